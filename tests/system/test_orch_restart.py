# SPDX-License-Identifier: Apache-2.0
"""A run's broker is restarted, killed and hung up under systemd: nobody is cut off, and no work is handed out twice."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.orchpeer import body, plan
from tests.contract.peer import Frame
from tests.system.runs import HANG_UP, KILL, Run, Team, What
from tests.system.wire import Door, until

ROUNDS_OF_TWO = [
    ("implementer", "plan", 1),
    ("implementer", "implementation", 1),
    ("probe", "probe", 1),
    ("reviewer", "review", 1),
    ("implementer", "implementation", 2),
    ("reviewer", "review", 2),
]
KILLS = 10


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened
        bed.as_user("alice", "systemctl --user stop orchestrate.slice; systemctl --user reset-failed")


def restored(run: Run) -> list[tuple[int, int]]:
    """What each broker that went on says: connections kept and closed."""
    entries = [entry for entry in run.journal() if entry.get("INTERCOM_EVENT") == "BROKER_RESTORED"]
    return [(int(entry["INTERCOM_KEPT"]), int(entry["INTERCOM_CLOSED"])) for entry in entries]


def test_every_way_to_end_a_broker_in_the_middle_of_a_round(bed: Any, door: Door) -> None:
    bed.drop_in("alice", "orchestrate@.service", "[Service]\nWatchdogSec=3s\n")
    run = Run(bed, door, "probe", flow="phased")
    run.start()

    def reexec() -> None:
        run.systemctl("daemon-reexec")
        run.systemctl("restart", run.service)

    # An end in order stores what was not stored yet, so it does not come first.
    ways = {
        ROUNDS_OF_TWO[0]: lambda: run.systemctl(*KILL, run.service),
        ROUNDS_OF_TWO[1]: lambda: run.systemctl(*HANG_UP, run.service),
        ROUNDS_OF_TWO[2]: lambda: run.systemctl("restart", run.service),
        ROUNDS_OF_TWO[3]: reexec,
        ROUNDS_OF_TWO[4]: lambda: run.systemctl(*KILL, run.service),
    }
    with Team(run, pauses=ways) as team:
        team.come()
        for (role, kind, round_), way in ways.items():
            worker = team.workers[role]
            team.until(lambda worker=worker: worker.thinks, "did it think")
            assert worker.pondered is not None and (worker.pondered["kind"], worker.pondered["round"]) == (kind, round_)
            team.answered()
            before = run.pid
            way()
            run.next_pid(before)
            team.answered()
            worker.go_on()
        team.until(team.settled, "did the run end")
        assert (team.watcher.state, team.closes()) == ("ready", 0)
        assert not any(worker.repeated for worker in team.workers.values())
        assert sorted(team.work()) == sorted(run.done()) == sorted(ROUNDS_OF_TWO)
    run.told("ready, round 2")
    assert run.workflow() == ("ready", 2)
    assert restored(run) == [(len(team.lines), 0)] * len(ways)
    assert run.states() == ("active",) * 3


class Endless:
    """What a team thinks whose reviewer is content only once there is `enough`."""

    def __init__(self) -> None:
        self.enough = False

    def __call__(self, role: str, kind: str, round_: int) -> Frame:
        if kind == "plan":
            return plan()
        if kind == "review":
            return body(role, verdict="approved" if self.enough else "changes_requested")
        return body(role, changed_paths=["src/a.py"] if role == "implementer" else [])


def kill_under_traffic(run: Run, kills: int) -> int:
    """Kill the broker while the rounds go on, `kills` times or until that made the run uncertain; how often."""
    think = Endless()
    killed = 0
    with Team(run, think) as team:
        team.come()

        def go_on() -> None:
            round_ = team.watcher.round + 3
            team.until(lambda: team.watcher.round >= round_ or team.settled(), "did the rounds go on")

        go_on()
        while killed < kills and team.watcher.state != "uncertain":
            before = team.closes()
            team.systemctl(*KILL, run.service)
            killed += 1
            go_on()
            # The one that was being read or written at that moment, and only that.
            assert team.closes() - before <= 1
        think.enough = True
        team.until(team.settled, "did the run end")
        # Nobody can tell whether what was on its way on a connection that was lost has arrived.
        assert team.watcher.state == "ready" or team.closes()
        work, made = team.work(), run.done()
        assert len(made) == len(set(made))
        assert set(made) == work or (work < set(made) and team.watcher.state == "uncertain")
        assert all(worker.baselines == 1 for worker in team.workers.values())
        if team.watcher.state == "ready":
            assert work == complete(team.watcher.round)
        assert [(kept + gone, gone <= 1) for kept, gone in restored(run)] == [(len(team.lines), True)] * killed
        assert sum(gone for _, gone in restored(run)) == team.closes()
        run.told(team.watcher.state)
        told, stored = run.told_events(), run.stored_events()
        # A broker that dies right after a line may have it said again by the next, but none is missing or made up.
        assert [event for event, _ in itertools.groupby(told)] == stored
        assert len(told) - len(stored) <= killed
    return killed


def complete(rounds: int) -> set[What]:
    """All work of so many rounds."""
    each = (("implementer", "implementation"), ("probe", "probe"), ("reviewer", "review"))
    return {("implementer", "plan", 1)} | {(*what, round_) for what in each for round_ in range(1, rounds + 1)}


def test_kills_under_traffic(bed: Any, door: Door) -> None:
    left = KILLS
    while left:
        run = Run(bed, door, "probe", flow="phased")
        run.start()
        left -= kill_under_traffic(run, left)
        run.stop()


def test_kills_of_brokers_that_are_coming_up(bed: Any, door: Door) -> None:
    """However far the one before had come: it continued somebody else's state, and so does the next."""
    run = Run(bed, door, "probe", flow="phased")
    run.start()
    with Team(run, pauses=[("implementer", "implementation", 1), ("probe", "probe", 1)]) as team:
        team.come()
        paused = [team.workers[role] for role in ("implementer", "probe")]
        team.until(lambda: all(worker.thinks for worker in paused), "did they think")
        team.answered()
        before = run.pid
        for _ in range(KILLS):
            run.systemctl(*KILL, run.service)
            # It was started, and no more than that.
            before = until(lambda before=before: (pid := run.pid) and pid != before and pid, "the next broker")
        team.answered()
        for worker in paused:
            worker.go_on()
        team.until(team.settled, "did the run end")
        assert (team.watcher.state, team.closes()) == ("ready", 0)
        assert sorted(team.work()) == sorted(run.done()) == sorted(ROUNDS_OF_TWO)
    assert run.shown("NRestarts") == str(KILLS)


