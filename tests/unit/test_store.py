# SPDX-License-Identifier: Apache-2.0
"""The store: what is committed stays, and what the environment does wrong degrades it and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from agent_intercom.intercom import store as store_module
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.store import Store, StoreError, StoreLocked

WALL = 1_700_000_000_000
SERVICE = str(Path(store_module.__file__).parents[2])


def edge(message_id: str, *, sender: str = "asker", expires: int = WALL + 600_000, blocking: bool = True) -> AskEdge:
    return AskEdge(sender, message_id, "answerer", WALL, expires, blocking)


def ids(store: Store) -> list[str]:
    return sorted(e.message_id for e in store.edges())


def stored(directory: Path) -> list[str]:
    """What a fresh process would find."""
    store = Store.open(str(directory), wall=WALL)
    try:
        return ids(store)
    finally:
        store.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "share" / "state"


@pytest.fixture
def store(state: Path) -> Iterator[Store]:
    opened = Store.open(str(state), wall=WALL)
    yield opened
    opened.close()


def child(code: str, *arguments: str, wrap: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, which has the names of this module's imports."""
    prelude = (
        "import os, resource, signal, sys\n"
        "from agent_intercom.intercom.edge import AskEdge\n"
        "from agent_intercom.intercom.store import Store, StoreError, StoreLocked\n"
        f"WALL = {WALL}\n"
        "def edge(i, text=''): return AskEdge('asker', f'{i}{text}', 'answerer', WALL, WALL + 600_000, True)\n"
    )
    return subprocess.run(
        [*wrap, sys.executable, "-c", prelude + code, *arguments],
        env={**os.environ, "PYTHONPATH": SERVICE},
        capture_output=True,
        text=True,
        check=False,
    )


def test_committed_edges_are_found_again_deferred(store: Store, state: Path) -> None:
    assert store.degraded is None and store.edges() == []
    store.commit([edge("m1"), edge("m2")], [])
    store.commit([edge("m3")], [("asker", "m1"), ("asker", "never there")])
    store.close()
    again = Store.open(str(state), wall=WALL)
    assert sorted(again.edges(), key=lambda e: e.message_id) == [edge("m2", blocking=False), edge("m3", blocking=False)]
    again.close()


def test_expired_edges_are_dropped_at_open(store: Store, state: Path) -> None:
    store.commit([edge("now", expires=WALL), edge("later", expires=WALL + 1)], [])
    store.close()
    assert stored(state) == ["later"]
    assert stored(state) == ["later"]
    again = Store.open(str(state), wall=WALL + 1)
    assert again.edges() == []
    again.close()


def test_ids_are_kept_exactly(store: Store, state: Path) -> None:
    odd = ["", "a\0b", "\ud800", "\U0001f600", "A", "a", "x" * 100_000]
    store.commit([edge(i, sender=i) for i in odd], [])
    store.commit([], [("a", "a")])
    store.close()
    assert stored(state) == sorted(set(odd) - {"a"})


def test_a_put_replaces_and_wins_over_a_drop_of_the_same_key(store: Store, state: Path) -> None:
    store.commit([edge("m")], [])
    renewed = edge("m", expires=WALL + 700_000)
    store.commit([renewed], [("asker", "m")])
    store.close()
    again = Store.open(str(state), wall=WALL)
    assert [e.expires_at for e in again.edges()] == [WALL + 700_000]
    again.close()


def test_deferring_writes_nothing(store: Store, state: Path) -> None:
    store.commit([edge("m")], [])
    log = (state / "intercom.db-wal").read_bytes()
    store.commit([edge("m", blocking=False)], [])
    assert (state / "intercom.db-wal").read_bytes() == log


def test_replace_makes_the_table_equal(store: Store, state: Path) -> None:
    store.commit([edge("a"), edge("b"), edge("c")], [])
    store.replace([edge("b"), edge("d")])
    store.close()
    assert stored(state) == ["b", "d"]


def test_generations_only_grow(state: Path) -> None:
    seen = []
    for wall in (WALL, WALL, WALL - 5000, WALL + 9000):
        store = Store.open(str(state), wall=wall)
        seen.append(store.generation)
        store.close()
    assert seen == sorted(set(seen))


def test_what_is_made_is_private(store: Store, state: Path) -> None:
    store.commit([edge("m")], [])
    assert state.stat().st_mode & 0o777 == 0o700
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert {name.name: name.stat().st_mode & 0o777 for name in state.iterdir()} == {
        "intercom.lock": 0o600,
        "intercom.db": 0o600,
        "intercom.db-wal": 0o600,
    }


