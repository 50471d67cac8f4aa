# SPDX-License-Identifier: Apache-2.0
"""Rows of a run for the tests of its database, and a run to put them into."""

from __future__ import annotations

from pathlib import Path

import apsw

from agent_intercom.orchestration import contract, rows
from agent_intercom.orchestration import store as store_module

NOW = "2026-01-02T03:04:05.678901+00:00"
META = {"control_token": "c" * 32, "soft_role_tokens": "100000", "soft_total_tokens": "300000"}


def role(name: str, **fields: object) -> rows.Role:
    given_fields: dict[str, object] = {
        "role": name,
        "auth_token": "a" * 32,
        "state": "disconnected",
        "usage": rows.Usage(provider_calls=0),
        "updated_at": NOW,
    }
    return rows.Role(**(given_fields | fields))  # type: ignore[arg-type]


def assignment(name: str, **fields: object) -> rows.Assignment:
    given_fields: dict[str, object] = {
        "id": name,
        "role": "implementer",
        "round": 1,
        "kind": "implementation",
        "state": "delivering",
        "delivery_id": "d" + name,
        "created_at": NOW,
        "updated_at": NOW,
    }
    return rows.Assignment(**(given_fields | fields))  # type: ignore[arg-type]


def report(name: str, assignment_id: str, usage: rows.AssignmentUsage | None = None, **fields: object) -> rows.Report:
    given_fields: dict[str, object] = {
        "id": name,
        "assignment_id": assignment_id,
        "role": "implementer",
        "round": 1,
        "kind": "implementation",
        "verdict": "approved",
        "summary_chars": 1,
        "changed_path_count": 2,
        "check_count": 3,
        "finding_count": 4,
        "risk_count": 5,
        "limitation_count": 6,
        "usage": usage,
        "created_at": NOW,
    }
    return rows.Report(**(given_fields | fields))  # type: ignore[arg-type]


def command(name: str, status: str = "accepted", **fields: object) -> rows.Command:
    given_fields: dict[str, object] = {
        "id": name,
        "action": "send",
        "role": "reviewer",
        "delivery": "steer",
        "status": status,
        "received_at": NOW,
        "updated_at": NOW,
    }
    return rows.Command(**(given_fields | fields))  # type: ignore[arg-type]


def event(sequence: int, **fields: object) -> rows.Event:
    given_fields: dict[str, object] = {
        "sequence": sequence,
        "timestamp": NOW,
        "event": "worker_lifecycle",
        "status": "idle",
    }
    return rows.Event(**(given_fields | fields))  # type: ignore[arg-type]


FULL_USAGE = rows.AssignmentUsage(
    provider_calls=1,
    input_tokens=2,
    output_tokens=3,
    cache_read_tokens=4,
    cache_write_tokens=contract.MAX_INTEGER,
    reasoning_tokens=6,
    cost_total=0.1,
    context_tokens=8,
    context_window=9,
    context_percent=12.5,
    peak_context_tokens=11,
)
FIRST: list[rows.Change] = [
    role("implementer", state="active", active_assignment_id="a8"),
    assignment("a8"),
    event(8, role="implementer", round=1, assignment_id="a8", delivery_id="da8"),
    rows.Meta(key="workflow_state", value="initializing"),
]
SECOND: list[rows.Change] = [
    assignment("a8", state="completed"),
    report("r8", "a8", FULL_USAGE),
    role("implementer", state="idle"),
    command("c8"),
    event(9),
    rows.Meta(key="workflow_state", value="ready"),
]
"""Two batches that go into every database here, fresh or migrated."""

EVERY_KIND: list[rows.Change] = [
    role("implementer", connected=True, active_assignment_id="a1", generation=7, activity="thinking", activity_at=NOW),
    assignment("a1", boundary_effective=True),
    assignment("a2"),
    assignment("a1", state="completed", boundary_effective=True),
    report("r1", "a1", FULL_USAGE),
    report("r2", "a2"),
    command("c1"),
    event(2, role="implementer", round=1, assignment_id="a1", delivery_id="da1"),
    event(3),
    rows.Guardrail(
        assignment_id="a1",
        role="implementer",
        level="hard",
        metric="tokens",
        observed=4.5,
        threshold=1.5,
        created_at=NOW,
    ),
    rows.Activation(role="probe", round=1, decision="run", rule_id="probe-risk", forced=True, created_at=NOW),
    rows.Meta(key="workflow_state", value="active"),
    rows.Meta(key="updated_at", value="later"),
]


def make(path: Path | str, vfs: str | None = None) -> str:
    """A new run's database at `path`, with all roles."""
    store_module.create(str(path), META, [role(name) for name in contract.ROLES], NOW, vfs)
    return str(path)


def dump(path: str) -> list[tuple[object, ...]]:
    """Every row of every table, and where SQLite stands with its own counting."""
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        return [(table, *row) for table in tables for row in db.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid")]
    finally:
        db.close()
