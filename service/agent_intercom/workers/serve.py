# SPDX-License-Identifier: Apache-2.0
"""Starting the worker service: by systemd with its socket, or binding for itself.

Started by systemd it always serves: where its registry cannot be used, be it that another worker service has it, it
says so to whoever asks, and looks again. One that is to bind for itself is refused at once where another one has it.
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
from agent_intercom.workers import clock, errors, opening, places, reattach, recording
from agent_intercom.workers.contract import Lifetimes, Limits
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.listening import Door
from agent_intercom.workers.managers import Managers
from agent_intercom.workers.opening import NoStore
from agent_intercom.workers.refusals import Refusals
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.requests import Requests
from agent_intercom.workers.service import Service
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
  1  refused to start; the line on standard error says why. Or it could not go on, as no descriptor was left for long
     or a fault kept it from its registry: systemd starts the next
  2  the command line is wrong
  3  another worker service has the registry (with --bind; started by systemd it says so to whoever asks)
"""

IDENTIFIER: Final = "orchestrate-workers"
LAUNCHER: Final = "orchestrate-launcher"
IDLE: Final = 30.0
"""Seconds without a worker and a connection, after which it ends: the next connection starts it again."""

SETTLING: Final = 7.0
"""Seconds for what is under way when it is told to end."""

PROVING = 5.0
"""Seconds in which the workers of an earlier service are proved before anybody is served; what takes longer goes on."""

_HELD: Final = 3


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
    if address is not None and not standalone.private(path.dirname(address)):
        return standalone.refuse(
            IDENTIFIER, "the directory of the socket must be yours alone: chmod 0700, or choose another"
        )
    store = await opening.opened(state)
    if address is not None and isinstance(store, NoStore) and store.error.reason == errors.LOCKED:
        standalone.refuse(IDENTIFIER, "another worker service has the registry")
        return _HELD
    made = None
    if address is not None:
        try:
            given.listeners.append(("workers", standalone.bind(address)))
            made = standalone.identity(address)
        except HostError as error:
            store.close()
            return standalone.refuse(IDENTIFIER, str(error))
    main_ = Main(given, notifier, journal, where, state, library, store, address is not None)
    try:
        await main_.run(started)
    finally:
        main_.store.close()
        if address is not None:
            standalone.unbind(address, made)
    return 1 if main_.failed else 0


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
        bound: bool,
        connect: Callable[[], Connection] | None = None,
        idle: float = IDLE,
    ) -> None:
        self._given = given
        self._notifier = notifier
        self._journal = journal
        self.store = store
        self._state = state
        self._reopening: opening.Reopening | None = None
        self._bound = bound
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        managers = Managers(connect or _scopes, self._unit_changed, journal)
        registry = Registry(Limits(), Lifetimes(), lambda: os.urandom(6).hex(), store.load())
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
        self._refusals = Refusals(journal)
        self._door = Door(
            Requests(self.service, library, self._refusals).answer, self._refusals, journal, self._changed, self._fail
        )
        self.failed = False
        """Whether it ended because it could not go on, and the next one can."""

    def _unit_changed(self, unit: str, active: str, sub: str, result: str) -> None:
        self.service.unit_changed(unit, active, sub, result)

    async def run(self, started: int) -> None:
        """Find the workers again, serve, and end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop, number.name)
        self._notifier.attach(self._loop)
        self._notifier.start_watchdog(self._loop)
        found = reattach.Found(0, 0)
        if isinstance(self.store, NoStore):
            self._blinded(self.store)
            self._reopening = opening.Reopening(self._state, self._opened, self._journal)
        else:
            found = await self._find_again()
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
        self._changed()
        await self._ending.wait()
        await self._close()

    async def _find_again(self) -> reattach.Found:
        """Find the workers of the registry again. What takes long goes on: nobody does anything with such a one before.

        What lies about is removed after that, and nobody waits for it.
        """
        finding = self.service.spawn(reattach.reattach(self.service))
        await asyncio.wait({finding}, timeout=PROVING)
        if self.store.set_aside is None:
            self.service.spawn(self._sweep(finding))
        else:
            # What a damaged registry knew of may live: its files are not taken from it.
            self._journal.emit(Event.WORKERS_SET_ASIDE, code=errors.DAMAGED)
        return finding.result() if finding.done() else reattach.Found(len(self.service.running), 0)

    async def _sweep(self, finding: asyncio.Task[reattach.Found]) -> None:
        await asyncio.wait({finding})
        await reattach.sweep(self.service)

    def _blinded(self, store: NoStore) -> None:
        """Tell why the registry cannot be used, where that was not told yet."""
        before = self.service.unusable
        self.service.unusable = store.error
        if before is None or before.reason != store.error.reason:
            self._journal.emit(Event.WORKERS_REFUSED, code=store.error.reason)

    async def _opened(self, store: Store | NoStore) -> None:
        """Go on with a registry that could not be used so far, if it can be now."""
        if isinstance(store, NoStore):
            self._blinded(store)
        else:
            self.store = self.service.store = store
            try:
                self.service.registry.load(store.load())
                self._journal.emit(Event.STORE_RECOVERED)
                await self._find_again()
            except Exception:
                # As at the beginning: whoever is told of the fault is not served, and the next one tries again.
                self.failed = True
                self.stop("fault")
                raise
            self.service.unusable = None
        self._changed()

    def _prove_again(self) -> None:
        self.service.spawn(reattach.prove_again(self.service))

    def _clock_was_set(self, by: int) -> None:
        self.service.registry.stepped(by)
        self.service.record()

    def _fail(self) -> None:
        if not self._bound:
            self.failed = True
            self.stop("descriptors")

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
        if self._reopening is not None:
            await self._reopening.close()
        self._journal.emit(Event.WORKERS_STOPPING, reason=self._reason, live=len(self.service.registry.live()))
        await self.service.settle(SETTLING)
        # Whoever is not answered by now is not: nothing is begun once what is needed for it is closed.
        await self._door.close()
        self._refusals.close()
        await self.service.close()
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
        service = self.service
        # There may be workers that it cannot see for now.
        blind = service.unusable is not None and recording.passing(service.unusable)
        return not (service.registry.live() or self._door.connections or service.busy or service.owing or blind)

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
        if self.service.unusable is not None:
            return f"degraded: the registry cannot be used ({self.service.unusable.reason})"
        live = len(self.service.registry.live())
        watched = f"watching {live} worker{'' if live == 1 else 's'}"
        return watched if self.store.set_aside is None else f"{watched}; a damaged registry is set aside"


def _scopes() -> Connection:
    # What D-Bus needs is imported with the first worker.
    from agent_intercom.host.scopes import Scopes

    return Scopes()
