# SPDX-License-Identifier: Apache-2.0
"""Whom a bridge hears and ends: its own processes, and nobody else's."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import processes
from agent_intercom.workers.bridge import belonging, child, events
from agent_intercom.workers.bridge.reception import Reception
from agent_intercom.workers.bridge.settings import SOCKET_ENVIRONMENT, Settings
from agent_intercom.workers.bridge.shell import Shell

SLICE = "/user.slice/orchestrate.slice/orchestrate-a1.slice"
OWN = f"{SLICE}/worker-1.scope"
HANG = 20.0


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
    for name in ("cgroup_of", "read_cgroup"):
        monkeypatch.setattr(processes, name, lambda _: groups.pop(0))
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
    for name in ("cgroup_of", "read_cgroup"):
        monkeypatch.setattr(processes, name, lambda _: groups.pop(0))
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


def test_what_was_left_is_ended_where_the_run_is_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    address, sleeping = "/nowhere/bridge-g7.sock", [sys.executable, "-c", "print(flush=True); input()"]
    groups = [OWN, f"{SLICE}/worker-0.scope", f"{OWN}/below", "/user.slice/app.slice/build.service", None, OWN]
    found: dict[int, str | None] = {}
    started = []
    try:
        for number, group in enumerate(groups):
            mark = "/another.sock" if number == 5 else address
            process = subprocess.Popen(
                sleeping, env={SOCKET_ENVIRONMENT: mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            started.append(process)
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            found[process.pid] = group
        monkeypatch.setattr(processes, "cgroup_of", found.get)
        assert child.end_leftovers(address, None) == 0
        assert child.end_leftovers(address, belonging.all_of_the_run(OWN, "/run/a1.sock")) == 3
        assert [each.wait(HANG) for each in started[:3]] == 3 * [-signal.SIGKILL]
        assert [each.poll() for each in started[3:]] == 3 * [None]
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_a_command_that_may_not_be_signalled_is_told_of_once_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(child, "_PATIENCE", 0)
    shell = Shell(Settings("implementer", "t", "s", 1, {}, str(tmp_path), str(tmp_path), "/", False, False, ["x"], {}))
    running = shell._child = child.run(["sleep", "1000"], {"PATH": os.environ["PATH"]}, "/", None)
    with monkeypatch.context() as another_users:
        another_users.setattr(os, "killpg", refused)
        for number in (signal.SIGTERM, signal.SIGKILL):
            shell._carry_out([events.Signal(number)])
        shell.close()
    assert capfd.readouterr().err.count("may not be signalled") == 1
    assert os.waitpid(running.pid, os.WNOHANG) == (0, 0)
    os.killpg(running.pid, signal.SIGKILL)
    os.waitpid(running.pid, 0)


def test_a_command_that_has_left_its_process_group_is_ended_all_the_same(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gone")
    leaves = "import os, signal; os.setpgid(0, os.getpgid(os.getppid())); open('gone', 'w'); signal.pause()"
    running = child.run([sys.executable, "-c", leaves], {}, str(tmp_path), None)
    (tmp_path / "gone").read_bytes()
    assert running.signal(signal.SIGKILL) and running.reap() == -signal.SIGKILL
