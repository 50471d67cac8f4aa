#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the start of a worker takes, and what its shim and its bridge keep; `run.py` has the bounds.

It boots a testbed with an installation in it, as root, and measures there, as a user. A start is everything from the
fork of the launcher to the word that the command runs: gate, scope unit, its job, verification, release. Beside each
one stands a bare fork and exec with one round trip to the service manager, and the start of the interpreter alone,
which the launcher contains; beside many at once stands one.

Memory is that of shims whose commands sleep, and of bridges that have said hello and wait for the answer, beside as
many interpreters that wait: PSS, RSS and what is private.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tests/testbed"
LIBRARY = "/usr/lib/agent-intercom"
INSIDE = "/usr/local/lib/bench-workers.py"
INTERPRETER = ["/usr/bin/python3", "-IS", "-c"]
CROWDS = 5
"""How often many are started at once."""

Figures = dict[str, dict[str, float]]


class Plan(NamedTuple):
    """How many starts, one after the other, and how many at once."""

    rounds: int
    together: int


FULL = Plan(rounds=40, together=40)
QUICK = Plan(rounds=12, together=40)


async def measure(rounds: int, together: int) -> list[Figures]:
    """All rounds, in a testbed: first those of starts, then those of many at once, last what is measured once."""
    sys.path.insert(0, f"{LIBRARY}/site")
    from agent_intercom.host.scopes import Scopes
    from agent_intercom.workers import spawning
    from agent_intercom.workers.contract import DESCRIPTION, scope_unit
    from agent_intercom.workers.spec import Launch

    properties = {
        "Description": ("s", DESCRIPTION),
        "Slice": ("s", "bench.slice"),
        "KillMode": ("s", "control-group"),
        "TimeoutStopUSec": ("t", 5_000_000),
        "CollectMode": ("s", "inactive-or-failed"),
    }
    found: list[Figures] = []
    with tempfile.TemporaryDirectory() as place:

        async def start(scopes: Scopes, *command: str) -> spawning.Gated:
            gated = await spawning.spawn(f"{LIBRARY}/orchestrate-launcher")
            exit_file = f"{place}/{gated.pid}.json"
            await scopes.start(scope_unit(os.urandom(6).hex()), gated.pid, properties)
            await gated.release(Launch(command, {"PATH": "/usr/bin:/bin"}, place, exit_file, place))
            return gated

        async with Scopes() as scopes:

            async def worker() -> float:
                since = time.perf_counter()
                gated = await start(scopes, "/bin/true")
                taken = time.perf_counter() - since
                await gated.ended()
                return taken

            async def bare() -> float:
                since = time.perf_counter()
                with subprocess.Popen(["/bin/true"], env={}):
                    await scopes.jobs()
                return time.perf_counter() - since

            async def interpreter() -> float:
                since = time.perf_counter()
                subprocess.run([*INTERPRETER, "pass"], env={}, check=True)
                return time.perf_counter() - since

            async def many() -> float:
                since = time.perf_counter()
                gated = await asyncio.gather(*(start(scopes, "/bin/true") for _ in range(together)))
                taken = time.perf_counter() - since
                await asyncio.gather(*(one.ended() for one in gated))
                return taken / together

            kinds: dict[str, Callable[[], Awaitable[float]]] = {
                "worker": worker,
                "bare": bare,
                "interpreter": interpreter,
            }
            for kind in kinds.values():
                await kind()
            for _ in range(rounds):
                found.append({"workers.start": {name: 1000 * await kind() for name, kind in kinds.items()}})
            for _ in range(min(rounds, CROWDS)):
                found.append({"workers.crowd": {"one": 1000 * await worker(), "worker": 1000 * await many()}})

            for crowd, count in (("1", 1), ("crowd", together)):
                shims = [await start(scopes, "/bin/sleep", "1000") for _ in range(count)]
                kept = {"shim": memory([one.pid for one in shims])}
                for name in await scopes.states("worker-*.scope"):
                    await scopes.stop(name)
                await asyncio.gather(*(one.ended() for one in shims))
                kept["bridge"] = bridges(count, place)
                beside = interpreters(count)
                for what, values in kept.items():
                    for field, value in values.items():
                        both = {"worker": value, "interpreter": beside[field]}
                        found.append({f"workers.{what}_{crowd}.{field}": both})
    return found


