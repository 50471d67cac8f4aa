# SPDX-License-Identifier: Apache-2.0
"""The measurements of the broker of a run. Shapes and units are those of `measure`.

A run has an implementer and a reviewer. Work that moves from one worker to the other takes the same two hops as a
message through the relay, into it and out of it, with as many bytes out; ours contains one commit to the database of
the run besides. What a commit takes is measured next to it, by SQLite without a broker in the same directory. Each is
measured with the run's directory on a disk and with it in memory: there the commit is next to nothing, and what is
left are the rules.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Self

from benchlib import measure
from benchlib.servers import (
    HERE,
    PYTHON,
    SERVICE,
    BenchError,
    Listener,
    Programs,
    Server,
    await_ready,
    environment,
    spawn_bound,
    start_relay,
)

PLACES = {"disk": "/var/tmp", "memory": "/dev/shm"}
"""Where directories of runs lie: as a person's do, which stay; and where no commit waits for a device."""

ROLES = ("implementer", "reviewer")
IMPORTS = "import agent_intercom.orchestration.launch"
LOOKED_AT = "looked-at"
"""The session of half of the runs that are retained; each of the others has one of its own."""

STATUS = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from agent_intercom.cli.orchestrate.main import main
sys.exit(main(sys.argv[2:]))
"""
"""The command line as it is installed, where it is told its path."""
MINUTE = 60.0
Values = dict[str, dict[str, float]]


class Plan(NamedTuple):
    """How long and how often.

    In each of `rounds` rounds and in each place `brokers` brokers lead one run each, with as many reports of either
    worker as `turns` says of the place: where commits wait for nothing, more fit into the time. At the end `crowd`
    brokers run at once, and wait for a person for `wait_seconds`. Whoever looks at a run does so among `retained` ones.
    """

    rounds: int
    brokers: int
    turns: dict[str, int]
    latency_seconds: float
    crowd: int
    wait_seconds: float
    retained: int


FULL = Plan(
    rounds=7,
    brokers=3,
    turns={"disk": 8, "memory": 40},
    latency_seconds=0.3,
    crowd=50,
    wait_seconds=MINUTE,
    retained=200,
)
QUICK = FULL._replace(rounds=2, brokers=2, turns={"disk": 4, "memory": 30}, latency_seconds=0.2, wait_seconds=5)
TINY = Plan(
    rounds=1, brokers=1, turns={"disk": 1, "memory": 2}, latency_seconds=0.05, crowd=2, wait_seconds=0.2, retained=4
)


def present() -> bool:
    """Whether this checkout has a broker of runs to measure."""
    return (SERVICE / "agent_intercom" / "orchestration" / "launch.py").exists()


class Run(NamedTuple):
    """A run that waits for its broker."""

    unit: str
    tokens: dict[str, str]


class Workshop:
    """Makes runs and starts their brokers, in one private environment below `home`.

    `places` are the directories, one in each of `PLACES`, that the runs' own go into. `core` is where servers are
    kept; None leaves that to the scheduler.
    """

    def __init__(self, programs: Programs, home: Path, places: dict[str, Path], core: int | None) -> None:
        self.programs = programs
        self.home = home
        self.places = places
        self.environ = environment(home)
        self._core = core
        self._made = 0
        (home / "project").mkdir()

    def run(self, place: str) -> Run:
        """A new run, as starting one leaves it to the broker."""
        # Only here: the references are measured in a checkout without a broker, too.
        if str(SERVICE) not in sys.path:
            sys.path.insert(0, str(SERVICE))
        from agent_intercom.orchestration import runtime

        self._made += 1
        unit = f"r{self._made}"
        made = self.create(place, "bench", unit)
        runtime.write(
            self.environ["XDG_RUNTIME_DIR"],
            unit,
            runtime.RunPlace(directory=made.path, scope=None, environment={}, observer_report_usage=True),
        )
        return Run(unit, dict(made.tokens))

    def create(self, place: str, session: str, unit: str) -> Any:
        """The directory of a run that nothing was started for, as `rundir` has it."""
        if str(SERVICE) not in sys.path:
            sys.path.insert(0, str(SERVICE))
        from agent_intercom.orchestration import manifest, rundir
        from agent_intercom.wire.clock import system_now

        spec = rundir.RunSpec(
            unit=unit,
            project=str(self.home / "project"),
            approve_project=False,
            transport="rpc",
            execution_profile=manifest.Profile(name="balanced", kind="packaged", source="packaged-default"),
            orchestration_config=manifest.OrchestrationConfig(path="/srv/bench.json", version=4),
            project_config=manifest.UNMATCHED,
            roles={role: rundir.RoleSpec(provider="bench", model="bench", thinking="low") for role in ROLES},
            implementation_flow="single",
            startup=rundir.Startup(task="x" * 512, role_tasks={}),
        )
        return rundir.create(str(self.places[place] / "runs"), session, f"20240101T000000Z-{unit}", spec, system_now())

    def listener(self, run: Run) -> Listener:
        """The socket of a run."""
        directory = self.home / run.unit
        directory.mkdir()
        return Listener(directory, ("run",))

    def spawn(self, listener: Listener, run: Run) -> Server:
        """Start the broker of a run, without waiting for it."""
        return self.pinned(listener.spawn(self.programs, self.command(run), self.environ))

    def command(self, run: Run) -> list[str]:
        """The broker of a run, from the checkout."""
        return [PYTHON, "-m", "agent_intercom.orchestration", run.unit]

    def start(self, run: Run) -> Server:
        """Start the broker of a run; returns at READY."""
        listener = self.listener(run)
        return await_ready(listener, self.spawn(listener, run))

    def pinned(self, server: Server) -> Server:
        """The server, kept on the servers' core."""
        if self._core is not None:
            os.sched_setaffinity(server.pid, {self._core})
        return server

    def output(self, command: list[str]) -> Any:
        """What a program prints, as JSON. BenchError when it fails."""
        result = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BenchError(f"{Path(command[0]).name}: {result.stderr.strip()[-400:]}")
        return json.loads(result.stdout)


