# SPDX-License-Identifier: Apache-2.0
"""Readers of a run's database: they see what is committed, leave no trace, and say why they cannot see."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from agent_intercom.orchestration import contract, reader, rows
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.store import Store
from tests.unit.orchrows import EVERY_KIND, command, event, make

SERVICE = str(Path(reader.__file__).parents[2])


@pytest.fixture
def database(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir()
    return make(tmp_path / "run" / "broker.sqlite3")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store.open(database)
    opened.apply(EVERY_KIND)
    yield opened
    opened.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BUSY_TIMEOUT_MS", 1)


def refusal(work: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value.code, caught.value.text


def trace(path: str) -> dict[str, tuple[bytes, int, int]]:
    """What is in the directory of `path`, and when it was changed; that of the directory itself too."""
    directory = Path(path).parent
    found = {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ctime_ns) for p in directory.iterdir()}
    return found | {".": (b"", directory.stat().st_mtime_ns, directory.stat().st_ctime_ns)}


UNAVAILABLE = (contract.Code.BROKER_NOT_READY, "Broker state is unavailable")
BUSY = (contract.Code.BROKER_NOT_READY, "Broker state is busy")


def test_a_reader_sees_what_the_writer_has(store: Store, database: str) -> None:
    assert reader.read(database) == store.load()
    store.apply([rows.Meta(key="round", value="5")])
    assert reader.read(database).meta["round"] == "5"


def test_events_are_paged(store: Store, database: str) -> None:
    store.apply([event(n, role="reviewer" if n % 2 else "probe") for n in range(4, 10)])
    everything = store.load().events
    assert reader.events(database, 0, 100) == everything
    assert reader.events(database, 3, 2) == everything[3:5]
    assert reader.events(database, 9, 2) == []
    assert [e.sequence for e in reader.events(database, 5, 2, "reviewer")] == [7, 9]
    assert reader.events(database, 0, 100, "nobody") == []


def test_a_command_is_found_by_its_id(store: Store, database: str) -> None:
    assert reader.command(database, "c1") == command("c1")
    assert reader.command(database, "c2") is None


def test_no_reader_leaves_a_trace(store: Store, database: str) -> None:
    before = trace(database)
    reader.read(database)
    reader.events(database, 0, 1)
    reader.command(database, "c1")
    assert trace(database) == before
    assert sorted(before) == [".", "broker.sqlite3", "broker.sqlite3.lock"]


def test_a_transaction_that_has_not_ended_is_not_seen(store: Store, database: str, impatient: None) -> None:
    expected = store.load()
    store._db.execute("BEGIN IMMEDIATE; UPDATE meta SET value = '77' WHERE key = 'round'")
    before = trace(database)
    assert reader.read(database) == expected
    assert trace(database) == before
    # The moment of a commit in which the writer wants the file for itself.
    store._db.execute("COMMIT; BEGIN EXCLUSIVE")
    before = trace(database)
    for work in (reader.read, lambda d: reader.events(d, 0, 1), lambda d: reader.command(d, "c1")):
        assert refusal(lambda work=work: work(database)) == BUSY  # type: ignore[misc]
    assert trace(database) == before
    store._db.execute("COMMIT")
    assert reader.read(database).meta["round"] == "77"


def test_a_reader_waits_a_little(database: str) -> None:
    assert reader.BUSY_TIMEOUT_MS == 2000
    with reader._opened(database) as (db, _):
        assert db.pragma("busy_timeout") == 2000
        assert db.readonly("main")
        with pytest.raises(apsw.ReadOnlyError):
            db.execute("UPDATE meta SET value = ''")


@pytest.fixture
def dead(database: str, tmp_path: Path) -> str:
    """A copy of `database` whose writer died while half of its transaction was in the file."""
    writer = apsw.Connection(database)
    writer.execute("PRAGMA cache_size = 1; PRAGMA cache_spill = 1; BEGIN IMMEDIATE")
    for n in range(2, 400):
        writer.execute("INSERT INTO events (sequence, timestamp, event, status) VALUES (?, '', ?, '')", (n, "x" * 99))
    copy = tmp_path / "dead" / "broker.sqlite3"
    copy.parent.mkdir()
    for suffix in ("", "-journal"):
        Path(str(copy) + suffix).write_bytes(Path(database + suffix).read_bytes())
    writer.execute("ROLLBACK")
    writer.close()
    assert copy.read_bytes() != Path(database).read_bytes()
    return str(copy)


def contents(path: str) -> dict[str, tuple[bytes, int]]:
    # SQLite gives a journal that it opens to the owner of the database, even if it is his.
    return {name: (data, changed) for name, (data, changed, _) in trace(path).items()}


def test_what_a_killed_writer_left_is_read_as_it_was_before(
    database: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    before = contents(dead)
    assert "broker.sqlite3-journal" in before
    assert reader.read(dead) == reader.read(database)
    assert reader.command(dead, "c1") is None
    assert contents(dead) == before
    assert os.listdir(tmp_path / "runtime") == []
    Store.open(dead).close()
    assert reader.read(dead) == reader.read(database)


def test_a_writer_that_comes_up_meanwhile_is_waited_for(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def coming_up(path: str) -> tuple[int, int, int]:
        found = state(path)
        if path.endswith("-journal"):
            Store.open(dead).close()
        return found

    state = reader._state
    monkeypatch.setattr(reader, "_state", coming_up)
    assert refusal(lambda: reader.read(dead)) == BUSY
    monkeypatch.undo()
    assert reader.read(dead).events


def test_a_missing_database_is_unavailable(tmp_path: Path) -> None:
    assert refusal(lambda: reader.read(str(tmp_path / "db"))) == UNAVAILABLE
    assert refusal(lambda: reader.events(str(tmp_path / "no" / "db"), 0, 1)) == UNAVAILABLE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "foreign"])
def test_what_is_no_file_of_ours_is_refused(database: str, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "link":
        place.symlink_to(database)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif os.geteuid() == 0:
        place.write_bytes(b"")
        os.chown(place, 4711, 4711)
    else:
        place.symlink_to("/etc/passwd")
    assert refusal(lambda: reader.read(str(place))) == (contract.Code.ERROR, "Broker database path is unsafe")


def test_a_link_among_the_directories_is_followed(database: str, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(tmp_path / "run")
    assert reader.read(str(tmp_path / "way" / "broker.sqlite3")) == reader.read(database)


def sql(database: str, text: str) -> None:
    db = apsw.Connection(database)
    try:
        db.execute(text)
    finally:
        db.close()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda d: Path(d).write_bytes(b"no database " * 1000), "Broker database is damaged"),
        (lambda d: os.truncate(d, 5000), "Broker database is damaged"),
        (lambda d: os.truncate(d, 0), "Broker database schema is unavailable"),
        (lambda d: sql(d, "DELETE FROM meta"), "Broker database schema is unavailable"),
        (lambda d: sql(d, "DROP TABLE meta"), "Broker database schema is unavailable"),
        (lambda d: sql(d, "UPDATE meta SET value = '8.0'"), "Broker database schema is invalid"),
        (lambda d: sql(d, "UPDATE meta SET value = '\u0668'"), "Broker database schema is invalid"),
        (lambda d: sql(d, "UPDATE meta SET value = '0'"), "Broker database schema is unsupported"),
        (lambda d: sql(d, "UPDATE meta SET value = '11'"), "Broker database schema is unsupported"),
        (lambda d: sql(d, "DROP TABLE events"), "Broker database is damaged"),
        (lambda d: sql(d, "UPDATE events SET timestamp = CAST(x'ff' AS TEXT)"), "Broker database holds an invalid row"),
        (
            lambda d: sql(d, "INSERT INTO specialist_activations VALUES ('probe', 1, 'run', 'prob-x', 0, '')"),
            "Retained specialist activation is invalid",
        ),
    ],
)
def test_a_damaged_database_is_an_error(database: str, how: Callable[[str], None], text: str) -> None:
    how(database)
    before = trace(database)
    assert refusal(lambda: reader.read(database)) == (contract.Code.ERROR, text)
    assert trace(database) == before


READ = """
import sys
from agent_intercom.orchestration import reader
print(len(reader.read(sys.argv[1]).events))
"""


def test_a_directory_that_cannot_be_written_is_read(store: Store, database: str) -> None:
    # Root heeds modes once it has no capabilities.
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    os.chmod(database, 0o400)
    os.chmod(os.path.dirname(database), 0o500)
    before = trace(database)
    done = subprocess.run(
        [*powerless, sys.executable, "-c", READ, database],
        env={**os.environ, "PYTHONPATH": SERVICE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert trace(database) == before
    os.chmod(os.path.dirname(database), 0o700)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3\n")


def test_a_reader_needs_few_modules() -> None:
    """A status is asked for often, and what it imports is what it takes."""
    code = "import sys\nfrom agent_intercom.orchestration import reader\nprint(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SERVICE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"asyncio", "pydantic", "pyroute2", "subprocess", "urllib", "logging"} & set(done.stdout.split())


UNSAFE = (contract.Code.ERROR, "Broker database path is unsafe")


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_what_sqlite_would_open_beside_it_is_looked_at_first(database: str, kind: str, suffix: str) -> None:
    beside = Path(database + suffix)
    if kind == "fifo":
        os.mkfifo(beside)
    elif kind == "link":
        beside.symlink_to("/dev/zero")
    else:
        beside.mkdir()
    before = trace_of_names(database)
    assert refusal(lambda: reader.overview(database)) == UNSAFE
    assert trace_of_names(database) == before


def trace_of_names(database: str) -> set[str]:
    return set(os.listdir(Path(database).parent))


def test_a_journal_is_copied_up_to_a_size(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_COPY", 512)
    assert refusal(lambda: reader.read(dead)) == BUSY


def test_a_file_in_another_journal_mode_is_not_opened(database: str) -> None:
    content = bytearray(Path(database).read_bytes())
    content[18:20] = b"\x02\x02"
    Path(database).write_bytes(content)
    code, text = refusal(lambda: reader.overview(database))
    assert code == contract.Code.ERROR and "journal mode" in text
    assert trace_of_names(database) == {"broker.sqlite3"}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE meta SET value = CAST(x'ff31' AS TEXT) WHERE key = 'schema_version'",
        "UPDATE meta SET value = CAST(x'ff31' AS TEXT) WHERE key = 'round'",
        "UPDATE roles SET cost_total = 9e999",
        "UPDATE roles SET context_percent = -9e999",
    ],
)
def test_what_no_broker_can_have_written_is_damage(database: str, change: str) -> None:
    with contextlib.closing(apsw.Connection(database)) as db:
        db.execute(change)
    assert refusal(lambda: reader.overview(database))[0] == contract.Code.ERROR
