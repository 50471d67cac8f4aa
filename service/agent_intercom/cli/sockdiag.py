# SPDX-License-Identifier: Apache-2.0
"""Backlog and unread bytes of the broker's sockets, by the kernel's socket diagnosis (sock_diag(7)).

The broker's end of a connection carries the path of its listener; the kernel names the inode of the other end, and
/proc tells which process has that inode open.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

_LISTEN: Final = 10
_SHOW_NAME, _SHOW_PEER, _SHOW_QUEUES = 0x01, 0x04, 0x10


class DiagnosisUnavailable(Exception):
    """The kernel or the library does not tell. The text is one line."""


class Listener(NamedTuple):
    """`waiting` connections out of `limit` are not accepted yet."""

    waiting: int
    limit: int


class Connection(NamedTuple):
    """One client. `unread` bytes wait in the kernel for the client to read, `unsent` for the broker.

    `pid` and `command` are the client's where /proc tells.
    """

    unread: int
    unsent: int
    inode: int
    pid: int | None
    command: str


class Sockets(NamedTuple):
    listeners: list[Listener]
    connections: list[Connection]


def look(addresses: list[str]) -> Sockets:
    """Everything at the listeners `addresses`. Raises DiagnosisUnavailable."""
    table = {int(entry["udiag_ino"]): entry for entry in _dump()}
    wanted = set(addresses)
    listeners, pairs = [], []
    for entry in table.values():
        if _text(_attribute(entry, "UNIX_DIAG_NAME")) not in wanted:
            continue
        queues = _queues(entry)
        if entry["udiag_state"] == _LISTEN:
            listeners.append(Listener(*queues))
            continue
        peer = _attribute(entry, "UNIX_DIAG_PEER")
        if isinstance(peer, int) and peer:
            pairs.append((peer, queues[0]))
    owners = _owners({peer for peer, _ in pairs})
    connections = []
    for peer, unsent in pairs:
        unread = _queues(table[peer])[0] if peer in table else 0
        pid = owners.get(peer)
        connections.append(Connection(unread, unsent, peer, pid, _command(pid)))
    return Sockets(listeners, connections)


def _dump() -> list[Any]:
    try:
        from pyroute2 import DiagSocket, NetlinkError
    except ImportError as error:
        raise DiagnosisUnavailable("pyroute2 is not installed") from error
    try:
        with closing(DiagSocket()) as diagnosis:
            diagnosis.bind()
            show = _SHOW_NAME | _SHOW_PEER | _SHOW_QUEUES
            return list(diagnosis.get_sock_stats(family=socket.AF_UNIX, states=0xFFFFFFFF, show=show))
    except (OSError, NetlinkError) as error:
        raise DiagnosisUnavailable("the kernel does not tell about sockets") from error


def _attribute(entry: Any, name: str) -> Any:
    return entry.get_attr(name)


def _text(name: Any) -> str:
    if isinstance(name, bytes):
        return name.rstrip(b"\0").decode("utf-8", "replace")
    return str(name).rstrip("\0")


def _queues(entry: Any) -> tuple[int, int]:
    queues = _attribute(entry, "UNIX_DIAG_RQLEN")
    return (int(queues["udiag_rqueue"]), int(queues["udiag_wqueue"])) if queues else (0, 0)


def _owners(inodes: set[int]) -> dict[int, int]:
    """Which process has which socket open, as far as this user may look (proc_pid_fd(5))."""
    found: dict[int, int] = {}
    for pid in _pids():
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if target.startswith("socket:[") and (inode := int(target[8:-1])) in inodes:
                found[inode] = pid
    return found


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _command(pid: int | None) -> str:
    if pid is None:
        return ""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""
