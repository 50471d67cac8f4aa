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

from agent_intercom.host import faults, predecessor, standalone
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

The directory of SOCKET must be yours alone (mode 0700).

example: orchestrate-broker --bind $XDG_RUNTIME_DIR/run.sock a1b2c3

exit codes:
  0  told to end
  1  refused to start; the line on standard error says why
  2  the command line is wrong
  3  another broker serves this run
"""

IDENTIFIER: Final = "orchestrate-broker"
_LOCKED: Final = "STATE_LOCKED"
_RETRY_DELAY: Final = 10.0
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
        self.store = Store.open(self.run.database)

    def engine(self, limits: Limits, *, remembered: bool) -> Engine:
        """The run as its database has it.

        A run that has not started needs its startup file, unless it is `remembered` in a memory file. A workspace
        capsule is checked here and, as long as the run goes on, before each time that it is handed on.
        """
        retained = self.store.load()
        startup = None
        starting = retained.meta.get("workflow_state") in _STARTING
        taken = rundir.take_startup(self.run.path) if starting else None
        if starting and taken is None and not remembered:
            raise Refusal("startup_missing", "the startup file of a run that has not started is gone", "startup")
        if taken is not None:
            if taken.workspace_capsule and not remembered:
                fault = check_workspace(taken.workspace_capsule, self.run.manifest.project)
                if fault:
                    raise Refusal(fault, "the workspace capsule does not hold", "workspace_capsule")
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
        engine = Engine(state, limits)
        engine.workflow.render_baselines()
        return engine

    def forget_startup(self) -> str | None:
        """Delete the startup file, if it is there; the code of what prevents it."""
        try:
            rundir.delete_startup(self.run.path)
        except Refusal as refusal:
            return refusal.code
        return None


def check_workspace(capsule: str, project: str) -> str:
    """The code of what is wrong with a workspace capsule, or nothing."""
    from agent_intercom.orchestration import workspace  # few runs have one

    try:
        workspace.validate(capsule, project)
    except Refusal as refusal:
        return refusal.code
    return ""


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
    try:
        given = inherited()
        notifier = Notifier() if given.listeners else Notifier({})
    except HostError as error:
        return standalone.refuse(IDENTIFIER, str(error))
    if address is None and not given.listeners:
        return standalone.refuse(IDENTIFIER, "no socket was handed over; start orchestrate@RUN.socket, or use --bind")
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
        standalone.refuse(IDENTIFIER, "another broker serves this run")
        return _SERVED
    if address is None:
        return await _served(place, problem, given, notifier, journal, started)

    if not standalone.private(os.path.dirname(os.path.abspath(address))):
        return standalone.refuse(
            IDENTIFIER, "the directory of the socket must be yours alone: chmod 0700, or choose another"
        )
    try:
        # Not before: a second broker must not take the first one's address.
        given.listeners.append((LISTENER, standalone.bind(address)))
        made = standalone.identity(address)
    except HostError as error:
        return standalone.refuse(IDENTIFIER, str(error))
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
    fresh = None
    if place is not None:
        try:
            # Before anything is adopted: a run that cannot be served leaves its predecessor's memory where it is.
            fresh = place.engine(limits(), remembered=predecessor.MEMORY_NAME in given.stored)
        except (Refusal, StoreError) as error:
            place.store.close()
            problem = error.code
    if place is None or fresh is None:
        return await _refuse_all(problem, given, notifier, journal, announce=announce)
    broker = _broker(place, fresh, given, notifier, journal, "itself" if announce else "systemd")
    if broker is None:
        place.store.close()
        left = Inherited(given.listeners, {}, [])
        return await _refuse_all("startup_missing", left, notifier, journal, announce=announce)
    await _run(broker, given, notifier, started, announce=announce)
    await broker.close(hand_over=not announce)
    return 0


def _broker(
    place: Place, fresh: Engine, given: Inherited, notifier: Notifier, journal: Journal, bound: str
) -> Broker | None:
    """The broker that goes on from its predecessor's memory, or else with `fresh`, which the database tells of.

    None where neither has what the run was to start with.
    """
    loop = asyncio.get_running_loop()
    stored = dict(given.stored)
    tape, recovered, doubtful = (
        predecessor.adopt(stored, notifier, journal, Engine.restored)
        if bound == "systemd"
        else (StateFile.create(), None, set[int]())
    )
    descriptors = predecessor.connections(stored)
    predecessor.discard([*given.unknown, *stored.items()], notifier, journal)
    state = fresh.workflow.state
    if recovered is None and state.workflow in _STARTING and state.startup is None:
        predecessor.hang_up(descriptors, notifier)
        tape.close()
        return None
    broker = Broker(
        loop,
        engine=recovered.engine if recovered else fresh,
        limits=limits(),
        tape=tape,
        notifier=notifier,
        journal=journal,
        store=place.store,
        forget_startup=place.forget_startup,
        check_workspace=check_workspace,
        bound=bound,
    )
    _obey_signals(broker)
    if recovered is None:
        predecessor.hang_up(descriptors, notifier)
        broker.begin()
    else:
        for failure in (*recovered.failures, *recovered.engine.faults):
            faults.tell(failure, journal)
        recovered.engine.faults.clear()
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
    gc.freeze()
    await broker.stopped.wait()


def _obey_signals(broker: Broker | Refuser) -> None:
    """Let SIGTERM, SIGINT and SIGHUP stop the broker."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, broker.stop, number.name)


async def _refuse_all(code: str, given: Inherited, notifier: Notifier, journal: Journal, *, announce: bool) -> int:
    loop = asyncio.get_running_loop()
    # The memory file stays in the store: a later broker may be able to go on with it.
    predecessor.hang_up(predecessor.connections(given.stored), notifier)
    refuser = Refuser(loop, code=code, limits=limits(), notifier=notifier, journal=journal)
    _obey_signals(refuser)
    for _, sock in given.listeners:
        refuser.listen(sock, LISTENER)
    notifier.attach(loop)
    notifier.start_watchdog(loop)
    refuser.ready()
    if announce:
        print("ready", flush=True)
    if problem_passes(code) and not announce:
        loop.call_later(_RETRY_DELAY, refuser.stop, "retry")
    await refuser.stopped.wait()
    refuser.close()
    return 1 if refuser.reason == "retry" else 0


def problem_passes(code: str) -> bool:
    """Whether what prevents a run from being served may be over in a while, so that the unit is to try again."""
    return code in ("STATE_FULL", "STATE_READ_ONLY", "STATE_BUSY", "STATE_IO")
