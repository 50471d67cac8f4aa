# SPDX-License-Identifier: Apache-2.0
"""From what was asked for to a start that can be carried out: the place, the scratch directory and all that is in them.

What a worker outside runs is started with is written into its place, in memory, and read from there for a restart. What
a worker of a run is started with, `runworker` reads where the run keeps it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from os import path
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict

from agent_intercom.workers import confinement, contract, environment, places
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.places import Place
from agent_intercom.workers.provisioning import Order, limited
from agent_intercom.workers.records import Worker
from agent_intercom.workers.spec import Confinement, Launch

if TYPE_CHECKING:
    from agent_intercom.workers.runworker import Prepared

MAX_PATH: Final = 4_095
"""Bytes of a path (PATH_MAX in limits.h, without its NUL); the kernel takes no longer one."""

MAX_WRITABLE: Final = 64
"""How many directories a worker may be given to write in."""

FRESH_ENVIRONMENT: Final = "AGENT_INTERCOM_FRESH"
"""`1` for a worker that is to begin without what it remembers of an earlier start (section 2.8)."""


def digest(text: str) -> str:
    """What stands in the registry for a text that may not."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def digest_of(place: Place) -> str:
    """The same for all that a worker is started with but its task, so that a repeat is told from another start."""
    return digest(json.dumps(asdict(place), sort_keys=True))


def within(directory: str) -> tuple[str, ...]:
    """The digests of a directory and of every one above it."""
    found = [directory]
    while path.dirname(found[-1]) != found[-1]:
        found.append(path.dirname(found[-1]))
    return tuple(map(digest, found))


def confined(place: Place) -> Confinement | None:
    """What the kernel is to refuse a worker outside runs."""
    return None if place.writable is None else Confinement(place.writable, place.network)


def plausible(place: Place) -> None:
    """Raise WorkerError where no worker could be started with this, whatever there is; looks at no file."""
    if not place.arguments or not place.arguments[0]:
        raise WorkerError(Code.INVALID, "say which command is to run", "command")
    _no_longer_than_paths([place.directory], "directory")
    writable = place.writable or ()
    if len(writable) > MAX_WRITABLE:
        raise WorkerError(Code.INVALID, f"it is at most {MAX_WRITABLE} directories", "writable")
    _no_longer_than_paths(writable, "writable")
    if any(not name or "=" in name or "\0" in name + value for name, value in place.environment.items()):
        raise WorkerError(Code.INVALID, "a variable has a name or a value that none can have", "environment")
    if any("\0" in argument for argument in place.arguments):
        raise WorkerError(Code.INVALID, "an argument has a character that none can have", "command")
    limits = confined(place)
    if limits is not None:
        confinement.check(limits, confinement.means())
    elif not place.network:
        raise WorkerError(Code.INVALID, "only a worker that may not write everywhere can be without network", "network")
    for name, value in (
        ("memory_max", place.memory_max),
        ("memory_high", place.memory_high),
        ("tasks_max", place.tasks_max),
    ):
        if value is not None and value < 1:
            raise WorkerError(Code.INVALID, "a limit is at least 1", name)


def _no_longer_than_paths(names: Sequence[str], field: str) -> None:
    if any(len(os.fsencode(name)) > MAX_PATH for name in names):
        raise WorkerError(Code.INVALID, f"a path is at most {MAX_PATH} bytes", field)


def check(place: Place) -> None:
    """Raise WorkerError where a worker could not be started with this, as far as that shows before it is tried."""
    plausible(place)
    if not path.isabs(place.directory) or not path.isdir(place.directory):
        raise WorkerError(Code.INVALID, "it is not an absolute path of a directory that is there", "directory")


def settled(place: Place, library: str) -> Place:
    """The same, checked, with what the paths lead to now, so that a restart gives exactly that.

    `library` is the directory of the launchers, by which who is started finds `orchestrate`.
    """
    check(place)
    directory = path.realpath(place.directory)
    limits = confined(place)
    writable = None if limits is None else tuple(confinement.settled(limits).writable)
    return replaced(place, directory=directory, writable=writable, environment=_finding(place, library))


def _finding(place: Place, library: str) -> dict[str, str]:
    """Its variables, by which `orchestrate` is found; the directories of their PATH are looked at."""
    return environment.with_command(place.environment, environment.commands_of(library))


def check_again(place: Place, library: str) -> Place:
    """What a worker is started with once more; `library` as that of `settled`. Raises WorkerError where it cannot be.

    Of its command only that it is there is looked at: whether it can be executed shows when it is.
    """
    check(place)
    limits = confined(place)
    if limits is not None and set(confinement.settled(limits).writable) != set(limits.writable):
        text = "a directory that it may write is behind a link that was not there when it was started"
        raise WorkerError(Code.INVALID, text, "writable")
    name = place.arguments[0]
    variables = _finding(place, library)
    where = [""] if "/" in name else variables.get("PATH", os.defpath).split(os.pathsep)
    if not any(path.lexists(path.join(place.directory, directory, name)) for directory in where):
        raise WorkerError(Code.COMMAND_NOT_FOUND, "the command was not found", "command")
    return replaced(place, environment=variables)


