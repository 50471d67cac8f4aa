# SPDX-License-Identifier: Apache-2.0
"""One typed struct per frame (contract sections 2.2, 2.3 and 2.6). Nothing here decides anything.

`UNSET` means that the key is absent; `null` is never written and never accepted in its place.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType

Number: TypeAlias = int | float


class Frame(Struct, tag_field="type", omit_defaults=True, gc=False):
    """Base of all frames."""


# From client to broker.


class Health(Frame, tag="health"):
    requestId: str


class SessionClaims(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What a client says of itself in `register` (contract section 3.1)."""

    cwd: str
    model: str
    pid: Number
    startedAt: Number
    lastActivity: Number
    name: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    runtimeInstanceId: str | UnsetType = UNSET


class Register(Frame, tag="register", kw_only=True):
    protocol: str
    version: int
    session: SessionClaims
    sessionId: str | UnsetType = UNSET
    scopeId: str | UnsetType = UNSET


class Unregister(Frame, tag="unregister"):
    preserveAsks: bool | UnsetType = UNSET


class List(Frame, tag="list"):
    requestId: str


class Presence(Frame, tag="presence"):
    name: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    model: str | UnsetType = UNSET


class Send(Frame, tag="send"):
    """`message` stays as it came: it is validated as `Message` and forwarded byte for byte."""

    to: str
    message: Raw


class MessageReceived(Frame, tag="message_received"):
    deliveryId: str


class MessageRejected(Frame, tag="message_rejected"):
    deliveryId: str
    code: str
    reason: str


class DeferAsk(Frame, tag="defer_ask"):
    requestId: str
    messageId: str


class CancelAsk(Frame, tag="cancel_ask"):
    requestId: str
    messageId: str


ClientFrame: TypeAlias = (
    Health | Unregister | List | Presence | Send | MessageReceived | MessageRejected | DeferAsk | CancelAsk
)
"""Frames that the fast decoder knows. `register` and `access_control` are checked key by key instead."""


# The message inside `send` and `message`.


class Attachment(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    type: Literal["file", "snippet", "context"]
    name: str
    content: str
    language: str | UnsetType = UNSET


class Control(Struct, omit_defaults=True):
    """A typed control between extensions; keys beyond these are allowed and forwarded."""

    type: str
    version: Number
    data: Any | UnsetType = UNSET


class Content(Struct, omit_defaults=True, forbid_unknown_fields=True):
    text: str
    attachments: list[Attachment] | UnsetType = UNSET
    control: Control | UnsetType = UNSET


class Message(Struct, omit_defaults=True, forbid_unknown_fields=True):
    id: str
    timestamp: Number
    content: Content
    replyTo: str | UnsetType = UNSET
    expectsReply: bool | UnsetType = UNSET


# From broker to client.


class SessionInfo(Struct, omit_defaults=True, gc=False):
    """What others are shown of a session (contract section 3.2). Everything but the last two fields is a claim."""

    id: str
    cwd: str
    model: str
    pid: Number
    startedAt: Number
    lastActivity: Number
    name: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    trustedLocal: bool | UnsetType = UNSET
    origin: str | UnsetType = UNSET


class RemoteAccess(Struct, gc=False):
    feature: str
    policySemanticsVersion: int
    policySemanticsHash: str


class HealthOk(Frame, tag="health_ok"):
    requestId: str
    protocol: str
    version: int
    endpoint: str
    remoteAccess: RemoteAccess


class Registered(Frame, tag="registered"):
    sessionId: str
    protocol: str
    version: int


class Sessions(Frame, tag="sessions"):
    requestId: str
    sessions: list[SessionInfo]


class SessionJoined(Frame, tag="session_joined"):
    session: SessionInfo


class PresenceUpdate(Frame, tag="presence_update"):
    session: SessionInfo


class SessionLeft(Frame, tag="session_left"):
    sessionId: str


class Delivery(Frame, tag="message", rename={"from_": "from"}):
    deliveryId: str
    from_: SessionInfo
    message: Raw


class DeliveryAccepted(Frame, tag="delivery_accepted"):
    messageId: str
    deliveryId: str


class Delivered(Frame, tag="delivered"):
    messageId: str
    deliveryId: str


class DeliveryFailed(Frame, tag="delivery_failed"):
    messageId: str
    accepted: bool
    code: str
    reason: str


class AskDeferred(Frame, tag="ask_deferred"):
    messageId: str
    fromSessionId: str


class AskCancelled(Frame, tag="ask_cancelled"):
    messageId: str
    fromSessionId: str
    reason: str


class AskControlResult(Frame, tag="ask_control_result"):
    requestId: str
    action: str
    messageId: str
    applied: bool


class Error(Frame, tag="error"):
    code: str
    error: str
