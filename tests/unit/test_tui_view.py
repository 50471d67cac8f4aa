# SPDX-License-Identifier: Apache-2.0
"""What is shown of a run: who works, who is waited for, and numbers that a person can read."""

from __future__ import annotations

from datetime import UTC, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration import rows
from agent_intercom.tui import view
from agent_intercom.tui.view import Life, Now, Tone, View
from tests.unit.tuistage import FACTS, event, role, snapshot, used, works


def shown(*roles: dict[str, Any], life: Life = Life.LIVE, **keys: Any) -> View:
    return view.make(snapshot(*roles, **keys), FACTS, [], life, UTC)


def now(*roles: dict[str, Any], **keys: Any) -> Now:
    return shown(*roles, **keys).now


def test_roles_come_in_the_order_of_the_work() -> None:
    names = ["reviewer", "custom-b", "implementer", "django", "custom-a", "probe", "playwright"]
    found = [each.name for each in shown(*map(role, names)).roles]
    assert found == ["implementer", "reviewer", "probe", "playwright", "django", "custom-a", "custom-b"]


def test_a_role_in_words() -> None:
    row = works(
        "implementer",
        "implementation",
        3,
        generation=2,
        activity="streaming",
        total_tokens=1_234,
        latest_assignment_usage=used(56_789),
        context_percent=41.6,
    )
    (found,) = shown(row).roles
    assert (found.link, found.state, found.work) == ("up g2", "active", "r3 implementation")
    assert (found.model, found.thinking) == ("anthropic/claude-opus-4.5", "high")
    assert (found.total, found.latest, found.context, found.flags) == ("1.2k", "+56.8k", "42%", "")
    assert (found.phase, found.tone) == ("writing", Tone.ACTIVE)


def test_what_is_not_known_is_empty() -> None:
    (found,) = shown(role("custom-a", state="disconnected", connected=False, latest_assignment_usage=used(None))).roles
    assert (found.link, found.work, found.model, found.thinking) == ("down g1", "", "", "")
    assert (found.latest, found.context, found.phase) == ("", "", "")


def test_snapshots_of_older_brokers_lack_keys() -> None:
    row = works("implementer", "plan")
    for key in ("activity", "activity_sequence", "activity_at", "latest_assignment_usage", "assignment_guardrails"):
        del row[key]
    found = snapshot(row)
    del found["workflow"]["implementation_flow"]
    made = view.make(found, FACTS._replace(profile=None, protocol=None), [], Life.LIVE)
    assert made.now == Now("implementer", "plan r1", 0, "", Tone.ACTIVE)
    assert (made.flow, made.profile, made.protocol) == ("", "", "")


@pytest.mark.parametrize(
    ("levels", "over", "flags", "tone"),
    [
        ([], False, "", Tone.WARNING),
        ([], True, "!", Tone.WARNING),
        (["warning"], False, "G~", Tone.WARNING),
        (["warning", "hard"], True, "! G!", Tone.ERROR),
        (["hard"], False, "G!", Tone.ERROR),
    ],
)
def test_flags(levels: list[str], over: bool, flags: str, tone: Tone) -> None:
    row = role("probe", soft_budget_exceeded=over, assignment_guardrails=[{"level": level} for level in levels])
    (found,) = shown(row).roles
    assert (found.flags, found.flag_tone) == (flags, tone)


# Who works, and who is waited for.

AWAY = {"state": "disconnected", "connected": False}
OWED = {"round": 1, "kind": "review", "state": "delivering"}
TAKEN = {"round": 1, "kind": "review", "state": "accepted"}


def test_one_works() -> None:
    found = now(works("implementer", "implementation", 2, activity="tool", activity_sequence=4), role("reviewer"))
    assert found == Now("implementer", "implementation r2, using a tool", 4, "", Tone.ACTIVE)


def test_a_role_whose_kind_is_its_name_is_named_once() -> None:
    assert now(works("probe", "probe"))[:2] == ("probe", "r1")


def test_several_work_and_the_one_that_moved_last_speaks() -> None:
    early = works("implementer", "implementation", activity="thinking", activity_at="2026-08-01T12:00:00+00:00")
    late = works("probe", "probe", activity="tool", activity_at="2026-08-01T12:00:09+00:00", activity_sequence=2)
    silent = works("django", "django", activity_sequence=3)
    assert now(early, late, silent) == Now("probe + implementer + django", "r1, using a tool", 5, "", Tone.ACTIVE)


