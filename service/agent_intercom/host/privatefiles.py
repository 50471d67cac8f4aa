# SPDX-License-Identifier: Apache-2.0
"""Files and directories of our state: ours, private, and never reached through a link.

The rules are those of both products (orchestration spec, section 9.1; intercom spec, section 1.2). Unless something
else is said, functions raise OSError. Three of its numbers have one meaning here: ELOOP for what is a link, is of
another kind than asked for or belongs to another user, EPERM for what others may open, EFBIG for a file that is longer
than the caller reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from os import path
from typing import Any, BinaryIO, NoReturn

_PIECE = 1 << 20

# A pipe in the place of the file must not block the caller.
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read(name: str, limit: int, *, closed: bool = False) -> bytes:
    """The content of the file `name`, at most `limit` bytes. With `closed` nobody else may have a right to it."""
    with _open(name, closed) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, "the file is too long")
    return content


def head(name: str, length: int) -> bytes:
    """The first bytes of the file `name`; fewer where it is shorter."""
    with _open(name, False) as file:
        return file.read(length)


def copy(source: str, target: str, limit: int | None = None) -> None:
    """Copy the file `source`, of at most `limit` bytes, to the new file `target`; without a source there is no copy."""
    with contextlib.suppress(FileNotFoundError), _open(source, False) as reader, open(target, "xb") as writer:
        copied = 0
        while piece := reader.read(_PIECE):
            copied += len(piece)
            if limit is not None and copied > limit:
                raise OSError(errno.EFBIG, "the file is too long")
            writer.write(piece)


def lock(name: str) -> int:
    """Open and lock the file `name` (0600), making it where it is missing; the descriptor holds the lock.

    Raises BlockingIOError where another process holds it.
    """
    descriptor = opened(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def opened(name: str) -> int:
    """Open the file `name` (0600) for reading and writing, making it where it is missing; the descriptor."""
    return _opened(name, os.O_RDWR | os.O_CREAT)


def prepare(name: str) -> int:
    """Make sure of the file `name`, empty and 0600 where it was missing; its size in bytes."""
    descriptor = opened(name)
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size == 0:
        sync_directory(path.dirname(name))
    return size


def create(name: str, content: bytes) -> None:
    """Make the file `name` (0600) and bring it to the disk; FileExistsError where the name is taken."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def replace(name: str, content: bytes) -> None:
    """Give the file `name` (0600) new content: after a crash there is the old or the new, and nothing in between."""
    directory, base = path.split(name)
    check_directory(directory)
    try:
        found = os.lstat(name)
    except FileNotFoundError:
        pass
    else:
        _check(found, stat.S_ISREG(found.st_mode), False)
    temporary = path.join(directory, f".{base}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
    try:
        create(temporary, content)
        os.rename(temporary, name)
    except BaseException:
        _forget(temporary)
        raise
    sync_directory(directory)


def remove(name: str) -> bool:
    """Unlink `name`, for good; False where it was not there."""
    try:
        os.unlink(name)
    except FileNotFoundError:
        return False
    sync_directory(path.dirname(name))
    return True


def check_directory(name: str, *, closed: bool = False) -> None:
    """Make sure that `name` is a directory of ours, not a link; with `closed`, one that nobody else may enter."""
    found = os.lstat(name)
    _check(found, stat.S_ISDIR(found.st_mode), closed)


def close_directory(name: str) -> None:
    """The same, and take others' rights away (0700)."""
    check_directory(name)
    if stat.S_IMODE(os.lstat(name).st_mode) != 0o700:
        os.chmod(name, 0o700)


def sync_directory(directory: str) -> None:
    """Make names that were made, renamed or removed in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def decode(content: bytes) -> Any:
    """The content of a file as strict JSON: UTF-8, no key twice, no NaN. Raises ValueError without any content."""
    import json  # what guards the socket unit reads no JSON

    try:
        return json.loads(content.decode(), object_pairs_hook=_members, parse_constant=_constant)
    except (ValueError, RecursionError):
        # Not chained: the library's own exception holds what was read.
        raise ValueError("not strict JSON") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key twice")
    return members


def _constant(_: str) -> NoReturn:
    raise ValueError("not a number of JSON")


def _open(name: str, closed: bool) -> BinaryIO:
    return open(_opened(name, os.O_RDONLY, closed), "rb")


def _opened(name: str, flags: int, closed: bool = False) -> int:
    descriptor = os.open(name, flags | _SAFE, 0o600)
    try:
        found = os.fstat(descriptor)
        _check(found, stat.S_ISREG(found.st_mode), closed)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, right_kind: bool, closed: bool) -> None:
    if not right_kind or found.st_uid != os.geteuid():
        raise OSError(errno.ELOOP, "a link, of another kind, or another user's")
    if closed and stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(errno.EPERM, "others may open it")


def _forget(name: str) -> None:
    try:
        os.unlink(name)
    except FileNotFoundError:
        return
