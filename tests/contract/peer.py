# SPDX-License-Identifier: Apache-2.0
"""A client that knows the wire and nothing else, for tests that look at the broker from outside.

It shares no code with the broker. Sockets block; every wait has a bound that only a hanging broker can reach.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import struct
import uuid
from pathlib import Path
from typing import Any, TypeAlias

Frame: TypeAlias = dict[str, Any]

HANG = 30.0
"""Seconds after which a wait is a fault. No test expects anything to take this long."""

SESSION_KEYS = ("id", "cwd", "model", "pid", "startedAt", "lastActivity", "trustedLocal", "origin")

_numbers = itertools.count(1)


def fresh(prefix: str = "s") -> str:
    """An id that no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex}"


def fresh_scope() -> str:
    """A valid scope of its own, so that tests on one broker do not see each other."""
    return f"Scope_{uuid.uuid4().hex}"


def session(**claims: Any) -> Frame:
    """The smallest valid `register.session`, with `claims` over it."""
    return {"cwd": "/tmp", "model": "m", "pid": 10, "startedAt": 1, "lastActivity": 1, **claims}


def register(session_id: str | None = None, scope: str | None = None, **claims: Any) -> Frame:
    """A valid `register` frame. Without an id the broker makes one; without a scope the session is unscoped."""
    frame: Frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "session": session(**claims)}
    if session_id is not None:
        frame["sessionId"] = session_id
    if scope is not None:
        frame["scopeId"] = scope
    return frame


def info(session_id: str, **claims: Any) -> Frame:
    """The SessionInfo that others see of `register(session_id, …, **claims)` on the local socket."""
    claims.pop("runtimeInstanceId", None)
    return {"id": session_id, **session(**claims), "trustedLocal": True, "origin": "local"}


def message(message_id: str | None = None, text: str = "hi", **members: Any) -> Frame:
    """A valid message."""
    return {
        "id": fresh("m") if message_id is None else message_id,
        "timestamp": 1,
        "content": {"text": text},
        **members,
    }


def send(to: Any, body: Any) -> Frame:
    return {"type": "send", "to": to, "message": body}


def refused(message_id: str, code: str, reason: str) -> Frame:
    """The `delivery_failed` of a send that was never accepted."""
    return failed(message_id, code, reason, accepted=False)


def failed(message_id: str, code: str, reason: str, *, accepted: bool = True) -> Frame:
    return {"type": "delivery_failed", "messageId": message_id, "accepted": accepted, "code": code, "reason": reason}


