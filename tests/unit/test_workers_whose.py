# SPDX-License-Identifier: Apache-2.0
"""What whoever asks is told of workers that it may not, or not now, change."""

from __future__ import annotations

import pytest

from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from tests.unit.workerstage import OTHER, PERSON, SESSION, WIDE, Stage, inside, refused


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_who_may_not_change_a_worker_is_told_whose_it_is_and_to_adopt_only_what_it_can(stage: Stage) -> None:
    theirs, released, lead = stage.run(SESSION), stage.run(SESSION), stage.run(SESSION, grant=WIDE)
    child, ended = stage.run(inside(lead)), stage.end(stage.run(SESSION))
    stage.it.release(SESSION, released.id, stage.now)
    texts = {
        theirs.id: "the worker is somebody else's; adopt it",
        released.id: "the worker is nobody's since it was released; adopt it",
        child.id: "the worker is that of who started it, a worker",
        ended.id: "the worker is somebody else's, and has ended",
    }
    for worker, text in texts.items():
        with pytest.raises(WorkerError, match="^" + text + "$"):
            stage.it.restart(OTHER, worker, stage.now)
    with pytest.raises(WorkerError, match="has ended, and only one that lives can be adopted") as caught:
        stage.it.adopt(OTHER, ended.id, stage.now)
    assert caught.value.code == Code.NOT_LIVE
    stage.it.stop(SESSION, theirs.id, stage.now)
    with pytest.raises(WorkerError, match="somebody else's, and is being ended"):
        stage.it.rename(OTHER, theirs.id, "other", stage.now)


def test_what_a_renewal_leaves_out_is_told(stage: Stage) -> None:
    paused, stopped, other = stage.run(SESSION), stage.run(SESSION), stage.run(PERSON)
    for worker in (paused, other):
        stage.it.paused(worker.incarnation, stage.now)
    stage.it.stop(SESSION, stopped.id, stage.now)
    stage.end(stage.run(SESSION))
    assert stage.it.renew(SESSION, None, stage.now) == []
    assert {row.id for row in stage.it.standing(SESSION)} == {paused.id, stopped.id}


def test_only_a_person_overrides(stage: Stage) -> None:
    worker = stage.run()
    agent = SESSION._replace(override=True)
    for call in (
        lambda: stage.it.find(agent, worker.id),
        lambda: stage.it.list(agent, stage.now),
        lambda: stage.it.stop(agent, worker.id, stage.now),
        lambda: stage.it.restart(agent, worker.id, stage.now),
        lambda: stage.it.adopt(agent, worker.id, stage.now),
        lambda: stage.it.prune(agent, None, True, True, stage.now),
        lambda: stage.it.cleanup(agent, stage.now),
        lambda: stage.start(agent),
    ):
        with refused(Code.FORBIDDEN, "override"):
            call()
    assert stage.get(worker) == worker
    assert stage.it.stop(agent._replace(session=None), worker.id, stage.now).fenced
