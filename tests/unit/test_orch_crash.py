# SPDX-License-Identifier: Apache-2.0
"""A run's database when its file system fails, its broker is killed, or the machine loses power, at every step."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.store import Store, StoreError
from tests.unit.orchrows import FIRST, SECOND, dump, make
from tests.unit.stepping import Step, SteppingVFS, steps_of
from tests.unit.test_orch_migrations import of_version

DATABASE = "db"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of syncs, of which none is for real."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def template(kind: str, path: Path) -> str:
    """A database to begin with: none yet, one of this version, or one that has to be migrated."""
    if kind == "new":
        path.touch(mode=0o600)
    elif kind == "fresh":
        make(path)
    else:
        of_version(path, 1)
    return str(path)


def stages(kind: str, start: str, path: Path) -> list[object]:
    """What the database may hold after a crash, in the order in which a broker gets there."""
    found: list[object] = [dump(start)]
    work = str(shutil.copy(start, path))
    if kind == "new":
        make(work)
        found.append(dump(work))
    store = Store.open(work)
    if kind == "old":
        found.append(dump(work))
    for batch in (FIRST, SECOND):
        store.apply(batch)
        found.append(dump(work))
    store.close()
    return found


def recovered(path: str, possible: list[object]) -> int:
    """The stage that `path` is at, having been opened and checked as SQLite does it."""
    db = apsw.Connection(path)
    try:
        assert db.pragma("integrity_check") == "ok"
    finally:
        db.close()
    return possible.index(dump(path))


def catch_up(path: str) -> None:
    """What a successor does that cannot know how far its predecessor got."""
    if not dump(path):
        make(path)
    store = Store.open(path)
    store.apply(FIRST)
    store.apply(SECOND)
    store.close()


# Faults


class Fault:
    """Fails the n-th step and all after it while `budget` is set."""

    def __init__(self, error: type[apsw.Error]) -> None:
        self.budget: int | None = None
        self.error = error

    def __call__(self, step: Step) -> None:
        if self.budget is not None:
            if self.budget == 0:
                raise self.error
            self.budget -= 1


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """APSW reports what a VFS raises here as well, besides turning it into SQLite's error."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "code"), [(apsw.FullError, "STATE_FULL"), (apsw.IOError, "STATE_IO")])
def test_a_fault_at_any_step_leaves_the_database_as_it_was(
    place: Path, error: type[apsw.Error], code: str, quiet: None
) -> None:
    fault = Fault(error)
    vfs = SteppingVFS("faulty", fault)
    start = template("fresh", place / "template")
    possible = stages("fresh", start, place / "stages")
    codes = []
    for budget in range(1000):
        path = str(shutil.copy(start, place / DATABASE))
        store = Store.open(path, vfs="faulty")
        fault.budget = budget
        try:
            store.apply(FIRST)
        except StoreError as caught:
            codes.append(caught.code)
        fault.budget = None
        failed = len(codes) > budget
        assert store.load().assignments == ([] if failed else FIRST[1:2])
        assert dump(path) == possible[0 if failed else 1]
        store.apply(FIRST)
        store.apply(SECOND)
        store.close()
        assert dump(path) == possible[2]
        if not failed:
            break
    assert not failed
    assert len(codes) > 10
    # A step that fails may make the next one fail otherwise, as when SQLite cannot take back what it wrote.
    assert code in codes
    assert set(codes) <= {code, "STATE_IO"}
    vfs.unregister()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["new", "old"])
def test_a_full_disk_at_any_step_of_a_start_is_a_start_later(place: Path, kind: str, quiet: None) -> None:
    fault = Fault(apsw.FullError)
    vfs = SteppingVFS("full", fault)
    start = template(kind, place / "template")
    possible = stages(kind, start, place / "stages")
    for budget in range(1000):
        path = str(shutil.copy(start, place / DATABASE))
        fault.budget = budget
        try:
            if kind == "new":
                make(path, vfs="full")
            Store.open(path, vfs="full").close()
            failed = False
        except StoreError as caught:
            failed = True
            assert caught.code in {"STATE_FULL", "STATE_IO"}
        fault.budget = None
        assert recovered(path, possible) == (0 if failed else 1)
        catch_up(path)
        assert dump(path) == possible[-1]
        if not failed:
            break
    assert not failed
    assert budget > 10
    vfs.unregister()


# Kills


@pytest.mark.parametrize("kind", ["new", "fresh", "old"])
def test_a_broker_killed_at_any_step_is_before_or_after(place: Path, kind: str) -> None:
    start = template(kind, place / "template")
    possible = stages(kind, start, place / "stages")
    (place / "killed").mkdir()
    steps = steps_of("tests.unit.orchfiles", start, str(place / "killed"))
    assert steps > 20
    seen = []
    for number in range(steps + 1):
        path = str(place / "killed" / str(number))
        seen.append(recovered(path, possible))
        catch_up(path)
        assert dump(path) == possible[-1]
    assert seen == sorted(seen)
    assert set(seen) == set(range(len(possible)))


# Power


