# SPDX-License-Identifier: Apache-2.0
"""What the stores of the brokers and of the worker service ask of SQLite alike: how it is opened and written, and what
its errors mean.

The module imports `apsw` (about 10 ms); who has a store imports it only with that.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TypeVar

import apsw

READ_ONLY: Final = "STATE_READ_ONLY"
FULL: Final = "STATE_FULL"
IO: Final = "STATE_IO"
BUSY: Final = "STATE_BUSY"
LOCKED: Final = "STATE_LOCKED"
"""Codes that every store has; for `code_of` they are what they say."""

DAMAGED: Final = "damaged"
CONSTRAINT: Final = "constraint"
MOVED: Final = "moved"
LINK: Final = "link"
"""What `code_of` gives besides, for which each store has a code of its own: the file is no database that makes sense; a
row does not fit those that are there; the file was removed or replaced; a link is in its place, or something else in
that of its directory.
"""

_OF_ERRNO: Final = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: FULL,
    errno.EROFS: READ_ONLY,
    errno.EACCES: READ_ONLY,
    errno.EPERM: READ_ONLY,
    errno.ELOOP: LINK,
    errno.ENOTDIR: LINK,
}

_T = TypeVar("_T")


def connect(name: str, vfs: str | None) -> apsw.Connection:
    """A connection to the file `name`, of which nothing is read yet, and which believes nothing that the file says.

    Raises apsw.Error, also where a link is in the place of the file or of one of its directories.
    """
    db = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW, vfs=vfs)
    try:
        for option, value in (
            (apsw.SQLITE_DBCONFIG_DQS_DML, 0),
            (apsw.SQLITE_DBCONFIG_DQS_DDL, 0),
            (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
            (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
        ):
            db.config(option, value)
    except apsw.Error:
        close(db)
        raise
    return db


def settle(db: apsw.Connection) -> None:
    """Have what is written last, references minded and nothing put beside the file. Raises apsw.Error."""
    for setting in ("synchronous = FULL", "foreign_keys = ON", "temp_store = MEMORY"):
        db.execute(f"PRAGMA {setting}")


def transaction(
    db: apsw.Connection,
    begin: str,
    work: Callable[[apsw.Connection], _T],
    translated: Callable[[apsw.Connection], AbstractContextManager[None]],
) -> _T:
    """What `work` returns, in a transaction that is rolled back if anything fails.

    `begin` is the statement that begins it. `translated` makes an error of SQLite's one of the store's; it does so
    before anything is rolled back, while the connection still knows the system's own error.
    """
    try:
        with translated(db):
            db.execute(begin)
            result = work(db)
            db.execute("COMMIT")
            return result
    finally:
        # A rollback that fails ends the transaction too; the next one rolls back first what a journal tells of.
        if db.in_transaction:
            with contextlib.suppress(apsw.Error):
                db.execute("ROLLBACK")


def close(db: apsw.Connection) -> None:
    """Close a connection. A log that cannot be folded in is kept, and read by the next one."""
    with contextlib.suppress(apsw.Error):
        db.close()


def code_of(error: apsw.Error, db: apsw.Connection | None) -> str:
    """What an error of SQLite's means. `db` is the connection that had it, which may know the system's own error."""
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, apsw.SQLError)):
        return DAMAGED
    if isinstance(error, apsw.FullError):
        return FULL
    if isinstance(error, apsw.ConstraintError):
        return CONSTRAINT
    if getattr(error, "extendedresult", 0) == apsw.SQLITE_READONLY_DBMOVED:
        return MOVED
    if isinstance(error, (apsw.ReadOnlyError, apsw.PermissionsError)):
        return READ_ONLY
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return BUSY
    if db is not None and isinstance(error, (apsw.IOError, apsw.CantOpenError)):
        return of_errno(db.system_errno)
    return IO


def of_errno(number: int | None) -> str:
    """What an error of the system's means."""
    return _OF_ERRNO.get(number or 0, IO)
