# SPDX-License-Identifier: Apache-2.0
"""Section 4.4: the same id again, from the same runtime or another one."""

from __future__ import annotations

import pytest

from tests.contract.brokers import Broker
from tests.contract.peer import Frame, Peer, failed, fresh, fresh_scope, info, message, register, send

RUNTIME = {"runtimeInstanceId": "runtime-1"}


# Which runtime may.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"pid": 5, "startedAt": 6}, {"pid": 5.0, "startedAt": 6.0, "lastActivity": 9, "cwd": "/x", "model": "n"}),
        (RUNTIME, RUNTIME),
        ({**RUNTIME, "pid": 1}, {**RUNTIME, "pid": 2, "startedAt": 99}),
        ({"pid": 0.5}, {"pid": 0.5}),
    ],
    ids=["pid and startedAt", "spelled otherwise", "runtime id", "runtime id with another pid", "fraction"],
)
def test_same_runtime_replaces(broker: Broker, old: Frame, new: Frame) -> None:
    scope = fresh_scope()
    first = broker.join(fresh(), scope, **old)
    second = broker.join(first.id, scope, **new)
    first.expect_eof()
    assert second.ids() == [first.id]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"pid": 1}, {"pid": 2}),
        ({"startedAt": 1}, {"startedAt": 2}),
        (RUNTIME, {}),
        ({}, RUNTIME),
        (RUNTIME, {"runtimeInstanceId": "runtime-2"}),
        (RUNTIME, {"runtimeInstanceId": "RUNTIME-1"}),
    ],
    ids=["pid", "startedAt", "runtime id gone", "runtime id new", "other runtime id", "case"],
)
@pytest.mark.parametrize("same_scope", [True, False])
def test_another_runtime_is_refused(broker: Broker, old: Frame, new: Frame, same_scope: bool) -> None:
    scope = fresh_scope()
    observer, first = broker.join(fresh(), scope), broker.join(fresh(), scope, **old)
    observer.expect_type("session_joined")
    intruder = broker.connect()
    intruder.send(register(first.id, scope if same_scope else fresh_scope(), **new))
    text = (
        f'Session ID "{first.id}" is already active in another local runtime; '
        "close the existing session or use a different session ID"
    )
    intruder.expect_error("SESSION_ID_IN_USE", text)
    first.expect_silence()
    observer.expect_silence()
    assert first.id in observer.ids()


@pytest.mark.parametrize("gone", ["closed", "unregistered"])
def test_any_runtime_may_take_an_id_that_is_free(broker: Broker, gone: str) -> None:
    scope = fresh_scope()
    observer, first = broker.join(fresh(), scope), broker.join(fresh(), scope, pid=1)
    observer.expect_type("session_joined")
    if gone == "closed":
        first.close()
    else:
        first.send({"type": "unregister"})
    observer.expect_type("session_left")
    broker.join(first.id, scope, pid=2)


# Order of what everybody sees.


def replace(broker: Broker, old: Peer, scope: str | None, **claims: object) -> Peer:
    new = broker.connect()
    new.register(old.id, scope, **claims)
    return new


def test_same_scope_sees_left_then_joined(broker: Broker) -> None:
    scope = fresh_scope()
    observer, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    new = replace(broker, old, scope, name="again")
    observer.expect(
        {"type": "session_left", "sessionId": old.id},
        {"type": "session_joined", "session": info(old.id, name="again")},
    )
    observer.expect_silence()
    old.expect_eof()
    new.expect_silence()


@pytest.mark.parametrize("way", ["A to B", "B to unscoped", "unscoped to A"])
def test_other_scope_sees_only_joined_and_old_scope_only_left(broker: Broker, way: str) -> None:
    before, after = {
        "A to B": (fresh_scope(), fresh_scope()),
        "B to unscoped": (fresh_scope(), None),
        "unscoped to A": (None, fresh_scope()),
    }[way]
    stayed, awaits, old = broker.join(fresh(), before), broker.join(fresh(), after), broker.join(fresh(), before)
    third = broker.join(fresh(), fresh_scope())
    stayed.barrier()
    awaits.barrier()
    new = replace(broker, old, after)
    stayed.expect({"type": "session_left", "sessionId": old.id})
    awaits.expect({"type": "session_joined", "session": info(old.id)})
    for peer in (stayed, awaits, third, new):
        peer.expect_silence()
    old.expect_eof()
    assert old.id not in stayed.ids()
    assert old.id in awaits.ids()


