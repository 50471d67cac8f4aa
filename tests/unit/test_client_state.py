# SPDX-License-Identifier: Apache-2.0
"""What the client keeps: bounds, order, pace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_intercom.intercom import client_frames
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_link import Link
from agent_intercom.intercom.client_receiver import Receiver
from agent_intercom.intercom.client_state import (
    MAX_IN_FLIGHT,
    MAX_IN_FLIGHT_BYTES,
    EventQueue,
    Inbox,
    Outbox,
    Outgoing,
    Pacer,
)
from agent_intercom.intercom.client_types import EventsLost, Left
from tests.unit.fakebroker import HANG, FakeBroker, run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def outgoing(message_id: str, size: int = 10) -> Outgoing:
    return Outgoing(message_id, b"x" * size, asyncio.get_running_loop().create_future())


def body(message_id: str, text: str = "t", **more: Any) -> dict[str, Any]:
    return {"id": message_id, "timestamp": 1, "content": {"text": text}, **more}


async def admitted(outbox: Outbox, *records: Outgoing) -> None:
    for record in records:
        await outbox.admit(record)


def test_pacer_spends_saves_and_tells_how_long() -> None:
    clock = Clock()
    pacer = Pacer(10, 2, 100, clock)
    assert pacer.take(901) == 0.0
    assert pacer.take(1) == 0.5
    clock.now = 0.5
    assert pacer.take(1) == 0.0
    clock.now = 1_000.0
    assert [pacer.take(500), pacer.take(500)] == [0.0, 0.0]
    assert pacer.take(200) == 1.0


def test_outbox_admits_in_order_and_never_more_than_it_may() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        records = [outgoing(str(n)) for n in range(MAX_IN_FLIGHT + 2)]
        await admitted(outbox, *records[:MAX_IN_FLIGHT])
        waiting = [asyncio.ensure_future(outbox.admit(record)) for record in records[MAX_IN_FLIGHT:]]
        await asyncio.sleep(0)
        assert len(outbox) == MAX_IN_FLIGHT
        outbox.remove(records[5])
        await waiting[0]
        assert not waiting[1].done()
        assert outbox.get(records[-2].message_id) is records[-2]
        outbox.remove(records[6])
        await waiting[1]
        assert len(outbox) == MAX_IN_FLIGHT

    asyncio.run(scenario())


def test_outbox_counts_bytes_but_lets_one_large_frame_pass() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        large = outgoing("large", MAX_IN_FLIGHT_BYTES + 1)
        await outbox.admit(large)
        small = outgoing("small")
        waiting = asyncio.ensure_future(outbox.admit(small))
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.remove(large)
        await waiting

    asyncio.run(scenario())


def test_a_cancelled_wait_gives_its_turn_away() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        first = outgoing("first", MAX_IN_FLIGHT_BYTES)
        await outbox.admit(first)
        waits = [asyncio.ensure_future(outbox.admit(outgoing(name))) for name in ("a", "b")]
        await asyncio.sleep(0)
        waits[0].cancel()
        outbox.remove(first)
        await waits[1]
        assert [record.message_id for record in outbox.records()] == ["b"]
        await asyncio.wait(waits)

    asyncio.run(scenario())


def test_outbox_failure_reaches_everybody() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        first = outgoing("first", MAX_IN_FLIGHT_BYTES)
        await outbox.admit(first)
        waiting = asyncio.ensure_future(outbox.admit(outgoing("second")))
        await asyncio.sleep(0)
        outbox.fail(ClientError("CLOSED", "closed"))
        for future in (first.future, waiting):
            with pytest.raises(ClientError):
                await future

    asyncio.run(scenario())


def test_inbox_tells_new_held_duplicate_and_conflict() -> None:
    inbox = Inbox()
    assert inbox.check("a", body("m"), "d1") == "new"
    inbox.add("a", body("m"), "d1")
    assert inbox.check("a", body("m"), "d2") == "held"
    assert inbox.acknowledge("a", "m") == "d2"
    assert inbox.acknowledge("a", "m") is None
    assert inbox.check("a", body("m"), "d3") == "duplicate"
    assert inbox.check("a", {**body("m"), "timestamp": 2}, "d4") == "duplicate"
    for other in (body("m", "other"), body("m", replyTo="q"), body("m", expectsReply=True)):
        assert inbox.check("a", other, "d5") == "conflict"
    assert inbox.check("b", body("m"), "d6") == "new"
    inbox.forget("a", "m")
    assert inbox.check("a", body("m"), "d7") == "new"


def test_inbox_forgets_the_oldest_acknowledged_key_only() -> None:
    inbox = Inbox(capacity=2)
    for name in ("1", "2", "3"):
        inbox.add("a", body(name), "d")
        if name != "1":
            inbox.acknowledge("a", name)
    assert [inbox.check("a", body(name), "d") for name in ("1", "2", "3")] == ["held", "new", "duplicate"]


def test_event_queue_counts_what_it_refuses() -> None:
    async def scenario() -> None:
        queue = EventQueue(capacity=2)
        assert [queue.put(Left(str(n))) for n in range(4)] == [True, True, False, False]
        assert [await anext(queue) for _ in range(3)] == [Left("0"), Left("1"), EventsLost(2)]
        assert queue.put(Left("4"))
        queue.end(ClientError("CLOSED", "why"))
        assert not queue.put(Left("5"))
        assert await anext(queue) == Left("4")
        with pytest.raises(ClientError):
            await anext(queue)

    asyncio.run(scenario())


def test_link_writes_acknowledgements_first() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link = Link([broker.path], lambda frame: None, lambda code: None, None)
        link.post(b'{"type":"dropped"}')
        await link.open()
        line = await broker.accept()
        link.post(b'{"type":"send"}')
        link.post_first(b'{"type":"ack"}')
        link.post(b'{"type":"list"}')
        assert [(await line.read())["type"] for _ in range(3)] == ["ack", "send", "list"]
        await link.close(HANG)

    run(scenario)


def test_link_keeps_the_pace_and_loses_nothing() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link = Link([broker.path], lambda frame: None, lambda code: None, (5, 200))
        await link.open()
        line = await broker.accept()
        for n in range(20):
            link.post(b'{"type":"%d"}' % n)
        await link.flushed()
        assert [(await line.read())["type"] for _ in range(20)] == [str(n) for n in range(20)]
        await link.close(HANG)

    run(scenario)


def test_link_tells_the_end_of_a_connection_once_and_of_a_dropped_one_never() -> None:
    async def scenario(broker: FakeBroker) -> None:
        told: list[str | None] = []
        ended = asyncio.Event()

        def lost(code: str | None) -> None:
            told.append(code)
            ended.set()

        link = Link([broker.path], lambda frame: "WRONG", lost, None)
        await link.open()
        line = await broker.accept()
        line.write({"type": "session_left", "sessionId": "x"})
        async with asyncio.timeout(HANG):
            await ended.wait()
        assert told == ["WRONG"]
        await link.open()
        link.drop()
        await link.close(HANG)
        assert told == ["WRONG"]

    run(scenario)


def test_acceptance_is_remembered_for_a_send_without_a_final_word() -> None:
    async def scenario() -> None:
        receiver = Receiver("me", auto_ack=True, event_capacity=1, on_registered=lambda: None)
        receiver.connected = True
        record = outgoing("m")
        await receiver.outbox.admit(record)
        assert receiver.on_frame(client_frames.DeliveryAccepted("m", "d")) is None
        assert (record.accepted, record.future.done()) == (True, False)

    asyncio.run(scenario())
