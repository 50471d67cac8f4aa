# SPDX-License-Identifier: Apache-2.0
"""Files in the state directory: ours, regular, private, and never reached through a link.

Every function raises OSError; ELOOP stands for a file that is a link or not a regular file of this user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from os import path
from typing import BinaryIO

# A pipe in the place of the file must not block the caller.
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def lock(name: str) -> int:
    """Open and lock the file `name` (0600), making it where it is missing; the descriptor holds the lock.

    Raises BlockingIOError where another process holds it.
    """
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
    try:
        _check(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def prepare(name: str) -> int:
    """Make sure of the file `name`, empty and 0600 where it was missing; its size in bytes."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _SAFE, 0o600)
    try:
        size = _check(descriptor)
    finally:
        os.close(descriptor)
    if size == 0:
        sync_directory(path.dirname(name))
    return size


def copy(source: str, target: str) -> None:
    """Copy the file `source` to the new file `target`; where there is no source there is no copy."""
    with contextlib.suppress(FileNotFoundError), _open(source) as reader, open(target, "xb") as writer:
        writer.write(reader.read())


def read(name: str, limit: int) -> bytes:
    """The content of the file `name`; EFBIG where it is longer than `limit` bytes."""
    with _open(name) as reader:
        content = reader.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, "the file is too long")
    return content


def sync_directory(directory: str) -> None:
    """Make names that were made, renamed or removed in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(name: str) -> BinaryIO:
    descriptor = os.open(name, os.O_RDONLY | _SAFE)
    try:
        _check(descriptor)
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def _check(descriptor: int) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.ELOOP, "not a regular file of this user")
    return found.st_size
