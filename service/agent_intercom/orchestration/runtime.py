# SPDX-License-Identifier: Apache-2.0
"""What a running run's broker is told, and where its socket is: `%t/agent-intercom/run/`.

A user service inherits from the user manager and not from the shell that asked for it. So whoever starts a run writes
its directory, scope id and environment to `<unit id>/run.json` there, and the broker reads it. The place is in memory:
it is gone at reboot, and when the run's socket unit stops. Nothing in it is ever logged or put elsewhere.

`runtime_dir` is always what systemd calls `%t`. Functions raise Refusal: `unit_invalid` for what is no unit id,
`run_unknown` where nothing was written, `run_foreign` where a directory or the file is a link, another user's or open
to others, `run_invalid` for content that is not what `write` writes, `run_exists` where the run was written already,
`run_unwritable` where the file system refuses. `live`, `units` and `listening` raise nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from os import path
from typing import Final, NamedTuple, NoReturn

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT, SCOPE_PATTERN
from agent_intercom.orchestration.contract import ROLES
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import UNIT_ID

VERSION: Final = 1
NAME: Final = "run.json"
MAX_BYTES: Final = 2_097_152
"""As much as the kernel takes as arguments and environment of a new process by default (execve(2))."""

LOGIND: Final = "/run/user"
"""Where pam_systemd(8) makes the runtime directory of every user."""

MAX_SOCKET_PATH: Final = 107
LOCK_TIMEOUT: Final = 15.0
"""Seconds; whoever calls the command line gives it thirty (orchestration spec, section 11.1)."""

_LOCK_INTERVAL: Final = 0.05
_KEYS: Final = frozenset({"version", "directory", "scope", "environment", "observer_report_usage"})
_OPTIONAL_KEYS: Final = frozenset({"programs", "workers"})
_PROGRAM: Final = re.compile(r"[a-z][a-z0-9-]{0,63}", re.ASCII)
_LOCK: Final = ".lock"
_LISTENING: Final = (b"00010000", b"0001", b"01")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Live(NamedTuple):
    """A run that is up: the id of its units, and its directory, which is empty where its place cannot be read."""

    unit: str
    directory: str


class WorkerPlace(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is said of the worker of one role.

    `command` are the words of the harness `command`, its program as an absolute path; no other harness has any.
    `confined`: it may change no files but its own and those in `writable`, which are directories; `required`: it does
    not begin where the kernel cannot see to that; `network` is whether it may use the network. Sizes are bytes,
    `tasks_max` counts processes and threads, `runtime_ms` is how long it may run.
    """

    command: tuple[str, ...] = ()
    confined: bool = True
    required: bool = False
    writable: tuple[str, ...] = ()
    network: bool = True
    memory_max: int | None = None
    memory_high: int | None = None
    tasks_max: int | None = None
    runtime_ms: int | None = None

    def __repr__(self) -> str:
        return "WorkerPlace()"


class RunPlace(msgspec.Struct, kw_only=True, frozen=True):
    """Where a run is and what its workers are given.

    `directory` is the run's directory, `scope` the private scope id (None: unscoped), `environment` all that workers
    inherit, without the scope, `observer_report_usage` whether observers are of an age that knows usage in reports,
    `programs` the absolute paths of what workers are made of, by the names that `harness` gives them, `workers` what is
    said of the workers that are hosted here, by role.
    """

    directory: str
    scope: str | None
    environment: Mapping[str, str]
    observer_report_usage: bool
    programs: Mapping[str, str] = {}
    workers: Mapping[str, WorkerPlace] = {}

    def __repr__(self) -> str:
        return "RunPlace()"


def runtime_dir(environ: Mapping[str, str]) -> str:
    """`%t`: XDG_RUNTIME_DIR, or where logind makes it, for those who call without a session (cron(8), su(1)).

    Raises Refusal `runtime_missing` where it is neither told nor there.
    """
    value = environ.get("XDG_RUNTIME_DIR", "")
    if not path.isabs(value):
        value = path.join(LOGIND, str(os.geteuid()))
        try:
            privatefiles.check_directory(value, closed=True)
        except OSError as error:
            text = f"XDG_RUNTIME_DIR is not set, and there is no {value}: log in through systemd-logind, or set it"
            raise Refusal("runtime_missing", text, "XDG_RUNTIME_DIR") from error
    # The service manager has it without links, and so the addresses of its sockets.
    return path.realpath(value)


def directory_of(runtime_dir: str, unit_id: str) -> str:
    """The private directory of a run, for what has to be in memory and gone with it."""
    return path.join(runtime_dir, "agent-intercom", "run", _checked(unit_id))


