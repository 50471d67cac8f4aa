# SPDX-License-Identifier: Apache-2.0
"""The run's database as its broker writes it (orchestration spec, section 8).

One process, one connection, open as long as the process lives; a `flock` on a file of its own beside the database keeps
a second broker out. Other programs read the database meanwhile, so it stays in DELETE mode: a reader opens it read-only
and leaves nothing behind.

The module imports `apsw` (about 10 ms): the broker imports it only when it opens its store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import path as paths
from typing import TypeVar

import apsw

from agent_intercom.host import privatefiles, sqlite
from agent_intercom.orchestration import contract, rows, schema

LOCK_SUFFIX = ".lock"
BUSY_TIMEOUT_MS = 100
OPENING_TIMEOUT_MS = 5_000

STATE_GONE = "STATE_GONE"
STATE_EXISTS = "STATE_EXISTS"
STATE_UNUSABLE = "STATE_UNUSABLE"
STATE_NEWER = "STATE_NEWER"
STATE_DAMAGED = "STATE_DAMAGED"

_TEXTS = {
    sqlite.READ_ONLY: "Broker database cannot be written",
    sqlite.FULL: "Broker database has no space left",
    sqlite.IO: "Broker database cannot be read or written",
    sqlite.BUSY: "Broker state is busy",
    sqlite.LOCKED: "Another broker uses this database",
    STATE_GONE: "Broker state is unavailable",
    STATE_EXISTS: "Broker database already exists",
    STATE_UNUSABLE: "Broker database path is unsafe",
    STATE_NEWER: "Broker database schema is unsupported",
    STATE_DAMAGED: "Broker database is damaged",
}
_OWN_CODES = {
    sqlite.DAMAGED: STATE_DAMAGED,
    sqlite.CONSTRAINT: STATE_UNUSABLE,
    sqlite.MOVED: STATE_GONE,
    sqlite.LINK: STATE_UNUSABLE,
}
# A pipe in the place of the file must not block the caller.
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_DROP_OLD_EVENTS = f"DELETE FROM events WHERE sequence <= (SELECT max(sequence) FROM events) - {contract.MAX_EVENTS}"

_T = TypeVar("_T")


class StoreError(Exception):
    """The store could not do it, and the database is as it was. `code` says why; the text holds no path."""

    def __init__(self, code: str, text: str | None = None) -> None:
        super().__init__(text or _TEXTS[code])
        self.code = code


class Store:
    """The broker's database. Use `Store.open`."""

    def __init__(self, lock: int, db: apsw.Connection) -> None:
        self._lock = lock
        self._db = db

    @classmethod
    def open(cls, path: str, vfs: str | None = None) -> Store:
        """Take the lock, open the database at `path` and bring an older schema up to date in one transaction.

        Raises StoreError: STATE_LOCKED while another store holds it, STATE_NEWER for a schema that only newer programs
        write, STATE_DAMAGED for one that makes no sense; in each of these cases the file stays as it is.
        """
        path = _resolved(path)
        _check(path)
        with contextlib.ExitStack() as undo:
            lock = _take_lock(path + LOCK_SUFFIX)
            undo.callback(os.close, lock)
            db = _connect(path, vfs)
            undo.callback(sqlite.close, db)
            with _translated(db):
                _prepare(db)
            undo.pop_all()
        # From here on the caller has a loop to serve, and tries again by itself.
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        return cls(lock, db)

    def load(self) -> rows.Retained:
        """Everything that is stored, as of one moment. Raises StoreError."""
        return _transaction(self._db, "BEGIN", lambda db: schema.load(db, schema.VERSION))

    def apply(self, changes: Sequence[rows.Change]) -> None:
        """Make the rows as given, in order and in one durable transaction, and drop the oldest events.

        A row that may not change is left alone where it is there already, so that what was applied in part or in whole
        may be applied again. Raises StoreError, with the database as it was: STATE_UNUSABLE where a row does not fit
        those that are there, STATE_GONE where the file was removed or replaced. A later call may succeed.
        """
        if changes:
            _transaction(self._db, "BEGIN IMMEDIATE", lambda db: _apply(db, changes))

    def close(self) -> None:
        """Let the database and its lock go. The object is of no use afterwards."""
        sqlite.close(self._db)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def create(
    path: str, meta: Mapping[str, str], roles: Sequence[rows.Role], now_text: str, vfs: str | None = None
) -> None:
    """Make the database of a new run at `path`, private and durable, with its first event.

    `meta` needs the run's own entries only (tokens, limits, policy); versions, round, state and times have values.
    Raises StoreError, STATE_EXISTS where there is a run already; a file that was not there before is then gone again.
    """
    entries = {"workflow_state": contract.Workflow.STARTING, "round": "1", **schema.DEFAULTS}
    entries.update({"created_at": now_text, "updated_at": now_text, **meta})
    entries.update({"schema_version": str(schema.VERSION), "protocol_version": str(contract.VERSION)})
    first = rows.Event(sequence=1, timestamp=now_text, event="broker_initialized", status=contract.Workflow.STARTING)
    changes: list[rows.Change] = [*(rows.Meta(key=key, value=value) for key, value in entries.items()), *roles, first]
    path = _resolved(path)
    with contextlib.ExitStack() as undo:
        if _make(path):
            undo.callback(_remove, path)
        db = _connect(path, vfs)
        try:
            _transaction(db, "BEGIN IMMEDIATE", lambda db: _fill(db, changes))
        finally:
            sqlite.close(db)
        undo.pop_all()


