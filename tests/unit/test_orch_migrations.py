# SPDX-License-Identifier: Apache-2.0
"""Databases of older and newer programs: brought up to date by a broker, read as they are by everybody else."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import apsw
import pytest

from agent_intercom.orchestration import contract, reader, rows, schema
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.store import Store, StoreError
from tests.unit.orchrows import EVERY_KIND, assignment, command, dump, event, make, report, role

# What a program of schema 1 made, written down independently of the code under test.
ONE = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE roles (role TEXT PRIMARY KEY, auth_token TEXT NOT NULL, state TEXT NOT NULL,
 connected INTEGER NOT NULL DEFAULT 0, active_assignment_id TEXT, generation INTEGER NOT NULL DEFAULT 1,
 input_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
 cache_read_tokens INTEGER NOT NULL DEFAULT 0, cache_write_tokens INTEGER NOT NULL DEFAULT 0, reasoning_tokens INTEGER,
 cost_total REAL NOT NULL DEFAULT 0, context_tokens INTEGER, context_window INTEGER, context_percent REAL,
 updated_at TEXT NOT NULL);
CREATE TABLE assignments (id TEXT PRIMARY KEY, role TEXT NOT NULL REFERENCES roles(role), round INTEGER NOT NULL,
 kind TEXT NOT NULL, state TEXT NOT NULL, delivery_id TEXT NOT NULL UNIQUE, created_at TEXT NOT NULL,
 updated_at TEXT NOT NULL);
CREATE TABLE reports (id TEXT PRIMARY KEY, assignment_id TEXT NOT NULL UNIQUE REFERENCES assignments(id),
 role TEXT NOT NULL REFERENCES roles(role), round INTEGER NOT NULL, kind TEXT NOT NULL, verdict TEXT,
 summary_chars INTEGER NOT NULL, changed_path_count INTEGER NOT NULL, check_count INTEGER NOT NULL,
 finding_count INTEGER NOT NULL, risk_count INTEGER NOT NULL, limitation_count INTEGER NOT NULL,
 created_at TEXT NOT NULL);
CREATE TABLE control_commands (id TEXT PRIMARY KEY, action TEXT NOT NULL, role TEXT NOT NULL REFERENCES roles(role),
 delivery TEXT, status TEXT NOT NULL, received_at TEXT NOT NULL, updated_at TEXT NOT NULL);
CREATE TABLE events (sequence INTEGER PRIMARY KEY AUTOINCREMENT, timestamp TEXT NOT NULL, event TEXT NOT NULL,
 role TEXT, round INTEGER, assignment_id TEXT, delivery_id TEXT, status TEXT NOT NULL);
CREATE INDEX events_role_sequence ON events(role, sequence);
INSERT INTO meta VALUES ('schema_version', '1'), ('protocol_version', '1'), ('workflow_state', 'active'),
 ('round', '2'), ('control_token', 'c'), ('soft_role_tokens', '1'), ('soft_total_tokens', '2'), ('created_at', 'then'),
 ('updated_at', 'then');
INSERT INTO roles (role, auth_token, state, connected, active_assignment_id, generation, input_tokens, output_tokens,
 cache_read_tokens, cache_write_tokens, reasoning_tokens, cost_total, context_tokens, context_window, context_percent,
 updated_at) VALUES
 ('implementer', 'token1', 'active', 1, 'a1', 3, 10, 20, 30, 40, 50, 0.5, 60, 70, 80.5, 'then'),
 ('reviewer', 'token2', 'idle', 0, NULL, 1, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, 'then'),
 ('probe', 'token3', 'idle', 0, NULL, 1, 0, 0, 0, 0, NULL, 0, NULL, NULL, NULL, 'then');
INSERT INTO assignments (id, role, round, kind, state, delivery_id, created_at, updated_at) VALUES
 ('a0', 'reviewer', 1, 'review', 'completed', 'd0', 'then', 'then'),
 ('a1', 'implementer', 2, 'implementation', 'accepted', 'd1', 'then', 'then');
INSERT INTO reports (id, assignment_id, role, round, kind, verdict, summary_chars, changed_path_count, check_count,
 finding_count, risk_count, limitation_count, created_at) VALUES
 ('r0', 'a0', 'reviewer', 1, 'review', 'changes_requested', 1, 2, 3, 4, 5, 6, 'then');
INSERT INTO control_commands VALUES ('k', 'abort', 'reviewer', NULL, 'uncertain', 'then', 'then');
INSERT INTO events (timestamp, event, role, round, assignment_id, delivery_id, status) VALUES
 ('then', 'broker_initialized', NULL, NULL, NULL, NULL, 'starting'),
 ('then', 'assignment_created', 'implementer', 2, 'a1', 'd1', 'delivering');
"""
STEPS = {
    2: """ALTER TABLE assignments ADD COLUMN boundary_effective INTEGER NOT NULL DEFAULT 0;
UPDATE assignments SET boundary_effective = 1 WHERE id = 'a0';""",
    3: """ALTER TABLE roles ADD COLUMN provider_calls INTEGER;
ALTER TABLE reports ADD COLUMN provider_calls INTEGER; ALTER TABLE reports ADD COLUMN input_tokens INTEGER;
ALTER TABLE reports ADD COLUMN output_tokens INTEGER; ALTER TABLE reports ADD COLUMN cache_read_tokens INTEGER;
ALTER TABLE reports ADD COLUMN cache_write_tokens INTEGER; ALTER TABLE reports ADD COLUMN reasoning_tokens INTEGER;
ALTER TABLE reports ADD COLUMN cost_total REAL; ALTER TABLE reports ADD COLUMN context_tokens INTEGER;
ALTER TABLE reports ADD COLUMN context_window INTEGER; ALTER TABLE reports ADD COLUMN context_percent REAL;
ALTER TABLE reports ADD COLUMN peak_context_tokens INTEGER;
UPDATE roles SET provider_calls = 9 WHERE role = 'implementer';
UPDATE reports SET provider_calls = 1, input_tokens = 2, output_tokens = 3, cache_read_tokens = 4,
 cache_write_tokens = 5, cost_total = 1.5, peak_context_tokens = 6;""",
    4: """CREATE TABLE budget_exhaustions (fingerprint TEXT PRIMARY KEY, scope TEXT, role TEXT, assignment_id TEXT,
 metric TEXT, observed REAL, threshold REAL, status TEXT, override_command_id TEXT, created_at TEXT, updated_at TEXT);
INSERT INTO budget_exhaustions (fingerprint, scope) VALUES ('print', 'assignment');""",
    5: """CREATE TABLE assignment_guardrails (assignment_id TEXT NOT NULL REFERENCES assignments(id),
 role TEXT NOT NULL REFERENCES roles(role), level TEXT NOT NULL, metric TEXT NOT NULL, observed REAL NOT NULL,
 threshold REAL NOT NULL, created_at TEXT NOT NULL, PRIMARY KEY(assignment_id, level));
INSERT INTO assignment_guardrails VALUES ('a1', 'implementer', 'warning', 'total_tokens', 12, 10, 'then');
INSERT INTO meta VALUES ('budget_policy', '{}');""",
    6: "INSERT INTO meta VALUES ('implementation_flow', 'phased');",
    7: """CREATE TABLE specialist_activations (role TEXT NOT NULL REFERENCES roles(role), round INTEGER NOT NULL,
 decision TEXT NOT NULL, rule_id TEXT NOT NULL, forced INTEGER NOT NULL, created_at TEXT NOT NULL,
 PRIMARY KEY(role, round));
INSERT INTO specialist_activations VALUES ('probe', 2, 'run', 'probe-risk', 1, 'then');
INSERT INTO meta VALUES ('forced_specialists', '["probe"]');""",
    8: """ALTER TABLE roles ADD COLUMN activity TEXT;
ALTER TABLE roles ADD COLUMN activity_sequence INTEGER NOT NULL DEFAULT 0;
ALTER TABLE roles ADD COLUMN activity_at TEXT;
UPDATE roles SET activity = 'thinking', activity_sequence = 4, activity_at = 'then' WHERE role = 'implementer';""",
    9: """INSERT INTO meta VALUES ('continuation_policy', '{"version":1,"max_repair_rounds":null}');""",
    10: """INSERT INTO meta VALUES ('worker_context_policy', '{"version":1,"overrides":{}}');""",
}


