# SPDX-License-Identifier: Apache-2.0
"""Section 2.6: a delivery, its acknowledgement and its outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.exchange import delivered, strangers
from tests.contract.peer import Frame, Peer, failed, fresh, fresh_scope, info, message, send


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
