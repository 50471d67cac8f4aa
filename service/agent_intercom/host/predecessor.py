# SPDX-License-Identifier: Apache-2.0
"""What a broker finds in the service manager's descriptor store: its predecessor's memory file and connections."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent_intercom import __version__
from agent_intercom.host import recovery
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.recovery import AnyEngine
from agent_intercom.host.safekeeping import connection_name, connection_number

MEMORY_NAME: Final = "memory"


def adopt(
    stored: dict[str, int],
    notifier: Notifier,
    journal: Journal,
    restored: Callable[[bytes], AnyEngine],
    foremost: int = 0,
) -> tuple[StateFile, recovery.Recovered[AnyEngine] | None, set[int]]:
    """The memory file to go on with, what it says (None: begin afresh), and the connections that are in doubt.

    Takes the file out of `stored`; a new one is made and stored where there is none that can be used. See
    `recovery.recover` for `restored` and `foremost`.
    """
    tape = _mapped(stored.pop(MEMORY_NAME, None), notifier, journal)
    if tape is None:
        tape = StateFile.create()
        notifier.store(MEMORY_NAME, tape.fileno(), poll=False)
        return tape, None, set()
    try:
        loaded = tape.load()
        if loaded.snapshot is None:
            raise ValueError("no snapshot")
        records = [recovery.Input(*record) for record in loaded.records]
        recovered = recovery.recover(__version__, loaded.snapshot, records, tape.sent, restored, foremost)
    except (HostError, ValueError) as error:
        journal.emit(Event.MEMORY_FILE_REFUSED, code=getattr(error, "code", "MEMORY_VERSION"))
        for number in tape.claimed():
            tape.release(number)
        tape.settle()
        return tape, None, set()
    doubtful = {number for number in (loaded.reading, loaded.writing) if number is not None}
    return tape, recovered, doubtful | set(recovered.diverged)


def _mapped(fd: int | None, notifier: Notifier, journal: Journal) -> StateFile | None:
    if fd is None:
        return None
    try:
        return StateFile.adopt(fd)
    except HostError as error:
        # Or the next broker would be handed both files under one name, and could take up either.
        notifier.remove(MEMORY_NAME)
        os.close(fd)
        journal.emit(Event.MEMORY_FILE_REFUSED, code=error.code)
        return None


def connections(stored: dict[str, int]) -> dict[int, int]:
    """Take the stored connections out of `stored`, by number."""
    found = {}
    for name in list(stored):
        number = connection_number(name)
        if number is not None:
            found[number] = stored.pop(name)
    return found


def discard(unknown: Iterable[tuple[str, int]], notifier: Notifier, journal: Journal) -> None:
    """Remove descriptors that nobody knows from the store: kept, they would count against its size for ever."""
    count = 0
    for name, fd in unknown:
        notifier.remove(name)
        os.close(fd)
        count += 1
    if count:
        journal.emit(Event.DESCRIPTOR_UNKNOWN, count=count)


def hang_up(descriptors: Mapping[int, int], notifier: Notifier) -> None:
    """End the connections of a predecessor that nobody can go on with."""
    for number, fd in descriptors.items():
        notifier.remove(connection_name(number))
        with socket.socket(fileno=fd) as sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
