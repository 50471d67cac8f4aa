# SPDX-License-Identifier: Apache-2.0
"""The socket server on real Unix sockets: batching, backpressure, ends, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection, NullTape, ReactorLimits
from agent_intercom.wire.peer import PeerCredentials, peer_pidfd
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
        assert connection.closed
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
    block = b"".join((index * 2654435761 + seed & 0xFFFFFFFF).to_bytes(4, "big") for index in range(65_521))
    return (block * (size // len(block) + 1))[:size]


def test_accept_receive_send_and_end_of_stream() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        assert (connection.number, connection.origin) == (1, "local")
        assert connection.peer == PeerCredentials(os.getpid(), os.getuid(), os.getgid())
        stage.handler.on["received"] = lambda connection, data: connection.queue(bytes(data).upper())
        client.send(b"hello")
        assert await stage.read(client, 5) == b"HELLO"
        assert (connection.sent, connection.queued) == (5, 0)
        client.close()
        await stage.handler.call("lost", 1, "eof")
        assert stage.reactor.connections == {}

    play(test)


def test_numbers_do_not_repeat() -> None:
    async def test(stage: Stage) -> None:
        stage.reactor.next_number = 40
        client, connection = await stage.connect()
        assert connection.number == 40
        client.close()
        await stage.handler.call("lost", 40, "eof")
        assert (await stage.connect())[1].number == 41

    play(test)


def test_frames_of_one_batch_leave_in_one_call() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, *(b"%03d" % index for index in range(50)))
        assert stage.tape.sends() == [150]
        assert await stage.read(client, 150) == b"".join(b"%03d" % index for index in range(50))

    play(test)


def test_nothing_leaves_before_the_batch_is_committed() -> None:
    async def test(stage: Stage) -> None:
        client, _ = await stage.connect()
        sends_at_commit: list[int] = []
        stage.handler.on["received"] = lambda connection, data: connection.queue(bytes(data))
        stage.handler.on["batch_done"] = lambda _now: sends_at_commit.append(len(stage.tape.sends()))
        client.send(b"x")
        assert await stage.read(client, 1) == b"x"
        assert sends_at_commit[0] == 0

    play(test)


def test_tape_sees_every_call_and_the_running_total() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.handler.on["received"] = lambda connection, _data: connection.queue(b"answer")
        for _ in range(2):
            client.send(b"abc")
            await stage.read(client, 6)
        client.close()
        await stage.handler.call("lost", 1, "eof")
        assert stage.tape.notes == [
            ("begin_receive", 1), ("end_receive", 1, 3), ("begin_send", 1), ("end_send", 1, 6),
            ("begin_receive", 1), ("end_receive", 1, 3), ("begin_send", 1), ("end_send", 1, 12),
            ("begin_receive", 1), ("end_receive", 1, 0),
        ]  # fmt: skip

    play(test)


def test_a_call_that_takes_nothing_leaves_the_total() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        # The socket is full before the reactor has it, so its first send takes nothing.
        ours.setblocking(False)
        filled = 0
        with pytest.raises(BlockingIOError):
            while True:
                filled += ours.send(bytes(65_536))
        connection = stage.reactor.adopt(ours, "local", 3, sent=filled)
        assert connection is not None
        stage.push(connection, b"tail")
        assert stage.tape.sends() == [filled]
        assert (connection.sent, connection.queued) == (filled, 4)
        assert await stage.read(client, filled + 4) == bytes(filled) + b"tail"
        await stage.idle()
        assert (connection.sent, connection.queued) == (filled + 4, 0)

    play(test)


def test_partial_writes_to_a_slow_reader() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        frames = [pattern(size, size) for size in (1, MIB, 7, 300_000, MIB, 5, 5, 5, MIB, 99_999)]
        stage.push(connection, *frames)
        assert 0 < connection.sent < sum(map(len, frames))
        assert connection.sent + connection.queued == sum(map(len, frames))
        received = bytearray()
        total = sum(map(len, frames))
        while len(received) < total:
            received += await stage.read(client, min(10_007, total - len(received)))
        assert bytes(received) == b"".join(frames)
        await stage.idle()
        assert (connection.sent, connection.queued) == (len(received), 0)
        # Interest in writing is over: nothing wakes the reactor any more.
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches == batches

    play(test)


def test_nothing_is_tried_while_the_peer_does_not_read() -> None:
    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        stage.push(connection, bytes(BIG))
        tries = len(stage.tape.sends())
        stage.push(connection, b"more")
        await stage.idle()
        assert len(stage.tape.sends()) == tries

    play(test)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=90), st.lists(st.integers(1, 400)))
def test_queue_keeps_every_byte_whatever_the_kernel_takes(frames: list[bytes], taken: list[int]) -> None:
    left, right = socket.socketpair()
    with left, right:
        connection = Connection(1, "local", PeerCredentials(0, 0, 0), left, lambda _connection: None)
        for frame in frames:
            connection.queue(frame)
        expected = b"".join(frames)
        out = bytearray()
        for size in [*taken, *[1 << 30] * 90]:
            if not connection.queued:
                break
            assert connection.unsent() == expected[len(out) :]
            buffers, offered = connection.gather()
            data = b"".join(buffers)
            assert 0 < len(data) == offered <= connection.queued
            out += data[:size]
            connection.advance(min(size, offered))
            assert (connection.sent, connection.queued) == (len(out), len(expected) - len(out))
        assert bytes(out) == expected


def test_congested_and_drained_are_told_once() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, bytes(BIG))
        stage.push(connection, bytes(100))
        assert stage.handler.named("congested") == [("congested", 1)]
        await stage.read(client, BIG // 2)
        assert not stage.handler.named("drained")
        await stage.read(client, BIG // 2 + 100)
        await stage.handler.call("drained", 1)
        assert connection.queued <= 1000
        stage.push(connection, bytes(BIG))
        assert stage.handler.named("congested") == [("congested", 1)] * 2
        assert len(stage.handler.named("drained")) == 1

    play(test, limits=ReactorLimits(high_water=MIB, low_water=1000))


def test_what_the_kernel_takes_at_once_is_no_congestion() -> None:
    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        stage.push(connection, bytes(10_000))
        assert not stage.handler.named("congested")

    play(test, limits=ReactorLimits(high_water=100, low_water=10))


def test_what_congestion_makes_the_handler_say_leaves_in_the_same_batch() -> None:
    async def test(stage: Stage) -> None:
        _, slow = await stage.connect()
        talker, other = await stage.connect()
        stage.handler.on["congested"] = lambda _connection: other.queue(b"wait")
        batches = stage.handler.batches
        stage.push(slow, bytes(BIG))
        assert stage.handler.batches == batches + 2
        assert talker.recv(100) == b"wait"

    play(test, limits=ReactorLimits(high_water=MIB, low_water=1000))


def test_over_the_hard_limit_the_peer_is_lost() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, bytes(BIG))
        assert stage.handler.calls[-1] == ("lost", 1, "not-reading")
        assert connection.closed
        await stage.read_to_end(client)

    play(test, limits=ReactorLimits(hard_limit=2 * MIB))


def test_a_peer_that_does_not_read_is_lost_at_the_deadline() -> None:
    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        _, other = await stage.connect()
        stage.push(connection, bytes(MIB))
        await stage.handler.call("lost", 1, "not-reading")
        assert not other.closed

    play(test, limits=ReactorLimits(write_deadline_ms=20))


def test_the_deadline_counts_from_the_last_progress() -> None:
    clock = FakeClock()

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, bytes(BIG))
        for _ in range(3):
            clock.mono += 900
            await stage.read(client, MIB)
            await stage.idle()
        assert clock.mono > 1_000 + 1_000
        assert not stage.handler.named("lost")

    play(test, limits=ReactorLimits(write_deadline_ms=1_000), clock=clock)


def test_a_server_that_was_stopped_does_not_blame_a_peer_that_read() -> None:
    clock = FakeClock()

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, bytes(MIB))
        got = 0
        with pytest.raises(BlockingIOError):
            while True:
                got += len(client.recv(1 << 20))
        clock.mono += 60_000
        # The timer is due before the loop has looked at any socket.
        stage.reactor._deadlines.fire()
        assert not stage.handler.named("lost")
        assert len(await stage.read(client, MIB - got)) == MIB - got

    play(test, limits=ReactorLimits(write_deadline_ms=1_000), clock=clock)


def test_over_the_total_limit_the_one_with_most_waiting_is_lost() -> None:
    async def test(stage: Stage) -> None:
        (_, first), (_, second), (_, third) = [await stage.connect() for _ in range(3)]
        stage.push(first, bytes(2 * MIB))
        stage.push(second, bytes(3 * MIB))
        assert not stage.handler.named("lost")
        stage.push(third, bytes(2 * MIB))
        assert stage.handler.named("lost") == [("lost", 2, "not-reading")]
        assert first.queued and third.queued

    play(test, limits=ReactorLimits(total_queue_limit=5 * MIB))


def test_end_sends_everything_and_then_the_end() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        data = pattern(BIG)

        def last_words(connection: Connection, _data: bytes) -> None:
            connection.queue(data)
            stage.reactor.end(connection)
            connection.queue(b"after the end")

        stage.handler.on["received"] = last_words
        client.send(b"bad")
        client.send(b"never read")
        assert await stage.read_to_end(client) == data
        await stage.handler.until(lambda: connection.closed)
        assert stage.handler.received_bytes[1] in (b"bad", b"badnever read")
        assert not stage.handler.named("lost")

    play(test, limits=ReactorLimits(linger_ms=20))


def test_end_without_anything_queued() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.run_batch(lambda _now: stage.reactor.end(connection))
        assert await stage.read_to_end(client) == b""
        assert not connection.closed
        client.close()
        await stage.handler.until(lambda: connection.closed)

    play(test)


def test_end_does_not_reset_a_peer_whose_input_was_left_unread() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()

        def refuse(_now: Now) -> None:
            client.send(bytes(50_000))
            connection.queue(b"error")
            stage.reactor.end(connection)

        stage.reactor.run_batch(refuse)
        await stage.handler.until(lambda: connection.closed)
        assert await stage.read_to_end(client) == b"error"
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert not stage.handler.named("received")

    play(test)


def test_end_closes_after_the_linger_time() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.run_batch(lambda _now: stage.reactor.end(connection))
        await stage.handler.until(lambda: connection.closed)
        with pytest.raises(BrokenPipeError):
            client.send(b"x")

    play(test, limits=ReactorLimits(linger_ms=20))


def test_end_gives_up_on_a_peer_that_does_not_read() -> None:
    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        stage.push(connection, bytes(MIB))
        stage.reactor.run_batch(lambda _now: stage.reactor.end(connection))
        await stage.handler.until(lambda: connection.closed)
        assert not stage.handler.named("lost")

    play(test, limits=ReactorLimits(write_deadline_ms=20))


def test_end_of_a_peer_that_is_gone() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()

        def work(_now: Now) -> None:
            client.close()
            connection.queue(b"nobody there")
            stage.reactor.end(connection)

        stage.reactor.run_batch(work)
        assert connection.closed
        assert not stage.handler.named("lost")

    play(test)


def test_destroy_closes_at_once_and_tells_nobody() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()

        def work(_now: Now) -> None:
            connection.queue(b"never sent")
            stage.reactor.destroy(connection)
            stage.reactor.destroy(connection)
            connection.queue(b"nor this")

        stage.reactor.run_batch(work)
        assert await stage.read_to_end(client) == b""
        assert not stage.handler.named("lost")
        assert connection.queued == 0

    play(test)


def test_a_connection_destroyed_in_a_batch_is_not_touched_again() -> None:
    async def test(stage: Stage) -> None:
        pairs = [await stage.connect() for _ in range(3)]

        def destroy_the_others(connection: Connection, _data: bytes) -> None:
            for _, other in pairs:
                if other is not connection:
                    other.queue(b"x")
                    stage.reactor.destroy(other)

        stage.handler.on["received"] = destroy_the_others
        for client, _ in pairs:
            client.send(b"ready in the same wake")
        await stage.handler.until(lambda: stage.handler.named("received"))
        await stage.idle()
        assert len(stage.handler.named("received")) == 1
        assert len(stage.reactor.connections) == 1
        assert not stage.tape.sends()

    play(test)


def test_a_new_connection_does_not_inherit_events_of_a_reused_descriptor() -> None:
    async def test(stage: Stage) -> None:
        (_, first), (_, second) = [await stage.connect() for _ in range(2)]
        gone = {first: second.fd, second: first.fd}

        def replace(connection: Connection, _data: bytes) -> None:
            stage.reactor.destroy(second if connection is first else first)

        stage.handler.on["received"] = replace
        # Both are readable and a third waits to be accepted when the reactor wakes.
        for client in list(stage.clients):
            client.send(b"x")
        stage.dial()
        await stage.handler.call("accepted", 3)
        survivor = next(connection for connection in (first, second) if not connection.closed)
        assert stage.handler.by_number[3].fd == gone[survivor]
        await stage.idle()
        assert [note for note in stage.tape.notes if note[1] == 3] == []

    play(test)


def test_end_and_destroy_inside_accepted() -> None:
    async def test(stage: Stage) -> None:
        stage.handler.on["accepted"] = stage.reactor.destroy
        assert await stage.read_to_end(stage.dial()) == b""

        def turn_away(connection: Connection) -> None:
            connection.queue(b"full")
            stage.reactor.end(connection)

        stage.handler.on["accepted"] = turn_away
        client = stage.dial()
        assert await stage.read_to_end(client) == b"full"
        client.close()
        await stage.handler.until(lambda: not stage.reactor.connections)

    play(test)


def test_pause_stops_reading_and_resume_goes_on() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.pause(connection)
        stage.reactor.pause(connection)
        client.send(b"abc")
        await stage.idle()
        assert not stage.handler.named("received")
        stage.push(connection, b"still sent")
        assert await stage.read(client, 10) == b"still sent"
        stage.reactor.resume(connection)
        await stage.handler.call("received", 1, b"abc")

    play(test)


def test_pause_inside_a_batch_holds_for_that_batch() -> None:
    async def test(stage: Stage) -> None:
        (client, first), (other, second) = [await stage.connect() for _ in range(2)]

        def pause_both(_connection: Connection, _data: bytes) -> None:
            stage.reactor.pause(first)
            stage.reactor.pause(second)

        stage.handler.on["received"] = pause_both
        client.send(b"x")
        other.send(b"x")
        await stage.idle()
        assert len(stage.handler.named("received")) == 1

    play(test)


def test_a_paused_peer_that_hangs_up_costs_nothing_and_loses_nothing() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.pause(connection)
        client.send(b"last words")
        client.close()
        await stage.idle()
        batches = stage.handler.batches
        await stage.idle()
        # At most the one wake that finds the hang-up; no spinning.
        assert stage.handler.batches - batches <= 1
        stage.reactor.resume(connection)
        await stage.handler.call("lost", 1, "eof")
        assert stage.handler.received_bytes[1] == b"last words"

    play(test)


def test_cork_holds_back_and_uncork_lets_go() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.cork(connection)
        stage.push(connection, b"registered")
        await stage.idle()
        assert (connection.queued, stage.tape.sends()) == (10, [])
        stage.reactor.run_batch(lambda _now: stage.reactor.uncork(connection))
        assert await stage.read(client, 10) == b"registered"

    play(test)


def test_cork_while_blocked_neither_sends_nor_spins_nor_blames() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        data = pattern(MIB)
        stage.push(connection, data)
        stage.reactor.cork(connection)
        first = await stage.read(client, connection.sent)
        await stage.idle()
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches - batches <= 1
        await stage.handler.until(lambda: not connection.deadline)
        assert not connection.closed
        stage.reactor.uncork(connection)
        stage.reactor.flush()
        assert first + await stage.read(client, MIB - len(first)) == data

    play(test, limits=ReactorLimits(write_deadline_ms=20))


def test_flush_outside_a_batch_commits_what_its_callbacks_decide() -> None:
    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        batches = stage.handler.batches
        connection.queue(b"small")
        stage.reactor.flush()
        assert stage.handler.batches == batches
        connection.queue(bytes(BIG))
        stage.reactor.flush()
        assert stage.handler.calls[-1] == ("congested", 1)
        assert stage.handler.batches == batches + 1

    play(test, limits=ReactorLimits(high_water=MIB, low_water=1000))


def test_run_batch_inside_a_batch_joins_it() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        batches = stage.handler.batches
        stage.reactor.run_batch(lambda _now: stage.push(connection, b"inner"))
        assert stage.handler.batches == batches + 1
        assert client.recv(10) == b"inner"

    play(test)


def test_what_a_vanished_peer_sent_is_received_before_it_is_lost() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        data = pattern(150_000)

        def work(_now: Now) -> None:
            assert client.send(data) == len(data)
            client.close()
            connection.queue(b"too late")

        stage.reactor.run_batch(work)
        await stage.handler.call("lost", 1, "reset")
        assert stage.handler.received_bytes[1] == data
        assert stage.handler.calls[-1] == ("lost", 1, "reset")

    play(test)


def test_a_peer_that_shut_its_receiving_side_is_lost() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        client.shutdown(socket.SHUT_RD)
        client.send(b"talks on")
        stage.push(connection, b"cannot be delivered")
        await stage.handler.call("lost", 1, "reset")
        assert stage.handler.received_bytes[1] == b"talks on"

    play(test)


def test_a_vanished_peer_that_is_paused_is_lost_after_resume() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.pause(connection)
        client.send(b"last words")
        client.close()
        stage.push(connection, b"too late")
        await stage.idle()
        assert not stage.handler.named("lost")
        assert connection.queued == 0
        stage.reactor.resume(connection)
        await stage.handler.call("lost", 1, "reset")
        assert stage.handler.received_bytes[1] == b"last words"

    play(test)


def test_reset_by_a_peer_that_left_our_bytes_unread() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, b"unread")
        client.close()
        await stage.handler.call("lost", 1, "reset")

    play(test)


def test_every_ready_connection_gets_one_receive_per_wake() -> None:
    async def test(stage: Stage) -> None:
        (loud, _), (quiet, _) = [await stage.connect() for _ in range(2)]
        loud.send(bytes(200_000))
        quiet.send(b"me too")
        await stage.handler.call("received", 2, b"me too")
        before = [call[1] for call in stage.handler.named("received")]
        assert before.count(1) <= 1

    play(test)


def test_adopt_goes_on_where_an_earlier_process_stopped() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        me = PeerCredentials(os.getpid(), os.getuid(), os.getgid())
        connection = stage.reactor.adopt(ours, "remote", 17, sent=1_000, unsent=b"rest of a frame", registered_peer=me)
        assert connection is not None
        assert (connection.number, connection.origin, connection.peer) == (17, "remote", me)
        assert (connection.sent, connection.queued) == (1_000, 15)
        assert stage.reactor.next_number == 18
        stage.reactor.flush()
        assert await stage.read(client, 15) == b"rest of a frame"
        assert stage.tape.sends() == [1_015]
        client.send(b"hello again")
        await stage.handler.call("received", 17, b"hello again")
        assert not stage.handler.named("accepted")

    play(test)


def test_adopt_of_a_connection_whose_peer_left_meanwhile() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        client.close()
        assert stage.reactor.adopt(ours, "local", 5) is not None
        await stage.handler.call("lost", 5, "eof")

    play(test)


def test_adopt_refuses_another_peer() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        other = PeerCredentials(os.getpid() + 1, os.getuid(), os.getgid())
        assert stage.reactor.adopt(ours, "local", 5, registered_peer=other) is None
        assert stage.handler.named("refused") == [("refused", "local", os.getuid())]
        assert await stage.read_to_end(client) == b""
        assert stage.reactor.next_number == 6

    play(test)


def test_adopt_refuses_a_peer_that_cannot_be_identified() -> None:
    async def test(stage: Stage) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            stage.clients.append(client)
            ours, _ = server.accept()
        assert stage.reactor.adopt(ours, "local", 5) is None
        assert stage.handler.named("refused") == [("refused", "local", None)]

    play(test)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to connect as another user")
def test_another_user_is_refused_before_a_byte_is_read() -> None:
    async def test(stage: Stage) -> None:
        # The modes are open on purpose: the kernel's word alone must do.
        os.chmod(Path(stage.path).parent, 0o755)
        os.chmod(stage.path, 0o777)
        foreigner = 65_534
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresuid(foreigner, foreigner, foreigner)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(stage.path)
                    code = 0
                    sock.sendall(b"let me in")
            except BrokenPipeError:
                pass
            finally:
                os._exit(code)
        await stage.handler.call("refused", "local", foreigner)
        assert os.waitpid(child, 0)[1] == 0
        assert not stage.handler.named("accepted")
        assert not stage.tape.notes
        assert stage.reactor.connections == {}
        client, _ = await stage.connect()
        client.send(b"x")
        await stage.handler.call("received", 1, b"x")

    play(test)


PEER_WITH_HEIR = """
import os, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
    os.write(1, b"heir done")
    os._exit(0)
