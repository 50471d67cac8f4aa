# SPDX-License-Identifier: Apache-2.0
"""The store of a run: what is applied stays, applying again changes nothing, and a fault leaves all as it was."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_intercom.orchestration import contract, rows, schema
from agent_intercom.orchestration import store as store_module
from agent_intercom.orchestration.store import Store, StoreError
from tests.unit.orchrows import EVERY_KIND, FULL_USAGE, META, NOW, assignment, command, dump, event, make, report, role


@pytest.fixture
def database(tmp_path: Path) -> str:
    return make(tmp_path / "broker.sqlite3")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store.open(database)
    yield opened
    opened.close()


def code_of(work: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        work()
    assert not re.search(r"/|sqlite3\b", str(caught.value))
    return caught.value.code


# A new run

COLUMNS = {
    "meta": "key:TEXT:pk value:TEXT:nn",
    "roles": "role:TEXT:pk auth_token:TEXT:nn state:TEXT:nn connected:INTEGER:nn=0 active_assignment_id:TEXT "
    "generation:INTEGER:nn=1 provider_calls:INTEGER=0 input_tokens:INTEGER:nn=0 output_tokens:INTEGER:nn=0 "
    "cache_read_tokens:INTEGER:nn=0 cache_write_tokens:INTEGER:nn=0 reasoning_tokens:INTEGER cost_total:REAL:nn=0 "
    "context_tokens:INTEGER context_window:INTEGER context_percent:REAL activity:TEXT activity_sequence:INTEGER:nn=0 "
    "activity_at:TEXT updated_at:TEXT:nn",
    "assignments": "id:TEXT:pk role:TEXT:nn round:INTEGER:nn kind:TEXT:nn state:TEXT:nn delivery_id:TEXT:nn "
    "boundary_effective:INTEGER:nn=0 created_at:TEXT:nn updated_at:TEXT:nn",
    "reports": "id:TEXT:pk assignment_id:TEXT:nn role:TEXT:nn round:INTEGER:nn kind:TEXT:nn verdict:TEXT "
    "summary_chars:INTEGER:nn changed_path_count:INTEGER:nn check_count:INTEGER:nn finding_count:INTEGER:nn "
    "risk_count:INTEGER:nn limitation_count:INTEGER:nn provider_calls:INTEGER input_tokens:INTEGER "
    "output_tokens:INTEGER cache_read_tokens:INTEGER cache_write_tokens:INTEGER reasoning_tokens:INTEGER "
    "cost_total:REAL context_tokens:INTEGER context_window:INTEGER context_percent:REAL peak_context_tokens:INTEGER "
    "created_at:TEXT:nn",
    "control_commands": "id:TEXT:pk action:TEXT:nn role:TEXT:nn delivery:TEXT status:TEXT:nn received_at:TEXT:nn "
    "updated_at:TEXT:nn",
    "events": "sequence:INTEGER:pk timestamp:TEXT:nn event:TEXT:nn role:TEXT round:INTEGER assignment_id:TEXT "
    "delivery_id:TEXT status:TEXT:nn",
    "assignment_guardrails": "assignment_id:TEXT:nn:pk role:TEXT:nn level:TEXT:nn:pk metric:TEXT:nn observed:REAL:nn "
    "threshold:REAL:nn created_at:TEXT:nn",
    "specialist_activations": "role:TEXT:nn:pk round:INTEGER:nn:pk decision:TEXT:nn rule_id:TEXT:nn forced:INTEGER:nn "
    "created_at:TEXT:nn",
}
REFERENCES = {
    ("assignments", "role", "roles", "role"),
    ("reports", "assignment_id", "assignments", "id"),
    ("reports", "role", "roles", "role"),
    ("control_commands", "role", "roles", "role"),
    ("assignment_guardrails", "assignment_id", "assignments", "id"),
    ("assignment_guardrails", "role", "roles", "role"),
    ("specialist_activations", "role", "roles", "role"),
}
UNIQUE = {
    ("meta", "key"),
    ("roles", "role"),
    ("assignments", "id"),
    ("assignments", "delivery_id"),
    ("reports", "id"),
    ("reports", "assignment_id"),
    ("control_commands", "id"),
    ("assignment_guardrails", "assignment_id,level"),
    ("specialist_activations", "role,round"),
}


def columns_of(db: apsw.Connection, table: str) -> str:
    described = []
    for _, name, declared, notnull, default, key in db.execute(f"PRAGMA table_info({table})"):
        text = f"{name}:{declared}" + ":nn" * notnull + ":pk" * bool(key)
        described.append(text + (f"={default}" if default is not None else ""))
    return " ".join(described)


def test_a_new_database_is_the_contract(database: str) -> None:
    db = apsw.Connection(database, flags=apsw.SQLITE_OPEN_READONLY)
    tables = {
        name: strict
        for name, strict in db.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'")
        if not name.startswith("sqlite_")
    }
    assert tables == dict.fromkeys(COLUMNS, 0)
    assert {table: columns_of(db, table) for table in COLUMNS} == COLUMNS
    references, unique = set(), set()
    for table in COLUMNS:
        for _, _, target, column, target_column, *_ in db.execute(f"PRAGMA foreign_key_list({table})"):
            references.add((table, column, target, target_column))
        for _, index, is_unique, *_ in db.execute(f"PRAGMA index_list({table})"):
            names = ",".join(name for _, _, name in db.execute(f"PRAGMA index_info({index})"))
            if is_unique:
                unique.add((table, names))
            else:
                assert (index, names) == ("events_role_sequence", "role,sequence")
    assert references == REFERENCES
    assert unique == UNIQUE
    assert db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").get == 1
    assert (db.pragma("journal_mode"), db.pragma("integrity_check")) == ("delete", "ok")
    db.close()


def test_a_new_run_has_its_meta_roles_and_first_event(store: Store, database: str) -> None:
    found = store.load()
    assert found.meta == META | {
        "schema_version": "10",
        "protocol_version": "1",
        "workflow_state": "starting",
        "round": "1",
        "implementation_flow": "single",
        "forced_specialists": "[]",
        "continuation_policy": '{"version":1,"max_repair_rounds":null}',
        "worker_context_policy": '{"version":1,"overrides":{}}',
        "created_at": NOW,
        "updated_at": NOW,
    }
    assert found.schema == 10
    assert found.roles == [role(name) for name in contract.ROLES]
    assert found.events == [rows.Event(sequence=1, timestamp=NOW, event="broker_initialized", status="starting")]
    assert not (found.assignments or found.reports or found.commands or found.guardrails or found.activations)
    assert os.stat(database).st_mode & 0o777 == 0o600
    assert os.stat(database + ".lock").st_mode & 0o777 == 0o600


def test_meta_of_the_run_wins_except_over_the_versions(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    meta = {"schema_version": "3", "protocol_version": "2", "implementation_flow": "phased", "round": "4"}
    store_module.create(path, meta, [], NOW)
    store = Store.open(path)
    found = store.load().meta
    store.close()
    assert (found["schema_version"], found["protocol_version"]) == ("10", "1")
    assert (found["implementation_flow"], found["round"]) == ("phased", "4")


def test_an_entry_is_taken_away(store: Store) -> None:
    store.apply([rows.Meta(key="pending_repair_round", value="3")])
    assert store.load().meta["pending_repair_round"] == "3"
    gone = rows.Meta(key="pending_repair_round", value=None)
    store.apply([rows.Meta(key="pending_repair_round", value="4"), gone])
    assert "pending_repair_round" not in store.load().meta
    store.apply([gone])
    assert "pending_repair_round" not in store.load().meta


def test_a_run_is_created_once(database: str) -> None:
    before = Path(database).read_bytes()
    assert code_of(lambda: make(Path(database))) == "STATE_EXISTS"
    assert Path(database).read_bytes() == before


def test_an_empty_file_of_ours_becomes_the_database(tmp_path: Path) -> None:
    (tmp_path / "db").touch(mode=0o600)
    Store.open(make(tmp_path / "db")).close()


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    twice = [role("probe"), role("probe", auth_token=None)]
    assert code_of(lambda: store_module.create(str(tmp_path / "db"), META, twice, NOW)) == "STATE_UNUSABLE"
    assert list(tmp_path.iterdir()) == []
    assert code_of(lambda: make(tmp_path / "missing" / "db")) == "STATE_GONE"


# Applying


def test_every_kind_of_row_comes_back_as_it_was_given(store: Store, database: str) -> None:
    store.apply(EVERY_KIND)
    found = store.load()
    given_roles = [role(name) for name in contract.ROLES]
    given_roles[0] = EVERY_KIND[0]  # type: ignore[call-overload]
    assert found.roles == given_roles
    assert found.assignments == [EVERY_KIND[3], EVERY_KIND[2]]
    assert found.reports == [EVERY_KIND[4], EVERY_KIND[5]]
    assert found.commands == [EVERY_KIND[6]]
    assert found.events[1:] == EVERY_KIND[7:9]
    assert found.guardrails == [EVERY_KIND[9]]
    assert found.activations == [EVERY_KIND[10]]
    assert (found.meta["workflow_state"], found.meta["updated_at"]) == ("active", "later")
    store.close()
    again = Store.open(database)
    assert again.load() == found
    again.close()


def test_the_connection_is_as_promised(store: Store) -> None:
    db = store._db
    assert db.pragma("synchronous") == 2
    assert db.pragma("foreign_keys") == 1
    assert db.pragma("busy_timeout") == 100
    assert db.pragma("journal_mode") == "delete"


def test_a_database_in_wal_mode_is_brought_back(database: str) -> None:
    sql(database, "PRAGMA journal_mode = WAL")
    Store.open(database).close()
    assert Path(database).read_bytes()[18:20] == b"\1\1"
    assert sorted(os.listdir(os.path.dirname(database))) == ["broker.sqlite3", "broker.sqlite3.lock"]


def test_no_change_is_no_write(store: Store, database: str) -> None:
    before = (Path(database).read_bytes(), os.stat(database).st_mtime_ns)
    store.apply([])
    store.load()
    assert (Path(database).read_bytes(), os.stat(database).st_mtime_ns) == before


@pytest.mark.parametrize("begun", range(len(EVERY_KIND) + 1))
def test_a_part_and_then_the_whole_is_the_whole(store: Store, database: str, tmp_path: Path, begun: int) -> None:
    store.apply(EVERY_KIND[:begun])
    store.apply(EVERY_KIND)
    store.apply(EVERY_KIND)
    other = Store.open(make(tmp_path / "other.sqlite3"))
    other.apply(EVERY_KIND)
    other.close()
    assert dump(database) == dump(str(tmp_path / "other.sqlite3"))


names = st.sampled_from(["1", "2", "3"])
texts = st.text(st.characters(codec="utf-8"), max_size=3)
counts = st.integers(0, contract.MAX_INTEGER)
usages = st.builds(
    rows.Usage, provider_calls=st.none() | counts, input_tokens=counts, cost_total=st.floats(0, allow_infinity=False)
)
OPEN_KINDS = st.one_of(
    st.builds(
        role, st.sampled_from(contract.ROLES), usage=usages, connected=st.booleans(), state=texts, activity=texts
    ),
    st.builds(assignment, names, state=texts, boundary_effective=st.booleans()),
    st.builds(rows.Meta, key=st.sampled_from(["round", "workflow_state", "updated_at"]), value=texts),
)
# A final row has one value ever, which is drawn from its key.
FINAL_KINDS = st.one_of(
    st.builds(lambda n: report("r" + n, n, FULL_USAGE if n == "2" else None), names),
    st.builds(command, names),
    st.builds(
        lambda n, level: rows.Guardrail(
            assignment_id=n, role="reviewer", level=level, metric="m", observed=2**60 + 1, threshold=0.1, created_at=NOW
        ),
        names,
        st.sampled_from(["warning", "hard"]),
    ),
    st.builds(
        lambda r, n: rows.Activation(
            role=r, round=n, decision="skipped", rule_id=f"{r}-none", forced=False, created_at=NOW
        ),
        st.sampled_from(contract.SPECIALISTS),
        st.integers(1, 3),
    ),
)


@settings(max_examples=40)
@given(
    changes=st.lists(OPEN_KINDS | FINAL_KINDS | st.just(event(0)), max_size=12),
    first=st.integers(2, 5000),
    begun=st.integers(0, 12),
)
def test_applying_is_catching_up(
    tmp_path_factory: pytest.TempPathFactory, changes: list[rows.Change], first: int, begun: int
) -> None:
    directory = tmp_path_factory.mktemp("catching")
    template = make(directory / "template")
    base: list[rows.Change] = [assignment(name) for name in ("1", "2", "3")]
    sequence = first
    for index, change in enumerate(changes):
        if isinstance(change, rows.Event):
            changes[index] = event(sequence)
            sequence += 1
    results = []
    for turn, batches in enumerate(([changes], [changes[:begun], changes, changes], [[c] for c in changes])):
        path = str(shutil.copy(template, directory / str(turn)))
        store = Store.open(path)
        store.apply(base)
        for batch in batches:
            store.apply(batch)
        store.close()
        results.append(dump(path))
    assert results == [results[0]] * len(results)


def test_only_the_newest_events_are_kept(store: Store) -> None:
    batch: list[rows.Change] = [event(n) for n in range(2, 4097)]
    store.apply(batch)
    assert [e.sequence for e in store.load().events] == list(range(1, 4097))
    more: list[rows.Change] = [event(n) for n in range(4097, 4100)]
    store.apply(more)
    assert [e.sequence for e in store.load().events] == list(range(4, 4100))
    store.apply([*batch, *more])
    assert [e.sequence for e in store.load().events] == list(range(4, 4100))


@pytest.mark.parametrize(
    "other",
    [
        report("r1", "a1"),
        command("c1", "uncertain"),
        rows.Guardrail(
            assignment_id="a1",
            role="implementer",
            level="hard",
            metric="tokens",
            observed=1,
            threshold=1.5,
            created_at=NOW,
        ),
        rows.Activation(role="probe", round=1, decision="skipped", rule_id="probe-risk", forced=True, created_at=NOW),
        report("r3", "a1"),
        assignment("a3", role="nobody"),
        assignment("a3", delivery_id="da1"),
    ],
    ids=["report", "command", "guardrail", "activation", "second report", "role", "delivery"],
)
def test_a_row_that_does_not_fit_takes_its_whole_batch_along(store: Store, database: str, other: rows.Change) -> None:
    store.apply(EVERY_KIND)
    before = dump(database)
    assert code_of(lambda: store.apply([rows.Meta(key="round", value="9"), other])) == "STATE_UNUSABLE"
    assert dump(database) == before
    store.apply([rows.Meta(key="round", value="9")])
    assert store.load().meta["round"] == "9"


def test_a_value_that_sqlite_cannot_hold_takes_its_batch_along(store: Store, database: str) -> None:
    before = dump(database)
    for value in (rows.Meta(key="round", value="\ud800"), role("probe", generation=2**63)):
        with pytest.raises((UnicodeEncodeError, OverflowError)):
            store.apply([rows.Meta(key="round", value="9"), value])
    assert dump(database) == before
    store.apply([rows.Meta(key="round", value="9")])


# What the environment does wrong


def test_a_second_store_is_refused_at_once(store: Store, database: str) -> None:
    assert code_of(lambda: Store.open(database)) == "STATE_LOCKED"
    store.apply(EVERY_KIND)
    store.close()
    store.close()
    Store.open(database).close()


@pytest.mark.parametrize("suffix", ["", ".lock"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "foreign"])
def test_what_is_no_file_of_ours_is_refused(database: str, tmp_path: Path, suffix: str, kind: str) -> None:
    target = tmp_path / "target"
    os.rename(database, target)
    if suffix:
        make(Path(database))
    place = Path(database + suffix)
    expected = "STATE_UNUSABLE"
    if kind == "link":
        place.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
        expected = "STATE_IO" if suffix else expected
    elif os.geteuid() == 0:
        place.write_bytes(b"")
        os.chown(place, 4711, 4711)
    else:
        place.symlink_to("/etc/passwd")
    before = target.read_bytes()
    assert code_of(lambda: Store.open(database)) == expected
    if not suffix:
        assert code_of(lambda: make(place)) == expected
    assert target.read_bytes() == before


def test_a_link_among_the_directories_is_followed(database: str, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(tmp_path)
    Store.open(str(tmp_path / "way" / "broker.sqlite3")).close()
    Store.open(make(tmp_path / "way" / "other.sqlite3")).close()


def test_a_missing_database_is_not_made(tmp_path: Path) -> None:
    assert code_of(lambda: Store.open(str(tmp_path / "db"))) == "STATE_GONE"
    assert code_of(lambda: Store.open(str(tmp_path / "there" / "db"))) == "STATE_GONE"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_that_was_taken_away_is_noticed(store: Store, database: str, tmp_path: Path, replaced: bool) -> None:
    os.rename(database, tmp_path / "aside")
    if replaced:
        make(Path(database))
    assert code_of(lambda: store.apply(EVERY_KIND)) == "STATE_GONE"
    os.rename(tmp_path / "aside", database)
    store.apply(EVERY_KIND)
    assert store.load().assignments


def harm(database: str, offset: int, content: bytes) -> None:
    with open(database, "r+b") as file:
        file.seek(offset)
        file.write(content)


def sql(database: str, text: str) -> None:
    db = apsw.Connection(database)
    try:
        db.execute(text)
    finally:
        db.close()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda d: harm(d, 0, os.urandom(8192)), "Broker database is damaged"),
        (lambda d: os.truncate(d, os.stat(d).st_size - 4096), "Broker database is damaged"),
        (lambda d: harm(d, 8192, bytes(4096)), "Broker database is damaged"),
        (lambda d: os.truncate(d, 0), "Broker database schema is unavailable"),
        (lambda d: sql(d, "DELETE FROM meta WHERE key = 'schema_version'"), "Broker database schema is unavailable"),
        (lambda d: sql(d, "UPDATE meta SET value = 'new'"), "Broker database schema is invalid"),
        (lambda d: sql(d, "UPDATE meta SET value = '-8'"), "Broker database schema is invalid"),
        (lambda d: sql(d, "UPDATE meta SET value = x'38'"), "Broker database schema is invalid"),
        (lambda d: sql(d, "UPDATE meta SET value = '0'"), "Broker database schema is unsupported"),
    ],
)
def test_a_damaged_database_is_refused_and_left(database: str, how: Callable[[str], None], text: str) -> None:
    how(database)
    before = Path(database).read_bytes()
    with pytest.raises(StoreError, match=text) as caught:
        Store.open(database)
    assert caught.value.code == "STATE_DAMAGED"
    assert Path(database).read_bytes() == before
    assert sorted(os.listdir(os.path.dirname(database))) == ["broker.sqlite3", "broker.sqlite3.lock"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE roles SET connected = 2",
        "UPDATE roles SET state = CAST(x'ff' AS TEXT)",
        "UPDATE roles SET generation = 'many'",
        "INSERT INTO specialist_activations VALUES ('probe', 1, 'perhaps', 'probe-risk', 0, '')",
        "INSERT INTO specialist_activations VALUES ('probe', 1, 'run', 'django-risk', 0, '')",
        "INSERT INTO specialist_activations VALUES ('probe', 1, 'run', 'probe-Risk', 0, '')",
        "INSERT INTO specialist_activations VALUES ('probe', 1, 'run', 'probe-risk', 3, '')",
        "DROP TABLE control_commands",
    ],
)
def test_a_row_that_makes_no_sense_is_damage(database: str, change: str) -> None:
    sql(database, change)
    store = Store.open(database)
    with pytest.raises(StoreError) as caught:
        store.load()
    assert caught.value.code == "STATE_DAMAGED"
    if "INSERT" in change:
        assert str(caught.value) == "Retained specialist activation is invalid"
    store.close()


def test_a_busy_database_is_a_passing_fault(store: Store, database: str) -> None:
    store._db.set_busy_timeout(1)
    other = apsw.Connection(database)
    other.execute("BEGIN; SELECT count(*) FROM meta")
    assert code_of(lambda: store.apply(EVERY_KIND)) == "STATE_BUSY"
    other.execute("COMMIT; BEGIN EXCLUSIVE")
    assert code_of(lambda: store.apply(EVERY_KIND)) == "STATE_BUSY"
    assert code_of(store.load) == "STATE_BUSY"
    other.close()
    store.apply(EVERY_KIND)
    assert store.load().commands == [command("c1")]


def test_a_full_database_takes_a_later_batch(store: Store, database: str) -> None:
    before = dump(database)
    store._db.pragma("max_page_count", store._db.pragma("page_count"))
    many: list[rows.Change] = [event(n) for n in range(2, 1000)]
    assert code_of(lambda: store.apply(many)) == "STATE_FULL"
    assert dump(database) == before
    store.apply([rows.Meta(key="round", value="2")])
    store._db.pragma("max_page_count", 1_000_000)
    store.apply(many)
    assert len(store.load().events) == 999


def test_every_change_has_a_table() -> None:
    assert set(schema.TABLES) == set(rows.Change.__args__)  # type: ignore[attr-defined]
