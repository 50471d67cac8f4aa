# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes: asking."""

from __future__ import annotations

import asyncio

import pytest

from agent_intercom.intercom.client_errors import AskCancelledError, AskTimeout, DeliveryFailed
from agent_intercom.intercom.client_types import Message
from tests.unit.clientstage import Reader, connected, settled
from tests.unit.fakebroker import HANG, FakeBroker, Line, accepted, delivered, failed, incoming, run


async def asked(line: Line, delivery_id: str = "d") -> str:
    """Take an ask and let it be delivered; its id."""
    frame = await line.expect("send")
    message_id = str(frame["message"]["id"])
    assert frame["message"]["expectsReply"] is True
    line.write(accepted(message_id, delivery_id), delivered(message_id, delivery_id))
    return message_id


def test_ask_returns_the_reply_and_acknowledges_it() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, auto_ack=False) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG))
            message_id = await asked(line)
            line.write(incoming("d2", "b", "r", "yes", replyTo=message_id))
            reply = await settled(asking)
            assert (reply.text, reply.asked_id, reply.message.sender.id) == ("yes", message_id, "b")
            assert await line.read() == {"type": "message_received", "deliveryId": "d2"}

    run(scenario)


def test_a_reply_proves_the_delivery() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG, message_id="q"))
            await line.expect("send")
            line.write(accepted("q", "d"), incoming("d2", "b", "r", "yes", replyTo="q"))
            assert (await settled(asking)).text == "yes"

    run(scenario)


def test_an_ask_without_reply_is_deferred_and_a_late_reply_is_a_message() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=0.05))
            message_id = await asked(line)
            request = await line.expect("defer_ask")
            assert request["messageId"] == message_id
            result = {"action": "defer", "messageId": message_id, "applied": True}
            line.write({"type": "ask_control_result", "requestId": request["requestId"], **result})
            with pytest.raises(AskTimeout) as caught:
                await settled(asking)
            assert (caught.value.message_id, caught.value.deferred) == (message_id, True)
            line.write(incoming("d2", "b", "r", "late", replyTo=message_id))
            late = await Reader(made).skip_to(Message)
            assert (late.text, late.reply_to) == ("late", message_id)

    run(scenario)


def test_an_ask_survives_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG))
            message_id = await asked(line)
            line.abort()
            again = await broker.accept()
            await again.register()
            again.write(incoming("d2", "b", "r", "yes", replyTo=message_id))
            assert (await settled(asking)).text == "yes"

    run(scenario)


def test_a_repeated_ask_that_is_pending_already_waits_for_its_reply() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG, message_id="q"))
            await line.expect("send")
            line.abort()
            again = await broker.accept()
            await again.register()
            await again.expect("send")
            again.write(failed("q", "ASK_ALREADY_PENDING"), incoming("d2", "b", "r", "yes", replyTo="q"))
            assert (await settled(asking)).text == "yes"

    run(scenario)


def test_a_refused_ask_fails_at_once() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG, message_id="q"))
            await line.expect("send")
            line.write(failed("q", "MUTUAL_ASK"))
            with pytest.raises(DeliveryFailed) as caught:
                await settled(asking)
            assert caught.value.code == "MUTUAL_ASK"

    run(scenario)


def test_an_ask_ends_when_the_asked_session_leaves_for_good() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=HANG))
            message_id = await asked(line)
            notice = {"type": "ask_cancelled", "messageId": message_id, "fromSessionId": "b"}
            line.write({**notice, "reason": "session_disconnected"})
            with pytest.raises(AskCancelledError) as caught:
                await settled(asking)
            assert caught.value.reason == "session_disconnected"

    run(scenario)


def test_cancelling_the_task_takes_the_ask_back() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=None))
            message_id = await asked(line)
            asking.cancel()
            assert (await line.expect("cancel_ask"))["messageId"] == message_id
            await asyncio.wait([asking])

    run(scenario)


def test_reply_names_the_ask_and_its_sender() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write(incoming("d1", "b", "q", expectsReply=True))
            await line.expect("message_received")
            message = await Reader(made).skip_to(Message)
            replying = asyncio.ensure_future(made.reply(message, "yes"))
            frame = await line.expect("send")
            assert (frame["to"], frame["message"]["replyTo"]) == ("b", "q")
            line.write(accepted(frame["message"]["id"], "d2"), delivered(frame["message"]["id"], "d2"))
            await settled(replying)

    run(scenario)


@pytest.mark.parametrize("applied", [True, False])
def test_cancel_tells_whether_it_applied(applied: bool) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            cancelling = asyncio.ensure_future(made.cancel("q"))
            request = await line.expect("cancel_ask")
            result = {"action": "cancel", "messageId": "q", "applied": applied}
            line.write({"type": "ask_control_result", "requestId": request["requestId"], **result})
            assert await settled(cancelling) is applied

    run(scenario)


def test_an_ask_that_is_not_kept_open_is_only_taken_back() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=0.05, keep_open=False))
            message_id = await asked(line)
            request = await line.expect("cancel_ask")
            result = {"action": "cancel", "messageId": message_id, "applied": True}
            line.write({"type": "ask_control_result", "requestId": request["requestId"], **result})
            with pytest.raises(AskTimeout) as caught:
                await settled(asking)
            assert (caught.value.deferred, caught.value.cancelled) == (False, True)

    run(scenario)


def test_a_reply_that_crosses_the_taking_back_is_the_result() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=0.05, keep_open=False))
            message_id = await asked(line)
            request = await line.expect("cancel_ask")
            result = {"action": "cancel", "messageId": message_id, "applied": False}
            line.write(
                incoming("d2", "b", "r", "yes", replyTo=message_id),
                {"type": "ask_control_result", "requestId": request["requestId"], **result},
            )
            assert (await settled(asking)).text == "yes"

    run(scenario)
