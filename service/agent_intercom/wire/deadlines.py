# SPDX-License-Identifier: Apache-2.0
"""When a connection has to have made progress: one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection


class Deadlines:
    """The connections that must do something by a certain time (`Connection.deadline`, 0 for none).

    The timer runs for the earliest one only and is not moved when a deadline moves back: firing too early costs one
    look. `overdue` is called for each connection that is late, inside a batch that `run_batch` makes; it clears or
    moves the deadline, or drops the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run_batch: Callable[[Callable[[Now], None]], None],
        overdue: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._run_batch = run_batch
        self._overdue = overdue
        self._connections: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def set(self, connection: Connection, now: Now, delay_ms: int) -> None:
        """Expect progress of `connection` within `delay_ms` from `now`."""
        connection.deadline = now.mono + delay_ms
        self._connections.add(connection)
        self._arm(connection.deadline, now)

    def clear(self, connection: Connection) -> None:
        """Expect nothing of `connection`."""
        if connection.deadline:
            connection.deadline = 0
            self._connections.discard(connection)

    def close(self) -> None:
        """Forget everything."""
        self._connections.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fire(self) -> None:
        """Look for connections that are late."""
        self._timer = None
        self._run_batch(self._expire)

    def _expire(self, now: Now) -> None:
        for connection in list(self._connections):
            # An earlier call may have cleared it.
            if connection in self._connections and connection.deadline <= now.mono:
                self._overdue(connection)
        if self._connections:
            self._arm(min(connection.deadline for connection in self._connections), now)

    def _arm(self, deadline: int, now: Now) -> None:
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(deadline - now.mono, 1) / 1000, self.fire)
