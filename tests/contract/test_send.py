# SPDX-License-Identifier: Apache-2.0
"""Section 2.6: the message, its delivery and its acknowledgement."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import (
    Frame,
    Peer,
    compact,
    failed,
    fresh,
    fresh_scope,
    info,
    message,
    refused,
    send,
)

FORMAT = "Invalid message format"


def strangers(broker: Broker) -> tuple[Peer, Peer]:
    """Two sessions in different scopes, so that neither sees the other come and go."""
    return broker.join(fresh("a"), fresh_scope()), broker.join(fresh("b"), fresh_scope())


def delivered(sender: Peer, target: Peer, body: Frame) -> str:
    """Carry `body` from `sender` to `target` and acknowledge it; the delivery id."""
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    assert target.received(info(sender.id), body) == delivery
    target.acknowledge(delivery)
    sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    return delivery


# The message's shape.

GOOD: dict[str, Frame] = {
    "smallest": {},
    "empty text": {"content": {"text": ""}},
    "fraction": {"timestamp": 1.5},
    "negative": {"timestamp": -1},
    "large number": {"timestamp": 1e300},
    "expects no reply": {"expectsReply": False},
    "expects a reply": {"expectsReply": True},
    "no attachments": {"content": {"text": "", "attachments": []}},
    "attachment": {"content": {"text": "", "attachments": [{"type": "file", "name": "", "content": ""}]}},
    "all kinds": {
        "content": {
            "text": "",
            "attachments": [
                {"type": "file", "name": "n", "content": "c", "language": ""},
                {"type": "snippet", "name": "n" * 256, "content": "c", "language": "x" * 10_000},
                {"type": "context", "name": "\U0001f600" * 128, "content": "c"},
            ],
        }
    },
    "sixteen attachments": {
        "content": {"text": "", "attachments": [{"type": "file", "name": "n", "content": "c"}] * 16}
    },
    "longest text": {"content": {"text": "x" * 262_144}},
    "longest text in bytes": {"content": {"text": "\u00e9" * 131_072}},
    "longest text of surrogates": {"content": {"text": "\ud800" * 87_381}},
    "longest attachment": {
        "content": {"text": "", "attachments": [{"type": "file", "name": "n", "content": "x" * 524_288}]}
    },
    "odd characters": {"content": {"text": "\0\u2028\ud800\U0001f600\x7f"}},
    "control": {"content": {"text": "", "control": {"type": "a", "version": 1}}},
    "control with data": {"content": {"text": "x", "control": {"type": "A0._:/-", "version": 2, "data": {"a": [1]}}}},
    "control with null data": {"content": {"text": "", "control": {"type": "a", "version": 1, "data": None}}},
    "control with more keys": {"content": {"text": "", "control": {"type": "a", "version": 1, "more": [None]}}},
    "control with expectsReply false": {
        "expectsReply": False,
        "content": {"text": "", "control": {"type": "a", "version": 1}},
    },
    "control with the longest type": {"content": {"text": "", "control": {"type": "a" * 128, "version": 1}}},
    "control with the longest data": {
        "content": {"text": "", "control": {"type": "a", "version": 1, "data": "x" * (16_384 - 2)}}
    },
    "control that looks like Boss": {"content": {"text": "", "control": {"type": "bossy.x", "version": 1}}},
}


@pytest.mark.parametrize("name", GOOD)
def test_valid_message_is_delivered_verbatim(broker: Broker, name: str) -> None:
    sender, target = strangers(broker)
    delivered(sender, target, message(**GOOD[name]))


def attachment(**members: Any) -> Frame:
    return {"content": {"text": "", "attachments": [{"type": "file", "name": "n", "content": "c", **members}]}}


def control(**members: Any) -> Frame:
    return {"content": {"text": "", "control": {"type": "a", "version": 1, **members}}}


BAD: list[Frame] = [{"timestamp": value} for value in (None, "1", True, [], {})]
BAD += [{"replyTo": value} for value in (None, "", "x" * 257, "\U0001f600" * 129, 1, True, [])]
BAD += [{"expectsReply": value} for value in (None, 0, 1, "true", [])]
BAD += [{"content": value} for value in (None, "text", 1, [], {}, {"text": None}, {"text": 1}, {"text": ["x"]})]
BAD += [{"content": {"text": value}} for value in ("x" * 262_145, "\u00e9" * 131_073, "\ud800" * 87_382)]
BAD += [{"content": {"text": "", "attachments": value}} for value in (None, {}, "x", 1, [None], [1], [[]], [{}])]
BAD += [{"content": {"text": "", "attachments": [{"type": "file", "name": "n", "content": "c"}] * 17}}]
BAD += [attachment(type=value) for value in (None, "File", "image", 1, "")]
BAD += [attachment(name=value) for value in (None, 1, "n" * 257, "\U0001f600" * 128 + "x")]
BAD += [attachment(content=value) for value in (None, 1, [], "x" * 524_289, "\u20ac" * 174_763)]
BAD += [attachment(language=value) for value in (None, 1, [])]
BAD += [attachment(extra=1), attachment(size=None)]
BAD += [{"content": {"text": "", "attachments": [{"type": "file", "name": "n"}]}}]
BAD += [{"content": {"text": "", "extra": 1}}, {"extra": 1}, {"control": {"type": "a", "version": 1}}]
BAD += [{"from": "x"}, {"to": "x"}, {"scopeId": "A" * 16}, {"": 1}]
BAD += [{"content": {"text": "", "control": value}} for value in (None, "a", 1, [], {}, True)]
BAD += [control(type=value) for value in (None, 1, "", "a" * 129, "-a", ".a", "a b", "\u00e9", "a\n", "a\0", "a+")]
BAD += [control(version=value) for value in (None, 0, -1, 1.5, "1", True, [])]
BAD += [control(data=value) for value in ("x" * 16_383, ["\u20ac" * 5_461])]
BAD += [{"replyTo": "x", **control()}, {"expectsReply": True, **control()}]
BAD += [{"content": {"text": "", "control": {"version": 1}}}, {"content": {"text": "", "control": {"type": "a"}}}]
BAD += [{"content": {"control": {"type": "a", "version": 1}}}]


@pytest.mark.parametrize("change", BAD, ids=lambda change: repr(change)[:60])
def test_invalid_message_is_refused_and_the_connection_stays(broker: Broker, change: Frame) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message(**change)
    peer.send(send(peer.id, body))
    peer.expect(refused(body["id"], "INVALID_MESSAGE", FORMAT))
    peer.expect_silence()


@pytest.mark.parametrize("key", ["timestamp", "content"])
def test_message_without_a_required_key(broker: Broker, key: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message()
    del body[key]
    peer.send(send(peer.id, body))
    peer.expect(refused(body["id"], "INVALID_MESSAGE", FORMAT))


@pytest.mark.parametrize(
    "value", [None, "", 1, True, [], {}, "x" * 257, "\U0001f600" * 128 + "x"], ids=lambda v: repr(v)[:9]
)
def test_message_id_that_cannot_be_echoed_is_unknown(broker: Broker, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, {**message(), "id": value}))
    peer.expect(refused("unknown", "INVALID_MESSAGE", FORMAT))


def test_message_without_an_id_is_unknown(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, {"timestamp": 1, "content": {"text": ""}}))
    peer.expect(refused("unknown", "INVALID_MESSAGE", FORMAT))


@pytest.mark.parametrize("value", [None, 1, "x", [], True, {}], ids=repr)
def test_message_that_is_no_message(broker: Broker, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, value))
    peer.expect(refused("unknown", "INVALID_MESSAGE", FORMAT))


def test_send_without_a_message(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "send", "to": peer.id})
    peer.expect(refused("unknown", "INVALID_MESSAGE", FORMAT))


def test_send_without_a_target(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "send", "message": message("m")})
    peer.expect(refused("m", "INVALID_MESSAGE", FORMAT))


@pytest.mark.parametrize("text", [b"1e400", b"-1e400", b"9" * 400])
def test_timestamp_that_is_infinite_as_a_double(broker: Broker, text: bytes) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send_payload(compact(send(peer.id, message("m", timestamp=987654321))).replace(b"987654321", text))
    peer.expect(refused("m", "INVALID_MESSAGE", FORMAT))


@pytest.mark.parametrize("version", [b"1.0", b"1e0", b"10e-1"])
def test_control_version_in_any_spelling(broker: Broker, version: bytes) -> None:
    peer = broker.join(fresh(), fresh_scope())
    payload = compact(send(peer.id, message("m", **control())))
    peer.send_payload(payload.replace(b'"version":1', b'"version":' + version))
    peer.accepted("m")


@pytest.mark.parametrize("version", [b"1e400", b"-1e400", b"9" * 400, b"-" + b"9" * 400])
def test_control_version_that_is_infinite_as_a_double(broker: Broker, version: bytes) -> None:
    peer = broker.join(fresh(), fresh_scope())
    payload = compact(send(peer.id, message("m", **control())))
    peer.send_payload(payload.replace(b'"version":1', b'"version":' + version))
    peer.expect(refused("m", "INVALID_MESSAGE", FORMAT))
    peer.expect_silence()


@pytest.mark.parametrize("number", [b"1e400", b"9" * 400, b"123456789012345678901234567890", b"-0", b"1E2"])
@pytest.mark.parametrize("text", [b"plain", b"\\ud800", b"\xff"], ids=["plain", "surrogate", "malformed"])
def test_odd_numbers_in_control_data_go_out_as_json(broker: Broker, number: bytes, text: bytes) -> None:
    """Whatever becomes of an infinite number, the recipient's parser has to accept the frame."""
    sender, target = strangers(broker)
    body = message("m", **control(data={"k": 987654321}))
    payload = compact(send(target.id, body)).replace(b"987654321", number)
    sender.send_payload(payload.replace(b'"text":""', b'"text":"' + text + b'"'))
    delivery = sender.accepted("m")
    assert target.expect_type("message")["deliveryId"] == delivery


