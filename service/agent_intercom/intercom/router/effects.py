# SPDX-License-Identifier: Apache-2.0
"""What the rules want done. The shell carries effects out in order, after the commit that they belong to."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from agent_intercom.intercom.edge import AskEdge


class Write(msgspec.Struct, frozen=True, gc=False):
    """Queue `frame` (length prefix included) on connection `number`.

    `delivery` is set on the two frames that tell of an ask's acceptance: they are taken back when its edge cannot be
    stored.
    """

    number: int
    frame: bytes
    delivery: str = ""


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Read no more from the connection, send what is queued, close."""

    number: int


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Close the connection at once."""

    number: int


class Bound(msgspec.Struct, frozen=True, gc=False):
    """The connection is a session now: what follows may leave only when it is sure to survive a restart."""

    number: int


class Unbound(msgspec.Struct, frozen=True, gc=False):
    """The connection stays open and is no session's any more."""

    number: int


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Stop reading from the connection: what it sends to, `held_for`, is not being read.

    Its own number means that it only has to let others read first.
    """

    number: int
    held_for: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """Read from the connection again."""

    number: int


class PutEdge(msgspec.Struct, frozen=True, gc=False):
    """Store an ask edge durably. `delivery` is the delivery that carries the ask."""

    edge: AskEdge
    delivery: str


class DropEdge(msgspec.Struct, frozen=True, gc=False):
    """Remove an ask edge from the store."""

    sender: str
    message_id: str


class Note(msgspec.Struct, frozen=True):
    """Something for the journal: a name of the host's catalogue and allow-listed fields."""

    event: str
    fields: dict[str, Any]


class Idle(msgspec.Struct, frozen=True, gc=False):
    """Nobody is registered and the idle time is over: exit if no connection waits."""


Effect: TypeAlias = Write | Finish | Drop | Bound | Unbound | Hold | Release | PutEdge | DropEdge | Note | Idle
