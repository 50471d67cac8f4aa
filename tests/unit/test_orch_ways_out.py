# SPDX-License-Identifier: Apache-2.0
"""Nothing stalls, and out of every doubt an operator's command leads on."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.contract import MAX_COMMANDS
from agent_intercom.orchestration.workflow.routing import Routing
from tests.unit.runstage import Stage


def active(*roles: str, **settings: Any) -> Stage:
    stage = Stage(roles or ("implementer", "reviewer"), **settings)
    stage.all_come()
    return stage


def informed(stage: Stage) -> Stage:
    """Every worker has acknowledged its baseline."""
    for role, number in stage.workers.items():
        for frame in stage.frames[number]:
            if frame.get("kind") == "baseline":
                stage.ack(role, frame["id"])
    return stage


@pytest.mark.parametrize("remembers", [True, False])
def test_a_fault_while_routing_makes_the_run_uncertain(monkeypatch: pytest.MonkeyPatch, remembers: bool) -> None:
    stage = informed(active())
    stage.accept("implementer")
    number = stage.workers["implementer"]
    with monkeypatch.context() as patch:
        patch.setattr(Routing, "route", lambda *_: 1 / 0)
        answers = stage.report("implementer")
        replayed = stage.replayed()
    assert [(frame["success"], frame["status"]) for frame in answers] == [(False, "broker_uncertain")]
    assert number in stage.ended
    assert stage.workflow == "uncertain"
    assert replayed.snapshot() == stage.engine.snapshot()
    if not remembers:
        stage.crash(remembers=False)
        stage.hello("reviewer")
    stage.hello("implementer")
    assert stage.control("redeliver", "implementer")["status"] == "accepted"
    stage.work("reviewer")
    assert stage.workflow == "ready"


def test_a_fault_while_a_verdict_is_routed_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = active()
    stage.work("implementer")
    stage.accept("reviewer")
    with monkeypatch.context() as patch:
        patch.setattr(Routing, "route", lambda *_: 1 / 0)
        stage.report("reviewer", "changes_requested")
    stage.hello("reviewer")
    stage.control("redeliver", "reviewer")
    assert (stage.workflow, stage.round) == ("active", 2)
    assert stage.current("implementer") is not None


def test_a_stranger_that_meets_a_fault_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = active()
    monkeypatch.setattr("agent_intercom.orchestration.parsing.first", lambda _: 1 / 0)
    assert stage.say(stage.connect(), {"type": "hello"}) == []
    assert stage.workflow == "active"


@pytest.mark.parametrize("lost", [True, False])
def test_a_doubt_before_the_start_leads_back_to_it(lost: bool) -> None:
    stage = Stage()
    stage.hello("reviewer")
    stage.restart("reviewer")
    if lost:
        stage.crash(remembers=False)
    else:
        stage.control("restart_failed", "reviewer")
    stage.all_come()
    assert stage.workflow == "uncertain"
    stage.control("redeliver", "reviewer")
    assert stage.workflow == "active"
    assert stage.kinds_sent("implementer")[-2:] == ["baseline", "implementation"]
    assert stage.kinds_sent("reviewer").count("baseline") == 1
    assert stage.startup is None


def test_redeliver_leaves_alone_who_works() -> None:
    stage = active("implementer", "reviewer", "probe")
    stage.accept("implementer")
    stage.leave("probe")
    stage.hello("probe")
    assert stage.workflow == "uncertain"
    assert stage.control("redeliver", "implementer")["status"] == "conflict"
    assert stage.control("redeliver", "probe")["status"] == "accepted"
    assert stage.workflow == "active"


def test_a_doubt_that_resolved_itself_is_ended_without_work_done_twice() -> None:
    stage = active()
    assignment = stage.current("implementer")
    assert assignment is not None
    stage.ack("implementer", assignment.delivery_id, "uncertain")
    stage.ack("implementer", assignment.delivery_id)
    before = len(stage.frames[stage.workers["implementer"]])
    assert stage.control("redeliver", "implementer")["status"] == "accepted"
    assert stage.workflow == "active"
    assert len(stage.frames[stage.workers["implementer"]]) == before


def test_who_waits_still_needs_attention_after_a_doubt() -> None:
    stage = active("implementer", "reviewer", "probe")
    stage.accept("probe")
    stage.leave("implementer")
    stage.hello("implementer")
    stage.lifecycle("probe", "waiting")
    stage.control("redeliver", "implementer")
    assert stage.workflow == "needs_attention"
    assert "without a report: probe" in stage.engine.workflow.status()
    stage.accept("implementer")
    assert stage.workflow == "needs_attention"
    stage.lifecycle("probe", "active")
    assert stage.workflow == "active"


def test_a_replacement_is_told_its_task_whatever_became_of_the_handover() -> None:
    stage = informed(active())
    stage.restart("implementer")
    stage.hello("implementer")
    stage.control("redeliver", "implementer")
    assert stage.kinds_sent("implementer") == ["response", "baseline", "implementation"]

    stage = informed(active())
    stage.restart("reviewer")
    stage.control("restart_failed", "reviewer")
    stage.work("implementer")
    stage.hello("reviewer")
    assert "review" not in stage.kinds_sent("reviewer"), "nobody has decided yet"
    stage.control("redeliver", "reviewer")
    kinds = stage.kinds_sent("reviewer")
    assert kinds.index("baseline") < kinds.index("review")


def test_redelivered_work_comes_with_the_run_state() -> None:
    stage = informed(active())
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    stage.leave("implementer")
    stage.hello("implementer")
    stage.control("redeliver", "implementer")
    assert stage.kinds_sent("implementer")[-2:] == ["run_state", "implementation"]


def test_a_full_registry_keeps_the_way_out() -> None:
    stage = active()
    for _ in range(MAX_COMMANDS):
        stage.control("abort", "reviewer")
    assert stage.send("implementer")["status"] == "conflict"
    stage.leave("implementer")
    stage.hello("implementer")
    assert stage.control("redeliver", "implementer")["status"] == "accepted"


def test_a_specialist_that_is_skipped_cannot_spoil_a_run_that_is_ready() -> None:
    stage = active("implementer", "reviewer", "playwright")
    stage.work("implementer", paths=["README.md"])
    stage.work("reviewer")
    stage.crash(remembers=False)
    stage.hello("playwright")
    assert stage.workflow == "ready"


def test_attention_ends_when_a_replacement_takes_the_work_up() -> None:
    stage = informed(active())
    stage.accept("implementer")
    stage.lifecycle("implementer", "waiting")
    stage.restart("implementer")
    stage.hello("implementer")
    stage.ack("implementer", stage.current("implementer").delivery_id)  # type: ignore[union-attr]
    assert (stage.workflow, stage.role_state("implementer")) == ("active", "active")


def test_the_status_names_who_is_in_doubt() -> None:
    stage = active()
    stage.leave("implementer")
    stage.hello("implementer")
    assert "in doubt: implementer" in stage.engine.workflow.status()


def test_what_was_initializing_when_its_broker_died_is_uncertain() -> None:
    stage = active()
    stage.database.meta["workflow_state"] = "initializing"
    stage.crash(remembers=False)
    assert stage.workflow == "uncertain"
    assert [event.status for event in stage.database.of(rows.Event)][-1] == "uncertain"


@pytest.mark.parametrize("verdict", ["approved", "changes_requested"])
def test_a_verdict_does_not_end_a_doubt(verdict: str) -> None:
    stage = active("implementer", "reviewer", "probe", task="Fix a typo in the readme")
    stage.work("implementer", paths=["README.md"])
    stage.lifecycle("probe", "idle")
    stage.accept("reviewer")
    stage.ack("reviewer", "0" * 32, "uncertain")
    stage.engine.workflow.state.roles["probe"].state = "uncertain"
    stage.engine.workflow._ledger.become_uncertain()
    stage.feed(4, 0)
    stage.report("reviewer", verdict)
    assert stage.workflow == "uncertain"
    stage.control("redeliver", "probe")
    assert stage.workflow == ("ready" if verdict == "approved" else "active")

