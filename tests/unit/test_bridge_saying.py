# SPDX-License-Identifier: Apache-2.0
"""What a bridge tells the worker service, which may go and come back at any time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_intercom.wire import codec, framing
from agent_intercom.workers.bridge import memory
from agent_intercom.workers.bridge import shell as module
from agent_intercom.workers.bridge.settings import Settings
from agent_intercom.workers.bridge.shell import Shell
from agent_intercom.workers.bridge.spending import Spending
from tests.unit.bridgestage import Stage

HANG = 20.0


def step(shell: Shell) -> None:
    """What a bridge does once it has nothing to do."""
    shell._wait(module._now() + 1_000)


class Service:
    """A worker service; `go` hangs up on everybody and unbinds."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.address = directory / "workers.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.address))
        self.listener.listen()
        self.connection: socket.socket | None = None

    def told(self, shell: Shell) -> str:
        """The next state that it is told."""
        if self.connection is None:
            self.listener.settimeout(0)
            deadline = time.monotonic() + HANG
            while self.connection is None:
                assert time.monotonic() < deadline, "it is told nothing"
                try:
                    self.connection, _ = self.listener.accept()
                except BlockingIOError:
                    step(shell)
        self.connection.settimeout(HANG)
        decoder = framing.FrameDecoder()
        while (payload := decoder.next()) is None:
            decoder.feed(self.connection.recv(65_536))
        request = codec.decode(payload)
        assert request["action"] == "notify"
        self.connection.sendall(framing.pack(codec.encode({"id": request["id"]})))
        step(shell)
        return str(request["params"]["state"])

    def go(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.listener.close()
        self.address.unlink()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr(module, "_AGAIN_MS", 1)
    monkeypatch.setattr(module, "_AGAIN_MOST_MS", 4)
    broker = tmp_path / "agent-intercom" / "unit" / "broker.sock"
    made = Shell(
        Settings("implementer", "t", str(broker), 1, {}, str(tmp_path), str(tmp_path), "/", False, True, ["x"], {})
    )
    yield made
    made._forget_service()
    made._selector.close()


def test_a_service_that_comes_back_is_told_again_what_is_done(shell: Shell, tmp_path: Path) -> None:
    first = Service(tmp_path / "agent-intercom")
    shell._notify("working")
    assert first.told(shell) == "working"
    shell._notify("waiting")
    assert first.told(shell) == "waiting"
    first.go()
    # Nobody listens for a while.
    for _ in range(4):
        step(shell)
    second = Service(tmp_path / "agent-intercom")
    assert second.told(shell) == "waiting"
    assert shell._say_at is None
    second.go()


def test_a_service_that_is_not_there_yet_is_told_when_it_is(shell: Shell, tmp_path: Path) -> None:
    shell._notify("ready")
    for _ in range(3):
        step(shell)
    service = Service(tmp_path / "agent-intercom")
    assert service.told(shell) == "ready"
    service.go()


def test_a_service_that_turns_the_bridge_away_is_told_less_and_less_often(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AGAIN_MS", "_AGAIN_MOST_MS"):
        monkeypatch.setattr(module, name, 1_000 if name == "_AGAIN_MS" else 8_000)
    shell._patience = 1_000
    service = Service(tmp_path / "agent-intercom")
    shell._notify("working")
    for expected in (2_000, 4_000, 8_000, 8_000):
        connection, _ = service.listener.accept()
        with connection:
            connection.sendall(framing.pack(codec.encode({"version": 1, "id": "", "ok": False, "error": {}})))
        while shell._service is not None:
            step(shell)
        assert shell._patience == expected
        shell._say_state()
    connection, _ = service.listener.accept()
    with connection:
        decoder = framing.FrameDecoder()
        while (payload := decoder.next()) is None:
            decoder.feed(connection.recv(65_536))
        answer = framing.pack(codec.encode({"id": codec.decode(payload)["id"]}))
        connection.sendall(answer[:9])
        step(shell)
        assert shell._patience == 8_000
        connection.sendall(answer[9:])
        step(shell)
        assert shell._patience == 1_000
    service.go()


def test_nobody_is_told_where_nobody_watches(shell: Shell, tmp_path: Path) -> None:
    shell._settings = shell._settings._replace(managed=False)
    shell._notify("ready")
    assert shell._say_at is None and shell._service is None


def test_of_what_a_program_says_to_have_used_the_last_word_counts() -> None:
    spending = Spending()
    zero = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    for calls in (7, 3):
        spending.said({**zero, "providerCalls": calls, "cost": {"total": 0}})
    total = spending.cumulative()
    assert total is not None and total["providerCalls"] == 3


def used(cost: object) -> dict[str, object]:
    zero = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite", "providerCalls"), 0)
    return {**zero, "cost": {"total": cost}}


def test_what_adds_up_to_more_than_can_be_said_is_refused_and_not_kept() -> None:
    for cost in (1.5e308, 2**62):
        made = Stage()
        made.settle()
        made.assign()
        made.settle()
        made.progress(usage=used(cost))
        made.settle()
        made.end()
        made.context("operator_message", "Go on.", trigger=True)
        made.settle()
        before = made.disk
        for ticket in (made.progress(usage=used(cost)), made.report(usage=used(cost))):
            answer = made.replies[ticket]
            assert (answer["code"], answer["field"], answer["by"]) == ("invalid_protocol", "usage", "bridge")
        assert made.disk == before
        ticket = made.report()
        made.settle()
        assert made.replies[ticket]["status"] == "accepted"
        usage = made.requests[-2].keys["usage"]
        assert made.requests[-2].kind == "report" and usage["cumulative"]["cost"] == {"total": cost}


@pytest.mark.parametrize(
    ("finished", "running"), [(used(None), None), (used(1.5e308), used(1.5e308)), ({}, None), (None, used(-1))]
)
def test_what_a_bridge_before_has_kept_and_cannot_be_said_is_nothing(
    finished: dict[str, object] | None, running: dict[str, object] | None
) -> None:
    made = Stage()
    made.settle()
    made.assign()
    made.settle()
    known = made.kept()
    known.spending = Spending(before=used(1), finished=finished, running=running, peak=5)
    assert known.work is not None
    known.report = memory.Kept(known.work.assignment_id, {"summary": "Done."}, {"cumulative": finished})
    content = memory.encode(known)
    found = memory.decode(content, known.role, known.generation)
    assert found.spending == Spending() and found.report is not None and found.report.usage is None
    made.disk = content
    made.crash()
    made.settle()
    assert [each.kind for each in made.requests][-1] == "lifecycle" and made.state == "idle"
    assert next(each for each in made.requests if each.kind == "report").keys.keys() == {"assignment_id", "report"}


def test_a_broker_that_takes_the_greeting_and_nothing_more_is_asked_less_and_less_often() -> None:
    made, waited = Stage(), []
    for _ in range(8):
        if not made.wanted:
            before = made.now
            made.tick()
            waited.append(made.now - before)
        made.connect()
        made.answer()
        made.answer("invalid_protocol")
        made.linked = made.greeted = False
    assert waited == [100, 200, 400, 800, 1_600, 3_200, 5_000]
    made.settle()
    made.drop()
    before = made.now
    made.tick()
    assert made.now - before == 100


def test_a_second_report_on_a_plan_is_a_plan_and_a_duplicate_whatever_came_meanwhile() -> None:
    made, steps = Stage(), {"intended_changes": ["It reads."]}
    made.settle()
    first = made.assign(kind="plan")
    made.settle()
    made.report(members=steps)
    # It waits for its answer, and the next assignment is here before that.
    made.active, active = None, made.active
    second = made.assign()
    made.active = active
    while made.request is not None:
        made.answer()
    made.active = second
    made.crash()
    made.settle()
    for members in (steps, {}, {**steps, "kind": "plan"}):
        ticket = made.report(first, members=members)
        made.settle()
        assert made.replies[ticket] == {"ok": True, "status": "duplicate", "assignment_id": first}
        assert made.requests[-1].keys["report"]["kind"] == "plan"
    refused = made.report(second, members=steps)
    assert made.replies[refused]["code"] == "invalid_protocol"
    made.report(second)
    made.settle()
    again = made.report(second)
    made.settle()
    assert made.replies[again]["status"] == "duplicate" and made.kept().plans == [first]
