# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_intercom.intercom import client_health
from agent_intercom.intercom.client import IntercomClient, Timeouts, capture_scope, health, random_id
from agent_intercom.intercom.client_errors import (
    AskCancelledError,
    AskTimeout,
    ClientError,
    DeliveryFailed,
    SendTimeout,
)
from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Attachment,
    Connected,
    Control,
    Disconnected,
    Event,
    EventsLost,
    Joined,
    Left,
    Message,
    Presence,
)
from agent_intercom.intercom.contract import POLICY_SEMANTICS_HASH
from tests.unit.fakebroker import (
    HANG,
    FakeBroker,
    Frame,
    Line,
    accepted,
    delivered,
    failed,
    incoming,
    info,
    registered,
    run,
)

SCOPE = "Scope_0123456789abcdef"
QUICK = Timeouts(connect=HANG, send=HANG, list=HANG, ask_control=HANG, close=HANG)


def client(broker: FakeBroker, **options: Any) -> IntercomClient:
    defaults: dict[str, Any] = {
        "cwd": "/src",
        "model": "m",
        "scope": None,
        "session_id": "me",
        "timeouts": QUICK,
        "reconnect_delays": (0.0,),
    }
    return IntercomClient(broker.path, **{**defaults, **options})


@asynccontextmanager
async def connected(broker: FakeBroker, **options: Any) -> AsyncIterator[tuple[IntercomClient, Line]]:
    """A registered client and the broker's end of its connection."""
    made = client(broker, **options)
    entering = asyncio.ensure_future(made.__aenter__())
    line = await broker.accept()
    await line.register()
    await entering
    try:
        yield made, line
    finally:
        await made.close()


class Reader:
    """Reads a client's events one at a time."""

    def __init__(self, made: IntercomClient) -> None:
        self._events = made.events()

    async def next(self) -> Event:
        async with asyncio.timeout(HANG):
            return await anext(self._events)

    async def skip_to(self, kind: type[Any]) -> Any:
        while not isinstance(event := await self.next(), kind):
            pass
        return event


async def settled(task: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(HANG):
        return await task


# Registering.


def test_register_has_exactly_the_contracts_keys() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, name="n", status="s", scope=SCOPE, pid=7, started_at=8, runtime_instance_id="r")
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        frame = await line.register()
        await entering
        session = frame.pop("session")
        assert frame == {
            "type": "register",
            "protocol": "pi-intercom",
            "version": 4,
            "sessionId": "me",
            "scopeId": SCOPE,
        }
        assert session.pop("lastActivity") > 8
        assert session == {
            "name": "n",
            "status": "s",
            "cwd": "/src",
            "model": "m",
            "pid": 7,
            "startedAt": 8,
            "runtimeInstanceId": "r",
        }
        assert made.session_id == "me"
        assert made.connected
        await made.close()
        assert await line.at_end()

    run(scenario)


def test_the_brokers_choice_of_an_id_is_kept_for_life() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, session_id=None)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        assert "sessionId" not in await line.read()
        line.write(registered("chosen"))
        await entering
        line.close()
        again = await broker.accept()
        assert (await again.register())["sessionId"] == "chosen"
        await made.close()

    run(scenario)


def test_a_reconnect_keeps_id_scope_and_runtime_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: FakeBroker) -> None:
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", SCOPE)
        made = IntercomClient(broker.path, cwd="/", model="m", session_id="me", reconnect_delays=(0.0,))
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "Other_scope_0123456789")
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        first = await line.register()
        await entering
        events = Reader(made)
        assert await events.next() == Connected("me", resumed=False)
        line.close()
        second = await (await broker.accept()).register()
        assert first["scopeId"] == second["scopeId"] == SCOPE
        for key in ("pid", "startedAt", "runtimeInstanceId"):
            assert first["session"][key] == second["session"][key]
        assert await events.next() == Disconnected(None)
        assert await events.next() == Connected("me", resumed=True)
        await made.close()

    run(scenario)


@pytest.mark.parametrize("value", ["short", "x" * 129, "with space 0123456789", "Scope_0123456789\n"])
def test_an_invalid_scope_stops_before_a_socket_is_opened(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: FakeBroker) -> None:
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", value)
        with pytest.raises(ClientError) as caught:
            IntercomClient(broker.path, cwd="/", model="m")
        assert caught.value.code == "SCOPE_INVALID"
        assert value not in repr(caught.value)
        assert caught.value.__cause__ is None
        assert broker.idle()

    run(scenario)


