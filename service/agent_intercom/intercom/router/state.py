# SPDX-License-Identifier: Apache-2.0
"""Everything that the rules remember. Plain records without references, so that they can be written and read back."""

from __future__ import annotations

from typing import Any

import msgspec

from agent_intercom.intercom.edge import AskEdge

NEVER = 2**62
"""A monotonic time that does not come."""

MEMORY_SHARE = 16 * 1024 * 1024
"""Bytes that settled deliveries, and again asks, may take up: clients choose how long their ids are."""


class Link(msgspec.Struct, gc=False):
    """A connection. `session` is the id that it is registered under; `register_by` (monotonic ms) counts while None.

    `spent` is how much of its rate bucket was in use at `spent_at` (monotonic ms), in thousandths of a token.
    """

    number: int
    origin: str
    register_by: int
    spent: int = 0
    spent_at: int = 0
    session: str | None = None
    held_for: int = -1
    held_until: int = 0


class Session(msgspec.Struct):
    """A registered session.

    `info` is what others are shown and `shown` the same as JSON; `scope` and `runtime` are private. `slow_since` is the
    monotonic time at which too many bytes waited for it, or -1.
    """

    id: str
    number: int
    scope: str | None
    runtime: str | None
    info: dict[str, Any]
    shown: bytes
    folded_name: str | None
    broadcast_at: int
    pending: int = 0
    slow_since: int = -1


class Delivery(msgspec.Struct, gc=False, array_like=True):
    """An accepted message, from its acceptance until it is forgotten.

    `until` (monotonic ms) is when it fails without an acknowledgement; once settled, when it is no more remembered, so
    that a retry would be delivered again. `delivered` says how it ended.
    """

    delivery: str
    sender: str
    sender_number: int
    message_id: str
    target: str
    target_number: int
    fingerprint: bytes
    until: int
    is_ask: bool
    answers: str | None
    delivered: bool = False


def weight(sender: str, message_id: str, target: str) -> int:
    """What a record with these ids is charged, in bytes."""
    return 128 + len(sender) + len(message_id) + len(target)


class Ask(msgspec.Struct, gc=False):
    """An ask edge and the monotonic time at which it expires."""

    edge: AskEdge
    due: int


class Image(msgspec.Struct):
    """The state as it is written to the memory file.

    Orders are part of it: `unregistered` are numbers of links, the first to make room first.
    """

    generation: str
    deliveries: int
    idle_at: int
    links: list[Link]
    unregistered: list[int]
    sessions: list[Session]
    pending: list[Delivery]
    settled: list[Delivery]
    asks: list[Ask]
