# SPDX-License-Identifier: Apache-2.0
"""What the shell offers: the walk over a parser, the words of both commands, and bash with the file for it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from agent_intercom.cli import completion
from agent_intercom.cli import main as intercom
from agent_intercom.cli.completion import DIRECTORIES, FILES, complete, nothing
from agent_intercom.cli.orchestrate import completing, parser
from agent_intercom.cli.orchestrate import main as orchestrate
from agent_intercom.orchestration import runtime

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = ROOT / "packaging/completions"
ROLES = ["django", "implementer", "playwright", "probe", "reviewer"]


@pytest.fixture
def toy() -> argparse.ArgumentParser:
    """A program with one of each."""
    top = argparse.ArgumentParser(prog="toy")
    top.add_argument("--version", action="version", version="1")
    commands = top.add_subparsers()
    run = commands.add_parser("run", help="shown")
    run.add_argument("colour", choices=("red", "green"))
    run.add_argument("thing", metavar="THING")
    run.add_argument("rest", nargs="*", metavar="FILE")
    run.add_argument("-n", "--number", nargs=2, metavar="N")
    run.add_argument("-q", action="store_true")
    run.add_argument("--in", metavar="FILE")
    run.add_argument("--to", metavar="DIR")
    run.add_argument("--level", choices=(1, 2))
    run.add_argument("--tag", action="append", metavar="TAG")
    run.add_argument("--secret", help=argparse.SUPPRESS)
    either = run.add_mutually_exclusive_group()
    either.add_argument("--yes", action="store_true")
    either.add_argument("--no", action="store_true")
    run.add_argument("--on", dest="switch", action="store_true")
    run.add_argument("--off", dest="switch", action="store_false")
    nested = commands.add_parser("nest", help="shown").add_subparsers()
    nested.add_parser("deep", help="shown").add_argument("thing", metavar="THING")
    commands.add_parser("hidden")
    return top


def things(command: Sequence[str], action: argparse.Action) -> Iterable[str]:
    if action.metavar == "THING":
        return [f"{'.'.join(command)}-thing", "other", "two words", "bell\a"]
    return ["a=1", "a=2", "b=1"] if action.metavar == "TAG" else ()


ALL = ["--help", "--in", "--level", "--no", "--number", "--off", "--on", "--tag", "--to", "--yes", "-q"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["nest", "run"]),
        ("r", ["run"]),
        ("-", ["--help", "--version"]),
        ("--v", ["--version"]),
        ("-h", ["-h"]),
        ("nothing ", []),
        ("hidden -", ["--help"]),
        ("run ", ["green", "red"]),
        ("run g", ["green"]),
        ("run green ", ["other", "run-thing"]),
        ("run green thing ", [FILES]),
        ("run green thing a b", [FILES]),
        ("run -", ALL),
        ("run -n", ["-n"]),
        ("run --on --yes -", [word for word in ALL if word not in {"--on", "--off", "--yes", "--no"}]),
        ("run --tag x --t", ["--tag", "--to"]),
        ("run --level 1 --l", []),
        ("run --level=1 --l", []),
        ("run --level ", ["1", "2"]),
        ("run --level=", ["--level=1", "--level=2"]),
        ("run --number 1 2 ", ["green", "red"]),
        ("run --number 1 -", []),
        ("run --in ", [FILES]),
        ("run --in=x", [FILES]),
        ("run --to ", [DIRECTORIES]),
        ("run --to=", [DIRECTORIES]),
        ("run --tag a", ["a=1", "a=2"]),
        ("run --tag=a=", ["--tag=a=1", "--tag=a=2"]),
        ("run --on=", []),
        ("run --none=", []),
        ("run --none ", []),
        ("run -- ", ["green", "red"]),
        ("run -- green -", []),
        ("run - ", ["other", "run-thing"]),
        ("nest ", ["deep"]),
        ("nest deep ", ["nest.deep-thing", "other"]),
        ("nest deep x ", ["--help"]),
        ("nest deep x y ", []),
        ("nest deep -- x ", []),
    ],
)
def test_a_walk(toy: argparse.ArgumentParser, line: str, expected: list[str]) -> None:
    assert complete(toy, line.split(" "), things) == expected


def test_no_word_at_all_is_an_empty_one(toy: argparse.ArgumentParser) -> None:
    assert complete(toy, [], things) == ["nest", "run"]


def test_options_that_may_stand_anywhere(toy: argparse.ArgumentParser) -> None:
    def found(line: str) -> list[str]:
        return complete(toy, line.split(" "), things, ["--json"])

    assert found("--j") == ["--json"]
    assert found("nest deep x --") == ["--help", "--json"]
    assert found("--json nest --json d") == ["deep"]
    assert found("nest deep --json --j") == []
    assert found("run --number --json --json r") == ["red"]


def test_intercom() -> None:
    def found(line: str) -> list[str]:
        return complete(intercom.build_parser(), line.split(" "), nothing)

    assert "ask" in found("")
    assert "_complete" not in found("")
    assert found("config ") == ["check", "show"]
    assert found("ask x --t") == ["--timeout"]
    assert found("send ") == []


def test_words_reach_the_walk_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that takes `--json` anywhere must not take it from what is being typed."""
    assert orchestrate.main(["_complete", "list", "--json"]) == 0
    assert capsys.readouterr().out == "--json\n"
    assert intercom.main(["_complete", "list", "--json", "--js"]) == 0
    assert capsys.readouterr().out == ""