@contextmanager
def workshop(programs: Programs, home: Path, core: int | None) -> Iterator[Workshop]:
    """A workshop whose directories are gone at the end."""
    with ExitStack() as stack:
        places = {
            name: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aib", dir=base)))
            for name, base in PLACES.items()
        }
        yield Workshop(programs, home, places, core)


class Worker:
    """A worker that is not timed."""

    def __init__(self, server: Server, role: str, token: str) -> None:
        self._server = server
        self._envelope = {"role": role, "token": token}
        self._requests = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(measure.ANSWER_TIMEOUT)
        self._socket.connect(str(server.path))
        self._input = self._socket.makefile("rb")
        self.ask("hello", generation=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._input.close()
        self._socket.close()

    def ask(self, kind: str, **members: object) -> None:
        """Send a frame and wait for its answer. BenchError when it is a refusal, or does not come."""
        self._requests += 1
        request = f"{self._requests:032x}"
        self._socket.sendall(measure.framed(worker_frame(kind, request, self._envelope, **members)))
        while (frame := self.read())["type"] != "response" or frame["id"] != request:
            pass
        if not frame["success"]:
            raise BenchError(self._server.complaint(f"{kind} is refused"))

    def read(self) -> dict[str, Any]:
        """The next frame."""
        try:
            frame: dict[str, Any] = json.loads(self._input.read(int.from_bytes(self._input.read(4), "big")))
        except (OSError, ValueError) as error:
            raise BenchError(self._server.complaint("no frame came")) from error
        return frame

    def assigned(self) -> str:
        """Wait for an assignment; the id of its delivery."""
        while (frame := self.read())["type"] != "assignment":
            pass
        return str(frame["id"])


def worker_frame(kind: str, request: str, envelope: dict[str, str], **members: object) -> bytes:
    """A frame of a worker."""
    return json.dumps({"version": 1, "type": kind, "id": request, **envelope, **members}).encode()


def _note(values: Values, figure: str, name: str, value: float) -> None:
    values.setdefault(f"runs.{figure}", {})[name] = value


def one_round(shop: Workshop, generator: measure.Generator, relay: Server, plan: Plan, turn: int) -> Values:
    """Every latency and every start once; which place comes first turns with `turn`."""
    values: Values = {}
    sizes: dict[str, int] = {}
    for place in sorted(PLACES, reverse=bool(turn % 2)):
        led = [_lead(shop, place, plan.turns[place]) for _ in range(plan.brokers)]
        for figure in ("hello", "report", "review", "server_us"):
            _note(values, f"{place}.{figure}", "run", median(one[figure] for one in led))
        sizes = {figure: int(led[0][f"{figure}_bytes"]) for figure in ("hello", "report", "review")}
        directory = shop.places[place] / f"commit{turn}"
        directory.mkdir()
        alone = shop.output([PYTHON, str(HERE / "commit.py"), str(directory), str(plan.brokers * plan.turns[place])])
        for figure in sizes:
            _note(values, f"{place}.{figure}", "commit", alone["commit"])
        _note(values, f"{place}.fsync", "commit", alone["fsync"])
    for figure, size in sizes.items():
        hop = generator.latency(relay, 2, plan.latency_seconds, size)["message_p50"]
        for place in PLACES:
            _note(values, f"{place}.{figure}", "relay", hop)
        _note(values, f"bytes.{figure}", "run", size)
    for figure, by_server in (_starts(shop) | _looks(shop)).items():
        for name, value in by_server.items():
            _note(values, figure, name, value)
    return values


def _lead(shop: Workshop, place: str, turns: int) -> dict[str, float]:
    """One run of `turns` rounds. Medians in microseconds, and the bytes that moved."""
    run = shop.run(place)
    with shop.start(run) as server:
        tokens = [run.tokens[role] for role in ROLES]
        result = shop.output([str(shop.programs.runload), str(server.path), *tokens, str(turns), str(server.pid)])
    return {
        "hello": result["hello"],
        "server_us": result["server_us"],
        **{figure: result[figure]["p50"] for figure in ("report", "review")},
        **{key: value for key, value in result.items() if key.endswith("_bytes")},
    }


def _starts(shop: Workshop) -> Values:
    """One cold start of a broker and of the bare process, each activated by a connection that waits already."""
    result: Values = {"start.imports": {}, "start.answer": {}, "start.ready": {}}
    result["start.imports"]["bare"] = measure.python_phase(shop.home, "import asyncio, msgspec")
    result["start.imports"]["run"] = measure.python_phase(shop.home, IMPORTS)
    listener = Listener(shop.home)
    since = time.perf_counter()
    with (
        measure.connect(listener.path) as connection,
        shop.pinned(listener.spawn(shop.programs, [PYTHON, str(HERE / "bare.py")], shop.environ)) as server,
    ):
        result["start.answer"]["bare"] = measure.await_answer(connection, since, server)
    run = shop.run("disk")
    listener = shop.listener(run)
    envelope = {"role": ROLES[0], "token": run.tokens[ROLES[0]]}
    since = time.perf_counter()
    with (
        measure.connect(listener.path, worker_frame("hello", "0" * 32, envelope, generation=1)) as connection,
        shop.spawn(listener, run) as server,
    ):
        result["start.answer"]["run"] = measure.await_answer(connection, since, server, b'"connected"')
        await_ready(listener, server)
        assert listener.notify.ready is not None
        result["start.ready"]["run"] = (listener.notify.ready - since) * 1e3
    return result


def retain(shop: Workshop, count: int) -> None:
    """Leave `count` runs behind that have ended."""
    for number in range(count):
        shop.create("memory", LOOKED_AT if number % 2 else f"other{number}", f"o{number}")


def _looks(shop: Workshop) -> Values:
    """`orchestrate status`, and what it is held against: an interpreter, and one that reads a run's files."""
    root = shop.places["memory"] / "runs"
    directory = max((root / LOOKED_AT).iterdir())
    path = shop.environ["PYTHONPATH"]
    environ = shop.environ | {"AGENT_INTERCOM_RUNS_DIR": str(root)}

    def took(*command: str) -> float:
        since = time.perf_counter()
        result = subprocess.run([PYTHON, *command], env=environ, capture_output=True, text=True, check=False)
        milliseconds = (time.perf_counter() - since) * 1e3
        if result.returncode:
            raise BenchError(f"a look at a run: {result.stderr.strip()[-400:]}")
        return milliseconds

    bare = took("-c", "pass")
    read = took("-IS", str(HERE / "look.py"), path, str(directory))
    status = took("-IS", "-c", STATUS, path, "status", LOOKED_AT)
    return {
        "look.bare": {"bare": bare},
        "look.read": {"bare": read},
        "look.status": {"bare": bare + read, "run": status},
    }


def crowd(shop: Workshop, plan: Plan) -> Values:
    """Memory per process, one alone and `plan.crowd` at once, and what those take while they wait for a person."""
    values: Values = {}
    for count, figure in ((1, "memory_1"), (plan.crowd, "memory_crowd")):
        for name in ("bare", "run"):
            with ExitStack() as stack:
                pids = _bare(shop, stack, count) if name == "bare" else _waiting(shop, stack, count)
                time.sleep(measure.SETTLE)
                for key in ("pss", "private"):
                    _note(values, f"{figure}.{key}", name, fmean(measure.pss(pid)[key] for pid in pids))
                if figure == "memory_crowd":
                    for key, value in _idle(pids, plan.wait_seconds).items():
                        _note(values, f"wait.{key}", name, value)
    return values


def _bare(shop: Workshop, stack: ExitStack, count: int) -> list[int]:
    """Bare processes that have answered once and wait; their process ids."""
    pids = []
    for number in range(count):
        path = shop.home / f"bare{number}.s"
        command = [PYTHON, str(HERE / "bare.py"), str(path)]
        server = shop.pinned(stack.enter_context(spawn_bound(command, shop.environ, path)))
        with measure.connect(path) as connection:
            measure.await_answer(connection, time.perf_counter(), server)
        pids.append(server.pid)
    return pids


def _waiting(shop: Workshop, stack: ExitStack, count: int) -> list[int]:
    """Brokers whose run waits for a person, with both workers connected; their process ids."""
    pids = []
    for _ in range(count):
        run = shop.run("disk")
        server = stack.enter_context(shop.start(run))
        first, second = (stack.enter_context(Worker(server, role, run.tokens[role])) for role in ROLES)
        second.ask("lifecycle", state="idle", usage=None)
        first.ask("ack", delivery_id=first.assigned(), status="accepted")
        first.ask("lifecycle", state="waiting", usage=None)
        pids.append(server.pid)
    return pids


def _idle(pids: list[int], seconds: float) -> dict[str, float]:
    """What processes take while nothing happens.

    `cpu_us` and `wakeups` are per process and minute, `share` is that of a core for all of them. There is no watchdog
    here, which under systemd is to be added: one ping in each half of its time.
    """

    def taken() -> tuple[float, int]:
        times = [Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in pids]
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        switches = [re.search(r"^voluntary_ctxt_switches:\s+(\d+)$", text, re.MULTILINE) for text in texts]
        return sum(map(float, times)) / 1e3, sum(int(found[1]) for found in switches if found)

    since = time.perf_counter()
    cpu, wakeups = taken()
    time.sleep(seconds)
    cpu_after, wakeups_after = taken()
    took = time.perf_counter() - since
    per_minute = MINUTE / took / len(pids)
    return {
        "cpu_us": (cpu_after - cpu) * per_minute,
        "wakeups": (wakeups_after - wakeups) * per_minute,
        "share": (cpu_after - cpu) / 1e6 / took,
    }


def rounds(
    programs: Programs, home: Path, generator: measure.Generator, plan: Plan, cores: list[int]
) -> Iterator[Values]:
    """All rounds of `plan`, the crowd as the last.

    `cores` has two cores, for servers and for who measures, or fewer, and then nothing is pinned. BenchError when
    something does not start or answer.
    """
    pin = len(cores) > 1
    with workshop(programs, home, cores[0] if pin else None) as shop:
        with start_relay(programs, home) as relay:
            shop.pinned(relay)
            retain(shop, plan.retained)
            _lead(shop, "memory", 1)  # not counted: fills the page cache and writes bytecode
            _looks(shop)
            for turn in range(plan.rounds):
                yield one_round(shop, generator, relay, plan, turn)
        yield crowd(shop, plan)
