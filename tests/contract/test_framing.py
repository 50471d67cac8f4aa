# SPDX-License-Identifier: Apache-2.0
"""Section 1.1 over a socket: lengths, splits, and JSON as JavaScript reads it."""

from __future__ import annotations

import json
import struct

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import compact, fresh, fresh_scope, info, message, packed, register, send

MAX_FRAME = 1_048_576


def padded(frame: bytes, size: int) -> bytes:
    """`frame` (an object) with a member that the broker ignores, so that it has `size` bytes."""
    start, end = frame[:-1] + b',"padding":"', b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


# Lengths.


def test_length_is_four_bytes_big_endian(broker: Broker) -> None:
    peer = broker.connect()
    payload = b'{"type":"health","requestId":"r"}'
    peer.send_bytes(bytes([0, 0, 0, len(payload)]) + payload)
    answer = peer.recv_payload()
    assert answer is not None and json.loads(answer)["requestId"] == "r"


def test_largest_frame_is_accepted(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send_payload(padded(b'{"type":"list","requestId":"r"}', MAX_FRAME))
    assert peer.expect_type("sessions")["requestId"] == "r"


def test_larger_frame_is_refused_on_its_header_without_an_error(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_bytes(struct.pack(">I", MAX_FRAME + 1))
    peer.expect_eof()


def test_largest_declared_length_is_refused(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_bytes(b"\xff\xff\xff\xff")
    peer.expect_eof()


def test_larger_frame_ends_a_session_and_tells_its_scope(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.send_bytes(struct.pack(">I", MAX_FRAME + 1))
    peer.expect_eof()
    observer.expect({"type": "session_left", "sessionId": peer.id})


def test_frames_before_a_larger_one_are_processed(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_bytes(packed(b'{"type":"health","requestId":"r"}') + struct.pack(">I", MAX_FRAME + 1) + b"x" * 100)
    assert [frame["type"] for frame in peer.drain()] == ["health_ok"]


def test_empty_frame_is_refused_without_an_error(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_bytes(packed(b""))
    peer.expect_eof()


# Splits.

SMALL = [
    b'{"type":"health","requestId":"r"}',
    compact({"type": "health", "requestId": "\u00e9\u20ac\U0001f600"}),
    b'{"type":"health","requestId":"\\ud800"}',
    b'{"type":"health","requestId":"\xff\xfe"}',
]


@pytest.mark.parametrize("payload", SMALL, ids=["plain", "astral", "surrogate", "malformed"])
def test_frame_split_at_every_byte(broker: Broker, payload: bytes) -> None:
    whole = broker.connect()
    whole.send_payload(payload)
    expected = whole.recv()
    frame = packed(payload)
    for position in range(1, len(frame)):
        peer = broker.connect()
        peer.send_bytes(frame[:position])
        peer.send_bytes(frame[position:])
        peer.expect(expected)
        peer.close()


def test_session_split_at_every_byte(broker: Broker) -> None:
    """Register, list and unregister, cut at each place, give the same answers."""
    scope = fresh_scope()
    session_id = fresh()
    stream = b"".join(
        packed(compact(frame))
        for frame in (
            register(session_id, scope),
            {"type": "list", "requestId": "r"},
            {"type": "unregister"},
            {"type": "health", "requestId": "end"},
        )
    )
    for position in range(1, len(stream)):
        peer = broker.connect()
        peer.send_bytes(stream[:position])
        peer.send_bytes(stream[position:])
        assert peer.expect_type("registered")["sessionId"] == session_id
        assert peer.expect_type("sessions")["sessions"] == [info(session_id)]
        assert peer.expect_type("health_ok")["requestId"] == "end"
        peer.close()


def test_frame_one_byte_at_a_time(broker: Broker) -> None:
    peer = broker.connect()
    for byte in packed(compact({"type": "health", "requestId": "r"})):
        peer.send_bytes(bytes([byte]))
    assert peer.recv()["requestId"] == "r"


def test_several_frames_in_one_chunk_are_processed_in_order(broker: Broker) -> None:
    peer = broker.connect()
    peer.send(*({"type": "health", "requestId": str(number)} for number in range(100)))
    assert [peer.recv()["requestId"] for _ in range(100)] == [str(number) for number in range(100)]


def test_registered_peer_may_stall_inside_a_frame(start: StartBroker) -> None:
    broker = start({"registration_timeout_ms": 200})
    peer = broker.connect()
    peer.register(fresh(), fresh_scope())
    frame = packed(compact({"type": "list", "requestId": "late"}))
    peer.send_bytes(frame[:-1])
    broker.connect().expect_eof()  # a later connection that never registered has met its timer
    peer.send_bytes(frame[-1:])
    assert peer.expect_type("sessions")["requestId"] == "late"


def test_unregistered_peer_that_stalls_inside_a_frame_meets_the_timer(start: StartBroker) -> None:
    broker = start({"registration_timeout_ms": 200})
    peer = broker.connect()
    peer.send_bytes(packed(compact(register(fresh())))[:-1])
    peer.expect_eof()


# JSON.


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b" ",
        b"{",
        b'{"type":"health","requestId":"r"',
        b'{"type":"health","requestId":"r"} x',
        b'{"type":"health","requestId":"r"}{}',
        b'{"type":"health","requestId":"r",}',
        b"{'type':'health','requestId':'r'}",
        b'{"type":"health","requestId":"\t"}',
        b'{"type":"health","requestId":"\\x41"}',
        b'{"type":"health","requestId":"\\u12g4"}',
        b'{"type":"health","requestId":"r","x":NaN}',
        b'{"type":"health","requestId":"r","x":Infinity}',
        b'{"type":"health","requestId":"r","x":-Infinity}',
        b'{"type":"health","requestId":"r","x":01}',
        b'{"type":"health","requestId":"r","x":+1}',
        b'{"type":"health","requestId":"r","x":1.}',
        b'{"type":"health","requestId":"r","x":.5}',
        b'{"type":"health","requestId":"r","x":1e}',
        b'{"type":"health","requestId":"r","x":0x10}',
        b'{"type":"health","requestId":"r","x":True}',
        b'{"type":"health","requestId":"r"/**/}',
        b'{"type":"health",requestId:"r"}',
        b'\xef\xbb\xbf{"type":"health","requestId":"r"}',
        b'{"type":"health","requestId":"r"\x0c}',
        b'{"type":"health","requestId":"r"\xc2\xa0}',
        b'{"type":"health","requestId":"r"}\x00',
        b"\xff\xfe",
        b"undefined",
    ],
)
def test_what_json_parse_refuses_ends_the_connection_without_an_error(broker: Broker, payload: bytes) -> None:
    peer = broker.connect()
    peer.send_payload(payload)
    peer.expect_eof()


@pytest.mark.parametrize(
    ("payload", "request_id"),
    [
        (b' \t\r\n{ "type" : "health" , "requestId" : "r" } \n', "r"),
        (b'{"requestId":"r","type":"health"}', "r"),
        (b'{"type":"health","requestId":"a","requestId":"b"}', "b"),
        (b'{"type":"health","requestId":1,"requestId":"b"}', "b"),
        (b'{"type":"list","requestId":"b","type":"health"}', "b"),
        (b'{"\\u0074ype":"health","requestId":"b"}', "b"),
        (b'{"type":"he\\u0061lth","requestId":"b"}', "b"),
        (b'{"type":"health","requestId":"r","x":1e400}', "r"),
        (b'{"type":"health","requestId":"r","x":-1e-400}', "r"),
        (b'{"type":"health","requestId":"r","x":' + b"9" * 400 + b"}", "r"),
        (b'{"type":"health","requestId":"r","__proto__":{"a":1},"constructor":null}', "r"),
        (b'{"type":"health","requestId":""}', ""),
        (b'{"type":"health","requestId":"\\u0000\x7f\\/\\b\\f\\n\\r\\t"}', "\0\x7f/\b\f\n\r\t"),
        (b'{"type":"health","requestId":"\xff\xfe"}', "\ufffd\ufffd"),
        (b'{"type":"health","requestId":"\xe2\x82"}', "\ufffd"),
        (b'{"type":"health","requestId":"\xf0\x9f\x98"}', "\ufffd"),
        (b'{"type":"health","requestId":"\xed\xa0\x80"}', "\ufffd\ufffd\ufffd"),
        (b'{"type":"health","requestId":"\xc0\xaf"}', "\ufffd\ufffd"),
        (b'{"type":"health","requestId":"\xf5\x80"}', "\ufffd\ufffd"),
        (b'{"type":"health","requestId":"r","\xff":1}', "r"),
        (b'{"type":"health","requestId":"r","x":"\xff"}', "r"),
        (b'{"type":"health","requestId":"r","x":"\\ud800"}', "r"),
        (b'{"type":"health","requestId":"r","\\udfff":1}', "r"),
        (b'{"type":"health","requestId":"\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"type":"health","requestId":"\xef\xbb\xbfr"}', "\ufeffr"),
        (compact({"type": "health", "requestId": "\u2028\u2029"}), "\u2028\u2029"),
    ],
)
def test_what_json_parse_accepts(broker: Broker, payload: bytes, request_id: str) -> None:
    peer = broker.connect()
    peer.send_payload(payload)
    assert peer.expect_type("health_ok")["requestId"] == request_id


def test_lone_surrogates_go_out_as_lower_case_escapes(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_payload(b'{"type":"health","requestId":"\\uD800\xc3\xa9\\uDFFF"}')
    answer = peer.recv_payload()
    assert answer is not None
    assert b'"requestId":"\\ud800\xc3\xa9\\udfff"' in answer


def test_answers_are_compact(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "list", "requestId": "r"})
    answer = peer.recv_payload()
    assert answer == compact(json.loads(answer or b""))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["arrays", "objects"])
def test_nesting_of_2000_levels_passes(broker: Broker, opening: bytes) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    peer = broker.connect()
    nested = opening * 2000 + b"1" + closing * 2000
    peer.send_payload(b'{"type":"health","requestId":"r","x":' + nested + b"}")
    assert peer.expect_type("health_ok")["requestId"] == "r"


@pytest.mark.parametrize("levels", [5_000, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["arrays", "objects"])
def test_nesting_of_5000_levels_ends_the_connection(broker: Broker, opening: bytes, levels: int) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    peer = broker.connect()
    peer.send_payload(b'{"type":"health","requestId":"r","x":' + opening * levels + b"1" + closing * levels + b"}")
    peer.expect_eof()


def test_unclosed_nesting_ends_the_connection(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_payload(b"[" * 1_000_000)
    peer.expect_eof()


def test_deep_control_data_is_delivered(broker: Broker) -> None:
    """Nesting that the broker accepts also has to survive being forwarded."""
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), scope)
    sender.expect_type("session_joined")
    data = json.loads("[" * 900 + "]" * 900)
    body = message(content={"text": "", "control": {"type": "a", "version": 1, "data": data}})
    sender.send(send(target.id, body))
    sender.accepted(body["id"])
    target.received(info(sender.id), body)


# Outgoing size.


def test_message_that_would_outgrow_a_frame_is_refused_to_its_sender(broker: Broker) -> None:
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), scope)
    sender.expect_type("session_joined")
    body = message(content={"text": "", "attachments": []})
    room = MAX_FRAME - len(compact(send(target.id, body)))
    half = room // 2 - len('{"type":"file","name":"","content":""},')
    body["content"]["attachments"] = [
        {"type": "file", "name": "", "content": "a" * half},
        {"type": "file", "name": "", "content": "b" * half},
    ]
    body["content"]["text"] = "c" * (MAX_FRAME - len(compact(send(target.id, body))))
    assert len(compact(send(target.id, body))) == MAX_FRAME
    sender.send(send(target.id, body))
    answer = sender.expect_type("delivery_failed")
    assert (answer["messageId"], answer["accepted"], answer["code"]) == (body["id"], False, "INVALID_MESSAGE")
    target.expect_silence()
    sender.send(send(target.id, message(body["id"], "the id is still free")))
    sender.accepted(body["id"])


def test_largest_message_that_fits_is_delivered(broker: Broker) -> None:
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), scope)
    sender.expect_type("session_joined")
    body = message(content={"text": "", "attachments": [{"type": "file", "name": "", "content": "a" * 524_288}]})
    overhead = len(compact({"type": "message", "deliveryId": "d" * 64, "from": info(sender.id), "message": body}))
    body["content"]["attachments"].append({"type": "file", "name": "", "content": "b" * (MAX_FRAME - overhead - 100)})
    sender.send(send(target.id, body))
    sender.accepted(body["id"])
    target.received(info(sender.id), body)


@pytest.mark.parametrize("kind", ["health", "list"])
def test_answer_that_would_outgrow_a_frame_is_never_sent(broker: Broker, kind: str) -> None:
    """An echo of a huge requestId would be longer than a frame may be; the peer's reader checks the length."""
    scope = fresh_scope()
    peer = broker.join(fresh(), scope)
    frame = {"type": kind, "requestId": ""}
    frame["requestId"] = "r" * (MAX_FRAME - len(compact(frame)))
    peer.send(frame)
    assert all(answer["type"] == "error" for answer in peer.drain())
    broker.connect().expect_silence()
