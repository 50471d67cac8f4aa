# SPDX-License-Identifier: Apache-2.0
"""Holding workers: their units are frozen and thawed, and what systemd says of that is what counts (section 2.7).

Anybody can freeze a unit of theirs past the worker service, and the service may be killed between a freeze and its
record. So the record follows what the kernel tells of a unit that is watched, and whoever looks at one has it follow
that. A unit that stands still because its slice is frozen is not paused; it is not ended for the sake of time either.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from agent_intercom.host import cgroups
from agent_intercom.host.manager import ManagerError
from agent_intercom.workers import lifecycle, pauses
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import explained

if TYPE_CHECKING:
    from agent_intercom.host.scopes import ScopeState
    from agent_intercom.workers.records import Worker
    from agent_intercom.workers.service import Service

FROZEN: Final = "frozen"
_RUNNING: Final = "running"


async def pause(service: Service, worker: Worker) -> Worker:
    """Freeze a worker, and see that it is.

    Raises WorkerError `freeze_unavailable`, `manager_unreachable`, and `conflict` where it is being ended meanwhile.
    """
    return await _freeze(service, worker, True)


async def resume(service: Service, worker: Worker) -> Worker:
    """Undo that."""
    return await _freeze(service, worker, False)


async def thaw(service: Service, worker: Worker) -> None:
    """Thaw a unit whose leader has ended, so that what is left in it can end too, as far as there is a manager."""
    async with service.lock(worker.id):
        with contextlib.suppress(WorkerError, ManagerError):
            await (await service.managers.scopes()).thaw(worker.unit)


async def look(service: Service, worker: Worker) -> None:
    """Have the record of a live worker say how its unit is, as far as there is somebody to say that."""
    with contextlib.suppress(WorkerError):
        await seen(service, worker)


async def seen(service: Service, worker: Worker) -> ScopeState | None:
    """How systemd says that a live worker's unit is; None where there is none. Its record follows that, unless
    something is being done with it.

    Raises WorkerError `manager_unreachable` where nobody can say it.
    """
    lock = service.lock(worker.id)
    if lock.locked():
        return await _state(service, worker)
    async with lock:
        state = await _state(service, worker)
        if state is not None:
            follow(service, worker, state)
        return state


def follow(service: Service, worker: Worker, state: ScopeState) -> None:
    """Have the record say `paused` exactly where the unit is frozen. A unit whose slice is frozen is neither."""
    if state.freezer == FROZEN:
        service.registry.paused(worker.incarnation, now_ms())
    elif state.freezer == _RUNNING:
        service.registry.resumed(worker.incarnation, now_ms())
    service.record()


def stilled(service: Service, incarnation: str, still: bool) -> None:
    """The same, as the kernel tells it of a unit that has come to stand still, or goes on."""
    worker = service.registry.of(incarnation)
    if worker is None or worker.placed is None:
        return
    if not still:
        service.registry.resumed(incarnation, now_ms())
    elif cgroups.frozen_itself(worker.placed.control_group):
        service.registry.paused(incarnation, now_ms())
    service.record()


def note_if_still(service: Service, incarnation: str) -> bool:
    """Whether a worker stands still now; where it does, have its record say so."""
    worker = service.registry.of(incarnation)
    if worker is None or worker.placed is None or not pauses.frozen(worker.placed.control_group):
        return False
    stilled(service, incarnation, True)
    return True


async def _state(service: Service, worker: Worker) -> ScopeState | None:
    async with explained(Code.MANAGER_UNREACHABLE, "how the unit is cannot be asked"):
        return await (await service.managers.scopes()).state(worker.unit)


async def _freeze(service: Service, worker: Worker, freeze: bool) -> Worker:
    async with service.lock(worker.id):
        now = service.registry.of(worker.incarnation)
        if now is None or not lifecycle.alive(now) or lifecycle.fenced(now):
            raise WorkerError(Code.CONFLICT, "the worker is being ended, or has ended", "worker")
        scopes = await service.managers.scopes()
        async with explained(Code.FREEZE_UNAVAILABLE, "the worker cannot be paused or resumed"):
            await (scopes.freeze if freeze else scopes.thaw)(worker.unit)
            state = await scopes.state(worker.unit)
        if state is None or (state.freezer == FROZEN) is not freeze:
            raise WorkerError(Code.FREEZE_UNAVAILABLE, "systemd did not pause or resume the worker", "worker")
        follow(service, worker, state)
    return service.registry.get(worker.id) or worker
