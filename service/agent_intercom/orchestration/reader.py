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
from collections.abc import Iterator, Mapping
from os import path as paths

import apsw
import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import contract, rows, schema
from agent_intercom.orchestration.errors import Refusal

BUSY_TIMEOUT_MS = 2_000

MAX_COPY = 1 << 28
"""Bytes of a database, or of its journal, that is copied to be read."""

_WAL = 2
"""As read or write version of a file: it is in WAL mode (the SQLite file format, section 1.3)."""

UNAVAILABLE = "Broker state is unavailable"
BUSY = "Broker state is busy"

_NEWEST_ASSIGNMENTS = """
WHERE id IN (SELECT active_assignment_id FROM roles)
OR rowid IN (SELECT max(rowid) FROM assignments GROUP BY role) ORDER BY rowid
"""
_NEWEST_REPORTS = """
WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER (PARTITION BY role ORDER BY round DESC, created_at DESC, rowid DESC) AS place
        FROM reports
    ) WHERE place = 1
) ORDER BY role
"""
_ADMITTED = """
SELECT count(DISTINCT round) FROM assignments WHERE role = 'implementer' AND kind = 'implementation' AND round > 1
"""
_SEQUENCES = "SELECT (SELECT min(sequence) FROM events), (SELECT max(sequence) FROM events)"


class Busy(Refusal):
    """The database is being written just now: a later try may succeed. Its code is `broker_not_ready`."""

    def __init__(self) -> None:
        super().__init__(contract.Code.BROKER_NOT_READY, BUSY)


class Overview(msgspec.Struct, kw_only=True):
    """Where a run stands: what its database holds, without commands, events, tokens and what is over.

    Roles by name. `active` and `newest` have, by role, its active assignment and the one that was made last; `reports`
    the report of the highest round; `guardrails` what the active assignment crossed, or the newest where none is
    active; `activations` are those of the current round. `admitted` counts rounds of repair. `earliest` and `latest`
    are the sequences of events that are retained, 0 where there is none.
    """

    schema: int
    meta: dict[str, str]
    round: int
    roles: list[rows.Role]
    active: dict[str, rows.Assignment]
    newest: dict[str, rows.Assignment]
    reports: dict[str, rows.Report]
    guardrails: list[rows.Guardrail]
    activations: list[rows.Activation]
    admitted: int
    earliest: int
    latest: int


class UsagePage(msgspec.Struct, kw_only=True):
    """Roles by name, without tokens, and the newest reports of a run, newest first. `truncated`: there are more."""

    roles: list[rows.Role]
    reports: list[rows.Report]
    truncated: bool


class EventPage(msgspec.Struct, kw_only=True):
    """Events above `after`, oldest first. `truncated`: there are more above them."""

    after: int
    events: list[rows.Event]
    truncated: bool


class EventPages(msgspec.Struct, kw_only=True):
    """One page per stream that was asked for, all of one moment, and what sequences are retained (0: none)."""

    pages: dict[str | None, EventPage]
    earliest: int
    latest: int


