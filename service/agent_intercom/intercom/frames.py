# SPDX-License-Identifier: Apache-2.0
"""One typed struct per frame from a client that the broker decodes (contract sections 2.2 and 2.6).

`UNSET` means that the key is absent; `null` is never accepted in its place. Nothing here decides anything. `register`
and `access_control` have no struct, because their checks are ordered key by key; frames to clients are built by
`router.encode`, and `client_frames` has the client's own view.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType

Number: TypeAlias = int | float


class Frame(Struct, tag_field="type", omit_defaults=True, gc=False):
    """Base of all frames."""


class Health(Frame, tag="health"):
    requestId: str


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
"""Frames that the fast decoder knows."""


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