def test_every_option_of_orchestrate_can_be_completed() -> None:
    """What help shows is offered, and nothing else."""
    top = parser.build("orchestrate", "1")
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    for name, sub in commands.choices.items():
        shown = {option for action in sub._actions for option in action.option_strings if option.startswith("--")}
        assert set(complete(top, [name, "--"], nothing, ["--json"])) == shown | {"--json"}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime and a state directory: session `alpha` lives, `beta` has ended, and the address of `gamma` is dead."""
    short = Path(f"/tmp/c{os.getpid()}")
    short.mkdir(mode=0o700)
    runs = tmp_path / "runs"
    for name in ("XDG_CONFIG_HOME", "PI_TMUX_AGENTS_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PI_CODING_AGENT_DIR", str(tmp_path / "pi"))
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", str(runs))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    for session, unit in (("alpha", "u1"), ("beta", None), ("gamma", "u3")):
        directory = runs / session / "run-1"
        directory.mkdir(parents=True)
        if unit is not None:
            place = runtime.RunPlace(directory=str(directory), scope=None, environment={}, observer_report_usage=True)
            runtime.write(str(short), unit, place)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(runtime.socket_path(str(short), "u1"))
        listener.listen()
        listener.setblocking(False)
        yield runs
        with pytest.raises(BlockingIOError):
            listener.accept()
    shutil.rmtree(short)


def offered(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    assert completing.print_words("orchestrate", line.split(" ")) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out.splitlines()


@pytest.mark.usefixtures("places")
def test_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    """Only commands that need a run that goes on are content with those; and nobody is connected to."""
    for command in ("send", "abort", "restart", "continue", "redeliver", "stop", "attach"):
        assert offered(capsys, f"{command} ") == ["alpha"]
    for command in ("status", "events", "usage", "supervisor snapshot", "prune --session"):
        assert offered(capsys, f"{command} ") == ["alpha", "beta", "gamma"]
    assert offered(capsys, "status b") == ["beta"]
    assert offered(capsys, "start --session ") == []


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "AGENT_INTERCOM_RUNS_DIR"])
def test_an_environment_that_makes_no_sense_offers_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, places: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, "nonsense")
    offered(capsys, "status ")
    assert offered(capsys, "status x") == []


def test_words_of_orchestrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert offered(capsys, "start --harness rev") == ["reviewer=external", "reviewer=pi"]
    assert offered(capsys, "start --worker-context=probe=") == [
        "--worker-context=probe=prune",
        "--worker-context=probe=retain",
    ]
    assert offered(capsys, "start --worker-skill rev") == ["reviewer="]
    assert offered(capsys, "start --profile ") == ["balanced", "economy", "thorough"]
    assert offered(capsys, "send x --role ") == ROLES
    assert offered(capsys, "supervisor events x --role ") == ROLES
    assert offered(capsys, "start --project ") == [DIRECTORIES]
    assert offered(capsys, "start --task-file ") == [FILES]
    assert offered(capsys, "start --reviewer-thinking hi") == ["high"]
    assert offered(capsys, "send x --message m --message-") == []


def test_a_completion_loads_little() -> None:
    """Whoever presses the key waits for it."""
    code = (
        "import sys; from agent_intercom.cli.orchestrate.completing import print_words;"
        "print_words('orchestrate', ['status', '']); print(*sorted(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "service"), "XDG_RUNTIME_DIR": "/nonexistent"}
    environment |= {"AGENT_INTERCOM_RUNS_DIR": "/nonexistent", "PI_CODING_AGENT_DIR": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"asyncio", "pydantic", "pyroute2", "jeepney", "apsw", "sqlite3"})


class Bash:
    """Bash that has sourced the file, and programs whose words come from this tree."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, call in (
            ("intercom", "main import main; main(sys.argv[1:])"),
            ("orchestrate", "orchestrate.main import main; main(sys.argv[1:])"),
        ):
            code = f"import sys; from agent_intercom.cli.{call}"
            program = directory / name
            program.write_text(
                f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT / 'service'))}"
                f' exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n'
            )
            program.chmod(0o755)

    def offers(self, *words: str, typed: str | None = None) -> list[str]:
        """What is offered for the last of `words`, which are as bash splits a line; `typed` is what it replaces."""
        script = (
            f"source {shlex.quote(str(COMPLETIONS / 'intercom.bash'))}\n"
            f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}\n"
            f"_agent_intercom {shlex.join([words[0], words[-1] if typed is None else typed, ''])}\n"
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        environment = {
            "PATH": f"{self.directory}:/usr/bin:/bin",
            "HOME": str(self.directory),
            "XDG_RUNTIME_DIR": str(self.directory),
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=self.directory,
        )
        assert done.stderr == ""
        return [line for line in done.stdout.splitlines() if line]


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "docs dir").mkdir()
    (tmp_path / "docs.md").touch()
    return Bash(tmp_path)


