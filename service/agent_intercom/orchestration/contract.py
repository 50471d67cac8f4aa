# SPDX-License-Identifier: Apache-2.0
"""Identity, limits, codes and patterns of coordination protocol 1 (orchestration spec, sections 0.4, 1.5 and 4.1)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

VERSION: Final = 1
DATABASE: Final = "broker.sqlite3"
"""The name of a run's database in its directory."""

MAX_FRAME: Final = 262_144
"""Largest payload of a frame, in bytes; equal is legal."""

IMPLEMENTER: Final = "implementer"
REVIEWER: Final = "reviewer"
PROBE: Final = "probe"
PLAYWRIGHT: Final = "playwright"
DJANGO: Final = "django"
ROLES: Final = (IMPLEMENTER, REVIEWER, PROBE, PLAYWRIGHT, DJANGO)
"""In the order in which roles are created."""

SPECIALISTS: Final = (PROBE, PLAYWRIGHT, DJANGO)
"""In the order in which they are decided on."""

THINKING: Final = ("off", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of a model's thinking."""

HEX32: Final = re.compile(r"[a-f0-9]{32}")
RULE_ID: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")


class Limits(NamedTuple):
    """Bounds that are settings of a broker. Milliseconds and counts."""

    handshake_ms: int = 10_000
    observer_write_ms: int = 1_000
    unauthenticated: int = 32
    observers: int = 16
    overdue_worker_ms: int = 60_000
    """How long a role may stay away in `connecting` before the status names it."""


MAX_MESSAGE_UNITS: Final = 32_768
"""UTF-16 units that a worker bridge takes in one delivery."""

MAX_TEXT: Final = 65_536
"""Bytes of a task or message as a person hands it over."""

MAX_CAPSULE: Final = 12_288
MAX_RUN_STATE: Final = 16_384
MAX_REPORT: Final = 32_768
MAX_STARTUP: Final = 262_144
MAX_TOKEN_FILE: Final = 128
MAX_COMMANDS: Final = 4_096
MAX_EVENTS: Final = 4_096
MAX_REPLAY: Final = 100
MAX_ERROR: Final = 512
MAX_INTEGER: Final = 2**63 - 1


class Workflow:
    """States of the workflow."""

    STARTING: Final = "starting"
    CONNECTING: Final = "connecting"
    INITIALIZING: Final = "initializing"
    ACTIVE: Final = "active"
    NEEDS_ATTENTION: Final = "needs_attention"
    READY: Final = "ready"
    UNCERTAIN: Final = "uncertain"


ROUTING: Final = "routing"
"""A state of the workflow in databases of other programs only: their broker ended while it decided who works next."""


class RoleState:
    """States of a role."""

    DISCONNECTED: Final = "disconnected"
    IDLE: Final = "idle"
    ACTIVE: Final = "active"
    WAITING: Final = "waiting"
    UNCERTAIN: Final = "uncertain"
    RESTARTING: Final = "restarting"
    RECOVERING: Final = "recovering"


class AssignmentState:
    """States of an assignment."""

    DELIVERING: Final = "delivering"
    ACCEPTED: Final = "accepted"
    COMPLETED: Final = "completed"
    UNCERTAIN: Final = "uncertain"


class CommandStatus:
    """How a control command ended; the closed set of the command line's client."""

    ACCEPTED: Final = "accepted"
    UNCERTAIN: Final = "uncertain"
    CONFLICT: Final = "conflict"


class Kind:
    """Kinds of assignments and of reports."""

    PLAN: Final = "plan"
    IMPLEMENTATION: Final = "implementation"
    REVIEW: Final = "review"


class Flow:
    """How an implementation begins."""

    SINGLE: Final = "single"
    PHASED: Final = "phased"


class Code:
    """Error codes on the wire (section 1.5)."""

    INVALID_PROTOCOL: Final = "invalid_protocol"
    UNAUTHORIZED: Final = "unauthorized"
    FORBIDDEN: Final = "forbidden"
    CONFLICT: Final = "conflict"
    REJECTED: Final = "rejected"
    BROKER_UNCERTAIN: Final = "broker_uncertain"
    BROKER_NOT_READY: Final = "broker_not_ready"
    ERROR: Final = "orchestration_error"
    CONTEXT_TOO_LARGE: Final = "worker_context_too_large"


def report_kind(role: str) -> str:
    """The kind of report, and of assignment, that is a role's own; the implementer has `plan` besides."""
    if role == IMPLEMENTER:
        return Kind.IMPLEMENTATION
    return Kind.REVIEW if role == REVIEWER else role
