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
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, cast

from agent_intercom.host import peers
from agent_intercom.host.journal import Event, Journal
from agent_intercom.wire import codec
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import HEADER_SIZE, FrameDecoder, pack
from agent_intercom.wire.peer import peer_credentials
from agent_intercom.workers import contract
from agent_intercom.workers.contract import Code
from agent_intercom.workers.refusals import Refusals

MAX_CONNECTIONS: Final = 512

OF_WORKERS: Final = 384
"""How many of them are for those who are in workers, all together; the rest is always there for those who are not."""

OF_ONE: Final = 16
"""How many are for those who are in one worker."""

ASKING: Final = 10.0
"""Seconds for the first request to come, and for the rest of any that has begun."""

READING: Final = 60.0
"""Seconds for an answer to be read."""

AHEAD: Final = 65_536
"""Bytes that may wait behind a request which is being carried out; with more a connection is not read from."""

_BYTES_OF_ONE: Final = 2 * contract.MAX_FRAME
"""Bytes of requests that have not come as a whole, of those who are in one worker."""

_ORIGIN: Final = "workers"

_NO_ROOM: Final = "too many connections are open in this worker, or in all workers: close some and try again"
_NO_DESCRIPTORS: Final = "the worker service may open no more files: try again in a few seconds"

STARVED: Final = 3.0
"""Seconds for which somebody waits and may not have a descriptor, after which nobody expects that to end by itself."""

_ACCEPTS_PER_WAKE: Final = 32
_RETRY: Final = 0.1

_TAKEN: Final = 3
"""Descriptors that it takes to let somebody in: the connection, and two to see who it is."""


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
    """Who connected, as the kernel has it now; None where that process has ended. Raises as `peers.cgroup_of`."""
    cgroup = peers.cgroup_of(connection, pid)
    return None if cgroup is None else Origin(pid, incarnation_of(cgroup))


def _shortage() -> int | None:
    """The errno of why there are not as many descriptors as it takes to let one in; None where there are."""
    opened = []
    try:
        for _ in range(_TAKEN):
            opened.append(os.eventfd(0))
    except OSError as error:
        return error.errno
    finally:
        for each in opened:
            os.close(each)
    return None


