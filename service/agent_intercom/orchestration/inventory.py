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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import contract, manifest, places, removal, rootscan, rundir, runtime, startup, tmux
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
MOUNTED: Final = "mounted"
CLOSED: Final = "closed"
ENDLESS: Final = "endless"
HELD: Final = {
    LIVE: "it lives",
    PLACED: "it is being started, or was not stopped",
    LEFT: "processes of it are left",
    IN_TMUX: "it lives in tmux",
    IN_USE: "a process has its directory or a file of it open",
    ORIGINAL: "it is the tmux program's",
    UNREADABLE: "its manifest is gone, or cannot be read",
    MOUNTED: "another file system is mounted in it",
    CLOSED: "something in it is another user's, or may not be changed",
    ENDLESS: "more lies in it than is looked at",
}
"""Why a run is left alone, whatever its age."""

_SLICE: Final = re.compile(r"/orchestrate-([a-z0-9]{1,32})\.slice(?:/|$)", re.ASCII | re.MULTILINE)
_RUN_ID: Final = re.compile(r"\d{8}T\d{6}Z-\d{1,10}", re.ASCII)
_FILES: Final = re.compile(
    r"startup\.json|startup-state|[a-z]+\.token|[a-z]+\.system\.md|\.[a-z.-]+\.\d+\.[0-9a-f]{16}\.tmp"
)
"""What a start writes into a run's directory before anything of worth, which tells such a start from anything else."""

_WORTH: Final = re.compile(r"broker\.sqlite3(-journal|-wal|\.lock)?|sessions")
"""What may hold the work of a run."""

MAX_ENTRIES: Final = 100_000
"""How much of what lies in one directory is looked at."""

STARTING_S: Final = 300
"""Seconds for which a run with its first bodies still there may be one that somebody is just starting."""

STARTUP_FILE: Final = "startup-file"
HALF_MADE: Final = "half-made-run"
HALF_REMOVED: Final = "half-removed-run"
EMPTY_SESSION: Final = "empty-session"


class RunFiles(NamedTuple):
    """A run's directory: `host` None where the manifest cannot be read, `ended` the newest change of a file of it.

    `ended` is between 1970 and the moment of looking, whatever the file says.

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
    """Everything that lies in the state roots, by session and run id; `closed` are sessions that cannot be read."""

    runs: list[RunFiles]
    leftovers: list[Leftover]
    closed: Sequence[str] = ()


class _Finds(NamedTuple):
    """What has been found so far, and by what more is judged."""

    now: float
    original: bool
    placed: Mapping[str, str]
    hosted: set[str]
    runs: list[RunFiles]
    leftovers: list[Leftover]


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
    finds, closed = _Finds(now, original, placed, hosted, [], []), []
    for root in roots if original else roots[:1]:
        for session, directory in _directories(rootscan.canonical(root)):
            if not rootscan.is_name(session):
                continue
            try:
                below = list(_directories(directory))
            except Refusal:
                closed.append(directory)
                continue
            for run_id, run_directory in below:
                if rootscan.is_name(run_id):
                    with contextlib.suppress(FileNotFoundError):
                        _look(session, run_id, run_directory, finds)
            if default:
                with contextlib.suppress(FileNotFoundError):
                    finds.leftovers.extend(_empty(session, directory))
    return Inventory(*_held_and_left(finds, standing), closed)


def _held_and_left(finds: _Finds, standing: Mapping[str, str]) -> tuple[list[RunFiles], list[Leftover]]:
    """What was found, once it was looked at what of it is in use; in order."""
    names = [each.directory for each in finds.runs] + [each.name for each in finds.leftovers]
    used, mounted = in_use(names), removal.mounted_in(names)
    standing = {**dict.fromkeys(with_processes(), LEFT), **standing}
    found = [
        each._replace(held=each.held or _held_anyhow(each, finds.now, used, mounted, standing)) for each in finds.runs
    ]
    leftovers = [each for each in finds.leftovers if each.name not in used | mounted]
    leftovers += [
        Leftover(STARTUP_FILE, path.join(each.directory, startup.NAME), each.ended, each.startup, each.session)
        for each in found
        if each.startup is not None and not each.held
    ]
    found.sort(key=lambda each: (each.session, each.run_id, each.root))
    leftovers.sort()
    return found, leftovers


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


def _held_anyhow(run: RunFiles, now: float, used: set[str], mounted: set[str], standing: Mapping[str, str]) -> str:
    if run.unit is not None and run.unit in standing:
        return standing[run.unit]
    if run.directory in used:
        return IN_USE
    if run.directory in mounted:
        return MOUNTED
    return PLACED if run.startup is not None and now - run.ended < STARTING_S else ""


def _empty(session: str, directory: str) -> Iterator[Leftover]:
    """A session's directory that has nothing in it. Raises FileNotFoundError where it is gone."""
    if not os.listdir(directory):
        yield Leftover(EMPTY_SESSION, directory, os.lstat(directory).st_mtime, 0, session)


