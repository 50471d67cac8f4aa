# SPDX-License-Identifier: Apache-2.0
"""Brokers that are killed at a numbered point of their work.

Run as a program it is the process that brokers are forked off: an order comes over its standard input with the
descriptors that a service manager would hand over. In the child the seams between the broker and the outside are made
to count: `point(kind)` is one that SIGKILL may strike at, and `fault` in the order is the number of the one where it
does, or its kind, or `kind#n` for the n-th of that kind. What it struck at is left in the file `trace`.

A point stands for everything that the outside cannot tell from it. For an input: its bytes are taken without a record
(`taken`), they are recorded (`logged`), the rules have dealt with it (`decided`), its rows are committed (`committed`).
For a frame: the kernel has it without a record (`sent`), and with one (`counted`). What is not done yet is the point
before: nothing is committed where the rules have decided, nothing is stored where all is committed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent_intercom.host.journal import Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.safekeeping import Safekeeping
from agent_intercom.orchestration import engine, launch, store

_HIGH: Final = 300
_PR_SET_PDEATHSIG: Final = 1
SAME: Final = "same"
"""As a fault: the next point of the kind that was struck at before."""

UNRECORDED: Final = ("taken", "sent")
"""Kinds of points at which one system call has no record: its connection cannot be continued."""


class Points:
    """The points of one process."""

    def __init__(self, fault: int | str | None, trace: str, log: str | None) -> None:
        self.fault = Path(trace).read_text().splitlines()[-1] if fault == SAME else fault
        self.trace = trace
        self.log = log
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.muted = False

    def __call__(self, kind: str) -> None:
        """Something has just come to be so."""
        if self.muted:
            return
        self.count += 1
        if self.log:
            _write(self.log, f"{self.count} {kind}\n")
        self.kinds[kind] += 1
        if self.fault in {self.count, kind, f"{kind}#{self.kinds[kind]}"}:
            _write(self.trace, f"{kind}\n")
            os.kill(os.getpid(), signal.SIGKILL)


def _write(name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, text.encode())
    os.close(fd)


def install(point: Points) -> None:
    """Have the broker of this process pass its points."""
    _memory(point)
    _snapshots(point)

    def after(owner: type, name: str, kind: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def passing(*arguments: Any, **more: Any) -> Any:
            result = function(*arguments, **more)
            point(kind)
            return result

        setattr(owner, name, passing)

    for name in ("received", "opened", "closed", "tick", "started"):
        after(engine.Engine, name, "decided")
    _replay(point)
    after(store.Store, "apply", "committed")
    after(Notifier, "store", "stored")
    after(Notifier, "remove", "removed")
    after(Notifier, "ready", "ready")
    after(Safekeeping, "found", "found")
    after(StateFile, "settle", "settled")
    after(StateFile, "load", "loaded")
    after(StateFile, "claim", "claimed")
    after(StateFile, "release", "released")
    after(launch.Place, "forget_startup", "forgotten")


def _replay(point: Points) -> None:
    """What is only done again is no point: nobody outside can tell one from the next."""
    replay = engine.Engine.replay

    def replayed(*arguments: Any) -> None:
        point.muted = True
        replay(*arguments)
        point.muted = False

    setattr(engine.Engine, "replay", replayed)  # noqa: B010


def _memory(point: Points) -> None:
    """Points around the system calls of connections, and after their records."""
    receive, send, record, end_send = StateFile.receive, StateFile.send, StateFile.record, StateFile.end_send

    def taking(call: Callable[..., int], kind: str) -> Callable[..., int]:
        def take(*arguments: Any) -> int:
            size = call(*arguments)
            if size:
                point(kind)
            return size

        return take

    def received(self: StateFile, number: int, recv_into: Callable[..., int], now: Any) -> memoryview:
        data = receive(self, number, taking(recv_into, "taken"), now)
        if data:
            point("logged")
        return data

    def sent(self: StateFile, number: int, call: Callable[..., int], frame: bytes, total: int) -> int:
        taken = send(self, number, taking(call, "sent"), frame, total)
        point("counted")
        return taken

    def ended(self: StateFile, number: int, total: int) -> None:
        point("sent")
        end_send(self, number, total)
        point("counted")

    def recorded(self: StateFile, *arguments: Any) -> None:
        record(self, *arguments)
        point("logged")

    for name, function in (("receive", received), ("send", sent), ("end_send", ended), ("record", recorded)):
        setattr(StateFile, name, function)


class _Pointed:
    """The view that a snapshot is written through."""

    def __init__(self, view: memoryview, point: Points) -> None:
        self._view = view
        self._point = point

    def __getitem__(self, at: Any) -> Any:
        return self._view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice) and at.stop - at.start > 1:
            half = (at.start + at.stop) // 2
            self._view[at.start : half] = value[: half - at.start]
            self._point("half-written")
        self._view[at] = value
        self._point("written")


def _snapshots(point: Points) -> None:
    """A point after each of a snapshot's stores into the memory file, and one within the longest."""
    snapshot = StateFile.snapshot

    def taken(self: Any, payload: bytes) -> None:
        base, words = self._base, self._words
        self._base, self._words = _Pointed(base, point), _Pointed(words, point)
        try:
            snapshot(self, payload)
        finally:
            self._base, self._words = base, words

    setattr(StateFile, "snapshot", taken)  # noqa: B010


