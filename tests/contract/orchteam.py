# SPDX-License-Identifier: Apache-2.0
"""A team that works by itself: five workers that answer deterministically, and an observer, on one loop.

A worker does what a bridge does (section 12.7): one request at a time; it reconnects only when its connection is really
closed, remembers the deliveries that it took, and reports again on what it has no answer for. Everything that must hold
of what it is sent is checked as it comes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from tests.contract.orchpeer import body, check_delivery, fresh_id, plan
from tests.contract.orchruns import Run
from tests.contract.peer import Frame, compact, packed
from tests.contract.servicemanager import ROOT, Loop, Nursery, Program, ServiceManager

Think: TypeAlias = Callable[[str, str, int], Frame]
"""The report on role, kind and round."""


class Line:
    """A connection that comes again when it was closed."""

    def __init__(self, loop: Loop, address: Path) -> None:
        self.loop = loop
        self.address = str(address)
        self.losses = 0
        """How often the connection was closed."""
        self.closes = 0
        """How often the connection was closed after the broker had admitted it."""
        self.admitted = False
        self.socket: socket.socket | None = None
        self._buffer = bytearray()

    def connect(self) -> None:
        """Connect, and say who this is."""
        self.admitted = False
        self._buffer.clear()
        connection = self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.address)
        connection.setblocking(False)
        self.loop.watch(connection.fileno(), self._readable, select.EPOLLIN)
        self.greet()

    def greet(self) -> None:
        """Say the first frame."""
        raise NotImplementedError

    def heard(self, frame: Frame) -> None:
        """Deal with a frame."""
        raise NotImplementedError

    def send(self, frame: Frame) -> None:
        """Write a frame; a connection that is closed is noticed when it is read."""
        assert self.socket is not None
        try:
            self.socket.sendall(packed(compact(frame)))
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        if self.socket is not None:
            self.loop.unwatch(self.socket.fileno())
            self.socket.close()
            self.socket = None

    def _readable(self) -> None:
        assert self.socket is not None
        try:
            data = self.socket.recv(262_144)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from(">I", self._buffer)
            if len(self._buffer) < 4 + length:
                break
            frame = json.loads(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            self.heard(frame)
        if not data:
            self.losses += 1
            self.closes += self.admitted
            self.close()
            self.connect()


class Member(Line):
    """A role's worker. `think` makes the report on an assignment."""

    def __init__(self, loop: Loop, address: Path, role: str, token: str, think: Think, generation: int = 1) -> None:
        super().__init__(loop, address)
        self.role = role
        self.token = token
        self.generation = generation
        self.think = think
        self.requests: list[Frame] = []
        """The first was sent and has no answer yet."""
        self.taken: set[str] = set()
        """Deliveries."""
        self.assignments: dict[str, tuple[str, int]] = {}
        """Kind and round by assignment."""
        self.answers: dict[str, list[str]] = {}
        """What reports on an assignment were answered."""
        self.baselines = 0
        self.messages: list[str] = []
        self.held: list[Frame] = []
        """The assignments on which no report was accepted."""
        self.said: set[str] = set()
        """Assignments on which a report was sent, be it by a connection that is gone."""
        self.repeated: Counter[str] = Counter()
        self.redelivered = 0
        """How often an operator had this role's work delivered again."""

    def greet(self) -> None:
        self.requests = []
        self.ask("hello", generation=self.generation)

    def ask(self, kind: str, /, **keys: Any) -> None:
        """Make a request, once those before it are answered."""
        keys = {"version": 1, "type": kind, "role": self.role, "token": self.token, "id": fresh_id(), **keys}
        self.requests.append(keys)
        if len(self.requests) == 1:
            self.send(keys)

    def send(self, frame: Frame) -> None:
        if frame["type"] == "report":
            self.said.add(frame["assignment_id"])
        super().send(frame)

    @property
    def idle(self) -> bool:
        """Whether everything that it asked was answered, and nothing is left to do."""
        return self.admitted and not self.requests and not self.held

    def heard(self, frame: Frame) -> None:
        if frame["type"] == "response":
            self._answered(frame)
            return
        check_delivery(frame)
        assert self.admitted, "a delivery before the hello was answered"
        again = frame["id"] in self.taken
        self.taken.add(frame["id"])
        self.ask("ack", delivery_id=frame["id"], status="duplicate" if again else "accepted")
        if frame["type"] == "assignment":
            self._work(frame, again)
        elif not again and frame["type"] == "context":
            self.baselines += frame["kind"] == "baseline"
            self.messages.append(frame["content"])

    def _work(self, frame: Frame, again: bool) -> None:
        assignment, what = frame["assignment_id"], (frame["kind"], frame["round"])
        assert self.baselines or self.redelivered, "work without a baseline"
        if assignment in self.assignments:
            self.repeated[assignment] += 1
            assert self.repeated[assignment] <= self.closes + self.redelivered, "an assignment came again for nothing"
            assert self.assignments[assignment] == what
            return
        assert not again and what not in self.assignments.values(), f"two assignments of {what}"
        # What follows from a report may come before the report's own answer, which a killed broker never gave.
        assert len(self.held) <= 1, "work on top of work"
        assert all(work["assignment_id"] in self.said for work in self.held), "work on top of work"
        self.assignments[assignment] = what
        self.held.append(frame)
        self._do(frame)

    def _do(self, work: Frame) -> None:
        """Work on an assignment."""
        self.ask("lifecycle", state="active", usage=None)
        report = self.think(self.role, work["kind"], work["round"])
        self.ask("report", assignment_id=work["assignment_id"], report=report)

    def _answered(self, frame: Frame) -> None:
        request = self.requests.pop(0)
        assert frame["id"] == request["id"]
        if self.requests:
            self.send(self.requests[0])
        kind = request["type"]
        assert frame["success"], (self.role, kind, frame["status"], frame["error"])
        if kind == "hello":
            self.admitted = True
            self.ask("lifecycle", state="active" if self.held else "idle", usage=None)
            for work in self.held:
                self._do(work)
        elif kind == "report":
            self._reported(request["assignment_id"], frame["status"])

    def _reported(self, assignment: str, status: str) -> None:
        answers = self.answers.setdefault(assignment, [])
        assert status == "accepted" or (status == "duplicate" and self.closes), status
        assert status not in answers, "a report was accepted twice"
        answers.append(status)
        self.held = [work for work in self.held if work["assignment_id"] != assignment]
        self.ask("lifecycle", state="idle", usage=None)


