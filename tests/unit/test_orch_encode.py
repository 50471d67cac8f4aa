# SPDX-License-Identifier: Apache-2.0
"""Frames from the broker: exact keys, order and bytes (orchestration spec, 1.1, 2.8, 3.2 and 3.3)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_intercom.orchestration import encode
from agent_intercom.orchestration.contract import MAX_FRAME, MAX_MESSAGE_UNITS

ID = "0123456789abcdef" * 2
OTHER = "f" * 32


def members(payload: bytes) -> list[tuple[str, Any]]:
    """What is in a frame, in order, after what every frame begins with."""
    pairs = json.loads(payload, object_pairs_hook=list)
    assert pairs[0] == ("version", 1)
    assert type(pairs[0][1]) is int
    return [tuple(pair) for pair in pairs[1:]]


def test_response_of_success() -> None:
    assert members(encode.response(ID, True, "connected", None)) == [
        ("type", "response"), ("id", ID), ("success", True), ("status", "connected"), ("error", None),
    ]


def test_response_of_failure() -> None:
    assert members(encode.response(ID, False, "conflict", "No")) == [
        ("type", "response"), ("id", ID), ("success", False), ("status", "conflict"), ("error", "No"),
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("a  b", "a b"), ("a\n\r\tb", "a b"), ("a\0\x1b \x7f\x85b", "a b"), ("  a \n", "a"), ("\0", ""), ("", ""),
        ("x" * 512, "x" * 512), ("x" * 513, "x" * 512), ("\n" * 600 + "x" * 600, "x" * 512), ("a\u00a0\u2028b", "a b"),
    ],
)
def test_error_text_is_one_bounded_line(error: str, shown: str) -> None:
    assert members(encode.response(ID, False, "rejected", error))[-1] == ("error", shown)


@pytest.mark.parametrize(("status", "success"), [("accepted", True), ("uncertain", False), ("conflict", False)])
@pytest.mark.parametrize("duplicate", [True, False])
def test_control_response(status: str, success: bool, duplicate: bool) -> None:
    assert members(encode.control_response(ID, status, duplicate)) == [
        ("type", "response"), ("id", ID), ("success", success), ("status", status), ("duplicate", duplicate),
    ]


def test_observing() -> None:
    assert members(encode.observing(ID)) == [
        ("type", "response"), ("id", ID), ("success", True), ("status", "observing"),
    ]


@pytest.mark.parametrize("trigger", [True, False])
def test_context(trigger: bool) -> None:
    expected = [
        ("type", "context"), ("id", ID), ("round", 2), ("kind", "run_state"), ("content", "text"), ("trigger", trigger),
    ]
    assert members(encode.context(ID, 2, "run_state", "text", trigger)) == expected
    with_extra = encode.context(ID, 2, "run_state", "text", trigger, deliver_as="steer")
    assert members(with_extra) == [*expected, ("deliver_as", "steer")]


def test_assignment() -> None:
    assert members(encode.assignment(ID, OTHER, 1, "plan", "text")) == [
        ("type", "assignment"), ("id", ID), ("assignment_id", OTHER), ("round", 1), ("kind", "plan"),
        ("content", "text"), ("trigger", True),
    ]


def test_abort() -> None:
    assert members(encode.abort(ID)) == [("type", "abort"), ("id", ID)]


def test_snapshot_orders_roles_by_name() -> None:
    roles = [("reviewer", "idle"), ("implementer", "active"), ("django", "waiting")]
    payload = encode.snapshot("work", "active", 3, roles, 101, False)
    assert [key for key, _ in members(payload)] == [
        "type", "session", "state", "round", "roles", "report_count", "report_replay_complete",
    ]
    assert json.loads(payload) == {
        "version": 1, "type": "snapshot", "session": "work", "state": "active", "round": 3, "report_count": 101,
        "report_replay_complete": False,
        "roles": [
            {"role": "django", "state": "waiting"}, {"role": "implementer", "state": "active"},
            {"role": "reviewer", "state": "idle"},
        ],
    }
    assert [name for name, _ in roles] == ["reviewer", "implementer", "django"]


def test_workflow() -> None:
    assert members(encode.workflow("work", "ready", 2)) == [
        ("type", "workflow"), ("session", "work"), ("state", "ready"), ("round", 2),
    ]


def test_lifecycle() -> None:
    assert members(encode.lifecycle("work", "probe", "idle")) == [
        ("type", "lifecycle"), ("session", "work"), ("role", "probe"), ("state", "idle"),
    ]


@pytest.mark.parametrize("used", [None, {"input": 1}])
def test_report(used: dict[str, Any] | None) -> None:
    body = {"kind": "probe", "summary": "ok"}
    plain = {
        "version": 1, "type": "report", "session": "work", "id": ID, "assignment_id": OTHER, "role": "probe",
        "round": 1, "report": body,
    }
    without = encode.report("work", ID, OTHER, "probe", 1, body, used, False)
    assert json.loads(without) == plain
    assert list(json.loads(without)) == list(plain)
    with_usage = encode.report("work", ID, OTHER, "probe", 1, body, used, True)
    assert json.loads(with_usage) == {**plain, "usage": used}
    assert list(json.loads(with_usage)) == [*plain, "usage"]


def test_compact_and_literal() -> None:
    assert encode.workflow("grün😀", "active", 1) == (
        '{"version":1,"type":"workflow","session":"grün😀","state":"active","round":1}'.encode()
    )


@pytest.mark.parametrize("unit", ["\0", "\x7f", "€", "\\"])
def test_largest_content_fits_a_frame(unit: str) -> None:
    payload = encode.context(ID, 10**6, "operator_message", unit * MAX_MESSAGE_UNITS, True, "follow-up")
    assert len(payload) <= MAX_FRAME


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("restarting", "disconnected"), ("recovering", "disconnected"), ("disconnected", "disconnected"),
        ("idle", "idle"), ("active", "active"), ("waiting", "waiting"), ("uncertain", "uncertain"),
    ],
)
def test_states_that_old_observers_know(state: str, shown: str) -> None:
    assert encode.old_parent_state(state) == shown
