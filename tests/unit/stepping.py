# SPDX-License-Identifier: Apache-2.0
"""File systems for SQLite that tell of every step that changes a file, and processes that are killed at each step."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

ROOT = Path(__file__).resolve().parents[2]
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


def killing(name: str, killed_at: int) -> SteppingVFS:
    """A file system that kills this process before step `killed_at`."""
    steps = iter(range(killed_at))

    def step(_: Step) -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return SteppingVFS(name, step)


def kill_at_each(work: Callable[[int], None], most: int) -> int:
    """Have children do `work(n)` for n = 0, 1, ..., each killed at step n, until one gets through; which one."""
    for number in range(most):
        child = os.fork()
        if child == 0:
            work(number)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return number
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"step {number}: {status}")
    raise SystemExit("no end")


def steps_of(module: str, *arguments: str) -> int:
    """Run a module that prints what `kill_at_each` says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'service'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)
