# SPDX-License-Identifier: Apache-2.0
"""Looking at runs under a real service manager: units are told, and nobody is woken by it."""

from __future__ import annotations

import json
from subprocess import Popen
from typing import Any

from tests.system import test_orch_start
from tests.system.test_orch_start import RUNTIME, Line
from tests.system.wire import until

line = test_orch_start.line

READS = (
    ("list", "--all"),
    ("status",),
    ("events",),
    ("usage",),
    ("supervisor", "sessions"),
    ("supervisor", "snapshot", "pi-project-agents"),
    ("supervisor", "events", "pi-project-agents"),
)


def broker_state(line: Line, unit: str) -> str:
    command = f"systemctl --user show -P ActiveState orchestrate@{unit}.service"
    return str(line.bed.as_user("alice", command).stdout).strip()


def waits(line: Line, *words: str) -> Popen[str]:
    """`orchestrate wait`, once the kernel is to wake it and nothing else will."""
    found: Popen[str] = line.bed.popen("alice", ["orchestrate", "wait", "--json", *words])

    def watches() -> bool:
        pids = line.bed.run(["pgrep", "-u", "alice", "-f", " ".join(["orchestrate wait --json", *words])], check=False)
        fds = [line.bed.run(["ls", "-l", f"/proc/{pid}/fd"], check=False).stdout for pid in pids.stdout.split()]
        return any("inotify" in each for each in fds)

    until(watches, "it waits")
    return found


def waited(found: Popen[str], code: int = 0) -> dict[str, Any]:
    out, err = found.communicate(timeout=60)
    assert (found.returncode, err) == (code, ""), out
    data: dict[str, Any] = json.loads(out)["data"]
    return data


def test_a_run_is_waited_for(line: Line) -> None:
    """Until a person is needed, because the worker that works has ended; and until the run has."""
    line.start("--implementer-thinking", "low")
    for role in ("implementer", "reviewer"):
        line.seen(role, 1)
    settled, ready = waits(line, "--until", "settled"), waits(line, "--until", "ready")
    end = waits(line, "--until", "end")
    line.bed.as_user("alice", f"systemctl --user kill --signal=KILL {line.worker('implementer')}")
    found = waited(settled)
    assert (found["reached"], found["life"]) == (True, "live")
    assert {each["role"] for each in found["awaited"]} >= {"implementer"}
    assert ready.poll() is None and end.poll() is None
    line.json("stop", "--yes")
    assert waited(end)["life"] in {"stopped", "gone"}
    assert waited(ready, 1)["reached"] is False


def test_looking_wakes_nobody_and_tells_of_units(line: Line) -> None:
    started = line.start("--implementer-thinking", "low")
    session = started["session"]
    for role in ("implementer", "reviewer"):
        line.seen(role, 1)
    found = line.json("status")
    unit = found["unit"]
    assert (found["session"], found["live"], found["host"]) == (session, True, "systemd")
    assert found["paths"]["observer_socket"] == f"{RUNTIME.format(uid=line.uid)}/{unit}.sock"
    assert (found["broker_unit"]["active"], found["broker_unit"]["sub"]) == ("active", "running")
    assert [(each["role"], each["generation"], each["active"]) for each in found["workers"]] == [
        ("implementer", 1, "active"),
        ("reviewer", 1, "active"),
    ]
    assert all(each["pid"] for each in found["workers"])
    # They run and have not connected: there is nothing that a person could do about it yet.
    assert found["next"] == []
    pid = line.bed.show("alice", f"orchestrate@{unit}.service", "MainPID")
    reviewer = line.worker("reviewer")
    line.bed.as_user("alice", f"systemctl --user kill --signal=KILL {reviewer}")

    def ended() -> dict[str, Any] | None:
        found = line.json("status")
        workers = {each["role"]: each for each in found["workers"]}
        return found if workers["reviewer"]["active"] not in {"active", "deactivating"} else None

    found = until(ended, "the end of the reviewer")
    assert [step["command"] for step in found["next"]] == [f"orchestrate restart {session} --role reviewer --yes"]
    (gone,) = [each for each in found["workers"] if each["role"] == "reviewer"]
    assert (gone["unit"], gone["pid"]) == (reviewer, 0) and gone["exit"] is None
    assert line.bed.show("alice", f"orchestrate@{unit}.service", "MainPID") == pid

    # Whoever stops the broker ends its workers.
    line.bed.as_user("alice", f"systemctl --user stop orchestrate@{unit}.service")
    assert line.json("status")["broker_unit"]["active"] == "inactive"
    until(lambda: "worker-" not in line.states(), "the end of the workers")
    before = line.files()
    for words in READS:
        line.json(*words)
        line.call(*words)
    assert broker_state(line, unit) == "inactive" and line.files() == before
    [listed] = line.json("list")["sessions"]
    assert (listed["session"], listed["live"], listed["unit"]) == (session, True, unit)

    line.json("stop", "--yes")
    for words in READS:
        line.json(*words)
    told = line.json("status")
    assert (told["live"], told["unit"], told["workers"], told["next"]) == (False, None, None, [])
    assert line.json("list")["sessions"] == []
    assert line.states() == ""
