# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes: what it receives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Attachment,
    Connected,
    Control,
    Disconnected,
    EventsLost,
    Joined,
    Left,
    Message,
    Presence,
)
from tests.unit.clientstage import Reader, connected, settled
from tests.unit.fakebroker import FakeBroker, Frame, accepted, delivered, incoming, info, run

# Frames that are not in the contract.


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "unheard_of"},
        {"type": "session_left", "sessionId": "x", "extra": 1},
        {"type": "session_joined", "session": {**info("x"), "name": None}},
        {"type": "session_joined", "session": {**info("x"), "surprise": 1}},
        {"type": "session_joined", "session": {**info("x"), "pid": True}},
        {"type": "delivered", "messageId": "m"},
        {"type": "delivery_failed", "messageId": "m", "accepted": False, "code": "NEW", "reason": "r"},
        {"type": "ask_cancelled", "messageId": "m", "fromSessionId": "x", "reason": "whim"},
        {"type": "registered", "sessionId": "me", "protocol": "pi-intercom", "version": 4},
        {"type": "health_ok"},
        "text",
        None,
    ],
)
def test_a_frame_outside_the_contract_ends_the_connection(frame: Any) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write(frame)
            assert await Reader(made).skip_to(Disconnected) == Disconnected("PROTOCOL_VIOLATION")
            assert await line.at_end()
            await (await broker.accept()).register()

    run(scenario)


def test_an_error_frame_closes_this_side_and_reconnects() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write({"type": "error", "code": "RATE_LIMITED", "error": "too fast"})
            assert await Reader(made).skip_to(Disconnected) == Disconnected("RATE_LIMITED")
            assert await line.at_end()
            await (await broker.accept()).register()

    run(scenario)


def test_delivered_needs_the_delivery_that_was_accepted() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x", message_id="m"))
            await line.expect("send")
            line.write(accepted("m", "d1"), delivered("m", "d2"))
            again = await broker.accept()
            await again.register()
            assert (await again.expect("send"))["message"]["id"] == "m"
            again.write(accepted("m", "d3"), delivered("m", "d3"))
            assert await settled(sending) == ("m", "d3")

    run(scenario)


def test_malformed_utf8_and_lone_surrogates_are_read() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write_bytes(b"\x00\x00\x00\x27" + b'{"type":"session_left","sessionId":"\xff"}'[:39])
            line.write({"type": "session_left", "sessionId": "\ud800"})
            events = Reader(made)
            assert await events.skip_to(Left) == Left("\ufffd")
            assert await events.next() == Left("\ud800")

    run(scenario)


# Receiving.


def test_a_message_is_queued_and_then_acknowledged() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            control = {"type": "x.y", "version": 1, "data": None}
            line.write(incoming("d1", "b", "m1", "hello"))
            await line.expect("message_received")
            frame = incoming("d2", "b", "m2", replyTo="q", expectsReply=True)
            frame["message"]["content"]["attachments"] = [{"type": "file", "name": "n", "content": "c"}]
            line.write(frame)
            assert await line.read() == {"type": "message_received", "deliveryId": "d2"}
            frame = incoming("d3", "b", "m3")
            frame["message"]["content"]["control"] = control
            line.write(frame)
            await line.expect("message_received")
            events = Reader(made)
            first = await events.skip_to(Message)
            assert (first.id, first.text, first.sender.id, first.expects_reply) == ("m1", "hello", "b", False)
            second = await events.skip_to(Message)
            assert (second.reply_to, second.expects_reply) == ("q", True)
            assert second.attachments == (Attachment("file", "n", "c"),)
            third = await events.skip_to(Message)
            assert third.control == Control("x.y", 1, None)

    run(scenario)


def test_a_redelivery_is_acknowledged_and_not_shown_again() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write(incoming("d1", "b", "m"), incoming("d2", "b", "m"), incoming("d3", "c", "m"))
            assert [(await line.expect("message_received"))["deliveryId"] for _ in range(3)] == ["d1", "d2", "d3"]
            events = Reader(made)
            assert (await events.skip_to(Message)).sender.id == "b"
            assert (await events.next()).sender.id == "c"  # type: ignore[union-attr]

    run(scenario)


