# SPDX-License-Identifier: Apache-2.0
"""Commands that watch a run, on a terminal or in a pipe, and a run that is led by the test alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Self

import pytest

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.store import Store
from tests.contract.orchruns import Run
from tests.contract.peer import HANG
from tests.contract.ptyscreen import OnTerminal

FULL, COMPACT, NARROW = (110, 30), (80, 14), (40, 10)
NOW = "2026-08-01T12:00:00.000000+00:00"


def environment(run: Run, **more: str) -> dict[str, str]:
    """What a person has who started the run."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    directories = {"HOME": str(run.root), "XDG_RUNTIME_DIR": str(run.runtime)}
    return {
        **kept,
        **directories,
        "AGENT_INTERCOM_RUNS_DIR": str(run.root / "state"),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "TZ": "UTC",
        **more,
    }


def command(*arguments: str) -> list[str]:
    """`orchestrate` with arguments."""
    return [sys.executable, "-m", "agent_intercom.cli.orchestrate.main", *arguments]


def terminal(
    run: Run, *arguments: str, size: tuple[int, int] = FULL, variables: Mapping[str, str] | None = None
) -> OnTerminal:
    """A command on a terminal."""
    return OnTerminal(command(*arguments), environment(run, **(variables or {})), run.root, size)


def piped(run: Run, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """A command whose output is read by a program."""
    return subprocess.Popen(
        command(*arguments),
        env=environment(run, **more),
        cwd=run.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def line_with(process: subprocess.Popen[str], *parts: str) -> str:
    """The next line that has all the parts."""
    assert process.stdout is not None
    for line in process.stdout:
        if all(part in line for part in parts):
            return line
    raise AssertionError(f"it ended without {parts}")


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, and the rest of standard output and error."""
    assert process.stdout is not None and process.stderr is not None
    # `communicate` would lose what was read ahead of the lines that were asked for.
    out, err = process.stdout.read(), process.stderr.read()
    assert "Traceback" not in err, err
    return process.wait(HANG), out, err


def completed(run: Run, *arguments: str, **more: str) -> tuple[int, str, str]:
    with piped(run, *arguments, **more) as process:
        return finished(process)


class Quiet:
    """A run whose broker is the test: it listens and commits, and nobody who connects would be let in."""

    def __init__(self) -> None:
        self.run = Run()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.run.socket))
        self._listener.listen()
        self._listener.setblocking(False)
        self._store = Store.open(str(self.run.database))
        self._sequence = 1

    def commit(self, event: str, status: str, *changes: rows.Change) -> None:
        """One event, and what has changed with it."""
        self._sequence += 1
        row = rows.Event(sequence=self._sequence, timestamp=NOW, event=event, status=status)
        self._store.apply([*changes, row])

    def apply(self, changes: Sequence[rows.Change]) -> None:
        """Any rows, in one commit."""
        self._store.apply(changes)

    def state(self, name: str) -> None:
        """Another state of the workflow."""
        self.commit(f"workflow_{name}", name, rows.Meta(key="workflow_state", value=name))

    def nobody_called(self) -> None:
        """No connection is there, nor was one made and closed again."""
        with pytest.raises(BlockingIOError):
            self._listener.accept()

    def stop(self) -> None:
        """What systemd does: the address goes, and then the place of the run."""
        self._listener.close()
        self.run.socket.unlink()
        place = self.run.socket.with_suffix("")
        for file in place.iterdir():
            file.unlink()
        place.rmdir()

    def touch(self) -> None:
        """What the kernel tells of a commit, without one."""
        journal = self.run.database.with_name("broker.sqlite3-journal")
        journal.touch()
        journal.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.close()
        self._listener.close()
        self.run.remove()
