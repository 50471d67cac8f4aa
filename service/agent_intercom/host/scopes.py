# SPDX-License-Identifier: Apache-2.0
"""Scope units of the user's service manager (systemd.scope(5), org.freedesktop.systemd1(5)), in an event loop.

A scope unit is what systemd makes of processes that somebody else has started. It knows no exit status, and what it
says of itself may be wrong or gone within a millisecond: what is proved of a worker is proved by its control group.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, NamedTuple, Self

from agent_intercom.host import processes
from agent_intercom.host.bus import BUS, Bus, Signal
from agent_intercom.host.manager import (
    CALL_TIMEOUT,
    JOB_TIMEOUT,
    MANAGER,
    MANAGER_PATH,
    NO_SUCH_UNIT,
    PROPERTIES,
    SYSTEMD,
    JobFailed,
    ManagerError,
    ManagerRefused,
    ManagerUnreachable,
    Variant,
)

FREEZE_TIMEOUT: Final = 5.0
RETURN_TIMEOUT: Final = 2.0

_UNIT: Final = f"{SYSTEMD}.Unit"
_SCOPE: Final = f"{SYSTEMD}.Scope"
_UNITS_PATH: Final = f"{MANAGER_PATH}/unit"
_SUBSCRIBED: Final = f"{SYSTEMD}.AlreadySubscribed"
_EXISTS: Final = f"{SYSTEMD}.UnitExists"
_PIDFDS: Final = 255
"""The version of systemd since which a process can be named by a descriptor, so that it cannot be another by then."""

_ESCAPED: Final = re.compile(r"_([0-9a-f]{2})")
_ENDED: Final = frozenset({"inactive", "failed"})

Changed = Callable[[str, str, str, str], None]
"""Given a scope unit, and what systemd calls its ActiveState, SubState and Result."""


class Started(NamedTuple):
    """A scope unit with its process in it: the control group, and the 32 digits of this start (InvocationID)."""

    control_group: str
    invocation_id: str


class ScopeState(NamedTuple):
    """A loaded scope unit, by what systemd calls its ActiveState, SubState, Result, FreezerState and so on."""

    active: str
    sub: str
    result: str
    freezer: str
    control_group: str
    invocation_id: str


class NotPlaced(ManagerError):
    """A process is not where it has to be for, or after, the start of a scope unit.

    `reason` is `ended`, or `elsewhere` (not in the control group of who started it, so that it is another one or was
    placed before; nothing was asked of systemd), or `moved` (the job is done, and it is not in the unit).
    """

    def __init__(self, unit: str, reason: str) -> None:
        super().__init__(f"the process for {unit} is not where it should be: {reason}")
        self.unit = unit
        self.reason = reason


class Scopes:
    """A connection to the user's service manager. Use as an async context manager.

    Raises `host.manager.ManagerError`: ManagerUnreachable where there is no bus or no manager, ManagerRefused for
    what the manager answers with an error. `lost` is set when the bus has gone; such an object is of no more use.
    A manager that goes and soon comes back (daemon-reexec) is asked again, once, and subscribed to, see `returned`.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.lost = asyncio.Event()
        self._bus = Bus(self._heard, self._gone, environ)
        self._stack = AsyncExitStack()
        self._owner = ""
        self._back = asyncio.Event()
        self._version: int | None = None
        self._jobs: dict[str, list[_Job]] = {}
        self._asking = 0
        self._early: dict[str, str] = {}
        self._changed: list[Changed] = []
        self._returned: list[Callable[[], None]] = []
        self._results: dict[str, str] = {}
        self._starting: set[str] = set()
        self._returning: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._bus)
            # Before anything is asked for: a job may be done before the answer that names it has come.
            await self._bus.match(sender=SYSTEMD, path=MANAGER_PATH, interface=MANAGER, member="JobRemoved")
            await self._bus.match(sender=BUS, interface=BUS, member="NameOwnerChanged", arg0=SYSTEMD)
            for kind in (_SCOPE, _UNIT):
                rule = {"interface": PROPERTIES, "member": "PropertiesChanged", "path_namespace": _UNITS_PATH}
                await self._bus.match(sender=SYSTEMD, **rule, arg0=kind)
            self._owner = str((await self._bus.bus("GetNameOwner", "s", SYSTEMD))[0])
            await self._subscribe()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait({self._returning})
        await self._stack.aclose()

    def changes(self, callback: Changed) -> None:
        """Have changes of every scope unit of the user's told, ours or not; of one of ours first that it is active.

        That is the only place where the result of a unit that is collected at its end can be read.
        """
        self._changed.append(callback)

    def returned(self, callback: Callable[[], None]) -> None:
        """Have it told that the manager is another process since now: changes may have been missed."""
        self._returned.append(callback)

    # Scope units.

    async def start(
        self, unit: str, pid: int, properties: Mapping[str, Variant], timeout: float = JOB_TIMEOUT
    ) -> Started:
        """Make the scope unit `unit` of a child process, wait until it is started and verify that the process is in it.

        The child must not have been waited for, and still be in the control group of this process: a second scope
        unit for a process would take it out of the first one without a word. `timeout` is in seconds.

        Raises NotPlaced, JobFailed, and ManagerRefused, also for a name that was used before. The unit is stopped again
        where it did not come about as asked; the process is the caller's to end. After ManagerUnreachable, or where the
        caller is cancelled, it may be there or not.
        """
        named = -1
        try:
            named = os.pidfd_open(pid) if await self.version() >= _PIDFDS else -1
            identity = processes.identify(pid)
            if identity is None:
                raise NotPlaced(unit, "ended")
            if processes.cgroup_of(pid) != processes.cgroup_of(os.getpid()):
                raise NotPlaced(unit, "elsewhere")
            who: tuple[str, Variant] = ("PIDFDs", ("ah", [named])) if named >= 0 else ("PIDs", ("au", [pid]))
            given = [*properties.items(), who]
            owner = self._owner
            try:
                self._starting.add(unit)
                try:
                    await self._job(unit, timeout, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", given, [])
                except ManagerRefused as error:
                    # Where it was asked twice the first one may have made it, which is verified like any other.
                    if error.name != _EXISTS or self._owner == owner:
                        raise
                return await self._verified(unit, identity)
            except (JobFailed, NotPlaced):
                await self._withdraw(unit)
                raise
        except ProcessLookupError as error:
            raise NotPlaced(unit, "ended") from error
        finally:
            self._starting.discard(unit)
            if named >= 0:
                os.close(named)

    async def stop(self, unit: str, timeout: float = JOB_TIMEOUT) -> bool:
        """Stop a unit and wait until it is stopped, at most `timeout` seconds; False where none is loaded.

        Raises JobFailed. That the job is done is no proof that nobody is left: see `host.cgroups.emptied`.
        """
        with suppress(_NoSuchUnit):
            await self._job(unit, timeout, "StopUnit", "ss", unit, "replace")
            return True
        return False

    async def kill(self, unit: str, signal: int) -> bool:
        """Send a signal to every process of a unit; False where none is loaded."""
        return await self._of_loaded("KillUnit", "ssi", unit, "all", signal)

    async def freeze(self, unit: str) -> bool:
        """Freeze every process of a unit, and wait until they are; False where none is loaded.

        Raises ManagerRefused where there is no freezer. RuntimeMaxUSec= counts meanwhile.
        """
        return await self._of_loaded("FreezeUnit", "s", unit, timeout=FREEZE_TIMEOUT)

    async def thaw(self, unit: str) -> bool:
        """Undo `freeze`; False where none is loaded."""
        return await self._of_loaded("ThawUnit", "s", unit, timeout=FREEZE_TIMEOUT)

    async def reset_failed(self, unit: str) -> bool:
        """Forget that a unit has failed; False where none is loaded."""
        return await self._of_loaded("ResetFailedUnit", "s", unit)

    async def state(self, unit: str) -> ScopeState | None:
        """How a scope unit is, or None where none is loaded."""
        with suppress(_NoSuchUnit):
            path = (await self._manager("GetUnit", "s", unit, unit=unit))[0]
            return await self._state(str(path))
        return None

    async def states(self, pattern: str) -> dict[str, ScopeState]:
        """The loaded scope units of which the name matches a pattern (glob(7))."""
        (listed,) = await self._manager("ListUnitsByPatterns", "asas", [], [pattern])
        found = {}
        for name, _, _, _, _, _, path, *_ in listed:
            if str(name).endswith(".scope") and (state := await self._state(str(path))) is not None:
                found[str(name)] = state
        return found

    async def ending(self, unit: str) -> bool:
        """Whether a unit of any kind is not active, or has a job to stop it."""
        with suppress(_NoSuchUnit):
            path = (await self._manager("GetUnit", "s", unit, unit=unit))[0]
            (properties,) = await self._call(str(path), PROPERTIES, "GetAll", "s", _UNIT)
            number, job = properties["Job"][1]
            if properties["ActiveState"][1] != "active":
                return True
            if not number:
                return False
            with suppress(ManagerRefused):
                answer = await self._call(str(job), PROPERTIES, "Get", "ss", f"{SYSTEMD}.Job", "JobType")
                return str(answer[0][1]) == "stop"
            # It has been done since, whatever it was.
            return await self.ending(unit)
        return True

    # The manager.

    async def jobs(self) -> int:
        """How many jobs the manager has queued or under way (NJobs)."""
        return int(await self._property("NJobs"))

    async def version(self) -> int:
        """The number of systemd's version, such as 257."""
        if self._version is None:
            number = re.search(r"\d+", str(await self._property("Version")))
            self._version = int(number[0]) if number else 0
        return self._version

    # How it is done.

    async def _verified(self, unit: str, identity: processes.Identity) -> Started:
        state = await self.state(unit)
        if not processes.alive(identity):
            raise NotPlaced(unit, "ended")
        if state is None or not state.control_group or processes.cgroup_of(identity.pid) != state.control_group:
            raise NotPlaced(unit, "moved")
        return Started(state.control_group, state.invocation_id)

    async def _withdraw(self, unit: str) -> None:
        with suppress(ManagerError):
            await self._manager("StopUnit", "ss", unit, "replace", unit=unit)
        with suppress(ManagerError):
            await self.reset_failed(unit)

    async def _state(self, path: str) -> ScopeState | None:
        found: dict[str, Any] = {}
        for interface in (_UNIT, _SCOPE):
            (properties,) = await self._call(path, PROPERTIES, "GetAll", "s", interface)
            found.update({key: value for key, (_, value) in properties.items()})
        # One that was unloaded since it was named is there as what could not be found.
        if found.get("LoadState") != "loaded":
            return None
        names = ("ActiveState", "SubState", "Result", "FreezerState", "ControlGroup")
        active, sub, result, freezer, control_group = (str(found.get(name, "")) for name in names)
        invocation_id = bytes(found.get("InvocationID", b"")).hex()
        return ScopeState(active, sub, result, freezer, control_group, invocation_id)

    async def _of_loaded(
        self, member: str, signature: str, unit: str, *arguments: Any, timeout: float = CALL_TIMEOUT
    ) -> bool:
        with suppress(_NoSuchUnit):
            await self._manager(member, signature, unit, *arguments, unit=unit, timeout=timeout)
            return True
        return False

    async def _job(self, unit: str, timeout: float, member: str, signature: str, *arguments: Any) -> None:
        job = _Job(unit, member == "StopUnit", asyncio.get_running_loop().create_future())
        path = ""
        try:
            async with asyncio.timeout(timeout):
                self._asking += 1
                try:
                    patience = max(timeout, CALL_TIMEOUT)
                    answer = await self._manager(member, signature, *arguments, unit=unit, timeout=patience)
                    path = str(answer[0])
                    self._jobs.setdefault(path, []).append(job)
                    if path in self._early:
                        self._finish(path, self._early[path])
                finally:
                    self._asking -= 1
                    if not self._asking:
                        self._early.clear()
                result = await job.result
        except TimeoutError as error:
            raise JobFailed(unit, "unfinished") from error
        finally:
            if job in (waiting := self._jobs.get(path, [])):
                waiting.remove(job)
            if not waiting:
                self._jobs.pop(path, None)
        if result != "done":
            raise JobFailed(unit, result)

    def _finish(self, path: str, result: str) -> None:
        for job in self._jobs.pop(path, []):
            if not job.result.done():
                job.result.set_result(result)

    async def _property(self, name: str) -> Any:
        answer = await self._call(MANAGER_PATH, PROPERTIES, "Get", "ss", MANAGER, name)
        return answer[0][1]

    async def _manager(
        self, member: str, signature: str, *arguments: Any, unit: str = "", timeout: float = CALL_TIMEOUT
    ) -> tuple[Any, ...]:
        try:
            return await self._call(MANAGER_PATH, MANAGER, member, signature, *arguments, unit=unit, timeout=timeout)
        except ManagerRefused as error:
            if error.name == NO_SUCH_UNIT:
                raise _NoSuchUnit(error.name, unit) from error
            raise

    async def _call(
        self, path: str, interface: str, member: str, signature: str, *arguments: Any, **more: Any
    ) -> tuple[Any, ...]:
        """Call a method of the manager's; once more where it went meanwhile and has come back. `more`: see `Bus`."""
        owner = self._owner
        try:
            return await self._bus.call(SYSTEMD, path, interface, member, signature, *arguments, **more)
        except ManagerUnreachable:
            if self.lost.is_set() or not await self._came_back(owner):
                raise
        return await self._bus.call(SYSTEMD, path, interface, member, signature, *arguments, **more)

    async def _came_back(self, owner: str) -> bool:
        """Whether another manager than `owner`, which did not answer, is there after a while at most."""
        if self._owner in ("", owner):
            # That it has gone may be told only after that.
            self._back.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._back.wait(), RETURN_TIMEOUT)
        return self._back.is_set()

    async def _subscribe(self) -> None:
        try:
            await self._bus.call(SYSTEMD, MANAGER_PATH, MANAGER, "Subscribe")
        except ManagerRefused as error:
            if error.name != _SUBSCRIBED:
                raise

    # What is heard.

    def _heard(self, signal: Signal) -> None:
        # Any process of the user's can send us anything: only the sender is the bus's word.
        if signal.sender == BUS and signal.member == "NameOwnerChanged" and signal.body[0] == SYSTEMD:
            self._owned(str(signal.body[2]))
        elif signal.sender != self._owner:
            return
        elif signal.member == "JobRemoved" and signal.interface == MANAGER:
            _, path, _, result = signal.body
            if path in self._jobs:
                self._finish(str(path), str(result))
            elif self._asking:
                self._early[str(path)] = str(result)
        elif signal.member == "PropertiesChanged" and signal.interface == PROPERTIES:
            self._properties_changed(signal)

    def _properties_changed(self, signal: Signal) -> None:
        unit = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), signal.path.rpartition("/")[2])
        if not unit.endswith(".scope"):
            return
        interface, properties, _ = signal.body
        # systemd sends what is special to the kind of unit first, then what every unit has.
        if interface == _SCOPE and "Result" in properties:
            self._results[unit] = str(properties["Result"][1])
        elif interface == _UNIT and "ActiveState" in properties:
            active, sub = (str(properties.get(name, ("s", ""))[1]) for name in ("ActiveState", "SubState"))
            result = self._results.get(unit, "")
            if active not in _ENDED:
                self._starting.discard(unit)
            elif unit in self._starting:
                # It has not begun yet.
                return
            else:
                self._results.pop(unit, None)
            for callback in self._changed:
                callback(unit, active, sub, result)

    def _gone(self) -> None:
        self.lost.set()
        self._back.set()
        for job in [job for jobs in self._jobs.values() for job in jobs if not job.result.done()]:
            job.result.set_exception(ManagerUnreachable("the user's bus has gone"))

    def _owned(self, owner: str) -> None:
        self._owner, self._version = owner, None
        self._back.clear()
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        if owner:
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        with suppress(ManagerError):
            await self._subscribe()
            self._back.set()
            for path, jobs in list(self._jobs.items()):
                await self._look_after(path, jobs[0])
        for callback in self._returned:
            callback()

    async def _look_after(self, path: str, job: _Job) -> None:
        """Find out about a job whose end may not have been told: it keeps its name in the manager that came after."""
        with suppress(ManagerRefused):
            await self._bus.call(SYSTEMD, path, PROPERTIES, "Get", "ss", f"{SYSTEMD}.Job", "State")
            return
        state = await self.state(job.unit)
        active = state is not None and state.active == "active"
        self._finish(path, "done" if active != job.stops else "failed")


class _NoSuchUnit(ManagerRefused):
    pass


class _Job(NamedTuple):
    """Somebody who waits for a job: for which unit, whether it is a stop, and what becomes its result."""

    unit: str
    stops: bool
    result: asyncio.Future[str]
