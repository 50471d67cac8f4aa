# SPDX-License-Identifier: Apache-2.0
"""An engine and the naive rules side by side: the same inputs, and the same frames on every connection."""

from __future__ import annotations

import json
from typing import Any

from agent_intercom.intercom.contract import MAX_FRAME, Limits
from agent_intercom.intercom.engine import Engine
from tests.enginehost import EPOCH, EngineHost, Frame, compact, lasting, packed
from tests.naive import END, Naive, Numbers
from tests.naive_shapes import parse

UNLIMITED_RATE = 10**9


def limits_of(numbers: Numbers) -> Limits:
    """The engine's limits for the naive rules' numbers; the rate limit, which the rules leave out, never applies."""
    return Limits(
        sessions=numbers.sessions,
        unregistered=numbers.unregistered,
        registration_ms=numbers.registration_ms,
        presence_ms=numbers.presence_ms,
        ack_ms=numbers.ack_ms,
        recent_ms=numbers.recent_ms,
        pending_total=numbers.pending_total,
        pending_per_sender=numbers.pending_per_sender,
        asks_per_sender=numbers.asks_per_sender,
        ask_expiry_ms=numbers.ask_expiry_ms,
        rate_capacity=UNLIMITED_RATE,
        remote_rate_capacity=UNLIMITED_RATE,
    )


