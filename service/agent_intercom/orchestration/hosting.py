# SPDX-License-Identifier: Apache-2.0
"""The units of one run, by the user's service manager: its socket, broker and workers, and the slice they are all in.

A worker is a transient service, `orchestrate-RUN-ROLE-gN.service` for generation N of a role. What it runs is the
launcher that is installed beside the broker, which reads everything private where that is; the unit has nothing of it.

`unit` is the run's unit id. Functions raise `host.manager.ManagerError`, and Refusal: `startup_failed` for a worker
that did not start, `stop_failed` where something is left of what was to end.
"""

from __future__ import annotations

import re
from os import path
from typing import Any, Final, NamedTuple

from agent_intercom.host import cgroups
from agent_intercom.host.errors import HostError
from agent_intercom.host.manager import NO_SUCH_UNIT, JobFailed, Manager, ManagerRefused, Variant
from agent_intercom.orchestration import contract, runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import UNIT_ID

LAUNCHER: Final = "orchestrate-worker"
STOP_TIMEOUT: Final = 25.0
"""Seconds for everything of a run to stop: a worker is killed after five, a broker after ten."""

START_TIMEOUT: Final = 20.0
"""Seconds for a worker's launcher to become the worker's program, which takes it less than one."""

_SETTLING: Final = 5.0
_WORKER_STOP_USEC: Final = 5_000_000
_WORKER_START_USEC: Final = int(START_TIMEOUT * 1_000_000)
_GONE: Final = frozenset({"inactive", "failed"})
_WORKER: Final = re.compile(r"-(?P<role>[a-z]+)-g(?P<generation>[1-9][0-9]{0,8})\.service")


class WorkerUnit(NamedTuple):
    """The service of one worker.

    `active`, `sub` and `result` are what systemd calls ActiveState, SubState and Result; `pid` is 0 where no main
    process runs; `status_text` is what its launcher said last, before it became the worker or gave up.
    """

    role: str
    generation: int
    unit: str
    active: str
    sub: str
    pid: int
    result: str
    status_text: str


class BrokerUnit(NamedTuple):
    """The service of a run's broker; its fields are those of `WorkerUnit`."""

    active: str
    sub: str
    status_text: str
    pid: int
    result: str


def socket_unit(unit: str) -> str:
    """The unit that listens for the run's broker."""
    return f"orchestrate@{_checked(unit)}.socket"


def service_unit(unit: str) -> str:
    """The unit of the run's broker."""
    return f"orchestrate@{_checked(unit)}.service"


def slice_unit(unit: str) -> str:
    """The unit that everything of the run is in."""
    return f"orchestrate-{_checked(unit)}.slice"


def worker_unit(unit: str, role: str, generation: int) -> str:
    """The unit of one worker. Raises Refusal `role_invalid` or `generation_invalid`."""
    if role not in contract.ROLES:
        raise Refusal("role_invalid", "unknown role", "role")
    if generation < 1:
        raise Refusal("generation_invalid", "generations are counted from 1", "generation")
    return f"orchestrate-{_checked(unit)}-{role}-g{generation}.service"


def listen(manager: Manager, unit: str) -> None:
    """Have systemd listen for the run's broker, which the first connection starts. Raises Refusal `startup_failed`."""
    try:
        manager.start(socket_unit(unit))
    except ManagerRefused as error:
        if error.name == NO_SUCH_UNIT:
            raise Refusal("startup_failed", "the units of runs are not installed", "units") from error
        raise


def start_worker(manager: Manager, unit: str, role: str, generation: int, timeout: float = START_TIMEOUT) -> None:
    """Start a worker and wait until its launcher has become the worker's program, or as good as; in seconds at most.

    Raises Refusal `startup_failed` with the launcher's reason where it gave up; the unit is forgotten then.
    """
    name = worker_unit(unit, role, generation)
    program = path.join(_directory(manager, unit), LAUNCHER)
    try:
        manager.transient(name, _properties(unit, [program, unit, role, str(generation)]), timeout)
    except JobFailed as error:
        found = manager.unit(name, "Service") or {}
        manager.stop(name)
        manager.reset_failed(name)
        why = found.get("StatusText") or _reason(found, error.result)
        raise Refusal("startup_failed", f"the worker {role} did not start: {why}", role) from error


def stop_workers(manager: Manager, unit: str, role: str) -> None:
    """End every worker of a role, of whatever generation, and see that they are gone. Raises Refusal `stop_failed`."""
    for state in manager.units(worker_unit(unit, role, 1).removesuffix("1.service") + "*.service"):
        cgroup = str((manager.unit(state.name, "Service") or {}).get("ControlGroup", ""))
        manager.stop(state.name)
        manager.reset_failed(state.name)
        _refuse_left(_left(cgroup), f"the worker {role}")


