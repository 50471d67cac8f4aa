# SPDX-License-Identifier: Apache-2.0
"""The broker's dealings with its database: opened late, retried when it failed, and never the broker's end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from agent_intercom.host.journal import Event, Journal
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.engine import Beginning
from agent_intercom.intercom.router.effects import DropEdge, PutEdge

if TYPE_CHECKING:
    from agent_intercom.intercom.store import Store


STORE_UNUSABLE: Final = "STATE_UNUSABLE"
"""The database library is missing, or the directory or the database holds what it cannot work with."""


class Keeper:
    """Owns the store of one broker.

    `state_directory` holds the database; `asks_directory` may hold the asks of an earlier Node broker. Importing the
    database library takes longer than answering a probe, so nothing is opened before `open`.
    """

    def __init__(self, state_directory: str, asks_directory: str, journal: Journal, problems: Iterable[str]) -> None:
        self.opened = False
        self.generation = 0
        self._directory = state_directory
        self._asks_directory = asks_directory
        self._journal = journal
        self._store: Store | None = None
        self._failure: str | None = None
        self._problems = list(problems)
        self._told: str | None = None

    @property
    def problems(self) -> list[str]:
        """Codes of what is wrong now."""
        degraded = self._failure or (self._store.degraded if self._store else None)
        return [*self._problems, *([degraded] if degraded else [])]

    def open(self, wall: int, held: list[AskEdge] | None, *, exclusive: bool = False) -> Beginning:
        """Open the database; what the broker begins with, if it begins afresh.

        `held` are the edges of an engine that went on from its predecessor's memory: they are what counts, and the
        database is made equal to them. Raises StoreLocked where another broker holds the directory and `exclusive` is
        set; otherwise the broker goes on without a database.
        """
        self.opened = True
        seed = os.urandom(16).hex()
        self._store = self._opened_store(wall, exclusive=exclusive)
        if self._store is None:
            self._tell()
            return Beginning(f"{wall:x}", seed, held or [])
        from agent_intercom.intercom.store import StoreError

        self.generation = self._store.generation
        known = self._begin(self._store, wall) if held is None else held
        if held is not None:
            with contextlib.suppress(StoreError):
                self._store.replace(held)
        self._tell()
        return Beginning(f"{self.generation:x}", seed, known)

    def _opened_store(self, wall: int, *, exclusive: bool) -> Store | None:
        """The store, or None with the reason in `problems`: a broker without a database still carries messages."""
        try:
            from agent_intercom.intercom.store import Store, StoreLocked
        except ImportError:
            self._failure = STORE_UNUSABLE
            return None
        try:
            return Store.open(self._directory, wall=wall)
        except StoreLocked as error:
            if exclusive:
                raise
            self._failure = error.code
        except (OverflowError, ValueError):
            self._failure = STORE_UNUSABLE
        return None

    def _begin(self, store: Store, wall: int) -> list[AskEdge]:
        """The stored edges, and once those that an earlier Node broker left (contract section 6)."""
        from agent_intercom.intercom import asks_import
        from agent_intercom.intercom.store import StoreError

        stored = store.edges()
        left = asks_import.load(self._asks_directory, wall)
        if left is None:
            return stored
        known = list({(edge.sender, edge.message_id): edge for edge in (*left, *stored)}.values())
        with contextlib.suppress(StoreError):
            if left:
                store.replace(known)
            asks_import.done(self._asks_directory, wall)
        return known

    def commit(self, changes: Sequence[PutEdge | DropEdge], edges: Callable[[], list[AskEdge]]) -> list[PutEdge]:
        """Store `changes`, in order, in one transaction. Returns the puts that are not stored; never raises."""
        puts: dict[tuple[str, str], PutEdge] = {}
        drops: dict[tuple[str, str], None] = {}
        for change in changes:
            if isinstance(change, PutEdge):
                puts[change.edge.sender, change.edge.message_id] = change
            else:
                key = (change.sender, change.message_id)
                puts.pop(key, None)
                drops[key] = None
        if self._store is None:
            return list(puts.values())
        from agent_intercom.intercom.store import StoreError

        try:
            if self._store.stale:
                self._store.replace(edges())
            else:
                self._store.commit([put.edge for put in puts.values()], list(drops))
        except StoreError:
            return list(puts.values())
        finally:
            self._tell()
        return []

    def _tell(self) -> None:
        """Log a change between working and degraded."""
        code = self._failure or (self._store.degraded if self._store else None)
        if code != self._told:
            self._told = code
            if code is None:
                self._journal.emit(Event.STORE_RECOVERED)
            else:
                self._journal.emit(Event.STORE_DEGRADED, code=code)

    def close(self) -> None:
        """Close the database."""
        if self._store is not None:
            self._store.close()
