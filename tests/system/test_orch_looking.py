# SPDX-License-Identifier: Apache-2.0
"""Looking at runs under a real service manager: units are told, and nobody is woken by it."""

from __future__ import annotations

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
