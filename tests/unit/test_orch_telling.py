# SPDX-License-Identifier: Apache-2.0
"""What a person is told of runs that hold what nobody should have written, cannot be read, or are in trouble."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from agent_intercom.cli.orchestrate import steps
from agent_intercom.orchestration import rootscan, rows, standing
from agent_intercom.orchestration.store import Store
from tests.unit.orchcli import Home
from tests.unit.orchruns import ID, SPECIALIST, WORKING, Alive, make

TEAM = ("implementer", "reviewer", "probe")
SESSION = "pi-project-agents"
EVIL = "x\x1b]0;OWNED\x07\nnext: rm -rf \u202e"
DEEP = "[" * 100_000


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


@pytest.fixture
def runs(home: Home) -> Runs:
    return Runs(home)


def change(directory: Path, *changes: rows.Change) -> None:
    store = Store.open(str(directory / "broker.sqlite3"))
    store.apply(list(changes))
    store.close()


def write(directory: Path, sql: str, *values: str) -> None:
    """Write what no broker would."""
    with closing(apsw.Connection(str(directory / "broker.sqlite3"))) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute(sql, values)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT OR REPLACE INTO meta VALUES ('workflow_state', ?)",
        "INSERT OR REPLACE INTO meta VALUES ('implementation_flow', ?)",
        "UPDATE roles SET role = ?, state = 'waiting' WHERE role = 'implementer'",
        "UPDATE roles SET state = ? WHERE role = 'implementer'",
        "UPDATE assignments SET kind = ?",
        "UPDATE assignments SET state = ?",
        "UPDATE reports SET kind = ?",
        "UPDATE reports SET verdict = ?",
        "UPDATE events SET event = ?",
        "UPDATE events SET status = ?",
        "UPDATE events SET role = ?",
        "UPDATE specialist_activations SET rule_id = ?",
        "UPDATE assignment_guardrails SET metric = ?",
        "UPDATE assignment_guardrails SET role = ?",
    ],
)
def test_what_a_database_holds_steers_no_terminal(home: Home, runs: Runs, sql: str) -> None:
    directory = runs.make()
    write(directory, sql, EVIL)
    with runs.alive(directory):
        for words in (["list"], ["list", "--all"], ["status"], ["events"], ["usage"], ["supervisor", "snapshot"]):
            said = home.call(*words, SESSION) if words[0] != "list" else home.call(*words)
            for line in (said.out + said.err).splitlines():
                assert line.isprintable() and not line.startswith("next: rm")


def test_no_command_is_suggested_for_a_role_that_nobody_has() -> None:
    found = [standing.Awaited(role, standing.MESSAGE, None) for role in ("reviewer", "rev;rm -rf ~", EVIL)]
    told = list(steps.steps(found, "s", "orchestrate", ready=False, down=(), new_id=""))
    assert [each["command"] for each in told] == ["orchestrate send s --role reviewer --message TEXT"]
    told = list(steps.steps(found[:1], "a b", "orchestrate", ready=True, down=(), new_id=""))
    assert all(" 'a b' " in each["command"] for each in told)


@pytest.mark.parametrize("key", ["forced_specialists", "continuation_policy", "worker_context_policy"])
def test_nesting_without_end_is_damage(home: Home, runs: Runs, key: str) -> None:
    write(runs.make("deep"), "INSERT OR REPLACE INTO meta VALUES (?, ?)", key, DEEP)
    runs.make("other")
    found = {each["session"]: each["dashboard"]["available"] for each in home.json("list", "--all").data["sessions"]}
    assert found == {"deep": False, "other": True}
    assert home.json("status", "deep").error[0] == "orchestration_error"


@pytest.mark.parametrize(("error", "issues"), [(PermissionError(13, "no"), ["shut"]), (FileNotFoundError(2, "no"), [])])
def test_a_session_that_cannot_be_read_hides_no_other(
    home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch, error: OSError, issues: list[str]
) -> None:
    runs.make("shut")
    runs.make("open")
    names = rootscan._names

    def refusing(directory: str) -> Any:
        if os.path.basename(directory) == "shut":
            raise error
        return names(directory)

    monkeypatch.setattr(rootscan, "_names", refusing)
    found = home.json("list", "--all").data["sessions"]
    assert [each["session"] for each in found if each["valid"]] == ["open"]
    assert [each["session"] for each in found if not each["valid"]] == issues
    assert all("session shut cannot be read: Permission denied" in each["error"]["message"] for each in found[1:])
    listed = home.json("supervisor", "sessions").data
    assert [each["session"] for each in listed["sessions"]] == ["open"]
    assert [each["session"] for each in listed["issues"]] == ["shut"]
    assert home.json("status", "open").envelope["success"]
    assert home.json("status", "shut").error[0] == "orchestration_error"