def compact(value: Any) -> bytes:
    """JSON as a Node client writes it: compact, raw UTF-8, lone surrogates as escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def packed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def strict(payload: bytes) -> Any:
    """What JSON.parse reads; UTF-8 has to be well-formed, because the broker writes it."""
    return json.loads(payload.decode(), parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise AssertionError(f"the broker wrote {name}")


class Peer:
    """One connection."""

    def __init__(self, path: Path | str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(HANG)
        self._socket.connect(str(path))
        self._buffer = bytearray()
        self._open = True
        self.may_be_torn = False
        """Whether the last frame may be incomplete: true after a rule was broken that closes without flushing."""
        self.id = ""

    # Writing.

    def send(self, *frames: Frame) -> None:
        """Write frames in one call, so that they can arrive in one piece."""
        self.send_bytes(b"".join(packed(compact(frame)) for frame in frames))

    def send_payload(self, payload: bytes) -> None:
        self.send_bytes(packed(payload))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def try_send(self, *frames: Frame) -> None:
        """Like `send`, to a connection that the broker may have closed already."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(*frames)

    def flood(self, data: bytes) -> None:
        """Write what the broker may refuse half-way."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_bytes(data)

    def shutdown_write(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    # Reading.

    def recv_payload(self) -> bytes | None:
        """The next payload as it came; None at the end of the stream."""
        while True:
            if len(self._buffer) >= 4:
                (length,) = struct.unpack_from(">I", self._buffer)
                assert 0 < length <= 1_048_576, f"the broker sent a frame of {length} bytes"
                if len(self._buffer) >= 4 + length:
                    payload = bytes(self._buffer[4 : 4 + length])
                    del self._buffer[: 4 + length]
                    return payload
            try:
                data = self._socket.recv(262_144)
            except ConnectionResetError:
                data = b""
            if not data:
                assert self.may_be_torn or not self._buffer, "the stream ended inside a frame"
                return None
            self._buffer += data

    def recv(self) -> Frame:
        payload = self.recv_payload()
        assert payload is not None, "the broker closed the connection"
        frame = strict(payload)
        assert isinstance(frame, dict)
        assert_no_null(frame)
        return frame

    def expect(self, *frames: Frame) -> None:
        """The next frames are exactly these."""
        for frame in frames:
            assert self.recv() == frame

    def expect_type(self, kind: str) -> Frame:
        frame = self.recv()
        assert frame["type"] == kind, frame
        return frame

    def expect_eof(self) -> None:
        """The connection has been closed, and nothing came before that."""
        payload = self.recv_payload()
        assert payload is None, payload

    def expect_error(self, code: str, text: str) -> None:
        """An `error` frame of exactly this shape, then the end."""
        self.expect({"type": "error", "code": code, "error": text})
        self.expect_eof()

    def barrier(self) -> list[Frame]:
        """What the broker wrote to this connection before it answered one more `health`."""
        token = f"barrier-{next(_numbers)}"
        self.send({"type": "health", "requestId": token})
        frames: list[Frame] = []
        while True:
            frame = self.recv()
            if frame["type"] == "health_ok" and frame["requestId"] == token:
                return frames
            frames.append(frame)

    def expect_silence(self) -> None:
        assert self.barrier() == []

    def drain(self) -> list[Frame]:
        """Every frame up to the end of the stream."""
        frames: list[Frame] = []
        while (payload := self.recv_payload()) is not None:
            frames.append(strict(payload))
        return frames

    def ended(self, timeout: float) -> bool:
        """Whether something, the end included, can be read within `timeout` seconds."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    # What nearly every test does.

    def register(self, session_id: str | None = None, scope: str | None = None, **claims: Any) -> str:
        """Register and return the session id; the answer has to be exact."""
        self.send(register(session_id, scope, **claims))
        answer = self.recv()
        assert answer["type"] == "registered", answer
        self.id = answer["sessionId"]
        assert answer == {"type": "registered", "sessionId": self.id, "protocol": "pi-intercom", "version": 4}
        if session_id is not None:
            assert self.id == session_id
        return self.id

    def roster(self) -> list[Frame]:
        """The sessions that a `list` shows now."""
        token = fresh("list")
        self.send({"type": "list", "requestId": token})
        answer = self.recv()
        assert list(answer) == ["type", "requestId", "sessions"], answer
        assert answer["type"] == "sessions" and answer["requestId"] == token
        sessions: list[Frame] = answer["sessions"]
        return sessions

    def ids(self) -> list[str]:
        return [entry["id"] for entry in self.roster()]

    def accepted(self, message_id: str) -> str:
        """The next frame accepts `message_id`; its delivery id."""
        frame = self.recv()
        delivery: str = frame.get("deliveryId", "")
        assert frame == {"type": "delivery_accepted", "messageId": message_id, "deliveryId": delivery}
        assert delivery
        return delivery

    def received(self, sender: Frame, body: Frame) -> str:
        """The next frame brings exactly `body` from `sender`; its delivery id."""
        frame = self.recv()
        delivery: str = frame.get("deliveryId", "")
        assert frame == {"type": "message", "deliveryId": delivery, "from": sender, "message": body}
        return delivery

    def acknowledge(self, delivery: str) -> None:
        self.send({"type": "message_received", "deliveryId": delivery})

    def close(self) -> None:
        if self._open:
            self._open = False
            self._socket.close()


def assert_no_null(value: Any) -> None:
    """`null` is never written in place of an absent key (contract, conventions)."""
    if isinstance(value, dict):
        for key, member in value.items():
            assert member is not None, f"{key} is null"
            if key != "message":
                assert_no_null(member)
    elif isinstance(value, list):
        for member in value:
            assert_no_null(member)