def end(manager: Manager, unit: str, runtime_dir: str) -> None:
    """End everything of a run, and see that nothing of it is left: no unit, no process, nobody who listens.

    Raises Refusal `stop_failed`, which says how many processes are left. Does nothing to a run that is not there.
    """
    name = slice_unit(unit)
    cgroup = f"{manager.control_group().rstrip('/')}/orchestrate.slice/{name}"
    failed: JobFailed | None = None
    try:
        manager.stop(name, STOP_TIMEOUT)
    except JobFailed as error:
        failed = error
    # The manager does not look where it believes that nothing is; the file system may not be visible here.
    _refuse_left(_left(cgroup) or len(manager.processes(name)), "the run")
    if failed is not None:
        raise Refusal("stop_failed", f"the run did not stop: {failed.result}", "unit") from failed
    states = manager.units(f"orchestrate@{unit}.*", name, f"orchestrate-{unit}-*")
    if any(state.active not in _GONE for state in states):
        raise Refusal("stop_failed", "a unit of the run is still there, with no process of it left", "unit")
    if runtime.socket_path(runtime_dir, unit) in runtime.listening():
        raise Refusal("stop_failed", "somebody else listens at the address of the run", "unit")
    for state in states:
        if state.active == "failed":
            manager.reset_failed(state.name)


def lingers(manager: Manager, unit: str) -> bool:
    """Whether anything of a run is still there: a unit that is not at its end, or a process in its slice."""
    states = manager.units(f"orchestrate@{unit}.*", slice_unit(unit), f"orchestrate-{unit}-*")
    return any(state.active not in _GONE for state in states) or bool(manager.processes(slice_unit(unit)))


def workers(manager: Manager, unit: str) -> list[WorkerUnit]:
    """The workers of a run that systemd knows, those that failed included, by role and generation."""
    prefix = f"orchestrate-{_checked(unit)}"
    found = []
    for state in manager.units(f"{prefix}-*.service"):
        match = _WORKER.fullmatch(state.name.removeprefix(prefix))
        service = manager.unit(state.name, "Service") if match else None
        if match and service:
            common = _common(service)
            found.append(WorkerUnit(match["role"], int(match["generation"]), state.name, *common))
    return sorted(found)


def broker(manager: Manager, unit: str) -> BrokerUnit | None:
    """The broker of a run, or None where systemd has no such unit loaded."""
    name = service_unit(unit)
    service = manager.unit(name, "Service") if manager.units(name) else None
    if service is None:
        return None
    active, sub, pid, result, status_text = _common(service)
    return BrokerUnit(active, sub, status_text, pid, result)


def _common(service: dict[str, Any]) -> tuple[str, str, int, str, str]:
    return (
        str(service["ActiveState"]),
        str(service["SubState"]),
        int(service["MainPID"]),
        str(service["Result"]),
        str(service["StatusText"]),
    )


def _checked(unit: str) -> str:
    if UNIT_ID.fullmatch(unit) is None:
        raise Refusal("unit_invalid", "not the id of a run", "unit")
    return unit


def _directory(manager: Manager, unit: str) -> str:
    """Where the launchers of this installation are: beside the broker's, which its unit names."""
    service = manager.unit(service_unit(unit), "Service")
    commands = service.get("ExecStart") if service else None
    if not commands:
        raise Refusal("startup_failed", "the units of runs are not installed", "units")
    return path.dirname(str(commands[0][0]))


def _properties(unit: str, command: list[str]) -> dict[str, Variant]:
    """The properties of a worker's service, by their D-Bus names. Anybody may read them."""
    return {
        "Description": ("s", f"Agent Intercom, worker of run {unit}"),
        "Slice": ("s", slice_unit(unit)),
        # Whoever stops the socket ends the run. Not the broker's service: a restart of that is nothing to its workers.
        "PartOf": ("as", [socket_unit(unit)]),
        # The launcher is ready when nothing is left that it could refuse.
        "Type": ("s", "notify"),
        "NotifyAccess": ("s", "main"),
        "ExecStart": ("a(sasb)", [(command[0], command, False)]),
        "TimeoutStartUSec": ("t", _WORKER_START_USEC),
        "KillMode": ("s", "control-group"),
        "SendSIGHUP": ("b", False),
        "TimeoutStopUSec": ("t", _WORKER_STOP_USEC),
        # What an agent says and prints is nobody's but the broker's.
        "StandardInput": ("s", "null"),
        "StandardOutput": ("s", "null"),
        "StandardError": ("s", "null"),
        # Its memory has the bodies in it, as the broker's has.
        "LimitCORE": ("t", 0),
        "MemorySwapMax": ("t", 0),
        # What an agent that is told to end exits with.
        "SuccessExitStatus": ("(aiai)", ([143], [])),
        # What is killed is what takes most, such as a compiler; the agent sees that it failed.
        "OOMPolicy": ("s", "continue"),
    }


def _reason(service: dict[str, Any], result: str) -> str:
    """Why a launcher that said nothing did not start."""
    status = service.get("ExecMainStatus", 0)
    if service.get("Result") == "exit-code" and status:
        return f"its launcher ended with exit status {status}"
    return f"its unit ended with {service.get('Result') or result}"


def _refuse_left(count: int, what: str) -> None:
    if count:
        are = "process of it is" if count == 1 else "processes of it are"
        raise Refusal("stop_failed", f"{what} was stopped, and {count} {are} left", "unit")


def _left(cgroup: str) -> int:
    """How many processes are in a control group and below it, once what was killed had a while to go."""
    try:
        return 0 if cgroups.wait_empty(cgroup, _SETTLING) else max(len(cgroups.members(cgroup)), 1)
    except HostError as error:
        raise Refusal("stop_failed", "whether processes of it are left cannot be seen", "unit") from error
