# SPDX-License-Identifier: Apache-2.0
"""What a run's broker does without its database: nothing leaves while a commit fails; what cannot be served says so."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.orchpeer import OrchPeer, Worker, fresh_id
from tests.contract.orchruns import Run
from tests.contract.orchteam import World, two_rounds
from tests.contract.peer import Frame
from tests.contract.servicemanager import Nursery, Program

WHOLE = {
    ("implementer", "plan", 1),
    ("implementer", "implementation", 1),
    ("reviewer", "review", 1),
    ("implementer", "implementation", 2),
    ("reviewer", "review", 2),
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    place = Nursery()
    yield place
    place.close()


class Trouble:
    """A round whose database fails from the moment at which a role makes the report on an assignment of `kind`."""

    def __init__(self, nursery: Nursery, role: str, kind: str) -> None:
        self.role, self.kind = role, kind
        self.begun = False
        self.world = World(Run(flow="phased"), nursery, self.think)
        self.run = self.world.run
        self.flag, self.tries = self.run.root / "flag", self.run.root / "tries"
        self.world.manager.orders = [{"flag": str(self.flag), "tries": str(self.tries)}]
        self.fail: Callable[[], object] = lambda: None

    def __enter__(self) -> Trouble:
        return self

    def __exit__(self, *rest: object) -> None:
        self.world.close()

    def think(self, role: str, kind: str, round_: int) -> Frame:
        if (role, kind) == (self.role, self.kind) and not self.begun:
            self.begun = True
            self.fail()
        return two_rounds(role, kind, round_)

    def until_degraded(self, code: str) -> None:
        """Let the team work until the database fails."""
        self.world.manager.start()
        self.world.come()
        said = f"; degraded: {code}"
        self.world.loop.until(lambda: self.world.manager.status.endswith(said), "did the status say so")

    def tried_again(self) -> None:
        """A commit was tried once more: whatever the broker was doing when it began to fail is done."""
        before = len(self.tries.read_text())
        while len(self.tries.read_text()) < before + 2:
            self.world.loop.turn(0.05)

    def told(self) -> list[object]:
        """Everything that the peers have been told so far."""
        members = [(member.requests, member.assignments, member.answers) for member in self.world.members.values()]
        return [*members, self.world.watcher.state, self.world.watcher.round, list(self.world.watcher.reports)]

    def nothing_leaves(self) -> None:
        """While nothing can be committed, nobody is told anything; new peers wait."""
        before = repr(self.told())
        stranger = OrchPeer(self.run.socket)
        request = {"version": 1, "type": "control", "token": self.run.control_token, "id": fresh_id()}
        stranger.send({**request, "action": "abort", "role": "reviewer", "delivery": None, "message": None})
        # Each attempt that fails tells the service manager; nobody else has anything to say.
        for _ in range(8):
            self.world.loop.turn(0.1)
        assert repr(self.told()) == before
        assert not stranger.ended(0)
        waiting = self.world.members[self.role].requests
        assert any(request["type"] in {"lifecycle", "report"} for request in waiting)
        self.stranger = stranger

    def goes_on(self) -> None:
        """It is over: the round ends as if nothing had been."""
        assert self.world.settle() == "ready"
        self.world.told()
        self.world.kept_its_word()
        assert self.world.work() == WHOLE
        assert self.world.losses() == 0
        assert self.stranger.recv()["status"] == "accepted"
        self.stranger.close()


PLACES = [("implementer", "plan"), ("implementer", "implementation"), ("reviewer", "review")]


@pytest.mark.parametrize("code", ["STATE_READ_ONLY", "STATE_FULL", "STATE_IO"])
@pytest.mark.parametrize(("role", "kind"), PLACES)
def test_nothing_leaves_while_a_commit_fails(nursery: Nursery, role: str, kind: str, code: str) -> None:
    with Trouble(nursery, role, kind) as trouble:
        trouble.fail = lambda: trouble.flag.write_text(code)
        trouble.until_degraded(code)
        trouble.nothing_leaves()
        assert len(trouble.tries.read_text()) > 1
        trouble.flag.unlink()
        trouble.goes_on()


@pytest.mark.parametrize(("role", "kind"), PLACES)
def test_a_disk_that_is_full(nursery: Nursery, role: str, kind: str) -> None:
    with Trouble(nursery, role, kind) as trouble:
        pid = 0
        before = (0, 0)

        def fill() -> None:
            nonlocal pid, before
            pid = trouble.world.manager.pid
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, before[1]))

        trouble.fail = fill
        trouble.until_degraded("STATE_FULL")
        trouble.nothing_leaves()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        trouble.goes_on()


def test_a_database_that_somebody_has_locked(nursery: Nursery) -> None:
    with Trouble(nursery, "implementer", "implementation") as trouble:
        with closing(sqlite3.connect(trouble.run.directory / "broker.sqlite3", isolation_level=None)) as other:
            trouble.fail = lambda: other.execute("BEGIN EXCLUSIVE")
            trouble.until_degraded("STATE_BUSY")
            trouble.nothing_leaves()
            other.execute("ROLLBACK")
        trouble.goes_on()


def test_a_database_that_is_away_for_a_while(nursery: Nursery) -> None:
    with Trouble(nursery, "reviewer", "review") as trouble:
        here, there = trouble.run.directory / "broker.sqlite3", trouble.run.root / "away"
        trouble.fail = lambda: here.rename(there)
        trouble.until_degraded("STATE_GONE")
        trouble.nothing_leaves()
        there.rename(here)
        trouble.goes_on()


@pytest.mark.parametrize(("role", "kind"), PLACES)
def test_a_broker_is_killed_while_nothing_can_be_committed(nursery: Nursery, role: str, kind: str) -> None:
    with Trouble(nursery, role, kind) as trouble:
        trouble.fail = lambda: trouble.flag.write_text("STATE_FULL")
        trouble.until_degraded("STATE_FULL")
        manager = trouble.world.manager
        trouble.tried_again()
        before = repr(trouble.told())
        for _ in range(2):
            trouble.tried_again()
            manager.status = ""
            manager.kill()
            said = "degraded: STATE_FULL"
            trouble.world.loop.until(lambda: manager.status.endswith(said), "did the next one say so")  # noqa: B023
        trouble.nothing_leaves()
        assert repr(trouble.told()) == before
        assert manager.starts == 3
        trouble.flag.unlink()
        trouble.goes_on()


# A run that cannot be served.


def spoil_pages(run: Run) -> None:
    with (run.directory / "broker.sqlite3").open("r+b") as file:
        file.write(b"not a database, " * 512)


def spoil_version(version: int) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        with closing(sqlite3.connect(run.directory / "broker.sqlite3", isolation_level=None)) as database:
            database.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))

    return spoil


def opened(name: str, mode: int) -> Callable[[Run], None]:
    return lambda run: (run.directory / name).chmod(mode)


def removed(name: str) -> Callable[[Run], None]:
    return lambda run: (run.directory / name).unlink()


def linked(run: Run) -> None:
    shutil.move(run.directory, run.root / "elsewhere")
    run.directory.symlink_to(run.root / "elsewhere")


def place(run: Run) -> Path:
    return run.runtime / "agent-intercom" / "run" / run.unit / "run.json"


SPOILED: dict[str, tuple[Callable[[Run], object], str]] = {
    "pages": (spoil_pages, "STATE_DAMAGED"),
    "schema-11": (spoil_version(11), "STATE_NEWER"),
    "no-directory": (lambda run: shutil.rmtree(run.directory), "run_gone"),
    "linked-directory": (linked, "run_foreign"),
    "no-database": (removed("broker.sqlite3"), "STATE_GONE"),
    "no-manifest": (removed("manifest.json"), "run_gone"),
    "no-startup": (removed("startup.json"), "startup_missing"),
    "no-token": (removed("reviewer.token"), "token_invalid"),
    "open-token": (opened("control.token", 0o644), "token_invalid"),
    "open-place": (lambda run: place(run).chmod(0o644), "run_foreign"),
    "no-place": (lambda run: place(run).unlink(), "run_unknown"),
    "torn-place": (lambda run: place(run).write_text("{"), "run_invalid"),
    "torn-manifest": (lambda run: (run.directory / "manifest.json").write_text("{"), "manifest_invalid"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_run_that_cannot_be_served_says_so(nursery: Nursery, what: str) -> None:
    spoil, code = SPOILED[what]
    run = Run()
    world = World(run, nursery)
    try:
        spoil(run)
        before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
        manager = world.manager
        manager.start()
        world.loop.until(lambda: manager.readies, "did it come up")
        assert manager.status == f"degraded: {code}; every request is refused"
        answer = run.command("abort", "reviewer")
        assert answer is not None and answer["status"] == "uncertain"
        worker = Worker(run.socket, "implementer", run.tokens["implementer"])
        frame = worker.ask("hello", generation=1)
        assert (frame["success"], frame["status"]) == (False, "broker_not_ready")
        worker.expect_eof()
        worker.close()
        assert manager.starts == 1 and not manager.ends and world.manager.pid
        assert (run.root / "stderr").read_text() == ""
        # It is left as it was found, for who looks into it; the lock of a broker says nothing.
        left = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file() and path.suffix != ".lock"}
        assert left == {path: content for path, content in before.items() if path.suffix != ".lock"}
    finally:
        world.close()


def test_a_second_broker_of_the_run_ends_at_once() -> None:
    run = Run()
    world = World(run)
    try:
        world.manager.start()
        world.come()
        statuses: list[int] = []
        errors = run.root / "second"
        environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(run.runtime)}
        environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "service")}
        second = Program(world.loop, environment, run.unit, errors, statuses.append)
        second.start([("run", world.manager.listener.fileno())], {})
        world.loop.until(lambda: statuses, "did it end")
        # The status that keeps the unit from starting it again.
        assert os.waitstatus_to_exitcode(statuses[0]) == 3
        assert errors.read_text() == "orchestrate-broker: another broker serves this run\n"
        assert world.settle() == "ready"
        assert world.losses() == 0
    finally:
        world.close()
