# SPDX-License-Identifier: Apache-2.0
"""What managed workers are made of: states, codes, names and limits (managed-workers spec, sections 1, 2 and 9).

Standard library only. Times are integer milliseconds since the epoch, durations milliseconds, unless a name says
otherwise.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 1
MAX_FRAME: Final = 4 * 1_048_576
"""Bytes of a request or an answer: an environment may take two MiB (execve(2))."""

SOCKET_NAME: Final = "workers.sock"
SOCKET_UNIT: Final = "orchestrate-workers.socket"
SERVICE_UNIT: Final = "orchestrate-workers.service"
SLICE_UNIT: Final = "orchestrate-workers.slice"
"""Where workers are that belong to no run."""

DESCRIPTION: Final = "Agent Intercom, worker"
"""What every scope unit is described as; the default would be the command line."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,79}", re.ASCII)
"""A name that people choose. Two that differ by case only are the same name (section 2.1)."""

ID: Final = re.compile(r"[0-9a-f]{12}", re.ASCII)
"""A worker's id, which it keeps for life, and an incarnation, which is new for each start. Both are opaque."""

UNIT: Final = re.compile(r"worker-(?P<incarnation>[0-9a-f]{12})\.scope", re.ASCII)

WORKER_ENVIRONMENT: Final = "AGENT_INTERCOM_WORKER_ID"
INCARNATION_ENVIRONMENT: Final = "AGENT_INTERCOM_WORKER_INCARNATION_ID"
GENERATION_ENVIRONMENT: Final = "AGENT_INTERCOM_WORKER_GENERATION"
SCRATCH_ENVIRONMENT: Final = "AGENT_INTERCOM_SCRATCH"
"""A directory of the worker's own, which it may write whatever else it may not, and which goes with it."""

STATE_ENVIRONMENT: Final = "AGENT_INTERCOM_WORKER_STATE"
"""A directory (0700) that outlives the bridge: for a run's worker that of its role."""

READ_ONLY_ENVIRONMENT: Final = "AGENT_INTERCOM_READ_ONLY"
"""`1` for a worker that may not change files but its own: the kernel refuses it, and this tells it beforehand."""

TASK_ENVIRONMENT: Final = "AGENT_INTERCOM_TASK_FILE"
MANAGER_ENVIRONMENT: Final = "AGENT_INTERCOM_MANAGER_SESSION_ID"


def scope_unit(incarnation: str) -> str:
    """The scope unit of an incarnation: one for each start, never used again."""
    return f"worker-{incarnation}.scope"


class State(StrEnum):
    """The states of section 2.2, but for `stalled`: nothing here tells a worker that hangs from one that thinks."""

    PROVISIONING = "provisioning"
    REGISTERING = "registering"
    READY = "ready"
    WORKING = "working"
    WAITING = "waiting"
    PAUSED = "paused"
    BLOCKED = "blocked"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


TERMINAL: Final = frozenset({State.FAILED, State.LOST, State.STOPPED})

STOP_IN_PROGRESS: Final = "stop_in_progress"
CHILDREN_REMAIN: Final = "children_remain"
"""Why a worker is `blocked`: it is being ended, or its leader ended and left processes behind."""


LEFT_UNIT: Final = "left_unit"
"""The `error_code` of a worker that has ended whose processes had left its unit: there nobody is, elsewhere may be."""

UNIT_CHANGED: Final = "unit_changed"
"""Why a worker is `unreachable`, and the `error_code` of one that ended as that: somebody else has started its unit."""


class StopReason(StrEnum):
    """Why a worker was ended."""

    REQUESTED = "manager-requested"
    IDLE = "idle-grace-expired"
    RUNTIME = "runtime-expired"
    START_FAILED = "spawn-failed"
    PARENT = "parent-ended"
    RUN = "run-ended"
    RESTART = "restarted"
    CHILDREN = "children-remained"


