# SPDX-License-Identifier: Apache-2.0
"""Writing down what the registry decides and what has happened, before and after it is carried out (section 2.18).

A request is refused where it cannot be written down. What has happened cannot be: it is kept, and tried again with each
change, after a while, and at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from agent_intercom.host.journal import Event, Journal
from agent_intercom.workers import errors
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import Unusable, WorkerError
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.terms import Changes

RETRY: Final = 2.0
"""Seconds after which what could not be written down is tried again, where no other change does."""

_PASSING: Final = frozenset({errors.BUSY, errors.FULL, errors.IO, errors.READ_ONLY})
"""Why a database may not be usable now and be so later; of anything else the next service makes something better."""


class Keeper(Protocol):
    """What remembers: `store.Store`."""

    def apply(self, changes: Changes) -> None:
        """Raises Unusable."""


def passing(error: Unusable) -> bool:
    """Whether what keeps a database from being used may go away by itself."""
    return error.reason in _PASSING


def ending() -> WorkerError:
    """What whoever asks is told where nothing is begun any more."""
    return WorkerError(Code.UNREACHABLE, "the worker service is ending: ask again, and the next one answers", "")


class Recording:
    """What the worker service knows, in memory and on the disk. `on_change` is called after each change written down.

    `behind` is the code of what prevents that what has happened is written down, or empty. `unusable` says why the
    registry cannot be used at all, or is None: that a worker is not in it says nothing then.
    """

    def __init__(self, registry: Registry, store: Keeper, journal: Journal) -> None:
        self.registry = registry
        self.store = store
        self.journal = journal
        self.on_change: Callable[[], None] = lambda: None
        self.behind = ""
        self.over = False
        """Whether nothing is begun any more: the service ends."""
        self.unusable: Unusable | None = None
        self._lasting = False
        self._retry: asyncio.TimerHandle | None = None
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def owing(self) -> bool:
        """Whether something is to be written down that this service can still write."""
        return bool(self.behind) and not self._lasting

    def ready(self) -> None:
        """Raise WorkerError `store_unusable` where what has happened could not be written down yet."""
        if self.behind:
            changes = self.registry.take()
            try:
                self.store.apply(changes)
            except BaseException:
                self.registry.keep(changes)
                raise
            self._written(changes)

    def commit(self) -> None:
        """Write down what a request has changed; where that fails nothing was changed, and the request is refused."""
        changes = self.registry.take()
        try:
            if self.over:
                raise ending()
            self.store.apply(changes)
        except BaseException:
            # A fault of ours too: what is not stored was not made.
            self.registry.revert(changes)
            raise
        self._written(changes)

    def record(self) -> None:
        """Write down what has happened; where that fails it is tried again with the next change, or after a while."""
        changes = self.registry.take()
        try:
            self.store.apply(changes)
        except Unusable as error:
            self.registry.keep(changes)
            if not self.behind:
                self.journal.emit(Event.STORE_DEGRADED, code=error.code)
            self.behind = str(error.code)
            self._lasting = not passing(error)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY, self._again)
            return
        except BaseException:
            self.registry.keep(changes)
            raise
        self._written(changes)

    async def change(self) -> None:
        """Wait for the next change of any worker."""
        await asyncio.shield(self._turn)

    def stop_recording(self) -> None:
        """Try for the last time."""
        if self.behind:
            self.record()
        self._give_up()

    def _again(self) -> None:
        self._retry = None
        if self.behind:
            self.record()

    def _give_up(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _written(self, changes: Changes) -> None:
        if self.behind:
            self.behind = ""
            self._give_up()
            self.journal.emit(Event.STORE_RECOVERED)
        if changes:
            turn, self._turn = self._turn, asyncio.get_running_loop().create_future()
            turn.set_result(None)
            self.on_change()
