# SPDX-License-Identifier: Apache-2.0
"""The shared ledger of the rules: state, indexes over it, and the effects of the input at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from agent_intercom.intercom.contract import ORIGIN_LOCAL, ORIGIN_REMOTE, Limits
from agent_intercom.intercom.router import encode
from agent_intercom.intercom.router.effects import Effect, Finish, Hold, Note, Release, Write
from agent_intercom.intercom.router.settled import Settled
from agent_intercom.intercom.router.state import NEVER, Ask, Delivery, Image, Link, Session, weight
from agent_intercom.wire.clock import Now


class Bucket(NamedTuple):
    """The rate limit of connections of one origin: `size` in thousandths of a token, refilled by whole ones."""

    size: int
    per_second: int
    bytes_per_token: int


class Book:
    """State, indexes and outgoing effects; what all rule modules share.

    Dictionaries keep insertion order, which is part of the rules: sessions are listed in the order of registration, and
    pending deliveries end in the order of acceptance.
    """

    __slots__ = (
        "ask_bytes",
        "asks",
        "buckets",
        "deliveries",
        "effects",
        "generation",
        "idle_at",
        "limits",
        "links",
        "pending",
        "pending_by_message",
        "released",
        "sessions",
        "settled",
        "unregistered",
        "wake_at",
    )

    def __init__(self, limits: Limits, generation: str) -> None:
        self.set_limits(limits)
        self.generation = generation
        self.deliveries = 0
        self.idle_at = NEVER
        self.wake_at = NEVER
        self.links: dict[int, Link] = {}
        self.unregistered: dict[int, Link] = {}
        self.sessions: dict[str, Session] = {}
        self.pending: dict[str, Delivery] = {}
        self.pending_by_message: dict[tuple[str, str], Delivery] = {}
        self.settled = Settled()
        self.asks: dict[str, dict[str, Ask]] = {}
        self.ask_bytes = 0
        self.released = False
        self.effects: list[Effect] = []

    def set_limits(self, limits: Limits) -> None:
        """Go on with these limits."""
        self.limits = limits
        unit = limits.bytes_per_token
        self.buckets = {
            ORIGIN_LOCAL: Bucket(limits.rate_capacity * 1000, limits.rate_per_second, unit),
            ORIGIN_REMOTE: Bucket(limits.remote_rate_capacity * 1000, limits.remote_rate_per_second, unit),
        }

    def change_limits(self, limits: Limits, now: Now) -> None:
        """Go on with other limits: tokens that are left stay, as far as they fit, and no time-out is longer."""
        before = self.buckets
        self.set_limits(limits)
        for link in self.links.values():
            old, new = before[link.origin], self.buckets[link.origin]
            spent = max(0, link.spent - (now.mono - link.spent_at) * old.per_second)
            link.spent = max(0, new.size - (old.size - spent))
            link.spent_at = now.mono
        for pending in self.pending.values():
            pending.until = min(pending.until, now.mono + limits.ack_ms)
        self.settled.hasten(now.mono + limits.recent_ms)
        self.wake(now.mono)

    def write(self, number: int, payload: bytes) -> None:
        """Queue a frame for a connection that still exists."""
        if number in self.links:
            self.effects.append(Write(number, encode.prefixed(payload)))

    def note(self, event: str, **fields: Any) -> None:
        self.effects.append(Note(event, fields))

    def wake(self, at: int) -> None:
        """Ask for a tick at monotonic time `at`, or earlier."""
        if at < self.wake_at:  # noqa: PLR1730 - called for every message; min() takes three times as long
            self.wake_at = at

    def audience(self, subject: Session) -> Iterator[Session]:
        """The other sessions that may know of `subject` (contract section 4.2)."""
        scope = subject.scope
        for session in self.sessions.values():
            if session.scope == scope and session is not subject and session.id != subject.id:
                yield session

    def tell_audience(self, subject: Session, payload: bytes) -> None:
        frame = encode.prefixed(payload)
        for session in self.audience(subject):
            self.effects.append(Write(session.number, frame))

    def forget_link(self, number: int) -> Link | None:
        """The connection is none of the rules' any more; those that were held for it go on."""
        self.unregistered.pop(number, None)
        self.release_for(number)
        return self.links.pop(number, None)

    def release_for(self, number: int) -> None:
        """Read again from the connections that were held for this one."""
        for link in self.links.values():
            if link.held_for == number:
                self.release(link)

    def release(self, link: Link) -> None:
        """Read again from a connection that was held; what it sent meanwhile comes first."""
        link.held_for = -1
        self.released = True
        self.effects.append(Release(link.number))

    def finish(self, number: int) -> None:
        """Let the connection go: it gets what was written to it and nothing after."""
        if self.forget_link(number) is not None:
            self.effects.append(Finish(number))

    def arm_idle(self, now: Now) -> None:
        """Start the idle time unless it runs already (contract section 1.4)."""
        if self.idle_at == NEVER:
            self.idle_at = now.mono + self.limits.idle_exit_ms
            self.wake(self.idle_at)

    def hold(self, link: Link, target: Session, now: Now) -> None:
        """Read no more from a connection whose frames fill the queue of `target`, for as long as that may take."""
        until = target.slow_since + self.limits.stall_ms
        if target.number != link.number and until > now.mono:
            self._hold(link, target.number, until)

    def rest(self, link: Link, now: Now) -> None:
        """Let others read what a connection's frames have made of them, before its next ones."""
        self._hold(link, link.number, now.mono + 1)

    def _hold(self, link: Link, held_for: int, until: int) -> None:
        link.held_for = held_for
        link.held_until = until
        self.wake(until)
        self.effects.append(Hold(link.number, held_for))

    def image(self) -> Image:
        return Image(
            generation=self.generation,
            deliveries=self.deliveries,
            idle_at=self.idle_at,
            links=list(self.links.values()),
            unregistered=list(self.unregistered),
            sessions=list(self.sessions.values()),
            pending=list(self.pending.values()),
            settled=self.settled.entries(),
            asks=[ask for asks in self.asks.values() for ask in asks.values()],
        )

    @classmethod
    def of_image(cls, image: Image, limits: Limits) -> Book:
        book = cls(limits, image.generation)
        book.deliveries = image.deliveries
        book.idle_at = image.idle_at
        for link in image.links:
            book.links[link.number] = link
        for number in image.unregistered:
            book.unregistered[number] = book.links[number]
        for session in image.sessions:
            book.sessions[session.id] = session
        for pending in image.pending:
            book.pending[pending.delivery] = pending
            book.pending_by_message[pending.sender, pending.message_id] = pending
        book.settled = Settled(image.settled)
        for ask in image.asks:
            book.asks.setdefault(ask.edge.sender, {})[ask.edge.message_id] = ask
            book.ask_bytes += weight(ask.edge.sender, ask.edge.message_id, ask.edge.target)
        book.wake_at = 0
        return book
