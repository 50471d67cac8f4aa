# SPDX-License-Identifier: Apache-2.0
"""What the passing of time does to workers: one timer for all of them, set to when something is due (section 2.6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.host import cgroups
from agent_intercom.workers import pausing
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import StopReason
from agent_intercom.workers.terms import Due, Work

if TYPE_CHECKING:
    from agent_intercom.workers.service import Service

WORKING_SHARE: Final = 0.01
"""How much of one processor a worker uses at least while it works; who only waits wakes up now and then."""

_LONGEST: Final = 3_600.0
"""Seconds: a loop counts without the time that the machine was asleep, deadlines count with it."""

_SOONEST: Final = 0.05

_HOLDING: Final = 1.0
"""Seconds until something that is due of a worker that stands still is looked at again."""


class Timers:
    """Does what is due. Call `arm` after each change."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handle: asyncio.TimerHandle | None = None
        self._used: dict[str, _Used] = {}
        self._held = 0.0

    def arm(self) -> None:
        """Set the timer to what is due next."""
        self.close()
        self._begin_counting()
        at = self._service.registry.next_due()
        if at is not None:
            loop = asyncio.get_running_loop()
            delay = max((at - now_ms()) / 1000, _SOONEST, self._held - loop.time())
            self._handle = loop.call_later(min(delay, _LONGEST), self._fire)

    def close(self) -> None:
        """Set it to nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        registry, now = self._service.registry, now_ms()
        for due in registry.due(now):
            idle = due.work == Work.CHECKPOINT or due.reason == StopReason.IDLE
            if pausing.note_if_still(self._service, due.incarnation):
                # It can neither save its work nor get any further. With its slice it is thawed at some time.
                self._held = asyncio.get_running_loop().time() + _HOLDING
            elif idle and self._worked(due):
                registry.noted(due.incarnation, now)
            elif due.work == Work.CHECKPOINT:
                registry.checkpoint(due, now)
            else:
                fenced = registry.expire(due, now)
                self._service.record()
                self._service.end_soon(fenced)
        self._service.record()
        self.arm()

    def _begin_counting(self) -> None:
        """Count what a worker uses from its last activity on: what it used before says nothing of what came after."""
        used = {}
        for worker in self._service.registry.live():
            if worker.placed is not None:
                known = self._used.get(worker.incarnation)
                if known is None or known.active_at != worker.active_at:
                    known = _used(worker.placed.control_group, worker.active_at)
                used[worker.incarnation] = known
        self._used = used

    def _worked(self, due: Due) -> bool:
        """Whether a worker has used the processor since that was looked at last: then it is not idle."""
        worker, before = self._service.registry.of(due.incarnation), self._used.get(due.incarnation)
        if worker is None or worker.placed is None or before is None:
            return False
        now = self._used[due.incarnation] = _used(worker.placed.control_group, worker.active_at)
        return now.usec - before.usec > (now.at - before.at) * 1_000_000 * WORKING_SHARE


class _Used(NamedTuple):
    """Microseconds of processor time that a worker had used at a time of the loop's clock, in seconds.

    `active_at` was its last activity then.
    """

    active_at: int
    usec: int
    at: float


def _used(control_group: str, active_at: int) -> _Used:
    # Who cannot be counted has not worked.
    return _Used(active_at, cgroups.cpu_usec(control_group) or 0, asyncio.get_running_loop().time())
