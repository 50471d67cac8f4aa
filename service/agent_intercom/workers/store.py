# SPDX-License-Identifier: Apache-2.0
"""The registry's database as the worker service writes it (managed-workers spec, section 2.18).

One process, one connection, open as long as the process lives. A `flock` on a file beside the database keeps a second
one out at once; because of it the database is in WAL mode with exclusive locking, in which SQLite maps no shared
memory. Nobody else opens the database: whoever wants to know something asks the worker service.

The module imports `apsw` (about 10 ms).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from os import path as paths
from typing import TypeVar

import apsw
import msgspec

from agent_intercom.host import privatefiles, sqlite
from agent_intercom.workers import schema
from agent_intercom.workers.contract import Limits
from agent_intercom.workers.errors import CHANGED, DAMAGED, FOREIGN, NEWER, Unusable
from agent_intercom.workers.records import Event, Generation, Incarnation, Key
from agent_intercom.workers.terms import Changes, Loaded

NAME = "workers.sqlite3"
LOCK_SUFFIX = ".lock"
BUSY_TIMEOUT_MS = 50
CHECKPOINT_PAGES = 256

_TEXTS = {
    sqlite.READ_ONLY: "the state directory cannot be written",
    sqlite.FULL: "the state directory has no space left",
    sqlite.IO: "the state directory cannot be read or written",
    sqlite.BUSY: "another program holds the registry open",
    sqlite.LOCKED: "another worker service uses this registry",
    FOREIGN: "the state directory or a file in it is a link, or belongs to another user",
    NEWER: "the registry was written by a newer version",
    DAMAGED: "the registry is damaged",
    CHANGED: "another program has changed the registry",
}
_OWN_CODES = {
    sqlite.DAMAGED: DAMAGED,
    sqlite.CONSTRAINT: CHANGED,
    sqlite.MOVED: CHANGED,
    sqlite.LINK: FOREIGN,
}
_HEADER = 100

_T = TypeVar("_T")


class StoreError(Unusable):
    """The same, with a text that says it, and holds no path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, _TEXTS[reason], NAME)


class Store:
    """The database of the registry. Use `Store.open`.

    `set_aside` is None, or the name that the files of a damaged database have now, beside the fresh one: what ran then
    is not known any more, and people have to be told.
    """

    def __init__(self, database: str, lock: int, vfs: str | None) -> None:
        self.set_aside: str | None = None
        self._database = database
        self._lock = lock
        self._vfs = vfs
        self._db: apsw.Connection | None = None
        self._loaded = Loaded()
        self._known: dict[str, tuple[str, int]] = {}

    @classmethod
    def open(cls, path: str, vfs: str | None = None) -> Store:
        """Open the database at `path` in its private directory, making both where they are missing.

        Raises StoreError: STATE_LOCKED at once while another store holds it, STATE_NEWER for a database of a newer
        version, which stays as it is. One that is damaged is set aside, and a fresh one takes its place.
        """
        database = paths.join(paths.realpath(paths.dirname(paths.abspath(path))), paths.basename(path))
        with contextlib.ExitStack() as undo, _translated(None):
            os.makedirs(paths.dirname(database), 0o700, exist_ok=True)
            privatefiles.close_directory(paths.dirname(database))
            try:
                lock = privatefiles.lock(database + LOCK_SUFFIX)
            except BlockingIOError as error:
                raise StoreError(sqlite.LOCKED) from error
            store = cls(database, lock, vfs)
            undo.callback(store.close)
            try:
                store._attach()
            except StoreError as error:
                if error.reason != DAMAGED:
                    raise
                store._put_aside()
                store._attach()
            undo.pop_all()
        return store

    def load(self) -> Loaded:
        """Everything that was stored when the store was opened."""
        return self._loaded

    def apply(self, changes: Changes) -> None:
        """Make the rows as given, in one durable transaction.

        A worker's row is changed only where it is still the one that this store read or wrote last. Raises StoreError,
        with the database as it was; STATE_CHANGED where another program has written it.
        """
        if not changes:
            return
        db = self._db
        if db is None:
            raise StoreError(sqlite.IO)
        self._known = _transaction(db, lambda db: _apply(db, changes, dict(self._known)))

    def close(self) -> None:
        """Fold the log into the database and let both go. The object is of no use afterwards."""
        self._detach()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _attach(self) -> None:
        size = privatefiles.prepare(self._database)
        # SQLite would delete the log of an empty database without a word.
        if size == 0 and paths.exists(self._database + "-wal") and paths.getsize(self._database + "-wal") > 0:
            raise StoreError(DAMAGED)
        if size:
            _refuse_newer(privatefiles.head(self._database, _HEADER))
        with _translated(None):
            self._db = sqlite.connect(self._database, self._vfs)
        try:
            with _translated(self._db):
                # A database that turns out to be newer or damaged is left as it was found, log and all.
                self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                self._loaded, self._known = _opened(self._db)
                self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        except StoreError:
            self._detach()
            raise

    def _detach(self) -> None:
        if self._db is not None:
            sqlite.close(self._db)
            self._db = None

    def _put_aside(self) -> None:
        number = 1
        while paths.lexists(f"{self._database}.damaged-{number}"):
            number += 1
        aside = f"{self._database}.damaged-{number}"
        for suffix in ("-wal", "-shm", "-journal", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._database + suffix, aside + suffix)
        privatefiles.sync_directory(paths.dirname(self._database))
        self.set_aside = paths.basename(aside)


