# SPDX-License-Identifier: Apache-2.0
"""The invocation contract of `orchestrate` and `pi-tmux-agents` (orchestration spec, section 11.1)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from agent_intercom import __version__
from agent_intercom.cli.orchestrate import answer, main, parser, workerflags
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchcli import Home

COMMANDS = sorted(parser.COMMANDS)


def subparsers(of: argparse.ArgumentParser, *names: str) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command of a parser with its words, the nested ones too."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield (*names, name), sub
                yield from subparsers(sub, *names, name)


def test_the_words_for_the_envelope_are_the_commands() -> None:
    made = parser.build("orchestrate", "1")
    assert {words[0] for words, _ in subparsers(made)} == set(parser.COMMANDS)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_json_may_stand_anywhere(home: Home, position: int) -> None:
    words = ["list", "--all"]
    words.insert(position, "--json")
    assert home.call(*words).data["sessions"] == []


def test_json_behind_two_dashes_is_a_word(home: Home) -> None:
    said = home.call("status", "--", "--json")
    assert said.code == answer.REFUSED and said.out == ""
    assert said.err.startswith("orchestrate: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "unknown"),
        (["nonsense"], "unknown"),
        (["--nonsense", "list"], "unknown"),
        (["list", "--nonsense"], "list"),
        (["supervisor"], "supervisor"),
        (["supervisor", "nonsense"], "supervisor"),
        (["events", "x", "--limit", "101"], "events"),
    ],
)
def test_wrong_usage_names_the_command(home: Home, words: list[str], command: str) -> None:
    said = home.json(*words)
    assert said.code == 2 and said.envelope["command"] == command and said.error[0] == "invalid_arguments"


def test_version(home: Home) -> None:
    said = home.json("--version")
    assert said.envelope["command"] == "version" and said.data == {"version": __version__}
    said = home.call("--version")
    assert said.code == 0 and said.out == f"orchestrate {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["list", "--help"], ["start", "-h"], ["help"], ["help", "start"]])
def test_help_is_for_people(home: Home, words: list[str]) -> None:
    assert home.json(*words).error[0] == "interactive_help_only"
    said = home.call(*words)
    assert said.code == 0 and "usage: orchestrate" in said.out


@pytest.mark.parametrize("words", [["--help"], ["start", "--help"], ["--version"]])
@pytest.mark.parametrize("module", ["agent_intercom.cli", "agent_intercom.cli.orchestrate.main"])
def test_help_that_cannot_be_printed_is_one_line(module: str, words: list[str]) -> None:
    words = ["list" if word == "start" and module == "agent_intercom.cli" else word for word in words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "cannot be written" in done.stderr


@pytest.mark.parametrize(
    ("given", "done"),
    [
        (answer.Answer({}, ["started"]), True),
        (answer.Answer({"long": "x" * 100_000}, ["x" * 100_000]), True),
        (answer.Answer({}, ["stopped in part"], error=("stop_failed", "one is left")), False),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_that_a_command_was_carried_out_is_said_where_its_answer_cannot_be_printed(
    home: Home, given: answer.Answer, done: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_intercom.cli.orchestrate.looking.list_runs", lambda options: given)
    said = StringIO()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", said)
        assert main.main(["list", *(["--json"] if as_json else [])]) == 1
    assert ("No space left on device; the command was carried out all the same\n" in said.getvalue()) is done


@pytest.mark.parametrize("name", ["orchestrate", "pi-tmux-agents"])
def test_help_calls_the_program_by_its_name(home: Home, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(main.CALLED_AS, name)
    assert f"usage: {name} start" in home.call("start", "--help").out
    assert home.call("nonsense").err.startswith(f"{name}: ")


def test_another_name_is_not_taken_from_the_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(main.CALLED_AS, "\x1b[31mrm")
    assert home.call("nonsense").err.startswith("orchestrate: ")


@pytest.mark.parametrize("words", [("controller", "status"), ("controller", "stop", "--confirm"), ("role-registry",)])
def test_what_there_is_not_is_refused_with_the_way_out(home: Home, words: tuple[str, ...]) -> None:
    code, message = home.json(*words).error
    assert code == "orchestration_error" and "there " in message
    said = home.call(*words)
    assert said.code == 2 and said.err.count("\n") == 1


class Raising:
    """A command that ends as it is told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, options: argparse.Namespace) -> answer.Answer:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "exit_code", "text"),
    [
        (Refusal("broker_not_ready", "Broker state is busy"), "broker_not_ready", 2, "Broker state is busy"),
        (Refusal("run_unwritable", "it cannot be", "directory"), "orchestration_error", 2, "it cannot be (directory)"),
        (PermissionError(13, "secret", "/secret"), "local_runtime_error", 1, "Permission denied"),
        (KeyError("secret"), "internal_error", 1, "KeyError"),
        (answer.CommandFailure("session_collision", "it is there", "Go."), "session_collision", 2, "it is there. Go."),
    ],
)
def test_whatever_goes_wrong_is_one_envelope_without_the_text_of_an_exception(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, exit_code: int, text: str
) -> None:
    monkeypatch.setattr("agent_intercom.cli.orchestrate.looking.list_runs", Raising(error))
    said = home.json("list")
    assert said.code == exit_code and said.error[0] == code and text in said.error[1]
    assert "secret" not in said.out
    said = home.call("list")
    assert said.code == exit_code and said.err.count("\n") == 1 and "secret" not in said.err