assert peer.recv(2) == b"go"
peer.sendall(b"last words")
os._exit(0)
"""


def has_peer_pidfd() -> bool:
    left, right = socket.socketpair()
    with left, right:
        pidfd = peer_pidfd(left)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


@pytest.mark.skipif(not has_peer_pidfd(), reason="this kernel has no SO_PEERPIDFD (Linux 6.5)")
@pytest.mark.parametrize("paused", [False, True])
def test_peer_death_is_noticed_although_another_process_holds_the_socket(paused: bool) -> None:
    async def test(stage: Stage) -> None:
        gate_read, gate_write = os.pipe()

        def watch(connection: Connection) -> None:
            assert stage.reactor.watch_peer_death(connection)
            assert stage.reactor.watch_peer_death(connection)
            if paused:
                stage.reactor.pause(connection)

        stage.handler.on["accepted"] = watch
        # The process that connects may end before it is accepted, and then there is no descriptor for it.
        child = subprocess.Popen(
            [sys.executable, "-c", PEER_WITH_HEIR, stage.path], stdin=gate_read, stdout=subprocess.PIPE
        )
        os.close(gate_read)
        await stage.handler.call("accepted", 1)
        connection = stage.handler.by_number[1]
        connection.queue(b"go")
        stage.reactor.flush()
        if paused:
            assert child.wait() == 0
            await stage.idle()
            assert not stage.handler.named("lost")
            stage.reactor.resume(connection)
        await stage.handler.call("lost", 1, "peer-died")
        assert stage.handler.received_bytes[1] == b"last words"
        os.close(gate_write)
        assert child.stdout is not None
        assert child.stdout.read() == b"heir done"
        child.stdout.close()
        assert child.wait() == 0

    play(test)


def test_watching_degrades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_intercom.wire.pool.peer_pidfd", lambda _sock: None)

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        assert not stage.reactor.watch_peer_death(connection)
        client.close()
        await stage.handler.call("lost", 1, "eof")
        assert not stage.reactor.watch_peer_death(connection)

    play(test)


def test_close_hangs_up_even_where_the_descriptor_store_has_a_copy() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        with connection.sock.dup():
            stage.reactor.close()
            assert await stage.read_to_end(client) == b""
        stage.reactor.close()

    play(test)


def test_close_with_detach_leaves_the_peer_connected() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, b"before")
        with connection.sock.dup() as stored:
            stage.reactor.close(detach=True)
            client.send(b"meanwhile")
            assert stored.recv(100) == b"meanwhile"
            stored.send(b" and after")
            assert await stage.read(client, 16) == b"before and after"
        assert not stage.handler.named("lost")

    play(test)


def test_a_closed_connection_with_a_stored_copy_wakes_nobody() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        with connection.sock.dup():
            stage.reactor.run_batch(lambda _now: stage.reactor.destroy(connection))
            assert await stage.read_to_end(client) == b""
            batches = stage.handler.batches
            await stage.idle()
            assert stage.handler.batches == batches

    play(test)


def test_the_reactor_may_be_closed_inside_any_callback() -> None:
    async def test(stage: Stage) -> None:
        stage.handler.on["accepted"] = lambda _connection: stage.reactor.close()
        clients = [stage.dial(), stage.dial()]
        await stage.handler.call("accepted", 1)
        assert await stage.read_to_end(clients[0]) == b""
        assert stage.handler.named("accepted") == [("accepted", 1)]

    play(test)


def test_listeners_idle() -> None:
    async def test(stage: Stage) -> None:
        assert stage.reactor.listeners_idle()
        stage.dial()
        assert not stage.reactor.listeners_idle()
        await stage.handler.call("accepted", 1)
        assert stage.reactor.listeners_idle()

    play(test)


class Starving(socket.socket):
    """A listener in a process that has no descriptor left, as long as `starved` says so."""

    starved = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self.starved:
            raise OSError(errno.EMFILE, "no descriptor")
        return super().accept()


def test_without_descriptors_peers_wait_and_a_freed_one_serves_them() -> None:
    async def test(stage: Stage) -> None:
        first, connection = await stage.connect()
        listener = Starving(socket.AF_UNIX)
        stage.path += "2"
        listener.bind(stage.path)
        listener.listen()
        stage.reactor.listen(listener, "local")
        listener.starved = True
        client = stage.dial()
        client.send(b"patient")
        await stage.handler.call("out_of_descriptors", True)
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches == batches
        first.send(b"others are served")
        await stage.handler.call("received", 1, b"others are served")
        listener.starved = False
        stage.reactor.destroy(connection)
        await stage.handler.call("received", 2, b"patient")
        assert stage.handler.named("out_of_descriptors") == [
            ("out_of_descriptors", True),
            ("out_of_descriptors", False),
        ]

    play(test)


STARVE = """
import asyncio, os, resource, socket, sys
from agent_intercom.wire.reactor import NullTape, Reactor

