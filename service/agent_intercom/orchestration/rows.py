# SPDX-License-Identifier: Apache-2.0
"""The rows of a run's database (orchestration spec, section 8.2), one struct per table. None has a body in it.

Timestamps are text as in section 0.3; counts of tokens are integers; `cost_total` is in the provider's currency.
"""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, kw_only=True):
    """What a provider reported. None is "unavailable", never an estimate."""

    provider_calls: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int | None = None
    cost_total: float = 0.0
    context_tokens: int | None = None
    context_window: int | None = None
    context_percent: float | None = None


class AssignmentUsage(Usage, kw_only=True):
    """What one assignment used."""

    peak_context_tokens: int | None = None


class Role(msgspec.Struct, kw_only=True):
    """A role of the run. `usage` is cumulative; the last snapshot wins."""

    role: str
    auth_token: str
    state: str
    connected: bool = False
    active_assignment_id: str | None = None
    generation: int = 1
    usage: Usage
    activity: str | None = None
    activity_sequence: int = 0
    activity_at: str | None = None
    updated_at: str


class Assignment(msgspec.Struct, kw_only=True):
    """A unit of triggered work."""

    id: str
    role: str
    round: int
    kind: str
    state: str
    delivery_id: str
    boundary_effective: bool = False
    created_at: str
    updated_at: str


class Report(msgspec.Struct, kw_only=True):
    """That a report was accepted, and its shape. `usage` is None where the worker sent none."""

    id: str
    assignment_id: str
    role: str
    round: int
    kind: str
    verdict: str | None
    summary_chars: int
    changed_path_count: int
    check_count: int
    finding_count: int
    risk_count: int
    limitation_count: int
    usage: AssignmentUsage | None = None
    created_at: str


class Command(msgspec.Struct, kw_only=True):
    """A control command that was decided on."""

    id: str
    action: str
    role: str
    delivery: str | None
    status: str
    received_at: str
    updated_at: str


class Event(msgspec.Struct, kw_only=True):
    """Something that happened. `sequence` is given by the workflow, from 1, without gaps."""

    sequence: int
    timestamp: str
    event: str
    role: str | None = None
    round: int | None = None
    assignment_id: str | None = None
    delivery_id: str | None = None
    status: str


class Guardrail(msgspec.Struct, kw_only=True):
    """A threshold that an assignment crossed; at most one per level."""

    assignment_id: str
    role: str
    level: str
    metric: str
    observed: float
    threshold: float
    created_at: str


class Activation(msgspec.Struct, kw_only=True):
    """Whether a specialist takes part in a round, and by which rule."""

    role: str
    round: int
    decision: str
    rule_id: str
    forced: bool
    created_at: str


class Meta(msgspec.Struct, kw_only=True):
    """One entry of `meta`; where `value` is None, there is to be none."""

    key: str
    value: str | None


Change = Role | Assignment | Report | Command | Event | Guardrail | Activation | Meta
"""A row that is to be as given. Reports, commands, guardrails, activations and events are never changed once there."""


class Retained(msgspec.Struct, kw_only=True):
    """Everything that a database holds. `meta` has every key as text; `schema` is the version of the file."""

    schema: int
    meta: dict[str, str]
    roles: list[Role]
    assignments: list[Assignment]
    reports: list[Report]
    commands: list[Command]
    events: list[Event]
    guardrails: list[Guardrail]
    activations: list[Activation]
