# SPDX-License-Identifier: Apache-2.0
"""The broker is killed at every step of two rounds, while the published bridges and the published parent are at work.

All three speak through a gate that sees each frame, numbers it and can keep it: a step is one frame that has left its
sender and has not arrived, with every other frame kept as well. What the dead broker left is kept by a service manager,
or lost with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import pytest

from tests.contract.faultybroker import UNRECORDED
from tests.contract.nodepeers import HANG, Parent, Worker
from tests.contract.orchruns import SESSION, Run
from tests.contract.orchteam import surroundings
from tests.contract.servicemanager import Loop, Nursery, ServiceManager

Frame: TypeAlias = dict[str, Any]
Rules: TypeAlias = Sequence[Mapping[str, object]]

STUBBORN = {"attempts": 50}
"""The agent tries again to report when the bridge could not tell whether it had."""

RULES: dict[str, Rules] = {
    "implementer": [STUBBORN],
    "reviewer": [{**STUBBORN, "round": 1, "report": {"verdict": "changes_requested"}}, STUBBORN],
}
SPECIALISTS = ("probe", "playwright", "django")
WORK = {(kind, round_) for kind in ("implementation", "review") for round_ in (1, 2)}
WORK_OF_ALL = WORK | {("plan", 1)} | {(role, round_) for role in SPECIALISTS for round_ in (1, 2)}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    place = Nursery()
    yield place
    place.close()


class Step(NamedTuple):
    """A frame on its way on `line`: `peer` is a role or `parent`, `up` is the way to the broker.

    A response has the name of the request that it answers in its own, as `recorded ack baseline`.
    """

    line: Line
    peer: str
    up: bool
    name: str
    frame: Frame


class Line:
    """One connection through the gate."""

    def __init__(self, deliveries: dict[str, str]) -> None:
        self.peer = ""
        self.admitted = False
        self.asking = False
        self.left = False
        """The peer has closed its end."""
        self.lost = False
        """The broker's end was closed first."""
        self._requests: dict[str, str] = {}
        self._deliveries = deliveries

    def step(self, frame: Frame, up: bool) -> Step:
        kind = frame["type"]
        if up:
            self.peer = self.peer or frame.get("role", "parent")
            words = [kind, *(frame[key] for key in ("state", "phase") if key in frame)]
            if kind == "ack":
                words.append(self._deliveries[frame["delivery_id"]])
            name = self._requests[frame["id"]] = " ".join(words)
        elif kind == "response":
            self.admitted = True
            name = f"{frame['status']} {self._requests.get(frame['id'], 'nothing')}"
        elif kind in {"context", "assignment"}:
            name = self._deliveries[frame["id"]] = frame["kind"]
        else:
            name = " ".join([kind, *(frame[key] for key in ("role", "state") if key in frame)])
        return Step(self, self.peer, up, name, frame)


class Gate:
    """A socket that peers connect to; each connection is led on to the broker's socket.

    `passing` is awaited for each step before its frame goes on; no other frame passes meanwhile. While `held` is true
    of a step, it and what is behind it have to wait for others.
    """

    def __init__(self, path: Path, broker: Path) -> None:
        self.path = path
        self.steps: list[Step] = []
        self.lines: list[Line] = []
        self.passing: Callable[[Step], Awaitable[None]] | None = None
        self.patient = False
        """A peer's next frame has to wait until the one before is answered."""
        self.failure: Exception | None = None
        self.held: Callable[[Step], bool] = lambda step: False
        self.moved = asyncio.Event()
        """Set, and another one put in its place, when anything has happened."""
        self._broker = broker
        self._deliveries: dict[str, str] = {}
        self._one = asyncio.Lock()

    def wake(self) -> None:
        """Have those look again who wait for something."""
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        server = await asyncio.start_unix_server(self._accept, self.path)
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = Line(self._deliveries)
        self.lines.append(line)
        try:
            # The server's own callback takes a cancelled task for a fault.
            with contextlib.suppress(asyncio.CancelledError):
                await self._lead(line, reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)
            self.wake()

    async def _lead(self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection on to the broker until either end is closed."""
        onward, back = await asyncio.open_unix_connection(self._broker)
        pumps = [
            asyncio.create_task(self._pump(line, reader, back, up=True)),
            asyncio.create_task(self._pump(line, onward, writer, up=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            line.lost = not line.left
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.close()

    async def _pump(
        self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                try:
                    head = await reader.readexactly(4)
                except (asyncio.IncompleteReadError, ConnectionError):
                    line.left |= up
                    return
                payload = await reader.readexactly(*struct.unpack(">I", head))
                step = line.step(json.loads(payload), up)
                while self.held(step) or (up and self.patient and line.asking):
                    await self.moved.wait()
                async with self._one:
                    self.steps.append(step)
                    if up or step.frame["type"] == "response":
                        line.asking = up
                    await self._pass(step)
                    writer.write(head + payload)
                    self.wake()
                await writer.drain()

    async def _pass(self, step: Step) -> None:
        try:
            if self.passing is not None:
                await self.passing(step)
        except Exception as error:
            self.failure = error
            raise


class Nested(Loop):
    """A loop of callbacks that turns within asyncio's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def join(self) -> None:
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._due)

    def leave(self) -> None:
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())

    def _due(self) -> None:
        self.turn(0)
        self._wake()


