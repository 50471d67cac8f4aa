# SPDX-License-Identifier: Apache-2.0
"""Asks of an earlier Node broker: taken over once, by the rules of contract section 6."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.intercom import asks_import
from agent_intercom.intercom.edge import AskEdge

WALL = 1_700_000_000_000
GOOD = {"messageId": "m", "from": "a", "to": "b", "createdAt": WALL - 5, "expiresAt": WALL + 1, "state": "blocking"}
EDGE = AskEdge("a", "m", "b", WALL - 5, WALL + 1, False)


def write(directory: Path, content: Any) -> Path:
    file = directory / "broker-asks.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def load(directory: Path) -> list[AskEdge] | None:
    return asks_import.load(str(directory), WALL)


@pytest.mark.parametrize("state", ["blocking", "deferred"])
def test_valid_edges_become_deferred(tmp_path: Path, state: str) -> None:
    write(tmp_path, {"version": 1, "edges": [{**GOOD, "state": state}]})
    assert load(tmp_path) == [EDGE]


@pytest.mark.parametrize(
    "change",
    [
        {"messageId": ""},
        {"messageId": "x" * 257},
        {"messageId": "\U0001f600" * 129},
        {"messageId": 3},
        {"from": " \t"},
        {"from": None},
        {"to": ""},
        {"to": ["b"]},
        {"createdAt": "1"},
        {"createdAt": True},
        {"createdAt": None},
        {"expiresAt": WALL},
        {"expiresAt": -1},
        {"expiresAt": False},
        {"state": "answered"},
        {"state": None},
        {"state": ["blocking"]},
    ],
)
def test_an_invalid_edge_is_left_out_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, {"version": 1, "edges": [{**GOOD, **change}, None, 3, [], GOOD]})
    assert load(tmp_path) == [EDGE]


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_invalid(tmp_path: Path, key: str) -> None:
    write(tmp_path, {"version": 1, "edges": [{k: v for k, v in GOOD.items() if k != key}]})
    assert load(tmp_path) == []
    assert (tmp_path / "broker-asks.json").exists()


def test_numbers_are_what_javascript_writes(tmp_path: Path) -> None:
    entry = json.dumps({**GOOD, "createdAt": 1.5, "expiresAt": 1}).replace('"expiresAt": 1', '"expiresAt": 1e300')
    write(tmp_path, f'{{"version": 1.0, "edges": [{entry}]}}'.encode())
    assert load(tmp_path) == [AskEdge("a", "m", "b", 1, 2**53 - 1, False)]
    write(tmp_path, f'{{"version": 1, "edges": [{entry.replace("1e300", "1e400")}]}}'.encode())
    assert load(tmp_path) == []


def test_the_last_of_two_equal_keys_wins(tmp_path: Path) -> None:
    write(tmp_path, {"version": 1, "edges": [GOOD, {**GOOD, "to": "c"}, {**GOOD, "from": "d"}]})
    assert [(e.sender, e.target) for e in load(tmp_path) or []] == [("a", "c"), ("d", "b")]


def test_odd_ids_survive(tmp_path: Path) -> None:
    write(tmp_path, {"version": 1, "edges": [{**GOOD, "messageId": "\ud800", "from": "a\0", "extra": 1}]})
    assert [(e.sender, e.message_id) for e in load(tmp_path) or []] == [("a\0", "\ud800")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version":1}',
        b'{"version":1,"edges":{}}',
        b'{"version":2,"edges":[]}',
        b'{"version":"1","edges":[]}',
        b'{"version":true,"edges":[]}',
        b'{"edges":[]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_asks_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path, content)
    assert load(tmp_path) == []
    assert not file.exists()
    assert (tmp_path / f"broker-asks.json.corrupt-{WALL}").read_bytes() == content


def test_nothing_to_take_over(tmp_path: Path) -> None:
    assert load(tmp_path) is None and load(tmp_path / "nowhere") is None
    assert not asks_import.done(str(tmp_path), WALL)
    assert list(tmp_path.iterdir()) == []


def test_the_file_stays_until_the_caller_is_done(tmp_path: Path) -> None:
    file = write(tmp_path, {"version": 1, "edges": [GOOD]})
    assert load(tmp_path) == load(tmp_path) == [EDGE]
    assert asks_import.done(str(tmp_path), WALL)
    assert not file.exists() and (tmp_path / f"broker-asks.json.taken-over-{WALL}").exists()
    assert load(tmp_path) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text(json.dumps({"version": 1, "edges": [GOOD]}))
    (tmp_path / "broker-asks.json").symlink_to(target)
    assert load(tmp_path) is None
    assert target.exists()
