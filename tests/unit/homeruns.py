# SPDX-License-Identifier: Apache-2.0
"""Runs in the home of a person who calls `orchestrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.store import Store
from tests.unit.orchcli import Home
from tests.unit.orchruns import ID, SPECIALIST, WORKING, Alive, make

TEAM = ("implementer", "reviewer", "probe")
SESSION = "pi-project-agents"


class Runs:
    """Runs in a home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.root = home.root / "home/.local/state/agent-intercom/runs"

    def make(self, session: str = SESSION, run_id: str = ID, *changes: rows.Change, **options: Any) -> Path:
        given: dict[str, Any] = {"project": self.home.project, "roles": TEAM}
        return make(self.root, session, run_id, changes=[*WORKING, *SPECIALIST, *changes], **given | options)

    def alive(self, directory: Path, unit: str = "u1") -> Alive:
        return Alive(self.home.runtime, unit, directory)


def change(directory: Path, *changes: rows.Change) -> None:
    """Write rows as a broker does."""
    store = Store.open(str(directory / "broker.sqlite3"))
    store.apply(list(changes))
    store.close()