class Watcher(Line):
    """An observer. `state` and `round` are what it was told last."""

    def __init__(self, loop: Loop, address: Path, token: str) -> None:
        super().__init__(loop, address)
        self.token = token
        self.state = ""
        self.round = 0
        self.reports: list[str] = []

    def greet(self) -> None:
        self.reports = []
        self.send({"version": 1, "type": "observe", "token": self.token, "id": fresh_id()})

    def heard(self, frame: Frame) -> None:
        if frame["type"] == "response":
            assert frame["status"] == "observing"
            self.admitted = True
        elif frame["type"] == "report":
            assert frame["assignment_id"] not in self.reports
            self.reports.append(frame["assignment_id"])
        elif frame["type"] in {"snapshot", "workflow"}:
            self.state, self.round = frame["state"], frame["round"]


class Command(Line):
    """A control command, given until it is answered. `status` is the answer's."""

    def __init__(
        self, loop: Loop, address: Path, token: str, action: str, role: str, message: str | None = None
    ) -> None:
        super().__init__(loop, address)
        self.status = ""
        self.duplicate = False
        delivery = None if message is None else "steer"
        self._request = {"version": 1, "type": "control", "token": token, "id": fresh_id(), "action": action}
        self._request |= {"role": role, "delivery": delivery, "message": message}

    def connect(self) -> None:
        if not self.status:
            super().connect()

    def greet(self) -> None:
        self.send(self._request)

    def heard(self, frame: Frame) -> None:
        self.status, self.duplicate = frame["status"], frame["duplicate"]
        assert not self.duplicate or self.losses


