# SPDX-License-Identifier: Apache-2.0
"""What lies on disk of runs, with its age and size, and what of it is in use: for `prune` and `doctor`.

Read-only like `runs`: nothing is made or touched, no link is followed and nobody is connected to. But everything is
looked at, where `runs` reads pages: a state root may hold more than a page.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from os import path
from typing import Final, NamedTuple

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import manifest, places, rootscan, runtime, startup, tmux
from agent_intercom.orchestration.contract import Code
from agent_intercom.orchestration.errors import Refusal

SYSTEMD: Final = "systemd"
TMUX: Final = "tmux"

LIVE: Final = "live"
PLACED: Final = "placed"
LEFT: Final = "left"
IN_TMUX: Final = "in-tmux"
IN_USE: Final = "in-use"
ORIGINAL: Final = "original"
UNREADABLE: Final = "unreadable"
HELD: Final = {
    LIVE: "it lives",
    PLACED: "it is being started, or was not stopped",
    LEFT: "processes of it are left",
    IN_TMUX: "it lives in tmux",
    IN_USE: "a process has its directory or a file of it open",
    ORIGINAL: "it is the tmux program's",
    UNREADABLE: "its manifest cannot be read",
}
"""Why a run is left alone, whatever its age."""

_SLICE: Final = re.compile(r"/orchestrate-([a-z0-9]{1,32})\.slice(?:/|$)", re.ASCII | re.MULTILINE)
_RUN_ID: Final = re.compile(r"\d{8}T\d{6}Z-\d{1,10}", re.ASCII)
_FILES: Final = re.compile(
    r"startup\.json|startup-state|[a-z]+\.token|[a-z]+\.system\.md|broker\.sqlite3(-journal|\.lock)?|sessions"
    r"|\.[a-z.-]+\.\d+\.[0-9a-f]{16}\.tmp"
)
"""What a start writes into a run's directory, which tells a run that was never complete from anything else."""

STARTING_S: Final = 300
"""Seconds for which a run with its first bodies still there may be one that somebody is just starting."""

STARTUP_FILE: Final = "startup-file"
HALF_MADE: Final = "half-made-run"
EMPTY_SESSION: Final = "empty-session"


class RunFiles(NamedTuple):
    """A run's directory: `host` None where the manifest cannot be read, `ended` the newest change of a file of it.

    `held` is empty or a key of `HELD`; `startup` has the bytes of the bodies that it was to begin with, None where they
    are gone.
    """

    session: str
    run_id: str
    directory: str
    root: str
    host: str | None
    unit: str | None
    ended: float
    size: int
    held: str
    startup: int | None


class Leftover(NamedTuple):
    """What belongs to no run that goes on: a kind, the file or directory, when it was changed, and its bytes.

    `session` is the name of the directory that it lies in or is.
    """

    kind: str
    name: str
    changed: float
    size: int
    session: str


class Inventory(NamedTuple):
    """Everything that lies in the state roots, by session and run id."""

    runs: list[RunFiles]
    leftovers: list[Leftover]


class _Measured(NamedTuple):
    size: int
    newest: float


def take(environ: Mapping[str, str], now: float, *, original: bool) -> Inventory:
    """Look at every run of ours, and with `original` at those of the tmux program. What goes meanwhile is left out.

    `now` is in seconds since 1970.

    Raises Refusal `orchestration_error` for a state root that is no directory of ours, and `runtime_missing` where
    nobody can tell what lives, because the directory of the user manager is not known.
    """
    runtime_dir = runtime.runtime_dir(environ)
    standing = _standing(runtime_dir)
    placed = _placed(runtime_dir, standing)
    roots = places.roots(environ)
    hosted = set(tmux.hosted(environ)) if original else set()
    # Whoever names another place may have other directories in it.
    default = not any(environ.get(name) for name in (places.RUNS_ENVIRONMENT, places.ORIGINAL_RUNS_ENVIRONMENT))
    found: list[RunFiles] = []
    leftovers: list[Leftover] = []
    for root in roots if original else roots[:1]:
        for session, directory in _directories(rootscan.canonical(root)):
            if not rootscan.is_name(session):
                continue
            for run_id, run_directory in _directories(directory):
                if rootscan.is_name(run_id):
                    with contextlib.suppress(FileNotFoundError):
                        _look(session, run_id, run_directory, placed, hosted, original, found, leftovers)
            if default:
                with contextlib.suppress(FileNotFoundError):
                    leftovers += _empty(session, directory)
    used = in_use([each.directory for each in found] + [each.name for each in leftovers])
    standing = dict.fromkeys(with_processes(), LEFT) | standing
    found = [each._replace(held=each.held or _held_anyhow(each, now, used, standing)) for each in found]
    leftovers = [each for each in leftovers if each.name not in used]
    leftovers += [
        Leftover(STARTUP_FILE, path.join(each.directory, startup.NAME), each.ended, each.startup, each.session)
        for each in found
        if each.startup is not None and not each.held
    ]
    found.sort(key=lambda each: (each.session, each.run_id, each.root))
    leftovers.sort()
    return Inventory(found, leftovers)


