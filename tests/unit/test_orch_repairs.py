# SPDX-License-Identifier: Apache-2.0
"""A run with a limit of repair rounds: it pauses there, and an operator's `continue` allows one round more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_intercom.orchestration import contract, rows
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.loading import load
from tests.unit.runstage import CONTROL, Database, Stage

LIMIT = '{"version":1,"max_repair_rounds":%s}'


def paused(limit: int = 0, *roles: str) -> Stage:
    """A run whose reviewer wants one round more than it may have."""
    stage = Stage(roles or ("implementer", "reviewer"), max_repair_rounds=limit)
    stage.all_come()
    for _ in range(limit + 1):
        stage.work("implementer")
        for role in stage.roles[2:]:
            if stage.current(role) is not None:
                stage.work(role)
        stage.work("reviewer", "changes_requested")
    return stage


def implementations(stage: Stage) -> list[int]:
    return [each.round for each in stage.database.of(rows.Assignment) if each.kind == "implementation"]


def go_on(stage: Stage, **more: Any) -> dict[str, Any]:
    return stage.control("continue", "implementer", **more)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_it_pauses_at_its_limit(limit: int) -> None:
    stage = paused(limit)
    assert (stage.workflow, stage.round) == ("needs_attention", limit + 2)
    assert implementations(stage) == list(range(1, limit + 2))
    assert stage.current("implementer") is None
    assert stage.database.meta["pending_repair_round"] == str(limit + 2)
    last = max(stage.database.of(rows.Event), key=lambda event: event.sequence if "cont" in event.event else 0)
    assert (last.event, last.status, last.round) == ("continuation_paused", "repair_round_limit", limit + 2)
    assert "limit of repair rounds" in stage.engine.workflow.status()


def test_without_a_limit_it_never_does() -> None:
    stage = Stage()
    stage.all_come()
    for _ in range(5):
        stage.work("implementer")
        stage.work("reviewer", "changes_requested")
    assert (stage.workflow, stage.round) == ("active", 6)
    assert "pending_repair_round" not in stage.database.meta
    assert go_on(stage)["status"] == "conflict"


def test_approval_at_the_limit_is_not_held_back() -> None:
    stage = Stage(max_repair_rounds=1)
    stage.all_come()
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    stage.work("implementer")
    stage.work("reviewer")
    assert stage.workflow == "ready"


def test_continue_allows_one_round_more() -> None:
    stage = paused(1)
    watching = stage.observe()
    answer = go_on(stage)
    assert (answer["status"], answer["success"], answer["duplicate"]) == ("accepted", True, False)
    assert (stage.workflow, stage.round) == ("active", 3)
    assert implementations(stage) == [1, 2, 3]
    assert stage.database.meta["continuation_policy"] == LIMIT % 2
    assert "pending_repair_round" not in stage.database.meta
    approved = next(each for each in stage.database.of(rows.Event) if each.event == "continuation_approved")
    assert (approved.role, approved.round, approved.delivery_id) == ("implementer", 3, answer["id"])
    assert [(frame["type"], frame["state"]) for frame in stage.frames[watching][-1:]] == [("workflow", "active")]
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    assert (stage.workflow, stage.database.meta["pending_repair_round"]) == ("needs_attention", "4")
    go_on(stage)
    stage.work("implementer")
    stage.work("reviewer")
    assert stage.workflow == "ready"


@pytest.mark.parametrize("remembers", [True, False])
def test_a_retried_continue_changes_nothing(remembers: bool) -> None:
    stage = paused()
    command = stage.fresh_id()
    assert go_on(stage, id=command)["duplicate"] is False
    before = (implementations(stage), dict(stage.database.meta))
    stage.crash(remembers=remembers)
    answer = go_on(stage, id=command)
    assert (answer["status"], answer["duplicate"]) == ("accepted", True)
    assert implementations(stage) == before[0]
    assert stage.database.meta["continuation_policy"] == before[1]["continuation_policy"] == LIMIT % 1


@pytest.mark.parametrize("remembers", [True, False])
def test_a_pause_outlives_its_broker(remembers: bool) -> None:
    stage = paused(1)
    stage.crash(remembers=remembers)
    assert (stage.workflow, stage.round) == ("needs_attention", 3)
    assert implementations(stage) == [1, 2]
    if not remembers:
        for role in stage.roles:
            stage.hello(role)
    assert implementations(stage) == [1, 2]
    assert go_on(stage)["status"] == "accepted"
    assert implementations(stage) == [1, 2, 3]


def test_nothing_but_continue_leads_on() -> None:
    stage = paused(0, "implementer", "reviewer", "probe")
    for role in stage.roles:
        assert stage.send(role)["status"] == "conflict"
        assert stage.control("redeliver", role)["status"] == "conflict"
        stage.lifecycle(role, "active")
        stage.lifecycle(role, "idle")
    stage.leave("implementer")
    stage.hello("implementer")
    assert (stage.workflow, implementations(stage)) == ("needs_attention", [1])


@pytest.mark.parametrize("state", ["active", "waiting", "uncertain"])
def test_continue_waits_for_quiet(state: str) -> None:
    stage = paused(0, "implementer", "reviewer", "probe")
    stage.lifecycle("probe", state)
    assert go_on(stage)["status"] == "conflict"
    assert stage.database.meta["pending_repair_round"] == "2"
    if state != "uncertain":
        stage.lifecycle("probe", "idle")
        assert go_on(stage)["status"] == "accepted"


def test_continue_waits_for_a_replacement() -> None:
    stage = paused()
    stage.restart("reviewer")
    assert go_on(stage)["status"] == "conflict"
    stage.hello("reviewer")
    assert go_on(stage)["status"] == "accepted"


@pytest.mark.parametrize("before", ["connecting", "active", "ready"])
def test_continue_without_a_pause(before: str) -> None:
    stage = Stage(max_repair_rounds=0)
    if before != "connecting":
        stage.all_come()
    if before == "ready":
        stage.work("implementer")
        stage.work("reviewer")
    assert stage.workflow == before
    assert go_on(stage)["status"] == "conflict"
    assert stage.workflow == before


def test_attention_is_no_pause() -> None:
    stage = Stage(max_repair_rounds=0)
    stage.all_come()
    stage.accept("implementer")
    stage.lifecycle("implementer", "waiting")
    assert stage.workflow == "needs_attention"
    assert go_on(stage)["status"] == "conflict"


def test_who_is_away_is_owed_the_round() -> None:
    stage = paused()
    stage.leave("implementer")
    assert go_on(stage)["status"] == "accepted"
    assert (stage.workflow, implementations(stage)) == ("active", [1])
    stage.crash(remembers=False)
    stage.hello("reviewer")
    stage.hello("implementer")
    assert implementations(stage) == [1, 2]
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    assert stage.workflow == "needs_attention"


def test_an_owed_round_is_not_a_second_one() -> None:
    stage = Stage(max_repair_rounds=1)
    stage.all_come()
    stage.work("implementer")
    stage.leave("implementer")
    stage.work("reviewer", "changes_requested")
    assert (stage.workflow, list(stage.engine.workflow.state.owed)) == ("active", ["implementer"])
    stage.hello("implementer")
    assert implementations(stage) == [1, 2]


def test_a_round_that_cannot_begin_is_uncertain() -> None:
    stage = Stage(max_repair_rounds=0)
    stage.all_come()
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    stage.restart("implementer")
    stage.crash(remembers=False)
    stage.hello("reviewer")
    stage.hello("implementer", generation=2)
    # Whether the replacement has its baseline is not known, and the run is uncertain for that.
    assert stage.workflow == "uncertain"
    assert go_on(stage)["status"] == "conflict"
    assert stage.control("redeliver", "implementer")["status"] == "accepted"
    assert (stage.workflow, stage.database.meta["pending_repair_round"]) == ("needs_attention", "2")
    assert implementations(stage) == [1]
    assert go_on(stage)["status"] == "accepted"
    assert implementations(stage) == [1, 2]


def test_an_approval_that_nobody_can_follow_says_so() -> None:
    stage = paused()
    stage.engine.workflow.state.unread["implementer"] = ""
    assert go_on(stage)["status"] == "accepted"
    assert stage.workflow == "uncertain"
    assert stage.events()[-1] == "continuation_uncertain"
    stage.control("redeliver", "implementer")
    assert (stage.workflow, implementations(stage)) == ("active", [1, 2])


def test_a_verdict_in_a_doubt_pauses_and_does_not_end_the_doubt() -> None:
    stage = Stage(("implementer", "reviewer", "probe"), max_repair_rounds=0, forced=["probe"])
    stage.all_come()
    stage.work("probe")
    stage.work("implementer")
    if stage.current("probe") is not None:
        stage.work("probe")
    stage.accept("reviewer")
    stage.restart("probe")
    stage.control("restart_failed", "probe")
    assert stage.workflow == "uncertain"
    stage.report("reviewer", "changes_requested")
    stage.lifecycle("reviewer", "idle")
    assert (stage.workflow, stage.round, stage.database.meta["pending_repair_round"]) == ("uncertain", 2, "2")
    stage.hello("probe")
    assert stage.control("redeliver", "probe")["status"] == "accepted"
    assert (stage.workflow, implementations(stage)) == ("needs_attention", [1])
    assert go_on(stage)["status"] == "accepted"


def test_a_run_that_is_reopened_keeps_to_its_limit() -> None:
    stage = Stage(max_repair_rounds=0)
    stage.all_come()
    stage.work("implementer")
    stage.work("reviewer")
    assert stage.send("implementer", "once more")["status"] == "accepted"
    assert (stage.workflow, stage.round) == ("needs_attention", 2)
    assert stage.kinds_sent("implementer")[-1] == "operator_message"
    go_on(stage)
    assert implementations(stage) == [1, 2]


def test_continue_is_taken_by_a_full_registry() -> None:
    stage = paused()
    commands = stage.engine.workflow.state.commands
    for number in range(contract.MAX_COMMANDS):
        known = rows.Command(
            id=f"f{number:031x}",
            action="abort",
            role="reviewer",
            delivery=None,
            status="accepted",
            received_at="then",
            updated_at="then",
        )
        commands[known.id] = known
    assert stage.control("abort", "reviewer")["status"] == "conflict"
    assert go_on(stage)["status"] == "accepted"
    assert go_on(stage)["status"] == "conflict"
    assert len(commands) == contract.MAX_COMMANDS + 1


def loaded(**meta: str) -> str:
    database = Database(("implementer", "reviewer"), "single", ())
    database.meta |= meta
    try:
        load(database.retained(), session="team", project="/p", report_usage=True, startup=None, seed="s")
    except Refusal as refusal:
        return refusal.field
    return ""


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "3", '{"version":1}', '{"version":true,"max_repair_rounds":1}', LIMIT % -1, LIMIT % "1.0",
     LIMIT % "true", LIMIT % '"1"', '{"version":2,"max_repair_rounds":1}', '{"version":1,"max_repair_rounds":1,"x":0}'],
)  # fmt: skip
def test_a_policy_that_is_none(text: str) -> None:
    assert loaded(continuation_policy=text) == "continuation_policy"


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1.0", "9999999999"])
def test_a_pending_round_that_is_none(text: str) -> None:
    assert loaded(pending_repair_round=text) == "pending_repair_round"


def test_policies_that_are_some() -> None:
    assert loaded() == ""
    assert loaded(continuation_policy=LIMIT % "null", pending_repair_round="2") == ""
    assert loaded(continuation_policy=LIMIT % 1_000_001) == ""


def test_no_observer_is_shown_that_a_broker_was_routing() -> None:
    stage = Stage()
    stage.all_come()
    stage.database.meta["workflow_state"] = "routing"
    stage.crash(remembers=False)
    assert (stage.workflow, stage.database.meta["workflow_state"]) == ("uncertain", "uncertain")
    watching = stage.observe()
    assert {frame["state"] for frame in stage.frames[watching] if frame["type"] == "snapshot"} == {"uncertain"}
    assert "routing" not in json.dumps(stage.frames)
    assert CONTROL not in json.dumps(stage.frames)
