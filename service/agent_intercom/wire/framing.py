# SPDX-License-Identifier: Apache-2.0
"""Length-prefixed frames: four bytes of big-endian length, then that many bytes."""

from __future__ import annotations

import struct
from typing import TypeAlias

from agent_intercom.wire.errors import WireError

Bytes: TypeAlias = bytes | bytearray | memoryview

MAX_FRAME = 1_048_576
"""Largest payload in bytes; equal is legal."""

HEADER_SIZE = 4

_HEADER = struct.Struct(">I")

frame_size = _HEADER.unpack_from
"""The length in the first four bytes of a buffer, which has as many; a tuple of one."""


def pack(payload: bytes, limit: int = MAX_FRAME) -> bytes:
    """Put the length in front of `payload`. Raises WireError `FRAME_TOO_LARGE` instead of building a longer frame."""
    if len(payload) > limit:
        raise WireError("FRAME_TOO_LARGE", f"frame of {len(payload)} bytes exceeds {limit}", "length")
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Cut a byte stream into payloads.

    Whole frames are cut straight out of what was fed; only an incomplete tail is kept, in one buffer that grows in
    place, so a frame that arrives in many pieces is copied once. A length over the limit is refused when its four bytes
    are complete, before a byte of payload is kept.
    """

    __slots__ = ("_data", "_limit", "_position", "_tail")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._data: Bytes = b""
        self._position = 0
        self._tail = bytearray()

    def feed(self, data: Bytes) -> None:
        """Take the next piece of the stream. `data` is not kept beyond the calls of `next` that drain it."""
        if self._position < len(self._data):
            if self._data is not self._tail:
                self._tail = bytearray(self._data[self._position :])
                self._data = self._tail
                self._position = 0
            self._tail += data
        else:
            self._data = data
            self._position = 0

    def next(self) -> bytes | None:
        """The next payload, or None when more bytes are needed.

        Raises WireError `FRAME_TOO_LARGE` or `FRAME_EMPTY`; the stream is useless after that.
        """
        data = self._data
        position = self._position
        have = len(data) - position
        if have < HEADER_SIZE:
            if have or data is self._tail:
                self._keep()
            else:
                self._data = b""
                self._position = 0
            return None
        (length,) = _HEADER.unpack_from(data, position)
        if length > self._limit:
            raise WireError("FRAME_TOO_LARGE", f"frame of {length} bytes exceeds {self._limit}", "length")
        if not length:
            raise WireError("FRAME_EMPTY", "frame of no bytes", "length")
        end = position + HEADER_SIZE + length
        if len(data) < end:
            self._keep()
            return None
        self._position = end
        return bytes(data[position + HEADER_SIZE : end])

    def keep(self) -> None:
        """Copy what was fed and not handed out, because the caller's buffer will be used again."""
        if self._data is not self._tail:
            self._keep()

    @property
    def waiting(self) -> bool:
        """Whether bytes are kept."""
        return self._position < len(self._data)

    @property
    def pending(self) -> bytes:
        """Bytes that were fed and are not part of a payload handed out yet."""
        return bytes(self._data[self._position :])

    def _keep(self) -> None:
        if self._data is self._tail:
            if self._position:
                del self._tail[: self._position]
        else:
            self._tail = bytearray(self._data[self._position :])
            self._data = self._tail
        self._position = 0
