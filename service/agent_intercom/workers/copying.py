# SPDX-License-Identifier: Apache-2.0
"""Copying one regular file: its content as far as it is there now, its holes, its mode and its times."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

# copy_file_range(2): another file system, or one that cannot. lseek(2): one that knows of no holes.
_CANNOT: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY})
_PIECE: Final = 1 << 30
_BUFFER: Final = 1 << 20


def copy(origin: str, place: str) -> None:
    """Copy the file `origin` to `place`, where nothing may be; they share blocks where the file system can.

    Of a file that grows meanwhile no more is copied than there was at the beginning. What has no blocks gets none.
    Raises OSError.
    """
    with open(origin, "rb", buffering=0, opener=_open) as reader, open(place, "xb", buffering=0) as writer:
        source, target = reader.fileno(), writer.fileno()
        found = os.fstat(source)
        for start, end in _filled(source, found.st_size):
            _copy_range(source, target, start, end)
        # It may end with a hole, and somebody may have cut it off.
        os.ftruncate(target, min(found.st_size, os.fstat(source).st_size))
        os.fchmod(target, stat.S_IMODE(found.st_mode) & 0o777)
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _open(name: str, _: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _filled(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where in the first `size` bytes there is something, as (start, end)."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                # All that is left is a hole.
                return
            if error.errno not in _CANNOT:
                raise
            start, end = end, size
        yield start, min(end, size)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        try:
            done = os.copy_file_range(source, target, min(end - start, _PIECE), start, start)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            done = 0
        if not done:
            # Some file systems copy nothing in this way, and say so by no error.
            piece = os.pread(source, min(end - start, _BUFFER), start)
            if not piece:
                return
            done = os.pwrite(target, piece, start)
        start += done
