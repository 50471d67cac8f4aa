# SPDX-License-Identifier: Apache-2.0
"""The client's end of a connection: who is trusted, sizes, backpressure, the end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from agent_intercom.wire import channel as channel_module
from agent_intercom.wire.channel import HIGH_WATER, FrameChannel
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import MAX_FRAME
from agent_intercom.wire.peer import PeerCredentials
from tests.unit.fakebroker import HANG, FakeBroker, run


class Log:
    """What a channel told."""

    def __init__(self) -> None:
        self.payloads: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def connect(self, broker: FakeBroker) -> FrameChannel:
        return await FrameChannel.connect(broker.path, self.payloads.put_nowait, self.closed.set_result)

    async def payload(self) -> bytes:
        async with asyncio.timeout(HANG):
            return await self.payloads.get()

    async def code(self) -> str | None:
        async with asyncio.timeout(HANG):
            return await self.closed


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def test_payloads_arrive_whole_and_in_order_however_the_stream_is_cut() -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        stream = b"".join(framed(payload) for payload in (b"1", b"[2]", b"x" * 200_000))
        for piece in (stream[:3], stream[3:5], stream[5:9], stream[9:]):
            line.write_bytes(piece)
            await line.writer.drain()
        assert [await log.payload() for _ in range(3)] == [b"1", b"[2]", b"x" * 200_000]
        channel.close()
        await channel.wait_closed()
        assert await log.code() is None

    run(scenario)


def test_a_frame_over_the_limit_is_refused_before_anything_is_queued() -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        with pytest.raises(WireError) as caught:
            channel.send_all([b"{}", b" " * (MAX_FRAME + 1)])
        assert caught.value.code == "FRAME_TOO_LARGE"
        channel.send(b'{"type":"x"}')
        assert await line.read() == {"type": "x"}
        channel.close()
        await channel.wait_closed()

    run(scenario)


@pytest.mark.parametrize(
    ("data", "code"),
    [(struct.pack(">I", MAX_FRAME + 1), "FRAME_TOO_LARGE"), (struct.pack(">I", 0), "FRAME_EMPTY")],
)
def test_a_broken_stream_ends_the_channel_with_its_code(data: bytes, code: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        line.write_bytes(data)
        assert await log.code() == code
        await channel.wait_closed()
        assert not channel.open
        with pytest.raises(WireError) as caught:
            channel.send(b"{}")
        assert caught.value.code == "CLOSED"

    run(scenario)


def test_the_end_is_told_once_when_the_broker_closes() -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        line.close()
        assert await log.code() is None
        await channel.wait_closed()
        channel.close()
        channel.abort("LATE")

    run(scenario)


def test_nothing_is_handed_on_after_close() -> None:
    async def scenario(broker: FakeBroker) -> None:
        seen: list[bytes] = []

        def take(payload: bytes) -> None:
            seen.append(payload)
            channel.close()

        channel = await FrameChannel.connect(broker.path, take, lambda code: None)
        line = await broker.accept()
        line.write_bytes(framed(b"1") + framed(b"2"))
        await channel.wait_closed()
        assert seen == [b"1"]

    run(scenario)


def test_drain_waits_for_the_reader() -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        while channel.writable:
            channel.send(b'"' + b"x" * HIGH_WATER + b'"')
            sent += 1
        waiting = asyncio.ensure_future(channel.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        line.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(sent):
            await line.read()
        async with asyncio.timeout(HANG):
            await waiting
        assert channel.writable
        channel.close()
        await channel.wait_closed()

    run(scenario)


def test_drain_fails_when_the_connection_ends() -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        channel = await log.connect(broker)
        line = await broker.accept()
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while channel.writable:
            channel.send(b"x" * HIGH_WATER)
        waiting = asyncio.ensure_future(channel.drain())
        await asyncio.sleep(0)
        line.abort()
        with pytest.raises(WireError) as caught:
            async with asyncio.timeout(HANG):
                await waiting
        assert caught.value.code == "CLOSED"
        await channel.wait_closed()

    run(scenario)


def test_another_users_listener_gets_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: FakeBroker) -> None:
        log = Log()
        theirs = PeerCredentials(1, os.geteuid() + 1, 0)
        monkeypatch.setattr(channel_module, "peer_credentials", lambda sock: theirs)
        with pytest.raises(WireError) as caught:
            await log.connect(broker)
        assert caught.value.code == "PEER_FOREIGN"
        assert await (await broker.accept()).at_end()

    run(scenario)


def test_the_listener_is_known_by_the_kernel() -> None:
    async def scenario(broker: FakeBroker) -> None:
        channel = await Log().connect(broker)
        assert channel.peer == PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
        channel.close()
        await channel.wait_closed()

    run(scenario)


def test_a_full_backlog_is_waited_for() -> None:
    """connect(2) answers EAGAIN there, which is no connection in progress."""

    async def scenario(broker: FakeBroker) -> None:
        path = broker.path.with_name("full")
        fillers: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(0)
            while True:
                filler = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                filler.setblocking(False)
                fillers.append(filler)
                if filler.connect_ex(str(path)):
                    break
            connecting = asyncio.ensure_future(FrameChannel.connect(path, lambda payload: None, lambda code: None))
            await asyncio.sleep(0)
            assert not connecting.done()
            listener.accept()[0].close()
            async with asyncio.timeout(HANG):
                channel = await connecting
            assert channel.peer.pid == os.getpid()
            channel.close()
            await channel.wait_closed()
            for filler in fillers:
                filler.close()

    run(scenario)


def test_nobody_listens() -> None:
    async def scenario(broker: FakeBroker) -> None:
        with pytest.raises(FileNotFoundError):
            await FrameChannel.connect(broker.path.with_name("none"), lambda payload: None, lambda code: None)

    run(scenario)
