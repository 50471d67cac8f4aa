# SPDX-License-Identifier: Apache-2.0
"""Being told by the kernel that something in a directory changed (inotify(7)): how a reader stays current for nothing.

The C library is asked directly: Python has no binding, and this needs three functions of it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final, NamedTuple

from agent_intercom.host.descriptors import Descriptor

MODIFY: Final = 0x2
"""What a file has in it is another; also told of some files of the kernel's own, such as cgroup.events."""

CLOSE_WRITE: Final = 0x8
"""A file that was open for writing was closed, by its process or by that one's death."""

MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
DELETE: Final = 0x200
DELETE_SELF: Final = 0x400
MOVE_SELF: Final = 0x800

OVERFLOW: Final = 0x4000
"""The kernel dropped events of any watch: whoever sees this has to look at everything."""

IGNORED: Final = 0x8000
"""The watch is gone, because its directory is."""

_ONLYDIR: Final = 0x0100_0000
_DONT_FOLLOW: Final = 0x0200_0000
_EXCL_UNLINK: Final = 0x0400_0000
_HEADER: Final = struct.Struct("iIII")
_BUFFER: Final = 65_536
"""Bytes that are read at once; the longest event has 272."""


class Event(NamedTuple):
    """What happened: the number of the watch (-1 for OVERFLOW), which bits of the mask, and the name in the directory.

    The name is empty where the directory itself is meant.
    """

    watch: int
    mask: int
    name: str


class Inotify(Descriptor):
    """Watches on directories. The descriptor is readable when there are events; it never blocks.

    Every failure of the kernel's is an OSError with its number: ENOSPC where the user's number of watches is used up,
    EMFILE where that of instances is, ENOENT and ENOTDIR where no directory is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        """The descriptor, for poll(2) or an event loop; -1 once it is closed."""
        return self._fd

    def watch(self, directory: str, mask: int) -> int:
        """Be told of what `mask` says about `directory`, which must not be a link; the number of the watch.

        The same directory has the same number, and the newest mask.
        """
        flags = mask | _ONLYDIR | _DONT_FOLLOW | _EXCL_UNLINK
        name = ctypes.c_char_p(os.fsencode(directory))
        return self._checked(self._libc.inotify_add_watch(self._fd, name, ctypes.c_uint32(flags)), directory)

    def unwatch(self, watch: int) -> None:
        """Be told no more; the kernel answers with IGNORED. A watch that is gone already raises EINVAL."""
        self._checked(self._libc.inotify_rm_watch(self._fd, watch))

    def read(self) -> list[Event]:
        """The events that there are, oldest first; none where nothing happened."""
        try:
            data = os.read(self._fd, _BUFFER)
        except BlockingIOError:
            return []
        return decode(data)

    def _checked(self, result: int, name: str | None = None) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
        return result


def decode(data: bytes) -> list[Event]:
    """The events in what the kernel wrote; it never splits one."""
    events = []
    position = 0
    while position < len(data):
        watch, mask, _, length = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        name = data[position : position + length].rstrip(b"\0")
        position += length
        events.append(Event(watch, mask, os.fsdecode(name)))
    return events
