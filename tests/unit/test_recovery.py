# SPDX-License-Identifier: Apache-2.0
"""A broker that goes on from its predecessor's memory sends what that one would have sent, byte for byte."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host import recovery
from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.engine import (
    CLOSED,
    CONGESTED,
    DRAINED,
    LOADED,
    NOT_STORED,
    OPENED,
    RECEIVED,
    TICK,
    Beginning,
    Engine,
    not_stored_record,
    pack_value,
)
from agent_intercom.intercom.router.effects import Drop, Finish, PutEdge, Write
from agent_intercom.wire.clock import Now
from agent_intercom.wire.framing import pack

LIMITS = Limits(
    ack_ms=50,
    ask_expiry_ms=200,
    registration_ms=40,
    pending_per_sender=4,
    asks_per_sender=3,
    stall_ms=30,
    recent_entries=3,
    recent_ms=300,
    unregistered=2,
)
NAMES = ("ann", "bob", "cy", "\ud800")
SCOPES = ("", "s" * 16, "t" * 16)

numbers = st.integers(0, 4)
names = st.sampled_from(NAMES)


def frame(value: dict[str, Any]) -> bytes:
    return pack(json.dumps(value).encode())


def register(name: str, scope: str, pid: int) -> bytes:
    claims = {"name": name, "cwd": "/w", "model": "m", "pid": pid, "startedAt": 1, "lastActivity": 1}
    value = {"type": "register", "protocol": "pi-intercom", "version": 4, "session": claims, "scopeId": scope}
    return frame(value | ({"sessionId": name} if name != "cy" else {}))


def send(to: str, key: int, asks: bool, reply: int) -> bytes:
    message: dict[str, Any] = {"id": f"m{key}", "timestamp": 1, "content": {"text": f"text {key} \ud801"}}
    message |= {"expectsReply": True} if asks else {}
    message |= {"replyTo": f"m{reply}"} if reply >= 0 else {}
    return frame({"type": "send", "to": to, "message": message})


frames = st.one_of(
    st.builds(register, names, st.sampled_from(SCOPES), st.integers(1, 2)),
    st.builds(send, names, st.integers(0, 6), st.booleans(), st.integers(-3, 3)),
    st.builds(lambda n: frame({"type": "message_received", "deliveryId": f"g-{n}"}), st.integers(1, 12)),
    st.builds(lambda n: frame({"type": "cancel_ask", "requestId": "r", "messageId": f"m{n}"}), st.integers(0, 6)),
    st.builds(lambda n: frame({"type": "defer_ask", "requestId": "r", "messageId": f"m{n}"}), st.integers(0, 6)),
    st.builds(lambda s: frame({"type": "presence", "status": s}), names),
    st.just(frame({"type": "list", "requestId": "l"})),
    st.builds(lambda k: frame({"type": "unregister", "preserveAsks": k}), st.booleans()),
)
inputs = st.one_of(
    st.tuples(st.just(RECEIVED), numbers, st.lists(frames, min_size=1, max_size=3).map(b"".join)),
    st.tuples(st.just(RECEIVED), numbers, frames.map(lambda whole: whole[: len(whole) // 2])),
    st.tuples(st.just(OPENED), numbers, st.just(b"local")),
    st.tuples(st.just(CLOSED), numbers, st.just(b"eof")),
    st.tuples(st.sampled_from([TICK, CONGESTED, DRAINED]), numbers, st.just(b"")),
)


class Host:
    """An engine with the least of a shell: logs inputs, keeps byte streams, and hands over like the broker."""

    def __init__(self) -> None:
        self.engine = Engine(LIMITS)
        self.mono = 1_000
        self.log: list[recovery.Input] = []
        self.queued: dict[int, bytes] = defaultdict(bytes)
        self.base: dict[int, int] = {}
        self.sent: dict[int, int] = defaultdict(int)
        self.current: dict[int, int] = {}
        self.next_number = 1
        self.engine.start(self.now())
        self.snapshot = b""
        self.take_snapshot()
        self.feed(LOADED, 0, pack_value(Beginning("g", "seed", [])))
        for number in range(3):
            self.feed(OPENED, number, b"local")
            self.feed(RECEIVED, number, register(NAMES[number], "", 1))

    def now(self) -> Now:
        self.mono += 7
        return Now(self.mono, 1_700_000_000_000 + self.mono)

    def feed(self, kind: int, place: int, data: bytes) -> None:
        """Feed an input for whatever connection is at `place`; a connection's number is never used again."""
        if kind == OPENED:
            self.current[place] = self.next_number
            self.next_number += 1
        number = self.current.get(place, 0)
        now = self.now()
        self.log.append(recovery.Input(kind, number, now, data))
        self.engine.replay(kind, number, now, data)
        effects = self.engine.take()
        failed = [effect for effect in effects if isinstance(effect, PutEdge) and effect.edge.message_id == "m3"]
        if failed:
            self.log.append(recovery.Input(NOT_STORED, 0, now, not_stored_record(failed)))
            effects = self.engine.not_stored(failed, effects) + self.engine.take()
        for effect in effects:
            if isinstance(effect, Write):
                self.queued[effect.number] += effect.frame
            elif isinstance(effect, Finish | Drop):
                self.queued.pop(effect.number, None)

    def kernel_takes(self, place: int, share: float) -> None:
        number = self.current.get(place, 0)
        waiting = len(self.queued[number]) - self.sent[number]
        self.sent[number] += int(waiting * share)

    def lines(self) -> list[recovery.Line]:
        return [
            recovery.Line(number, link.origin, self.sent[number], self.queued[number][self.sent[number] :])
            for number, link in self.engine.router.book.links.items()
        ]

    def take_snapshot(self) -> None:
        self.snapshot = recovery.pack("1", self.engine, self.lines(), self.next_number)
        self.log.clear()


