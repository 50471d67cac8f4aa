# SPDX-License-Identifier: Apache-2.0
"""The measurements. Each returns plain numbers: microseconds for messages, milliseconds for starts, KiB for memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchlib.servers import (
    HERE,
    PYTHON,
    BenchError,
    Listener,
    Programs,
    Server,
    broker_command,
    environment,
    spawn_bound,
)

PROBE = b'{"type":"health","requestId":"probe"}'
ANSWER_TIMEOUT = 20.0
LOOK_EVERY = 0.5
SETTLE = 1.2
"""Seconds from the answer to looking at memory: whatever a start puts off must have been done, or it is not counted."""


class Plan(NamedTuple):
    """How long and how often.

    `processes` times new servers are started, and each time `turns` rounds of alternating runs are made: many short
    runs next to each other pair better on a machine that does other things too than few long ones.
    """

    processes: int
    turns: int
    latency_seconds: float
    pairs_seconds: float
    list_seconds: float
    starts: int
    pairs: int = 60
    idle_sessions: int = 118


FULL = Plan(processes=5, turns=3, latency_seconds=0.35, pairs_seconds=0.5, list_seconds=0.15, starts=9)
QUICK = Plan(processes=2, turns=2, latency_seconds=0.25, pairs_seconds=0.3, list_seconds=0.1, starts=3)
TINY = Plan(1, 1, latency_seconds=0.05, pairs_seconds=0.05, list_seconds=0.02, starts=1, pairs=3, idle_sessions=4)


class Generator:
    """Runs the load generator; each run has a prefix of its own, so that no session or message id comes twice."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._runs = 0

    def _run(self, server: Server, mode: str, *arguments: float) -> dict[str, Any]:
        self._runs += 1
        command = [str(self._programs.loadgen), mode, str(server.path), f"b{os.getpid()}-{self._runs}"]
        result = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise BenchError(f"loadgen {mode} against {server.path.stem}: {result.stderr.strip()}")
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def latency(self, server: Server, sessions: int, seconds: float, size: int = 512) -> dict[str, float]:
        """One message at a time between two of `sessions` sessions: send→message and send→delivered.

        `size` is the number of bytes of its text.
        """
        result = self._run(server, "latency", sessions, seconds, size)
        return {f"{kind}_{q}": result[kind][q] for kind in ("message", "delivered") for q in ("p50", "p99")}

    def pairs(self, server: Server, pairs: int, window: int, seconds: float) -> dict[str, float]:
        """`pairs` senders at once, `window` messages outstanding each: delivered per second."""
        result = self._run(server, "pairs", pairs, window, server.pid, seconds)
        return {key: result[key] for key in ("rate", "server_us", "generator_cpu")}

    def list(self, server: Server, sessions: int, seconds: float) -> dict[str, float]:
        """`list` with `sessions` sessions registered."""
        result = self._run(server, "list", sessions, seconds)
        return {"p50": result["list"]["p50"], "p99": result["list"]["p99"], "bytes": result["bytes"]}


