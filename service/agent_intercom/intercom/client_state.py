# SPDX-License-Identifier: Apache-2.0
"""What the client keeps: sends without a final word, messages already seen, queued events, its pace."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from typing import Any

from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import Delivery, Event, EventsLost
from agent_intercom.wire import codec

MAX_IN_FLIGHT = 63
"""The broker refuses the 65th unacknowledged send (contract section 1.1); replays must stay below it too."""

MAX_IN_FLIGHT_BYTES = 8 * 1024 * 1024
SEEN_KEYS = 4_096
EVENT_QUEUE = 1_024


class Outgoing:
    """A send without a final word. `payload` is the whole frame; `attempts` counts connections it was written to."""

    __slots__ = ("accepted", "attempts", "delivery_id", "future", "message_id", "payload")

    def __init__(self, message_id: str, payload: bytes, future: asyncio.Future[Delivery]) -> None:
        self.message_id = message_id
        self.payload = payload
        self.future = future
        self.delivery_id: str | None = None
        self.accepted = False
        self.attempts = 0


class Outbox:
    """Sends in flight, in order, by message id; at most `MAX_IN_FLIGHT` of them and `MAX_IN_FLIGHT_BYTES`."""

    def __init__(self) -> None:
        self._records: dict[str, Outgoing] = {}
        self._bytes = 0
        self._waiting: deque[tuple[Outgoing, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, message_id: str) -> Outgoing | None:
        return self._records.get(message_id)

    def records(self) -> list[Outgoing]:
        return list(self._records.values())

    async def admit(self, record: Outgoing) -> None:
        """Wait for room, first come first served. Raises ClientError `INVALID_MESSAGE` for an id that is in flight."""
        self._refuse_duplicate(record)
        if not self._waiting and self._fits(record):
            self._put(record)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (record, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self.remove(record)
            self._wake()
            raise

    def remove(self, record: Outgoing) -> None:
        """Forget `record`; another use of its id that is in flight stays."""
        if self._records.get(record.message_id) is record:
            del self._records[record.message_id]
            self._bytes -= len(record.payload)
            self._wake()

    def fail(self, error: ClientError) -> None:
        """End every send, waiting ones included, with `error`."""
        for record, turn in self._waiting:
            fail(turn, error)
            fail(record.future, error)
        self._waiting.clear()
        for record in self.records():
            fail(record.future, error)

    def _refuse_duplicate(self, record: Outgoing) -> None:
        waiting = any(other.message_id == record.message_id for other, _ in self._waiting)
        if waiting or record.message_id in self._records:
            raise ClientError("INVALID_MESSAGE", "a message with this id is being sent already", "message_id")

    def _fits(self, record: Outgoing) -> bool:
        if not self._records:
            return True
        return len(self._records) < MAX_IN_FLIGHT and self._bytes + len(record.payload) <= MAX_IN_FLIGHT_BYTES

    def _put(self, record: Outgoing) -> None:
        self._records[record.message_id] = record
        self._bytes += len(record.payload)

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            record, turn = self._waiting.popleft()
            if not turn.done():
                self._put(record)
                turn.set_result(None)


def fail(future: asyncio.Future[Any], error: ClientError) -> None:
    """End a wait with `error`, whether or not anybody is still waiting."""
    if not future.done():
        future.set_exception(error)
        future.exception()


class _Seen:
    __slots__ = ("acknowledged", "delivery_id", "fingerprint")

    def __init__(self, fingerprint: bytes, delivery_id: str) -> None:
        self.fingerprint = fingerprint
        self.delivery_id = delivery_id
        self.acknowledged = False


class Inbox:
    """Which messages were surfaced, so that a redelivery is not (contract section 2.6, retry contract).

    Keyed by sender id and message id; only a digest of the payload is kept. The oldest keys beyond `SEEN_KEYS` are
    forgotten, acknowledged ones only.
    """

    def __init__(self, capacity: int = SEEN_KEYS) -> None:
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()
        self._capacity = capacity

    def check(self, sender: str, message: dict[str, Any], delivery_id: str) -> str:
        """`new`, `duplicate` (acknowledge it again), `held` (surfaced, not acknowledged yet) or `conflict`."""
        known = self._seen.get((sender, message["id"]))
        if known is None:
            return "new"
        if known.fingerprint != _fingerprint(message):
            return "conflict"
        known.delivery_id = delivery_id
        return "duplicate" if known.acknowledged else "held"

    def add(self, sender: str, message: dict[str, Any], delivery_id: str) -> None:
        """Remember a message that is being surfaced."""
        self._seen[(sender, message["id"])] = _Seen(_fingerprint(message), delivery_id)
        while len(self._seen) > self._capacity:
            oldest = next((key for key, seen in self._seen.items() if seen.acknowledged), None)
            if oldest is None:
                break
            del self._seen[oldest]

    def acknowledge(self, sender: str, message_id: str) -> str | None:
        """Mark as acknowledged; the delivery id to acknowledge, or None when it was done before."""
        known = self._seen.get((sender, message_id))
        if known is None or known.acknowledged:
            return None
        known.acknowledged = True
        return known.delivery_id

    def forget(self, sender: str, message_id: str) -> None:
        """An ask whose delivery failed may come again under its id and must be surfaced then (contract section 2.7)."""
        self._seen.pop((sender, message_id), None)


def _fingerprint(message: dict[str, Any]) -> bytes:
    fields = [message.get("replyTo"), message.get("expectsReply", False), message["content"]]
    return blake2b(codec.encode(fields), digest_size=16).digest()


class Pacer:
    """A token bucket a little smaller than the broker's, which answers excess by closing (contract section 2.1)."""

    def __init__(self, capacity: float, per_second: float, bytes_per_token: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._rate = per_second
        self._unit = bytes_per_token
        self._clock = clock
        self._tokens = capacity
        self._at = clock()

    def take(self, size: int) -> float:
        """Pay for a frame of `size` bytes. 0.0 when paid, else the seconds until it can be."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # Dearer than a full bucket can never pass: let the broker say so.
        cost = min(max(1.0, float(-(-size // self._unit))), self._capacity)
        if cost <= self._tokens:
            self._tokens -= cost
            return 0.0
        return (cost - self._tokens) / self._rate


class EventQueue(AsyncIterator[Event]):
    """Events in order for one reader, bounded. A full queue refuses; `EventsLost` tells how many it refused."""

    def __init__(self, capacity: int = EVENT_QUEUE) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._lost = 0
        self._ended = False
        self._error: ClientError | None = None
        self._arrived: asyncio.Future[None] | None = None

    def put(self, event: Event) -> bool:
        """Queue `event`; False when there is no room for it."""
        if self._ended or len(self._events) >= self._capacity:
            self._lost += 1
            return False
        if self._lost:
            self._events.append(EventsLost(self._lost))
            self._lost = 0
        self._events.append(event)
        self._wake()
        return True

    def end(self, error: ClientError | None = None) -> None:
        """No more events. The reader gets what is queued, then `error` or the end."""
        self._ended = True
        self._error = self._error or error
        self._wake()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._lost and not self._ended:
                lost, self._lost = self._lost, 0
                return EventsLost(lost)
            if self._ended:
                raise self._error or StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        return self._events.popleft()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
