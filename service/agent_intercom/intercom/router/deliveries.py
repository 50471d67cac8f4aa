# SPDX-License-Identifier: Apache-2.0
"""Messages between acceptance and acknowledgement, and what is remembered after (contract section 2.6)."""

from __future__ import annotations

from typing import Final

import msgspec

from agent_intercom.intercom.contract import MAX_FRAME, DeliveryCode, Text
from agent_intercom.intercom.router import encode
from agent_intercom.intercom.router.asks import Asks, Refusal
from agent_intercom.intercom.router.book import Book
from agent_intercom.intercom.router.effects import Write
from agent_intercom.intercom.router.state import NEVER, Delivery, Link, Session
from agent_intercom.wire.clock import Now

_LARGEST: Final = MAX_FRAME + 4


class Outgoing(msgspec.Struct, gc=False):
    """A message that passed the checks of form. `fingerprint` is equal exactly for equal payloads."""

    message_id: str
    reply_to: str | None
    expects_reply: bool
    fingerprint: bytes
    body: bytes


class Deliveries:
    """Acceptance, acknowledgement, refusal, time-out and retries."""

    __slots__ = ("_asks", "_book")

    def __init__(self, book: Book, asks: Asks) -> None:
        self._book = book
        self._asks = asks

    def refuse(self, number: int, message_id: str, code: str, reason: str) -> None:
        """The message was not accepted."""
        self._book.write(number, encode.delivery_failed(message_id, False, code, reason))

    def retry(self, sender: Session, message: Outgoing, now: Now) -> bool:
        """Steps 2 to 4 of the contract: whether the send is dealt with already (a repetition, or over a cap)."""
        book = self._book
        key = (sender.id, message.message_id)
        book.settled.forget(now, book.limits)
        settled = book.settled.by_message.get(key)
        if settled is not None:
            if settled.fingerprint != message.fingerprint:
                self._refuse_duplicate(sender, message, Text.DUPLICATE_SETTLED)
                return True
            if settled.delivered and settled.target in book.sessions:
                self._tell(sender, encode.ACCEPTED, settled)
                self._tell(sender, encode.DELIVERED, settled)
                return True
            book.settled.drop(settled)
        pending = book.pending_by_message.get(key)
        if pending is not None:
            if pending.fingerprint != message.fingerprint:
                self._refuse_duplicate(sender, message, Text.DUPLICATE_PENDING)
            else:
                self._tell(sender, encode.ACCEPTED, pending)
            return True
        limits = book.limits
        if len(book.pending) >= limits.pending_total or sender.pending >= limits.pending_per_sender:
            code = DeliveryCode.TOO_MANY_PENDING_DELIVERIES
            self.refuse(sender.number, message.message_id, code, Text.TOO_MANY_DELIVERIES)
            return True
        return False

    def _tell(self, sender: Session, start: bytes, known: Delivery) -> None:
        """Say again how a message stands whose sender repeats it."""
        frame = encode.outcome_frame(start, encode.quote(known.message_id), known.delivery.encode())
        self._book.effects.append(Write(sender.number, frame))

    def accept(self, link: Link, sender: Session, target: Session, message: Outgoing, now: Now) -> None:
        """Steps 6 and 7: the rules of asks, then acceptance and the way to the recipient."""
        book = self._book
        message_id = message.message_id
        refusal: Refusal | None = None
        if message.expects_reply or message.reply_to is not None:
            refusal = self._asks.check(sender.id, target.id, message_id, message.reply_to, message.expects_reply)
        if refusal is None and target.slow_since >= 0 and now.mono - target.slow_since >= book.limits.stall_ms:
            refusal = DeliveryCode.TOO_MANY_PENDING_DELIVERIES, Text.RECIPIENT_NOT_READING
        count = book.deliveries + 1
        delivery = f"{book.generation}-{count}"
        encoded = delivery.encode()
        frame = encode.message_frame(encoded, sender.shown, message.body)
        if refusal is None and len(frame) > _LARGEST:
            refusal = DeliveryCode.INVALID_MESSAGE, Text.MESSAGE_TOO_LARGE
        if refusal is not None:
            self.refuse(link.number, message_id, *refusal)
            return
        book.deliveries = count
        tag = ""
        if message.expects_reply:
            self._asks.open(sender.id, target.id, message_id, delivery, now)
            tag = delivery
        self._remember(link, sender, target, message, delivery, now)
        accepted = encode.outcome_frame(encode.ACCEPTED, encode.quote(message_id), encoded)
        answer, onward = Write(link.number, accepted, tag), Write(target.number, frame, tag)
        # Whoever waits for the message comes first; who writes to itself hears of the acceptance before.
        book.effects += (answer, onward) if target.number == link.number else (onward, answer)
        if target.slow_since >= 0:
            self._book.hold(link, target, now)

    def _remember(
        self, link: Link, sender: Session, target: Session, message: Outgoing, delivery: str, now: Now
    ) -> None:
        book = self._book
        due = now.mono + book.limits.ack_ms
        book.pending[delivery] = book.pending_by_message[sender.id, message.message_id] = Delivery(
            delivery,
            sender.id,
            link.number,
            message.message_id,
            target.id,
            target.number,
            message.fingerprint,
            due,
            message.expects_reply,
            message.reply_to,
        )
        sender.pending += 1
        if due < book.wake_at:  # noqa: PLR1730 - see Book.wake
            book.wake_at = due

    def acknowledge(self, number: int, delivery: str, now: Now) -> None:
        """`message_received`; ignored unless it comes from the connection that the message was written to."""
        book = self._book
        pending = book.pending.get(delivery)
        if pending is None or pending.target_number != number:
            return
        answers = pending.answers
        self._settle(pending, True, now)
        if answers is not None:
            self._asks.answer(pending.target, answers)
        if pending.sender_number in book.links:
            frame = encode.outcome_frame(encode.DELIVERED, encode.quote(pending.message_id), delivery.encode())
            book.effects.append(Write(pending.sender_number, frame))

    def reject(self, number: int, delivery: str, reason: str, now: Now) -> None:
        """`message_rejected`: the recipient knows the id with another payload."""
        pending = self._book.pending.get(delivery)
        if pending is not None and pending.target_number == number:
            self._fail(pending, DeliveryCode.CONFLICTING_MESSAGE_ID, reason, now)

    def fail_for(self, number: int, now: Now, *, hears: bool) -> None:
        """A connection is a session's no more: what was on its way to or from it has failed.

        `hears`: whether the connection itself is told. The one that is replaced is, the one that unregistered is not.
        """
        deaf = -1 if hears else number
        for pending in list(self._book.pending.values()):
            if pending.target_number == number:
                self._fail(pending, DeliveryCode.RECIPIENT_DISCONNECTED, Text.RECIPIENT_GONE, now, deaf)
            elif pending.sender_number == number:
                self._fail(pending, DeliveryCode.SENDER_DISCONNECTED, Text.SENDER_GONE, now, deaf)

    def expire(self, now: Now) -> int:
        """Fail what was not acknowledged in time. Returns the monotonic time of the next such failure."""
        pending_by_id = self._book.pending
        while pending_by_id:
            pending = next(iter(pending_by_id.values()))
            if pending.until > now.mono:
                return pending.until
            self._fail(pending, DeliveryCode.DELIVERY_TIMEOUT, Text.ACK_TIMEOUT, now)
        return NEVER

    def _fail(self, pending: Delivery, code: str, reason: str, now: Now, deaf: int = -1) -> None:
        self._settle(pending, False, now)
        if pending.is_ask:
            told = -1 if pending.target_number == deaf else pending.target_number
            self._asks.delivery_failed(pending.sender, pending.message_id, told)
        if pending.sender_number != deaf:
            failed = encode.delivery_failed(pending.message_id, True, code, reason)
            self._book.write(pending.sender_number, failed)
        self._book.note("DELIVERY_FAILED", session=pending.sender, code=code)

    def _settle(self, pending: Delivery, delivered: bool, now: Now) -> None:
        book = self._book
        del book.pending[pending.delivery]
        del book.pending_by_message[pending.sender, pending.message_id]
        sender = book.sessions.get(pending.sender)
        if sender is not None and sender.number == pending.sender_number:
            sender.pending -= 1
        pending.delivered = delivered
        pending.answers = None
        pending.until = now.mono + book.limits.recent_ms
        book.settled.add(pending)

    def _refuse_duplicate(self, sender: Session, message: Outgoing, reason: str) -> None:
        self.refuse(sender.number, message.message_id, DeliveryCode.DUPLICATE_MESSAGE_ID, reason)
