# SPDX-License-Identifier: Apache-2.0
"""Who a run waits for: one rule and one wording for `status`, `list`, the dashboard and `watch`."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.orchestration import standing
from agent_intercom.orchestration.contract import RoleState, Workflow
from agent_intercom.tui import layout, view
from agent_intercom.tui.text import Style
from agent_intercom.tui.view import Life
from tests.unit.tuistage import FACTS, role, snapshot, works

AWAY = {"state": "disconnected", "connected": False}


def work(state: str = "accepted") -> dict[str, Any]:
    return {"assignment": {"round": 2, "kind": "review", "state": state}}


def paused(*roles: dict[str, Any], state: str = "needs_attention") -> dict[str, Any]:
    shown = snapshot(*roles, state=state)
    shown["workflow"]["continuation"] = {"version": 1, "max_repair_rounds": 1, "pending_repair_round": 3}
    return shown


def what(shown: dict[str, Any]) -> list[tuple[str | None, str]]:
    return [(each.role, each.what) for each in standing.awaited(shown)]


@pytest.mark.parametrize(
    ("state", "fields", "awaited"),
    [
        ("connecting", AWAY, "connection"),
        ("starting", {}, "broker"),
        ("connecting", {}, "broker"),
        ("initializing", {}, None),
        ("active", {"state": "active", **work()}, "report"),
        ("active", work(), "report"),
        ("active", {"state": "active", **work("delivering")}, "acceptance"),
        ("active", {**AWAY, **work()}, "connection"),
        ("active", {"state": "active", "connected": False, **work()}, "connection"),
        ("active", {**AWAY}, "connection"),
        ("active", {}, None),
        ("active", {"state": "restarting", **work()}, "restart"),
        ("active", {"state": "recovering"}, "restart"),
        ("active", {"state": "waiting", **work()}, "message"),
        ("needs_attention", {"state": "waiting", **work()}, "message"),
        ("needs_attention", {}, "decision"),
        ("needs_attention", AWAY, "decision"),
        ("active", work("uncertain"), "redelivery"),
        ("uncertain", {"state": "uncertain"}, "redelivery"),
        ("uncertain", {}, "redelivery"),
        ("active", work("completed"), None),
        ("ready", AWAY, None),
    ],
)
def test_what_is_awaited_of_one(state: str, fields: dict[str, Any], awaited: str | None) -> None:
    found = standing.awaited(snapshot(role("implementer", **fields), role("reviewer"), state=state))
    assert [each.what for each in found] == ([] if awaited is None else [awaited])
    for each in found:
        nobody = each.what in {"broker", "decision"} or (awaited, fields) == ("redelivery", {})
        assert each.role == (None if nobody else "implementer")
        assert each.by_person is each.phrase.startswith("waiting for a person")


def test_who_is_away_without_work_is_not_waited_for_while_another_works() -> None:
    shown = snapshot(works("implementer", "implementation"), role("reviewer", **AWAY))
    assert what(shown) == [("implementer", "report")]


def test_what_persons_have_to_do_comes_first() -> None:
    shown = snapshot(
        role("implementer", **AWAY, **work()), works("probe", "probe"), role("reviewer", state="waiting", **work())
    )
    assert what(shown) == [("reviewer", "message"), ("probe", "report"), ("implementer", "connection")]


def test_who_is_waited_for_in_the_same_way_is_named_together() -> None:
    shown = snapshot(role("implementer", **AWAY), role("probe", **AWAY), role("reviewer"), state="connecting")
    assert standing.told(standing.awaited(shown)) == "waiting for implementer, probe to connect"
    shown = snapshot(works("implementer", "implementation"), role("reviewer", **AWAY, **work()))
    assert standing.told(standing.awaited(shown)) == "implementer at work; waiting for reviewer to connect"


def test_a_round_of_repair_waits_until_everybody_is_at_rest() -> None:
    assert what(paused(role("implementer", **AWAY), role("reviewer"))) == [("implementer", "continuation")]
    assert what(paused(works("implementer", "implementation"), role("reviewer"))) == [("implementer", "report")]
    assert what(paused(role("implementer", state="restarting"))) == [("implementer", "restart")]
    assert what(paused(role("implementer"), state="uncertain")) == [(None, "redelivery")]
    assert what(paused(role("implementer", state="idle", **work("completed")))) == [(None, "decision")]


def test_since_when() -> None:
    shown = snapshot(works("implementer", "implementation"), role("reviewer", **AWAY, **work()))
    begun = {"implementer": "then", "reviewer": "never"}
    assert [each.since for each in standing.awaited(shown, begun)] == ["then", shown["roles"][1]["updated_at"]]
    assert standing.awaited(shown)[0].since == shown["roles"][0]["updated_at"]


def states(of: type) -> list[str]:
    return [value for name, value in vars(of).items() if not name.startswith("_")]


@pytest.mark.parametrize("state", states(Workflow))
def test_the_dashboard_says_what_status_says(state: str) -> None:
    """Of every state of a role, with and without work, there or away."""
    assignments = [None, *(work(each)["assignment"] for each in ("delivering", "accepted", "completed", "uncertain"))]
    for role_state in states(RoleState):
        for assignment in assignments:
            for connected in (True, False):
                row = role("implementer", state=role_state, assignment=assignment, connected=connected)
                shown = snapshot(row, role("reviewer"), state=state)
                found = standing.awaited(shown)
                now = view.make(shown, FACTS, [], Life.LIVE).now
                assert (now.worker == "implementer") is any(each.what == standing.REPORT for each in found)
                others = standing.told(each for each in found if each.what != standing.REPORT)
                assert now.waiting == others or (not found and state == Workflow.READY)


def test_the_screen_has_the_words_of_the_list() -> None:
    shown = snapshot(role("implementer", **AWAY), role("reviewer"), state="connecting")
    lines = layout.render(view.make(shown, FACTS, [], Life.LIVE), 120, 30, Style(unicode=True, colour=False), "o")
    assert any(standing.told(standing.awaited(shown)) in line for line in lines)
