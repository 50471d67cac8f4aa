# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` makes of what it has found: words, commands to copy, and no more than callers take."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import doctor, findings
from agent_intercom.cli.orchestrate.findings import Systemd
from agent_intercom.cli.verdicts import Check
from agent_intercom.host.manager import UnitState
from agent_intercom.workers import confinement
from agent_intercom.workers.hosted import WorkerUnit
from tests.unit.orchcli import Home
from tests.unit.test_orch_doctor import checks, home, machine, say, well
from tests.unit.test_orch_pruning import make, place

__all__ = ["home", "machine"]

LIMIT = 256 * 1024


def unit(role: str, generation: int, active: str, result: str) -> WorkerUnit:
    """The scope unit of a worker, or what it was."""
    return WorkerUnit(role, generation, "worker-0123456789ab.scope", active, "", 0, result, "", (), None)


def test_a_command_is_told_as_it_is_to_be_typed(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_PI_PACKAGE", "/nowhere")
    error = machine.json("doctor").error
    assert error[0] == "missing_prerequisite" and ". `pi install npm:pi-tmux-orchestrator`, or name" in error[1]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    say(monkeypatch, Systemd("the user's bus does not answer"))
    assert ". Run this in a login session, or have" in machine.json("doctor").error[1]


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_has_failed(machine: Home, monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    run = make(machine, "team", "r1", 0)
    gone = unit("reviewer", 2, "inactive", "exit-code")
    workers = {"teamr1": [unit("implementer", 3, "active", "success"), gone]}
    say(monkeypatch, well(machine, failed=["orchestrate@old1.service"], workers=workers if lives else {}))
    with contextlib.ExitStack() as open_sockets:
        if lives:
            listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(place(machine, run))
            listener.listen()
        told = checks(machine)
    if lives:
        state, text, way_out = told["failed-worker"]
        assert (state, text) == ("warn", "team: the worker of reviewer has ended (exit-code)")
        assert way_out == "`orchestrate restart team --role reviewer --yes` starts another"
    else:
        assert "failed-worker" not in told
    assert told["failed-units"][1] == "have failed: orchestrate@old1.service"
    assert told["failed-units"][2].endswith("then: `systemctl --user reset-failed 'orchestrate*'`")


def test_a_worker_that_is_paused(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(machine, "team", "r1", 0)
    still = unit("reviewer", 2, "active", "success")._replace(paused=True)
    say(monkeypatch, well(machine, workers={"teamr1": [unit("implementer", 3, "active", "success"), still]}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place(machine, run))
        listener.listen()
        told = checks(machine)["paused-worker"]
    assert told[:2] == ("warn", "team: the worker of reviewer is paused")
    assert told[2] == "`orchestrate worker resume teamr1/reviewer` has it go on"


@pytest.mark.parametrize(
    ("abi", "filters", "state", "words"),
    [
        (0, True, "warn", "no Landlock"),
        (1, True, "warn", "but-truncation"),
        (7, True, "ok", "files-read-only, mounts-off, tracing-own, no-new-privileges, calls-filtered, network-off"),
        (7, False, "warn", "tcp-off"),
    ],
)
def test_what_the_kernel_enforces(
    machine: Home, monkeypatch: pytest.MonkeyPatch, abi: int, filters: bool, state: str, words: str
) -> None:
    monkeypatch.setattr(confinement, "abi", lambda: abi)
    monkeypatch.setattr(confinement, "filters", lambda: filters)
    told = checks(machine)["confinement"]
    assert told[0] == state and words in told[1]
    assert ("libseccomp.so.2" in told[2]) == (abi > 0 and not filters)
    found = machine.json("doctor").data["confinement"]
    assert (found["landlock_abi"], found["filters"]) == (abi, filters)


@pytest.mark.parametrize(
    ("changes", "name", "state", "words"),
    [
        ({}, "worker-service", "ok", "orchestrate-workers.socket listens"),
        ({"service": []}, "worker-service", "ok", "does not listen"),
        (
            {"service": [UnitState("orchestrate-workers.service", "loaded", "failed", "failed")]},
            "worker-service",
            "fail",
            "no worker can be started",
        ),
        ({"freezer": True}, "freezer", "ok", "can be paused"),
        ({"freezer": False}, "freezer", "warn", "cannot be paused"),
        ({"strays": 1}, "stray-workers", "warn", "1 worker lives of which the worker service does not know"),
        (
            {"unwritten": "store_unusable", "unusable": "another program holds the registry open"},
            "worker-registry",
            "fail",
            "the registry cannot be used (another program holds the registry open)",
        ),
        ({"unwritten": "store_unusable"}, "worker-registry", "fail", "the registry cannot be written (store_unusable)"),
        ({"strays": 2}, "stray-workers", "warn", "2 workers live of which the worker service does not know"),
        ({"oom_policy": False}, "oom-policy", "warn", "knows no OOMPolicy="),
    ],
)
def test_how_workers_are_seen_to(
    machine: Home, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str, state: str, words: str
) -> None:
    say(monkeypatch, well(machine, **changes))
    told = checks(machine)[name]
    assert told[0] == state and words in told[1]


def test_a_bus_without_a_manager(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, Systemd("no service manager is on the user's bus, or it does not answer"))
    assert "DBUS" not in checks(machine)["systemd"][2]
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/tmp/dbus-x")
    state, text, way_out = checks(machine)["systemd"]
    assert state == "unknown" and "no service manager is on the user's bus" in text
    assert "`unset DBUS_SESSION_BUS_ADDRESS`, where that is a bus without it" in way_out


def test_an_answer_is_no_longer_than_callers_take(machine: Home) -> None:
    machine.config("".join(f"a{number} = 1\n" for number in range(6000)))
    said = machine.json("doctor", "--skip-model-check")
    assert len(said.out) < LIMIT
    told = [check for check in said.envelope["data"]["checks"] if check["check"] == "settings"]
    assert len(told) <= findings.MAX_PROBLEMS + 1


def test_faults_come_before_what_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check("well", "ok", "x" * 5000) for _ in range(doctor.MAX_CHECKS * 2)]
    found += [Check("bad", "fail", "y" * 5000, "z" * 5000)]
    data = doctor.answer({}, found).data
    assert data["checks_total"] == len(found) and len(data["checks"]) == doctor.MAX_CHECKS
    assert data["checks"][-1]["check"] == "bad"
    assert {len(check["text"]) for check in data["checks"]} == {doctor.MAX_TEXT}


def test_one_is_told_as_one(machine: Home) -> None:
    make(machine, "a", "new", 1)
    assert checks(machine)["retained"][1].startswith("1 run lies there, ")


def test_a_session_that_cannot_be_read(machine: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = make(machine, "b", "r", 1).parent
    real = os.listdir

    def refuse(name: str = ".") -> list[str]:
        if Path(name) == shut:
            raise PermissionError(13, "Permission denied")
        return real(name)

    monkeypatch.setattr(os, "listdir", refuse)
    told = checks(machine)["unreadable-session"]
    assert told == (
        "warn",
        "1 session cannot be read, and nothing in it",
        f"look at {shut}, and at its mode and owner",
    )
