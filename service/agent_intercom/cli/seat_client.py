# SPDX-License-Identifier: Apache-2.0
"""The seat, connected: what arrives is kept in its inbox before it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from agent_intercom.cli.operations import message_json
from agent_intercom.cli.place import MODEL, Place
from agent_intercom.cli.seat import Seat
from agent_intercom.intercom.client import IntercomClient
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import AskCancelled, AskDeferred, Event, Message


class SeatClient:
    """`on_event` sees every event after it was kept. `seat` must be held by this process; `name` is what others see."""

    def __init__(self, place: Place, seat: Seat, on_event: Callable[[Event], None] | None = None) -> None:
        identity = seat.identity()
        self.name = place.name
        self._seat = seat
        self._on_event = on_event
        self._reader: asyncio.Task[None] | None = None
        self.client = IntercomClient(
            place.addresses,
            session_id=identity.session_id,
            name=place.name,
            cwd=place.cwd,
            model=MODEL,
            scope=place.scope,
            started_at=identity.started_at,
            runtime_instance_id=identity.runtime_instance_id,
            auto_ack=False,
        )

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        self._reader = asyncio.create_task(self._read(), name="seat-reader")
        return self

    async def __aexit__(self, *exc: object) -> None:
        reader, self._reader = self._reader, None
        await self.client.close()
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError, ClientError, OSError):
                await reader

    async def ended(self) -> None:
        """Wait for the end of the events. Raises the ClientError that ended the client, OSError of the inbox."""
        if self._reader is not None:
            await asyncio.shield(self._reader)

    async def _read(self) -> None:
        async for event in self.client.events():
            match event:
                case Message():
                    self._seat.inbox.add(message_json(event))
                    await event.ack()
                case AskDeferred(message_id=message_id, from_session_id=sender):
                    self._seat.inbox.note("deferred", sender, message_id)
                case AskCancelled(message_id=message_id, from_session_id=sender):
                    self._seat.inbox.note("cancelled", sender, message_id)
            if self._on_event is not None:
                self._on_event(event)
