# SPDX-License-Identifier: Apache-2.0
"""A worker that may have missed its baseline gets it again, or the run is uncertain: nobody works without a task."""

from __future__ import annotations

from tests.unit.runstage import Frame, Stage


def begun() -> Stage:
    """A run that has just begun: nobody has acknowledged anything."""
    stage = Stage(["implementer", "reviewer"])
    stage.hello("implementer")
    stage.hello("reviewer")
    return stage


def baselines(stage: Stage, role: str) -> list[Frame]:
    """The baselines that the role's present connection was sent."""
    return [frame for frame in stage.frames[stage.workers[role]] if frame.get("kind") == "baseline"]


def test_a_baseline_that_was_lost_with_its_connection_comes_again_under_its_id() -> None:
    stage = begun()
    (first,) = baselines(stage, "reviewer")
    stage.leave("reviewer")
    stage.hello("reviewer")
    assert baselines(stage, "reviewer") == [first]
    stage.ack("reviewer", first["id"], "duplicate")
    stage.leave("reviewer")
    stage.hello("reviewer")
    assert baselines(stage, "reviewer") == []


def test_an_accepted_assignment_proves_the_baseline_before_it() -> None:
    stage = begun()
    stage.accept("implementer")
    stage.leave("implementer")
    stage.hello("implementer")
    assert baselines(stage, "implementer") == []
    assert stage.kinds_sent("implementer")[-1] == "implementation"


def test_a_baseline_that_nobody_has_any_more_makes_the_run_uncertain() -> None:
    stage = begun()
    stage.accept("implementer")
    stage.crash(remembers=False)
    stage.hello("implementer")
    assert stage.workflow == "active"
    stage.hello("reviewer")
    assert stage.workflow == "active", "it has nothing to do yet"
    stage.report("implementer")
    assert (stage.workflow, stage.role_state("reviewer")) == ("uncertain", "uncertain")
    assert stage.current("reviewer") is None
    assert stage.database.meta["owed"] == '{"reviewer":[1,"review"]}'


def test_an_operator_has_the_work_done_without_the_baseline() -> None:
    stage = begun()
    stage.accept("implementer")
    stage.crash(remembers=False)
    stage.hello("implementer")
    stage.hello("reviewer")
    stage.report("implementer")
    assert stage.control("redeliver", "reviewer")["status"] == "accepted"
    assert stage.workflow == "active"
    stage.work("reviewer", "approved")
    assert stage.workflow == "ready"


def test_redelivered_work_follows_the_baseline_that_was_lost() -> None:
    stage = begun()
    stage.leave("implementer")
    stage.hello("implementer")
    assert stage.workflow == "uncertain"
    assert stage.kinds_sent("implementer") == ["response"]
    assert stage.control("redeliver", "implementer")["status"] == "accepted"
    assert stage.kinds_sent("implementer") == ["response", "baseline", "implementation"]


def test_a_report_proves_the_baseline_too() -> None:
    stage = Stage(["implementer", "reviewer"], flow="phased")
    stage.all_come()
    stage.engine.workflow.state.unread["implementer"] = ""
    stage.leave("implementer")
    stage.hello("implementer")
    assert stage.workflow == "uncertain"
    stage.report("implementer")
    assert stage.kinds_sent("implementer")[-2:] == ["implementation", "response"]
    assert stage.database.meta["unread"] == "[]"
