# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start`: what it warns of, what it refuses as empty, and what it says where there is no room."""

from __future__ import annotations

import errno
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import launching, starting
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.orchestration import rundir, runtime
from agent_intercom.orchestration.errors import Refusal
from tests.unit import orchruns
from tests.unit.orchcli import Home
from tests.unit.test_orch_start import EXTERNAL, TASK, dry, prepared, refused

ROOT = "home/.local/state/agent-intercom/runs"


@pytest.fixture(autouse=True)
def quiet(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to warn of."""
    (home.project / ".git").mkdir()
    monkeypatch.setattr(starting, "file_system", lambda _directory: "tmpfs")


def warned(home: Home, *words: str) -> list[str]:
    """The warnings, which a person is told, too."""
    found: list[str] = dry(home, *words)["warnings"]
    out = home.call("start", *TASK, *words, "--dry-run").out
    assert [line.removeprefix("Warning: ") for line in out.splitlines() if line.startswith("Warning: ")] == found
    return found


def test_of_nothing(home: Home) -> None:
    assert warned(home) == []
    below = home.project / "a/b"
    below.mkdir(parents=True)
    assert warned(home, "--project", str(below)) == []


def test_of_another_run_in_the_same_tree(home: Home) -> None:
    run = orchruns.make(home.root / ROOT, "mine", project=home.project)
    below, beside = home.project / "sub", home.root / "project-2"
    for directory in (below, beside):
        (directory / ".git").mkdir(parents=True)
    with orchruns.Alive(home.runtime, "u1", run):
        end = ": mine; two implementers would write in one tree"
        assert warned(home) == [f"another run works in this directory{end}"]
        assert warned(home, "--project", str(below)) == [f"another run works in {home.project}{end}"]
        assert warned(home, "--project", str(beside)) == []
    assert warned(home) == []


def test_of_a_project_that_is_all_that_a_person_has(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home.root / "project/home"))
    assert warned(home) == ["the project holds your home directory and everything in it, and workers may write there"]
    assert "the root of the file system" in warned(home, "--project", "/")[0]


def test_of_a_project_without_git(home: Home) -> None:
    (home.project / ".git").rmdir()
    assert warned(home) == ["the project is in no Git work tree: what workers change is not seen and not undone there"]


def test_of_a_program_that_would_not_find_orchestrate(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("--harness", "implementer=command", "--worker-command", "implementer=/bin/true")
    monkeypatch.setattr(sys, "argv", ["/usr/lib/nothing/main.py"])
    assert warned(home, *command) == ["no directory of PATH has `orchestrate`, by which a program reports: implementer"]
    (home.root / "commands").mkdir()
    program = home.root / "commands/orchestrate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert warned(home, *command) == []
    assert prepared(*TASK, *command).environment["PATH"] == f"{os.environ['PATH']}:{program.parent}"
    monkeypatch.setattr(sys, "argv", ["/usr/lib/nothing/main.py"])
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert warned(home, *command) == []
    assert prepared(*TASK, *command).environment["PATH"] == os.environ["PATH"]


def test_of_programs_for_which_the_project_cannot_be_copied(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(role: str) -> tuple[str, ...]:
        return ("--harness", f"{role}=command", "--worker-command", f"{role}=/bin/true", "--skip-model-check")

    commands = home.root / "commands"
    commands.mkdir()
    for name in ("orchestrate", "git", "pi"):
        (commands / name).write_text("#!/bin/sh\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    assert warned(home, *command("reviewer")) == []
    (home.project / ".git").rmdir()
    assert not any("copy" in text for text in warned(home, *command("reviewer")))
    (home.project / ".git").mkdir()
    (commands / "git").unlink()
    assert warned(home, *command("implementer")) == []
    expected = "these programs get no copy of the project and do not start: reviewer: git is not installed"
    assert [text.split(",")[0] for text in warned(home, *command("reviewer"))] == [expected]
    root = warned(home, *command("reviewer"), "--project", "/")
    assert "the root of all files" in root[-1]


@pytest.mark.parametrize(("kind", "expected"), [("ext4", 1), ("ramfs", 0), (None, 0)])
def test_of_keys_on_a_disk(home: Home, monkeypatch: pytest.MonkeyPatch, kind: str | None, expected: int) -> None:
    monkeypatch.setattr(starting, "file_system", lambda directory: kind if directory == str(home.runtime) else "")
    found = warned(home)
    assert len(found) == expected and all(text.startswith(f"XDG_RUNTIME_DIR is on {kind}: ") for text in found)


def test_how_workers_of_others_connect(home: Home) -> None:
    assert dry(home, *EXTERNAL)["external"] is None
    made = prepared(*TASK, "--harness", "reviewer=external")
    address = runtime.socket_path(str(home.runtime), made.spec.unit)
    assert starting._data(made, "/srv/run", [])["external"] == {
        "reviewer": {"socket": address, "token_file": "/srv/run/reviewer.token", "generation": 1}
    }


EMPTY = ("session", "project", "profile", "task-file", "reviewer-provider", "implementer-model", "worker-skill")


@pytest.mark.parametrize("flag", EMPTY)
@pytest.mark.parametrize("form", ["--{} ", "--{}= "])
def test_what_is_empty_is_not_what_was_left_out(home: Home, flag: str, form: str) -> None:
    words = form.format(flag).split(" ") if form.endswith("{} ") else [f"--{flag}="]
    task = () if flag == "task-file" else TASK
    code, text = refused(home, *task, *words, "--dry-run")
    assert code == "invalid_arguments" and f"--{flag} " in text and ("empty" in text or flag == "task-file")
    if flag == "project":
        assert "--project is empty" in home.json("config", "show", *words).error[1]


@pytest.mark.parametrize(("name", "text"), [("-demo", "dash"), ("-", "dash"), ("x" * 101, "100 characters")])
def test_a_session_that_no_command_could_name(home: Home, name: str, text: str) -> None:
    code, said = refused(home, *TASK, f"--session={name}", "--dry-run")
    assert code == "invalid_arguments" and "--session" in said and text in said
    assert dry(home, f"--session={'x' * 100}")["session"] == "x" * 100


def test_a_harness_of_a_role_that_the_run_has_not(home: Home) -> None:
    code, text = refused(home, *TASK, "--harness", "probe=external", "--dry-run")
    assert code == "invalid_arguments" and text.startswith("--harness: the run has no probe") and "--with-probe" in text
    assert dry(home, "--harness", "probe=external", "--with-probe")["harness"]["probe"] == "external"


def test_an_environment_that_is_too_large(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is no UTF-8 takes six in the run's place."""
    for number in range(4):
        monkeypatch.setenv(f"BULK_API_KEY_{number}", "\udcff" * 100_000)
    dry(home)
    home.config("[environment]\npass = ['BULK_*']\n")
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "too large" in text and "[environment] drop" in text
    assert "BULK_API_KEY_0" in text and "\udcff" not in text
    home.config("[environment]\npass = ['BULK_*']\ndrop = ['BULK_API_KEY_0']\n")
    place = runtime.RunPlace(
        directory="/srv/run", scope=None, environment=prepared(*TASK).environment, observer_report_usage=True
    )
    runtime.write(str(home.runtime), "u1", place)
    assert len(runtime.read(str(home.runtime), "u1").environment["BULK_API_KEY_3"]) == 100_000


FULL = OSError(errno.ENOSPC, "secret")
NO_ROOM = (
    (Refusal("run_unwritable", "the run's directory cannot be used", "directory"), FULL, "Make room in {root}"),
    (Refusal("run_unwritable", "the database cannot be made", "STATE_FULL"), None, "Make room in {root}"),
    (Refusal("run_unwritable", "the runtime directory cannot be written", "unit"), FULL, "Make room in {run}"),
    (Refusal("run_unwritable", "the run's directory cannot be made", "directory"), None, "write to {root}"),
)


@pytest.mark.parametrize(("refusal", "cause", "text"), NO_ROOM)
def test_where_there_is_no_room(
    home: Home, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, cause: OSError | None, text: str
) -> None:
    def launch(_prepared: object) -> Any:
        raise refusal from cause

    monkeypatch.setattr(launching, "launch", launch)
    code, said = refused(home, *TASK)
    expected = text.format(root=home.root / ROOT, run=home.runtime)
    assert code == "orchestration_error" and expected in said and "secret" not in said
    assert ("No space left on device" in said) is ("room" in text)


def test_a_root_that_cannot_be_written(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object) -> Any:
        raise Refusal("run_unwritable", "the run's directory cannot be made", "directory")

    monkeypatch.setattr(rundir, "check", check)
    assert "AGENT_INTERCOM_RUNS_DIR" in refused(home, *TASK, "--dry-run")[1]


def test_nothing_is_made_where_nobody_could_see_the_dashboard(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_prepared: object) -> Any:
        raise AssertionError("something was made")

    monkeypatch.setattr(launching, "launch", launch)
    assert home.json("start", *TASK, "--attach").error[0] == "interactive_only"
    said = home.call("start", *TASK, "--attach")
    assert said.code == 2 and "`orchestrate watch`" in said.err
    monkeypatch.setenv("TERM", "dumb")
    options = Namespace(json=False, program="orchestrate", attach=True)
    with pytest.raises(CommandFailure):
        starting.start(options)


def test_a_skill_that_cannot_be_read_is_named(home: Home) -> None:
    code, text = refused(home, *TASK, "--worker-skill", "reviewer=no.md", "--dry-run")
    assert code == "invalid_arguments" and "--worker-skill: no.md cannot be read: No such file" in text
    skill = home.file("skill.md", "x")
    text = refused(home, *TASK, *["--worker-skill", f"reviewer={skill}"] * 2, "--dry-run")[1]
    assert f"{Path(skill)} is named twice for reviewer" in text
    assert os.path.isabs(skill)


def test_of_a_reviewer_that_may_write_in_the_project_after_all(home: Home) -> None:
    inside, beside = home.project / "cache", home.root / "cache"
    for directory in (inside, beside):
        directory.mkdir()
    home.config(f'[workers]\nwritable = ["{beside}"]\n')
    assert warned(home) == []
    home.config(f'[workers.roles.reviewer]\nwritable = ["{inside}"]\n')
    assert [each.partition(" in")[0] for each in warned(home)] == ["reviewer may write"]
    home.config(f'[workers.roles.implementer]\nconfine = true\nwritable = ["{inside}"]\n')
    assert warned(home) == []
