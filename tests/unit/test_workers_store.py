# SPDX-License-Identifier: Apache-2.0
"""The registry's database: what comes back, who may open it, and what is left of it when everything fails."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace

from agent_intercom.host import sqlite
from agent_intercom.workers import errors, schema
from agent_intercom.workers.contract import Code, Limits
from agent_intercom.workers.records import Event, Generation, Worker
from agent_intercom.workers.store import Store, StoreError
from agent_intercom.workers.terms import Caller, Changes, Loaded, Wanted
from tests.unit.stepping import Step, SteppingVFS, kill_at_each, killing, steps_of
from tests.unit.workerstage import OVERRIDE, PERSON, SESSION, WIDE, Stage, inside

SECRET = "scope-that-nobody-may-read"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of syncs, of which none is for real."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def batches() -> list[Changes]:
    """What three requests and their consequences have a store do: rows of every kind, new, changed and removed."""
    stage = Stage()
    scoped = Caller(SECRET, "m")
    parent = stage.run(scoped, name="parent", grant=WIDE, key="k", task_digest="t", task_length=3)
    child = stage.run(inside(parent), name="child")
    first = stage.it.take()
    stage.it.paused(child.incarnation, stage.now)
    stage.it.restart(scoped, parent.id, stage.now)
    stage.end(child, dirty=True)
    stage.end(parent, code=3, dirty=False)
    stage.begin(stage.it.again(scoped, parent.id, parent.incarnation, stage.now))
    second = stage.it.take()
    for row in stage.it.forget(OVERRIDE, child.id, True, stage.now):
        stage.it.forgotten(row.id, stage.now)
    stage.it.adopt(Caller(SECRET), parent.id, stage.now)
    return [first, second, stage.it.take()]


def kept(path: Path) -> Loaded:
    store = Store.open(str(path))
    try:
        return store.load()
    finally:
        store.close()


def rows_of(loaded: Loaded) -> tuple[object, ...]:
    return tuple(sorted(map(repr, rows)) for rows in loaded)


# What comes back


def test_everything_comes_back_as_it_was(place: Path) -> None:
    path = place / "state" / "workers.sqlite3"
    store = Store.open(str(path))
    assert store.load() == Loaded()
    stage = Stage()
    parent = stage.run(SESSION, name="parent", grant=WIDE, key="k")
    child = stage.run(inside(parent))
    stage.it.paused(child.incarnation, stage.now)
    other = stage.end(stage.run(PERSON), code=4, dirty=True)
    store.apply(stage.it.take())
    store.close()
    loaded = kept(path)
    assert {row.id: row for row in loaded.workers} == {row.id: stage.get(row) for row in (parent, child, other)}
    later = Stage(loaded=loaded)
    later.it.remember_scope(parent.id, "scope-a")
    wanted = Wanted("command", name="parent", grant=WIDE, key="k")
    assert later.it.events(other.id, 9) == stage.it.events(other.id, 9)
    assert later.it.start(SESSION, wanted, stage.now).repeated
    assert [row.id for row in later.it.stop(SESSION, "parent", stage.now).fenced] == [child.id, parent.id]


def test_generations_outlive_the_rows(place: Path) -> None:
    store = Store.open(str(place / "db"))
    for changes in batches():
        store.apply(changes)
    store.close()
    loaded = kept(place / "db")
    assert len(loaded.workers) == 1
    assert sorted(row.generation for row in loaded.generations) == [1, 2]
    assert [row.worker for row in loaded.incarnations] == [loaded.workers[0].id]
    assert {event.worker for event in loaded.events} == {loaded.workers[0].id}


def test_no_scope_id_is_stored(place: Path) -> None:
    store = Store.open(str(place / "db"))
    for changes in batches():
        store.apply(changes)
        assert all(SECRET.encode() not in file.read_bytes() for file in place.iterdir())
    store.close()


def test_only_the_last_events_of_each_worker_are_kept(place: Path) -> None:
    store = Store.open(str(place / "db"))
    stage = Stage()
    one, two = stage.run(), stage.run()
    store.apply(stage.it.take())
    many = [Event(at=at, worker=one.id, incarnation=one.incarnation, kind="noted") for at in range(600)]
    store.apply(Changes(events=tuple(many)))
    store.close()
    events = kept(place / "db").events
    assert [event.at for event in events if event.worker == one.id] == list(range(100, 600))
    assert len([event for event in events if event.worker == two.id]) == 3
    assert Limits().events == 500


# Who may open it


def test_the_files_are_private(place: Path) -> None:
    path = place / "state" / "workers.sqlite3"
    store = Store.open(str(path))
    store.apply(batches()[0])
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    assert not path.with_name("workers.sqlite3-shm").exists()
    store.close()


def test_what_is_stored_outlives_a_loss_of_power(place: Path) -> None:
    store = Store.open(str(place / "db"))
    assert store._db is not None
    settings = [store._db.pragma(name) for name in ("journal_mode", "synchronous", "foreign_keys", "locking_mode")]
    assert settings == ["wal", 2, 1, "exclusive"]
    store.close()


def test_a_second_one_fails_at_once_and_the_next_one_does_not(place: Path) -> None:
    store = Store.open(str(place / "db"))
    with pytest.raises(StoreError) as caught:
        Store.open(str(place / "db"))
    assert (caught.value.code, caught.value.reason) == (Code.STORE, "STATE_LOCKED")
    store.apply(batches()[0])
    store.close()
    assert len(kept(place / "db").workers) == 2


def test_a_link_in_the_place_of_the_file_is_refused(place: Path) -> None:
    (place / "elsewhere").touch()
    (place / "db").symlink_to(place / "elsewhere")
    with pytest.raises(StoreError) as caught:
        Store.open(str(place / "db"))
    assert caught.value.reason == "STATE_FOREIGN"
    assert (place / "elsewhere").read_bytes() == b""


def test_a_newer_database_is_left_as_it_is(place: Path) -> None:
    Store.open(str(place / "db")).close()
    with sqlite3.connect(place / "db") as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
        db.execute("CREATE TABLE unheard_of (x)")
    db.close()
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    with pytest.raises(StoreError) as caught:
        Store.open(str(place / "db"))
    assert caught.value.reason == "STATE_NEWER"
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before


@pytest.mark.parametrize("how", ["garbage", "another", "column", "value", "emptied"])
def test_what_is_damaged_is_set_aside_and_said(place: Path, how: str) -> None:
    path = place / "db"
    store = Store.open(str(path))
    store.apply(batches()[0])
    if how == "emptied":
        # As a kill leaves it, with its log, and the file itself lost.
        shutil.copy(place / "db-wal", place / "log")
        store.close()
        path.write_bytes(b"")
        (place / "log").rename(place / "db-wal")
    else:
        store.close()
    if how == "garbage":
        path.write_bytes(b"no database at all" * 999)
    elif how != "emptied":
        with sqlite3.connect(path) as db:
            db.execute(
                {
                    "another": "PRAGMA application_id = 7",
                    "column": "ALTER TABLE worker DROP COLUMN stop_reason",
                    "value": "UPDATE worker SET enforced = 'no json'",
                }[how]
            )
        db.close()
    damaged = path.read_bytes()
    store = Store.open(str(path))
    assert store.set_aside == "db.damaged-1"
    assert store.load() == Loaded()
    assert (place / "db.damaged-1").read_bytes() == damaged
    store.apply(batches()[0])
    store.close()
    assert len(kept(path).workers) == 2


# Changes that fail


def test_a_row_that_another_program_changed_is_not_overwritten(place: Path) -> None:
    stage = Stage()
    worker = stage.run()
    store = Store.open(str(place / "db"))
    store.apply(stage.it.take())
    store._known[worker.id] = (worker.incarnation, 7)
    stage.end(worker)
    with pytest.raises(StoreError) as caught:
        store.apply(stage.it.take())
    assert caught.value.reason == "STATE_CHANGED"
    store.close()
    assert kept(place / "db").workers == (worker,)


def test_a_change_that_does_not_fit_changes_nothing(place: Path) -> None:
    store = Store.open(str(place / "db"))
    first, second, _ = batches()
    store.apply(first)
    orphan = replace(first.workers[0], id="f" * 12, unit="other.scope")
    with pytest.raises(StoreError):
        store.apply(Changes(workers=(orphan,), generations=(Generation("f" * 12, 9),)))
    store.apply(second)
    store.close()
    loaded = kept(place / "db")
    assert "f" * 12 not in {row.worker for row in loaded.generations}
    assert {row.id for row in loaded.workers} == {row.id for row in first.workers}


def test_facts_that_were_stored_late_fit(place: Path) -> None:
    """What could not be stored comes again later, together with what happened since."""
    stage = Stage()
    worker = stage.run()
    gone = stage.end(stage.run())
    stage.it.keep(stage.it.take())
    stage.it.forget(OVERRIDE, gone.id, True, stage.now)
    stage.it.forgotten(gone.id, stage.now)
    store = Store.open(str(place / "db"))
    store.apply(stage.it.take())
    store.close()
    assert kept(place / "db").workers == (worker,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "reason"), [(apsw.FullError, "STATE_FULL"), (apsw.IOError, "STATE_IO")])
def test_a_fault_at_any_step_leaves_the_registry_as_it_was(
    place: Path, error: type[apsw.Error], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    left: list[int] = []

    def step(_: Step) -> None:
        if left:
            if left[0] == 0:
                raise error
            left[0] -= 1

    vfs = SteppingVFS("workers-faulty", step)
    first, second, third = batches()
    reasons: list[str] = []
    for budget in range(500):
        path = place / str(budget)
        store = Store.open(str(path), vfs="workers-faulty")
        store.apply(first)
        left[:] = [budget]
        try:
            store.apply(second)
        except StoreError as caught:
            reasons.append(caught.reason)
        left.clear()
        failed = len(reasons) > budget
        store.apply(second if failed else third)
        store.close()
        assert {row.generation for row in kept(path).workers} == ({1, 2} if failed else {2})
        if not failed:
            break
    assert not failed
    assert len(reasons) > 3
    assert reason in reasons
    assert set(reasons) <= {reason, "STATE_IO"}
    vfs.unregister()


# Kills


def main(directory: str) -> None:
    """Open, store three batches and close, killed at each step of all that SQLite does with files."""

    def work(number: int) -> None:
        vfs = killing("workers-killing", number)
        store = Store.open(os.path.join(directory, str(number), "db"), vfs="workers-killing")
        for changes in batches():
            store.apply(changes)
        store.close()
        vfs.unregister()

    print(kill_at_each(work, 500))


def test_a_service_killed_at_any_step_has_stored_all_of_a_change_or_nothing(place: Path) -> None:
    stages = [rows_of(Loaded())]
    store = Store.open(str(place / "reference"))
    for number, changes in enumerate(batches()):
        store.apply(changes)
        # A copy of a database that is open, log and all, is what a kill leaves.
        (place / f"copy-{number}").mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(place / f"reference{suffix}", place / f"copy-{number}" / f"db{suffix}")
        stages.append(rows_of(kept(place / f"copy-{number}" / "db")))
    store.close()
    steps = steps_of("tests.unit.test_workers_store", str(place / "killed"))
    assert steps > 15
    seen = []
    for number in range(steps + 1):
        path = place / "killed" / str(number) / "db"
        store = Store.open(str(path))
        assert store.set_aside is None
        seen.append(stages.index(rows_of(store.load())))
        store.close()
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 3}


def test_every_field_of_a_worker_has_a_column() -> None:
    worker = batches()[0].workers[0]
    assert len(schema.packed(worker)) == len(schema.COLUMNS)
    assert schema.COLUMNS[0] == "id"
    assert schema.unpacked(schema.packed(worker)) == worker
    assert isinstance(worker, Worker)


if __name__ == "__main__":
    main(*sys.argv[1:])


def test_the_reasons_that_are_told_without_sqlite_are_those_that_it_gives() -> None:
    for name in ("READ_ONLY", "FULL", "IO", "BUSY", "LOCKED"):
        assert getattr(errors, name) == getattr(sqlite, name)
