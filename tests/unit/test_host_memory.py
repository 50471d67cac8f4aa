# SPDX-License-Identifier: Apache-2.0
"""The memory file: round trip, refusal of foreign files, and death at any instruction."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host import memory
from agent_intercom.host.errors import HostError
from agent_intercom.host.memory import RECEIVED, Record, StateFile
from agent_intercom.wire.clock import Now

SMALL = 1024 * 1024
NOW = Now(1_000, 1_700_000_000_000)


@pytest.fixture
def state() -> Iterator[StateFile]:
    made = StateFile.create(SMALL)
    yield made
    made.close()


@contextlib.contextmanager
def adopted(state: StateFile) -> Iterator[StateFile]:
    """What the next process would see."""
    other = StateFile.adopt(os.dup(state.fileno()))
    try:
        yield other
    finally:
        other.close()


def receive(state: StateFile, number: int, data: bytes, now: Now = NOW) -> None:
    assert bytes(state.receive(number, arriving(data), now)) == data


def arriving(data: bytes) -> Callable[[memoryview], int]:
    """A `recv_into` that answers with `data`."""

    def recv_into(buffer: memoryview) -> int:
        buffer[: len(data)] = data
        return len(data)

    return recv_into


def failing(_: object) -> int:
    raise BlockingIOError


def test_empty_file(state: StateFile) -> None:
    with adopted(state) as other:
        assert other.load() == (None, [], None, None)
        assert other.claimed() == []
    assert (state.log_size, state.snapshot_size, state.room) == (0, 0, SMALL // 2)


numbers = st.integers(0, 2**63)
times = st.builds(Now, st.integers(0, 2**62), st.integers(-(2**62), 2**62))
steps = st.one_of(
    st.tuples(st.just("receive"), numbers, times, st.binary(max_size=300)),
    st.tuples(st.just("record"), st.integers(2, 255), numbers, times, st.binary(max_size=300)),
    st.tuples(st.just("snapshot"), st.binary(max_size=5000)),
)


@given(st.lists(steps, max_size=30))
def test_round_trip(script: list[tuple[Any, ...]]) -> None:
    state = StateFile.create(SMALL)
    snapshot: bytes | None = None
    records: list[Record] = []
    for step in script:
        match step:
            case ("receive", number, now, data):
                receive(state, number, data, now)
                if data:
                    records.append(Record(RECEIVED, number, now, data))
            case ("record", kind, number, now, data):
                state.record(kind, number, now, data)
                records.append(Record(kind, number, now, data))
            case ("snapshot", payload):
                state.snapshot(payload)
                snapshot, records = payload, []
    try:
        with adopted(state) as other:
            assert other.load() == (snapshot, records, None, None)
            assert (other.log_size, other.snapshot_size, other.room) == (
                state.log_size,
                state.snapshot_size,
                state.room,
            )
            assert other.snapshot_size == len(snapshot or b"")
            other.record(9, 1, NOW, b"more")
            assert other.load().records == [*records, Record(9, 1, NOW, b"more")]
    finally:
        state.close()


def test_interrupted_calls_are_named(state: StateFile) -> None:
    def killed(_: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        state.receive(0, killed, NOW)
    with pytest.raises(KeyboardInterrupt):
        state.send(41, killed, b"x", 0)
    with adopted(state) as other:
        assert other.load()[2:] == (0, 41)
        other.settle()
        assert other.load()[2:] == (None, None)


def test_failed_calls_leave_nothing(state: StateFile) -> None:
    state.claim(3)
    with pytest.raises(BlockingIOError):
        state.receive(3, failing, NOW)
    with pytest.raises(BlockingIOError):
        state.send(3, failing, b"x", 7)
    with adopted(state) as other:
        assert other.load() == (None, [], None, None)
        assert other.sent(3) == 0


def test_slots(state: StateFile) -> None:
    for number in range(memory.SLOTS):
        state.claim(number)
    with pytest.raises(HostError) as caught:
        state.claim(memory.SLOTS)
    assert caught.value.code == "MEMORY_SLOTS"
    state.end_send(7, 2**40)
    state.release(8)
    state.release(8)
    state.claim(5000)
    with adopted(state) as other:
        assert (other.sent(7), other.sent(8), other.sent(5000), other.sent(9)) == (2**40, None, 0, 0)
        assert set(other.claimed()) == set(range(memory.SLOTS)) - {8} | {5000}
        other.claim(7)
        assert other.sent(7) == 0


def test_full(state: StateFile) -> None:
    with pytest.raises(HostError) as caught:
        state.snapshot(bytes(SMALL // 2 - 1000))
    assert caught.value.code == "MEMORY_FULL"
    while state.room > 64 * 1024 + 32:
        receive(state, 3, bytes(60_000))
    with pytest.raises(HostError) as caught:
        receive(state, 3, b"x")
    assert caught.value.code == "MEMORY_FULL"
    state.record(2, 3, NOW, bytes(state.room - 32))
    assert state.room == 0
    with pytest.raises(HostError) as caught:
        state.record(2, 3, NOW)
    assert caught.value.code == "MEMORY_FULL"
    before = state.load()
    state.snapshot(b"start again")
    assert len(before.records) > 1
    assert state.load() == (b"start again", [], None, None)
    receive(state, 3, bytes(memory.RECEIVE_MAX))


def test_buffer_is_reused_and_moves(state: StateFile) -> None:
    before = state.log_end
    assert not state.receive(1, arriving(b""), NOW)
    assert state.log_end == before
    first = state.receive(1, arriving(b"first"), NOW)
    second = state.receive(1, arriving(b"second"), NOW)
    assert (bytes(first), bytes(second)) == (b"first", b"second")


def test_memory_is_given_back(state: StateFile) -> None:
    def resident() -> int:
        return os.fstat(state.fileno()).st_blocks * 512

    idle = resident()
    assert idle <= 8 * resource.getpagesize()
    receive(state, 1, bytes(200_000))
    assert resident() >= 200_000
    state.snapshot(b"small")
    assert resident() <= idle + resource.getpagesize()


def words(state: StateFile) -> memoryview:
    return state._words


@pytest.mark.parametrize(
    ("word", "value", "code"),
    [
        (memory._MAGIC, 1, "MEMORY_FOREIGN"),
        (memory._VERSION, 99, "MEMORY_VERSION"),
        (memory._SIZE, SMALL * 2, "MEMORY_CORRUPT"),
        (memory._SIZE, 0, "MEMORY_CORRUPT"),
        (memory._ACTIVE, 2, "MEMORY_CORRUPT"),
        (memory._END, 0, "MEMORY_CORRUPT"),
        (memory._END, 2**64 - 8, "MEMORY_CORRUPT"),
        (memory._END, memory._HALVES + 4, "MEMORY_CORRUPT"),
        (memory._SNAPSHOT, 2**64 - 1, "MEMORY_CORRUPT"),
        (memory._SNAPSHOT, SMALL, "MEMORY_CORRUPT"),
    ],
)
def test_corrupt_header(state: StateFile, word: int, value: int, code: str) -> None:
    words(state)[word] = value
    fd = os.dup(state.fileno())
    try:
        with pytest.raises(HostError) as caught:
            StateFile.adopt(fd)
        assert caught.value.code == code
        os.fstat(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("damage", ["kind", "size", "short", "end"])
def test_corrupt_log(state: StateFile, damage: str) -> None:
    receive(state, 1, b"hello")
    at = memory._HALVES
    match damage:
        case "kind":
            state._base[at : at + 4] = bytes(4)
        case "size":
            state._base[at + 4 : at + 8] = b"\xff" * 4
        case "short":
            words(state)[memory._END] -= 8
        case "end":
            words(state)[memory._END] += 8
    with adopted(state) as other, pytest.raises(HostError) as caught:
        other.load()
    assert caught.value.code == "MEMORY_CORRUPT"


def test_foreign_descriptors() -> None:
    read, write = os.pipe()
    plain = os.memfd_create("plain")
    null = os.open("/dev/null", os.O_RDWR)
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, memory._SEALS)
    try:
        for fd in (read, write, plain, null, short):
            with pytest.raises(HostError) as caught:
                StateFile.adopt(fd)
            assert caught.value.code == "MEMORY_FOREIGN"
    finally:
        for fd in (read, write, plain, null, short):
            os.close(fd)


def test_size_is_sealed(state: StateFile) -> None:
    with pytest.raises(OSError):
        os.ftruncate(state.fileno(), 4096)
    assert not os.get_inheritable(state.fileno())


class Killed(BaseException):
    """Raised in place of a SIGKILL."""


def interrupted(action: Callable[[], object], after: int) -> bool:
    """Run `action` and stop it after that many bytecode instructions of the memory module; False when it ended."""
    left = after

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != memory.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def every_instruction(action: Callable[[StateFile], object]) -> Iterator[StateFile]:
    """The file as a kill at each instruction of `action` leaves it, then as its end leaves it."""
    going = True
    after = 0
    while going:
        state = StateFile.create(SMALL)
        state.claim(4)
        state.record(2, 4, NOW, b"before")
        state.end_send(4, 10)
        going = interrupted(lambda state=state: action(state), after)  # type: ignore[misc]
        after += 1
        with adopted(state) as other:
            yield other
        state.close()
    assert after > 5


BEFORE = Record(2, 4, NOW, b"before")


def test_kill_at_every_instruction_of_a_receive() -> None:
    def action(state: StateFile) -> None:
        state.receive(4, arriving(b"new"), NOW)

    new = Record(RECEIVED, 4, NOW, b"new")
    seen = set()
    for state in every_instruction(action):
        loaded = state.load()
        assert loaded.records in ([BEFORE], [BEFORE, new])
        seen.add((len(loaded.records), loaded.reading))
    assert seen == {(1, None), (1, 4), (2, 4), (2, None)}


def test_kill_at_every_instruction_of_a_send() -> None:
    def action(state: StateFile) -> None:
        state.send(4, len, b"12345", 10)

    seen = {(state.sent(4), state.load().writing) for state in every_instruction(action)}
    assert seen == {(10, None), (10, 4), (15, 4), (15, None)}


def test_kill_at_every_instruction_of_a_record() -> None:
    def action(state: StateFile) -> None:
        state.record(3, 6, NOW, b"tick")

    seen = {tuple(state.load().records) for state in every_instruction(action)}
    assert seen == {(BEFORE,), (BEFORE, Record(3, 6, NOW, b"tick"))}


def test_kill_at_every_instruction_of_snapshots() -> None:
    def action(state: StateFile) -> None:
        state.snapshot(b"one")
        state.record(3, 6, NOW)
        state.snapshot(b"two!")

    seen = {(state.load().snapshot, tuple(state.load().records)) for state in every_instruction(action)}
    assert seen == {(None, (BEFORE,)), (b"one", ()), (b"one", (Record(3, 6, NOW, b""),)), (b"two!", ())}


def test_kill_at_every_instruction_of_slots() -> None:
    def action(state: StateFile) -> None:
        state.claim(5)
        state.end_send(5, 3)
        state.release(5)
        state.claim(6)

    seen = {(state.sent(5), state.sent(6)) for state in every_instruction(action)}
    assert seen == {(None, None), (0, None), (3, None), (None, 0)}
    assert all(state.sent(4) == 10 for state in every_instruction(action))


CHILD = """
import os, select, socket, sys
from agent_intercom.host.memory import StateFile
from agent_intercom.wire.clock import Now

