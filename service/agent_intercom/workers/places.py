# SPDX-License-Identifier: Apache-2.0
"""Where the private things of workers lie (managed-workers spec, sections 4.3 and 9.4).

The *place* of a worker is in memory, below `%t/agent-intercom`, 0700 with files of 0600. A worker of a run has one for
each incarnation, `run/UNIT/worker-INCARNATION`, any other has one for life, `worker/ID`, with all that a restart needs.
Its *scratch* directory is on a disk, and gone once the incarnation is. Nothing of either is logged or in a database.

`runtime_dir` is what systemd calls `%t`. Functions raise WorkerError: `place_lost` for what is not there or not as it
was written, `start_failed` where the file system refuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from os import path
from typing import Any, Final, NamedTuple

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.workers import contract
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

_ASIDE: Final = re.compile(r"workers\.sqlite3\.damaged-([0-9]{1,9})", re.ASCII)
PRODUCT: Final = "agent-intercom"
PLACE_NAME: Final = "place.json"
EXIT_NAME: Final = "exit.json"
ROLE_NAME: Final = "worker.json"
TASK_NAME: Final = "task"
OUTPUT_NAME: Final = "output"

_RUN_PREFIX: Final = "worker-"
_MAX_PLACE: Final = contract.MAX_FRAME
_MAX_ROLE: Final = 65_536
_MAX_EXIT: Final = 4_096


class Place(msgspec.Struct, kw_only=True, frozen=True):
    """All that a worker which belongs to no run was started with, so that a restart gives it exactly the same.

    `environment` is what the caller passed, without what is added for each incarnation; `scope` the private scope id
    (None: unscoped). `writable` None means unconfined. `session` is that of the manager who started it, or empty.
    Sizes are bytes, None meaning no limit of its own.
    """

    arguments: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    scope: str | None = None
    session: str = ""
    writable: tuple[str, ...] | None = None
    network: bool = True
    memory_max: int | None = None
    memory_high: int | None = None
    tasks_max: int | None = None
    keep_output: bool = False
    task: bool = False
    version: int = 1

    def __repr__(self) -> str:
        return "Place()"


class RoleWorker(msgspec.Struct, kw_only=True, frozen=True):
    """The worker of a role of a run, for `status`, which asks nobody.

    `unit` is its scope unit, `pid` the shim's, `enforced` has the words of `confinement.plan`.
    """

    role: str
    generation: int
    unit: str
    pid: int
    enforced: tuple[str, ...] = ()


def of_worker(runtime_dir: str, worker_id: str) -> str:
    """The place of a worker that belongs to no run."""
    return path.join(runtime_dir, PRODUCT, "worker", _checked(worker_id))


def of_run_worker(runtime_dir: str, unit: str, incarnation: str) -> str:
    """The place of one incarnation of a worker of the run with unit id `unit`."""
    return path.join(runtime_dir, PRODUCT, "run", unit, _RUN_PREFIX + _checked(incarnation))


class Exit(NamedTuple):
    """How a command ended: its exit status or the signal that ended it, and when (milliseconds since the epoch)."""

    code: int | None
    signal: int | None
    at: int


def exit_file(place: str) -> str:
    """Where the shim writes how the command ended."""
    return path.join(place, EXIT_NAME)


def read_exit(file: str) -> Exit | None:
    """How a command ended, as its shim has written it; None where nobody has."""
    try:
        record: Any = privatefiles.decode(privatefiles.read(file, _MAX_EXIT))
        code, killer, at = record["code"], record["signal"], record["at"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = (code if killer is None else killer, at)
    if (code is None) == (killer is None) or any(type(number) is not int or number < 0 for number in numbers):
        return None
    return Exit(code, killer, at)


def task_file(place: str) -> str:
    """Where a worker reads its task, which is in no argument and no variable."""
    return path.join(place, TASK_NAME)


def output_directory(place: str) -> str:
    """Where the private ring of the output of a worker outside runs is, of all its starts."""
    return path.join(place, OUTPUT_NAME)


def output_of_role(runtime_dir: str, unit: str, role: str) -> str:
    """The same of the workers of a role in a run; it goes with the run."""
    return path.join(runtime_dir, PRODUCT, "run", unit, f"{OUTPUT_NAME}-{role}")


def make(place: str) -> None:
    """Make a place, private and with the directories above it; one that is there stays."""
    try:
        _make_private(place, os.sep)
    except OSError as error:
        raise WorkerError(Code.START_FAILED, _why("the runtime directory", error), "runtime_dir") from error


def forget_exit(place: str) -> None:
    """Take away how the incarnation before ended."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(exit_file(place))


def write(place: str, content: Place) -> None:
    """Say what a worker is, in its place, which is there."""
    _replace(path.join(place, PLACE_NAME), encoded(content))


def encoded(content: Place) -> bytes:
    """What `write` writes. Raises WorkerError `invalid_request` for more than `read` reads."""
    text = json.dumps(msgspec.structs.asdict(content), ensure_ascii=False, separators=(",", ":"))
    # A variable may have bytes that are no UTF-8: they become escapes.
    made = text.encode("utf-8", "backslashreplace")
    if len(made) > _MAX_PLACE:
        text = f"with the arguments it is longer than the {_MAX_PLACE} bytes that are kept for a restart: pass less"
        raise WorkerError(Code.INVALID, text, "environment")
    return made


