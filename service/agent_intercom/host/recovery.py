# SPDX-License-Identifier: Apache-2.0
"""What a broker leaves to the next one in the memory file, and how that one goes on from it. Pure.

The snapshot holds the engine (the broker's rules and decoders) and, for each connection, the bytes that had not been
sent. Replaying the inputs logged since gives all bytes queued since; the count of bytes that the kernel took says how
many of them the peer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from agent_intercom.wire.clock import Now


class Replayable(Protocol):
    """A broker's deterministic half."""

    def replay(self, kind: int, number: int, now: Now, data: bytes) -> None:
        """Feed a logged input again. Raises ValueError for one that it does not know."""
        ...

    def sent(self) -> Iterable[tuple[int, bytes | None]]:
        """What goes to connections since the last call: frames, and None where a connection was let go."""
        ...

    def origins(self) -> Mapping[int, str]:
        """The connections that the rules know of, and the listeners that they came by."""
        ...

    def snapshot(self) -> bytes:
        """The engine at rest."""
        ...


AnyEngine = TypeVar("AnyEngine", bound=Replayable)


class Line(msgspec.Struct):
    """A connection at the time of a snapshot: bytes that the kernel had taken, bytes that waited."""

    number: int
    origin: str
    sent: int
    unsent: bytes


class Legacy(msgspec.Struct):
    """The payload of the memory file's snapshot. `version` is the program's: another one may follow other rules."""

    version: str
    engine: bytes
    lines: list[Line]
    next_number: int


class Input(NamedTuple):
    """A logged input of the engine."""

    kind: int
    number: int
    now: Now
    data: bytes


class Recovered(NamedTuple, Generic[AnyEngine]):
    """An engine that is where its predecessor was. `lines` are the connections that the rules still know of.

    `diverged` are those whose peers have more bytes than the replay produced; they cannot be continued. `failures` are
    exceptions that nobody expected: faults of the rules, which every replay meets again.
    """

    engine: AnyEngine
    lines: dict[int, Line]
    diverged: list[int]
    next_number: int
    records: int
    failures: list[Exception]


def pack(version: str, engine: Replayable, lines: Iterable[Line], next_number: int) -> bytes:
    """The snapshot of a broker. Effects of the engine must have been carried out."""
    return msgspec.msgpack.encode(Legacy(version, engine.snapshot(), list(lines), next_number))


def recover(
    version: str,
    snapshot: bytes,
    inputs: Iterable[Input],
    total_sent: Callable[[int], int | None],
    restored: Callable[[bytes], AnyEngine],
    foremost: int = 0,
) -> Recovered[AnyEngine]:
    """Go on from a snapshot and the inputs since.

    `restored` makes an engine of its snapshot; inputs of kind `foremost` come first. `total_sent` tells how many bytes
    the kernel took of a connection. Raises ValueError where the snapshot cannot be read, or where inputs would have to
    be replayed by other rules than those that they were first met with.
    """
    try:
        legacy = msgspec.msgpack.decode(snapshot, type=Legacy)
    except msgspec.DecodeError as error:
        raise ValueError("snapshot of another format") from error
    inputs = list(inputs)
    if inputs and legacy.version != version:
        raise ValueError("inputs of another version cannot be replayed")
    engine = restored(legacy.engine)
    next_number = legacy.next_number
    failures: list[Exception] = []
    streams = _Streams(engine, legacy.lines, total_sent)
    batch = Now(0, 0)
    for entry in sorted(inputs, key=lambda entry: entry.kind != foremost):
        # Inputs of one batch have one time, and what is told of a failed commit concerns its own batch only.
        if entry.now != batch:
            streams.collect()
            batch = entry.now
        try:
            engine.replay(entry.kind, entry.number, entry.now, entry.data)
        except ValueError:
            raise
        except Exception as error:
            # The broker that first met this input failed on it in the same way, and went on.
            failures.append(error)
        next_number = max(next_number, entry.number + 1)
    streams.collect()
    lines, diverged = streams.lines()
    return Recovered(engine, lines, diverged, next_number, len(inputs), failures)


class _Streams:
    """The bytes that were queued for each connection, without those that the kernel took: a busy broker has written
    gigabytes since the snapshot, and nearly all of it is gone."""

    def __init__(self, engine: Replayable, lines: Iterable[Line], total_sent: Callable[[int], int | None]) -> None:
        self._engine = engine
        self._total_sent = total_sent
        self._start = {line.number: line.sent for line in lines}
        self._taken: dict[int, int] = {}
        self._waiting: dict[int, list[bytes]] = {}
        for line in lines:
            self._add(line.number, line.unsent)

    def collect(self) -> None:
        """Take what the engine has queued."""
        for number, frame in self._engine.sent():
            if frame is not None:
                self._add(number, frame)
            else:
                self._waiting.pop(number, None)

    def _add(self, number: int, data: bytes) -> None:
        total = self._total_sent(number)
        if total is None:
            return
        taken = self._taken.setdefault(number, total - self._start.get(number, 0))
        if taken < 0:
            return
        if taken >= len(data):
            self._taken[number] = taken - len(data)
        else:
            self._taken[number] = 0
            self._waiting.setdefault(number, []).append(data[taken:] if taken else data)

    def lines(self) -> tuple[dict[int, Line], list[int]]:
        """What is left for each connection of the engine, and the connections for which that cannot be told."""
        lines: dict[int, Line] = {}
        diverged: list[int] = []
        for number, origin in self._engine.origins().items():
            total = self._total_sent(number)
            start = self._start.get(number, 0)
            if total is None:
                lines[number] = Line(number, origin, start, b"")
            elif self._taken.get(number, total - start) != 0:
                diverged.append(number)
            else:
                lines[number] = Line(number, origin, total, b"".join(self._waiting.get(number, ())))
        return lines, diverged
