# SPDX-License-Identifier: Apache-2.0
"""The broker's shell on a loop of its own: when the database is opened, what is late, what does not fit."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import memory, predecessor, shell
from agent_intercom.host.journal import Journal
from agent_intercom.host.memory import StateFile
from agent_intercom.host.notify import Notifier
from agent_intercom.host.recovery import Recovered
from agent_intercom.host.standalone import bind
from agent_intercom.intercom.broker import Broker
from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.engine import CLOSED, LOADED, Engine
from agent_intercom.intercom.keeper import Keeper
from agent_intercom.wire.clock import Now, system_now
from agent_intercom.wire.framing import pack

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stage:
    """A broker that listens in a directory of its own; its clock runs ahead by `ahead` milliseconds."""

    def __init__(
        self,
        directory: Path,
        tape: StateFile,
        limits: Limits,
        restored: tuple[Recovered, set[int]] | None = None,
    ) -> None:
        self.address = str(directory / "s")
        self.ahead = 0
        self.clients: list[Client] = []
        self.journal = Journal(path=str(directory / "no journal"))
        state = "state" if restored is None else "another state"
        self.keeper = Keeper(str(directory / state), str(directory), self.journal, [])
        self.broker = Broker(
            asyncio.get_running_loop(),
            limits=limits,
            tape=tape,
            notifier=Notifier({}),
            journal=self.journal,
            keeper=self.keeper,
            bound="itself",
            clock=self.now,
        )
        if restored is not None:
            self.broker.restore(restored[0], {}, restored[1])
            return
        self.broker.begin()
        self.broker.listen(bind(self.address), "local")

    def now(self) -> Now:
        now = system_now()
        return Now(now.mono + self.ahead, now.wall + self.ahead)

    async def connect(self) -> Client:
        client = await asyncio.open_unix_connection(self.address, limit=2**22)
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for _, writer in self.clients:
            writer.close()
            await writer.wait_closed()
        await self.broker.close(hand_over=False)

    async def join(self, session_id: str) -> Client:
        client = await self.connect()
        write(client, register(session_id))
        assert (await read(client))["type"] == "registered"
        return client


def play(test: Callable[[Stage], Awaitable[None]], *, size: int = 1024 * 1024 * 64, **limits: int) -> None:
    async def run(directory: Path) -> None:
        stage = Stage(directory, StateFile.create(size), Limits(**{"rate_capacity": 10**6, **limits}))
        try:
            async with asyncio.timeout(30):
                await test(stage)
        finally:
            await stage.close()

    with tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as name:
        asyncio.run(run(Path(name)))


def register(session_id: str | None = None) -> dict[str, Any]:
    session = {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1}
    frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "session": session}
    return frame if session_id is None else frame | {"sessionId": session_id}


def send(to: str, message_id: str, text: str = "", **members: Any) -> dict[str, Any]:
    message = {"id": message_id, "timestamp": 1, "content": {"text": text}, **members}
    return {"type": "send", "to": to, "message": message}


def write(client: Client, *frames: dict[str, Any]) -> None:
    client[1].write(b"".join(pack(json.dumps(frame, separators=(",", ":")).encode()) for frame in frames))


async def read(client: Client, kind: str | None = None) -> dict[str, Any]:
    """The next frame, or the next of a kind."""
    while True:
        size = int.from_bytes(await client[0].readexactly(4), "big")
        frame: dict[str, Any] = json.loads(await client[0].readexactly(size))
        if kind is None or frame["type"] == kind:
            return frame


def test_a_probe_does_not_open_the_database() -> None:
    async def test(stage: Stage) -> None:
        client = await stage.connect()
        write(client, {"type": "health", "requestId": "r"})
        assert (await read(client))["type"] == "health_ok"
        assert not stage.keeper.opened
        write(client, register())
        assert (await read(client))["type"] == "registered"
        assert stage.keeper.opened

    play(test)


def test_what_follows_a_probe_in_one_piece_finds_the_database_open() -> None:
    seen: list[tuple[str, str]] = []

    async def test(stage: Stage) -> None:
        client = await stage.connect()
        ask = send("one", "m", expectsReply=True)
        write(client, {"type": "health", "requestId": "r"}, register(), {"type": "list", "requestId": "l"})
        await stage.join("one")
        chosen = (await read(client, "registered"))["sessionId"]
        write(client, ask)
        accepted = await read(client, "delivery_accepted")
        seen.append((chosen, accepted["deliveryId"].rpartition("-")[0]))

    for _ in range(2):
        play(test)
    (first, generation), (second, _) = seen
    assert first != second
    assert generation


def test_without_the_database_library_messages_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agent_intercom.intercom.store", None)

    async def test(stage: Stage) -> None:
        one, two = await stage.join("one"), await stage.join("two")
        write(one, send("two", "m"))
        message = await read(two, "message")
        write(two, {"type": "message_received", "deliveryId": message["deliveryId"]})
        await read(one, "delivered")
        write(one, send("two", "a", expectsReply=True))
        refused = await read(one, "delivery_failed")
        assert (refused["accepted"], refused["code"]) == (False, "TOO_MANY_PENDING_ASKS")
        assert "STATE_UNUSABLE" in stage.broker.status_text()

    play(test)


def test_what_arrived_in_time_is_not_late_because_the_process_was_stopped() -> None:
    async def test(stage: Stage) -> None:
        one, two = await stage.join("one"), await stage.join("two")
        write(one, send("two", "m"))
        message = await read(two, "message")
        # No turn of the loop lies between the acknowledgement and the jump.
        write(two, {"type": "message_received", "deliveryId": message["deliveryId"]})
        stage.ahead = 9_000
        stage.broker._due()
        await read(one, "delivery_accepted")
        assert (await read(one))["type"] == "delivered"

    play(test)


def test_a_state_that_does_not_fit_sheds_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "SNAPSHOT_BYTES", 60_000)
    monkeypatch.setattr(shell, "BATCH_BYTES", 300_000)

    async def test(stage: Stage) -> None:
        one = await stage.join("i" * 4_000)
        for number in range(200):
            write(one, send("i" * 500, f"m{number}", "x" * 2_000))
            message = await read(one, "message")
            write(one, {"type": "message_received", "deliveryId": message["deliveryId"]})
            await read(one, "delivered")
        assert 0 < len(stage.broker._engine.router.book.settled) < 200

    play(test, size=2 * 1024 * 1024, pending_per_sender=1_000)


def test_asks_that_cannot_be_read_stay_for_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"version":1,"edges":[]}')
    (tmp_path / "broker-asks.json").symlink_to("elsewhere.json")
    keeper = Keeper(str(tmp_path / "state"), str(tmp_path), Journal(path=str(tmp_path / "no journal")), [])
    keeper.open(1, None)
    keeper.close()
    assert (tmp_path / "broker-asks.json").is_symlink()


def test_doubt_outlives_a_broker_that_is_killed_while_it_comes_up() -> None:
    """What a connection was sent last is not known, and stays so until its end is in the log."""

    async def test(stage: Stage) -> None:
        await stage.join("one")
        await stage.join("two")
        tape = stage.broker._tape
        tape._words[memory._WRITING] = 2
        for killed_at_once in (True, False):
            copy, recovered, doubtful = predecessor.adopt(
                {"memory": os.dup(tape.fileno())}, Notifier({}), stage.journal, Engine.restored, LOADED
            )
            assert copy is not None
            assert recovered is not None
            assert doubtful == {1}
            assert len(recovered.engine.router.book.sessions) == 2
            if killed_at_once:
                copy.close()
                continue
            successor = Stage(Path(stage.address).parent, copy, Limits(), restored=(recovered, doubtful))
            assert not successor.broker._engine.router.book.sessions
            loaded = copy.load()
            assert (loaded.writing, [entry.kind for entry in loaded.records][-2:]) == (None, [CLOSED, CLOSED])
            await successor.broker.close(hand_over=False)

    play(test)
