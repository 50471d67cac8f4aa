# SPDX-License-Identifier: Apache-2.0
"""Starting the broker of one run: by systemd, with its socket and what a predecessor left, or binding for itself.

Started by systemd it always serves, however degraded; only a second broker for the same run is refused, at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from agent_intercom.host import faults, predecessor
from agent_intercom.host.activation import Inherited, inherited
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.orchestration import rundir, runtime
from agent_intercom.orchestration.broker import Broker
from agent_intercom.orchestration.contract import Limits, Workflow
from agent_intercom.orchestration.degraded import Refuser
from agent_intercom.orchestration.engine import LISTENER, Engine
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.store import Store, StoreError
from agent_intercom.orchestration.workflow.loading import load
from agent_intercom.orchestration.workflow.state import Startup
from agent_intercom.wire import codec

USAGE: Final = """\
usage: orchestrate-broker [--bind SOCKET] RUN

Serve the run RUN (its unit id). systemd starts this as orchestrate@RUN.service.
With --bind it listens on SOCKET itself, without a service manager.

example: orchestrate-broker --bind /tmp/run.sock a1b2c3

exit codes:
  0  told to end
  1  refused to start; the line on standard error says why
  2  the command line is wrong
  3  another broker serves this run
"""

IDENTIFIER: Final = "orchestrate-broker"
_LOCKED: Final = "STATE_LOCKED"
_SERVED: Final = 3
"""The exit status after which the unit does not try again (`RestartPreventExitStatus=`)."""

_HANDSHAKE: Final = "AGENT_INTERCOM_HANDSHAKE_MS"
_STARTING: Final = (Workflow.STARTING, Workflow.CONNECTING, Workflow.INITIALIZING)


class Place:
    """What a broker needs to know of its run. Raises Refusal or StoreError where the run cannot be served."""

    def __init__(self, unit: str) -> None:
        entry = runtime.read(runtime.runtime_dir(os.environ), unit)
        self.run = rundir.open_run(entry.directory, writer=True)
        self.report_usage = entry.observer_report_usage
        self.store = Store.open(os.path.join(self.run.path, "broker.sqlite3"))

    def engine(self, limits: Limits) -> Engine:
        """The run as its database has it."""
        retained = self.store.load()
        startup = None
        if retained.meta.get("workflow_state") in _STARTING:
            taken = rundir.take_startup(self.run.path)
            if taken is None:
                raise Refusal("startup_missing", "the startup file of a run that has not started is gone", "startup")
            startup = Startup(
                task=taken.task,
                role_tasks=dict(taken.role_tasks),
                context_capsule=taken.context_capsule or "",
                workspace_capsule=taken.workspace_capsule or "",
            )
        state = load(
            retained,
            session=self.run.session,
            project=self.run.manifest.project,
            report_usage=self.report_usage,
            startup=startup,
            seed=os.urandom(16).hex(),
        )
        return Engine(state, limits)

    def forget_startup(self) -> None:
        """Delete the startup file, if it is there."""
        rundir.delete_startup(self.run.path)


def main(argv: Sequence[str] = ()) -> int:
    """Run a broker until it is told to end. Returns the exit status."""
    arguments = list(argv)
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(USAGE)
        return 0
    address = None
    if len(arguments) == 3 and arguments[0] == "--bind":
        address = arguments[1]
        del arguments[:2]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("orchestrate-broker: one run id is needed; see --help\n")
        return 2
    started = time.monotonic_ns()
    codec.allow_deep_nesting()
    os.umask(0o077)
    try:
        given = inherited()
        notifier = Notifier() if given.listeners else Notifier({})
    except HostError as error:
        return _refuse(str(error))
    if address is None and not given.listeners:
        return _refuse("no socket was handed over; start orchestrate@RUN.socket, or use --bind")
    return asyncio.run(_serve(arguments[0], given, address, notifier, started))


def limits() -> Limits:
    """The limits, with what the environment says of them."""
    text = os.environ.get(_HANDSHAKE, "")
    if text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= 600_000:
        return Limits(handshake_ms=int(text[:9]))
    return Limits()


async def _serve(unit: str, given: Inherited, address: str | None, notifier: Notifier, started: int) -> int:
    journal = Journal(identifier=IDENTIFIER, stderr=address is not None)
    faults.watch(asyncio.get_running_loop(), journal)
    place: Place | None = None
    problem = ""
    try:
        place = Place(unit)
    except (Refusal, StoreError) as error:
        problem = error.code
    if problem == _LOCKED:
        _refuse("another broker serves this run")
        return _SERVED
    if address is None:
        return await _served(place, problem, given, notifier, journal, started)
    from agent_intercom.host import standalone

    try:
        # Not before: a second broker must not take the first one's address.
        given.listeners.append((LISTENER, standalone.bind(address)))
        made = standalone.identity(address)
    except HostError as error:
        return _refuse(str(error))
    try:
        return await _served(place, problem, given, notifier, journal, started, announce=True)
    finally:
        standalone.unbind(address, made)


async def _served(
    place: Place | None,
    problem: str,
    given: Inherited,
    notifier: Notifier,
    journal: Journal,
    started: int,
    *,
    announce: bool = False,
) -> int:
    """Serve the run or, where it cannot be served, refuse everybody until told to end."""
    broker = None
    if place is not None:
        try:
            broker = _broker(place, given, notifier, journal, "itself" if announce else "systemd")
        except (Refusal, StoreError) as error:
            place.store.close()
            problem = error.code
    if broker is None:
        return await _refuse_all(problem, given, notifier, journal, announce=announce)
    await _run(broker, given, notifier, started, announce=announce)
    await broker.close(hand_over=not announce)
    return 0


def _broker(place: Place, given: Inherited, notifier: Notifier, journal: Journal, bound: str) -> Broker:
    loop = asyncio.get_running_loop()
    stored = dict(given.stored)
    bounds = limits()
    tape, recovered, doubtful = (
        predecessor.adopt(stored, notifier, journal, lambda data: Engine.restored(data, bounds))
        if bound == "systemd"
        else (StateFile.create(), None, set[int]())
    )
    descriptors = predecessor.connections(stored)
    predecessor.discard([*given.unknown, *stored.items()], notifier, journal)
    broker = Broker(
        loop,
        engine=recovered.engine if recovered else place.engine(bounds),
        limits=bounds,
        tape=tape,
        notifier=notifier,
        journal=journal,
        store=place.store,
        forget_startup=place.forget_startup,
        bound=bound,
    )
    _obey_signals(broker)
    if recovered is None:
        predecessor.hang_up(descriptors, notifier)
        broker.begin()
    else:
        for failure in recovered.failures:
            faults.tell(failure, journal)
        broker.restore(recovered, descriptors, doubtful)
    return broker


async def _run(broker: Broker, given: Inherited, notifier: Notifier, started: int, *, announce: bool) -> None:
    loop = asyncio.get_running_loop()
    for _, sock in given.listeners:
        broker.listen(sock)
    notifier.attach(loop)
    notifier.start_watchdog(loop)
    broker.ready((time.monotonic_ns() - started) // 1_000_000)
    if announce:
        print("ready", flush=True)
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    await broker.stopped.wait()


def _obey_signals(broker: Broker | Refuser) -> None:
    """Let SIGTERM, SIGINT and SIGHUP stop the broker."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, broker.stop, number.name)


async def _refuse_all(
    code: str, given: Inherited, notifier: Notifier, journal: Journal, *, announce: bool
) -> int:
    loop = asyncio.get_running_loop()
    for name, fd in (*given.stored.items(), *given.unknown):
        notifier.remove(name)
        os.close(fd)
    refuser = Refuser(loop, code=code, limits=limits(), notifier=notifier, journal=journal)
    _obey_signals(refuser)
    for _, sock in given.listeners:
        refuser.listen(sock, LISTENER)
    notifier.attach(loop)
    notifier.start_watchdog(loop)
    refuser.ready()
    if announce:
        print("ready", flush=True)
    await refuser.stopped.wait()
    refuser.close()
    return 0


def _refuse(why: str) -> int:
    sys.stderr.write(f"orchestrate-broker: {why}\n")
    return 1
