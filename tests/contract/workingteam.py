# SPDX-License-Identifier: Apache-2.0
"""Workers of a run as processes that a test starts itself, each with a command of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

from tests.contract.orchpeer import eventually
from tests.contract.orchruns import Run
from tests.contract.orchwatching import environment


class Team(ABC):
    """Those of one run, with `orchestrate` on their path."""

    def __init__(self, run: Run) -> None:
        self.run = run
        programs = run.root / "bin"
        programs.mkdir()
        program = programs / "orchestrate"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m agent_intercom.cli.orchestrate.main "$@"\n')
        program.chmod(0o755)
        self.environment = environment(run)
        self.environment["PATH"] = f"{programs}:{os.environ['PATH']}"

    def text(self, name: str) -> str:
        """What a command has written."""
        return (self.run.project / name).read_text()

    def until(self, state: str, round_: int) -> None:
        """Wait until the run stands there."""
        eventually(lambda: self.run.workflow() == (state, round_))

    @abstractmethod
    def close(self) -> None:
        """End all that was started."""


_T = TypeVar("_T", bound=Team)


@contextlib.contextmanager
def working(kind: type[_T], **options: Any) -> Iterator[_T]:
    """A run, with a team that has nobody in it yet."""
    with Run(harness="external", **options) as run:
        workers = kind(run)
        try:
            yield workers
        finally:
            workers.close()


def reports(run: Run) -> list[tuple[object, ...]]:
    """Who has reported what, in order."""
    rows = run.rows("SELECT * FROM reports ORDER BY rowid")
    return [(row["role"], row["round"], row["kind"], row["verdict"]) for row in rows]
