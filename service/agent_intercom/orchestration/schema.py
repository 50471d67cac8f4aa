# SPDX-License-Identifier: Apache-2.0
"""The tables of a run's database, what older versions of them lacked, and the way between rows and structs.

The tables are a contract with other programs (orchestration spec, section 8.2): names, types and order are theirs, and
so is the lack of STRICT. A migrated file has its added columns at the end, so columns are named everywhere. The names
are the fields of the structs in `rows`, where a struct's `usage` stands for the fields of the usage struct.

Functions here take an open `apsw` connection, begin no transaction and let `apsw.Error` through.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

import msgspec

from agent_intercom.orchestration import contract, policies, rows

if TYPE_CHECKING:
    import apsw

VERSION: Final = 10
"""What this program writes."""

NEWEST_READABLE: Final = 10

_GUARDRAILS = """
CREATE TABLE IF NOT EXISTS assignment_guardrails (
    assignment_id TEXT NOT NULL REFERENCES assignments(id),
    role TEXT NOT NULL REFERENCES roles(role),
    level TEXT NOT NULL,
    metric TEXT NOT NULL,
    observed REAL NOT NULL,
    threshold REAL NOT NULL,
    created_at TEXT NOT NULL,
    PRIMARY KEY (assignment_id, level)
);
"""
_ACTIVATIONS = """
CREATE TABLE IF NOT EXISTS specialist_activations (
    role TEXT NOT NULL REFERENCES roles(role),
    round INTEGER NOT NULL,
    decision TEXT NOT NULL,
    rule_id TEXT NOT NULL,
    forced INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    PRIMARY KEY (role, round)
);
"""
CREATE: Final = f"""
CREATE TABLE IF NOT EXISTS meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS roles (
    role TEXT PRIMARY KEY,
    auth_token TEXT NOT NULL,
    state TEXT NOT NULL,
    connected INTEGER NOT NULL DEFAULT 0,
    active_assignment_id TEXT,
    generation INTEGER NOT NULL DEFAULT 1,
    provider_calls INTEGER DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER,
    cost_total REAL NOT NULL DEFAULT 0,
    context_tokens INTEGER,
    context_window INTEGER,
    context_percent REAL,
    activity TEXT,
    activity_sequence INTEGER NOT NULL DEFAULT 0,
    activity_at TEXT,
    updated_at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS assignments (
    id TEXT PRIMARY KEY,
    role TEXT NOT NULL REFERENCES roles(role),
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    delivery_id TEXT NOT NULL UNIQUE,
    boundary_effective INTEGER NOT NULL DEFAULT 0,
    created_at TEXT NOT NULL,
    updated_at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS reports (
    id TEXT PRIMARY KEY,
    assignment_id TEXT NOT NULL UNIQUE REFERENCES assignments(id),
    role TEXT NOT NULL REFERENCES roles(role),
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    verdict TEXT,
    summary_chars INTEGER NOT NULL,
    changed_path_count INTEGER NOT NULL,
    check_count INTEGER NOT NULL,
    finding_count INTEGER NOT NULL,
    risk_count INTEGER NOT NULL,
    limitation_count INTEGER NOT NULL,
    provider_calls INTEGER,
    input_tokens INTEGER,
    output_tokens INTEGER,
    cache_read_tokens INTEGER,
    cache_write_tokens INTEGER,
    reasoning_tokens INTEGER,
    cost_total REAL,
    context_tokens INTEGER,
    context_window INTEGER,
    context_percent REAL,
    peak_context_tokens INTEGER,
    created_at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS control_commands (
    id TEXT PRIMARY KEY,
    action TEXT NOT NULL,
    role TEXT NOT NULL REFERENCES roles(role),
    delivery TEXT,
    status TEXT NOT NULL,
    received_at TEXT NOT NULL,
    updated_at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    timestamp TEXT NOT NULL,
    event TEXT NOT NULL,
    role TEXT,
    round INTEGER,
    assignment_id TEXT,
    delivery_id TEXT,
    status TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_role_sequence ON events(role, sequence);
{_GUARDRAILS}{_ACTIVATIONS}"""

DEFAULTS: Final = {
    "implementation_flow": contract.Flow.SINGLE,
    "forced_specialists": "[]",
    policies.CONTINUATION: policies.continuation(None),
    policies.WORKER_CONTEXT: policies.worker_context({}),
}
"""Entries of `meta` that a migration adds."""

_USAGE = rows.Usage.__struct_fields__
_REPORT_USAGE = rows.AssignmentUsage.__struct_fields__
_REALS = frozenset({"cost_total", "context_percent", "observed", "threshold"})
_FLAGS = frozenset({"connected", "boundary_effective", "forced"})

_ADDED = (
    (2, "assignments", "boundary_effective", "INTEGER NOT NULL DEFAULT 0"),
    # Without a default: what an old file never counted is unavailable, not zero.
    (3, "roles", "provider_calls", "INTEGER"),
    *((3, "reports", name, "REAL" if name in _REALS else "INTEGER") for name in _REPORT_USAGE),
    (8, "roles", "activity", "TEXT"),
    (8, "roles", "activity_sequence", "INTEGER NOT NULL DEFAULT 0"),
    (8, "roles", "activity_at", "TEXT"),
)
"""Columns by the version that added them."""

_SINCE = {(table, column): version for version, table, column, _ in _ADDED}
_INSERT_META = "INSERT OR IGNORE INTO meta (key, value) VALUES (?, ?)"

_Row = TypeVar("_Row", bound=msgspec.Struct)


class SchemaError(Exception):
    """The database holds what this program cannot make sense of. `newer`: it was written by a newer one."""

    def __init__(self, text: str, *, newer: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.newer = newer


class Table(NamedTuple, Generic[_Row]):
    """A table of which each row is one struct; `columns` in the order of `record`.

    `upsert` stores a row; where `final`, it leaves a row alone that is there already.
    """

    name: str
    row: type[_Row]
    key: tuple[str, ...]
    columns: tuple[str, ...]
    final: bool
    since: int
    upsert: str
    find: str


def _table(name: str, row: type[_Row], *key: str, final: bool = False, since: int = 1) -> Table[_Row]:
    usage = _REPORT_USAGE if row is rows.Report else _USAGE
    columns = tuple(c for field in row.__struct_fields__ for c in (usage if field == "usage" else (field,)))
    listed, marks, keys = ", ".join(columns), ", ".join("?" * len(columns)), ", ".join(key)
    # Not INSERT OR REPLACE, which deletes: the row would lose its place, and a reference to it would forbid that.
    changes = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in key)
    return Table(
        name,
        row,
        key,
        columns,
        final,
        since,
        f"INSERT INTO {name} ({listed}) VALUES ({marks}) "
        f"ON CONFLICT ({keys}) DO {'NOTHING' if final else f'UPDATE SET {changes}'}",
        f"SELECT {listed} FROM {name} WHERE {' AND '.join(f'{column} = ?' for column in key)}",
    )


ROLES = _table("roles", rows.Role, "role")
ASSIGNMENTS = _table("assignments", rows.Assignment, "id")
REPORTS = _table("reports", rows.Report, "id", final=True)
COMMANDS = _table("control_commands", rows.Command, "id", final=True)
EVENTS = _table("events", rows.Event, "sequence", final=True)
GUARDRAILS = _table("assignment_guardrails", rows.Guardrail, "assignment_id", "level", final=True, since=5)
ACTIVATIONS = _table("specialist_activations", rows.Activation, "role", "round", final=True, since=7)
META = _table("meta", rows.Meta, "key")

TABLES: Final[dict[type, Table[Any]]] = {
    table.row: table
    for table in cast(
        "tuple[Table[Any], ...]",
        (ROLES, ASSIGNMENTS, REPORTS, COMMANDS, EVENTS, GUARDRAILS, ACTIVATIONS, META),
    )
}


def version_of(db: apsw.Connection) -> int:
    """The schema version of the file. Raises SchemaError where there is none, or none that makes sense."""
    if db.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'meta'").get == 0:
        raise SchemaError("Broker database schema is unavailable")
    text = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").get
    if text is None:
        raise SchemaError("Broker database schema is unavailable")
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise SchemaError("Broker database schema is invalid")
    return int(text)


def unsupported(version: int, newest: int) -> SchemaError | None:
    """What is wrong with `version` for one who knows versions 1 to `newest`, or None."""
    if 1 <= version <= newest:
        return None
    return SchemaError("Broker database schema is unsupported", newer=version > newest)


def migrate(db: apsw.Connection, version: int) -> None:
    """Turn a file of `version` into one of `VERSION` (section 8.3); to be called in a transaction."""
    for since, table, column, declared in _ADDED:
        if version < since:
            there = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
            if column not in there:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {declared}")
    # The table that version 4 had instead is left where it is.
    if version < GUARDRAILS.since:
        db.execute(_GUARDRAILS)
    if version < 6:
        db.execute(_INSERT_META, ("implementation_flow", DEFAULTS["implementation_flow"]))
    if version < ACTIVATIONS.since:
        db.execute(_ACTIVATIONS)
        db.execute(_INSERT_META, ("forced_specialists", DEFAULTS["forced_specialists"]))
    for since, key in ((9, policies.CONTINUATION), (10, policies.WORKER_CONTEXT)):
        if version < since:
            db.execute(_INSERT_META, (key, DEFAULTS[key]))
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(VERSION),))


def record(row: rows.Change) -> tuple[str | int | float | None, ...]:
    """The columns of `row`, in the order of its table's `columns` and as SQLite gives them back."""
    values: list[str | int | float | None] = []
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if name != "usage":
            values.append(_cell(name, value))
        elif value is None:
            values.extend(None for _ in _REPORT_USAGE)
        else:
            values.extend(_cell(field, getattr(value, field)) for field in value.__struct_fields__)
    return tuple(values)


def load(db: apsw.Connection, version: int) -> rows.Retained:
    """Everything in a file of `version`, rows in the order in which they were made.

    What a version did not have is empty or at its default. Raises SchemaError for a value that no row may have.
    """
    return rows.Retained(
        schema=version,
        meta={entry.key: entry.value for entry in select(db, META, version) if entry.value is not None},
        roles=select(db, ROLES, version),
        assignments=select(db, ASSIGNMENTS, version),
        reports=select(db, REPORTS, version),
        commands=select(db, COMMANDS, version),
        events=select(db, EVENTS, version),
        guardrails=select(db, GUARDRAILS, version),
        activations=[checked(row) for row in select(db, ACTIVATIONS, version)],
    )


def select(
    db: apsw.Connection, table: Table[_Row], version: int, where: str = "", bindings: tuple[str | int, ...] = ()
) -> list[_Row]:
    """Rows of `table` in a file of `version`, narrowed by the clauses `where`, which follow the table's name."""
    if version < table.since:
        return []
    names = tuple(name for name in table.columns if version >= _SINCE.get((table.name, name), 1))
    found = db.execute(f"SELECT {', '.join(names)} FROM {table.name} {where or 'ORDER BY rowid'}", bindings)
    try:
        return [
            msgspec.convert(_fields(table.row, dict(zip(names, record, strict=True))), table.row) for record in found
        ]
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise SchemaError("Broker database holds an invalid row") from error


def _cell(name: str, value: Any) -> str | int | float | None:
    if value is None:
        return None
    if name in _REALS:
        return float(value)
    return int(value) if name in _FLAGS else cast("str | int", value)


def _fields(row: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `row` from its columns: flags as booleans, usage as a struct of its own."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in values.values()):
        # No JSON can say it, and no broker can have written it.
        raise SchemaError("Broker database holds an invalid row")
    for name in _FLAGS & values.keys():
        if values[name] not in (0, 1):
            raise SchemaError(
                "Retained specialist activation is invalid"
                if row is rows.Activation
                else "Broker database holds an invalid row"
            )
        values[name] = bool(values[name])
    if "usage" in row.__struct_fields__:
        usage = {name: value for name in _REPORT_USAGE if (value := values.pop(name, None)) is not None}
        # A report that names nothing was accepted without usage.
        values["usage"] = usage if usage or row is rows.Role else None
    return values


def checked(row: rows.Activation) -> rows.Activation:
    """`row`, if it may be one (section 5.4)."""
    if (
        row.decision not in ("run", "skipped")
        or contract.RULE_ID.fullmatch(row.rule_id) is None
        or not row.rule_id.startswith(row.role + "-")
    ):
        raise SchemaError("Retained specialist activation is invalid")
    return row
