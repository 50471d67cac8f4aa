# SPDX-License-Identifier: Apache-2.0
"""What the tests of scope units do as a user of the testbed: each probe makes units and returns what came of it.

Run as `python3 scopeprobe.py NAME`, with the package on the path; prints JSON. Probes leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent_intercom.host import cgroups, processes
from agent_intercom.host.bus import Bus
from agent_intercom.host.manager import (
    MANAGER,
    MANAGER_PATH,
    SYSTEMD,
    JobFailed,
    Manager,
    ManagerError,
    ManagerRefused,
    Variant,
)
from agent_intercom.host.scopes import NotPlaced, Scopes, Started

PROPERTIES: dict[str, Variant] = {
    "Description": ("s", "probe"),
    "Slice": ("s", "probe.slice"),
    "KillMode": ("s", "control-group"),
    "SendSIGHUP": ("b", False),
    "TimeoutStopUSec": ("t", 300_000),
    "OOMPolicy": ("s", "kill"),
    "TasksMax": ("t", 512),
    "CollectMode": ("s", "inactive-or-failed"),
}
SLEEP = ["/bin/sleep", "1000"]
HANG = 20.0

POLITE = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(33))\nprint('ready', flush=True)\nsignal.pause()"
STUBBORN = """
import os, signal
input()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        signal.pause()
    os._exit(0)
os.wait()
signal.pause()
"""
FORKING = """
import os, signal
input()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made, flush=True)
signal.pause()
"""
ESCAPING = """
import os, sys
input()
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
print("out", flush=True)
input()
"""


class Stage:
    """Children, and the scope units that they are put in."""

    def __init__(self, scopes: Scopes, bus: Bus) -> None:
        self.scopes = scopes
        self.bus = bus
        self.children: dict[int, subprocess.Popen[str]] = {}
        self.names: list[str] = []
        self.changes: list[tuple[str, str, str, str]] = []
        self._moved = asyncio.Event()
        scopes.changes(self._changed)

    def _changed(self, *change: str) -> None:
        unit, active, sub, result = change
        self.changes.append((unit, active, sub, result))
        self._moved.set()

    async def ended(self, unit: str) -> list[str]:
        """The last change of a unit: how it ended, and why."""
        async with asyncio.timeout(HANG):
            while True:
                self._moved.clear()
                for name, active, _, result in self.changes:
                    if name == unit and active in ("inactive", "failed"):
                        return [active, result]
                await self._moved.wait()

    def unit(self) -> str:
        name = f"probe-{os.urandom(6).hex()}.scope"
        self.names.append(name)
        return name

    def child(self, *command: str, script: str = "", arguments: list[str] | None = None) -> int:
        argv = list(command) or ([sys.executable, "-ISc", script, *(arguments or [])] if script else SLEEP)
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True)
        self.children[child.pid] = child
        return child.pid

    async def line(self, pid: int) -> str:
        stdout = self.children[pid].stdout
        assert stdout is not None
        return (await asyncio.to_thread(stdout.readline)).strip()

    def tell(self, pid: int) -> None:
        stdin = self.children[pid].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    async def wait(self, pid: int) -> int:
        async with asyncio.timeout(HANG):
            return await asyncio.to_thread(self.children[pid].wait)

    async def start(self, pid: int, unit: str = "", timeout: float = HANG, **more: Variant) -> tuple[str, Started]:
        name = unit or self.unit()
        return name, await self.scopes.start(name, pid, PROPERTIES | more, timeout)

    async def raw(self, unit: str, pid: int, mode: str = "fail", **more: Variant) -> str:
        """The call alone, and what it answers: a job."""
        given = [*(PROPERTIES | more).items(), ("PIDs", ("au", [pid]))]
        signature = "ssa(sv)a(sa(sv))"
        answer = await self.bus.call(
            SYSTEMD, MANAGER_PATH, MANAGER, "StartTransientUnit", signature, unit, mode, given, []
        )
        return str(answer[0])

    async def put(self, unit: str, pid: int, **more: Variant) -> None:
        """The call alone, until its process is there."""
        await self.raw(unit, pid, "fail", **more)
        await until(lambda: where(pid) == unit)

    async def clear(self) -> None:
        for name in self.names:
            with contextlib.suppress(ManagerError):
                await self.scopes.stop(name, HANG)
            await self.scopes.reset_failed(name)
        for child in self.children.values():
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANG):
        while not condition():
            await asyncio.sleep(0.005)


def where(pid: int) -> str:
    """The last part of a process's control group."""
    return (processes.cgroup_of(pid) or "").rpartition("/")[2]