def socket_path(runtime_dir: str, unit_id: str) -> str:
    """The address of a run's broker, as `orchestrate@.socket` has it."""
    return directory_of(runtime_dir, unit_id) + ".sock"


def write(runtime_dir: str, unit_id: str, place: RunPlace) -> str:
    """Say where a run is, for the broker that is to be started; the directory that was made.

    Raises Refusal `run_invalid` for a place that could not be read again; a failure leaves nothing behind.
    """
    directory = directory_of(runtime_dir, unit_id)
    if len(os.fsencode(socket_path(runtime_dir, unit_id))) > MAX_SOCKET_PATH:
        raise Refusal("runtime_path_long", "XDG_RUNTIME_DIR is too long for the address of a socket", "XDG_RUNTIME_DIR")
    record = {"version": VERSION, **msgspec.structs.asdict(place)}
    record |= {"environment": dict(place.environment), "programs": dict(place.programs)}
    record["workers"] = {role: msgspec.structs.asdict(worker) for role, worker in place.workers.items()}
    # ASCII, because a variable may have bytes that are no UTF-8.
    content = json.dumps(record).encode()
    _parse(content)
    made: list[str] = []
    try:
        for step in (path.dirname(path.dirname(directory)), path.dirname(directory)):
            if not path.lexists(step):
                os.mkdir(step, 0o700)
                made.append(step)
            privatefiles.close_directory(step)
        os.mkdir(directory, 0o700)
        made.append(directory)
        privatefiles.create(path.join(directory, NAME), content)
    except BaseException as error:
        _take_back(made, path.join(directory, NAME))
        if isinstance(error, FileExistsError):
            raise Refusal("run_exists", "the run is there already", "unit") from error
        if isinstance(error, OSError):
            code = "run_foreign" if error.errno in {errno.ELOOP, errno.EPERM} else "run_unwritable"
            raise Refusal(code, "the runtime directory cannot be written", "unit") from error
        raise
    return directory