def admit(limits: Confinement | None) -> None:
    """Raise WorkerError where the worker of a role cannot be confined as its run says; nothing was begun then.

    A run is started with what the paths lead to then: a link that is there since would grant what nobody has granted.
    """
    if limits is None:
        return
    confinement.check(limits, confinement.means())
    if set(confinement.settled(limits).writable) != set(limits.writable):
        text = "a directory that it may write is behind a link that was not there when the run was started"
        raise WorkerError(Code.INVALID, text, "writable")


def replaced(place: Place, **changes: object) -> Place:
    from msgspec.structs import replace

    return replace(place, **changes)


def narrowed(place: Place, parent: Place, scratch: str) -> Place:
    """What a worker asks for below itself, never wider than what it has. Raises WorkerError `grant_exceeded`.

    Limits that it does not ask for are its own; the scope id and the manager are its own whatever it asks for.
    """
    if confinement.wider(confined(place), confined(parent), scratch):
        raise WorkerError(Code.GRANT, "it may change or reach no more than you may yourself", "writable")
    return replaced(
        place,
        scope=parent.scope,
        session=parent.session,
        memory_max=_least(place.memory_max, parent.memory_max),
        memory_high=_least(place.memory_high, parent.memory_high),
        tasks_max=_least(place.tasks_max, parent.tasks_max),
    )


def _least(asked: int | None, own: int | None) -> int | None:
    known = [value for value in (asked, own) if value is not None]
    return min(known, default=None)


def of_person(
    worker: Worker,
    place: Place,
    *,
    runtime_dir: str,
    state_dir: str,
    parent_unit: str | None,
    task: str | None = None,
    fresh: bool = False,
    again: bool = False,
) -> Order:
    """The start of a worker outside runs; its place and its scratch directory are made. Looks at no other path.

    `again`: it was started before, and its place is there. Raises WorkerError; the caller removes what was made.
    """
    directory = places.of_worker(runtime_dir, worker.id)
    scratch = places.scratch_of(state_dir, worker.incarnation)
    places.make(directory)
    if not again:
        places.write(directory, place)
    places.forget_exit(directory)
    if task is not None:
        places.write_task(directory, task)
    output = places.output_directory(directory) if place.keep_output else None
    if output is not None:
        places.make(output)
    places.make_scratch(scratch)
    limits = confined(place)
    launch = Launch(
        arguments=place.arguments,
        environment=_variables(worker, place, directory, scratch, fresh),
        directory=place.directory,
        exit_file=places.exit_file(directory),
        scratch=scratch,
        confinement=limits,
        output=output,
    )
    return Order(
        launch=launch,
        place=directory,
        slice=contract.SLICE_UNIT,
        part_of=[] if parent_unit is None else [parent_unit],
        # Whoever limits the memory of one worker means all of it.
        limits=limited("kill", place.memory_max, place.memory_high, place.tasks_max),
        enforced=enforced(limits),
        keep_place=again,
    )


def _variables(worker: Worker, place: Place, directory: str, scratch: str, fresh: bool) -> dict[str, str]:
    """All variables of a worker outside runs, whose place is `directory`."""
    limits = confined(place)
    added = {contract.TASK_ENVIRONMENT: places.task_file(directory)} if place.task else {}
    added |= {contract.MANAGER_ENVIRONMENT: place.session} if place.session else {}
    added |= {FRESH_ENVIRONMENT: "1"} if fresh else {}
    return environment.build(
        place.environment,
        scope=place.scope,
        identity=environment.Identity(worker.id, worker.incarnation, worker.generation),
        scratch=scratch,
        confined=limits is not None,
        read_only=limits is not None and not any(_below(place.directory, name) for name in limits.writable),
        added=added,
    )


def of_role(worker: Worker, prepared: Prepared, runtime_dir: str) -> Order:
    """The start of a worker of a run; its place and its scratch directory are made."""
    from agent_intercom.workers import runworker

    assert worker.run is not None
    place = places.of_run_worker(runtime_dir, worker.run, worker.incarnation)
    launch = runworker.launch(prepared, places.exit_file(place), worker.id, worker.incarnation)
    places.make(place)
    if launch.output is not None:
        places.make(launch.output)
    places.make_scratch(launch.scratch)
    return Order(
        launch=launch,
        place=place,
        slice=prepared.slice,
        part_of=prepared.part_of,
        limits=prepared.properties,
        enforced=enforced(launch.confinement),
    )


def enforced(limits: Confinement | None) -> tuple[str, ...]:
    """The words of what the kernel enforces; none for a worker that is not confined."""
    return () if limits is None else confinement.plan(limits, confinement.means())


def _below(name: str, directory: str) -> bool:
    return path.commonpath((name, directory)) == directory
