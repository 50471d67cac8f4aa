# SPDX-License-Identifier: Apache-2.0
"""The command: run once for each assignment, in a process group of its own (fork(2), setpgid(2), pidfd_open(2)).

It prints where the bridge does, which for a run's worker is a private ring in memory (`workers.ring`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from os import path
from typing import Final, NoReturn

from agent_intercom.host import processes
from agent_intercom.workers.bridge import belonging, settings
from agent_intercom.workers.errors import WorkerError

_REFUSED: Final = 125
_CANNOT_EXECUTE: Final = 126
_NOT_FOUND: Final = 127
"""How a process ends that did not become the command (env(1)). Nobody is told but whoever reads its output."""

_PATIENCE: Final = 2.0
"""Seconds. A unit that is stopped gives the bridge 5."""


class Running:
    """The command that runs. `pidfd` becomes readable when it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def signal(self, number: int) -> bool:
        """Send a signal to its process group; False where that may not be, as of another user's (kill(2)).

        A group is there as long as nobody has waited for its leader, but that may have left it for another one.
        """
        try:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                signal.pidfd_send_signal(self.pidfd, number)
        except OSError:
            return False
        return True

    def reap(self) -> int:
        """End what it has left in its process group, and forget it. Waits until it has ended.

        Returns what it exited with; minus the number of a signal that ended it.
        """
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)

    def leave(self, *, gently: bool = False) -> None:
        """End it, and wait a while for that: one that cannot be ended is left behind. `gently`: with SIGTERM first."""
        if gently and self.signal(signal.SIGTERM):
            select.select([self.pidfd], [], [], _PATIENCE)
        self.signal(signal.SIGKILL)
        if select.select([self.pidfd], [], [], _PATIENCE)[0]:
            self.reap()
        else:
            os.close(self.pidfd)


def run(command: Sequence[str], environment: Mapping[str, str], project: str, scratch: str | None) -> Running:
    """Start `command` in `project`. With `scratch` a copy of the project is made there first, for it to work in.

    The copy is made by the process that becomes the command, so that it takes nothing of the bridge's time and is ended
    as the command is. Raises OSError where there can be no further process.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, dict(environment), project, scratch, parent)
    # Both do it: whoever is first, the group is there before anybody signals it.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return Running(pid)


def _become(
    command: Sequence[str], environment: dict[str, str], project: str, scratch: str | None, parent: int
) -> NoReturn:
    status = _REFUSED
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # While a copy is made, nobody must take these for a bridge that lives.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.chdir(project)
        if scratch is not None:
            from agent_intercom.workers import checkout

            environment[settings.CHECKOUT_ENVIRONMENT] = checkout.make(project, scratch).directory
        if os.getppid() != parent:
            # The bridge was killed meanwhile: whoever takes its place decides what runs.
            os._exit(_REFUSED)
        status = _CANNOT_EXECUTE
        os.execvpe(command[0], list(command), environment)
    except (FileNotFoundError, NotADirectoryError) as error:
        status = _NOT_FOUND if status == _CANNOT_EXECUTE else status
        _tell("the command, or what interprets it, was not found" if status == _NOT_FOUND else _why(error))
    except WorkerError as error:
        _tell(f"no copy of the project could be made: {error.text}")
    except Exception as error:  # the end of this process, whatever it is
        _tell(_why(error))
    finally:
        os._exit(status)


def _why(error: Exception) -> str:
    """What went wrong, by its kind: a text may have anybody's paths in it."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
    return f"the command could not be run: {reason}"


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"orchestrate-bridge: {text}\n")
        sys.stderr.flush()


def end_leftovers(address: str, group: str | None) -> int:
    """End every process in the control group `group` that a bridge of this report socket has run; how many there were.

    A bridge that was killed leaves its command behind, and nothing says where it went but its environment. What that
    has put into another unit, such as a service, is not the worker's any more.
    """
    mark = os.fsencode(f"{settings.SOCKET_ENVIRONMENT}={address}")
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            with open(path.join("/proc", name, "environ"), "rb") as file:
                ours = mark in file.read().split(b"\0")
            if ours and belonging.within(processes.cgroup_of(int(name)), group):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                found += 1
        except OSError:
            # It has ended, or is another user's.
            continue
        finally:
            os.close(pidfd)
    return found
