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
from typing import TYPE_CHECKING, Final

from agent_intercom.host import cgroups
from agent_intercom.host.errors import HostError
from agent_intercom.host.manager import JobFailed, ManagerError
from agent_intercom.workers.contract import STOP_TIMEOUT, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import Managers

if TYPE_CHECKING:
    from agent_intercom.host.scopes import Scopes

DIRTY_TIMEOUT: Final = 5.0
"""Seconds for git to look at a working tree (section 2.7)."""

_JOB_TIMEOUT: Final = STOP_TIMEOUT + 5.0
_SETTLING: Final = 5.0
_MOMENT: Final = 0.5

_GIT: Final = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status", "--short", "--porcelain")
"""Nothing that the repository's own settings could name is run, and nothing is written."""


async def end(managers: Managers, unit: str, cgroup: str, *, frozen: bool) -> None:
    """End a worker, and see that nobody of it is left. May be repeated, and is of no effect on one that has gone.

    Raises WorkerError `stop_failed` where somebody is left, or nobody can see whether.
    """
    scopes = None
    with contextlib.suppress(WorkerError):
        scopes = await managers.scopes()
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
    """Whether a working tree has changes; None where it is none, or git does not say so in time. Nothing else of it."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    environment |= {"HOME": os.environ.get("HOME", "/"), "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": "/"}
    try:
        git = await asyncio.create_subprocess_exec(
            "git",
            "-C",
            directory,
            *_GIT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    assert git.stdout is not None
    try:
        async with asyncio.timeout(DIRTY_TIMEOUT):
            changed = bool(await git.stdout.read(1))
            if changed:
                return True
            return False if await git.wait() == 0 else None
    except TimeoutError:
        return None
    finally:
        if git.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                git.kill()
            await git.wait()


async def _stopped(scopes: Scopes, unit: str, frozen: bool) -> bool:
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


async def _kill(scopes: Scopes | None, unit: str, cgroup: str) -> None:
    if not cgroups.kill(cgroup) and scopes is not None:
        with contextlib.suppress(ManagerError):
            await scopes.kill(unit, signal.SIGKILL)
