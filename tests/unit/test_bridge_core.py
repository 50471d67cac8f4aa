# SPDX-License-Identifier: Apache-2.0
"""The bridge's rules one by one: connections, refusals, messages, reports, progress, guardrails, ends."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from agent_intercom.workers.bridge import core, desk, events
from tests.unit.bridgestage import Stage

USED: dict[str, Any] = {
    "input": 10,
    "output": 20,
    "cacheRead": 30,
    "cacheWrite": 40,
    "cost": {"total": 0.1},
    "providerCalls": 2,
}


def stage(**thresholds: dict[str, float]) -> Stage:
    """A worker that the broker has taken."""
    made = Stage(thresholds)
    made.settle()
    return made


def at_work(**thresholds: dict[str, float]) -> Stage:
    """A worker whose command runs."""
    made = stage(**thresholds)
    made.context("baseline", "The task.")
    made.assign()
    made.settle()
    return made


def kinds(made: Stage, since: int = 0) -> list[str]:
    return [request.kind for request in made.requests[since:]]


def test_a_connection_that_cannot_be_made_is_tried_after_times_that_double_up_to_five_seconds() -> None:
    made, waited = Stage(), []
    for _ in range(8):
        made.refuse()
        before = made.now
        made.tick()
        waited.append(made.now - before)
    assert waited == [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]
    made.settle()
    made.drop()
    before = made.now
    made.tick()
    assert made.now - before == 100 and made.wanted


def test_an_assignment_is_acknowledged_begun_told_and_ended_by_its_report() -> None:
    made = at_work()
    assert kinds(made) == ["hello", "lifecycle", "ack", "ack", "lifecycle"]
    assert made.state == "active" and made.notified == ["ready", "working"]
    (text,) = made.texts
    assert text.index("The task.") < text.index(f"Do {made.active}.")
    ticket = made.report()
    made.settle()
    assert made.replies[ticket]["status"] == "accepted" and made.state == "idle"
    assert made.notified[-1] == "ready" and made.signals == []


def test_a_connection_that_ended_is_greeted_with_what_was_not_answered_and_with_what_is_true() -> None:
    made = at_work()
    made.drop()
    made.settle()
    assert made.state == "active"
    made.context("run_state", "They say.")
    ticket = made.report()
    made.drop()
    since = len(made.requests)
    made.settle()
    assert kinds(made, since) == ["hello", "ack", "ack", "report", "lifecycle"]
    assert made.replies[ticket]["status"] == "accepted"


def test_a_report_whose_answer_was_lost_is_a_duplicate_and_counts() -> None:
    made = at_work()
    ticket = made.report()
    assert made.request is not None and made.request.kind == "report"
    made._reported(made.request.keys)
    made.drop()
    made.settle()
    assert made.replies[ticket]["status"] == "duplicate" and made.kept().work is None


def test_a_worker_without_a_report_waits_and_only_what_triggers_runs_the_command_again() -> None:
    made = at_work()
    made.end()
    made.settle()
    assert made.state == "waiting" and made.child is None
    made.context("operator_message", "Remember this.")
    made.settle()
    assert made.child is None
    made.context("operator_message", "Now go on.", trigger=True)
    made.settle()
    assert made.child is not None and made.state == "active"
    assert "Remember this." in made.texts[-1] and made.texts[-1].index("Now go on.") < made.texts[-1].index("Do ")


@pytest.mark.parametrize(("deliver_as", "again"), [("steer", False), ("followUp", True), (None, True)])
def test_a_message_comes_to_a_command_that_runs_and_a_follow_up_is_acted_on_after_it(
    deliver_as: str | None, again: bool
) -> None:
    made = at_work()
    made.context("operator_message", "Words.", True, deliver_as)
    assert [(each.number, each.deliver_as) for each in made.handed] == [(1, deliver_as or "followUp")]
    made.settle()
    made.end()
    assert (made.child is not None) is again


def test_an_abort_ends_the_command_with_sigterm_and_after_five_seconds_with_sigkill() -> None:
    made = at_work()
    made.abort()
    assert made.signals == [signal.SIGTERM]
    made.settle()
    assert made.state == "active"
    made.tick(core.KILL_MS - 1)
    assert made.signals == [signal.SIGTERM]
    made.tick(1)
    assert made.signals == [signal.SIGTERM, signal.SIGKILL]
    made.end()
    made.settle()
    assert made.state == "waiting" and made.child is None


def test_an_abort_takes_back_what_was_to_be_acted_on_after_the_command_and_later_words_do_not_wait() -> None:
    made = at_work()
    made.context("operator_message", "Then this.", True, "followUp")
    made.abort()
    made.end()
    assert made.child is None
    made.context("operator_message", "Now this.", True)
    made.abort()
    made.context("operator_message", "Now that.", True, "steer")
    assert len(made.handed) == 1
    made.end()
    assert made.child is not None and "Now that." in made.texts[-1]


def test_a_command_that_goes_on_after_its_report_is_ended() -> None:
    made = at_work()
    made.report()
    made.settle()
    made.assign()
    made.settle()
    assert made.state == "active" and made.child != made.active
    made.tick(core.LINGER_MS)
    assert made.signals == [signal.SIGTERM]
    made.end()
    assert made.child == made.active


@pytest.mark.parametrize("code", ["invalid_protocol", "forbidden"])
def test_a_report_that_the_broker_refuses_is_not_said_again_and_the_work_stays_open(code: str) -> None:
    made = at_work()
    ticket = made.report()
    made.answer(code)
    answer = made.replies[ticket]
    assert (answer["ok"], answer["code"], answer["by"]) == (False, code, "broker")
    since = len(made.requests)
    made.settle()
    assert "report" not in kinds(made, since) and made.kept().work is not None and made.child is not None


def test_work_that_the_broker_does_not_know_is_forgotten_and_its_command_ended() -> None:
    made = at_work()
    ticket = made.report()
    made.active = None
    made.answer("conflict")
    assert made.replies[ticket]["code"] == "conflict" and made.signals == [signal.SIGTERM]
    made.settle()
    assert made.kept().work is None and made.state == "idle"
    assert made.linked, "it has connected again"


def test_a_conflict_about_progress_leaves_the_connection() -> None:
    made = at_work()
    ticket = made.progress()
    made.active = None
    made.answer("conflict")
    assert made.replies[ticket]["code"] == "conflict" and made.linked and made.signals == [signal.SIGTERM]


def test_what_the_broker_failed_at_is_said_again() -> None:
    made = at_work()
    ticket = made.report()
    made.answer("broker_uncertain")
    assert ticket in made.waiting
    made.settle()
    assert made.replies[ticket]["status"] == "accepted"


@pytest.mark.parametrize("how", ["silent", "unauthorized"])
def test_a_worker_that_is_turned_away_looks_which_generation_is_wanted_and_leaves_for_another(how: str) -> None:
    made = at_work()
    made.drop()
    made.tick()
    made.connect()
    if how == "silent":
        made.drop()
    else:
        made.answer("unauthorized")
    assert made.looks == 1
    made.step(events.Looked(None))
    made.step(events.Looked(1))
    assert made.status is None
    disk = made.disk
    made.step(events.Looked(2))
    assert made.status == core.REPLACED and made.signals == [signal.SIGKILL] and made.disk is disk


def test_a_run_that_has_ended_ends_its_worker() -> None:
    made = at_work()
    made.drop()
    made.tick()
    made.refuse(gone=True)
    assert made.status == core.ENDED and made.signals == [signal.SIGKILL]


def test_who_is_told_to_end_ends_the_command_first() -> None:
    made = at_work()
    made.step(events.Terminated())
    assert made.status is None and made.signals == [signal.SIGTERM]
    made.end()
    assert made.status == 128 + signal.SIGTERM
    idle = stage()
    idle.step(events.Terminated())
    assert idle.status == 128 + signal.SIGTERM


def test_after_a_kill_work_that_was_begun_waits_and_work_that_was_not_begins() -> None:
    begun = at_work()
    begun.crash()
    begun.settle()
    assert begun.child is None and begun.state == "waiting"
    lingering = at_work()
    lingering.report()
    lingering.settle()
    lingering.assign()
    lingering.crash()
    assert lingering.child == lingering.active
    lingering.settle()
    assert lingering.deliveries[lingering.active or ""] in lingering.acked


def test_a_report_that_was_kept_survives_a_kill() -> None:
    made = at_work()
    made.report()
    made.crash()
    made.settle()
    assert len(made.accepted) == 1 and made.state == "idle"


def test_work_that_is_handed_over_again_goes_on_or_begins_again() -> None:
    made = at_work()
    made.redeliver()
    made.settle()
    assert len(made.texts) == 1
    made.end()
    made.redeliver()
    assert len(made.texts) == 2
    since = len(made.requests)
    made.send(made.active or "")
    made.settle()
    assert (made.requests[since + 1].keys["status"], len(made.texts)) == ("duplicate", 2)


def test_who_reports_is_told_after_a_while_that_the_report_is_kept_and_not_accepted() -> None:
    made = at_work()
    made.drop()
    ticket = made.report()
    made.tick(desk.PATIENCE_MS)
    answer = made.replies[ticket]
    assert (answer["ok"], answer["code"], answer["kept"]) == (False, "not_accepted_yet", True)
    made.settle()
    assert len(made.accepted) == 1


def test_a_report_that_waits_for_its_answer_is_not_replaced() -> None:
    made = at_work()
    first, same, other = made.report(), made.report(), made.report(summary="Otherwise.")
    assert made.replies[other]["code"] == "conflict" and made.waiting == {first, same}
    made.settle()
    assert made.replies[first] == made.replies[same]


def test_a_report_on_what_was_reported_before_is_answered_by_the_broker() -> None:
    made = at_work()
    about = made.active
    made.report()
    made.settle()
    ticket = made.report(about, "Otherwise.")
    made.settle()
    assert made.replies[ticket]["status"] == "duplicate"
    unknown, nothing = made.report("f" * 32), made.report()
    assert made.replies[unknown]["code"] == made.replies[nothing]["code"] == "conflict"


@pytest.mark.parametrize(
    ("members", "code", "field"),
    [
        ({"verdict": "approved"}, "forbidden", "verdict"),
        ({"kind": "review"}, "forbidden", "kind"),
        ({"kind": "plan"}, "forbidden", "kind"),
        ({"changed_paths": ["/etc"]}, "invalid_protocol", "changed_paths"),
        ({"more": 1}, "invalid_protocol", "report"),
    ],
)
def test_what_the_broker_would_refuse_is_refused_before_it_is_sent(members: Any, code: str, field: str) -> None:
    made = at_work()
    ticket = made.report(members=members)
    answer = made.replies[ticket]
    assert (answer["code"], answer["field"], answer["by"]) == (code, field, "bridge")
    assert made.linked and made.kept().report is None


def test_progress_is_told_when_the_phase_changes_and_else_every_two_seconds() -> None:
    made = at_work()
    since = len(made.requests)
    tickets = [made.progress("tool") for _ in range(1)]
    made.settle()
    tickets += [made.progress("tool"), made.progress("tool")]
    made.settle()
    assert kinds(made, since) == ["progress"]
    assert [made.replies[ticket]["status"] for ticket in tickets] == ["recorded", "noted", "noted"]
    changed = made.progress("thinking")
    made.settle()
    assert made.replies[changed]["status"] == "recorded" and kinds(made, since) == ["progress"] * 2
    made.progress("thinking")
    made.tick()
    assert kinds(made, since) == ["progress"] * 3
    made.settle()
    wrong = made.progress("dancing")
    assert made.replies[wrong]["code"] == "invalid_protocol"


def test_usage_is_of_the_role_and_of_the_assignment_over_all_commands_that_ran() -> None:
    made = at_work()
    made.progress(usage={**USED, "contextTokens": 70})
    made.settle()
    made.report(usage={**USED, "output": 21, "contextTokens": 50})
    made.settle()
    first = next(request for request in made.requests if request.kind == "report").keys["usage"]
    assert first["cumulative"]["output"] == first["assignment"]["output"] == 21
    assert first["assignment"]["peakContextTokens"] == 70 and "peakContextTokens" not in first["cumulative"]
    made.end()
    made.assign()
    made.settle()
    made.report(usage=USED)
    made.settle()
    second = [request for request in made.requests if request.kind == "report"][-1].keys["usage"]
    assert (second["cumulative"]["output"], second["assignment"]["output"]) == (41, 20)
    assert (second["cumulative"]["cost"], second["assignment"]["cost"]) == ({"total": 0.2}, {"total": 0.1})
    assert second["cumulative"]["providerCalls"] == 4 and "contextTokens" not in second["cumulative"]


def test_without_usage_there_is_none() -> None:
    made = at_work()
    made.report()
    made.settle()
    assert "usage" not in next(request for request in made.requests if request.kind == "report").keys
    wrong = at_work()
    ticket = wrong.report(usage={"input": 1})
    assert wrong.replies[ticket]["code"] == "invalid_protocol" and wrong.kept().report is None


def test_each_threshold_is_told_once_for_an_assignment() -> None:
    made = at_work(warning={"provider_calls": 2, "context_percent": 50.5}, hard={"provider_calls": 5})
    since = len(made.requests)
    made.progress(usage={**USED, "providerCalls": 1, "contextPercent": 50})
    made.settle()
    assert "guardrail" not in kinds(made, since)
    made.progress("thinking", usage={**USED, "contextPercent": 50.5})
    made.settle()
    ticket = made.progress("tool", usage={**USED, "providerCalls": 6, "contextPercent": 60})
    made.drop()
    made.settle()
    told = [request.keys for request in made.requests[since:] if request.kind == "guardrail"]
    found = {(each["level"], each["metric"], each["observed"], each["threshold"]) for each in told}
    assert found == {
        ("warning", "context_percent", 50.5, 50.5),
        ("warning", "provider_calls", 2, 2),
        ("hard", "provider_calls", 6, 5),
    }
    # The last of them was asked again, because its answer was lost.
    assert len(told) == 4 and made.replies[ticket]["status"] == "noted"
    made.crash()
    made.settle()
    assert len([request for request in made.requests if request.kind == "guardrail"]) == 4


def test_a_broker_that_does_not_answer_is_connected_to_again() -> None:
    made = Stage()
    made.connect()
    made.tick(core.HELLO_MS)
    assert not made.linked
    made.settle()
    made.assign()
    made.tick(core.ANSWER_MS)
    assert not made.linked
    made.settle()
    assert made.state == "active"


def test_a_command_that_ends_without_a_report_is_told_to_persons() -> None:
    made = at_work()
    made.end(7)
    assert made.silent == [events.Silent("implementation", 1, 7)]
    made.context("operator_message", "Go on.", trigger=True)
    made.report()
    made.settle()
    made.end(0)
    assert len(made.silent) == 1, "it has reported"


def test_a_report_is_left_for_persons_when_it_counts_and_after_a_crash_again() -> None:
    made = at_work()
    made.report(summary="Done.")
    assert made.published == []
    while made.request is None or made.request.kind != "report":
        made.answer()
    before = made.disk
    made.answer()
    assert made.published == [events.Publish(1, "implementation", {"kind": "implementation", "summary": "Done."})]
    # It was killed before it knew that the broker has it.
    made.disk = before
    made.crash()
    made.settle()
    assert made.published[1:] == made.published[:1]


def test_a_report_that_is_refused_is_not_left() -> None:
    made = at_work()
    made.report()
    while made.request is None or made.request.kind != "report":
        made.answer()
    made.answer("invalid_protocol")
    made.settle()
    assert made.published == []
