# SPDX-License-Identifier: Apache-2.0
"""Any order of requests and facts against a model that keeps every rule in the simplest way there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from agent_intercom.workers.contract import Lifetimes, State
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Grant, Worker
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.terms import Caller, Changes, Due, Wanted, Work
from tests.unit.workerstage import PLACED, Stage, ending

IDLE, WARNING, GRACE, RUNTIME = 100, 30, 50, 400
TIMES = Lifetimes(
    idle_ms=IDLE, warning_ms=WARNING, grace_ms=GRACE, runtime_ms=RUNTIME, retry_ms=20, retention_ms=300,
    dirty_retention_ms=600,
)  # fmt: skip
GRANT = Grant(children=2, descendants=3, depth=2, subdelegate=True)
CHILD_GRANT = Grant(children=1, descendants=1, depth=1)
Answer = TypeVar("Answer")
OUTSIDE = [Caller(scope, session) for scope in (None, "a") for session in (None, "m1", "m2")]


@dataclass
class Model:
    """A worker as one would note it on paper: budgets that are used up while it runs, and who started it."""

    id: str
    name: str
    scope: str | None
    owner: str
    parent: str | None
    grant: Grant | None
    incarnation: str
    generation: int = 1
    epoch: int = 1
    phase: str = "starting"
    idle_left: int = IDLE + GRACE
    runtime_left: int = RUNTIME
    dirty: bool = False
    ended_at: int = 0
    passed: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.phase != "ended"

    @property
    def running(self) -> bool:
        return self.phase == "running"


class Workers(RuleBasedStateMachine):
    known = Bundle("known")

    @initialize()
    def begin(self) -> None:
        self.stage = Stage(lifetimes=TIMES)
        self.models: dict[str, Model] = {}
        self.ledger: dict[str, int] = {}
        self.stored = Mirror()
        self.seen: list[Due] = []

    @property
    def it(self) -> Registry:
        return self.stage.it

    # Callers

    def caller(self, who: int | Model) -> Caller:
        if isinstance(who, int):
            return OUTSIDE[who]
        return Caller("a", "m1", who.incarnation)

    def owner(self, caller: Caller) -> str:
        return caller.worker or caller.session or "person"

    def above(self, model: Model) -> list[Model]:
        found = []
        while model.parent is not None:
            model = self.models[model.parent]
            found.append(model)
        return found

    def below(self, model: Model) -> list[Model]:
        return [other for other in self.models.values() if model in self.above(other)]

    def may(self, who: int | Model, model: Model, change: bool) -> bool:
        if isinstance(who, Model):
            return who.live and who in self.above(model)
        caller = OUTSIDE[who]
        return caller.scope == model.scope and (not change or self.owner(caller) == model.owner)

    def who(self, number: int, inside: str) -> int | Model:
        model = self.models.get(inside)
        return number if model is None else model

    def attempt(self, allowed: bool, call: Callable[[], Answer]) -> Answer | None:
        """What a request answers; it is refused exactly where the model says so, and has changed nothing then."""
        before = dict(self.it._rows)
        try:
            answer = call()
        except WorkerError:
            assert not allowed
            assert self.it._rows == before
            return None
        assert allowed
        return answer

    # Requests

    @rule(
        target=known,
        number=st.integers(0, 5),
        parent=st.one_of(st.just(""), known),
        name=st.sampled_from(["one", "ONE", "two", "three"]),
        granted=st.booleans(),
    )
    def start(self, number: int, parent: str, name: str, granted: bool) -> object:
        who = self.who(number, parent)
        caller = self.caller(who)
        scope = who.scope if isinstance(who, Model) else caller.scope
        above = who.id if isinstance(who, Model) else None
        taken = any(
            other.live and other.name.lower() == name.lower() and other.parent == above and other.scope == scope
            for other in self.models.values()
        )
        grant = (CHILD_GRANT if above else GRANT) if granted else None
        allowed = not taken and (not isinstance(who, Model) or self.may_start(who, grant))
        before = set(self.models)
        worker = self.attempt(allowed, lambda: self.stage.start(caller, name=name, grant=grant))
        if worker is None:
            return multiple()
        assert worker.id not in before
        self.models[worker.id] = Model(
            worker.id, name, scope, self.owner(caller), above, grant, worker.incarnation, ended_at=self.stage.now
        )
        self.ledger[worker.id] = 1
        return worker.id

    def may_start(self, who: Model, grant: Grant | None) -> bool:
        if who.phase in ("fenced", "ended") or who.grant is None:
            return False
        if sum(other.live and other.parent == who.id for other in self.models.values()) >= who.grant.children:
            return False
        for distance, holder in enumerate([who, *self.above(who)], 1):
            assert holder.grant is not None
            if distance > holder.grant.depth or sum(m.live for m in self.below(holder)) >= holder.grant.descendants:
                return False
        return grant is None or (who.grant.subdelegate and grant.depth < who.grant.depth)

    @rule(worker=known, number=st.integers(0, 5), inside=st.one_of(st.just(""), known))
    def stop(self, worker: str, number: int, inside: str) -> None:
        model = self.models.get(worker)
        who = self.who(number, inside)
        if model is None:
            return
        answer = self.attempt(
            self.may(who, model, True), lambda: self.it.stop(self.caller(who), worker, self.stage.now)
        )
        if answer is not None:
            family = [*self.below(model), model]
            assert {row.id for row in answer.fenced} == {row.id for row in family if row.live}
            depths = [len(self.above(self.models[row.id])) for row in answer.fenced]
            assert depths == sorted(depths, reverse=True)
            self.fence(family)

    def fence(self, family: list[Model]) -> None:
        for model in family:
            if model.live:
                model.phase = "fenced"

    @rule(worker=known, number=st.integers(0, 5), stopped_between=st.booleans())
    def restart(self, worker: str, number: int, stopped_between: bool) -> None:
        model = self.models.get(worker)
        if model is None or model.phase == "fenced" or model.parent is not None:
            return
        caller, now = OUTSIDE[number], self.stage.now
        taken = any(
            other.live
            and other is not model
            and other.name.lower() == model.name.lower()
            and (other.scope, other.parent) == (model.scope, None)
            for other in self.models.values()
        )
        allowed = not taken and self.may(number, model, True)
        answer = self.attempt(allowed, lambda: self.it.restart(caller, worker, now))
        if answer is None:
            return
        if stopped_between:
            self.it.stop(caller, worker, now)
        for row in sorted([*self.below(model), model], key=lambda row: -len(self.above(row))):
            self.finish(row)
        again = self.attempt(not stopped_between, lambda: self.it.again(caller, worker, model.incarnation, now))
        if again is not None:
            model.generation += 1
            self.ledger[worker] += 1
            model.passed.append(model.incarnation)
            model.incarnation = again.incarnation
            model.phase, model.idle_left, model.runtime_left = "starting", IDLE + GRACE, RUNTIME

    def finish(self, model: Model) -> None:
        """Whatever is left of a worker ends, with all its consequences."""
        if not model.live:
            return
        self.it.ended(model.incarnation, ending(self.stage.now), self.stage.now, model.dirty)
        model.phase, model.ended_at = "ended", self.stage.now
        self.fence(self.below(model))

    @rule(worker=known, number=st.integers(0, 5), release=st.booleans())
    def adopt(self, worker: str, number: int, release: bool) -> None:
        model = self.models.get(worker)
        if model is None:
            return
        caller = OUTSIDE[number]
        ready = model.phase in ("starting", "running", "paused") and model.parent is None
        if release:
            allowed, owner = ready and self.may(number, model, True), "nobody"
            answer = self.attempt(allowed, lambda: self.it.release(caller, worker, self.stage.now))
        else:
            allowed, owner = ready and self.may(number, model, False), self.owner(caller)
            answer = self.attempt(allowed, lambda: self.it.adopt(caller, worker, self.stage.now))
        if answer is not None:
            model.epoch += owner != model.owner
            model.owner = owner
            model.idle_left = IDLE + GRACE

    @rule(number=st.integers(0, 5), inside=st.one_of(st.just(""), known))
    def renew(self, number: int, inside: str) -> None:
        who = self.who(number, inside)
        if isinstance(who, Model) and not who.live:
            return
        answer = self.it.renew(self.caller(who), None, self.stage.now)
        mine = [
            model
            for model in self.models.values()
            if model.phase in ("starting", "running")
            and (model.parent == who.id if isinstance(who, Model) else self.may(who, model, True))
        ]
        assert {row.id for row in answer} == {model.id for model in mine}
        for model in mine:
            model.idle_left = IDLE + GRACE

    @rule(worker=known)
    def forget(self, worker: str) -> None:
        model = self.models.get(worker)
        if model is None:
            return
        family = [*self.below(model), model]
        override = Caller(override=True)
        answer = self.attempt(
            not any(row.live for row in family), lambda: self.it.forget(override, worker, True, self.stage.now)
        )
        for row in answer or ():
            self.it.forgotten(row.id, self.stage.now)
            del self.models[row.id]

    # Facts

    @rule(worker=known)
    def released(self, worker: str) -> None:
        model = self.models.get(worker)
        if model is not None and model.phase in ("starting", "fenced"):
            row = self.it._rows[worker]
            if model.phase == "starting":
                self.it.placed(model.incarnation, PLACED, self.stage.now)
                model.phase, model.idle_left = "running", IDLE + GRACE
            elif row.state == State.PROVISIONING:
                raise AssertionError("fenced, and yet provisioning")
            self.it.released(model.incarnation, self.stage.now)

    @rule(worker=known, dirty=st.booleans())
    def ended(self, worker: str, dirty: bool) -> None:
        model = self.models.get(worker)
        if model is not None:
            model.dirty = dirty if model.live else model.dirty
            self.finish(model)

    @rule(worker=known)
    def late(self, worker: str) -> None:
        model = self.models.get(worker)
        for incarnation in model.passed if model is not None else ():
            self.it.lost(incarnation, self.stage.now)
            self.it.noted(incarnation, self.stage.now)
            self.it.released(incarnation, self.stage.now)

    @rule(worker=known)
    def active(self, worker: str) -> None:
        model = self.models.get(worker)
        if model is not None:
            self.it.noted(model.incarnation, self.stage.now)
            if model.phase in ("running", "paused"):
                model.idle_left = IDLE + GRACE

    @rule(worker=known)
    def pause(self, worker: str) -> None:
        model = self.models.get(worker)
        if model is not None and model.running:
            self.it.paused(model.incarnation, self.stage.now)
            model.phase = "paused"
        elif model is not None and model.phase == "paused":
            self.it.resumed(model.incarnation, self.stage.now)
            model.phase = "running"

    @rule(by=st.integers(1, 200))
    def wait(self, by: int) -> None:
        self.seen = self.it.due(self.stage.now)
        self.stage.now += by
        for model in self.models.values():
            if model.running:
                model.idle_left -= by
                model.runtime_left -= by

    @rule()
    def expire(self) -> None:
        """What was due at an earlier look is ended only where it is due still, for the same reason."""
        for due in self.seen:
            model = self.models.get(due.worker)
            current = model is not None and model.incarnation == due.incarnation and model.running
            if due.work is Work.CHECKPOINT:
                self.it.checkpoint(due, self.stage.now)
                continue
            left = 1
            if current and model is not None:
                left = model.idle_left if due.reason == "idle-grace-expired" else model.runtime_left
            fenced = self.it.expire(due, self.stage.now)
            if fenced:
                assert left <= 0
                assert model is not None
                self.fence([*self.below(model), model])
            elif current and model is not None:
                assert due.deadline != self.stage.now + left or min(model.idle_left, model.runtime_left) < left

    @rule()
    def fail_to_store(self) -> None:
        """A request that cannot be stored leaves nothing behind."""
        self.store()
        before = dict(self.it._rows)
        self.it.start(OUTSIDE[0], Wanted("command", name="kept-nowhere"), self.stage.now)
        for worker in list(self.models.values()):
            if worker.running and worker.parent is None:
                self.it.stop(Caller(override=True), worker.id, self.stage.now)
        self.it.revert(self.it.take())
        assert self.it._rows == before

    def store(self) -> None:
        self.stored.apply(self.it.take())

    # What must hold

    @invariant()
    def everything_is_stored(self) -> None:
        self.store()
        self.stored.check(self.it)

    @invariant()
    def workers_are_as_the_model_has_them(self) -> None:
        assert set(self.it._rows) == set(self.models)
        for model in self.models.values():
            row = self.it._rows[model.id]
            phase = (
                "ended" if row.state in ("failed", "lost", "stopped")
                else "fenced" if row.stop_requested_at is not None
                else "starting" if row.state == "provisioning"
                else "paused" if row.state == "paused"
                else "running"
            )  # fmt: skip
            assert phase == model.phase
            assert (row.generation, row.incarnation) == (model.generation, model.incarnation)
            assert (row.owner.name or {"none": "nobody"}.get(row.owner.kind, "person")) == model.owner
            assert row.owner.epoch == model.epoch
            if model.running:
                assert row.checkpoint_deadline_at == self.stage.now + model.idle_left
                assert row.runtime_deadline_at == self.stage.now + model.runtime_left
            if model.phase == "paused":
                assert row.runtime_left_ms == max(0, model.runtime_left)

    @invariant()
    def generations_never_fall(self) -> None:
        for worker, generation in self.ledger.items():
            assert self.it._generations[worker] == generation

    @invariant()
    def nothing_lives_on_below_what_ends(self) -> None:
        for model in self.models.values():
            if model.phase in ("fenced", "ended"):
                assert all(other.phase in ("fenced", "ended") for other in self.below(model))

    @invariant()
    def everybody_sees_what_is_theirs(self) -> None:
        callers: list[int | Model] = [*range(len(OUTSIDE)), *self.models.values()]
        for who in callers:
            if isinstance(who, Model) and not who.live:
                continue
            listed = self.it.list(self.caller(who), self.stage.now, everyone=True, history=True).workers
            visible = {model.id for model in self.models.values() if self.may(who, model, False)}
            assert {row.id for row in listed} == visible
            for model in self.models.values():
                try:
                    found = self.it.find(self.caller(who), model.id).id
                except WorkerError as error:
                    found = error.code
                assert found == (model.id if model.id in visible else "worker_not_found")


class Mirror:
    """What a store that does as it is told would hold."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.generations: dict[str, int] = {}
        self.incarnations: dict[str, str] = {}

    def apply(self, changes: Changes) -> None:
        self.workers.update((row.id, row) for row in changes.workers)
        self.generations.update((row.worker, row.generation) for row in changes.generations)
        self.incarnations.update((row.incarnation, row.worker) for row in changes.incarnations)
        for worker in changes.removed:
            self.workers.pop(worker, None)
        for incarnation in changes.buried:
            self.incarnations.pop(incarnation, None)

    def check(self, registry: Registry) -> None:
        assert self.workers == registry._rows
        assert self.generations == registry._generations
        assert self.incarnations == registry._incarnations
        for row in self.workers.values():
            assert self.incarnations[row.incarnation] == row.id
            assert row.parent is None or self.incarnations[row.parent] in self.workers


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
