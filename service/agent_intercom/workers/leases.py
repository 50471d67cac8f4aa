# SPDX-License-Identifier: Apache-2.0
"""When a worker is asked to save its work, and when it is ended by itself (managed-workers spec, section 2.6).

With A the last activity, I `idle_ms`, W `warning_ms`, R `retry_ms`, G `grace_ms` and L `lease_ms`: the idle deadline
is A+I, the checkpoint deadline A+I+G, the lease ends at min(now+L, A+I). From A+I-W on the worker is asked for a
checkpoint, again after each R, and at A+I+G it is ended: never where I or G is 0. While it is paused all of these stand
still, and its runtime.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent_intercom.workers.contract import STOP_IN_PROGRESS, TERMINAL, State, StopReason
from agent_intercom.workers.records import Worker

_SHIFTED = (
    "idle_deadline_at",
    "lease_expires_at",
    "checkpoint_deadline_at",
    "checkpoint_requested_at",
    "checkpoint_attempted_at",
    "children_deadline_at",
)


def touch(worker: Worker, now: int, lease_ms: int) -> Worker:
    """The worker after activity at `now`: with a whole idle window, and no checkpoint asked for."""
    idle = now + worker.idle_ms if worker.idle_ms else None
    return replace(
        worker,
        active_at=now,
        updated_at=now,
        idle_deadline_at=idle,
        lease_expires_at=_lease(now, lease_ms, idle),
        checkpoint_deadline_at=idle + worker.grace_ms if idle is not None and worker.grace_ms else None,
        checkpoint_requested_at=None,
        checkpoint_attempted_at=None,
        checkpoint_attempts=0,
        paused_at=None if worker.paused_at is None else now,
    )


def _lease(now: int, lease_ms: int, idle: int | None) -> int | None:
    ends = [end for end in (now + lease_ms if lease_ms else None, idle) if end is not None]
    return min(ends, default=None)


def extend(worker: Worker, now: int, lease_ms: int) -> Worker:
    """The worker whose owner was there at `now`, which never makes its lease shorter; itself if nothing changes.

    An owner says so every minute, and each change is a write to the disk: less than a quarter of a lease is not worth
    one, unless it is the last that there is.
    """
    if worker.paused_at is not None:
        return worker
    lease, known = _lease(now, lease_ms, worker.idle_deadline_at), worker.lease_expires_at or 0
    if lease is None or lease <= known or (lease - known < lease_ms // 4 and lease != worker.idle_deadline_at):
        return worker
    return replace(worker, lease_expires_at=lease, updated_at=now)


def started(worker: Worker, now: int) -> Worker:
    """The worker whose command began at `now`."""
    return replace(worker, runtime_deadline_at=now + worker.runtime_ms if worker.runtime_ms else None)


def pause(worker: Worker, now: int) -> Worker:
    """The worker whose times stand still from `now` on."""
    deadline = worker.runtime_deadline_at
    left = None if deadline is None else max(0, deadline - now)
    return replace(worker, paused_at=now, runtime_left_ms=left, runtime_deadline_at=None)


def stepped(worker: Worker, by: int) -> Worker:
    """The worker after the wall clock was set forward `by` milliseconds: everything is as far away as it was."""
    names = (*_SHIFTED, "runtime_deadline_at", "paused_at")
    return replace(worker, **{name: at + by for name in names if (at := getattr(worker, name)) is not None})


def resume(worker: Worker, now: int) -> Worker:
    """The worker whose times go on at `now`, with what was left when it was paused."""
    if worker.paused_at is None:
        return worker
    pause_ms = max(0, now - worker.paused_at)
    shifted = {name: at + pause_ms for name in _SHIFTED if (at := getattr(worker, name)) is not None}
    deadline = None if worker.runtime_left_ms is None else now + worker.runtime_left_ms
    return replace(worker, paused_at=None, runtime_left_ms=None, runtime_deadline_at=deadline, **shifted)


def cleared(worker: Worker) -> Worker:
    """The worker without anything that is still to come."""
    return replace(
        worker,
        idle_deadline_at=None,
        lease_expires_at=None,
        checkpoint_deadline_at=None,
        checkpoint_requested_at=None,
        checkpoint_attempted_at=None,
        checkpoint_attempts=0,
        runtime_deadline_at=None,
        runtime_left_ms=None,
        paused_at=None,
        children_deadline_at=None,
    )


def attempted(worker: Worker, now: int) -> Worker:
    """The worker that was asked for a checkpoint at `now`."""
    first = worker.checkpoint_requested_at
    return replace(
        worker,
        checkpoint_requested_at=now if first is None else first,
        checkpoint_attempted_at=now,
        checkpoint_attempts=worker.checkpoint_attempts + 1,
        updated_at=now,
    )


def _standing(worker: Worker) -> bool:
    """Whether nothing is done to a worker for the sake of time.

    What cannot be proved to be ours is not ended by itself either: the unit may be somebody else's.
    """
    return (
        worker.state in TERMINAL
        or worker.state in (State.PROVISIONING, State.PAUSED, State.UNREACHABLE)
        or worker.paused_at is not None
        or worker.state_reason == STOP_IN_PROGRESS
    )


def expiry(worker: Worker) -> tuple[int, StopReason] | None:
    """When a worker is to be ended by itself, and why; None: not as things are."""
    if _standing(worker):
        return None
    ends = [
        (worker.children_deadline_at, StopReason.CHILDREN),
        (worker.runtime_deadline_at, StopReason.RUNTIME),
        (worker.checkpoint_deadline_at, StopReason.IDLE),
    ]
    known = [(at, reason) for at, reason in ends if at is not None]
    return min(known, key=lambda end: end[0], default=None)


def next_checkpoint(worker: Worker, retry_ms: int) -> int | None:
    """When a worker is to be asked for a checkpoint next; None: not as things are."""
    idle, deadline = worker.idle_deadline_at, worker.checkpoint_deadline_at
    if _standing(worker) or idle is None or worker.state == State.BLOCKED:
        return None
    last = worker.checkpoint_attempted_at
    if last is None:
        due = idle - worker.warning_ms
    elif retry_ms:
        due = last + retry_ms
    else:
        return None
    return due if deadline is None or due < deadline else None