class World:
    """A run under a service manager, with the published peers behind a gate. Its roles have `work` to do."""

    def __init__(self, run: Run, nursery: Nursery, work: set[tuple[str, int]]) -> None:
        self.run = run
        self.work = work
        self.gate = Gate(run.root / "gate", run.socket)
        self.loop = Nested(self.gate.wake)
        self.manager = ServiceManager(self.loop, run.root, run.socket)
        (run.root / "stderr").touch()
        environment = {**surroundings(run), "NOTIFY_SOCKET": self.manager.notify_path}
        self.manager.starter = nursery.attach(
            self.loop, environment, run.unit, run.root / "stderr", self.manager.ended
        )
        self.workers: dict[str, Worker] = {}
        self.kills = 0
        self.gate.held = self._too_early

    # The broker.

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition` is true, as long as frames move."""
        steps, deadline = -1, 0.0
        while True:
            moved = self.gate.moved
            if self.gate.failure is not None:
                raise self.gate.failure
            if condition():
                return
            now = asyncio.get_running_loop().time()
            if steps != len(self.gate.steps):
                steps, deadline = len(self.gate.steps), now + HANG
            assert now < deadline, f"nothing moves any more, and never {what}"
            # Not all that is waited for is told here.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(moved.wait(), 0.02)

    async def at_rest(self) -> None:
        """Wait until the broker has dealt with everything that it was sent: whoever is sent something has to run."""
        rested = 0
        while rested < 3:
            await asyncio.sleep(0.001)
            state = Path(f"/proc/{self.manager.pid}/stat").read_text().rpartition(")")[2].split()[0]
            rested = rested + 1 if state == "S" else 0

    async def kill(self) -> None:
        """Kill the broker at rest, and wait until the next one serves."""
        await self.at_rest()
        readies = self.manager.readies
        self.kills += 1
        self.manager.kill()
        await self.until(lambda: self.manager.readies > readies, "a broker that is ready")

    def describe(self) -> str:
        steps = [f"{step.peer} {'>' if step.up else '<'} {step.name}" for step in self.gate.steps[-40:]]
        return "\n  ".join([self.manager.status, *steps, self.run.errors()])

    # The peers.

    def _too_early(self, step: Step) -> bool:
        """The first work begins when everybody has a baseline, so that the steps behind it are the same in all runs."""
        first = (step.peer, step.name) == ("implementer", "implementation")
        return first and not self.kills and not self.sent("recorded ack baseline", "reviewer")

    @contextlib.asynccontextmanager
    async def going(self, rules: Mapping[str, Rules] = RULES) -> AsyncIterator[Parent]:
        """The broker, the parent, and the workers one after the other."""
        async with self.gate.open(), contextlib.AsyncExitStack() as peers:
            self.loop.join()
            peers.callback(self.loop.leave)
            self.manager.start()
            parent = Parent(SESSION, self.run.directory, self.gate.path, self.run.roles)
            await peers.enter_async_context(parent)
            await parent.ready()
            for role in self.run.roles:
                worker = Worker(role, self.run.tokens[role], self.gate.path, rules=rules.get(role, [STUBBORN]))
                self.workers[role] = await peers.enter_async_context(worker)
                await self.until(lambda role=role: self.run.role(role)["connected"], "connected")
            yield parent

    # What has come of it.

    def sent(self, name: str, peer: str | None = None) -> list[Frame]:
        """The frames of this name that passed."""
        return [step.frame for step in self.gate.steps if step.name == name and peer in {None, step.peer}]


    def lost(self) -> list[str]:
        """Whose connections the broker closed."""
        return [line.peer for line in self.gate.lines if line.lost]

    def doubts(self) -> bool:
        """Whether a worker was sent something that it has not acknowledged, and cannot do without."""
        unread = self.run.rows("SELECT value FROM meta WHERE key = 'unread' AND value <> '[]'")
        return bool(unread or self.run.rows("SELECT id FROM assignments WHERE state = 'delivering'"))

    def state(self) -> str:
        return self.run.workflow()[0]

    def idle(self, role: str) -> bool:
        """Whether the role is connected, and its agent has dealt with everything that it was given.

        What came last on a connection that was lost then may or may not have been read.
        """
        worker = self.workers[role]
        steps = [step for step in self.gate.steps if step.peer == role and _assigns(step) and not step.line.lost]
        given = {step.frame["assignment_id"] for step in steps}
        turns = [event for event in worker.events if event["event"] in {"turn", "settled"}]
        done = not turns or turns[-1]["event"] == "settled"
        return done and len(given) <= len(self.turns(role)) and bool(self.run.role(role)["connected"])

    def turns(self, role: str) -> list[tuple[str, int]]:
        return [(event["kind"], event["round"]) for event in self.workers[role].events if event["event"] == "turn"]

    async def settle(self, state: str) -> None:
        """Wait until nobody has anything left to do, and the run is in this state."""
        await self.until(
            lambda: all(self.idle(role) for role in self.run.roles) and self.state() == state, f"{state} at rest"
        )

    def check(self, parent: Parent) -> None:
        """What must hold of every run: no work twice, no report lost, nothing untrue to the parent."""
        frames = [step.frame for step in self.gate.steps if _assigns(step)]
        given = {frame["assignment_id"]: (frame["kind"], frame["round"]) for frame in frames}
        assert sorted(given.values()) == sorted(set(given.values())), "two assignments of one kind in a round"
        work = [what for role in self.run.roles for what in self.turns(role)]
        assert len(work) == len(set(work)), "work was done twice"
        assert set(work) <= set(given.values()) <= self.work
        assert self.state() != "ready" or set(work) == self.work
        reports = {row["assignment_id"]: row["id"] for row in self.run.rows("SELECT * FROM reports")}
        assert set(reports) <= set(given)
        assert len(self.sent("accepted report")) <= len(reports)
        for frame in self.told("report"):
            assert reports[frame["assignment_id"]] == frame["id"]
        self._check_parent(parent)

    def told(self, kind: str) -> list[Frame]:
        """The frames of this type that the parent was sent."""
        return [step.frame for step in self.gate.steps if step.peer == "parent" and step.frame["type"] == kind]

    def _check_parent(self, parent: Parent) -> None:
        state = self.state()
        told = {frame["state"] for frame in [*self.told("workflow"), *self.told("snapshot")]}
        wakes = [event["message"]["content"] for event in parent.events if _wakes(event)]
        verdict = "uncertain" if self._forgotten() or "uncertain" in told else state
        assert len(wakes) == 1 and wakes[0].startswith(f"# Tmux orchestration {verdict}\n"), wakes
        if "uncertain" in told:
            assert self.run.events("workflow_uncertain", "worker_handover_uncertain")
        assert "ready" not in told or state == "ready"

    def _forgotten(self) -> bool:
        """Whether the parent was told of more reports than it was shown."""
        shown: set[str] = set()
        for frame in (step.frame for step in self.gate.steps if step.peer == "parent"):
            if frame["type"] == "report":
                shown.add(frame["id"])
            elif frame["type"] == "snapshot" and len(shown) < frame["report_count"]:
                assert not frame["report_replay_complete"]
                return True
        return False


def _assigns(step: Step) -> bool:
    return step.frame["type"] == "assignment"


def _wakes(event: Frame) -> bool:
    return event["event"] == "message" and event["options"].get("triggerTurn") is True


class Kill(NamedTuple):
    """The step at which the broker is killed, and what comes of it when all memory is lost, where that is certain."""

    peer: str
    name: str
    lost: str | None
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.peer} {self.name} {self.nth}"


STEPS = [
    Kill("implementer", "hello", "ready"),
    Kill("implementer", "connected hello", "ready"),
    Kill("implementer", "lifecycle idle", "ready"),
    Kill("reviewer", "hello", "ready"),
    Kill("reviewer", "connected hello", None),
    Kill("implementer", "baseline", "uncertain"),
    Kill("reviewer", "baseline", "uncertain"),
    Kill("parent", "workflow active", None),
    Kill("implementer", "implementation", "uncertain"),
    Kill("implementer", "ack implementation", "uncertain"),
    Kill("implementer", "recorded ack implementation", "ready"),
    Kill("implementer", "lifecycle active", "ready"),
    Kill("implementer", "recorded lifecycle active", "ready"),
    Kill("implementer", "progress thinking", "ready"),
    Kill("implementer", "progress streaming", "ready"),
    Kill("implementer", "progress reporting", "ready"),
    Kill("implementer", "report", "ready"),
    Kill("parent", "report implementer", None),
    Kill("implementer", "accepted report", None),
    Kill("reviewer", "run_state", "uncertain"),
    Kill("reviewer", "review", "uncertain"),
    Kill("reviewer", "ack review", "uncertain"),
    Kill("reviewer", "recorded ack review", "ready"),
    Kill("reviewer", "report", "ready"),
    Kill("reviewer", "accepted report", None),
    Kill("implementer", "implementation", "uncertain", 2),
    Kill("implementer", "ack implementation", "uncertain", 2),
    Kill("implementer", "recorded ack implementation", "ready", 2),
    Kill("implementer", "report", "ready", 2),
    Kill("parent", "workflow ready", "ready"),
    Kill("reviewer", "accepted report", "ready", 2),
]


@contextlib.contextmanager
def world_of(nursery: Nursery, run: Run | None = None, work: set[tuple[str, int]] = WORK) -> Iterator[World]:
    """The world of a run, of two roles if not given, which takes it along at the end."""
    run = run or Run()
    world = World(run, nursery, work)
    try:
        yield world
        assert "Traceback" not in run.errors(), run.errors()
    except BaseException:
        print(world.describe())
        raise
    finally:
        world.manager.close()
        world.loop.close()
        run.remove()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("at", STEPS, ids=str)
def test_a_broker_that_is_killed_at_a_step(nursery: Nursery, at: Kill, keeps: bool) -> None:
    async def scene(world: World) -> None:
        expected = "ready"

        async def passing(step: Step) -> None:
            nonlocal expected
            if (step.peer, step.name) == (at.peer, at.name) and len(world.sent(at.name, at.peer)) == at.nth:
                await world.at_rest()
                if not keeps:
                    expected = "uncertain" if world.doubts() else "ready"
                    assert at.lost in {None, expected}
                await world.kill()

        world.manager.keeps = keeps
        world.gate.passing = passing
        world.gate.patient = True
        async with world.going() as parent:
            await world.until(lambda: world.kills, "killed")
            await world.settle(expected)
            await parent.event("stopped")
            world.check(parent)
            assert not keeps or len(world.lost()) == (at.name == "hello")

    with world_of(nursery) as world:
        asyncio.run(scene(world))


def test_a_broker_that_is_killed_at_every_step(nursery: Nursery) -> None:
    async def scene(world: World) -> None:
        async def passing(step: Step) -> None:
            # A connection is kept from the moment on that its first frame has an answer.
            if step.name not in {"hello", "observe"} or len(world.sent(step.name, step.peer)) == 1:
                await world.kill()

        world.gate.passing = passing
        async with world.going() as parent:
            await world.settle("ready")
            await parent.event("stopped")
            world.check(parent)
        assert not any(line.lost and line.admitted for line in world.gate.lines)
        assert world.kills > 100

    with world_of(nursery) as world:
        asyncio.run(scene(world))


def test_a_broker_of_five_roles_that_is_killed_at_every_fifth_step(nursery: Nursery) -> None:
    async def scene(world: World) -> None:
        async def passing(step: Step) -> None:
            if len(world.gate.steps) % 5 == 0 and step.line.admitted:
                await world.kill()

        world.gate.passing = passing
        async with world.going() as parent:
            await world.settle("ready")
            await parent.event("stopped")
            world.check(parent)
        assert not any(line.lost and line.admitted for line in world.gate.lines)
        assert world.kills > 40

    with world_of(nursery, Run(*SPECIALISTS, flow="phased"), WORK_OF_ALL) as world:
        asyncio.run(scene(world))


async def set_trap(world: World, nth: int) -> None:
    """Have the broker killed at the `nth` point of its work on what it is sent next.

    One broker counts the points that it passes while it comes up, and is killed: the next one passes as many.
    """
    trace, log = (str(world.run.root / name) for name in ("trace", "log"))
    world.manager.orders += [{}, {"trace": trace, "log": log}]
    await world.kill()
    await world.at_rest()
    passed = len(Path(log).read_text().splitlines())
    world.manager.orders += [{"trace": trace, "fault": passed + nth}, {}]
    await world.kill()
    await world.at_rest()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("nth", range(1, 11))
def test_a_broker_that_is_killed_between_a_report_and_its_answer(nursery: Nursery, nth: int, keeps: bool) -> None:
    async def scene(world: World) -> None:
        async def passing(step: Step) -> None:
            if not world.kills and (step.peer, step.name) == ("implementer", "report"):
                await set_trap(world, nth)
                world.manager.keeps = keeps

        world.gate.passing = passing
        async with world.going() as parent:
            await world.until(lambda: len(world.manager.ends) == 3, "killed")
            struck = (world.run.root / "trace").read_text().strip()
            if keeps:
                closed = struck in UNRECORDED
                await world.until(lambda: len(world.lost()) == closed, "closed")
                doubted = struck == "sent" and "reviewer" in world.lost()
            else:
                doubted = struck not in {"taken", "logged", "decided", "uncommitted"}
            await world.settle("uncertain" if doubted else "ready")
            await parent.event("stopped")
            world.check(parent)
            assert not keeps or len(world.lost()) == closed

    with world_of(nursery) as world:
        asyncio.run(scene(world))


@pytest.mark.parametrize(
    ("do", "last", "keeps"),
    [("report", "report", False), ("settle", "lifecycle waiting", False), ("settle", "lifecycle waiting", True)],
)
def test_an_agent_that_stops_without_a_report_while_there_is_no_broker(
    nursery: Nursery, do: str, last: str, keeps: bool
) -> None:
    async def scene(world: World) -> None:
        async def passing(step: Step) -> None:
            if not world.kills and (step.peer, step.name) == ("implementer", last):
                await world.at_rest()
                world.kills += 1
                world.manager.kill()

        world.manager.keeps = keeps
        world.manager.restarts = False
        world.gate.passing = passing
        async with world.going({**RULES, "implementer": [{"do": do, "times": 1}, STUBBORN]}) as parent:
            implementer = world.workers["implementer"]
            await implementer.event("settled")
            await world.until(lambda: world.kills and not world.manager.pid, "gone")
            world.manager.restarts = True
            world.manager.start()
            assert "- implementer: waiting" in await parent.update("orchestration needs_attention", triggers=True)
            assert world.run.workflow() == ("needs_attention", 1)
            world.run.send("implementer", "There is a broker again. Report, please.")
            await implementer.delivery("operator_message")
            await implementer.send(op="turn")
            await parent.update("orchestration ready", triggers=True)
            assert world.run.workflow() == ("ready", 2)
            assert keeps or len(world.lost()) == 3
            assert not keeps or not world.lost()

    with world_of(nursery) as world:
        asyncio.run(scene(world))


def test_an_operator_who_has_looked_has_uncertain_work_done_again(nursery: Nursery) -> None:
    async def scene(world: World) -> None:
        async def passing(step: Step) -> None:
            if not world.kills and (step.peer, step.name) == ("implementer", "ack implementation"):
                await world.kill()

        world.manager.keeps = False
        world.gate.passing = passing
        async with world.going({**RULES, "implementer": [{"do": "ignore", "times": 1}, STUBBORN]}) as parent:
            await parent.update("orchestration uncertain", triggers=True)
            await world.until(lambda: all(world.run.role(role)["connected"] for role in world.run.roles), "back")
            world.run.accepted("redeliver", "implementer")
            await world.settle("ready")
            world.check(parent)

    with world_of(nursery) as world:
        asyncio.run(scene(world))
