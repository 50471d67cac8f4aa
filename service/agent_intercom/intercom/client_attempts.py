# SPDX-License-Identifier: Apache-2.0
"""When the client tries to connect again, and who waits for the end of the next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_state import fail


class Attempts:
    """`delays` are seconds between attempts; the last repeats. `count` is how many failed in a row."""

    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = tuple(delays)
        self._hurry = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self.count = 0

    async def next(self) -> None:
        """Wait for the end of an attempt that begins now, or runs. Raises the ClientError that it failed with."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._hurry.set()
        await waiting

    async def pause(self) -> None:
        """Wait until the next attempt is due, or somebody wants it now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._delays[min(self.count, len(self._delays) - 1)]):
                await self._hurry.wait()
        self._hurry.clear()
        self.count += 1

    def succeeded(self) -> None:
        """Tell who waits that the session is registered."""
        self._hurry.clear()
        for waiting in self._take():
            if not waiting.done():
                waiting.set_result(None)

    def failed(self, error: ClientError) -> None:
        """Tell who waits why it is not."""
        for waiting in self._take():
            fail(waiting, error)

    def _take(self) -> list[asyncio.Future[None]]:
        taken, self._waiting = self._waiting, []
        return taken
