# SPDX-License-Identifier: Apache-2.0
"""Opening the registry's database, be it later: a worker service that cannot use it says why, and looks again.

Another program that only reads the file holds it for a moment, and that is waited for. Whatever lasts longer (a full
disk, a newer version's file, another worker service) leaves the service blind: it knows of no worker, and refuses what
it is asked for, until it can open the file. Then it goes on as one that was just started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from os import path
from typing import TYPE_CHECKING, Final

from agent_intercom.host import faults
from agent_intercom.workers import errors
from agent_intercom.workers.errors import Unusable
from agent_intercom.workers.terms import Changes, Loaded

if TYPE_CHECKING:
    from agent_intercom.host.journal import Journal
    from agent_intercom.workers.store import Store

LETTING_GO: Final = 5.0
"""Seconds for another program to let go of the file before anybody is served."""

FIRST: Final = 2.0
LONGEST: Final = 15.0
"""Seconds between two looks after that, the first and the longest."""

_LOOK: Final = 0.1


class NoStore:
    """In the place of a registry that cannot be used: nothing is remembered, and so nothing may change."""

    set_aside: str | None = None

    def __init__(self, error: Unusable) -> None:
        self.error = error

    def apply(self, changes: Changes) -> None:
        if changes:
            raise Unusable(self.error.reason, self.error.text, self.error.field)

    def load(self) -> Loaded:
        return Loaded()

    def close(self) -> None:
        """Nothing was opened."""


async def opened(state: str, patience: float = LETTING_GO) -> Store | NoStore:
    """The store in the directory `state`.

    Another program that holds the file is waited for, at most `patience` seconds.
    """
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        found = attempt(state)
        held = isinstance(found, NoStore) and found.error.reason == errors.BUSY
        if not held or asyncio.get_running_loop().time() >= deadline:
            return found
        await asyncio.sleep(_LOOK)


def attempt(state: str) -> Store | NoStore:
    """The store in the directory `state`, or why there is none."""
    from agent_intercom.workers.store import NAME, Store

    try:
        return Store.open(path.join(state, NAME))
    except Unusable as error:
        return NoStore(error)


class Reopening:
    """Looks again for the store in the directory `state`, and tells `found` each time, until there is one.

    `close` ends it.
    """

    def __init__(self, state: str, found: Callable[[Store | NoStore], Awaitable[None]], journal: Journal) -> None:
        self._state = state
        self._found = found
        self._journal = journal
        self._task = asyncio.get_running_loop().create_task(self._look())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Look no more."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            faults.tell(fault, self._journal)

    async def _look(self) -> None:
        pause = FIRST
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST)
            store = attempt(self._state)
            await self._found(store)
            if not isinstance(store, NoStore):
                return
