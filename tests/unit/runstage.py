# SPDX-License-Identifier: Apache-2.0
"""A run without sockets or files: an engine, the rows that it saved, and peers that say what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from agent_intercom.orchestration import budget, policies, rows
from agent_intercom.orchestration import engine as kinds
from agent_intercom.orchestration.contract import Flow, Limits
from agent_intercom.orchestration.effects import Check, Drop, Effect, Finish, ForgetStartup, Save, Write
from agent_intercom.orchestration.engine import Engine
from agent_intercom.orchestration.workflow.loading import load
from agent_intercom.orchestration.workflow.state import Startup
from agent_intercom.wire.clock import Now
from agent_intercom.wire.framing import pack

CONTROL = "c" * 32
BEGAN = "2026-01-01T00:00:00.000000+00:00"
POLICY = budget.merge(
    budget.PACKAGED, budget.overrides(["warning.assignment.provider_calls=5", "hard.assignment.context_percent=90"])
)

Frame = dict[str, Any]


def token(role: str) -> str:
    return (role.encode().hex() * 4)[:32]


def hex_id(number: int) -> str:
    return f"{number:032x}"


def usage(calls: int = 1, **more: Any) -> Frame:
    return {
        "input": 10,
        "output": 2,
        "cacheRead": 0,
        "cacheWrite": 0,
        "cost": {"total": 0.5},
        "providerCalls": calls,
    } | more


def report_body(kind: str, verdict: str | None = None, paths: Iterable[str] = ("src/a.py",)) -> Frame:
    body: Frame = {"kind": kind, "summary": f"summary of {kind}"}
    if kind == "plan":
        lists = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "risks", "open_questions")
        return body | {name: ["one"] for name in lists}
    if kind == "implementation":
        body["changed_paths"] = list(paths)
    verdicts = {"review": "approved", "playwright": "pass", "django": "advisory_approved"}
    if kind in verdicts:
        body["verdict"] = verdict or verdicts[kind]
    return body


class Database:
    """What a store would hold."""

    def __init__(self, roles: Iterable[str], flow: str, forced: Iterable[str]) -> None:
        self.meta = {
            "workflow_state": "starting",
            "round": "1",
            "control_token": CONTROL,
            "implementation_flow": flow,
            "forced_specialists": json.dumps(list(forced)),
            "budget_policy": budget.to_json(POLICY),
        }
        self.rows: dict[tuple[type, object], Any] = {}
        self.apply(rows.Event(sequence=1, timestamp=BEGAN, event="broker_initialized", status="starting"))
        for role in roles:
            self.apply(
                rows.Role(role=role, auth_token=token(role), state="disconnected", usage=rows.Usage(), updated_at=BEGAN)
            )

    @classmethod
    def holding(cls, retained: rows.Retained) -> Database:
        """What a store holds."""
        database = cls((), Flow.SINGLE, ())
        database.rows.clear()
        database.meta = dict(retained.meta)
        tables = (retained.roles, retained.assignments, retained.reports, retained.commands)
        for table in (*tables, retained.events, retained.guardrails, retained.activations):
            for row in table:
                database.apply(row)
        return database

    def apply(self, row: rows.Change) -> None:
        # What is changed in place later must not change what was committed.
        row = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=type(row))
        match row:
            case rows.Meta():
                self.meta.pop(row.key, None)
                if row.value is not None:
                    self.meta[row.key] = row.value
            case rows.Role():
                self.rows[rows.Role, row.role] = row
            case rows.Event():
                assert (rows.Event, row.sequence) not in self.rows
                self.rows[rows.Event, row.sequence] = row
            case rows.Guardrail():
                self.rows[rows.Guardrail, (row.assignment_id, row.level)] = row
            case rows.Activation():
                key = (rows.Activation, (row.role, row.round))
                assert self.rows.setdefault(key, row) == row
            case rows.Report():
                assert (rows.Report, row.assignment_id) not in self.rows
                self.rows[rows.Report, row.assignment_id] = row
            case _:
                self.rows[type(row), row.id] = row

    def of(self, kind: type) -> list[Any]:
        return [row for (each, _), row in self.rows.items() if each is kind]

    def retained(self) -> rows.Retained:
        text = msgspec.msgpack.encode(
            rows.Retained(
                schema=10,
                meta=self.meta,
                roles=self.of(rows.Role),
                assignments=self.of(rows.Assignment),
                reports=self.of(rows.Report),
                commands=self.of(rows.Command),
                events=self.of(rows.Event),
                guardrails=self.of(rows.Guardrail),
                activations=self.of(rows.Activation),
            )
        )
        return msgspec.msgpack.decode(text, type=rows.Retained)


class Stage:
    """A run with `roles`; every input is logged as a broker would."""

    def __init__(
        self,
        roles: Iterable[str] = ("implementer", "reviewer"),
        *,
        flow: str = Flow.SINGLE,
        forced: Iterable[str] = (),
        task: str = "Make the thing work",
        limits: Limits | None = None,
        max_repair_rounds: int | None = None,
        worker_context: Mapping[str, str] | None = None,
        workspace: str = "",
    ) -> None:
        self.roles = list(roles)
        self.limits = limits or Limits()
        self.database = Database(self.roles, flow, forced)
        self.database.meta[policies.CONTINUATION] = policies.continuation(max_repair_rounds)
        self.database.meta[policies.WORKER_CONTEXT] = policies.worker_context(worker_context or {})
        self.startup: Startup | None = Startup(task=task, role_tasks={}, workspace_capsule=workspace)
        self.now = Now(1_000, 1_700_000_000_000)
        self.next_number = 1
        self.next_id = 1
        self.frames: dict[int, list[Frame]] = {}
        self.ended: set[int] = set()
        self.workers: dict[str, int] = {}
        self.generations = dict.fromkeys(self.roles, 1)
        self.been: dict[int, tuple[str, int]] = {}
        self.states: list[str] = []
        self.checks: list[int] = []
        self.batches: list[list[rows.Change]] = []
        self.log: list[tuple[int, int, Now, bytes]] = []
        self.boot()

    # The broker's process.

    def boot(self) -> None:
        """Start a broker that has nothing but the database."""
        state = load(
            self.database.retained(),
            session="team",
            project="/srv/project",
            report_usage=True,
            startup=self.startup,
            seed=f"seed-{self.next_id}",
        )
        self.engine = Engine(state, self.limits)
        self.begun = self.engine.snapshot()
        self.log = []
        self.workers.clear()
        self.checks.clear()
        self.feed(kinds.STARTED, 0, b"")

    def crash(self, *, remembers: bool) -> None:
        """SIGKILL. With `remembers` the memory file and the connections are still there."""
        if not remembers:
            self.ended.update(self.workers.values())
            self.boot()
            return
        replayed = self.replayed()
        assert replayed.snapshot() == self.engine.snapshot()
        self.engine = replayed
        self.checks.clear()
        self.feed(kinds.STARTED, 0, b"remembers")

    def replayed(self) -> Engine:
        """An engine that was fed the log again."""
        engine = Engine.restored(self.begun)
        for kind, number, now, data in self.log:
            engine.replay(kind, number, now, data)
            engine.take()
        return engine

    def feed(self, kind: int, number: int, data: bytes = b"") -> list[Effect]:
        """One input, its commit, and its effects."""
        self.log.append((kind, number, self.now, data))
        self.engine.replay(kind, number, self.now, data)
        effects = self.engine.take()
        batch = [effect.row for effect in effects if isinstance(effect, Save)]
        for row in batch:
            self.database.apply(row)
        # What is changed in place later must not change what was committed.
        self.batches.append([msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=type(row)) for row in batch])
        for effect in effects:
            if isinstance(effect, Write):
                self.frames.setdefault(effect.number, []).append(json.loads(effect.frame[4:]))
            elif isinstance(effect, Finish | Drop):
                self.ended.add(effect.number)
                for role, at in list(self.workers.items()):
                    if at == effect.number:
                        del self.workers[role]
            elif isinstance(effect, Check):
                self.checks.append(effect.number)
            elif isinstance(effect, ForgetStartup):
                self.startup = None
        self.states.append(self.engine.workflow.state.workflow)
        return effects

    def pass_time(self, ms: int) -> None:
        """Let time pass, and the broker notice."""
        self.now = Now(self.now.mono + ms, self.now.wall + ms)
        if self.engine.wake_at <= self.now.mono:
            self.feed(kinds.TICK, 0)

    # Peers.

    def connect(self) -> int:
        number = self.next_number
        self.next_number += 1
        self.frames[number] = []
        self.feed(kinds.OPENED, number)
        return number

    def say(self, number: int, frame: Frame) -> list[Frame]:
        """Send a frame; the frames that came back on the same connection."""
        before = len(self.frames[number])
        self.feed(kinds.RECEIVED, number, pack(json.dumps(frame).encode()))
        return self.frames[number][before:]

    def fresh_id(self) -> str:
        self.next_id += 1
        return hex_id(self.next_id)

    def envelope(self, kind: str, role: str, **more: Any) -> Frame:
        return {"version": 1, "type": kind, "role": role, "token": token(role), "id": self.fresh_id()} | more

    def hello(self, role: str, generation: int | None = None) -> list[Frame]:
        """A worker comes; what it is sent at once."""
        number = self.connect()
        at = self.generations[role] if generation is None else generation
        answers = self.say(number, self.envelope("hello", role, generation=at))
        if number not in self.ended:
            self.workers[role] = number
            self.been[number] = (role, at)
        return answers

    def all_come(self) -> None:
        """Everybody comes, and takes the baseline."""
        for role in self.roles:
            self.hello(role)
        for role in self.roles:
            sent = self.frames[self.workers[role]]
            for frame in [frame for frame in sent if frame.get("kind") == "baseline"]:
                self.ack(role, frame["id"])
                sent.pop()

    def check(self, fault: str = "") -> list[Frame]:
        """The oldest check of the workspace capsule ends; what its connection is sent then."""
        number = self.checks.pop(0)
        before = len(self.frames[number])
        self.feed(kinds.CHECKED, number, fault.encode())
        return self.frames[number][before:]

    def leave(self, role: str) -> None:
        """The worker's connection is lost."""
        number = self.workers.pop(role)
        self.ended.add(number)
        self.feed(kinds.CLOSED, number, b"eof")

    def worker(self, kind: str, role: str, **more: Any) -> list[Frame]:
        """A frame of a connected worker; what it is answered."""
        return self.say(self.workers[role], self.envelope(kind, role, **more))

    def ack(self, role: str, delivery: str, status: str = "accepted") -> list[Frame]:
        return self.worker("ack", role, delivery_id=delivery, status=status)

    def lifecycle(self, role: str, state: str) -> list[Frame]:
        return self.worker("lifecycle", role, state=state, usage=None)

    def current(self, role: str) -> rows.Assignment | None:
        found = self.engine.workflow.state.roles[role].active_assignment_id
        return None if found is None else self.engine.workflow.state.assignments[found]

    def accept(self, role: str) -> None:
        """The worker takes what it was given."""
        assignment = self.current(role)
        assert assignment is not None
        self.ack(role, assignment.delivery_id)
        self.lifecycle(role, "active")

    def report(self, role: str, verdict: str | None = None, paths: Iterable[str] = ("src/a.py",)) -> list[Frame]:
        """The worker reports on what it was given."""
        assignment = self.current(role)
        assert assignment is not None
        body = report_body(assignment.kind, verdict, paths)
        return self.worker("report", role, assignment_id=assignment.id, report=body)

    def work(self, role: str, verdict: str | None = None, paths: Iterable[str] = ("src/a.py",)) -> None:
        """The whole way of an assignment."""
        self.accept(role)
        answers = self.report(role, verdict, paths)
        assert any(frame.get("status") == "accepted" for frame in answers), answers
        self.lifecycle(role, "idle")

    def control(self, action: str, role: str, **more: Any) -> Frame:
        """A command; its answer, which is empty where none came or it has to wait."""
        number = self.connect()
        frame = {"version": 1, "type": "control", "token": CONTROL, "id": self.fresh_id(), "action": action}
        frame |= {"role": role, "delivery": None, "message": None} | more
        answers = self.say(number, frame)
        assert number in self.ended or number in self.checks
        return answers[-1] if answers else {}

    def send(self, role: str, message: str = "please", **more: Any) -> Frame:
        return self.control("send", role, message=message, **more)

    def restart(self, role: str) -> Frame:
        answer = self.control("restart", role)
        if answer["status"] == "accepted":
            self.generations[role] += 1
        return answer

    def observe(self) -> int:
        number = self.connect()
        self.say(number, {"version": 1, "type": "observe", "token": CONTROL, "id": self.fresh_id()})
        return number

    # What there is.

    @property
    def workflow(self) -> str:
        return self.engine.workflow.state.workflow

    @property
    def round(self) -> int:
        return self.engine.workflow.state.round

    def role_state(self, role: str) -> str:
        return self.engine.workflow.state.roles[role].state

    def events(self) -> list[str]:
        return [event.event for event in sorted(self.database.of(rows.Event), key=lambda event: event.sequence)]

    def kinds_sent(self, role: str) -> list[str]:
        """The kinds of everything that the role's present connection was sent."""
        return [frame.get("kind") or frame["type"] for frame in self.frames[self.workers[role]]]