def test_an_empty_scope_is_unscoped() -> None:
    assert capture_scope("") is None
    assert capture_scope(None) is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cwd": ""}, "cwd"),
        ({"cwd": "x" * 4097}, "cwd"),
        ({"model": ""}, "model"),
        ({"name": "\U0001f600" * 129}, "name"),
        ({"status": "x" * 513}, "status"),
        ({"runtime_instance_id": "x" * 257}, "runtimeInstanceId"),
        ({"session_id": " "}, "session_id"),
        ({"session_id": "x" * 513}, "session_id"),
    ],
)
def test_claims_over_the_limits_are_refused_at_once(options: dict[str, Any], field: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        with pytest.raises(ClientError) as caught:
            client(broker, **options)
        assert (caught.value.code, caught.value.field) == ("INVALID_SESSION", field)

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "registered", "sessionId": "me"},
        {"type": "registered", "sessionId": "me", "protocol": "pi-intercom", "version": 3},
        {"type": "registered", "sessionId": "me", "protocol": "other", "version": 4},
        {"type": "registered", "sessionId": "me", "protocol": "pi-intercom", "version": 4, "extra": 1},
        {"type": "registered", "sessionId": "another", "protocol": "pi-intercom", "version": 4},
        {"type": "session_left", "sessionId": "x"},
        {"type": "unheard_of"},
        [],
    ],
)
def test_another_protocol_ends_the_client_for_good(answer: Any) -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, patient=True)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write(answer)
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert caught.value.code == "INCOMPATIBLE"
        assert await line.at_end()
        assert broker.idle()

    run(scenario)


def test_version_four_may_be_written_as_a_fraction() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write({**registered("me"), "version": 4.0})
        await settled(entering)
        await made.close()

    run(scenario)


@pytest.mark.parametrize("code", ["SESSION_ID_IN_USE", "INVALID_REQUEST", "TOO_MANY_SESSIONS"])
def test_a_refused_registration_carries_its_code(code: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        entering = asyncio.ensure_future(client(broker).__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write({"type": "error", "code": code, "error": "why"})
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert (caught.value.code, str(caught.value)) == (code, "why")
        assert await line.at_end()

    run(scenario)


def test_a_full_broker_is_tried_again_after_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.close()
            again = await broker.accept()
            await again.expect("register")
            again.write({"type": "error", "code": "TOO_MANY_SESSIONS", "error": "full"})
            await (await broker.accept()).register()
            await Reader(made).skip_to(Disconnected)

    run(scenario)


def test_an_id_lost_to_another_ends_the_client_and_what_waits() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x"))
            await line.expect("send")
            line.close()
            again = await broker.accept()
            await again.expect("register")
            again.write({"type": "error", "code": "SESSION_ID_IN_USE", "error": "why"})
            with pytest.raises(ClientError) as caught:
                await settled(sending)
            assert caught.value.code == "SESSION_ID_IN_USE"
            with pytest.raises(ClientError):
                await Reader(made).skip_to(type(None))
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "SESSION_ID_IN_USE"

    run(scenario)


def test_no_broker_is_told_at_once_and_nothing_is_started() -> None:
    async def scenario(broker: FakeBroker) -> None:
        await broker.stop()
        with pytest.raises(ClientError) as caught:
            await client(broker).__aenter__()
        assert caught.value.code == "BROKER_UNREACHABLE"
        assert str(broker.path) not in str(caught.value)

    run(scenario)


def test_a_patient_client_waits_for_a_broker() -> None:
    async def scenario(broker: FakeBroker) -> None:
        await broker.stop()
        made = client(broker, patient=True)
        entering = asyncio.ensure_future(made.__aenter__())
        await asyncio.sleep(0)
        await broker.start()
        await (await broker.accept()).register()
        await settled(entering)
        await made.close()

    run(scenario)


def test_the_first_address_that_answers_is_taken() -> None:
    async def scenario(broker: FakeBroker) -> None:
        paths = [broker.path.with_name("none"), broker.path]
        made = IntercomClient(paths, cwd="/", model="m", scope=None)
        entering = asyncio.ensure_future(made.__aenter__())
        await (await broker.accept()).register()
        await settled(entering)
        await made.close()

    run(scenario)


def test_a_connection_lost_before_registered_is_tried_three_times() -> None:
    async def scenario(broker: FakeBroker) -> None:
        entering = asyncio.ensure_future(client(broker).__aenter__())
        for _ in range(3):
            line = await broker.accept()
            await line.expect("register")
            line.close()
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert caught.value.code == "CONNECTION_LOST"
        assert broker.idle()

    run(scenario)


def test_a_broker_that_does_not_register_is_given_up() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, timeouts=Timeouts(connect=0.01))
        with pytest.raises(ClientError) as caught:
            await made.__aenter__()
        assert caught.value.code == "TIMEOUT"

    run(scenario)


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


# Sending.


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


# Asking.


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


# The rest.


def test_list_is_asked_again_after_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            listing = asyncio.ensure_future(made.list())
            await line.expect("list")
            line.close()
            again = await broker.accept()
            await again.register()
            request = await again.expect("list")
            again.write({"type": "sessions", "requestId": request["requestId"], "sessions": [info("me"), info("b")]})
            assert [session.id for session in await settled(listing)] == ["me", "b"]

    run(scenario)


def test_list_without_an_answer_times_out() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, timeouts=QUICK._replace(list=0.01)) as (made, _):
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "TIMEOUT"

    run(scenario)