def read(runtime_dir: str, unit_id: str) -> RunPlace:
    """What was written for a run."""
    directory = directory_of(runtime_dir, unit_id)
    try:
        for step in (path.dirname(path.dirname(directory)), path.dirname(directory), directory):
            privatefiles.check_directory(step, closed=True)
        content = privatefiles.read(path.join(directory, NAME), MAX_BYTES, closed=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Refusal("run_unknown", "the run is over, or was never started", "unit") from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise Refusal("run_invalid", "the run's place is too long", NAME) from error
        raise Refusal("run_foreign", "the run's place is not private", "unit") from error
    return _parse(content)


def programs(runtime_dir: str, unit_id: str) -> dict[str, str]:
    """The file names of the programs that work, by role, of the harness `command`; none where nobody can tell.

    Never their arguments: those may be private.
    """
    try:
        workers = read(runtime_dir, unit_id).workers
    except Refusal:
        return {}
    return {role: path.basename(worker.command[0]) for role, worker in workers.items() if worker.command}


def remove(runtime_dir: str, unit_id: str) -> bool:
    """Take back what was written, and what was put beside it; False where nothing was there.

    A link in the place of the directory is removed and not followed.
    """
    directory = directory_of(runtime_dir, unit_id)
    if not path.lexists(directory):
        return False
    try:
        if path.islink(directory) or not path.isdir(directory):
            os.unlink(directory)
        else:
            import shutil  # a broker that only reads does without

            shutil.rmtree(directory)
    except OSError as error:
        raise Refusal("run_unwritable", "the run's place cannot be removed", "unit") from error
    return True


@contextlib.contextmanager
def lock(runtime_dir: str, session: str | None = None) -> Iterator[None]:
    """Be the only one who starts, ends or changes a run of `session`; None: of any session of this user.

    Waits at most `LOCK_TIMEOUT` seconds for another one. Raises Refusal `broker_not_ready` after that, `run_foreign`
    where a lock or its directory is not ours alone, `run_unwritable`.
    """
    directory = path.join(runtime_dir, "agent-intercom", "run")
    deadline = time.monotonic() + LOCK_TIMEOUT
    with contextlib.ExitStack() as held:
        everybody = _open_lock(directory, _LOCK)
        held.callback(os.close, everybody)
        _wait_for(everybody, fcntl.LOCK_EX if session is None else fcntl.LOCK_SH, deadline)
        if session is not None:
            import hashlib  # a broker locks nothing here

            # The name is not shown by that of the file.
            digest = hashlib.blake2b(session.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
            descriptor = _open_lock(directory, f"{_LOCK}-{digest}")
            held.callback(os.close, descriptor)
            _wait_for(descriptor, fcntl.LOCK_EX, deadline)
        yield


def _open_lock(directory: str, name: str) -> int:
    try:
        for step in (path.dirname(directory), directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(step, 0o700)
            privatefiles.close_directory(step)
        return privatefiles.opened(path.join(directory, name))
    except OSError as error:
        code = "run_foreign" if error.errno in {errno.ELOOP, errno.EPERM, errno.ENXIO} else "run_unwritable"
        raise Refusal(code, "the runtime directory cannot be locked", _LOCK) from error


def _wait_for(descriptor: int, how: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                text = "another command starts, ends, changes or removes that run, and has not finished"
                raise Refusal("broker_not_ready", text) from error
            # flock(2) can wait, but not for so long and no longer.
            time.sleep(_LOCK_INTERVAL)
        else:
            return


def live(runtime_dir: str) -> list[Live]:
    """The runs that are up, by their units: those at whose address somebody listens.

    Nothing is written, connected to or started. A run is up, too, of which the place cannot be read.
    """
    found = []
    place = path.join(runtime_dir, "agent-intercom", "run")
    for address in sorted(listening()):
        directory, name = path.split(address)
        unit, extension = path.splitext(name)
        if directory != place or extension != ".sock" or UNIT_ID.fullmatch(unit) is None:
            continue
        # Containers may have the network of this machine, and the same path in a file system of their own.
        if not path.lexists(address):
            continue
        where = ""
        with contextlib.suppress(Refusal):
            where = read(runtime_dir, unit).directory
        found.append(Live(unit, where))
    return found


def units(runtime_dir: str) -> list[str]:
    """The units of the runs that have a place, whether they are up or not."""
    try:
        names = os.listdir(path.join(runtime_dir, "agent-intercom", "run"))
    except OSError:
        return []
    return sorted(name for name in names if UNIT_ID.fullmatch(name))


def listening() -> frozenset[str]:
    """The paths of all sockets of this network namespace at which somebody listens (proc_pid_net(5), unix)."""
    try:
        with open("/proc/net/unix", "rb") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return frozenset()
    # Num RefCount Protocol Flags Type St Inode Path; a path may have spaces in it.
    rows = (line.split(maxsplit=7) for line in lines)
    return frozenset(os.fsdecode(row[7]) for row in rows if len(row) == 8 and tuple(row[3:6]) == _LISTENING)


def _take_back(made: list[str], file: str) -> None:
    for step in reversed(made):
        try:
            if step == path.dirname(file) and path.lexists(file):
                os.unlink(file)
            os.rmdir(step)
        except OSError:
            # Somebody else uses it by now.
            return


def _checked(unit_id: str) -> str:
    if UNIT_ID.fullmatch(unit_id) is None:
        raise Refusal("unit_invalid", "not the id of a run", "unit")
    return unit_id


def _parse(content: bytes) -> RunPlace:
    try:
        record = privatefiles.decode(content)
    except ValueError as error:
        raise Refusal("run_invalid", "the run's place is not strict JSON", NAME) from error
    if not isinstance(record, dict) or not _KEYS <= record.keys() <= _KEYS | _OPTIONAL_KEYS:
        _refuse(NAME)
    if len(content) > MAX_BYTES:
        _refuse(NAME)
    version = record.pop("version")
    if type(version) is not int or version != VERSION:
        _refuse("version")
    try:
        place = msgspec.convert(record, RunPlace)
    except (msgspec.ValidationError, UnicodeEncodeError):
        # Not chained: it may quote what it read.
        raise Refusal("run_invalid", "the run's place has a value of the wrong type", NAME) from None
    if not path.isabs(place.directory) or path.normpath(place.directory) != place.directory or "\0" in place.directory:
        _refuse("directory")
    if place.scope is not None and SCOPE_PATTERN.fullmatch(place.scope) is None:
        _refuse("scope")
    for name, value in place.environment.items():
        # Two words for the scope could differ.
        if _VARIABLE.fullmatch(name) is None or "\0" in value or name == SCOPE_ENVIRONMENT:
            _refuse("environment")
    for name, program in place.programs.items():
        if _PROGRAM.fullmatch(name) is None or not path.isabs(program) or "\0" in program:
            _refuse("programs")
    for role, worker in place.workers.items():
        _check_worker(role, worker)
    return place


def _check_worker(role: str, worker: WorkerPlace) -> None:
    sizes = (worker.memory_max, worker.memory_high, worker.tasks_max, worker.runtime_ms)
    if role not in ROLES or any(size is not None and size < 1 for size in sizes):
        _refuse("workers")
    if any("\0" in text for text in (*worker.command, *worker.writable)):
        _refuse("workers")
    if not all(path.isabs(each) for each in (*worker.command[:1], *worker.writable)):
        _refuse("workers")


def _refuse(field: str) -> NoReturn:
    raise Refusal("run_invalid", "the run's place does not say what it must", field)
