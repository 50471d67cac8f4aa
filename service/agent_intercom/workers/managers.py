# SPDX-License-Identifier: Apache-2.0
"""The connection of the worker service to the user's service manager: made when it is needed, and again when it broke.

Without a manager nothing can be started, and everything else goes on (managed-workers spec, A-14).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.manager import JobFailed, ManagerError, ManagerUnreachable
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

if TYPE_CHECKING:
    from agent_intercom.host.scopes import Scopes

Changed = Callable[[str, str, str, str], None]


class Managers:
    """Whoever is the user's service manager now. `connect` makes an unconnected `Scopes`; `changed` as of its
    `changes`."""

    def __init__(self, connect: Callable[[], Scopes], changed: Changed, journal: Journal) -> None:
        self._connect = connect
        self._changed = changed
        self._journal = journal
        self._current: Scopes | None = None
        self._lock = asyncio.Lock()
        self._told = False
        self.lacking: set[str] = set()
        """The properties that scope units do not have with this manager, as far as one was asked for."""
        self.on_connect: Callable[[], None] = lambda: None
        """Called when there is a connection again, or for the first time."""

    async def scopes(self) -> Scopes:
        """A connection that holds, as far as anybody knows. Raises WorkerError `manager_unreachable`."""
        async with self._lock:
            if self._current is not None and not self._current.lost.is_set():
                return self._current
            await self._drop()
            made = self._connect()
            try:
                await made.__aenter__()
            except ManagerError as error:
                if not self._told:
                    self._told = True
                    self._journal.emit(Event.MANAGER_LOST, code=Code.MANAGER_UNREACHABLE)
                raise unreachable(error) from error
            made.changes(self._changed)
            # Another one may be a newer one.
            self.lacking.clear()
            made.returned(self.lacking.clear)
            self._current = made
            self._told = False
            self.on_connect()
            return made

    async def close(self) -> None:
        """Give the connection back."""
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        gone, self._current = self._current, None
        if gone is not None:
            await gone.__aexit__(None, None, None)


def unreachable(error: Exception) -> WorkerError:
    """What whoever asks is told of a manager that does not answer."""
    return WorkerError(Code.MANAGER_UNREACHABLE, f"{error}; no worker can be started without systemd")


@asynccontextmanager
async def explained(code: Code, what: str) -> AsyncIterator[None]:
    """Turn faults of the manager and of control groups into WorkerError `code`, or `manager_unreachable`."""
    try:
        yield
    except ManagerUnreachable as error:
        raise unreachable(error) from error
    except JobFailed as error:
        raise WorkerError(code, f"{what}: systemd's job ended with {error.result}", "unit") from error
    except (ManagerError, HostError) as error:
        raise WorkerError(code, f"{what}: {error}", "unit") from error