def test_infinite_timestamp_beside_a_lone_surrogate(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    payload = compact(send(peer.id, message("\ud800", timestamp=987654321)))
    peer.send_payload(payload.replace(b"987654321", b"1e400"))
    peer.expect(refused("\ud800", "INVALID_MESSAGE", FORMAT))


LONE = "\ud800"


@pytest.mark.parametrize(
    "change",
    [
        {LONE: 1},
        {"content": {"text": "", LONE: 1}},
        {"content": {"text": "", "attachments": [{"type": LONE, "name": "n", "content": "c"}]}},
        {"content": {"text": "", "attachments": [{"type": "file", "name": "n", "content": "c", LONE: 1}]}},
        {"content": {"text": "", "control": {"type": LONE, "version": 1}}},
        {"content": {"text": "", "control": {"type": "a", "version": LONE}}},
    ],
    ids=ascii,
)
def test_lone_surrogates_where_they_are_invalid(broker: Broker, change: Frame) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, message("m", **change)))
    peer.expect(refused("m", "INVALID_MESSAGE", FORMAT))
    peer.expect_silence()


def test_lone_surrogates_wherever_they_are_valid(broker: Broker) -> None:
    scope = fresh_scope()
    target, sender = broker.join(LONE + fresh(), scope, name=LONE), broker.join(fresh(), scope)
    attached = {"type": "file", "name": LONE, "content": LONE, "language": LONE}
    slot = {"type": "a", "version": 1, "data": {LONE: LONE}, LONE: 1}
    content = {"text": LONE, "attachments": [attached], "control": slot}
    target.expect_type("session_joined")
    delivered(sender, target, message(LONE, content=content))
    sender.send({"type": "list", "requestId": LONE, LONE: LONE})
    assert sender.expect_type("sessions")["requestId"] == LONE
    sender.send({"type": "defer_ask", "requestId": LONE, "messageId": LONE, LONE: 1})
    assert sender.expect_type("ask_control_result")["requestId"] == LONE
    sender.send(
        {"type": "presence", "status": LONE, LONE: 1}, {"type": "message_received", "deliveryId": LONE, LONE: 1}
    )
    sender.send({"type": "unregister", LONE: 1})
    sender.expect_silence()


