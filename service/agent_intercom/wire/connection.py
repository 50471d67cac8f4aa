# SPDX-License-Identifier: Apache-2.0
"""What the socket server and its users hand to each other: connections, limits, the handler and the tape."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from agent_intercom.wire.clock import Now
from agent_intercom.wire.peer import PeerCredentials

RECEIVE_SIZE: Final = 65_536
_DRAIN_READS: Final = 16
_MAX_BUFFERS: Final = 64
_MAX_BYTES: Final = 262_144
# Up to here one copy costs less than a vector of buffers.
_JOIN_BYTES: Final = 32_768


class ReactorLimits(NamedTuple):
    """What a connection, and all of them together, may keep waiting. Bytes and milliseconds."""

    high_water: int = 2 * 1_048_576
    low_water: int = 524_288
    hard_limit: int = 16 * 1_048_576
    write_deadline_ms: int = 30_000
    linger_ms: int = 1_000
    total_queue_limit: int = 64 * 1_048_576


class Connection:
    """One accepted or adopted stream.

    `number` never repeats in the life of a server, restarts included. `origin` is the name of the listener that it came
    by. `queued` counts the bytes that wait for the peer, `sent` those that the kernel took since the connection began.
    Everything below `corked` belongs to the reactor, but for `congested`, which who adopts a connection may set.
    `plain` is what nearly every connection is: open, and without anything that sending has to mind (a cork, a blocked
    peer, an end, a deadline, a charge, congestion). `patience_ms`, where set, takes the place of `write_deadline_ms`.
    """

    __slots__ = (
        "_mark",
        "blocked",
        "broken",
        "charged",
        "chunks",
        "congested",
        "corked",
        "deadline",
        "dirty",
        "dying",
        "ending",
        "fd",
        "lingering",
        "mask",
        "number",
        "offset",
        "origin",
        "patience_ms",
        "peer",
        "pidfd",
        "plain",
        "queued",
        "reading",
        "recv_into",
        "send",
        "sent",
        "sock",
    )

    def __init__(
        self, number: int, origin: str, peer: PeerCredentials, sock: socket.socket, mark: Callable[[Connection], None]
    ) -> None:
        self.number = number
        self.origin = origin
        self.peer = peer
        self.sock = sock
        self.queued = 0
        self.sent = 0
        self.corked = False
        self.recv_into = sock.recv_into
        self.send = sock.send
        self.fd = sock.fileno()
        self.mask = 0
        self.reading = True
        self.blocked = False
        self.broken = False
        self.congested = False
        self.dirty = False
        self.dying = ""
        self.ending = False
        self.lingering = False
        self.deadline = 0
        self.charged = 0
        self.chunks: deque[bytes] = deque()
        self.offset = 0
        self.pidfd = -1
        self.plain = True
        self.patience_ms = 0
        self._mark = mark

    @property
    def closed(self) -> bool:
        """Whether the reactor let go of the socket."""
        return self.fd < 0

    def queue(self, frame: bytes) -> None:
        """Charge `frame` to this connection; it is sent by the flush that ends the batch.

        Without effect on a connection that was closed or is ending: nothing can reach that peer any more.
        """
        if not frame or (not self.plain and (self.ending or self.fd < 0)):
            return
        self.chunks.append(frame)
        self.queued += len(frame)
        if not self.dirty:
            self.dirty = True
            self._mark(self)

    def touch(self) -> None:
        """Have the next flush look at this connection."""
        if not self.dirty:
            self.dirty = True
            self._mark(self)

    def gather(self) -> tuple[list[bytes | memoryview], int]:
        """The next buffers for one `sendmsg(2)`, and their size; small ones are joined. The queue keeps them."""
        chunks = self.chunks
        size = -self.offset
        buffers: list[bytes | memoryview] = []
        for chunk in chunks:
            buffers.append(chunk)
            size += len(chunk)
            if size >= _MAX_BYTES or len(buffers) == _MAX_BUFFERS:
                break
        if self.offset:
            buffers[0] = memoryview(chunks[0])[self.offset :]
        if len(buffers) > 1 and size <= _JOIN_BYTES:
            buffers = [b"".join(buffers)]
        return buffers, size

    def advance(self, size: int) -> None:
        """Take `size` bytes that the kernel accepted off the queue."""
        chunks = self.chunks
        self.sent += size
        self.queued -= size
        if not self.queued:
            chunks.clear()
            self.offset = 0
            return
        size += self.offset
        while size >= len(chunks[0]):
            size -= len(chunks.popleft())
        self.offset = size

    def drain(self) -> None:
        """Receive and forget what the peer has sent, within reason."""
        scratch = bytearray(RECEIVE_SIZE)
        with contextlib.suppress(OSError):
            for _ in range(_DRAIN_READS):
                if not self.sock.recv_into(scratch):
                    return

    def discard_queue(self) -> None:
        """Forget what waits: the peer can no longer receive it."""
        self.chunks.clear()
        self.offset = 0
        self.queued = 0

    def unsent(self) -> bytes:
        """A copy of the bytes that wait, for handing the connection over with `Reactor.adopt`."""
        return b"".join(self.chunks)[self.offset :]


class Tape(Protocol):
    """Where input is received and where progress is noted, so that a killed server can be replayed.

    One system call is under way at a time: within `receive` or `send`, or between `begin_send` and `end_send`.
    """

    def receive(self, number: int, recv_into: Callable[[memoryview], int], now: Now) -> memoryview:
        """Receive once for connection `number`; the answer is a view of the bytes, and an empty one means the end.

        Raises OSError (BlockingIOError: nothing was there); then nothing was taken from the socket.
        """
        ...

    def send(self, number: int, send: Callable[[bytes], int], frame: bytes, sent: int) -> int:
        """Send `frame` to connection `number`, which took `sent` bytes before; how many bytes the kernel took.

        Raises OSError (BlockingIOError: there was no room); then it took none.
        """
        ...

    def begin_send(self, number: int) -> None:
        """A `sendmsg(2)` for connection `number` is about to start."""
        ...

    def end_send(self, number: int, total: int) -> None:
        """It returned; the kernel has taken `total` bytes since the connection began."""
        ...


class NullTape:
    """A tape that keeps nothing: one buffer, used again and again."""

    __slots__ = ("_buffer",)

    def __init__(self, size: int = RECEIVE_SIZE) -> None:
        self._buffer = memoryview(bytearray(size))

    def receive(self, number: int, recv_into: Callable[[memoryview], int], now: Now) -> memoryview:
        """The received part of the buffer; valid until the next receive."""
        self.begin_receive(number)
        size = 0
        try:
            size = recv_into(self._buffer)
        finally:
            data = self.end_receive(number, size, now)
        return data

    def send(self, number: int, send: Callable[[bytes], int], frame: bytes, sent: int) -> int:
        """Just send."""
        self.begin_send(number)
        taken = 0
        try:
            taken = send(frame)
        finally:
            self.end_send(number, sent + taken)
        return taken

    def begin_receive(self, number: int) -> None:
        """Nothing is noted."""

    def end_receive(self, number: int, size: int, now: Now) -> memoryview:
        """The received part of the buffer."""
        return self._buffer[:size]

    def begin_send(self, number: int) -> None:
        """Nothing is noted."""

    def end_send(self, number: int, total: int) -> None:
        """Nothing is noted."""


class Handler(Protocol):
    """Who the reactor works for. Callbacks may queue to, pause, cork, end or destroy any connection at any time."""

    def accepted(self, connection: Connection, now: Now) -> None:
        """A peer of the right user connected; nothing was read yet."""
        ...

    def received(self, connection: Connection, data: memoryview, now: Now) -> None:
        """Bytes arrived. `data` is the tape's; copy what must outlive the call."""
        ...

    def lost(self, connection: Connection, reason: str, now: Now) -> None:
        """The connection is gone: `eof`, `reset`, `not-reading` or `peer-died`.

        Its socket is closed already, or, on `eof` with bytes queued, ended as by `Reactor.end`: those bytes leave, and
        nothing can be queued any more. Not called for connections that were ended or destroyed on this side.
        """
        ...

    def congested(self, connection: Connection, now: Now) -> None:
        """More than `high_water` bytes still wait after an attempt to send them. Told once, until `drained`."""
        ...

    def drained(self, connection: Connection, now: Now) -> None:
        """A congested connection is down to `low_water`."""
        ...

    def refused(self, origin: str, uid: int | None) -> None:
        """A peer of another user, or one that cannot be identified (None), was closed before a byte was read."""
        ...

    def out_of_descriptors(self, active: bool) -> None:
        """Connections wait in a listener's queue because no descriptor is free; False when one was accepted again."""
        ...

    def batch_done(self, now: Now) -> None:
        """All sockets that were ready have been served: commit, then queue what may leave. A flush follows."""
        ...
