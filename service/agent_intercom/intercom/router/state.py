# SPDX-License-Identifier: Apache-2.0
"""Everything that the rules remember. Plain records without references, so that they can be written and read back."""

from __future__ import annotations

from typing import Any

import msgspec

from agent_intercom.intercom.edge import AskEdge


class Link(msgspec.Struct, gc=False):
    """A connection. `session` is the id that it is registered under; `register_by` (monotonic ms) counts while None."""

    number: int
    origin: str
    register_by: int
    tokens: float
    refilled_at: int
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


class Pending(msgspec.Struct, gc=False, array_like=True):
    """An accepted message that its recipient has not acknowledged."""

    delivery: str
    sender: str
    sender_number: int
    message_id: str
    target: str
    target_number: int
    fingerprint: bytes
    due: int
    is_ask: bool
    answers: str | None


class Settled(msgspec.Struct, gc=False, array_like=True):
    """How a message ended, kept so that a retry is not delivered twice."""

    sender: str
    message_id: str
    delivery: str
    target: str
    fingerprint: bytes
    delivered: bool
    forget_at: int


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
    pending: list[Pending]
    settled: list[Settled]
    asks: list[Ask]
