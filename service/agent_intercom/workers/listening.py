# SPDX-License-Identifier: Apache-2.0
"""Connections to the worker service: who is on the other end, and requests that are answered one after another.

Nobody but processes of this user is served, and it is the kernel that says who somebody is (decision 8 of the design).
Whoever is in the scope unit of a worker, or below it, is that worker, whatever it says. Whoever has ended, or cannot be
looked at any more, since it connected is nobody, and is not served: a worker could pose as an outsider like that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, cast

from agent_intercom.host import processes
from agent_intercom.host.journal import Event, Journal
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import FrameDecoder, pack
from agent_intercom.wire.peer import peer_credentials, peer_pidfd
from agent_intercom.workers import contract

MAX_CONNECTIONS: Final = 512

_ORIGIN: Final = "workers"
_MAX_WAITING: Final = 4
"""Requests of one connection that may wait before it is not read from for a while."""

_ACCEPTS_PER_WAKE: Final = 32
_RETRY: Final = 0.1


class Origin(NamedTuple):
    """Where a request comes from: `worker` is the incarnation in whose scope unit its process is, or None."""

    pid: int
    worker: str | None


Handler = Callable[[bytes, Origin, "Peer"], Awaitable[bytes]]


def incarnation_of(cgroup: str) -> str | None:
    """The incarnation in whose scope unit a control group is, or which it is below."""
    for step in cgroup.split("/"):
        if match := contract.UNIT.fullmatch(step):
            return match["incarnation"]
    return None


def origin_of(connection: socket.socket, pid: int) -> Origin | None:
    """Who connected, as the kernel has it now; None where that process has ended."""
    pidfd = peer_pidfd(connection)
    try:
        cgroup = processes.cgroup_of(pid) if pid > 0 else None
        if cgroup is None:
            return None
        if pidfd is not None and select.select([pidfd], [], [], 0)[0]:
            # The number may be another process's by now.
            return None
        return Origin(pid, incarnation_of(cgroup))
    finally:
        if pidfd is not None:
            os.close(pidfd)


class Peer(asyncio.Protocol):
    """One connection. Requests are answered in order, each when the one before it was."""

    def __init__(self, origin: Origin, handler: Handler, ended: Callable[[Peer], None]) -> None:
        self.origin = origin
        self.gone = asyncio.Event()
        """Set when nobody reads answers any more."""
        self._handler = handler
        self._ended = ended
        self._decoder = FrameDecoder(contract.MAX_FRAME)
        self._waiting: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        try:
            self._decoder.feed(data)
            while (payload := self._decoder.next()) is not None:
                self._waiting.append(payload)
        except WireError:
            self.abort()
            return
        if self._waiting:
            self._arrived.set()
        if len(self._waiting) > _MAX_WAITING and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        # Nobody waits for an answer with half a connection.
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.gone.set()
        self._arrived.set()
        self._room.set()
        self._ended(self)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def stop(self) -> None:
        """Answer what is being carried out, and nothing after it."""
        self._waiting.clear()
        self._stopped = True
        if self._transport is not None:
            self._transport.pause_reading()

    def abort(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()

    async def finished(self) -> None:
        """Wait until what was being answered is, and nothing is in memory for this connection."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        while not self.gone.is_set():
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            payload = self._waiting.popleft()
            if len(self._waiting) <= _MAX_WAITING and self._transport is not None and not self._stopped:
                self._transport.resume_reading()
            try:
                answer = pack(await self._handler(payload, self.origin, self), contract.MAX_FRAME)
            except BaseException:
                # The handler answers with every fault that it knows; this one is told by whoever looks at the task.
                self.abort()
                raise
            if self._transport is not None:
                self._transport.write(answer)
                await self._room.wait()


class Door:
    """The listening sockets, and everybody who is connected. `changed` is called when one has come or gone."""

    def __init__(self, handler: Handler, journal: Journal, changed: Callable[[], None]) -> None:
        self._handler = handler
        self._journal = journal
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._peers: set[Peer] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._open = True

    def listen(self, listener: socket.socket) -> None:
        """Accept whoever connects to `listener`."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener, self._accept, listener)

    @property
    def connections(self) -> int:
        """How many are connected."""
        return len(self._peers) + len(self._greetings)

    def waiting(self) -> bool:
        """Whether somebody is in the queue of a listener."""
        return bool(self._listeners and select.select(self._listeners, [], [], 0)[0])

    def shut(self) -> None:
        """Serve nobody from here on: who connects waits in the queue, for the next service. Listeners stay open."""
        self._open = False
        for peer in self._peers:
            peer.stop()
        if self._retry is not None:
            self._retry.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    async def close(self) -> None:
        """Hang up on everybody, and close this process's copies of the listeners."""
        self.shut()
        for peer in list(self._peers):
            peer.abort()
        for task in [*self._greetings, *(asyncio.ensure_future(peer.finished()) for peer in self._peers)]:
            await asyncio.wait([task])
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            if self.connections >= MAX_CONNECTIONS:
                self._rest(listener)
                return
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._journal.emit(Event.OUT_OF_DESCRIPTORS, open=self.connections)
                self._rest(listener)
                return
            self._welcome(connection)

    def _rest(self, listener: socket.socket) -> None:
        """Let them wait in the queue, the one place where they can, until somebody has gone."""
        self._loop.remove_reader(listener)
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY, self._again)

    def _again(self) -> None:
        self._retry = None
        if self._open:
            for listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

    def _welcome(self, connection: socket.socket) -> None:
        try:
            credentials = peer_credentials(connection)
        except WireError as error:
            self._journal.emit(Event.PEER_REFUSED, listener=_ORIGIN, code=error.code)
            connection.close()
            return
        if credentials.uid != os.geteuid():
            self._journal.emit(Event.PEER_REFUSED, uid=credentials.uid, listener=_ORIGIN)
            connection.close()
            return
        origin = origin_of(connection, credentials.pid)
        if origin is None:
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._greet(connection, origin))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket, origin: Origin) -> None:
        peer = Peer(origin, self._handler, self._left)
        self._peers.add(peer)
        self._changed()
        try:
            await self._loop.connect_accepted_socket(lambda: peer, connection)
        except OSError:
            self._left(peer)
            with contextlib.suppress(OSError):
                connection.close()

    def _left(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._changed()
