# SPDX-License-Identifier: Apache-2.0
"""The decoder of section 1.1 by itself: where the stream is cut makes no difference, and lengths are checked early."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import MAX_FRAME, FrameDecoder, pack

PAYLOADS: dict[str, bytes] = {
    "health": b'{"type":"health","requestId":"r"}',
    "register": b'{"type":"register","protocol":"pi-intercom","version":4,"session":{"cwd":"/"}}',
    "unregister": b'{"type":"unregister","preserveAsks":true}',
    "list": b'{"type":"list","requestId":"\xc3\xa9\xf0\x9f\x98\x80"}',
    "presence": b'{"type":"presence","status":"\\ud800"}',
    "send": b'{"type":"send","to":"b","message":{"id":"m","timestamp":1,"content":{"text":"\xff"}}}',
    "message_received": b'{"type":"message_received","deliveryId":"d"}',
    "message_rejected": b'{"type":"message_rejected","deliveryId":"d","code":"CONFLICTING_MESSAGE_ID","reason":""}',
    "defer_ask": b'{"type":"defer_ask","requestId":"r","messageId":"m"}',
    "cancel_ask": b'{"type":"cancel_ask","requestId":"r","messageId":"m"}',
    "access_control": b'{"type":"access_control","requestId":"r","action":"inspect_tree"}',
    "one byte": b"1",
    "looks like a header": b"\x00\x00\x00\x01" * 8,
    "256 bytes": b"x" * 256,
    "65,536 bytes": b"y" * 65_536,
}


def decoded(pieces: list[bytes]) -> list[bytes]:
    decoder = FrameDecoder()
    payloads: list[bytes] = []
    for piece in pieces:
        decoder.feed(piece)
        while (payload := decoder.next()) is not None:
            payloads.append(payload)
    return payloads


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name != "65,536 bytes"])
def test_every_frame_cut_at_every_byte(name: str) -> None:
    stream = pack(PAYLOADS[name])
    for position in range(len(stream) + 1):
        assert decoded([stream[:position], stream[position:]]) == [PAYLOADS[name]]
    assert decoded([bytes([byte]) for byte in stream]) == [PAYLOADS[name]]


def test_two_cuts_at_every_pair_of_bytes() -> None:
    payloads = [PAYLOADS["health"], PAYLOADS["one byte"], PAYLOADS["list"]]
    stream = b"".join(map(pack, payloads))
    for first in range(len(stream)):
        for second in range(first, len(stream)):
            assert decoded([stream[:first], stream[first:second], stream[second:]]) == payloads


@given(st.lists(st.sampled_from(list(PAYLOADS.values())), max_size=6), st.lists(st.integers(0, 70_000), max_size=12))
def test_any_stream_cut_anywhere(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(pack, payloads))
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert decoded(pieces) == payloads


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(0, 300))
def test_what_is_pending_is_what_was_not_handed_out(payloads: list[bytes], cut: int) -> None:
    """`pending`, fed to another decoder, goes on where this one stopped."""
    stream = b"".join(map(pack, payloads))
    first, rest = stream[:cut], stream[cut:]
    decoder = FrameDecoder()
    decoder.feed(first)
    before: list[bytes] = []
    while (payload := decoder.next()) is not None:
        before.append(payload)
    other = FrameDecoder()
    other.feed(decoder.pending)
    other.feed(rest)
    after: list[bytes] = []
    while (payload := other.next()) is not None:
        after.append(payload)
    assert before + after == payloads


@pytest.mark.parametrize("length", [MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_larger_frame_is_refused_when_its_header_is_complete(length: int) -> None:
    header = struct.pack(">I", length)
    decoder = FrameDecoder()
    decoder.feed(header[:3])
    assert decoder.next() is None
    decoder.feed(header[3:])
    with pytest.raises(WireError) as caught:
        decoder.next()
    assert caught.value.code == "FRAME_TOO_LARGE"


def test_empty_frame_is_refused() -> None:
    decoder = FrameDecoder()
    decoder.feed(pack(b"1") + bytes(4))
    assert decoder.next() == b"1"
    with pytest.raises(WireError) as caught:
        decoder.next()
    assert caught.value.code == "FRAME_EMPTY"


def test_largest_frame_passes_and_a_larger_one_is_not_built() -> None:
    payload = b"x" * MAX_FRAME
    stream = pack(payload)
    assert decoded([stream[:5], stream[5:700_000], stream[700_000:]]) == [payload]
    with pytest.raises(WireError) as caught:
        pack(payload + b"x")
    assert caught.value.code == "FRAME_TOO_LARGE"
