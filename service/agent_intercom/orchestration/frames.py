# SPDX-License-Identifier: Apache-2.0
"""One typed struct per frame that the broker takes (orchestration spec, sections 2.2 to 2.7, 3.2 and 3.3).

A frame that is one of these has passed every check that needs nothing but the frame. `token` is not authenticated yet;
`id` is the request's, and the answer carries it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.reports import Report
from agent_intercom.orchestration.usage import ReportUsage


class _Worker(msgspec.Struct, frozen=True):
    """What every frame of a worker has."""

    role: str
    token: str
    id: str


class Hello(_Worker, frozen=True):
    """A worker names itself."""

    generation: int


class Lifecycle(_Worker, frozen=True):
    """A worker says what it is doing. Without `calls_given`, stored provider calls stay as they are."""

    state: str
    usage: rows.Usage | None
    calls_given: bool


class Ack(_Worker, frozen=True):
    """What became of a delivery; `delivery_id` may be unknown to the broker."""

    delivery_id: str
    status: str


class ReportFrame(_Worker, frozen=True):
    """The result of an assignment."""

    assignment_id: str
    report: Report
    usage: ReportUsage | None


class Progress(_Worker, frozen=True):
    """A sign of life during an assignment."""

    assignment_id: str
    phase: str
    usage: rows.Usage | None


class GuardrailFrame(_Worker, frozen=True):
    """An assignment crossed a threshold. Integers, except for `context_percent`, which may be a float."""

    assignment_id: str
    level: str
    metric: str
    observed: int | float
    threshold: int | float


class Control(msgspec.Struct, frozen=True):
    """An operator's command; `id` is the command's own. `delivery` and `message` are for `send` alone."""

    id: str
    token: str
    action: str
    role: str
    delivery: str | None
    message: str | None


class Observe(msgspec.Struct, frozen=True):
    """A read-only observer names itself."""

    id: str
    token: str


WorkerFrame: TypeAlias = Hello | Lifecycle | Ack | ReportFrame | Progress | GuardrailFrame
FirstFrame: TypeAlias = Hello | Control | Observe