def read(path: str) -> rows.Retained:
    """Everything that the database at `path` holds, of any schema from 1 to `schema.NEWEST_READABLE`.

    Raises Refusal: `broker_not_ready` where the file is missing, `Busy` where its writer keeps it locked,
    `orchestration_error` where it is unsafe, damaged, or of an unknown schema.
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


def is_busy(refusal: Refusal) -> bool:
    """Whether a later try may succeed: the database is being written just now."""
    return isinstance(refusal, Busy)


def overview(path: str) -> Overview:
    """Where the run stands whose database is at `path`. Raises like `read`."""
    with _opened(path) as (db, version):
        entries = schema.select(db, schema.META, version, "WHERE key <> 'control_token'")
        meta = {entry.key: entry.value for entry in entries if entry.value is not None}
        current = _round(meta)
        roles = _roles(db, version)
        assignments = schema.select(db, schema.ASSIGNMENTS, version, _NEWEST_ASSIGNMENTS)
        by_id = {each.id: each for each in assignments}
        active = {each.role: by_id[id] for each in roles if (id := each.active_assignment_id) and id in by_id}
        newest = {each.role: each for each in assignments}
        watched = {role: active.get(role, newest[role]).id for role in newest}
        marks = ", ".join("?" * len(watched))
        earliest, latest = _sequences(db)
        return Overview(
            schema=version,
            meta=meta,
            round=current,
            roles=roles,
            active=active,
            newest=newest,
            reports={each.role: each for each in schema.select(db, schema.REPORTS, version, _NEWEST_REPORTS)},
            guardrails=schema.select(
                db,
                schema.GUARDRAILS,
                version,
                f"WHERE assignment_id IN ({marks}) ORDER BY role, level DESC",
                tuple(watched.values()),
            ),
            activations=[
                schema.checked(row)
                for row in schema.select(db, schema.ACTIVATIONS, version, "WHERE round = ? ORDER BY role", (current,))
            ],
            admitted=db.execute(_ADMITTED).get,
            earliest=earliest,
            latest=latest,
        )


def usage_page(path: str, limit: int) -> UsagePage:
    """What the roles and at most `limit` of the newest reports used. Raises like `read`."""
    with _opened(path) as (db, version):
        newest = "ORDER BY created_at DESC, rowid DESC LIMIT ?"
        found = schema.select(db, schema.REPORTS, version, newest, (limit + 1,))
        return UsagePage(roles=_roles(db, version), reports=found[:limit], truncated=len(found) > limit)


def event_pages(path: str, cursors: Mapping[str | None, int], limit: int) -> EventPages:
    """Per role, and under None for events of no role, at most `limit` events above its cursor. Raises like `read`."""
    pages = {}
    with _opened(path) as (db, version):
        for role, after in cursors.items():
            whose = "role IS NULL" if role is None else "role = ?"
            where = f"WHERE {whose} AND sequence > ? ORDER BY sequence LIMIT ?"
            bindings = (after, limit + 1) if role is None else (role, after, limit + 1)
            found = schema.select(db, schema.EVENTS, version, where, bindings)
            pages[role] = EventPage(after=after, events=found[:limit], truncated=len(found) > limit)
        earliest, latest = _sequences(db)
    return EventPages(pages=pages, earliest=earliest, latest=latest)


def command(path: str, id: str) -> rows.Command | None:
    """The control command `id`, or None where none was decided on. Raises like `read`."""
    with _opened(path) as (db, version):
        found = schema.select(db, schema.COMMANDS, version, "WHERE id = ?", (id,))
    return found[0] if found else None


def _roles(db: apsw.Connection, version: int) -> list[rows.Role]:
    found = schema.select(db, schema.ROLES, version, "ORDER BY role")
    for role in found:
        role.auth_token = ""
    return found


def _round(meta: Mapping[str, str]) -> int:
    text = meta.get("round", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise schema.SchemaError("Broker database holds an invalid row")
    return int(text)


def _sequences(db: apsw.Connection) -> tuple[int, int]:
    earliest, latest = next(db.execute(_SEQUENCES))
    return earliest or 0, latest or 0


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
            privatefiles.copy(name, paths.join(directory, paths.basename(name)), MAX_COPY)
        if [_state(name) for name in names] != before:
            raise Busy
    except OSError as error:
        raise Busy from error
    return paths.join(directory, paths.basename(path))


def _state(path: str) -> tuple[int, int, int]:
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check(path: str) -> None:
    """What SQLite opens by itself has to be ours and regular, too; a pipe in its place would have it wait for ever."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, UNAVAILABLE) from error
    _check_kind(found)
    for suffix in ("-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            _check_kind(os.lstat(path + suffix))
    try:
        versions = privatefiles.head(path, 20)[18:20]
    except OSError as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, UNAVAILABLE) from error
    if _WAL in versions:
        # SQLite would make files beside it, and a broker of a run never has it like that.
        raise Refusal(contract.Code.ERROR, "Broker database is in another journal mode than a run's")


def _check_kind(found: os.stat_result) -> None:
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
        raise Busy from error
    except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeError) as error:
        raise Refusal(contract.Code.ERROR, "Broker database is damaged") from error
    except apsw.Error as error:
        raise Refusal(contract.Code.BROKER_NOT_READY, UNAVAILABLE) from error