def test_an_id_with_another_payload_is_rejected() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (_, line):
            line.write(incoming("d1", "b", "m", "one"), incoming("d2", "b", "m", "two"))
            await line.expect("message_received")
            assert await line.read() == {
                "type": "message_rejected",
                "deliveryId": "d2",
                "code": "CONFLICTING_MESSAGE_ID",
                "reason": 'Conflicting payload for reused message ID "m"',
            }

    run(scenario)


def test_without_auto_ack_the_application_acknowledges() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, auto_ack=False) as (made, line):
            line.write(incoming("d1", "b", "m"), incoming("d2", "b", "m"))
            events = Reader(made)
            message = await events.skip_to(Message)
            line.write({"type": "session_left", "sessionId": "z"})
            await events.skip_to(Left)
            await message.ack()
            await message.ack()
            assert await line.read() == {"type": "message_received", "deliveryId": "d2"}
            line.write(incoming("d3", "b", "m"))
            assert await line.read() == {"type": "message_received", "deliveryId": "d3"}

    run(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"replyTo": None},
        {"id": ""},
        {"content": {"text": "x", "surprise": 1}},
        {"content": {"text": 1}},
    ],
)
def test_a_peers_malformed_message_is_not_acknowledged_and_ends_nothing(change: Frame) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            frame = incoming("d1", "b", "m")
            frame["message"].update(change)
            line.write(frame, incoming("d2", "b", "good"))
            assert await line.read() == {"type": "message_received", "deliveryId": "d2"}
            assert (await Reader(made).skip_to(Message)).id == "good"

    run(scenario)


def test_a_full_queue_acknowledges_nothing_that_it_does_not_hold() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, event_capacity=2) as (made, line):
            line.write(*(incoming(f"d{n}", "b", f"m{n}") for n in range(3)))
            assert await line.read() == {"type": "message_received", "deliveryId": "d0"}
            listing = asyncio.ensure_future(made.list())
            request = await line.expect("list")
            line.write({"type": "sessions", "requestId": request["requestId"], "sessions": []})
            await settled(listing)
            events = Reader(made)
            assert await events.next() == Connected("me", resumed=False)
            assert (await events.next()).id == "m0"  # type: ignore[union-attr]
            assert await events.next() == EventsLost(2)
            line.write(incoming("d9", "b", "m1"))
            assert await line.read() == {"type": "message_received", "deliveryId": "d9"}
            assert (await events.next()).id == "m1"  # type: ignore[union-attr]

    run(scenario)


def test_lifecycle_events_in_order() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write(
                {"type": "session_joined", "session": info("b", name="beta")},
                {"type": "presence_update", "session": info("b", status="busy")},
                {"type": "ask_deferred", "messageId": "q", "fromSessionId": "b"},
                {"type": "ask_cancelled", "messageId": "q", "fromSessionId": "b", "reason": "expired"},
                {"type": "session_left", "sessionId": "b"},
            )
            events = Reader(made)
            joined = await events.skip_to(Joined)
            assert (joined.session.id, joined.session.name) == ("b", "beta")
            presence = await events.next()
            assert isinstance(presence, Presence)
            assert presence.session.status == "busy"
            assert await events.next() == AskDeferred("q", "b")
            assert await events.next() == AskCancelled("q", "b", "expired")
            assert await events.next() == Left("b")

    run(scenario)


def test_an_ask_whose_delivery_failed_is_shown_when_it_comes_again() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            ask = incoming("d1", "b", "q", expectsReply=True)
            cancelled = {"type": "ask_cancelled", "messageId": "q", "fromSessionId": "b", "reason": "delivery_failed"}
            line.write(ask, cancelled, {**ask, "deliveryId": "d2"})
            events = Reader(made)
            assert (await events.skip_to(Message)).id == "q"
            await events.skip_to(AskCancelled)
            assert (await events.skip_to(Message)).id == "q"

    run(scenario)
