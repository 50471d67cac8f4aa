# SPDX-License-Identifier: Apache-2.0
"""The open connections of a server, and what epoll is asked about them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Final

from agent_intercom.wire.connection import Connection
from agent_intercom.wire.peer import PeerCredentials, peer_pidfd

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT


class Pool:
    """Connections by number and by descriptor, and the descriptors of watched peers, on one epoll.

    `dirty` are the connections that marked themselves for the next flush.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self.by_number: dict[int, Connection] = {}
        self.by_fd: dict[int, Connection] = {}
        self.by_pidfd: dict[int, Connection] = {}
        self.dirty: list[Connection] = []
        self._epoll = epoll

    def add(self, sock: socket.socket, origin: str, number: int, peer: PeerCredentials) -> Connection:
        """A new connection; `arm` makes epoll look at it."""
        sock.setblocking(False)
        connection = Connection(number, origin, peer, sock, self.dirty.append)
        self.by_fd[connection.fd] = connection
        self.by_number[number] = connection
        return connection

    def arm(self, connection: Connection) -> None:
        """Make epoll's interest what the connection's state asks for.

        A socket without interest is taken out: epoll would report a hang-up on it again and again.
        """
        if connection.fd < 0:
            return
        wanted = (_IN if connection.reading or connection.lingering else 0) | (_OUT if connection.blocked else 0)
        if wanted == connection.mask:
            return
        if not connection.mask:
            self._epoll.register(connection.fd, wanted)
        elif wanted:
            self._epoll.modify(connection.fd, wanted)
        else:
            self._epoll.unregister(connection.fd)
        connection.mask = wanted

    def watch(self, connection: Connection) -> bool:
        """Have epoll report the end of the process that connected; False where the kernel cannot."""
        pidfd = peer_pidfd(connection.sock)
        if pidfd is None:
            return False
        connection.pidfd = pidfd
        self.by_pidfd[pidfd] = connection
        self._epoll.register(pidfd, _IN)
        return True

    def unwatch(self, connection: Connection) -> None:
        """Undo `watch`."""
        if connection.pidfd >= 0:
            self._epoll.unregister(connection.pidfd)
            del self.by_pidfd[connection.pidfd]
            os.close(connection.pidfd)
            connection.pidfd = -1

    def close(self, connection: Connection, *, shut: bool) -> None:
        """Close the socket and forget the connection; with `shut` the peer is hung up too.

        Closing alone does neither take a socket out of the epoll nor hang up the peer while the descriptor store has a
        copy (epoll(7), "Questions and answers").
        """
        if connection.mask:
            self._epoll.unregister(connection.fd)
            connection.mask = 0
        self.unwatch(connection)
        if shut:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.sock.close()
        del self.by_fd[connection.fd]
        del self.by_number[connection.number]
        connection.fd = -1
        connection.plain = False
        connection.reading = connection.blocked = connection.lingering = False
        connection.discard_queue()
