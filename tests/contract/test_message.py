# SPDX-License-Identifier: Apache-2.0
"""Section 2.6: the shape of a message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.exchange import control, delivered, strangers
from tests.contract.peer import Frame, compact, fresh, fresh_scope, info, message, refused, send

FORMAT = "Invalid message format"

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
