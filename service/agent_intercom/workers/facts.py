# SPDX-License-Identifier: Apache-2.0
"""What happens to workers, as the one who watches them tells it (managed-workers spec, sections 2.2, 2.5, 2.7, 9.4).

Every method does nothing for an incarnation that is not the latest of its worker or has ended: what arrives late is
about the past.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from agent_intercom.workers import leases, lifecycle
from agent_intercom.workers.contract import CHILDREN_REMAIN, LEFT_UNIT, UNIT_CHANGED, Code, Outcome, State, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.lifecycle import Evidence
from agent_intercom.workers.records import Ending, Placed, Worker
from agent_intercom.workers.table import Table
from agent_intercom.workers.terms import Due, Work

_READINESS_UNVERIFIED = "unverified"


class Facts(Table):
    """The part of the registry that is told what happened, and what is due."""

    def placed(self, incarnation: str, placed: Placed, now: int, enforced: tuple[str, ...] = ()) -> Worker:
        """A worker is in its scope unit, verified, and waits at its gate.

        Raises WorkerError, `conflict` where it is not to begin any more: abandon it then.
        """
        worker = self.of(incarnation)
        if worker is None or worker.state != State.PROVISIONING:
            raise WorkerError(Code.CONFLICT, "the worker is not to begin any more")
        return self._put(replace(worker, placed=placed, enforced=enforced, updated_at=now), "placed")

    def released(self, incarnation: str, now: int) -> Worker | None:
        """The command has begun: `registering`, and its idle window and its runtime begin."""
        worker = self._current(incarnation)
        if worker is None or worker.state != State.PROVISIONING:
            return worker
        moved = lifecycle.move(worker, State.REGISTERING, Evidence.REGISTRATION_STARTED, now)
        moved = replace(moved, readiness=_READINESS_UNVERIFIED)
        return self._put(leases.started(leases.touch(moved, now, self._lifetimes.lease_ms), now), "started")

    def failed(self, incarnation: str, code: str, now: int) -> list[Worker]:
        """A start has failed and nothing of it is left; what below it is to be ended, in order."""
        worker = self._current(incarnation)
        if worker is None:
            return []
        ending = Ending(at=now, outcome=Outcome.UNKNOWN)
        reason = worker.stop_reason or StopReason.START_FAILED
        failed = lifecycle.finish(
            worker, State.FAILED, now, ended=ending, error_code=str(code), stop_reason=reason, dirty=False
        )
        self._put(failed, "failed", code)
        return self._orphans(failed, now)

    def stop_failed(self, incarnation: str, code: str, now: int) -> None:
        """A stop could not be completed: the fence stays, so that it can be repeated."""
        worker = self._current(incarnation)
        if worker is not None and lifecycle.fenced(worker):
            self._put(replace(worker, error_code=str(code), updated_at=now), "stop_failed", code)

    def children_remain(self, incarnation: str, ending: Ending, now: int) -> None:
        """The leader has ended and left processes behind, which `due` gives to stop after a grace."""
        worker = self._current(incarnation)
        if worker is None or worker.ended is not None:
            return
        worker = replace(worker, ended=ending, updated_at=now)
        if not lifecycle.fenced(worker):
            worker = replace(worker, children_deadline_at=now + self._lifetimes.children_ms)
            if worker.state == State.PROVISIONING:
                worker = lifecycle.move(worker, State.REGISTERING, Evidence.REGISTRATION_STARTED, now)
            worker = lifecycle.move(worker, State.BLOCKED, Evidence.BLOCKED, now, CHILDREN_REMAIN)
        self._put(worker, CHILDREN_REMAIN, ending.outcome)

    def ended(
        self,
        incarnation: str,
        ending: Ending,
        now: int,
        dirty: bool | None = None,
        *,
        left: bool = False,
        unit_changed: bool = False,
    ) -> list[Worker]:
        """Nobody is left in the unit of an incarnation; what below it is to be ended, in order.

        `left`: its leader lives elsewhere. `unit_changed`: the unit is another one, and goes on. `dirty` is whether its
        directory had changes that are not committed; None: not known.
        """
        worker = self._current(incarnation)
        if worker is None:
            return []
        # How the leader ended, where that came first, is how the worker ended; what was left behind was only ended.
        asked = lifecycle.fenced(worker) and worker.ended is None
        ending = ending if worker.ended is None else worker.ended
        if unit_changed:
            state, code = State.LOST, UNIT_CHANGED
        elif asked or (ending.outcome == Outcome.EXITED and ending.exit_code == 0):
            state, code = State.STOPPED, ""
        elif ending.outcome == Outcome.UNKNOWN:
            state, code = State.LOST, str(Outcome.UNKNOWN)
        else:
            state, code = State.FAILED, str(ending.outcome)
        if left:
            code = LEFT_UNIT
            self._put(replace(worker, updated_at=now), LEFT_UNIT)
        gone = lifecycle.finish(worker, state, now, ended=ending, error_code=code, dirty=dirty)
        self._put(gone, state, ending.outcome)
        return self._orphans(gone, now)

    def lost(self, incarnation: str, now: int, *, left: bool = False, unit_changed: bool = False) -> list[Worker]:
        """An incarnation is gone and nothing tells how; what below it is to be ended, in order."""
        ending = Ending(at=now, outcome=Outcome.UNKNOWN)
        return self.ended(incarnation, ending, now, left=left, unit_changed=unit_changed)

    def unreachable(self, incarnation: str, reason: str, now: int) -> None:
        """It cannot be proved that what is there is this incarnation, nor that it is gone. `reason` is a code."""
        worker = self._current(incarnation)
        if worker is None or worker.state == State.UNREACHABLE:
            return
        if lifecycle.fenced(worker):
            self._put(replace(worker, error_code=str(reason), updated_at=now), "unreachable", reason)
        else:
            moved = lifecycle.move(worker, State.UNREACHABLE, Evidence.FAILURE, now, str(reason))
            self._put(moved, "unreachable", reason)

    def reattached(self, incarnation: str, now: int) -> None:
        """An incarnation is proved to be there, after a restart of ours or after `unreachable`."""
        worker = self._current(incarnation)
        if worker is None:
            return
        if worker.state == State.PROVISIONING and worker.placed is not None:
            self.released(incarnation, now)
        elif not lifecycle.fenced(worker):
            self._put(lifecycle.recover(worker, now), "reattached")

    def paused(self, incarnation: str, now: int) -> None:
        """The unit is frozen: all times of the worker stand still."""
        worker = self._current(incarnation)
        if worker is not None and worker.state in lifecycle.PAUSABLE:
            self._put(leases.pause(lifecycle.move(worker, State.PAUSED, Evidence.PAUSED, now), now), "paused")

    def resumed(self, incarnation: str, now: int) -> None:
        """The unit is thawed: the times go on with what was left."""
        worker = self._current(incarnation)
        if worker is not None and worker.state == State.PAUSED:
            before = State(worker.interrupted or State.REGISTERING)
            self._put(leases.resume(lifecycle.move(worker, before, Evidence.RESUMED, now), now), "resumed")

    def noted(self, incarnation: str, now: int) -> None:
        """A worker was active: it spoke to us, or used the processor."""
        worker = self._current(incarnation)
        if worker is not None and worker.state != State.PROVISIONING and not lifecycle.fenced(worker):
            self._put(leases.touch(worker, now, self._lifetimes.lease_ms))

    def stepped(self, by: int) -> None:
        """The wall clock was set forward `by` milliseconds, which may be less than 0; no time has passed by that."""
        for worker in self.live():
            self._put(leases.stepped(worker, by))
        self._begun = deque(at + by for at in self._begun)

    # A timer

    def due(self, now: int) -> list[Due]:
        """What has to be done by now: workers to stop, deepest first, then checkpoints to ask for."""
        return [*self._expired(now), *self._unasked(now)]

    def next_due(self) -> int | None:
        """When `due` will have something, at the latest."""
        times = []
        for worker in self._rows.values():
            end, ask = leases.expiry(worker), leases.next_checkpoint(worker, self._lifetimes.retry_ms)
            times += [end[0]] if end is not None else []
            times += [ask] if ask is not None else []
        return min(times, default=None)

    def checkpoint(self, due: Due, now: int) -> Worker | None:
        """Count an attempt to ask for a checkpoint; None where the worker was active or ended meanwhile."""
        worker = self._current(due.incarnation)
        if worker is None or leases.next_checkpoint(worker, self._lifetimes.retry_ms) != due.deadline:
            return None
        return self._put(leases.attempted(worker, now), "checkpoint_requested")

    def expire(self, due: Due, now: int) -> list[Worker]:
        """Fence what has expired; what is to be ended, in order; nothing where it was renewed meanwhile."""
        worker = self._current(due.incarnation)
        if worker is None or due.deadline > now or leases.expiry(worker) != (due.deadline, due.reason):
            return []
        return self._fence(worker, due.reason, now, StopReason.PARENT)

    def _unasked(self, now: int) -> list[Due]:
        found = []
        for worker in self.live():
            end, at = leases.expiry(worker), leases.next_checkpoint(worker, self._lifetimes.retry_ms)
            if at is not None and at <= now and (end is None or end[0] > now):
                found.append(Due(Work.CHECKPOINT, worker.id, worker.incarnation, at))
        return found

    def _expired(self, now: int) -> list[Due]:
        """What is to be stopped for the sake of time by now, deepest first."""
        found = []
        for worker in reversed(self.live()):
            end = leases.expiry(worker)
            if end is not None and end[0] <= now:
                found.append(Due(Work.STOP, worker.id, worker.incarnation, *end))
        return found

    def _current(self, incarnation: str) -> Worker | None:
        worker = self.of(incarnation)
        return worker if worker is not None and lifecycle.alive(worker) else None

    def _orphans(self, worker: Worker, now: int) -> list[Worker]:
        """Fence what is live below a worker that has ended."""
        return self._fence(worker, StopReason.PARENT, now, StopReason.PARENT)
