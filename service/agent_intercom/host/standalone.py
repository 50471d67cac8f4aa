# SPDX-License-Identifier: Apache-2.0
"""Listening without a service manager, and the rules for the directories in which sockets and private files lie.

Codes of `HostError`: `PATH_TOO_LONG` (a socket's path has at most 107 bytes, unix(7)), `PATH_IN_USE` (somebody else was
faster), `PATH_FOREIGN` (something lies there that is not a socket of ours), `DIRECTORY_SYMLINK`, `DIRECTORY_FOREIGN`
(not a directory, or another user's), `DIRECTORY_OPEN` (others may enter, and the mode cannot be repaired),
`DIRECTORY_UNUSABLE` (it cannot be made or opened).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from typing import Final, NamedTuple

from agent_intercom.host.errors import HostError

PATH_MAX: Final = 107
"""Bytes of a socket's path, without the terminating zero."""


class Identity(NamedTuple):
    """Which file lay at a path. The number alone does not say: file systems use it again at once."""

    device: int
    inode: int
    modified: int


def bind(path: str, backlog: int = 128) -> socket.socket:
    """Listen at absolute `path` with mode 0600, in a directory that `private_directory` accepts; non-blocking.

    A socket of ours that lies there is replaced: whether it still answers is for the caller to find out before. Raises
    `HostError` (see above).
    """
    if len(os.fsencode(path)) > PATH_MAX:
        raise HostError("PATH_TOO_LONG", f"the socket's path is longer than {PATH_MAX} bytes", "path")
    directory, name = os.path.split(path)
    fd = private_directory(directory)
    try:
        _clear(name, fd)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            _bind_and_listen(listener, path, backlog)
            _confirm(name, fd)
        except BaseException:
            listener.close()
            raise
        return listener
    finally:
        os.close(fd)


def identity(path: str) -> Identity | None:
    """What lies at `path` now; None for nothing. Ask right after `bind`, for `unbind`."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return Identity(found.st_dev, found.st_ino, found.st_mtime_ns)


def unbind(path: str, made: Identity | None) -> bool:
    """Remove the socket at `path` if it still is the one that `made` describes; whether it was removed."""
    if made is None or identity(path) != made:
        return False
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def private_directory(path: str) -> int:
    """Make `path` (with missing parents, each 0700) or check it, and return an open descriptor of it.

    It must be a directory of ours and no symbolic link; a mode that lets others in is set to 0700, as the contract
    (section 1.2) has every party do. Raises `HostError`.
    """
    try:
        _make(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if os.path.islink(path):
            raise HostError("DIRECTORY_SYMLINK", "the directory is a symbolic link", "directory") from error
        if error.errno in {errno.ENOTDIR, errno.EEXIST}:
            raise HostError("DIRECTORY_FOREIGN", "what should be a directory is none", "directory") from error
        raise HostError("DIRECTORY_UNUSABLE", "the directory cannot be made or opened", "directory") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise HostError("DIRECTORY_FOREIGN", "the directory belongs to another user", "directory")
        if stat.S_IMODE(found.st_mode) & 0o077:
            _close_to_others(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def private(directory: str) -> bool:
    """Whether a directory is this user's alone. Nobody's rights are taken away by binding in it."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def refuse(identifier: str, why: str) -> int:
    """Say on standard error why a service does not start; its exit status."""
    sys.stderr.write(f"{identifier}: {why}\n")
    return 1


def _make(path: str) -> None:
    """`os.makedirs`, which gives its mode to the last directory only, with 0700 for each."""
    missing = []
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        # Another process of ours may make the same one.
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def _close_to_others(fd: int) -> None:
    try:
        os.fchmod(fd, 0o700)
    except OSError as error:
        raise HostError("DIRECTORY_OPEN", "others may enter the directory, and chmod fails", "directory") from error


def _clear(name: str, directory: int) -> None:
    """Remove a socket of ours; refuse anything else."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise HostError("PATH_FOREIGN", "something that is not a socket of ours lies at the socket's path", "path")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _bind_and_listen(listener: socket.socket, path: str, backlog: int) -> None:
    # The mode must be right from the first moment: chmod after bind leaves a gap. 0777 & ~0177 is 0600.
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise HostError("PATH_IN_USE", "another process took the socket's path", "path") from error
        raise HostError("DIRECTORY_UNUSABLE", "no socket can be made in the directory", "directory") from error
    finally:
        os.umask(before)
    listener.listen(backlog)


def _confirm(name: str, directory: int) -> None:
    """The socket must lie in the directory that was checked, not in one that took its place meanwhile."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError as error:
        raise HostError("DIRECTORY_FOREIGN", "the directory was replaced while binding", "directory") from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise HostError("PATH_FOREIGN", "the socket was replaced while binding", "path")
