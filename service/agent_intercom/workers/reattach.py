# SPDX-License-Identifier: Apache-2.0
"""Finding the workers again that an earlier worker service has started (managed-workers spec, section 9.4).

What is in the registry is a claim; what is there is proved anew: the same process (number, start, boot), in the same
control group, in the same start of the unit. All equal: it is watched again. Gone: the exit file tells how, or nothing
does. Anything else is left alone, as `unreachable`, until it can be proved or somebody stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.host import cgroups, processes
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event
from agent_intercom.host.manager import ManagerError, ManagerUnreachable
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import ending, lifecycle, pausing, places, strays
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import UNIT_CHANGED, Code, State
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Placed, Worker
from agent_intercom.workers.service import Service, forgets_place

if TYPE_CHECKING:
    from agent_intercom.host.scopes import ScopeState

PASSING: Final = 3.0
"""Seconds for a launcher whose gate has ended to go one way or the other; it takes it milliseconds."""

_LOOK: Final = 0.02
_SAME, _GONE, _OTHER, _UNKNOWN, _UNSEEN = "same", "gone", "other", "unknown", "unseen"

_UNPROVED: Final = {_OTHER: UNIT_CHANGED, _UNKNOWN: str(Code.MANAGER_UNREACHABLE), _UNSEEN: "unproved"}
"""Why a worker is `unreachable`: its unit has been started by somebody since, there is no manager to ask, or neither
the manager nor the kernel tells whose what is there is."""

_UNWATCHED: Final = "unwatched"
"""The same, for one of which no descriptor was to be had."""

AGAIN: Final = 30.0
"""Seconds after which a worker that could not be proved or watched is looked at again: nothing tells when it can be."""


class Found(NamedTuple):
    """How many workers are live, and of those that were: how many are watched again, and how many are lost."""

    attached: int
    lost: int


async def reattach(service: Service) -> Found:
    """Look after every worker that is live in the registry. Raises nothing for any of them."""
    counts = {True: 0, False: 0}
    # First: who has which is asked for meanwhile, if somebody is to be proved for long.
    for worker in (*service.registry.live(), *service.registry.ended_workers()):
        _remember_scope(service, worker)
    for found in await asyncio.gather(*(_prove(service, worker) for worker in service.registry.live())):
        if found is not None:
            counts[found] += 1
    # What was being ended is ended, deepest first.
    service.end_soon(service.registry.fenced())
    return Found(counts[True], counts[False])


async def prove_again(service: Service) -> None:
    """Look again after every worker, now that the manager can be asked, or is another process."""
    for worker in service.registry.live():
        if worker.incarnation in service.running:
            # What somebody did to it meanwhile was not told.
            await pausing.look(service, worker)
        elif worker.state == State.UNREACHABLE:
            await _prove(service, worker)


async def _prove(service: Service, worker: Worker) -> bool | None:
    """As `_one`, unless somebody has ended it, or seen it, before."""
    async with service.lock(worker.id):
        now = service.registry.of(worker.incarnation)
        if now is None or now.state != worker.state or now.incarnation in service.running:
            return None
        return await _one(service, now)


class Again:
    """Looks again after workers that could not be proved or watched for want of something. `arm` after each change."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Set the timer, where there is such a worker and it is not set."""
        if self._handle is None and any(map(_wanting, self._service.registry.live())):
            self._handle = asyncio.get_running_loop().call_later(AGAIN, self._fire)

    def close(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._handle = None
        self._service.spawn(prove_again(self._service))


def _wanting(worker: Worker) -> bool:
    return worker.state == State.UNREACHABLE and worker.state_reason in (_UNWATCHED, _UNPROVED[_UNSEEN])


async def sweep(service: Service) -> None:
    """Remove the files of workers that nobody knows any more, or that had ended when an earlier service was killed.

    What an unknown worker that lives may have is left to it, and all that is unknown where nobody can tell of those.
    """
    # Listed first: what is made from now on is of a worker that is known by then.
    scratch, ids = await asyncio.to_thread(_there, service)
    for worker in service.registry.ended_workers():
        if forgets_place(worker):
            await _sweep_ended(service, worker)
    used = service.registry.in_use() | set(service.running)
    known = {worker.id for worker in (*service.registry.live(), *service.registry.ended_workers())}
    scratch = [each for each in scratch if os.path.basename(each) not in used]
    unknown = [places.of_worker(service.runtime_dir, each) for each in ids if each not in known]
    if not scratch and not unknown:
        return
    try:
        alive = await strays.find(service)
    except WorkerError:
        return
    kept = {places.scratch_of(service.state_dir, stray.incarnation) for stray in alive}
    # Which worker a place is of its row tells, and nothing else does.
    for directory in scratch:
        if directory not in kept:
            await _remove(service, os.path.basename(directory), directory, "scratch")
    for directory in [] if alive else unknown:
        await _remove(service, os.path.basename(directory), directory, "place")


def _there(service: Service) -> tuple[list[str], list[str]]:
    """The scratch directories of workers outside runs, and the ids of those that have a place."""
    return places.leftovers(service.state_dir, ()), places.worker_ids(service.runtime_dir)


async def _sweep_ended(service: Service, worker: Worker) -> None:
    """Remove what a worker that has ended may have left, unless somebody has started it again."""
    async with service.lock(worker.id):
        now = service.registry.of(worker.incarnation)
        if now is None or lifecycle.alive(now):
            return
        await _remove(service, worker.id, service.place_of(worker), "place")
        if worker.run is not None and worker.incarnation not in service.registry.in_use():
            await _remove(service, worker.id, _directories(service, worker)[0], "scratch")


async def _remove(service: Service, worker: str, directory: str, code: str) -> None:
    if not await service.remove(directory):
        service.journal.emit(Event.WORKER_FILES_LEFT, worker=worker, code=code)


def _remember_scope(service: Service, worker: Worker) -> None:
    """Say which scope id a worker has, if that is still written anywhere: it is in memory, and gone with that."""
    with contextlib.suppress(WorkerError, Refusal):
        if worker.run is not None:
            scope = runtime.read(service.runtime_dir, worker.run).scope
        else:
            scope = places.read(service.place_of(worker)).scope
        service.registry.remember_scope(worker.id, scope)


async def _one(service: Service, worker: Worker) -> bool | None:
    """Whether a worker is watched again; False where it is lost, None where it is known how it ended."""
    placed = worker.placed
    if placed is None:
        await _never_ran(service, worker)
        return None
    pidfd = _leader(placed)
    verdict, state = await _verdict(service, worker, placed, pidfd)
    if verdict == _SAME and worker.state == State.PROVISIONING and not await _passed(pidfd, placed.pid):
        # Its service ended before it told it anything.
        _close(pidfd)
        await _never_ran(service, worker)
        return None
    if verdict == _SAME:
        return _attached(service, worker, placed, pidfd, state)
    if (
        verdict == _GONE
        and worker.state == State.PROVISIONING
        and places.read_exit(_exit_file(service, worker)) is None
    ):
        _close(pidfd)
        await _never_ran(service, worker)
        return None
    if verdict in _UNPROVED:
        _close(pidfd)
        if verdict == _OTHER:
            service.changed.add(worker.incarnation)
        service.registry.unreachable(worker.incarnation, _UNPROVED[verdict], now_ms())
        service.record()
        return None
    return await _ended(service, worker, placed, pidfd)


def _attached(
    service: Service, worker: Worker, placed: Placed, pidfd: int | None, state: ScopeState | None
) -> bool | None:
    """Watch a worker that is there; None where it cannot be watched, which is told of it."""
    scratch, tree = _directories(service, worker)
    try:
        service.attach(worker, placed, pidfd, scratch, tree)
    except (HostError, OSError):
        _close(pidfd)
        service.registry.unreachable(worker.incarnation, _UNWATCHED, now_ms())
        service.record()
        return None
    if worker.state == State.PROVISIONING:
        service.registry.released(worker.incarnation, now_ms())
    service.registry.reattached(worker.incarnation, now_ms())
    service.record()
    if state is not None:
        pausing.follow(service, worker, state)
    return True


def _leader(placed: Placed) -> int | None:
    """A pidfd of the shim; None where it has ended."""
    try:
        pidfd = os.pidfd_open(placed.pid)
    except OSError:
        return None
    # Only now: the descriptor is of whoever had the number before this look.
    if processes.alive(processes.Identity(placed.pid, placed.start_ticks, placed.boot_id)):
        return pidfd
    os.close(pidfd)
    return None


async def _verdict(
    service: Service, worker: Worker, placed: Placed, pidfd: int | None
) -> tuple[str, ScopeState | None]:
    """What a worker is found to be, and how its unit is, where that was asked.

    Whoever has left the unit does not make it another one: while somebody is in it, it is the worker's.
    """
    if placed.boot_id != processes.boot_id():
        return _GONE, None
    try:
        populated = cgroups.populated(placed.control_group)
    except HostError:
        return _UNSEEN, None
    if not populated:
        return _GONE, None
    leading = pidfd is not None and processes.cgroup_of(placed.pid) == placed.control_group
    # The kernel alone proves a leader; without one the group could be that of a later unit.
    try:
        state = await (await service.managers.scopes()).state(worker.unit)
    except (WorkerError, ManagerUnreachable):
        return _SAME if leading else _UNKNOWN, None
    except ManagerError:
        return _SAME if leading else _UNSEEN, None
    if state is None:
        # systemd may forget a unit that still has processes in it.
        return _SAME if leading else _UNSEEN, None
    if state.invocation_id != placed.invocation_id or state.control_group != placed.control_group:
        return _OTHER, state
    return _SAME, state


async def _passed(pidfd: int | None, pid: int) -> bool:
    """Whether a launcher was told everything before its service ended: then it has let go of its gate."""
    if pidfd is None:
        return False
    deadline = asyncio.get_running_loop().time() + PASSING
    while asyncio.get_running_loop().time() < deadline:
        if select.select([pidfd], [], [], 0)[0]:
            return False
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/{pid}/fd/0").startswith("pipe:"):
                return True
        await asyncio.sleep(_LOOK)
    return False


async def _never_ran(service: Service, worker: Worker) -> None:
    """End what there is of a start that did not come to its end. A launcher without a service ends by itself."""
    where = (worker.placed.control_group, worker.placed.invocation_id) if worker.placed else ("",)
    try:
        with contextlib.suppress(ending.AnotherUnit):
            await ending.end(service.managers, worker.unit, *where)
    except WorkerError as error:
        service.registry.unreachable(worker.incarnation, error.code, now_ms())
        service.record()
        return
    scratch, _ = _directories(service, worker)
    for directory in (scratch, *([service.place_of(worker)] if worker.run or worker.generation == 1 else [])):
        if directory:
            await asyncio.to_thread(places.remove, directory)
    service.end_soon(service.registry.failed(worker.incarnation, Code.START_FAILED, now_ms()))
    service.record()
    service.journal.emit(Event.WORKER_START_FAILED, worker=worker.id, code=Code.START_FAILED)


async def _ended(service: Service, worker: Worker, placed: Placed, pidfd: int | None) -> bool | None:
    """Say how a worker ended that nobody watched, as far as its exit file tells."""
    if placed.boot_id == processes.boot_id():
        # What sees that nobody is in the unit says it; a leader that lives has left it.
        _attached(service, worker, placed, pidfd, None)
        return None
    _close(pidfd)
    service.end_soon(service.registry.lost(worker.incarnation, now_ms()))
    service.record()
    service.journal.emit(Event.WORKER_LOST, worker=worker.id, code="reboot")
    scratch, _ = _directories(service, worker)
    if scratch:
        await asyncio.to_thread(places.remove, scratch)
    return False


def _exit_file(service: Service, worker: Worker) -> str:
    return places.exit_file(service.place_of(worker))


def _directories(service: Service, worker: Worker) -> tuple[str, str]:
    """The scratch directory of a worker, empty where that is not known any more; and its tree, see `Running`."""
    if worker.run is None:
        tree = ""
        with contextlib.suppress(WorkerError):
            place = places.read(service.place_of(worker))
            tree = place.directory if place.writable is None else ""
        return places.scratch_of(service.state_dir, worker.incarnation), tree
    try:
        run = runtime.read(service.runtime_dir, worker.run).directory
    except Refusal:
        return "", ""
    return places.scratch_of_role(run, worker.role, worker.generation), ""


def _close(pidfd: int | None) -> None:
    if pidfd is not None:
        os.close(pidfd)
