# SPDX-License-Identifier: Apache-2.0
"""The start protocol (managed-workers spec, section 9.3): nothing private leaves before a process is where it belongs.

The row is there already. A launcher is forked that knows nothing and waits at its gate; systemd puts it into a scope
unit; that is verified and written down; only then is it told what to become. Whatever fails leaves no unit, nobody in
one and no file, and a service that is killed at any step leaves either that or a worker that the next one finds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.host import cgroups, processes
from agent_intercom.host.errors import HostError
from agent_intercom.host.manager import SYSTEMD, ManagerError, ManagerRefused, Variant
from agent_intercom.orchestration.config import packaged
from agent_intercom.workers import contract, places
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import Connection, Managers, explained
from agent_intercom.workers.records import Placed
from agent_intercom.workers.spawning import Gated, spawn
from agent_intercom.workers.spec import Launch

if TYPE_CHECKING:
    from agent_intercom.host.scopes import Started

_SETTLING: Final = 5.0
"""Seconds for what was killed to be gone."""

_UNKNOWN: Final = frozenset(f"org.freedesktop.DBus.Error.{name}" for name in ("PropertyReadOnly", "UnknownProperty"))
"""What systemd calls a property that it does not know (sd-bus-errors(3)): the unit is not made then."""

_OPTIONAL: Final = "OOMPolicy"
"""Scope units have it since systemd 253, and where that was put into an older one."""

_DESTRUCTIVE: Final = f"{SYSTEMD}.TransactionIsDestructive"
_SLICE_TRIES: Final = 40
_SLICE_PAUSE: Final = 0.05


class NotTakenBack(WorkerError):
    """A start has failed, and whether processes of it are left cannot be told."""

    def __init__(self) -> None:
        super().__init__(Code.STOP_FAILED, "the start failed, and processes of it may be left: stop the worker", "unit")


class Order(NamedTuple):
    """A start, ready to be carried out.

    `launch` is for the launcher alone, `place` and `launch.scratch` are the directories that are the worker's, `slice`,
    `part_of` and `limits` (by their D-Bus names) what its scope unit is given, `enforced` the words of
    `confinement.plan`, none for a worker that is not confined. `keep_place`: the place outlives a start that fails.
    """

    launch: Launch
    place: str
    slice: str
    part_of: list[str]
    limits: Mapping[str, Variant]
    enforced: tuple[str, ...]
    keep_place: bool = False

    def __repr__(self) -> str:
        return "Order()"


def properties(order: Order) -> dict[str, Variant]:
    """The properties of a worker's scope unit. Anybody may read them."""
    found: dict[str, Variant] = {
        # The default would be the command line.
        "Description": ("s", contract.DESCRIPTION),
        "Slice": ("s", order.slice),
        # `mixed` would kill at once, without asking.
        "KillMode": ("s", "control-group"),
        "SendSIGHUP": ("b", False),
        "TimeoutStopUSec": ("t", int(contract.STOP_TIMEOUT * 1_000_000)),
        # Its memory has bodies in it, as the broker's has.
        "MemorySwapMax": ("t", 0),
        "TasksMax": ("t", packaged.TASKS_MAX),
        # A failed one would stay until somebody forgets it.
        "CollectMode": ("s", "inactive-or-failed"),
    }
    if order.part_of:
        # Without After=: it would have the run's own end wait for each of its workers.
        found["PartOf"] = ("as", order.part_of)
    return found | dict(order.limits)


def limited(
    oom_policy: str, memory_max: int | None, memory_high: int | None, tasks_max: int | None
) -> dict[str, Variant]:
    """What a worker's scope unit is given in the place of what every one has (`properties`)."""
    found: dict[str, Variant] = {"OOMPolicy": ("s", oom_policy)}
    for name, value in (("MemoryMax", memory_max), ("MemoryHigh", memory_high), ("TasksMax", tasks_max)):
        if value is not None:
            found[name] = ("t", value)
    return found