def stale_places(environ: Mapping[str, str]) -> list[str]:
    """The units of which the place is there although nobody listens for them: `run.json` of runs that do not live."""
    runtime_dir = runtime.runtime_dir(environ)
    listeners = runtime.listening()
    return [unit for unit in runtime.units(runtime_dir) if runtime.socket_path(runtime_dir, unit) not in listeners]


def with_processes() -> set[str]:
    """The unit ids of the runs in whose slices processes are (proc_pid_cgroup(5)), whether anybody listens or not."""
    found: set[str] = set()
    for process in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{process}/cgroup", encoding="utf-8", errors="replace") as file:
            found.update(_SLICE.findall(file.read()))
    return found


def in_use(directories: Iterable[str]) -> set[str]:
    """Those of the directories in or below which a process of this user works, or has a file open (proc(5))."""
    wanted = set(directories)
    used: set[str] = set()
    if not wanted:
        return used
    for name in _open_names():
        while len(name) > 1:
            if name in wanted:
                used.add(name)
            name = path.dirname(name)
    return used


def _held_anyhow(run: RunFiles, now: float, used: set[str], standing: Mapping[str, str]) -> str:
    if run.unit is not None and run.unit in standing:
        return standing[run.unit]
    if run.directory in used:
        return IN_USE
    return PLACED if run.startup is not None and now - run.ended < STARTING_S else ""


def _empty(session: str, directory: str) -> Iterator[Leftover]:
    """A session's directory that has nothing in it. Raises FileNotFoundError where it is gone."""
    if not os.listdir(directory):
        yield Leftover(EMPTY_SESSION, directory, os.lstat(directory).st_mtime, 0, session)


def _look(
    session: str,
    run_id: str,
    directory: str,
    placed: Mapping[str, str],
    hosted: set[str],
    original: bool,
    found: list[RunFiles],
    leftovers: list[Leftover],
) -> None:
    """Add one directory that may be a run's to what it is. Raises FileNotFoundError where it is gone."""
    measured = _measure(directory)
    host = unit = None
    held = placed.get(directory, "")
    try:
        record = manifest.read(directory)
    except Refusal as refusal:
        if refusal.code == "run_gone" and not held and directory not in hosted:
            if _is_half_made(run_id, directory):
                leftovers.append(Leftover(HALF_MADE, directory, measured.newest, measured.size, session))
            return
        held = held or UNREADABLE
    else:
        host, unit = record.host, record.unit
        if host != SYSTEMD and not held:
            held = "" if original else ORIGINAL
    if directory in hosted:
        held = IN_TMUX
    bodies = _bytes(path.join(directory, startup.NAME))
    root = path.dirname(path.dirname(directory))
    found.append(RunFiles(session, run_id, directory, root, host, unit, measured.newest, measured.size, held, bodies))


def _is_half_made(run_id: str, directory: str) -> bool:
    """Whether a directory without a manifest has the name of a run, and nothing in it that no start writes."""
    return _RUN_ID.fullmatch(run_id) is not None and all(map(_FILES.fullmatch, os.listdir(directory)))


def _standing(runtime_dir: str) -> dict[str, str]:
    """From the unit of every run that was started and not stopped to how it is held."""
    return dict.fromkeys(runtime.units(runtime_dir), PLACED) | {each.unit: LIVE for each in runtime.live(runtime_dir)}


def _placed(runtime_dir: str, standing: Mapping[str, str]) -> dict[str, str]:
    """The same from the directory of the run, of those of which the place can be read."""
    found = {}
    for unit, held in standing.items():
        with contextlib.suppress(Refusal):
            found[runtime.read(runtime_dir, unit).directory] = held
    return found


def _directories(directory: str) -> Iterator[tuple[str, str]]:
    """Names and paths of the directories of ours in a directory, by name; none where it is not there.

    Raises Refusal `orchestration_error` where the directory itself is a link, another user's, or cannot be read.
    """
    try:
        privatefiles.check_directory(directory)
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refusal(Code.ERROR, "a directory of runs is a link, another user's, or cannot be read", "root") from error
    for name in names:
        below = path.join(directory, name)
        try:
            privatefiles.check_directory(below)
        except OSError:
            continue
        yield name, below


def _measure(directory: str) -> _Measured:
    """The bytes of all files in a directory and below it, and when the newest of them was changed."""
    size, newest = 0, 0.0
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                found = os.lstat(path.join(where, name))
            except OSError:
                continue
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
            newest = max(newest, found.st_mtime)
    return _Measured(size, newest or os.lstat(directory).st_mtime)


def _bytes(name: str) -> int | None:
    """How long a file is; None where it is not there."""
    try:
        return os.lstat(name).st_size
    except FileNotFoundError:
        return None


def _processes() -> Iterator[str]:
    return filter(str.isdigit, os.listdir("/proc"))


def _open_names() -> Iterator[str]:
    """What the working directories and descriptors of this user's processes lead to."""
    for process in _processes():
        base = f"/proc/{process}"
        yield from _target(f"{base}/cwd")
        try:
            descriptors = os.listdir(f"{base}/fd")
        except OSError:
            # Another user's, or it has ended.
            continue
        for descriptor in descriptors:
            yield from _target(f"{base}/fd/{descriptor}")


def _target(link: str) -> Iterator[str]:
    try:
        name = os.readlink(link)
    except OSError:
        return
    if name.startswith("/"):
        yield name