def test_control_data_is_measured_as_compact_json(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message("m", **control(data="DATA"))
    payload = compact(send(peer.id, body)).replace(b'"DATA"', b'"' + b"\\u0041" * 10_000 + b'"' + b" " * 20_000)
    peer.send_payload(payload)
    peer.accepted("m")


@pytest.mark.parametrize("length", [256, 1])
def test_message_id_length_is_in_utf_16_units(broker: Broker, length: int) -> None:
    sender, target = strangers(broker)
    delivered(sender, target, message("x" * length))
    delivered(sender, target, message("\U0001f600" * (length // 2 or 1)))


def test_malformed_utf_8_in_a_message_is_delivered_as_replacement_characters(broker: Broker) -> None:
    sender, target = strangers(broker)
    payload = compact(send(target.id, message("m", "TEXT"))).replace(b"TEXT", b"a\xff\xe2\x82b")
    sender.send_payload(payload)
    delivery = sender.accepted("m")
    assert target.received(info(sender.id), message("m", "a\ufffd\ufffdb")) == delivery


def test_replacement_characters_count_three_bytes(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    payload = compact(send(peer.id, message("m", "TEXT")))
    peer.send_payload(payload.replace(b"TEXT", b"\xff" * 87_382))
    peer.expect(refused("m", "INVALID_MESSAGE", FORMAT))
    peer.send_payload(payload.replace(b"TEXT", b"\xff" * 87_381))
    peer.accepted("m")


def test_last_of_two_equal_keys_wins_in_a_message(broker: Broker) -> None:
    sender, target = strangers(broker)
    payload = compact(send(target.id, message("m"))).replace(b'"text":"hi"', b'"text":"first","text":"hi"')
    sender.send_payload(payload)
    sender.accepted("m")
    target.received(info(sender.id), message("m"))


def test_refused_message_leaves_no_trace(broker: Broker) -> None:
    sender, target = strangers(broker)
    sender.send(send(target.id, message("m", extra=1)))
    sender.expect(refused("m", "INVALID_MESSAGE", FORMAT))
    delivered(sender, target, message("m"))


# Acceptance and acknowledgement.


def test_accepted_then_message_then_delivered(broker: Broker) -> None:
    sender, target = strangers(broker)
    delivered(sender, target, message())
    sender.expect_silence()
    target.expect_silence()


def test_message_to_oneself_is_accepted_before_it_arrives(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message()
    peer.send(send(peer.id, body))
    delivery = peer.accepted(body["id"])
    assert peer.received(info(peer.id), body) == delivery
    peer.acknowledge(delivery)
    peer.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})


def test_delivery_ids_differ(broker: Broker) -> None:
    sender, target = strangers(broker)
    assert len({delivered(sender, target, message()) for _ in range(20)}) == 20


def test_same_message_id_of_two_senders(broker: Broker) -> None:
    first, target = strangers(broker)
    second = broker.join(fresh(), fresh_scope())
    assert delivered(first, target, message("m", "one")) != delivered(second, target, message("m", "two"))


def test_messages_arrive_in_the_order_of_sending(broker: Broker) -> None:
    sender, target = strangers(broker)
    bodies = [message() for _ in range(60)]
    sender.send(*(send(target.id, body) for body in bodies))
    assert [target.recv()["message"]["id"] for _ in bodies] == [body["id"] for body in bodies]
    assert [sender.recv()["messageId"] for _ in bodies] == [body["id"] for body in bodies]


def test_acknowledgements_may_come_in_any_order(broker: Broker) -> None:
    sender, target = strangers(broker)
    bodies = [message() for _ in range(5)]
    sender.send(*(send(target.id, body) for body in bodies))
    ids = [sender.accepted(body["id"]) for body in bodies]
    for body, delivery in reversed(list(zip(bodies, ids, strict=True))):
        target.acknowledge(delivery)
        sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})


def test_row_rejected(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    target.received(info(sender.id), body)
    reason = "r" * 1_024
    target.send(
        {"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": reason}
    )
    sender.expect(failed(body["id"], "CONFLICTING_MESSAGE_ID", reason))
    target.acknowledge(delivery)
    target.barrier()
    sender.expect_silence()


@pytest.mark.parametrize("reason", ["", "\U0001f600" * 512, "\ud800"], ids=["empty", "longest", "surrogate"])
def test_rejection_reason_is_passed_on(broker: Broker, reason: str) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    target.send(
        {"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": reason}
    )
    sender.expect(failed(body["id"], "CONFLICTING_MESSAGE_ID", reason))


def test_row_timeout(start: StartBroker) -> None:
    broker = start({"ack_timeout_ms": 100})
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    sender.expect(failed(body["id"], "DELIVERY_TIMEOUT", "Recipient did not acknowledge the message in time"))
    target.received(info(sender.id), body)
    target.acknowledge(delivery)
    target.barrier()
    sender.expect_silence()


@pytest.mark.parametrize("how", ["closes", "unregisters", "breaks a rule", "breaks the framing"])
def test_row_recipient_goes(broker: Broker, how: str) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    sender.accepted(body["id"])
    leave(target, how)
    reason = "Recipient disconnected before acknowledging the message"
    sender.expect(failed(body["id"], "RECIPIENT_DISCONNECTED", reason))


@pytest.mark.parametrize("how", ["closes", "unregisters", "breaks a rule", "breaks the framing"])
def test_row_sender_goes(broker: Broker, how: str) -> None:
    """Nobody is there to be told; the late acknowledgement is ignored, and so is the id's past."""
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    target.received(info(sender.id), body)
    leave(sender, how)
    broker.connect().barrier()
    again = broker.join(sender.id, fresh_scope())
    target.acknowledge(delivery)
    target.expect_silence()
    again.expect_silence()
    assert delivered(again, target, body) != delivery


def test_sender_that_unregisters_is_told_nothing(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    sender.send({"type": "unregister"})
    sender.expect_silence()
    target.received(info(sender.id), body)
    target.acknowledge(delivery)
    target.barrier()
    sender.expect_silence()


def leave(peer: Peer, how: str) -> None:
    if how == "closes":
        peer.close()
    elif how == "unregisters":
        peer.send({"type": "unregister"})
        peer.barrier()
    elif how == "breaks a rule":
        peer.send({"type": "nonsense"})
    else:
        peer.send_payload(b"{")


@pytest.mark.parametrize("kind", ["message_received", "message_rejected"])
def test_acknowledgement_of_nothing_is_ignored(broker: Broker, kind: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": kind, "deliveryId": fresh(), "code": "CONFLICTING_MESSAGE_ID", "reason": "r"})
    peer.expect_silence()


@pytest.mark.parametrize("kind", ["message_received", "message_rejected"])
def test_acknowledgement_by_somebody_else_is_ignored(broker: Broker, kind: str) -> None:
    sender, target = strangers(broker)
    other = broker.join(fresh(), fresh_scope())
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    for peer in (other, sender):
        peer.send({"type": kind, "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": "r"})
        peer.expect_silence()
    target.acknowledge(delivery)
    sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})


def test_second_acknowledgement_is_ignored(broker: Broker) -> None:
    sender, target = strangers(broker)
    delivery = delivered(sender, target, message())
    target.acknowledge(delivery)
    target.send({"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": "r"})
    target.expect_silence()
    sender.expect_silence()


@pytest.mark.parametrize("value", [None, 1, True, [], {}], ids=repr)
def test_message_received_delivery_id_is_a_string(broker: Broker, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "message_received", "deliveryId": value})
    peer.expect_error("INVALID_REQUEST", "Invalid message_received message")


REJECTED = {"deliveryId": "x", "code": "CONFLICTING_MESSAGE_ID", "reason": "r"}


@pytest.mark.parametrize(
    "change",
    [
        *({"deliveryId": value} for value in (None, 1, [])),
        *({"code": value} for value in (None, 1, "", "DELIVERY_TIMEOUT", "conflicting_message_id")),
        *({"reason": value} for value in (None, 1, [], "r" * 1_025, "\U0001f600" * 513)),
    ],
    ids=lambda change: repr(change)[:40],
)
def test_message_rejected_fields(broker: Broker, change: Frame) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "message_rejected", **REJECTED, **change})
    peer.expect_error("INVALID_REQUEST", "Invalid message_rejected message")


