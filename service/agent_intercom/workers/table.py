# SPDX-License-Identifier: Apache-2.0
"""The rows of the registry in memory, how they hang together, and what is to be stored of them.

Pure. Every change leaves behind how to take it back, so that one that cannot be stored was never made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from agent_intercom.workers import lifecycle
from agent_intercom.workers.contract import Code, Lifetimes, Limits, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Event, Generation, Incarnation, Key, Worker
from agent_intercom.workers.terms import Changes, Loaded

_EMPTY = Loaded()
_K = TypeVar("_K")
_V = TypeVar("_V")


class Table:
    """All workers of one user. `identify` gives twelve fresh hexadecimal digits at each call."""

    def __init__(
        self, limits: Limits, lifetimes: Lifetimes, identify: Callable[[], str], loaded: Loaded = _EMPTY
    ) -> None:
        self._limits = limits
        self._lifetimes = lifetimes
        self._identify = identify
        self.load(loaded)

    def load(self, loaded: Loaded) -> None:
        """Know what is stored, and nothing else."""
        self._rows = {worker.id: worker for worker in loaded.workers}
        self._generations = {row.worker: row.generation for row in loaded.generations}
        self._incarnations = {row.incarnation: row.worker for row in loaded.incarnations}
        self._keys = {(row.key, row.principal, row.worker): row for row in loaded.keys}
        self._scopes: dict[str, str | None] = {}
        self._claims: set[str] = set()
        self._restarting: dict[str, str] = {}
        self._begun: deque[int] = deque()
        self._kept: Changes | None = None
        self._events: dict[str, deque[Event]] = {}
        for event in loaded.events:
            self._history(event.worker).append(event)
        for worker in loaded.workers:
            self._incarnations.setdefault(worker.incarnation, worker.id)
        self._forget_changes()

    # What is there. No caller: for who runs the workers, not for who asks.

    def get(self, worker: str) -> Worker | None:
        """The worker with this id."""
        return self._rows.get(worker)

    def of(self, incarnation: str) -> Worker | None:
        """The worker whose latest incarnation this is."""
        worker = self._rows.get(self._incarnations.get(incarnation, ""))
        return worker if worker is not None and worker.incarnation == incarnation else None

    def live(self) -> list[Worker]:
        """The workers that have not ended, parents before their children."""
        return sorted(
            filter(lifecycle.alive, self._rows.values()), key=lambda worker: (worker.depth, worker.created_at)
        )

    def in_use(self) -> set[str]:
        """The incarnations that live or are above one that does, which may write in what is theirs."""
        used = set()
        for worker in self.live():
            for row in (worker, *self._ancestors(worker)):
                # Whoever is above may have been restarted since, or be forgotten.
                used.update({row.incarnation, row.parent or row.incarnation})
        return used

    def fenced(self) -> list[Worker]:
        """The workers that are to be ended and have not, deepest first: to be stopped again after a restart of ours."""
        return deepest_first(filter(lifecycle.fenced, self._rows.values()))

    def _stands(self, worker: Worker) -> bool:
        """Whether a worker has its name, and counts, as a live one: a restart gives neither away in between."""
        under_way = self._restarting.get(worker.id) == worker.incarnation
        return lifecycle.alive(worker) or (under_way and worker.stop_reason == StopReason.RESTART)

    def ended_workers(self) -> list[Worker]:
        """The workers that have ended and are retained."""
        return [worker for worker in self._rows.values() if not lifecycle.alive(worker)]

    def remember_scope(self, worker: str, scope: str | None) -> None:
        """Say which scope id a worker has (None: none at all), after it was loaded.

        Without it, the scope id is not known: nobody can restart or adopt the worker, and where it had one only a
        person with an override sees it.
        """
        if worker in self._rows:
            self._scopes[worker] = scope

    def scope(self, worker: str) -> str | None:
        """The scope id of a worker. Raises WorkerError, `place_lost` where it is not known."""
        if worker not in self._scopes:
            raise WorkerError(Code.PLACE_LOST, "what the worker was started with is gone: start it anew")
        return self._scopes[worker]

    def events(self, worker: str, lines: int) -> list[Event]:
        """The last events of a worker, oldest first."""
        return list(self._events.get(worker, ()))[-lines:] if lines > 0 else []

    # What is to be stored

    def take(self) -> Changes:
        """What has changed since the last time; to be stored in one transaction."""
        rows = self._rows
        changes = Changes(
            workers=tuple(rows[worker] for worker in self._touched if worker in rows),
            removed=tuple(worker for worker in self._touched if worker not in rows),
            generations=tuple(Generation(worker, self._generations[worker]) for worker in self._raised),
            incarnations=tuple(
                Incarnation(name, self._incarnations[name]) for name in self._named if name in self._incarnations
            ),
            buried=tuple(name for name in self._named if name not in self._incarnations),
            keys=tuple(self._keys[key] for key in self._keyed if key in self._keys),
            expired_keys=tuple(row for key, row in self._keyed.items() if key not in self._keys),
            events=tuple(self._happened),
            undo=tuple(self._undo),
            kept=self._kept,
        )
        self._forget_changes()
        return changes

    def revert(self, changes: Changes) -> None:
        """Undo what `take` has given just before and could not be stored: for a request that is refused then."""
        for undo in reversed(changes.undo):
            undo()
        if changes.kept is not None:
            self.keep(changes.kept)

    def keep(self, changes: Changes) -> None:
        """Give `changes` again with the next `take`, because they are facts that could not be stored."""
        for worker in (*(worker.id for worker in changes.workers), *changes.removed):
            self._touched.setdefault(worker)
        for generation in changes.generations:
            self._raised.setdefault(generation.worker)
        for name in (*(row.incarnation for row in changes.incarnations), *changes.buried):
            self._named.setdefault(name)
        for key in (*changes.keys, *changes.expired_keys):
            self._keyed.setdefault((key.key, key.principal, key.worker), key)
        self._happened[:0] = changes.events
        self._kept = changes

    def _forget_changes(self) -> None:
        self._touched: dict[str, None] = {}
        self._raised: dict[str, None] = {}
        self._named: dict[str, None] = {}
        self._keyed: dict[tuple[str, str, str], Key] = {}
        self._happened: list[Event] = []
        self._undo: list[Callable[[], object]] = []
        self._kept = None

    # Changes

    def _set(self, table: dict[_K, _V], key: _K, value: _V) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.pop(key, None))
        table[key] = value

    def _drop(self, table: dict[_K, Any], key: _K) -> None:
        if key in table:
            before = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, before))

    def _put(self, worker: Worker, kind: str = "", code: str = "") -> Worker:
        """Make this the row of the worker; `kind` names what happened, if that is worth an event."""
        if self._rows.get(worker.id) != worker:
            self._set(self._rows, worker.id, worker)
            self._touched[worker.id] = None
        if kind:
            event = Event(
                at=worker.updated_at, worker=worker.id, incarnation=worker.incarnation, kind=kind, code=str(code)
            )
            history = self._history(worker.id)
            history.append(event)
            self._happened.append(event)
            self._undo.append(lambda: history.pop() if history else None)
        return worker

    def _begin(self, worker: Worker) -> Worker:
        """Put the row of a new incarnation."""
        self._set(self._generations, worker.id, worker.generation)
        self._raised[worker.id] = None
        self._set(self._incarnations, worker.incarnation, worker.id)
        self._named[worker.incarnation] = None
        self._put(worker, "provisioning")
        self._bury()
        return worker

    def _remove(self, worker: str) -> None:
        """Take a row away, with all that is kept for it but its generation."""
        self._drop(self._rows, worker)
        self._touched[worker] = None
        self._drop(self._scopes, worker)
        self._drop(self._events, worker)
        for key in [key for key in self._keys if key[2] == worker]:
            self._drop_key(key)
        self._happened = [event for event in self._happened if event.worker != worker]
        self._bury()

    def _drop_key(self, key: tuple[str, str, str]) -> None:
        self._keyed[key] = self._keys[key]
        self._drop(self._keys, key)

    def _bury(self) -> None:
        """Drop the incarnations that no row is of and none names as its parent."""
        named = {worker.incarnation for worker in self._rows.values()}
        named.update(worker.parent for worker in self._rows.values() if worker.parent is not None)
        for incarnation in self._incarnations.keys() - named:
            self._drop(self._incarnations, incarnation)
            self._named[incarnation] = None

    def _history(self, worker: str) -> deque[Event]:
        return self._events.setdefault(worker, deque(maxlen=self._limits.events))

    # Families. A worker is the child of whichever incarnation of another one started it.

    def _parent(self, worker: Worker) -> Worker | None:
        if worker.parent is None:
            return None
        return self._rows.get(self._incarnations.get(worker.parent, ""))

    def _ancestors(self, worker: Worker) -> Iterator[Worker]:
        seen = {worker.id}
        parent = self._parent(worker)
        while parent is not None and parent.id not in seen:
            yield parent
            seen.add(parent.id)
            parent = self._parent(parent)

    def _descendants(self, worker: Worker) -> list[Worker]:
        """What is below a worker, deepest first."""
        return deepest_first(
            row for row in self._rows.values() if any(above.id == worker.id for above in self._ancestors(row))
        )

    def _below(self, worker: Worker, above: Worker) -> bool:
        return any(row.id == above.id for row in self._ancestors(worker))

    def _fence(self, worker: Worker, reason: str, now: int, below: str) -> list[Worker]:
        """Fence a worker and all that is live below it, in one change; what is to be ended, deepest first."""
        fenced = [self._fence_one(row, below, now) for row in self._descendants(worker) if lifecycle.alive(row)]
        if lifecycle.alive(worker):
            fenced.append(self._fence_one(worker, reason, now))
        return fenced

    def _fence_one(self, worker: Worker, reason: str, now: int) -> Worker:
        fenced = lifecycle.fence(worker, reason, now)
        return worker if fenced is worker else self._put(fenced, "stop_requested", reason)


def deepest_first(workers: Iterable[Worker]) -> list[Worker]:
    """Workers in an order in which none comes before what is below it."""
    return sorted(workers, key=lambda worker: (-worker.depth, worker.created_at, worker.id))