def two_rounds(role: str, kind: str, round_: int) -> Frame:
    """The reports of a run that is reviewed twice, with all specialists in the first round."""
    if kind == "plan":
        return plan()
    if kind == "implementation":
        return body(role, changed_paths=["src/a.py"] if round_ == 1 else ["README.md"])
    if kind == "review":
        return body(role, verdict="approved" if round_ > 1 else "changes_requested")
    return body(role)


def surroundings(run: Run) -> dict[str, str]:
    """The environment of a run's broker: nothing of this process but what a user manager has, too."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    directories = {"HOME": str(run.root), "XDG_RUNTIME_DIR": str(run.runtime), "TMPDIR": str(run.root)}
    return {**kept, **directories, "PYTHONPATH": str(ROOT / "service"), **run.environment}


class World:
    """A run under a service manager, with its team. Without a nursery, brokers are programs of their own."""

    def __init__(self, run: Run, nursery: Nursery | None = None, think: Think = two_rounds) -> None:
        self.run = run
        self.loop = Loop()
        self.manager = manager = ServiceManager(self.loop, run.root, run.socket)
        errors = run.root / "stderr"
        errors.touch()
        environment = {**surroundings(run), "NOTIFY_SOCKET": manager.notify_path}
        if nursery is None:
            manager.starter = Program(self.loop, environment, run.unit, errors, manager.ended)
        else:
            manager.starter = nursery.attach(self.loop, environment, run.unit, errors, manager.ended)
        self.members = {role: Member(self.loop, run.socket, role, run.tokens[role], think) for role in run.roles}
        manager.on_end = self.kept_its_word
        self.watcher = Watcher(self.loop, run.socket, run.control_token)
        self.lines: tuple[Line, ...] = (self.watcher, *self.members.values())

    def come(self) -> None:
        """The observer and the workers connect, each when the one before is admitted."""
        for line in self.lines:
            line.connect()
            while not line.admitted:
                self.loop.step("was a peer admitted")

    def settle(self) -> str:
        """Let the team work until there is nothing left to do; the state that the observer was told."""
        self.loop.until(self.settled, "was the run ready or uncertain")
        return self.watcher.state

    def settled(self) -> bool:
        """Whether nothing moves any more, and the observer knows why."""
        done = self.watcher.admitted and all(member.idle for member in self.members.values())
        return done and self.watcher.state in {"ready", "uncertain"}

    def redeliver(self) -> None:
        """Do what a person does about a run that is uncertain: have uncertain work delivered again, until it is not."""
        while self.watcher.state == "uncertain":
            found = [row["role"] for row in self.run.rows("SELECT role FROM roles WHERE state = 'uncertain'")]
            for role in found or ["implementer"]:
                self.members[role].redelivered += 1
                command = Command(self.loop, self.run.socket, self.run.control_token, "redeliver", role)
                command.connect()
                while not command.status or command.socket:
                    self.loop.step("was a command answered")
                assert command.status == "accepted"
            self.loop.until(lambda: self.watcher.state != "uncertain", "did it go on")
            self.settle()

    def told(self) -> None:
        """The status line and the database say what the observer was told."""
        state = self.watcher.state
        self.loop.until(
            lambda: self.manager.status.startswith(f"{state}, round {self.watcher.round};"), "did it say so"
        )
        assert self.run.workflow() == (state, self.watcher.round)

    def kept_its_word(self) -> None:
        """What peers were told is in the database."""
        reports = {row["assignment_id"] for row in self.run.rows("SELECT assignment_id FROM reports")}
        assert reports >= {assignment for member in self.members.values() for assignment in member.answers}
        assert reports >= set(self.watcher.reports)
        assignments = {row["id"] for row in self.run.rows("SELECT id FROM assignments")}
        assert assignments >= {assignment for member in self.members.values() for assignment in member.assignments}

    def closes(self) -> int:
        """How many connections were closed on peers that had been admitted."""
        return sum(line.closes for line in self.lines)

    def losses(self) -> int:
        """How many connections were closed at all."""
        return sum(line.losses for line in self.lines)

    def work(self) -> set[tuple[str, str, int]]:
        """All assignments that were delivered, as role, kind and round."""
        return {(role, *what) for role, member in self.members.items() for what in member.assignments.values()}

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.manager.close()
        self.loop.close()
        self.run.remove()