def test_the_database_is_what_it_says(store: Store, state: Path) -> None:
    store.close()
    database = apsw.Connection(str(state / "intercom.db"), flags=apsw.SQLITE_OPEN_READONLY)
    assert database.pragma("application_id") == 0x41496E74
    assert database.pragma("user_version") == 1
    assert database.pragma("journal_mode") == "wal"
    tables = database.execute("SELECT name, strict FROM pragma_table_list WHERE name NOT LIKE 'sqlite_%'")
    assert sorted(tables) == [("asks", 1), ("generation", 1)]
    database.close()


def test_the_connection_is_durable(store: Store) -> None:
    assert store._db is not None
    assert store._db.pragma("synchronous") == 2
    with pytest.raises(apsw.SQLError):
        store._db.execute('SELECT "no such column"')


def test_a_second_broker_is_refused(store: Store, state: Path) -> None:
    with pytest.raises(StoreLocked) as caught:
        Store.open(str(state), wall=WALL)
    assert caught.value.code == "STATE_LOCKED"
    other = child(
        "try: Store.open(sys.argv[1], wall=WALL)\nexcept StoreLocked: print('locked')",
        str(state),
    )
    assert other.stdout == "locked\n"
    store.commit([edge("m")], [])


def test_a_killed_broker_leaves_its_commits_and_no_lock(state: Path) -> None:
    killed = child(
        "store = Store.open(sys.argv[1], wall=WALL)\n"
        "for i in range(7): store.commit([edge(i)], [('asker', str(i - 3))])\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        str(state),
    )
    assert killed.returncode == -signal.SIGKILL
    assert stored(state) == ["4", "5", "6"]


def test_a_newer_database_is_read_and_left_alone(store: Store, state: Path) -> None:
    store.commit([edge("m")], [])
    assert store._db is not None
    store._db.execute("PRAGMA user_version = 2; ALTER TABLE asks ADD COLUMN mood TEXT")
    os.link(state / "intercom.db", state.parent / "before")
    files = {name: (state / name).read_bytes() for name in ("intercom.db", "intercom.db-wal")}
    store._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    store.close()
    newer = Store.open(str(state), wall=WALL)
    assert newer.degraded == "DATABASE_NEWER" and not newer.writable
    assert newer.edges() == [edge("m", blocking=False)]
    with pytest.raises(StoreError) as caught:
        newer.commit([edge("n")], [])
    assert caught.value.code == "DATABASE_NEWER"
    newer.close()
    assert {name: (state / name).read_bytes() for name in files} == files


def test_a_newer_database_without_known_columns_is_only_refused(store: Store, state: Path) -> None:
    assert store._db is not None
    store._db.execute("PRAGMA user_version = 9; DROP TABLE asks")
    store.close()
    newer = Store.open(str(state), wall=WALL)
    assert (newer.degraded, newer.edges()) == ("DATABASE_NEWER", [])
    newer.close()


def garbage(database: Path) -> None:
    database.write_bytes(os.urandom(8192))


def truncated(database: Path) -> None:
    os.truncate(database, database.stat().st_size - 4096)


