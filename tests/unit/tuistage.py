# SPDX-License-Identifier: Apache-2.0
"""Snapshots, facts and events of a run for the tests of its views."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from hypothesis import strategies as st

from agent_intercom.orchestration import rows
from agent_intercom.tui import view
from agent_intercom.tui.view import Facts, Life, Model, View

ROLES = ("django", "implementer", "playwright", "probe", "reviewer")
FACTS = Facts(
    session="pi-shop-agents",
    project="/home/ada/src/shop",
    host="systemd",
    profile="balanced",
    protocol=1,
    models={name: Model("anthropic", "claude-opus-4.5", "high") for name in ROLES},
)


def role(name: str, **keys: Any) -> dict[str, Any]:
    """The row of a role in a snapshot: connected, idle and without any usage, with `keys` over that."""
    row: dict[str, Any] = {
        "role": name,
        "state": "idle",
        "connected": True,
        "generation": 1,
        "provider_calls": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "cache_read_tokens": 0,
        "cache_write_tokens": 0,
        "reasoning_tokens": None,
        "cost_total": 0.0,
        "context_tokens": None,
        "context_window": None,
        "context_percent": None,
        "activity": None,
        "activity_sequence": 0,
        "activity_at": None,
        "updated_at": "2026-08-01T12:00:00.000000+00:00",
        "assignment": None,
        "latest_assignment_usage": None,
        "assignment_guardrails": [],
        "total_tokens": 0,
        "soft_budget_exceeded": False,
    }
    assert keys.keys() <= row.keys()
    return {**row, **keys}


def works(name: str, kind: str, round_: int = 1, **keys: Any) -> dict[str, Any]:
    """A role that has taken its work and is at it."""
    assignment = {"round": round_, "kind": kind, "state": "accepted"}
    return role(name, **{"state": "active", "assignment": assignment, **keys})


def snapshot(*roles: dict[str, Any], state: str = "active", round: int = 1, **usage: Any) -> dict[str, Any]:
    """A snapshot with these roles."""
    totals = {
        "provider_calls": 0,
        "total_tokens": 0,
        "soft_role_tokens": 200_000,
        "soft_total_tokens": 600_000,
        "soft_total_budget_exceeded": False,
        "actual_provider_usage_only": True,
    }
    assert usage.keys() <= totals.keys()
    return {
        "workflow": {"state": state, "round": round, "implementation_flow": "single", "updated_at": "x"},
        "roles": sorted(roles, key=lambda row: row["role"]),
        "usage": {**totals, **usage},
    }


def used(tokens: int | None) -> dict[str, Any]:
    """The latest usage of a role."""
    return {"round": 1, "kind": "x", "usage": None if tokens is None else {"operational_tokens": tokens}}


def event(second: int, name: str = "report_accepted", status: str = "completed", **keys: Any) -> rows.Event:
    """An event, some seconds after noon."""
    minutes, seconds = divmod(second, 60)
    timestamp = f"2026-08-01T12:{minutes:02}:{seconds:02}.000000+00:00"
    return rows.Event(sequence=second, timestamp=timestamp, event=name, status=status, **keys)


def busy() -> View:
    """A run in its second round: somebody works, somebody is away, budgets are crossed."""
    found = snapshot(
        works(
            "implementer",
            "implementation",
            2,
            activity="tool",
            activity_sequence=5,
            total_tokens=612_000,
            soft_budget_exceeded=True,
            context_percent=71.4,
            assignment_guardrails=[{"level": "warning"}],
            latest_assignment_usage=used(120_345),
        ),
        role("reviewer", total_tokens=91_456, context_percent=12.0, latest_assignment_usage=used(91_456)),
        role("probe", latest_assignment_usage=used(None)),
        role("playwright", state="disconnected", connected=False),
        role("django", generation=3),
        round=2,
        total_tokens=703_456,
        soft_total_budget_exceeded=True,
    )
    events = [
        event(1, "worker_connected", "idle", role="reviewer", round=1),
        event(2, "workflow_active", "active", round=1),
        event(3, "assignment_created", "delivering", role="implementer", round=1),
        event(4, "assignment_delivery", "accepted", role="implementer", round=1),
        event(5, "report_accepted", "completed", role="implementer", round=1),
        event(6, "specialist_activation", "skipped", role="django", round=1),
        event(7, "report_accepted", "changes_requested", role="reviewer", round=1),
        event(8, "worker_disconnected", "disconnected", role="playwright", round=2),
        event(9, "assignment_guardrail", "warning", role="implementer", round=2),
        event(70, "worker_handover_uncertain", "uncertain", role="django", round=2),
    ]
    return view.make(found, FACTS, events, Life.LIVE, UTC)


NAMES = st.text(max_size=40)
STATES = ("starting", "connecting", "initializing", "active", "needs_attention", "ready", "uncertain", "new_state")
ROLE_STATES = ("disconnected", "idle", "active", "waiting", "uncertain", "restarting", "recovering", "new_state")
COUNTS = st.integers(0, 2**63 - 1)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any run that a database could tell of, and names that nobody should have chosen."""
    names = draw(st.lists(st.sampled_from([*ROLES, "custom-a", "custom-" + "x" * 25]), unique=True, max_size=5))
    roles = [draw(_roles(name)) for name in names]
    found = snapshot(
        *roles,
        state=draw(st.sampled_from(STATES)),
        round=draw(st.integers(1, 10**9)),
        total_tokens=draw(COUNTS),
        soft_total_tokens=draw(st.integers(0, 10**12)),
        soft_total_budget_exceeded=draw(st.booleans()),
    )
    facts = Facts(
        session=draw(NAMES),
        project=draw(NAMES),
        host=draw(st.sampled_from(["systemd", "tmux"])),
        profile=draw(st.none() | NAMES),
        protocol=draw(st.none() | st.just(1)),
        models={name: Model(draw(NAMES), draw(NAMES), "xhigh") for name in names if draw(st.booleans())},
    )
    events = draw(st.lists(st.builds(_event, NAMES, NAMES, st.none() | NAMES), max_size=4))
    life = draw(st.sampled_from(Life))
    made = view.make(draw(st.sampled_from([found, found, found, None])), facts, events, life, UTC)
    return view.unreadable(made) if draw(st.booleans()) else made


@st.composite
def _roles(draw: st.DrawFn, name: str) -> dict[str, Any]:
    assignment = {"round": draw(st.integers(1, 10**6)), "kind": draw(NAMES), "state": "accepted"}
    return role(
        name,
        state=draw(st.sampled_from(ROLE_STATES)),
        connected=draw(st.booleans()),
        generation=draw(st.integers(1, 10**9)),
        activity=draw(st.sampled_from([None, "thinking", "streaming", "tool", "reporting"])),
        activity_sequence=draw(st.integers(0, 10**9)),
        activity_at=draw(st.sampled_from([None, "2026-08-01T12:00:00.000000+00:00"])),
        assignment=draw(st.sampled_from([None, assignment])),
        latest_assignment_usage=draw(st.sampled_from([None, used(None), used(10**15)])),
        assignment_guardrails=[{"level": each} for each in draw(st.lists(st.sampled_from(["warning", "hard"])))],
        total_tokens=draw(COUNTS),
        soft_budget_exceeded=draw(st.booleans()),
        context_percent=draw(st.none() | st.floats(0, 10**6)),
    )


def _event(name: str, status: str, role: str | None) -> rows.Event:
    return event(1, name, status, role=role, round=1)
