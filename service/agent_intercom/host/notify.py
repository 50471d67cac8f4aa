# SPDX-License-Identifier: Apache-2.0
"""Telling the service manager: readiness, status, watchdog, and descriptors to keep (sd_notify(3)).

Nothing here may stop or stall a broker, and both libraries could: sdnotify's socket blocks, and so does the one that
systemd-python opens for a message with descriptors, whenever the manager's queue is full (a `daemon-reload` is enough).
So plain state goes through sdnotify's socket made non-blocking, and a message with descriptors is handed to
systemd-python only while poll(2) says of that same, connected socket that the manager's queue has room. (Another
sender can take the last place in between; then the call waits for the manager to read one datagram.) What finds no room
waits here in order, with duplicates of its descriptors, until the queue drains; a later status replaces an earlier one
that is still waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from agent_intercom.host.errors import HostError

BARRIER_TIMEOUT: Final = 5.0
"""Seconds that `barrier` waits by default; the manager normally answers within a millisecond."""

_WAITING_MAX: Final = 4096
_REPLACEABLE: Final = ("STATUS=", "WATCHDOG=")


class _Message(NamedTuple):
    state: str
    fds: tuple[int, ...]


class Notifier:
    """The line to the manager. Without `NOTIFY_SOCKET` every call does nothing and `active` is False.

    `environ` is the process's own environment; both libraries read that and nothing else.

    `lost` counts messages that could not be delivered. Raises `HostError` `MODULE_MISSING` when there is a manager and
    a library to talk to it is not installed, `NOTIFY_UNREACHABLE` when its socket refuses us: a service that can
    never become ready had better say so.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.lost = 0
        self.watchdog_interval = _watchdog_interval(environ)
        self._waiting: deque[_Message] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched = False
        self._line: Any = None
        self._socket: socket.socket | None = None
        if environ.get("NOTIFY_SOCKET"):
            self._connect()

    def _connect(self) -> None:
        try:
            import sdnotify
            from systemd import daemon
        except ImportError as error:
            raise HostError(
                "MODULE_MISSING",
                "started by systemd, but a Python module is missing: install python3-systemd and python3-sdnotify"
                " (PyPI: systemd-python and sdnotify)",
                error.name,
            ) from error
        self._daemon = daemon
        try:
            self._line = sdnotify.SystemdNotifier(debug=True)
        except OSError as error:
            raise HostError("NOTIFY_UNREACHABLE", "NOTIFY_SOCKET cannot be reached", "NOTIFY_SOCKET") from error
        self._socket = self._line.socket
        self._socket.setblocking(False)
        self._room = select.poll()
        self._room.register(self._socket, select.POLLOUT)

    @property
    def active(self) -> bool:
        """Whether a manager listens."""
        return self._socket is not None

    @property
    def waiting(self) -> int:
        """Messages that wait for room in the manager's queue."""
        return len(self._waiting)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let `loop` deliver what has to wait. Without a loop it waits for the next call."""
        self._loop = loop
        self.flush()

    def ready(self, status: str) -> None:
        """Start-up is complete; `status` is the first status line."""
        self._post(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`. Never peer text."""
        self._post(f"STATUS={_line(text)}")

    def stopping(self) -> None:
        """Nothing is served from here on; a later `ready` is ignored by the manager."""
        self._post("STOPPING=1")

    def watchdog(self) -> None:
        """Prove life once."""
        self._post("WATCHDOG=1")

    def store(self, name: str, fd: int, *, poll: bool = True) -> None:
        """Have the manager keep a duplicate of `fd` under `name`, for the next process of this unit.

        `poll=False` for what poll(2) makes no sense of (a memory file): the manager then keeps it until told otherwise,
        instead of dropping it on a hang-up.
        """
        self._post(f"FDSTORE=1\nFDNAME={name}" + ("" if poll else "\nFDPOLL=0"), (fd,))

    def remove(self, name: str) -> None:
        """Have the manager close every stored descriptor of that name."""
        self._post(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def barrier(self, loop: asyncio.AbstractEventLoop, timeout: float = BARRIER_TIMEOUT) -> asyncio.Future[bool]:
        """A future that is done when the manager has dealt with everything that was sent before.

        True when it has (or there is no manager), False when it did not say so within `timeout` seconds; it has no
        exception. Cancelling it is fine.
        """
        done: asyncio.Future[bool] = loop.create_future()
        if not self.active:
            done.set_result(True)
            return done
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self.lost += 1
            done.set_result(False)
            return done

        def settle(answer: bool) -> None:
            if not done.done():
                done.set_result(answer)

        def clear(_: asyncio.Future[bool]) -> None:
            timer.cancel()
            loop.remove_reader(ours)
            os.close(ours)

        self.attach(loop)
        loop.add_reader(ours, settle, True)
        timer = loop.call_later(timeout, settle, False)
        done.add_done_callback(clear)
        lost = self.lost
        self._post("BARRIER=1", (theirs,))
        os.close(theirs)
        if self.lost != lost:
            settle(False)
        return done

    def start_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prove life from `loop` itself at every `watchdog_interval`, so that a loop that hangs is noticed."""
        self.stop_watchdog()
        if self.active and self.watchdog_interval is not None:
            self._loop = loop
            self._beat(loop, self.watchdog_interval)

    def stop_watchdog(self) -> None:
        """End the proofs of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self.watchdog()
        self._timer = loop.call_later(interval, self._beat, loop, interval)

    def close(self) -> None:
        """End the watchdog, give up what waits (counted as lost) and close the socket."""
        self.stop_watchdog()
        self._unwatch()
        self.lost += len(self._waiting)
        while self._waiting:
            _close(self._waiting.popleft().fds)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def flush(self) -> None:
        """Deliver what waits, as far as there is room."""
        while self._waiting and self._send(self._waiting[0]):
            _close(self._waiting.popleft().fds)
        if not self._waiting:
            self._unwatch()
        elif self._loop is not None and not self._watched and self._socket is not None:
            self._loop.add_writer(self._socket, self.flush)
            self._watched = True

    def _unwatch(self) -> None:
        if self._watched and self._loop is not None and self._socket is not None:
            self._loop.remove_writer(self._socket)
        self._watched = False

    def _post(self, state: str, fds: tuple[int, ...] = ()) -> None:
        if self._socket is None:
            return
        message = _Message(state, fds)
        if self._waiting or not self._send(message):
            self._wait(message)
            self.flush()

    def _wait(self, message: _Message) -> None:
        if message.state.startswith(_REPLACEABLE):
            key = message.state[: message.state.index("=") + 1]
            kept = [other for other in self._waiting if not other.state.startswith(key)]
            self._waiting = deque(kept)
        if len(self._waiting) >= _WAITING_MAX:
            self.lost += 1
            return
        copies: list[int] = []
        try:
            # The caller may close its descriptor, and the number may come to mean another file, before this is sent.
            copies.extend(os.dup(fd) for fd in message.fds)
        except OSError:
            self.lost += 1
            return
        self._waiting.append(_Message(message.state, tuple(copies)))

    def _send(self, message: _Message) -> bool:
        """Deliver one message; False when there is no room now. A refusal counts as delivered, and as lost."""
        try:
            if not message.fds:
                self._line.notify(message.state)
            elif not any(events & select.POLLOUT for _, events in self._room.poll(0)):
                return False
            elif not self._daemon.notify(message.state, fds=list(message.fds)):
                self.lost += 1
        except BlockingIOError:
            return False
        except OSError:
            self.lost += 1
        return True


def _line(text: str) -> str:
    # sdnotify encodes as Latin-1; a line break would begin another assignment.
    return text.encode("ascii", "replace").decode("ascii").replace("\n", " ")


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Half of `WATCHDOG_USEC` in seconds, or None when no watchdog is asked of this process."""
    period = environ.get("WATCHDOG_USEC", "")
    if not period.isdecimal() or int(period) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(period) / 2_000_000
