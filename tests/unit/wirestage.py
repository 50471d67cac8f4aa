# SPDX-License-Identifier: Apache-2.0
"""A socket server on a stage: a handler and a tape that note everything, and clients that read when told to."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection, NullTape, ReactorLimits
from agent_intercom.wire.reactor import Reactor

GUARD_S = 30
MIB = 1_048_576
# A few hundred KiB fit into a Unix socket; this is far more.
BIG = 4 * MIB


class Recorder:
    """A handler that notes every call; `on` holds what a test wants to happen inside one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.received_bytes: dict[int, bytearray] = {}
        self.by_number: dict[int, Connection] = {}
        self.batches = 0
        self.on: dict[str, Callable[..., None]] = {}
        self._changed = asyncio.Event()

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *(arg.number if isinstance(arg, Connection) else arg for arg in args)))
        self._changed.set()
        if name in self.on:
            self.on[name](*args)

    def accepted(self, connection: Connection, now: Now) -> None:
        self.by_number[connection.number] = connection
        self._note("accepted", connection)

    def received(self, connection: Connection, data: memoryview, now: Now) -> None:
        self.received_bytes.setdefault(connection.number, bytearray()).extend(data)
        self._note("received", connection, bytes(data))

    def lost(self, connection: Connection, reason: str, now: Now) -> None:
        assert connection.closed or (reason == "eof" and connection.ending)
        self._note("lost", connection, reason)

    def congested(self, connection: Connection, now: Now) -> None:
        self._note("congested", connection)

    def drained(self, connection: Connection, now: Now) -> None:
        self._note("drained", connection)

    def refused(self, origin: str, uid: int | None) -> None:
        self._note("refused", origin, uid)

    def out_of_descriptors(self, active: bool) -> None:
        self._note("out_of_descriptors", active)

    def batch_done(self, now: Now) -> None:
        self.batches += 1
        self._changed.set()
        if "batch_done" in self.on:
            self.on["batch_done"](now)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def call(self, name: str, *args: Any) -> None:
        await self.until(lambda: (name, *args) in self.calls)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class SpyTape(NullTape):
    """Notes what a memory file would have to know."""

    __slots__ = ("notes",)

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, ...]] = []

    def begin_receive(self, number: int) -> None:
        self.notes.append(("begin_receive", number))

    def end_receive(self, number: int, size: int, now: Now) -> memoryview:
        self.notes.append(("end_receive", number, size))
        return super().end_receive(number, size, now)

    def begin_send(self, number: int) -> None:
        self.notes.append(("begin_send", number))

    def end_send(self, number: int, total: int) -> None:
        self.notes.append(("end_send", number, total))

    def sends(self) -> list[int]:
        return [note[2] for note in self.notes if note[0] == "end_send"]


class FakeClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.mono = 1_000

    def __call__(self) -> Now:
        return Now(self.mono, 1_700_000_000_000 + self.mono)


class Stage:
    """One reactor, one listener, and clients that read only when they are told to."""

    def __init__(self, directory: str, limits: ReactorLimits | None, clock: Callable[[], Now] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.handler = Recorder()
        self.tape = SpyTape()
        extra = {} if clock is None else {"clock": clock}
        self.reactor = Reactor(self.loop, self.handler, self.tape, uid=os.getuid(), limits=limits, **extra)
        self.path = str(Path(directory, "s"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.reactor.listen(self.listener, "local")
        self.clients: list[socket.socket] = []

    def dial(self) -> socket.socket:
        """A client whose connection the reactor has not seen yet."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(self.path)
        client.setblocking(False)
        self.clients.append(client)
        return client

    async def connect(self) -> tuple[socket.socket, Connection]:
        number = self.reactor.next_number
        client = self.dial()
        await self.handler.call("accepted", number)
        return client, self.handler.by_number[number]

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Ours, for `adopt`, and the client's."""
        ours, client = socket.socketpair()
        client.setblocking(False)
        self.clients.append(client)
        return ours, client

    def push(self, connection: Connection, *frames: bytes) -> None:
        def work(_now: Now) -> None:
            for frame in frames:
                connection.queue(frame)

        self.reactor.run_batch(work)

    async def read(self, client: socket.socket, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (part := await self.loop.sock_recv(client, min(size - len(data), 1 << 20))):
            data += part
        return bytes(data)

    async def read_to_end(self, client: socket.socket) -> bytes:
        return await self.read(client, 1 << 40)

    async def idle(self) -> None:
        """Let the loop turn often enough that everything that is ready has been served."""
        for _ in range(20):
            await asyncio.sleep(0)

    def close(self) -> None:
        self.reactor.close()
        for client in self.clients:
            client.close()


def play(
    test: Callable[[Stage], Awaitable[None]],
    *,
    limits: ReactorLimits | None = None,
    clock: Callable[[], Now] | None = None,
) -> None:
    """Run `test` on a fresh stage. An exception that reached the loop's handler fails it."""

    async def main() -> None:
        unhandled: list[Exception] = []
        task = asyncio.current_task()
        assert task is not None

        def fail(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            unhandled.append(context.get("exception") or AssertionError(context["message"]))
            task.cancel()

        asyncio.get_running_loop().set_exception_handler(fail)
        with tempfile.TemporaryDirectory(prefix="aic-", dir="/tmp") as directory:
            stage = Stage(directory, limits, clock)
            try:
                async with asyncio.timeout(GUARD_S):
                    await test(stage)
            except asyncio.CancelledError:
                raise unhandled[0] from None
            finally:
                stage.close()
        assert not unhandled

    asyncio.run(main())


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes in which a lost, repeated or displaced piece shows."""
    return random.Random(seed).randbytes(size)