class Handler:
    calls = []
    def accepted(self, connection, now): self.calls.append("accepted")
    def received(self, connection, data, now): connection.queue(bytes(data))
    def lost(self, connection, reason, now): self.calls.append("lost " + reason)
    def congested(self, connection, now): pass
    def drained(self, connection, now): pass
    def refused(self, origin, uid): self.calls.append("refused")
    def out_of_descriptors(self, active):
        self.calls.append(f"out of descriptors {active}")
        if active:
            # Freed behind the reactor's back, so only its own retry can notice.
            loop.call_soon(os.close, ballast.pop())
    def batch_done(self, now): pass

async def main():
    global loop
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    client.connect(sys.argv[1])
    reactor = Reactor(loop, Handler(), NullTape(), uid=os.getuid())
    reactor.listen(listener, "local")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            ballast.append(os.dup(0))
    except OSError:
        pass
    await loop.sock_sendall(client, b"answer me")
    assert await loop.sock_recv(client, 100) == b"answer me"
    reactor.close()
    print(*Handler.calls, sep="|")

ballast = []
asyncio.run(main())
"""


def test_with_the_limit_of_descriptors_reached_for_real() -> None:
    with tempfile.TemporaryDirectory(prefix="aic-", dir="/tmp") as directory:
        done = subprocess.run(
            [sys.executable, "-c", STARVE, str(Path(directory, "s"))],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=GUARD_S,
        )
    assert done.stdout.strip() == "out of descriptors True|out of descriptors False|accepted"
