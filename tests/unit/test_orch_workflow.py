# SPDX-License-Identifier: Apache-2.0
"""The transition table of section 4.10, row by row, and what sections 4.3 to 4.8 say around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent_intercom.orchestration import engine as kinds
from agent_intercom.orchestration import rows
from agent_intercom.wire.framing import pack
from tests.unit.runstage import CONTROL, Stage, report_body, usage

FIVE = ("implementer", "reviewer", "probe", "playwright", "django")


def shown(stage: Stage, observer: int) -> list[tuple[Any, ...]]:
    """What an observer was told since it was last asked, without its greeting."""
    told = []
    for frame in stage.frames[observer]:
        if frame["type"] == "workflow":
            told.append(("workflow", frame["state"], frame["round"]))
        elif frame["type"] == "lifecycle":
            told.append(("lifecycle", frame["role"], frame["state"]))
        elif frame["type"] == "report":
            told.append(("report", frame["role"], frame["round"]))
    stage.frames[observer].clear()
    return told


def active(roles: tuple[str, ...] = ("implementer", "reviewer"), **settings: Any) -> Stage:
    stage = Stage(roles, **settings)
    stage.all_come()
    return stage


def reviewing() -> Stage:
    stage = active()
    stage.work("implementer")
    return stage


def ready() -> Stage:
    stage = reviewing()
    stage.work("reviewer", "approved")
    return stage


def stopped() -> Stage:
    stage = active()
    stage.accept("implementer")
    stage.lifecycle("implementer", "waiting")
    return stage


def uncertain() -> Stage:
    stage = active()
    stage.leave("implementer")
    stage.hello("implementer")
    return stage


Step = Callable[[Stage], object]

TABLE: list[tuple[str, Callable[[], Stage], Step, str, int, list[tuple[Any, ...]]]] = [
    (
        "connecting, last bridge connects",
        Stage,
        lambda s: s.all_come(),
        "active",
        1,
        [("workflow", "active", 1)],
    ),
    (
        "active, implementation report",
        active,
        lambda s: s.report("implementer"),
        "active",
        1,
        [("report", "implementer", 1)],
    ),
    (
        "active, plan report",
        lambda: active(flow="phased"),
        lambda s: s.report("implementer"),
        "active",
        1,
        [("report", "implementer", 1)],
    ),
    (
        "active, changes requested",
        reviewing,
        lambda s: s.report("reviewer", "changes_requested"),
        "active",
        2,
        [("report", "reviewer", 1), ("workflow", "active", 2)],
    ),
    (
        "active, approved",
        reviewing,
        lambda s: s.report("reviewer", "approved"),
        "ready",
        1,
        [("report", "reviewer", 1), ("workflow", "ready", 1)],
    ),
    (
        "active, a worker waits",
        active,
        lambda s: s.lifecycle("implementer", "waiting"),
        "needs_attention",
        1,
        [("lifecycle", "implementer", "waiting"), ("workflow", "needs_attention", 1)],
    ),
    (
        "needs_attention, it works again",
        stopped,
        lambda s: s.lifecycle("implementer", "active"),
        "active",
        1,
        [("lifecycle", "implementer", "active"), ("workflow", "active", 1)],
    ),
    ("needs_attention, send to its owner", stopped, lambda s: s.send("implementer"), "needs_attention", 1, []),
    (
        "ready, send to the implementer",
        ready,
        lambda s: s.send("implementer"),
        "active",
        2,
        [("workflow", "active", 2)],
    ),
    ("ready, send to the reviewer", ready, lambda s: s.send("reviewer"), "ready", 1, []),
    (
        "any, uncertain acknowledgement",
        active,
        lambda s: s.ack("implementer", s.current("implementer").delivery_id, "uncertain"),  # type: ignore[union-attr]
        "uncertain",
        1,
        [("workflow", "uncertain", 1)],
    ),
    (
        "any, unprovable delivery on reconnect",
        active,
        lambda s: (s.leave("implementer"), s.hello("implementer")),
        "uncertain",
        1,
        [("workflow", "uncertain", 1)],
    ),
    (
        "any, handover failure",
        active,
        lambda s: (s.accept("implementer"), s.restart("implementer"), s.control("restart_failed", "implementer")),
        "uncertain",
        1,
        [("lifecycle", "implementer", "active"), ("workflow", "uncertain", 1)],
    ),
    (
        "any, lifecycle uncertain",
        active,
        lambda s: s.lifecycle("implementer", "uncertain"),
        "uncertain",
        1,
        [("lifecycle", "implementer", "uncertain"), ("workflow", "uncertain", 1)],
    ),
    (
        "ready, lifecycle uncertain",
        ready,
        lambda s: s.lifecycle("implementer", "uncertain"),
        "ready",
        1,
        [("lifecycle", "implementer", "uncertain")],
    ),
    ("uncertain, send", uncertain, lambda s: s.send("implementer"), "uncertain", 1, []),
    ("uncertain, abort", uncertain, lambda s: s.control("abort", "implementer"), "uncertain", 1, []),
    ("uncertain, restart", uncertain, lambda s: s.restart("implementer"), "uncertain", 1, []),
    (
        "uncertain, an operator decides",
        uncertain,
        lambda s: s.control("redeliver", "implementer"),
        "active",
        1,
        [("workflow", "active", 1)],
    ),
]


@pytest.mark.parametrize(
    ("make", "step", "state", "round", "told"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_transition(make: Callable[[], Stage], step: Step, state: str, round: int, told: list[tuple[Any, ...]]) -> None:
    stage = make()
    observer = stage.observe()
    shown(stage, observer)
    step(stage)
    assert (stage.workflow, stage.round) == (state, round)
    assert shown(stage, observer) == told
    assert stage.database.meta["workflow_state"] == state


def test_before_the_broker_a_run_is_starting() -> None:
    stage = Stage()
    assert stage.events() == ["broker_initialized", "broker_started"]
    assert stage.workflow == "connecting"


def test_start_hands_out_everything_in_order() -> None:
    stage = active(FIVE)
    assert stage.kinds_sent("implementer") == ["response", "baseline", "implementation"]
    assert stage.kinds_sent("probe") == ["response", "baseline", "probe"]
    for role in ("reviewer", "playwright", "django"):
        assert stage.kinds_sent(role) == ["response", "baseline"]
    started = stage.events().index("workflow_started")
    assert stage.events()[started:] == [
        "workflow_started",
        *["context_delivered"] * 5,
        "workflow_active",
        "specialist_activation",
        "assignment_created",
        "assignment_created",
    ]
    delivered = [event.role for event in stage.database.of(rows.Event) if event.event == "context_delivered"]
    assert delivered == sorted(FIVE)
    assert stage.startup is None


def test_nothing_starts_before_all_are_there() -> None:
    stage = Stage(FIVE)
    for role in FIVE[:-1]:
        stage.hello(role)
    assert stage.workflow == "connecting"
    stage.pass_time(60_000)
    assert "never came or away: django" in stage.engine.workflow.status()


def test_a_round_with_every_specialist() -> None:
    stage = active(FIVE)
    stage.work("implementer", paths=["app/models.py"])
    assert stage.current("reviewer") is None
    for role in ("playwright", "django"):
        stage.work(role)
    assert stage.current("reviewer") is None, "the initial probe is still at work"
    stage.work("probe")
    assert stage.current("reviewer") is not None
    stage.work("reviewer", "changes_requested")
    stage.work("implementer", paths=["README.md"])
    decisions = {(row.role, row.round): row.decision for row in stage.database.of(rows.Activation)}
    assert {role: decisions[role, 2] for role in FIVE[2:]} == dict.fromkeys(FIVE[2:], "skipped")
    stage.work("reviewer")
    assert stage.workflow == "ready"


def test_a_documentation_task_leaves_the_probe_alone() -> None:
    stage = active(FIVE, task="Fix a typo in the readme")
    assert stage.current("probe") is None
    stage.work("implementer", paths=["README.md"])
    assert stage.current("reviewer") is not None


def test_a_forced_specialist_reports_before_the_review() -> None:
    stage = active(FIVE, task="Fix a typo in the readme", forced=["playwright"])
    stage.work("implementer", paths=["README.md"])
    assert stage.current("reviewer") is None
    stage.work("playwright", "fail")
    assert stage.current("reviewer") is not None


def test_phased_goes_from_plan_to_implementation_in_the_same_round() -> None:
    stage = active(flow="phased")
    plan = stage.current("implementer")
    assert plan is not None and plan.kind == "plan"
    stage.accept("implementer")
    stage.report("implementer")
    following = stage.current("implementer")
    assert following is not None and (following.kind, following.round) == ("implementation", 1)
    kinds = [frame.get("kind") for frame in stage.frames[stage.workers["implementer"]] if "kind" in frame]
    assert kinds == ["baseline", "plan", "run_state", "implementation"]
    stage.work("implementer")
    stage.work("reviewer", "changes_requested")
    repair = stage.current("implementer")
    assert repair is not None and (repair.kind, repair.round) == ("implementation", 2)


def test_a_busy_recipient_gets_the_newest_run_state_with_its_next_assignment() -> None:
    stage = active(FIVE)
    stage.work("implementer", paths=["app/models.py"])
    stage.accept("probe")
    for role in ("playwright", "django"):
        stage.work(role)
    assert "run_state" not in stage.kinds_sent("probe")
    stage.work("probe")
    stage.work("reviewer", "changes_requested")
    stage.work("implementer", paths=["app/models.py"])
    kinds = stage.kinds_sent("probe")
    assert kinds[-3:].count("probe") == 1
    assert kinds[kinds.index("probe", 3) - 1] == "run_state"


def test_a_role_that_is_away_is_owed_its_assignment() -> None:
    stage = active()
    stage.leave("reviewer")
    stage.work("implementer")
    assert stage.database.meta["owed"] == '{"reviewer":[1,"review"]}'
    assert "work waits for reviewer" in stage.engine.workflow.status()
    stage.crash(remembers=False)
    stage.hello("implementer")
    stage.hello("reviewer")
    assert stage.kinds_sent("reviewer")[-1] == "review"
    assert stage.database.meta["owed"] == "{}"
    stage.work("reviewer")
    assert stage.workflow == "ready"


@pytest.mark.parametrize("status", ["accepted", "duplicate", "uncertain"])
def test_a_late_acknowledgement_changes_nothing_that_is_finished(status: str) -> None:
    stage = active()
    assignment = stage.current("implementer")
    assert assignment is not None
    stage.work("implementer")
    assert [frame["status"] for frame in stage.ack("implementer", assignment.delivery_id, status)] == ["recorded"]
    assert assignment.state == "completed"
    assert stage.workflow == "active"


def test_a_report_is_taken_once() -> None:
    stage = active()
    assignment = stage.current("implementer")
    assert assignment is not None
    stage.accept("implementer")
    body = report_body("implementation")
    first = {"assignment_id": assignment.id, "report": body, "usage": {"cumulative": usage(7), "assignment": usage(7)}}
    assert stage.worker("report", "implementer", **first)[-1]["status"] == "accepted"
    again = first | {"usage": {"cumulative": usage(9), "assignment": usage(9)}}
    assert stage.worker("report", "implementer", **again)[-1]["status"] == "duplicate"
    (report,) = stage.database.of(rows.Report)
    assert report.usage.provider_calls == 7
    assert stage.engine.workflow.state.roles["implementer"].usage.provider_calls == 7


def test_a_report_for_what_is_not_active_is_refused() -> None:
    stage = active()
    number = stage.workers["implementer"]
    answers = stage.worker("report", "implementer", assignment_id="0" * 32, report=report_body("implementation"))
    assert [(frame["success"], frame["status"]) for frame in answers] == [(False, "conflict")]
    assert number in stage.ended


def test_the_attention_of_one_is_not_ended_by_another() -> None:
    stage = active(FIVE)
    stage.accept("implementer")
    stage.accept("probe")
    stage.lifecycle("probe", "waiting")
    stage.lifecycle("implementer", "active")
    assert stage.workflow == "needs_attention"
    stage.lifecycle("probe", "active")
    assert stage.workflow == "active"


def test_a_waiting_worker_that_reconnects_still_waits() -> None:
    stage = stopped()
    stage.leave("implementer")
    stage.hello("implementer")
    stage.lifecycle("implementer", "idle")
    assert stage.role_state("implementer") == "waiting"
    assert stage.send("implementer")["status"] == "accepted"


@pytest.mark.parametrize("idle_first", [True, False])
def test_an_agent_that_stopped_while_nobody_listened_needs_attention(idle_first: bool) -> None:
    stage = active()
    stage.accept("implementer")
    assignment = stage.current("implementer")
    assert assignment is not None
    stage.leave("implementer")
    observer = stage.observe()
    stage.hello("implementer")
    shown(stage, observer)
    if idle_first:
        stage.lifecycle("implementer", "idle")
        assert stage.workflow == "active"
    stage.ack("implementer", assignment.delivery_id, "duplicate")
    if not idle_first:
        assert stage.workflow == "active"
        stage.lifecycle("implementer", "idle")
    assert (stage.workflow, stage.role_state("implementer")) == ("needs_attention", "waiting")
    assert shown(stage, observer)[-2:] == [("lifecycle", "implementer", "waiting"), ("workflow", "needs_attention", 1)]
    stage.lifecycle("implementer", "active")
    assert stage.workflow == "active"


def test_an_agent_that_still_works_when_it_is_back_needs_none() -> None:
    stage = active()
    stage.accept("implementer")
    assignment = stage.current("implementer")
    assert assignment is not None
    stage.leave("implementer")
    stage.hello("implementer")
    stage.lifecycle("implementer", "active")
    stage.ack("implementer", assignment.delivery_id, "duplicate")
    assert (stage.workflow, stage.role_state("implementer")) == ("active", "active")


def test_send_while_attention_is_needed_reaches_its_owner_only() -> None:
    stage = stopped()
    assert stage.send("reviewer")["status"] == "conflict"
    assert stage.send("implementer")["status"] == "accepted"
    assert stage.frames[stage.workers["implementer"]][-1]["trigger"] is True


def test_send_after_ready_opens_one_round_and_is_idempotent() -> None:
    stage = ready()
    number = stage.workers["implementer"]
    before = len(stage.frames[number])
    command = "f" * 32
    assert stage.send("implementer", id=command) == stage.send("implementer", id=command) | {"duplicate": False}
    sent = [(frame["kind"], frame["round"], frame["trigger"]) for frame in stage.frames[number][before:]]
    assert sent == [("run_state", 1, False), ("operator_message", 2, False), ("implementation", 2, True)]
    assert stage.round == 2
    assert stage.send("implementer", "another text", id=command)["status"] == "conflict"


def test_steer_and_follow_up_differ_where_the_worker_can_honour_it() -> None:
    stage = active()
    stage.send("reviewer", delivery="steer")
    stage.send("reviewer", delivery="follow-up")
    stage.send("reviewer")
    told = [frame.get("deliver_as") for frame in stage.frames[stage.workers["reviewer"]][-3:]]
    assert told == ["steer", "followUp", None]


def test_a_message_that_no_bridge_takes_is_refused_before_anything_is_recorded() -> None:
    stage = active()
    assert stage.send("implementer", "x" * 32_769)["status"] == "conflict"
    assert stage.send("implementer", "\U0001f600" * 16_385)["status"] == "conflict"
    assert not stage.database.of(rows.Command)
    assert stage.send("implementer", "  " + "x" * 32_768 + "\n")["status"] == "accepted"


def test_restart_hands_over_baseline_run_state_and_assignment() -> None:
    stage = active(flow="phased")
    stage.work("implementer")
    stage.accept("implementer")
    assignment = stage.current("implementer")
    assert assignment is not None
    old = assignment.delivery_id
    assert stage.restart("implementer")["status"] == "accepted"
    assert stage.role_state("implementer") == "restarting"
    assert stage.hello("implementer", generation=1) == []
    stage.hello("implementer")
    assert stage.kinds_sent("implementer") == ["response", "baseline", "run_state", "implementation"]
    assert assignment.delivery_id != old
    assert stage.role_state("implementer") == "recovering"
    stage.lifecycle("implementer", "idle")
    assert stage.role_state("implementer") == "recovering"
    stage.ack("implementer", assignment.delivery_id)
    assert stage.role_state("implementer") == "active"
    assert "worker_handover_recovered" in stage.events()
    assert stage.events().count("context_boundary") == 2


def test_a_replacement_that_breaks_off_is_uncertain() -> None:
    stage = active()
    stage.accept("implementer")
    stage.restart("implementer")
    stage.hello("implementer")
    stage.leave("implementer")
    assert (stage.workflow, stage.role_state("implementer")) == ("uncertain", "uncertain")


def test_restart_without_a_baseline_changes_nothing() -> None:
    stage = active()
    stage.accept("implementer")
    stage.crash(remembers=False)
    stage.hello("implementer")
    assert stage.restart("implementer")["status"] == "uncertain"
    assert stage.engine.workflow.state.roles["implementer"].generation == 1


def test_a_broker_that_remembers_goes_on_as_if_nothing_had_been() -> None:
    stage = active(FIVE)
    stage.accept("implementer")
    stage.crash(remembers=True)
    stage.report("implementer", paths=["app/models.py"])
    for role in ("probe", "playwright", "django"):
        stage.work(role)
    stage.crash(remembers=True)
    stage.work("reviewer")
    assert stage.workflow == "ready"
    observer = stage.observe()
    snapshot = stage.frames[observer][-1]
    assert (snapshot["report_count"], snapshot["report_replay_complete"]) == (5, True)


def test_a_broker_that_has_only_the_database_says_what_is_missing() -> None:
    stage = active()
    stage.work("implementer")
    stage.accept("reviewer")
    stage.crash(remembers=False)
    assert not any(row.connected for row in stage.database.of(rows.Role))
    observer = stage.observe()
    assert stage.frames[observer][-1]["report_replay_complete"] is False
    stage.all_come()
    assert stage.frames[stage.workers["reviewer"]][-1]["kind"] == "review"
    stage.lifecycle("reviewer", "active")
    stage.report("reviewer")
    assert stage.workflow == "ready"


def test_silent_connections_end_and_make_room() -> None:
    stage = Stage()
    first = stage.connect()
    for _ in range(stage.limits.unauthenticated):
        stage.connect()
    assert first in stage.ended
    second = stage.next_number - 1
    stage.pass_time(stage.limits.handshake_ms)
    assert second in stage.ended


def test_guardrails_are_recorded_once_per_level() -> None:
    stage = active()
    assignment = stage.current("implementer")
    assert assignment is not None
    facts = {"assignment_id": assignment.id, "level": "warning", "metric": "provider_calls", "observed": 6}
    told = [stage.worker("guardrail", "implementer", threshold=5, **facts)[-1]["status"] for _ in range(2)]
    assert told == ["recorded", "duplicate"]
    number = stage.workers["implementer"]
    assert stage.worker("guardrail", "implementer", threshold=4, **facts)[-1]["status"] == "forbidden"
    assert number in stage.ended


def test_progress_for_another_assignment_costs_no_connection() -> None:
    stage = active()
    answer = stage.worker("progress", "implementer", assignment_id="0" * 32, phase="tool", usage=None)[-1]
    assert (answer["success"], answer["status"]) == (False, "conflict")
    assert "implementer" in stage.workers


def test_observers_of_an_old_parent_see_no_state_that_it_does_not_know() -> None:
    stage = active()
    stage.engine.workflow.state.settings.report_usage = False
    stage.accept("implementer")
    stage.restart("implementer")
    observer = stage.observe()
    assert {"role": "implementer", "state": "disconnected"} in stage.frames[observer][-1]["roles"]
    stage.hello("implementer")
    stage.ack("implementer", stage.current("implementer").delivery_id)  # type: ignore[union-attr]
    stage.report("implementer")
    assert all("usage" not in frame for frame in stage.frames[observer])


def test_no_observer_is_shown_more_than_a_hundred_reports() -> None:
    stage = reviewing()
    observer = stage.observe()
    for _ in range(60):
        stage.work("reviewer", "changes_requested")
        stage.work("implementer")
    assert sum(frame["type"] == "report" for frame in stage.frames[observer]) == 100
    late = stage.observe()
    assert sum(frame["type"] == "report" for frame in stage.frames[late]) == 100
    assert stage.frames[late][-1]["report_replay_complete"] is False


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\2{}"])
def test_a_byte_of_an_observer_ends_it(data: bytes) -> None:
    stage = active()
    observer = stage.observe()
    stage.feed(kinds.RECEIVED, observer, data)
    assert observer in stage.ended
    frame = {"version": 1, "type": "observe", "token": CONTROL, "id": stage.fresh_id()}
    other = stage.connect()
    stage.feed(kinds.RECEIVED, other, pack(json.dumps(frame).encode()) + data)
    assert other in stage.ended