def test_pending_deliveries_fail_before_the_new_session_joins(broker: Broker) -> None:
    """Steps 1, 2 and 6 as the sender of an unacknowledged message sees them."""
    scope = fresh_scope()
    sender, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    sender.expect_type("session_joined")
    body = message()
    sender.send(send(old.id, body))
    sender.accepted(body["id"])
    replace(broker, old, scope)
    sender.expect(
        {"type": "session_left", "sessionId": old.id},
        failed(body["id"], "RECIPIENT_DISCONNECTED", "Recipient disconnected before acknowledging the message"),
        {"type": "session_joined", "session": info(old.id)},
    )
    assert [frame["type"] for frame in old.drain()] == ["message"]


def test_pending_deliveries_of_the_replaced_sender_fail_on_its_old_connection(broker: Broker) -> None:
    scope = fresh_scope()
    target, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    body = message()
    old.send(send(target.id, body))
    old.accepted(body["id"])
    delivery = target.received(info(old.id), body)
    new = replace(broker, old, scope)
    old.expect(failed(body["id"], "SENDER_DISCONNECTED", "Sender disconnected before delivery was acknowledged"))
    old.expect_eof()
    target.acknowledge(delivery)
    target.barrier()
    new.expect_silence()


def test_unacknowledged_ask_of_the_replaced_sender_is_cancelled(broker: Broker) -> None:
    scope = fresh_scope()
    target, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    body = message(expectsReply=True)
    old.send(send(target.id, body))
    old.accepted(body["id"])
    target.received(info(old.id), body)
    replace(broker, old, scope)
    cancelled = {"type": "ask_cancelled", "messageId": body["id"], "fromSessionId": old.id, "reason": "delivery_failed"}
    target.expect(
        {"type": "session_left", "sessionId": old.id}, cancelled, {"type": "session_joined", "session": info(old.id)}
    )
    old.expect(failed(body["id"], "SENDER_DISCONNECTED", "Sender disconnected before delivery was acknowledged"))


def test_unacknowledged_ask_to_the_replaced_recipient_is_cancelled_on_its_old_connection(broker: Broker) -> None:
    asker, old = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    asker.send(send(old.id, body))
    asker.accepted(body["id"])
    old.received(info(asker.id), body)
    new = replace(broker, old, fresh_scope())
    cancelled = {
        "type": "ask_cancelled",
        "messageId": body["id"],
        "fromSessionId": asker.id,
        "reason": "delivery_failed",
    }
    old.expect(cancelled)
    old.expect_eof()
    asker.expect(
        failed(body["id"], "RECIPIENT_DISCONNECTED", "Recipient disconnected before acknowledging the message")
    )
    new.expect_silence()


def acknowledged_ask(asker: Peer, target: Peer, message_id: str | None = None) -> str:
    """An ask from `asker` that `target` has acknowledged; its message id."""
    body = message(message_id, expectsReply=True)
    asker.send(send(target.id, body))
    delivery = asker.accepted(body["id"])
    frame = target.recv()
    while frame["type"] != "message":
        frame = target.recv()
    target.acknowledge(delivery)
    asker.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    name: str = body["id"]
    return name


def test_blocking_asks_of_the_replaced_session_become_deferred(broker: Broker) -> None:
    scope = fresh_scope()
    target, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    ask = acknowledged_ask(old, target)
    replace(broker, old, scope)
    target.expect(
        {"type": "session_left", "sessionId": old.id},
        {"type": "ask_deferred", "messageId": ask, "fromSessionId": old.id},
        {"type": "session_joined", "session": info(old.id)},
    )


def test_asks_to_the_replaced_session_become_deferred_without_a_word(broker: Broker) -> None:
    asker, old = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    ask = acknowledged_ask(asker, old)
    new = replace(broker, old, fresh_scope())
    asker.expect_silence()
    new.expect_silence()
    counter = message(expectsReply=True)  # a blocking edge would make this a mutual ask
    new.send(send(asker.id, counter))
    new.accepted(counter["id"])
    reply = message(replyTo=ask)
    new.send(send(asker.id, reply))
    new.accepted(reply["id"])


