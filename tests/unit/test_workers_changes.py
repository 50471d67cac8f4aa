# SPDX-License-Identifier: Apache-2.0
"""How many workers there may be, and what a store is given of what happens to them."""

from __future__ import annotations

import pytest

from agent_intercom.workers.contract import Code, Limits
from agent_intercom.workers.lifecycle import reached
from agent_intercom.workers.records import Grant
from agent_intercom.workers.terms import Wanted
from tests.unit.workerstage import FOREIGN, PERSON, WIDE, Stage, inside, refused

MINUTE = 60_000


@pytest.fixture
def stage() -> Stage:
    return Stage()


# Limits


def test_no_more_workers_are_live_than_there_may_be() -> None:
    stage = Stage(Limits(live=3, live_in_run=2))
    stage.start(run="u1", role="one", generation=1)
    stage.start(run="u1", role="two", generation=1)
    with refused(Code.LIMIT, "live_in_run"):
        stage.start(run="u1", role="three", generation=1)
    last = stage.run()
    with refused(Code.LIMIT, "live"):
        stage.start(FOREIGN)
    stage.end(last)
    stage.start(FOREIGN)


def test_no_more_workers_begin_in_a_minute_than_may() -> None:
    stage = Stage(Limits(starts=2, starts_ms=MINUTE))
    for _ in range(2):
        stage.start()
        stage.now += 1
    with refused(Code.LIMIT, "starts"):
        stage.start()
    stage.now += MINUTE - 2
    stage.start()


# What is stored


def test_a_change_that_cannot_be_stored_was_never_made(stage: Stage) -> None:
    parent = stage.run(grant=WIDE)
    stage.run(inside(parent), name="child")
    stage.it.take()
    before = (stage.it.live(), stage.it.events(parent.id, 99))
    stage.it.stop(PERSON, parent.id, stage.now)
    new = stage.start(name="new", key="k")
    stage.it.revert(stage.it.take())
    assert (stage.it.live(), stage.it.events(parent.id, 99)) == before
    assert stage.it.get(new.id) is None
    assert not stage.it.take()
    assert stage.it.start(PERSON, Wanted("command", name="new", key="k"), stage.now).repeated is False


def test_facts_that_could_not_be_stored_are_given_again(stage: Stage) -> None:
    worker = stage.run()
    first = stage.it.take()
    stage.it.keep(first)
    stage.end(worker)
    second = stage.it.take()
    assert second.workers == (stage.get(worker),)
    assert second.incarnations == first.incarnations
    assert [event.kind for event in second.events] == ["provisioning", "placed", "started", "stopped"]


def test_a_request_that_is_undone_leaves_what_was_kept(stage: Stage) -> None:
    worker = stage.run()
    stage.it.keep(stage.it.take())
    stage.start(name="refused")
    stage.it.revert(stage.it.take())
    kept = stage.it.take()
    assert (kept.workers, kept.removed) == ((worker,), ())
    assert [event.kind for event in kept.events] == ["provisioning", "placed", "started"]
    assert not stage.it.take()


def test_events_say_what_happened_and_the_last_ones_are_kept() -> None:
    stage = Stage(Limits(events=3))
    worker = stage.end(stage.run())
    assert [event.kind for event in stage.it.events(worker.id, 9)] == ["placed", "started", "stopped"]
    assert [event.kind for event in stage.it.events(worker.id, 1)] == ["stopped"]


def test_what_changes_nothing_about_a_state_does_not_begin_it_anew(stage: Stage) -> None:
    worker = stage.run(idle_ms=60 * MINUTE, warning_ms=10 * MINUTE, grace_ms=MINUTE)
    begun = stage.now
    stage.now += 50 * MINUTE
    (due,) = stage.it.due(stage.now)
    stage.it.checkpoint(due, stage.now)
    stage.it.rename(PERSON, worker.id, "other", stage.now)
    (renewed,) = stage.it.renew(PERSON, worker.id, stage.now)
    assert (renewed.entered_at, renewed.updated_at) == (begun, stage.now)
    working = stage.it.notify(inside(worker), "working", stage.now)
    assert working.entered_at == stage.now
    stage.now += MINUTE
    assert stage.it.notify(inside(worker), "working", stage.now).entered_at == working.entered_at
    assert stage.it.stop(PERSON, worker.id, stage.now).worker.entered_at == stage.now
    fenced = stage.now
    stage.now += MINUTE
    stage.it.stop_failed(worker.incarnation, Code.STOP_FAILED, stage.now)
    assert stage.get(worker).entered_at == fenced
    assert stage.end(worker).entered_at == stage.now
    stage.now += MINUTE
    ended = stage.it.restart(PERSON, worker.id, stage.now).worker
    assert (ended.state, ended.entered_at) == ("stopped", stage.now - MINUTE)
    assert stage.it.again(PERSON, worker.id, worker.incarnation, stage.now).entered_at == stage.now


def test_waiting_knows_what_it_waits_for(stage: Stage) -> None:
    worker = stage.run()
    assert not reached(worker, "ready")
    assert reached(worker, "registering")
    waiting = stage.it.notify(inside(worker), "waiting", stage.now)
    assert reached(waiting, "ready")
    assert reached(waiting, "idle")
    assert reached(stage.end(worker), "end")
    with refused(Code.INVALID, "until"):
        reached(worker, "later")


def test_a_grant_says_something_sensible(stage: Stage) -> None:
    for grant, field in (
        (Grant(children=0, descendants=1), "grant.children"),
        (Grant(children=2, descendants=1), "grant.children"),
        (Grant(children=1, descendants=10_001), "grant.descendants"),
        (Grant(children=1, descendants=1, depth=33), "grant.depth"),
        (Grant(children=1, descendants=1, depth=0), "grant.depth"),
        (Grant(children=1, descendants=1, expires_at=2**53 + 1), "grant.expires_at"),
    ):
        with refused(Code.INVALID, field):
            stage.start(grant=grant)
