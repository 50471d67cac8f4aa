# SPDX-License-Identifier: Apache-2.0
"""File systems for SQLite that tell of every step that changes a file.

As a program, it kills itself at every such step of a store's work: `python -m tests.unit.orchfiles TEMPLATE DIRECTORY`
copies the database TEMPLATE to DIRECTORY/0, /1, ..., and a child opens copy n, applies two batches and is killed at
step n; the last child gets through. An empty TEMPLATE is created as a new run first. The output is the number of steps.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

import apsw

from agent_intercom.orchestration.store import Store
from tests.unit.orchrows import FIRST, SECOND, make

Step = tuple[Any, ...]
"""("create", name), ("delete", name), ("sync", name, file), ("truncate", name, file, size) or
("write", name, file, offset, data).

`file` numbers what was opened: a name that was deleted and made again is another file.
"""


class _File(apsw.VFSFile):
    def __init__(self, vfs: SteppingVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self.vfs = vfs
        self.number = next(vfs.numbers)
        full = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self.name = os.path.basename(full)
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        self.vfs.step(("write", self.name, self.number, offset, bytes(data)))
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self.vfs.step(("sync", self.name, self.number))
        super().xSync(flags)

    def xTruncate(self, size: int) -> None:
        self.vfs.step(("truncate", self.name, self.number, size))
        super().xTruncate(size)


class SteppingVFS(apsw.VFS):
    """The system's file system, which calls `step` before each step; what that raises is what SQLite gets."""

    def __init__(self, name: str, step: Callable[[Step], None]) -> None:
        self.step = step
        self.numbers = itertools.count()
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _File:
        full = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        if not os.path.exists(full):
            self.step(("create", os.path.basename(full)))
        return _File(self, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:
        self.step(("delete", os.path.basename(name)))
        super().xDelete(name, sync)


def _work(path: str, killed_at: int) -> None:
    steps = iter(range(killed_at))

    def step(_: Step) -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    vfs = SteppingVFS("killing", step)
    if os.path.getsize(path) == 0:
        make(path, vfs="killing")
    opened = Store.open(path, vfs="killing")
    opened.apply(FIRST)
    opened.apply(SECOND)
    opened.close()
    vfs.unregister()


def main(template: str, directory: str) -> None:
    for number in range(2000):
        path = str(shutil.copy(template, os.path.join(directory, str(number))))
        child = os.fork()
        if child == 0:
            _work(path, number)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            print(number)
            return
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"step {number}: {status}")
    raise SystemExit("no end")


if __name__ == "__main__":
    main(*sys.argv[1:])