@pytest.mark.parametrize(
    ("state", "roles", "waiting", "tone"),
    [
        ("connecting", [role("reviewer", **AWAY), role("probe")], "waiting for reviewer to connect", Tone.PLAIN),
        ("starting", [role("reviewer")], "waiting for the broker", Tone.PLAIN),
        ("initializing", [role("reviewer"), role("implementer")], "", Tone.PLAIN),
        (
            "active",
            [role("reviewer", state="active", assignment=OWED)],
            "waiting for reviewer to take the work",
            Tone.ACTIVE,
        ),
        ("active", [role("reviewer", **AWAY, assignment=TAKEN)], "waiting for reviewer to connect", Tone.ACTIVE),
        (
            "active",
            [role("reviewer", state="restarting", assignment=TAKEN)],
            "waiting for reviewer to be replaced",
            Tone.ACTIVE,
        ),
        ("active", [role("implementer"), role("reviewer", **AWAY)], "waiting for reviewer to connect", Tone.ACTIVE),
        ("active", [role("implementer"), role("reviewer")], "", Tone.ACTIVE),
        ("ready", [role("implementer")], "approved; nothing is waited for", Tone.SUCCESS),
        (
            "needs_attention",
            [role("implementer", state="waiting", assignment=TAKEN)],
            "waiting for a person: implementer stopped without a report",
            Tone.WARNING,
        ),
        ("needs_attention", [role("implementer")], "waiting for a person", Tone.WARNING),
        (
            "uncertain",
            [role("implementer", state="uncertain"), role("probe", state="uncertain")],
            "waiting for a person: what implementer, probe did is uncertain",
            Tone.ERROR,
        ),
        ("uncertain", [role("implementer")], "waiting for a person: what a role did is uncertain", Tone.ERROR),
    ],
)
def test_who_is_waited_for(state: str, roles: list[dict[str, Any]], waiting: str, tone: Tone) -> None:
    assert now(*roles, state=state) == Now("", "", 0, waiting, tone)


@pytest.mark.parametrize(("pending", "said"), [(3, True), (None, False)])
def test_a_limit_of_rounds_waits_for_a_person(pending: int | None, said: bool) -> None:
    found = snapshot(role("implementer"), state="needs_attention")
    found["workflow"]["continuation"] = {"version": 1, "max_repair_rounds": 1, "pending_repair_round": pending}
    waiting = view.make(found, FACTS, [], Life.LIVE).now.waiting
    assert waiting.startswith("waiting for a person") and ("limit of repair rounds" in waiting) is said


def test_one_works_and_another_is_waited_for() -> None:
    found = now(works("implementer", "implementation"), role("probe", **AWAY, assignment=TAKEN), role("reviewer"))
    assert (found.worker, found.waiting, found.tone) == ("implementer", "waiting for probe to connect", Tone.ACTIVE)


def test_one_that_is_paused_waits_for_a_person() -> None:
    found = snapshot(works("implementer", "implementation", activity="tool"), role("reviewer"))
    made = view.make(found, FACTS, [], Life.LIVE, paused=["implementer"])
    assert made.now == Now("", "", 0, "waiting for a person: implementer paused", Tone.WARNING)
    assert (made.roles[0].state, made.roles[0].phase, made.roles[0].tone) == ("paused", "", Tone.WARNING)
    made = view.make(found, FACTS, [], Life.LIVE, paused=["reviewer"])
    assert (made.now.worker, made.now.waiting, made.roles[1].state) == ("implementer", "", "paused")
    assert view.make(found, FACTS, [], Life.STOPPED, paused=["implementer"]).roles[0].state == "active"


def test_nobody_works_in_a_run_that_is_stopped() -> None:
    """Whatever the database says: it keeps the last that was known."""
    made = shown(works("implementer", "plan"), role("reviewer"), life=Life.STOPPED)
    assert made.now == Now("", "", 0, "nothing is waited for", Tone.MUTED)
    assert [each.link for each in made.roles] == ["down g1", "down g1"]
    assert {each.tone for each in made.roles} == {made.tone} == {Tone.MUTED}
    assert (made.state, made.roles[0].state) == ("active", "active")


def test_that_a_run_cannot_be_read_takes_nothing_away() -> None:
    made = shown(works("implementer", "plan"), round=7)
    again = view.unreadable(made)
    assert not again.available and again._replace(available=True) == made
    nothing = view.make(None, FACTS, [], Life.LIVE)
    assert not nothing.available and (nothing.session, nothing.state, nothing.roles) == (FACTS.session, "", ())


