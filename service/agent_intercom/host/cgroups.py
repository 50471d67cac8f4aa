# SPDX-License-Identifier: Apache-2.0
"""Control groups of version 2 as the kernel shows them (cgroups(7)): who is in one, and being told that nobody is.

A control group is named as in /proc/PID/cgroup and as systemd's property ControlGroup, such as
`/user.slice/.../worker-3f.scope`. One that is gone has nobody in it. Functions raise HostError `cgroup_unreadable`
where the kernel does not say what it should; asyncio is the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from os import path
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.host.descriptors import Descriptor
from agent_intercom.host.errors import HostError

if TYPE_CHECKING:
    import asyncio

_ROOTS: Final = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where the hierarchy is, and where it is on a machine that also has version 1."""

EVENTS_NAME: Final = "cgroup.events"
"""The file of a control group that is modified when it freezes, thaws, or nobody is left in it; inotify(7) tells it."""

_MEMORY: Final = "memory.events"

_MARK: Final = "cgroup.controllers"
"""What every control group of version 2 has, the topmost one included, and none of version 1."""

_NONE: Final = "max"
"""What a limit says that is none."""

_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""What opening and reading a file of a control group that has gone, or is just going, ends with."""

_SECOND_LOOK: Final = 0.05
"""Seconds. The kernel holds back what it would tell within 10 ms of the last time, and forgets it with the directory
(cgroup_file_notify): so each time that something was told, and at the beginning, a second look follows."""


def directory(cgroup: str) -> str | None:
    """Where a control group is in the file system; None where it is gone, or not to be seen from here."""
    # A process outside of this cgroup namespace shows as `/../...`.
    if not cgroup.startswith("/") or ".." in cgroup.split("/"):
        return None
    # On a machine that also has version 1 the first place is a plain directory with one hierarchy in each of its own.
    found = (f"{root}{cgroup}".rstrip("/") for root in _ROOTS)
    return next((each for each in found if path.exists(f"{each}/{_MARK}")), None)


def members(cgroup: str) -> list[int]:
    """The ids of the processes in a control group and below it."""
    found = directory(cgroup)
    pids: list[int] = []
    if found is not None:
        for step, _, _ in os.walk(found):
            with contextlib.suppress(OSError), open(path.join(step, "cgroup.procs"), encoding="ascii") as processes:
                pids += map(int, processes.read().split())
    return pids


def populated(cgroup: str) -> bool:
    """Whether anybody is in a control group or below it, a process that nobody has waited for not included."""
    with _Events(cgroup) as events:
        return events.populated()


def frozen(cgroup: str) -> bool:
    """Whether all of a control group stands still, be it that one above it is frozen; not where it is gone."""
    with _Events(cgroup) as events:
        return events.frozen()


def frozen_itself(cgroup: str) -> bool:
    """Whether it is a control group itself that is to be frozen, and not only one above it; not where it is gone."""
    found = directory(cgroup)
    with contextlib.suppress(OSError):
        if found is not None:
            with open(path.join(found, "cgroup.freeze"), encoding="ascii") as file:
                return file.read().strip() == "1"
    return False


def wait_empty(cgroup: str, timeout: float) -> bool:
    """Wait, at most `timeout` seconds, until nobody is in a control group or below it; whether that came. Blocks."""
    deadline = time.monotonic() + timeout
    with _Events(cgroup) as events:
        while events.populated():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            events.wait(min(left, _SECOND_LOOK))
    return True


async def emptied(cgroup: str, timeout: float) -> bool:
    """The same as `wait_empty` in an event loop, which goes on meanwhile."""
    import asyncio

    empty = asyncio.Event()
    watch = Watch(cgroup, asyncio.get_running_loop(), empty.set)
    try:
        async with asyncio.timeout(timeout):
            await empty.wait()
    except TimeoutError:
        return not populated(cgroup)
    finally:
        watch.close()
    return True


def kill(cgroup: str) -> bool:
    """Send SIGKILL to everybody in a control group and below it, those that are just being forked included.

    False where it is gone, or the kernel has no cgroup.kill (before 5.14); they are not gone when this returns.
    """
    found = directory(cgroup)
    if found is None:
        return False
    try:
        fd = os.open(path.join(found, "cgroup.kill"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise HostError("cgroup_unreadable", "the control group cannot be killed", "cgroup.kill") from error
    return True


def cpu_usec(cgroup: str) -> int | None:
    """The microseconds of processor time that everybody who ever was in a control group has used; None for no group."""
    found = directory(cgroup)
    if found is not None:
        with contextlib.suppress(OSError), open(path.join(found, "cpu.stat"), encoding="ascii") as stat:
            return _flat(stat.read()).get("usage_usec")
    return None


def controllers(cgroup: str) -> frozenset[str] | None:
    """The controllers that a control group can have for those below it; None where it cannot be seen."""
    found = directory(cgroup)
    with contextlib.suppress(OSError):
        if found is not None:
            with open(path.join(found, _MARK), encoding="ascii") as file:
                return frozenset(file.read().split())
    return None


def unheld(cgroup: str, limits: Iterable[str]) -> tuple[str, ...]:
    """Of the limits that a control group was to have, such as `memory.max`, those that the kernel holds nobody to.

    Of one that is gone it is what the nearest above it that is there could not have given it.
    """
    limits = tuple(limits)
    found = directory(cgroup)
    if found is not None:
        loose = tuple(name for name in limits if not _limits(path.join(found, name)))
        # A file that was missed may be missing because the group went at that moment.
        if not loose or directory(cgroup) is not None:
            return loose
    above = path.dirname(cgroup)
    while len(above) > 1 and directory(above) is None:
        above = path.dirname(above)
    # The topmost one that is seen from here need not be the topmost one that there is.
    given = controllers(above) if len(above) > 1 else None
    return () if given is None else tuple(name for name in limits if name.partition(".")[0] not in given)


def _limits(file: str) -> bool:
    """Whether a limit is one. Where the controller is not there, neither is its file."""
    try:
        with open(file, encoding="ascii") as limit:
            return limit.read().strip() != _NONE
    except OSError:
        return False


class Watch:
    """Calls back once, from the loop and never from within the constructor, when nobody is left in a control group.

    For one that is gone that is at once. `stilled` is called before that with True whenever all of it has come to stand
    still, and with False when it goes on (see `frozen`). `close` ends it before; a second time is of no effect.
    """

    def __init__(
        self,
        cgroup: str,
        loop: asyncio.AbstractEventLoop,
        callback: Callable[[], None],
        stilled: Callable[[bool], None] | None = None,
    ) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = callback
        self._stilled = stilled
        self._still = False
        self._events = _Events(cgroup)
        # The file is always readable; only that it has changed is of interest, which a loop cannot ask for itself.
        try:
            self._epoll = self._events.poller()
        except OSError:
            self._events.close()
            raise
        loop.add_reader(self._epoll.fileno(), self._changed)
        self._timer: asyncio.Handle | None = loop.call_soon(self._changed)

    def close(self) -> None:
        """Be told no more."""
        self._callback = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._events.close()

    def _changed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_SECOND_LOOK, self._look)
        self._look()

    def _look(self) -> None:
        callback = self._callback
        if callback is not None and not self._events.populated():
            self.close()
            callback()
        elif callback is not None and self._stilled is not None and self._events.frozen() is not self._still:
            self._still = not self._still
            self._stilled(self._still)


class Counts(NamedTuple):
    """What came of the limits of a control group and of those below it: `oom_kill` processes were killed for memory."""

    oom_kill: int = 0


class Counters(Descriptor):
    """What came of the limits of a control group, through a descriptor that is kept open.

    A controller that is not there counts nothing. The kernel forgets the numbers with the group, so `read` answers
    then what it answered last; call it when a `Watch` calls, and once in a while before.
    """

    def __init__(self, cgroup: str) -> None:
        super().__init__()
        found = directory(cgroup)
        self._last = Counts()
        if found is not None:
            with contextlib.suppress(OSError):
                self._fd = os.open(f"{found}/{_MEMORY}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Counts:
        """The counts, which never go back."""
        if self._fd < 0:
            return self._last
        try:
            found = _flat(os.pread(self._fd, 4096, 0).decode())
        except OSError as error:
            if error.errno not in _GONE:
                raise HostError("cgroup_unreadable", "the counters cannot be read", _MEMORY) from error
            return self._last
        self._last = Counts(found.get("oom_kill", 0))
        return self._last


class _Events(Descriptor):
    """The file cgroup.events of a control group, kept open. One that is gone is not populated."""

    def __init__(self, cgroup: str) -> None:
        super().__init__()
        found = directory(cgroup)
        if found is not None:
            with _reading():
                self._fd = os.open(f"{found}/{EVENTS_NAME}", os.O_RDONLY | os.O_CLOEXEC)

    def populated(self) -> bool:
        found = self._read()
        return found is not None and found.get("populated") != 0

    def frozen(self) -> bool:
        found = self._read()
        return found is not None and found.get("frozen") == 1

    def _read(self) -> dict[str, int] | None:
        """What it says; None where the control group is gone."""
        found = None
        if self._fd >= 0:
            with _reading():
                found = _flat(os.pread(self._fd, 4096, 0).decode())
        return found

    def wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLPRI)
        poll.poll(seconds * 1000)

    def poller(self) -> select.epoll:
        """What is readable when the file has changed since it was read last."""
        epoll = select.epoll()
        if self._fd >= 0:
            epoll.register(self._fd, select.EPOLLPRI)
        return epoll


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Goes on behind what is read where the control group is gone, be it at this moment."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            return
        raise HostError("cgroup_unreadable", "how the control group is cannot be seen", EVENTS_NAME) from error


def _flat(text: str) -> dict[str, int]:
    """A file of the kernel's that has a name and a number in each line."""
    pairs = (line.partition(" ") for line in text.splitlines())
    return {key: int(value) for key, _, value in pairs if value.isdecimal()}
