# SPDX-License-Identifier: Apache-2.0
"""Scope units of workers that live and are in no row: what a registry knew of that was damaged and is set aside.

They may be somebody's work, so nobody ends them unasked: `cleanup` lists them, and ends them for a person who says so.
Until they have ended, none of the files that might be theirs is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent_intercom.host import cgroups, processes
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event
from agent_intercom.workers import contract, ending, places
from agent_intercom.workers.contract import Code, Outcome
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import explained

if TYPE_CHECKING:
    from agent_intercom.workers.service import Service

PATTERN: Final = "worker-*.scope"
REASON: Final = "stray"
"""Why one was ended, for the journal."""

MAX_PROGRAMS: Final = 8

_RUN: Final = re.compile(r"/orchestrate-([^/]+)\.slice/[^/]+")


class Stray(NamedTuple):
    """A scope unit that lives and is in no row. `run` is the unit id of the run in whose slice it is, or None."""

    unit: str
    incarnation: str
    run: str | None
    control_group: str

    def as_json(self) -> dict[str, Any]:
        """What is told of it: `programs` are what runs in it, so that a person may recognize it."""
        programs = sorted({name for _, name in processes.names(cgroups.members(self.control_group))})
        return {"unit": self.unit, "run": self.run, "programs": programs[:MAX_PROGRAMS]}


async def find(service: Service) -> list[Stray]:
    """All of them, by name. Raises WorkerError where nobody can tell: `manager_unreachable`, `store_unusable`."""
    if service.unusable is not None:
        raise WorkerError(Code.STORE, "the registry of workers cannot be used", "store")
    async with explained(Code.MANAGER_UNREACHABLE, "the scope units of workers cannot be listed"):
        states = await (await service.managers.scopes()).states(PATTERN)
    # Afterwards: a row comes before its unit.
    known = {worker.unit for worker in service.registry.live()}
    known.update(map(contract.scope_unit, service.running))
    found = []
    for name, state in sorted(states.items()):
        match = contract.UNIT.fullmatch(name)
        if match is not None and name not in known and _populated(state.control_group):
            found.append(Stray(name, match["incarnation"], _run(state.control_group), state.control_group))
    return found


async def end(service: Service, strays: Iterable[Stray]) -> tuple[list[str], int]:
    """End them, one after the other, with their scratch directories: the units that have ended, and how many have not.

    The place of one that was of no run goes when an idle service starts again: which it is, only its row could tell.
    """
    ended, failed = [], 0
    for stray in strays:
        try:
            await ending.end(service.managers, stray.unit, stray.control_group)
        except WorkerError as error:
            service.journal.emit(Event.WORKER_STOP_FAILED, worker=stray.incarnation, code=error.code)
            failed += 1
            continue
        service.journal.emit(Event.WORKER_ENDED, worker=stray.incarnation, outcome=Outcome.UNKNOWN, reason=REASON)
        await service.remove(places.scratch_of(service.state_dir, stray.incarnation))
        ended.append(stray.unit)
    return ended, failed


def _run(control_group: str) -> str | None:
    match = _RUN.search(control_group)
    return match[1] if match is not None and f"orchestrate-{match[1]}.slice" != contract.SLICE_UNIT else None


def _populated(control_group: str) -> bool:
    try:
        return bool(control_group) and cgroups.populated(control_group)
    except HostError:
        # It cannot be seen: that it is empty is not proved.
        return True
