# SPDX-License-Identifier: Apache-2.0
"""The broker without systemd: it owns the intercom directory and binds both sockets for itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from agent_intercom.host import faults, standalone
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.intercom import contract, ownership, paths
from agent_intercom.intercom.launch import make_broker, obey_signals, serve


class StatusFile(Notifier):
    """Tells the status to `broker.status` in `directory` too: there may be no service manager to ask."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def ready(self, status: str) -> None:
        super().ready(status)
        self._write(status)

    def status(self, text: str) -> None:
        super().status(text)
        self._write(text)

    def _write(self, text: str) -> None:
        # A full disk is among what the status tells; it must not end the broker.
        with contextlib.suppress(OSError):
            ownership.write_status(self._directory, text)


def run(started: int) -> int:
    """Start, in the order of contract section 1.3, and serve. Exit status 1 with one line where it must refuse."""
    directory = paths.intercom_dir(os.environ)
    pid = os.getpid()
    try:
        notifier = StatusFile(directory)
        os.close(standalone.private_directory(directory))
        ownership.acquire_owner(directory, pid)
    except HostError as error:
        return _refuse(f"{error} ({directory})" if error.field != "NOTIFY_SOCKET" else str(error))
    except ownership.OwnershipError as error:
        return _refuse(f"{error}{_whose(directory)}")
    except OSError as error:
        return _refuse(f"{os.strerror(error.errno or 0)} ({directory})")
    bound: dict[str, standalone.Identity | None] = {}
    try:
        return asyncio.run(_serve(notifier, started, directory, bound))
    except HostError as error:
        return _refuse(f"{error} ({directory})")
    except OSError as error:
        return _refuse(f"{os.strerror(error.errno or 0)} ({directory})")
    finally:
        ownership.release(directory, pid, bound)


async def _serve(notifier: Notifier, started: int, directory: str, bound: dict[str, standalone.Identity | None]) -> int:
    """Serve; `bound` is told which sockets are this process's own."""
    from agent_intercom.intercom.store import StoreLocked

    journal = Journal(stderr=True)
    faults.watch(asyncio.get_running_loop(), journal)
    broker = make_broker(
        notifier,
        StateFile.create(),
        journal,
        bound="itself",
        state_directory=paths.state_dir(os.environ, self_bound=True),
    )
    obey_signals(broker)
    broker.begin()
    try:
        broker.open_store(exclusive=True)
        for address, origin in (
            (paths.compat_socket(os.environ), contract.ORIGIN_LOCAL),
            (paths.compat_gateway_socket(os.environ), contract.ORIGIN_REMOTE),
        ):
            broker.listen(standalone.bind(address), origin)
            bound[address] = standalone.identity(address)
        ownership.write_pid(directory, os.getpid())
        print(contract.ready_line(os.getpid()), flush=True)
        await serve(broker, notifier, started)
    except StoreLocked:
        return _refuse("another intercom broker holds this state directory; stop it, or set PI_CODING_AGENT_DIR")
    finally:
        await broker.close(hand_over=False)
    return 0


def _whose(directory: str) -> str:
    """Who has the directory, and the way out, behind the contract's text."""
    pid = ownership.owner(directory)
    name = os.path.join(directory, ownership.OWNER)
    if not ownership.is_manager(pid):
        return f" ({name})"
    if ownership.probe(paths.compat_socket(os.environ)).listening:
        return f", the service manager: intercom.socket listens there, and no other broker is needed ({name})"
    return f", the service manager, but nothing listens there. If intercom.socket is elsewhere by now: rm {name}"


def _refuse(why: str) -> int:
    sys.stderr.write(f"intercom broker: {why}\n")
    return 1
