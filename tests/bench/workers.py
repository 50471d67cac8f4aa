#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the start of a worker takes, and what its shim keeps: `python tests/bench/workers.py`, as root.

It boots a testbed with an installation in it and measures there, as a user. A start is everything from the fork of the
launcher to the word that the command runs: gate, scope unit, its job, verification, release. Beside each one stands a
bare fork and exec with one round trip to the service manager, and the start of the interpreter alone, which the
launcher contains. Ratios are medians of the ratios of each round; there is no bare number of seconds to hold.

Memory is that of shims, whose commands sleep, beside as many interpreters that wait: PSS, RSS and what is private.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tests/testbed"
LIBRARY = "/usr/lib/agent-intercom"
INSIDE = "/usr/local/lib/bench-workers.py"
INTERPRETER = ["/usr/bin/python3", "-IS", "-c"]
ROUNDS = 40
TOGETHER = 40

Figures = dict[str, dict[str, float]]


async def measure(rounds: int, together: int) -> list[Figures]:
    """All rounds, in a testbed; the last has what is measured once."""
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
                found.append({"start": {name: 1000 * await kind() for name, kind in kinds.items()}})
            found.append({"start, many at once": {"worker": 1000 * await many()}})

            for count in (1, together):
                shims = [await start(scopes, "/bin/sleep", "1000") for _ in range(count)]
                values = memory([one.pid for one in shims])
                for name in await scopes.states("worker-*.scope"):
                    await scopes.stop(name)
                await asyncio.gather(*(one.ended() for one in shims))
                async with AsyncExitStack() as stack:
                    waiting = [
                        stack.enter_context(
                            subprocess.Popen(
                                [*INTERPRETER, "print(flush=True); input()"],
                                stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE,
                                env={},
                            )
                        )
                        for _ in range(count)
                    ]
                    for process in waiting:
                        assert process.stdout is not None
                        process.stdout.readline()
                    beside = memory([process.pid for process in waiting])
                    for process in waiting:
                        process.kill()
                for field, value in values.items():
                    found.append({f"{field} of {count}": {"worker": value, "interpreter": beside[field]}})
    return found


def memory(pids: Sequence[int]) -> dict[str, float]:
    """KiB of each of these processes, on average, by kind (proc(5), smaps_rollup)."""
    kinds = {"PSS": ("Pss",), "RSS": ("Rss",), "private": ("Private_Dirty", "Private_Clean")}
    sums = dict.fromkeys(kinds, 0.0)
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        for kind, names in kinds.items():
            sums[kind] += sum(fields[name] for name in names) / len(pids)
    return sums


def in_testbed(rounds: int, together: int) -> list[Figures]:
    """The rounds, out of a testbed that is booted for them."""
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
            counts = ["--rounds", str(rounds), "--together", str(together)]
            done = subprocess.run([*command, *counts], check=True, capture_output=True, text=True)
        finally:
            subprocess.run([TESTBED, "down", name], check=True)
    found: list[Figures] = json.loads(done.stdout)
    return found


def table(found: Sequence[Figures]) -> str:
    """Each figure, and its ratio to what stands beside it."""
    lines = []
    for figure in dict.fromkeys(name for values in found for name in values):
        rounds = [values[figure] for values in found if figure in values]
        unit = "ms" if figure.startswith("start") else "KiB"
        for server in rounds[0]:
            lines.append(f"{figure:24} {server:12} {median(values[server] for values in rounds):10.1f} {unit}")
        for beside in [server for server in rounds[0] if server != "worker"]:
            ratio = median(values["worker"] / values[beside] for values in rounds)
            lines.append(f"{figure:24} {'  to ' + beside:18} {ratio:.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the start and the shims of workers.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--together", type=int, default=TOGETHER, help="how many at once")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(asyncio.run(measure(options.rounds, options.together))))
        return 0
    found = in_testbed(options.rounds, options.together)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
