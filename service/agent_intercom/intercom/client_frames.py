# SPDX-License-Identifier: Apache-2.0
"""Frames as the client reads and writes them: strict towards the broker, checked before they are queued.

The broker's side of the same frames is `frames`; there unknown keys are the peer's affair, here they are refused
(contract sections 2.2, 2.3, 2.6 and 2.8).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import Attachment, Control, Message, Number, SessionInfo
from agent_intercom.intercom.contract import CONTROL_TYPE_PATTERN, DEFAULT_LIMITS, MAX_FRAME, PROTOCOL, VERSION
from agent_intercom.wire import codec
from agent_intercom.wire.errors import WireError

_LIMITS = DEFAULT_LIMITS


class _Frame(Struct, tag_field="type", rename="camel", forbid_unknown_fields=True, gc=False):
    pass


class Registered(_Frame, tag="registered"):
    session_id: str
    protocol: str
    version: Number

    @property
    def compatible(self) -> bool:
        """Whether the broker speaks exactly this protocol."""
        return self.protocol == PROTOCOL and self.version == VERSION


class Sessions(_Frame, tag="sessions"):
    request_id: str
    sessions: list[SessionInfo]


class SessionJoined(_Frame, tag="session_joined"):
    session: SessionInfo


class PresenceUpdate(_Frame, tag="presence_update"):
    session: SessionInfo


class SessionLeft(_Frame, tag="session_left"):
    session_id: str


class Incoming(_Frame, tag="message"):
    delivery_id: str
    from_: SessionInfo = msgspec.field(name="from")
    message: dict[str, Any]


class DeliveryAccepted(_Frame, tag="delivery_accepted"):
    message_id: str
    delivery_id: str


class Delivered(_Frame, tag="delivered"):
    message_id: str
    delivery_id: str


class DeliveryRefused(_Frame, tag="delivery_failed"):
    message_id: str
    accepted: bool
    code: Literal[
        "INVALID_MESSAGE",
        "CONTROL_DISPATCH_UNAVAILABLE",
        "SESSION_NOT_FOUND",
        "AMBIGUOUS_TARGET",
        "SENDER_NOT_FOUND",
        "INVALID_REPLY_TARGET",
        "MUTUAL_ASK",
        "ASK_ALREADY_PENDING",
        "DUPLICATE_MESSAGE_ID",
        "CONFLICTING_MESSAGE_ID",
        "TOO_MANY_PENDING_DELIVERIES",
        "TOO_MANY_PENDING_ASKS",
        "RECIPIENT_DISCONNECTED",
        "SENDER_DISCONNECTED",
        "DELIVERY_TIMEOUT",
    ]
    reason: str


class AskDeferredNotice(_Frame, tag="ask_deferred"):
    message_id: str
    from_session_id: str


class AskCancelledNotice(_Frame, tag="ask_cancelled"):
    message_id: str
    from_session_id: str
    reason: Literal["cancelled", "expired", "delivery_failed", "session_disconnected", "authorization_revoked"]


class AskControlResult(_Frame, tag="ask_control_result"):
    request_id: str
    action: Literal["defer", "cancel"]
    message_id: str
    applied: bool


class ErrorFrame(_Frame, tag="error"):
    code: str
    error: str


BrokerFrame: TypeAlias = (
    Registered
    | Sessions
    | SessionJoined
    | PresenceUpdate
    | SessionLeft
    | Incoming
    | DeliveryAccepted
    | Delivered
    | DeliveryRefused
    | AskDeferredNotice
    | AskCancelledNotice
    | AskControlResult
    | ErrorFrame
)


class Content(Struct, omit_defaults=True, forbid_unknown_fields=True):
    text: str
    attachments: list[Attachment] | UnsetType = UNSET
    control: Control | UnsetType = UNSET


class Body(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The message inside `send` and `message`."""

    id: str
    timestamp: Number
    content: Content
    reply_to: str | UnsetType = UNSET
    expects_reply: bool | UnsetType = UNSET


_decoder = msgspec.json.Decoder(BrokerFrame)


