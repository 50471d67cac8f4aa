# SPDX-License-Identifier: Apache-2.0
"""The tables of the registry's database, and how rows get in and out of them (managed-workers spec, section 2.18).

Metadata only: names and codes, digests instead of directories and tasks, and never a scope id, a command or a
variable. A worker's parent is named by its incarnation, which stays in `incarnation` as long as a row names it, so that
one that was started again or forgotten meanwhile leaves no row behind that makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from agent_intercom.workers.records import Ending, Event, Generation, Grant, Incarnation, Key, Owner, Placed, Worker

APPLICATION_ID: Final = 0x41496E77
VERSION: Final = 1

CREATE: Final = f"""
CREATE TABLE worker (
    id                      TEXT PRIMARY KEY,
    name                    TEXT NOT NULL,
    harness                 TEXT NOT NULL,
    role                    TEXT NOT NULL,
    run                     TEXT,
    scoped                  INTEGER NOT NULL CHECK (scoped IN (0, 1)),
    state                   TEXT NOT NULL,
    state_reason            TEXT NOT NULL,
    interrupted             TEXT NOT NULL,
    readiness               TEXT NOT NULL,
    generation              INTEGER NOT NULL CHECK (generation >= 1),
    incarnation             TEXT NOT NULL UNIQUE REFERENCES incarnation DEFERRABLE INITIALLY DEFERRED,
    parent                  TEXT REFERENCES incarnation DEFERRABLE INITIALLY DEFERRED,
    root                    TEXT NOT NULL,
    depth                   INTEGER NOT NULL CHECK (depth >= 0),
    unit                    TEXT NOT NULL UNIQUE,
    directory_digest        TEXT NOT NULL,
    task_digest             TEXT NOT NULL,
    task_length             INTEGER NOT NULL,
    enforced                TEXT NOT NULL,
    created_at              INTEGER NOT NULL,
    updated_at              INTEGER NOT NULL,
    entered_at              INTEGER NOT NULL,
    active_at               INTEGER NOT NULL,
    idle_ms                 INTEGER NOT NULL,
    warning_ms              INTEGER NOT NULL,
    grace_ms                INTEGER NOT NULL,
    runtime_ms              INTEGER NOT NULL,
    lease_expires_at        INTEGER,
    idle_deadline_at        INTEGER,
    checkpoint_requested_at INTEGER,
    checkpoint_attempted_at INTEGER,
    checkpoint_attempts     INTEGER NOT NULL,
    checkpoint_deadline_at  INTEGER,
    runtime_left_ms         INTEGER,
    runtime_deadline_at     INTEGER,
    paused_at               INTEGER,
    children_deadline_at    INTEGER,
    stop_requested_at       INTEGER,
    stop_reason             TEXT NOT NULL,
    dirty                   INTEGER CHECK (dirty IN (0, 1)),
    error_code              TEXT NOT NULL,
    owner_kind              TEXT NOT NULL,
    owner_name              TEXT NOT NULL,
    owner_epoch             INTEGER NOT NULL CHECK (owner_epoch >= 1),
    grant_children          INTEGER,
    grant_descendants       INTEGER,
    grant_depth             INTEGER,
    grant_expires_at        INTEGER,
    grant_subdelegate       INTEGER,
    placed_control_group    TEXT,
    placed_invocation_id    TEXT,
    placed_pid              INTEGER,
    placed_start_ticks      INTEGER,
    placed_boot_id          TEXT,
    ended_at                INTEGER,
    ended_outcome           TEXT,
    ended_exit_code         INTEGER,
    ended_exit_signal       INTEGER,
    updated_seq             INTEGER NOT NULL
) STRICT;
CREATE TABLE generation (
    worker     TEXT PRIMARY KEY,
    generation INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE incarnation (
    incarnation TEXT PRIMARY KEY,
    worker      TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE key (
    key        TEXT NOT NULL,
    principal  TEXT NOT NULL,
    worker     TEXT NOT NULL REFERENCES worker ON DELETE CASCADE,
    digest     TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (key, principal, worker)
) STRICT, WITHOUT ROWID;
CREATE TABLE event (
    seq         INTEGER PRIMARY KEY,
    worker      TEXT NOT NULL REFERENCES worker ON DELETE CASCADE,
    at          INTEGER NOT NULL,
    incarnation TEXT NOT NULL,
    kind        TEXT NOT NULL,
    code        TEXT NOT NULL
) STRICT;
CREATE INDEX event_of_worker ON event (worker, seq);
CREATE INDEX key_of_worker ON key (worker);
CREATE INDEX child_of_worker ON worker (parent);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""

_NESTED: Final = {
    "owner": (Owner, {name: f"owner_{name}" for name in Owner.__struct_fields__}),
    "grant": (Grant, {name: f"grant_{name}" for name in Grant.__struct_fields__}),
    "placed": (Placed, {name: f"placed_{name}" for name in Placed.__struct_fields__}),
    "ended": (Ending, {name: f"ended_{name}" for name in Ending.__struct_fields__}),
}
_PLAIN: Final = tuple(name for name in Worker.__struct_fields__ if name not in _NESTED)
COLUMNS: Final = (*_PLAIN, *(column for _, columns in _NESTED.values() for column in columns.values()))
_SETTING: Final = ", ".join(f"{column} = ?" for column in COLUMNS if column != "id")

INSERT: Final = f"INSERT INTO worker ({', '.join(COLUMNS)}, updated_seq) VALUES ({'?, ' * len(COLUMNS)}1)"
UPDATE: Final = (
    f"UPDATE worker SET {_SETTING}, updated_seq = updated_seq + 1 WHERE id = ? AND incarnation = ? AND updated_seq = ?"
)
DELETE: Final = "DELETE FROM worker WHERE id = ? AND incarnation = ? AND updated_seq = ?"
RAISE: Final = (
    "INSERT INTO generation (worker, generation) VALUES (?, ?)"
    " ON CONFLICT (worker) DO UPDATE SET generation = max(generation, excluded.generation)"
)
NAME: Final = "INSERT OR REPLACE INTO incarnation (incarnation, worker) VALUES (?, ?)"
BURY: Final = "DELETE FROM incarnation WHERE incarnation = ?"
KEEP_KEY: Final = "INSERT OR REPLACE INTO key (key, principal, worker, digest, expires_at) VALUES (?, ?, ?, ?, ?)"
DROP_KEY: Final = "DELETE FROM key WHERE key = ? AND principal = ? AND worker = ?"
HAPPEN: Final = "INSERT INTO event (worker, at, incarnation, kind, code) VALUES (?, ?, ?, ?, ?)"
TRIM: Final = (
    "DELETE FROM event WHERE worker = ?1 AND seq <= "
    "(SELECT seq FROM event WHERE worker = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)"
)

_Row = TypeVar("_Row", Generation, Incarnation, Key, Event)


def packed(worker: Worker) -> list[Any]:
    """The values of a worker's columns, in the order of `COLUMNS`."""
    values = [_plain(getattr(worker, name)) for name in _PLAIN]
    for name, (_, columns) in _NESTED.items():
        nested = getattr(worker, name)
        values += [None if nested is None else _plain(getattr(nested, field)) for field in columns]
    return values


def unpacked(values: Sequence[Any]) -> Worker:
    """The worker of a row, whose columns are `COLUMNS`. Raises msgspec.ValidationError or ValueError."""
    row = dict(zip(COLUMNS, values, strict=True))
    record = {name: row[name] for name in _PLAIN}
    record["enforced"] = json.loads(record["enforced"])
    record["scoped"] = bool(record["scoped"])
    record["dirty"] = None if record["dirty"] is None else bool(record["dirty"])
    for name, (_, columns) in _NESTED.items():
        nested = {field: row[column] for field, column in columns.items()}
        record[name] = None if all(value is None for value in nested.values()) else nested
    if record["grant"] is not None:
        record["grant"]["subdelegate"] = bool(record["grant"]["subdelegate"])
    return msgspec.convert(record, Worker)


def rows(kind: type[_Row], found: Iterable[Sequence[Any]]) -> tuple[_Row, ...]:
    """Rows of the other tables, whose columns are the fields of `kind`. Raises msgspec.ValidationError."""
    fields = kind.__struct_fields__
    return tuple(msgspec.convert(dict(zip(fields, values, strict=True)), kind) for values in found)


def select(kind: type[msgspec.Struct]) -> str:
    """The query for `rows`."""
    order = " ORDER BY seq" if kind is Event else ""
    return f"SELECT {', '.join(kind.__struct_fields__)} FROM {kind.__name__.lower()}{order}"


SELECT: Final = f"SELECT {', '.join(COLUMNS)} FROM worker ORDER BY created_at, id"
SELECT_KNOWN: Final = "SELECT id, incarnation, updated_seq FROM worker"


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value) if isinstance(value, str) else value
