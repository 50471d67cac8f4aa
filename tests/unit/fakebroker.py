# SPDX-License-Identifier: Apache-2.0
"""A broker whose every frame the test writes by hand, over a real socket."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

Frame: TypeAlias = dict[str, Any]

HANG = 20.0
"""Seconds after which a wait is a fault."""


class Line:
    """One connection, from the broker's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def read(self) -> Frame:
        """The next frame of the client."""
        async with asyncio.timeout(HANG):
            (length,) = struct.unpack(">I", await self._reader.readexactly(4))
            frame: Frame = json.loads(await self._reader.readexactly(length))
            return frame

    async def expect(self, kind: str) -> Frame:
        frame = await self.read()
        assert frame["type"] == kind, frame
        return frame

    async def at_end(self) -> bool:
        """Whether the client closed without another byte."""
        async with asyncio.timeout(HANG):
            try:
                return await self._reader.read(1) == b""
            except ConnectionError:
                return True

    def write(self, *frames: Frame) -> None:
        for frame in frames:
            payload = json.dumps(frame).encode()
            self.writer.write(struct.pack(">I", len(payload)) + payload)

    def write_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    async def register(self) -> Frame:
        """Take the registration and accept it."""
        frame = await self.expect("register")
        self.write(registered(frame.get("sessionId", "S")))
        return frame

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


class FakeBroker:
    """Listens on `path`; connections come out of `accept` in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: asyncio.Queue[Line] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._open: list[Line] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)

    async def close(self) -> None:
        await self.stop()
        while not self._lines.empty():
            self._lines.get_nowait()
        for line in self._open:
            line.abort()
        for line in self._open:
            with suppress(ConnectionError):
                await line.writer.wait_closed()

    async def accept(self) -> Line:
        async with asyncio.timeout(HANG):
            return await self._lines.get()

    def idle(self) -> bool:
        """Whether no further connection waits."""
        return self._lines.empty()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        self._open.append(line)
        self._lines.put_nowait(line)


def registered(session_id: str) -> Frame:
    return {"type": "registered", "sessionId": session_id, "protocol": "pi-intercom", "version": 4}


def info(session_id: str, **claims: Any) -> Frame:
    """A SessionInfo."""
    return {
        "id": session_id,
        "cwd": "/",
        "model": "m",
        "pid": 1,
        "startedAt": 1,
        "lastActivity": 1,
        "trustedLocal": True,
        "origin": "local",
        **claims,
    }


def incoming(delivery_id: str, sender: str, message_id: str, text: str = "hi", **more: Any) -> Frame:
    """A `message` frame."""
    message = {"id": message_id, "timestamp": 1, "content": {"text": text}, **more}
    return {"type": "message", "deliveryId": delivery_id, "from": info(sender), "message": message}


def accepted(message_id: str, delivery_id: str) -> Frame:
    return {"type": "delivery_accepted", "messageId": message_id, "deliveryId": delivery_id}


def delivered(message_id: str, delivery_id: str) -> Frame:
    return {"type": "delivered", "messageId": message_id, "deliveryId": delivery_id}


def failed(message_id: str, code: str, *, accepted: bool = False) -> Frame:
    return {"type": "delivery_failed", "messageId": message_id, "accepted": accepted, "code": code, "reason": "why"}


@asynccontextmanager
async def fake_broker() -> AsyncIterator[FakeBroker]:
    """A listening broker in a directory of its own with a short name."""
    directory = Path(tempfile.mkdtemp(prefix="fb", dir="/tmp"))
    broker = FakeBroker(directory / "s")
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
        shutil.rmtree(directory, ignore_errors=True)


def run(scenario: Callable[[FakeBroker], Coroutine[Any, Any, None]]) -> None:
    """Run `scenario` with a broker on a loop of its own."""

    async def main() -> None:
        async with fake_broker() as broker:
            await scenario(broker)

    asyncio.run(main())