def test_ask_is_answered_after_its_asker_changed_scope(broker: Broker) -> None:
    target, old = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    ask = acknowledged_ask(old, target)
    new = replace(broker, old, fresh_scope())
    target.expect({"type": "ask_deferred", "messageId": ask, "fromSessionId": old.id})
    reply = message(replyTo=ask)
    target.send(send(old.id, reply))
    target.accepted(reply["id"])
    new.received(info(target.id), reply)


def test_replacement_may_be_replaced(broker: Broker) -> None:
    scope = fresh_scope()
    observer, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    for _ in range(5):
        new = replace(broker, old, scope)
        old.expect_eof()
        observer.expect(
            {"type": "session_left", "sessionId": old.id}, {"type": "session_joined", "session": info(old.id)}
        )
        old = new
    observer.expect_silence()


def test_replacement_needs_the_runtime_of_the_latest(broker: Broker) -> None:
    """A runtime id cannot be left out once it was given, but the pid may change with it."""
    scope = fresh_scope()
    first = broker.join(fresh(), scope, pid=1, **RUNTIME)
    broker.join(first.id, scope, pid=2, **RUNTIME)
    intruder = broker.connect()
    intruder.send(register(first.id, scope, pid=2))
    assert intruder.recv()["code"] == "SESSION_ID_IN_USE"


# Late frames.

LATE: list[Frame] = [
    {"type": "list", "requestId": "late"},
    {"type": "presence", "name": "late"},
    {"type": "unregister"},
    {"type": "health", "requestId": "late"},
    {"type": "access_control", "requestId": "late"},
    {"type": "nonsense"},
    {"type": "defer_ask", "requestId": "late", "messageId": "x"},
]


@pytest.mark.parametrize("frame", LATE, ids=lambda frame: frame["type"])
def test_late_frame_is_discarded(broker: Broker, frame: Frame) -> None:
    scope = fresh_scope()
    observer, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    new = replace(broker, old, scope)
    observer.expect_type("session_left")
    observer.expect_type("session_joined")
    old.try_send(frame)
    old.expect_eof()
    broker.connect().barrier()
    new.expect_silence()
    observer.expect_silence()
    assert new.roster()[1] == info(new.id)


def test_late_send_is_discarded(broker: Broker) -> None:
    scope = fresh_scope()
    target, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    new = replace(broker, old, scope)
    old.try_send(send(target.id, message()))
    old.expect_eof()
    broker.connect().barrier()
    assert [frame["type"] for frame in target.barrier()] == ["session_left", "session_joined"]
    new.expect_silence()


def test_late_register_is_discarded(broker: Broker) -> None:
    scope = fresh_scope()
    observer, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    new = replace(broker, old, scope)
    observer.barrier()
    old.try_send(register(old.id, scope))
    old.expect_eof()
    observer.expect_silence()
    new.expect_silence()


def test_late_acknowledgement_and_cancel_are_discarded(broker: Broker) -> None:
    scope = fresh_scope()
    asker = broker.join(fresh(), fresh_scope())
    old = broker.join(fresh(), scope)
    ask = acknowledged_ask(old, asker)
    new = replace(broker, old, scope)
    asker.expect_type("ask_deferred")
    body = message()
    asker.send(send(new.id, body))
    delivery = asker.accepted(body["id"])
    new.received(info(asker.id), body)
    old.try_send(
        {"type": "message_received", "deliveryId": delivery},
        {"type": "cancel_ask", "requestId": "r", "messageId": ask},
    )
    old.expect_eof()
    asker.expect_silence()
    new.acknowledge(delivery)
    asker.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})


def test_closing_the_old_connection_tells_nobody(broker: Broker) -> None:
    scope = fresh_scope()
    observer, old = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    new = replace(broker, old, scope)
    observer.barrier()
    old.close()
    broker.connect().barrier()
    observer.expect_silence()
    assert new.id in observer.ids()


# Replacing by the same connection is a duplicate registration: see test_register, row 6.