def hung_up(sock: socket.socket | None) -> bool:
    assert sock is not None
    waiting = select.poll()
    waiting.register(sock, select.POLLRDHUP)
    return bool(waiting.poll(0))


def gone(run: Run, process: Path) -> None:
    """Nothing of the run is left but its directory, and nothing brings it back."""
    socket_, _, slice_ = run.states()
    # The socket of a service that may not be started again fails, too.
    assert socket_ in {"inactive", "failed"}
    assert slice_ == "inactive"
    assert not process.exists()
    assert not run.place.exists()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            run.connect()
        for kind in ("socket", "service"):
            run.systemctl("start", f"orchestrate@{run.unit}.{kind}", check=False)
    assert run.pid == 0
    assert {"manifest.json", "broker.sqlite3"} <= {file.name for file in run.path.iterdir()}
    assert not (run.path / "startup.json").exists()


STUBBORN = ("sh", "-c", "trap '' TERM; while :; do sleep 1000; done")
"""A worker that does not go when it is asked to."""

HALF = [("implementer", "implementation", 1)]


def test_stopping_the_slice_ends_a_run_wherever_it_is(bed: Any, door: Door) -> None:
    active, connecting = Run(bed, door), Run(bed, door)
    for run in (active, connecting):
        run.start()
    with Team(active, pauses=HALF) as team, Team(connecting) as half:
        team.come()
        team.until(lambda: team.workers["implementer"].thinks, "did it think")
        reviewer = half.workers["reviewer"]
        reviewer.connect()
        half.until(lambda: reviewer.idle, "was it admitted")
        assert (connecting.path / "startup.json").exists()
        for run, lines in ((active, team.lines), (connecting, (reviewer,))):
            run.scope("stubborn", STUBBORN)
            process = run.bed.root / f"proc/{run.pid}"
            run.stop()
            assert run.bed.show("alice", f"orchestrate-{run.unit}-stubborn.scope", "ActiveState") != "active"
            assert all(hung_up(line.socket) for line in lines)
            gone(run, process)
    assert active.workflow() == ("active", 1)
    assert connecting.workflow() == ("connecting", 1)


def test_a_broker_that_fails_for_good_takes_its_run_along(bed: Any, door: Door) -> None:
    bed.drop_in("alice", "orchestrate@.service", "[Unit]\nStartLimitBurst=2\n")
    run = Run(bed, door)
    run.start()
    with Team(run, pauses=HALF) as team:
        team.come()
        team.until(lambda: team.workers["implementer"].thinks, "did it think")
        run.scope("stubborn", STUBBORN)
        before = run.pid
        run.systemctl(*KILL, run.service)
        last = run.next_pid(before)
        team.answered()
        run.systemctl(*KILL, run.service)
        until(lambda: run.states()[2] == "inactive", "the end of the run")
        assert run.shown("ActiveState") == "failed"
        assert all(hung_up(line.socket) for line in team.lines)
        assert run.bed.show("alice", f"orchestrate-{run.unit}-stubborn.scope", "ActiveState") != "active"
        gone(run, run.bed.root / f"proc/{last}")
    assert run.workflow() == ("active", 1)