async def begin(
    managers: Managers,
    program: str,
    unit: str,
    order: Order,
    write_down: Callable[[Placed], None],
    watch: Callable[[Gated, Placed], None],
) -> None:
    """Start a worker in its scope unit, from the launcher on until its command has begun.

    `write_down` is called when the process is placed and verified, before it is told anything, and `watch` at the end,
    which has the launcher from then on; what they raise ends the start. Raises WorkerError `manager_unreachable`,
    `start_failed`, and what the launcher tells. Its unit is gone then, and nobody is in it; left are `order.place` and
    the scratch directory, see `forget`. NotTakenBack where that is not sure.
    """
    scopes = await managers.scopes()
    gated = await spawn(program)
    cgroup = ""
    try:
        async with explained(Code.START_FAILED, "the worker's scope unit did not start"):
            started = await _placed(managers, scopes, unit, gated.pid, order)
        cgroup = started.control_group
        identity = processes.identify(gated.pid)
        if identity is None or processes.cgroup_of(gated.pid) != cgroup:
            raise WorkerError(Code.START_FAILED, "the launcher is not in its scope unit", "unit")
        placed = Placed(
            control_group=cgroup,
            invocation_id=started.invocation_id,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
            boot_id=identity.boot_id,
        )
        write_down(placed)
        await gated.release(order.launch)
        try:
            watch(gated, placed)
        except (HostError, OSError) as error:
            raise WorkerError(Code.START_FAILED, "the worker cannot be watched", "unit") from error
    except BaseException as error:
        gated.abandon()
        # Also where the one who waits gives up: nobody else knows of this process.
        if not await asyncio.shield(_take_back(scopes, unit, cgroup, gated)):
            raise NotTakenBack from error
        if isinstance(error, ValueError):
            # A path, an argument or a variable that none can be; the text has none of them.
            raise WorkerError(Code.INVALID, str(error), "command") from error
        raise


async def _placed(managers: Managers, scopes: Connection, unit: str, pid: int, order: Order) -> Started:
    """Have systemd make the scope unit; raises as `Scopes.start`, and WorkerError `conflict` or `manager_busy`.

    The slice of the workers outside runs stops when the last one has ended, and whoever comes in that moment waits for
    it. That of a run stops when the run is over.
    """
    for _ in range(_SLICE_TRIES):
        try:
            return await _made(managers, scopes, unit, pid, properties(order))
        except ManagerRefused as error:
            if error.name != _DESTRUCTIVE:
                raise
            if order.slice != contract.SLICE_UNIT:
                raise WorkerError(Code.CONFLICT, "the run is being ended and begins nothing more", "run") from error
        await asyncio.sleep(_SLICE_PAUSE)
    raise WorkerError(Code.BUSY, "the slice of the workers is being stopped: try again", "slice")


async def _made(managers: Managers, scopes: Connection, unit: str, pid: int, wanted: dict[str, Variant]) -> Started:
    """The same, once; without a property that this systemd does not know and a worker can be without."""
    given = {name: value for name, value in wanted.items() if name not in managers.lacking}
    try:
        return await scopes.start(unit, pid, given, contract.START_TIMEOUT)
    except ManagerRefused as error:
        if error.name not in _UNKNOWN or _OPTIONAL not in given:
            raise
    del given[_OPTIONAL]
    started = await scopes.start(unit, pid, given, contract.START_TIMEOUT)
    managers.lacking.add(_OPTIONAL)
    return started


async def _take_back(scopes: Connection, unit: str, cgroup: str, gated: Gated) -> bool:
    """End all of a start that failed; whether nobody is left in its unit.

    What was placed nowhere has begun nothing and is alone. A job whose end is unknown may have been done: the
    unit is stopped anyhow.
    """
    await gated.ended()
    with contextlib.suppress(ManagerError):
        await scopes.stop(unit, contract.STOP_TIMEOUT + _SETTLING)
    left = bool(cgroup) and not await emptied(cgroup)
    with contextlib.suppress(ManagerError):
        await scopes.reset_failed(unit)
    return not left


async def emptied(cgroup: str) -> bool:
    """See to it that nobody is in a control group, by killing whoever is; whether that is so."""
    try:
        if cgroups.populated(cgroup):
            cgroups.kill(cgroup)
        return await cgroups.emptied(cgroup, _SETTLING)
    except HostError:
        return False


async def forget(order: Order) -> None:
    """Remove the files of a start that failed."""
    await asyncio.to_thread(places.remove, order.launch.scratch)
    if not order.keep_place:
        await asyncio.to_thread(places.remove, order.place)
