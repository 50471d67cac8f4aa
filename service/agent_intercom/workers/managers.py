# SPDX-License-Identifier: Apache-2.0
"""The connection of the worker service to the user's service manager: made when it is needed, and again when it broke.

Without a manager nothing can be started, and everything else goes on (managed-workers spec, A-14).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol, Self

from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.manager import JobFailed, ManagerError, ManagerUnreachable, Variant
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

if TYPE_CHECKING:
    from agent_intercom.host.scopes import ScopeState, Started

Changed = Callable[[str, str, str, str], None]

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 60.0
"""Seconds between two tries to find a bus again that has gone, the first and the longest."""


class Connection(Protocol):
    """What the worker service asks of the user's service manager: `host.scopes.Scopes`, which says what each does."""

    @property
    def lost(self) -> asyncio.Event: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def changes(self, callback: Changed) -> None: ...

    def returned(self, callback: Callable[[], None]) -> None: ...

    async def start(self, unit: str, pid: int, properties: Mapping[str, Variant], timeout: float) -> Started: ...

    async def stop(self, unit: str, timeout: float) -> bool: ...

    async def kill(self, unit: str, signal: int) -> bool: ...

    async def freeze(self, unit: str) -> bool: ...

    async def thaw(self, unit: str) -> bool: ...

    async def reset_failed(self, unit: str) -> bool: ...

    async def state(self, unit: str) -> ScopeState | None: ...

    async def states(self, pattern: str) -> dict[str, ScopeState]: ...

    async def ending(self, unit: str) -> bool: ...

    async def jobs(self) -> int: ...

    async def version(self) -> int: ...


class Managers:
    """Whoever is the user's service manager now. `connect` makes an unconnected one; `changed` as of its `changes`."""

    def __init__(self, connect: Callable[[], Connection], changed: Changed, journal: Journal) -> None:
        self._connect = connect
        self._changed = changed
        self._journal = journal
        self._current: Connection | None = None
        self._making: asyncio.Task[Connection] | None = None
        self._told = False
        self._closed = False
        self._following: asyncio.Task[None] | None = None
        self.lacking: set[str] = set()
        """The properties that scope units do not have with this manager, as far as one was asked for."""
        self.on_connect: Callable[[], None] = lambda: None
        """Called when there is a connection, and when the manager is another process: changes may have been missed."""

    async def scopes(self) -> Connection:
        """A connection that holds, as far as anybody knows. Raises WorkerError `manager_unreachable`.

        All who ask while it is made wait for the same one, and are told alike where it cannot be made.
        """
        if self._current is not None and not self._current.lost.is_set():
            return self._current
        if self._closed:
            raise unreachable(ManagerUnreachable("the worker service is ending"))
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make())
            self._making.add_done_callback(self._made)
        try:
            return await asyncio.shield(self._making)
        except ManagerError as error:
            raise unreachable(error) from error

    async def _make(self) -> Connection:
        await self._drop()
        made = self._connect()
        try:
            await made.__aenter__()
        except ManagerError:
            if not self._told:
                self._told = True
                self._journal.emit(Event.MANAGER_LOST, code=Code.MANAGER_UNREACHABLE)
            self._begin_following(None)
            raise
        made.changes(self._changed)
        made.returned(self._another)
        self._current = made
        self._told = False
        self._begin_following(made)
        self._another()
        return made

    def _made(self, task: asyncio.Task[Connection]) -> None:
        self._making = None
        if not task.cancelled():
            # Whoever waited may have gone.
            task.exception()

    def _another(self) -> None:
        # It may be a newer one.
        self.lacking.clear()
        self.on_connect()

    def _begin_following(self, current: Connection | None) -> None:
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(current))

    async def _follow(self, current: Connection | None) -> None:
        """Connect again whenever the bus has gone: why a unit ends is told once, to whoever listens then."""
        while True:
            if current is not None:
                await current.lost.wait()
            current, pause = None, _FIRST_PAUSE
            while current is None:
                with contextlib.suppress(WorkerError):
                    current = await self.scopes()
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def close(self) -> None:
        """Give the connection back, and make no other."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait({self._making})
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