def one_round(generator: Generator, servers: dict[str, Server], plan: Plan, turn: int) -> dict[str, dict[str, float]]:
    """Every measurement once on every server, alternating; the order turns with `turn`. Figure → server → value."""
    names = list(servers)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    crowd = 2 + plan.idle_sessions
    result: dict[str, dict[str, float]] = {}

    def note(figure: str, name: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            result.setdefault(f"{figure}.{key}", {})[name] = value

    def both_latencies(name: str, server: Server) -> None:
        # Next to each other, because their ratio is a figure of its own; which comes first turns as well.
        for sessions in (2, crowd) if turn % 2 else (crowd, 2):
            figure = "latency_2" if sessions == 2 else "latency_crowd"
            note(figure, name, generator.latency(server, sessions, plan.latency_seconds))

    runs: list[Callable[[str, Server], None]] = [
        both_latencies,
        lambda name, server: note("pairs_1", name, generator.pairs(server, plan.pairs, 1, plan.pairs_seconds)),
        lambda name, server: note("pairs_16", name, generator.pairs(server, plan.pairs, 16, plan.pairs_seconds)),
        lambda name, server: note("list", name, generator.list(server, crowd, plan.list_seconds)),
    ]
    for run in runs:
        for name in names:
            run(name, servers[name])
    return result


def framed(payload: bytes) -> bytes:
    """`payload` behind its four-byte length."""
    return len(payload).to_bytes(4, "big") + payload


def await_answer(connection: socket.socket, since: float, server: Server, expected: bytes = b'"health_ok"') -> float:
    """Read one frame; milliseconds since `since`.

    BenchError when the answer does not have `expected` in it, does not come, or the server ended.
    """
    connection.settimeout(LOOK_EVERY)
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        try:
            received = connection.recv(65536)
        except TimeoutError:
            if server.alive() and time.perf_counter() < since + ANSWER_TIMEOUT:
                continue
            received = b""
        if not received:
            raise BenchError(server.complaint("no answer came"))
        data += received
    took = (time.perf_counter() - since) * 1e3
    if expected not in data:
        raise BenchError(server.complaint("the answer is another"))
    return took


def connect(path: Path, payload: bytes = PROBE) -> socket.socket:
    """A connection that has already sent a frame, `health` if nothing else is said."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_TIMEOUT)
    connection.connect(str(path))
    connection.sendall(framed(payload))
    return connection


def pss(pid: int) -> dict[str, float]:
    """Memory of a process in KiB: its proportional share, what is its own alone, and what is resident."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {name: float(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {"pss": values["Pss"], "private": values["Private_Clean"] + values["Private_Dirty"], "rss": values["Rss"]}


def activated_start(programs: Programs, home: Path, command: list[str]) -> dict[str, float]:
    """A start as systemd does it: the client's connection is there first, and its wait is the figure.

    `health_ok` counts from the connection, `ready` from the same moment to READY=1 (absent when none was sent), `warm`
    is the same probe on the running process where it answers a second one.
    """
    listener = Listener(home)
    since = time.perf_counter()
    with (
        connect(listener.path) as connection,
        listener.spawn(programs, command, environment(home)) as server,
    ):
        result = {"health_ok": await_answer(connection, since, server)}
        time.sleep(SETTLE)
        result |= pss(server.pid)
        if listener.notify.ready is not None:
            result["ready"] = (listener.notify.ready - since) * 1e3
            again = time.perf_counter()
            with connect(listener.path) as second:
                result["warm"] = await_answer(second, again, server)
    return result


def bound_start(home: Path, command: list[str], path: Path) -> dict[str, float]:
    """A start that binds for itself: `listening` is the time to the line that it prints then."""
    since = time.perf_counter()
    with spawn_bound(command, environment(home), path) as server:
        result = {"listening": (time.perf_counter() - since) * 1e3}
        with connect(server.path) as connection:
            await_answer(connection, since, server)
    return result


def python_phase(home: Path, statement: str) -> float:
    """Milliseconds of an interpreter that runs `statement` and ends without tidying up."""
    since = time.perf_counter()
    command = [PYTHON, "-c", f"{statement}\nimport os\nos._exit(0)"]
    subprocess.run(command, env=environment(home), check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - since) * 1e3


def starts(programs: Programs, home: Path, with_broker: bool) -> dict[str, dict[str, float]]:
    """One cold start of everything that starts; the shape is that of `one_round`."""
    bare = [PYTHON, str(HERE / "bare.py"), str(home / "bare.s")]
    result: dict[str, dict[str, float]] = {}

    def note(figure: str, name: str, value: float) -> None:
        result.setdefault(figure, {})[name] = value

    def measure(name: str, command: list[str], path: Path) -> None:
        for figure, value in activated_start(programs, home, command).items():
            kind = "memory" if figure in ("pss", "private", "rss") else "start"
            note(f"{kind}.{figure}", name, value)
        note("start.listening", name, bound_start(home, command, path)["listening"])

    measure("bare", bare, home / "bare.s")
    note("start.interpreter", "bare", python_phase(home, "pass"))
    note("start.imports", "bare", python_phase(home, "import asyncio, msgspec"))
    if with_broker:
        measure("broker", broker_command(), home / "agent" / "intercom" / "broker.sock")
        note("start.interpreter", "broker", python_phase(home, "pass"))
        note("start.imports", "broker", python_phase(home, "import agent_intercom.intercom.broker"))
    return result
