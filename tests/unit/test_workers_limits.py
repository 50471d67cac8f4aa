# SPDX-License-Identifier: Apache-2.0
"""Limits that a worker was given and nobody is held to: everybody who shows a worker says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import starting
from agent_intercom.host import cgroups, manager
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.runtime import RunPlace, WorkerPlace
from agent_intercom.workers import hosted, limits, looking, places
from agent_intercom.workers.places import Place
from tests.unit.homeruns import SESSION, Runs
from tests.unit.orchcli import Home
from tests.unit.test_orch_doctor import checks, machine, say, well
from tests.unit.test_orch_start import TASK, dry
from tests.unit.toldservice import Service, serving, worker
from tests.unit.workerstage import PERSON, Stage

__all__ = ["machine"]

GROUP = "/user.slice/workers.slice/worker-0123456789ab.scope"
PLACE = Place(arguments=("true",), directory="/", environment={}, memory_max=1 << 26, tasks_max=9)


@pytest.fixture
def controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the control group of a worker, below a manager with some controllers."""
    monkeypatch.setattr(cgroups, "_ROOTS", (str(tmp_path),))

    def made(*names: str) -> None:
        group = tmp_path / GROUP.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        for each in (tmp_path, *tmp_path.glob("**/")):
            (each / "cgroup.controllers").write_text(" ".join(names))
        for name, file in (("memory", "memory.max"), ("pids", "pids.max")):
            (group / file).unlink(missing_ok=True)
            if name in names:
                (group / file).write_text("9\n")

    return made


@pytest.fixture
def service(home: Home) -> Iterator[Service]:
    with serving(home.runtime) as made:
        yield made


def test_what_was_given_and_is_no_limit(controllers: Callable[..., None]) -> None:
    controllers("cpu", "pids")
    assert limits.unheld(PLACE, GROUP) == ("memory_max",)
    assert limits.unheld(WorkerPlace(), GROUP) == ()
    assert limits.lacking([PLACE, WorkerPlace(memory_high=9)], "/user.slice") == ("memory",)
    assert limits.lacking([WorkerPlace(tasks_max=9)], "/user.slice") == ()
    assert limits.lacking([PLACE], "/nowhere") == ()
    controllers("memory", "pids")
    assert limits.unheld(PLACE, GROUP) == () and limits.lacking([PLACE], "/user.slice") == ()


