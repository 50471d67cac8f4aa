# SPDX-License-Identifier: Apache-2.0
"""Section 2.6: the steps that judge a message, and the golden exchange of Appendix B."""

from __future__ import annotations

import time

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.exchange import control, delivered, strangers
from tests.contract.peer import Frame, fresh, fresh_scope, info, message, refused, send

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
