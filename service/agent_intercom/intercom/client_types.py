# SPDX-License-Identifier: Apache-2.0
"""What users of the client see: sessions, events and results. The errors are in `client_errors`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET, Struct, UnsetType

Number: TypeAlias = int | float


class SessionInfo(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A session as the broker shows it (contract section 3.2).

    `trusted_local`, `origin` and the remote fields are the broker's word, all else is the session's own claim. Times
    are Unix milliseconds. Fields that the broker left out are UNSET.
    """

    id: str
    cwd: str
    model: str
    pid: Number
    started_at: Number
    last_activity: Number
    trusted_local: bool
    origin: Literal["local", "remote"]
    name: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    peer_uid: Number | UnsetType = UNSET
    remote_host_id: str | UnsetType = UNSET
    parent_session_id: str | UnsetType = UNSET
    root_session_id: str | UnsetType = UNSET
    generation: Number | UnsetType = UNSET
    can_delegate: bool | UnsetType = UNSET
    depth: Number | UnsetType = UNSET
    max_depth: Number | UnsetType = UNSET
    max_children: Number | UnsetType = UNSET


class Attachment(Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A file, a snippet or context that travels with a message."""

    type: Literal["file", "snippet", "context"]
    name: str
    content: str
    language: str | UnsetType = UNSET


class Control(Struct, omit_defaults=True, frozen=True):
    """A typed control between extensions (contract section 2.6)."""

    type: str
    version: Number
    data: Any | UnsetType = UNSET


class Delivery(NamedTuple):
    """The recipient acknowledged the message."""

    message_id: str
    delivery_id: str


class Message:
    """A message from another session. It is information, never authority.

    `timestamp` is the sender's claim in Unix milliseconds. `expects_reply` marks an ask; `reply_to` the id of the ask
    that this answers.
    """

    __slots__ = (
        "_acknowledge",
        "attachments",
        "control",
        "expects_reply",
        "id",
        "reply_to",
        "sender",
        "text",
        "timestamp",
    )

    def __init__(
        self,
        sender: SessionInfo,
        id: str,
        timestamp: Number,
        text: str,
        *,
        reply_to: str | None = None,
        expects_reply: bool = False,
        attachments: tuple[Attachment, ...] = (),
        control: Control | None = None,
        acknowledge: Callable[[Message], Awaitable[None]] | None = None,
    ) -> None:
        self.sender = sender
        self.id = id
        self.timestamp = timestamp
        self.text = text
        self.reply_to = reply_to
        self.expects_reply = expects_reply
        self.attachments = attachments
        self.control = control
        self._acknowledge = acknowledge

    async def ack(self) -> None:
        """Tell the broker that this message is kept. Needed only with `auto_ack=False`; more than once does no harm."""
        if self._acknowledge is not None:
            await self._acknowledge(self)


class Reply(NamedTuple):
    """The answer to an ask."""

    message: Message
    asked_id: str

    @property
    def text(self) -> str:
        return self.message.text


class Connected(NamedTuple):
    """Registered; `resumed` is true when the client had been connected before. The roster may have changed."""

    session_id: str
    resumed: bool


class Disconnected(NamedTuple):
    """The connection ended and is being made again; `code` says why where that is known."""

    code: str | None


class Joined(NamedTuple):
    session: SessionInfo


class Left(NamedTuple):
    session_id: str


class Presence(NamedTuple):
    session: SessionInfo


class AskDeferred(NamedTuple):
    """The asker waits no more; the ask may still be answered."""

    message_id: str
    from_session_id: str


class AskCancelled(NamedTuple):
    """The ask is gone; a reply would be refused."""

    message_id: str
    from_session_id: str
    reason: str


class EventsLost(NamedTuple):
    """The event queue was full and `number` events, none of them an acknowledged message, were left out."""

    number: int


Event: TypeAlias = (
    Connected | Disconnected | Joined | Left | Presence | Message | AskDeferred | AskCancelled | EventsLost
)