def test_the_worker_service_looks_at_the_units_own_files(
    tmp_path: Path, controllers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers()
    stage = Stage()
    row = stage.run(PERSON)
    assert row.placed is not None
    monkeypatch.setattr(
        cgroups, "unheld", lambda group, files: tuple(files) if row.placed.control_group == group else ()
    )
    runtime_dir = str(tmp_path / "run")
    os.mkdir(runtime_dir, 0o700)
    place = places.of_worker(runtime_dir, row.id)
    service: Any = SimpleNamespace(place_of=lambda worker: place, runtime_dir=runtime_dir)
    assert looking.unenforced(service, row) == []
    places.make(place)
    places.write(place, PLACE)
    assert looking.unenforced(service, row) == ["memory_max", "tasks_max"]
    assert looking.unenforced(service, stage.start(PERSON)) == []
    ours = stage.begin(stage.start(PERSON, run="a1", role="probe", generation=1))
    assert looking.unenforced(service, ours) == []
    given = RunPlace(
        directory="/r", scope=None, environment={}, observer_report_usage=True,
        workers={"probe": WorkerPlace(memory_high=9)},
    )  # fmt: skip
    runtime.write(runtime_dir, "a1", given)
    assert looking.unenforced(service, ours) == ["memory_high"]


@pytest.mark.parametrize(
    "words",
    [("start", "review", "--memory-max", "64M", "--", "true"), ("status", "review"), ("restart", "review", "--yes")],
)
def test_it_is_told_of_a_worker(home: Home, service: Service, words: tuple[str, ...]) -> None:
    answer: dict[str, Any] = {"worker": worker(), "processes": [], "unit": None, "stopped": []}
    service.answers[words[0]] = answer
    assert "not enforced" not in home.call("worker", *words).out
    service.answers[words[0]] = {**answer, "unenforced": ["memory_max", "tasks_max"]}
    assert "not enforced: memory, tasks (its control group has no such limit;" in home.call("worker", *words).out
    assert home.json("worker", *words).data["unenforced"] == ["memory_max", "tasks_max"]


class Answering:
    """A service manager that says where it is, and has one scope unit."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def control_group(self) -> str:
        return "/user.slice"

    def unit(self, name: str, kind: str) -> dict[str, Any]:
        return {"ActiveState": "active", "SubState": "running", "Result": "success", "ControlGroup": GROUP}


def test_it_is_told_of_a_run(home: Home, controllers: Callable[..., None]) -> None:
    where = str(home.runtime)
    given = RunPlace(
        directory="/r", scope=None, environment={}, observer_report_usage=True,
        workers={"probe": WorkerPlace(memory_max=9, tasks_max=9)},
    )  # fmt: skip
    runtime.write(where, "a1", given)
    place = places.of_run_worker(where, "a1", "0123456789ab")
    places.make(place)
    record = places.RoleWorker(role="probe", generation=1, unit="worker-0123456789ab.scope", pid=7)
    places.write_role(place, record)
    answering: Any = Answering()
    controllers("pids")
    (found,) = hosted.workers(answering, where, "a1")
    assert found.unenforced == ("memory_max",) and found.as_json()["unenforced"] == ["memory_max"]
    controllers("memory", "pids")
    assert hosted.workers(answering, where, "a1")[0].unenforced == ()


def test_status_of_a_run_says_so(
    home: Home, runs: Runs, controllers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_intercom.cli.orchestrate import looking as shown

    row = hosted.WorkerUnit(
        "probe", 1, "u", "active", "running", 7, "success", "", (), None, unenforced=("memory_max",)
    )
    monkeypatch.setattr(shown, "_units", lambda entry: (None, [row.as_json()]))
    with runs.alive(runs.make()):
        out = home.call("status", SESSION).out
    assert "not enforced: probe: memory (its control group has no such limit; `orchestrate doctor` tells more)\n" in out


def test_start_warns(home: Home, controllers: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    (home.project / ".git").mkdir()
    monkeypatch.setattr(starting, "file_system", lambda _directory: "tmpfs")
    monkeypatch.setattr(manager, "Manager", Answering)
    controllers("pids")
    assert dry(home, *TASK)["warnings"] == []
    home.config("[workers]\nmemory_max = '2G'\ntasks_max = 64\n")
    (warning,) = dry(home, *TASK)["warnings"]
    assert warning.startswith(
        "limits of its workers are not enforced: the user's service manager has no memory controller"
    )
    controllers("memory", "pids")
    assert dry(home, *TASK)["warnings"] == []


@pytest.mark.parametrize(
    ("there", "kernel", "state", "words", "way_out"),
    [
        ({"cpu", "memory", "pids"}, None, "ok", "are enforced", ""),
        (
            {"pids"},
            {"memory", "pids"},
            "warn",
            "has no memory controller: such limits of workers are not",
            "Delegate=yes",
        ),
        ({"pids"}, {"pids"}, "warn", "has no memory controller", "cgroup_enable=memory"),
        (set(), None, "warn", "has no memory and no pids controller", "Delegate=yes"),
    ],
)
def test_the_doctor_has_a_row(
    machine: Home,
    monkeypatch: pytest.MonkeyPatch,
    there: set[str],
    kernel: set[str] | None,
    state: str,
    words: str,
    way_out: str,
) -> None:
    seen = None if kernel is None else frozenset(kernel)
    say(monkeypatch, well(machine, controllers=frozenset(there), kernel=seen))
    told = checks(machine)["limits"]
    assert told[0] == state and words in told[1] and way_out in told[2]
    say(monkeypatch, well(machine))
    assert "limits" not in checks(machine)
