# SPDX-License-Identifier: Apache-2.0
"""Watching one incarnation of a worker until nothing of it is left (managed-workers spec, section 9.4).

systemd never tells how a process of a scope unit ended, and its signals come in no certain order. So there are
several sources, each for what it alone can prove: the pidfd of the shim that the leader ended and, to its parent, how;
the exit file how the command ended, also to a service that came later; `cgroup.events` that everybody has gone; the
counters of the control group and systemd's Result that memory ran out.

Nothing here looks again and again: every source is a descriptor that becomes ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

from agent_intercom.host import cgroups
from agent_intercom.host.errors import HostError
from agent_intercom.workers import places
from agent_intercom.workers.contract import Outcome, StopReason
from agent_intercom.workers.records import Ending, Placed
from agent_intercom.workers.spawning import Gated, ready

SETTLING: Final = 0.25
"""Seconds in which whoever was the leader's is gone with it, as a rule; the kernel tells the last with a delay."""

LEAVING: Final = 1.0
"""Seconds in which a leader that nobody sees in its unit any more is seen to have ended; it takes it a moment."""

OOM_RESULT: Final = "oom-kill"


class Watch:
    """What is seen of one incarnation that is in its scope unit.

    `leader` is the shim: its launcher where this process is its parent, else a pidfd, which becomes this object's; None
    where it has ended. `remain` is called when the shim has ended and others are left after a moment, `gone` once,
    when nobody is left in the unit, `stilled` as of `cgroups.Watch`; none from within the constructor. `close` ends it
    before.

    Raises HostError and OSError where the control group cannot be watched; `leader` is the caller's then.
    """

    def __init__(
        self,
        placed: Placed,
        exit_file: str,
        leader: Gated | int | None,
        remain: Callable[[], None],
        gone: Callable[[], object],
        stilled: Callable[[bool], None] | None = None,
    ) -> None:
        self.placed = placed
        self.result = ""
        """What systemd said of the unit, where that was anything but `success`."""
        self.empty = asyncio.Event()
        """Set when nobody is left."""
        self.left = False
        """Nobody is left in the unit, and the shim lives: it has left its unit, and others may have with it."""
        self._exit_file = exit_file
        self._leader = leader
        self._remain = remain
        self._gone = gone
        self._shim: tuple[int | None, int | None] | None = None
        self._counted = 0
        self._counters = cgroups.Counters(placed.control_group)
        try:
            loop = asyncio.get_running_loop()
            self._events = cgroups.Watch(placed.control_group, loop, self.empty.set, stilled)
        except BaseException:
            self._counters.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def close(self) -> None:
        """Watch no more; the worker goes on."""
        self._task.cancel()
        self._let_go()

    async def closed(self) -> None:
        """Wait until nothing of this is running any more."""
        await asyncio.wait([self._task])

    def ending(self, reason: str, now: int) -> Ending:
        """How it ended, as far as it can be proved, once the leader has. `reason` is why somebody ended it."""
        found = places.read_exit(self._exit_file)
        code, killer = (found.code, found.signal) if found else (self._shim or (None, None))
        at = found.at if found else now
        if self.result == OOM_RESULT or self._counted_kill(killer):
            outcome = Outcome.OOM
        elif reason == StopReason.RUNTIME:
            outcome = Outcome.TIMEOUT
        elif code is not None:
            outcome = Outcome.EXITED
        else:
            outcome = Outcome.SIGNALED if killer is not None else Outcome.UNKNOWN
        return Ending(at=at, outcome=outcome, exit_code=code, exit_signal=killer)

    def _counted_kill(self, killer: int | None) -> bool:
        # A compiler that was killed for its memory is not how the worker ended.
        return killer == signal.SIGKILL and self._oom_kills() > 0

    def _oom_kills(self) -> int:
        """What was counted last, where it cannot be read: nothing else depends on it."""
        with contextlib.suppress(HostError):
            self._counted = self._counters.read().oom_kill
        return self._counted

    async def _follow(self) -> None:
        try:
            await self._leader_gone()
        except Exception as error:
            # That everybody has gone is seen all the same, and somebody may wait for it.
            fault = {"message": "the leader of a worker cannot be followed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(fault)
        await self.empty.wait()
        try:
            self._gone()
        finally:
            self._let_go()

    async def _leader_gone(self) -> None:
        """Wait until the leader has ended, and for a moment more; say so where others are left then."""
        await self._first()
        self._oom_kills()
        try:
            async with asyncio.timeout(SETTLING):
                await self.empty.wait()
        except TimeoutError:
            self._remain()

    async def _first(self) -> None:
        """Wait until the leader has ended, or lives on elsewhere while nobody is left in the unit."""
        leader, empty = (asyncio.ensure_future(each) for each in (self._leader_ended(), self.empty.wait()))
        try:
            await asyncio.wait({leader, empty}, return_when=asyncio.FIRST_COMPLETED)
            if not leader.done():
                # As a rule it is just ending: it has left the group, and is told to have ended after that.
                await asyncio.wait({leader}, timeout=LEAVING)
            self.left = not leader.done()
        finally:
            for each in (leader, empty):
                each.cancel()
            await asyncio.wait({leader, empty})
        if leader.done() and not leader.cancelled():
            leader.result()

    async def _leader_ended(self) -> None:
        if isinstance(self._leader, Gated):
            self._shim = await self._leader.ended()
        elif self._leader is not None:
            await ready(self._leader)

    def _let_go(self) -> None:
        self._events.close()
        self._counters.close()
        if isinstance(self._leader, int):
            os.close(self._leader)
            self._leader = None