def read(place: str) -> Place:
    """What was written there."""
    try:
        privatefiles.check_directory(place, closed=True)
        content = privatefiles.read(path.join(place, PLACE_NAME), _MAX_PLACE, closed=True)
        return msgspec.convert(privatefiles.decode(content), Place)
    except (OSError, ValueError, msgspec.ValidationError, UnicodeEncodeError):
        # Not chained: the library's own exception may quote what it read.
        text = "what it was started with is gone, with its stop or a restart of the machine: start it anew"
        raise WorkerError(Code.PLACE_LOST, text, "worker") from None


def write_task(place: str, task: str) -> None:
    """Put the task where the worker reads it."""
    _replace(task_file(place), task.encode("utf-8", "surrogateescape"))


def write_role(place: str, content: RoleWorker) -> None:
    """Say which role's worker lives in a place of a run."""
    _replace(path.join(place, ROLE_NAME), msgspec.json.encode(content))


def run_workers(runtime_dir: str, unit: str) -> list[RoleWorker]:
    """The workers of a run that were started and not seen to have ended, by role and generation. Raises nothing.

    What is not as `write_role` writes it is passed over.
    """
    directory = path.join(runtime_dir, PRODUCT, "run", unit)
    found = []
    for name in _names(directory):
        if not name.startswith(_RUN_PREFIX):
            continue
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            content = privatefiles.read(path.join(directory, name, ROLE_NAME), _MAX_ROLE, closed=True)
            found.append(msgspec.json.decode(content, type=RoleWorker))
    return sorted(found, key=lambda worker: (worker.role, worker.generation))


def worker_ids(runtime_dir: str) -> list[str]:
    """The ids of the workers outside runs that have a place."""
    return [name for name in _names(path.join(runtime_dir, PRODUCT, "worker")) if contract.ID.fullmatch(name)]


def remove(directory: str) -> bool:
    """Remove a place or a scratch directory with all that is in it; whether nothing of it is left.

    Links in it are removed and not followed; directories that were closed are opened first. Whoever may write in it
    and lives can keep that from its end: remove it when the worker and all below it have ended.
    """
    from agent_intercom.orchestration import removal  # few commands remove anything

    try:
        removal.clear(directory)
    except OSError:
        return False
    return True


def scratch_of(state_dir: str, incarnation: str) -> str:
    """The scratch directory of a worker that belongs to no run; `state_dir` is `$XDG_STATE_HOME/agent-intercom`."""
    return path.join(state_dir, "workers", _checked(incarnation))


def scratch_of_role(run_directory: str, role: str, generation: int) -> str:
    """The scratch directory of a role's worker, in the run's own directory."""
    return path.join(run_directory, "scratch", f"{role}-g{generation}")


def make_scratch(directory: str) -> None:
    """Make a scratch directory, empty: what an incarnation before left in it is removed."""
    if not remove(directory):
        raise WorkerError(Code.START_FAILED, "the scratch directory of an earlier worker cannot be removed", "scratch")
    try:
        _make_private(directory, os.sep)
    except OSError as error:
        raise WorkerError(Code.START_FAILED, _why("the scratch directory", error), "scratch") from error


def leftovers(state_dir: str, keep: Iterable[str]) -> list[str]:
    """The scratch directories outside runs that belong to none of the incarnations `keep`."""
    directory = path.join(state_dir, "workers")
    kept = set(keep)
    return [path.join(directory, n) for n in _names(directory) if contract.ID.fullmatch(n) and n not in kept]


def set_aside(state_dir: str) -> str | None:
    """The name of the registry that was set aside last because it was damaged; None where there is none."""
    found = [(int(match[1]), name) for name in _names(state_dir) if (match := _ASIDE.fullmatch(name))]
    return max(found)[1] if found else None


def state_dir(environ: Mapping[str, str]) -> str:
    """`$XDG_STATE_HOME/agent-intercom`, as every part of the product has it; it need not be there."""
    from agent_intercom.orchestration import places
    from agent_intercom.orchestration.errors import Refusal

    base = environ.get("XDG_STATE_HOME", "")
    if not path.isabs(base):
        try:
            base = path.join(places.home(environ), ".local", "state")
        except Refusal as refusal:
            raise WorkerError(Code.START_FAILED, refusal.text, refusal.field or "HOME") from refusal
    return path.join(path.normpath(base), PRODUCT)


def _make_private(directory: str, root: str) -> None:
    missing = []
    step = directory
    while step != root and not path.lexists(step):
        missing.append(step)
        step = path.dirname(step)
    for step in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(step, 0o700)
    privatefiles.close_directory(directory)


def _replace(name: str, content: bytes) -> None:
    try:
        privatefiles.replace(name, content)
    except OSError as error:
        raise WorkerError(Code.START_FAILED, _why("the worker's place", error), "runtime_dir") from error


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _checked(number: str) -> str:
    if contract.ID.fullmatch(number) is None:
        raise WorkerError(Code.INVALID, "not the id of a worker", "worker")
    return number


def _why(what: str, error: OSError) -> str:
    return f"{what} cannot be written: {os.strerror(error.errno or 0)}"
