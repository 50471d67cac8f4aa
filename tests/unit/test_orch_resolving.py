# SPDX-License-Identifier: Apache-2.0
"""Whoever asks for what is not there, or cannot be read, is told the fault and the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.orchcli import Home
from tests.unit.orchruns import ID, make

READS = ("snapshot", "usage", "events", "command")
NEEDED = {"command": ("--role", "implementer", "--command-id", "a" * 32)}
SEEN = ("status", "events", "usage", "watch", "wait", "dashboard", "attach")


@pytest.fixture
def root(home: Home) -> Path:
    found = home.root / "home/.local/state/agent-intercom/runs"
    make(found, "s", project=home.project)
    return found


def read(operation: str, *words: str) -> tuple[str, ...]:
    return ("supervisor", operation, *words, *NEEDED.get(operation, ()))


def told(home: Home, *words: str) -> tuple[str, str]:
    """The code and the way out of a failure, which has one line that begins with the fault."""
    said = home.call(*words)
    assert said.code == 2 and said.out == "" and said.err.count("\n") == 1
    found = re.fullmatch(r"orchestrate: ([^`]+?)\. (.+\.)\n", said.err)
    assert found is not None, said.err
    if words[0] == "dashboard":
        return "", found[2]
    code, message = home.json(*words).error
    assert message == f"{found[1]}. {found[2]}"
    return code, found[2]


@pytest.mark.parametrize(
    "words", [*((name, "nobody") for name in SEEN), *(read(name, "nobody") for name in (*READS, "runs"))]
)
def test_an_unknown_session(home: Home, root: Path, words: tuple[str, ...]) -> None:
    assert "`orchestrate list --all`" in told(home, *words)[1]


@pytest.mark.parametrize("words", [(name,) for name in SEEN])
def test_nothing_is_named_and_nothing_lives(home: Home, words: tuple[str, ...]) -> None:
    assert "`orchestrate list --all`" in told(home, *words)[1]


@pytest.mark.parametrize(
    "words", [*((name, "s", "--run", "x") for name in SEEN[:6]), *(read(name, "s", "--run", "x") for name in READS)]
)
def test_an_unknown_run(home: Home, root: Path, words: tuple[str, ...]) -> None:
    code, hint = told(home, *words)
    assert code in {"orchestration_error", ""} and "`orchestrate supervisor runs s`" in hint
    assert home.json("supervisor", "runs", "s").data["runs"][0]["run_id"] == ID


@pytest.mark.parametrize("words", [("status", "no name"), ("events", ".."), ("watch", "a/b")])
def test_what_is_no_name(home: Home, root: Path, words: tuple[str, ...]) -> None:
    assert "`orchestrate list --all`" in told(home, *words)[1]


@pytest.mark.parametrize(
    "words", [("status", "s"), ("events", "s"), ("usage", "s"), *(read(name, "s") for name in READS)]
)
@pytest.mark.parametrize("content", [b"no database" * 99, None])
def test_a_database_that_cannot_be_read(home: Home, root: Path, words: tuple[str, ...], content: bytes | None) -> None:
    database = root / "s" / ID / "broker.sqlite3"
    if content is None:
        database.unlink()
    else:
        database.write_bytes(content)
    code, hint = told(home, *words)
    assert code == ("broker_not_ready" if content is None else "orchestration_error") and "`orchestrate " in hint


@pytest.mark.parametrize(
    "words",
    [
        ("events", "s", "--cursor", "x"),
        ("events", "s", "--role", "django"),
        ("command", "s", "--role", "implementer", "--command-id", "x"),
        ("command", "s", "--role", "django", "--command-id", "a" * 32),
    ],
)
def test_a_question_that_makes_no_sense(home: Home, root: Path, words: tuple[str, ...]) -> None:
    code, hint = told(home, "supervisor", *words)
    assert (code, hint) == ("invalid_arguments", f"See `orchestrate supervisor {words[0]} --help`.")


def test_an_unknown_command(home: Home, root: Path) -> None:
    code, hint = told(home, *read("command", "s"))
    assert code == "broker_command_not_found" and "`orchestrate events s`" in hint


@pytest.mark.parametrize("words", [("list",), ("list", "--all"), ("status",), ("watch",), ("supervisor", "sessions")])
def test_a_directory_of_runs_that_is_named_wrongly(
    home: Home, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", "relative")
    assert told(home, *words) == ("orchestration_error", "Correct it, or unset it.")


@pytest.mark.parametrize("words", [("status", "s"), ("events", "s"), ("usage", "s")])
def test_where_the_current_directory_is_gone(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    gone = home.root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert home.json(*words).data["session"] == "s"
    assert told(home, words[0])[0] == "orchestration_state_not_found"


def test_the_way_out_calls_the_program_as_the_person_does(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_CALLED_AS", "pi-tmux-agents")
    for words in (("status", "nobody"), ("attach", "nobody"), ("supervisor", "snapshot", "nobody")):
        assert "`pi-tmux-agents list --all`" in home.call(*words).err
    assert "`pi-tmux-agents watch --json`" in home.json("dashboard", "nobody").error[1]
