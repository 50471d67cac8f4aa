# SPDX-License-Identifier: Apache-2.0
"""The registry of managed workers: who has which worker, in which state, until when (managed-workers spec, section 2).

Pure: no I/O, no clock, no randomness of its own. `now` is milliseconds since the epoch everywhere. What a method
changes is in memory at once and in `take()` for the store; who calls it commits that before acting on it. A method that
raises WorkerError has changed nothing.

Methods named like actions take the caller and a reference to a worker: its id, the beginning of exactly one, or its
name (`UNIT/ROLE` for a run's). Methods named like facts (`placed`, `ended`, ...) take an incarnation. The parts:
`table` (rows, what is to be stored), `ownership` (who may), `starting`, `facts` (what is told, what is due),
`retention`.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent_intercom.workers import leases, lifecycle, retention
from agent_intercom.workers.contract import Code, State, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Worker
from agent_intercom.workers.retention import Retention
from agent_intercom.workers.starting import Starting
from agent_intercom.workers.terms import (
    NOTIFIABLE,
    Caller,
    Listed,
    Stopping,
)

_VERIFIED = "verified"


class Registry(Starting, Retention):
    """All workers of one user. `identify` gives twelve fresh hexadecimal digits at each call."""

    def stop(self, caller: Caller, reference: str, now: int) -> Stopping:
        """Put the stop fence around a worker and its whole live subtree, in one change; may be repeated.

        Codes as of `find`, and not_owner, forbidden. A worker that has ended is no error: nothing is to be ended then.
        """
        worker = self._owned(caller, reference)
        if worker.run is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker of a run is changed by its run alone", "worker")
        if not lifecycle.alive(worker) and worker.stop_reason == StopReason.RESTART:
            # Between the two halves of a restart: it does not begin again.
            self._put(replace(worker, stop_reason=StopReason.REQUESTED, updated_at=now), "stop_requested")
        fenced = tuple(self._fence(worker, StopReason.REQUESTED, now, StopReason.PARENT))
        return Stopping(self._rows[worker.id], fenced)

    def stop_role(self, caller: Caller, run: str, role: str | None, now: int) -> list[Worker]:
        """Fence the worker of a run's role (None: of all its roles) and what is below; what is to be ended, in order.

        Code: forbidden, for a caller inside a worker.
        """
        self._outside(caller)
        reason = StopReason.RUN if role is None else StopReason.REQUESTED
        fenced: dict[str, Worker] = {}
        for worker in self.live():
            if worker.run == run and role in (None, worker.role):
                fenced.update((row.id, row) for row in self._fence(worker, reason, now, StopReason.PARENT))
        return sorted(fenced.values(), key=lambda row: (-row.depth, row.created_at, row.id))

    def pause(self, caller: Caller, reference: str, now: int) -> Worker:
        """The worker to freeze; it is `paused` when that is told. One that is paused already is no error.

        Codes as of `find`, and not_owner, worker_not_live, conflict.
        """
        worker = self._running(self._owned(caller, reference, person=True))
        if worker.state not in lifecycle.PAUSABLE | {State.PAUSED}:
            raise WorkerError(Code.CONFLICT, "a worker in this state cannot be paused", "worker")
        return worker

    def resume(self, caller: Caller, reference: str, now: int) -> Worker:
        """The worker to thaw; it goes on when `resumed` is told. Codes as of `pause`; conflict: it is not paused."""
        worker = self._running(self._owned(caller, reference, person=True))
        if worker.state != State.PAUSED:
            raise WorkerError(Code.CONFLICT, "the worker is not paused", "worker")
        return worker

    def notify(self, caller: Caller, state: str, now: int) -> Worker:
        """A worker says from inside its unit that it is `ready`, `working` or `waiting`, which counts as activity.

        What it says changes nothing where it is being ended or is blocked. Codes: forbidden (not in a worker),
        invalid_request.
        """
        if state not in NOTIFIABLE:
            raise WorkerError(Code.INVALID, "it is ready, working or waiting", "state")
        worker = self._me(caller)
        if worker is None:
            raise WorkerError(Code.FORBIDDEN, "only a worker can say how it is, from inside its unit")
        if lifecycle.fenced(worker) or worker.state in (State.PROVISIONING, State.BLOCKED):
            return worker
        if worker.state == State.PAUSED:
            moved = replace(worker, interrupted=state)
        else:
            moved = lifecycle.advance(lifecycle.recover(worker, now), State(state), now)
        moved = leases.touch(replace(moved, readiness=_VERIFIED), now, self._lifetimes.lease_ms)
        return self._put(moved, moved.state if moved.state != worker.state else "")

    def list(self, caller: Caller, now: int, *, everyone: bool = False, history: bool = False) -> Listed:
        """The caller's own workers, with `everyone` all that it may see; inside a worker always its subtree.

        Those that ended longer ago than `recent_ms` are only counted, except with `history`, and of those that have
        ended no more than `Limits.listed` are given, the last that were made.
        """
        me = self._me(caller)
        shown, hidden = [], 0
        for worker in sorted(self._rows.values(), key=lambda row: (row.created_at, row.id)):
            if not self._sees(caller, me, worker) or not (everyone or me or self._mine(caller, me, worker)):
                continue
            recent = lifecycle.alive(worker) or retention.ended_at(worker) > now - self._lifetimes.recent_ms
            if history or recent:
                shown.append(worker)
            else:
                hidden += 1
        ended = [worker.id for worker in shown if not lifecycle.alive(worker)]
        older = frozenset(ended[: -self._limits.listed])
        return Listed(tuple(worker for worker in shown if worker.id not in older), hidden, len(older))
