# SPDX-License-Identifier: Apache-2.0
"""A run's database when its file system fails, its broker is killed, or the machine loses power, at every step."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import apsw
import pytest

from agent_intercom.orchestration.store import Store, StoreError
from tests.unit.orchrows import EVERY_KIND, dump, make


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

    def xTruncate(self, size: int) -> None:
        self.faulty.step()
        super().xTruncate(size)


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

    def xDelete(self, name: str, sync: bool) -> None:
        self.step()
        super().xDelete(name, sync)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "code"), [(apsw.FullError, "STATE_FULL"), (apsw.IOError, "STATE_IO")])
def test_a_fault_at_any_step_leaves_the_database_as_it_was(
    tmp_path: Path, error: type[apsw.Error], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # APSW reports what a VFS raises here as well, besides turning it into SQLite's error.
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    vfs = FaultyVFS(f"orch-{code}", error)
    failures = 0
    template = make(tmp_path / "template")
    before = dump(template)
    for budget in range(400):
        path = str(shutil.copy(template, tmp_path / "db"))
        store = Store.open(path, vfs=f"orch-{code}")
        vfs.budget = budget
        try:
            store.apply(EVERY_KIND)
            failed = False
        except StoreError as caught:
            failed = True
            failures += 1
            # A failed step may make the next one fail otherwise, as when SQLite cannot take back what it wrote.
            assert caught.code in {code, "STATE_IO"}
        vfs.budget = None
        if failed:
            assert store.load().assignments == []
            assert dump(path) == before
        store.apply(EVERY_KIND)
        assert [a.id for a in store.load().assignments] == ["a1", "a2"]
        store.close()
        if not failed:
            break
    assert failures > 10
    assert not failed
    vfs.unregister()
