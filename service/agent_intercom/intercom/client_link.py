# SPDX-License-Identifier: Apache-2.0
"""The client's connection: a channel, the frames that wait for it, and their pace."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent_intercom.intercom import client_frames as frames
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_state import Pacer
from agent_intercom.intercom.contract import DEFAULT_LIMITS
from agent_intercom.intercom.foreign import ADDRESS_BYTES, fits
from agent_intercom.wire.channel import NOBODY, FrameChannel
from agent_intercom.wire.errors import WireError

_HEADROOM = 0.9
"""Part of the broker's bucket that is used: its clock is not this one."""

_BATCH_BYTES = 262_144


class Link:
    """One connection after another to the broker at the first of `paths` where somebody listens.

    `on_frame` gets each decoded frame and returns the code that ends the connection, or None. `on_lost` is called once
    per connection with the code that ended it. Frames posted while there is no connection are dropped: what must
    survive is kept by the caller and posted again.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        on_frame: Callable[[frames.BrokerFrame], str | None],
        on_lost: Callable[[str | None], None],
        rate: tuple[float, float] | None,
    ) -> None:
        self._paths = tuple(paths)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._rate = rate
        self._pacer: Pacer | None = None
        self._channel: FrameChannel | None = None
        self._first: deque[bytes] = deque()
        self._rest: deque[bytes] = deque()
        self._flush_handle: asyncio.Handle | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._leaving: set[FrameChannel] = set()
        self.peer = NOBODY

    async def open(self) -> None:
        """Connect. Raises ClientError `BROKER_UNREACHABLE`, `PATH_TOO_LONG`, `PEER_FOREIGN` or `PEER_UNREADABLE`."""
        self._clear()
        refused: OSError | None = None
        possible = [path for path in self._paths if fits(path)]
        if self._paths and not possible:
            text = f"the broker's address is longer than the {ADDRESS_BYTES} bytes that a socket's path may have"
            raise ClientError("PATH_TOO_LONG", text)
        for path in possible:
            try:
                channel = await self._connect(path)
            except WireError as error:
                raise ClientError(error.code, str(error), error.field) from error
            except OSError as error:
                refused = error
            else:
                self._use(channel)
                return
        why = "no address" if refused is None else os.strerror(refused.errno or 0)
        raise ClientError("BROKER_UNREACHABLE", f"no broker listens: {why}") from refused

    async def _connect(self, path: str | os.PathLike[str]) -> FrameChannel:
        channel: FrameChannel | None = None

        def lost(code: str | None) -> None:
            if channel is None:
                return
            self._leaving.discard(channel)
            if self._channel is channel:
                self._clear()
                self._channel = None
                self._on_lost(code)

        channel = await FrameChannel.connect(path, self._on_payload, lost)
        if not channel.open:
            raise ClientError("CONNECTION_LOST", "what listens closed the connection without an answer")
        return channel

    def _use(self, channel: FrameChannel) -> None:
        channel.when_writable(self._schedule)
        self._channel = channel
        self.peer = channel.peer
        if self._rate is not None:
            capacity, per_second = (part * _HEADROOM for part in self._rate)
            loop = asyncio.get_running_loop()
            self._pacer = Pacer(capacity, per_second, DEFAULT_LIMITS.bytes_per_token, loop.time)

    def post(self, payload: bytes) -> None:
        """Queue a frame behind the others."""
        if self._channel is not None:
            self._rest.append(payload)
            self._schedule()

    def post_first(self, payload: bytes) -> None:
        """Queue a frame ahead of sends: acknowledgements have a deadline."""
        if self._channel is not None:
            self._first.append(payload)
            self._schedule()

    async def flushed(self) -> None:
        """Wait until nothing is queued here, or the connection is gone."""
        if self._first or self._rest:
            self._flushed = asyncio.get_running_loop().create_future()
            await self._flushed

    def drop(self) -> None:
        """Close the connection, if there is one; `on_lost` is not called for it."""
        channel, self._channel = self._channel, None
        self._clear()
        if channel is not None and channel.open:
            self._leaving.add(channel)
            channel.close()

    async def close(self, timeout: float) -> None:
        """Close every channel that is left, wait for them at most `timeout` seconds, then abort them."""
        self.drop()
        for channel in list(self._leaving):
            try:
                async with asyncio.timeout(timeout):
                    await channel.wait_closed()
            except TimeoutError:
                channel.abort()
                await channel.wait_closed()

    def _on_payload(self, payload: bytes) -> None:
        try:
            code = self._on_frame(frames.decode(payload))
        except ClientError as error:
            code = error.code
        if code is not None and self._channel is not None:
            self._channel.abort(code)

    def _schedule(self, delay: float = 0.0) -> None:
        if self._flush_handle is not None:
            return
        loop = asyncio.get_running_loop()
        self._flush_handle = loop.call_later(delay, self._flush) if delay else loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what the pace and the socket allow, as one write."""
        self._flush_handle = None
        channel = self._channel
        if channel is None:
            return
        while channel.writable and (self._first or self._rest):
            batch, wait = self._batch()
            if batch:
                with suppress(WireError):
                    channel.send_all(batch)
            if wait:
                self._schedule(wait)
                break
        if not self._first and not self._rest:
            self._tell_flushed()

    def _batch(self) -> tuple[list[bytes], float]:
        batch: list[bytes] = []
        size = 0
        while size < _BATCH_BYTES and (queue := self._first or self._rest):
            wait = self._pacer.take(len(queue[0])) if self._pacer is not None else 0.0
            if wait:
                return batch, wait
            payload = queue.popleft()
            batch.append(payload)
            size += len(payload)
        return batch, 0.0

    def _clear(self) -> None:
        self._first.clear()
        self._rest.clear()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        self._tell_flushed()

    def _tell_flushed(self) -> None:
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
