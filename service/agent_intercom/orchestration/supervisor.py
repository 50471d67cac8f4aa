# SPDX-License-Identifier: Apache-2.0
"""Supervisor API, version 2: runs as other programs read them (orchestration spec, sections 11.5 and 11.6).

Answers are made of what is retained and of nothing else: neither the service manager nor tmux nor a broker is asked,
nothing is written, and whether a run lives is not told. `roots` are the directories that runs lie in; an entry is what
`runs.find` makes of them.

Functions return the `data` of an answer. They raise Refusal: `invalid_arguments` for a question that makes no sense,
`orchestration_state_not_found` and `broker_command_not_found` for what is not there, `broker_not_ready` for a database
that is missing, `orchestration_error` for anything else that cannot be read. A database that is being written just now
is no error: the answer says `temporarily-unavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from agent_intercom.orchestration import contract, reader, rootscan, rows, runs, snapshot
from agent_intercom.orchestration.errors import Refusal

JsonObject: TypeAlias = dict[str, Any]
_Read = TypeVar("_Read")

API_VERSION: Final = "2"
MAX_PAGE: Final = 100
WORKFLOW: Final = "workflow"
"""What events of no role go by, in cursors and in answers."""

AVAILABLE: Final = "available"
BUSY: Final = "temporarily-unavailable"
LEGACY: Final = "unavailable_legacy_coordination"
INVALID_ARGUMENTS: Final = "invalid_arguments"
COMMAND_NOT_FOUND: Final = "broker_command_not_found"

_RUNTIME: Final = {"source": "retained-broker-state", "liveness": "not-observed"}
_TERMINAL: Final = frozenset({"rejected", contract.CommandStatus.UNCERTAIN})
_SEMANTICS: Final = {
    "cumulative": "what each provider reported to the role's session so far; the last report wins",
    "assignment": "what the provider reported between the acceptance of an assignment and its report; never changed",
    "operational_tokens": "input, output, cache read and cache write tokens together; for comparison, not for billing",
    "cost": "as the provider's price list has it in the worker's program; not an invoice",
    "payload_bodies_included": False,
}


def capabilities() -> JsonObject:
    """What this interface can do. All that the contract does not have is under `extensions`."""
    return {
        "api_version": API_VERSION,
        "envelope_schema_version": "1",
        "state_plane": "metadata-only-sqlite",
        "worker_transport": "tui-or-rpc-with-shared-bridge",
        "coordination_protocol": {
            "name": "broker-v1",
            "transport": "owner-only-unix-socket",
            "payload_files": False,
            "polling": False,
        },
        "host_adapter": {"name": "systemd", "attachment": "terminal-only", "runtime_observed_by_read_api": False},
        "read_operations": ["capabilities", "sessions", "runs", "snapshot", "usage", "events", "command"],
        "control_semantics": {
            "acknowledgement": "acceptance-or-queueing",
            "completion_observed_via": ["events", "command"],
            "crash_ambiguity": "uncertain",
            "exactly_once": False,
        },
        "control_commands": {
            "send": {"command": "send", "deliveries": ["steer", "follow-up"], "exact_run_option": "--run"},
            "abort": {"command": "abort", "exact_run_option": "--run"},
            "continue": {
                "command": "continue",
                "confirmation": "--yes",
                "idempotency_key": "--command-id",
                "scope": "one-additional-repair-round",
            },
        },
        "event_cursor": {
            "scope": "role",
            "initial": 0,
            "argument": "--cursor ROLE=SEQUENCE",
            "retention_gap_reported": True,
        },
        "execution_profiles": {
            "manifest_metadata_since": 4,
            "legacy": "unavailable",
            "provider_usage_and_quality_evidence": "unavailable",
        },
        "project_configuration": {
            "manifest_metadata_since": 5,
            "legacy": "unavailable",
            "matching": "exact-canonical-directory",
        },
        "usage_accounting": {
            "cumulative_role_usage": True,
            "latest_assignment_usage": True,
            "bounded_assignment_usage_page": True,
            "assignment_result_immutable": True,
            "legacy_assignment_usage": "unavailable",
            "provider_reported_only": True,
            "in_assignment_guardrails": True,
            "guardrail_metadata": True,
            "guardrail_mode": "observational",
            "budget_routing_gates": False,
        },
        "limits": {
            "page_items": MAX_PAGE,
            "events_per_role": MAX_PAGE,
            "commands_per_role": contract.MAX_COMMANDS,
            "state_scan_entries": rootscan.MAX_SCAN,
        },
        "metadata_only": True,
        "extensions": {
            "workflow_events": {
                "operation": "events",
                "key": WORKFLOW,
                "initial": 0,
                "argument": f"--cursor {WORKFLOW}=SEQUENCE",
            },
            "snapshot_specialist_activations": True,
            "control_commands": {
                "redeliver": {"command": "redeliver", "confirmation": "--yes", "idempotency_key": "--command-id"}
            },
        },
    }


def sessions(roots: Sequence[str]) -> JsonObject:
    """The newest readable run of every session."""
    found = runs.sessions(roots)
    return {
        "api_version": API_VERSION,
        "sessions": [
            {
                **snapshot.run_object(each.newest.manifest, each.newest.run_id),
                "runs_truncated": each.truncated,
                "run_issue_count": each.issues,
            }
            for each in found.sessions
        ],
        "issues": [{"session": issue.name, "message": issue.text} for issue in found.issues],
        "truncated": found.truncated,
    }


def runs_of(session: str, roots: Sequence[str], limit: int = MAX_PAGE) -> JsonObject:
    """The runs of a session, newest first."""
    _check_limit(limit)
    found = runs.runs_of(session, roots, limit)
    return {
        "api_version": API_VERSION,
        "session": session,
        "runs": [snapshot.run_object(entry.manifest, entry.run_id) for entry in found.entries],
        "issues": [{"run_id": issue.name, "message": issue.text} for issue in found.issues],
        "truncated": found.truncated,
    }


def snapshot_of(entry: runs.Entry) -> JsonObject:
    """Where a run stands."""
    overview, availability = _read(entry, lambda: reader.overview(entry.database))
    shown = None if overview is None else snapshot.broker(overview)
    states = {} if shown is None else {role["role"]: role for role in shown["roles"]}
    public = snapshot.run_object(entry.manifest, entry.run_id)
    return {
        "api_version": API_VERSION,
        **public,
        "coordination": entry.manifest.coordination,
        "host_adapter": {"name": entry.host, "runtime_status": "not_observed"},
        "workflow": shown and shown["workflow"],
        "specialist_activations": shown and shown["specialist_activations"],
        "guardrails": shown and shown["guardrails"],
        "usage": shown and shown["usage"],
        "roles": [
            {
                **role,
                "runtime": {**_RUNTIME, "state": states.get(role["name"])},
                "worker": None,
                "event_cursor": shown and shown["event_cursor"],
            }
            for role in public["roles"]
        ],
        **({} if availability == AVAILABLE else {"availability": availability}),
    }


def usage(entry: runs.Entry, limit: int = MAX_PAGE) -> JsonObject:
    """What the roles of a run used, and its newest assignments."""
    _check_limit(limit)
    page, availability = _read(entry, lambda: reader.usage_page(entry.database, limit))
    reports = [] if page is None else sorted(page.reports, key=lambda each: (each.round, each.kind, each.assignment_id))
    return {
        "api_version": API_VERSION,
        "session": entry.session,
        "run_id": entry.run_id,
        "available": page is not None,
        "availability": availability,
        "semantics": dict(_SEMANTICS),
        "cumulative": None if page is None else snapshot.cumulative(page.roles),
        "roles": [] if page is None else [_role_usage(role, reports) for role in page.roles],
        "assignment_count": len(reports),
        "assignment_usage_unavailable": sum(report.usage is None for report in reports),
        "truncated": page is not None and page.truncated,
        "limit": limit,
        "paths": snapshot.paths(entry.manifest),
    }


def events(entry: runs.Entry, roles: Sequence[str] = (), cursors: Sequence[str] = (), limit: int = 50) -> JsonObject:
    """Events by role, for `roles` or for all of the run, and those of no role, each from its cursor on.

    `cursors` are `ROLE=SEQUENCE`; a stream without one begins at 0. Every stream has at most `limit` events.
    """
    _check_limit(limit)
    selected = list(roles) or sorted(entry.manifest.roles)
    for role in selected:
        _check_role(role, entry)
    if len(set(selected)) != len(selected):
        raise Refusal(INVALID_ARGUMENTS, "a role is named twice", "role")
    streams: list[str | None] = [*selected, None]
    after = _cursors(cursors, selected)
    wanted = {stream: after.get(WORKFLOW if stream is None else stream, 0) for stream in streams}
    found, availability = _read(entry, lambda: reader.event_pages(entry.database, wanted, limit))

    def page(stream: str | None) -> JsonObject:
        return _event_page(stream, wanted[stream], found)

    return {
        "api_version": API_VERSION,
        "session": entry.session,
        "run_id": entry.run_id,
        "roles": [{"role": role, "runtime": dict(_RUNTIME), "worker": None, **page(role)} for role in selected],
        WORKFLOW: page(None),
        "paths": snapshot.paths(entry.manifest),
        **({} if availability == AVAILABLE else {"availability": availability}),
    }


def command(entry: runs.Entry, role: str, command_id: str) -> JsonObject:
    """What became of a control command for a role."""
    if contract.HEX32.fullmatch(command_id) is None:
        raise Refusal(INVALID_ARGUMENTS, "a command's id is 32 hexadecimal digits in lower case", "command_id")
    _check_role(role, entry)
    found = None
    if entry.manifest.coordination is not None:
        found = reader.command(entry.database, command_id)
    if found is None or found.role != role:
        raise Refusal(COMMAND_NOT_FOUND, "the run has no such command for that role", "command_id")
    return {
        "api_version": API_VERSION,
        "session": entry.session,
        "run_id": entry.run_id,
        "role": role,
        "command": {**msgspec.to_builtins(found), "terminal": found.status in _TERMINAL},
        "paths": snapshot.paths(entry.manifest),
    }


def _read(entry: runs.Entry, work: Callable[[], _Read]) -> tuple[_Read | None, str]:
    """What `work` reads, and whether it could; runs of old manifests have no database."""
    if entry.manifest.coordination is None:
        return None, LEGACY
    try:
        return work(), AVAILABLE
    except Refusal as refusal:
        if reader.is_busy(refusal):
            return None, BUSY
        raise


def _role_usage(role: rows.Role, reports: Sequence[rows.Report]) -> JsonObject:
    return {
        "role": role.role,
        "cumulative": snapshot.usage(role.usage),
        "assignments": [snapshot.assignment_usage(report) for report in reports if report.role == role.role],
    }


def _event_page(stream: str | None, after: int, found: reader.EventPages | None) -> JsonObject:
    if found is None:
        nothing = {"earliest_retained": None, "latest": None, "gap": False, "truncated": False}
        return {"events": [], "cursor": {"after": after, "next": after, **nothing}}
    page = found.pages[stream]
    return {
        "events": [msgspec.to_builtins(event) for event in page.events],
        "cursor": {
            "after": after,
            "next": page.events[-1].sequence if page.events else after,
            "earliest_retained": found.earliest,
            "latest": found.latest,
            "gap": found.earliest > after + 1,
            "truncated": page.truncated,
        },
    }


def _cursors(given: Sequence[str], selected: Sequence[str]) -> dict[str, int]:
    """Sequences by role, or `workflow`."""
    cursors: dict[str, int] = {}
    for text in given:
        stream, separator, number = text.partition("=")
        if not (separator and number.isascii() and number.isdigit() and len(number) <= 18):
            raise Refusal(INVALID_ARGUMENTS, "a cursor is ROLE=SEQUENCE with a whole number", "cursor")
        if stream != WORKFLOW and stream not in selected:
            raise Refusal(INVALID_ARGUMENTS, "a cursor is for a role that is not selected", "cursor")
        if stream in cursors:
            raise Refusal(INVALID_ARGUMENTS, "a role has two cursors", "cursor")
        cursors[stream] = int(number)
    return cursors


def _check_role(role: str, entry: runs.Entry) -> None:
    if role not in entry.manifest.roles:
        raise Refusal(INVALID_ARGUMENTS, f"the run has no such role; it has {_roles(entry)}", "role")


def _roles(entry: runs.Entry) -> str:
    return ", ".join(sorted(entry.manifest.roles))


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise Refusal(INVALID_ARGUMENTS, f"a limit is a whole number from 1 to {MAX_PAGE}", "limit")