def systemctl(*arguments: str) -> str:
    command = ["systemctl", "--user", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def show(unit: str, name: str) -> str:
    return systemctl("show", "--value", "-p", name, unit)


async def told(action: Awaitable[Any]) -> Any:
    """What came of it, or what was raised."""
    try:
        return await action
    except JobFailed as error:
        return ["JobFailed", error.result]
    except NotPlaced as error:
        return ["NotPlaced", error.reason]
    except ManagerRefused as error:
        return ["ManagerRefused", error.name.rpartition(".")[2]]


def service(name: str, *command: str) -> dict[str, Variant]:
    execute: Variant = ("a(sasb)", [(command[0], list(command), False)])
    return {"Description": ("s", name), "Type": ("s", "exec"), "ExecStart": execute, "Slice": ("s", "probe.slice")}


def make_service(name: str, *command: str) -> None:
    with Manager() as manager:
        properties = list(service(name, *command).items())
        manager._job(name, HANG, "StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", properties, [])


class Activating:
    """A service that never becomes ready."""

    name = "probe-activating.service"

    async def __aenter__(self) -> str:
        systemctl("start", "probe.slice")
        command = ["systemd-run", "--user", "--quiet", "--no-block", f"--unit={self.name}", "-pType=notify", *SLEEP]
        subprocess.run(command, check=True)
        await until(lambda: show(self.name, "ActiveState") == "activating")
        return self.name

    async def __aexit__(self, *exc: object) -> None:
        systemctl("stop", self.name)


# What a start is.


async def started(stage: Stage) -> Any:
    pid = stage.child()
    unit, placed = await stage.start(pid)
    state = await stage.scopes.state(unit)
    assert state is not None
    stats = processes.identify(pid)
    return {
        "placed": placed == (show(unit, "ControlGroup"), show(unit, "InvocationID")) == state[4:],
        "in it": [cgroups.members(placed.control_group), where(pid) == unit],
        "state": state[:4],
        "states": list(await stage.scopes.states("probe-*")) == [unit],
        "slice": placed.control_group.split("/")[-2],
        "description": show(unit, "Description"),
        "alive": stats is not None and processes.alive(stats),
        "names": processes.names(cgroups.members(placed.control_group)) == [(pid, "sleep")],
        "stop": [await stage.scopes.stop(unit), await stage.scopes.stop(unit)],
        "exit": await stage.wait(pid),
        "gone": [await stage.scopes.state(unit), await cgroups.emptied(placed.control_group, 5)],
        "dead": stats is not None and processes.alive(stats),
        "unknown": [
            await stage.scopes.kill(unit, 9),
            await stage.scopes.freeze(unit),
            await stage.scopes.thaw(unit),
            await stage.scopes.reset_failed(unit),
        ],
        "version": await stage.scopes.version(),
        "jobs": await stage.scopes.jobs(),
    }


async def many_at_once(stage: Stage) -> Any:
    """As many as there are may be started and stopped beside each other."""
    pids = [stage.child() for _ in range(30)]
    made = await asyncio.gather(*(stage.start(pid) for pid in pids))
    places = [where(pid) == unit for pid, (unit, _) in zip(pids, made, strict=True)]
    ends = await asyncio.gather(*(stage.scopes.stop(unit) for unit, _ in made for _ in range(2)))
    return [all(places), set(ends) <= {True, False}, sum(ends) >= 30, await stage.scopes.states("probe-*")]


async def without_properties(stage: Stage) -> Any:
    """What systemd takes where it is told nothing."""
    pid = stage.child("/bin/sleep", "1000")
    name = stage.unit()
    await stage.scopes.start(name, pid, {}, HANG)
    return {key: show(name, key) for key in ("Slice", "TimeoutStopUSec", "CollectMode", "Description")}


async def reply_means_queued(stage: Stage) -> Any:
    pid, other = stage.child(), stage.child()
    unit, second = stage.unit(), stage.unit()
    before = where(pid)
    async with Activating() as activating:
        after: Variant = ("as", [activating])
        job = await stage.raw(unit, pid, After=after)
        queued = [job.startswith("/org/freedesktop/systemd1/job/"), where(pid) == before, show(unit, "ActiveState")]
        jobs = await stage.scopes.jobs() >= 1
        waited = await told(stage.start(other, second, timeout=0.3, After=after))
        left = [where(other) == before, stage.children[other].poll(), await stage.scopes.state(second)]
        await stage.scopes.stop(unit)
    return {"queued": queued, "jobs": jobs, "waited": waited, "left": left, "still": where(pid) == before}


async def results_of_jobs(stage: Stage) -> Any:
    pid, other = stage.child(), stage.child()
    unit, second = stage.unit(), stage.unit()
    async with Activating() as activating:
        start = asyncio.create_task(told(stage.start(pid, unit, After=("as", [activating]))))
        while await stage.scopes.state(unit) is None:
            await asyncio.sleep(0.005)
        await stage.scopes.stop(unit)
        canceled = await start
    Path("~/.config/systemd/user").expanduser().mkdir(parents=True, exist_ok=True)
    failing = Path("~/.config/systemd/user/probe-failing.service").expanduser()
    failing.write_text("[Service]\nType=oneshot\nExecStart=/bin/false\n")
    systemctl("daemon-reload")
    needed: Variant = ("as", [failing.name])
    dependency = await told(stage.start(other, second, Requires=needed, After=needed))
    systemctl("reset-failed", failing.name)
    return [canceled, dependency, where(pid) == where(other) == where(os.getpid()), await stage.scopes.states("probe*")]


async def second_unit_moves(stage: Stage) -> Any:
    pid = stage.child()
    first, second = stage.unit(), stage.unit()
    _, placed = await stage.start(pid, first)
    await stage.put(second, pid)
    moved = [where(pid) == second, await cgroups.emptied(placed.control_group, HANG)]
    await stage.ended(first)
    third = stage.unit()
    refused = await told(stage.scopes.start(third, pid, PROPERTIES, HANG))
    return [moved, refused, where(pid) == second, await stage.scopes.state(third)]


async def names_are_used_once(stage: Stage) -> Any:
    pid, other = stage.child(), stage.child()
    unit, _ = await stage.start(pid)
    again = [await told(stage.start(other, unit))]
    again += [await told(stage.raw(unit, other, mode)) for mode in ("fail", "replace")]
    # The one that has the name has lost nothing by it.
    return [again, where(pid) == unit, where(other) == where(os.getpid())]


async def refused_calls(stage: Stage) -> Any:
    """Each is refused as a whole, and the process stays where it was."""
    faults: dict[str, Variant] = {
        "NoSuchProperty": ("s", ""),
        "Environment": ("as", ["A=b"]),
        "WorkingDirectory": ("s", "/"),
        "ExecStopPost": ("a(sasb)", []),
        "NoNewPrivileges": ("b", True),
        "ProtectHome": ("s", "yes"),
        "StandardOutput": ("s", "null"),
        "LimitCORE": ("t", 0),
        "LoadCredential": ("a(ss)", []),
        "BindsTo": ("as", ["no-such.service"]),
    }
    pid = stage.child()
    answers = {}
    for name, value in faults.items():
        unit = stage.unit()
        answer = await told(stage.start(pid, unit, timeout=5, **{name: value}))
        answers[name] = [answer[0], where(pid) == where(os.getpid()), await stage.scopes.state(unit)]
    return answers


async def ended_processes(stage: Stage) -> Any:
    unwaited, waited = stage.child("/bin/true"), stage.child("/bin/true")
    os.waitid(os.P_PID, unwaited, os.WEXITED | os.WNOWAIT)
    stage.children[waited].wait()
    ours = [await told(stage.start(pid)) for pid in (unwaited, waited)]
    with Manager() as asked:
        manager = asked.pid() or 0
    theirs = [await told(stage.raw(stage.unit(), pid)) for pid in (waited, manager)]
    return [ours, theirs, await told(stage.start(manager))]


# What an end is.


async def kill_modes(stage: Stage) -> Any:
    found = {}
    for mode in ("control-group", "mixed"):
        pid = stage.child(script=POLITE)
        await stage.line(pid)
        unit, _ = await stage.start(pid, KillMode=("s", mode))
        await stage.scopes.stop(unit)
        found[mode] = await stage.wait(pid)
    return found


async def stubborn_tree(stage: Stage) -> Any:
    pid = stage.child(script=STUBBORN)
    unit, placed = await stage.start(pid)
    stage.tell(pid)
    grandchild = int(await stage.line(pid))
    both = sorted(cgroups.members(placed.control_group)) == sorted([pid, grandchild])
    stop = await stage.scopes.stop(unit)
    return [both, stop, await stage.wait(pid), await cgroups.emptied(placed.control_group, HANG), gone(grandchild)]


def gone(pid: int) -> bool:
    return processes.identify(pid) is None


async def leader_gone(stage: Stage) -> Any:
    """The unit and its control group stay for the children that a leader left behind."""
    script = (
        "import os, signal\ninput()\npid = os.fork()\nif pid == 0: signal.pause()\nprint(pid, flush=True); os._exit(0)"
    )
    pid = stage.child(script=script)
    unit, placed = await stage.start(pid)
    stage.tell(pid)
    child = int(await stage.line(pid))
    await stage.wait(pid)
    state = await stage.scopes.state(unit)
    members = cgroups.members(placed.control_group) == [child]
    return [state and state[:2], members, await stage.scopes.stop(unit), gone(child)]


async def many_children(stage: Stage) -> Any:
    pid = stage.child(script=FORKING)
    unit, placed = await stage.start(pid, TasksMax=("t", 128))
    limited = (Path(cgroups.directory(placed.control_group) or "/") / "pids.max").exists()
    stage.tell(pid)
    made = int(await stage.line(pid))
    members = len(cgroups.members(placed.control_group))
    events = Path(cgroups.directory(placed.control_group) or "/") / "pids.events"
    refused = int(events.read_text().split()[1]) if limited else 0
    stop = await stage.scopes.stop(unit)
    empty = await cgroups.emptied(placed.control_group, HANG)
    return {"limited": limited, "made": made, "members": members, "refused": refused, "end": [stop, empty]}


async def killed_at_once(stage: Stage) -> Any:
    pid = stage.child(script=STUBBORN)
    _, placed = await stage.start(pid)
    stage.tell(pid)
    await stage.line(pid)
    told_of = asyncio.Event()
    watch = cgroups.Watch(placed.control_group, asyncio.get_running_loop(), told_of.set)
    early = [cgroups.populated(placed.control_group), cgroups.wait_empty(placed.control_group, 0.01)]
    early += [await cgroups.emptied(placed.control_group, 0.01), told_of.is_set()]
    used = cgroups.cpu_usec(placed.control_group)
    killed = cgroups.kill(placed.control_group)
    async with asyncio.timeout(HANG):
        await told_of.wait()
    watch.close()
    return [early, used is not None and used > 0, killed, await stage.wait(pid), cgroups.kill("/none")]


async def results_and_collecting(stage: Stage) -> Any:
    """Why a unit ended: told as it changes, and for one that is collected nowhere else."""
    found = {}
    for mode in ("inactive-or-failed", "inactive"):
        pid = stage.child()
        unit, _ = await stage.start(pid, RuntimeMaxUSec=("t", 100_000), CollectMode=("s", mode))
        change = await stage.ended(unit)
        await stage.wait(pid)
        while (state := await stage.scopes.state(unit)) is not None and mode != "inactive":
            await asyncio.sleep(0.005)
        found[mode] = [change, state and state[:3], await stage.scopes.reset_failed(unit)]
        assert await stage.scopes.state(unit) is None
    return found


async def exit_status(stage: Stage) -> Any:
    """There is none: whatever it is, it was a success."""
    pid = stage.child(script="input()\nraise SystemExit(7)")
    unit, _ = await stage.start(pid)
    stage.tell(pid)
    return [await stage.wait(pid), await stage.ended(unit)]


# Freezing.


async def freezing(stage: Stage) -> Any:
    pid = stage.child(script=POLITE)
    await stage.line(pid)
    unit, placed = await stage.start(pid)
    freezers = []
    for action in (stage.scopes.freeze, stage.scopes.thaw, stage.scopes.freeze):
        done = await action(unit)
        state = await stage.scopes.state(unit)
        assert state is not None
        events = (Path(cgroups.directory(placed.control_group) or "/") / "cgroup.events").read_text()
        freezers.append([done, state.freezer, "frozen 1" in events])
    # The stop thaws it, and it has its chance to end by itself.
    return [freezers, await stage.scopes.stop(unit), await stage.wait(pid)]


async def killing_frozen(stage: Stage) -> Any:
    pid = stage.child()
    unit, _ = await stage.start(pid)
    await stage.scopes.freeze(unit)
    return [await stage.scopes.kill(unit, signal.SIGKILL), await stage.wait(pid)]


async def runtime_of_frozen(stage: Stage) -> Any:
    """It counts while nothing runs, so that a pause would be the end of a worker."""
    pid = stage.child()
    begun = time.monotonic()
    unit, _ = await stage.start(pid, RuntimeMaxUSec=("t", 500_000))
    await stage.scopes.freeze(unit)
    state = await stage.scopes.state(unit)
    ended = await stage.ended(unit)
    return [state and state.freezer, ended, await stage.wait(pid), time.monotonic() - begun >= 0.5]


# The run that a worker belongs to.


async def with_its_run(stage: Stage) -> Any:
    run = "probe-run.service"
    make_service(run, *SLEEP)
    pid, nested = stage.child(), stage.child()
    unit, placed = await stage.start(pid, PartOf=("as", [run]))
    inner, _ = await stage.start(nested, PartOf=("as", [unit]))
    first = show(run, "InvocationID")
    systemctl("restart", run)
    restarted = [show(run, "InvocationID") != first, await same(stage, unit, placed), where(pid) == unit]
    systemctl("kill", "--signal=KILL", run)
    await until(lambda: show(run, "ActiveState") == "failed")
    crashed = [await same(stage, unit, placed), where(pid) == unit]
    systemctl("start", run)
    again = await same(stage, unit, placed)
    systemctl("stop", run)
    stopped = [await stage.wait(pid), await stage.wait(nested), await stage.ended(unit), await stage.ended(inner)]
    return {"restarted": restarted, "crashed": crashed, "started again": again, "stopped": stopped}


async def same(stage: Stage, unit: str, placed: Started) -> bool:
    state = await stage.scopes.state(unit)
    return state is not None and state.active == "active" and state[4:] == placed


async def ordered_after_its_run(stage: Stage) -> Any:
    """With After= a run would be told of its end only when its workers have gone; without, all at once."""
    run = "probe-run.service"
    told_in_time = {}
    for ordered in (True, False):
        pid = stage.child(script=STUBBORN)
        make_service(run, *SLEEP)
        main = int(show(run, "MainPID"))
        extra: dict[str, Variant] = {"After": ("as", [run])} if ordered else {}
        await stage.start(pid, "", HANG, PartOf=("as", [run]), **extra)
        stage.tell(pid)
        await stage.line(pid)
        stop = asyncio.create_task(asyncio.to_thread(systemctl, "stop", run))
        while not gone(main) and not gone(pid):
            await asyncio.sleep(0.005)
        told_in_time["ordered" if ordered else "not"] = gone(main) and not gone(pid)
        await stop
    return told_in_time


# The manager goes on.


async def reloads(stage: Stage) -> Any:
    returned = asyncio.Event()
    stage.scopes.returned(returned.set)
    pid, waiting, late = stage.child(), stage.child(), stage.child()
    unit, placed = await stage.start(pid)
    kept = []
    for verb in ("daemon-reload", "daemon-reexec"):
        systemctl(verb)
        kept.append([await same(stage, unit, placed), where(pid) == unit, returned.is_set()])
        if verb == "daemon-reexec":
            async with asyncio.timeout(HANG):
                await returned.wait()
    # What was under way when the manager became another one.
    async with Activating() as activating:
        second = stage.unit()
        start = asyncio.create_task(told(stage.start(waiting, second, After=("as", [activating]))))
        while await stage.scopes.state(second) is None:
            await asyncio.sleep(0.005)
        returned.clear()
        systemctl("daemon-reexec")
        async with asyncio.timeout(HANG):
            await returned.wait()
        pending = not start.done()
    result = await start
    third, _ = await stage.start(late)
    ends = [await stage.scopes.stop(third), await stage.ended(third), await stage.scopes.stop(unit)]
    return {"kept": kept, "pending": pending, "result": result, "ends": ends, "lost": stage.scopes.lost.is_set()}


# Those who do not stay.


async def moves_itself(stage: Stage) -> Any:
    with Manager() as manager:
        outside = Path(cgroups.directory(manager.control_group()) or "/") / "probe-outside"
    outside.mkdir()
    try:
        pid = stage.child(script=ESCAPING, arguments=[str(outside)])
        unit, placed = await stage.start(pid)
        inside = processes.cgroup_of(pid) == placed.control_group
        stage.tell(pid)
        await stage.line(pid)
        detected = processes.cgroup_of(pid) != placed.control_group
        empty = await cgroups.emptied(placed.control_group, HANG)
        end = await stage.ended(unit)
        alive = not gone(pid)
        cgroups.kill(f"{processes.cgroup_of(pid)}")
        return [inside, detected, empty, end, alive, await stage.wait(pid)]
    finally:
        outside.rmdir()


async def moved_while_started(stage: Stage) -> Any:
    """The job is done, and the process is somewhere else when it is looked at."""
    wanted = stage.child()
    look = processes.cgroup_of
    seen: list[str] = []

    def looked(pid: int) -> str | None:
        found = look(pid)
        if pid == wanted and found is not None and found.endswith(".scope"):
            seen.append(found)
            return "/elsewhere"
        return found

    processes.cgroup_of = looked
    unit = stage.unit()
    answer = await told(stage.start(wanted, unit))
    processes.cgroup_of = look
    # What did not come about as asked is stopped.
    return [answer, len(seen), await stage.wait(wanted), await stage.ended(unit)]


async def _main(name: str) -> Any:
    probe = globals()[name]
    assert inspect.iscoroutinefunction(probe)
    async with Scopes() as scopes, Bus(lambda signal: None, lambda: None) as bus:
        stage = Stage(scopes, bus)
        try:
            return await probe(stage)
        finally:
            await stage.clear()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(sys.argv[1]))))
