# SPDX-License-Identifier: Apache-2.0
"""Starting the worker service: by systemd with its socket, or binding for itself.

Started by systemd it always serves: where its registry cannot be used it says so to whoever asks, and looks again after
a restart. Only a second one is refused, at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from os import path
from typing import TYPE_CHECKING, Final

from agent_intercom.host import faults, standalone
from agent_intercom.host.activation import Inherited, inherited
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.notify import Notifier
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import clock, places, reattach
from agent_intercom.workers.contract import Lifetimes, Limits
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.listening import Door
from agent_intercom.workers.managers import Managers
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.requests import Requests
from agent_intercom.workers.service import Service
from agent_intercom.workers.terms import Changes, Loaded
from agent_intercom.workers.timers import Timers

if TYPE_CHECKING:
    from agent_intercom.workers.managers import Connection
    from agent_intercom.workers.store import Store

USAGE: Final = """\
usage: orchestrate-workers [--bind SOCKET]

Start, watch and end managed workers. systemd starts this as orchestrate-workers.service.
With --bind it listens on SOCKET itself; workers need the user's systemd all the same.

The directory of SOCKET must be yours alone (mode 0700).

example: orchestrate-workers --bind $XDG_RUNTIME_DIR/agent-intercom/workers.sock

exit codes:
  0  told to end, or nothing is to be watched
  1  refused to start; the line on standard error says why
  2  the command line is wrong
  3  another worker service has the registry