def _fill(db: apsw.Connection, changes: Sequence[rows.Change]) -> None:
    db.execute(schema.CREATE)
    if db.execute("SELECT count(*) FROM meta WHERE key = 'schema_version'").get != 0:
        raise StoreError(STATE_EXISTS)
    _apply(db, changes)


def _apply(db: apsw.Connection, changes: Sequence[rows.Change]) -> None:
    crowded = False
    for change in changes:
        if isinstance(change, rows.Meta) and change.value is None:
            db.execute("DELETE FROM meta WHERE key = ?", (change.key,))
            continue
        table = schema.TABLES[type(change)]
        record = schema.record(change)
        db.execute(table.upsert, record)
        if isinstance(change, rows.Event):
            crowded = True
        elif table.final and db.changes() == 0:
            key = [record[table.columns.index(column)] for column in table.key]
            if db.execute(table.find, key).fetchone() != record:
                raise StoreError(STATE_UNUSABLE, "Broker database holds another row under that key")
    if crowded:
        db.execute(_DROP_OLD_EVENTS)


def _transaction(db: apsw.Connection, begin: str, work: Callable[[apsw.Connection], _T]) -> _T:
    """What `work` returns, in a transaction that is rolled back if anything fails. Raises StoreError."""
    return sqlite.transaction(db, begin, work, _translated)


# Opening


def _resolved(path: str) -> str:
    """`path` without links in its directories, which SQLite refuses together with one in the place of the file."""
    directory, name = paths.split(paths.abspath(path))
    return paths.join(paths.realpath(directory), name)


def _check(path: str) -> None:
    """Make sure that there is a regular file of ours. Raises StoreError.

    Not by opening it: to close any descriptor of a file drops the locks that SQLite has on it in this process.
    """
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _of_system(error) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise StoreError(STATE_UNUSABLE)


def _make(path: str) -> bool:
    """Make the file `path`, empty and 0600; False where there is a file already. Raises StoreError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600))
        privatefiles.sync_directory(paths.dirname(path))
    except FileExistsError:
        _check(path)
        return False
    except OSError as error:
        raise _of_system(error) from error
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _take_lock(path: str) -> int:
    """Lock the file `path` (0600), making it where it is missing; the descriptor holds the lock. Raises StoreError."""
    try:
        return privatefiles.lock(path)
    except BlockingIOError as error:
        raise StoreError(sqlite.LOCKED) from error
    except OSError as error:
        raise _of_system(error) from error


def _connect(path: str, vfs: str | None) -> apsw.Connection:
    """A connection that writes durably and minds references. Touches no file content. Raises StoreError."""
    with _translated(None):
        db = sqlite.connect(path, vfs)
        try:
            db.set_busy_timeout(OPENING_TIMEOUT_MS)
            sqlite.settle(db)
        except apsw.Error:
            sqlite.close(db)
            raise
    return db


def _prepare(db: apsw.Connection) -> None:
    """Bring the file up to date, unless it is newer or damaged."""
    version = schema.version_of(db)
    if wrong := schema.unsupported(version, schema.VERSION):
        raise wrong
    if db.pragma("quick_check", 1) != "ok":
        raise StoreError(STATE_DAMAGED)
    # Changes nothing, unless somebody's tool has made it a WAL database, which readers could not read in peace.
    db.execute("PRAGMA journal_mode = DELETE")
    if version < schema.VERSION:
        _transaction(db, "BEGIN IMMEDIATE", lambda db: schema.migrate(db, version))


@contextlib.contextmanager
def _translated(db: apsw.Connection | None) -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise StoreError(_code_of(error, db)) from error
    except schema.SchemaError as error:
        raise StoreError(STATE_NEWER if error.newer else STATE_DAMAGED, error.text) from error


def _code_of(error: apsw.Error, db: apsw.Connection | None) -> str:
    code = sqlite.code_of(error, db)
    return _OWN_CODES.get(code, code)


def _of_system(error: OSError) -> StoreError:
    # Not in the table: SQLite's last error may be that there was no journal to roll back.
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return StoreError(STATE_GONE)
    code = sqlite.of_errno(error.errno)
    return StoreError(_OWN_CODES.get(code, code))
