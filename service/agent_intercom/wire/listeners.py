# SPDX-License-Identifier: Apache-2.0
"""Accepting: listening sockets on the reactor's epoll, and what to do when no descriptor is free."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable
from typing import Final

_ACCEPTS_PER_WAKE: Final = 64
_RETRY_S: Final = 0.1
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


class Listeners:
    """The listening sockets of one reactor.

    `welcome(sock, origin)` is given each accepted socket, non-blocking. When accept(2) finds no descriptor, the peers
    stay in the listener's queue, the one place where they can wait: the listeners rest until a descriptor is freed
    (`freed`) or 100 ms have passed, and `short(active)` is told when that begins and when accepting works again.
    `run_batch` runs the retries.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        epoll: select.epoll,
        run_batch: Callable[[Callable[[], None]], None],
        welcome: Callable[[socket.socket, str], None],
        short: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._epoll = epoll
        self._run_batch = run_batch
        self._welcome = welcome
        self._tell_short = short
        self._sockets: dict[int, tuple[socket.socket, str]] = {}
        self._stopped: list[socket.socket] = []
        self._resting = False
        self._held = False
        self._short = False
        self._retry_handle: asyncio.Handle | None = None

    def __contains__(self, fd: int) -> bool:
        return fd in self._sockets

    def add(self, sock: socket.socket, origin: str) -> None:
        """Accept from `sock`."""
        sock.setblocking(False)
        self._sockets[sock.fileno()] = (sock, origin)
        if not self._resting:
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def accept(self, fd: int) -> None:
        """Accept what waits on a listener, up to a bound."""
        for _ in range(_ACCEPTS_PER_WAKE):
            # `welcome` may have closed everything.
            if fd not in self._sockets:
                return
            sock, origin = self._sockets[fd]
            try:
                accepted, _address = sock.accept()
            except BlockingIOError:
                self._set_short(False)
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._failed(fd, error)
                return
            self._set_short(False)
            accepted.setblocking(False)
            self._welcome(accepted, origin)

    def freed(self) -> None:
        """A descriptor was closed: try again soon if peers are waiting for one."""
        if (self._short or self._resting) and not self._held:
            self._schedule(0)

    def idle(self) -> bool:
        """Whether no peer waits in any queue."""
        return not _readable(*self._sockets)

    def hold(self, held: bool) -> None:
        """Accept nobody while `held`; who connects waits in the queue."""
        self._held = held
        if not held:
            self._schedule(0)
        elif not self._resting:
            self._resting = True
            for fd in self._sockets:
                self._epoll.unregister(fd)

    def stop(self) -> None:
        """Accept nobody from here on; who connects waits in the queue. The sockets stay open."""
        if self._retry_handle is not None:
            self._retry_handle.cancel()
            self._retry_handle = None
        if not self._resting:
            for fd in self._sockets:
                self._epoll.unregister(fd)
        self._stopped.extend(sock for sock, _ in self._sockets.values())
        self._sockets.clear()
        self._resting = self._short = False

    def close(self) -> None:
        """Close this process's copies of the listening sockets."""
        self.stop()
        for sock in self._stopped:
            sock.close()
        self._stopped.clear()

    def _failed(self, fd: int, error: OSError) -> None:
        starved = error.errno in _NO_DESCRIPTORS
        # accept(2) looks for a descriptor before it looks for a peer.
        if starved and not _readable(fd):
            return
        if not self._resting:
            self._resting = True
            for listener in self._sockets:
                self._epoll.unregister(listener)
        self._schedule(_RETRY_S)
        if starved:
            self._set_short(True)

    def _set_short(self, short: bool) -> None:
        if short != self._short:
            self._short = short
            self._tell_short(short)

    def _schedule(self, delay: float) -> None:
        if self._retry_handle is not None:
            self._retry_handle.cancel()
        self._retry_handle = self._loop.call_later(delay, self._retry)

    def _retry(self) -> None:
        self._retry_handle = None
        self._run_batch(self._accept_all)

    def _accept_all(self) -> None:
        if self._held:
            return
        if self._resting:
            self._resting = False
            for fd in self._sockets:
                self._epoll.register(fd, select.EPOLLIN)
        for fd in list(self._sockets):
            if not self._resting:
                self.accept(fd)


def _readable(*fds: int) -> bool:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