def test_presence_is_kept_across_reconnects() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, name="old") as (made, line):
            await made.presence(name="new", status="busy")
            assert await line.read() == {"type": "presence", "name": "new", "status": "busy"}
            line.close()
            again = await broker.accept()
            session = (await again.register())["session"]
            assert (session["name"], session["status"]) == ("new", "busy")
            with pytest.raises(ClientError):
                await made.presence(status="x" * 513)

    run(scenario)


@pytest.mark.parametrize("preserve", [True, False])
def test_unregister_is_written_before_the_end(preserve: bool) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            await made.unregister(preserve_asks=preserve)
            assert await line.read() == {"type": "unregister", "preserveAsks": preserve}
            assert await line.at_end()
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "CLOSED"

    run(scenario)


def test_close_fails_what_waits_and_ends_the_events() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x"))
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=None))
            await line.expect("send")
            await line.expect("send")
            await made.close()
            for waiting in (sending, asking):
                with pytest.raises(ClientError) as caught:
                    await settled(waiting)
                assert caught.value.code == "CLOSED"
            assert [type(event) async for event in made.events()] == [Connected]

    run(scenario)


def test_random_ids_are_uuids() -> None:
    import uuid

    found = uuid.UUID(random_id())
    assert (found.version, found.variant) == (4, uuid.RFC_4122)


# The health probe.

HEALTHY: Frame = {
    "type": "health_ok",
    "protocol": "pi-intercom",
    "version": 4,
    "endpoint": "local",
    "remoteAccess": {
        "feature": "remote-access-v1",
        "policySemanticsVersion": 2,
        "policySemanticsHash": POLICY_SEMANTICS_HASH,
    },
}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "compatible"),
        ({"version": 3}, "incompatible"),
        ({"version": True}, "incompatible"),
        ({"remoteAccess": None}, "incompatible"),
        ({"endpoint": "remote"}, "incompatible"),
        ({"type": "error"}, "unreachable"),
        ({"requestId": "other"}, "unreachable"),
    ],
)
def test_health_judges_the_first_frame(change: Frame, state: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        probing = asyncio.ensure_future(health(broker.path, HANG))
        line = await broker.accept()
        request = await line.expect("health")
        line.write({**HEALTHY, "requestId": request["requestId"], **change})
        found = await settled(probing)
        assert found.state == state
        assert await line.at_end()

    run(scenario)


def test_health_of_nobody_and_of_a_silent_listener() -> None:
    async def scenario(broker: FakeBroker) -> None:
        assert (await health(broker.path, 0.01)).state == "unreachable"
        assert (await health(broker.path.with_name("none"))).state == "unreachable"
        with pytest.raises(ClientError) as caught:
            client_health.require(await health(broker.path.with_name("none")))
        assert caught.value.code == "BROKER_UNREACHABLE"

    run(scenario)