@pytest.mark.parametrize("key", list(REJECTED))
def test_message_rejected_without_a_key(broker: Broker, key: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    frame = {"type": "message_rejected", **REJECTED}
    del frame[key]
    peer.send(frame)
    peer.expect_error("INVALID_REQUEST", "Invalid message_rejected message")


# Steps 1 and 2: what was sent before.

USED = "Message ID was already used with a different payload"
PENDING = "Message ID is already pending with a different payload"

OTHERWISE: list[Frame] = [
    {"content": {"text": "other"}},
    {"expectsReply": False},
    {"expectsReply": True},
    {"replyTo": "x"},
    {"content": {"text": "hi", "attachments": []}},
    {"content": {"text": "hi", "control": {"type": "a", "version": 1}}},
]


def test_step_2_same_payload_is_acknowledged_again_without_a_delivery(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    delivery = delivered(sender, target, body)
    for again in (body, {**body, "timestamp": 99}):  # the time is no part of the payload
        sender.send(send(target.id, again))
        assert sender.accepted(body["id"]) == delivery
        sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    target.expect_silence()


@pytest.mark.parametrize("change", OTHERWISE, ids=repr)
def test_step_2_other_payload_after_delivery(broker: Broker, change: Frame) -> None:
    sender, target = strangers(broker)
    body = message()
    delivered(sender, target, body)
    sender.send(send(target.id, {**body, **change}))
    sender.expect(refused(body["id"], "DUPLICATE_MESSAGE_ID", USED))
    target.expect_silence()


def test_step_2_every_key_of_a_control_belongs_to_the_payload(broker: Broker) -> None:
    sender, target = strangers(broker)
    delivered(sender, target, message("m", **control(more=1)))
    for other in (control(more=2), control(), control(more=1, data=None)):
        sender.send(send(target.id, message("m", **other)))
        sender.expect(refused("m", "DUPLICATE_MESSAGE_ID", USED))


def test_step_2_other_spelling_of_the_target_is_another_payload(broker: Broker) -> None:
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), scope, name="target")
    sender.expect_type("session_joined")
    body = message()
    delivered(sender, target, body)
    sender.send(send("target", body))
    sender.expect(refused(body["id"], "DUPLICATE_MESSAGE_ID", USED))