@given(st.lists(inputs, max_size=40), st.integers(0, 40), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_successor_continues_exactly(steps: list[tuple[int, int, bytes]], at: int, shares: list[float]) -> None:
    host = Host()
    for index, (kind, number, data) in enumerate(steps):
        if index == at:
            host.take_snapshot()
        host.feed(kind, number, data)
        host.kernel_takes(number, shares[number])
    recovered = recovery.recover("1", host.snapshot, host.log, host.sent.__getitem__, Engine.restored, LOADED)
    assert recovered.diverged == []
    assert recovered.engine.snapshot() == host.engine.snapshot()
    expected = {line.number: line for line in host.lines()}
    assert recovered.lines == expected


@given(st.lists(inputs, max_size=30), st.lists(inputs, max_size=15))
def test_state_survives_writing_and_reading(steps: list[tuple[int, int, bytes]], more: list[Any]) -> None:
    host = Host()
    for step in steps:
        host.feed(*step)
    twin = Host()
    twin.mono, twin.queued, twin.sent = host.mono, host.queued.copy(), host.sent.copy()
    twin.current, twin.next_number = host.current.copy(), host.next_number
    twin.engine = Engine.restored(host.engine.snapshot())
    for step in more:
        host.feed(*step)
        twin.feed(*step)
    assert twin.queued == host.queued
    assert twin.engine.snapshot() == host.engine.snapshot()


def test_inputs_of_another_version_are_not_replayed() -> None:
    host = Host()
    with pytest.raises(ValueError, match="another version"):
        recovery.recover("2", host.snapshot, host.log, host.sent.__getitem__, Engine.restored, LOADED)
    host.take_snapshot()
    assert recovery.recover("2", host.snapshot, host.log, host.sent.__getitem__, Engine.restored, LOADED).records == 0


def test_a_peer_that_has_more_than_the_replay_made_is_named() -> None:
    host = Host()
    number = host.current[1]
    host.sent[number] = 10_000
    again = recovery.recover("1", host.snapshot, host.log, host.sent.__getitem__, Engine.restored, LOADED)
    assert again.diverged == [number]
