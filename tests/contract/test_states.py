# SPDX-License-Identifier: Apache-2.0
"""Section 2.1: what is checked for every frame, in which order, and what an error does."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, compact, fresh, fresh_scope, info, message, packed, register, send

HEALTH: Frame = {"type": "health", "requestId": "r"}
RATE_LIMITED: Frame = {"type": "error", "code": "RATE_LIMITED", "error": "Intercom broker rate limit exceeded"}


def invalid(text: str) -> Frame:
    return {"type": "error", "code": "INVALID_REQUEST", "error": text}


# 1. Rate limit.


def answers_until_limited(broker: Broker, payload: bytes, count: int, *, remote: bool = False) -> tuple[int, float]:
    """Write `count` frames at once; how many were answered, and the seconds within which that happened."""
    peer = broker.connect_remote() if remote else broker.connect()
    begin = time.monotonic()
    peer.flood(packed(payload) * count)
    frames = peer.drain()
    seconds = time.monotonic() - begin
    if frames and frames[-1]["type"] == "error":  # a reset may overtake it
        assert frames.pop() == RATE_LIMITED
    assert all(frame["type"] == "health_ok" for frame in frames)
    return len(frames), seconds


def test_check_1_rate_limit_of_240_with_120_per_second(broker: Broker) -> None:
    answered, seconds = answers_until_limited(broker, compact(HEALTH), 4_000)
    assert 240 <= answered <= 241 + seconds * 120


def test_check_1_rate_limit_of_the_gateway_is_60_with_30_per_second(broker: Broker) -> None:
    answered, seconds = answers_until_limited(broker, compact(HEALTH), 2_000, remote=True)
    assert 60 <= answered <= 61 + seconds * 30


def test_check_1_240_frames_at_once_pass(broker: Broker) -> None:
    peer = broker.connect()
    peer.send(*[HEALTH] * 240)
    for _ in range(240):
        peer.expect_type("health_ok")


def test_check_1_a_frame_costs_a_token_per_8192_bytes(broker: Broker) -> None:
    payload = compact({**HEALTH, "padding": "x" * 81_900})
    tokens = -(-len(payload) // 8_192)
    answered, seconds = answers_until_limited(broker, payload, 200)
    assert 240 // tokens <= answered <= (241 + seconds * 120) // tokens


def test_check_1_cost_is_of_the_json_written_compactly(broker: Broker) -> None:
    """White space is free: it is not there when the value is serialised again."""
    peer = broker.connect()
    payload = b'{"type":"health",' + b" " * 1_000_000 + b'"requestId":"r"}'
    for _ in range(4):
        peer.send_payload(payload)
        peer.expect_type("health_ok")


def test_check_1_gateway_frame_above_491520_bytes_never_passes(broker: Broker) -> None:
    peer = broker.connect_remote()
    peer.send({**HEALTH, "padding": "x" * 491_520})
    assert peer.drain() in ([RATE_LIMITED], [])


def test_check_1_gateway_frame_of_491520_bytes_passes(broker: Broker) -> None:
    peer = broker.connect_remote()
    frame = {**HEALTH, "padding": ""}
    frame["padding"] = "x" * (491_520 - len(compact(frame)))
    peer.send(frame)
    peer.expect_type("health_ok")


def test_check_1_every_kind_of_frame_counts(broker: Broker) -> None:
    """Acknowledgements of nothing are ignored, but not for free."""
    peer = broker.join(fresh(), fresh_scope())
    peer.flood(packed(compact({"type": "message_received", "deliveryId": "x"})) * 4_000)
    assert peer.drain() in ([RATE_LIMITED], [])


def test_check_1_precedes_check_2(broker: Broker) -> None:
    peer = broker.connect()
    peer.flood(packed(compact(HEALTH)) * 239 + packed(compact({"type": 1, "padding": "x" * 1_000_000})))
    assert [frame for frame in peer.drain() if frame["type"] != "health_ok"] in ([RATE_LIMITED], [])


def test_check_1_rate_limit_ends_the_session_at_once(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.flood(packed(compact({"type": "message_received", "deliveryId": "x"})) * 4_000)
    observer.expect({"type": "session_left", "sessionId": peer.id})


def test_check_1_buckets_are_per_connection(broker: Broker) -> None:
    first, second = broker.connect(), broker.connect()
    first.send(*[HEALTH] * 200)
    second.send(*[HEALTH] * 200)
    for peer in (first, second):
        for _ in range(200):
            peer.expect_type("health_ok")


# 2. Shape.

NOT_FRAMES: list[Any] = [[], [HEALTH], "health", 1, 1.5, True, False, None, {}, {"requestId": "r"}, {"type": None}]
NOT_FRAMES += [{"type": 1}, {"type": ["health"]}, {"type": {}}, {"type": True}, {"Type": "health", "requestId": "r"}]


@pytest.mark.parametrize("value", NOT_FRAMES, ids=repr)
@pytest.mark.parametrize("registered", [False, True])
def test_check_2_no_object_or_no_type(broker: Broker, value: Any, registered: bool) -> None:
    peer = broker.connect()
    if registered:
        peer.register(fresh(), fresh_scope())
    peer.send_payload(compact(value))
    peer.expect_error("INVALID_REQUEST", "Invalid client message")


# 3 and 4. In any state.


def test_check_3_health_in_any_state(broker: Broker) -> None:
    peer = broker.connect()
    peer.expect_silence()
    peer.register(fresh(), fresh_scope())
    peer.expect_silence()
    peer.send({"type": "unregister"})
    peer.expect_silence()


def test_check_4_access_control_on_a_registered_connection(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "access_control", "requestId": "r", "action": "inspect_tree", "adminToken": "x" * 43})
    text = "Remote access control requires a short-lived control connection"
    peer.expect_error("ACCESS_DENIED", text)


# 6. Before registration.


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "unregister"},
        {"type": "list", "requestId": "r"},
        {"type": "list"},
        {"type": "presence"},
        send("x", {}),
        {"type": "message_received"},
        {"type": "message_rejected"},
        {"type": "defer_ask"},
        {"type": "cancel_ask"},
        {"type": "registered"},
        {"type": "nonsense"},
        {"type": ""},
        {"type": "h\u00e9alth\U0001f600"},
        {"type": "Health", "requestId": "r"},
    ],
    ids=lambda frame: frame["type"],
)
def test_check_6_anything_else_before_register(broker: Broker, frame: Frame) -> None:
    peer = broker.connect()
    peer.send(frame)
    peer.expect_error("INVALID_REQUEST", f"Received {frame['type']} before register")


def test_check_6_type_with_a_lone_surrogate(broker: Broker) -> None:
    peer = broker.connect()
    peer.send_payload(b'{"type":"\\ud800"}')
    peer.expect_error("INVALID_REQUEST", "Received \ud800 before register")


def test_check_6_applies_again_after_unregister(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "unregister"}, {"type": "list", "requestId": "r"})
    peer.expect_error("INVALID_REQUEST", "Received list before register")


# 9. Dispatch.


@pytest.mark.parametrize("kind", ["nonsense", "", "LIST", "registered", "error", "message", "cancel_message", "\u00e9"])
def test_check_9_unknown_type(broker: Broker, kind: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": kind})
    peer.expect_error("INVALID_REQUEST", f"Unknown client message type: {kind}")


INVALID_FRAMES: list[tuple[Frame, str]] = [
    ({"type": "list"}, "Invalid list message"),
    ({"type": "list", "requestId": None}, "Invalid list message"),
    ({"type": "list", "requestId": 1}, "Invalid list message"),
    ({"type": "health"}, "Invalid health message"),
    ({"type": "health", "requestId": 7}, "Invalid health message"),
    ({"type": "presence", "name": 1}, "Invalid presence name"),
    ({"type": "unregister", "preserveAsks": 1}, "Invalid unregister preserveAsks value"),
    ({"type": "message_received"}, "Invalid message_received message"),
    ({"type": "message_rejected"}, "Invalid message_rejected message"),
    ({"type": "defer_ask"}, "Invalid defer_ask message"),
    ({"type": "cancel_ask"}, "Invalid cancel_ask message"),
]


@pytest.mark.parametrize(("frame", "text"), INVALID_FRAMES, ids=lambda value: value if isinstance(value, str) else "")
def test_check_9_validation_failures_end_the_connection(broker: Broker, frame: Frame, text: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(frame)
    peer.expect_error("INVALID_REQUEST", text)


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "list", "requestId": "r", "scopeId": "AAAAAAAAAAAAAAAA", "extra": None},
        {"type": "presence", "scopeId": "AAAAAAAAAAAAAAAA", "extra": [1]},
        {"type": "message_received", "deliveryId": "x", "extra": {}},
        {"type": "message_rejected", "deliveryId": "x", "code": "CONFLICTING_MESSAGE_ID", "reason": "", "extra": 0},
        {"type": "defer_ask", "requestId": "r", "messageId": "m", "extra": 0},
        {"type": "cancel_ask", "requestId": "r", "messageId": "m", "extra": 0},
        {"type": "unregister", "extra": 0},
        {"type": "health", "requestId": "r", "stateId": 5, "extra": 0},
    ],
    ids=lambda frame: frame["type"],
)
def test_unknown_keys_are_ignored_outside_register_and_message(broker: Broker, frame: Frame) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(frame)
    assert all(answer["type"] != "error" for answer in peer.barrier())


# What an error does (improved over the half-close of section 2.1).


def test_nothing_is_read_after_an_error(broker: Broker) -> None:
    """The frames behind the offending one, in the same chunk, are not executed."""
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    body = message()
    peer.send({"type": "list"}, send(observer.id, body), {"type": "presence", "name": "late"}, HEALTH)
    peer.expect_error("INVALID_REQUEST", "Invalid list message")
    observer.expect({"type": "session_left", "sessionId": peer.id})
    observer.expect_silence()


def test_session_left_is_told_while_the_peer_keeps_its_side_open(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.send({"type": "nonsense"})
    observer.expect({"type": "session_left", "sessionId": peer.id})
    assert observer.ids() == [observer.id]


def test_register_behind_an_error_registers_nobody(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.connect()
    peer.send({"type": "nonsense"}, register(fresh(), scope))
    peer.expect_error("INVALID_REQUEST", "Received nonsense before register")
    observer.expect_silence()


def test_answers_before_an_error_are_flushed(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "list", "requestId": "one"}, {"type": "list"})
    assert peer.expect_type("sessions")["requestId"] == "one"
    peer.expect_error("INVALID_REQUEST", "Invalid list message")


def test_id_is_free_after_an_error(broker: Broker) -> None:
    scope = fresh_scope()
    peer = broker.join(fresh(), scope, pid=1)
    peer.send({"type": "nonsense"})
    peer.drain()
    broker.join(peer.id, scope, pid=2)


def test_peer_that_closes_its_writing_side_leaves(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.shutdown_write()
    peer.expect_eof()
    observer.expect({"type": "session_left", "sessionId": peer.id})


def test_other_sessions_are_not_disturbed_by_an_error(broker: Broker) -> None:
    scope = fresh_scope()
    other = broker.join(fresh(), fresh_scope())
    peer = broker.join(fresh(), scope)
    peer.send({"type": "nonsense"})
    peer.drain()
    other.expect_silence()
    assert other.roster() == [info(other.id)]


# Timer and caps.


def test_unregistered_connection_is_closed_by_the_timer(start: StartBroker) -> None:
    start({"registration_timeout_ms": 150}).connect().expect_eof()


def test_health_does_not_stop_the_registration_timer(start: StartBroker) -> None:
    peer = start({"registration_timeout_ms": 150}).connect()
    peer.send(HEALTH)
    assert [frame["type"] for frame in peer.drain()] == ["health_ok"]


def test_timer_is_armed_again_after_unregister(start: StartBroker) -> None:
    peer = start({"registration_timeout_ms": 150}).connect()
    peer.register(fresh())
    peer.send({"type": "unregister"})
    peer.expect_eof()


def test_registration_stops_the_timer(start: StartBroker) -> None:
    broker = start({"registration_timeout_ms": 150})
    peer = broker.connect()
    peer.register(fresh())
    broker.connect().expect_eof()
    peer.expect_silence()


def test_oldest_of_33_unregistered_connections_is_closed(start: StartBroker) -> None:
    broker = start({})
    peers = [broker.connect() for _ in range(32)]
    for peer in peers:
        peer.expect_silence()
    newest = broker.connect()
    newest.expect_silence()
    peers[0].expect_eof()
    for peer in peers[1:]:
        peer.expect_silence()
    newest.register(fresh())
    broker.connect().expect_silence()  # thirty-two again
    peers[1].expect_silence()


def test_idle_connections_cannot_block_a_registration(start: StartBroker) -> None:
    broker = start({})
    for _ in range(60):
        broker.connect()
    broker.join(fresh())
