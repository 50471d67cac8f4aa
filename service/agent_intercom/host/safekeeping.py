# SPDX-License-Identifier: Apache-2.0
"""Connections in the service manager's descriptor store, where they outlive the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from agent_intercom.host.notify import Notifier
from agent_intercom.wire.reactor import Connection, Reactor

_PREFIX: Final = "c"


def connection_name(number: int) -> str:
    """The name of a connection in the descriptor store: opaque, and of no use to who reads it."""
    return f"{_PREFIX}{number}"


def connection_number(name: str) -> int | None:
    """The connection of that name; None where it is no connection's."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name != digits and digits.isascii() and digits.isdecimal() else None


class Safekeeping:
    """Knows which connections are stored. A session's is before its peer hears `registered` (design 6).

    Several that come in one turn of the loop wait for one barrier.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, notifier: Notifier, reactor: Reactor) -> None:
        self._loop = loop
        self._notifier = notifier
        self._reactor = reactor
        self._stored: set[int] = set()
        self._held: set[int] = set()
        self._waiting: list[Connection] = []
        self._barrier: asyncio.Future[bool] | None = None

    def found(self, numbers: Iterable[int]) -> None:
        """These connections were stored by a predecessor."""
        self._stored.update(numbers)

    def keep(self, connection: Connection) -> None:
        """Store a session's connection; nothing is sent to it before the manager has it."""
        if not self._notifier.active or connection.number in self._stored:
            return
        self._store(connection)
        self._reactor.cork(connection)
        self._held.add(connection.number)
        self._waiting.append(connection)
        self._reactor.yield_to_loop()
        if self._barrier is None:
            self._loop.call_soon(self._await)

    def holds(self, connection: Connection) -> bool:
        """Whether the connection waits for the manager to have it."""
        return connection.number in self._held

    def forget(self, number: int) -> None:
        """The connection is about to go: it must not come back."""
        if number in self._stored:
            self._stored.discard(number)
            self._notifier.remove(connection_name(number))

    async def keep_all(self, connections: Iterable[Connection]) -> None:
        """Store whatever is not stored yet, and return when the manager has it."""
        for connection in connections:
            if connection.number not in self._stored:
                self._store(connection)
        await self._notifier.barrier(self._loop)

    def _store(self, connection: Connection) -> None:
        self._stored.add(connection.number)
        self._notifier.store(connection_name(connection.number), connection.sock.fileno())

    def _await(self) -> None:
        if self._barrier is None and self._waiting:
            waiting, self._waiting = self._waiting, []
            self._barrier = self._notifier.barrier(self._loop)
            self._barrier.add_done_callback(lambda _: self._release(waiting))

    def _release(self, waiting: list[Connection]) -> None:
        self._barrier = None
        for connection in waiting:
            self._held.discard(connection.number)
            self._reactor.uncork(connection)
        self._reactor.flush()
        self._await()