class Peer(asyncio.Protocol):
    """One connection. Requests are answered in order, each when the one before it was.

    `arrived` is called when bytes have come that are no whole request yet.
    """

    def __init__(
        self,
        origin: Origin,
        handler: Handler,
        ended: Callable[[Peer], None],
        arrived: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        self.origin = origin
        self.gone = asyncio.Event()
        """Set when nobody reads answers any more."""
        self.held = 0
        """Bytes that have come and are not being answered."""
        self._handler = handler
        self._ended = ended
        self._piece_arrived = arrived
        self._decoder = FrameDecoder(contract.MAX_FRAME)
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._answering = False
        self._stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        self.held += len(data)
        self._arrived.set()
        self._piece_arrived(self)
        # Whoever sends one request at a time is read from, or its end would not be seen while it waits.
        if self._answering and self.held > AHEAD and self._transport is not None:
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
        self._stopped = True
        if self._transport is not None:
            self._transport.pause_reading()

    def abort(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """Hang up at once, and let what is being carried out for it be."""
        self.abort()
        if self._task is not None:
            self._task.cancel()
            await self.finished()

    async def finished(self) -> None:
        """Wait until what was being answered is, and nothing is in memory for this connection."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        deadline: float | None = asyncio.get_running_loop().time() + ASKING
        try:
            while (payload := await self._next(deadline)) is not None:
                deadline = None
                self._answering = True
                answering, payload = self._handler(payload, self.origin, self), None
                answer = pack(await answering, contract.MAX_FRAME)
                self._answering = False
                if self._transport is not None:
                    self._transport.write(answer)
                    await self._comes(self._room, asyncio.get_running_loop().time() + READING)
                # Others have requests as well.
                await asyncio.sleep(0)
        except BaseException:
            # The handler answers with every fault that it knows; this one is told by whoever looks at the task.
            self.abort()
            raise

    async def _next(self, deadline: float | None) -> bytes | None:
        """The next request; None where no more is going to be answered."""
        while not self.gone.is_set():
            payload = self._cut()
            if payload is not None:
                return payload
            if self._transport is not None and not self._stopped:
                self._transport.resume_reading()
            if deadline is None and self.held:
                deadline = asyncio.get_running_loop().time() + ASKING
            self._arrived.clear()
            await self._comes(self._arrived, None if self._stopped else deadline)
        return None

    def _cut(self) -> bytes | None:
        """A request that has come as a whole. Hangs up on who sends what is none."""
        if self._stopped:
            return None
        try:
            payload = self._decoder.next()
        except WireError:
            self.abort()
            return None
        if payload is not None:
            self.held -= HEADER_SIZE + len(payload)
            if len(payload) > AHEAD:
                # What it has kept for that one, it would keep until the next.
                rest, self._decoder = self._decoder.pending, FrameDecoder(contract.MAX_FRAME)
                self._decoder.feed(rest)
        return payload

    async def _comes(self, event: asyncio.Event, deadline: float | None) -> None:
        """Wait for something that the other end does, and hang up where it does not."""
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            self.abort()
            # Told by the loop, and not before.
            await self.gone.wait()


class Door:
    """The listening sockets, and everybody who is connected. `changed` is called when one has come or gone.

    `starved` is called when nobody could be accepted for long, because this process may have no more descriptors. It is
    far from any limit by itself: its limit was lowered, which it cannot undo, or it lost count. The next one has both.
    """

    def __init__(
        self,
        handler: Handler,
        refusals: Refusals,
        journal: Journal,
        changed: Callable[[], None],
        starved: Callable[[], None] | None = None,
    ) -> None:
        self._handler = handler
        self._journal = journal
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._peers: set[Peer] = set()
        self._inside: defaultdict[str, set[Peer]] = defaultdict(set)
        self._refusals = refusals
        self._greetings: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._starved = starved
        self._short: float | None = None
        self._open = True

    def listen(self, listener: socket.socket) -> None:
        """Accept whoever connects to `listener`."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener, self._accept, listener)

    @property
    def connections(self) -> int:
        """How many are connected."""
        return len(self._peers)

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
        for task in list(self._greetings):
            await asyncio.wait([task])
        for peer in list(self._peers):
            await peer.end()
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
                if error.errno in peers.NO_DESCRIPTOR:
                    # accept(2) looks for a descriptor before it looks for a peer.
                    if not self.waiting():
                        return
                    self._starve(error.errno)
                self._rest(listener)
                return
            try:
                self._welcome(connection)
            except OSError as error:
                # The last one was for the connection, and who is on it cannot be seen.
                self._turn_away(connection, _NO_DESCRIPTORS, "descriptors")
                self._starve(error.errno)
                self._rest(listener)
                return
            self._short = None

    def _starve(self, why: int | None) -> None:
        """Nobody can be let in for want of a descriptor; with EMFILE this process may have no more, others may."""
        now = self._loop.time()
        if self._short is None:
            self._short = now
            self._journal.emit(Event.OUT_OF_DESCRIPTORS, open=self.connections)
        elif why == errno.EMFILE and now - self._short >= STARVED and self._starved is not None:
            self._starved()

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
            self._look_again()

    def _look_again(self) -> None:
        """See whether a shortage is over: those for whom there was no descriptor may not come again."""
        if self._short is None:
            return
        why = _shortage()
        if why is None:
            self._short = None
            return
        self._starve(why)
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY, self._again)

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
        if origin.worker is not None and not self._has_room(origin.worker):
            self._refusals.tell("unknown", Code.LIMIT, inside=True)
            self._turn_away(connection, _NO_ROOM, "connections")
            return
        peer = Peer(origin, self._handler, self._left, self._arrived)
        self._peers.add(peer)
        if origin.worker is not None:
            self._inside[origin.worker].add(peer)
        task = self._loop.create_task(self._greet(connection, peer))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    def _has_room(self, worker: str) -> bool:
        """Whether somebody in a worker may connect: a share is its own, and a part of all is for others."""
        inside = sum(map(len, self._inside.values()))
        return len(self._inside.get(worker, ())) < OF_ONE and inside < OF_WORKERS

    def _turn_away(self, connection: socket.socket, text: str, field: str) -> None:
        """Tell why before anything is asked, in an answer to no request, and hang up."""
        fault = {"code": str(Code.LIMIT), "text": text, "field": field}
        answer = {"version": contract.PROTOCOL_VERSION, "id": "", "ok": False, "error": fault}
        with connection, contextlib.suppress(OSError):
            connection.send(pack(codec.encode(answer), contract.MAX_FRAME))

    def _arrived(self, peer: Peer) -> None:
        """Hang up where somebody in a worker begins more requests than are kept for it."""
        if peer.origin.worker is None or peer.held <= AHEAD:
            return
        if sum(other.held for other in self._inside[peer.origin.worker]) > _BYTES_OF_ONE:
            peer.abort()

    async def _greet(self, connection: socket.socket, peer: Peer) -> None:
        self._changed()
        try:
            await self._loop.connect_accepted_socket(lambda: peer, connection)
        except OSError:
            self._left(peer)
            with contextlib.suppress(OSError):
                connection.close()

    def _left(self, peer: Peer) -> None:
        self._peers.discard(peer)
        if (worker := peer.origin.worker) is not None and worker in self._inside:
            self._inside[worker].discard(peer)
            if not self._inside[worker]:
                del self._inside[worker]
        self._changed()
