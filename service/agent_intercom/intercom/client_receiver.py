# SPDX-License-Identifier: Apache-2.0
"""What each frame of the broker does to the client: who is waiting for it, and what becomes an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from agent_intercom.intercom import client_frames as frames
from agent_intercom.intercom.client_errors import AskCancelledError, ClientError, DeliveryFailed
from agent_intercom.intercom.client_state import EventQueue, Inbox, Outbox, fail
from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Delivery,
    Joined,
    Left,
    Message,
    Presence,
    Reply,
)


class Writer(Protocol):
    """The part of the link that answers go to."""

    def post_first(self, payload: bytes) -> None: ...


class Receiver:
    """State behind one client; it outlives connections.

    `on_registered` runs at the moment of `registered`, before any later frame is looked at.
    """

    def __init__(
        self, session_id: str | None, auto_ack: bool, event_capacity: int, on_registered: Callable[[], None]
    ) -> None:
        self.session_id = session_id
        self.connected = False
        self.outbox = Outbox()
        self.events = EventQueue(event_capacity)
        self.replies: dict[str, asyncio.Future[Reply]] = {}
        self.requests: dict[str, tuple[bytes, asyncio.Future[Any]]] = {}
        self.registering: asyncio.Future[None] | None = None
        self._inbox = Inbox()
        self._auto_ack = auto_ack
        self._on_registered = on_registered
        self._writer: Writer | None = None

    def attach(self, writer: Writer) -> None:
        """Say where acknowledgements go."""
        self._writer = writer

    def on_frame(self, frame: frames.BrokerFrame) -> str | None:
        """Take one frame. Returns the code that ends the connection, or None."""
        if not self.connected:
            return self._on_first(frame)
        match frame:
            case frames.Incoming():
                self._on_message(frame)
            case frames.DeliveryAccepted() | frames.Delivered() | frames.DeliveryRefused():
                return self._on_delivery(frame)
            case frames.Sessions(request_id=request_id, sessions=sessions):
                self._answer(request_id, sessions)
            case frames.AskControlResult(request_id=request_id, applied=applied):
                self._answer(request_id, applied)
            case frames.SessionJoined(session=session):
                self.events.put(Joined(session))
            case frames.SessionLeft(session_id=session_id):
                self.events.put(Left(session_id))
            case frames.PresenceUpdate(session=session):
                self.events.put(Presence(session))
            case frames.AskDeferredNotice(message_id=message_id, from_session_id=sender):
                self.events.put(AskDeferred(message_id, sender))
            case frames.AskCancelledNotice():
                self._on_cancelled(frame)
            case frames.ErrorFrame(code=code):
                return code
            case _:
                return "PROTOCOL_VIOLATION"
        return None

    def end(self, error: ClientError, for_reader: ClientError | None) -> None:
        """Fail whatever waits; the events end with `for_reader`."""
        self.connected = False
        self.outbox.fail(error)
        for _, future in self.requests.values():
            fail(future, error)
        for reply in self.replies.values():
            fail(reply, error)
        self.events.end(for_reader)

    def _on_first(self, frame: frames.BrokerFrame) -> str | None:
        registering = self.registering
        if registering is None or registering.done():
            return "PROTOCOL_VIOLATION"
        if isinstance(frame, frames.ErrorFrame):
            fail(registering, ClientError(frame.code, frame.error))
            return frame.code
        if not isinstance(frame, frames.Registered) or not frame.compatible:
            return "INCOMPATIBLE"
        if self.session_id not in {None, frame.session_id}:
            return "INCOMPATIBLE"
        self.session_id = frame.session_id
        self.connected = True
        registering.set_result(None)
        self._on_registered()
        return None

    def _on_delivery(self, frame: frames.DeliveryAccepted | frames.Delivered | frames.DeliveryRefused) -> str | None:
        record = self.outbox.get(frame.message_id)
        if record is None or record.future.done():
            return None
        match frame:
            case frames.DeliveryAccepted(delivery_id=delivery_id):
                record.accepted = True
                record.delivery_id = delivery_id
            case frames.Delivered(delivery_id=delivery_id):
                if delivery_id != record.delivery_id:
                    return "PROTOCOL_VIOLATION"
                record.future.set_result(Delivery(record.message_id, delivery_id))
            case frames.DeliveryRefused(code=code, reason=reason, accepted=accepted):
                fail(record.future, DeliveryFailed(record.message_id, code, reason, accepted))
        return None

    def _answer(self, request_id: str, value: Any) -> None:
        _, future = self.requests.get(request_id, (b"", None))
        if future is not None and not future.done():
            future.set_result(value)

    def _on_cancelled(self, frame: frames.AskCancelledNotice) -> None:
        waiting = self.replies.get(frame.message_id)
        if waiting is not None and frame.from_session_id != self.session_id:
            fail(waiting, AskCancelledError(frame.message_id, frame.reason))
            return
        self._inbox.forget(frame.from_session_id, frame.message_id)
        self.events.put(AskCancelled(frame.message_id, frame.from_session_id, frame.reason))

    def _on_message(self, frame: frames.Incoming) -> None:
        """Surface a message once. Without an acknowledgement the sender is told that a malformed one did not arrive."""
        try:
            body = frames.decode_body(frame.message)
        except ClientError:
            return
        seen = self._inbox.check(frame.from_.id, frame.message, frame.delivery_id)
        if seen == "conflict":
            self._post(frames.rejected(frame.delivery_id, body.id))
        elif seen == "duplicate":
            self._post(frames.received(frame.delivery_id))
        elif seen == "new":
            self._surface(frame, frames.message_of(frame.from_, body, self._acknowledge))

    def _surface(self, frame: frames.Incoming, message: Message) -> None:
        asked = message.reply_to
        waiting = self.replies.get(asked) if asked is not None else None
        if asked is not None and waiting is not None and not waiting.done():
            waiting.set_result(Reply(message, asked))
            self._settle_by_reply(asked)
        elif not self.events.put(message):
            return
        self._inbox.add(message.sender.id, frame.message, frame.delivery_id)
        if self._auto_ack or waiting is not None:
            self._acknowledge_now(message)

    def _settle_by_reply(self, message_id: str) -> None:
        """A reply proves that its ask arrived, whatever became of the broker's word."""
        record = self.outbox.get(message_id)
        if record is not None and not record.future.done():
            record.future.set_result(Delivery(message_id, record.delivery_id or ""))

    def _acknowledge_now(self, message: Message) -> None:
        delivery_id = self._inbox.acknowledge(message.sender.id, message.id)
        if delivery_id is not None:
            self._post(frames.received(delivery_id))

    async def _acknowledge(self, message: Message) -> None:
        self._acknowledge_now(message)

    def _post(self, payload: bytes) -> None:
        if self._writer is not None:
            self._writer.post_first(payload)
