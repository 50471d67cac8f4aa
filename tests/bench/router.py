# SPDX-License-Identifier: Apache-2.0
"""The calibration row: asyncio and msgspec with no rules at all.

It does what `relay.c` does, in the plainest good Python: one `BufferedProtocol` per connection, typed frames, the body
carried as raw bytes. What a broker costs beyond this is what its rules cost. Run as `router.py SOCKET`.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec


class Client(msgspec.Struct, tag_field="type"):
    pass


class Register(Client, tag="register"):
    session: dict[str, object]
    session_id: str = msgspec.field(name="sessionId")


class Send(Client, tag="send"):
    to: str
    message: msgspec.Raw


class Received(Client, tag="message_received"):
    delivery_id: str = msgspec.field(name="deliveryId")


class Listing(Client, tag="list"):
    request_id: str = msgspec.field(name="requestId")


class Health(Client, tag="health"):
    request_id: str = msgspec.field(name="requestId")


class MessageId(msgspec.Struct):
    id: str


decode = msgspec.json.Decoder(Register | Send | Received | Listing | Health).decode
decode_id = msgspec.json.Decoder(MessageId).decode
encode = msgspec.json.encode


class Connection(asyncio.BufferedProtocol):
    """One client: frames in through one buffer that is reused, frames out as they arise."""

    sessions: dict[str, Connection] = {}
    pending: dict[str, tuple[Connection, str]] = {}
    delivery = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = bytearray(65536)
        self.filled = 0
        self.info: dict[str, object] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        self.sessions.pop(str(self.info.get("id")), None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        end = self.filled + nbytes
        start = 0
        with memoryview(self.buffer) as view:
            while end - start >= 4:
                stop = start + 4 + int.from_bytes(view[start : start + 4], "big")
                if stop > end:
                    break
                self.dispatch(decode(view[start + 4 : stop]))
                start = stop
        self.buffer[: end - start] = self.buffer[start:end]
        self.filled = end - start

    def write(self, frame: dict[str, object]) -> None:
        payload = encode(frame)
        self.transport.write(len(payload).to_bytes(4, "big") + payload)

    def dispatch(self, frame: Client) -> None:
        match frame:
            case Send(to, message):
                Connection.delivery += 1
                delivery = f"{self.delivery:036x}"
                message_id = decode_id(message).id
                self.pending[delivery] = (self, message_id)
                self.write({"type": "delivery_accepted", "messageId": message_id, "deliveryId": delivery})
                self.sessions[to].write(
                    {"type": "message", "deliveryId": delivery, "from": self.info, "message": message}
                )
            case Received(delivery):
                sender, message_id = self.pending.pop(delivery)
                sender.write({"type": "delivered", "messageId": message_id, "deliveryId": delivery})
            case Register(session, session_id):
                self.info = {"id": session_id, **session, "trustedLocal": True, "origin": "local"}
                self.sessions[session_id] = self
                self.write({"type": "registered", "sessionId": session_id, "protocol": "pi-intercom", "version": 4})
            case Listing(request_id):
                self.write(
                    {"type": "sessions", "requestId": request_id, "sessions": [s.info for s in self.sessions.values()]}
                )
            case Health(request_id):
                self.write({"type": "health_ok", "requestId": request_id})


async def main() -> None:
    await asyncio.get_running_loop().create_unix_server(Connection, sys.argv[1], backlog=512)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