class Comparison:
    """Every method feeds both sides and compares what came out."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.naive = Naive(numbers, EPOCH)
        self.host = EngineHost(limits_of(numbers))
        self.rest: dict[int, bytes] = {}
        self.history: list[tuple[int, Frame | str]] = []
        self._streams: dict[int, bytes] = {}
        self.announced: dict[int, Any] = {}
        """The scope in the last `register` on a connection that was answered with `registered`."""
        self._checkpoint()

    @property
    def open(self) -> list[int]:
        return list(self.naive.connections)

    # Inputs.

    def connect(self, origin: str = "local") -> int:
        number = self.host.open(origin)
        self.naive.opened(number, origin)
        self.compare()
        return number

    def payload(self, number: int, payload: bytes) -> None:
        """One whole frame, behind what was held back of an earlier one."""
        self.finish(number)
        if number in self.naive.connections:
            self._whole(number, packed(payload), payload)

    def send(self, number: int, frame: Any) -> None:
        self.payload(number, compact(frame))

    def begin(self, number: int, frame: Any, cut: int) -> None:
        """A part of a frame; the naive rules hear of it when it is whole."""
        self.finish(number)
        if number in self.naive.connections:
            data = packed(compact(frame))
            cut = 1 + cut % (len(data) - 1)
            self.host.feed(number, data[:cut])
            self.rest[number] = data[cut:]
            self._payloads[number] = data[4:]
            self.compare()

    def finish(self, number: int) -> None:
        rest = self.rest.pop(number, None)
        if rest is not None and number in self.naive.connections:
            self._whole(number, rest, self._payloads.pop(number))

    def _whole(self, number: int, data: bytes, payload: bytes) -> None:
        """The last bytes of a frame."""
        before = len(self.history)
        self.host.feed(number, data)
        self.naive.received(number, payload)
        self.compare()
        if any(to == number and isinstance(f, dict) and f["type"] == "registered" for to, f in self.history[before:]):
            self.announced[number] = parse(payload).get("scopeId") or None

    def stream(self, number: int, data: bytes) -> None:
        """Bytes that need not be frames. Whole frames in them are frames; a length out of range ends the connection."""
        self.host.feed(number, data)
        data = self._streams.pop(number, b"") + data
        while number in self.naive.connections and len(data) >= 4:
            length = int.from_bytes(data[:4], "big")
            if not 0 < length <= MAX_FRAME:
                self.naive.break_off(self.naive.connections[number])
            elif len(data) < 4 + length:
                break
            else:
                self.naive.received(number, data[4 : 4 + length])
                data = data[4 + length :]
        self._streams[number] = data
        self.compare()

    def late(self, number: int, frame: Any) -> None:
        """A frame on a connection that has ended: it must not even be looked at."""
        assert number in self.host.ended
        self.host.send(number, frame)
        self.compare()

    def close(self, number: int) -> None:
        self.rest.pop(number, None)
        self.host.close(number)
        self.naive.closed(number)
        self.compare()

    def advance(self, milliseconds: int) -> None:
        until = self.host.time + milliseconds
        going = True
        while going:
            going = self.host.due(until)
            self.naive.now = self.host.time
            self.naive.ticked()
            self.compare(ordered=False)

    def restart(self) -> None:
        """Another broker begins with what the store kept."""
        self.check_store()
        self.rest.clear()
        numbers = self.host._numbers
        for number in self.open:
            self.host.ended.add(number)
        self.host = EngineHost(limits_of(self.numbers), self.host.store.values(), at=self.host.time)
        self.host._numbers = numbers
        self.naive.restarted()
        self.naive.names.clear()
        self._checkpoint()
        self.compare()

    # Outputs.

    def compare(self, *, ordered: bool = True) -> None:
        expected, self.naive.out = self.naive.out, []
        seen = self.host.take()
        self.history += seen
        left, right = _by_connection(expected), _by_connection(seen)
        assert left.keys() == right.keys(), f"expected {expected}, seen {seen}"
        for number, frames in left.items():
            self._same(number, frames, right[number], ordered)
        assert self.host.ended.isdisjoint(self.naive.connections)

    def _same(self, number: int, expected: list[Any], seen: list[Any], ordered: bool) -> None:
        for frame in seen:
            self._learn(frame)
        translated = [self._translated(frame) for frame in seen]
        if translated == expected:
            return
        wanted = [_plain(frame) for frame in expected]
        got = [_plain(frame) for frame in translated]
        if not ordered:
            wanted, got = sorted(wanted), sorted(got)
        assert _settle_order(got) == _settle_order(wanted), f"connection {number}"

    def _learn(self, frame: Frame | str) -> None:
        """A delivery id is new exactly when the naive rules made a new delivery."""
        if isinstance(frame, dict) and "deliveryId" in frame:
            names = self.naive.names
            if frame["deliveryId"] not in names:
                names[frame["deliveryId"]] = 1 + max(names.values(), default=self._first_delivery)
                assert names[frame["deliveryId"]] <= self.naive.deliveries, "a delivery that nobody accepted"

    def _translated(self, frame: Frame | str) -> Frame | str:
        if isinstance(frame, dict) and "deliveryId" in frame:
            return {**frame, "deliveryId": self.naive.names[frame["deliveryId"]]}
        return frame

    # State.

    def check_store(self) -> None:
        """What the store was told to keep is exactly the open asks."""
        kept = sorted(
            (e.sender, e.message_id, e.target, e.created_at, e.expires_at, e.blocking) for e in self.host.store.values()
        )
        wanted = sorted(
            (e.sender, e.message_id, e.target, e.created_at + EPOCH, e.expires_at + EPOCH, e.blocking)
            for e in self.naive.edges
        )
        assert [edge[:5] for edge in kept] == [edge[:5] for edge in wanted]

    def restore(self) -> None:
        """Go on with an engine made of a snapshot of this one."""
        self.host.engine = Engine.restored(self.host.engine.snapshot())

    def _checkpoint(self) -> None:
        self._first_delivery = self.naive.deliveries
        self._payloads: dict[int, bytes] = {}
        self.checkpoint()

    def checkpoint(self) -> None:
        """Remember this moment for `replay`."""
        self._image = self.host.engine.snapshot()
        self.host.log.clear()
        self.host.effects.clear()

    def replay(self) -> None:
        """The snapshot of the checkpoint and the inputs since give every effect again, to the byte."""
        engine = Engine.restored(self._image)
        effects: list[Any] = []
        for item in self.host.log:
            engine.replay(item.kind, item.number, item.now, item.data)
            effects += map(lasting, engine.take())
        assert effects == self.host.effects


def _by_connection(out: list[tuple[int, Frame | str]]) -> dict[int, list[Frame | str]]:
    frames: dict[int, list[Frame | str]] = {}
    for number, frame in out:
        frames.setdefault(number, []).append(frame)
    return frames


def _plain(frame: Frame | str) -> str:
    """A frame as text that depends neither on the order of keys nor on the spelling of numbers."""
    return END if frame == END else json.dumps(_as_doubles(frame), sort_keys=True)


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_doubles(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_as_doubles(member) for member in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _settle_order(frames: list[str]) -> list[str]:
    """Asks that end together with a session end in no particular order."""
    ordered: list[str] = []
    run: list[str] = []
    for frame in frames:
        if '"session_disconnected"' in frame:
            run.append(frame)
        else:
            ordered += [*sorted(run), frame]
            run = []
    return ordered + sorted(run)