class Outcome(StrEnum):
    """How an incarnation ended, as far as it can be proved."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    OOM = "oom-kill"
    UNKNOWN = "unknown"


class Code(StrEnum):
    """Every code of an error, and by `EXITS` what a command ends with (section 1.9, 6)."""

    INVALID = "invalid_request"
    NOT_FOUND = "worker_not_found"
    AMBIGUOUS = "worker_ambiguous"
    NAME_TAKEN = "name_taken"
    CONFLICT = "conflict"
    NOT_OWNER = "not_owner"
    FORBIDDEN = "forbidden"
    NOT_LIVE = "worker_not_live"
    LIVE = "worker_live"
    LIMIT = "limit_reached"
    ACKNOWLEDGE = "acknowledge_required"
    GRANT = "grant_exceeded"
    BUSY = "manager_busy"
    MANAGER_UNREACHABLE = "manager_unreachable"
    START_FAILED = "start_failed"
    STOP_FAILED = "stop_failed"
    COMMAND_NOT_FOUND = "command_not_found"
    CONFINEMENT_UNAVAILABLE = "confinement_unavailable"
    FREEZE_UNAVAILABLE = "freeze_unavailable"
    PLACE_LOST = "place_lost"
    STORE = "store_unusable"
    UNREACHABLE = "workers_unreachable"
    TIMEOUT = "timed_out"


EXITS: Final = {
    Code.INVALID: 2,
    Code.ACKNOWLEDGE: 2,
    Code.NOT_FOUND: 4,
    Code.AMBIGUOUS: 4,
    Code.NAME_TAKEN: 5,
    Code.CONFLICT: 5,
    Code.LIVE: 5,
    Code.NOT_LIVE: 5,
    Code.NOT_OWNER: 6,
    Code.FORBIDDEN: 6,
    Code.GRANT: 6,
    Code.LIMIT: 3,
    Code.BUSY: 3,
    Code.MANAGER_UNREACHABLE: 3,
    Code.STORE: 3,
    Code.UNREACHABLE: 3,
    Code.CONFINEMENT_UNAVAILABLE: 3,
    Code.FREEZE_UNAVAILABLE: 3,
}
"""2 usage, 3 blocked or degraded, 4 not found, 5 changed meanwhile, 6 not permitted; any other is 1, failed."""


MAX_DURATION_MS: Final = 100 * 366 * 86_400_000
"""How long a lifetime of a worker, or what somebody waits for, may be."""

MAX_TIME: Final = 2**53
"""Milliseconds since the epoch, beyond which no number is a time."""

MAX_TASK: Final = 262_144
"""Characters of a task."""

MAX_EVENTS: Final = 500
"""How many events of a worker are kept, and lines of its output are told at most."""


class Limits(NamedTuple):
    """How much there may be (section 2.13). `granted` is the most that a grant may count.

    No more than `starts` begin in any `starts_ms`.
    """

    live_in_run: int = 16
    live: int = 64
    jobs: int = 32
    events: int = MAX_EVENTS
    candidates: int = 128
    listed: int = 500
    depth: int = 32
    granted: int = 10_000
    starts: int = 240
    starts_ms: int = 60_000


class Lifetimes(NamedTuple):
    """When a worker is ended or forgotten by itself (sections 2.6 and 2.11). 0: never.

    `children_ms` is how long what a leader left behind may stay, `recent_ms` how long `list` shows what has ended.
    """

    lease_ms: int = 30 * 60_000
    idle_ms: int = 60 * 60_000
    warning_ms: int = 10 * 60_000
    retry_ms: int = 5 * 60_000
    grace_ms: int = 15 * 60_000
    runtime_ms: int = 12 * 3_600_000
    children_ms: int = 10_000
    recent_ms: int = 24 * 3_600_000
    retention_ms: int = 7 * 86_400_000
    dirty_retention_ms: int = 30 * 86_400_000


START_TIMEOUT: Final = 10.0
STOP_TIMEOUT: Final = 5.0
"""Seconds: for the job of a scope unit, and from SIGTERM to SIGKILL."""
