# SPDX-License-Identifier: Apache-2.0
"""Random lives of connections: whatever happens in whatever order, bytes keep their order and nothing is told twice."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_intercom.wire.connection import Connection, ReactorLimits
from tests.unit.wirestage import MIB, Stage, pattern, play

SIZES = (1, 7, 500, 65_536, 150_000, 400_000)


@dataclass
class Life:
    """What must be true of one connection."""

    client: socket.socket
    connection: Connection
    from_client: bytearray = field(default_factory=bytearray)
    to_client: bytearray = field(default_factory=bytearray)
    client_read: bytearray = field(default_factory=bytearray)
    client_open: bool = True
    client_talks: bool = True
    finished: bool = False
    ended: bool = False


class World:
    """Does things to connections, from outside and from inside callbacks, and checks after each."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self.stage = stage
        self.rng = rng
        self.lives: dict[int, Life] = {}
        self.seed = 0
        stage.handler.on |= {"received": self.received, "lost": self.lost}

    def received(self, connection: Connection, _data: bytes) -> None:
        assert not self.lives[connection.number].finished
        if self.rng.random() < 0.3:
            self.act_on_server(self.rng.choice(list(self.lives.values())))

    def lost(self, connection: Connection, reason: str) -> None:
        life = self.lives[connection.number]
        assert not life.finished
        assert reason in ("eof", "reset")
        assert not (life.client_open and life.client_talks)
        life.finished = True
        # A peer that has only stopped talking gets what was queued for it, as it does at an orderly end.
        life.ended = reason == "eof"
        if self.rng.random() < 0.5:
            self.act_on_server(self.rng.choice(list(self.lives.values())))

    def act_on_server(self, life: Life) -> None:
        reactor = self.stage.reactor
        connection = life.connection
        action = self.rng.choice(
            ["push"] * 6 + ["pause", "resume", "resume", "cork", "uncork", "uncork", "end", "destroy"]
        )
        if action == "push":
            self.seed += 1
            data = pattern(self.rng.choice(SIZES), self.seed)
            connection.queue(data)
            if not life.finished:
                life.to_client += data
        elif action in ("end", "destroy"):
            if self.rng.random() < 0.4:
                life.ended = action == "end" and (life.ended or not life.finished)
                getattr(reactor, action)(connection)
                life.finished = True
        else:
            getattr(reactor, action)(connection)

    async def add(self) -> None:
        client, connection = await self.stage.connect()
        self.lives[connection.number] = Life(client, connection)

    def act_on_client(self, life: Life) -> None:
        if not life.client_open:
            return
        action = self.rng.choice(["send", "send", "read", "read", "read", "half-close", "close"])
        if action == "send" and life.client_talks:
            self.seed += 1
            with contextlib.suppress(OSError):
                data = pattern(self.rng.choice(SIZES), self.seed)
                life.from_client += data[: life.client.send(data)]
        elif action == "read":
            self.read(life, self.rng.choice(SIZES))
        elif action == "half-close" and self.rng.random() < 0.2:
            life.client.shutdown(socket.SHUT_WR)
            life.client_talks = False
        elif action == "close" and self.rng.random() < 0.2:
            life.client.close()
            life.client_open = False

    def read(self, life: Life, size: int) -> bool:
        with contextlib.suppress(OSError):
            data = life.client.recv(size)
            life.client_read += data
            return bool(data)
        return False

    def check(self) -> None:
        for number, life in self.lives.items():
            got = self.stage.handler.received_bytes.get(number, b"")
            assert life.from_client.startswith(got)
            assert life.to_client.startswith(life.client_read)
            told = [
                call[0]
                for call in self.stage.handler.calls
                if call[1] == number and call[0] in ("congested", "drained")
            ]
            assert told == ["congested", "drained"] * (len(told) // 2) + ["congested"] * (len(told) % 2)

    async def finish(self) -> None:
        """Let everything through that still can get through."""
        for life in self.lives.values():
            self.stage.reactor.resume(life.connection)
            self.stage.reactor.uncork(life.connection)
        self.stage.reactor.run_batch(lambda _now: None)
        self.rng = random.Random(0)
        self.stage.handler.on.pop("received")
        moving = True
        while moving:
            await self.stage.idle()
            moving = any([self.read(life, MIB) for life in self.lives.values() if life.client_open])
        self.check()
        for number, life in self.lives.items():
            if not life.finished:
                assert bytes(life.from_client) == bytes(self.stage.handler.received_bytes.get(number, b""))
                assert bytes(life.to_client) == bytes(life.client_read)
                assert life.connection.queued == 0
                assert not life.connection.congested
            elif life.ended and life.client_open:
                assert bytes(life.to_client) == bytes(life.client_read)
                with contextlib.suppress(ConnectionResetError):
                    assert life.client.recv(1) == b""
        alive = {number for number, life in self.lives.items() if not life.finished}
        ending = {number for number, life in self.lives.items() if life.ended}
        assert alive <= set(self.stage.reactor.connections) <= alive | ending


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)

    async def test(stage: Stage) -> None:
        world = World(stage, rng)
        await world.add()
        await world.add()
        for _ in range(25):
            if len(world.lives) < 5 and rng.random() < 0.1:
                await world.add()
            for _ in range(rng.randrange(4)):
                life = rng.choice(list(world.lives.values()))
                if rng.random() < 0.6:
                    world.act_on_client(life)
                else:
                    stage.reactor.run_batch(lambda _now, life=life: world.act_on_server(life))
            for _ in range(rng.randrange(3)):
                await stage.idle()
            world.check()
        await world.finish()

    play(
        test, limits=ReactorLimits(high_water=300_000, low_water=50_000, hard_limit=1 << 30, total_queue_limit=1 << 30)
    )
