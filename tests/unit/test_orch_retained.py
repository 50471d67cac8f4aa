# SPDX-License-Identifier: Apache-2.0
"""Workers that keep the context of their earlier assignments, and what they are told when."""

from __future__ import annotations

import pytest

from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.loading import load
from tests.unit.runstage import Database, Stage

RETAINED = {"implementer": "retain", "reviewer": "prune"}


def kinds_since(stage: Stage, role: str, before: int) -> list[str]:
    return stage.kinds_sent(role)[before:]


def test_every_assignment_comes_with_what_is_known_by_then() -> None:
    stage = Stage(worker_context=RETAINED)
    stage.all_come()
    sent = stage.frames[stage.workers["implementer"]]
    assert stage.kinds_sent("implementer")[-2:] == ["run_state", "implementation"]
    # Reports or not.
    assert "## " not in sent[-2]["content"]
    assert stage.kinds_sent("reviewer").count("run_state") == 0
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    assert stage.kinds_sent("implementer")[-2:] == ["run_state", "implementation"]
    assert sent[-2]["round"] == 2
    assert "Current round: 2" in sent[-2]["content"]
    assert "## reviewer · round 1" in sent[-2]["content"]


def test_nothing_comes_between_assignments() -> None:
    stage = Stage(("implementer", "reviewer", "probe"), forced=["probe"], worker_context={"implementer": "retain"})
    stage.all_come()
    stage.work("implementer")
    before = len(stage.kinds_sent("implementer"))
    stage.work("probe")
    assert not {"run_state", "implementation"} & set(kinds_since(stage, "implementer", before))
    assert "implementer" not in stage.engine.workflow.state.deferred
    stage.work("reviewer", "changes_requested")
    told = [kind for kind in kinds_since(stage, "implementer", before) if kind != "response"]
    assert told == ["run_state", "implementation"]


def test_a_replacement_is_told_what_is_known_by_then() -> None:
    stage = Stage(worker_context={"reviewer": "retain"})
    stage.all_come()
    stage.restart("reviewer")
    stage.hello("reviewer")
    assert stage.kinds_sent("reviewer") == ["response", "baseline", "run_state"]
    stage.work("implementer")
    assert stage.kinds_sent("reviewer")[-2:] == ["run_state", "review"]
    stage.accept("reviewer")
    stage.restart("reviewer")
    stage.hello("reviewer")
    assert stage.kinds_sent("reviewer") == ["response", "baseline", "run_state", "review"]
    assert "## implementer · round 1" in stage.frames[stage.workers["reviewer"]][2]["content"]


def test_a_worker_that_comes_back_is_told_nothing_new() -> None:
    stage = Stage(worker_context=RETAINED)
    stage.all_come()
    stage.accept("implementer")
    stage.leave("implementer")
    stage.hello("implementer")
    assert stage.kinds_sent("implementer") == ["response", "implementation"]


def test_what_is_owed_comes_with_it_too() -> None:
    stage = Stage(worker_context={"reviewer": "retain"})
    stage.all_come()
    stage.leave("reviewer")
    stage.work("implementer")
    stage.hello("reviewer")
    assert stage.kinds_sent("reviewer") == ["response", "run_state", "review"]


def test_what_is_redelivered_comes_with_it_too() -> None:
    stage = Stage(worker_context=RETAINED)
    stage.all_come()
    stage.leave("implementer")
    stage.hello("implementer")
    assert stage.workflow == "uncertain"
    stage.control("redeliver", "implementer")
    assert stage.kinds_sent("implementer")[-2:] == ["run_state", "implementation"]


@pytest.mark.parametrize("remembers", [True, False])
def test_a_message_that_reopens_a_run_comes_with_it_too(remembers: bool) -> None:
    stage = Stage(worker_context=RETAINED)
    stage.all_come()
    stage.work("implementer")
    stage.work("reviewer")
    stage.crash(remembers=remembers)
    if not remembers:
        for role in stage.roles:
            stage.hello(role)
    before = len(stage.kinds_sent("implementer"))
    stage.send("implementer", "once more")
    assert kinds_since(stage, "implementer", before) == ["run_state", "operator_message", "run_state", "implementation"]
    sent = stage.frames[stage.workers["implementer"]][before:]
    assert [frame["round"] for frame in sent] == [1, 2, 2, 2]


def test_the_way_of_others_is_as_it_was() -> None:
    plain, other = Stage(), Stage(worker_context={"implementer": "prune"})
    for stage in (plain, other):
        stage.all_come()
        stage.work("implementer")
        stage.work("reviewer", "changes_requested")
    for role in plain.roles:
        assert plain.kinds_sent(role) == other.kinds_sent(role)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", '{"version":1,"overrides":[]}', '{"version":1,"overrides":{"nobody":"retain"}}',
     '{"version":1,"overrides":{"probe":"keep"}}', '{"version":1,"overrides":{"probe":["retain"]}}',
     '{"version":1,"overrides":{},"more":1}', '{"version":0,"overrides":{}}'],
)  # fmt: skip
def test_a_policy_that_is_none(text: str) -> None:
    database = Database(("implementer", "reviewer"), "single", ())
    database.meta["worker_context_policy"] = text
    with pytest.raises(Refusal) as refused:
        load(database.retained(), session="team", project="/p", report_usage=True, startup=None, seed="s")
    assert refused.value.field == "worker_context_policy"
