# SPDX-License-Identifier: Apache-2.0
"""Removing a directory with everything in it, and nothing else: no link is followed, and no mount point crossed.

It is renamed first, to a name that no reader takes for a run's, so that what cannot be brought to its end is no half of
a run; whoever comes next brings it to its end. Every directory is entered by its descriptor, and told by fdinfo of
proc(5) to be of the same mount: a bind mount has the device of what it shows.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from os import path
from typing import Final

from agent_intercom.orchestration import rootscan

MAX_DEPTH: Final = 64
"""How many directories may lie in one another; no run of ours has more than a few."""

_LAST: Final = "manifest.json"
"""What tells whose directory it is, and so stays until everything else is gone."""

_MOUNTINFO: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
_ENTER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def mounted_in(directories: Iterable[str]) -> set[str]:
    """Those of the canonical paths at or below which something is mounted, as this process sees it."""
    wanted = set(directories)
    found: set[str] = set()
    for name in _mount_points() if wanted else ():
        while len(name) > 1:
            if name in wanted:
                found.add(name)
            name = path.dirname(name)
    return found


def remove(directory: str) -> None:
    """Remove the directory at a canonical path. Raises OSError; EXDEV: something is mounted at or below it.

    What has failed once is under its new name (`rootscan.removing`), which can be given here as well.
    """
    if mounted_in([directory]):
        raise _crossing()
    above, name = path.split(directory)
    outer = os.open(above, _ENTER)
    try:
        aside = name if rootscan.is_removing(name) else rootscan.removing(name)
        inner = os.open(name, _ENTER, dir_fd=outer)
        try:
            if _mount(inner) != _mount(outer):
                raise _crossing()
            if aside != name:
                os.rename(name, aside, src_dir_fd=outer, dst_dir_fd=outer)
            _empty(inner, _mount(inner), 0)
        finally:
            os.close(inner)
        os.rmdir(aside, dir_fd=outer)
    finally:
        os.close(outer)


def _empty(descriptor: int, mount: tuple[int, str], depth: int) -> None:
    """Remove everything in an open directory."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, "directories lie in one another too deep")
    with os.scandir(descriptor) as scan:
        entries = [(item.name, item.is_dir(follow_symlinks=False)) for item in scan]
    entries.sort(key=lambda entry: depth == 0 and entry[0] == _LAST)
    for name, is_directory in entries:
        if not is_directory:
            os.unlink(name, dir_fd=descriptor)
            continue
        below = os.open(name, _ENTER, dir_fd=descriptor)
        try:
            if _mount(below) != mount:
                raise _crossing()
            _empty(below, mount, depth + 1)
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=descriptor)


def _mount(descriptor: int) -> tuple[int, str]:
    """The device and the mount of an open directory."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        found = _MOUNT_ID.search(file.read())
    if found is None:
        raise OSError(errno.ENOSYS, "the mount of a directory cannot be told")
    return os.fstat(descriptor).st_dev, found[1]


def _crossing() -> OSError:
    return OSError(errno.EXDEV, "something is mounted there")


def _mount_points() -> list[str]:
    """Where something is mounted (proc_pid_mountinfo(5)); blanks and the like are escaped there."""
    with open(_MOUNTINFO, "rb") as file:
        names = [line.split(b" ")[4] for line in file]
    return [os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), name)) for name in names]


class Weighed:
    """What lies in a directory: the bytes of its files, when the newest was changed, and what prevents its removal.

    `crosses`: another file system is in it. `closed`: something in it is another user's, or may not be changed.
    `endless`: there is more than was looked at, so that the other members do not tell everything.
    """

    __slots__ = ("closed", "crosses", "endless", "newest", "size")

    def __init__(self) -> None:
        self.size, self.newest = 0, 0.0
        self.crosses = self.closed = self.endless = False


def weigh(directory: str, limit: int) -> Weighed:
    """Look at no more than `limit` names in `directory` and below it. Raises FileNotFoundError where it is gone."""
    found, top = Weighed(), os.lstat(directory)
    user = os.geteuid()
    waiting = [(directory, 0)]
    while waiting and not found.endless:
        where, depth = waiting.pop()
        found.closed |= not os.access(where, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        try:
            scan = os.scandir(where)
        except OSError:
            if where == directory and not path.lexists(directory):
                raise
            found.closed = True
            continue
        with scan:
            for item in scan:
                limit -= 1
                if limit < 0 or depth > MAX_DEPTH:
                    found.endless = True
                    break
                try:
                    entry = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                found.closed |= entry.st_uid != user
                if stat.S_ISDIR(entry.st_mode):
                    # The device of other files is no sign: overlay file systems tell that of the layer.
                    if entry.st_dev != top.st_dev:
                        found.crosses = True
                    else:
                        waiting.append((item.path, depth + 1))
                    continue
                found.size += entry.st_size if stat.S_ISREG(entry.st_mode) else 0
                found.newest = max(found.newest, entry.st_mtime)
    found.newest = found.newest or top.st_mtime
    return found
