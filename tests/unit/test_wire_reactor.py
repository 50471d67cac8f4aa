# SPDX-License-Identifier: Apache-2.0
"""The socket server on real Unix sockets: batches, reading, pausing, and connections that go away."""

from __future__ import annotations

import os
import socket

from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection
from agent_intercom.wire.peer import PeerCredentials
from tests.unit.wirestage import Stage, pattern, play


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
        # When the reactor wakes, one is readable, a third waits to be accepted, and the other is readable.
        one, other = stage.clients
        one.send(b"x")
        stage.dial()
        other.send(b"x")
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


def test_a_late_timer_can_have_everything_served_that_is_ready() -> None:
    async def test(stage: Stage) -> None:
        # More than one wake would serve.
        clients = [(await stage.connect())[0] for _ in range(70)]
        stage.handler.on["received"] = lambda connection, data: connection.queue(data)
        assert not stage.reactor.serve_ready()
        for client in clients:
            client.send(b"in time")
        batches = stage.handler.batches
        assert stage.reactor.serve_ready()
        assert stage.handler.batches == batches + 1
        assert len(stage.handler.named("received")) == len(clients)
        assert all(client.recv(10) == b"in time" for client in clients)
        assert not stage.reactor.serve_ready()

    play(test)


def test_inside_a_batch_nothing_else_is_served() -> None:
    async def test(stage: Stage) -> None:
        client, _ = await stage.connect()
        client.send(b"x")
        answers: list[bool] = []
        stage.reactor.run_batch(lambda _now: answers.append(stage.reactor.serve_ready()))
        assert answers == [False]
        assert not stage.handler.named("received")
        await stage.handler.call("received", 1, b"x")
        stage.reactor.close()
        assert not stage.reactor.serve_ready()

    play(test)


def test_every_ready_connection_gets_one_receive_per_wake() -> None:
    async def test(stage: Stage) -> None:
        (loud, _), (quiet, _) = [await stage.connect() for _ in range(2)]
        loud.send(bytes(200_000))
        quiet.send(b"me too")
        await stage.handler.call("received", 2, b"me too")
        order = [call[1] for call in stage.handler.named("received")]
        assert order[: order.index(2)].count(1) <= 1

    play(test)
