# SPDX-License-Identifier: Apache-2.0
"""A broker that comes up with other limits takes nothing from a session that it had."""

from __future__ import annotations

import json

import pytest

from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.engine import Beginning, Engine
from agent_intercom.intercom.router.effects import Write
from agent_intercom.wire.clock import Now
from agent_intercom.wire.framing import pack

HEALTH = pack(b'{"type":"health","requestId":"r"}')


class Peers:
    """Two sessions, `a` on connection 1 and `b` on connection 2, of an engine whose limits can change."""

    def __init__(self, limits: Limits) -> None:
        self.now = Now(1_000, 1_700_000_000_000)
        self.engine = Engine(limits)
        self.engine.start(self.now)
        self.engine.load(Beginning("g", "seed", []), self.now)
        for number, name in ((1, "a"), (2, "b")):
            self.engine.opened(number, "local", self.now)
            claims = {"name": name, "cwd": "/w", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1}
            self.say(
                number,
                {"type": "register", "protocol": "pi-intercom", "version": 4, "session": claims, "sessionId": name},
            )

    def say(self, number: int, frame: dict[str, object]) -> list[dict[str, object]]:
        self.engine.received(number, pack(json.dumps(frame).encode()), self.now)
        return self.told()

    def told(self) -> list[dict[str, object]]:
        return [json.loads(effect.frame[4:]) for effect in self.engine.take() if isinstance(effect, Write)]

    def send(self, message_id: str, text: str = "x") -> list[dict[str, object]]:
        content = {"text": text}
        return self.say(
            1, {"type": "send", "to": "b", "message": {"id": message_id, "timestamp": 1, "content": content}}
        )

    def restart(self, limits: Limits) -> None:
        self.engine = Engine.restored(self.engine.snapshot())
        self.engine.apply(limits, self.now)

    def later(self, ms: int) -> None:
        self.now = Now(self.now.mono + ms, self.now.wall + ms)
        if self.engine.wake_at <= self.now.mono:
            self.engine.tick(self.now)


@pytest.mark.parametrize(
    ("before", "spent", "after", "left"), [(1_000, 300, 240, 240), (1_000, 900, 240, 99), (240, 100, 1_000, 139)]
)
def test_tokens_that_are_left_stay(before: int, spent: int, after: int, left: int) -> None:
    peers = Peers(Limits(rate_capacity=before, rate_per_second=1))
    for _ in range(spent):
        peers.engine.received(1, HEALTH, peers.now)
    peers.told()
    peers.restart(Limits(rate_capacity=after, rate_per_second=1))
    for _ in range(left + 1):
        peers.engine.received(1, HEALTH, peers.now)
    answers = [frame["type"] for frame in peers.told()]
    assert answers.count("health_ok") == left
    assert "error" in answers


def test_a_shorter_time_out_holds_for_what_is_on_its_way() -> None:
    peers = Peers(Limits(ack_ms=3_600_000))
    peers.send("old")
    peers.restart(Limits(ack_ms=8_000))
    peers.later(100)
    peers.send("new")
    peers.later(8_000)
    assert [frame["messageId"] for frame in peers.told() if frame["type"] == "delivery_failed"] == ["old", "new"]


def test_a_shorter_memory_holds_for_what_is_remembered() -> None:
    peers = Peers(Limits(recent_ms=86_400_000))
    accepted = next(frame for frame in peers.send("m") if frame["type"] == "delivery_accepted")
    peers.say(2, {"type": "message_received", "deliveryId": accepted["deliveryId"]})
    peers.restart(Limits(recent_ms=1_000))
    peers.later(1_001)
    assert "delivery_accepted" in [frame["type"] for frame in peers.send("m", "another text")]


def test_what_a_settled_message_answered_is_not_kept() -> None:
    peers = Peers(Limits())
    asked = peers.say(
        1,
        {
            "type": "send",
            "to": "b",
            "message": {"id": "q" * 200, "timestamp": 1, "expectsReply": True, "content": {"text": "x"}},
        },
    )
    peers.say(2, {"type": "message_received", "deliveryId": asked[0]["deliveryId"]})
    reply = {"id": "r", "timestamp": 1, "replyTo": "q" * 200, "content": {"text": "x"}}
    answered = peers.say(2, {"type": "send", "to": "a", "message": reply})
    peers.say(1, {"type": "message_received", "deliveryId": answered[0]["deliveryId"]})
    assert [entry.answers for entry in peers.engine.router.book.settled.entries()] == [None, None]
