# SPDX-License-Identifier: Apache-2.0
"""The units of a run, asked of a stand-in for the service manager. The real one is in tests/system."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import cgroups
from agent_intercom.host.manager import JobFailed, Manager, ManagerUnreachable, UnitState
from agent_intercom.orchestration import hosting, runtime
from agent_intercom.orchestration.errors import Refusal

SERVICE: dict[str, Any] = {
    "ActiveState": "active",
    "SubState": "running",
    "MainPID": 77,
    "Result": "success",
    "StatusText": "",
    "ControlGroup": "",
}


class Stage(Manager):
    """A manager without a bus: the services that it knows, and what it was asked to do."""

    def __init__(self) -> None:
        super().__init__({})
        self.services: dict[str, dict[str, Any]] = {}
        self.others: list[UnitState] = []
        self.done: list[tuple[str, str]] = []
        self.fault: str | None = None
        self.group = "/nowhere"
        self.installed: list[Any] = [("/opt/lib/orchestrate-broker", [], False)]

    def unit(self, name: str, kind: str) -> dict[str, Any] | None:
        assert kind == "Service"
        if name.startswith("orchestrate@"):
            return SERVICE | {"ExecStart": self.installed} | self.services.get(name, {})
        return self.services.get(name)

    def units(self, *patterns: str) -> list[UnitState]:
        known = [UnitState(name, "loaded", unit["ActiveState"], "") for name, unit in self.services.items()]
        return sorted(unit for unit in known + self.others if any(fnmatchcase(unit.name, p) for p in patterns))

    def processes(self, unit: str) -> list[tuple[int, str]]:
        return []

    def control_group(self) -> str:
        return self.group

    def start(self, unit: str, timeout: float = 0) -> None:
        self.done.append(("start", unit))

    def stop(self, unit: str, timeout: float = 0) -> bool:
        self.done.append(("stop", unit))
        if self.fault:
            raise JobFailed(unit, self.fault)
        return self.services.pop(unit, None) is not None

    def reset_failed(self, unit: str) -> bool:
        self.done.append(("reset", unit))
        return True


@pytest.fixture
def stage() -> Stage:
    return Stage()


def refusal(call: Callable[..., object], *args: Any) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        call(*args)
    return caught.value.code, caught.value.text


def test_names(stage: Stage) -> None:
    assert hosting.socket_unit("a1") == "orchestrate@a1.socket"
    assert hosting.service_unit("a1") == "orchestrate@a1.service"
    assert hosting.slice_unit("a1") == "orchestrate-a1.slice"
    for name in (hosting.socket_unit, hosting.service_unit, hosting.slice_unit):
        assert refusal(name, "a-1")[0] == "unit_invalid"
    for ask in (hosting.broker, hosting.listen):
        assert refusal(ask, stage, "*")[0] == "unit_invalid"
    assert refusal(hosting.end, stage, "*", "/run")[0] == "unit_invalid"
    assert stage.done == []


def test_a_broker_that_is_not_loaded(stage: Stage) -> None:
    assert hosting.broker(stage, "a1") is None
    stage.services["orchestrate@a1.service"] = SERVICE | {"StatusText": "round 1"}
    assert hosting.broker(stage, "a1") == hosting.BrokerUnit("active", "running", "round 1", 77, "success")


@pytest.fixture
def runtime_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ho", dir="/tmp") as name:
        yield name


def test_the_end_resets_what_failed(stage: Stage, runtime_dir: str) -> None:
    stage.others = [
        UnitState("orchestrate@a1.service", "loaded", "failed", "failed"),
        UnitState("orchestrate@a1.socket", "loaded", "inactive", "dead"),
        UnitState("orchestrate-a1.slice", "loaded", "inactive", "dead"),
        UnitState("orchestrate-a12.slice", "loaded", "active", "active"),
    ]
    hosting.end(stage, "a1", runtime_dir)
    assert stage.done == [("stop", "orchestrate-a1.slice"), ("reset", "orchestrate@a1.service")]


@pytest.mark.parametrize("state", ["active", "activating", "deactivating", "reloading"])
def test_a_unit_that_is_left(stage: Stage, runtime_dir: str, state: str) -> None:
    stage.others = [UnitState("orchestrate-a1.slice", "loaded", state, "")]
    assert refusal(hosting.end, stage, "a1", runtime_dir)[0] == "stop_failed"


def test_a_stop_that_did_not_come_to_its_end(stage: Stage, runtime_dir: str) -> None:
    stage.fault = "unfinished"
    assert refusal(hosting.end, stage, "a1", runtime_dir) == ("stop_failed", "the run did not stop: unfinished")


def test_who_listens_at_the_address(stage: Stage, runtime_dir: str) -> None:
    address = runtime.socket_path(runtime_dir, "a1")
    os.makedirs(os.path.dirname(address))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(address)
        hosting.end(stage, "a1", runtime_dir)
        sock.listen()
        os.unlink(address)
        assert refusal(hosting.end, stage, "a1", runtime_dir)[0] == "stop_failed"


def test_who_is_left_in_the_control_group(
    stage: Stage, runtime_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories as the kernel shows them; what waits for a change of theirs does not wait."""
    monkeypatch.setattr(cgroups, "_ROOTS", (str(tmp_path / "none"), str(tmp_path)))
    monkeypatch.setattr(hosting, "_SETTLING", 0.01)
    group = tmp_path / "nowhere/orchestrate.slice/orchestrate-a1.slice"
    inner = group / "worker-0123456789ab.scope"
    inner.mkdir(parents=True)
    (group / "cgroup.procs").write_text("")
    (group / "cgroup.controllers").write_text("")
    (inner / "cgroup.procs").write_text("4\n5\n")
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    told = refusal(hosting.end, stage, "a1", runtime_dir)
    assert told == ("stop_failed", "the run was stopped, and 2 processes of it are left")
    stage.fault = "canceled"
    (inner / "cgroup.procs").write_text("4\n")
    assert refusal(hosting.end, stage, "a1", runtime_dir)[1] == "the run was stopped, and 1 process of it is left"
    stage.fault = None
    (group / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    hosting.end(stage, "a1", runtime_dir)


def test_processes_that_only_the_manager_sees(stage: Stage, runtime_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "processes", lambda unit: [(4, "/x"), (5, "/x"), (6, "/x")])
    assert "3 processes" in refusal(hosting.end, stage, "a1", runtime_dir)[1]


def test_no_manager_is_said_as_what_it_is() -> None:
    for environ in ({}, {"XDG_RUNTIME_DIR": "/nonexistent"}, {"DBUS_SESSION_BUS_ADDRESS": "nonsense"}):
        with pytest.raises(ManagerUnreachable), Manager(environ):
            pass
