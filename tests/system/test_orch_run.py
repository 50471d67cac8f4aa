# SPDX-License-Identifier: Apache-2.0
"""A run from its first unit to `ready`, installed, under systemd, with the real Pi as its workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mockmodel import Model, call, report, saved
from tests.system import realpi
from tests.system.runs import KILL, Run, Team
from tests.system.wire import Door

HOME = "/home/alice/.local/worker"
AGENT = f"{HOME}/agent"

TEXT = "words " * 1000
SCRIPT = {
    ("implementer", "implementation", 1): [
        {"hold": "implementation"},
        call("write", path="feature.py", content=TEXT),
        call("read", path="feature.py"),
        report(),
    ],
    ("implementer", "implementation", 2): [
        call("read", path="feature.py"),
        {"hold": "repair"},
        call("write", path="README.md", content=TEXT),
        report(changed_paths=["README.md"]),
    ],
    ("reviewer", "review", 1): [
        call("read", path="feature.py"),
        report(
            verdict="changes_requested",
            findings=[{"severity": "high", "summary": "It says nothing.", "path": "feature.py"}],
        ),
    ],
    ("reviewer", "review", 2): [call("read", path="README.md"), report()],
}

DONE = [
    ("implementer", "plan", 1),
    ("probe", "probe", 1),
    ("implementer", "implementation", 1),
    ("reviewer", "review", 1),
    ("implementer", "implementation", 2),
    ("reviewer", "review", 2),
]


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened
        bed.as_user("alice", "systemctl --user stop orchestrate.slice; systemctl --user reset-failed")


def test_two_rounds_with_the_real_pi(bed: Any, door: Door) -> None:
    """Planned, probed, reviewed, sent back and reviewed again; the broker is killed on the way."""
    programs = realpi.programs(bed.root)
    run = Run(bed, door, "probe", flow="phased")
    with Model(SCRIPT) as model:
        bed.as_user("alice", ["mkdir", "-p", HOME])
        realpi.prepare(bed.root / AGENT.lstrip("/"), model.url)
        run.start()
        assert run.states() == ("active", "inactive", "active")
        run.launch("implementer", programs, HOME, AGENT)
        run.told("connecting, round 1; 1 of 3 workers connected")
        for role in ("reviewer", "probe"):
            run.launch(role, programs, HOME, AGENT)
        assert model.held("implementation")
        run.told("active, round 1; 3 of 3 workers connected")
        assert not (run.path / "startup.json").exists()
        model.release("implementation")
        assert model.held("repair")
        run.told("active, round 2; 3 of 3 workers connected")
        before = run.pid
        run.systemctl(*KILL, run.service)
        run.next_pid(before)
        run.told("active, round 2; 3 of 3 workers connected")
        model.release("repair")
        run.told("ready, round 2; 3 of 3 workers connected")
    assert sorted(run.done()) == sorted(DONE)
    assert run.workflow() == ("ready", 2)
    for role, kind in (("implementer", "implementation"), ("reviewer", "review")):
        assert saved(model.requests, role, kind) >= 0.5, role
    check_journal(bed, run)
    run.stop()
    assert run.states() == ("inactive",) * 3
    assert bed.run(["pgrep", "-u", "alice", "-f", "orchestrator-worker"], check=False).stdout == ""


def check_journal(bed: Any, run: Run) -> None:
    """Every event of the database is told once, in order, in the same words; and each can be explained."""
    entries = [entry for entry in run.journal() if "INTERCOM_EVENT" in entry]
    assert {entry["_SYSTEMD_USER_UNIT"] for entry in entries} == {run.service}
    told = run.told_events()
    assert told == run.stored_events()
    names = [event["event"] for event in told]
    assert [name for name in names if name.startswith("workflow")] == [
        "workflow_started",
        "workflow_active",
        "workflow_ready",
    ]
    explained = bed.as_user("alice", ["journalctl", "--user", "-x", "-u", run.service]).stdout
    assert explained.count("Subject: A run went on") == len(told)
    assert "Event:   workflow_ready" in explained


def test_a_run_that_waits_for_a_person_costs_nothing(bed: Any, door: Door) -> None:
    run = Run(bed, door)
    run.start()
    with Team(run, pauses=[("implementer", "implementation", 1)]) as team:
        team.come()
        implementer = team.workers["implementer"]
        team.until(lambda: implementer.thinks, "did it think")
        implementer.ask("lifecycle", state="waiting", usage=None)
        team.until(lambda: team.watcher.state == "needs_attention" and implementer.thinks, "was attention needed")
        run.told("needs_attention, round 1; 2 of 2 workers connected")
        process = bed.root / f"proc/{run.pid}"

        def spent() -> tuple[int, int]:
            """Processor time in ticks, and how often the process woke up."""
            ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
            lines = (process / "status").read_text().splitlines()
            (switches,) = [line.split()[1] for line in lines if line.startswith("voluntary")]
            return sum(map(int, ticks)), int(switches)

        ticks, wakes = spent()
        # That nothing happens can only be waited for.
        time.sleep(5)
        later, more = spent()
        # Half of the watchdog's time is longer than this, so it pings at most once.
        assert more - wakes <= 2
        # The time of one ping can be what was missing of a tick.
        assert later - ticks <= (more > wakes)
        answer = run.send("implementer", "Go on.")
        assert answer["status"] == "accepted"
        implementer.go_on()
        team.until(team.settled, "did the run end")
        assert team.watcher.state == "ready"
    assert run.workflow() == ("ready", 2)
