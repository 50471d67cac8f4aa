# SPDX-License-Identifier: Apache-2.0
"""Section 2.7: asks, their edges, and what ends them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, Peer, failed, fresh, fresh_scope, info, message, refused, send

UNMATCHED = "Reply target does not match a pending ask"
MISMATCHED = "Reply target does not match the pending ask"
ALREADY = (
    "Another ask to this session is still unresolved. "
    "Wait for its reply or use intercom_send for a non-blocking follow-up."
)
MUTUAL = "Mutual ask refused: target session is already waiting for a reply from this session."


def strangers(broker: Broker) -> tuple[Peer, Peer]:
    """An asker and a target in different scopes."""
    return broker.join(fresh("asker"), fresh_scope()), broker.join(fresh("target"), fresh_scope())


def carry(sender: Peer, target: Peer, body: Frame) -> str:
    """Deliver and acknowledge `body`; its message id."""
    sender.send(send(target.id, body))
    delivery = sender.accepted(body["id"])
    assert target.received(info(sender.id), body) == delivery
    target.acknowledge(delivery)
    sender.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    message_id: str = body["id"]
    return message_id


def ask(asker: Peer, target: Peer, **members: Any) -> str:
    """An acknowledged ask; its message id."""
    return carry(asker, target, message(expectsReply=True, **members))


def is_refused(sender: Peer, target: Peer, code: str, reason: str, **members: Any) -> None:
    body = message(**members)
    sender.send(send(target.id, body))
    sender.expect(refused(body["id"], code, reason))


def control(kind: str, message_id: str, request_id: str = "r") -> Frame:
    return {"type": f"{kind}_ask", "requestId": request_id, "messageId": message_id}


def result(kind: str, message_id: str, applied: bool, request_id: str = "r") -> Frame:
    return {
        "type": "ask_control_result",
        "requestId": request_id,
        "action": kind,
        "messageId": message_id,
        "applied": applied,
    }


def deferred(message_id: str, asker: Peer) -> Frame:
    return {"type": "ask_deferred", "messageId": message_id, "fromSessionId": asker.id}


def cancelled(message_id: str, session: Peer, reason: str) -> Frame:
    return {"type": "ask_cancelled", "messageId": message_id, "fromSessionId": session.id, "reason": reason}


# (a) Replies.


def test_check_a_reply_to_nothing(broker: Broker) -> None:
    asker, target = strangers(broker)
    is_refused(asker, target, "INVALID_REPLY_TARGET", UNMATCHED, replyTo="nothing")


def test_check_a_reply_to_an_ask_of_another_session(broker: Broker) -> None:
    asker, target = strangers(broker)
    other = broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    is_refused(target, other, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)


def test_check_a_reply_by_a_session_that_was_not_asked(broker: Broker) -> None:
    asker, target = strangers(broker)
    other = broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    is_refused(other, asker, "INVALID_REPLY_TARGET", MISMATCHED, replyTo=question)
    is_refused(asker, asker, "INVALID_REPLY_TARGET", MISMATCHED, replyTo=question)
    carry(target, asker, message(replyTo=question))


def test_check_a_reply_to_a_message_that_was_no_ask(broker: Broker) -> None:
    asker, target = strangers(broker)
    body = message()
    carry(asker, target, body)
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=body["id"])


def test_check_a_precedes_b(broker: Broker) -> None:
    asker, target = strangers(broker)
    ask(asker, target)
    is_refused(asker, target, "INVALID_REPLY_TARGET", UNMATCHED, replyTo="nothing", expectsReply=True)


def test_step_5_precedes_check_a(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message(replyTo="nothing")
    peer.send(send("nobody", body))
    peer.expect(refused(body["id"], "SESSION_NOT_FOUND", "Session not found"))


def test_reply_resolves_its_target_like_any_send(broker: Broker) -> None:
    scope = fresh_scope()
    asker = broker.join(fresh(), scope, name="asker")
    target = broker.join(fresh(), scope)
    asker.expect_type("session_joined")
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    target.expect_type("message")
    reply = message(replyTo=body["id"])
    target.send(send("ASKER", reply))
    target.accepted(reply["id"])


def test_reply_is_possible_before_the_ask_is_acknowledged(broker: Broker) -> None:
    """The edge is made when the ask is accepted."""
    asker, target = strangers(broker)
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    delivery = asker.accepted(body["id"])
    target.expect_type("message")
    reply = message(replyTo=body["id"])
    carry(target, asker, reply)
    target.acknowledge(delivery)
    asker.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=body["id"])


def test_edge_goes_when_the_reply_is_acknowledged(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    carry(target, asker, message(replyTo=question))
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)
    ask(asker, target)


def test_edge_stays_while_the_reply_is_on_its_way(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    reply = message(replyTo=question)
    target.send(send(asker.id, reply))
    target.accepted(reply["id"])
    asker.received(info(target.id), reply)
    is_refused(asker, target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)


def test_edge_stays_when_the_reply_fails(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    reply = message(replyTo=question)
    target.send(send(asker.id, reply))
    delivery = target.accepted(reply["id"])
    asker.expect_type("message")
    asker.send({"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": ""})
    target.expect_type("delivery_failed")
    carry(target, asker, message(replyTo=question))


def test_several_replies_may_be_on_their_way(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    replies = [message(replyTo=question) for _ in range(3)]
    target.send(*(send(asker.id, reply) for reply in replies))
    deliveries = [target.accepted(reply["id"]) for reply in replies]
    for reply, delivery in zip(replies, deliveries, strict=True):
        assert asker.received(info(target.id), reply) == delivery
        asker.acknowledge(delivery)
        target.expect({"type": "delivered", "messageId": reply["id"], "deliveryId": delivery})


# (b) Double asks.


@pytest.mark.parametrize("state", ["blocking", "deferred"])
def test_check_b_second_ask_to_the_same_session(broker: Broker, state: str) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    if state == "deferred":
        asker.send(control("defer", question))
        asker.expect(result("defer", question, True))
        target.expect(deferred(question, asker))
    is_refused(asker, target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)
    target.expect_silence()


def test_check_b_ask_that_is_not_acknowledged_counts(broker: Broker) -> None:
    asker, target = strangers(broker)
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    is_refused(asker, target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)


@pytest.mark.parametrize("members", [{}, {"expectsReply": False}], ids=repr)
def test_check_b_plain_messages_pass(broker: Broker, members: Frame) -> None:
    asker, target = strangers(broker)
    ask(asker, target)
    carry(asker, target, message(**members))


def test_check_b_asks_to_different_sessions_pass(broker: Broker) -> None:
    asker, target = strangers(broker)
    ask(asker, target)
    ask(asker, broker.join(fresh(), fresh_scope()))


def test_check_b_asks_of_different_sessions_pass(broker: Broker) -> None:
    asker, target = strangers(broker)
    ask(asker, target)
    ask(broker.join(fresh(), fresh_scope()), target)


def test_check_b_precedes_c(broker: Broker) -> None:
    asker, target = strangers(broker)
    first = ask(asker, target)
    asker.send(control("defer", first))
    asker.barrier()
    target.expect(deferred(first, asker))
    ask(target, asker)
    is_refused(asker, target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)


# (c) Mutual asks.


def test_check_c_mutual_ask(broker: Broker) -> None:
    asker, target = strangers(broker)
    ask(asker, target)
    is_refused(target, asker, "MUTUAL_ASK", MUTUAL, expectsReply=True)
    carry(target, asker, message())


def test_check_c_deferred_edge_does_not_count(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.send(control("defer", question))
    asker.barrier()
    target.expect(deferred(question, asker))
    ask(target, asker)


def test_check_c_reply_that_is_an_ask(broker: Broker) -> None:
    """The edge that is being answered does not count; then the answer is one itself."""
    asker, target = strangers(broker)
    question = ask(asker, target)
    counter = ask(target, asker, replyTo=question)
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)
    is_refused(asker, target, "MUTUAL_ASK", MUTUAL, expectsReply=True)
    is_refused(target, asker, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)
    carry(asker, target, message(replyTo=counter))


def test_check_c_ask_to_oneself(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    peer.send(send(peer.id, body))
    delivery = peer.accepted(body["id"])
    peer.received(info(peer.id), body)
    peer.acknowledge(delivery)
    peer.expect_type("delivered")
    is_refused(peer, peer, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)
    reply = message(replyTo=body["id"])
    peer.send(send(peer.id, reply))
    peer.accepted(reply["id"])


# (d) Cap.


def test_check_d_64_asks_of_one_sender(start: StartBroker) -> None:
    broker = start({})
    asker = broker.join(fresh(), fresh_scope())
    targets = [broker.join(fresh(), fresh_scope()) for _ in range(65)]
    for target in targets[:64]:
        ask(asker, target)
    is_refused(
        asker, targets[64], "TOO_MANY_PENDING_ASKS", "Too many asks are already waiting for replies", expectsReply=True
    )
    is_refused(asker, targets[0], "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)  # (b) comes first
    carry(asker, targets[64], message())


# Refusals keep nothing.


def test_refused_ask_leaves_no_edge(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    is_refused(target, asker, "MUTUAL_ASK", MUTUAL, expectsReply=True)
    carry(target, asker, message(replyTo=question))
    ask(target, asker)


# Failed deliveries of an ask.


def test_failed_ask_is_cancelled_at_its_recipient_first(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    peer.send(send(peer.id, body))
    delivery = peer.accepted(body["id"])
    peer.received(info(peer.id), body)
    peer.send({"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": "x"})
    peer.expect(cancelled(body["id"], peer, "delivery_failed"), failed(body["id"], "CONFLICTING_MESSAGE_ID", "x"))


def test_rejected_ask_removes_its_edge(broker: Broker) -> None:
    asker, target = strangers(broker)
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    delivery = asker.accepted(body["id"])
    target.expect_type("message")
    target.send({"type": "message_rejected", "deliveryId": delivery, "code": "CONFLICTING_MESSAGE_ID", "reason": "x"})
    target.expect(cancelled(body["id"], asker, "delivery_failed"))
    asker.expect(failed(body["id"], "CONFLICTING_MESSAGE_ID", "x"))
    ask(asker, target)


def test_timed_out_ask_removes_its_edge(start: StartBroker) -> None:
    broker = start({"ack_timeout_ms": 100})
    asker, target = strangers(broker)
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    target.expect_type("message")
    target.expect(cancelled(body["id"], asker, "delivery_failed"))
    asker.expect(failed(body["id"], "DELIVERY_TIMEOUT", "Recipient did not acknowledge the message in time"))
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=body["id"])


@pytest.mark.parametrize("how", ["close", "unregister", "preserve"])
def test_unacknowledged_ask_of_a_session_that_goes(broker: Broker, how: str) -> None:
    scope = fresh_scope()
    target, asker = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    target.expect_type("message")
    leave(asker, how)
    target.expect({"type": "session_left", "sessionId": asker.id}, cancelled(body["id"], asker, "delivery_failed"))
    target.expect_silence()


@pytest.mark.parametrize("how", ["close", "unregister", "preserve"])
def test_unacknowledged_ask_to_a_session_that_goes(broker: Broker, how: str) -> None:
    scope = fresh_scope()
    asker, target = broker.join(fresh(), scope), broker.join(fresh(), scope)
    asker.expect_type("session_joined")
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    leave(target, how)
    reason = "Recipient disconnected before acknowledging the message"
    asker.expect({"type": "session_left", "sessionId": target.id}, failed(body["id"], "RECIPIENT_DISCONNECTED", reason))
    asker.expect_silence()


def leave(peer: Peer, how: str) -> None:
    if how == "close":
        peer.close()
        return
    peer.send({"type": "unregister", "preserveAsks": True} if how == "preserve" else {"type": "unregister"})
    peer.barrier()


# defer_ask and cancel_ask.


def test_row_defer_by_the_asker(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.send(control("defer", question))
    asker.expect(result("defer", question, True))
    target.expect(deferred(question, asker))


def test_row_defer_twice(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    for _ in range(3):
        asker.send(control("defer", question))
        asker.expect(result("defer", question, True))
    target.expect(deferred(question, asker))
    target.expect_silence()


def test_deferred_ask_can_be_answered_and_cancelled(broker: Broker) -> None:
    asker, target = strangers(broker)
    for end in ("reply", "cancel"):
        question = ask(asker, target)
        asker.send(control("defer", question))
        asker.expect(result("defer", question, True))
        target.expect(deferred(question, asker))
        if end == "reply":
            carry(target, asker, message(replyTo=question))
        else:
            asker.send(control("cancel", question))
            asker.expect(result("cancel", question, True))
            target.expect(cancelled(question, asker, "cancelled"))


def test_row_cancel_by_the_asker(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.send(control("cancel", question, "x" * 256))
    asker.expect(result("cancel", question, True, "x" * 256))
    target.expect(cancelled(question, asker, "cancelled"))
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)
    for kind in ("cancel", "defer"):
        asker.send(control(kind, question))
        asker.expect(result(kind, question, False))
    ask(asker, target)


def test_cancel_of_an_ask_that_is_not_acknowledged(broker: Broker) -> None:
    asker, target = strangers(broker)
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    delivery = asker.accepted(body["id"])
    target.expect_type("message")
    asker.send(control("cancel", body["id"]))
    asker.expect(result("cancel", body["id"], True))
    target.expect(cancelled(body["id"], asker, "cancelled"))
    target.acknowledge(delivery)
    asker.expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
    target.expect_silence()


@pytest.mark.parametrize("kind", ["defer", "cancel"])
def test_row_control_by_anyone_else(broker: Broker, kind: str) -> None:
    asker, target = strangers(broker)
    other = broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    for peer in (target, other):
        peer.send(control(kind, question))
        peer.expect(result(kind, question, False))
    asker.expect_silence()
    carry(target, asker, message(replyTo=question))


@pytest.mark.parametrize("kind", ["defer", "cancel"])
@pytest.mark.parametrize(
    "message_id", ["unknown", "", "x" * 256, "\U0001f600" * 128, "\ud800"], ids=lambda v: ascii(v)[:9]
)
def test_row_control_of_an_unknown_ask(broker: Broker, kind: str, message_id: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(control(kind, message_id, ""))
    peer.expect(result(kind, message_id, False, ""))


@pytest.mark.parametrize("kind", ["defer", "cancel"])
@pytest.mark.parametrize("field", ["requestId", "messageId"])
@pytest.mark.parametrize(
    "value", [None, 1, True, [], {}, "x" * 257, "\U0001f600" * 128 + "x"], ids=lambda v: repr(v)[:9]
)
def test_control_fields_are_strings_of_at_most_256(broker: Broker, kind: str, field: str, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({**control(kind, "m"), field: value})
    peer.expect_error("INVALID_REQUEST", f"Invalid {kind}_ask message")


@pytest.mark.parametrize("kind", ["defer", "cancel"])
@pytest.mark.parametrize("field", ["requestId", "messageId"])
def test_control_without_a_field(broker: Broker, kind: str, field: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    frame = control(kind, "m")
    del frame[field]
    peer.send(frame)
    peer.expect_error("INVALID_REQUEST", f"Invalid {kind}_ask message")


@pytest.mark.parametrize("kind", ["defer", "cancel"])
def test_notice_is_written_before_the_result(broker: Broker, kind: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    peer.send(send(peer.id, body))
    peer.accepted(body["id"])
    peer.expect_type("message")
    peer.send(control(kind, body["id"]))
    notice = deferred(body["id"], peer) if kind == "defer" else cancelled(body["id"], peer, "cancelled")
    peer.expect(notice, result(kind, body["id"], True))


# Expiry.


def test_row_expiry_tells_the_recipient_only(start: StartBroker) -> None:
    broker = start({"ask_expiry_ms": 300})
    asker, target = strangers(broker)
    question = ask(asker, target)
    target.expect(cancelled(question, asker, "expired"))
    asker.expect_silence()
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)
    asker.send(control("cancel", question))
    asker.expect(result("cancel", question, False))


def test_expiry_of_a_deferred_ask_whose_asker_is_gone(start: StartBroker) -> None:
    broker = start({"ask_expiry_ms": 300})
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.close()
    target.expect(deferred(question, asker), cancelled(question, asker, "expired"))


# Leaving.


def leaving_pair(broker: Broker) -> tuple[Peer, Peer, str, str]:
    """A session that goes, one that stays, an ask from the first to the second, and one the other way."""
    goes, stays = strangers(broker)
    outgoing = ask(goes, stays)
    goes.send(control("defer", outgoing))
    goes.expect(result("defer", outgoing, True))
    stays.expect(deferred(outgoing, goes))
    incoming = ask(stays, goes)
    return goes, stays, outgoing, incoming


@pytest.mark.parametrize("how", ["close", "preserve"])
def test_row_asker_goes(broker: Broker, how: str) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    leave(asker, how)
    target.expect(deferred(question, asker))
    again = broker.join(asker.id, fresh_scope())
    carry(target, again, message(replyTo=question))


@pytest.mark.parametrize("how", ["close", "preserve"])
def test_row_recipient_goes(broker: Broker, how: str) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    leave(target, how)
    broker.connect().barrier()
    again = broker.join(target.id, fresh_scope())
    asker.expect_silence()
    ask(again, asker)  # deferred, or else this were a mutual ask
    carry(again, asker, message(replyTo=question))


def test_row_going_does_not_defer_twice(broker: Broker) -> None:
    goes, stays, _, _ = leaving_pair(broker)
    leave(goes, "preserve")
    stays.expect_silence()


def test_row_unregister_without_preserving(broker: Broker) -> None:
    goes, stays, outgoing, incoming = leaving_pair(broker)
    leave(goes, "unregister")
    frames = stays.barrier()
    wanted = [cancelled(name, goes, "session_disconnected") for name in (outgoing, incoming)]
    assert sorted(frames, key=str) == sorted(wanted, key=str)
    again = broker.join(goes.id, fresh_scope())
    is_refused(again, stays, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=incoming)
    is_refused(stays, again, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=outgoing)


def test_row_unregister_with_preserve_asks_false(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.send({"type": "unregister", "preserveAsks": False})
    target.expect(cancelled(question, asker, "session_disconnected"))


def test_unregister_tells_session_left_then_asks(broker: Broker) -> None:
    scope = fresh_scope()
    target, asker = broker.join(fresh(), scope), broker.join(fresh(), scope)
    target.expect_type("session_joined")
    question = message(expectsReply=True)
    asker.send(send(target.id, question))
    delivery = asker.accepted(question["id"])
    target.expect_type("message")
    target.acknowledge(delivery)
    asker.expect_type("delivered")
    asker.send({"type": "unregister"})
    target.expect(
        {"type": "session_left", "sessionId": asker.id}, cancelled(question["id"], asker, "session_disconnected")
    )


def test_cancelling_session_may_be_gone_and_come_back(broker: Broker) -> None:
    """Edges are kept by id, so the asker may cancel after it came back in another scope."""
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.close()
    target.expect(deferred(question, asker))
    again = broker.join(asker.id, fresh_scope())
    again.send(control("cancel", question))
    again.expect(result("cancel", question, True))
    target.expect(cancelled(question, asker, "cancelled"))


def test_ask_to_a_session_that_is_gone_is_answered_when_both_came_back(broker: Broker) -> None:
    asker, target = strangers(broker)
    question = ask(asker, target)
    asker.close()
    target.expect(deferred(question, asker))
    target.close()
    new_target = broker.join(target.id, fresh_scope())
    new_asker = broker.join(asker.id, fresh_scope())
    carry(new_target, new_asker, message(replyTo=question))