def flipped(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[4096:8192] = bytes(4096)
    database.write_bytes(content)


def emptied_beside_its_log(database: Path) -> None:
    database.with_name("intercom.db-wal").write_bytes(b"something")
    os.truncate(database, 0)


def of_another_program(database: Path) -> None:
    database.unlink()
    other = apsw.Connection(str(database))
    other.execute("CREATE TABLE asks (note TEXT)")
    other.close()


def without_its_tables(database: Path) -> None:
    other = apsw.Connection(str(database))
    other.execute("DROP TABLE generation")
    other.close()


@pytest.mark.parametrize(
    "harm", [garbage, truncated, flipped, emptied_beside_its_log, of_another_program, without_its_tables]
)
def test_a_damaged_database_is_set_aside_loudly_and_a_fresh_one_works(store: Store, state: Path, harm: object) -> None:
    store.commit([edge("m")], [])
    before = store.generation
    store.close()
    harm(state / "intercom.db")  # type: ignore[operator]
    damaged = (state / "intercom.db").read_bytes()
    fresh = Store.open(str(state), wall=WALL + 1)
    assert fresh.degraded == "DATABASE_DAMAGED" and fresh.writable
    assert fresh.generation > before
    assert (state / f"intercom.db.damaged-{WALL + 1}").read_bytes() == damaged
    fresh.commit([edge("n")], [])
    assert fresh.degraded == "DATABASE_DAMAGED"
    fresh.close()
    assert stored(state) == ["n"]


def test_damaged_twice_in_one_millisecond_keeps_both(store: Store, state: Path) -> None:
    store.close()
    for _ in range(2):
        garbage(state / "intercom.db")
        Store.open(str(state), wall=WALL).close()
    assert len(list(state.glob("intercom.db.damaged-*"))) == 2


@pytest.mark.parametrize("name", ["intercom.db", "intercom.lock"])
def test_a_link_in_place_of_a_file_is_refused(store: Store, state: Path, tmp_path: Path, name: str) -> None:
    store.close()
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    (state / name).unlink()
    (state / name).symlink_to(target)
    refused = Store.open(str(state), wall=WALL)
    assert refused.degraded == "STATE_FOREIGN"
    refused.close()
    assert target.read_bytes() == b""


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused = Store.open(str(tmp_path / "link"), wall=WALL)
    assert refused.degraded == "STATE_FOREIGN"
    assert list((tmp_path / "real").iterdir()) == []
    through = Store.open(str(tmp_path / "link" / "below"), wall=WALL)
    assert through.degraded is None
    through.close()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    refused = Store.open(str(tmp_path / "state"), wall=WALL)
    assert refused.degraded == "STATE_FOREIGN"
    with pytest.raises(StoreError):
        refused.commit([edge("m")], [])


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    foreign = Path("/usr")  # root's, for everybody else
    if os.geteuid() == 0:
        foreign = tmp_path / "state"
        foreign.mkdir(mode=0o777)
        os.chown(foreign, 4711, 4711)
    before = sorted(os.listdir(foreign))
    assert Store.open(str(foreign), wall=WALL).degraded == "STATE_FOREIGN"
    assert sorted(os.listdir(foreign)) == before


def test_another_program_in_the_database_is_a_passing_fault(store: Store, state: Path) -> None:
    store.commit([edge("m")], [])
    store.close()
    other = apsw.Connection(str(state / "intercom.db"))
    other.execute("BEGIN IMMEDIATE; UPDATE generation SET value = value")
    busy = Store.open(str(state), wall=WALL)
    assert (busy.degraded, ids(busy)) == ("STATE_BUSY", ["m"])
    with pytest.raises(StoreError):
        busy.commit([edge("n")], [])
    other.close()
    busy.commit([edge("n")], [])
    assert (busy.degraded, ids(busy)) == (None, ["m", "n"])
    busy.close()


# A file system that fails on purpose


class FaultyFile(apsw.VFSFile):
    def __init__(self, vfs: FaultyVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self.faulty = vfs
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self.faulty.step()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self.faulty.step()
        super().xSync(flags)


class FaultyVFS(apsw.VFS):
    """The system's file system, of which the n-th writing call and all after it fail while `budget` is set."""

    def __init__(self, name: str, error: type[apsw.Error]) -> None:
        self.budget: int | None = None
        self.error = error
        super().__init__(name, "")

    def step(self) -> None:
        if self.budget is not None:
            if self.budget == 0:
                raise self.error
            self.budget -= 1

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> FaultyFile:
        return FaultyFile(self, name, flags)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "code"), [(apsw.FullError, "STATE_FULL"), (apsw.IOError, "STATE_IO")])
