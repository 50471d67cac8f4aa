# SPDX-License-Identifier: Apache-2.0
"""The broker snapshot, key by key, and the objects that answers about runs have in common (11.3, 11.4)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from agent_intercom.orchestration import contract, manifest, reader, rows, snapshot
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.store import Store
from agent_intercom.orchestration.workflow.routing import Routing
from tests.unit.orchrows import NOW, assignment, role
from tests.unit.orchruns import CANARY, ID, SPECIALIST, WORKING, make
from tests.unit.test_orch_migrations import known, of_version

USAGE = {
    "provider_calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "cost_total",
}
CONTEXT = {"context_tokens", "context_window", "context_percent"}
TOTALS = {"operational_tokens", "actual_provider_usage_only"}
ROW = {
    *USAGE,
    *CONTEXT,
    "role",
    "state",
    "connected",
    "generation",
    "activity",
    "activity_sequence",
    "activity_at",
    "updated_at",
    "assignment",
    "latest_assignment_usage",
    "assignment_guardrails",
    "total_tokens",
    "soft_budget_exceeded",
}
RUN = {
    "session",
    "run_id",
    "created_at",
    "project",
    "transport",
    "execution_profile",
    "project_config",
    "orchestration_config",
    "durable_workers",
    "roles",
    "paths",
}
WORKFLOW = {"state", "round", "implementation_flow", "forced_specialists", "updated_at"}
NEWER_WORKFLOW = {9: {"continuation"}, 10: {"worker_context_policy"}}


@pytest.fixture
def working(tmp_path: Path) -> str:
    roles = ("implementer", "reviewer", "probe")
    directory = make(tmp_path.resolve(), "s", project=tmp_path, roles=roles, changes=WORKING + SPECIALIST)
    return str(directory / "broker.sqlite3")


def shown(path: str) -> dict[str, Any]:
    return snapshot.broker(reader.overview(path))


def change(path: str, *changes: rows.Change) -> dict[str, Any]:
    store = Store.open(path)
    store.apply(list(changes))
    store.close()
    return shown(path)


def test_a_run_at_work(working: str) -> None:
    found = shown(working)
    assert found.keys() == {"workflow", "specialist_activations", "roles", "guardrails", "usage", "event_cursor"}
    assert found["workflow"] == {
        "state": "active",
        "round": 2,
        "implementation_flow": "single",
        "forced_specialists": [],
        "updated_at": NOW,
        "continuation": {
            "version": 1,
            "max_repair_rounds": None,
            "admitted_repair_rounds": 1,
            "pending_repair_round": None,
        },
        "worker_context_policy": {"version": 1, "overrides": {}},
    }
    assert found["specialist_activations"] == [
        {"role": "probe", "round": 2, "decision": "skipped", "rule_id": "probe-docs", "forced": False}
    ]
    assert found["guardrails"] == {"mode": "observational", "payload_bodies_included": False}
    assert found["usage"] == {
        "provider_calls": 4,
        "total_tokens": 141,
        "soft_role_tokens": 100,
        "soft_total_tokens": 1000,
        "soft_total_budget_exceeded": False,
        "actual_provider_usage_only": True,
    }
    assert found["event_cursor"] == {"earliest_retained": 1, "latest": 5}
    assert [row["role"] for row in found["roles"]] == ["implementer", "probe", "reviewer"]
    assert all(row.keys() == ROW for row in found["roles"])


def test_a_role_at_work(working: str) -> None:
    implementer, probe, reviewer = shown(working)["roles"]
    assert implementer == {
        "role": "implementer",
        "state": "active",
        "connected": True,
        "generation": 1,
        "provider_calls": 3,
        "input_tokens": 100,
        "output_tokens": 20,
        "cache_read_tokens": 7,
        "cache_write_tokens": 3,
        "reasoning_tokens": 5,
        "cost_total": 0.25,
        "context_tokens": 40,
        "context_window": 200,
        "context_percent": 20.0,
        "activity": "tool",
        "activity_sequence": 9,
        "activity_at": NOW,
        "updated_at": NOW,
        "assignment": {"round": 2, "kind": "implementation", "state": "accepted"},
        "latest_assignment_usage": {
            "assignment_id": "a" * 32,
            "round": 1,
            "kind": "implementation",
            "usage": {
                "provider_calls": 2,
                "input_tokens": 50,
                "output_tokens": 0,
                "cache_read_tokens": 0,
                "cache_write_tokens": 0,
                "reasoning_tokens": None,
                "cost_total": 0.0,
                "context_tokens": None,
                "context_window": None,
                "context_percent": None,
                "peak_context_tokens": 60,
                "operational_tokens": 50,
                "actual_provider_usage_only": True,
            },
        },
        # Of the assignment that is active: what the one before crossed is over.
        "assignment_guardrails": [
            {
                "assignment_id": "b" * 32,
                "level": "warning",
                "metric": "provider_calls",
                "observed": 5.0,
                "threshold": 4.0,
            }
        ],
        "total_tokens": 130,
        "soft_budget_exceeded": True,
    }
    assert reviewer["latest_assignment_usage"]["usage"] is None
    assert reviewer["assignment"] is None and not reviewer["soft_budget_exceeded"]
    assert probe["latest_assignment_usage"] is None and probe["assignment_guardrails"] == []


def test_without_active_work_the_newest_counts(working: str) -> None:
    crossed = rows.Guardrail(
        assignment_id="b" * 32,
        role="implementer",
        level="hard",
        metric="context_percent",
        observed=91.5,
        threshold=90,
        created_at=NOW,
    )
    implementer = change(working, role("implementer", state="idle"), crossed)["roles"][0]
    assert implementer["assignment"] is None
    assert [(each["level"], each["metric"]) for each in implementer["assignment_guardrails"]] == [
        ("warning", "provider_calls"),
        ("hard", "context_percent"),
    ]


def test_the_latest_report_is_that_of_the_highest_round(working: str) -> None:
    late = rows.Report(
        id="9" * 32,
        assignment_id="b" * 32,
        role="implementer",
        round=2,
        kind="implementation",
        verdict=None,
        summary_chars=0,
        changed_path_count=0,
        check_count=0,
        finding_count=0,
        risk_count=0,
        limitation_count=0,
        created_at="2020-01-01T00:00:00.000000+00:00",
    )
    assert change(working, late)["roles"][0]["latest_assignment_usage"]["round"] == 2


def test_budgets_are_exceeded_above_them_and_off_at_zero(working: str) -> None:
    def exceeded(role_tokens: int, total: int) -> tuple[list[bool], bool]:
        found = change(
            working,
            rows.Meta(key="soft_role_tokens", value=str(role_tokens)),
            rows.Meta(key="soft_total_tokens", value=str(total)),
        )
        return [row["soft_budget_exceeded"] for row in found["roles"]], found["usage"]["soft_total_budget_exceeded"]

    assert exceeded(130, 141) == ([False] * 3, False)
    assert exceeded(129, 140) == ([True, False, False], True)
    assert exceeded(0, 0) == ([False] * 3, False)


def test_unavailable_is_not_nothing(working: str) -> None:
    found = change(working, role("reviewer", usage=rows.Usage()))
    assert found["usage"]["provider_calls"] is None
    assert found["usage"]["total_tokens"] == 130
    assert snapshot.dashboard(reader.overview(working))["usage"]["provider_calls"] is None


def test_a_run_that_waits_for_continue(working: str) -> None:
    found = change(
        working,
        rows.Meta(key="continuation_policy", value='{"version":1,"max_repair_rounds":1}'),
        rows.Meta(key="pending_repair_round", value="3"),
        rows.Meta(key="worker_context_policy", value='{"version":1,"overrides":{"reviewer":"retain"}}'),
        rows.Meta(key="workflow_state", value="routing"),
        rows.Meta(key="forced_specialists", value='["probe"]'),
    )["workflow"]
    assert found["continuation"] == {
        "version": 1,
        "max_repair_rounds": 1,
        "admitted_repair_rounds": 1,
        "pending_repair_round": 3,
    }
    assert found["worker_context_policy"] == {"version": 1, "overrides": {"reviewer": "retain"}}
    assert found["state"] == "active" and found["forced_specialists"] == ["probe"]


@pytest.mark.parametrize("version", range(1, 11))
def test_databases_of_every_schema(tmp_path: Path, version: int) -> None:
    path = of_version(tmp_path / "broker.sqlite3", version)
    overview = reader.overview(path)
    expected = known(version)
    assert overview.schema == version
    assert overview.meta == {key: value for key, value in expected.meta.items() if key != "control_token"}
    for full in expected.roles:
        full.auth_token = ""
    assert overview.roles == sorted(expected.roles, key=lambda each: each.role)
    assert overview.active == {"implementer": expected.assignments[1]}
    assert overview.reports == {"reviewer": expected.reports[0]}
    assert overview.guardrails == expected.guardrails and overview.activations == expected.activations
    assert (overview.round, overview.earliest, overview.latest) == (2, 1, 2)
    found = snapshot.broker(overview)
    newer = {key for since, keys in NEWER_WORKFLOW.items() if version >= since for key in keys}
    assert found["workflow"].keys() == WORKFLOW | newer
    assert found["workflow"]["implementation_flow"] == ("phased" if version >= 6 else "single")
    assert found["workflow"]["forced_specialists"] == (["probe"] if version >= 7 else [])
    implementer, _, reviewer = found["roles"]
    assert implementer.keys() == ROW
    assert implementer["provider_calls"] == (9 if version >= 3 else None)
    assert found["usage"]["provider_calls"] is None
    assert (implementer["activity"], implementer["activity_sequence"]) == (
        ("thinking", 4) if version >= 8 else (None, 0)
    )
    assert len(implementer["assignment_guardrails"]) == (version >= 5)
    assert len(found["specialist_activations"]) == (version >= 7)
    assert (reviewer["latest_assignment_usage"]["usage"] is not None) == (version >= 3)
    assert implementer["total_tokens"] == 100


def test_nothing_private_is_even_read(working: str) -> None:
    database = apsw.Connection(working)
    database.execute("UPDATE roles SET auth_token = ?", (CANARY,))
    database.execute("UPDATE meta SET value = ? WHERE key = 'control_token'", (CANARY,))
    database.close()
    assert CANARY in repr(reader.read(working))
    overview = reader.overview(working)
    assert CANARY not in repr(overview)
    assert CANARY not in repr(reader.usage_page(working, 100))
    assert CANARY not in json.dumps(snapshot.broker(overview))


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("UPDATE roles SET activity = 'dreaming'", "Retained worker activity is invalid"),
        ("UPDATE roles SET activity_sequence = -1", "Retained worker activity is invalid"),
        ("UPDATE specialist_activations SET rule_id = 'x'", "Retained specialist activation is invalid"),
        ("UPDATE specialist_activations SET forced = 2", "Retained specialist activation is invalid"),
        ("UPDATE meta SET value = 'x' WHERE key = 'round'", "Broker database holds an invalid row"),
        ("UPDATE meta SET value = '-' WHERE key = 'soft_role_tokens'", "Retained soft_role_tokens is invalid"),
        ("UPDATE meta SET value = '{}' WHERE key = 'forced_specialists'", "Retained forced specialists are invalid"),
        ("UPDATE meta SET value = '[' WHERE key = 'forced_specialists'", "Retained forced specialists are invalid"),
        (
            "UPDATE meta SET value = '{}' WHERE key = 'continuation_policy'",
            "Retained policy of max_repair_rounds is invalid",
        ),
        (
            """UPDATE meta SET value = '{"max_repair_rounds":true}' WHERE key = 'continuation_policy'""",
            "Retained continuation policy is invalid",
        ),
        ("UPDATE meta SET value = '[' WHERE key = 'worker_context_policy'", "Retained policy of overrides is invalid"),
        (
            """UPDATE meta SET value = '{"overrides":1}' WHERE key = 'worker_context_policy'""",
            "Retained worker context policy is invalid",
        ),
        (
            "INSERT INTO meta VALUES ('pending_repair_round', 'x')",
            "Retained pending_repair_round is invalid",
        ),
    ],
)
def test_what_no_broker_wrote_is_refused(working: str, statement: str, text: str) -> None:
    database = apsw.Connection(working)
    database.execute(statement)
    database.close()
    with pytest.raises(Refusal) as caught:
        shown(working)
    assert (caught.value.code, caught.value.text) == ("orchestration_error", text)


def test_pages_of_usage(working: str) -> None:
    page = reader.usage_page(working, 100)
    assert [each.id for each in page.reports] == ["f" * 32, "e" * 32] and not page.truncated
    assert [each.role for each in page.roles] == ["implementer", "probe", "reviewer"]
    page = reader.usage_page(working, 1)
    assert [each.id for each in page.reports] == ["f" * 32] and page.truncated
    assert not reader.usage_page(working, 2).truncated


def test_pages_of_events(working: str) -> None:
    found = reader.event_pages(working, {"implementer": 0, "reviewer": 3, None: 0}, 1)
    assert (found.earliest, found.latest) == (1, 5)
    pages = {role: ([event.sequence for event in page.events], page.truncated) for role, page in found.pages.items()}
    assert pages == {"implementer": ([2], True), "reviewer": ([], False), None: ([1], True)}
    everything = reader.event_pages(working, dict.fromkeys(["implementer", "reviewer", "probe", None], 0), 100)
    events = sorted((event for page in everything.pages.values() for event in page.events), key=lambda e: e.sequence)
    assert events == reader.events(working, 0, 100)


def test_a_dashboard_in_a_list(working: str) -> None:
    assert snapshot.dashboard(reader.overview(working)) == {
        "available": True,
        "workflow": {"state": "active", "round": 2, "implementation_flow": "single"},
        "usage": {
            "provider_calls": 4,
            "operational_tokens": 141,
            "cost_total": 0.25,
            "context_percent": 20.0,
            "actual_provider_usage_only": True,
        },
        "roles": {"total": 3, "connected": 2},
    }
    assert snapshot.no_dashboard("legacy-run") == {"available": False, "reason": "legacy-run"}


def test_cumulative_usage() -> None:
    known_role = rows.Usage(provider_calls=1, input_tokens=2, reasoning_tokens=3, cost_total=0.5, context_tokens=9)
    together = snapshot.cumulative([role("implementer", usage=known_role), role("reviewer", usage=known_role)])
    assert together.keys() == USAGE | TOTALS
    assert (together["provider_calls"], together["input_tokens"], together["reasoning_tokens"]) == (2, 4, 6)
    assert (together["cost_total"], together["operational_tokens"]) == (1.0, 4)
    partly = snapshot.cumulative([role("implementer", usage=known_role), role("reviewer", usage=rows.Usage())])
    assert (partly["provider_calls"], partly["reasoning_tokens"], partly["input_tokens"]) == (None, None, 2)
    assert snapshot.usage(known_role).keys() == USAGE | CONTEXT | TOTALS
    assert snapshot.usage(rows.AssignmentUsage()).keys() == USAGE | CONTEXT | TOTALS | {"peak_context_tokens"}


@pytest.mark.parametrize("version", range(1, 9))
def test_public_objects_of_a_run(tmp_path: Path, version: int) -> None:
    top = tmp_path.resolve()
    directory = make(top, "s", project=top, version=version, roles=("reviewer", "implementer"))
    found = manifest.read(str(directory))
    run = snapshot.run_object(found, ID)
    assert run.keys() == RUN
    assert run["transport"] == ("rpc" if version == 8 else "tui")
    assert run["durable_workers"] == (version >= 3)
    assert run["paths"] == {"coordination": str(directory)}
    implementer, reviewer = run["roles"]
    pane = {} if version == 8 else {"pane_id": "%2"}
    assert implementer == {
        "name": "implementer",
        "transport": run["transport"],
        "provider": "openai",
        "model": "m-implementer",
        "thinking": "high",
        "tool_policy": "default",
        **pane,
    }
    assert reviewer["tool_policy"] == "workflow-read-only-with-bash"
    profile = {"name": "thorough", "kind": "packaged", "source": "packaged-default"}
    unavailable = {"name": None, "kind": "unavailable", "source": "legacy"}
    assert run["execution_profile"] == (profile if version >= 4 else unavailable)
    configured = {"path": "/srv/conf.json", "version": 4}
    assert run["orchestration_config"] == (configured if version >= 5 else {"path": None, "version": None})
    keys = {"directory", "profile", "implementation_flow", "specialists", "workspace_capsule"}
    matched = {"matched": False, "model_defaults": False, "role_overrides": []}
    nothing = {"matched": None, "model_defaults": None, "role_overrides": None}
    assert run["project_config"] == dict.fromkeys(keys) | (matched if version >= 5 else nothing)


@pytest.mark.parametrize("highest", range(1, 5))
def test_readers_count_rounds_of_repair_as_the_broker_does(tmp_path: Path, highest: int) -> None:
    made: list[rows.Change] = [
        assignment(f"{number:032x}", role=role, kind=kind, round=round_, delivery_id=f"{number:032x}")
        for number, (role, kind, round_, _) in enumerate(
            itertools.product(
                ("implementer", "reviewer"), ("plan", "implementation", "review"), range(1, highest + 1), range(2)
            )
        )
    ]
    path = str(make(tmp_path.resolve(), "s", project=tmp_path, changes=made) / "broker.sqlite3")
    assignments = {each.id: each for each in reader.read(path).assignments}
    routing: Any = SimpleNamespace(_state=SimpleNamespace(assignments=assignments))
    assert reader.overview(path).admitted == Routing._repairs(routing) == highest - 1


def test_that_a_database_is_written_is_told_by_what_is_raised_and_not_by_its_text() -> None:
    assert reader.is_busy(reader.Busy()) and reader.Busy().code == "broker_not_ready"
    assert not reader.is_busy(Refusal("broker_not_ready", reader.BUSY))


def test_a_moment_of_routing_is_shown_as_active(working: str) -> None:
    with apsw.Connection(working) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'workflow_state'", (contract.ROUTING,))
    assert shown(working)["workflow"]["state"] == contract.Workflow.ACTIVE
