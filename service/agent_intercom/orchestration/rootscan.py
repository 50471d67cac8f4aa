# SPDX-License-Identifier: Apache-2.0
"""What lies below the directories of runs, by its names: `<root>/<session>/<run id>` (orchestration spec, section 9.1).

No run is opened, no link is followed, and of no directory more than 4096 names are looked at. Functions raise Refusal
`orchestration_error` for a root that is no directory of ours, and for what cannot be listed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.host import privatefiles
from agent_intercom.orchestration.contract import Code
from agent_intercom.orchestration.errors import Refusal

MAX_SCAN: Final = 4_096
"""How many names of one directory are looked at."""

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,255}", re.ASCII)
"""What a session or a run may be called, `.` and `..` aside."""

_REMOVING: Final = re.compile(r"\.(.+)\.removing", re.DOTALL)

NO_DIRECTORY: Final = "the run is not a directory of ours"


class Candidate(NamedTuple):
    """What lies in a session's directory below `root`. Nothing of it has been opened."""

    run_id: str
    root: str
    is_directory: bool

    @property
    def fault(self) -> str:
        """Why it cannot be a run, as far as that is seen from outside; empty where nothing is."""
        if not is_name(self.run_id):
            return "not the name of a run"
        return "" if self.is_directory else NO_DIRECTORY


class Found(NamedTuple):
    """From every session's name to the canonical roots that have it; and name, fault and path of what is no session.

    `truncated`: a root has more than was looked at.
    """

    places: dict[str, list[str]]
    strangers: list[tuple[str, str, str]]
    truncated: bool


def sessions(roots: Sequence[str]) -> Found:
    """What lies in the roots. One that is not there has no sessions."""
    places: dict[str, list[str]] = {}
    strangers: list[tuple[str, str, str]] = []
    truncated = False
    for root in map(canonical, roots):
        if not _is_root(root):
            continue
        try:
            names, more = _names(root)
        except OSError as error:
            text = f"a directory of runs cannot be read: {os.strerror(error.errno or 0)}"
            raise Refusal(Code.ERROR, text, "directory") from error
        truncated = truncated or more
        for name, _ in names:
            if not is_name(name):
                strangers.append((name, "not the name of a session", path.join(root, name)))
            elif not is_directory(path.join(root, name)):
                strangers.append((name, "not a directory of ours", path.join(root, name)))
            else:
                places.setdefault(name, []).append(root)
    return Found(places, strangers, truncated)


def places_of(session: str, roots: Sequence[str]) -> list[str]:
    """The canonical roots that have a session."""
    if not is_name(session):
        return []
    return [root for root in map(canonical, roots) if _is_root(root) and is_directory(path.join(root, session))]


def candidates(session: str, places: Sequence[str]) -> tuple[list[Candidate], bool]:
    """What lies in a session's directories, newest first, and whether there is more.

    One that has gone meanwhile has nothing in it. Raises Refusal for one that cannot be read.
    """
    found: list[Candidate] = []
    truncated = False
    for root in places:
        try:
            names, more = _names(path.join(root, session))
        except FileNotFoundError:
            continue
        except OSError as error:
            text = f"the directory of session {session} cannot be read: {os.strerror(error.errno or 0)}"
            raise Refusal(Code.ERROR, text, "directory") from error
        found += [Candidate(name, root, kind) for name, kind in names if not is_removing(name)]
        truncated = truncated or more
    # Ids begin with the time of their making.
    found.sort(reverse=True)
    return found, truncated


def canonical(root: str) -> str:
    """`root` without links above it; whether it is one itself is left to be seen."""
    root = path.normpath(root)
    return path.join(path.realpath(path.dirname(root)), path.basename(root))


def is_directory(name: str) -> bool:
    """Whether `name` is a directory of ours, and no link."""
    try:
        privatefiles.check_directory(name)
    except OSError:
        return False
    return True


def is_name(name: str) -> bool:
    """Whether a session or a run may be called `name`."""
    return NAME.fullmatch(name) is not None and name not in {".", ".."}


def removing(run_id: str) -> str:
    """What a run's directory is called while it is removed."""
    return f".{run_id}.removing"


def is_removing(name: str) -> bool:
    """Whether a directory of that name was a run's, and is being removed: it is none any more."""
    return _REMOVING.fullmatch(name) is not None


def run_of(name: str) -> str:
    """The run that is removed under that name."""
    match = _REMOVING.fullmatch(name)
    return match[1] if match else name


def _is_root(root: str) -> bool:
    """Whether the root is there. Raises Refusal for what is in its place and no directory of ours."""
    if not path.lexists(root):
        return False
    if not is_directory(root):
        raise Refusal(Code.ERROR, "the state root is a link, or no directory of ours", "root")
    return True


def _names(directory: str) -> tuple[list[tuple[str, bool]], bool]:
    """At most 4096 names in `directory`, each with whether it is a directory's, and whether there are more."""
    with os.scandir(directory) as scan:
        names = [(item.name, item.is_dir(follow_symlinks=False)) for item in itertools.islice(scan, MAX_SCAN + 1)]
    return names[:MAX_SCAN], len(names) > MAX_SCAN
