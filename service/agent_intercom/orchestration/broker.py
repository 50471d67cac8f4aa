# SPDX-License-Identifier: Apache-2.0
"""The shell of a run's broker: inputs into the engine, effects out of it, in order and after the commit.

No rule lives here. Every input is in the memory file before the engine sees it; all rows that a batch saves are in the
database before one of its frames leaves. While the database takes nothing, nothing leaves and nobody is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from agent_intercom.host import faults, recovery
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.shell import Shell
from agent_intercom.orchestration import engine as inputs
from agent_intercom.orchestration import rows
from agent_intercom.orchestration.contract import Limits, RoleState
from agent_intercom.orchestration.effects import (
    Bound,
    Check,
    Drop,
    Effect,
    Finish,
    ForgetStartup,
    Note,
    Save,
    Tell,
    Write,
)
from agent_intercom.orchestration.engine import Engine
from agent_intercom.orchestration.store import StoreError
from agent_intercom.orchestration.workflow.ledger import event_note
from agent_intercom.wire.clock import Now, system_now
from agent_intercom.wire.reactor import Connection, ReactorLimits

REACTOR_LIMITS: Final = ReactorLimits(high_water=1_048_576, low_water=262_144, hard_limit=8 * 1_048_576)

_RETRY_DELAY: Final = 1.0


class Database(Protocol):
    """What the broker needs of `store.Store`."""

    def apply(self, changes: list[rows.Change]) -> None:
        """Commit all of it or raise StoreError."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Broker(Shell[Engine]):
    """The broker of one run on one loop. Made by `launch`; `stopped` is set when it wants to end.

    `forget_startup` deletes the startup file; it returns the code of what prevents that, and raises nothing.
    `check_workspace` takes a workspace capsule and the project's directory, and returns the code of what is wrong, or
    nothing. It may take seconds, and runs on a thread of its own.
    """

    TICK = inputs.TICK

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        engine: Engine,
        limits: Limits,
        tape: StateFile,
        notifier: Notifier,
        journal: Journal,
        store: Database,
        forget_startup: Callable[[], str | None],
        check_workspace: Callable[[str, str], str],
        bound: str,
        clock: Callable[[], Now] = system_now,
        reactor_limits: ReactorLimits = REACTOR_LIMITS,
    ) -> None:
        super().__init__(
            loop,
            engine,
            tape=tape,
            notifier=notifier,
            journal=journal,
            bound=bound,
            uid=None,
            clock=clock,
            reactor_limits=reactor_limits,
        )
        self._limits = limits
        self._store = store
        self._delete_startup = forget_startup
        self._check_workspace = check_workspace
        self._checks: set[asyncio.Future[str]] = set()
        self._rows: list[rows.Change] = []
        self._held: list[Effect] = []
        self._problem: str | None = None
        self._startup_kept = False
        self._retry: asyncio.TimerHandle | None = None

    # Beginning.

    def begin(self) -> None:
        """Start with what the database says: there is no predecessor's memory."""
        self._reactor.run_batch(lambda now: self._engine.started(now, remembers=False))
        self._snapshot()
        if self._engine.workflow.state.startup is None:
            self._forget_startup()

    def restore(self, loaded: recovery.Recovered[Engine], descriptors: dict[int, int], doubtful: set[int]) -> None:
        """Go on where the predecessor stopped.

        `descriptors` are the stored connections by number; `doubtful` are those whose last system call has no record.
        """
        self._reactor.next_number = loaded.next_number
        kept = self._adopt(loaded.lines, descriptors, doubtful)
        for connection in kept.values():
            # What waits may tell of rows that were not committed.
            self._reactor.cork(connection)
        # The predecessor may have died before it logged these.
        events = (row for row in self._engine.unsaved if isinstance(row, rows.Event))
        untold = [row for row in events if row.sequence > self._tape.mark]
        self._held += [event_note(row) for row in untold]
        self._rows += self._engine.unsaved
        self._engine.unsaved = []
        self._reactor.run_batch(lambda now: self._resume(kept, now))
        gone = len(loaded.lines) - len(kept)
        self._journal.emit(Event.BROKER_RESTORED, kept=len(kept), closed=gone, records=loaded.records)
        if self._engine.workflow.state.startup is None:
            self._forget_startup()

    def _resume(self, kept: dict[int, Connection], now: Now) -> None:
        engine = self._engine
        links = engine.workflow.state.links
        for number in self._release_others(kept):
            self._tape.record(inputs.CLOSED, number, now)
            engine.closed(number, now)
        # Not before: a broker that is killed while it comes up leaves the doubt to the next one.
        self._tape.settle()
        self._tape.record(inputs.STARTED, 0, now, b"remembers")
        engine.started(now, remembers=True)
        engine.apply(self._limits)
        for number, connection in kept.items():
            if links[number].kind:
                self._reactor.watch_peer_death(connection)
            if links[number].kind == "observer":
                connection.patience_ms = self._limits.observer_write_ms
        self._schedule_snapshot()

    def listen(self, sock: socket.socket) -> None:
        """Accept from a listener."""
        self._reactor.listen(sock, inputs.LISTENER)

    def ready(self, took_ms: int) -> None:
        """Say that connections are served."""
        self._notifier.ready(self.status_text())
        self._journal.emit(Event.BROKER_STARTED, sessions=self._restored, took_ms=took_ms, bound=self._bound)

    # What the reactor tells.

    def accepted(self, connection: Connection, now: Now) -> None:
        self._tape.claim(connection.number)
        self._tape.record(inputs.OPENED, connection.number, now)
        self._engine.opened(connection.number, now)
        if self._problem is not None:
            self._reactor.pause(connection)

    def received(self, connection: Connection, data: memoryview, now: Now) -> None:
        self._engine.received(connection.number, data, now)
        for error in self._engine.faults:
            faults.tell(error, self._journal)
        self._engine.faults.clear()

    def lost(self, connection: Connection, reason: str, now: Now) -> None:
        if reason == "not-reading":
            self._journal.emit(Event.PEER_NOT_READING, connection=connection.number)
        self._forget(connection.number)
        self._tape.record(inputs.CLOSED, connection.number, now)
        self._engine.closed(connection.number, now)

    def congested(self, connection: Connection, now: Now) -> None:
        """Bounded by the reactor: who does not read is disconnected."""

    def drained(self, connection: Connection, now: Now) -> None:
        """Nothing waits for it."""

    def batch_done(self, now: Now) -> None:
        for effect in self._engine.take():
            if isinstance(effect, Save):
                self._rows.append(effect.row)
            else:
                self._held.append(effect)
        if self._rows and (self._retry is not None or not self._commit()):
            return
        held, self._held = self._held, []
        for effect in held:
            self._carry_out(effect)
        if self._engine.wake_at != self._timer_at:
            self._arm(now)
        if self._tape.log_end > self._snapshot_at:
            self._schedule_snapshot()

    # The database.

    def _commit(self) -> bool:
        """Commit what waits, in one transaction. While that fails nobody is read, and it is tried again."""
        try:
            self._store.apply(self._rows)
        except StoreError as error:
            if self._problem is None:
                self._journal.emit(Event.RUN_STALLED, code=error.code)
                # Nobody is heard until then, so nobody is let in either: each would cost a descriptor.
                self._reactor.hold_listening(True)
                for connection in self._reactor.connections.values():
                    self._reactor.pause(connection)
            self._problem = error.code
            self._retry = self._loop.call_later(_RETRY_DELAY, self._try_again)
            self._status_soon()
            return False
        self._rows = []
        if self._problem is not None:
            self._problem = None
            self._journal.emit(Event.STORE_RECOVERED)
            for connection in self._reactor.connections.values():
                self._reactor.resume(connection)
            self._reactor.hold_listening(False)
            self._status_soon()
        for connection in self._reactor.connections.values():
            if connection.corked and not self._safekeeping.holds(connection):
                self._reactor.uncork(connection)
        return True

    def _try_again(self) -> None:
        self._retry = None
        self._reactor.run_batch(lambda _now: None)

    # Effects.

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Note):
            self._journal.emit(Event[effect.event], **effect.fields)
            # A successor tells what comes after it.
            self._tape.mark = effect.fields.get("sequence", self._tape.mark)
        elif isinstance(effect, Tell):
            self._status_soon()
        elif isinstance(effect, Check):
            self._check(effect.number)
        elif isinstance(effect, ForgetStartup):
            # After the frames have left: nobody is to wait for the disk.
            self._reactor.yield_to_loop()
            self._loop.call_soon(self._forget_startup)
        elif isinstance(effect, Write | Bound | Finish | Drop):
            connection = self._reactor.connections.get(effect.number)
            if connection is not None:
                self._act_on(effect, connection)

    def _act_on(self, effect: Write | Bound | Finish | Drop, connection: Connection) -> None:
        if isinstance(effect, Write):
            connection.queue(effect.frame)
        elif isinstance(effect, Bound):
            if effect.watches:
                connection.patience_ms = self._limits.observer_write_ms
            self._reactor.watch_peer_death(connection)
            self._safekeeping.keep(connection)
        elif isinstance(effect, Finish):
            self._forget(connection.number)
            self._reactor.end(connection)
        else:
            self._forget(connection.number)
            self._reactor.destroy(connection)

    def _check(self, number: int) -> None:
        """Have the workspace capsule checked; what is found is an input."""
        state = self._engine.workflow.state
        check = self._loop.run_in_executor(None, self._check_workspace, state.workspace, state.settings.project)
        self._checks.add(check)
        check.add_done_callback(lambda done: self._checked(number, done))

    def _checked(self, number: int, check: asyncio.Future[str]) -> None:
        self._checks.discard(check)
        if self.stopped.is_set() or check.cancelled():
            # Who follows asks again.
            return
        error = check.exception()
        if isinstance(error, Exception):
            faults.tell(error, self._journal)
        fault = "workspace_capsule_invalid" if error else check.result()

        def tell(now: Now) -> None:
            self._tape.record(inputs.CHECKED, number, now, fault.encode())
            self._engine.checked(number, fault, now)

        self._reactor.run_batch(tell)

    def _forget_startup(self) -> None:
        """Delete the startup file: what it holds is in memory, or needed no more."""
        code = self._delete_startup()
        if code is not None:
            self._journal.emit(Event.STARTUP_KEPT, code=code)
        self._startup_kept = code is not None
        self._status_soon()

    def _forget(self, number: int) -> None:
        """A connection is about to go: nothing of it may come back after a restart."""
        self._tape.release(number)
        self._safekeeping.forget(number)

    # The memory file.

    def _snapshot(self) -> None:
        self._snapshot_soon = False
        if self._rows or self._held:
            # What is held is in nobody's snapshot: it comes out of the log.
            return
        self._write_snapshot(self._lines())

    # Status and the end.

    def status_text(self) -> str:
        """One line for `systemctl status`."""
        problems = [self._problem] if self._problem else []
        problems += ["OUT_OF_DESCRIPTORS"] if self._short else []
        problems += ["STARTUP_KEPT"] if self._startup_kept else []
        text = self._engine.workflow.status()
        return f"{text}; degraded: {', '.join(problems)}" if problems else text

    async def close(self, *, hand_over: bool) -> None:
        """Let go of everything.

        With `hand_over` the connections stay up for a next broker, and the memory file is complete. The database says
        that nobody is connected: if no broker follows, that is the truth, and one that does knows better.
        """
        self._reactor.stop_listening()
        if hand_over:
            await self._hand_over()
        if self._retry is not None:
            self._retry.cancel()
        self._say_disconnected()
        self._forget_startup()
        self._let_go(hand_over=hand_over)
        self._store.close()
        self._close_host()

    def _say_disconnected(self) -> None:
        settled = (RoleState.IDLE, RoleState.ACTIVE)
        away = [
            msgspec.structs.replace(
                row,
                connected=False,
                activity=None,
                activity_at=None,
                state=RoleState.DISCONNECTED if row.state in settled else row.state,
            )
            for row in self._engine.workflow.state.roles.values()
        ]
        try:
            self._store.apply([*self._rows, *away])
        except StoreError as error:
            self._journal.emit(Event.RUN_STALLED, code=error.code)
