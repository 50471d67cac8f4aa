# SPDX-License-Identifier: Apache-2.0
"""Bad frames by the thousand: valid ones with one thing wrong, and bytes that never were a frame.

Everything follows from the `Random` that is handed in, so a seed names a run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

Frame: TypeAlias = dict[str, Any]

ODD: list[Any] = [
    *[None, True, False, 0, 1, -1, 4, 1.5, 2**53, 2**64, 10**30, -(10**30), 1e300, "", "x", " ", "\ufeff", "\0"],
    *["\ud800", "\udfff", "\U0001f600", "e\u0301", "x" * 256, "x" * 257, "x" * 513, "\U0001f600" * 129, "boss."],
    *[
        [],
        {},
        [None],
        [[]],
        {"": 1},
        {"type": "health"},
        ["file"],
        {"text": "x"},
        "pi-intercom",
        "4",
        "SSSSSSSSSSSSSSSS",
    ],
]
NUMBERS = [
    *[b"1e400", b"-0", b"1E2", b"01", b"1.", b".5", b"+1", b"0x1", b"NaN", b"Infinity", b"-Infinity", b"9" * 400],
]
BYTES = [
    b"\xff",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80",
    b"\x80",
    b"\xe2\x82",
    b"\xef\xbb\xbf",
    b"\0",
    b"\x7f",
]
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"null", b" ", b"\n", b"/**/", b"\\/"]


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def packed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


class Fuzzer:
    """Makes frames around the ids that are in use."""

    def __init__(self, random: Random, ids: list[str], scopes: list[str]) -> None:
        self.random = random
        self.ids = ids
        self.scopes = scopes
        self.messages = [f"m{number}" for number in range(12)] + ["\ud800", "\U0001f600"]
        self.names = ["worker", "Worker", "", *ids[:2]]

    # Valid frames.

    def register(self, session_id: str) -> Frame:
        pick = self.random.choice
        session: Frame = {"cwd": "/", "model": "m", "pid": pick([1, 1, 1, 2]), "startedAt": 1, "lastActivity": 1}
        if pick([0, 1]):
            session["name"] = pick(self.names)
        if not self.random.randrange(6):
            session["runtimeInstanceId"] = "r"
        frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "session": session}
        frame["sessionId"] = session_id
        if pick([0, 1]):
            frame["scopeId"] = pick(self.scopes)
        return frame

    def message(self) -> Frame:
        pick = self.random.choice
        content: Frame = {"text": pick(["x", "y\u00e9", ""])}
        body: Frame = {"id": pick(self.messages), "timestamp": pick([1, 2.5]), "content": content}
        kind = self.random.randrange(8)
        if kind == 0:
            content["attachments"] = [{"type": "file", "name": "n", "content": "c", "language": "l"}]
        elif kind == 1:
            content["control"] = {"type": "a:b", "version": 1, "data": {"k": [1, None]}, "more": 1}
        elif kind < 4:
            body["expectsReply"] = pick([True, True, False])
        elif kind < 6:
            body["replyTo"] = pick(self.messages)
        return body

    def valid(self) -> Frame:
        """Any frame that a session may send."""
        pick = self.random.choice
        makers: list[Callable[[], Frame]] = [
            lambda: {"type": "health", "requestId": "r"},
            lambda: {"type": "list", "requestId": "r"},
            lambda: {"type": "presence", "name": pick(self.names), "status": pick(["", "s"]), "model": pick("mn")},
            lambda: {"type": "unregister", "preserveAsks": pick([True, False])},
            lambda: {"type": "message_received", "deliveryId": "d"},
            lambda: {"type": "message_rejected", "deliveryId": "d", "code": "CONFLICTING_MESSAGE_ID", "reason": "r"},
            lambda: {"type": "defer_ask", "requestId": "r", "messageId": pick(self.messages)},
            lambda: {"type": "cancel_ask", "requestId": "r", "messageId": pick(self.messages)},
            lambda: {"type": "access_control", "requestId": "r", "action": "inspect_tree", "adminToken": "t"},
            lambda: self.register(pick(self.ids)),
        ]
        if self.random.randrange(4):
            return {"type": "send", "to": pick([*self.ids, *self.ids, *self.names]), "message": self.message()}
        return pick(makers[: pick([3, 8, 8, 8, 10])])()

    # Wrong frames.

    def spoiled(self, frame: Any) -> Any:
        """The same with one member, somewhere, replaced, removed, renamed or added."""
        places = [(frame, key) for key in frame]
        for holder, key in places:
            inner = holder[key]
            if isinstance(inner, dict):
                places += [(inner, name) for name in inner]
            elif isinstance(inner, list):
                places += [(item, name) for item in inner if isinstance(item, dict) for name in item]
        holder, key = self.random.choice(places)
        action = self.random.randrange(6)
        if action < 3:
            holder[key] = self.random.choice(ODD)
        elif action == 3:
            del holder[key]
        elif action == 4:
            holder[self.random.choice(["extra", "", "__proto__", "Type", "\ud800"])] = self.random.choice(ODD)
        else:
            holder[key.upper()] = holder.pop(key)
        return frame

    def payload(self) -> bytes:
        """A payload; about half of them are valid."""
        kind = self.random.randrange(16)
        frame = self.valid()
        if kind < 8:
            return compact(frame)
        if kind < 12:
            return compact(self.spoiled(frame))
        if kind < 15:
            return self.mangled(compact(frame))
        return self.peculiar(frame)

    def mangled(self, payload: bytes) -> bytes:
        """The payload with bytes changed somewhere."""
        at = self.random.randrange(len(payload))
        action = self.random.randrange(7)
        if action == 0:
            return payload[:at]
        if action == 1:
            return payload[:at] + self.random.choice(BYTES) + payload[at:]
        if action == 2:
            return payload[:at] + self.random.choice(TOKENS) + payload[at:]
        if action == 3:
            return payload[:at] + bytes([payload[at] ^ 1 << self.random.randrange(8)]) + payload[at + 1 :]
        if action == 4:
            return payload.replace(b":1", b":" + self.random.choice(NUMBERS), 1)
        if action == 5:
            return payload[:-1] + b',"type":"' + self.random.choice([b"list", b"health", b"nonsense"]) + b'"}'
        return payload[:at] + payload[self.random.randrange(len(payload)) :]

    def peculiar(self, frame: Frame) -> bytes:
        """Rarities: depth, size, other values at the top, white space."""
        action = self.random.randrange(7)
        if action == 0:
            return compact(self.random.choice(ODD))
        if action == 1:
            depth = self.random.choice([100, 20_000])
            opening, closing = self.random.choice([(b"[", b"]"), (b'{"a":', b"}")])
            return compact(frame)[:-1] + b',"deep":' + opening * depth + b"1" + closing * depth + b"}"
        if action == 2:
            return json.dumps(frame, indent=self.random.choice([1, "\t"])).encode()
        if action == 3 and frame["type"] == "send":
            frame["message"]["content"]["text"] = "x" * self.random.choice([262_144, 262_145])
            return compact(frame)
        if action == 4:
            return self.random.randbytes(self.random.randrange(1, 40))
        if action == 5:
            text = compact(frame)
            return text[:-1] + b"," + text[1:]
        return json.dumps(frame).encode()

    def stream(self) -> bytes:
        """Bytes that break the framing, or end inside a frame."""
        action = self.random.randrange(5)
        frame = packed(compact(self.valid()))
        if action == 0:
            return frame + struct.pack(">I", self.random.choice([0, 1_048_577, 2**31, 2**32 - 1])) + b"x" * 20
        if action == 1:
            return self.random.randbytes(self.random.randrange(1, 60))
        if action == 2:
            return frame[: self.random.randrange(1, len(frame))]
        if action == 3:
            return frame * self.random.randrange(2, 5)
        return frame[:3]
