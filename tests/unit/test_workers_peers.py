# SPDX-License-Identifier: Apache-2.0
"""Connections to the worker service: what each may take of it, and what those in workers leave to others."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host.journal import Event, Journal
from agent_intercom.workers import contract, listening, refusals
from agent_intercom.workers.client import Client
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.listening import Door, Origin, Peer
from agent_intercom.workers.refusals import Refusals
from tests.unit.workerstage import refused

HANG = 20.0
FIRST, SECOND = "a" * 12, "b" * 12


class Told(Journal):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(path="/nonexistent")
        self.events: list[tuple[Event, dict[str, Any]]] = []

    def emit(self, event: Event, **fields: Any) -> None:
        self.events.append((event, fields))


async def _echo(payload: bytes, *_: Any) -> bytes:
    return payload


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


Handler = Callable[..., Coroutine[Any, Any, bytes]]


async def connected(handler: Handler = _echo) -> tuple[socket.socket, Peer]:
    """Our end of a connection, and the other one."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    peer = Peer(Origin(1, None), handler, lambda _: None)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, theirs)
    return ours, peer


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANG):
            await body()

    asyncio.run(bounded())


async def received(ours: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        piece = await asyncio.get_running_loop().sock_recv(ours, length - len(found))
        assert piece
        found += piece
    return found


@pytest.mark.parametrize("begun", [b"", b"\0", frame(b"xyz")[:-1]])
def test_who_says_nothing_or_half_of_something_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(listening, "ASKING", 0.05)

    async def body() -> None:
        ours, peer = await connected()
        with ours:
            await asyncio.get_running_loop().sock_sendall(ours, begun)
            assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
        await peer.finished()

    run(body)


def test_who_was_answered_may_be_silent_but_not_begin_and_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        ours, peer = await connected()
        with ours:
            await loop.sock_sendall(ours, frame(b"one"))
            await received(ours, 7)
            monkeypatch.setattr(listening, "ASKING", 0.0)
            for _ in range(20):
                await asyncio.sleep(0)
            await loop.sock_sendall(ours, frame(b"two"))
            assert await received(ours, 7) == frame(b"two")
            await loop.sock_sendall(ours, b"\0")
            assert await loop.sock_recv(ours, 1) == b""
        await peer.finished()

    run(body)


def test_who_does_not_read_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "READING", 0.05)

    async def long(*_: Any) -> bytes:
        return b"x" * (2 << 20)

    async def body() -> None:
        ours, peer = await connected(long)
        with ours:
            await asyncio.get_running_loop().sock_sendall(ours, frame(b"one"))
            await peer.gone.wait()
            await peer.finished()

    run(body)


def test_what_comes_while_a_request_is_carried_out_is_bounded_in_bytes() -> None:
    begun = asyncio.Event()
    go_on = asyncio.Event()

    async def slow(payload: bytes, *_: Any) -> bytes:
        begun.set()
        await go_on.wait()
        return payload[:1]

    async def body() -> None:
        loop = asyncio.get_running_loop()
        ours, peer = await connected(slow)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        large = frame(b"x" * (1 << 20))
        with ours:
            await loop.sock_sendall(ours, large)
            await begun.wait()
            more = asyncio.create_task(loop.sock_sendall(ours, large * 4))
            while peer.held <= listening.AHEAD:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not more.done() and peer.held <= listening.AHEAD + (1 << 18)
            assert len(peer._decoder._tail) == peer.held
            go_on.set()
            await more
            assert await received(ours, 25) == frame(b"x") * 5
            assert peer.held == 0
        await peer.finished()

    run(body)


def test_the_end_of_who_waits_for_an_answer_is_seen() -> None:
    async def forever(_: bytes, __: Origin, peer: Peer) -> bytes:
        await peer.gone.wait()
        return b"x"

    async def body() -> None:
        ours, peer = await connected(forever)
        await asyncio.get_running_loop().sock_sendall(ours, frame(b"one"))
        while not peer._answering:
            await asyncio.sleep(0)
        ours.close()
        await peer.finished()

    run(body)