def test_step_2_survives_a_reconnect_of_the_sender(broker: Broker) -> None:
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), fresh_scope())
    body = message()
    delivery = delivered(sender, target, body)
    again = broker.join(sender.id, scope)
    again.send(send(target.id, body))
    assert again.accepted(body["id"]) == delivery
    again.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    target.expect_silence()


def test_step_2_target_is_gone_meanwhile(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    delivered(sender, target, body)
    target.send({"type": "unregister"})
    target.barrier()
    sender.send(send(target.id, body))
    sender.expect(refused(body["id"], "SESSION_NOT_FOUND", "Session not found"))
    sender.send(send(sender.id, {**body, "timestamp": 5}))  # the id was let go, so another payload is new
    sender.accepted(body["id"])


def test_step_2_failed_delivery_is_tried_again_with_the_same_payload(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    first = sender.accepted(body["id"])
    target.send({"type": "message_rejected", "deliveryId": first, "code": "CONFLICTING_MESSAGE_ID", "reason": "r"})
    sender.expect_type("delivery_failed")
    target.expect_type("message")
    assert delivered(sender, target, body) != first


def test_step_2_failed_delivery_still_binds_the_id_to_its_payload(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    target.send({"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": "r"})
    sender.expect_type("delivery_failed")
    sender.send(send(target.id, {**body, "content": {"text": "other"}}))
    sender.expect(refused(body["id"], "DUPLICATE_MESSAGE_ID", USED))


def test_step_2_refusal_leaves_the_id_free(broker: Broker) -> None:
    sender, target = strangers(broker)
    sender.send(send("nobody", message("m", "one")))
    sender.expect(refused("m", "SESSION_NOT_FOUND", "Session not found"))
    delivered(sender, target, message("m", "two"))


def test_step_2_is_forgotten_in_time(start: StartBroker) -> None:
    broker = start({"recent_delivery_ms": 1_000})
    sender, target = strangers(broker)
    delivered(sender, target, message("m", "first"))
    body = message("m", "second")
    sender.send(send(target.id, body))
    answer = sender.recv()
    while answer["type"] == "delivery_failed":
        assert answer == refused("m", "DUPLICATE_MESSAGE_ID", USED)
        time.sleep(0.05)  # only time makes the broker forget
        sender.send(send(target.id, body))
        answer = sender.recv()
    assert answer["type"] == "delivery_accepted"
    target.received(info(sender.id), body)


# Step 3: what is still waiting.


def test_step_3_same_payload_while_pending(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    target.received(info(sender.id), body)
    sender.send(send(target.id, body))
    assert sender.accepted(body["id"]) == delivery
    target.expect_silence()
    target.acknowledge(delivery)
    sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    sender.expect_silence()


@pytest.mark.parametrize("change", OTHERWISE, ids=repr)
def test_step_3_other_payload_while_pending(broker: Broker, change: Frame) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    sender.send(send(target.id, {**body, **change}))
    sender.expect(refused(body["id"], "DUPLICATE_MESSAGE_ID", PENDING))
    target.acknowledge(delivery)
    sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})


def test_step_3_precedes_step_5(broker: Broker) -> None:
    sender, target = strangers(broker)
    body = message()
    sender.send(send(target.id, body))
    sender.accepted(body["id"])
    sender.send(send("nobody", body))
    sender.expect(refused(body["id"], "DUPLICATE_MESSAGE_ID", PENDING))


# Step 4: caps.

TOO_MANY = "Too many messages are waiting for receiver acknowledgement"


def test_step_4_64_pending_of_one_sender(broker: Broker) -> None:
    sender, target = strangers(broker)
    bodies = [message() for _ in range(65)]
    sender.send(*(send(target.id, body) for body in bodies))
    deliveries = [sender.accepted(body["id"]) for body in bodies[:64]]
    sender.expect(refused(bodies[64]["id"], "TOO_MANY_PENDING_DELIVERIES", TOO_MANY))
    sender.send(send("nobody", message("m")))  # step 4 comes before step 5
    sender.expect(refused("m", "TOO_MANY_PENDING_DELIVERIES", TOO_MANY))
    sender.send(send(target.id, bodies[0]))  # and after step 3
    assert sender.accepted(bodies[0]["id"]) == deliveries[0]
    target.acknowledge(deliveries[0])
    sender.expect_type("delivered")
    sender.send(send(target.id, bodies[64]))
    sender.accepted(bodies[64]["id"])


def test_step_4_1024_pending_of_all(start: StartBroker) -> None:
    broker = start({})
    target = broker.join(fresh(), fresh_scope())
    senders = [broker.join(fresh(), fresh_scope()) for _ in range(17)]
    last = senders.pop()
    for sender in senders:
        sender.send(*(send(target.id, message()) for _ in range(64)))
        for _ in range(64):
            sender.expect_type("delivery_accepted")
    body = message()
    last.send(send(target.id, body))
    last.expect(refused(body["id"], "TOO_MANY_PENDING_DELIVERIES", TOO_MANY))
    senders[0].close()
    senders[1].send(send("nobody", body))
    senders[1].expect_type("delivery_failed")
    while True:  # the broker notices the closed connection in its own time
        last.send(send(target.id, body))
        if last.recv()["type"] == "delivery_accepted":
            break


# Step 5 and 7.


def test_step_5_not_found(broker: Broker) -> None:
    sender = broker.join(fresh(), fresh_scope())
    body = message()
    sender.send(send("nobody", body))
    sender.expect(refused(body["id"], "SESSION_NOT_FOUND", "Session not found"))


def test_step_7_from_is_the_senders_current_information(broker: Broker) -> None:
    sender, target = broker.join(fresh(), fresh_scope(), name="old", runtimeInstanceId="x"), broker.join(fresh())
    sender.send({"type": "presence", "name": "new", "status": "busy"})
    (entry,) = sender.roster()
    body = message()
    sender.send(send(target.id, body))
    sender.accepted(body["id"])
    frames = [frame for frame in target.barrier() if frame["type"] == "message"]
    assert [frame["from"] for frame in frames] == [entry]
    assert (entry["name"], entry["status"]) == ("new", "busy")


# Golden exchange of Appendix B.


def test_golden_exchange(broker: Broker) -> None:
    scope_a, scope_b = fresh_scope(), fresh_scope()
    a_id, b_id = fresh("A1"), fresh("B1")
    a = broker.join(a_id, scope_a, name="alpha")
    b = broker.join(b_id, scope_b, name="beta")
    a.send(send("beta", message("m0")))
    a.expect(refused("m0", "SESSION_NOT_FOUND", "Session not found"))
    ask = {"id": "ask1", "timestamp": 1, "content": {"text": "q"}, "expectsReply": True}
    a.send(send(b_id, ask))
    d1 = a.accepted("ask1")
    assert b.received(info(a_id, name="alpha"), ask) == d1
    b.acknowledge(d1)
    a.expect({"type": "delivered", "messageId": "ask1", "deliveryId": d1})
    a.send(send(b_id, ask))
    assert a.accepted("ask1") == d1
    a.expect({"type": "delivered", "messageId": "ask1", "deliveryId": d1})
    a.send(send(b_id, {**ask, "content": {"text": "DIFF"}}))
    a.expect(refused("ask1", "DUPLICATE_MESSAGE_ID", USED))
    b.send(send(a_id, {"id": "x", "timestamp": 1, "content": {"text": "q"}, "expectsReply": True}))
    mutual = "Mutual ask refused: target session is already waiting for a reply from this session."
    b.expect(refused("x", "MUTUAL_ASK", mutual))
    a.send({"type": "defer_ask", "requestId": "r", "messageId": "ask1"})
    b.expect({"type": "ask_deferred", "messageId": "ask1", "fromSessionId": a_id})
    a.expect({"type": "ask_control_result", "requestId": "r", "action": "defer", "messageId": "ask1", "applied": True})
    answer = {"id": "r1", "timestamp": 1, "replyTo": "ask1", "content": {"text": "answer"}}
    b.send(send(a_id, answer))
    d2 = b.accepted("r1")
    assert a.received(info(b_id, name="beta"), answer) == d2
    a.acknowledge(d2)
    b.expect({"type": "delivered", "messageId": "r1", "deliveryId": d2})
    b.send(send(a_id, {**answer, "id": "r2"}))
    b.expect(refused("r2", "INVALID_REPLY_TARGET", "Reply target does not match a pending ask"))
    old_peer, new_peer = broker.join(fresh(), scope_a), b
    a.expect_type("session_joined")
    a2 = broker.join(a_id, scope_b, name="alpha")
    old_peer.expect({"type": "session_left", "sessionId": a_id})
    new_peer.expect({"type": "session_joined", "session": info(a_id, name="alpha")})
    a.expect_eof()
    for peer in (a2, old_peer, new_peer):
        peer.expect_silence()
