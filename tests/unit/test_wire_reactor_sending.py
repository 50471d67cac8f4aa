# SPDX-License-Identifier: Apache-2.0
"""The write side of the socket server: coalescing, partial writes, backpressure, corks and orderly ends."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection, ReactorLimits
from agent_intercom.wire.peer import PeerCredentials
from tests.unit.wirestage import BIG, MIB, FakeClock, Stage, pattern, play


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
            stage.reactor._deadlines.fire()
        assert clock.mono > 1_000 + 1_000
        assert not stage.handler.named("lost")
        clock.mono += 900
        stage.reactor._deadlines.fire()
        assert not stage.handler.named("lost")
        # Being late costs one more attempt, which may fill what room is left in the socket; nobody reads after it.
        for _ in range(2):
            clock.mono += 1_000
            stage.reactor._deadlines.fire()
        assert stage.handler.named("lost") == [("lost", 1, "not-reading")]

    play(test, limits=ReactorLimits(write_deadline_ms=1_000), clock=clock)


def test_a_peer_that_caught_up_has_no_deadline() -> None:
    clock = FakeClock()

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, bytes(MIB))
        await stage.read(client, MIB)
        await stage.idle()
        clock.mono += 60_000
        stage.reactor._deadlines.fire()
        assert not stage.handler.named("lost")

    play(test, limits=ReactorLimits(write_deadline_ms=1_000), clock=clock)


def test_a_deadline_set_outside_a_batch_counts_from_now() -> None:
    clock = FakeClock()

    async def test(stage: Stage) -> None:
        _, connection = await stage.connect()
        stage.push(connection, bytes(MIB))
        clock.mono += 60_000
        stage.reactor.end(connection)
        stage.reactor._deadlines.fire()
        assert not connection.closed
        clock.mono += 1_000
        stage.reactor._deadlines.fire()
        assert connection.closed

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


@pytest.mark.parametrize("corked", [False, True])
def test_a_peer_that_asks_and_ends_its_side_at_once_gets_the_answer(corked: bool) -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        answer = pattern(BIG)

        def respond(connection: Connection, _data: bytes) -> None:
            connection.queue(answer)
            if corked:
                stage.reactor.cork(connection)

        stage.handler.on["received"] = respond
        stage.handler.on["lost"] = lambda connection, _reason: connection.queue(b"after the end")
        client.send(b"ask")
        client.shutdown(socket.SHUT_WR)
        await stage.handler.call("lost", 1, "eof")
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches - batches <= 1
        assert not connection.closed
        if corked:
            assert connection.sent == 0
            stage.reactor.uncork(connection)
            stage.reactor.flush()
        assert await stage.read_to_end(client) == answer
        await stage.handler.until(lambda: connection.closed)
        assert stage.handler.named("lost") == [("lost", 1, "eof")]
        assert stage.reactor.connections == {}

    play(test)


@pytest.mark.parametrize(("corked", "gone"), [(False, False), (True, False), (True, True)])
def test_a_peer_that_ended_its_side_and_does_not_read_is_closed_at_the_deadline(corked: bool, gone: bool) -> None:
    clock = FakeClock()

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        if corked:
            stage.reactor.cork(connection)
        stage.push(connection, bytes(BIG))
        if gone:
            client.close()
        else:
            client.shutdown(socket.SHUT_WR)
        await stage.handler.call("lost", 1, "eof")
        assert not connection.closed
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches - batches <= 1
        for _ in range(2):
            clock.mono += 1_000
            stage.reactor._deadlines.fire()
        assert connection.closed
        assert len(stage.handler.named("lost")) == 1
        assert stage.reactor.connections == {}

    play(test, limits=ReactorLimits(write_deadline_ms=1_000), clock=clock)


def test_destroy_inside_lost_drops_what_was_queued() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.cork(connection)
        stage.push(connection, b"never sent")
        stage.handler.on["lost"] = lambda connection, _reason: stage.reactor.destroy(connection)
        client.shutdown(socket.SHUT_WR)
        await stage.handler.call("lost", 1, "eof")
        assert connection.closed
        assert await stage.read_to_end(client) == b""

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
