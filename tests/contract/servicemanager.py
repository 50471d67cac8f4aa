# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a service manager, as far as a broker sees it: its socket, its descriptor store, its restarts.

It holds the listening socket, hands it over as sd_listen_fds(3) says, keeps what is stored by sd_notify(3) and starts
the broker again when that was killed. Notifications of a broker that is dead are dealt with before its end is, as
systemd does it; a stored connection is dropped when its peer hangs up. One thread, one selector, which others may use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tests.contract.peer import HANG

NAME: Final = "run"
STORE_MAX: Final = 128
ROOT: Final = Path(__file__).resolve().parents[2]
_HIGH: Final = 300
"""Where descriptors go before they are put in their places: no process here has as many."""


class Loop:
    """Callbacks by descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, ready: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call `ready` when `fd` is; with no `events`, when it was hung up."""
        self._epoll.register(fd, events)
        self._ready[fd] = ready

    def unwatch(self, fd: int) -> None:
        """No more of that; before the descriptor is closed."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def turn(self, wait: float = HANG) -> bool:
        """Wait for something and deal with it; False when nothing came."""
        events = self._epoll.poll(wait)
        for fd, _ in events:
            # An earlier callback of this turn may have let it go.
            if fd in self._ready:
                self._ready[fd]()
        return bool(events)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Turn until `condition` is true."""
        while not condition():
            self.step(what)

    def step(self, what: str) -> None:
        """A turn; it fails where nothing moves any more."""
        assert self.turn(), f"nothing moves any more, and never {what}"

    def close(self) -> None:
        self._epoll.close()


class Starter(Protocol):
    """Makes broker processes. One at a time; `ended` is called with its wait status."""

    def start(self, descriptors: Sequence[tuple[str, int]], extra: Mapping[str, Any]) -> int:
        """Start a broker that is handed `descriptors`; its process id."""
        ...


class Program:
    """The broker as systemd starts it: a new process with an environment of its own."""

    def __init__(
        self, loop: Loop, environment: Mapping[str, str], unit: str, errors: Path, ended: Callable[[int], None]
    ) -> None:
        self._loop = loop
        self._environment = dict(environment)
        self._unit = unit
        self._errors = str(errors)
        self._ended = ended

    def start(self, descriptors: Sequence[tuple[str, int]], extra: Mapping[str, Any]) -> int:
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for _, fd in descriptors]
        names = ":".join(name for name, _ in descriptors)
        environment = {**self._environment, "LISTEN_FDS": str(len(moved)), "LISTEN_FDNAMES": names}
        actions: list[Any] = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, self._errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_DUP2, fd, 3 + at) for at, fd in enumerate(moved)),
        ]
        line = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh"]
        line += [sys.executable, "-m", "agent_intercom.orchestration", self._unit]
        try:
            pid = os.posix_spawn("/bin/sh", line, environment, file_actions=actions)
        finally:
            for fd in moved:
                os.close(fd)
        watched = os.pidfd_open(pid)

        def gone() -> None:
            self._loop.unwatch(watched)
            os.close(watched)
            self._ended(os.waitpid(pid, 0)[1])

        self._loop.watch(watched, gone)
        return pid


class Nursery:
    """Brokers forked off one process that has all modules already, and that makes faults as it is told."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(HANG)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.faultybroker"],
                stdin=theirs.fileno(),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "service"), str(ROOT)])},
            )
        self._loop: Loop | None = None
        self._environment: dict[str, str] = {}
        self._order: dict[str, Any] = {}

    def attach(
        self, loop: Loop, environment: Mapping[str, str], unit: str, errors: Path, ended: Callable[[int], None]
    ) -> Nursery:
        """Serve another test. No broker of an earlier one is left."""
        self._loop = loop
        self._environment = dict(environment)
        self._order = {"unit": unit, "errors": str(errors)}
        self._ended = ended
        return self

    def start(self, descriptors: Sequence[tuple[str, int]], extra: Mapping[str, Any]) -> int:
        assert self._loop is not None
        names = [name for name, _ in descriptors]
        order = {**self._order, "names": names, "environment": self._environment, **extra}
        socket.send_fds(self._ours, [json.dumps(order).encode()], [fd for _, fd in descriptors])
        pid = int(self._ours.recv(64))
        self._loop.watch(self._ours.fileno(), self._gone)
        return pid

    def _gone(self) -> None:
        assert self._loop is not None
        self._loop.unwatch(self._ours.fileno())
        self._ended(int(self._ours.recv(64)))

    def close(self) -> None:
        self._ours.close()
        self._process.wait(HANG)


class ServiceManager:
    """One socket unit and its service. `orders` has what each start is told besides; the last one is for the rest.

    `keeps` says whether what is stored survives the end of a process; `status` is the last status line.
    """

    def __init__(self, loop: Loop, directory: Path, address: Path) -> None:
        self.loop = loop
        self.keeps = True
        self.restarts = True
        self.orders: list[Mapping[str, Any]] = []
        self.stored: dict[str, int] = {}
        self.status = ""
        self.readies = 0
        self.starts = 0
        self.ends: list[int] = []
        self.pid = 0
        self.starter: Starter | None = None
        self.on_end: Callable[[], object] = lambda: None
        """Called between the end of a process and the start of the next."""
        self._watched: dict[int, int] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(address))
        self.listener.listen(128)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.notify_path = str(directory / "notify")
        self._notified.bind(self.notify_path)
        loop.watch(self._notified.fileno(), self._notice)

    # The service.

    def start(self) -> None:
        """Start the service with what is stored."""
        assert self.starter is not None and not self.pid
        order = self.orders[min(self.starts, len(self.orders) - 1)] if self.orders else {}
        self.starts += 1
        self.pid = self.starter.start([(NAME, self.listener.fileno()), *self.stored.items()], order)

    def ended(self, status: int) -> None:
        """The service's process has ended, with this wait status."""
        self._notice()
        self.pid = 0
        self.ends.append(status)
        self.on_end()
        if not self.keeps:
            self.discard()
        if self.restarts and status != 0:
            self.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the broker."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """End everything."""
        self.restarts = False
        self.on_end = lambda: None
        self.kill()
        self.loop.until(lambda: not self.pid, "has the broker ended")
        self.discard()
        self.loop.unwatch(self._notified.fileno())
        self._notified.close()
        self.listener.close()

    # The store.

    def discard(self) -> None:
        """Let everything go that is stored."""
        for name in list(self.stored):
            self._remove(name)

    def _remove(self, name: str) -> None:
        fd = self.stored.pop(name, None)
        if fd is not None:
            self.loop.unwatch(fd)
            os.close(fd)

    def _keep(self, name: str, fd: int, watched: bool) -> None:
        if len(self.stored) >= STORE_MAX or name in self.stored:
            os.close(fd)
            return
        self.stored[name] = fd
        if watched:
            self.loop.watch(fd, lambda: self._remove(name), 0)

    def _notice(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._notified, 65536, 16)
            except BlockingIOError:
                return
            self._obey(dict(line.split("=", 1) for line in data.decode().splitlines()), fds)

    def _obey(self, message: dict[str, str], fds: list[int]) -> None:
        if "FDSTORE" in message:
            for fd in fds:
                self._keep(message["FDNAME"], fd, message.get("FDPOLL") != "0")
            fds = []
        if "FDSTOREREMOVE" in message:
            self._remove(message["FDNAME"])
        self.status = message.get("STATUS", self.status)
        self.readies += "READY" in message
        # Also what BARRIER=1 waits for.
        for fd in fds:
            os.close(fd)