def interpreters(count: int) -> dict[str, float]:
    """The memory of each of so many that wait."""
    command = [*INTERPRETER, "print(flush=True); input()"]
    with ExitStack() as stack:
        waiting = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})
            waiting.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in waiting:
            assert process.stdout is not None
            process.stdout.readline()
        return memory([process.pid for process in waiting])


def bridges(count: int, place: str) -> dict[str, float]:
    """The memory of each of so many bridges of one broker, which listens and answers nothing."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = f"{place}/broker-{count}.sock"
        listener.bind(address)
        listener.listen(count)
        started = []
        for number in range(count):
            state = Path(place, f"state-{count}-{number}")
            state.mkdir(mode=0o700)
            told = {"ROLE": "implementer", "TOKEN": "0" * 32, "SOCKET": address, "GENERATION": "1"}
            variables = {f"PI_TMUX_ORCHESTRATOR_{name}": value for name, value in told.items()}
            variables |= {"AGENT_INTERCOM_WORKER_STATE": str(state), "PATH": "/usr/bin:/bin"}
            process = subprocess.Popen([f"{LIBRARY}/orchestrate-bridge", "--", "/bin/true"], env=variables, cwd=place)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        for _ in started:
            connection, _ = listener.accept()
            stack.enter_context(connection).recv(1)
        return memory([process.pid for process in started])


def memory(pids: Sequence[int]) -> dict[str, float]:
    """KiB of each of these processes, on average, by kind (proc(5), smaps_rollup)."""
    kinds = {"pss": ("Pss",), "rss": ("Rss",), "private": ("Private_Dirty", "Private_Clean")}
    sums = dict.fromkeys(kinds, 0.0)
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        for kind, names in kinds.items():
            sums[kind] += sum(fields[name] for name in names) / len(pids)
    return sums


def why_not() -> str:
    """Why there can be no testbed here; empty where there can."""
    if os.geteuid() != 0:
        return "the testbed needs root"
    probe = subprocess.run(["unshare", "-m", "-p", "-f", "-C", "true"], capture_output=True, check=False)
    return "the testbed needs namespaces" if probe.returncode else ""


def in_testbed(plan: Plan) -> list[Figures]:
    """The rounds, out of a testbed that is booted for them. Raises subprocess.CalledProcessError."""
    name = f"bench{os.getpid()}"
    with tempfile.TemporaryDirectory() as stage:
        os.chmod(stage, 0o755)
        install = ["make", "-C", str(ROOT), "install", f"DESTDIR={stage}", "PREFIX=/usr", "MOUNTS=yes"]
        subprocess.run(install, check=True, capture_output=True)
        subprocess.run([TESTBED, "up", name, "--owner", str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
        try:
            path = subprocess.run([TESTBED, "path", name], check=True, capture_output=True, text=True).stdout.strip()
            subprocess.run(["cp", "-a", f"{stage}/.", f"{path}/"], check=True)
            Path(f"{path}{INSIDE}").write_bytes(Path(__file__).read_bytes())
            command = [str(TESTBED), "user", name, "alice", "/usr/bin/python3", "-B", INSIDE, "--inside"]
            counts = ["--rounds", str(plan.rounds), "--together", str(plan.together)]
            done = subprocess.run([*command, *counts], check=True, capture_output=True, text=True)
        finally:
            subprocess.run([TESTBED, "down", name], check=True)
    found: list[Figures] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in the testbed, and print the rounds."""
    parser = argparse.ArgumentParser(description="Measure workers, from within a testbed; see run.py --only workers.")
    parser.add_argument("--inside", action="store_true", required=True, help="this is a testbed")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--together", type=int, default=FULL.together, help="how many at once")
    options: Any = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(measure(options.rounds, options.together))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
