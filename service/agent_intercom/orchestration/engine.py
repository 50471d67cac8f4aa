# SPDX-License-Identifier: Apache-2.0
"""The deterministic half of a run's broker: byte streams in, effects out.

All that happens to a broker comes in through these methods, and each input has a kind by which the shell logs it in the
memory file and `replay` feeds it again: a snapshot and the inputs since are all that the next broker needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from agent_intercom.orchestration import parsing, rows
from agent_intercom.orchestration.contract import MAX_FRAME, Code, Limits
from agent_intercom.orchestration.effects import Drop, Effect, Finish, Save, Write
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.core import Workflow
from agent_intercom.orchestration.workflow.state import Link, State
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import Bytes, FrameDecoder

RECEIVED: Final = 1
"""Logged by whoever receives the bytes, with the memory file's own number for it."""
OPENED: Final = 2
CLOSED: Final = 3
TICK: Final = 4
STARTED: Final = 5
CHECKED: Final = 6
"""A check of the workspace capsule ended; the data is the code of what is wrong, or empty."""

LISTENER: Final = "run"
"""The name of the only listener."""


class Snapshot(msgspec.Struct):
    """An engine at rest: the rules' state, the limits that they keep, and half-read bytes by connection."""

    limits: Limits
    state: State
    half_read: dict[int, bytes]


class Engine:
    """Decoders and workflow of one broker."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.workflow = Workflow(state, limits)
        self.unsaved: list[rows.Change] = []
        self.faults: list[Exception] = []
        self._decoders: dict[int, FrameDecoder] = {}

    @property
    def wake_at(self) -> int:
        """Monotonic time in ms at which `tick` wants to be called."""
        return self.workflow.wake_at

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        return self.workflow.take()

    def apply(self, limits: Limits) -> None:
        """Go on with other limits; to be followed by a snapshot, since no input says so."""
        self.workflow.limits = limits

    def started(self, now: Now, *, remembers: bool) -> None:
        """A broker serves from now on; see `Workflow.started`."""
        self.workflow.started(now, remembers=remembers)

    def opened(self, number: int, now: Now) -> None:
        """A connection with this number was accepted."""
        self.workflow.opened(number, now)

    def closed(self, number: int, now: Now) -> None:
        """The connection ended or was lost."""
        self._decoders.pop(number, None)
        self.workflow.closed(number, now)

    def tick(self, now: Now) -> None:
        """Time has come to `now`."""
        self.workflow.tick(now)

    def received(self, number: int, data: Bytes, now: Now) -> None:
        """The connection's next bytes. Bytes of a connection that was let go are not looked at."""
        links = self.workflow.state.links
        link = links.get(number)
        if link is None:
            return
        decoder = self._decoders.setdefault(number, FrameDecoder(MAX_FRAME))
        decoder.feed(data)
        self._serve(link, decoder, now)

    def checked(self, number: int, fault: str, now: Now) -> None:
        """What the check of the workspace capsule that this connection waits for found: a code, or nothing."""
        link = self.workflow.state.links.get(number)
        if link is None or not link.held:
            return
        self.workflow.checked(fault, now)
        payload, link.held = link.held, b""
        self._serve(link, self._decoders.setdefault(number, FrameDecoder(MAX_FRAME)), now, payload)

    def _serve(self, link: Link, decoder: FrameDecoder, now: Now, held: bytes = b"") -> None:
        """Serve a connection as far as whole frames are there, `held` before them."""
        links, number = self.workflow.state.links, link.number
        try:
            if held:
                self.workflow.first(link, parsing.first(held), now)
            while self._reads(link) and (payload := _next(decoder)) is not None:
                self._payload(link, payload, now)
            if link.held and len(decoder.pending) > MAX_FRAME:
                raise Refusal(Code.REJECTED, "Too much was sent before the first answer", "length")
            if link.kind == "observer" and decoder.waiting:
                raise Refusal(Code.FORBIDDEN, "Observer connections are read-only", "type")
        except Refusal as refusal:
            self.workflow.refuse(link, refusal, now)
        except Exception as error:
            # A fault of the rules: here and not in the shell, so that a replay comes to the same end.
            self.faults.append(error)
            self.workflow.failed(link, now)
        if number in links and decoder.waiting:
            decoder.keep()
        else:
            self._decoders.pop(number, None)

    def _payload(self, link: Link, payload: bytes, now: Now) -> None:
        if link.kind == "worker":
            self.workflow.worker(link, parsing.worker(payload, link.role), now)
        else:
            link.kind = "control" if _is_control(payload) else ""
            frame = parsing.first(payload)
            if self.workflow.hands_on(frame):
                self.workflow.hold(link, payload, now)
            else:
                self.workflow.first(link, frame, now)

    def _reads(self, link: Link) -> bool:
        return link.number in self.workflow.state.links and link.kind != "observer" and not link.held

    # Snapshot and replay (`host.recovery.Replayable`).

    def sent(self) -> Iterator[tuple[int, bytes | None]]:
        """What goes to connections since the last call of this or of `take`; rows to be saved gather in `unsaved`."""
        for effect in self.take():
            if isinstance(effect, Write):
                yield effect.number, effect.frame
            elif isinstance(effect, Finish | Drop):
                yield effect.number, None
            elif isinstance(effect, Save):
                self.unsaved.append(effect.row)

    def origins(self) -> dict[int, str]:
        """The connections that the rules know of, and the listener that they came by."""
        return dict.fromkeys(self.workflow.state.links, LISTENER)

    def snapshot(self) -> bytes:
        """The engine as bytes for `restored`."""
        links = self.workflow.state.links
        half_read = {number: each.pending for number, each in self._decoders.items() if number in links}
        return msgspec.msgpack.encode(Snapshot(self.workflow.limits, self.workflow.state, half_read))

    @classmethod
    def restored(cls, data: bytes) -> Engine:
        """The engine that `data` was taken of, limits included. Raises ValueError where it is none of this format."""
        try:
            snapshot = msgspec.msgpack.decode(data, type=Snapshot)
        except msgspec.DecodeError as error:
            raise ValueError("bytes of another format") from error
        engine = cls(snapshot.state, snapshot.limits)
        for number, data_read in snapshot.half_read.items():
            engine._decoders[number] = decoder = FrameDecoder(MAX_FRAME)
            decoder.feed(data_read)
            decoder.keep()
        return engine

    def replay(self, kind: int, number: int, now: Now, data: Bytes) -> None:
        """Feed a logged input again."""
        if kind == RECEIVED:
            self.received(number, data, now)
        elif kind == OPENED:
            self.opened(number, now)
        elif kind == CLOSED:
            self.closed(number, now)
        elif kind == TICK:
            self.tick(now)
        elif kind == STARTED:
            self.started(now, remembers=bytes(data) == b"remembers")
        elif kind == CHECKED:
            self.checked(number, bytes(data).decode(), now)
        else:
            raise ValueError(f"input of unknown kind {kind}")


def _next(decoder: FrameDecoder) -> bytes | None:
    try:
        return decoder.next()
    except WireError as error:
        raise Refusal(Code.INVALID_PROTOCOL, "Broker frame size is invalid", "length") from error


def _is_control(payload: bytes) -> bool:
    """Whether a first frame, whatever else is wrong with it, is a control client's: those are told of a refusal."""
    try:
        value = codec.decode(payload)
    except WireError:
        return False
    return isinstance(value, dict) and value.get("type") == "control"

