# SPDX-License-Identifier: Apache-2.0
"""The socket server: listeners, connections, write queues and backpressure on one nested epoll.

The asyncio loop sees a single descriptor, an epoll instance of our own. One callback per wake serves every socket that
is ready, then lets the handler commit, then flushes every connection that has bytes waiting: however many frames one
turn queues for a peer, they leave in one system call.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Mapping
from typing import Final

from agent_intercom.wire.clock import Now, system_now
from agent_intercom.wire.connection import Connection, Handler, NullTape, ReactorLimits, Tape
from agent_intercom.wire.deadlines import Deadlines
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.listeners import Listeners
from agent_intercom.wire.peer import PeerCredentials, peer_credentials
from agent_intercom.wire.pool import Pool
from agent_intercom.wire.sender import Outcomes, Sender

__all__ = ["Connection", "Handler", "NullTape", "Reactor", "ReactorLimits", "Tape"]

_WRITE_EVENTS: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_READ_EVENTS: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_BUSY_MS: Final = 5
_BUSY_WAIT_S: Final = 0.001
_EVENTS_PER_WAKE: Final = 64


class Reactor:
    """Serves Unix stream sockets for one user on one asyncio loop.

    `uid` is the only user whose connections are served. `next_number` is the number of the next connection and may be
    set. All work happens in batches: a wake of the epoll, a timer, or `run_batch`; within one, `send` (`Sender.send`)
    may be called. Exceptions of the handler propagate to the loop's exception handler.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        tape: Tape,
        *,
        uid: int,
        clock: Callable[[], Now] = system_now,
        limits: ReactorLimits | None = None,
    ) -> None:
        self.next_number = 1
        self._loop = loop
        self._handler = handler
        self._tape = tape
        self._uid = uid
        self._clock = clock
        self._limits = limits or ReactorLimits()
        self._epoll = select.epoll()
        self._pool = Pool(self._epoll)
        self.connections: Mapping[int, Connection] = self._pool.by_number
        self._now = clock()
        self._in_batch = False
        self._yielding = False
        self._told = False
        self._dying: set[Connection] = set()
        self._reap_handle: asyncio.Handle | None = None
        self._deadlines = Deadlines(loop, self.run_batch, self._overdue)
        outcomes = Outcomes(self._congested, self._drained, self._give_up, self._half_close, self._broken)
        self._sender = Sender(tape, self._limits, self._pool, self._deadlines, outcomes)
        self.send = self._sender.send
        self._listeners = Listeners(
            loop,
            self._epoll,
            lambda work: self.run_batch(lambda _now: work()),
            self._welcome,
            self._short_of_descriptors,
        )
        self.listeners_idle = self._listeners.idle
        self.hold_listening = self._listeners.hold
        self.stop_listening = self._listeners.stop
        loop.add_reader(self._epoll.fileno(), self._wake)

    # Listeners and connections

    def listen(self, sock: socket.socket, origin: str) -> None:
        """Accept from a listening socket; its connections carry `origin`."""
        self._listeners.add(sock, origin)

    def adopt(
        self,
        sock: socket.socket,
        origin: str,
        number: int,
        *,
        sent: int = 0,
        unsent: bytes = b"",
    ) -> Connection | None:
        """Take over a connection that an earlier process accepted.

        `sent` is how many bytes the kernel took so far, `unsent` what follows them; it leaves with the next flush. Set
        `congested` before that flush to be told `drained`. The credentials are read again: answers None, closes the
        socket and tells `refused` where they are not good. `next_number` moves past `number`.
        """
        self.next_number = max(self.next_number, number + 1)
        peer = self._checked(sock, origin)
        if peer is None:
            return None
        connection = self._pool.add(sock, origin, number, peer)
        connection.sent = sent
        connection.plain = False
        connection.queue(unsent)
        self._pool.arm(connection)
        return connection

    def pause(self, connection: Connection) -> None:
        """Read no more from this peer until `resume`."""
        if connection.reading and not connection.ending:
            connection.reading = False
            self._pool.arm(connection)

    def resume(self, connection: Connection) -> None:
        """Read again."""
        if not connection.reading and not connection.ending and connection.fd >= 0:
            connection.reading = True
            self._pool.arm(connection)
            if connection.dying:
                self._reap_soon()

    def cork(self, connection: Connection) -> None:
        """Queue, but do not send, until `uncork`."""
        connection.corked = True
        connection.plain = False

    def uncork(self, connection: Connection) -> None:
        """Send again, with the next flush."""
        connection.corked = False
        if connection.fd >= 0:
            connection.touch()

    def end(self, connection: Connection) -> None:
        """Read no more, send what is queued, then close: the peer gets all of it and an orderly end of stream.

        The sending side is shut down when the queue is empty; the socket closes when the peer has answered with
        anything, or after `linger_ms`. A peer that takes nothing for `write_deadline_ms` is closed.
        """
        if connection.ending or connection.fd < 0:
            return
        connection.ending = True
        connection.plain = False
        connection.reading = False
        self._pool.unwatch(connection)
        self._pool.arm(connection)
        self._expect(connection, self._limits.write_deadline_ms)
        connection.touch()

    def destroy(self, connection: Connection) -> None:
        """Close at once; nothing more is sent."""
        if connection.fd >= 0:
            self._drop(connection)

    def watch_peer_death(self, connection: Connection) -> bool:
        """Lose the connection when the process that connected ends, even if another process holds its end open.

        What the peer sent before is received first. False where the kernel gives no such notice.
        """
        if connection.fd < 0 or connection.ending:
            return False
        if connection.pidfd >= 0 or connection.dying:
            return True
        return self._pool.watch(connection)

    def close(self, *, detach: bool = False) -> None:
        """Close every socket of this process, listeners included, without telling the handler.

        With `detach` only our descriptors go: a copy in the descriptor store keeps the peer connected. Without it the
        peers see the end of the stream.
        """
        for connection in list(self.connections.values()):
            self._drop(connection, shut=not detach)
        if self._reap_handle is not None:
            self._reap_handle.cancel()
            self._reap_handle = None
        self._listeners.close()
        self._deadlines.close()
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    # Batches

    def run_batch(self, work: Callable[[Now], None]) -> None:
        """Run `work` as if a socket had asked for it, followed by `batch_done` and a flush.

        Inside a batch it just runs: that batch ends the same way.
        """
        if self._in_batch:
            work(self._now)
            return
        self._now = self._clock()
        self._in_batch = True
        try:
            work(self._now)
            self._settle(self._now)
        finally:
            self._in_batch = False

    def serve_ready(self) -> bool:
        """Serve every socket that is ready now, once, in a batch of its own; False when none was, or inside a batch.

        For a timer that is late: what arrived in time, while this process did not run, must be seen before the tick.
        """
        if self._in_batch or self._epoll.closed:
            return False
        events = self._epoll.poll(0)
        if events:
            self._serve(events)
        return bool(events)

    def yield_to_loop(self) -> None:
        """Go back to asyncio after this batch: something was scheduled that should not wait for the sockets."""
        self._yielding = True

    def _wake(self) -> None:
        # A turn of asyncio's loop costs more than a small frame does. While sockets are busy they are waited for here,
        # for no longer than a timer, a signal or a watchdog can wait.
        poll = self._epoll.poll
        events = poll(0, _EVENTS_PER_WAKE)
        until = 0
        self._yielding = False
        while events:
            self._serve(events)
            until = until or self._now.mono + _BUSY_MS
            if self._yielding or self._now.mono >= until or self._epoll.closed:
                return
            events = poll(_BUSY_WAIT_S, _EVENTS_PER_WAKE)

    def _serve(self, events: list[tuple[int, int]]) -> None:
        self._now = now = self._clock()
        self._in_batch = True
        try:
            find = self._pool.by_fd.get
            watched = self._pool.by_pidfd
            listening: list[int] = []
            for fd, mask in events:
                connection = find(fd)
                if connection is None:
                    if fd in self._listeners:
                        # Accepted last: a new connection must not inherit an event of a descriptor closed before it.
                        listening.append(fd)
                    elif fd in watched:
                        self._peer_died(watched[fd])
                    continue
                if connection.reading and mask & _READ_EVENTS:
                    self._receive(connection, now)
                elif connection.lingering:
                    self._finish(connection)
                if connection.blocked and mask & _WRITE_EVENTS:
                    connection.blocked = False
                    connection.touch()
            for fd in listening:
                self._listeners.accept(fd)
            self._settle(now)
        finally:
            self._in_batch = False

    def _settle(self, now: Now) -> None:
        self._told = True
        # Whatever the handler decided while bytes left has to be committed like everything else.
        while self._told:
            self._told = False
            self._handler.batch_done(now)
            self._sender.flush(now)

    # Receiving

    def _receive(self, connection: Connection, now: Now) -> bool:
        """Receive once; False when nothing was there."""
        try:
            data = self._tape.receive(connection.number, connection.recv_into, now)
        except BlockingIOError:
            return False
        except OSError:
            self._lose(connection, "reset")
            return True
        if data:
            self._handler.received(connection, data, now)
        elif connection.broken or not connection.queued:
            self._lose(connection, "reset" if connection.broken else "eof")
        else:
            # A peer that only ended its own side has a right to what was answered.
            self.end(connection)
            self._dying.discard(connection)
            self._told = True
            self._handler.lost(connection, "eof", now)
        return True

    def _peer_died(self, connection: Connection) -> None:
        self._pool.unwatch(connection)
        self._let_die(connection, "peer-died")

    def _let_die(self, connection: Connection, reason: str) -> None:
        """Lose the connection for `reason` once everything that the peer sent has been received."""
        connection.dying = connection.dying or reason
        self._dying.add(connection)
        self._reap_soon()

    def _reap_soon(self) -> None:
        if self._reap_handle is None:
            self._yielding = True
            self._reap_handle = self._loop.call_soon(self._reap_batch)

    def _reap_batch(self) -> None:
        self._reap_handle = None
        self.run_batch(self._reap)

    def _reap(self, now: Now) -> None:
        for connection in list(self._dying):
            if connection.reading and not self._receive(connection, now):
                self._lose(connection, connection.dying)
        if any(connection.reading for connection in self._dying):
            self._reap_soon()

    # Sending

    def flush(self) -> None:
        """Send what is queued on every connection that is neither corked nor waiting for its peer to read."""
        if self._in_batch:
            self._sender.flush(self._now)
        elif self._pool.dirty:
            self._now = self._clock()
            self._in_batch = True
            try:
                self._told = False
                self._sender.flush(self._now)
                if self._told:
                    self._settle(self._now)
            finally:
                self._in_batch = False

    def _congested(self, connection: Connection) -> None:
        self._told = True
        self._handler.congested(connection, self._now)

    def _drained(self, connection: Connection) -> None:
        self._told = True
        self._handler.drained(connection, self._now)

    def _broken(self, connection: Connection) -> None:
        # What the peer sent before it left is still to be received.
        if not connection.ending:
            self._let_die(connection, "reset")

    def _half_close(self, connection: Connection) -> None:
        if connection.broken:
            self._drop(connection)
            return
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(connection)
            return
        connection.lingering = True
        self._pool.arm(connection)
        self._expect(connection, self._limits.linger_ms)

    def _finish(self, connection: Connection) -> None:
        """Close an ended connection; unread bytes are taken first, or the peer would see a reset instead of our end."""
        connection.drain()
        self._drop(connection)

    # Deadlines

    def _expect(self, connection: Connection, delay_ms: int) -> None:
        if not self._in_batch:
            self._now = self._clock()
        self._deadlines.set(connection, self._now, delay_ms)

    def _overdue(self, connection: Connection) -> None:
        if connection.lingering:
            self._finish(connection)
            return
        if connection.corked and not connection.ending:
            self._deadlines.clear(connection)
            return
        # This process may have been stopped while the peer read: only a send tells who is late.
        if connection.blocked and not connection.corked:
            sent = connection.sent
            connection.blocked = False
            self._sender.transmit(connection, self._now)
            if connection.sent != sent or not connection.queued:
                connection.touch()
                return
        self._give_up(connection)

    def _give_up(self, connection: Connection) -> None:
        if connection.ending:
            self._drop(connection)
        else:
            self._lose(connection, "not-reading")

    # Accepting

    def _welcome(self, sock: socket.socket, origin: str) -> None:
        peer = self._checked(sock, origin)
        if peer is None:
            return
        number = self.next_number
        self.next_number = number + 1
        connection = self._pool.add(sock, origin, number, peer)
        self._handler.accepted(connection, self._now)
        self._pool.arm(connection)

    def _checked(self, sock: socket.socket, origin: str) -> PeerCredentials | None:
        uid = None
        try:
            peer = peer_credentials(sock)
            uid = peer.uid
        except WireError:
            peer = None
        if peer is None or uid != self._uid:
            sock.close()
            self._told = True
            self._handler.refused(origin, uid)
            return None
        return peer

    def _short_of_descriptors(self, active: bool) -> None:
        self._told = True
        self._handler.out_of_descriptors(active)

    # Bookkeeping

    def _lose(self, connection: Connection, reason: str) -> None:
        self._drop(connection)
        self._told = True
        self._handler.lost(connection, reason, self._now)

    def _drop(self, connection: Connection, *, shut: bool = True) -> None:
        self._pool.close(connection, shut=shut)
        self._deadlines.clear(connection)
        self._sender.forget(connection)
        self._dying.discard(connection)
        self._listeners.freed()
