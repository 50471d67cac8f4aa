# SPDX-License-Identifier: Apache-2.0
"""The workers of a run as its place and the service manager tell of them; the manager is a stand-in."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import cgroups, processes
from agent_intercom.host.manager import Manager, ManagerRefused
from agent_intercom.orchestration import runtime
from agent_intercom.workers import hosted, pauses, places
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

UP = {"ActiveState": "active", "SubState": "running", "Result": "success"}


class Stage(Manager):
    """A manager that knows some scope units."""

    def __init__(self) -> None:
        super().__init__({})
        self.scopes: dict[str, dict[str, Any]] = {}
        self.refuses = ""
        self.started: list[str] = []

    def unit(self, name: str, kind: str) -> dict[str, Any] | None:
        assert kind == "Scope"
        # What is gone can be looked at all the same: it is loaded for that, and has no scope of its own.
        return self.scopes.get(name, {"ActiveState": "inactive", "SubState": "dead"} if "ba9" in name else None)

    def start(self, unit: str, timeout: float = 0) -> None:
        self.started.append(unit)
        if self.refuses:
            raise ManagerRefused(self.refuses, unit)


@pytest.fixture
def where() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ho", dir="/tmp") as name:
        os.makedirs(runtime.directory_of(name, "a1"), 0o700)
        yield name


def worker(where: str, role: str, incarnation: str, generation: int = 1, ended: dict[str, Any] | None = None) -> str:
    """The place of a worker, as the worker service and the shim leave it."""
    place = places.of_run_worker(where, "a1", incarnation)
    places.make(place)
    unit = f"worker-{incarnation}.scope"
    places.write_role(
        place, places.RoleWorker(role=role, generation=generation, unit=unit, pid=77, enforced=("nothing",))
    )
    if ended is not None:
        with open(os.open(places.exit_file(place), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(ended, file)
    return unit


def test_those_that_run(where: str) -> None:
    stage = Stage()
    for role, incarnation in (("reviewer", "0123456789ab"), ("implementer", "0123456789ac")):
        stage.scopes[worker(where, role, incarnation)] = UP
    found = hosted.workers(stage, where, "a1")
    assert [(each.role, each.pid, each.up, each.enforced) for each in found] == [
        ("implementer", 77, True, ("nothing",)),
        ("reviewer", 77, True, ("nothing",)),
    ]
    assert found[0].as_json()["exit"] is None and found[0].as_json()["enforced"] == ["nothing"]
    assert hosted.workers(stage, where, "a2") == []


@pytest.mark.parametrize(
    ("ended", "result", "told"),
    [
        ({"code": 0, "signal": None, "at": 5}, "success", (0, None, 5)),
        ({"code": 3, "signal": None, "at": 5}, "exit-code", (3, None, 5)),
        ({"code": None, "signal": 9, "at": 5}, "signal", (None, 9, 5)),
        ({"code": None, "signal": None, "at": 5}, "", None),
        ({"code": "3", "signal": None, "at": 5}, "", None),
        ({"at": "5"}, "", None),
        (None, "", None),
    ],
)
def test_how_one_ended(where: str, ended: dict[str, Any] | None, result: str, told: tuple[Any, ...] | None) -> None:
    for incarnation in ("0123456789ab", "ba9876543210"):
        worker(where, "reviewer" if incarnation[0] == "0" else "probe", incarnation, ended=ended)
    for found in hosted.workers(Stage(), where, "a1"):
        assert (found.active, found.sub, found.pid, found.result) == ("inactive", "dead", 0, result)
        assert (None if found.exit is None else tuple(found.exit)) == told


def test_what_systemd_says_of_an_end_counts(where: str) -> None:
    stage = Stage()
    unit = worker(where, "reviewer", "0123456789ab", ended={"code": None, "signal": 9, "at": 1})
    stage.scopes[unit] = {"ActiveState": "failed", "SubState": "failed", "Result": "oom-kill"}
    (found,) = hosted.workers(stage, where, "a1")
    assert (found.active, found.result, found.pid) == ("failed", "oom-kill", 0)


def test_of_a_role_only_the_last_is_told_unless_they_run(where: str) -> None:
    stage = Stage()
    worker(where, "reviewer", "0123456789aa", 1, {"code": 1, "signal": None, "at": 1})
    worker(where, "reviewer", "0123456789ab", 2, {"code": 1, "signal": None, "at": 3})
    worker(where, "reviewer", "0123456789ac", 2, {"code": 2, "signal": None, "at": 2})
    assert [each.unit[7:19] for each in hosted.workers(stage, where, "a1")] == ["0123456789ab"]
    stage.scopes[worker(where, "reviewer", "0123456789ad", 2)] = UP
    assert [each.unit[7:19] for each in hosted.workers(stage, where, "a1")] == ["0123456789ad"]


def test_without_the_units_of_the_worker_service(where: str) -> None:
    stage = Stage()
    stage.refuses = "org.freedesktop.systemd1.NoSuchUnit"
    with pytest.raises(WorkerError) as caught, hosted.service(stage, where):
        pass
    assert (caught.value.code, caught.value.field) == (Code.UNREACHABLE, "units")
    stage.refuses = ""
    with pytest.raises(WorkerError) as caught, hosted.service(stage, where):
        pass
    assert caught.value.code == Code.UNREACHABLE and "nobody listens" in caught.value.text
    assert stage.started == ["orchestrate-workers.socket"] * 2


def test_of_whom_it_is_that_something_is_told() -> None:
    class Refusing:
        def request(self, *given: Any, **more: Any) -> dict[str, Any]:
            raise WorkerError(Code.COMMAND_NOT_FOUND, "it is not there")

    client: Any = Refusing()
    with pytest.raises(WorkerError) as caught:
        hosted.start_role(client, "a1", "probe", 1)
    assert (caught.value.code, caught.value.text) == (
        Code.COMMAND_NOT_FOUND,
        "the worker probe did not start: it is not there",
    )
    with pytest.raises(WorkerError, match="the worker probe did not stop: it is not there"):
        hosted.stop_role(client, "a1", "probe")


@pytest.mark.parametrize(
    ("freezer", "paused"),
    [
        ("running", False),
        ("freezing", False),
        ("frozen", True),
        ("frozen-by-parent", False),
        ("thawing", False),
        (None, False),
    ],
)
def test_one_that_is_paused(where: str, freezer: str | None, paused: bool) -> None:
    stage = Stage()
    unit = worker(where, "probe", "0123456789ab")
    stage.scopes[unit] = UP | ({"FreezerState": freezer} if freezer else {})
    (found,) = hosted.workers(stage, where, "a1")
    assert found.paused is paused and found.as_json()["paused"] is paused
    stage.scopes[unit] = {"ActiveState": "inactive", "SubState": "dead", "Result": "success", "FreezerState": "frozen"}
    assert not hosted.workers(stage, where, "a1")[0].paused


def test_whoever_looks_is_told_by_the_kernel_who_is_paused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {77: "/u/worker-0123456789ab.scope", 78: "/u/worker-0123456789ff.scope"}
    monkeypatch.setattr(processes, "cgroup_of", groups.get)
    monkeypatch.setattr(cgroups, "directory", lambda group: f"{where}{group}")
    worker(where, "probe", "0123456789ab")
    events = Path(where, "u/worker-0123456789ab.scope/cgroup.events")
    assert pauses.roles(where, "a1") == [], "it is gone"
    events.parent.mkdir(parents=True)
    events.write_text("populated 1\nfrozen 0\n")
    assert pauses.roles(where, "a1") == []
    events.write_text("populated 1\nfrozen 1\n")
    assert pauses.roles(where, "a1") == ["probe"]
    # The process that has this number now is in another unit.
    groups[77] = groups[78]
    assert pauses.roles(where, "a1") == [] == pauses.roles(where, "a2")
