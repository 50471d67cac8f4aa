# SPDX-License-Identifier: Apache-2.0
"""Steps that several tests of messages and deliveries take."""

from __future__ import annotations

from typing import Any

from tests.contract.brokers import Broker
from tests.contract.peer import Frame, Peer, fresh, fresh_scope, info, send


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


def control(**members: Any) -> Frame:
    return {"content": {"text": "", "control": {"type": "a", "version": 1, **members}}}