def test_one_who_asks_without_end_leaves_others_their_turn() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        greedy, first = await connected()
        modest, second = await connected()
        with greedy, modest:
            await loop.sock_sendall(greedy, frame(b"x") * 10_000)
            await loop.sock_sendall(modest, frame(b"y"))
            await received(modest, 5)
            assert first.held > 0
        await first.finished()
        await second.finished()

    run(body)


# The door.


@contextmanager
def listener(directory: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX) as listening_:
        listening_.bind(str(directory / "s"))
        listening_.listen(64)
        yield listening_, str(directory / "s")


def test_each_worker_has_a_share_and_those_outside_have_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str | None] = [FIRST]
    monkeypatch.setattr(listening, "origin_of", lambda connection, pid: Origin(pid, where[0]))
    monkeypatch.setattr(listening, "OF_ONE", 2)
    monkeypatch.setattr(listening, "OF_WORKERS", 3)
    journal = Told()

    def asking(address: str) -> str:
        """The code of what a client is told, or its answer's own."""
        with Client(address) as client:
            try:
                return str(client.request("list", {}, timeout=HANG)["x"])
            except WorkerError as error:
                return str(error.code)

    async def answer(payload: bytes, *_: Any) -> bytes:
        number = json.loads(payload)["id"]
        return json.dumps({"version": 1, "id": number, "ok": True, "result": {"x": "fine"}}).encode()

    async def body(address: str, socket_: socket.socket) -> None:
        door = Door(answer, Refusals(journal), journal, lambda: None)
        door.listen(socket_)
        silent: list[socket.socket] = []

        async def silently(count: int, worker: str | None) -> None:
            where[0] = worker
            for _ in range(count):
                silent.append(socket.socket(socket.AF_UNIX))
                silent[-1].connect(address)
            while door.connections != len(silent):
                await asyncio.sleep(0)

        await silently(2, FIRST)
        assert await asyncio.to_thread(asking, address) == "limit_reached"
        where[0] = SECOND
        assert await asyncio.to_thread(asking, address) == "fine"
        await silently(1, SECOND)
        assert await asyncio.to_thread(asking, address) == "limit_reached"
        where[0] = None
        assert await asyncio.to_thread(asking, address) == "fine"
        assert [event for event, _ in journal.events] == [Event.WORKER_REQUEST_REFUSED] * 2
        for each in silent:
            each.close()
        while door.connections:
            await asyncio.sleep(0)
        where[0] = FIRST
        assert await asyncio.to_thread(asking, address) == "fine"
        await door.close()

    with listener(tmp_path) as (listening_, address):
        run(lambda: body(address, listening_))


