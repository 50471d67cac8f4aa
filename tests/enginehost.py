# SPDX-License-Identifier: Apache-2.0
"""An engine without sockets: frames in as JSON values, frames out per connection, and a record of both.

Tests that use this see what a peer would see and nothing of how the rules are written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from agent_intercom.intercom.contract import MAX_FRAME, Limits
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.engine import CLOSED, OPENED, RECEIVED, TICK, Beginning, Engine
from agent_intercom.intercom.router.effects import Drop, DropEdge, Effect, Finish, Idle, PutEdge, Write
from agent_intercom.wire.clock import Now

Frame: TypeAlias = dict[str, Any]

EPOCH = 1_800_000_000_000
"""Wall clock at monotonic time 0."""

END = "end"
"""Stands in an output for the end of the connection."""


class Input(NamedTuple):
    """One thing that happened to an engine."""

    kind: int
    number: int
    now: Now
    data: bytes


def packed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class EngineHost:
    """Feeds one engine, sorts its effects, and holds each connection to the promises that every peer relies on."""

    def __init__(self, limits: Limits | None = None, edges: Iterable[AskEdge] = (), *, at: int = 0) -> None:
        self.limits = limits or Limits()
        self.time = at
        self.store: dict[tuple[str, str], AskEdge] = {}
        self.engine = Engine(self.limits)
        self.log: list[Input] = []
        self.effects: list[Effect] = []
        self.ended: set[int] = set()
        self.idle = 0
        kept = [msgspec.structs.replace(edge) for edge in edges]
        self.store.update({(edge.sender, edge.message_id): edge for edge in kept})
        self.engine.start(self.now)
        self.engine.load(Beginning("g", "seed", kept), self.now)
        self._numbers = 0
        self._unsorted: list[tuple[int, Frame | str]] = []
        self._collect()

    @property
    def now(self) -> Now:
        return Now(self.time, EPOCH + self.time)

    # Inputs.

    def open(self, origin: str = "local") -> int:
        self._numbers += 1
        number = self._numbers
        self.log.append(Input(OPENED, number, self.now, origin.encode()))
        self.engine.opened(number, origin, self.now)
        self._collect()
        return number

    def feed(self, number: int, data: bytes) -> None:
        """Bytes as they come from the socket."""
        self.log.append(Input(RECEIVED, number, self.now, data))
        self.engine.received(number, data, self.now)
        self._collect()

    def send(self, number: int, *frames: Any) -> None:
        self.feed(number, b"".join(packed(compact(frame)) for frame in frames))

    def close(self, number: int) -> None:
        if number in self.ended:
            return
        self.ended.add(number)
        self.log.append(Input(CLOSED, number, self.now, b"eof"))
        self.engine.closed(number, "eof", self.now)
        self._collect()

    def tick(self) -> None:
        self.log.append(Input(TICK, 0, self.now, b""))
        self.engine.tick(self.now)
        self._collect()

    def due(self, until: int) -> bool:
        """Move time to the next tick that the engine wants by `until`, and tick; False when there is none."""
        if self.engine.wake_at > until:
            self.time = until
            return False
        self.time = max(self.time, self.engine.wake_at)
        self.tick()
        return True

    def advance(self, milliseconds: int) -> None:
        """Let time pass as the shell would: with a tick whenever the engine asks for one."""
        until = self.time + milliseconds
        while self.due(until):
            pass

    # Outputs.

    def take(self) -> list[tuple[int, Frame | str]]:
        """What was written since the last call: (connection, frame), or (connection, END)."""
        taken, self._unsorted = self._unsorted, []
        return taken

    def frames(self, number: int) -> list[Frame | str]:
        """Like `take`, for one connection; the rest is thrown away."""
        return [frame for target, frame in self.take() if target == number]

    def register(self, session_id: str, scope: str | None = None, **claims: Any) -> int:
        """A registered connection."""
        number = self.open()
        session = {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1, **claims}
        frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "sessionId": session_id}
        self.send(number, {**frame, "session": session, **({"scopeId": scope} if scope else {})})
        answers = self.frames(number)
        assert answers == [{"type": "registered", "sessionId": session_id, "protocol": "pi-intercom", "version": 4}]
        return number

    def _collect(self) -> None:
        effects = self.engine.take()
        self.effects.extend(lasting(effect) for effect in effects)
        for effect in effects:
            if isinstance(effect, Write):
                assert effect.number not in self.ended, "written to a connection that had ended"
                self._unsorted.append((effect.number, unpacked(effect.frame)))
            elif isinstance(effect, Finish | Drop):
                assert effect.number not in self.ended, "ended twice"
                self.ended.add(effect.number)
                self._unsorted.append((effect.number, END))
            elif isinstance(effect, PutEdge):
                edge = effect.edge
                self.store[edge.sender, edge.message_id] = msgspec.structs.replace(edge)
            elif isinstance(effect, DropEdge):
                del self.store[effect.sender, effect.message_id]
            elif isinstance(effect, Idle):
                self.idle += 1


def _refuse(name: str) -> Any:
    raise AssertionError(f"the engine wrote {name}")


def lasting(effect: Effect) -> Effect:
    """The effect as it is now: the record of an ask goes on changing."""
    return PutEdge(msgspec.structs.replace(effect.edge), effect.delivery) if isinstance(effect, PutEdge) else effect


def unpacked(frame: bytes) -> Frame:
    """The one frame in `frame`, which has to be whole, compact, within the limit and without null of the broker's."""
    (length,) = struct.unpack_from(">I", frame)
    assert length == len(frame) - 4 and 0 < length <= MAX_FRAME
    value = json.loads(frame[4:].decode(), parse_constant=_refuse)
    assert isinstance(value, dict) and isinstance(value["type"], str)
    return value
