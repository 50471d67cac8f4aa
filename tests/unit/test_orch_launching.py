# SPDX-License-Identifier: Apache-2.0
"""Taking back what a start made, with a stand-in for the service manager (orchestration spec, section 11.2)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from agent_intercom.cli.orchestrate import launching
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.host.manager import JobFailed, ManagerUnreachable
from agent_intercom.orchestration import hosting
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import hosted
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from tests.unit.orchcli import Home

START = ("start", "--task", "Canary.", "--harness", "implementer=external", "--harness", "reviewer=external")


class Bus:
    """Stands for the connection to the manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Stage:
    """The steps of a start and of its taking back, each of which may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: dict[str, BaseException] = {}
        self.done: list[str] = []
        self.takes: dict[str, int] = {}
        """The steps that take all the time that they are given, and where among their arguments that is."""
        self.time = 0.0
        monkeypatch.setattr(launching, "Manager", Bus)
        for name in ("listen", "end"):
            monkeypatch.setattr(hosting, name, self._step(name))
        for name in ("start_role", "stop_role"):
            monkeypatch.setattr(hosted, name, self._step(name))
        monkeypatch.setattr(hosted, "service", self._service)
        monkeypatch.setattr(launching, "_see_it_serve", self._step("serve"))

    @contextlib.contextmanager
    def _service(self, *given: object) -> Iterator[None]:
        self._step("service")()
        yield

    def _step(self, name: str) -> Any:
        def step(*given: Any) -> None:
            self.done.append(name)
            if name in self.takes:
                self.time += given[self.takes[name]]
            if name in self.failing:
                raise self.failing[name]

        return step


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def made(home: Home) -> set[str]:
    """What there is of runs, their locks apart."""
    return {name for name in home.tree() if "/.lock" not in name and not name.endswith(("agent-intercom", "/run"))}


def test_everything_in_its_order(home: Home, stage: Stage) -> None:
    data = home.json(*START).data
    assert stage.done == ["listen", "serve"]
    directory = Path(data["paths"]["coordination"])
    assert (directory / "startup-state").read_text() == "RUNNING\n"
    assert json.loads((home.runtime / f"agent-intercom/run/{data['unit']}/run.json").read_text())["scope"] is None


@pytest.mark.parametrize(
    ("step", "error", "code"),
    [
        ("listen", JobFailed("orchestrate@x.socket", "failed"), "startup_failed"),
        ("listen", ManagerUnreachable("gone"), "manager_unreachable"),
        ("listen", Refusal("startup_failed", "no units"), "startup_failed"),
        ("serve", CommandFailure("startup_failed", "it does not serve"), "startup_failed"),
        ("service", ManagerUnreachable("gone"), "manager_unreachable"),
        ("service", WorkerError(Code.UNREACHABLE, "nobody listens"), "startup_failed"),
        ("start_role", WorkerError(Code.START_FAILED, "no worker"), "startup_failed"),
    ],
)
def test_a_step_that_fails_takes_back_what_was_made(
    home: Home, stage: Stage, step: str, error: Exception, code: str
) -> None:
    before = made(home)
    stage.failing[step] = error
    words = START if step in {"listen", "serve"} else START[:3]
    assert home.json(*words).error[0] == code
    assert stage.done[-1] == "end" and made(home) == before


def test_workers_that_were_started_are_ended_before_the_run_is(home: Home, stage: Stage) -> None:
    data = home.json(*START[:3]).data
    assert stage.done == ["listen", "serve", "service", "start_role", "start_role"] and data["unit"]
    stage.done.clear()
    stage.failing["start_role"] = WorkerError(Code.COMMAND_NOT_FOUND, "it is not there")
    assert "it is not there" in home.json(*START[:3], "--session", "other").error[1]
    assert stage.done == ["listen", "serve", "service", "start_role", "service", "stop_role", "end"]


@pytest.mark.parametrize("step", ["start_role", "stop_role"])
def test_nobody_waits_longer_than_callers_do_for_a_service_that_hangs(
    home: Home, stage: Stage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It hangs from `step` on. The start is as slow as it may be, and so is everything that is taken back."""
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: stage.time))
    stage.takes = {"serve": -1, "start_role": -1, "stop_role": -1, "end": -1}
    hangs = WorkerError(Code.TIMEOUT, "the worker service did not answer in time")
    stage.failing = {"start_role": WorkerError(Code.START_FAILED, "it did not start"), step: hangs}
    assert home.json(*START[:3]).error[0] == "startup_failed"
    assert stage.time <= 30
    # Who has not answered is not asked again, and the end of the run does without.
    asked = ["service", "stop_role"] if step == "stop_role" else []
    assert stage.done == ["listen", "serve", "service", "start_role", *asked, "end"]


def test_an_interruption_takes_back_what_was_made(home: Home, stage: Stage) -> None:
    before = made(home)
    stage.failing["serve"] = KeyboardInterrupt()
    assert home.call(*START).code == 130
    assert stage.done[-1] == "end" and made(home) == before


@pytest.mark.parametrize(
    "error", [Refusal("stop_failed", "2 processes of it are left"), ManagerUnreachable("no answer")]
)
def test_what_cannot_be_taken_back_is_told_and_can_still_be_found(home: Home, stage: Stage, error: Exception) -> None:
    stage.failing = {"serve": CommandFailure("startup_failed", "it does not serve"), "end": error}
    code, text = home.json(*START).error
    assert code == "stop_failed"
    assert "it does not serve" in text and str(error) in text and "systemctl --user stop orchestrate-" in text
    (manifest,) = [Path(name) for name in made(home) if name.endswith("manifest.json")]
    assert (manifest.parent / "startup-state").read_text() == "FAILED\n"
    assert not (manifest.parent / "startup.json").exists()
    assert any(name.endswith("/run.json") for name in made(home))
