# SPDX-License-Identifier: Apache-2.0
"""What a run is shown as: the objects that `status`, `list` and the Supervisor API have in common.

Pure. The broker snapshot is that of section 11.4 of the orchestration spec, run and role objects are those of 11.3 and
11.5. Databases of every readable schema give the same keys: what an older one never counted is None, what it never had
is empty. Functions raise Refusal `orchestration_error` for what a broker cannot have written.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from agent_intercom.orchestration import budget, contract, policies, rows
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import Manifest, RoleRecord

if TYPE_CHECKING:
    from agent_intercom.orchestration.reader import Overview

JsonObject: TypeAlias = dict[str, Any]
Measures: TypeAlias = dict[str, budget.Number | None]

ACTIVITIES: Final = frozenset({"thinking", "streaming", "tool", "reporting"})
"""What a worker can be at while it works (section 2.6)."""

_CONTEXT: Final = frozenset({"context_tokens", "context_window", "context_percent", "peak_context_tokens"})
_REPORTED: Final = "actual_provider_usage_only"


def broker(overview: Overview) -> JsonObject:
    """The broker snapshot."""
    soft_role, soft_total = soft_tokens(overview.meta)
    total = sum(operational(role.usage) for role in overview.roles)
    return {
        "workflow": workflow(overview),
        "specialist_activations": activations(overview.activations),
        "roles": [_role(role, overview, soft_role) for role in overview.roles],
        "guardrails": {"mode": "observational", "payload_bodies_included": False},
        "usage": {
            "provider_calls": _sum(role.usage.provider_calls for role in overview.roles),
            "total_tokens": total,
            "soft_role_tokens": soft_role,
            "soft_total_tokens": soft_total,
            "soft_total_budget_exceeded": 0 < soft_total < total,
            _REPORTED: True,
        },
        "event_cursor": {"earliest_retained": overview.earliest, "latest": overview.latest},
    }


def workflow(overview: Overview) -> JsonObject:
    """State and round of a run, and what decides on how it goes on."""
    meta = overview.meta
    shown: JsonObject = {
        "state": shown_state(meta.get("workflow_state", "")),
        "round": overview.round,
        "implementation_flow": meta.get("implementation_flow", contract.Flow.SINGLE),
        "forced_specialists": _forced(meta.get("forced_specialists", "[]")),
        "updated_at": meta.get("updated_at"),
    }
    if (text := meta.get(policies.CONTINUATION)) is not None:
        limit = _policy(text, "max_repair_rounds")
        if limit is not None and type(limit) is not int:
            raise _invalid("Retained continuation policy is invalid")
        pending = meta.get(policies.PENDING_REPAIR)
        shown["continuation"] = {
            "version": 1,
            "max_repair_rounds": limit,
            "admitted_repair_rounds": overview.admitted,
            "pending_repair_round": None if pending is None else _count(pending, policies.PENDING_REPAIR),
        }
    if (text := meta.get(policies.WORKER_CONTEXT)) is not None:
        overrides = _policy(text, "overrides")
        if not isinstance(overrides, dict) or not all(isinstance(mode, str) for mode in overrides.values()):
            raise _invalid("Retained worker context policy is invalid")
        shown["worker_context_policy"] = {"version": 1, "overrides": overrides}
    return shown


def shown_state(state: str) -> str:
    """A state of the workflow as it is shown: `routing` is a moment of an active run."""
    return contract.Workflow.ACTIVE if state == contract.ROUTING else state


def activations(found: Iterable[rows.Activation]) -> list[JsonObject]:
    """Which specialists take part in a round, and by which rule."""
    return [
        {"role": each.role, "round": each.round, "decision": each.decision, "rule_id": each.rule_id,
         "forced": each.forced}
        for each in found
    ]  # fmt: skip


def dashboard(overview: Overview) -> JsonObject:
    """The few figures of a run that a list of runs has room for."""
    percents = [role.usage.context_percent for role in overview.roles if role.usage.context_percent is not None]
    flow = workflow(overview)
    return {
        "available": True,
        "workflow": {key: flow[key] for key in ("state", "round", "implementation_flow")},
        "usage": {
            "provider_calls": _sum(role.usage.provider_calls for role in overview.roles),
            "operational_tokens": sum(operational(role.usage) for role in overview.roles),
            "cost_total": added_up(role.usage.cost_total for role in overview.roles),
            "context_percent": max(percents, default=None),
            _REPORTED: True,
        },
        "roles": {"total": len(overview.roles), "connected": sum(role.connected for role in overview.roles)},
    }


def added_up(values: Iterable[Any]) -> Any:
    """The sum of what was told; of costs the largest number there is, where it is more: JSON has no infinity."""
    added = sum(values)
    return min(added, sys.float_info.max) if isinstance(added, float) else added


def no_dashboard(reason: str) -> JsonObject:
    """The same where nothing can be told: `legacy-run` or `temporarily-unavailable`."""
    return {"available": False, "reason": reason}


def run_object(manifest: Manifest, run_id: str) -> JsonObject:
    """A run, by what it was started with."""
    return {
        "session": manifest.session,
        "run_id": run_id,
        "created_at": manifest.created_at,
        **provenance(manifest),
        "transport": transport(manifest),
        "durable_workers": manifest.coordination is not None,
        "roles": role_objects(manifest),
        "paths": paths(manifest),
    }


def provenance(manifest: Manifest) -> JsonObject:
    """The project of a run, and which settings it was started with."""
    return {
        "project": manifest.project,
        "execution_profile": msgspec.to_builtins(manifest.execution_profile),
        "project_config": msgspec.to_builtins(manifest.project_config),
        "orchestration_config": msgspec.to_builtins(manifest.orchestration_config),
    }


def paths(manifest: Manifest) -> JsonObject:
    """Where a run lies."""
    return {"coordination": manifest.coord}


def transport(manifest: Manifest) -> str:
    """`tui` or `rpc`. Manifests of version 1 do not say: theirs had terminals."""
    return manifest.transport or "tui"


def role_objects(manifest: Manifest) -> list[JsonObject]:
    """Every role of a run, by name."""
    return [role_object(name, manifest.roles[name], transport(manifest)) for name in sorted(manifest.roles)]


def role_object(name: str, record: RoleRecord, transport: str) -> JsonObject:
    """A role: what runs in it. `pane_id` is there for runs that were shown in panes."""
    shown = {
        "name": name,
        "transport": transport,
        "provider": record.provider,
        "model": record.model,
        "thinking": record.thinking,
        "tool_policy": _tool_policy(record.tools),
    }
    return shown if record.pane_id is None else {**shown, "pane_id": record.pane_id}


def cumulative(roles: Sequence[rows.Role]) -> JsonObject:
    """What all roles of a run used together; None where one of them does not tell."""
    summed: JsonObject = {name: 0 for name in rows.Usage.__struct_fields__ if name not in _CONTEXT}
    for name in summed:
        summed[name] = _sum(getattr(role.usage, name) for role in roles)
    return _with_total(summed)


def usage(used: rows.Usage) -> JsonObject:
    """What a role or an assignment used."""
    return _with_total({name: getattr(used, name) for name in used.__struct_fields__})


def operational(used: rows.Usage) -> int:
    """Input, output and both kinds of cache together: a figure to compare with, not one to be billed."""
    return used.input_tokens + used.output_tokens + used.cache_read_tokens + used.cache_write_tokens


def soft_tokens(meta: Mapping[str, str]) -> tuple[int, int]:
    """From how many tokens on a role, and the whole run, is pointed out; 0: never."""
    return _count(meta.get("soft_role_tokens", "0"), "soft_role_tokens"), _count(
        meta.get("soft_total_tokens", "0"), "soft_total_tokens"
    )


def crossed(overview: Overview) -> list[budget.Crossed]:
    """Every threshold of the run's budget that is crossed as far as its database tells, of the run, then by role.

    What a worker bridge reported itself is left out: it is among the `assignment_guardrails`.
    """
    told = {(fact.role, fact.level, fact.metric) for fact in overview.guardrails}
    found = budget.crossed(_budget(overview.meta), _measured(overview))
    return [each for each in found if each.scope != "assignment" or (each.role, each.level, each.metric) not in told]


def over(overview: Overview) -> list[str]:
    """Who crossed a threshold: `run`, and roles."""
    return list(dict.fromkeys(each.role or "run" for each in crossed(overview)))


def _budget(meta: Mapping[str, str]) -> budget.Policy:
    """The policy of a run; where none is retained that can be read, its soft budgets only."""
    with contextlib.suppress(Refusal):
        return budget.from_json(meta.get("budget_policy", ""))
    role, total = soft_tokens(meta)
    soft: budget.Thresholds = {
        "run": {"operational_tokens": total or None},
        "role": {"operational_tokens": role or None},
    }
    return budget.Policy(warning=soft, hard={})


def _measured(overview: Overview) -> Iterable[tuple[str, str | None, Measures]]:
    roles = {role.role: _measures(role.usage) for role in overview.roles}
    # What one role does not tell makes the sum too small at most; contexts are not summed, the fullest one counts.
    run: dict[str, budget.Number | None] = {}
    for metric in budget.METRICS:
        known = [value for each in roles.values() if (value := each[metric]) is not None]
        together = max if metric in _CONTEXT else added_up
        run[metric] = together(known) if known else None
    yield "run", None, run
    for role in overview.roles:
        yield "role", role.role, roles[role.role]
        report = overview.reports.get(role.role)
        if role.role not in overview.active:
            if report is not None and report.usage is not None:
                yield "assignment", role.role, _measures(report.usage)
        elif report is None:
            # It is the first one: all that the role used is its.
            yield "assignment", role.role, roles[role.role]
        else:
            yield "assignment", role.role, {m: v for m, v in roles[role.role].items() if m in _CONTEXT}


def _measures(used: rows.Usage) -> Measures:
    """What was used, by metric of a budget."""
    found = {name: getattr(used, name) for name in budget.METRICS if name in used.__struct_fields__}
    if isinstance(used, rows.AssignmentUsage) and used.peak_context_tokens is not None:
        found["context_tokens"] = max(used.peak_context_tokens, used.context_tokens or 0)
    return {**found, "operational_tokens": operational(used)}


def _role(role: rows.Role, overview: Overview, soft: int) -> JsonObject:
    if role.activity is not None and role.activity not in ACTIVITIES or role.activity_sequence < 0:
        raise _invalid("Retained worker activity is invalid")
    active = overview.active.get(role.role)
    total = operational(role.usage)
    return {
        "role": role.role,
        "state": role.state,
        "connected": role.connected,
        "generation": role.generation,
        **{name: getattr(role.usage, name) for name in rows.Usage.__struct_fields__},
        "activity": role.activity,
        "activity_sequence": role.activity_sequence,
        "activity_at": role.activity_at,
        "updated_at": role.updated_at,
        "assignment": active and {"round": active.round, "kind": active.kind, "state": active.state},
        "latest_assignment_usage": _latest(overview.reports.get(role.role)),
        "assignment_guardrails": [
            {name: getattr(crossed, name) for name in ("assignment_id", "level", "metric", "observed", "threshold")}
            for crossed in overview.guardrails
            if crossed.role == role.role
        ],
        "total_tokens": total,
        "soft_budget_exceeded": 0 < soft < total,
    }


def _latest(report: rows.Report | None) -> JsonObject | None:
    return None if report is None else assignment_usage(report)


def assignment_usage(report: rows.Report) -> JsonObject:
    """What the assignment used that a report was for; `usage` is None where the worker did not tell."""
    used = None if report.usage is None else usage(report.usage)
    return {"assignment_id": report.assignment_id, "round": report.round, "kind": report.kind, "usage": used}


def _with_total(used: JsonObject) -> JsonObject:
    parts = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")
    return {**used, "operational_tokens": sum(used[name] for name in parts), _REPORTED: True}


def _sum(values: Iterable[Any]) -> Any:
    """The sum, or None where one is unavailable."""
    found = list(values)
    return None if None in found else added_up(found)


def _tool_policy(tools: str | None) -> str:
    if tools is None:
        return "default"
    return "workflow-read-only-with-bash" if "bash" in tools.split(",") else "workflow-read-only"


def _forced(text: str) -> list[str]:
    try:
        forced = json.loads(text)
    except (ValueError, RecursionError):
        forced = None
    if not isinstance(forced, list) or not all(isinstance(role, str) for role in forced):
        raise _invalid("Retained forced specialists are invalid")
    return forced


def _policy(text: str, key: str) -> Any:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or key not in record:
        raise _invalid(f"Retained policy of {key} is invalid")
    return record[key]


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _invalid(f"Retained {name} is invalid")
    return int(text)


def _invalid(text: str) -> Refusal:
    return Refusal(contract.Code.ERROR, text)
