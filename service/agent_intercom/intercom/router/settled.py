# SPDX-License-Identifier: Apache-2.0
"""How messages ended, kept so that a retry is not delivered twice (contract section 2.6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.router.state import MEMORY_SHARE, NEVER, Delivery, weight
from agent_intercom.wire.clock import Now

_STALE = 64


class Settled:
    """Settled deliveries by sender and message id, forgotten in the order in which they ended.

    A dictionary finds them and a queue keeps their order: an ordered dictionary does both, but takes twice as long for
    each message and ten times as long for a snapshot. What is dropped out of turn stays in the queue, emptied, until
    its turn comes or until such are the most.
    """

    __slots__ = ("_forget_at", "_order", "_stale", "by_message", "size")

    def __init__(self, entries: Iterable[Delivery] = ()) -> None:
        self.by_message: dict[tuple[str, str], Delivery] = {}
        self.size = 0
        self._order: deque[Delivery] = deque()
        self._stale = 0
        self._forget_at = NEVER
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self.by_message)

    def add(self, entry: Delivery) -> None:
        """Keep `entry` until `entry.until`. None of the same sender and message id is kept yet."""
        self.by_message[entry.sender, entry.message_id] = entry
        self._order.append(entry)
        self.size += weight(entry.sender, entry.message_id, entry.target)
        self._forget_at = min(self._forget_at, entry.until)

    def drop(self, entry: Delivery) -> None:
        """Forget `entry`, which is kept, before its time."""
        self._remove(entry)
        entry.sender = entry.message_id = entry.target = entry.delivery = ""
        self._stale += 1
        if self._stale > len(self.by_message) + _STALE:
            self._order = deque(self.entries())
            self._stale = 0

    def forget(self, now: Now, limits: Limits) -> None:
        """Drop what is older than the contract's time, and the oldest beyond what may be kept."""
        known = self.by_message
        most = limits.recent_entries
        while self._forget_at <= now.mono or len(known) > most or self.size > MEMORY_SHARE:
            if not self._order:
                self._forget_at = NEVER
                return
            oldest = self._order[0]
            if not self._kept(oldest):
                self._stale -= 1
            elif oldest.until <= now.mono or len(known) > most or self.size > MEMORY_SHARE:
                self._remove(oldest)
            else:
                self._forget_at = oldest.until
                return
            self._order.popleft()

    def hasten(self, at: int) -> None:
        """Keep nothing beyond monotonic time `at`."""
        for entry in self.by_message.values():
            entry.until = min(entry.until, at)
        self._forget_at = min(self._forget_at, at)

    def entries(self) -> list[Delivery]:
        """All that is kept, the oldest first."""
        return [entry for entry in self._order if self._kept(entry)] if self._stale else list(self._order)

    def _kept(self, entry: Delivery) -> bool:
        return self.by_message.get((entry.sender, entry.message_id)) is entry

    def _remove(self, entry: Delivery) -> None:
        del self.by_message[entry.sender, entry.message_id]
        self.size -= weight(entry.sender, entry.message_id, entry.target)
