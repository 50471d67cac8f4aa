# SPDX-License-Identifier: Apache-2.0
"""What the shells of both brokers do alike: one reactor, one memory file, one timer, a status line, and an orderly end.

A product's broker adds what its inputs are, how a batch ends (the commit), and how effects are carried out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from agent_intercom import __version__
from agent_intercom.host import recovery
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.safekeeping import Safekeeping, connection_name
from agent_intercom.wire.clock import Now, system_now
from agent_intercom.wire.reactor import Connection, Reactor, ReactorLimits

SNAPSHOT_BYTES: Final = 8 * 1024 * 1024
"""A snapshot is due when the log is longer than this and than the snapshot before it.

More would make a replay after SIGKILL longer than a client waits for its probe; less would stall a busy broker oftener.
"""

BATCH_BYTES: Final = 32 * 1024 * 1024
"""Room for what one batch can add to the log before a snapshot is taken."""

NEVER: Final = 2**62
"""A monotonic time that does not come."""

_STATUS_DELAY: Final = 0.2
_LATE_MS: Final = 100
_CATCH_UP: Final = 64


class Rules(recovery.Replayable, Protocol):
    """The deterministic half of a broker that serves."""

    @property
    def wake_at(self) -> int:
        """Monotonic time in ms at which `tick` wants to be called."""
        ...

    def tick(self, now: Now) -> None:
        """Time has come to `now`."""
        ...


AnyRules = TypeVar("AnyRules", bound=Rules)


class Shell(ABC, Generic[AnyRules]):
    """A broker on one loop; `stopped` is set when it wants to end, and `reason` says why.

    `TICK` is the kind under which the passing of time is logged.
    """

    TICK: ClassVar[int]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: AnyRules,
        *,
        tape: StateFile,
        notifier: Notifier,
        journal: Journal,
        bound: str,
        uid: int | None,
        clock: Callable[[], Now] = system_now,
        reactor_limits: ReactorLimits | None = None,
    ) -> None:
        self.stopped = asyncio.Event()
        self.reason = ""
        self._loop = loop
        self._engine = engine
        self._tape = tape
        self._notifier = notifier
        self._journal = journal
        self._bound = bound
        self._clock = clock
        self._reactor = Reactor(
            loop, self, tape, uid=os.getuid() if uid is None else uid, clock=clock, limits=reactor_limits
        )
        self._safekeeping = Safekeeping(loop, notifier, self._reactor)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._status: asyncio.TimerHandle | None = None
        self._snapshot_soon = False
        self._snapshot_at = 0
        self._short = False
        self._restored = 0

    # Beginning.

    def _adopt(
        self, lines: Mapping[int, recovery.Line], descriptors: dict[int, int], doubtful: set[int]
    ) -> dict[int, Connection]:
        """Take over the stored connections that can be continued; close the others.

        `descriptors` are the stored connections by number; `doubtful` are those whose last system call has no record.
        """
        kept = {}
        for number, line in lines.items():
            fd = descriptors.get(number)
            if fd is not None and number not in doubtful:
                sock = socket.socket(fileno=descriptors.pop(number))
                connection = self._reactor.adopt(sock, line.origin, number, sent=line.sent, unsent=line.unsent)
                if connection is not None:
                    kept[number] = connection
                else:
                    self._notifier.remove(connection_name(number))
        for number, fd in descriptors.items():
            self._notifier.remove(connection_name(number))
            socket.socket(fileno=fd).close()
        self._safekeeping.found(kept)
        self._restored = len(kept)
        return kept

    def _release_others(self, kept: Mapping[int, Connection]) -> list[int]:
        """Free the slots of connections that are gone; which of them the rules still know of."""
        for number in self._tape.claimed():
            if number not in kept:
                self._tape.release(number)
        return [number for number in self._engine.origins() if number not in kept]

    # What the reactor tells.

    @abstractmethod
    def accepted(self, connection: Connection, now: Now) -> None: ...

    @abstractmethod
    def received(self, connection: Connection, data: memoryview, now: Now) -> None: ...

    @abstractmethod
    def lost(self, connection: Connection, reason: str, now: Now) -> None: ...

    @abstractmethod
    def congested(self, connection: Connection, now: Now) -> None: ...

    @abstractmethod
    def drained(self, connection: Connection, now: Now) -> None: ...

    @abstractmethod
    def batch_done(self, now: Now) -> None: ...

    def refused(self, origin: str, uid: int | None) -> None:
        code = "UNREADABLE" if uid is None else "FOREIGN"
        self._journal.emit(Event.PEER_REFUSED, uid=uid, listener=origin, code=code)

    def out_of_descriptors(self, active: bool) -> None:
        self._short = active
        if active:
            self._journal.emit(Event.OUT_OF_DESCRIPTORS, open=len(self._reactor.connections))
        self._status_soon()

    # Time.

    def _arm(self, now: Now) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = self._engine.wake_at
        if self._timer_at != NEVER:
            self._timer = self._loop.call_later(max(self._timer_at - now.mono, 0) / 1000, self._due)

    def _due(self) -> None:
        # After a stop of this process, what arrived meanwhile comes before what is overdue.
        if self._clock().mono > self._timer_at + _LATE_MS:
            for _ in range(_CATCH_UP):
                if not self._reactor.serve_ready():
                    break
        self._timer = None
        self._timer_at = NEVER
        self._reactor.run_batch(self._tick)

    def _tick(self, now: Now) -> None:
        if now.mono >= self._engine.wake_at:
            self._tape.record(self.TICK, 0, now)
            self._engine.tick(now)

    # The memory file.

    def _lines(self) -> list[recovery.Line]:
        """The connections that a successor can go on with."""
        known = self._engine.origins()
        return [
            recovery.Line(connection.number, connection.origin, connection.sent, connection.unsent())
            for connection in self._reactor.connections.values()
            if connection.number in known
        ]

    def _write_snapshot(self, lines: Iterable[recovery.Line]) -> None:
        self._tape.snapshot(recovery.pack(__version__, self._engine, lines, self._reactor.next_number))
        due = max(SNAPSHOT_BYTES, self._tape.snapshot_size)
        self._snapshot_at = self._tape.log_end + min(due, self._tape.room - BATCH_BYTES)

    @abstractmethod
    def _snapshot(self) -> None:
        """Take a snapshot now."""

    def _schedule_snapshot(self) -> None:
        """Take one when the batch is over: what it logs must not lie behind it."""
        if not self._snapshot_soon:
            self._snapshot_soon = True
            self._reactor.yield_to_loop()
            self._loop.call_soon(self._snapshot)

    # Status and the end.

    @abstractmethod
    def status_text(self) -> str:
        """One line for `systemctl status`."""

    def _status_soon(self) -> None:
        if self._status is None:
            self._status = self._loop.call_later(_STATUS_DELAY, self._tell_status)

    def _tell_status(self) -> None:
        self._status = None
        self._notifier.status(self.status_text())

    def stop(self, reason: str) -> None:
        """Serve nobody from here on. `reason` is `idle` or the name of a signal."""
        if not self.stopped.is_set():
            self.reason = reason
            self._reactor.yield_to_loop()
            self._notifier.stopping()
            self._journal.emit(Event.BROKER_STOPPING, reason=reason)
            self.stopped.set()

    async def _hand_over(self) -> None:
        """Leave the connections up for the next broker: the manager has them all, and the memory file is complete."""
        known = self._engine.origins()
        going_on = [item for number, item in self._reactor.connections.items() if number in known]
        for connection in going_on:
            self._reactor.pause(connection)
        await self._safekeeping.keep_all(going_on)
        # Last, so that no input follows it: the next broker may be of another version, with other rules.
        self._snapshot()

    def _let_go(self, *, hand_over: bool) -> None:
        """Stop the timers and close every socket; with `hand_over` the peers stay connected."""
        for timer in (self._timer, self._status):
            if timer is not None:
                timer.cancel()
        self._reactor.close(detach=hand_over)

    def _close_host(self) -> None:
        """Close what the host gave."""
        self._notifier.close()
        self._journal.close()
        self._tape.close()