def _refuse_newer(header: bytes) -> None:
    """Refuse a newer database before SQLite touches anything beside it (sqlite.org/fileformat2, database header)."""
    version, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application == schema.APPLICATION_ID and version > schema.VERSION:
        raise StoreError(NEWER)


def _opened(db: apsw.Connection) -> tuple[Loaded, dict[str, tuple[str, int]]]:
    """Check the database, make its tables where there are none, and read it."""
    db.set_busy_timeout(BUSY_TIMEOUT_MS)
    # Exclusive before the first read: only then does SQLite do without a shared-memory file.
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    application, version = db.pragma("application_id"), db.pragma("user_version")
    if application == schema.APPLICATION_ID and version > schema.VERSION:
        raise StoreError(NEWER)
    new = application == version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if not new and (application, version) != (schema.APPLICATION_ID, schema.VERSION):
        raise StoreError(DAMAGED)
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    sqlite.settle(db)
    db.execute("PRAGMA journal_mode = WAL")
    if new:
        _transaction(db, lambda db: db.execute(schema.CREATE))
        return Loaded(), {}
    if db.pragma("quick_check", 1) != "ok" or db.execute("PRAGMA foreign_key_check").fetchone() is not None:
        raise StoreError(DAMAGED)
    try:
        loaded = _read(db)
    except (msgspec.ValidationError, ValueError) as error:
        raise StoreError(DAMAGED) from error
    known = {row: (incarnation, seq) for row, incarnation, seq in db.execute(schema.SELECT_KNOWN)}
    return loaded, known


def _read(db: apsw.Connection) -> Loaded:
    return Loaded(
        workers=tuple(schema.unpacked(values) for values in db.execute(schema.SELECT)),
        generations=schema.rows(Generation, db.execute(schema.select(Generation))),
        incarnations=schema.rows(Incarnation, db.execute(schema.select(Incarnation))),
        keys=schema.rows(Key, db.execute(schema.select(Key))),
        events=schema.rows(Event, db.execute(schema.select(Event))),
    )


def _apply(db: apsw.Connection, changes: Changes, known: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    for generation in changes.generations:
        db.execute(schema.RAISE, (generation.worker, generation.generation))
    for row in changes.incarnations:
        db.execute(schema.NAME, (row.incarnation, row.worker))
    for worker in changes.workers:
        values = schema.packed(worker)
        if worker.id not in known:
            db.execute(schema.INSERT, values)
            known[worker.id] = (worker.incarnation, 1)
            continue
        incarnation, seq = known[worker.id]
        # The first column is the id, which never changes.
        db.execute(schema.UPDATE, [*values[1:], worker.id, incarnation, seq])
        _changed_one(db)
        known[worker.id] = (worker.incarnation, seq + 1)
    for removed in changes.removed:
        if removed in known:
            db.execute(schema.DELETE, (removed, *known.pop(removed)))
            _changed_one(db)
    for name in changes.buried:
        db.execute(schema.BURY, (name,))
    for key in changes.expired_keys:
        db.execute(schema.DROP_KEY, (key.key, key.principal, key.worker))
    for key in changes.keys:
        db.execute(schema.KEEP_KEY, (key.key, key.principal, key.worker, key.digest, key.expires_at))
    _happen(db, [event for event in changes.events if event.worker in known])
    return known


def _happen(db: apsw.Connection, events: list[Event]) -> None:
    for event in events:
        db.execute(schema.HAPPEN, (event.worker, event.at, event.incarnation, event.kind, event.code))
    for worker in {event.worker for event in events}:
        db.execute(schema.TRIM, (worker, Limits().events))


def _changed_one(db: apsw.Connection) -> None:
    if db.changes() != 1:
        raise StoreError(CHANGED)


def _transaction(db: apsw.Connection, work: Callable[[apsw.Connection], _T]) -> _T:
    """What `work` returns, in a transaction that is rolled back if anything fails. Raises StoreError."""
    return sqlite.transaction(db, "BEGIN IMMEDIATE", work, _translated)


@contextlib.contextmanager
def _translated(db: apsw.Connection | None) -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        code = sqlite.code_of(error, db)
        raise StoreError(_OWN_CODES.get(code, code)) from error
    except OSError as error:
        code = sqlite.of_errno(error.errno)
        raise StoreError(_OWN_CODES.get(code, code)) from error