def decode(payload: bytes) -> BrokerFrame:
    """Read a frame of the broker. Raises ClientError `PROTOCOL_VIOLATION` for one that is not in the contract."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_slowly(payload)


def _decode_slowly(payload: bytes) -> BrokerFrame:
    """Malformed UTF-8 and lone surrogates are legal and only this path reads them."""
    try:
        return cast(BrokerFrame, msgspec.convert(codec.decode(payload), BrokerFrame))
    except (WireError, msgspec.ValidationError, RecursionError) as error:
        raise ClientError("PROTOCOL_VIOLATION", "the broker sent a frame that is not in the contract") from error


def decode_body(message: dict[str, Any]) -> Body:
    """Check what a peer put into a message. Raises ClientError `INVALID_MESSAGE`."""
    try:
        body = msgspec.convert(message, Body)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ClientError("INVALID_MESSAGE", "the message has a shape that is not in the contract") from error
    if not 0 < codec.utf16_length(body.id) <= _LIMITS.message_id:
        raise ClientError("INVALID_MESSAGE", "message id has a wrong length", "id")
    return body


def encode(frame: dict[str, Any], field: str = "frame") -> bytes:
    """Write a frame; the size is checked here, so that nothing too large is ever queued (contract section 1.1)."""
    payload = codec.encode(frame)
    if len(payload) > MAX_FRAME:
        raise ClientError("FRAME_TOO_LARGE", f"frame of {len(payload)} bytes exceeds {MAX_FRAME}", field)
    return payload


def register_frame(
    *,
    claims: dict[str, Any],
    session_id: str | None,
    scope: str | None,
) -> bytes:
    """`register` for `claims` that `check_claims` passed."""
    frame: dict[str, Any] = {"type": "register", "protocol": PROTOCOL, "version": VERSION, "session": claims}
    if session_id is not None:
        frame["sessionId"] = session_id
    if scope is not None:
        frame["scopeId"] = scope
    return encode(frame, "session")


def check_text(value: object, field: str, low: int, high: int, code: str) -> str:
    """`value` when it is a string of `low` to `high` UTF-16 units. Raises ClientError `code` naming `field`."""
    if not isinstance(value, str):
        raise ClientError(code, f"{field} must be a string", field)
    if not low <= codec.utf16_length(value) <= high:
        raise ClientError(code, f"{field} must have {low} to {high} characters", field)
    return value


def check_claims(claims: dict[str, Any]) -> dict[str, Any]:
    """The session part of `register` (contract section 3.1). Raises ClientError `INVALID_SESSION`."""
    for field, low, high in (
        ("name", 0, _LIMITS.name),
        ("cwd", 1, _LIMITS.cwd),
        ("model", 1, _LIMITS.model),
        ("status", 0, _LIMITS.status),
        ("runtimeInstanceId", 1, _LIMITS.runtime_instance_id),
    ):
        if field in claims:
            check_text(claims[field], field, low, high, "INVALID_SESSION")
    return claims


def build_message(
    message_id: str,
    timestamp: int,
    text: str,
    *,
    reply_to: str | None,
    expects_reply: bool,
    attachments: Sequence[Attachment],
    control: Control | None,
) -> dict[str, Any]:
    """A message within the contract's limits (section 2.6). Raises ClientError `INVALID_MESSAGE`."""
    check_text(message_id, "message_id", 1, _LIMITS.message_id, "INVALID_MESSAGE")
    _check_bytes(text, "text", _LIMITS.text_bytes)
    content: dict[str, Any] = {"text": text}
    if attachments:
        content["attachments"] = [_attachment(attachment) for attachment in attachments]
        if len(attachments) > _LIMITS.attachments:
            raise ClientError("INVALID_MESSAGE", f"more than {_LIMITS.attachments} attachments", "attachments")
    if control is not None:
        if reply_to is not None or expects_reply:
            raise ClientError("INVALID_MESSAGE", "a control can be neither an ask nor a reply", "control")
        content["control"] = _control(control)
    message: dict[str, Any] = {"id": message_id, "timestamp": timestamp}
    if reply_to is not None:
        message["replyTo"] = check_text(reply_to, "reply_to", 1, _LIMITS.message_id, "INVALID_MESSAGE")
    if expects_reply:
        message["expectsReply"] = True
    message["content"] = content
    return message


def _check_bytes(value: object, field: str, limit: int) -> None:
    if not isinstance(value, str):
        raise ClientError("INVALID_MESSAGE", f"{field} must be a string", field)
    if codec.utf8_length(value) > limit:
        raise ClientError("INVALID_MESSAGE", f"{field} is longer than {limit} bytes", field)


def _attachment(attachment: Attachment) -> Attachment:
    if attachment.type not in {"file", "snippet", "context"}:
        raise ClientError("INVALID_MESSAGE", "attachment type must be file, snippet or context", "attachments.type")
    check_text(attachment.name, "attachments.name", 0, _LIMITS.attachment_name, "INVALID_MESSAGE")
    _check_bytes(attachment.content, "attachments.content", _LIMITS.attachment_bytes)
    return attachment


def _control(control: Control) -> Control:
    check_text(control.type, "control.type", 1, _LIMITS.control_type, "INVALID_MESSAGE")
    if not CONTROL_TYPE_PATTERN.fullmatch(control.type):
        raise ClientError("INVALID_MESSAGE", "control type has a character that is not allowed", "control.type")
    if isinstance(control.version, bool) or not isinstance(control.version, int) or control.version < 1:
        raise ClientError("INVALID_MESSAGE", "control version must be an integer of at least 1", "control.version")
    if control.data is not UNSET and len(codec.encode(control.data)) > _LIMITS.control_bytes:
        raise ClientError("INVALID_MESSAGE", f"control data exceeds {_LIMITS.control_bytes} bytes", "control.data")
    return control


def received(delivery_id: str) -> bytes:
    """The acknowledgement of a delivery."""
    return encode({"type": "message_received", "deliveryId": delivery_id})


def rejected(delivery_id: str, message_id: str) -> bytes:
    """The refusal of an id that was used with another payload (contract section 6)."""
    reason = f'Conflicting payload for reused message ID "{message_id}"'
    frame = {"type": "message_rejected", "deliveryId": delivery_id, "code": "CONFLICTING_MESSAGE_ID", "reason": reason}
    return encode(frame)


def message_of(sender: SessionInfo, body: Body, acknowledge: Callable[[Message], Awaitable[None]]) -> Message:
    """The event for a message that a peer sent."""
    content = body.content
    return Message(
        sender,
        body.id,
        body.timestamp,
        content.text,
        reply_to=None if body.reply_to is UNSET else body.reply_to,
        expects_reply=body.expects_reply is True,
        attachments=() if content.attachments is UNSET else tuple(content.attachments),
        control=None if content.control is UNSET else content.control,
        acknowledge=acknowledge,
    )