class Disk:
    """What may be left of the steps in `log` when the power goes after them.

    Only what was synced is there for sure; of each later write any sectors may be there, and of the names that were
    made or removed any number, in order. Making a file lasts with the file's first sync, for SQLite syncs the directory
    then; removing one lasts with the next file made (`synchronous=FULL` does not sync the directory for it).
    """

    SECTOR = 512

    def __init__(self, content: bytes, log: list[Step], choice: random.Random | bool) -> None:
        self._choice = choice
        synced = {step[2]: index for index, step in enumerate(log) if step[0] == "sync"}
        opened: dict[int, int] = {}
        names: list[tuple[int, str, int | None]] = []
        files: dict[int, bytearray] = {}
        incarnation = {DATABASE: 0}
        for index, step in enumerate(log):
            if step[0] == "create":
                incarnation[step[1]] = index + 1
                names.append((index, step[1], index + 1))
            elif step[0] == "delete":
                names.append((index, step[1], None))
            else:
                file = opened.setdefault(step[2], incarnation[step[1]])
                files.setdefault(file, bytearray(content if file == 0 else b""))
                if step[0] != "sync":
                    self._change(files[file], step, index < synced.get(step[2], -1))
        lasting = max(
            (index for index, _, file in names if any(opened[f] == file for f in synced if f in opened)), default=-1
        )
        present: dict[str, int] = {DATABASE: 0}
        self.forgot = False
        for index, name, file in names:
            if index > lasting and not self._luck():
                self.forgot = True
                break
            if file is None:
                present.pop(name, None)
            else:
                present[name] = file
        files.setdefault(0, bytearray(content))
        self.files = {name: bytes(files.get(file, b"")) for name, file in present.items()}

    def _luck(self) -> bool:
        return self._choice if isinstance(self._choice, bool) else self._choice.random() < 0.5

    def _change(self, file: bytearray, step: Step, lasts: bool) -> None:
        if step[0] == "truncate":
            if lasts or self._luck():
                del file[step[3] :]
            return
        offset, data = step[3], step[4]
        for start in range(0, len(data), self.SECTOR):
            if lasts or self._luck():
                end = offset + min(start + self.SECTOR, len(data))
                if len(file) < end:
                    file.extend(bytes(end - len(file)))
                file[offset + start : end] = data[start : start + self.SECTOR]


def choices(number: int) -> Iterator[random.Random | bool]:
    yield False
    yield True
    for attempt in range(2):
        yield random.Random(1000 * number + attempt)


@pytest.mark.parametrize("kind", ["new", "fresh", "old"])
def test_a_machine_that_loses_power_at_any_step_has_before_or_after(place: Path, kind: str) -> None:
    start = template(kind, place / "template")
    possible = stages(kind, start, place / "stages")
    content = Path(start).read_bytes()
    log: list[Step] = []
    returned: list[int] = []
    vfs = SteppingVFS("recorded", log.append)
    live = str(shutil.copy(start, place / DATABASE))
    if kind == "new":
        make(live, vfs="recorded")
        returned.append(len(log))
    store = Store.open(live, vfs="recorded")
    if kind == "old":
        returned.append(len(log))
    for batch in (FIRST, SECOND):
        store.apply(batch)
        returned.append(len(log))
    store.close()
    vfs.unregister()
    assert len(returned) == len(possible) - 1
    seen = set()
    for number in range(len(log) + 1):
        reached = sum(number >= end for end in returned)
        for choice in choices(number):
            disk = Disk(content, log[:number], choice)
            after = place / "after"
            after.mkdir()
            for name, data in disk.files.items():
                (after / name).write_bytes(data)
            path = str(after / DATABASE)
            stage = recovered(path, possible)
            seen.add(stage)
            # The one that is under way may be there already; the last may be taken back by a journal that reappears.
            assert reached - disk.forgot <= stage <= reached + 1
            catch_up(path)
            assert dump(path) == possible[-1]
            shutil.rmtree(after)
    assert seen == set(range(len(possible)))


def test_the_disk_forgets_what_was_not_synced() -> None:
    log: list[Step] = [
        ("create", "j"),
        ("write", "j", 1, 0, b"x" * 1024),
        ("write", DATABASE, 2, 512, b"y" * 512),
        ("sync", "j", 1),
        ("write", "j", 1, 0, b"z"),
        ("delete", "j"),
    ]
    none, everything = (Disk(b"-" * 1024, log, choice) for choice in (False, True))
    assert none.files == {DATABASE: b"-" * 1024, "j": b"x" * 1024}
    assert everything.files == {DATABASE: b"-" * 512 + b"y" * 512}
    assert (none.forgot, everything.forgot) == (True, False)
    assert Disk(b"", log[:2], False).files == {DATABASE: b""}
    parts = {len(set(Disk(b"", log[:2], random.Random(n)).files.get("j", b""))) for n in range(50)}
    assert parts == {0, 1, 2}


def test_every_batch_names_final_rows_and_others() -> None:
    kinds = {type(change) for change in (*FIRST, *SECOND)}
    assert kinds >= {rows.Role, rows.Assignment, rows.Report, rows.Command, rows.Event, rows.Meta}
