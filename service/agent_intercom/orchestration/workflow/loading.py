# SPDX-License-Identifier: Apache-2.0
"""A run's state out of its database: what is left when a broker's memory is gone (section 4.2). Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent_intercom.orchestration import activation, budget, policies, rows
from agent_intercom.orchestration.contract import ROUTING, Code, Flow, Workflow
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.state import Owed, Settings, Startup, State

_T = TypeVar("_T")

_STATES = {ROUTING, *(value for name, value in vars(Workflow).items() if not name.startswith("_"))}


def load(
    retained: rows.Retained,
    *,
    session: str,
    project: str,
    report_usage: bool,
    startup: Startup | None,
    seed: str,
) -> State:
    """The state that `retained` tells of. `seed` is the randomness in the ids that will be made.

    Raises Refusal `invalid_protocol` with the name of a `meta` entry that cannot be right, and where an activation is
    not one that the rules could have made.
    """
    meta = retained.meta
    for row in retained.activations:
        activation.check_retained(row.role, row.decision, row.rule_id, row.forced)
    roles = {row.role: row for row in retained.roles}
    flow = meta.get("implementation_flow", Flow.SINGLE)
    if flow not in (Flow.SINGLE, Flow.PHASED):
        raise _wrong("implementation_flow")
    if meta.get("workflow_state") not in _STATES:
        raise _wrong("workflow_state")
    policy = budget.from_json(meta["budget_policy"]) if "budget_policy" in meta else budget.PACKAGED
    return State(
        settings=Settings(
            session=session,
            project=project,
            flow=flow,
            forced=list(activation.forced_list(_json(meta, "forced_specialists", "[]"), list(roles))),
            policy=policy,
            control_token=_entry(meta, "control_token"),
            report_usage=report_usage,
            worker_context=_policy(meta, policies.WORKER_CONTEXT, policies.read_worker_context) or {},
        ),
        seed=seed,
        roles=roles,
        startup=startup,
        workflow=_entry(meta, "workflow_state"),
        round=_count(meta, "round"),
        max_repair_rounds=_policy(meta, policies.CONTINUATION, policies.read_continuation),
        pending_repair_round=_count(meta, policies.PENDING_REPAIR) if policies.PENDING_REPAIR in meta else None,
        sequence=max((event.sequence for event in retained.events), default=0),
        assignments={row.id: row for row in retained.assignments},
        reports={row.assignment_id: row for row in retained.reports},
        activations=list(retained.activations),
        guardrails=list(retained.guardrails),
        commands={row.id: row for row in retained.commands},
        owed=_owed(meta, list(roles)),
        unread=_unread(meta, list(roles)),
    )


def _wrong(key: str) -> Refusal:
    return Refusal(Code.INVALID_PROTOCOL, f"The run's database has no usable {key}", key)


def _entry(meta: dict[str, str], key: str) -> str:
    value = meta.get(key)
    if not value:
        raise _wrong(key)
    return value


def _count(meta: dict[str, str], key: str) -> int:
    text = _entry(meta, key)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise _wrong(key)
    return int(text)


def _json(meta: dict[str, str], key: str, default: str) -> object:
    try:
        return json.loads(meta.get(key, default))
    except ValueError as error:
        raise _wrong(key) from error


def _policy(meta: dict[str, str], key: str, read: Callable[[str], _T]) -> _T | None:
    try:
        return read(meta[key]) if key in meta else None
    except ValueError as error:
        raise _wrong(key) from error


def _unread(meta: dict[str, str], roles: Sequence[str]) -> dict[str, str]:
    value = _json(meta, "unread", "[]")
    if not isinstance(value, list) or not all(role in roles for role in value):
        raise _wrong("unread")
    return dict.fromkeys(value, "")


def _owed(meta: dict[str, str], roles: Sequence[str]) -> dict[str, Owed]:
    value = _json(meta, "owed", "{}")
    found = {}
    for role, pair in value.items() if isinstance(value, dict) else ():
        match pair:
            case [int(round), str(kind)] if role in roles:
                found[role] = Owed(round, kind)
            case _:
                raise _wrong("owed")
    return found
