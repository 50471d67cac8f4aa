# SPDX-License-Identifier: Apache-2.0
"""The token bucket of section 2.1, check 1, with the time in hand."""

from __future__ import annotations

import pytest

from tests.enginehost import END, EngineHost, compact, packed

HEALTH = {"type": "health", "requestId": "r"}
LIMITED = {"type": "error", "code": "RATE_LIMITED", "error": "Intercom broker rate limit exceeded"}


def answers(host: EngineHost, number: int, count: int) -> int:
    """How many of `count` health frames are answered; what follows them is the refusal and the end."""
    host.send(number, *[HEALTH] * count)
    frames = host.frames(number)
    served = sum(1 for frame in frames if isinstance(frame, dict) and frame["type"] == "health_ok")
    assert frames[served:] in ([], [LIMITED, END])
    assert (served < count) == (frames[served:] != [])
    return served


@pytest.mark.parametrize(("origin", "capacity"), [("local", 240), ("remote", 60)])
def test_capacity(origin: str, capacity: int) -> None:
    host = EngineHost()
    assert answers(host, host.open(origin), capacity) == capacity
    assert answers(host, host.open(origin), capacity + 1) == capacity
    assert answers(host, host.open(origin), capacity + 500) == capacity


@pytest.mark.parametrize(
    ("origin", "milliseconds", "regained"),
    [("local", 8, 0), ("local", 9, 1), ("local", 500, 60), ("local", 995, 119)]
    + [("remote", 33, 0), ("remote", 34, 1), ("remote", 990, 29)],
)
def test_refill(origin: str, milliseconds: int, regained: int) -> None:
    host = EngineHost()
    number = host.open(origin)
    capacity = 240 if origin == "local" else 60
    answers(host, number, capacity)
    host.time += milliseconds
    assert answers(host, number, regained + 1) == regained


def test_tokens_are_fractional() -> None:
    """Two waits that are worth half a token each are worth one."""
    host = EngineHost()
    number = host.register("a")
    host.send(number, *[HEALTH] * 238)
    host.take()
    for _ in range(2):
        host.time += 5
        host.send(number, HEALTH)
    host.send(number, HEALTH)
    assert [frame["type"] for frame in host.frames(number) if isinstance(frame, dict)] == [
        *["health_ok", "health_ok"],
        "error",
    ]


def test_bucket_never_holds_more_than_its_capacity() -> None:
    host = EngineHost()
    number = host.register("a")
    host.time += 3_600_000
    assert answers(host, number, 300) == 240


@pytest.mark.parametrize(("size", "tokens"), [(8_192, 1), (8_193, 2), (16_384, 2), (16_385, 3), (1_048_576, 128)])
def test_price_of_a_frame_by_its_bytes(size: int, tokens: int) -> None:
    host = EngineHost()
    number = host.open()
    payload = compact({**HEALTH, "padding": ""})
    payload = payload[:-2] + b"x" * (size - len(payload)) + payload[-2:]
    assert len(payload) == size
    for _ in range(240 // tokens):
        host.feed(number, packed(payload))
    frames = host.frames(number)
    assert [frame["type"] for frame in frames if isinstance(frame, dict)] == ["health_ok"] * (240 // tokens)
    rest = 240 - 240 // tokens * tokens
    assert answers(host, number, rest + 1) == rest


@pytest.mark.parametrize(
    ("payload", "tokens"),
    [
        (b'{"type":"health",' + b" " * 100_000 + b'"requestId":"r"}', 1),
        (b'{"type":"health","requestId":"r","x":"' + b"\\u0041" * 8_000 + b'"}', 1),
        (b'{"type":"health","requestId":"r","x":"' + b"\\u00e9" * 8_000 + b'"}', 2),
        (b'{"type":"health","requestId":"r","x":1,"x":"' + b"y" * 9_000 + b'","x":1}', 1),
        (b'{"type":"health","requestId":"r","x":"' + b"\\ud800" * 4_000 + b'"}', 3),
    ],
    ids=["white space", "escapes", "escapes of two bytes", "duplicate keys", "lone surrogates stay escapes"],
)
def test_price_is_of_the_frame_written_compactly(payload: bytes, tokens: int) -> None:
    host = EngineHost()
    number = host.open()
    host.feed(number, packed(payload))
    host.take()
    assert answers(host, number, 241) == 240 - tokens


def test_frames_that_are_refused_cost_as_well() -> None:
    """An ignored acknowledgement, a refused send and an unknown control are frames like any other."""
    host = EngineHost()
    number = host.register("a")
    frames = [
        {"type": "message_received", "deliveryId": "x"},
        {"type": "send", "to": "", "message": {}},
        {"type": "cancel_ask", "requestId": "r", "messageId": "m"},
    ]
    host.send(number, *frames * 79)
    host.take()
    assert answers(host, number, 10) == 240 - 1 - 3 * 79
