# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes: sending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_intercom.intercom.client_errors import ClientError, DeliveryFailed, SendTimeout
from agent_intercom.intercom.client_types import Attachment, Control, Left
from tests.unit.clientstage import QUICK, Reader, connected, settled
from tests.unit.fakebroker import FakeBroker, accepted, delivered, failed, run


def test_send_is_done_when_delivered_and_not_before() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            attachment = Attachment("snippet", "n", "c", "py")
            sending = asyncio.ensure_future(made.send("b", "x", attachments=[attachment]))
            frame = await line.expect("send")
            message = frame["message"]
            assert frame["to"] == "b"
            assert set(message) == {"id", "timestamp", "content"}
            expected = {"type": "snippet", "name": "n", "content": "c", "language": "py"}
            assert message["content"] == {"text": "x", "attachments": [expected]}
            line.write(accepted(message["id"], "d"))
            line.write({"type": "session_left", "sessionId": "z"})
            await Reader(made).skip_to(Left)
            assert not sending.done()
            line.write(delivered(message["id"], "d"))
            assert await settled(sending) == (message["id"], "d")

    run(scenario)


@pytest.mark.parametrize("taken", [False, True])
def test_a_failed_delivery_tells_whether_it_was_accepted(taken: bool) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x", message_id="m"))
            await line.expect("send")
            if taken:
                line.write(accepted("m", "d"))
            line.write(failed("m", "DELIVERY_TIMEOUT", accepted=taken))
            with pytest.raises(DeliveryFailed) as caught:
                await settled(sending)
            found = caught.value
            assert (found.code, found.reason, found.accepted) == ("DELIVERY_TIMEOUT", "why", taken)

    run(scenario)


def test_a_word_about_an_unknown_message_is_ignored() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.write(accepted("?", "d"), delivered("?", "d"), failed("?", "SESSION_NOT_FOUND"))
            line.write({"type": "session_left", "sessionId": "z"})
            await Reader(made).skip_to(Left)
            assert made.connected

    run(scenario)


def test_an_unacknowledged_send_is_repeated_as_it_was_after_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sends = [asyncio.ensure_future(made.send("b", text)) for text in ("1", "2", "3")]
            first = [await line.expect("send") for _ in sends]
            line.write(accepted(first[1]["message"]["id"], "d"), delivered(first[1]["message"]["id"], "d"))
            await settled(sends[1])
            line.abort()
            again = await broker.accept()
            await again.register()
            assert [await again.expect("send") for _ in range(2)] == [first[0], first[2]]
            for frame in (first[0], first[2]):
                again.write(accepted(frame["message"]["id"], "e"), delivered(frame["message"]["id"], "e"))
            await settled(sends[0])
            await settled(sends[2])

    run(scenario)


def test_a_send_made_while_disconnected_waits_for_the_next_connection() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.close()
            again = await broker.accept()
            sending = asyncio.ensure_future(made.send("b", "x", message_id="m"))
            await again.register()
            await again.expect("send")
            again.write(accepted("m", "d"), delivered("m", "d"))
            await settled(sending)
            listing = asyncio.ensure_future(made.list())
            assert (await again.read())["type"] == "list", "the message was sent twice"
            listing.cancel()

    run(scenario)


def test_fewer_than_sixty_four_sends_are_in_flight() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, rate=None) as (made, line):
            sends = [asyncio.ensure_future(made.send("b", str(n), message_id=str(n))) for n in range(100)]
            listing = asyncio.ensure_future(made.list())
            frames = []
            while (frame := await line.read())["type"] == "send":
                frames.append(frame)
            assert len(frames) == 63
            line.write({"type": "sessions", "requestId": frame["requestId"], "sessions": []})
            await settled(listing)
            for n in range(100):
                if n >= 63:
                    frames.append(await line.expect("send"))
                line.write(accepted(str(n), "d"), delivered(str(n), "d"))
            await settled(asyncio.gather(*sends))
            assert [frame["message"]["id"] for frame in frames] == [str(n) for n in range(100)]

    run(scenario)


def test_no_word_in_time_is_neither_success_nor_failure() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, timeouts=QUICK._replace(send=0.05)) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x", message_id="m"))
            await line.expect("send")
            with pytest.raises(SendTimeout) as caught:
                await settled(sending)
            assert (caught.value.code, caught.value.accepted) == ("TIMEOUT", False)
            line.write(accepted("m", "d"), delivered("m", "d"))
            line.write({"type": "session_left", "sessionId": "z"})
            await Reader(made).skip_to(Left)

    run(scenario)


def test_a_cancelled_send_is_not_repeated() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x"))
            await line.expect("send")
            sending.cancel()
            await asyncio.wait([sending])
            line.close()
            again = await broker.accept()
            await again.register()
            await made.presence(status="s")
            await again.expect("presence")

    run(scenario)


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        (("", "x"), {}, "to"),
        (("b" * 513, "x"), {}, "to"),
        (("b", "x" * 262_145), {}, "text"),
        (("b", "\u20ac" * 87_382), {}, "text"),
        (("b", "x"), {"message_id": ""}, "message_id"),
        (("b", "x"), {"message_id": "i" * 257}, "message_id"),
        (("b", "x"), {"reply_to": "i" * 257}, "reply_to"),
        (("b", "x"), {"attachments": [Attachment("file", "n", "c")] * 17}, "attachments"),
        (("b", "x"), {"attachments": [Attachment("file", "n" * 257, "c")]}, "attachments.name"),
        (("b", "x"), {"attachments": [Attachment("file", "n", "c" * 524_289)]}, "attachments.content"),
        (("b", "x"), {"attachments": [Attachment("link", "n", "c")]}, "attachments.type"),  # type: ignore[arg-type]
        (("b", "x"), {"control": Control("-x", 1)}, "control.type"),
        (("b", "x"), {"control": Control("x", 0)}, "control.version"),
        (("b", "x"), {"control": Control("x", 1, "d" * 16_384)}, "control.data"),
        (("b", "x"), {"control": Control("x", 1), "reply_to": "m"}, "control"),
    ],
)
def test_a_message_over_the_limits_never_leaves(arguments: tuple[str, str], options: Any, field: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            with pytest.raises(ClientError) as caught:
                await made.send(*arguments, **options)
            assert (caught.value.code, caught.value.field) == ("INVALID_MESSAGE", field)
            await made.presence(status="s")
            await line.expect("presence")

    run(scenario)


def test_a_frame_over_the_limit_never_leaves_and_poisons_nothing() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            large = [Attachment("file", "n", "c" * 524_288)] * 2
            with pytest.raises(ClientError) as caught:
                await made.send("b", "x", attachments=large)
            assert caught.value.code == "FRAME_TOO_LARGE"
            await made.presence(status="s")
            await line.expect("presence")

    run(scenario)


def test_an_id_in_flight_cannot_be_used_twice() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x", message_id="m"))
            await line.expect("send")
            with pytest.raises(ClientError) as caught:
                await made.send("b", "y", message_id="m")
            assert caught.value.code == "INVALID_MESSAGE"
            line.write(accepted("m", "d"), delivered("m", "d"))
            await settled(sending)

    run(scenario)
