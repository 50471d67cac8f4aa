# SPDX-License-Identifier: Apache-2.0
"""Restarts: what a worker could not be started with again does not end it, and nobody takes its place in between."""

from __future__ import annotations

import pytest

from agent_intercom.workers.contract import Code, Limits, State, StopReason
from agent_intercom.workers.records import Grant
from tests.unit.workerstage import PERSON, Stage, inside, refused


def test_a_restart_that_could_not_begin_ends_nothing() -> None:
    stage = Stage(Limits(starts=2))
    worker = stage.run(name="mine")
    stage.start()
    before = stage.get(worker)
    with refused(Code.LIMIT, "starts"):
        stage.it.restart(PERSON, worker.id, stage.now)
    assert stage.get(worker) == before


def test_a_restart_counts_as_a_start_when_it_is_asked_for() -> None:
    stage = Stage(Limits(starts=2))
    worker = stage.run()
    stage.it.restart(PERSON, worker.id, stage.now)
    stage.end(worker)
    with refused(Code.LIMIT, "starts"):
        stage.start()
    stage.it.again(PERSON, worker.id, worker.incarnation, stage.now)
    with refused(Code.LIMIT, "starts"):
        stage.start()


@pytest.mark.parametrize("ended_before", [True, False])
def test_a_restart_keeps_the_name_and_the_place_of_its_worker(ended_before: bool) -> None:
    stage = Stage(Limits(live=1))
    worker = stage.run(name="mine")
    if ended_before:
        stage.end(worker)
    stage.it.restart(PERSON, worker.id, stage.now)
    if not ended_before:
        stage.end(worker)
    with refused(Code.LIMIT, "live"):
        stage.start()
    stage.it._limits = Limits(live=2)
    with refused(Code.NAME_TAKEN, "name"):
        stage.start(name="Mine")
    stage.it._limits = Limits(live=1)
    again = stage.it.again(PERSON, worker.id, worker.incarnation, stage.now)
    assert (again.state, again.name) == (State.PROVISIONING, "mine")


@pytest.mark.parametrize("how", ["given up", "stopped", "reverted"])
def test_a_restart_that_is_over_keeps_nothing(how: str) -> None:
    stage = Stage(Limits(live=1))
    worker = stage.end(stage.run(name="mine"))
    stage.it.take()
    stage.it.restart(PERSON, worker.id, stage.now)
    if how == "given up":
        stage.it.given_up(worker.id, worker.incarnation)
    elif how == "stopped":
        stage.it.stop(PERSON, worker.id, stage.now)
    else:
        stage.it.revert(stage.it.take())
    stage.start(name="mine")
    with refused(Code.NAME_TAKEN if how == "given up" else Code.CONFLICT):
        stage.it._limits = Limits()
        stage.it.again(PERSON, worker.id, worker.incarnation, stage.now)


def test_a_restart_below_a_worker_keeps_its_part_of_the_grant() -> None:
    stage = Stage()
    parent = stage.run(grant=Grant(children=1, descendants=1))
    child = stage.run(inside(parent), name="child")
    stage.it.restart(inside(parent), child.id, stage.now)
    stage.end(child)
    with refused(Code.GRANT, "grant.children"):
        stage.start(inside(parent))
    assert stage.it.again(inside(parent), child.id, child.incarnation, stage.now).generation == 2


def test_what_an_earlier_service_had_under_way_keeps_nothing() -> None:
    stage = Stage()
    worker = stage.run(name="mine")
    stage.it.restart(PERSON, worker.id, stage.now)
    stage.end(worker)
    assert stage.get(worker).stop_reason == StopReason.RESTART
    stage.it._restarting.clear()
    stage.start(name="mine")
