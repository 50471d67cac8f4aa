# SPDX-License-Identifier: Apache-2.0
"""What the passing of time does to workers: one timer for all of them, set to when something is due (section 2.6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from agent_intercom.host import cgroups
from agent_intercom.workers.contract import StopReason
from agent_intercom.workers.terms import Due, Work
from agent_intercom.workers.watching import now_ms

if TYPE_CHECKING:
    from agent_intercom.workers.service import Service

WORKING_SHARE: Final = 0.01
"""How much of one processor a worker uses at least while it works; who only waits wakes up now and then."""

_LONGEST: Final = 3_600.0
"""Seconds: a loop counts without the time that the machine was asleep, deadlines count with it."""

_SOONEST: Final = 0.05


class Timers:
    """Does what is due. Call `arm` after each change."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handle: asyncio.TimerHandle | None = None
        self._used: dict[str, tuple[int, int]] = {}

    def arm(self) -> None:
        """Set the timer to what is due next."""
        self.close()
        at = self._service.registry.next_due()
        if at is not None:
            delay = min(max((at - now_ms()) / 1000, _SOONEST), _LONGEST)
            self._handle = asyncio.get_running_loop().call_later(delay, self._fire)

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
            if idle and self._worked(due, now):
                registry.noted(due.incarnation, now)
            elif due.work == Work.CHECKPOINT:
                registry.checkpoint(due, now)
            else:
                fenced = registry.expire(due, now)
                self._service.record()
                self._service.end_soon(fenced)
        self._service.record()
        live = {worker.incarnation for worker in registry.live()}
        self._used = {incarnation: seen for incarnation, seen in self._used.items() if incarnation in live}
        self.arm()

    def _worked(self, due: Due, now: int) -> bool:
        """Whether a worker has used the processor since this was looked at last: then it is not idle."""
        worker = self._service.registry.of(due.incarnation)
        if worker is None or worker.placed is None:
            return False
        used = cgroups.cpu_usec(worker.placed.control_group)
        if used is None:
            return False
        before, at = self._used.get(due.incarnation, (0, worker.active_at))
        self._used[due.incarnation] = (used, now)
        return used - before > (now - at) * 1000 * WORKING_SHARE
