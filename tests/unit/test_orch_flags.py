# SPDX-License-Identifier: Apache-2.0
"""Every flag and word of every command: what it says, what it takes and what it does not (section 11.2).

What a flag does is tested where its command is; here nothing that `--help` shows is left out.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import parser
from agent_intercom.cli.orchestrate.answer import CommandFailure
from tests.unit.test_orch_main import subparsers

ID = "0123456789abcdef" * 2
ROLE = ("--role", "reviewer")

SESSION_AND_RUN: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "SESSION": (("demo",), "session", "demo"),
    "--run": (("--run", "r1"), "run", "r1"),
}
PAGE: dict[str, tuple[tuple[str, ...], str, Any]] = {"--limit": (("--limit", "7"), "limit", 7)}
YES: dict[str, tuple[tuple[str, ...], str, Any]] = {"--yes": (("--yes",), "yes", True)}
COMMAND_ID: dict[str, tuple[tuple[str, ...], str, Any]] = {"--command-id": (("--command-id", ID), "command_id", ID)}
ONE_ROLE: dict[str, tuple[tuple[str, ...], str, Any]] = {"--role": (ROLE, "role", "reviewer")}
ROLES: dict[str, tuple[tuple[str, ...], str, Any]] = {"--role": (ROLE, "role", ["reviewer"])}
PROJECT: dict[str, tuple[tuple[str, ...], str, Any]] = {"--project": (("--project", "d"), "project", "d")}
SKIP: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "--skip-model-check": (("--skip-model-check",), "skip_model_check", True)
}

TAKEN: dict[str, tuple[tuple[str, ...], dict[str, tuple[tuple[str, ...], str, Any]]]] = {
    "list": ((), {"--all": (("--all",), "all", True)}),
    "status": ((), SESSION_AND_RUN),
    "watch": ((), SESSION_AND_RUN),
    "wait": (
        (),
        {
            **SESSION_AND_RUN,
            "--until": (("--until", "end"), "until", "end"),
            "--timeout": (("--timeout", "2h"), "timeout", 7_200_000),
        },
    ),
    "dashboard": ((), SESSION_AND_RUN),
    "attach": ((), {"SESSION": SESSION_AND_RUN["SESSION"]}),
    "events": (
        (),
        {
            **SESSION_AND_RUN,
            **ROLES,
            **PAGE,
            "--after": (("--after", "9"), "after", 9),
            "--last": (("--last", "9"), "last", 9),
        },
    ),
    "usage": ((), {**SESSION_AND_RUN, **PAGE}),
    "send": (
        ("demo", *ROLE, "--message", "x"),
        {
            **SESSION_AND_RUN,
            **ONE_ROLE,
            **COMMAND_ID,
            "--message": ((), "message", "x"),
            "--message-file": ((), "message_file", None),
            "--delivery": (("--delivery", "follow-up"), "delivery", "follow-up"),
        },
    ),
    "abort": (("demo", *ROLE), {**SESSION_AND_RUN, **ONE_ROLE, **COMMAND_ID}),
    "restart": (
        ("demo", *ROLE),
        {
            **SESSION_AND_RUN,
            **ONE_ROLE,
            **YES,
            **SKIP,
            "--provider": (("--provider", "p"), "provider", "p"),
            "--model": (("--model", "m"), "model", "m"),
            "--thinking": (("--thinking", "low"), "thinking", "low"),
        },
    ),
    "continue": (("demo",), {**SESSION_AND_RUN, **COMMAND_ID, **YES}),
    "redeliver": (("demo", *ROLE), {**SESSION_AND_RUN, **ONE_ROLE, **COMMAND_ID, **YES}),
    "stop": ((), {**SESSION_AND_RUN, **YES}),
    "doctor": ((), {**PROJECT, **SKIP}),
    "prune": (
        (),
        {
            **YES,
            "--session": (("--session", "demo"), "session", "demo"),
            "--older-than": (("--older-than", "3"), "older_than", 3),
            "--keep": (("--keep", "5"), "keep", 5),
            "--original": (("--original",), "original", True),
        },
    ),
    "config": (("show",), {**PROJECT, "check|show": ((), "action", "show")}),
    "report": (
        (),
        {
            "--file": (("--file", "r"), "file", "r"),
            "--summary": (("--summary", "Done."), "summary", "Done."),
            "--verdict": (("--verdict", "approve"), "verdict", "approve"),
            "--usage-file": (("--usage-file", "u"), "usage_file", "u"),
        },
    ),
    "progress": (
        ("--phase", "tool"),
        {
            "--phase": (("--phase", "tool"), "phase", "tool"),
            "--usage-file": (("--usage-file", "u"), "usage_file", "u"),
        },
    ),
    "controller": ((), {"…": (("status",), "rest", ["status"])}),
    "role-registry": ((), {"…": ((), "rest", [])}),
    "supervisor capabilities": ((), {}),
    "supervisor sessions": ((), {}),
    "supervisor runs": (("demo",), {"SESSION": SESSION_AND_RUN["SESSION"], **PAGE}),
    "supervisor snapshot": (("demo",), SESSION_AND_RUN),
    "supervisor usage": (("demo",), {**SESSION_AND_RUN, **PAGE}),
    "supervisor events": (
        ("demo",),
        {
            **SESSION_AND_RUN,
            **ROLES,
            **PAGE,
            "--cursor": (("--cursor", "reviewer=3"), "cursor", ["reviewer=3"]),
        },
    ),
    "supervisor command": (
        ("demo", *ROLE, "--command-id", ID),
        {**SESSION_AND_RUN, **ONE_ROLE, **COMMAND_ID},
    ),
}
"""Command to: the words that it needs, and for each flag more words, where they show and as what."""

CASES = [(command, flag) for command, (_, flags) in TAKEN.items() for flag in flags]
WITH_VALUES = [(command, flag) for command, flag in CASES if len(TAKEN[command][1][flag][0]) == 2]


def made() -> parser.Parser:
    return parser.build("orchestrate", "1")


def needed(command: str, flag: str) -> list[str]:
    """The words that a command needs, without a session where that is what is tried."""
    words = list(TAKEN[command][0])
    return words[1:] if flag == "SESSION" and words[:1] == ["demo"] else words


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_flag_says_what_it_says(command: str, flag: str) -> None:
    more, name, expected = TAKEN[command][1][flag]
    options = made().parse_args([*command.split(), *needed(command, flag), *more])
    assert getattr(options, name) == expected


@pytest.mark.parametrize(("command", "flag"), WITH_VALUES)
def test_a_flag_that_takes_a_value_is_refused_without_one(command: str, flag: str) -> None:
    with pytest.raises(CommandFailure) as failed:
        made().parse_args([*command.split(), *needed(command, flag), flag])
    assert failed.value.code == "invalid_arguments" and flag in failed.value.text
    assert f"orchestrate {command} --help" in failed.value.hint


BAD_VALUES = {
    "--limit": ("0", "101", "-1", "x", "1.5", "٣"),
    "--after": ("-1", "x", "9" * 30),
    "--older-than": ("-1", "x"),
    "--keep": ("-1", "x"),
    "--delivery": ("now", ""),
    "--thinking": ("deep", ""),
}


@pytest.mark.parametrize(("command", "flag"), [case for case in CASES if case[1] in BAD_VALUES])
def test_a_bad_value_is_refused_by_the_name_of_its_flag(command: str, flag: str) -> None:
    for value in BAD_VALUES[flag]:
        with pytest.raises(CommandFailure) as failed:
            made().parse_args([*command.split(), *needed(command, flag), f"{flag}={value}"])
        assert failed.value.code == "invalid_arguments" and flag in failed.value.text


def shown(sub: argparse.ArgumentParser) -> set[str]:
    """What `--help` shows of a command: its long options and the names of its words."""
    names: set[str] = set()
    for action in sub._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            names.update(word for word in action.option_strings if word.startswith("--"))
        else:
            names.add(str(action.metavar))
    return names - {"--help", "--json"}


def test_nothing_that_help_shows_is_left_out() -> None:
    found = {" ".join(words): shown(sub) for words, sub in subparsers(made()) if words[0] != "worker"}
    del found["start"], found["supervisor"]
    assert found == {command: set(flags) for command, (_, flags) in TAKEN.items()}


def test_every_command_shows_an_example_that_it_takes() -> None:
    for words, sub in subparsers(made()):
        if len(words) > 1:
            continue
        assert sub.epilog is not None
        example = sub.epilog.splitlines()[1].strip()
        assert example.startswith(f"orchestrate {words[0]}")
        made().parse_args(shlex.split(example)[1:])
        assert "--json" in sub.format_help()
