# SPDX-License-Identifier: Apache-2.0
"""Every flag and word of `orchestrate worker`: what it says, what it takes and what it does not."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from agent_intercom.cli.orchestrate import amounts, parser, workerflags
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.workers import actions
from agent_intercom.workers.contract import EXITS, Code
from tests.unit.orchcli import Home
from tests.unit.test_orch_flags import shown
from tests.unit.test_orch_main import subparsers

AS = {"--as": (("--as", "s1"), "session", "s1")}
OVERRIDE = {**AS, "--override": (("--override",), "override", True)}
YES = {"--yes": (("--yes",), "yes", True)}
ONE: dict[str, tuple[tuple[str, ...], str, Any]] = {"WORKER": ((), "worker", "review"), **OVERRIDE}

TAKEN: dict[str, tuple[tuple[str, ...], dict[str, tuple[tuple[str, ...], str, Any]]]] = {
    "start": (
        (),
        {
            **AS,
            "NAME": (("review",), "worker_name", "review"),
            "COMMAND…": (("--", "make", "-j", "2"), "arguments", ["make", "-j", "2"]),
            "--role": (("--role", "audit"), "role", "audit"),
            "--directory": (("--directory", "d"), "directory", "d"),
            "--key": (("--key", "k"), "key", "k"),
            "--task": (("--task", "do"), "task", "do"),
            "--task-file": (("--task-file", "f"), "task_file", "f"),
            "--read-only": (("--read-only",), "read_only", True),
            "--writable": (("--writable", "a", "--writable", "b"), "writable", ["a", "b"]),
            "--no-network": (("--no-network",), "no_network", True),
            "--memory-max": (("--memory-max", "2G"), "memory_max", 2 << 30),
            "--memory-high": (("--memory-high", "1.5G"), "memory_high", 3 << 29),
            "--tasks-max": (("--tasks-max", "9"), "tasks_max", 9),
            "--max-runtime": (("--max-runtime", "2h 30min"), "max_runtime", 9_000_000),
            "--idle-timeout": (("--idle-timeout", "infinity"), "idle_timeout", 0),
            "--grace": (("--grace", "90s"), "grace", 90_000),
            "--may-start": (("--may-start", "2/5"), "may_start", (2, 5)),
            "--depth": (("--depth", "3"), "depth", 3),
            "--keep-output": (("--keep-output",), "keep_output", True),
        },
    ),
    "list": (
        (),
        {**OVERRIDE, "--all": (("--all",), "all", True), "--history": (("--history",), "history", True)},
    ),
    "status": ((), {**OVERRIDE, "WORKER": (("review",), "worker", "review")}),
    "logs": (
        ("review",),
        {**ONE, "--lines": (("--lines", "7"), "lines", 7), "--output": (("--output",), "output", True)},
    ),
    "wait": (
        ("review",),
        {
            **ONE,
            "--until": (("--until", "checkpoint"), "until", "checkpoint"),
            "--timeout": (("--timeout", "1min"), "timeout", 60_000),
        },
    ),
    "stop": (("review",), {**ONE, **YES}),
    "restart": (("review",), {**ONE, **YES, "--fresh": (("--fresh",), "fresh", True)}),
    "rename": (("review", "audit"), {**ONE, "NAME": ((), "worker_name", "audit")}),
    "adopt": (("review",), ONE),
    "release": (("review",), ONE),
    "pause": (("review",), ONE),
    "resume": (("review",), ONE),
    "renew": ((), {**OVERRIDE, "WORKER": (("review",), "worker", "review")}),
    "forget": (("review",), {**ONE, **YES}),
    "prune": (
        (),
        {**OVERRIDE, **YES, "WORKER": (("review",), "worker", "review"), "--all": (("--all",), "all", True)},
    ),
    "cleanup": ((), {**OVERRIDE, **YES, "--execute": (("--execute",), "yes", True)}),
    "notify": (("waiting",), {"ready|working|waiting": ((), "state", "waiting")}),
    "checkout": ((), {"DIR": (("d",), "directory", "d")}),
    "run": ((), {"COMMAND…": (("--", "./agent", "--json"), "arguments", ["./agent", "--json"])}),
}
CASES = [(command, flag) for command, (_, flags) in TAKEN.items() for flag in flags]
WITH_VALUES = [(command, flag) for command, flag in CASES if flag[0] == "-" and len(TAKEN[command][1][flag][0]) > 1]


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_flag_says_what_it_says(command: str, flag: str) -> None:
    words, flags = TAKEN[command]
    more, name, expected = flags[flag]
    options = parser.build("orchestrate", "1").parse_args(["worker", command, *words, *more])
    assert getattr(options, name) == expected


@pytest.mark.parametrize(("command", "flag"), WITH_VALUES)
def test_a_flag_that_takes_a_value_is_refused_without_one(command: str, flag: str) -> None:
    with pytest.raises(CommandFailure) as failed:
        parser.build("orchestrate", "1").parse_args(["worker", command, *TAKEN[command][0], flag])
    assert failed.value.code == "invalid_arguments" and flag in failed.value.text
    assert f"orchestrate worker {command} --help" in failed.value.hint


def test_an_unknown_flag_leads_to_the_help_of_its_command(home: Home) -> None:
    for words in ("worker status x1", "supervisor sessions", "list"):
        said = home.call(*words.split(), "--nonsense")
        command = words.removesuffix(" x1")
        assert said.code == 2 and said.err.endswith(f"unrecognized: --nonsense. See `orchestrate {command} --help`.\n")


BAD = {
    "--lines": ("0", "501", "x", "-1"),
    "--until": ("", "never"),
    "--timeout": ("10", "5m", "", "x", "-1s", "0s"),
    "--max-runtime": ("90", "1m", "0h", "1e3s", "1 fortnight", "infinity 1s", "999999 year"),
    "--idle-timeout": ("2", "٣h"),
    "--grace": ("min",),
    "--memory-max": ("lots", "0", "-1M", "2X", "infinity", "500", "15M"),
    "--memory-high": ("", "9" * 18, "1M"),
    "--tasks-max": ("0", "-1", "1.5", "7", "100001"),
    "--may-start": ("0", "3/2", "1/2/3", "x", "2/99999"),
    "--depth": ("0", "x"),
}


@pytest.mark.parametrize(("command", "flag"), [case for case in CASES if case[1] in BAD])
def test_a_bad_value_is_refused_by_the_name_of_its_flag(home: Home, command: str, flag: str) -> None:
    before = home.tree()
    for value in BAD[flag]:
        said = home.call("worker", command, *TAKEN[command][0], f"{flag}={value}")
        assert said.code == 2 and said.out == "" and said.err.count("\n") == 1 and flag in said.err, said
        assert f"orchestrate worker {command} --help" in said.err
    assert home.tree() == before


def test_the_service_takes_the_longest_times_that_there_are() -> None:
    longest = {name: amounts.span("36600d") for name in actions.Durations.__struct_fields__}
    assert msgspec.to_builtins(msgspec.convert(longest, actions.Durations)) == longest
    with pytest.raises(ValueError, match="a hundred years"):
        amounts.span("36600d 1ms")


def test_nothing_that_help_shows_is_left_out() -> None:
    found = {
        words[1]: shown(sub)
        for words, sub in subparsers(parser.build("orchestrate", "1"))
        if words[0] == "worker" and len(words) == 2
    }
    assert found == {command: set(flags) for command, (_, flags) in TAKEN.items()}


def test_every_command_shows_an_example_that_it_takes_and_the_exit_codes() -> None:
    made = parser.build("orchestrate", "1")
    for words, sub in subparsers(made):
        if words[0] != "worker":
            continue
        assert sub.epilog is not None and workerflags.EXITS in sub.epilog
        example = shlex.split(sub.epilog.splitlines()[1])
        assert example[: 1 + len(words)] == ["orchestrate", *words]
        made.parse_args(example[1:])


def test_the_exit_codes_that_help_shows_are_those_that_there_are() -> None:
    assert set(workerflags.MEANINGS) == {0, 1, *EXITS.values()}
    assert {workerflags.exit_of(code) for code in Code} == {1, *EXITS.values()}
    assert workerflags.exit_of("what is no code") == 1