"""

IDENTIFIER: Final = "orchestrate-workers"
LAUNCHER: Final = "orchestrate-launcher"
IDLE: Final = 30.0
"""Seconds without a worker and a connection, after which it ends: the next connection starts it again."""

PATIENCE: Final = 7.0
"""Seconds for what is under way when it is told to end."""

_HELD: Final = 3
"""The exit status after which the unit does not try again (`RestartPreventExitStatus=`)."""

_LOCKED: Final = "STATE_LOCKED"
_DAMAGED: Final = "STATE_DAMAGED"


class NoStore:
    """In the place of a registry that cannot be used: nothing is remembered, and so nothing may change."""

    set_aside: str | None = None

    def __init__(self, error: WorkerError) -> None:
        self._error = error

    def apply(self, changes: Changes) -> None:
        if changes:
            raise self._error

    def close(self) -> None:
        """Nothing was opened."""


def main(argv: Sequence[str] = ()) -> int:
    """Serve until told to end, or nothing is to be watched. Returns the exit status."""
    arguments = list(argv)
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(USAGE)
        return 0
    address = None
    if len(arguments) == 2 and arguments[0] == "--bind":
        address = path.abspath(arguments[1])
    elif arguments:
        sys.stderr.write("orchestrate-workers: it takes --bind SOCKET or nothing; see --help\n")
        return 2
    started = time.monotonic_ns()
    try:
        given = inherited()
        notifier = Notifier() if given.listeners else Notifier({})
        where = runtime.runtime_dir(os.environ)
        state = places.state_dir(os.environ)
    except HostError as error:
        return standalone.refuse(IDENTIFIER, str(error))
    except (Refusal, WorkerError) as error:
        return standalone.refuse(IDENTIFIER, error.text)
    if address is None and not given.listeners:
        return standalone.refuse(
            IDENTIFIER, "no socket was handed over; start orchestrate-workers.socket, or use --bind"
        )
    library = path.dirname(path.abspath(sys.argv[0]))
    return asyncio.run(_serve(given, address, notifier, started, where, state, library))


async def _serve(
    given: Inherited, address: str | None, notifier: Notifier, started: int, where: str, state: str, library: str
) -> int:
    journal = Journal(identifier=IDENTIFIER, stderr=address is not None)
    faults.watch(asyncio.get_running_loop(), journal)
    from agent_intercom.workers.store import NAME, Store, StoreError

    store: Store | NoStore
    problem = ""
    try:
        store = Store.open(path.join(state, NAME))
    except StoreError as error:
        problem = error.reason
        store = NoStore(error)
    if problem == _LOCKED:
        standalone.refuse(IDENTIFIER, "another worker service has the registry")
        return _HELD
    loaded = store.load() if isinstance(store, Store) else Loaded()
    made = None
    if address is not None:
        if not standalone.private(path.dirname(address)):
            return standalone.refuse(
                IDENTIFIER, "the directory of the socket must be yours alone: chmod 0700, or choose another"
            )
        try:
            given.listeners.append(("workers", standalone.bind(address)))
            made = standalone.identity(address)
        except HostError as error:
            store.close()
            return standalone.refuse(IDENTIFIER, str(error))
    try:
        main_ = Main(given, notifier, journal, where, state, library, store, loaded, problem, address is not None)
        await main_.run(started)
    finally:
        store.close()
        if address is not None:
            standalone.unbind(address, made)
    return 0


class Main:
    """One life of the service."""

    def __init__(
        self,
        given: Inherited,
        notifier: Notifier,
        journal: Journal,
        where: str,
        state: str,
        library: str,
        store: Store | NoStore,
        loaded: Loaded,
        problem: str,
        bound: bool,
        connect: Callable[[], Connection] | None = None,
        idle: float = IDLE,
    ) -> None:
        self._given = given
        self._notifier = notifier
        self._journal = journal
        self._problem = problem
        self._set_aside = store.set_aside
        self._bound = bound
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        managers = Managers(connect or _scopes, self._unit_changed, journal)
        registry = Registry(Limits(), Lifetimes(), lambda: os.urandom(6).hex(), loaded)
        self.service = Service(
            registry,
            store,
            managers,
            journal,
            runtime_dir=where,
            state_dir=state,
            launcher=path.join(library, LAUNCHER),
        )
        self._timers = Timers(self.service)
        self._again = reattach.Again(self.service)
        self._requests = Requests(self.service, library, problem)
        self._door = Door(self._requests.answer, journal, self._changed)

    def _unit_changed(self, unit: str, active: str, sub: str, result: str) -> None:
        self.service.unit_changed(unit, active, sub, result)

    async def run(self, started: int) -> None:
        """Find the workers again, serve, and end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop, number.name)
        self._notifier.attach(self._loop)
        self._notifier.start_watchdog(self._loop)
        if not self._problem:
            found = await reattach.reattach(self.service)
            if self._set_aside is not None:
                # What a damaged registry knew of may live: its files are not taken from it.
                self._journal.emit(Event.WORKERS_SET_ASIDE, code=_DAMAGED)
        else:
            self.service.blind = True
            found = reattach.Found(0, 0)
            self._journal.emit(Event.WORKERS_REFUSED, code=self._problem)
        clock.CLOCK.stepped = self._clock_was_set
        self.service.managers.on_connect = self._prove_again
        self.service.on_change = self._changed
        for _, listener in self._given.listeners:
            self._door.listen(listener)
        live = len(self.service.registry.live())
        took = (time.monotonic_ns() - started) // 1_000_000
        self._notifier.ready(self._status())
        self._journal.emit(Event.WORKERS_STARTED, live=live, attached=found.attached, lost=found.lost, took_ms=took)
        if self._bound:
            print("ready", flush=True)
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.freeze()
        if not self._problem and self._set_aside is None:
            # However long that takes, nobody waits for it.
            self.service.spawn(reattach.sweep(self.service))
        self._changed()
        await self._ending.wait()
        await self._close()

    def _prove_again(self) -> None:
        self.service.spawn(reattach.prove_again(self.service))

    def _clock_was_set(self, by: int) -> None:
        self.service.registry.stepped(by)
        self.service.record()

    def stop(self, reason: str) -> None:
        """End, for a reason that is logged. Workers go on."""
        if not self._reason:
            self._reason = reason
            self._ending.set()

    async def _close(self) -> None:
        # From here on nobody is served: systemd takes a later READY=1 for nothing.
        self._door.shut()
        self._notifier.stopping()
        self._timers.close()
        self._again.close()
        self._disarm()
        self._journal.emit(Event.WORKERS_STOPPING, reason=self._reason, live=len(self.service.registry.live()))
        await self.service.close(PATIENCE)
        await self._door.close()
        self._notifier.close()
        self._journal.close()

    # Being idle.

    def _changed(self) -> None:
        if self._reason:
            return
        self._timers.arm()
        self._again.arm()
        self._notifier.status(self._status())
        if self._bound or not self._nothing_to_do():
            self._disarm()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._idle, self._rest)

    def _nothing_to_do(self) -> bool:
        return not (self.service.registry.live() or self._door.connections or self.service.busy)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        self._timer = None
        if self._nothing_to_do() and not self._door.waiting():
            self.stop("idle")
        else:
            self._changed()

    def _status(self) -> str:
        if self._problem:
            return f"degraded: the registry cannot be used ({self._problem})"
        live = len(self.service.registry.live())
        watched = f"watching {live} worker{'' if live == 1 else 's'}"
        return watched if self._set_aside is None else f"{watched}; a damaged registry is set aside"


def _scopes() -> Connection:
    # What D-Bus needs is imported with the first worker.
    from agent_intercom.host.scopes import Scopes

    return Scopes()
