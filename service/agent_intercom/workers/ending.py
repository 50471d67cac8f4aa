# SPDX-License-Identifier: Apache-2.0
"""The stop protocol (managed-workers spec, section 9.4): asked, then killed, then seen to be gone.

A worker has ended when nobody is in its control group. What systemd says of the unit is no proof of that, and where
there is no systemd to ask, the control group is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import Final

from agent_intercom.host import cgroups
from agent_intercom.host.errors import HostError
from agent_intercom.host.manager import JobFailed, ManagerError
from agent_intercom.workers.contract import STOP_TIMEOUT, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import Connection, Managers
from agent_intercom.workers.spawning import ready

DIRTY_TIMEOUT: Final = 5.0
"""Seconds for git to look at a working tree (section 2.7)."""

_JOB_TIMEOUT: Final = STOP_TIMEOUT + 5.0
_SETTLING: Final = 5.0
_MOMENT: Final = 0.5
_NOT_FROZEN: Final = frozenset({"", "running"})

_MOURNING: Final = 1.0
"""Seconds for git to be gone after SIGKILL; it is waited for later where it is not."""

_GIT: Final = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status", "--porcelain")
"""Nothing is written, and no hook and no monitor is run. Filters that the repository's settings name are (gitattributes
(5)), as whoever owns the repository wants, so that `dirty` is not for the tree of a worker that is confined."""


class AnotherUnit(WorkerError):
    """The unit of that name is another start, of whoever. Nothing was done to it."""

    def __init__(self) -> None:
        super().__init__(Code.STOP_FAILED, "the unit is not the worker's any more: it is left alone", "unit")


async def end(managers: Managers, unit: str, cgroup: str, invocation: str = "", changed: bool = False) -> None:
    """End a worker, and see that nobody is left in its unit. May be repeated, and is of no effect on one that has gone.

    What has left the unit before is not seen, and not ended. `invocation` is which start of the unit is the worker's,
    where nothing else proves that what is there is the worker; `changed`: it was seen to be another one before, so that
    nothing is done to it while nobody can tell.

    Raises WorkerError `stop_failed` where somebody is left, or nobody can see whether; AnotherUnit.
    """
    scopes, state = None, None
    with contextlib.suppress(WorkerError, ManagerError):
        scopes = await managers.scopes()
        state = await scopes.state(unit)
    if not cgroup and state is not None:
        # It was never written down where it is.
        cgroup = state.control_group
    if state is None and changed and (scopes is None or cgroups.directory(cgroup) is not None):
        raise AnotherUnit
    if state is not None and invocation and state.invocation_id not in ("", invocation):
        if state.control_group == cgroup:
            raise AnotherUnit
        # Another one of that name: what is left of ours is elsewhere, and no business of systemd's.
        scopes = state = None
    frozen = state is not None and state.freezer not in _NOT_FROZEN
    if scopes is None or not await _stopped(scopes, unit, frozen):
        await _asked(cgroup)
    try:
        if not await cgroups.emptied(cgroup, _MOMENT):
            await _kill(scopes, unit, cgroup)
        if not await cgroups.emptied(cgroup, _SETTLING):
            count = len(cgroups.members(cgroup))
            are = "process of it is" if count == 1 else "processes of it are"
            raise WorkerError(Code.STOP_FAILED, f"the worker was killed, and {count} {are} left", "worker")
    except HostError as error:
        raise WorkerError(Code.STOP_FAILED, "whether processes of it are left cannot be seen", "worker") from error
    if scopes is not None:
        with contextlib.suppress(ManagerError):
            await scopes.reset_failed(unit)


async def dirty(directory: str) -> bool | None:
    """Whether a working tree has changes; None where it is none, or git does not say so in time. Nothing else of it.

    Only for the directory of a worker that could do anyhow whatever the repository has git do: it is done here, outside
    the worker's unit. What is left of its process group is killed.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath), "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    environment |= {"HOME": os.environ.get("HOME", "/"), "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": "/"}
    environment["GIT_NO_LAZY_FETCH"] = "1"
    try:
        git = subprocess.Popen(
            ["git", "-C", directory, *_GIT, "--ignore-submodules=all"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    assert git.stdout is not None
    with git.stdout as output:
        try:
            async with asyncio.timeout(DIRTY_TIMEOUT):
                await ready(output.fileno())
                if os.read(output.fileno(), 1):
                    return True
                return False if await _status(git.pid) == 0 else None
        except (OSError, TimeoutError):
            return None
        finally:
            # Its number, and that of its process group, are its own until it is waited for.
            os.killpg(git.pid, signal.SIGKILL)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_MOURNING):
                    await _status(git.pid)
            git.poll()


async def _status(child: int) -> int:
    """The exit status of a child once it has ended, which is not waited for by this (waitid(2), WNOWAIT)."""
    pidfd = os.pidfd_open(child)
    try:
        await ready(pidfd)
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        return -1 if found is None or found.si_code != os.CLD_EXITED else found.si_status
    finally:
        os.close(pidfd)


async def _stopped(scopes: Connection, unit: str, frozen: bool) -> bool:
    """Have systemd stop a unit; False where it did not."""
    try:
        if frozen:
            # systemd before 255 sends SIGTERM to processes that cannot take it, and waits.
            with contextlib.suppress(ManagerError):
                await scopes.thaw(unit)
        await scopes.stop(unit, _JOB_TIMEOUT)
    except JobFailed:
        return True
    except ManagerError:
        return False
    return True


async def _asked(cgroup: str) -> None:
    """Do as systemd would: SIGTERM to everybody, and wait."""
    for pid in cgroups.members(cgroup):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(HostError):
        await cgroups.emptied(cgroup, STOP_TIMEOUT)


async def _kill(scopes: Connection | None, unit: str, cgroup: str) -> None:
    if not cgroups.kill(cgroup) and scopes is not None:
        with contextlib.suppress(ManagerError):
            await scopes.kill(unit, signal.SIGKILL)