state = StateFile.adopt(int(sys.argv[1]))
peer = socket.socket(fileno=int(sys.argv[2]))
peer.setblocking(True)
sent = 0
got = b""
for turn in range(10**9):
    if state.log_size > 300_000:
        state.snapshot(got)
    select.select([peer], [], [])
    data = state.receive(4, lambda buffer: peer.recv_into(buffer, 997), Now(turn, 0))
    got = (got + bytes(data))[-8:]
    sent += state.send(4, peer.send, bytes(1 + turn % 7), sent)
"""


@pytest.mark.parametrize("rounds", [3, 40, 333, 900, 1500])
def test_real_kill(rounds: int) -> None:
    """A stream through a killed process: what it logged and what still waits in the kernel are the whole stream."""
    state = StateFile.create(SMALL)
    state.claim(4)
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(state.fileno()), str(theirs.fileno())],
        pass_fds=(state.fileno(), theirs.fileno()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        written = answered = 0
        for turn in range(rounds):
            chunk = b"".join(number.to_bytes(8, "big") for number in range(written // 8, written // 8 + 60))
            ours.sendall(chunk)
            written += len(chunk)
            if turn < rounds - 1:
                answered += len(ours.recv(65536))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        check_stream(state, theirs, ours, written, answered)
    finally:
        child.kill()
        child.wait()
        ours.close()
        theirs.close()
        state.close()


def check_stream(state: StateFile, theirs: socket.socket, ours: socket.socket, written: int, answered: int) -> None:
    with adopted(state) as other:
        loaded = other.load()
        logged = (loaded.snapshot or b"") + b"".join(record.data for record in loaded.records)
        first = int.from_bytes(logged[:8], "big") * 8 if logged else 0
        theirs.setblocking(False)
        waiting = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting += theirs.recv(65536)
        if loaded.reading is None:
            expected = b"".join(number.to_bytes(8, "big") for number in range(first // 8, written // 8))
            assert logged + waiting == expected
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                answered += len(ours.recv(65536))
        if loaded.writing is None:
            assert other.sent(4) == answered