def test_bash(bash: Bash) -> None:
    assert bash.offers("intercom", "conf") == ["config"]
    assert bash.offers("intercom", "config", "") == ["check", "show"]
    assert bash.offers("intercom", "nonsense", "") == []
    assert bash.offers("orchestrate", "start", "--project", "doc") == ["docs dir"]
    assert sorted(bash.offers("orchestrate", "start", "--task-file", "doc")) == ["docs dir", "docs.md"]
    assert bash.offers("~/intercom", "whoam") == ["whoami"]


def test_bash_replaces_what_follows_an_equals_sign(bash: Bash) -> None:
    """Readline splits at it, so only what comes behind is given back."""
    assert bash.offers("orchestrate", "start", "--harness", "reviewer", "=", "ex") == ["external"]
    assert bash.offers("orchestrate", "start", "--harness", "reviewer", "=", typed="") == ["external", "pi"]
    assert bash.offers("orchestrate", "start", "--harness", "=", "reviewer", "=", "ex") == ["external"]
    assert bash.offers("orchestrate", "start", "--project", "=", "doc") == ["docs dir"]
    assert bash.offers("orchestrate", "start", "--worker-skill", "rev") == ["reviewer="]


def test_bash_registers_both_commands(bash: Bash) -> None:
    script = f"source {shlex.quote(str(COMPLETIONS / 'intercom.bash'))}; complete -p intercom orchestrate"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "complete -F _agent_intercom intercom",
        "complete -F _agent_intercom orchestrate",
    ]


def test_directives_are_those_that_the_shells_know() -> None:
    for name in ("intercom.bash", "intercom.zsh", "intercom.fish"):
        text = (COMPLETIONS / name).read_text()
        assert "_complete" in text
        for directive in (completion.FILES, completion.DIRECTORIES):
            assert directive in text
    assert (COMPLETIONS / "intercom.zsh").read_text().startswith("#compdef intercom orchestrate\n")
