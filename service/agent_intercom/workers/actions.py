# SPDX-License-Identifier: Apache-2.0
"""The actions of the worker service, one method for each (managed-workers spec, sections 1.2 and 1.9).

A method gets who asks, as the kernel or else they themselves tell it, and its parameters, and returns the JSON of its
result. What changes something is written down before it is done, and done before it is answered.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT
from agent_intercom.workers import contract, orders, pausing, places, removing
from agent_intercom.workers.answers import Known, told
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import TERMINAL, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.lifecycle import reached
from agent_intercom.workers.lookers import Lookers
from agent_intercom.workers.looking import Looking, unenforced
from agent_intercom.workers.places import Place
from agent_intercom.workers.provisioning import Order
from agent_intercom.workers.records import Grant, Worker
from agent_intercom.workers.terms import Caller, Stopping, Wanted

if TYPE_CHECKING:
    from agent_intercom.workers.runworker import Prepared
    from agent_intercom.workers.service import Service

MAX_WAIT_MS: Final = 24 * 3_600_000

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Duration = Annotated[int, msgspec.Meta(ge=0, le=contract.MAX_DURATION_MS)]


class Durations(msgspec.Struct, forbid_unknown_fields=True):
    idle_ms: _Duration | None = None
    grace_ms: _Duration | None = None
    warning_ms: _Duration | None = None
    runtime_ms: _Duration | None = None


class Start(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    command: list[str]
    directory: str
    environment: dict[str, str]
    harness: str = "command"
    name: str | None = None
    role: str | None = None
    task: Annotated[str, msgspec.Meta(max_length=contract.MAX_TASK)] | None = None
    writable: list[str] | None = None
    network: bool = True
    memory_max: _Positive | None = None
    memory_high: _Positive | None = None
    tasks_max: _Positive | None = None
    lifetimes: Durations = msgspec.field(default_factory=Durations)
    grant: Grant | None = None
    keep_output: bool = False
    key: str | None = None


class StartRole(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    role: str
    generation: _Positive


class StopRole(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    role: str


class One(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class Again(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    fresh: bool = False


class Rename(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    name: str


class Renew(msgspec.Struct, forbid_unknown_fields=True):
    worker: str | None = None


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Wait(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    until: str
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)]


class Notify(msgspec.Struct, forbid_unknown_fields=True):
    state: str


class Actions:
    """What can be asked for. `known` has each action's parameters and method, and whether it changes anything."""

    def __init__(self, service: Service, library: str) -> None:
        self._service = service
        self._registry = service.registry
        self._library = library
        self._lookers = Lookers()
        looking = Looking(service)
        going = removing.Removing(service)
        self.known: Known = {
            "start": (Start, self._start, True),
            "start_role": (StartRole, self._start_role, True),
            # Whoever wants to end something is not refused because it cannot be written down.
            "stop_role": (StopRole, self._stop_role, False),
            "stop": (One, self._stop, False),
            "restart": (Again, self._restart, True),
            "pause": (One, self._pause, True),
            "resume": (One, self._resume, True),
            "rename": (Rename, self._rename, True),
            "adopt": (One, self._adopt, True),
            "release": (One, self._release, True),
            "renew": (Renew, self._renew, True),
            "heartbeat": (Heartbeat, self._heartbeat, True),
            "notify": (Notify, self._notify, True),
            "wait": (Wait, self._wait, False),
            **looking.known,
            **going.known,
        }

    def inside(self, incarnation: str) -> Caller:
        """Who a process is that is in a worker's scope unit. Raises WorkerError `forbidden` for one of nobody's."""
        worker = self._registry.of(incarnation)
        if worker is None or worker.state in TERMINAL:
            raise WorkerError(Code.FORBIDDEN, "you are in the unit of a worker that is not known")
        return Caller(worker=incarnation)

    # Starting

    async def _start(self, caller: Caller, asked: Start) -> dict[str, Any]:
        place, parent = await self._place(caller, asked)
        await self._admit()
        durations = asked.lifetimes
        wanted = Wanted(
            harness=asked.harness,
            name=asked.name,
            role=asked.role or "",
            directory_digest=orders.digest(place.directory),
            within=orders.within(place.directory),
            task_digest="" if asked.task is None else orders.digest(asked.task),
            task_length=len(asked.task or ""),
            idle_ms=durations.idle_ms,
            warning_ms=durations.warning_ms,
            grace_ms=durations.grace_ms,
            runtime_ms=durations.runtime_ms,
            grant=asked.grant,
            key=asked.key,
            order_digest=orders.digest_of(place),
        )
        started = self._registry.start(caller, wanted, now_ms())
        if started.repeated:
            return {
                "worker": told(started.worker),
                "unenforced": unenforced(self._service, started.worker),
                "repeated": True,
            }
        self._service.commit()

        prepare = self._preparation(place, parent, task=asked.task)
        worker = await self._service.carry_out(self._service.begin(started.worker, prepare))
        return {"worker": told(worker), "unenforced": unenforced(self._service, worker), "repeated": False}

    def _preparation(self, place: Place, parent: Worker | None, **how: Any) -> Callable[[Worker], Order]:
        """What makes the order of a start, as `orders.of_person` does."""
        return functools.partial(
            orders.of_person,
            place=place,
            runtime_dir=self._service.runtime_dir,
            state_dir=self._service.state_dir,
            parent_unit=None if parent is None else parent.unit,
            **how,
        )

    async def _place(self, caller: Caller, asked: Start) -> tuple[Place, Worker | None]:
        """What a worker is to be started with, and who its parent is.

        Whether the caller may start any comes first: until then no path is looked at.
        """
        parent = self._registry.starter(caller)
        place = Place(
            arguments=tuple(asked.command),
            directory=asked.directory,
            environment=asked.environment,
            scope=caller.scope,
            session=caller.session or "",
            writable=None if asked.writable is None else tuple(asked.writable),
            network=asked.network,
            memory_max=asked.memory_max,
            memory_high=asked.memory_high,
            tasks_max=asked.tasks_max,
            keep_output=asked.keep_output,
            task=asked.task is not None,
        )
        orders.plausible(place)
        place = await self._lookers.look(_whose(caller), orders.settled, place, self._library)
        if parent is not None:
            own = places.read(self._service.place_of(parent))
            place = orders.narrowed(place, own, places.scratch_of(self._service.state_dir, parent.incarnation))
        # What cannot be read again could be neither started again nor be told whose it is.
        places.encoded(place)
        return place, parent

    async def _admit(self) -> None:
        """Raise WorkerError where systemd does not answer, or has more to do than it should (section 2.4)."""
        from agent_intercom.workers.managers import explained

        scopes = await self._service.managers.scopes()
        async with explained(Code.BUSY, "the user's service manager cannot be asked"):
            jobs = await scopes.jobs()
        if jobs > contract.Limits().jobs:
            raise WorkerError(Code.BUSY, f"the user's service manager has {jobs} jobs to do: try again later", "jobs")

    async def _start_role(self, caller: Caller, asked: StartRole) -> dict[str, Any]:
        _outside(caller)
        # Before there is a row: what a run cannot be started with is refused without a trace.
        first = await self._lookers.look(
            asked.run, _role, self._service.runtime_dir, asked.run, asked.role, asked.generation, self._library
        )
        await self._admit()
        wanted = Wanted(
            harness=first.harness,
            role=asked.role,
            run=asked.run,
            generation=asked.generation,
            directory_digest=orders.digest(first.unnamed.directory),
            runtime_ms=first.runtime_ms,
        )
        scope = first.unnamed.environment.get(SCOPE_ENVIRONMENT)
        worker = self._registry.start(caller._replace(scope=scope), wanted, now_ms()).worker
        self._service.commit()

        def prepare(row: Worker) -> Order:
            return orders.of_role(row, first, self._service.runtime_dir)

        worker = await self._service.carry_out(self._service.begin(worker, prepare))
        return {"worker": told(worker), "unenforced": unenforced(self._service, worker)}

    async def _stop_role(self, caller: Caller, asked: StopRole) -> dict[str, Any]:
        _outside(caller)
        fenced = self._registry.stop_role(caller, asked.run, asked.role, now_ms())
        self._service.record()
        ended = await asyncio.shield(self._service.spawn(self._service.end_all(fenced)))
        return {"stopped": [told(worker) for worker in ended], "recorded": not self._service.behind}

    # Ending and starting again

    async def _stop(self, caller: Caller, asked: One) -> dict[str, Any]:
        stopping = self._registry.stop(caller, asked.worker, now_ms())
        self._service.record()
        return await self._end(stopping)

    async def _end(self, stopping: Stopping) -> dict[str, Any]:
        ended = await asyncio.shield(self._service.spawn(self._service.end_all(stopping.fenced)))
        now = self._registry.get(stopping.worker.id) or stopping.worker
        stopped = [told(worker) for worker in ended]
        # What is not written down is forgotten with a restart of the service, which then finds that it has ended.
        return {"worker": told(now), "stopped": stopped, "recorded": not self._service.behind}

    async def _restart(self, caller: Caller, asked: Again) -> dict[str, Any]:
        seen = self._registry.find(caller, asked.worker)
        place = None if seen.run is not None else places.read(self._service.place_of(seen))
        if place is not None:
            # Nothing is ended that could not be begun again.
            place = await self._lookers.look(_whose(caller), orders.check_again, place, self._library)
        await self._admit()
        # By its id: its name may be another's by now.
        stopping = self._registry.restart(caller, seen.id, now_ms())
        assert place is not None
        self._service.commit()
        return await asyncio.shield(self._service.spawn(self._again(caller, stopping, place, asked.fresh)))

    async def _again(self, caller: Caller, stopping: Stopping, place: Place, fresh: bool) -> dict[str, Any]:
        old = stopping.worker
        try:
            ended = await self._service.end_all(stopping.fenced)
            begun = await self._begun_again(caller, old, place, fresh)
        except WorkerError as error:
            now = self._registry.of(old.incarnation) or self._registry.get(old.id)
            if stopping.fenced and (now is None or now.state in TERMINAL):
                text = f"{error.text}; the worker has ended, and not begun again"
                raise WorkerError(error.code, text, error.field) from error
            raise
        finally:
            self._registry.given_up(old.id, old.incarnation)
        lacks = unenforced(self._service, begun)
        return {"worker": told(begun), "stopped": [told(each) for each in ended], "unenforced": lacks}

    async def _begun_again(self, caller: Caller, old: Worker, place: Place, fresh: bool) -> Worker:
        """The next incarnation of a worker that has ended."""
        worker = self._registry.again(caller, old.id, old.incarnation, now_ms())
        self._service.commit()
        parent = self._registry.of(worker.parent) if worker.parent is not None else None
        return await self._service.begin(worker, self._preparation(place, parent, fresh=fresh, again=True))

    async def _pause(self, caller: Caller, asked: One) -> dict[str, Any]:
        seen = await self._look(caller, asked)
        worker = self._registry.pause(caller, seen.id, now_ms())
        return {"worker": told(await self._service.carry_out(pausing.pause(self._service, worker)))}

    async def _resume(self, caller: Caller, asked: One) -> dict[str, Any]:
        seen = await self._look(caller, asked)
        worker = self._registry.resume(caller, seen.id, now_ms())
        return {"worker": told(await self._service.carry_out(pausing.resume(self._service, worker)))}

    async def _look(self, caller: Caller, asked: One) -> Worker:
        """The worker that is meant, found out whether somebody has paused or resumed it past us.

        What follows goes by its id: its name may be another's by then.
        """
        worker = self._registry.find(caller, asked.worker)
        if worker.state not in TERMINAL and worker.placed is not None:
            await pausing.look(self._service, worker)
        return worker

    # Whose it is

    async def _rename(self, caller: Caller, asked: Rename) -> dict[str, Any]:
        return self._changed(self._registry.rename(caller, asked.worker, asked.name, now_ms()))

    async def _adopt(self, caller: Caller, asked: One) -> dict[str, Any]:
        return self._changed(self._registry.adopt(caller, asked.worker, now_ms()))

    async def _release(self, caller: Caller, asked: One) -> dict[str, Any]:
        return self._changed(self._registry.release(caller, asked.worker, now_ms()))

    async def _renew(self, caller: Caller, asked: Renew) -> dict[str, Any]:
        renewed = self._registry.renew(caller, asked.worker, now_ms())
        self._service.commit()
        left = self._registry.standing(caller) if asked.worker is None else []
        return {"workers": [told(worker) for worker in renewed], "left": [told(worker) for worker in left]}

    async def _heartbeat(self, caller: Caller, asked: Heartbeat) -> dict[str, Any]:
        renewed = self._registry.heartbeat(caller, now_ms())
        self._service.commit()
        return {"workers": [told(worker) for worker in renewed]}

    async def _notify(self, caller: Caller, asked: Notify) -> dict[str, Any]:
        return self._changed(self._registry.notify(caller, asked.state, now_ms()))

    def _changed(self, worker: Worker) -> dict[str, Any]:
        self._service.commit()
        return {"worker": told(worker)}

    # Waiting

    async def _wait(self, caller: Caller, asked: Wait) -> dict[str, Any]:
        worker = self._registry.find(caller, asked.worker)
        found = reached(worker, asked.until)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + asked.timeout_ms / 1000
        while not found and worker.state not in TERMINAL and (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._service.change()
            except TimeoutError:
                break
            # By its id: its name may be another's by now.
            worker = self._registry.find(caller, worker.id)
            found = reached(worker, asked.until)
        return {"worker": told(worker), "reached": found}


def _outside(caller: Caller) -> None:
    if caller.worker is not None:
        raise WorkerError(Code.FORBIDDEN, "workers of a run are started and ended by the run alone", "run")


def _whose(caller: Caller) -> Caller:
    """Whose threads look at the paths that a caller names."""
    return caller._replace(override=False)


def _role(runtime_dir: str, run: str, role: str, generation: int, library: str) -> Prepared:
    """What the worker of a role is started with, looked at. Raises WorkerError."""
    from agent_intercom.workers import runworker

    prepared = runworker.prepare(runtime_dir, run, role, generation, library=library)
    orders.admit(prepared.unnamed.confinement)
    return prepared
