# SPDX-License-Identifier: Apache-2.0
"""Sending what is queued, and charging what cannot be sent."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final, NamedTuple

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection, ReactorLimits, Tape
from agent_intercom.wire.deadlines import Deadlines
from agent_intercom.wire.pool import Pool

_OUT: Final = select.EPOLLOUT
_SENDS_PER_FLUSH: Final = 16


class Outcomes(NamedTuple):
    """What is to happen to a connection that a flush looked at.

    `congested`: more than the high-water mark waits after an attempt to send. `drained`: it is down to the low-water
    mark. `give_up`: it is over a limit and must be dropped. `all_sent`: it is ending and nothing is left to send.
    `broken`: the peer receives no more, and what was queued is gone.
    """

    congested: Callable[[Connection], None]
    drained: Callable[[Connection], None]
    give_up: Callable[[Connection], None]
    all_sent: Callable[[Connection], None]
    broken: Callable[[Connection], None]


class Sender:
    """The write side of all connections of a pool.

    Bytes are charged when a flush looks at a connection, so what the kernel takes at once is never congestion.
    """

    def __init__(self, tape: Tape, limits: ReactorLimits, pool: Pool, deadlines: Deadlines, outcomes: Outcomes) -> None:
        self._tape = tape
        self._limits = limits
        self._pool = pool
        self._deadlines = deadlines
        self._outcomes = outcomes
        self._total = 0

    def flush(self, now: Now) -> None:
        """Send on every marked connection that is neither corked nor waiting for its peer to read."""
        dirty = self._pool.dirty
        # Callbacks may mark further connections; the loop reaches them too.
        for connection in dirty:
            connection.dirty = False
            if connection.plain and len(connection.chunks) == 1:
                connection.queued = 0
                self.send(connection, connection.chunks.pop(), now)
            elif connection.fd >= 0:
                self._look_at(connection, now)
        dirty.clear()
        if self._total > self._limits.total_queue_limit:
            self._make_room()

    def send(self, connection: Connection, frame: bytes, now: Now) -> None:
        """`queue`, and at once what `flush` would do, where the peer has taken all before `frame`.

        For a frame that no other will follow in the same batch: those leave together when they are queued.
        """
        if not connection.plain or connection.chunks:
            connection.queue(frame)
            return
        sent = connection.sent
        try:
            taken = self._tape.send(connection.number, connection.send, frame, sent)
        except BlockingIOError:
            taken = 0
        except OSError:
            self._break(connection)
            return
        if taken == len(frame):
            connection.sent = sent + taken
            return
        connection.chunks.append(frame)
        connection.queued = len(frame)
        if taken:
            connection.advance(taken)
        self._block(connection, taken, now)
        self._account(connection)

    def _look_at(self, connection: Connection, now: Now) -> None:
        """Whatever sending and charging there is to do for a connection."""
        if connection.queued and not connection.blocked:
            if not connection.corked:
                self.transmit(connection, now)
            elif connection.mask & _OUT:
                self._pool.arm(connection)
        if connection.queued or connection.charged or connection.congested or connection.ending:
            self._account(connection)
        # Bytes that wait were charged above, unless the peer is gone.
        connection.plain = not (
            connection.fd < 0
            or connection.ending
            or connection.corked
            or connection.blocked
            or connection.broken
            or connection.deadline
            or connection.charged
            or connection.congested
            or connection.mask & _OUT
        )

    def _make_room(self) -> None:
        while self._total > self._limits.total_queue_limit:
            self._outcomes.give_up(max(self._pool.by_number.values(), key=lambda item: item.charged))

    def _break(self, connection: Connection) -> None:
        connection.broken = True
        connection.plain = False
        connection.discard_queue()
        self._outcomes.broken(connection)

    def transmit(self, connection: Connection, now: Now) -> None:
        """Send until nothing is queued or the kernel takes no more; then epoll tells when to go on."""
        if connection.broken:
            connection.discard_queue()
            return
        tape = self._tape
        sock = connection.sock
        number = connection.number
        chunks = connection.chunks
        for _ in range(_SENDS_PER_FLUSH):
            size = connection.queued
            buffers = None
            if len(chunks) > 1 or connection.offset:
                buffers, size = connection.gather()
            tape.begin_send(number)
            try:
                taken = sock.send(chunks[0]) if buffers is None else sock.sendmsg(buffers)
            except BlockingIOError:
                taken = 0
            except OSError:
                tape.end_send(number, connection.sent)
                self._break(connection)
                break
            if taken:
                connection.advance(taken)
            tape.end_send(number, connection.sent)
            if not connection.queued:
                break
            if taken < size:
                self._block(connection, taken, now)
                return
        else:
            self._block(connection, 1, now)
            return
        if connection.mask & _OUT:
            self._pool.arm(connection)
        if connection.deadline and not connection.ending:
            self._deadlines.clear(connection)

    def forget(self, connection: Connection) -> None:
        """A connection was closed: it is charged nothing any more."""
        self._total -= connection.charged
        connection.charged = 0

    def _block(self, connection: Connection, progress: int, now: Now) -> None:
        connection.blocked = True
        connection.plain = False
        if not connection.mask & _OUT:
            self._pool.arm(connection)
        if progress or not connection.deadline:
            self._deadlines.set(connection, now, connection.patience_ms or self._limits.write_deadline_ms)

    def _account(self, connection: Connection) -> None:
        queued = connection.queued
        self._total += queued - connection.charged
        connection.charged = queued
        limits = self._limits
        if connection.ending:
            if not queued and not connection.lingering:
                self._outcomes.all_sent(connection)
        elif queued > limits.hard_limit:
            self._outcomes.give_up(connection)
        elif connection.congested:
            if queued <= limits.low_water:
                connection.congested = False
                self._outcomes.drained(connection)
        elif queued > limits.high_water:
            connection.congested = True
            self._outcomes.congested(connection)
