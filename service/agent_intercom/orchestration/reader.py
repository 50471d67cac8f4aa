# SPDX-License-Identifier: Apache-2.0
"""The run's database as everybody else reads it: `status`, `list`, the Supervisor (orchestration spec, section 8.1).

Read-only to the letter: no side file, no lock that outlives the call, no changed time of modification, no migration.
Every call opens the database, reads in one transaction and closes it again, so that no reader keeps the broker waiting.
What a broker that was killed in the middle of a commit left is read from a short-lived copy, as it was before.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from os import path as paths

import apsw

from agent_intercom.orchestration import contract, rows, schema
from agent_intercom.orchestration.errors import Refusal

BUSY_TIMEOUT_MS = 2_000

UNAVAILABLE = "Broker state is unavailable"
BUSY = "Broker state is busy"


def read(path: str) -> rows.Retained:
    """Everything that the database at `path` holds, of any schema from 1 to `schema.NEWEST_READABLE`.

    Raises Refusal: `broker_not_ready` where the file is missing or its writer keeps it locked, `orchestration_error`
    where it is unsafe, damaged, or of an unknown schema.
    """
    with _opened(path) as (db, version):
        return schema.load(db, version)


def events(path: str, after: int, limit: int, role: str | None = None) -> list[rows.Event]:
    """At most `limit` events with a sequence above `after`, oldest first, of one role or of all. Raises like `read`."""
    with _opened(path) as (db, version):
        if role is None:
            where, bindings = "WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, limit)
            return schema.select(db, schema.EVENTS, version, where, bindings)
        where = "WHERE role = ? AND sequence > ? ORDER BY sequence LIMIT ?"
        return schema.select(db, schema.EVENTS, version, where, (role, after, limit))


def command(path: str, id: str) -> rows.Command | None:
    """The control command `id`, or None where none was decided on. Raises like `read`."""
    with _opened(path) as (db, version):
        found = schema.select(db, schema.COMMANDS, version, "WHERE id = ?", (id,))
    return found[0] if found else None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[apsw.Connection, int]]:
    """The database at `path`, in a transaction, and the version of its schema."""
    path = _resolved(path)
    with _translated(), contextlib.ExitStack() as stack:
        _check(path)
        db = _connect(path, stack)
        try:
            version = _begin(db)
        except apsw.ReadOnlyError:
            # The writer died in a transaction. Only its successor may take back what it had written.
            db.close()
            db = _connect(_copy(path, stack), stack, apsw.SQLITE_OPEN_READWRITE)
            version = _begin(db)
        if wrong := schema.unsupported(version, schema.NEWEST_READABLE):
            raise wrong
        yield db, version


def _connect(path: str, stack: contextlib.ExitStack, access: int = apsw.SQLITE_OPEN_READONLY) -> apsw.Connection:
    db = apsw.Connection(path, flags=access | apsw.SQLITE_OPEN_NOFOLLOW)
    stack.callback(db.close)
    db.set_busy_timeout(BUSY_TIMEOUT_MS)
    db.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    return db


def _begin(db: apsw.Connection) -> int:
    db.execute("BEGIN")
    return schema.version_of(db)


def _copy(path: str, stack: contextlib.ExitStack) -> str:
    """A private copy of the database and of the journal that says how to take back what is half written.

    It lies in memory where the system offers that, and goes with `stack`. Raises Refusal where a writer came up.
    """
    import tempfile  # rarely needed, and heavy

    names = [path, path + "-journal"]
    parents = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    parent = next((p for p in parents if p and os.access(p, os.W_OK)), None)
    try:
        directory = paths.realpath(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        before = [_state(name) for name in names]
        for name in names:
            with open(name, "rb") as source, open(paths.join(directory, paths.basename(name)), "xb") as target:
                target.write(source.read())
        if [_state(name) for name in names] != before:
            raise Refusal(contract.Code.BROKER_NOT_READY, BUSY)
    except OSError as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, BUSY) from error
    return paths.join(directory, paths.basename(path))


def _state(path: str) -> tuple[int, int, int]:
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check(path: str) -> None:
    try:
        found = os.lstat(path)
    except OSError as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, UNAVAILABLE) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise Refusal(contract.Code.ERROR, "Broker database path is unsafe")


def _resolved(path: str) -> str:
    """`path` without links in its directories, which SQLite refuses together with one in the place of the file."""
    directory, name = paths.split(paths.abspath(path))
    return paths.join(paths.realpath(directory), name)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except schema.SchemaError as error:
        raise Refusal(contract.Code.ERROR, error.text) from error
    except (apsw.BusyError, apsw.LockedError) as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, BUSY) from error
    except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as error:
        raise Refusal(contract.Code.ERROR, "Broker database is damaged") from error
    except apsw.Error as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, UNAVAILABLE) from error
