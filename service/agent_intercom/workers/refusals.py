# SPDX-License-Identifier: Apache-2.0
"""What the journal is told of refused requests: each of them, as long as there are few.

A worker could fill the journal otherwise, and push out of it what others need to know.
"""

from __future__ import annotations

import asyncio
from typing import Final

from agent_intercom.host.journal import Event, Journal

LINES: Final = 30
WINDOW: Final = 60.0
"""How many refusals are told in how many seconds; more are counted, and their number is told when these are over."""


class Refusals:
    """Tells of refused requests. Those inside workers are counted apart, so that they hide none from outside."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._told = {True: 0, False: 0}
        self._window: asyncio.TimerHandle | None = None

    def tell(self, action: str, code: str, inside: bool) -> None:
        """A request for `action` (a word of ours) was refused with `code`, to somebody `inside` a worker or not."""
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(WINDOW, self.close)
        self._told[inside] += 1
        if self._told[inside] <= LINES:
            self._journal.emit(Event.WORKER_REQUEST_REFUSED, action=action, code=code, inside=inside)

    def close(self) -> None:
        """Tell how many were not told, and begin anew."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        for inside, count in self._told.items():
            self._told[inside] = 0
            if count > LINES:
                self._journal.emit(Event.WORKER_REQUESTS_REFUSED, count=count - LINES, inside=inside)