def test_a_fault_at_any_step_leaves_the_database_as_it_was(
    tmp_path: Path, error: type[apsw.Error], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # APSW reports what a VFS raises here as well, besides turning it into SQLite's error.
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    vfs = FaultyVFS(f"faulty-{code}", error)
    failures = 0
    for budget in range(40):
        directory = tmp_path / str(budget)
        store = Store.open(str(directory), wall=WALL, vfs=f"faulty-{code}")
        store.commit([edge("kept")], [])
        vfs.budget = budget
        try:
            store.commit([edge(f"n{i}", sender="x" * 3000) for i in range(4)], [("asker", "kept")])
            expected = ["n0", "n1", "n2", "n3"]
            assert store.degraded is None and not store.stale
        except StoreError as caught:
            failures += 1
            expected = ["kept"]
            assert caught.code == store.degraded == code and store.stale
        vfs.budget = None
        assert ids(store) == expected
        store.replace([edge("last")])
        assert store.degraded is None and not store.stale
        store.close()
        assert stored(directory) == ["last"]
        if expected != ["kept"]:
            break
    assert failures > 2
    assert expected != ["kept"]
    vfs.unregister()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("really", [True, False])
def test_damage_while_running_is_looked_into_with_the_next_write(
    state: Path, really: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    vfs = FaultyVFS("faulty-damage", apsw.CorruptError)
    store = Store.open(str(state), wall=WALL, vfs="faulty-damage")
    store.commit([edge("a"), edge("b")], [])
    vfs.budget = 0
    with pytest.raises(StoreError) as caught:
        store.commit([edge("refused")], [])
    assert caught.value.code == store.degraded == "DATABASE_DAMAGED"
    vfs.budget = None
    if really:
        garbage(state / "intercom.db")
        (state / "intercom.db-wal").unlink()
    store.replace([edge("a"), edge("c")])
    assert store.degraded == ("DATABASE_DAMAGED" if really else None)
    assert (store.writable, store.stale) == (True, False)
    store.close()
    vfs.unregister()
    assert stored(state) == ["a", "c"]


LIMITED = """
store = Store.open(sys.argv[1], wall=WALL)
store.commit([edge('kept')], [])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
stored = []
try:
    for i in range(1000):
        store.commit([edge(i, 'x' * 200)], [])
        stored.append(str(i) + 'x' * 200)
except StoreError as error:
    assert error.code == store.degraded == 'STATE_FULL', error.code
    assert store.stale
else:
    raise SystemExit('never full')
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.commit([edge('after')], [])
assert store.degraded is None
assert sorted(e.message_id for e in store.edges()) == sorted(['kept', 'after', *stored])
"""


def test_a_limit_on_the_file_size_is_a_full_disk(state: Path) -> None:
    ran = child(LIMITED, str(state))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {"kept", "after"} <= set(stored(state))


NAMESPACE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
namespaces = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="no private mount namespace here",
)


def mounted(setup: str) -> tuple[str, ...]:
    """A command prefix: run `setup` in a private mount namespace (`$0` is the state's parent), then the command."""
    return (*NAMESPACE, "sh", "-ec", f'd=$1; shift; {setup}; exec "$@"', "sh")


FULL = """
def fill():
    with open(sys.argv[1] + '/ballast', 'ab', buffering=0) as ballast:
        while True:
            try: ballast.write(bytes(1024))
            except OSError: return
os.makedirs(sys.argv[1], mode=0o700)
fill()
store = Store.open(sys.argv[1], wall=WALL)
assert store.degraded == 'STATE_FULL' and store.edges() == [], store.degraded
first = store.generation
assert first > 0
os.unlink(sys.argv[1] + '/ballast')
store.commit([edge('a')], [])
assert store.degraded is None and store.generation == first
fill()
try:
    for i in range(1000): store.commit([edge(i, 'x' * 200)], [])
except StoreError as error:
    assert error.code == 'STATE_FULL'
    assert str(sys.argv[1]) not in str(error)
else:
    raise SystemExit('never full')
kept = sorted(e.message_id for e in store.edges())
store.close()
fill()
again = Store.open(sys.argv[1], wall=WALL)
assert again.degraded == 'STATE_FULL', again.degraded
assert sorted(e.message_id for e in again.edges()) == kept
assert again.generation > first or again.generation == WALL
os.unlink(sys.argv[1] + '/ballast')
again.replace(again.edges() + [edge('b')])
assert again.degraded is None and not again.stale
again.close()
last = Store.open(sys.argv[1], wall=WALL)
assert last.degraded is None and sorted(e.message_id for e in last.edges()) == sorted(kept + ['b'])
"""


@namespaces
def test_a_full_disk_degrades_and_passes(tmp_path: Path) -> None:
    wrap = (*mounted("mount -t tmpfs -o size=128k,mode=700 tmpfs $d"), str(tmp_path))
    ran = child(FULL, str(tmp_path / "state"), wrap=wrap)
    assert (ran.returncode, ran.stderr) == (0, "")


READ_ONLY = """
store = Store.open(sys.argv[1], wall=WALL)
assert store.degraded == 'STATE_READ_ONLY', store.degraded
print(*sorted(e.message_id for e in store.edges()))
try: store.commit([edge('c')], [])
except StoreError as error: print(error.code)
store.close()
"""


@namespaces
def test_a_read_only_directory_is_still_read_log_and_all(store: Store, state: Path) -> None:
    store.commit([edge("a"), edge("b")], [])
    assert (state / "intercom.db-wal").stat().st_size > 0
    wrap = (*mounted("mount --bind $d $d && mount -o remount,bind,ro $d"), str(state))
    ran = child(READ_ONLY, str(state), wrap=wrap)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "a b\nSTATE_READ_ONLY\n")


@namespaces
def test_a_read_only_place_without_a_directory_is_degraded(tmp_path: Path) -> None:
    wrap = (*mounted("mount -t tmpfs -o ro tmpfs $d"), str(tmp_path))
    ran = child(READ_ONLY, str(tmp_path / "share" / "state"), wrap=wrap)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "\nSTATE_READ_ONLY\n")


def test_a_directory_without_write_permission_is_degraded(store: Store, state: Path) -> None:
    store.commit([edge("a")], [])
    store.close()
    (state / "intercom.lock").unlink()
    state.chmod(0o500)
    # Root heeds modes once it has no capabilities.
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    ran = child(READ_ONLY, str(state), wrap=powerless)
    state.chmod(0o700)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "a\nSTATE_READ_ONLY\n")