def test_half_requests_of_one_worker_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "origin_of", lambda connection, pid: Origin(pid, FIRST))
    monkeypatch.setattr(listening, "_BYTES_OF_ONE", 300_000)

    async def body(address: str, socket_: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        door = Door(_echo, Refusals(Told()), Told(), lambda: None)
        door.listen(socket_)
        silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        half = struct.pack(">I", contract.MAX_FRAME) + b"x" * 150_000
        for each in silent:
            each.setblocking(False)
            await loop.sock_connect(each, address)
        for each in silent[:2]:
            await loop.sock_sendall(each, half[:100_000])
        await loop.sock_sendall(silent[2], half)
        with pytest.raises(ConnectionError):
            if not await loop.sock_recv(silent[2], 1):
                raise ConnectionResetError
        assert door.connections == 2
        for each in silent:
            each.close()
        await door.close()

    with listener(tmp_path) as (listening_, address):
        run(lambda: body(address, listening_))


# The journal.


def test_many_refusals_are_counted_and_hide_none_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        journal = Told()
        told = Refusals(journal)
        for _ in range(1000):
            told.tell("list", "forbidden", inside=True)
        told.tell("list", "invalid_request", inside=False)
        lines = [fields for event, fields in journal.events if event is Event.WORKER_REQUEST_REFUSED]
        assert [each["inside"] for each in lines] == [True] * refusals.LINES + [False]
        told.close()
        assert journal.events[-1] == (
            Event.WORKER_REQUESTS_REFUSED,
            {"count": 1000 - refusals.LINES, "inside": True},
        )
        assert len(journal.events) == len(lines) + 1
        monkeypatch.setattr(refusals, "WINDOW", 0.0)
        for _ in range(refusals.LINES + 1):
            told.tell("list", "forbidden", inside=True)
        while journal.events[-1][1].get("count") != 1:
            await asyncio.sleep(0)

    run(body)


def test_who_is_not_let_in_is_told_why_even_where_nothing_can_be_sent(tmp_path: Path) -> None:
    with listener(tmp_path) as (listening_, address), Client(address) as client:
        connection, _ = listening_.accept()
        fault = {"code": "limit_reached", "text": "too many", "field": "connections"}
        with connection:
            connection.send(frame(json.dumps({"version": 1, "id": "", "ok": False, "error": fault}).encode()))
        with refused(contract.Code.LIMIT, "connections"):
            client.request("list", {}, timeout=HANG)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may have no more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_service_that_has_no_descriptors_left_for_good_says_it_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STARVED", 0.0)

    async def body(address: str, socket_: socket.socket) -> None:
        journal, starved = Told(), asyncio.Event()
        door = Door(_echo, Refusals(journal), journal, lambda: None, starved.set)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            with no_descriptors():
                door.listen(socket_)
                async with asyncio.timeout(HANG):
                    await starved.wait()
            assert [event for event, _ in journal.events] == [Event.OUT_OF_DESCRIPTORS]
            while not door.connections:
                await asyncio.sleep(0)
            await door.close()

    with listener(tmp_path) as (listening_, address):
        run(lambda: body(address, listening_))


def test_a_shortage_that_passes_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is counted from its own beginning."""
    monkeypatch.setattr(listening, "STARVED", 0.0)

    async def body(address: str, socket_: socket.socket) -> None:
        journal, starved = Told(), asyncio.Event()
        door = Door(_echo, Refusals(journal), journal, lambda: None, starved.set)
        door.listen(socket_)
        for number in (1, 2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                with no_descriptors():
                    while len(journal.events) < number:
                        await asyncio.sleep(0)
                while not door.connections:
                    await asyncio.sleep(0)
            while door.connections:
                await asyncio.sleep(0)
        assert not starved.is_set()
        await door.close()

    with listener(tmp_path) as (listening_, address):
        run(lambda: body(address, listening_))


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """This process may have so many more than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free: list[int] = []
    try:
        # The lowest that are free are given first, so those below the highest one are taken.
        while not free or not _is_top(free[-1]):
            free.append(os.eventfd(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1 + count, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in free:
            os.close(each)


def _is_top(descriptor: int) -> bool:
    return max(int(name) for name in os.listdir("/proc/self/fd")) <= descriptor + 1


@pytest.mark.parametrize("left", [1, 2])
def test_the_last_descriptors_do_not_hide_a_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The connection gets one, and nothing is left to see who is on it."""
    monkeypatch.setattr(listening, "STARVED", 0.0)

    async def body(address: str, socket_: socket.socket) -> None:
        journal, starved = Told(), asyncio.Event()
        door = Door(_echo, Refusals(journal), journal, lambda: None, starved.set)
        door.listen(socket_)
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            with descriptors(left):
                client.connect(address)
                async with asyncio.timeout(HANG):
                    await starved.wait()
                told = json.loads(client.recv(4096)[4:])
            assert (told["id"], told["error"]["code"], told["error"]["field"]) == ("", "limit_reached", "descriptors")
            assert [event for event, _ in journal.events] == [Event.OUT_OF_DESCRIPTORS]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            while not door.connections or door._short is not None:
                await asyncio.sleep(0)
        await door.close()

    with listener(tmp_path) as (listening_, address):
        run(lambda: body(address, listening_))
