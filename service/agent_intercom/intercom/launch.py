# SPDX-License-Identifier: Apache-2.0
"""Starting the intercom broker: by systemd, with its sockets and what a predecessor left, or binding for itself.

Started by systemd it always serves, however degraded: a service that refuses by exiting takes its own address away.
Started by hand, or by a client as its `brokerCommand`, it refuses where it must, in one line and with exit status 1.
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
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.intercom import contract, paths, settings
from agent_intercom.intercom.broker import Broker
from agent_intercom.intercom.engine import LOADED, Engine
from agent_intercom.intercom.keeper import Keeper
from agent_intercom.wire import codec

USAGE: Final = """\
usage: intercom broker [PATH]

Run the intercom broker in the foreground, binding for itself in the agent directory
(PI_CODING_AGENT_DIR, else ~/.pi/agent). Under systemd use intercom.socket instead.
A client can run it as its brokerCommand: the trailing PATH that clients add is ignored.

It ends when there was no session for five seconds. To let it wait longer, set
AGENT_INTERCOM_IDLE_EXIT_MS (at most 86400000, a day), or idle_exit_ms in intercom.toml.

example: PI_CODING_AGENT_DIR=/tmp/agents AGENT_INTERCOM_IDLE_EXIT_MS=3600000 intercom broker

exit codes:
  0  ended: idle, or told to
  1  refused to start; the line on standard error says why
"""

_STORE_DELAY: Final = 0.5
_COLLECT_AFTER: Final = 20_000


def main(argv: Sequence[str] = ()) -> int:
    """Run a broker until it is told to end or nobody needs it. Returns the exit status."""
    if any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(USAGE)
        return 0
    started = time.monotonic_ns()
    codec.allow_deep_nesting()
    os.umask(0o077)
    try:
        given = inherited()
        notifier = Notifier() if given.listeners else None
    except HostError as error:
        sys.stderr.write(f"intercom broker: {error}\n")
        return 1
    if notifier is not None:
        return asyncio.run(_activated(given, notifier, started))
    from agent_intercom.intercom import foreground

    return foreground.run(started)


def make_broker(notifier: Notifier, tape: StateFile, journal: Journal, *, bound: str, state_directory: str) -> Broker:
    """A broker with this environment's settings. What is wrong with them is logged and shown in the status."""
    loaded = settings.load(os.environ)
    for problem in loaded.problems:
        journal.emit(Event.CONFIG_INVALID, key=problem.key, code=problem.code)
    keeper = Keeper(
        state_directory,
        paths.intercom_dir(os.environ),
        journal,
        ["CONFIG_INVALID"] if loaded.problems else [],
    )
    return Broker(
        asyncio.get_running_loop(),
        limits=loaded.settings.limits(),
        tape=tape,
        notifier=notifier,
        journal=journal,
        keeper=keeper,
        bound=bound,
        reactor_limits=loaded.settings.reactor_limits(),
    )


def obey_signals(broker: Broker) -> None:
    """Let SIGTERM and SIGINT stop the broker. Before anybody is told that it is there, or they would kill it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.stop, number.name)


async def serve(broker: Broker, notifier: Notifier, started: int) -> None:
    """Serve until the broker stops."""
    loop = asyncio.get_running_loop()
    notifier.attach(loop)
    notifier.start_watchdog(loop)
    loop.call_later(_STORE_DELAY, broker.open_store)
    broker.ready((time.monotonic_ns() - started) // 1_000_000)
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    # Messages make no cycles; looking for some after every 700 objects is wasted.
    gc.set_threshold(_COLLECT_AFTER, 20, 20)
    await broker.stopped.wait()


async def _activated(given: Inherited, notifier: Notifier, started: int) -> int:
    journal = Journal()
    faults.watch(asyncio.get_running_loop(), journal)
    stored = dict(given.stored)
    # The first frame opens the database, and is in the log before that: what it brought comes first.
    tape, recovered, doubtful = predecessor.adopt(stored, notifier, journal, Engine.restored, LOADED)
    broker = make_broker(notifier, tape, journal, bound="systemd", state_directory=paths.state_dir(os.environ))
    obey_signals(broker)
    descriptors = predecessor.connections(stored)
    predecessor.discard([*given.unknown, *stored.items()], notifier, journal)
    if recovered is not None:
        for failure in recovered.failures:
            faults.tell(failure, journal)
        broker.restore(recovered, descriptors, doubtful)
    else:
        predecessor.hang_up(descriptors, notifier)
        broker.begin()
    for name, sock in given.listeners:
        origin = contract.ORIGIN_REMOTE if name == contract.ORIGIN_REMOTE else contract.ORIGIN_LOCAL
        broker.listen(sock, origin)
    await serve(broker, notifier, started)
    await broker.close(hand_over=broker.reason != "idle")
    return 0
