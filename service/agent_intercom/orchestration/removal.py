# SPDX-License-Identifier: Apache-2.0
"""Removing a directory with everything in it, and nothing else: no link is followed, and no mount point crossed.

It is renamed first, to a name that no reader takes for a run's, so that what cannot be brought to its end is no half of
a run; whoever comes next brings it to its end. Every directory is entered by its descriptor, and told by fdinfo of
proc(5) to be of the same mount: a bind mount has the device of what it shows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable
from os import path
from typing import Final

from agent_intercom.orchestration import rootscan

MAX_DEPTH: Final = 64
"""How many directories are open at a time while one in another is removed; no run of ours has more than a few."""

_MAX_PASSES: Final = 4_096
"""How often what was too deep is looked at again, while somebody may still add to it."""

_LAST: Final = "manifest.json"
"""What tells whose directory it is, and so stays until everything else is gone."""

_MOUNTINFO: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
_ENTER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        inner = _entered(name, outer, _mount(outer))
        try:
            if aside != name:
                os.rename(name, aside, src_dir_fd=outer, dst_dir_fd=outer)
            _Emptying(inner).run(_LAST)
        finally:
            os.close(inner)
        os.rmdir(aside, dir_fd=outer)
    finally:
        os.close(outer)


def clear(directory: str) -> None:
    """Remove whatever is at a path, under its name; nothing there is no error. Raises OSError, after all was tried.

    Whoever may still write in it can have nothing else removed or changed: nobody but us may write in the directory
    above it, and no path below that is used.
    """
    above, name = path.split(directory)
    try:
        outer = os.open(above, _ENTER)
    except FileNotFoundError:
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=outer, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=outer)
                return
            inner = _entered(name, outer, _mount(outer))
            try:
                _Emptying(inner).run()
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=outer)
    finally:
        os.close(outer)


class _Emptying:
    """Removes everything in the open directory `top`, whatever modes its directories have and however deep they lie.

    No more than `MAX_DEPTH` are open at a time: what lies deeper is moved up into `top`.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._mount = _mount(top)
        self._moved = False
        self._failed: OSError | None = None

    def run(self, last: str = "") -> None:
        """Do it, the file `last` after everything else. Raises what failed first, after the rest was tried."""
        for _ in range(_MAX_PASSES):
            self._moved = False
            self._empty(self._top, 0, last)
            if self._failed is not None:
                raise self._failed
            if not self._moved:
                break
        else:
            raise OSError(errno.ELOOP, "directories lie in one another too deep")
        if last:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=self._top)

    def _empty(self, descriptor: int, depth: int, kept: str = "") -> None:
        with os.scandir(descriptor) as scan:
            entries = [(item.name, item.is_dir(follow_symlinks=False)) for item in scan if item.name != kept]
        for name, is_directory in entries:
            try:
                if is_directory:
                    self._remove_directory(descriptor, name, depth)
                else:
                    os.unlink(name, dir_fd=descriptor)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._failed = self._failed or error

    def _remove_directory(self, outer: int, name: str, depth: int) -> None:
        inner = _entered(name, outer, self._mount)
        try:
            if depth == MAX_DEPTH:
                # Entered before, because it has to be writable to be moved.
                os.rename(name, f".{os.urandom(16).hex()}.removing", src_dir_fd=outer, dst_dir_fd=self._top)
                self._moved = True
                return
            self._empty(inner, depth + 1)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=outer)


def _entered(name: str, outer: int, mount: tuple[int, str]) -> int:
    """Open a directory by its name in an open one; one of ours is opened to its owner first. Raises OSError."""
    found = os.open(name, _LOOK, dir_fd=outer)
    try:
        if _mount(found) != mount:
            raise _crossing()
        entry = os.fstat(found)
        if stat.S_IMODE(entry.st_mode) & 0o700 != 0o700 and entry.st_uid == os.geteuid():
            # That of the descriptor: by its name it may be another by now. fchmod(2) takes none of O_PATH.
            os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(".", _ENTER, dir_fd=found)
    finally:
        os.close(found)


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
    `endless`: there are more names than were looked at, so that the other members do not tell everything. Nor do they
    of directories that their owner, who is this user, has closed, or that lie too deep: they can be removed.
    """

    __slots__ = ("closed", "crosses", "endless", "newest", "size")

    def __init__(self) -> None:
        self.size, self.newest = 0, 0.0
        self.crosses = self.closed = self.endless = False


def weigh(directory: str, limit: int) -> Weighed:
    """Look at no more than `limit` names in `directory` and below it. Raises FileNotFoundError where it is gone."""
    found, top = Weighed(), os.lstat(directory)
    user = os.geteuid()
    found.closed = top.st_uid != user
    waiting = [(directory, 0, top.st_mode)]
    while waiting and not found.endless:
        where, depth, mode = waiting.pop()
        own = mode & stat.S_IRWXU == stat.S_IRWXU
        found.closed |= own and not os.access(where, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        try:
            scan = os.scandir(where)
        except OSError:
            if where == directory and not path.lexists(directory):
                raise
            found.closed |= own
            continue
        with scan:
            for item in scan:
                limit -= 1
                if limit < 0:
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
                    elif depth < MAX_DEPTH:
                        waiting.append((item.path, depth + 1, entry.st_mode))
                    continue
                found.size += entry.st_size if stat.S_ISREG(entry.st_mode) else 0
                found.newest = max(found.newest, entry.st_mtime)
    found.newest = found.newest or top.st_mtime
    return found
