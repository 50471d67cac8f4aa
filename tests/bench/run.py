#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bench: paired measurements of the brokers, and of workers, against references that run in the same minute.

For speed the reference is a C relay without rules (`relay.c`); for cold start and memory a bare Python process that
imports asyncio and msgspec (`bare.py`); an asyncio router without rules (`router.py`) calibrates both. Beside the times
of the broker of a run, which contain a commit, stands what a commit takes (`commit.py`). The start of a worker stands
beside a bare fork and exec, and what stays of it beside an interpreter (`workers.py`; in a testbed, which takes root).
Measurements are serial and alternate, the intercom broker's limits are lifted because the references have none, and a
ratio is the median of the ratios of each round. A missed target is printed, and is no failure: exit status 1 means that
something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import workers
from benchlib import measure, report, runs, servers

PARTS = ("intercom", "runs", "workers")


def progress(text: str, say: bool = True) -> None:
    """Tell whoever waits."""
    if say:
        print(text, file=sys.stderr, flush=True)


def run(plan: measure.Plan, say: bool = True, pin: bool = True) -> report.Rounds:
    """All rounds of the intercom broker after `plan`. BenchError when something does not start or answer.

    `pin` keeps the generator on one core and the servers on another from the second part on. Without it the scheduler
    puts the two now together and now apart, which moves the relay's figure by half and more than any change of code.
    Apart, the calibration row comes out where it is known to; and a broker and its clients run at the same time.
    """
    rounds: report.Rounds = []
    with_broker = servers.broker_present()
    if not with_broker:
        progress("no broker in this checkout: only the references are measured", say)
    # Socket paths must stay far below the 108 bytes of a Unix address.
    with tempfile.TemporaryDirectory(prefix="aib", dir="/tmp") as name:
        home = Path(name)
        programs = servers.build(home)
        generator = measure.Generator(programs)
        measure.starts(programs, home, with_broker)  # not counted: fills the page cache and writes bytecode
        for turn in range(plan.starts):
            progress(f"start {turn + 1} of {plan.starts}", say)
            rounds.append(measure.starts(programs, home, with_broker))
        cores = sorted(os.sched_getaffinity(0))
        if pin:
            os.sched_setaffinity(0, cores[1:] or cores)
        for process in range(plan.processes):
            progress(f"servers {process + 1} of {plan.processes}, {plan.turns} rounds each", say)
            # New processes now and then: where one happens to lie in memory is then part of the spread.
            with contextlib.ExitStack() as stack:
                running = {
                    "relay": stack.enter_context(servers.start_relay(programs, home)),
                    "router": stack.enter_context(servers.start_router(home)),
                }
                if with_broker:
                    running["broker"] = stack.enter_context(servers.start_broker(programs, home))
                if pin:
                    for server in running.values():
                        os.sched_setaffinity(server.pid, cores[:1])
                for turn in range(plan.turns):
                    number = process * plan.turns + turn
                    rounds.append(measure.one_round(generator, running, plan, number))
    return rounds


def run_runs(plan: runs.Plan, say: bool = True, pin: bool = True) -> report.Rounds:
    """All rounds of brokers of runs after `plan`; otherwise as `run`."""
    if not runs.present():
        progress("no broker of runs in this checkout: they are not measured", say)
        return []
    rounds: report.Rounds = []
    with tempfile.TemporaryDirectory(prefix="aib", dir="/tmp") as name, contextlib.ExitStack() as stack:
        home = Path(name)
        programs = servers.build(home)
        cores = sorted(os.sched_getaffinity(0))
        if pin:
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, cores[1:] or cores)
        for values in runs.rounds(programs, home, measure.Generator(programs), plan, cores if pin else []):
            rounds.append(values)
            progress(f"runs: {len(rounds)} of {plan.rounds} rounds", say and len(rounds) <= plan.rounds)
    return rounds


def run_workers(plan: workers.Plan, say: bool = True) -> report.Rounds:
    """All rounds of workers after `plan`, in a testbed. BenchError where that, or something in it, does not work."""
    progress("workers: a testbed is booted", say)
    try:
        return workers.in_testbed(plan)
    except subprocess.CalledProcessError as error:
        told = (error.stderr or b"") if isinstance(error.stderr, bytes) else (error.stderr or "").encode()
        raise servers.BenchError(f"workers: {told.decode(errors='replace').strip() or error}") from error


def document(rounds: report.Rounds, seconds: float) -> dict[str, Any]:
    """The results as they are written to the JSON file."""
    return {
        "machine": {
            "system": platform.platform(),
            "python": servers.PYTHON,
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "nice": os.nice(0),
        },
        "seconds": round(seconds, 1),
        "figures": report.figures(rounds),
        "targets": [verdict._asdict() for verdict in report.judge(report.TARGETS, rounds)],
        "runs": [verdict._asdict() for verdict in report.judge(report.RUN_TARGETS, rounds)],
        "workers": [verdict._asdict() for verdict in report.judge(report.WORKER_TARGETS, rounds)],
        "room": [verdict._asdict() for verdict in report.judge(report.ROOM, rounds)],
        "calibration": [verdict._asdict() for verdict in report.judge(report.CALIBRATION, rounds)],
        "rounds": rounds,
    }


def main() -> int:
    """Run the bench; see the module's text for what the exit status means."""
    root = Path(__file__).resolve().parent.parent.parent
    parser = argparse.ArgumentParser(description="Measure the brokers against their references.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: about two minutes")
    parser.add_argument("--only", choices=PARTS, help="measure one of the brokers, or workers")
    parser.add_argument("--no-pin", action="store_true", help="let the scheduler place servers and load generator")
    parser.add_argument("--json", type=Path, default=root / "build" / "bench.json", help="where the results go")
    options = parser.parse_args()
    since = time.monotonic()
    try:
        rounds: report.Rounds = []
        wanted = [options.only] if options.only else PARTS
        missing = workers.why_not() if "workers" in wanted else ""
        if missing and options.only:
            raise servers.BenchError(f"workers: {missing}")
        if "workers" in wanted and not missing:
            rounds += run_workers(workers.QUICK if options.quick else workers.FULL)
        elif missing:
            progress(f"{missing}: workers are not measured")
        if "runs" in wanted:
            rounds += run_runs(runs.QUICK if options.quick else runs.FULL, pin=not options.no_pin)
        if "intercom" in wanted:
            rounds += run(measure.QUICK if options.quick else measure.FULL, pin=not options.no_pin)
    except servers.BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    results = document(rounds, time.monotonic() - since) | {"pinned": not options.no_pin}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.table(rounds))
    how = f"{servers.PYTHON}, {results['seconds']} s, load {results['machine']['load'][0]:.2f}"
    print(f"\n{how}; results in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