def _look(session: str, run_id: str, directory: str, finds: _Finds) -> None:
    """Add one directory that may be a run's to what it is. Raises FileNotFoundError where it is gone.

    Nothing is measured before it is known to be one: the directory may be of anything.
    """
    host = unit = None
    held = finds.placed.get(directory, "")
    kind = ""
    try:
        if rootscan.is_removing(run_id):
            record = _removed_manifest(directory, rootscan.run_of(run_id))
            kind = HALF_REMOVED
        else:
            record = manifest.read(directory)
    except Refusal as refusal:
        if refusal.code == "run_gone" and not held and directory not in finds.hosted:
            kind = _without_manifest(run_id, directory)
            if not kind:
                return
        if kind in {"", UNREADABLE}:
            held = held or UNREADABLE
    else:
        host, unit = record.host, record.unit
        if host != SYSTEMD and not held:
            held = "" if finds.original else ORIGINAL
    weighed = removal.weigh(directory, MAX_ENTRIES)
    ended = min(max(weighed.newest, 0.0), finds.now)
    if directory in finds.hosted:
        held = IN_TMUX
    held = held or _kept_by(weighed)
    if kind in {HALF_MADE, HALF_REMOVED} and not held:
        finds.leftovers.append(Leftover(kind, directory, ended, weighed.size, session))
        return
    bodies = _bytes(path.join(directory, startup.NAME))
    root = path.dirname(path.dirname(directory))
    finds.runs.append(RunFiles(session, run_id, directory, root, host, unit, ended, weighed.size, held, bodies))


def _kept_by(weighed: removal.Weighed) -> str:
    """What lies in a directory that it cannot be removed with, as a key of `HELD`."""
    if weighed.crosses:
        return MOUNTED
    if weighed.closed:
        return CLOSED
    return ENDLESS if weighed.endless else ""


def _removed_manifest(directory: str, run_id: str) -> manifest.Manifest:
    """The manifest of a run of which a removal has begun; it is the last to go. Raises Refusal as `manifest.read`."""
    try:
        content = privatefiles.read(path.join(directory, manifest.NAME), manifest.MAX_BYTES)
    except FileNotFoundError as error:
        raise Refusal("run_gone", "the run has no manifest", manifest.NAME) from error
    except OSError as error:
        raise Refusal("manifest_invalid", "the manifest cannot be read", manifest.NAME) from error
    return manifest.parse(content, path.join(path.dirname(directory), run_id))


def _without_manifest(run_id: str, directory: str) -> str:
    """What a directory without a manifest is: `HALF_MADE`, `HALF_REMOVED`, `UNREADABLE`, or nothing of ours ("").

    It has the name of a run. One that may hold work is kept; an empty one may be anybody's, and is not touched.
    """
    being_removed = rootscan.is_removing(run_id)
    if _RUN_ID.fullmatch(rootscan.run_of(run_id)) is None:
        return ""
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:
        raise
    except OSError:
        return ""
    if not names:
        return HALF_REMOVED if being_removed else ""
    works = {name for name in names if _WORTH.fullmatch(name)}
    if all(map(_is_of_start, (path.join(directory, name) for name in names - works))) and (
        not works or (works == {rundir.SESSIONS} and _is_bare(path.join(directory, rundir.SESSIONS)))
    ):
        return HALF_REMOVED if being_removed else HALF_MADE
    return UNREADABLE if works else ""


def _is_of_start(name: str) -> bool:
    """Whether it is a file that a start writes first."""
    return _FILES.fullmatch(path.basename(name)) is not None and stat.S_ISREG(os.lstat(name).st_mode)


def _is_bare(directory: str) -> bool:
    """Whether there are no more than empty directories of roles in the directory of transcripts."""
    try:
        roles = os.listdir(directory)
        return set(roles) <= set(contract.ROLES) and not any(os.listdir(path.join(directory, role)) for role in roles)
    except OSError:
        return False


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


def _bytes(name: str) -> int | None:
    """How long a file is; None where it is not there, or cannot be seen."""
    try:
        return os.lstat(name).st_size
    except OSError:
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