def _patch_speed() -> None:
    """SIGKILL loses nothing that was written: what is for the loss of power only costs time here. So does patience."""
    connect = store._connect

    def quick(path: str, vfs: str | None) -> Any:
        db = connect(path, vfs)
        db.execute("PRAGMA synchronous = OFF")
        return db

    store._connect = quick
    store.BUSY_TIMEOUT_MS = 20
    for name, module in list(sys.modules.items()):
        for delay, seconds in (("_STATUS_DELAY", 0.01), ("_RETRY_DELAY", 0.05)):
            if name.startswith("agent_intercom.") and hasattr(module, delay):
                setattr(module, delay, seconds)


def _failing(flag: str, tries: str) -> None:
    """While the file `flag` is there, every commit fails with the code that is in it, and is counted in `tries`."""
    apply = store.Store.apply

    def failing(self: store.Store, changes: Any) -> None:
        if os.path.exists(flag):
            _write(tries, "x")
            raise store.StoreError(Path(flag).read_text())
        apply(self, changes)

    setattr(store.Store, "apply", failing)  # noqa: B010


def _torn(point: Points) -> None:
    """A point after the rows of a transaction were written, before it is committed."""
    apply = store._apply

    def applied(db: Any, changes: Any) -> None:
        apply(db, changes)
        point("applied")

    store._apply = applied


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(order: dict[str, Any], descriptors: list[int]) -> int:
    """Be the broker that was ordered."""
    _die_with_parent()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in descriptors]
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.dup2(nothing, 0)
    os.closerange(3, _HIGH)
    for at, fd in enumerate(moved):
        os.dup2(fd, 3 + at)
        os.close(fd)
    names = ":".join(order["names"])
    listening = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(moved)), "LISTEN_FDNAMES": names}
    os.environ.clear()
    os.environ.update({**order["environment"], **listening})
    if order.get("journal"):
        defaults = Journal.__init__.__kwdefaults__
        assert defaults is not None
        defaults["path"] = order["journal"]
    _patch_speed()
    if "flag" in order:
        _failing(order["flag"], order["tries"])
    if "trace" in order:
        point = Points(order.get("fault"), order["trace"], order.get("log"))
        install(point)
        if order.get("torn"):
            _torn(point)
    return launch.main([order["unit"]])


def main() -> None:
    """Fork brokers off, one at a time, until there is nobody to order them."""
    _die_with_parent()
    # What the broker imports late.
    import sdnotify  # noqa: F401
    from systemd import daemon  # noqa: F401

    with socket.socket(fileno=0) as channel:
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, 65536, 250)
            if not data:
                return
            pid = os.fork()
            if not pid:
                status = 70
                try:
                    status = _child(json.loads(data), descriptors)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(status)
            for fd in descriptors:
                os.close(fd)
            channel.send(str(pid).encode())
            channel.send(str(os.waitpid(pid, 0)[1]).encode())


if __name__ == "__main__":
    main()