def of_version(path: Path, version: int) -> str:
    """A database of `version` at `path`, which came there through every version before."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA synchronous = OFF; BEGIN")
    db.execute(ONE)
    for step in range(2, version + 1):
        # 4 was never released: only a database that stopped there has its table.
        if step != 4 or version == 4:
            db.execute(STEPS[step])
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
    db.execute("COMMIT")
    db.close()
    path.chmod(0o600)
    return str(path)


def known(version: int) -> rows.Retained:
    """What such a database holds."""
    calls = 9 if version >= 3 else None
    active: dict[str, object] = {"activity": "thinking", "activity_sequence": 4, "activity_at": "then"}
    if version < 8:
        active = {}
    usage = rows.Usage(
        provider_calls=calls,
        input_tokens=10,
        output_tokens=20,
        cache_read_tokens=30,
        cache_write_tokens=40,
        reasoning_tokens=50,
        cost_total=0.5,
        context_tokens=60,
        context_window=70,
        context_percent=80.5,
    )
    reported = rows.AssignmentUsage(
        provider_calls=1,
        input_tokens=2,
        output_tokens=3,
        cache_read_tokens=4,
        cache_write_tokens=5,
        cost_total=1.5,
        peak_context_tokens=6,
    )
    meta = {
        "schema_version": str(version),
        "protocol_version": "1",
        "workflow_state": "active",
        "round": "2",
        "control_token": "c",
        "soft_role_tokens": "1",
        "soft_total_tokens": "2",
        "created_at": "then",
        "updated_at": "then",
    }
    for since, key, value in (
        (5, "budget_policy", "{}"),
        (6, "implementation_flow", "phased"),
        (7, "forced_specialists", '["probe"]'),
        (9, "continuation_policy", '{"version":1,"max_repair_rounds":null}'),
        (10, "worker_context_policy", '{"version":1,"overrides":{}}'),
    ):
        if version >= since:
            meta[key] = value
    return rows.Retained(
        schema=version,
        meta=meta,
        roles=[
            role(
                "implementer",
                auth_token="token1",
                state="active",
                connected=True,
                active_assignment_id="a1",
                generation=3,
                usage=usage,
                updated_at="then",
                **active,
            ),
            *(
                role(name, auth_token=token, state="idle", usage=rows.Usage(), updated_at="then")
                for name, token in (("reviewer", "token2"), ("probe", "token3"))
            ),
        ],
        assignments=[
            assignment(
                "a0",
                role="reviewer",
                kind="review",
                state="completed",
                delivery_id="d0",
                boundary_effective=version >= 2,
                created_at="then",
                updated_at="then",
            ),
            assignment("a1", round=2, state="accepted", delivery_id="d1", created_at="then", updated_at="then"),
        ],
        reports=[
            report(
                "r0",
                "a0",
                reported if version >= 3 else None,
                role="reviewer",
                kind="review",
                verdict="changes_requested",
                created_at="then",
            )
        ],
        commands=[
            command("k", "uncertain", action="abort", delivery=None, received_at="then", updated_at="then"),
        ],
        events=[
            event(1, timestamp="then", event="broker_initialized", status="starting"),
            event(
                2,
                timestamp="then",
                event="assignment_created",
                role="implementer",
                round=2,
                assignment_id="a1",
                delivery_id="d1",
                status="delivering",
            ),
        ],
        guardrails=[
            rows.Guardrail(
                assignment_id="a1",
                role="implementer",
                level="warning",
                metric="total_tokens",
                observed=12.0,
                threshold=10.0,
                created_at="then",
            )
        ]
        * (version >= 5),
        activations=[
            rows.Activation(role="probe", round=2, decision="run", rule_id="probe-risk", forced=True, created_at="then")
        ]
        * (version >= 7),
    )


def migrated(version: int) -> rows.Retained:
    expected = known(version)
    expected.schema = 10
    expected.meta = schema.DEFAULTS | expected.meta | {"schema_version": "10"}
    return expected


@pytest.mark.parametrize("version", range(1, 11))
def test_every_known_version_is_read_as_it_is(tmp_path: Path, version: int) -> None:
    path = of_version(tmp_path / "db", version)
    before = (Path(path).read_bytes(), os.stat(path).st_mtime_ns)
    assert reader.read(path) == known(version)
    assert (Path(path).read_bytes(), os.stat(path).st_mtime_ns) == before
    assert os.listdir(tmp_path) == ["db"]


@pytest.mark.parametrize("version", range(1, 11))
def test_every_older_version_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path = of_version(tmp_path / "db", version)
    before = Path(path).read_bytes()
    store = Store.open(path)
    assert store.load() == migrated(version) == reader.read(path)
    if version == 10:
        assert Path(path).read_bytes() == before
    store.close()
    db = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
    assert db.pragma("integrity_check") == "ok"
    assert list(db.execute("PRAGMA foreign_key_check")) == []
    if version == 4:
        assert db.execute("SELECT fingerprint, scope FROM budget_exhaustions").get == ("print", "assignment")
    fresh = apsw.Connection(make(tmp_path / "fresh"), flags=apsw.SQLITE_OPEN_READONLY)
    for table in schema.TABLES.values():
        old, new = (
            # Where a column stands, and with what default it came, is what an added one may differ in.
            {
                (name, declared, notnull, key)
                for _, name, declared, notnull, _, key in c.execute(f"PRAGMA table_info({table.name})")
            }
            for c in (db, fresh)
        )
        assert old == new
    db.close()
    fresh.close()


@pytest.mark.parametrize("version", range(1, 11))
def test_a_migrated_file_takes_every_row(tmp_path: Path, version: int) -> None:
    store = Store.open(of_version(tmp_path / "db", version))
    changes = [
        change
        for change in EVERY_KIND
        if not isinstance(change, rows.Event) and getattr(change, "assignment_id", None) != "a1"
    ]
    store.apply([*changes, event(3, role="probe")])
    found = store.load()
    assert found.roles[0] == EVERY_KIND[0]
    assert [a.id for a in found.assignments] == ["a0", "a1", "a2"]
    assert [r.id for r in found.reports] == ["r0", "r2"]
    assert found.commands[1] == command("c1")
    assert found.events[2] == event(3, role="probe")
    assert found.activations[-1].round == 1
    store.apply([*changes, event(3, role="probe")])
    assert store.load() == found
    store.close()


def test_columns_are_named_and_not_counted(tmp_path: Path) -> None:
    path = make(tmp_path / "db")
    store = Store.open(path)
    store.apply(EVERY_KIND)
    expected = store.load()
    store.close()
    db = apsw.Connection(path)
    for table in schema.TABLES.values():
        created = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table.name,)).get
        head, _, body = created.partition("(")
        lines = [line.strip().rstrip(",") for line in body.rstrip().removesuffix(")").split("\n") if line.strip()]
        constraint = [line for line in lines if line.startswith("PRIMARY KEY")]
        columns = [line for line in reversed(lines) if line not in constraint]
        turned = f"{head.replace(table.name, 'turned')}({', '.join(['extra TEXT', *columns, *constraint])})"
        listed = ", ".join(table.columns)
        db.execute("PRAGMA foreign_keys = OFF; PRAGMA legacy_alter_table = ON")
        db.execute(f"{turned}; INSERT INTO turned ({listed}) SELECT {listed} FROM {table.name} ORDER BY rowid")
        db.execute(f"DROP TABLE {table.name}; ALTER TABLE turned RENAME TO {table.name}")
    assert next(iter(db.execute("PRAGMA table_info(roles)")))[1] == "extra"
    db.close()
    assert reader.read(path) == expected
    store = Store.open(path)
    store.apply([*EVERY_KIND, event(4)])
    assert store.load().events == [*expected.events, event(4)]
    store.close()


def test_a_half_made_migration_is_finished(tmp_path: Path) -> None:
    """Columns and tables that are there already, as after a program that writes its version last."""
    for number, (steps, version) in enumerate(itertools.product(((2,), (2, 3, 5), (2, 3, 5, 7, 8)), (1, 2))):
        path = of_version(tmp_path / str(number), version)
        db = apsw.Connection(path)
        for step in steps:
            if step > version:
                db.execute(
                    "".join(p + ";" for p in STEPS[step].split(";") if p.strip().startswith(("CREATE", "ALTER")))
                )
        db.close()
        store = Store.open(path)
        assert store.load() == migrated(version)
        store.close()


@pytest.mark.parametrize("version", [11, 999])
def test_a_newer_database_is_refused_for_writing_and_left(tmp_path: Path, version: int) -> None:
    path = of_version(tmp_path / "db", 10)
    db = apsw.Connection(path)
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
    db.close()
    before = (Path(path).read_bytes(), os.stat(path).st_mtime_ns)
    with pytest.raises(StoreError, match="Broker database schema is unsupported") as caught:
        Store.open(path)
    assert caught.value.code == "STATE_NEWER"
    with pytest.raises(Refusal, match="Broker database schema is unsupported") as refused:
        reader.read(path)
    assert refused.value.code == contract.Code.ERROR
    assert (Path(path).read_bytes(), os.stat(path).st_mtime_ns) == before
    assert sorted(os.listdir(tmp_path)) == ["db", "db.lock"]


@pytest.mark.parametrize("version", range(1, 10))
def test_a_migration_that_fails_leaves_the_old_version(tmp_path: Path, version: int) -> None:
    path = of_version(tmp_path / "db", version)
    db = apsw.Connection(path)
    # The last statement of every migration.
    db.execute("CREATE TRIGGER no BEFORE UPDATE ON meta BEGIN SELECT raise(ABORT, 'no'); END")
    db.close()
    before = dump(path)
    with pytest.raises(StoreError) as caught:
        Store.open(path)
    assert caught.value.code == "STATE_UNUSABLE"
    assert dump(path) == before
    assert reader.read(path) == known(version)
