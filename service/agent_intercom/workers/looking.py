# SPDX-License-Identifier: Apache-2.0
"""The actions of the worker service that change nothing: list, status, logs and health."""

from __future__ import annotations

import asyncio
import contextlib
from os import path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from agent_intercom import __version__
from agent_intercom.host import cgroups, processes
from agent_intercom.host.manager import ManagerError
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import confinement, contract, limits, pausing, places, ring, strays
from agent_intercom.workers.answers import Known, told
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import TERMINAL
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.removing import left_behind
from agent_intercom.workers.spec import Confinement
from agent_intercom.workers.strays import Stray
from agent_intercom.workers.terms import Caller

if TYPE_CHECKING:
    from agent_intercom.workers.records import Worker
    from agent_intercom.workers.service import Service

OUTPUT_MAX: Final = 262_144
"""Bytes of a worker's output that are told at most."""


class List(msgspec.Struct, forbid_unknown_fields=True):
    all: bool = False
    history: bool = False


class Status(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class Logs(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    lines: Annotated[int, msgspec.Meta(ge=1, le=contract.MAX_EVENTS)] = 80
    output: bool = False


class Health(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Looking:
    """What is there. `known` is as that of `Actions`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = service.registry
        self.known: Known = {
            "list": (List, self._list, False),
            "status": (Status, self._status, False),
            "logs": (Logs, self._logs, False),
            "health": (Health, self._health, False),
        }

    async def _list(self, caller: Caller, asked: List) -> dict[str, Any]:
        listed = self._registry.list(caller, now_ms(), everyone=asked.all, history=asked.history)
        workers = [told(worker) for worker in listed.workers]
        return {"workers": workers, "hidden": listed.hidden, "more": listed.more, "set_aside": self._set_aside(caller)}

    async def _status(self, caller: Caller, asked: Status) -> dict[str, Any]:
        worker = self._registry.find(caller, asked.worker)
        if worker.state in TERMINAL or worker.placed is None:
            return {"worker": told(worker), "processes": [], "unit": None, "unenforced": []}
        group = worker.placed.control_group
        unit = await self._unit(worker, group)
        # It may have been paused past us, or have ended meanwhile.
        worker = self._registry.get(worker.id) or worker
        found = processes.names(cgroups.members(group))
        return {
            "worker": told(worker),
            "processes": [{"pid": pid, "name": name} for pid, name in found],
            "unit": unit,
            "unenforced": unenforced(self._service, worker),
        }

    async def _unit(self, worker: Worker, group: str) -> dict[str, Any] | None:
        """What systemd and the kernel say of a scope unit; None where there is none.

        What systemd would say is null where no service manager answers: that tells nothing of the unit.
        """
        told: dict[str, Any] = dict.fromkeys(("active", "sub", "result", "freezer"))
        with contextlib.suppress(WorkerError):
            state = await pausing.seen(self._service, worker)
            if state is None:
                return None
            told = {name: getattr(state, name) for name in told}
        return {
            **told,
            "memory_bytes": _number(group, "memory.current"),
            "tasks": _number(group, "pids.current"),
            "cpu_usec": cgroups.cpu_usec(group),
        }

    async def _logs(self, caller: Caller, asked: Logs) -> dict[str, Any]:
        worker = self._registry.readable(caller, asked.worker)
        events = [msgspec.to_builtins(event) for event in self._registry.events(worker.id, asked.lines)]
        output = await asyncio.to_thread(self._output, worker, asked.lines) if asked.output else None
        return {"events": events, "output": output}

    def _output(self, worker: Worker, lines: int) -> str | None:
        """The end of what a worker has printed, in all its starts; None where nobody keeps it, or its run is over."""
        try:
            if worker.run is not None:
                directory = places.output_of_role(self._service.runtime_dir, worker.run, worker.role)
                kept = path.isdir(directory)
            else:
                place = self._service.place_of(worker)
                directory, kept = places.output_directory(place), places.read(place).keep_output
            if not kept:
                return None
            content = ring.read(directory, OUTPUT_MAX)
        except (WorkerError, OSError):
            return None
        return "".join(content.decode("utf-8", "replace").splitlines(keepends=True)[-lines:])

    async def _health(self, caller: Caller, asked: Health) -> dict[str, Any]:
        seen = self._registry.list(caller, now_ms(), everyone=True).workers
        # It may be well again.
        with contextlib.suppress(WorkerError):
            self._service.ready()
        unusable, unknown = self._service.unusable, await self._strays(caller)
        systemd = None
        try:
            systemd = await (await self._service.managers.scopes()).version()
        except (WorkerError, ManagerError):
            # It is told as what it is: nothing that could be asked.
            systemd = None
        return {
            "version": __version__,
            # Of those that it may see: how many there are is nobody else's.
            "live": sum(worker.state not in TERMINAL for worker in seen),
            "systemd": systemd,
            # The code of what prevents the registry from being written, or None.
            "store": self._service.behind or (None if unusable is None else str(unusable.code)),
            # Why it cannot even be read, so that no worker is known, or None.
            "unusable": None if unusable is None else unusable.text,
            # Known once a worker was started.
            "lacking": sorted(self._service.managers.lacking),
            "strays": None if unknown is None else len(unknown),
            # Directories of workers that have ended, which could not be removed; None where nobody can tell.
            "left": None if unknown is None else len(await left_behind(self._service, unknown)),
            "set_aside": self._set_aside(caller),
            "confinement": list(confinement.plan(Confinement((), False), confinement.means())),
        }

    def _set_aside(self, caller: Caller) -> str | None:
        """The file of the last registry that was damaged and is set aside; None: there is none, or nobody is told."""
        if caller.worker is not None:
            return None
        return places.set_aside(self._service.state_dir)

    async def _strays(self, caller: Caller) -> list[Stray] | None:
        """The workers that live and are in no row; None where nobody can tell, or it is nothing to the caller."""
        if caller.worker is not None:
            return None
        try:
            return await strays.find(self._service)
        except WorkerError:
            return None


def unenforced(service: Service, worker: Worker) -> list[str]:
    """The limits that a worker was given and nobody in its unit is held to, by their names in its place."""
    if worker.placed is None:
        return []
    given: limits.Limited | None = None
    with contextlib.suppress(WorkerError, Refusal):
        if worker.run is None:
            given = places.read(service.place_of(worker))
        else:
            given = runtime.read(service.runtime_dir, worker.run).workers.get(worker.role)
    return [] if given is None else list(limits.unheld(given, worker.placed.control_group))


def _number(group: str, name: str) -> int | None:
    directory = cgroups.directory(group)
    try:
        with open(f"{directory}/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
