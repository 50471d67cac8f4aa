# SPDX-License-Identifier: Apache-2.0
"""The deterministic half of the broker: byte streams in, effects out.

All that happens to a broker comes in through these methods: bytes, connections that open and close, time, and what the
shell found out (a peer that does not read, an edge that could not be stored). So a snapshot and a log of the inputs
since is all that the next broker needs to go on exactly where this one stopped. Each input has a kind, by which the
shell logs it and `replay` feeds it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, TypeVar

import msgspec

from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.intercom.frames import ClientFrame
from agent_intercom.intercom.router import Router
from agent_intercom.intercom.router.effects import Drop, Effect, Finish, PutEdge, Write
from agent_intercom.intercom.router.settled import Settled
from agent_intercom.intercom.router.state import Image, Link
from agent_intercom.intercom.untyped import handle_untyped
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import HEADER_SIZE, MAX_FRAME, Bytes, FrameDecoder, frame_size

RECEIVED: Final = 1
"""Logged by whoever receives the bytes, with the memory file's own number for it."""
OPENED: Final = 2
CLOSED: Final = 3
TICK: Final = 4
CONGESTED: Final = 5
DRAINED: Final = 6
NOT_STORED: Final = 7
LOADED: Final = 8

REST_BYTES: Final = 1024 * 1024
"""What the frames of one connection may have written before others are served: a small frame can tell everybody."""

_TYPED: Final = msgspec.json.Decoder(ClientFrame).decode
_Packed = TypeVar("_Packed", bound=msgspec.Struct)


class Snapshot(msgspec.Struct):
    """An engine at rest: the rules' state, half-read bytes by connection, and how many ids were made up."""

    limits: Limits
    image: Image
    half_read: dict[int, bytes]
    seed: str
    fresh_ids: int


class Beginning(msgspec.Struct):
    """What a broker's life begins with; see `Engine.load`."""

    generation: str
    seed: str
    edges: list[AskEdge]


