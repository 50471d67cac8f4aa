# SPDX-License-Identifier: Apache-2.0
"""Whom a bridge hears and ends: its own processes, and nobody else's."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import processes
from agent_intercom.workers.bridge import belonging, events
from agent_intercom.workers.bridge.reception import Reception

SLICE = "/user.slice/orchestrate.slice/orchestrate-a1.slice"
OWN = f"{SLICE}/worker-1.scope"


class Desk:
    """A report socket and what is told of it."""

    def __init__(self, address: str) -> None:
        self.told: list[events.Event] = []
        self.watched: dict[socket.socket, Callable[[], None]] = {}
        self.reception = Reception(address, self.watched.__setitem__, self.watched.pop, self.told.append)

    def work(self) -> None:
        """Do whatever there is to do."""
        while ready := select.select(list(self.watched), [], [], 0)[0]:
            for each in ready:
                if each in self.watched:
                    self.watched[each]()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(str(tmp_path / "s"))
    yield made
    made.reception.close()
    assert not (tmp_path / "s").exists()


def say(desk: Desk, tmp_path: Path, kind: str) -> dict[str, Any] | None:
    """What is answered at once to a request of this process; None for nothing."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(0)
        line.connect(str(tmp_path / "s"))
        line.sendall(json.dumps({"request": kind, "phase": "tool", "report": {"summary": "x"}}).encode() + b"\n")
        desk.work()
        try:
            answer: dict[str, Any] = json.loads(line.recv(65_536))
        except BlockingIOError:
            return None
        return answer


@pytest.mark.parametrize("kind", ["report", "progress"])
def test_who_is_in_another_workers_unit_is_not_heard(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    groups: list[str | None] = []
    monkeypatch.setattr(processes, "cgroup_of", lambda _: groups.pop(0))
    # It is asked about who has connected, and then about the bridge, which is the same process here.
    for group in (f"{SLICE}/worker-2.scope", f"{OWN}2", SLICE, "/", f"{OWN} (deleted)", None):
        groups[:] = [group, OWN]
        answer = say(desk, tmp_path, kind)
        assert answer is not None and (answer["ok"], answer["code"], answer["by"]) == (False, "unauthorized", "bridge")
        assert desk.told == []
    for group in (OWN, f"{OWN}/below"):
        groups[:] = [group, OWN]
        assert say(desk, tmp_path, kind) is None
    heard = [type(each) for each in desk.told if not isinstance(each, events.Left)]
    assert heard == 2 * [events.Reporting if kind == "report" else events.Progressing]


def test_those_who_are_not_heard_take_no_place_of_those_who_are(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str | None] = []
    monkeypatch.setattr(processes, "cgroup_of", lambda _: groups.pop(0))
    lines = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for line in lines:
            groups[:] = ["/elsewhere", OWN]
            line.connect(str(tmp_path / "s"))
            desk.work()
        groups[:] = [OWN, OWN]
        assert say(desk, tmp_path, "report") is None and desk.told
    finally:
        for line in lines:
            line.close()
        desk.work()


def test_where_a_group_is_below_another() -> None:
    assert belonging.within("/a/b", "/a") and belonging.within("/a", "/a") and belonging.within("/a", "/")
    for group, other in (("/ab", "/a"), ("/a", "/a/b"), ("/../a", "/"), (None, "/a"), ("/a", None), (None, None)):
        assert not belonging.within(group, other)
    assert belonging.all_of_the_run(OWN, "/run/a1.sock") == SLICE
    assert belonging.all_of_the_run(OWN, "/run/b2.sock") == OWN
    assert belonging.all_of_the_run(None, "/run/a1.sock") is None
