# SPDX-License-Identifier: Apache-2.0
"""The shell of the intercom broker: inputs into the engine, effects out of it, in order and after the commit.

No rule lives here. Every input is in the memory file before the engine sees it; edges are in the database before a
frame that tells of them leaves; a session's connection is in the descriptor store before its peer hears `registered`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Final

from agent_intercom.host import faults, recovery
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.shell import Shell
from agent_intercom.intercom import engine as inputs
from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.engine import Engine
from agent_intercom.intercom.keeper import Keeper
from agent_intercom.intercom.router.effects import (
    Bound,
    Drop,
    DropEdge,
    Effect,
    Finish,
    Hold,
    Idle,
    Note,
    PutEdge,
    Release,
    Unbound,
    Write,
)
from agent_intercom.wire.clock import Now, system_now
from agent_intercom.wire.reactor import Connection, ReactorLimits

WRITTEN_BYTES: Final = 32 * 1024 * 1024
"""A snapshot is also due when so much was written since: a replay writes all of it again."""

_CHANGES: Final[frozenset[type]] = frozenset({PutEdge, DropEdge})
_FEW: Final = 2
"""Effects of a batch that need no look at whom they are for: hardly ever is it the same peer."""

_PROBE: Final = b'{"type":"health"'


def _is_probe(data: memoryview) -> bool:
    """Whether this is one `health` frame and nothing else."""
    return bytes(data[4 : 4 + len(_PROBE)]) == _PROBE and int.from_bytes(data[:4], "big") == len(data) - 4


class Broker(Shell[Engine]):
    """One broker on one loop. Made by `launch`, which gives it listeners; `stopped` is set when it wants to end.

    `keeper` opens the database when the first frame comes that is more than a probe.
    """

    TICK = inputs.TICK

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limits: Limits,
        tape: StateFile,
        notifier: Notifier,
        journal: Journal,
        keeper: Keeper,
        bound: str,
        uid: int | None = None,
        clock: Callable[[], Now] = system_now,
        reactor_limits: ReactorLimits | None = None,
    ) -> None:
        super().__init__(
            loop,
            Engine(limits),
            tape=tape,
            notifier=notifier,
            journal=journal,
            bound=bound,
            uid=uid,
            clock=clock,
            reactor_limits=reactor_limits,
        )
        self._limits = limits
        self._keeper = keeper
        self._connections = self._reactor.connections
        self._send = self._reactor.send
        self._written = 0

    # Beginning.

    def begin(self) -> None:
        """Start with nothing: no predecessor left anything."""
        self._engine.start(self._clock())
        self._reactor.run_batch(self._first_snapshot)

    def restore(self, loaded: recovery.Recovered[Engine], descriptors: dict[int, int], doubtful: set[int]) -> None:
        """Go on where the predecessor stopped.

        `descriptors` are the stored connections by number; `doubtful` are those whose last system call has no record.
        """
        self._engine = loaded.engine
        self._reactor.next_number = loaded.next_number
        # Bytes that were on their way may tell of asks: those must be stored before the bytes leave.
        self.open_store()
        kept = self._adopt(loaded.lines, descriptors, doubtful)
        self._reactor.run_batch(lambda now: self._resume(loaded, kept, now))

    def _resume(self, loaded: recovery.Recovered[Engine], kept: dict[int, Connection], now: Now) -> None:
        engine = self._engine
        gone = self._release_others(kept)
        for number in gone:
            self._tape.record(inputs.CLOSED, number, now, b"restart")
            engine.closed(number, "restart", now)
        # Not before: a broker that is killed while it comes up leaves the doubt to the next one.
        self._tape.settle()
        for number, connection in kept.items():
            if engine.session_at(number) is not None:
                self._reactor.watch_peer_death(connection)
        for number in engine.held():
            self._reactor.pause(kept[number])
        for number in engine.slow():
            self._resume_slow(kept[number], now)
        engine.apply(self._limits, now)
        self._journal.emit(Event.BROKER_RESTORED, kept=len(kept), closed=len(gone), records=loaded.records)
        self._schedule_snapshot()

    def _resume_slow(self, connection: Connection, now: Now) -> None:
        """The predecessor found that this peer does not read: senders wait until it does, so somebody has to tell."""
        if connection.queued:
            connection.congested = True
        else:
            self.drained(connection, now)

    def _first_snapshot(self, _now: Now) -> None:
        self._write_snapshot(())

    def listen(self, sock: socket.socket, origin: str) -> None:
        """Accept from a listener. `origin` decides trust."""
        self._reactor.listen(sock, origin)

    def ready(self, took_ms: int) -> None:
        """Say that connections are served."""
        self._notifier.ready(self.status_text())
        self._journal.emit(
            Event.BROKER_STARTED,
            sessions=self._restored,
            generation=self._keeper.generation,
            took_ms=took_ms,
            bound=self._bound,
        )

    # What the reactor tells.

    def accepted(self, connection: Connection, now: Now) -> None:
        self._tape.claim(connection.number)
        self._tape.record(inputs.OPENED, connection.number, now, connection.origin.encode())
        self._engine.opened(connection.number, connection.origin, now)

    def received(self, connection: Connection, data: memoryview, now: Now) -> None:
        if not self._keeper.opened and not _is_probe(data):
            self._open_store(now)
        try:
            self._engine.received(connection.number, data, now)
        except Exception as error:
            # A fault of ours must not take the other sessions along; whoever met it connects again.
            faults.tell(error, self._journal)
            self._reactor.destroy(connection)
            self.lost(connection, "internal", now)

    def lost(self, connection: Connection, reason: str, now: Now) -> None:
        if reason == "not-reading":
            session = self._engine.session_at(connection.number)
            self._journal.emit(Event.SLOW_READER_DISCONNECTED, session=session)
        self._forget(connection.number)
        self._tape.record(inputs.CLOSED, connection.number, now, reason.encode())
        self._engine.closed(connection.number, reason, now)

    def congested(self, connection: Connection, now: Now) -> None:
        self._tape.record(inputs.CONGESTED, connection.number, now)
        self._engine.congested(connection.number, now)

    def drained(self, connection: Connection, now: Now) -> None:
        self._tape.record(inputs.DRAINED, connection.number, now)
        self._engine.drained(connection.number, now)

    def batch_done(self, now: Now) -> None:
        engine = self._engine
        effects = engine.take()
        if effects:
            # Nearly no batch has any; looking at types is a quarter of the price of isinstance.
            if not _CHANGES.isdisjoint(map(type, effects)):
                effects = self._committed(effects, now)
            self._carry_out(effects, now)
        if engine.wake_at < self._timer_at:
            self._arm(now)
        if self._tape.log_end > self._snapshot_at or self._written > WRITTEN_BYTES:
            self._schedule_snapshot()

    # Effects.

    def _committed(self, effects: list[Effect], now: Now) -> list[Effect]:
        """Store the edges that `effects` speak of; what may be done after that."""
        changes = [effect for effect in effects if isinstance(effect, PutEdge | DropEdge)]
        before = self._keeper.problems
        failed = self._keeper.commit(changes, self._engine.router.edges)
        if self._keeper.problems != before:
            self._status_soon()
        if not failed:
            return effects
        self._tape.record(inputs.NOT_STORED, 0, now, inputs.not_stored_record(failed))
        remaining = self._engine.not_stored(failed, effects)
        return remaining + self._engine.take()

    def _carry_out(self, effects: list[Effect], now: Now) -> None:
        # Frames for the same peer are queued, to leave together; where each is for another, queueing gains nothing.
        find = self._connections.get
        at_once = len(effects) <= _FEW or len({it.number for it in effects if type(it) is Write}) == len(effects)
        written = 0
        for effect in effects:
            if type(effect) is Write:
                connection = find(effect.number)
                if connection is None:
                    continue
                written += len(effect.frame)
                if at_once:
                    self._send(connection, effect.frame, now)
                else:
                    connection.queue(effect.frame)
            else:
                self._act(effect, now)
        self._written += written

    def _act(self, effect: Effect, now: Now) -> None:
        if isinstance(effect, Note):
            self._journal.emit(Event[effect.event], **effect.fields)
        elif isinstance(effect, Idle):
            self._idle()
        elif isinstance(effect, Unbound):
            self._status_soon()
        elif isinstance(effect, Bound | Finish | Drop | Hold | Release):
            connection = self._reactor.connections.get(effect.number)
            if connection is not None:
                self._act_on(effect, connection)

    def _act_on(self, effect: Bound | Finish | Drop | Hold | Release, connection: Connection) -> None:
        if isinstance(effect, Bound):
            self._keep(connection)
        elif isinstance(effect, Finish):
            self._forget(connection.number)
            self._reactor.end(connection)
        elif isinstance(effect, Drop):
            self._forget(connection.number)
            self._reactor.destroy(connection)
        elif isinstance(effect, Hold):
            if effect.held_for != effect.number:
                self._journal.emit(Event.SENDER_PAUSED, session=self._engine.session_at(connection.number))
            self._reactor.pause(connection)
        else:
            self._reactor.resume(connection)

    def _keep(self, connection: Connection) -> None:
        self._status_soon()
        self._reactor.watch_peer_death(connection)
        self._safekeeping.keep(connection)

    def _forget(self, number: int) -> None:
        """A connection is about to go: nothing of it may come back after a restart."""
        self._tape.release(number)
        self._safekeeping.forget(number)
        self._status_soon()

    def _idle(self) -> None:
        """Exit, unless somebody is at the door or just came in."""
        if not self._reactor.connections and self._reactor.listeners_idle():
            self.stop("idle")

    # The store.

    def open_store(self, *, exclusive: bool = False) -> None:
        """Open the database now, if the first frame has not done so. Raises StoreLocked with `exclusive`."""
        if not self._keeper.opened:
            self._reactor.run_batch(lambda now: self._open_store(now, exclusive=exclusive))

    def _open_store(self, now: Now, *, exclusive: bool = False) -> None:
        held = self._engine.router.edges() if self._engine.loaded else None
        beginning = self._keeper.open(now.wall, held, exclusive=exclusive)
        if not self._engine.loaded:
            self._tape.record(inputs.LOADED, 0, now, inputs.pack_value(beginning))
            self._engine.load(beginning, now)
        self._status_soon()

    # The memory file.

    def _snapshot(self) -> None:
        self._snapshot_soon = False
        lines = self._lines()
        try:
            self._write_snapshot(lines)
        except HostError as error:
            self._journal.emit(Event.STATE_SHED, code=error.code)
            # Rather deliver something twice than stop remembering who is connected.
            self._engine.shed()
            self._write_snapshot(lines)

    def _write_snapshot(self, lines: Iterable[recovery.Line]) -> None:
        super()._write_snapshot(lines)
        self._written = 0

    # Status and the end.

    def status_text(self) -> str:
        """One line for `systemctl status` and `intercom status`."""
        count = len(self._engine.router.book.sessions)
        text = f"{count} session{'' if count == 1 else 's'}"
        problems = list(self._keeper.problems)
        if self._short:
            problems.append("OUT_OF_DESCRIPTORS")
        return f"{text}; degraded: {', '.join(problems)}" if problems else text

    async def close(self, *, hand_over: bool) -> None:
        """Let go of everything.

        With `hand_over` the connections stay up for the next broker. Without, the peers see an orderly end of what was
        written to them.
        """
        self._reactor.stop_listening()
        if hand_over:
            await self._hand_over()
        self._let_go(hand_over=hand_over)
        self._keeper.close()
        self._close_host()
