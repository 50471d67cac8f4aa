# SPDX-License-Identifier: Apache-2.0
"""One connection of the client, and what has arrived on it and was not read yet."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from agent_intercom.orchestration.contract import MAX_FRAME, Code
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire.channel import FrameChannel
from agent_intercom.wire.errors import WireError

UNAVAILABLE: Final = "Broker is unavailable; command delivery was not accepted"
MAX_WAITING: Final = 1_024
"""Frames that may wait to be read; a broker that sends more is left."""

_CLOSE_TIMEOUT: Final = 1.0

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """What arrived, in order, for whoever reads; afterwards the end, or the error that ended it."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Refusal | None = None

    def put(self, item: _Item) -> None:
        """Keep `item`. Raises Refusal `orchestration_error` where nobody reads what is there."""
        if len(self._items) >= MAX_WAITING:
            raise Refusal(Code.ERROR, "Broker sends more than is read")
        self._items.append(item)
        self._changed.set()

    def end(self, error: Refusal | None) -> None:
        """Nothing comes after this."""
        self._ended = True
        self._error = error
        self._changed.set()

    async def next(self) -> _Item | None:
        """The next item; None at the end. Raises what ended the connection, where something did."""
        while not self._items:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


class Line:
    """A connection to the broker at the Unix socket `path`.

    `on_payload` gets each payload in order and may raise Refusal, which ends the connection. `on_end` is called once
    for a connection, with what ended it where this side found fault.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_payload: Callable[[bytes], None],
        on_end: Callable[[Refusal | None], None],
    ) -> None:
        self._path = path
        self._on_payload = on_payload
        self._on_end = on_end
        self._channel: FrameChannel | None = None
        self._error: Refusal | None = None

    @property
    def open(self) -> bool:
        """Whether frames can be sent."""
        return self._channel is not None and self._channel.open

    async def connect(self, timeout: float) -> None:
        """Connect within `timeout` seconds.

        Raises Refusal `broker_not_ready` where nobody listens or answers, `unauthorized` where the listener is another
        user's or cannot be told.
        """
        if self._channel is not None:
            raise Refusal(Code.BROKER_NOT_READY, "a link is one connection and was used before")
        try:
            async with asyncio.timeout(timeout):
                self._channel = await FrameChannel.connect(self._path, self._received, self._closed)
        except WireError as error:
            raise Refusal(Code.UNAUTHORIZED, "Broker socket belongs to another user", error.field or "") from error
        except (OSError, TimeoutError) as error:
            raise Refusal(Code.BROKER_NOT_READY, UNAVAILABLE) from error

    def send(self, payload: bytes) -> None:
        """Queue a frame. Raises Refusal `broker_not_ready` where there is no connection."""
        if self._channel is None:
            raise Refusal(Code.BROKER_NOT_READY, UNAVAILABLE)
        try:
            self._channel.send(payload)
        except WireError as error:
            raise Refusal(Code.BROKER_NOT_READY, UNAVAILABLE) from error

    async def close(self) -> None:
        """Flush, close, and wait until the socket is gone; a broker that does not read gets a second."""
        if self._channel is None:
            return
        self._channel.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._channel.wait_closed()
        except TimeoutError:
            self._channel.abort()
            await self._channel.wait_closed()

    def _received(self, payload: bytes) -> None:
        try:
            if len(payload) > MAX_FRAME:
                raise Refusal(Code.ERROR, "Broker sent a frame that is too long", "length")
            self._on_payload(payload)
        except Refusal as error:
            self._error = error
            if self._channel is not None:
                self._channel.abort()

    def _closed(self, code: str | None) -> None:
        if self._error is None and code is not None:
            self._error = Refusal(Code.ERROR, "Broker response is invalid", "length")
        self._on_end(self._error)
