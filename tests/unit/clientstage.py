# SPDX-License-Identifier: Apache-2.0
"""A client and the scripted broker that it talks to, for the tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent_intercom.intercom.client import IntercomClient, Timeouts
from agent_intercom.intercom.client_types import Event
from tests.unit.fakebroker import HANG, FakeBroker, Line

SCOPE = "Scope_0123456789abcdef"
QUICK = Timeouts(connect=HANG, send=HANG, list=HANG, ask_control=HANG, close=HANG)


def client(broker: FakeBroker, **options: Any) -> IntercomClient:
    defaults: dict[str, Any] = {
        "cwd": "/src",
        "model": "m",
        "scope": None,
        "session_id": "me",
        "timeouts": QUICK,
        "reconnect_delays": (0.0,),
    }
    return IntercomClient(broker.path, **{**defaults, **options})


@asynccontextmanager
async def connected(broker: FakeBroker, **options: Any) -> AsyncIterator[tuple[IntercomClient, Line]]:
    """A registered client and the broker's end of its connection."""
    made = client(broker, **options)
    entering = asyncio.ensure_future(made.__aenter__())
    line = await broker.accept()
    await line.register()
    await entering
    try:
        yield made, line
    finally:
        await made.close()


class Reader:
    """Reads a client's events one at a time."""

    def __init__(self, made: IntercomClient) -> None:
        self._events = made.events()

    async def next(self) -> Event:
        async with asyncio.timeout(HANG):
            return await anext(self._events)

    async def skip_to(self, kind: type[Any]) -> Any:
        while not isinstance(event := await self.next(), kind):
            pass
        return event


async def settled(task: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(HANG):
        return await task
