# SPDX-License-Identifier: Apache-2.0
"""Ask edges and the generation, in SQLite.

One process, one connection, open as long as the process lives. A `flock` on `intercom.lock` keeps a second broker out;
because of it the database runs in WAL mode with exclusive locking, so that SQLite keeps its WAL index on the heap:
no `-shm` file is mapped, and none can raise SIGBUS when the disk is full or the file is truncated.

What is stored is what must survive the machine: who asked whom under which id, and until when. Whether the asker still
waits is not stored, since an edge that is read again is deferred by rule (contract section 2.7, "broker restart"); a
defer therefore costs no commit. Ids are peers' strings, which may hold NUL or lone surrogates, so they are blobs.

The module imports `apsw` (about 10 ms): the broker imports it only when it opens its store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from os import path
from typing import NamedTuple

import apsw

from agent_intercom.host import privatefiles, sqlite
from agent_intercom.intercom import paths
from agent_intercom.intercom.edge import AskEdge

DATABASE = "intercom.db"
LOCK = "intercom.lock"
APPLICATION_ID = 0x41496E74
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 50
CHECKPOINT_PAGES = 256

SCHEMA = f"""
CREATE TABLE asks (
    sender     BLOB NOT NULL,
    message_id BLOB NOT NULL,
    target     BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (sender, message_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE generation (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    value INTEGER NOT NULL
) STRICT;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
SELECT = "SELECT sender, message_id, target, created_at, expires_at FROM asks"
UPSERT = "INSERT OR REPLACE INTO asks (sender, message_id, target, created_at, expires_at) VALUES (?, ?, ?, ?, ?)"
DELETE = "DELETE FROM asks WHERE sender = ? AND message_id = ?"
READ_GENERATION = "SELECT value FROM generation WHERE id = 1"
WRITE_GENERATION = "INSERT OR REPLACE INTO generation (id, value) VALUES (1, ?)"

STATE_FOREIGN = "STATE_FOREIGN"
DATABASE_NEWER = "DATABASE_NEWER"
DATABASE_DAMAGED = "DATABASE_DAMAGED"

_TEXTS = {
    sqlite.READ_ONLY: "the state directory cannot be written",
    sqlite.FULL: "the state directory has no space left",
    sqlite.IO: "the state directory cannot be read or written",
    sqlite.BUSY: "another program holds the database open",
    sqlite.LOCKED: "another broker uses this state directory",
    STATE_FOREIGN: "the state directory or a file in it is a link, or belongs to another user",
    DATABASE_NEWER: "the database was written by a newer version",
    DATABASE_DAMAGED: "the database is damaged",
}
_OWN_CODES = {
    sqlite.DAMAGED: DATABASE_DAMAGED,
    sqlite.CONSTRAINT: sqlite.IO,
    sqlite.MOVED: sqlite.READ_ONLY,
    sqlite.LINK: STATE_FOREIGN,
}

Key = tuple[str, str]


class StoreError(Exception):
    """The store could not do it, and the database is as it was. `code` says why; the text holds no path."""

    def __init__(self, code: str) -> None:
        super().__init__(_TEXTS[code])
        self.code = code


class StoreLocked(StoreError):
    """Another live process holds this state directory."""

    def __init__(self) -> None:
        super().__init__(sqlite.LOCKED)


class _Row(NamedTuple):
    target: str
    created_at: int
    expires_at: int


class Store:
    """The broker's database. Use `Store.open`.

    `degraded` is None or the code of what is wrong. `DATABASE_DAMAGED` is a warning for the rest of the process's life
    (the damaged files lie beside the fresh database, which works); every other code means that nothing can be written
    now, and goes when a write succeeds.

    `stale` is true after a failed write: what the broker holds and what is stored may differ. The next write should
    be a `replace` with every edge there is.
    """

    def __init__(self, directory: str, wall: int, vfs: str | None = None) -> None:
        self.generation = 0
        self.stale = False
        self._directory = path.realpath(path.dirname(directory) or ".") + "/" + path.basename(directory)
        self._wall = wall
        self._vfs = vfs
        self._lock = -1
        self._db: apsw.Connection | None = None
        self._rows: dict[Key, _Row] = {}
        self._fault: str | None = None
        self._lasting: str | None = None

    @classmethod
    def open(cls, directory: str, *, wall: int, vfs: str | None = None) -> Store:
        """Open the database in `directory`, making both where they are missing; `wall` is the time in Unix ms.

        Never raises for what the environment does wrong (see `degraded`), with one exception: StoreLocked.
        """
        store = cls(path.abspath(directory), wall, vfs)
        try:
            store._attach()
        except StoreLocked:
            store.close()
            raise
        except StoreError as error:
            store._fault = error.code
            store.stale = True
            store.generation = store.generation or wall
            if not store._rows:
                store._rows = _read_copy(store._database)
        return store

    @property
    def degraded(self) -> str | None:
        """The code of what is wrong, or None."""
        return self._fault or self._lasting

    @property
    def writable(self) -> bool:
        """Whether the last attempt to write worked."""
        return self._fault is None

    def edges(self) -> list[AskEdge]:
        """The edges that are stored and had not expired when the store was opened; all of them deferred."""
        return [
            AskEdge(sender, message_id, row.target, row.created_at, row.expires_at, False)
            for (sender, message_id), row in self._rows.items()
            if row.expires_at > self._wall
        ]

    def commit(self, puts: Sequence[AskEdge], drops: Sequence[Key]) -> None:
        """Store `puts` and forget `drops` (sender, message id), drops first, in one durable transaction.

        Nothing is written where nothing would change. Raises StoreError, with the database as it was.
        """
        if puts or drops:
            self._apply(_by_key(puts), drops)

    def replace(self, edges: Iterable[AskEdge]) -> None:
        """Make `edges` all that is stored, in one durable transaction that holds the difference only.

        Raises StoreError, with the database as it was.
        """
        self._apply(_by_key(edges), None)
        self.stale = False

    def close(self) -> None:
        """Fold the log into the database and let both go. The object is of no use afterwards."""
        self._detach()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Writing

    def _apply(self, puts: dict[Key, _Row], drops: Iterable[Key] | None) -> None:
        """Write what differs from the rows that are stored; `drops` None: everything that is not in `puts`."""
        try:
            if self._fault == DATABASE_NEWER:
                raise StoreError(DATABASE_NEWER)
            # First, since it may load other rows than those that were known, or none.
            db = self._db or self._attach()
            changed = {key: row for key, row in puts.items() if self._rows.get(key) != row}
            gone = [key for key in (self._rows if drops is None else drops) if key in self._rows and key not in puts]
            if changed or gone or self._fault:
                self._write(db, lambda: _change(db, changed, gone))
        except StoreError as error:
            self._fault = error.code
            self.stale = True
            if error.code == DATABASE_DAMAGED:
                self._detach()
            raise
        for key in gone:
            self._rows.pop(key, None)
        self._rows.update(changed)
        self._fault = None

    def _write(self, db: apsw.Connection, change: Callable[[], None]) -> None:
        """Run `change` in a transaction; on failure the transaction is gone, or else the connection."""
        try:
            db.execute("BEGIN IMMEDIATE")
            change()
            db.execute("COMMIT")
        except apsw.Error as error:
            code = _code_of(error, db)
            try:
                if not db.getautocommit():
                    db.execute("ROLLBACK")
            except apsw.Error:
                self._detach()
            raise StoreError(code) from error

    # Opening

    @property
    def _database(self) -> str:
        return path.join(self._directory, DATABASE)

    def _attach(self) -> apsw.Connection:
        """Take the lock, open the database and begin a generation. Raises StoreError."""
        try:
            paths.ensure_private(self._directory)
            if self._lock < 0:
                self._lock = self._take_lock()
            try:
                return self._begin()
            except StoreError as error:
                if error.code != DATABASE_DAMAGED:
                    raise
            self._set_aside()
            return self._begin()
        except paths.DirectoryRefusedError as error:
            raise StoreError(STATE_FOREIGN) from error
        except OSError as error:
            raise StoreError(_of_system(error)) from error

    def _take_lock(self) -> int:
        try:
            return privatefiles.lock(path.join(self._directory, LOCK))
        except BlockingIOError as error:
            raise StoreLocked from error

    def _prepare(self) -> None:
        """Make sure of a private file of ours. Raises OSError, or StoreError where the database lost its content."""
        size = privatefiles.prepare(self._database)
        with contextlib.suppress(FileNotFoundError):
            # SQLite would delete the log of an empty database without a word.
            if size == 0 and os.stat(self._database + "-wal").st_size > 0:
                raise StoreError(DATABASE_DAMAGED)

    def _begin(self) -> apsw.Connection:
        self._prepare()
        db = self._connect()
        try:
            stored = self._read(db)
            generation = self.generation or max(stored + 1, self._wall)
            self._write(db, lambda: self._start(db, max(stored, generation)))
            db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        except apsw.Error as error:
            code = _code_of(error, db)
            sqlite.close(db)
            raise StoreError(code) from error
        except StoreError:
            sqlite.close(db)
            raise
        self.generation = generation
        self._rows = {key: row for key, row in self._rows.items() if row.expires_at > self._wall}
        self._db = db
        return db

    def _connect(self) -> apsw.Connection:
        try:
            db = sqlite.connect(self._database, self._vfs)
        except apsw.Error as error:
            raise StoreError(_code_of(error, None)) from error
        try:
            # A database that turns out to be newer or damaged is left as it was found, log and all.
            db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        except apsw.Error as error:
            sqlite.close(db)
            raise StoreError(_code_of(error, None)) from error
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        return db

    def _read(self, db: apsw.Connection) -> int:
        """Check the database, load the rows, make the schema where there is none; the stored generation (0: new)."""
        # Exclusive before the first read: only then does SQLite do without a shared-memory file.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        application, version = db.pragma("application_id"), db.pragma("user_version")
        if application == APPLICATION_ID and version > SCHEMA_VERSION:
            with contextlib.suppress(apsw.SQLError):
                self._rows = _rows_of(db)
            raise StoreError(DATABASE_NEWER)
        new = application == version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").get == 0
        if not new and (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise StoreError(DATABASE_DAMAGED)
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        sqlite.settle(db)
        if new:
            db.execute("PRAGMA journal_mode = WAL")
            return 0
        if db.pragma("quick_check", 1) != "ok":
            raise StoreError(DATABASE_DAMAGED)
        self._rows = _rows_of(db)
        stored = db.execute(READ_GENERATION).get
        # Set again in case a tool turned it off; changes nothing where the file says so already.
        db.execute("PRAGMA journal_mode = WAL")
        return int(stored or 0)

    def _start(self, db: apsw.Connection, generation: int) -> None:
        if db.pragma("user_version") == 0:
            db.execute(SCHEMA)
        db.execute(WRITE_GENERATION, (generation,))
        db.execute("DELETE FROM asks WHERE expires_at <= ?", (self._wall,))

    def _set_aside(self) -> None:
        """Rename the damaged database and its companions; the names keep belonging together for SQLite's tools."""
        stamp = self._wall
        while path.lexists(f"{self._database}.damaged-{stamp}"):
            stamp += 1
        for suffix in ("-wal", "-shm", "-journal", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._database + suffix, f"{self._database}.damaged-{stamp}{suffix}")
        self._rows = {}
        self._lasting = DATABASE_DAMAGED

    def _detach(self) -> None:
        if self._db is not None:
            sqlite.close(self._db)
            self._db = None


def _by_key(edges: Iterable[AskEdge]) -> dict[Key, _Row]:
    return {(e.sender, e.message_id): _Row(e.target, e.created_at, e.expires_at) for e in edges}


def _change(db: apsw.Connection, puts: dict[Key, _Row], drops: Sequence[Key]) -> None:
    db.executemany(DELETE, [(_pack(sender), _pack(message_id)) for sender, message_id in drops])
    packed = [(*map(_pack, (*key, row.target)), row.created_at, row.expires_at) for key, row in puts.items()]
    db.executemany(UPSERT, packed)


def _rows_of(db: apsw.Connection) -> dict[Key, _Row]:
    rows = {}
    for sender, message_id, target, created_at, expires_at in db.execute(SELECT):
        # A row that only another program can have written is nobody's ask.
        with contextlib.suppress(UnicodeDecodeError):
            rows[_unpack(sender), _unpack(message_id)] = _Row(_unpack(target), created_at, expires_at)
    return rows


def _read_copy(database: str) -> dict[Key, _Row]:
    """The rows of a database that cannot be opened for writing, read from a short-lived copy.

    A WAL database in a read-only place cannot be opened together with its log, and without the log the last commits
    would be missing. The copy lies in memory where the system offers that.
    """
    import tempfile  # rarely needed, and heavy

    parents = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    parent = next((p for p in parents if p and os.access(p, os.W_OK)), None)
    try:
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            for suffix in ("", "-wal"):
                privatefiles.copy(database + suffix, path.join(directory, DATABASE + suffix))
            db = apsw.Connection(path.join(directory, DATABASE), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                return _rows_of(db)
            finally:
                sqlite.close(db)
    except (OSError, apsw.Error):
        return {}


def _code_of(error: apsw.Error, db: apsw.Connection | None) -> str:
    code = sqlite.code_of(error, db)
    return _OWN_CODES.get(code, code)


def _of_system(error: OSError) -> str:
    code = sqlite.of_errno(error.errno)
    return _OWN_CODES.get(code, code)


def _pack(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _unpack(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")
