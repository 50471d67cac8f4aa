# SPDX-License-Identifier: Apache-2.0
"""The private ring of what a worker prints (managed-workers spec, 9.6).

It is two files: when the newer one is full, it takes the place of the older one. All starts of a worker have one ring,
with a line between them. The shim writes it, the worker service reads it, for those who may see it. Like the shim it
imports next to nothing.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time

SIZE = 1 << 20
"""Bytes of both files together, at most."""

BETWEEN = "--- started again, %Y-%m-%d %H:%M:%S %z ---\n"
"""What is between two starts, for strftime(3)."""

_HALF = SIZE // 2
_NEWER, _OLDER = "output", "output.old"
_PIECE = 1 << 16
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Ring:
    """The writing side. `directory` is private and there already.

    What cannot be stored is dropped: a worker does not wait for its output to be kept.
    """

    def __init__(self, directory: str) -> None:
        self._newer = os.path.join(directory, _NEWER)
        self._older = os.path.join(directory, _OLDER)
        self._descriptor = -1
        self._size = 0

    def write(self, content: bytes) -> None:
        """Add `content`, of which each half of the ring takes what fits."""
        try:
            while content:
                if self._descriptor < 0 or self._size >= _HALF:
                    self._open()
                written = os.write(self._descriptor, content[: _HALF - self._size])
                self._size += written
                content = content[written:]
        except OSError:
            return

    def begin(self) -> None:
        """Put a line between what is there, of an earlier start, and what comes."""
        try:
            if end := read(os.path.dirname(self._newer), 1):
                self.write(b"" if end == b"\n" else b"\n")
                self.write(time.strftime(BETWEEN).encode())
        except OSError:
            return

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        """Open the newer file, after it has become the older one if it is full."""
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFE
        self._descriptor = os.open(self._newer, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size
        if self._size >= _HALF:
            os.rename(self._newer, self._older)
            self.close()
            self._descriptor = os.open(self._newer, flags | os.O_EXCL, 0o600)
            self._size = 0


def copy(output: int, child: int, directory: str) -> None:
    """Copy what comes through the pipe `output` into the ring, until `child` has ended or nobody can write any more.

    What the command itself printed is all in the pipe by then. What it left behind may go on printing: of that there is
    as much as comes at once, and a ring at most.
    """
    ended = os.pidfd_open(child)
    ring = Ring(directory)
    ring.begin()
    os.set_blocking(output, False)
    waiting = select.poll()
    waiting.register(output, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    left = SIZE
    try:
        while left > 0:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            try:
                content = os.read(output, _PIECE)
            except BlockingIOError:
                if ended in ready:
                    return
                continue
            if not content:
                return
            ring.write(content)
            if ended in ready:
                left -= len(content)
    finally:
        ring.close()
        os.close(ended)


def read(directory: str, limit: int) -> bytes:
    """The last `limit` bytes of the ring in `directory`, oldest first; empty where nothing has been kept.

    Raises OSError, ELOOP for a file that is none of ours.
    """
    while True:
        newer = _opened(os.path.join(directory, _NEWER))
        older = _opened(os.path.join(directory, _OLDER))
        try:
            if not _renamed(newer, directory):
                return (_content(older) + _content(newer))[-limit:] if limit > 0 else b""
        finally:
            for descriptor in (newer, older):
                if descriptor is not None:
                    os.close(descriptor)


def _renamed(newer: int | None, directory: str) -> bool:
    """Whether the file that was the newer one is not any more, so that what is open may not be in order."""
    try:
        now = os.lstat(os.path.join(directory, _NEWER))
    except FileNotFoundError:
        # It is being replaced, or there never was one.
        return newer is not None
    return newer is None or not os.path.samestat(os.fstat(newer), now)


def _opened(name: str) -> int | None:
    try:
        descriptor = os.open(name, os.O_RDONLY | _SAFE)
    except FileNotFoundError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise OSError(errno.ELOOP, "of another kind, or another user's")
    return descriptor


def _content(descriptor: int | None) -> bytes:
    if descriptor is None:
        return b""
    content = b""
    while piece := os.read(descriptor, SIZE):
        content += piece
    return content
