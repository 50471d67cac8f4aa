# SPDX-License-Identifier: Apache-2.0
"""Asking a harness for models: what is asked, how often, and what is made of every answer."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_intercom.orchestration import models
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.models import Listed, ModelCheck, check, parse

LIST = "provider  model  context\np1  a  200K\np1  b  200K\n\np2 a\n"


class Worker(NamedTuple):
    provider: str
    model: str
    harness: str = "pi"


class Pi:
    """A program that answers as it is told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[list[str], Mapping[str, str] | None, float]] = []

    def __call__(self, line: Sequence[str], environ: Mapping[str, str] | None, seconds: float) -> Listed:
        self.calls.append(([*line], environ, seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        status, text = answer
        return Listed(text.encode(), status)


def test_each_provider_is_asked_once_and_roles_keep_their_order() -> None:
    pi = Pi((0, LIST), (0, "provider model\np2 a\n"))
    roles = {
        "reviewer": Worker("p1", "a"),
        "implementer": Worker("p2", "a"),
        "probe": Worker("p1", "c"),
        "django": Worker("x", "y", "external"),
    }
    assert check(roles, "pi-next", {"PATH": "/bin"}, pi) == [
        ModelCheck("reviewer", "p1", "a", True, "available"),
        ModelCheck("implementer", "p2", "a", True, "available"),
        ModelCheck("probe", "p1", "c", False, "`pi-next` does not list p1/c"),
        ModelCheck("django", "x", "y", None, "harness external is not asked"),
    ]
    assert [line for line, _, _ in pi.calls] == [["pi-next", "--list-models", "p1"], ["pi-next", "--list-models", "p2"]]
    for _, environ, seconds in pi.calls:
        assert environ == {"PATH": "/bin"}
        assert 0 < seconds <= models.TIMEOUT_S


def test_without_an_environment_that_of_this_process_counts() -> None:
    pi = Pi((0, LIST))
    assert check({"probe": Worker("p1", "b")}, "pi", run=pi)[0].available
    assert pi.calls[0][0][0] == "pi"
    assert pi.calls[0][1] is None


def test_a_pair_counts_and_not_its_halves() -> None:
    assert parse(LIST) == {("p1", "a"), ("p1", "b"), ("p2", "a")}
    assert parse("") == parse("p1 a") == parse("heading\nlonely\n") == frozenset()
    pi = Pi((0, LIST), (0, LIST), (0, LIST))
    roles = {"a": Worker("p2", "b"), "b": Worker("provider", "model"), "c": Worker("p", "1")}
    assert [one.available for one in check(roles, "pi", run=pi)] == [False, False, False]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (FileNotFoundError(), "`pi` is not found in PATH"),
        (PermissionError(errno.EACCES, "secret"), "`pi` cannot be run: Permission denied"),
        (TimeoutError(), "`pi` did not answer in time"),
        ((None, LIST), "`pi --list-models` says more than 1024 KiB"),
        ((3, "key sk-canary\n"), "`pi --list-models` failed with status 3"),
        ((-9, ""), "`pi --list-models` failed with status -9"),
        ((0, "No models match pattern\n"), "`pi` does not list p/m"),
    ],
)
def test_a_list_that_cannot_be_had(answer: Any, detail: str) -> None:
    assert check({"probe": Worker("p", "m")}, "pi", {"PATH": "/nowhere"}, Pi(answer)) == [
        ModelCheck("probe", "p", "m", False, detail)
    ]


def test_all_questions_share_one_patience() -> None:
    now = iter([0.0, 5.0, 21.0])
    pi = Pi((0, LIST))
    roles = {"a": Worker("p1", "a"), "b": Worker("p2", "a")}
    found = check(roles, "pi", run=pi, clock=lambda: next(now))
    assert pi.calls[0][2] == models.TIMEOUT_S - 5
    assert [one.available for one in found] == [True, False]
    assert found[1].detail == "`pi` did not answer in time"


def test_what_cannot_go_on_without_a_model(tmp_path: Path) -> None:
    program = tmp_path / "pi"
    program.write_text("#!/bin/sh\necho heading; echo p m\n")
    program.chmod(0o755)
    roles = {"implementer": Worker("p", "m"), "probe": Worker("x", "y", "external")}
    models.require(roles, str(program), {})
    with pytest.raises(Refusal) as caught:
        models.require({**roles, "reviewer": Worker("p", "n"), "django": Worker("p", "o")}, str(program), {})
    assert (caught.value.code, caught.value.field) == ("model_unavailable", "reviewer")
    assert caught.value.text.startswith("reviewer model unavailable: ") and "p/n" in caught.value.text
    assert "--skip-model-check" in caught.value.text


def test_a_real_program(tmp_path: Path) -> None:
    program = tmp_path / "pi"
    program.write_text(
        f"#!{sys.executable} -I\n"
        "import os, sys\n"
        "assert sys.argv[1] == '--list-models' and sys.stdin.read() == '' and os.getcwd() == '/'\n"
        "sys.stderr.write('noise')\n"
        "sys.stdout.buffer.write(b'provider model\\n' + sys.argv[2].encode() + b' \\xff ' + b'\\n')\n"
        "sys.stdout.buffer.write(sys.argv[2].encode() + b' ' + os.environ['MODEL'].encode() + b'\\n')\n"
    )
    program.chmod(0o755)
    found = check({"probe": Worker("p", "m"), "django": Worker("p", "n")}, str(program), {"MODEL": "m"})
    assert [one.available for one in found] == [True, False]
    program.chmod(0o644)
    assert not check({"probe": Worker("p", "m")}, str(tmp_path / "gone"))[0].available


def script(tmp_path: Path, text: str) -> str:
    program = tmp_path / "pi"
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("ending", ["silence", "noise", "interrupted"])
def test_nothing_of_a_program_is_left_that_does_not_come_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """What the program has started keeps a pipe open, and nobody else does."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    monkeypatch.setattr(subprocess.Popen, "__init__", inheriting(subprocess.Popen.__init__, writing))
    last = "exec yes p" if ending == "noise" else "sleep 1000"
    program = script(tmp_path, f"#!/bin/sh\nsleep 1000 &\n{last}\n")
    if ending == "interrupted":
        monkeypatch.setattr(models, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.ask([program], None, 30)
    elif ending == "noise":
        assert models.ask([program], None, 30).status is None
    else:
        with pytest.raises(TimeoutError):
            models.ask([program], None, 0.05)
    os.close(writing)
    assert select.select([reading], [], [], 30)[0] and os.read(reading, 1) == b""
    os.close(reading)


def inheriting(start: Any, descriptor: int) -> Any:
    def started(self: Any, *words: Any, **options: Any) -> None:
        start(self, *words, pass_fds=(descriptor,), **options)

    return started


def interrupted(*_: object) -> bytes:
    raise KeyboardInterrupt


def test_a_program_that_hangs_after_its_answer(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        models.ask([script(tmp_path, "#!/bin/sh\necho heading\nexec sleep 1000 >&-\n")], None, 0.3)


def test_a_missing_interpreter_is_told_as_that(tmp_path: Path) -> None:
    program = script(tmp_path, "#!/nowhere/node\n")
    for name, environ in ((program, None), ("pi", {"PATH": str(tmp_path)})):
        (found,) = check({"probe": Worker("p", "m")}, name, environ)
        assert found.detail == f"`{name}` cannot be run: the interpreter that its first line names is not there"
