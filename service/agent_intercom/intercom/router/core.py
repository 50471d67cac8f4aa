# SPDX-License-Identifier: Apache-2.0
"""The router: one entry point per kind of input, in the check order of contract section 2.1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from agent_intercom.intercom import contract
from agent_intercom.intercom.contract import DeliveryCode, ErrorCode, Limits, Text
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.frames import (
    CancelAsk,
    ClientFrame,
    DeferAsk,
    Health,
    List,
    Message,
    MessageReceived,
    MessageRejected,
    Presence,
    Send,
    Unregister,
)
from agent_intercom.intercom.router import encode, messages
from agent_intercom.intercom.router.asks import Asks
from agent_intercom.intercom.router.book import Book
from agent_intercom.intercom.router.deliveries import Deliveries, Outgoing
from agent_intercom.intercom.router.effects import Drop, Effect, Idle, PutEdge
from agent_intercom.intercom.router.messages import well_formed
from agent_intercom.intercom.router.registration import Refused
from agent_intercom.intercom.router.sessions import Sessions
from agent_intercom.intercom.router.state import NEVER, Image, Link, Session
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now
from agent_intercom.wire.codec import convert, decode, utf16_length
from agent_intercom.wire.errors import WireError

_read_message = msgspec.json.Decoder(Message).decode
_write_content = msgspec.json.Encoder().encode
_UNSET: Final = msgspec.UNSET


class Router:
    """State and rules of the intercom.

    Every method that takes an input appends to `book.effects`; the caller takes them from there. `book.wake_at` is the
    monotonic time at which `tick` wants to be called.
    """

    __slots__ = ("_asks", "_deliveries", "_sessions", "book")

    def __init__(self, limits: Limits, generation: str) -> None:
        self._wire(Book(limits, generation))

    @classmethod
    def of_image(cls, image: Image, limits: Limits) -> Router:
        """The router that `image` was taken of."""
        router = cls.__new__(cls)
        router._wire(Book.of_image(image, limits))
        return router

    def _wire(self, book: Book) -> None:
        self.book = book
        self._asks = Asks(book)
        self._deliveries = Deliveries(book, self._asks)
        self._sessions = Sessions(book, self._asks, self._deliveries)

    def start(self, now: Now) -> None:
        """Begin the idle time: it runs from the start, so that a mere probe keeps nobody up."""
        self.book.arm_idle(now)

    def load(self, generation: str, edges: Iterable[AskEdge], now: Now) -> None:
        """Take the generation and the edges from the store, before the first session registers."""
        self.book.generation = generation
        self._asks.load(edges, now)

    def edges(self) -> list[AskEdge]:
        """All open ask edges."""
        return list(self._asks.edges())

    # Connections.

    def opened(self, number: int, origin: str, now: Now) -> Link:
        """A connection was accepted. The oldest unregistered one makes room when there are too many."""
        book = self.book
        link = Link(number, origin, now.mono + book.limits.registration_ms)
        book.links[number] = link
        book.unregistered[number] = link
        book.wake(link.register_by)
        if len(book.unregistered) > book.limits.unregistered:
            self._destroy(next(iter(book.unregistered.values())), "evicted", now)
        return link

    def closed(self, number: int, reason: str, now: Now) -> None:
        """The connection is gone; nothing more can be written to it."""
        link = self.book.forget_link(number)
        if link is not None:
            self._leave(link, reason, now)

    def broken(self, link: Link, code: str, now: Now) -> None:
        """The peer broke the framing or sent no JSON: closed without a word (contract section 1.1).

        What was written to it before, in answer to the frames that were good, still leaves.
        """
        self.book.note("PROTOCOL_ERROR", connection=link.number, code=code)
        self.book.finish(link.number)
        self._leave(link, "protocol", now)

    def _destroy(self, link: Link, reason: str, now: Now) -> None:
        if self.book.forget_link(link.number) is not None:
            self.book.effects.append(Drop(link.number))
            self._leave(link, reason, now)

    def _leave(self, link: Link, reason: str, now: Now) -> None:
        session = None if link.session is None else self.book.sessions.get(link.session)
        if session is not None and session.number == link.number:
            self._sessions.leave(session, reason, now)

    def fail(self, link: Link, code: str, text: str, now: Now) -> None:
        """Answer with `error`; the connection is read no more and its session leaves at once."""
        self.book.note("FRAME_REFUSED", session=link.session, code=code)
        self.book.write(link.number, encode.error(code, text))
        self.book.finish(link.number)
        self._leave(link, "protocol", now)

    def congested(self, number: int, now: Now) -> None:
        """Too many bytes wait for the connection."""
        session = self._session_at(number)
        if session is not None and session.slow_since < 0:
            session.slow_since = now.mono

    def drained(self, number: int) -> None:
        """The connection reads again: those that were held for it go on."""
        session = self._session_at(number)
        if session is not None:
            session.slow_since = -1
        self.book.release_for(number)

    def _session_at(self, number: int) -> Session | None:
        link = self.book.links.get(number)
        return None if link is None or link.session is None else self.book.sessions.get(link.session)

    # Time.

    def tick(self, now: Now) -> None:
        """Do what is due by `now` and set `book.wake_at` anew."""
        book = self.book
        if now.mono < book.wake_at:
            return
        book.wake_at = NEVER
        for link in [link for link in book.unregistered.values() if link.register_by <= now.mono]:
            self._destroy(link, "unregistered", now)
        for link in book.unregistered.values():
            book.wake(link.register_by)
        book.wake(self._deliveries.expire(now))
        book.wake(self._asks.expire(now))
        for link in book.links.values():
            if link.held_for >= 0:
                if link.held_until <= now.mono:
                    book.release(link)
                else:
                    book.wake(link.held_until)
        self._idle(now)

    def _idle(self, now: Now) -> None:
        book = self.book
        if book.idle_at <= now.mono:
            book.idle_at = NEVER
            if not book.sessions:
                book.effects.append(Idle())
                book.arm_idle(now)
        book.wake(book.idle_at)

    # Frames.

    def charge(self, link: Link, payload: bytes, now: Now) -> bool:
        """Take the price of a frame from the connection's bucket; False ends the connection.

        What counts is its size once written compactly.
        """
        book = self.book
        bucket = book.buckets[link.origin]
        mono = now.mono
        spent = link.spent - (mono - link.spent_at) * bucket.per_second
        spent = max(spent, 0)
        if len(payload) <= bucket.bytes_per_token:
            spent += 1000
        else:
            spent += 1000 * -(-codec.compact_length(payload) // bucket.bytes_per_token)
        if spent <= bucket.size:
            link.spent = spent
            link.spent_at = mono
            return True
        book.note("RATE_LIMITED", session=link.session)
        self.fail(link, ErrorCode.RATE_LIMITED, Text.RATE_LIMITED, now)
        return False

    def health(self, link: Link, request_id: str, now: Now) -> None:
        """`health`, in any state."""
        payload = encode.health_ok(request_id, link.origin)
        if len(payload) > contract.MAX_FRAME:
            self.fail(link, ErrorCode.INVALID_REQUEST, Text.INVALID_HEALTH, now)
        else:
            self.book.write(link.number, payload)

    def access_control(self, link: Link, now: Now) -> None:
        """`access_control`: no credential is accepted yet (contract section 2.9)."""
        if link.session is not None:
            text = Text.ACCESS_ON_SESSION
        elif link.origin == contract.ORIGIN_LOCAL:
            text = Text.ACCESS_REJECTED
        else:
            text = Text.REMOTE_CONTROL_REJECTED
        self.fail(link, ErrorCode.ACCESS_DENIED, text, now)

    def register(self, link: Link, frame: dict[str, Any], fresh_id: str, now: Now) -> None:
        """`register`; `fresh_id` is used when the client brings no id."""
        try:
            self._sessions.register(link, frame, fresh_id, now)
        except Refused as refusal:
            self.fail(link, refusal.code, refusal.text, now)

    def frame(self, link: Link, frame: ClientFrame, now: Now) -> None:
        """Any other frame whose types are right, from a connection in any state."""
        kind = type(frame)
        session = self.book.sessions.get(link.session)  # type: ignore[arg-type]
        if session is None or kind is Health:
            self._outside_session(link, frame, now)
        elif kind is Send:
            self._send_raw(link, session, frame, now)  # type: ignore[arg-type]
        elif kind is MessageReceived:
            self._deliveries.acknowledge(link.number, frame.deliveryId, now)  # type: ignore[union-attr]
        else:
            self._session_frame(link, session, frame, now)

    def _outside_session(self, link: Link, frame: ClientFrame, now: Now) -> None:
        if isinstance(frame, Health):
            self.health(link, frame.requestId, now)
        else:
            tag = frame.__struct_config__.tag
            self.fail(link, ErrorCode.INVALID_REQUEST, f"Received {tag} before register", now)

    def _session_frame(self, link: Link, session: Session, frame: ClientFrame, now: Now) -> None:
        book = self.book
        text: str | None = None
        if isinstance(frame, List):
            text = None if self._sessions.list(session, frame.requestId) else Text.INVALID_LIST
        elif isinstance(frame, Presence):
            text = self._presence(link, session, frame, now)
        elif isinstance(frame, MessageRejected):
            fits = utf16_length(frame.reason) <= book.limits.reject_reason
            if frame.code == DeliveryCode.CONFLICTING_MESSAGE_ID and fits:
                self._deliveries.reject(link.number, frame.deliveryId, frame.reason, now)
            else:
                text = Text.INVALID_REJECTED
        elif isinstance(frame, DeferAsk | CancelAsk):
            text = self._control_ask(session, frame)
        elif isinstance(frame, Unregister):
            self._sessions.unregister(link, session, frame.preserveAsks is True, now)
        if text is not None:
            self.fail(link, ErrorCode.INVALID_REQUEST, text, now)

    def _presence(self, link: Link, session: Session, frame: Presence, now: Now) -> str | None:
        limits = self.book.limits
        changes: dict[str, str] = {}
        for key, value, longest in (
            ("name", frame.name, limits.name),
            ("status", frame.status, limits.status),
            ("model", frame.model, limits.model),
        ):
            if value is msgspec.UNSET:
                continue
            if utf16_length(value) > longest:
                return f"Invalid presence {key}"
            changes[key] = value
        try:
            slow = self._sessions.presence(session, changes, now)
        except Refused as refusal:
            return refusal.text
        if slow is not None:
            self.book.hold(link, slow, now)
        return None

    def _control_ask(self, session: Session, frame: DeferAsk | CancelAsk) -> str | None:
        limits = self.book.limits
        deferring = isinstance(frame, DeferAsk)
        if utf16_length(frame.requestId) > limits.request_id or utf16_length(frame.messageId) > limits.message_id:
            return Text.INVALID_DEFER if deferring else Text.INVALID_CANCEL
        act = self._asks.defer if deferring else self._asks.cancel
        applied = act(session, frame.messageId)
        action = "defer" if deferring else "cancel"
        self.book.write(session.number, encode.ask_control_result(frame.requestId, action, frame.messageId, applied))
        return None

    def _send_raw(self, link: Link, session: Session, frame: Send, now: Now) -> None:
        raw = frame.message
        try:
            message = _read_message(raw)
        except (msgspec.DecodeError, RecursionError):
            self.send_untyped(link, session, frame.to, bytes(raw), now)
            return
        self.send(link, session, frame.to, message, bytes(raw), now)

    def send_untyped(self, link: Link, session: Session, to: object, body: bytes, now: Now) -> None:
        """A send whose message the typed decoder refuses: odd encodings of text pass, the rest does not."""
        try:
            value = decode(body)
        except WireError:
            value = None
        try:
            message = convert(value, Message)
            target = convert(to, str)
        except (msgspec.ValidationError, RecursionError):
            self._malformed(link, value)
            return
        self.send(link, session, target, message, encode.quote(value), now)

    def _malformed(self, link: Link, message: object) -> None:
        message_id = message.get("id") if isinstance(message, dict) else None
        named = message_id if messages.usable_id(message_id, self.book.limits) else "unknown"
        self._deliveries.refuse(link.number, str(named), DeliveryCode.INVALID_MESSAGE, Text.INVALID_MESSAGE)

    def send(self, link: Link, session: Session, to: str, message: Message, body: bytes, now: Now) -> None:
        """The processing order of contract section 2.6."""
        if not well_formed(to, message, self.book.limits):
            self._malformed(link, {"id": message.id})
            return
        control = None
        if message.content.control is not _UNSET:
            value = decode(body)
            control = value["content"]["control"]
            if not self._control_passes(link, message, control):
                return
            body = encode.quote(value)
        reply_to = None if message.replyTo is _UNSET else message.replyTo
        fingerprint = _fingerprint(to, reply_to, message, control)
        outgoing = Outgoing(message.id, reply_to, message.expectsReply is True, fingerprint, body)
        if self._deliveries.retry(session, outgoing, now):
            return
        target = self._sessions.resolve(session, to)
        if isinstance(target, Session):
            self._deliveries.accept(link, session, target, outgoing, now)
        else:
            self._deliveries.refuse(link.number, message.id, *target)

    def _control_passes(self, link: Link, message: Message, raw: Any) -> bool:
        if not messages.control_well_formed(raw, message, self.book.limits):
            self._malformed(link, {"id": message.id})
            return False
        if raw["type"].startswith(contract.BOSS_CONTROL_PREFIX):
            code = DeliveryCode.CONTROL_DISPATCH_UNAVAILABLE
            self._deliveries.refuse(link.number, message.id, code, Text.BOSS_CONTROL_UNAVAILABLE)
            return False
        return True

    # The store.

    def not_stored(self, failed: Sequence[PutEdge], effects: list[Effect]) -> list[Effect]:
        """The store refused these edges: what of `effects`, none of which has left yet, is to be done instead."""
        return self._asks.not_stored(failed, effects)


def _fingerprint(to: str, reply_to: str | None, message: Message, control: object) -> bytes:
    """A digest that is equal exactly for equal {to as typed, replyTo, expectsReply, content}.

    `control` is the control slot as it came: it may have more keys than the typed one.
    """
    expects = message.expectsReply
    parts: list[object] = [to, reply_to, None if expects is _UNSET else expects, message.content]
    if control is not None:
        parts.append(control)
    try:
        text = _write_content(parts)
    except UnicodeEncodeError:
        text = encode.quote(parts)
    # Asking for a shorter digest takes longer than cutting this one.
    return blake2b(text).digest()[:16]
