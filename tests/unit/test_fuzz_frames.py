# SPDX-License-Identifier: Apache-2.0
"""A hundred thousand generated frames through decoder and rules, each compared with the naive rules."""

from __future__ import annotations

from random import Random

import pytest

from tests.comparison import Comparison
from tests.enginehost import EngineHost
from tests.fuzzing import Fuzzer, compact, packed
from tests.naive import Numbers

FRAMES = 25_000
SCOPES = ["S" * 16, "T" * 16]
IDS = ["a", "ab", "abc", "B", "\u00e9"]
BYSTANDER = {
    "type": "register",
    "protocol": "pi-intercom",
    "version": 4,
    "session": {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1},
    "sessionId": "bystander",
    "scopeId": "B" * 16,
}


@pytest.mark.parametrize("seed", range(4))
def test_frames_do_exactly_what_the_rules_say(seed: int) -> None:
    """Every frame has the naive rules' effect, and a session that nobody addresses hears nothing."""
    random = Random(seed)
    fuzzer = Fuzzer(random, IDS, SCOPES)
    both = Comparison(Numbers(ack_ms=500, ask_expiry_ms=5_000, presence_ms=9, recent_ms=4_001, unregistered=30))
    bystander = both.connect()
    both.send(bystander, BYSTANDER)
    for count in range(FRAMES):
        number = connection(both, fuzzer, bystander)
        if count % 50 == 7:
            both.stream(number, fuzzer.stream())
            both.close(number)
        elif count % 5 == 0 and both.naive.pending:
            acknowledge_oldest(both)
        else:
            both.payload(number, fuzzer.payload())
        if count % 10 == 0:
            both.advance(random.randrange(1, 20))
        if count == FRAMES - 5_000:
            both.checkpoint()
    both.send(bystander, {"type": "health", "requestId": "end"})
    heard = [frame for target, frame in both.history if target == bystander and isinstance(frame, dict)]
    assert [frame["type"] for frame in heard] == ["registered", "health_ok"]
    both.check_store()
    both.replay()


def connection(both: Comparison, fuzzer: Fuzzer, bystander: int) -> int:
    """One of a handful of connections, most of them sessions."""
    numbers = [number for number in both.open if number != bystander]
    if len(numbers) < 6:
        number = both.connect(fuzzer.random.choice(["local"] * 9 + ["remote"]))
        both.send(number, fuzzer.register(fuzzer.random.choice(IDS)))
        numbers = [number for number in both.open if number != bystander] or [both.connect()]
    return fuzzer.random.choice(numbers)


def acknowledge_oldest(both: Comparison) -> None:
    item = both.naive.pending[0]
    name = next(name for name, number in both.naive.names.items() if number == item.delivery)
    both.send(item.sink, {"type": "message_received", "deliveryId": name})


def test_no_split_changes_anything() -> None:
    """A stream of frames, the last of them bad, has the same outcome wherever it is cut."""
    message = {"id": "m", "timestamp": 1, "content": {"text": "\u00e9\U0001f600\ud800"}}
    frames = [
        BYSTANDER,
        {"type": "list", "requestId": "r"},
        {"type": "send", "to": "bystander", "message": message},
        {"type": "presence", "name": "\u00e9"},
        {"type": "message_received", "deliveryId": "g-1"},
        {"type": "unregister"},
        {"type": "health", "requestId": "\ud800"},
        {"type": "list", "requestId": "r"},
    ]
    stream = b"".join(packed(compact(frame)) for frame in frames)
    expected = outcome([stream])
    assert len(expected) == 8
    for position in range(1, len(stream)):
        assert outcome([stream[:position], stream[position:]]) == expected
    for first in range(1, len(stream), 97):
        for second in range(first + 1, min(first + 40, len(stream))):
            assert outcome([stream[:first], stream[first:second], stream[second:]]) == expected
    assert outcome([bytes([byte]) for byte in stream]) == expected


def outcome(pieces: list[bytes]) -> list[object]:
    host = EngineHost()
    number = host.open()
    for piece in pieces:
        host.feed(number, piece)
    return list(host.take())
