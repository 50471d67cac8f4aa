# SPDX-License-Identifier: Apache-2.0
"""The rules of managed workers: who may do what with which, and what time and ends do to them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from agent_intercom.workers import lifecycle
from agent_intercom.workers.contract import Code, Outcome, State, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.lifecycle import TABLE, Evidence
from agent_intercom.workers.records import Ending, Worker
from agent_intercom.workers.terms import Caller, Due, Loaded, Wanted, Work
from tests.unit.workerstage import (
    FOREIGN,
    OTHER,
    OVERRIDE,
    PERSON,
    PLACED,
    SESSION,
    WIDE,
    Stage,
    ending,
    inside,
    refused,
)

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR


@pytest.fixture
def stage() -> Stage:
    return Stage()


# Names and references


def test_a_worker_is_found_by_its_id_the_beginning_of_it_and_its_label_in_any_case(stage: Stage) -> None:
    worker = stage.start(name="Tester")
    stage.start(name="second")
    for reference in (worker.id, worker.id[:4], "Tester", "tESTER"):
        assert stage.it.find(PERSON, reference).id == worker.id
    for reference in ("", worker.id[:3], "test", "nobody"):
        with refused(Code.NOT_FOUND, "worker"):
            stage.it.find(PERSON, reference)


def test_what_may_mean_several_workers_is_refused(stage: Stage) -> None:
    for _ in range(2):
        stage.end(stage.run(name="twice"))
        stage.now += 1
    with refused(Code.AMBIGUOUS):
        stage.it.find(PERSON, "twice")
    live = stage.start(name="twice")
    assert stage.it.find(PERSON, "twice").id == live.id


def test_a_worker_without_a_name_gets_one(stage: Stage) -> None:
    worker = stage.start(role="reviewer")
    assert worker.name == f"command-reviewer-{worker.id[:6]}"


@pytest.mark.parametrize(
    ("role", "name"),
    [("code review", "command-code-review"), ("Prüfung/2", "command-Pr-fung-2"), ("x" * 80, f"command-{'x' * 52}")],
)
def test_a_name_that_nobody_has_chosen_is_one_whatever_the_role_is(stage: Stage, role: str, name: str) -> None:
    worker = stage.start(role=role)
    assert worker.name == f"{name}-{worker.id[:6]}" and worker.role == role


@pytest.mark.parametrize("name", ["", "x", "-ab", "a b", "a/b", "a" * 81, "ab\n", "äb"])
def test_a_name_that_is_none_is_refused(stage: Stage, name: str) -> None:
    with refused(Code.INVALID, "name"):
        stage.start(name=name)
    assert not stage.it.take()


def test_live_workers_of_one_scope_id_do_not_share_a_label_however_it_is_written(stage: Stage) -> None:
    first = stage.run(name="tester")
    with refused(Code.NAME_TAKEN, "name"):
        stage.start(SESSION, name="TESTER")
    stage.start(FOREIGN, name="tester")
    other = stage.start(name="other")
    with refused(Code.NAME_TAKEN):
        stage.it.rename(PERSON, other.id, "Tester", stage.now)
    stage.end(first)
    assert stage.it.rename(PERSON, other.id, "Tester", stage.now).name == "Tester"


def test_a_renamed_worker_keeps_everything_but_its_name(stage: Stage) -> None:
    worker = stage.run(name="before")
    renamed = stage.it.rename(PERSON, "before", "after", stage.now)
    assert replace(renamed, name="before") == worker
    assert stage.it.rename(PERSON, "after", "AFTER", stage.now).name == "AFTER"


def test_a_part_of_the_table_is_as_the_contract_has_it() -> None:
    assert TABLE[State.PROVISIONING, State.REGISTERING] is Evidence.REGISTRATION_STARTED
    assert (State.PROVISIONING, State.READY) not in TABLE
    assert (State.READY, State.WAITING) not in TABLE
    assert (State.UNREACHABLE, State.READY) not in TABLE
    assert (State.UNREACHABLE, State.PAUSED) not in TABLE
    for ended in (State.FAILED, State.LOST, State.STOPPED):
        assert [to for before, to in TABLE if before is ended] == [ended]
        assert all((live, ended) in TABLE for live in lifecycle.LIVE)


def test_a_state_changes_only_by_the_evidence_that_it_takes(stage: Stage) -> None:
    worker = stage.run()
    for evidence in Evidence:
        if evidence is not Evidence.READINESS:
            with refused(Code.CONFLICT):
                lifecycle.move(worker, State.READY, evidence, stage.now)
    assert lifecycle.move(worker, State.READY, Evidence.READINESS, stage.now).state == State.READY


# Ownership


def test_only_who_has_the_scope_id_learns_of_a_worker(stage: Stage) -> None:
    worker = stage.run(SESSION, name="tester")
    for caller in (PERSON, SESSION, OTHER, OVERRIDE):
        assert stage.it.find(caller, worker.id).id == worker.id
    for caller in (FOREIGN, Caller(), Caller("scope-b", override=False)):
        with refused(Code.NOT_FOUND):
            stage.it.find(caller, worker.id)
        with refused(Code.NOT_FOUND):
            stage.it.stop(caller, "tester", stage.now)
        assert stage.it.list(caller, stage.now, everyone=True).workers == ()
    assert stage.it.find(Caller(override=True), worker.id).id == worker.id


def test_having_no_scope_id_is_one_too(stage: Stage) -> None:
    worker = stage.run(Caller())
    assert stage.it.find(Caller(None, "manager-1"), worker.id).id == worker.id
    with refused(Code.NOT_FOUND):
        stage.it.find(PERSON, worker.id)


@pytest.mark.parametrize("action", ["stop", "restart", "release", "rename", "renew", "pause", "readable", "forget"])
def test_only_the_owner_changes_a_worker_or_who_overrides(stage: Stage, action: str) -> None:
    worker = stage.run(SESSION)
    if action == "forget":
        stage.end(worker)

    def act(caller: Caller) -> None:
        extra = {"rename": ("new-name",), "forget": (True,)}.get(action, ())
        now = () if action == "readable" else (stage.now,)
        getattr(stage.it, action)(caller, worker.id, *extra, *now)

    before = stage.get(worker)
    for caller in (OTHER, PERSON):
        with refused(Code.NOT_OWNER, "worker"):
            act(caller)
    assert stage.get(worker) == before
    act(OVERRIDE)


def test_adopting_raises_the_epoch_by_one_and_only_when_the_owner_changes(stage: Stage) -> None:
    worker = stage.run(SESSION)
    stage.now += MINUTE
    again = stage.it.adopt(SESSION, worker.id, stage.now)
    assert (again.owner.epoch, again.active_at) == (1, stage.now)
    other = stage.it.adopt(OTHER, worker.id, stage.now)
    assert (other.owner.name, other.owner.epoch) == ("manager-2", 2)
    assert stage.it.scope(worker.id) == "scope-a"
    with refused(Code.NOT_OWNER):
        stage.it.stop(SESSION, worker.id, stage.now)


def test_who_has_another_scope_id_cannot_adopt_not_even_with_an_override(stage: Stage) -> None:
    worker = stage.run(SESSION)
    with refused(Code.NOT_FOUND):
        stage.it.adopt(FOREIGN, worker.id, stage.now)
    with refused(Code.FORBIDDEN):
        stage.it.adopt(Caller("scope-b", override=True), worker.id, stage.now)


def test_what_is_released_is_nobodys_until_somebody_adopts_it(stage: Stage) -> None:
    worker = stage.run(SESSION)
    stage.now += HOUR // 2
    released = stage.it.release(SESSION, worker.id, stage.now)
    assert (released.owner.kind, released.owner.epoch) == ("none", 2)
    assert released.idle_deadline_at == stage.now + HOUR
    with refused(Code.NOT_OWNER):
        stage.it.stop(SESSION, worker.id, stage.now)
    assert stage.it.list(SESSION, stage.now).workers == ()
    assert stage.it.adopt(PERSON, worker.id, stage.now).owner.epoch == 3


def test_what_has_ended_or_is_being_ended_is_not_adopted(stage: Stage) -> None:
    worker = stage.run(SESSION)
    stage.it.stop(SESSION, worker.id, stage.now)
    with refused(Code.CONFLICT):
        stage.it.adopt(OTHER, worker.id, stage.now)
    stage.end(worker)
    with refused(Code.NOT_LIVE):
        stage.it.adopt(OTHER, worker.id, stage.now)


def test_a_worker_whose_scope_id_is_not_known_any_more_is_nobodys_to_see_and_never_begins_again(stage: Stage) -> None:
    worker, bare = stage.run(), stage.run(Caller())
    later = Stage(loaded=Loaded(workers=stage.it.take().workers))
    for caller in (PERSON, Caller(), Caller(None, "manager-1")):
        with refused(Code.NOT_FOUND):
            later.it.find(caller, worker.id)
        assert worker not in later.it.list(caller, stage.now, everyone=True, history=True).workers
    assert later.it.find(Caller(override=True), worker.id) == worker
    with refused(Code.NOT_FOUND):
        later.it.find(PERSON, bare.id)
    assert later.it.find(Caller(), bare.id) == bare
    for row, action in ((worker, later.it.restart), (bare, later.it.restart), (bare, later.it.adopt)):
        with refused(Code.PLACE_LOST):
            action(Caller(override=row is worker), row.id, stage.now)
    later.it.remember_scope(worker.id, "scope-a")
    assert later.it.find(PERSON, worker.id) == worker


def test_listing_gives_ones_own_and_with_everyone_what_may_be_seen(stage: Stage) -> None:
    mine, other = stage.run(SESSION), stage.run(OTHER)
    stage.run(FOREIGN)
    assert [worker.id for worker in stage.it.list(SESSION, stage.now).workers] == [mine.id]
    listed = stage.it.list(SESSION, stage.now, everyone=True).workers
    assert {worker.id for worker in listed} == {mine.id, other.id}


def test_what_ended_long_ago_is_only_counted(stage: Stage) -> None:
    worker = stage.end(stage.run())
    assert stage.it.list(PERSON, stage.now + DAY - 1).workers == (worker,)
    assert stage.it.list(PERSON, stage.now + DAY) == ((), 1, 0)
    assert stage.it.list(PERSON, stage.now + DAY, history=True) == ((worker,), 0, 0)


# Keys


def test_a_start_under_the_same_key_is_the_same_start_for_a_day(stage: Stage) -> None:
    worker = stage.start(SESSION, name="tester", key="k")
    wanted = Wanted("command", name="tester", key="k")
    assert stage.it.start(SESSION, wanted, stage.now + DAY - 1) == (worker, True)
    for other in (wanted._replace(role="other"), wanted._replace(order_digest="of another command")):
        with pytest.raises(WorkerError, match=f"^{worker.id} was started under this key") as told:
            stage.it.start(SESSION, other, stage.now)
        assert (told.value.code, told.value.field) == (Code.CONFLICT, "key")
    stage.end(stage.begin(worker))
    again = stage.it.start(SESSION, wanted, stage.now + DAY)
    assert not again.repeated
    assert again.worker.id != worker.id


def test_a_key_is_its_owners_and_its_scope_ids(stage: Stage) -> None:
    started = {stage.start(caller, key="k").id for caller in (PERSON, SESSION, OTHER, FOREIGN, Caller("scope-b"))}
    assert len(started) == 5


@pytest.mark.parametrize("key", ["", "k" * 65])
def test_a_key_that_is_none_is_refused(stage: Stage, key: str) -> None:
    with refused(Code.INVALID, "key"):
        stage.start(key=key)


# Beginning and readiness


def test_a_worker_is_ready_only_when_it_says_so_from_inside(stage: Stage) -> None:
    worker = stage.run()
    assert (worker.state, worker.readiness) == (State.REGISTERING, "unverified")
    with refused(Code.FORBIDDEN):
        stage.it.notify(PERSON, "ready", stage.now)
    with refused(Code.INVALID, "state"):
        stage.it.notify(inside(worker), "paused", stage.now)
    ready = stage.it.notify(inside(worker), "ready", stage.now)
    assert (ready.state, ready.readiness) == (State.READY, "verified")
    assert [stage.it.notify(inside(worker), said, stage.now).state for said in ("waiting", "working", "waiting")] == [
        "waiting",
        "working",
        "waiting",
    ]
    assert stage.it.notify(inside(worker), "ready", stage.now).state == State.WAITING


def test_a_start_that_was_stopped_meanwhile_is_not_let_go(stage: Stage) -> None:
    worker = stage.start()
    assert stage.it.stop(PERSON, worker.id, stage.now).fenced == (stage.get(worker),)
    with refused(Code.CONFLICT):
        stage.it.placed(worker.incarnation, PLACED, stage.now)
    stage.it.released(worker.incarnation, stage.now)
    assert stage.get(worker).state == State.BLOCKED
    stage.it.failed(worker.incarnation, "start_failed", stage.now)
    assert (stage.get(worker).state, stage.get(worker).stop_reason) == (State.FAILED, StopReason.REQUESTED)


def test_what_comes_late_about_an_incarnation_changes_nothing(stage: Stage) -> None:
    worker = stage.run()
    stage.it.restart(PERSON, worker.id, stage.now)
    stage.end(worker)
    again = stage.it.again(PERSON, worker.id, worker.incarnation, stage.now)
    for tell in (stage.it.released, stage.it.lost, stage.it.noted, stage.it.reattached, stage.it.paused):
        tell(worker.incarnation, stage.now)
    stage.it.ended(worker.incarnation, ending(), stage.now)
    assert stage.get(worker) == again


# Ends


@pytest.mark.parametrize(
    ("how", "state", "code"),
    [
        (ending(code=0), State.STOPPED, ""),
        (ending(code=3), State.FAILED, "exited"),
        (ending(code=None, signal=11), State.FAILED, "signaled"),
        (Ending(at=0, outcome=Outcome.OOM), State.FAILED, "oom-kill"),
        (Ending(at=0, outcome=Outcome.UNKNOWN), State.LOST, "unknown"),
    ],
)
def test_how_a_worker_ends_says_what_it_is_then(stage: Stage, how: Ending, state: State, code: str) -> None:
    by_itself, asked = stage.run(), stage.run()
    stage.it.stop(PERSON, asked.id, stage.now)
    for worker in (by_itself, asked):
        stage.it.ended(worker.incarnation, how, stage.now)
    assert (stage.get(by_itself).state, stage.get(by_itself).error_code) == (state, code)
    assert (stage.get(asked).state, stage.get(asked).stop_reason) == (State.STOPPED, "manager-requested")
    assert stage.get(asked).idle_deadline_at is None


def test_stopping_may_be_repeated_and_what_has_ended_is_no_error(stage: Stage) -> None:
    worker = stage.run()
    first = stage.it.stop(PERSON, worker.id, stage.now)
    assert stage.it.stop(PERSON, worker.id, stage.now + 1) == first
    ended = stage.end(worker)
    assert stage.it.stop(PERSON, worker.id, stage.now) == (ended, ())


def test_a_stop_that_fails_keeps_the_fence(stage: Stage) -> None:
    worker = stage.run()
    stage.it.stop(PERSON, worker.id, stage.now)
    stage.it.stop_failed(worker.incarnation, "stop_failed", stage.now)
    assert (stage.get(worker).state_reason, stage.get(worker).error_code) == ("stop_in_progress", "stop_failed")
    assert [row.id for row in stage.it.fenced()] == [worker.id]


def test_nothing_takes_a_worker_out_of_its_fence(stage: Stage) -> None:
    worker = stage.run()
    stage.it.stop(PERSON, worker.id, stage.now)
    fenced = stage.get(worker)
    stage.it.notify(inside(worker), "working", stage.now)
    stage.it.reattached(worker.incarnation, stage.now)
    stage.it.paused(worker.incarnation, stage.now)
    stage.it.noted(worker.incarnation, stage.now + 1)
    assert stage.it.renew(PERSON, None, stage.now) == []
    assert stage.get(worker) == fenced


def test_what_a_leader_leaves_behind_blocks_and_is_ended_after_a_grace(stage: Stage) -> None:
    worker = stage.run()
    stage.it.children_remain(worker.incarnation, ending(code=4), stage.now)
    assert (stage.get(worker).state, stage.get(worker).state_reason) == (State.BLOCKED, "children_remain")
    due = Due(Work.STOP, worker.id, worker.incarnation, stage.now + 10_000, StopReason.CHILDREN)
    assert stage.it.next_due() == due.deadline
    assert stage.it.due(due.deadline) == [due]
    stage.now = due.deadline
    assert [row.id for row in stage.it.expire(due, stage.now)] == [worker.id]
    stage.it.ended(worker.incarnation, ending(code=None, signal=9), stage.now)
    gone = stage.get(worker)
    assert gone.ended is not None
    assert (gone.state, gone.ended.exit_code, gone.stop_reason) == (State.FAILED, 4, "children-remained")


def test_what_cannot_be_proved_is_unreachable_and_is_not_ended_by_itself(stage: Stage) -> None:
    worker = stage.run()
    stage.it.notify(inside(worker), "working", stage.now)
    stage.it.unreachable(worker.incarnation, "manager_unreachable", stage.now)
    assert (stage.get(worker).state, stage.get(worker).state_reason) == ("unreachable", "manager_unreachable")
    assert stage.it.due(stage.now + DAY) == []
    stage.it.reattached(worker.incarnation, stage.now)
    assert (stage.get(worker).state, stage.get(worker).state_reason) == (State.WORKING, "")


# Restarts


def test_a_restart_is_a_fence_an_end_and_the_next_generation_of_the_same_worker(stage: Stage) -> None:
    worker = stage.run(SESSION, name="tester", task_digest="t", directory_digest="d", idle_ms=5 * MINUTE)
    stopping = stage.it.restart(OVERRIDE, worker.id, stage.now)
    assert [row.id for row in stopping.fenced] == [worker.id]
    with refused(Code.LIVE):
        stage.it.again(OVERRIDE, worker.id, worker.incarnation, stage.now)
    stage.end(worker)
    again = stage.it.again(OVERRIDE, worker.id, worker.incarnation, stage.now)
    made = {"generation": 2, "incarnation": again.incarnation, "unit": again.unit, "root": again.incarnation}
    times = {"updated_at": stage.now, "entered_at": stage.now, "active_at": stage.now}
    deadlines = ("lease_expires_at", "idle_deadline_at", "checkpoint_deadline_at", "runtime_deadline_at")
    happened = ("state", "readiness", "placed", "ended", "stop_requested_at", "stop_reason", *deadlines)
    assert again == replace(
        worker, **made, **times, **{field.name: field.default for field in fields(Worker) if field.name in happened}
    )
    assert again.state == State.PROVISIONING
    assert again.incarnation != worker.incarnation
    assert again.unit == f"worker-{again.incarnation}.scope"
    assert stage.it.scope(worker.id) == "scope-a"


def test_a_stop_between_the_halves_of_a_restart_wins(stage: Stage) -> None:
    for ended_first in (True, False):
        worker = stage.run()
        stage.it.restart(PERSON, worker.id, stage.now)
        if ended_first:
            stage.end(worker)
        stage.it.stop(PERSON, worker.id, stage.now)
        stage.end(worker)
        with refused(Code.CONFLICT):
            stage.it.again(PERSON, worker.id, worker.incarnation, stage.now)


def test_a_worker_that_is_being_stopped_or_forgotten_is_not_restarted(stage: Stage) -> None:
    worker = stage.run()
    stage.it.stop(PERSON, worker.id, stage.now)
    with refused(Code.CONFLICT):
        stage.it.restart(PERSON, worker.id, stage.now)
    stage.end(worker)
    stage.it.forget(PERSON, worker.id, True, stage.now)
    with refused(Code.CONFLICT):
        stage.it.restart(PERSON, worker.id, stage.now)
    stage.it.unclaim(worker.id)
    stage.it.restart(PERSON, worker.id, stage.now)
    assert stage.it.again(PERSON, worker.id, worker.incarnation, stage.now).generation == 2


def test_a_restart_does_not_take_a_label_that_has_gone_to_another(stage: Stage) -> None:
    worker = stage.end(stage.run(name="tester"))
    stage.start(name="TESTER")
    with refused(Code.NAME_TAKEN):
        stage.it.restart(PERSON, worker.id, stage.now)
    assert stage.get(worker).stop_reason == worker.stop_reason


# Workers of a run


def test_a_role_of_a_run_keeps_its_id_and_takes_rising_generations_even_when_forgotten(stage: Stage) -> None:
    role: dict[str, Any] = {"run": "u1", "role": "reviewer"}
    first = stage.run(generation=1, **role)
    assert (first.name, first.owner.kind, first.owner.name) == ("u1/reviewer", "run", "u1")
    with refused(Code.CONFLICT, "role"):
        stage.start(generation=2, **role)
    stage.end(first)
    stage.now += MINUTE
    again = stage.end(stage.run(generation=1, **role))
    assert again.created_at == first.created_at == again.updated_at - MINUTE
    assert again.id == first.id and again.incarnation != first.incarnation
    second = stage.end(stage.run(generation=4, **role))
    assert second.id == first.id
    stage.it.forget(OVERRIDE, "u1/reviewer", True, stage.now)
    stage.it.forgotten(first.id, stage.now)
    with refused(Code.CONFLICT, "generation"):
        stage.start(generation=3, **role)
    assert stage.start(generation=4, **role).id == first.id


def test_a_worker_of_a_run_is_changed_by_its_run_alone_but_a_person_may_look_and_pause(stage: Stage) -> None:
    worker = stage.run(run="u1", role="reviewer", generation=1)
    for caller in (PERSON, SESSION, OVERRIDE):
        for action in (stage.it.stop, stage.it.restart, stage.it.adopt, stage.it.release):
            with refused(Code.FORBIDDEN):
                action(caller, worker.id, stage.now)
        with refused(Code.FORBIDDEN):
            stage.it.rename(caller, worker.id, "other", stage.now)
    assert stage.it.pause(PERSON, "u1/reviewer", stage.now) == worker
    assert stage.it.readable(PERSON, worker.id) == worker
    with refused(Code.FORBIDDEN):
        stage.it.pause(SESSION, worker.id, stage.now)


def test_stopping_roles_fences_what_is_below_them_too(stage: Stage) -> None:
    one = stage.run(run="u1", role="one", generation=1, grant=WIDE)
    two = stage.run(run="u1", role="two", generation=1)
    child = stage.run(inside(one))
    stage.run(run="u2", role="one", generation=1)
    assert [row.id for row in stage.it.stop_role(Caller("any"), "u1", "one", stage.now)] == [child.id, one.id]
    assert {row.id for row in stage.it.stop_role(PERSON, "u1", None, stage.now)} == {child.id, one.id, two.id}
    assert stage.get(two).stop_reason == "run-ended"
    with refused(Code.FORBIDDEN):
        stage.it.stop_role(inside(two), "u2", None, stage.now)


def test_a_worker_of_a_run_is_not_ended_for_being_idle_or_old(stage: Stage) -> None:
    stage.run(run="u1", role="one", generation=1)
    assert stage.it.next_due() is None


# Leases


def test_the_times_of_a_worker_are_those_of_the_rule(stage: Stage) -> None:
    worker = stage.run(idle_ms=60 * MINUTE, grace_ms=15 * MINUTE, warning_ms=10 * MINUTE, runtime_ms=5 * HOUR)
    begun = stage.now
    assert (worker.idle_deadline_at, worker.checkpoint_deadline_at) == (begun + 60 * MINUTE, begun + 75 * MINUTE)
    assert (worker.lease_expires_at, worker.runtime_deadline_at) == (begun + 30 * MINUTE, begun + 5 * HOUR)
    assert stage.it.next_due() == begun + 50 * MINUTE
    asked = []
    while (at := stage.it.next_due()) is not None and at < begun + 75 * MINUTE:
        assert stage.it.due(at - 1) == []
        (due,) = stage.it.due(at)
        assert due == Due(Work.CHECKPOINT, worker.id, worker.incarnation, at)
        assert stage.it.checkpoint(due, at) is not None
        asked.append((at - begun) // MINUTE)
    assert asked == [50, 55, 60, 65, 70]
    assert stage.get(worker).checkpoint_attempts == 5
    (due,) = stage.it.due(begun + 75 * MINUTE)
    assert (due.work, due.reason) == (Work.STOP, StopReason.IDLE)


def test_a_lease_is_extended_by_its_owner_but_never_past_the_idle_deadline(stage: Stage) -> None:
    worker = stage.run(SESSION, idle_ms=40 * MINUTE)
    begun = stage.now
    assert stage.it.heartbeat(OTHER, begun + 10 * MINUTE) == []
    assert stage.get(worker) == worker
    (extended,) = stage.it.heartbeat(SESSION, begun + 9 * MINUTE)
    assert stage.get(worker) == extended and extended.lease_expires_at == begun + 39 * MINUTE
    # What is left is less than a quarter, and the last that there is.
    stage.it.heartbeat(SESSION, begun + 25 * MINUTE)
    assert stage.get(worker).lease_expires_at == stage.get(worker).idle_deadline_at == begun + 40 * MINUTE
    stage.it.take()
    stage.it.heartbeat(SESSION, begun + 26 * MINUTE)
    assert not stage.it.take()


def test_an_owner_who_is_there_all_the_time_is_written_down_four_times_a_lease(stage: Stage) -> None:
    worker = stage.run(SESSION, idle_ms=0)
    stage.it.take()
    begun, written = stage.now, 0
    for minute in range(60):
        extended = stage.it.heartbeat(SESSION, begun + minute * MINUTE)
        assert [row.id for row in extended] == ([worker.id] if extended else [])
        written += bool(stage.it.take())
        # However often it is written, the lease of one whose owner is there does not come to its end.
        assert (stage.get(worker).lease_expires_at or 0) > begun + (minute + 22) * MINUTE
    assert written == 7


@pytest.mark.parametrize("how", ["renew", "adopt", "noted", "notify"])
def test_activity_gives_a_whole_window_and_beats_an_expiry_that_was_seen(stage: Stage, how: str) -> None:
    worker = stage.run()
    begun = stage.now
    (ask,) = stage.it.due(begun + 50 * MINUTE)
    stage.it.checkpoint(ask, begun + 50 * MINUTE)
    stage.now = begun + 75 * MINUTE
    (due,) = stage.it.due(stage.now)
    if how == "noted":
        stage.it.noted(worker.incarnation, stage.now)
    elif how == "notify":
        stage.it.notify(inside(worker), "ready", stage.now)
    elif how == "renew":
        assert stage.it.renew(PERSON, None, stage.now) == [stage.get(worker)]
    else:
        stage.it.adopt(SESSION, worker.id, stage.now)
    assert stage.it.expire(due, stage.now) == []
    assert stage.it.checkpoint(ask, stage.now) is None
    renewed = stage.get(worker)
    assert (renewed.idle_deadline_at, renewed.checkpoint_requested_at) == (stage.now + 60 * MINUTE, None)
    assert renewed.runtime_deadline_at == worker.runtime_deadline_at


def test_a_worker_that_runs_too_long_is_ended_however_active(stage: Stage) -> None:
    worker = stage.run(runtime_ms=2 * HOUR)
    end = stage.now + 2 * HOUR
    stage.it.noted(worker.incarnation, end - 1)
    (due,) = stage.it.due(end)
    assert due.reason == StopReason.RUNTIME
    assert stage.it.expire(due, end - 1) == []
    assert stage.it.expire(due, end) == [stage.get(worker)]


def test_a_pause_keeps_what_was_left_of_the_idle_window_and_the_runtime(stage: Stage) -> None:
    worker = stage.run(runtime_ms=2 * HOUR)
    begun = stage.now
    (ask,) = stage.it.due(begun + 50 * MINUTE)
    stage.it.checkpoint(ask, begun + 50 * MINUTE)
    stage.it.paused(worker.incarnation, begun + 52 * MINUTE)
    paused = stage.get(worker)
    assert (paused.state, paused.runtime_left_ms, paused.runtime_deadline_at) == (State.PAUSED, 68 * MINUTE, None)
    assert stage.it.next_due() is None
    assert stage.it.due(begun + 3 * DAY) == []
    assert stage.it.renew(PERSON, None, begun + DAY) == []
    with refused(Code.CONFLICT):
        stage.it.renew(PERSON, worker.id, begun + DAY)
    stage.it.resumed(worker.incarnation, begun + 52 * MINUTE + DAY)
    resumed = stage.get(worker)
    assert (resumed.state, resumed.idle_deadline_at) == (State.REGISTERING, begun + 60 * MINUTE + DAY)
    assert resumed.checkpoint_deadline_at == begun + 75 * MINUTE + DAY
    assert resumed.runtime_deadline_at == begun + 2 * HOUR + DAY
    assert stage.it.next_due() == begun + 55 * MINUTE + DAY


def test_a_pause_goes_back_to_what_it_interrupted(stage: Stage) -> None:
    worker = stage.run()
    stage.it.notify(inside(worker), "working", stage.now)
    with refused(Code.CONFLICT):
        stage.it.resume(PERSON, worker.id, stage.now)
    stage.it.paused(worker.incarnation, stage.now)
    assert stage.it.pause(PERSON, worker.id, stage.now).state == State.PAUSED
    stage.it.unreachable(worker.incarnation, "manager_unreachable", stage.now)
    stage.it.reattached(worker.incarnation, stage.now)
    assert stage.get(worker).state == State.PAUSED
    assert stage.it.resume(PERSON, worker.id, stage.now).state == State.PAUSED
    stage.it.resumed(worker.incarnation, stage.now)
    assert stage.get(worker).state == State.WORKING


def test_a_grace_of_nothing_is_no_end(stage: Stage) -> None:
    worker = stage.run(idle_ms=60 * MINUTE, grace_ms=0, warning_ms=10 * MINUTE, runtime_ms=0)
    assert (worker.idle_deadline_at, worker.checkpoint_deadline_at) == (stage.now + 60 * MINUTE, None)
    (due,) = stage.it.due(stage.now + DAY)
    assert due.work == Work.CHECKPOINT and stage.it.checkpoint(due, stage.now + DAY) is not None
    assert stage.it.next_due() == stage.now + DAY + 5 * MINUTE


@pytest.mark.parametrize("field", ["idle_ms", "warning_ms", "grace_ms", "runtime_ms"])
def test_a_duration_is_never_negative(stage: Stage, field: str) -> None:
    with refused(Code.INVALID, field):
        stage.start(PERSON, **{field: -1})


def test_a_warning_fits_into_the_idle_window(stage: Stage) -> None:
    assert stage.start(idle_ms=4 * MINUTE).warning_ms == 2 * MINUTE
    with refused(Code.INVALID, "warning_ms"):
        stage.start(idle_ms=4 * MINUTE, warning_ms=5 * MINUTE)
