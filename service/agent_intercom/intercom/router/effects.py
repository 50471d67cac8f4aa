# SPDX-License-Identifier: Apache-2.0
"""What the rules want done. The shell carries effects out in order, after the commit that they belong to."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from agent_intercom.intercom.edge import AskEdge


class Write(NamedTuple):
    """Queue `frame` (length prefix included) on connection `number`.

    `delivery` is set on the two frames that tell of an ask's acceptance: they are taken back when its edge cannot be
    stored.
    """

    number: int
    frame: bytes
    delivery: str = ""


class Finish(NamedTuple):
    """Read no more from the connection, send what is queued, close."""

    number: int


class Drop(NamedTuple):
    """Close the connection at once."""

    number: int


class Bound(NamedTuple):
    """The connection is a session now: what follows may leave only when it is sure to survive a restart."""

    number: int


class Unbound(NamedTuple):
    """The connection stays open and is no session's any more."""

    number: int


class Hold(NamedTuple):
    """Stop reading from the connection: what it sends to is not being read."""

    number: int


class Release(NamedTuple):
    """Read from the connection again."""

    number: int


class PutEdge(NamedTuple):
    """Store an ask edge durably. `delivery` is the delivery that carries the ask."""

    edge: AskEdge
    delivery: str


class DropEdge(NamedTuple):
    """Remove an ask edge from the store."""

    sender: str
    message_id: str


class Note(NamedTuple):
    """Something for the journal: a name of the host's catalogue and allow-listed fields."""

    event: str
    fields: dict[str, Any]


class Idle(NamedTuple):
    """Nobody is registered and the idle time is over: exit if no connection waits."""


Effect: TypeAlias = Write | Finish | Drop | Bound | Unbound | Hold | Release | PutEdge | DropEdge | Note | Idle