def test_a_module_that_is_missing_is_told_with_its_package(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'apsw'", name="apsw")
    monkeypatch.setattr("agent_intercom.cli.orchestrate.looking.list_runs", Raising(missing))
    said = home.json("list")
    assert said.code == 1 and said.error[0] == "missing_prerequisite" and "python3-apsw" in said.error[1]
    monkeypatch.setattr("agent_intercom.cli.orchestrate.looking.list_runs", Raising(ModuleNotFoundError(name="nobody")))
    assert home.json("list").error[0] == "internal_error"


def test_a_fault_while_lines_are_made_is_no_fault_of_the_output(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[str]:
        yield "first"
        raise PermissionError(13, "secret")

    def command(options: argparse.Namespace) -> answer.Answer:
        return answer.Answer({}, lines())

    monkeypatch.setattr("agent_intercom.cli.orchestrate.looking.list_runs", command)
    said = home.call("list")
    assert said.code == 1 and said.out == "" and "Permission denied" in said.err and "output" not in said.err


def test_a_message_is_one_line_of_bounded_length() -> None:
    text = answer.bounded("a\nb\x1b[31m" + "x" * 1_000)
    assert text.startswith("a b [31mxxx") and len(text) == answer.MAX_MESSAGE and text.endswith("…")


def test_every_code_has_an_exit_status_of_the_contract() -> None:
    assert set(answer.EXITS.values()) == {1, 2}
    assert {code for code, status in answer.EXITS.items() if status == 1} == {
        "missing_prerequisite",
        "local_runtime_error",
        "internal_error",
        "timed_out",
        "run_over",
    }


def test_every_code_of_a_report_is_documented_with_its_exit_status() -> None:
    of_the_protocol = {"invalid_protocol", "forbidden", "conflict", "unauthorized", "broker_not_ready"}
    assert {*of_the_protocol, "broker_uncertain", "not_accepted_yet"} <= answer.REPORTING_EXITS.keys()
    assert set(answer.REPORTING_EXITS.values()) | {0} == set(workerflags.REPORTING)
    page = (Path(__file__).parents[2] / "docs/orchestrate.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for code, status in answer.REPORTING_EXITS.items():
        assert any(f"`{code}`" in row and row.startswith(f"| {status} |") for row in rows), code


@pytest.mark.parametrize("variable", ["AGENT_INTERCOM_RUNS_DIR", "XDG_STATE_HOME"])
def test_a_directory_that_no_database_can_be_in_is_refused_by_its_variable(
    home: Home, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, os.fsdecode(b"/tmp/caf\xe9"))
    for words in (["list", "--all"], ["start", "--task", "x", "--dry-run"], ["supervisor", "sessions"]):
        code, text = home.json(*words).error
        assert code == "orchestration_error" and variable in text and "UTF-8" in text
