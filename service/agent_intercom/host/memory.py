# SPDX-License-Identifier: Apache-2.0
"""The memory file: what a broker must remember across a restart or a SIGKILL, and what must never reach a disk.

One memfd, mapped from the start. It holds a snapshot of the caller's state, a log of every input since, and for each
connection how many bytes the kernel has taken from us. Whoever holds the descriptor (a descriptor store) can hand it to
the next process, which loads the snapshot and feeds the inputs again.

Every change becomes valid by one aligned eight-byte store that follows everything it depends on. Stores of a process
that is killed stay in the file in program order, so whatever the instruction, the file is loadable; what can be missing
is the record of the single system call that was under way, and `reading` or `writing` name its connection.

Layout, in native byte order (the file never leaves the machine):

====================  =====================================================================
bytes                 content
====================  =====================================================================
0 … 4095              header words (`_MAGIC` … `_SIZE` below)
4096 … 20479          1024 slots of two words: connection number + 1 (0 is free), bytes sent
20480 …               two halves of equal size: the snapshot, then the log
====================  =====================================================================

A record is a 32-byte header (kind, size, connection number, both clocks) and its data, padded to eight bytes.

Codes of `HostError`: `MEMORY_FULL` (no room in the half), `MEMORY_SLOTS` (no free slot), `MEMORY_FOREIGN` (not a file
of ours), `MEMORY_VERSION` (ours, in another format), `MEMORY_CORRUPT` (ours, and contradicts itself).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from agent_intercom.host.errors import HostError
from agent_intercom.wire.clock import Now

RECEIVED: Final = 1
"""The kind of a record of received bytes. Callers number their own kinds from 2 to 255."""

SLOTS: Final = 1024
DEFAULT_SIZE: Final = 2048 * 1024 * 1024
"""Bytes of both halves together. The file is sparse: only what was written occupies memory."""

RECEIVE_MAX: Final = 256 * 1024
RECEIVE_MIN: Final = 64 * 1024

_PAGE: Final = 4096
_FORMAT: Final = 1
_MAGIC_VALUE: Final = int.from_bytes(b"AIntercM", "little")

# Indices of the header's words.
_MAGIC: Final = 0
_VERSION: Final = 1
_SIZE: Final = 2
_ACTIVE: Final = 3
_END: Final = 4  # and 5: where the log of each half ends, as an offset in the file
_SNAPSHOT: Final = 6  # and 7: length of the snapshot of each half + 1; 0 means none was ever taken
_READING: Final = 8
_WRITING: Final = 9
_MARK: Final = 10
_WORDS: Final = 11

_SLOT_WORD: Final = _PAGE // 8  # word index of the first slot
_HALVES: Final = _PAGE + SLOTS * 16
_RECORD: Final = Struct("=IIQqq")
_HEADER: Final = _RECORD.size
_REACH: Final = _HEADER + RECEIVE_MAX
_pack_record: Final = _RECORD.pack_into
_KIND_MAX: Final = 255

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; os.MFD_NOEXEC_SEAL does not exist in Python 3.11


class Record(NamedTuple):
    """One logged input: `kind`, the connection's `number`, when it happened, and its bytes."""

    kind: int
    number: int
    now: Now
    data: bytes


class Loaded(NamedTuple):
    """What an adopted file holds.

    `snapshot` is None when none was ever taken. `reading` is the connection whose received bytes may be missing from
    the log, `writing` the one whose total may be too small: neither can be continued.
    """

    snapshot: bytes | None
    records: list[Record]
    reading: int | None
    writing: int | None


