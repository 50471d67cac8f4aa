# SPDX-License-Identifier: Apache-2.0
"""The client's end of a connection: frames over `asyncio.BufferedProtocol`, after a check of who listens."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from typing import Self, cast

from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import FrameDecoder, pack
from agent_intercom.wire.peer import PeerCredentials, peer_credentials

READ_BUFFER = 65_536
HIGH_WATER = 262_144

NOBODY = PeerCredentials(0, 0xFFFFFFFF, 0xFFFFFFFF)
"""Credentials of a channel that is not connected."""

_BACKLOG_PAUSE = 0.02


def check_listener(sock: socket.socket) -> PeerCredentials:
    """Credentials of the process that called listen(), when it is this user's.

    Raises WireError `PEER_FOREIGN` for anybody else's, `PEER_UNREADABLE` where the kernel does not tell.
    """
    peer = peer_credentials(sock)
    if peer.uid != os.geteuid():
        raise WireError("PEER_FOREIGN", "the socket belongs to another user", "uid")
    return peer


async def _connected(path: str) -> socket.socket:
    """A connected, non-blocking socket. OSError as connect(2) has it.

    A full backlog makes connect(2) on a Unix socket answer EAGAIN without a connection in progress, which
    `loop.sock_connect` takes for one; so it is retried here.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                await asyncio.sleep(_BACKLOG_PAUSE)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


class FrameChannel(asyncio.BufferedProtocol):
    """One connection to a broker.

    `on_payload` gets every payload in order; `on_closed` is called exactly once, with the code of the WireError that
    ended the connection, or None where the peer or this side closed it. Both run inside the event loop and must not
    block; `on_payload` is not called again after `close`, `abort` or an error.
    """

    def __init__(self, on_payload: Callable[[bytes], None], on_closed: Callable[[str | None], None]) -> None:
        self._on_payload = on_payload
        self._on_closed = on_closed
        self._decoder = FrameDecoder()
        self._buffer = bytearray(READ_BUFFER)
        self._view = memoryview(self._buffer)
        self._transport: asyncio.Transport | None = None
        self._writable = True
        self._stopped = False
        self._code: str | None = None
        self._drained: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_writable: Callable[[], None] | None = None
        self.peer = NOBODY

    @classmethod
    async def connect(
        cls,
        path: str | os.PathLike[str],
        on_payload: Callable[[bytes], None],
        on_closed: Callable[[str | None], None],
    ) -> Self:
        """Connect to the Unix socket `path` and check its owner before a byte is sent.

        Raises OSError as connect(2) has it, WireError `PEER_FOREIGN` or `PEER_UNREADABLE`.
        """
        sock = await _connected(os.fspath(path))
        try:
            peer = check_listener(sock)
            channel = cls(on_payload, on_closed)
            channel.peer = peer
            await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=sock)
        except BaseException:
            sock.close()
            raise
        return channel

    @property
    def writable(self) -> bool:
        """Whether less than the high-water mark is waiting for the kernel."""
        return self._writable and not self._stopped

    @property
    def open(self) -> bool:
        """Whether frames may still be sent."""
        return not self._stopped

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time the channel becomes writable again."""
        self._on_writable = callback

    def send(self, payload: bytes) -> None:
        """Queue one frame. Raises WireError `FRAME_TOO_LARGE` before anything is queued, `CLOSED` after the end."""
        self._write(pack(payload))

    def send_all(self, payloads: Iterable[bytes]) -> None:
        """Queue several frames in one write; all of them, or none."""
        self._write(b"".join([pack(payload) for payload in payloads]))

    async def drain(self) -> None:
        """Wait until less than the high-water mark is queued. Raises WireError `CLOSED` if the connection ends."""
        if self._writable and not self._stopped:
            return
        if self._stopped:
            raise WireError("CLOSED", "the connection is closed")
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._drained)

    def close(self) -> None:
        """Flush what is queued and close. Nothing is received from here on."""
        self._stopped = True
        if self._transport is not None:
            self._transport.close()

    def abort(self, code: str | None = None) -> None:
        """Close at once and drop what is queued; `code` is what `on_closed` is told."""
        self._stopped = True
        if self._code is None:
            self._code = code
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stopped = True
        self._transport = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(WireError("CLOSED", "the connection is closed"))
            self._drained.exception()
        if not self._closed.done():
            self._closed.set_result(None)
        self._on_closed(self._code)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._decoder.feed(self._view[:nbytes])
            while not self._stopped and (payload := self._decoder.next()) is not None:
                self._on_payload(payload)
        except WireError as error:
            self.abort(error.code)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None
        if self._on_writable is not None and not self._stopped:
            self._on_writable()

    def _write(self, data: bytes) -> None:
        if self._stopped or self._transport is None:
            raise WireError("CLOSED", "the connection is closed")
        self._transport.write(data)
