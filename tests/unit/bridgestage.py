# SPDX-License-Identifier: Apache-2.0
"""A bridge's rules without a process: a broker that is naive, a disk, and a command that runs when it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from agent_intercom.orchestration.client_frames import Abort, Assignment, Context, Response
from agent_intercom.workers.bridge import core, events, memory

ROLE = "implementer"
GENERATION = 1


class Stage:
    """One role's worker. What the broker knows is what it was told; what is on the disk survives `crash`."""

    def __init__(self, thresholds: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.thresholds = thresholds or {}
        self.now = 0
        self.disk: bytes | None = None
        self.number = 0
        # The broker.
        self.linked = self.greeted = self.wanted = False
        self.request: events.Send | None = None
        self.requests: list[events.Send] = []
        self.active: str | None = None
        self.deliveries: dict[str, str] = {}
        """The delivery of each assignment that the broker has sent last."""
        self.kinds: dict[str, str] = {}
        self.acked: set[str] = set()
        self.received: set[str] = set()
        self.accepted: dict[str, dict[str, Any]] = {}
        self.state = ""
        # The command, and who waits at the report socket.
        self.child: str | None = None
        self.may_begin: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.texts: list[str] = []
        self.signals: list[int] = []
        self.handed: list[memory.Message] = []
        self.replies: dict[int, dict[str, Any]] = {}
        self.waiting: set[int] = set()
        self.notified: list[str] = []
        self.silent: list[events.Silent] = []
        self.published: list[events.Publish] = []
        self.looks = 0
        self.status: int | None = None
        self._boot()

    def id(self) -> str:
        self.number += 1
        return f"{self.number:032x}"

    # The process.

    def _boot(self) -> None:
        known = memory.Memory(ROLE, GENERATION) if self.disk is None else memory.decode(self.disk, ROLE, GENERATION)
        self.bridge = core.Bridge(known, self.thresholds, self.id)
        self.carry_out(self.bridge.start(self.now))

    def crash(self) -> None:
        """SIGKILL, and a new process. Whoever waited has lost the connection, and the command was ended."""
        self.linked = self.greeted = self.wanted = False
        self.request = self.child = None
        self.waiting.clear()
        self._boot()

    def step(self, event: events.Event) -> None:
        self.carry_out(self.bridge.step(event, self.now))

    def carry_out(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            assert self.status is None, "something follows the exit"
            match effect:
                case events.Remember():
                    self.disk = memory.encode(effect.memory)
                    assert memory.decode(self.disk, ROLE, GENERATION) == effect.memory
                case events.Connect():
                    assert not self.linked
                    self.wanted = True
                case events.Disconnect():
                    self.linked = self.greeted = False
                    self.request = None
                case events.Send():
                    self._sent(effect)
                case events.Begin():
                    self._begun(effect)
                case events.Silent():
                    self.silent.append(effect)
                case events.Publish():
                    assert effect.report in self.accepted.values(), "left for persons, and counts nowhere"
                    self.published.append(effect)
                case events.Signal():
                    assert self.child is not None
                    self.signals.append(effect.number)
                case events.Hand():
                    assert self.child is not None
                    self.handed.append(effect.message)
                case events.Reply():
                    self._replied(effect)
                case events.Notify():
                    assert self.greeted
                    self.notified.append(effect.state)
                case events.Look():
                    self.looks += 1
                case events.Exit():
                    self.status = effect.status

    def kept(self) -> memory.Memory:
        """What a crash would leave."""
        assert self.disk is not None
        return memory.decode(self.disk, ROLE, GENERATION)

    def _sent(self, effect: events.Send) -> None:
        assert self.linked and self.request is None, "one request at a time"
        assert self.greeted or effect.kind == "hello"
        if effect.kind == "ack":
            assert effect.keys["delivery_id"] in self.kept().seen, "acknowledged what a crash would lose"
        if effect.kind == "report" and effect.keys["assignment_id"] not in self.kept().done:
            kept = self.kept().report
            assert kept is not None and kept.report == effect.keys["report"]
        self.request = effect
        self.requests.append(effect)

    def _begun(self, effect: events.Begin) -> None:
        work = self.kept().work
        assert self.child is None, "two commands at once"
        assert work is not None and work.begun and work.assignment_id == effect.assignment_id
        self.child = effect.assignment_id
        self.begun[self.child] += 1
        self.texts.append(effect.text)
        assert self.begun[self.child] <= self.may_begin[self.child], "work that nobody wanted again"

    def _replied(self, effect: events.Reply) -> None:
        self.waiting.remove(effect.ticket)
        self.replies[effect.ticket] = effect.answer
        if effect.answer.get("status") in {"accepted", "duplicate"}:
            assert effect.answer["assignment_id"] in self.accepted, "accepted by nobody"
        if effect.answer.get("code") == "not_accepted_yet":
            assert self.kept().report is not None, "kept by nobody"

    # The broker.

    def connect(self) -> None:
        assert self.wanted
        self.wanted, self.linked = False, True
        self.step(events.Connected())

    def refuse(self, gone: bool = False) -> None:
        """The broker's address takes no connection."""
        assert self.wanted
        self.wanted = False
        self.step(events.Lost(gone))

    def drop(self) -> None:
        """The connection ends."""
        self.linked = self.greeted = False
        self.request = None
        self.step(events.Lost())

    def answer(self, code: str | None = None) -> None:
        """Answer the request that waits, with a refusal if there is a `code`."""
        request, self.request = self.request, None
        assert request is not None
        if code is not None:
            self.step(events.Received(Response(1, request.id, False, code, "for a reason")))
            return
        status, keys = "recorded", request.keys
        match request.kind:
            case "hello":
                status, self.greeted, self.state = "connected", True, "idle"
            case "ack":
                self.acked.add(keys["delivery_id"])
            case "lifecycle":
                self.state = keys["state"]
            case "report":
                status = self._reported(keys)
        self.step(events.Received(Response(1, request.id, True, status, None)))
        if request.kind == "hello" and self.active is not None and self.deliveries[self.active] in self.acked:
            self.send(self.active)

    def _reported(self, keys: dict[str, Any]) -> str:
        about = keys["assignment_id"]
        if about in self.accepted:
            return "duplicate"
        assert about == self.active
        self.accepted[about] = keys["report"]
        self.active, self.state = None, "idle"
        return "accepted"

    def assign(self, lost: bool = False, kind: str = "implementation") -> str:
        """Make an assignment. `lost`: the connection ends before it arrives."""
        assert self.greeted and self.active is None
        self.active = self.id()
        self.deliveries[self.active] = self.id()
        self.kinds[self.active] = kind
        if not lost:
            self.send(self.active)
        return self.active

    def redeliver(self) -> None:
        """What a person has done about work that is uncertain."""
        assert self.active is not None
        self.deliveries[self.active] = self.id()
        self.send(self.active)

    def send(self, assignment: str) -> None:
        if self.deliveries[assignment] not in self.received:
            self.received |= {assignment, self.deliveries[assignment]}
            self.may_begin[assignment] += 1
        delivery, content = self.deliveries[assignment], f"Do {assignment}."
        frame = Assignment(
            version=1,
            id=delivery,
            assignment_id=assignment,
            round=1,
            kind=self.kinds[assignment],
            content=content,
            trigger=True,
        )
        self.step(events.Received(frame))

    def context(self, kind: str, content: str, trigger: bool = False, deliver_as: str | None = None) -> None:
        if trigger and self.active is not None:
            self.may_begin[self.active] += 1
        frame = Context(version=1, id=self.id(), round=1, kind=kind, content=content, trigger=trigger)
        self.step(events.Received(frame, deliver_as))

    def abort(self) -> None:
        self.step(events.Received(Abort(1, self.id())))

    def settle(self) -> None:
        """The broker is there, and answers whatever is asked."""
        asked = len(self.requests)
        while self.status is None and (self.wanted or self.request or not self.greeted):
            assert len(self.requests) < asked + 100, "it never comes to rest"
            if self.wanted:
                self.connect()
            elif self.request:
                self.answer()
            else:
                self.tick()

    # The command.

    def end(self, code: int | None = 0) -> None:
        """The command ends."""
        assert self.child is not None
        self.child = None
        self.step(events.Ended(code))

    def report(self, assignment: str | None = None, summary: str = "Done.", **keys: Any) -> int:
        ticket = self._ticket()
        body = {"summary": summary, **keys.pop("members", {})}
        self.step(events.Reporting(ticket, assignment, body, keys.get("usage")))
        return ticket

    def progress(self, phase: str = "tool", usage: object = None) -> int:
        ticket = self._ticket()
        self.step(events.Progressing(ticket, None, phase, usage))
        return ticket

    def _ticket(self) -> int:
        self.number += 1
        self.waiting.add(self.number)
        return self.number

    def tick(self, ms: int | None = None) -> None:
        """Let time pass: `ms`, or as long as the bridge wants to wait."""
        until = self.bridge.wake_at
        if ms is None:
            assert until is not None
            self.now = max(self.now, until)
        else:
            self.now += ms
        self.step(events.Tick())
