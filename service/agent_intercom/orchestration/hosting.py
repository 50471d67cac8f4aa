# SPDX-License-Identifier: Apache-2.0
"""The units of one run, by the user's service manager: its socket and broker, and the slice that everything is in.

The workers of a run are scope units in that slice, which the worker service makes; see `workers.hosted`.

`unit` is the run's unit id. Functions raise `host.manager.ManagerError`, and Refusal: `startup_failed` where nobody can
listen, `stop_failed` where something is left of what was to end.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from agent_intercom.host import cgroups
from agent_intercom.host.errors import HostError
from agent_intercom.host.manager import NO_SUCH_UNIT, JobFailed, Manager, ManagerRefused
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import UNIT_ID

STOP_TIMEOUT: Final = 25.0
"""Seconds for everything of a run to stop: a worker is killed after five, a broker after ten."""

_SETTLING: Final = 5.0
_GONE: Final = frozenset({"inactive", "failed"})


class BrokerUnit(NamedTuple):
    """The service of a run's broker.

    `active`, `sub` and `result` are what systemd calls ActiveState, SubState and Result; `pid` is 0 where no main
    process runs; `status_text` is what it said last.
    """

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


def listen(manager: Manager, unit: str) -> None:
    """Have systemd listen for the run's broker, which the first connection starts. Raises Refusal `startup_failed`."""
    try:
        manager.start(socket_unit(unit))
    except ManagerRefused as error:
        if error.name == NO_SUCH_UNIT:
            raise Refusal("startup_failed", "the units of runs are not installed", "units") from error
        raise


def end(manager: Manager, unit: str, runtime_dir: str, timeout: float = STOP_TIMEOUT) -> None:
    """End everything of a run, and see that nothing of it is left: no unit, no process, nobody who listens.

    `timeout` is how many seconds its job may take. Raises Refusal `stop_failed`, which says how many processes are
    left. Does nothing to a run that is not there.
    """
    name = slice_unit(unit)
    cgroup = f"{manager.control_group().rstrip('/')}/orchestrate.slice/{name}"
    failed: JobFailed | None = None
    try:
        manager.stop(name, timeout)
    except JobFailed as error:
        failed = error
    # The manager does not look where it believes that nothing is; the file system may not be visible here.
    _refuse_left(_left(cgroup) or len(manager.processes(name)), "the run")
    if failed is not None:
        raise Refusal("stop_failed", f"the run did not stop: {failed.result}", "unit") from failed
    states = manager.units(f"orchestrate@{unit}.*", name)
    if any(state.active not in _GONE for state in states):
        raise Refusal("stop_failed", "a unit of the run is still there, with no process of it left", "unit")
    if runtime.socket_path(runtime_dir, unit) in runtime.listening():
        raise Refusal("stop_failed", "somebody else listens at the address of the run", "unit")
    for state in states:
        if state.active == "failed":
            manager.reset_failed(state.name)


def lingers(manager: Manager, unit: str) -> bool:
    """Whether anything of a run is still there: a unit that is not at its end, or a process in its slice."""
    states = manager.units(f"orchestrate@{unit}.*", slice_unit(unit))
    return any(state.active not in _GONE for state in states) or bool(manager.processes(slice_unit(unit)))


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