# Budgets and numbers.


def test_the_budget_of_the_run() -> None:
    made = shown(role("probe"), total_tokens=700_000, soft_total_tokens=600_000, soft_total_budget_exceeded=True)
    assert (made.total, made.limit, made.over_budget) == ("700k", "600k", True)
    made = shown(role("probe"), total_tokens=700_000, soft_total_tokens=0)
    assert (made.total, made.limit, made.over_budget) == ("700k", "", False)


@pytest.mark.parametrize(
    ("number", "short"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.0k"),
        (1_049, "1.0k"),
        (99_949, "99.9k"),
        (99_950, "100k"),
        (999_499, "999k"),
        (999_500, "1.0M"),
        (12_345_678, "12.3M"),
        (999_500_000, "1.0G"),
        (999_499_999_999, "999G"),
        (999_500_000_000, "1.0T"),
        (2**63 - 1, "9223372.0T"),
    ],
)
def test_counts_are_short(number: int, short: str) -> None:
    assert view.count(number) == short


@given(st.integers(0, 10**12))
def test_a_count_is_near_and_fits_its_column(number: int) -> None:
    short = view.count(number)
    sizes = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    value = float(short[:-1]) * sizes[short[-1]] if short[-1] in sizes else float(short)
    assert len(short) <= 5 and abs(value - number) <= number * 0.05


# Events.


def test_an_event_in_words() -> None:
    row = event(61, "worker_handover_uncertain", "uncertain", role="probe", round=2)
    assert view.event(row, UTC) == ("12:01:01", "worker handover uncertain", "probe", "r2", "uncertain", Tone.ERROR)
    assert view.event(event(1, "workflow_active", "active"), UTC)[2:] == ("", "", "active", Tone.PLAIN)


@pytest.mark.parametrize(
    ("status", "tone"),
    [
        ("approved", Tone.SUCCESS),
        ("pass", Tone.SUCCESS),
        ("ready", Tone.SUCCESS),
        ("changes_requested", Tone.WARNING),
        ("needs_attention", Tone.WARNING),
        ("warning", Tone.WARNING),
        ("hard", Tone.ERROR),
        ("uncertain", Tone.ERROR),
        ("fail", Tone.ERROR),
        ("delivered", Tone.PLAIN),
        ("something_new", Tone.PLAIN),
    ],
)
def test_what_a_status_means(status: str, tone: Tone) -> None:
    assert view.event(event(1, status=status), UTC).tone is tone


def test_the_newest_are_shown() -> None:
    made = view.make(snapshot(role("probe")), FACTS, [event(n) for n in range(130)], Life.LIVE, UTC)
    assert [each.time for each in made.events] == [f"12:{n // 60:02}:{n % 60:02}" for n in range(30, 130)]


def test_of_signs_of_life_the_newest_of_a_role_is_left() -> None:
    def sign(number: int, role: str) -> rows.Event:
        return event(number, view.PROGRESS, "tool", role=role)

    found = [sign(1, "probe"), event(2), sign(3, "reviewer"), sign(4, "probe"), event(5), sign(6, "probe")]
    assert [each.sequence for each in view.folded(found)] == [2, 3, 5, 6]


@pytest.mark.parametrize("status", ["accepted", "uncertain", "conflict"])
def test_a_command_is_told_by_what_it_was(status: str) -> None:
    row = event(1, "control_command", status, role="reviewer", delivery_id="a" * 32)
    told = view.event(row, UTC, {"a" * 32: "send"})
    assert told.what == "command: send"
    assert told.status.split(":")[0] == {
        "accepted": "accepted", "uncertain": "not handed over", "conflict": "not taken"
    }[status]  # fmt: skip
    assert view.event(row, UTC).what == "control command"


def test_who_is_over_a_budget_is_marked() -> None:
    made = view.make(snapshot(role("probe"), role("reviewer")), FACTS, [], Life.LIVE, UTC, over=["run", "probe"])
    assert made.over_budget and [each.flags for each in made.roles] == ["", "!"]


@pytest.mark.parametrize(
    ("timestamp", "time"),
    [
        ("2026-08-01T12:00:00.000000+00:00", "14:00:00"),
        ("2026-08-01T23:30:00Z", "01:30:00"),
        ("yesterday", ""),
        ("", ""),
        ("9999-12-31T23:59:59+00:00", ""),
    ],
)
def test_times_are_those_of_the_reader(timestamp: str, time: str) -> None:
    assert view.moment(timestamp, timezone(timedelta(hours=2))) == time
