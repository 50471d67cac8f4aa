# SPDX-License-Identifier: Apache-2.0
"""What one client can make the rules keep, write or compute is bounded."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from agent_intercom.host import recovery
from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.engine import LOADED, OPENED, RECEIVED, REST_BYTES, Beginning, Engine, pack_value
from agent_intercom.intercom.router import asks, settled
from agent_intercom.intercom.router.effects import Effect, Finish, Hold, Release, Write
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import pack

LIMITS = Limits(rate_capacity=10**6)


def frame(value: dict[str, Any]) -> bytes:
    return pack(json.dumps(value).encode())


def register(session_id: str, **claims: Any) -> bytes:
    session = {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1, **claims}
    return frame(
        {"type": "register", "protocol": "pi-intercom", "version": 4, "sessionId": session_id, "session": session}
    )


def send(to: str, message_id: str, **members: Any) -> bytes:
    message = {"id": message_id, "timestamp": 1, "content": {"text": ""}, **members}
    return frame({"type": "send", "to": to, "message": message})


class Stage:
    """An engine with sessions, fed at a time that passes only on demand."""

    def __init__(self, *session_ids: str, limits: Limits = LIMITS) -> None:
        self.engine = Engine(limits)
        self.mono = 1_000
        self.engine.start(self.now)
        self.engine.load(Beginning("g", "seed", []), self.now)
        for number, session_id in enumerate(session_ids):
            self.engine.opened(number, "local", self.now)
            self.feed(number, register(session_id))

    @property
    def now(self) -> Now:
        return Now(self.mono, 1_700_000_000_000 + self.mono)

    def feed(self, number: int, data: bytes) -> list[Effect]:
        self.engine.received(number, data, self.now)
        return self.engine.take()

    def pass_time(self, milliseconds: int) -> list[Effect]:
        self.mono += milliseconds
        self.engine.tick(self.now)
        return self.engine.take()

    def answers(self, number: int, data: bytes) -> list[dict[str, Any]]:
        return [
            json.loads(effect.frame[4:])
            for effect in self.feed(number, data)
            if isinstance(effect, Write) and effect.number == number
        ]


def written(effects: list[Effect]) -> int:
    return sum(len(effect.frame) for effect in effects if isinstance(effect, Write))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "tail",
    [b'"' + b'\\"' * 500_000, b'"' + b"\\" * 500_001 + b"[" * 5_000, b'"' * 500_001],
    ids=["quotes", "backslashes", "pairs"],
)
def test_depth_is_found_in_linear_time(tail: bytes) -> None:
    codec.check_depth(b"[]" * 4_001 + tail)


def test_depth_is_that_of_brackets_outside_strings() -> None:
    codec.check_depth(b'["' + b"[" * 6_000 + b'"]')
    codec.check_depth(b"[" * 2_000 + b'"\\"["' + b"]" * 2_000 + b"[]" * 4_000)
    with pytest.raises(WireError, match="nested deeper"):
        codec.check_depth(b"[" * 5_000 + b"]" * 5_000)


def test_settled_deliveries_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "MEMORY_SHARE", 100_000)
    name = "i" * 10_000
    stage = Stage(name)
    for number in range(20):
        (message,) = [answer for answer in stage.answers(0, send("i", f"m{number}")) if answer["type"] == "message"]
        acknowledgement = {"type": "message_received", "deliveryId": message["deliveryId"]}
        assert stage.answers(0, frame(acknowledgement))[0]["type"] == "delivered"
    book = stage.engine.router.book
    assert 0 < len(book.settled) < 8
    restored = Engine.restored(stage.engine.snapshot()).router.book
    assert (restored.settled.entries(), restored.settled.size) == (book.settled.entries(), book.settled.size)


def test_asks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "MEMORY_SHARE", 20_000)
    stage = Stage("asker", "x" * 10_000, "y" * 10_000, "z")
    codes = [
        stage.answers(0, send(target, target * 2, expectsReply=True))[0].get("code", "accepted")
        for target in ("x", "y", "z")
    ]
    assert codes == ["accepted", "accepted", "TOO_MANY_PENDING_ASKS"]
    stage.answers(0, frame({"type": "cancel_ask", "requestId": "r", "messageId": "xx"}))
    assert stage.answers(0, send("z", "zz", expectsReply=True))[0]["type"] == "delivery_accepted"
    assert stage.engine.router.book.ask_bytes < 20_000


def test_id_is_measured_as_json() -> None:
    stage = Stage()
    cases = [("i" * 16_382, True), ("\u0001" * 2_730, True), ("\u0001" * 2_731, False)]
    for number, (session_id, fine) in enumerate(cases):
        stage.engine.opened(number, "local", stage.now)
        assert (stage.answers(number, register(session_id))[0]["type"] == "registered") is fine


def test_a_burst_of_presences_lets_others_read_in_between() -> None:
    names = [f"s{number}" for number in range(30)]
    stage = Stage(*names)
    burst = b"".join(frame({"type": "presence", "status": f"{number} {'é' * 500}"}) for number in range(200))
    effects = stage.feed(0, burst)
    total = written(effects)
    assert REST_BYTES < total < 2 * REST_BYTES
    assert [effect for effect in effects if isinstance(effect, Hold)] == [Hold(0, 0)]
    rounds = 1
    while any(isinstance(effect, Hold) for effect in effects):
        effects = stage.pass_time(1)
        assert any(isinstance(effect, Release) for effect in effects)
        total += written(effects)
        rounds += 1
    assert rounds > 5
    assert total > 200 * 29 * 1_000


def test_who_tells_a_slow_reader_is_held() -> None:
    stage = Stage("loud", "slow")
    stage.engine.congested(1, stage.now)
    effects = stage.feed(0, frame({"type": "presence", "status": "a"}) + frame({"type": "presence", "status": "b"}))
    assert [effect for effect in effects if isinstance(effect, Hold)] == [Hold(0, 1)]
    stage.engine.drained(1, stage.now)
    effects = stage.engine.take()
    assert Release(0) in effects
    assert b'"status":"b"' in b"".join(effect.frame for effect in effects if isinstance(effect, Write))


def test_frames_that_waited_go_on_when_the_slow_one_leaves() -> None:
    stage = Stage("loud", "slow", "other")
    stage.engine.congested(1, stage.now)
    stage.feed(0, send("slow", "m1") + send("other", "m2"))
    stage.engine.closed(1, "eof", stage.now)
    messages = [effect for effect in stage.engine.take() if isinstance(effect, Write) and effect.number == 2]
    assert any(b'"id": "m2"' in effect.frame for effect in messages)


def test_senders_go_on_when_the_slow_one_comes_back() -> None:
    stage = Stage("loud", "slow", "other")
    stage.engine.congested(1, stage.now)
    stage.feed(0, send("slow", "m1") + send("other", "m2"))
    stage.engine.opened(9, "local", stage.now)
    effects = stage.feed(9, register("slow"))
    assert Release(0) in effects
    assert any(isinstance(effect, Write) and b'"id": "m2"' in effect.frame for effect in effects)


def test_presence_cannot_outgrow_a_frame() -> None:
    stage = Stage("one", "two", limits=LIMITS._replace(name=65_536, status=65_536, model=65_536))
    assert not stage.answers(0, frame({"type": "presence", "name": "n" * 60_000}))
    (error,) = stage.answers(0, frame({"type": "presence", "status": "s" * 65_000, "model": "m" * 65_000}))
    assert (error["code"], error["error"]) == ("INVALID_REQUEST", "Invalid presence status")


def test_replay_keeps_only_what_was_not_sent() -> None:
    """A client that polls a long list has been written far more than the log that made it."""
    stage = Stage()
    log = [recovery.Input(LOADED, 0, stage.now, pack_value(Beginning("g", "seed", [])))]
    empty = recovery.pack("1", Engine(LIMITS), [], 0)
    for number in range(100):
        stage.mono += 1
        log.append(recovery.Input(OPENED, number, stage.now, b"local"))
        log.append(recovery.Input(RECEIVED, number, stage.now, register(f"s{number}", cwd="/" * 200)))
    for _ in range(500):
        stage.mono += 1
        log.append(recovery.Input(RECEIVED, 0, stage.now, frame({"type": "list", "requestId": "r"})))
    everything = recovery.recover("1", empty, log, lambda number: 0, Engine.restored, LOADED)
    size = len(everything.lines[0].unsent)
    assert size > 10_000_000
    tracemalloc.start()
    rest = recovery.recover("1", empty, log, lambda number: size - 100 if number == 0 else 0, Engine.restored, LOADED)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rest.lines[0].unsent == everything.lines[0].unsent[-100:]
    assert peak < size / 2


def test_more_than_was_queued_cannot_have_been_sent() -> None:
    stage = Stage()
    empty = recovery.pack("1", Engine(LIMITS), [], 0)
    log = [recovery.Input(OPENED, 1, stage.now, b"local")]
    assert recovery.recover("1", empty, log, lambda number: 5, Engine.restored, LOADED).diverged == [1]
    line = recovery.Line(1, "local", 10, b"")
    engine = recovery.recover("1", empty, log, lambda number: 0, Engine.restored, LOADED).engine
    assert recovery.recover(
        "1", recovery.pack("1", engine, [line], 2), [], lambda number: 3, Engine.restored
    ).diverged == [1]


def test_ended_connections_have_no_stream() -> None:
    stage = Stage("one")
    assert Finish(0) in stage.feed(0, frame({"type": "nonsense"}))