class StateFile:
    """The mapped memory file. Made by `create` or `adopt`; one process at a time writes to it."""

    __slots__ = (
        "_active",
        "_base",
        "_end",
        "_end_word",
        "_fd",
        "_half",
        "_limit",
        "_map",
        "_slots",
        "_words",
    )

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        """Internal: take over a descriptor whose header is already valid."""
        self._fd = fd
        self._map = mapping
        self._base = memoryview(mapping)
        self._words = self._base[:_HALVES].cast("Q")
        self._half = self._words[_SIZE] // 2
        self._select(self._words[_ACTIVE])
        slots = {self._words[word]: word for word in range(_SLOT_WORD, _SLOT_WORD + 2 * SLOTS, 2)}
        self._slots = {marked - 1: word + 1 for marked, word in slots.items() if marked}

    def _select(self, active: int) -> None:
        self._active = active
        self._end_word = _END + active
        self._end = self._words[self._end_word]
        self._limit = _HALVES + (active + 1) * self._half

    @classmethod
    def create(cls, size: int = DEFAULT_SIZE) -> StateFile:
        """Make an empty file whose halves have `size` bytes together (a multiple of two pages, at least 512 KiB)."""
        if size % (2 * _PAGE) or size < 2 * RECEIVE_MAX:
            raise ValueError("size: a multiple of 8192, at least 524288")
        fd = _memfd()
        try:
            os.ftruncate(fd, _HALVES + size)
            # The size can never change again, so that no holder of the descriptor can turn our stores into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, _HALVES + size)
        except OSError:
            os.close(fd)
            raise
        with memoryview(mapping) as base, base[:_PAGE].cast("Q") as words:
            words[_SIZE] = size
            words[_END] = _HALVES
            words[_END + 1] = _HALVES + size // 2
            words[_VERSION] = _FORMAT
            words[_MAGIC] = _MAGIC_VALUE
        return cls(fd, mapping)

    @classmethod
    def adopt(cls, fd: int) -> StateFile:
        """Map the file behind `fd`, which belongs to the result from then on.

        Raises `HostError` (`MEMORY_FOREIGN`, `MEMORY_VERSION`, `MEMORY_CORRUPT`) and leaves `fd` open. The records are
        checked by `load`.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise HostError("MEMORY_FOREIGN", "the descriptor is not a sealed memory file", "memory")
            length = os.fstat(fd).st_size
            if length < _HALVES:
                raise HostError("MEMORY_FOREIGN", "the memory file is shorter than its header", "memory")
            mapping = mmap.mmap(fd, length)
        except OSError as error:
            raise HostError("MEMORY_FOREIGN", "the descriptor is not a memory file", "memory") from error
        with memoryview(mapping) as base, base[:_PAGE].cast("Q") as words:
            problem = _problem(words[:_WORDS].tolist(), length)
        if problem is not None:
            mapping.close()
            raise problem
        os.set_inheritable(fd, False)
        state = cls(fd, mapping)
        # A process killed just after a switch left its old half behind.
        state._forget(1 - state._active)
        return state

    def fileno(self) -> int:
        """The descriptor, for the descriptor store."""
        return self._fd

    def close(self) -> None:
        """Unmap and close. Views that a caller still holds keep the mapping until they go."""
        if self._fd < 0:
            return
        self._words.release()
        self._base.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)
        self._fd = -1

    @property
    def room(self) -> int:
        """Bytes left in the active half, record headers included."""
        return self._limit - self._end

    @property
    def log_end(self) -> int:
        """Offset in the file at which the log ends."""
        return self._end

    @property
    def mark(self) -> int:
        """A number of the caller's own, kept across a kill and a snapshot; 0 in a new file."""
        return self._words[_MARK]

    @mark.setter
    def mark(self, value: int) -> None:
        self._words[_MARK] = value

    @property
    def snapshot_size(self) -> int:
        """Bytes of the current snapshot; 0 without one."""
        return max(self._words[_SNAPSHOT + self._active] - 1, 0)

    @property
    def log_size(self) -> int:
        """Bytes of log since the current snapshot, headers and padding included."""
        return self._end - self._log_start(self._active)

    def receive(self, number: int, recv_into: Callable[[memoryview], int], now: Now) -> memoryview:
        """Receive once for connection `number` where the log ends, and log what came.

        The answer is a view of the bytes, valid until the next `snapshot`; an empty one (the end) is not logged. Raises
        `HostError` `MEMORY_FULL` (take a snapshot first), and OSError where `recv_into` does: nothing is logged then.
        """
        end = self._end
        base = self._base
        view = base[end + _HEADER : end + _REACH] if end + _REACH <= self._limit else self._last_buffer()
        words = self._words
        words[_READING] = number + 1
        try:
            size = recv_into(view)
        except OSError:
            words[_READING] = 0
            raise
        if size:
            _pack_record(base, end, RECEIVED, size, number, now.mono, now.wall)
            self._end = words[self._end_word] = (end + size + 39) & -8
        words[_READING] = 0
        return view[:size]

    def _last_buffer(self) -> memoryview:
        """What is left of the half for received bytes."""
        start = self._end + _HEADER
        if self._limit - start < RECEIVE_MIN:
            raise HostError("MEMORY_FULL", "no room in the memory file for received bytes", "log")
        return self._base[start : self._limit]

    def send(self, number: int, send: Callable[[bytes], int], frame: bytes, sent: int) -> int:
        """`begin_send`, one call of `send` with `frame`, `end_send`; `sent` is what the kernel has taken before.

        Raises OSError where `send` does: then nothing was taken.
        """
        words = self._words
        words[_WRITING] = number + 1
        try:
            taken = send(frame)
        except OSError:
            words[_WRITING] = 0
            raise
        word = self._slots.get(number)
        if word is not None:
            words[word] = sent + taken
        words[_WRITING] = 0
        return taken

    def begin_send(self, number: int) -> None:
        """Note that bytes are about to be sent to connection `number`."""
        self._words[_WRITING] = number + 1

    def end_send(self, number: int, total: int) -> None:
        """Note that the kernel has taken `total` bytes of connection `number` since it was claimed.

        A connection without a slot is one that nobody will go on with: nothing is noted of it.
        """
        words = self._words
        word = self._slots.get(number)
        if word is not None:
            words[word] = total
        words[_WRITING] = 0

    def claim(self, number: int) -> None:
        """Give connection `number` a slot, with a total of 0. Raises `HostError` `MEMORY_SLOTS` when all are taken."""
        words = self._words
        if number in self._slots:
            words[self._slots[number]] = 0
            return
        for word in range(_SLOT_WORD, _SLOT_WORD + 2 * SLOTS, 2):
            if not words[word]:
                words[word + 1] = 0
                words[word] = number + 1
                self._slots[number] = word + 1
                return
        raise HostError("MEMORY_SLOTS", "no free slot in the memory file", "slots")

    def release(self, number: int) -> None:
        """Free the slot of connection `number`, if it has one."""
        word = self._slots.pop(number, None)
        if word is not None:
            self._words[word - 1] = 0

    def sent(self, number: int) -> int | None:
        """Bytes that the kernel has taken of connection `number`; None when it has no slot."""
        word = self._slots.get(number)
        return None if word is None else self._words[word]

    def claimed(self) -> list[int]:
        """The connections that hold a slot."""
        return list(self._slots)

    def record(self, kind: int, number: int, now: Now, data: bytes = b"") -> None:
        """Log any other input. `kind` is the caller's (2 to 255). Raises `HostError` `MEMORY_FULL`."""
        size = len(data)
        end = self._end
        start = end + _HEADER
        after = (start + size + 7) & -8
        if after > self._limit:
            raise HostError("MEMORY_FULL", "no room in the memory file for a record", "log")
        if size:
            self._base[start : start + size] = data
        _pack_record(self._base, end, kind, size, number, now.mono, now.wall)
        self._end = self._words[self._end_word] = after

    def snapshot(self, payload: bytes) -> None:
        """Replace the snapshot and empty the log. Views of received bytes are void afterwards.

        Raises `HostError` `MEMORY_FULL`, and changes nothing, when `payload` leaves less than `RECEIVE_MIN` for a log.
        """
        old = self._active
        other = 1 - old
        start = _HALVES + other * self._half
        log = (start + len(payload) + 7) & -8
        if log + _HEADER + RECEIVE_MIN > start + self._half:
            raise HostError("MEMORY_FULL", "the snapshot does not fit into the memory file", "snapshot")
        words = self._words
        self._base[start : start + len(payload)] = payload
        words[_SNAPSHOT + other] = len(payload) + 1
        words[_END + other] = log
        words[_ACTIVE] = other
        self._select(other)
        self._forget(old)

    def load(self) -> Loaded:
        """Read everything back. Raises `HostError` `MEMORY_CORRUPT` when the log contradicts itself."""
        words = self._words
        base = self._base
        start = _HALVES + self._active * self._half
        length = words[_SNAPSHOT + self._active]
        snapshot = bytes(base[start : start + length - 1]) if length else None
        records = []
        at = self._log_start(self._active)
        while at < self._end:
            if at + _HEADER > self._end:
                raise HostError("MEMORY_CORRUPT", "the memory file ends inside a record", "log")
            kind, size, number, mono, wall = _RECORD.unpack_from(base, at)
            data = at + _HEADER
            at = (data + size + 7) & -8
            if at > self._end or not 0 < kind <= _KIND_MAX:
                raise HostError("MEMORY_CORRUPT", "the memory file has an impossible record", "log")
            records.append(Record(kind, number, Now(mono, wall), bytes(base[data : data + size])))
        reading, writing = words[_READING], words[_WRITING]
        return Loaded(snapshot, records, reading - 1 if reading else None, writing - 1 if writing else None)

    def settle(self) -> None:
        """Clear `reading` and `writing`, once the caller has dealt with the connections that `load` named."""
        self._words[_READING] = 0
        self._words[_WRITING] = 0

    def _log_start(self, half: int) -> int:
        return (_HALVES + half * self._half + max(self._words[_SNAPSHOT + half] - 1, 0) + 7) & -8

    def _forget(self, half: int) -> None:
        """Give the pages of a half back to the kernel; a kernel that cannot keeps them until they are overwritten."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, _HALVES + half * self._half, self._half)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Kernels from 6.3 on warn about, and may be told to refuse, a memfd that does not say whether it is executable.
        return os.memfd_create("agent-intercom", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("agent-intercom", flags)


def _problem(words: list[int], length: int) -> HostError | None:
    """What is wrong with header `words` in a file of `length` bytes."""
    if words[_MAGIC] != _MAGIC_VALUE:
        return HostError("MEMORY_FOREIGN", "the memory file is not one of ours", "magic")
    if words[_VERSION] != _FORMAT:
        return HostError("MEMORY_VERSION", "the memory file has another format", "version")
    size, active = words[_SIZE], words[_ACTIVE]
    if size != length - _HALVES or size % (2 * _PAGE) or active > 1:
        return HostError("MEMORY_CORRUPT", "the header of the memory file contradicts its size", "size")
    start = _HALVES + active * (size // 2)
    log = (start + max(words[_SNAPSHOT + active] - 1, 0) + 7) & -8
    if not start <= log <= words[_END + active] <= start + size // 2 or words[_END + active] % 8:
        return HostError("MEMORY_CORRUPT", "the log of the memory file lies outside it", "log")
    return None