class Engine:
    """Decoders and router of one broker."""

    def __init__(self, limits: Limits) -> None:
        self._begin(Router(limits, ""))

    def _begin(self, router: Router) -> None:
        self.router = router
        self._book = router.book
        self._links = router.book.links
        # Of the connections of which part of a frame, or frames that wait, were read.
        self._decoders: dict[int, FrameDecoder] = {}
        self._seed = ""
        self._fresh_ids = 0

    def start(self, now: Now) -> None:
        """Begin afresh: the idle time runs."""
        self.router.start(now)

    @property
    def loaded(self) -> bool:
        """Whether `load` was called in this engine's life, which a restart does not end."""
        return bool(self._seed)

    def load(self, beginning: Beginning, now: Now) -> None:
        """Take what the store kept, before the first frame other than `health`.

        `generation` names this broker's life in delivery ids; `seed` is the randomness in the ids of sessions that
        bring none, so that a replay makes the same ones.
        """
        self._seed = beginning.seed
        self.router.load(beginning.generation, beginning.edges, now)

    @property
    def wake_at(self) -> int:
        """Monotonic time in ms at which `tick` wants to be called."""
        return self._book.wake_at

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects = self._book.effects
        self._book.effects = []
        return effects

    def opened(self, number: int, origin: str, now: Now) -> None:
        """A connection with this number was accepted on a listener of `origin`."""
        self.router.opened(number, origin, now)

    def closed(self, number: int, reason: str, now: Now) -> None:
        """The connection ended or was lost."""
        self._decoders.pop(number, None)
        self.router.closed(number, reason, now)
        self._go_on(now)

    def received(self, number: int, data: Bytes, now: Now) -> None:
        """The connection's next bytes. Bytes of a connection that was let go are not looked at."""
        link = self._links.get(number)
        if link is None:
            return
        size = len(data) - HEADER_SIZE
        # Nearly always what arrives is one whole frame; then there is nothing to cut or to keep.
        if 0 < size <= MAX_FRAME and number not in self._decoders and link.held_for < 0 and frame_size(data)[0] == size:
            try:
                self._payload(link, bytes(data[HEADER_SIZE:]), now)
            except WireError as error:
                self.router.broken(link, error.code, now)
        else:
            self._piece(link, data, now)
        if self._book.released:
            self._go_on(now)

    def _piece(self, link: Link, data: Bytes, now: Now) -> None:
        decoder = self._decoders.get(link.number)
        if decoder is None:
            decoder = self._decoders[link.number] = FrameDecoder()
        decoder.feed(data)
        self._drain(link, decoder, now)

    def _drain(self, link: Link, decoder: FrameDecoder, now: Now) -> None:
        links = self._links
        number = link.number
        effects = self._book.effects
        looked = len(effects)
        written = 0
        try:
            while link.held_for < 0 and (payload := decoder.next()) is not None:
                self._payload(link, payload, now)
                if number not in links:
                    break
                written += sum(len(effect.frame) for effect in effects[looked:] if isinstance(effect, Write))
                looked = len(effects)
                if written > REST_BYTES and decoder.waiting and link.held_for < 0:
                    self._book.rest(link, now)
        except WireError as error:
            self.router.broken(link, error.code, now)
        if number in links and decoder.waiting:
            decoder.keep()
        else:
            del self._decoders[number]

    def _payload(self, link: Link, payload: bytes, now: Now) -> None:
        if len(payload) > codec.MAX_DEPTH:
            codec.check_depth(payload)
        router = self.router
        try:
            frame = _TYPED(payload)
        except (msgspec.DecodeError, RecursionError):
            value = codec.decode(payload)
            if router.charge(link, payload, now):
                handle_untyped(router, link, value, self._next_id, now)
            return
        if router.charge(link, payload, now):
            router.frame(link, frame, now)

    def _next_id(self) -> str:
        self._fresh_ids += 1
        return uuid4_of(f"{self._seed}-{self._fresh_ids}".encode())

    def tick(self, now: Now) -> None:
        """Time has come to `now`."""
        self.router.tick(now)
        self._go_on(now)

    def congested(self, number: int, now: Now) -> None:
        """Too many bytes wait for the connection to read them."""
        self.router.congested(number, now)

    def drained(self, number: int, now: Now) -> None:
        """The connection reads again."""
        self.router.drained(number)
        self._go_on(now)

    def _go_on(self, now: Now) -> None:
        """Read on in what was buffered for connections that are held no more."""
        book = self._book
        while book.released:
            book.released = False
            for number in sorted(self._decoders):
                link = self._links.get(number)
                decoder = self._decoders.get(number)
                if link is None:
                    self._decoders.pop(number, None)
                elif decoder is not None and decoder.waiting and link.held_for < 0:
                    self._drain(link, decoder, now)

    def not_stored(self, failed: Iterable[PutEdge], effects: list[Effect]) -> list[Effect]:
        """These edges could not be stored; `effects` have not left the process. Returns what to do instead."""
        return self.router.not_stored(list(failed), effects)

    def session_at(self, number: int) -> str | None:
        """The id that the connection is registered under."""
        link = self._links.get(number)
        return None if link is None else link.session

    def held(self) -> list[int]:
        """The connections that are not to be read from now."""
        return [number for number, link in self._links.items() if link.held_for >= 0]

    def slow(self) -> list[int]:
        """The connections for which too much waits, as far as the engine was told."""
        return [session.number for session in self._book.sessions.values() if session.slow_since >= 0]

    def apply(self, limits: Limits, now: Now) -> None:
        """Go on with other limits; to be followed by a snapshot, since no input says so."""
        self._book.change_limits(limits, now)

    def shed(self) -> None:
        """Forget what a repetition would be recognised by; to be followed by a snapshot."""
        self._book.settled = Settled()

    # Snapshot and replay (`host.recovery.Replayable`).

    def sent(self) -> Iterator[tuple[int, bytes | None]]:
        """What goes to connections since the last call of this or of `take`; other effects are forgotten."""
        for effect in self.take():
            if isinstance(effect, Write):
                yield effect.number, effect.frame
            elif isinstance(effect, Finish | Drop):
                yield effect.number, None

    def origins(self) -> dict[int, str]:
        """The connections that the rules know of, and the listeners that they came by."""
        return {number: link.origin for number, link in self._links.items()}

    def snapshot(self) -> bytes:
        """The engine as bytes for `restored`."""
        half_read = {n: d.pending for n, d in self._decoders.items() if d.waiting and n in self._book.links}
        return pack_value(Snapshot(self._book.limits, self._book.image(), half_read, self._seed, self._fresh_ids))

    @classmethod
    def restored(cls, data: bytes) -> Engine:
        """The engine that `data` was taken of, limits included. Raises ValueError where it is none of this format."""
        snapshot = unpack_value(data, Snapshot)
        engine = cls.__new__(cls)
        engine._begin(Router.of_image(snapshot.image, snapshot.limits))
        engine._seed = snapshot.seed
        engine._fresh_ids = snapshot.fresh_ids
        for number, data_read in snapshot.half_read.items():
            decoder = engine._decoders[number] = FrameDecoder()
            decoder.feed(data_read)
        return engine

    def replay(self, kind: int, number: int, now: Now, data: Bytes) -> None:
        """Feed a logged input again."""
        if kind == RECEIVED:
            self.received(number, data, now)
        elif kind == OPENED:
            self.opened(number, bytes(data).decode(), now)
        elif kind == CLOSED:
            self.closed(number, bytes(data).decode(), now)
        elif kind == TICK:
            self.tick(now)
        elif kind == CONGESTED:
            self.congested(number, now)
        elif kind == DRAINED:
            self.drained(number, now)
        elif kind == LOADED:
            self.load(unpack_value(bytes(data), Beginning), now)
        elif kind == NOT_STORED:
            deliveries = set(msgspec.msgpack.decode(bytes(data), type=list[str]))
            effects = self.take()
            failed = [effect for effect in effects if isinstance(effect, PutEdge) and effect.delivery in deliveries]
            self._book.effects = [*self.not_stored(failed, effects), *self._book.effects]
        else:
            raise ValueError(f"input of unknown kind {kind}")


def not_stored_record(failed: Iterable[PutEdge]) -> bytes:
    """What is logged for a `NOT_STORED` input."""
    return msgspec.msgpack.encode([put.delivery for put in failed])


def pack_value(value: msgspec.Struct) -> bytes:
    """A struct as bytes, whatever its strings hold: lone surrogates, which MessagePack cannot carry, go as JSON."""
    try:
        return b"M" + msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return b"J" + codec.encode(value)


def unpack_value(data: bytes, kind: type[_Packed]) -> _Packed:
    """The struct that `pack_value` made `data` of. Raises ValueError where it is another."""
    body = memoryview(data)[1:]
    try:
        if data[:1] == b"M":
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.convert(codec.decode(body), kind, str_keys=True)
    except (msgspec.DecodeError, WireError) as error:
        raise ValueError("bytes of another format") from error


def uuid4_of(name: bytes) -> str:
    """A version 4 UUID whose random bits come from `name`."""
    digits = blake2b(name, digest_size=16).hexdigest()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
