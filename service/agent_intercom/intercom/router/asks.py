# SPDX-License-Identifier: Apache-2.0
"""Ask edges: who waits for whose reply (contract section 2.7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from agent_intercom.intercom.contract import CancelReason, DeliveryCode, Text
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.router import encode
from agent_intercom.intercom.router.book import Book
from agent_intercom.intercom.router.effects import DropEdge, Effect, PutEdge, Write
from agent_intercom.intercom.router.state import MEMORY_SHARE, NEVER, Ask, Session, weight
from agent_intercom.wire.clock import Now

Refusal = tuple[str, str]
"""A delivery code and its reason."""


class Asks:
    """The rules of asking, deferring, cancelling and answering."""

    __slots__ = ("_book",)

    def __init__(self, book: Book) -> None:
        self._book = book

    def load(self, edges: Iterable[AskEdge], now: Now) -> None:
        """Take edges from the store: deferred, and without those that expired (contract section 6)."""
        for edge in edges:
            left = edge.expires_at - now.wall
            if left > 0:
                edge.blocking = False
                self._insert(edge, now.mono + left)

    def edges(self) -> Iterator[AskEdge]:
        for asks in self._book.asks.values():
            for ask in asks.values():
                yield ask.edge

    def check(
        self, sender: str, target: str, message_id: str, reply_to: str | None, expects_reply: bool
    ) -> Refusal | None:
        """The refusal of a send from `sender` to `target`, or None. Order is that of the contract."""
        asks = self._book.asks
        towards_sender = asks.get(target)
        if reply_to is not None:
            answered = towards_sender.get(reply_to) if towards_sender else None
            if answered is None:
                return DeliveryCode.INVALID_REPLY_TARGET, Text.REPLY_UNMATCHED
            if answered.edge.target != sender:
                return DeliveryCode.INVALID_REPLY_TARGET, Text.REPLY_MISMATCHED
        if not expects_reply:
            return None
        return self._check_ask(sender, target, message_id, reply_to, towards_sender or {})

    def _check_ask(
        self, sender: str, target: str, message_id: str, reply_to: str | None, towards_sender: dict[str, Ask]
    ) -> Refusal | None:
        own = self._book.asks.get(sender) or {}
        same = own.get(message_id)
        if same is not None and same.edge.target != target:
            return DeliveryCode.DUPLICATE_MESSAGE_ID, Text.DUPLICATE_SETTLED
        for ask in own.values():
            if ask.edge.target == target and ask is not same:
                return DeliveryCode.ASK_ALREADY_PENDING, Text.ASK_PENDING
        for key, ask in towards_sender.items():
            if ask.edge.target == sender and ask.edge.blocking and key != reply_to:
                return DeliveryCode.MUTUAL_ASK, Text.MUTUAL_ASK
        if same is None and (len(own) >= self._book.limits.asks_per_sender or self._book.ask_bytes > MEMORY_SHARE):
            return DeliveryCode.TOO_MANY_PENDING_ASKS, Text.TOO_MANY_ASKS
        return None

    def open(self, sender: str, target: str, message_id: str, delivery: str, now: Now) -> None:
        """Begin an ask, or renew the very same one that an earlier broker left."""
        expiry = self._book.limits.ask_expiry_ms
        edge = AskEdge(
            sender=sender,
            message_id=message_id,
            target=target,
            created_at=now.wall,
            expires_at=now.wall + expiry,
            blocking=True,
        )
        self._insert(edge, now.mono + expiry)
        self._book.effects.append(PutEdge(edge, delivery))

    def answer(self, asker: str, message_id: str) -> None:
        """The reply was acknowledged: the edge is gone."""
        self._remove(asker, message_id)

    def delivery_failed(self, asker: str, message_id: str, target_number: int) -> None:
        """The message that carried the ask was not delivered."""
        if self._remove(asker, message_id):
            notice = encode.ask_cancelled(message_id, asker, CancelReason.DELIVERY_FAILED)
            self._book.write(target_number, notice)

    def defer(self, asker: Session, message_id: str) -> bool:
        """`defer_ask`: whether `message_id` is an ask of the asker's; the recipient is told on the first transition."""
        ask = self._book.asks.get(asker.id, {}).get(message_id)
        if ask is None:
            return False
        self._defer(ask.edge)
        return True

    def cancel(self, asker: Session, message_id: str) -> bool:
        """`cancel_ask`: whether `message_id` was an ask of the asker's."""
        ask = self._remove(asker.id, message_id)
        if ask is None:
            return False
        self._tell(ask.edge.target, encode.ask_cancelled(message_id, asker.id, CancelReason.CANCELLED))
        return True

    def leave(self, session_id: str) -> None:
        """A party left without a word, or is being replaced: its asks, both ways, stay answerable."""
        for edge in self.edges():
            if edge.sender == session_id:
                self._defer(edge)
            elif edge.target == session_id:
                edge.blocking = False

    def withdraw(self, session_id: str) -> None:
        """A party unregistered for good: its asks, both ways, are removed and the other side is told."""
        for edge in [edge for edge in self.edges() if session_id in (edge.sender, edge.target)]:
            self._remove(edge.sender, edge.message_id)
            other = edge.target if edge.sender == session_id else edge.sender
            notice = encode.ask_cancelled(edge.message_id, session_id, CancelReason.SESSION_DISCONNECTED)
            self._tell(other, notice)

    def expire(self, now: Now) -> int:
        """Remove what is due, telling the recipients only. Returns the monotonic time of the next expiry."""
        following = NEVER
        due: list[AskEdge] = []
        for asks in self._book.asks.values():
            for ask in asks.values():
                if ask.due <= now.mono:
                    due.append(ask.edge)
                else:
                    following = min(following, ask.due)
        for edge in due:
            self._remove(edge.sender, edge.message_id)
            self._book.note("ASK_EXPIRED", session=edge.sender)
            self._tell(edge.target, encode.ask_cancelled(edge.message_id, edge.sender, CancelReason.EXPIRED))
        return following

    def not_stored(self, failed: Sequence[PutEdge], effects: list[Effect]) -> list[Effect]:
        """Take back asks whose edges could not be stored.

        `effects` are those that have not left the process; the frames that told of the acceptance are removed from them
        and a refusal is put in their place, so that no one ever hears of an ask that would not survive.
        """
        book = self._book
        taken_back = {put.delivery: put.edge for put in failed}
        for put in failed:
            self._remove(put.edge.sender, put.edge.message_id, stored=False)
            pending = book.pending.pop(put.delivery, None)
            if pending is not None:
                book.pending_by_message.pop((pending.sender, pending.message_id), None)
                sender = book.sessions.get(pending.sender)
                if sender is not None:
                    sender.pending -= 1
        kept: list[Effect] = []
        for effect in effects:
            edge = taken_back.get(effect.delivery) if isinstance(effect, Write | PutEdge) else None
            if edge is None:
                kept.append(effect)
            elif isinstance(effect, Write):
                kept.extend(self._refusal(effect, edge))
        return kept

    def _refusal(self, effect: Write, edge: AskEdge) -> list[Effect]:
        sender = self._book.sessions.get(edge.sender)
        if sender is None or sender.number != effect.number or b'"delivery_accepted"' not in effect.frame[:40]:
            return []
        payload = encode.delivery_failed(
            edge.message_id, False, DeliveryCode.TOO_MANY_PENDING_ASKS, Text.ASKS_UNAVAILABLE
        )
        return [Write(effect.number, encode.prefixed(payload))]

    def _insert(self, edge: AskEdge, due: int) -> None:
        own = self._book.asks.setdefault(edge.sender, {})
        if edge.message_id not in own:
            self._book.ask_bytes += weight(edge.sender, edge.message_id, edge.target)
        own[edge.message_id] = Ask(edge, due)
        self._book.wake(due)

    def _remove(self, sender: str, message_id: str, stored: bool = True) -> Ask | None:
        own = self._book.asks.get(sender)
        ask = own.pop(message_id, None) if own else None
        if ask is None:
            return None
        self._book.ask_bytes -= weight(ask.edge.sender, ask.edge.message_id, ask.edge.target)
        if not own:
            del self._book.asks[sender]
        if stored:
            self._book.effects.append(DropEdge(sender, message_id))
        return ask

    def _defer(self, edge: AskEdge) -> None:
        if edge.blocking:
            edge.blocking = False
            self._tell(edge.target, encode.ask_deferred(edge.message_id, edge.sender))

    def _tell(self, session_id: str, payload: bytes) -> None:
        session = self._book.sessions.get(session_id)
        if session is not None:
            self._book.write(session.number, payload)
