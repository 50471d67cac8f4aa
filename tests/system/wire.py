# SPDX-License-Identifier: Apache-2.0
"""Clients for the system tests: connections that belong to a user of the testbed and are driven by the test itself.

The kernel notes who connected, not who holds the descriptor later. So a small process inside the testbed, the `Door`,
connects as alice and hands each connection out; a test then reads and writes it like any socket of its own. It knows
the wire and shares no code with the broker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Frame: TypeAlias = dict[str, Any]

HANG = 30.0
"""Seconds after which a wait is a fault. No test expects anything to take this long."""

UID = 4000
LOCAL = (f"/run/user/{UID}/agent-intercom/intercom.sock", "/home/alice/.pi/agent/intercom/broker.sock")
REMOTE = (f"/run/user/{UID}/agent-intercom/gateway.sock", "/home/alice/.pi/agent/intercom/remote-gateway.sock")

POLICY_HASH = "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0"
PRESENCE = frozenset({"session_joined", "session_left", "presence_update"})

_DOOR = """
import socket
line = socket.socket(fileno=0)
while path := line.recv(4096):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            line.send(b"%d" % error.errno)
        else:
            socket.send_fds(line, [b"0"], [sock.fileno()])
"""

_numbers = itertools.count(1)


def fresh(prefix: str) -> str:
    """An id that nothing else uses."""
    return f"{prefix}-{next(_numbers)}-{os.urandom(4).hex()}"


def until(condition: Callable[[], Any], what: str, seconds: float = HANG) -> Any:
    """Poll for what nothing tells of; the first true answer."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.02)
    return found


def health(request_id: str) -> Frame:
    return {"type": "health", "requestId": request_id}


def health_ok(request_id: str, endpoint: str = "local") -> Frame:
    """The only right answer (contract section 2.4)."""
    policy = {"feature": "remote-access-v1", "policySemanticsVersion": 2, "policySemanticsHash": POLICY_HASH}
    identity = {"protocol": "pi-intercom", "version": 4}
    return {"type": "health_ok", "requestId": request_id, **identity, "endpoint": endpoint, "remoteAccess": policy}


def register(session_id: str, scope: str | None = None, **claims: Any) -> Frame:
    session = {"cwd": "/tmp", "model": "m", "pid": 10, "startedAt": 1, "lastActivity": 1, **claims}
    frame: Frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "session": session}
    return frame | {"sessionId": session_id} | ({} if scope is None else {"scopeId": scope})


def send(to: str, message_id: str, text: str = "hi", **members: Any) -> Frame:
    message = {"id": message_id, "timestamp": 1, "content": {"text": text}, **members}
    return {"type": "send", "to": to, "message": message}


def received(delivery_id: str) -> Frame:
    return {"type": "message_received", "deliveryId": delivery_id}


def packed(frame: Frame) -> bytes:
    payload = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode()
    return struct.pack(">I", len(payload)) + payload


class Peer:
    """One connection. `id` is the session's; `ended` is set when the broker closed it.

    Frames about the presence of others are passed over: every session of a scope gets them at any time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(HANG)
        self.id = ""
        self.ended = False
        self._buffer = bytearray()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    # Writing.

    def send(self, *frames: Frame) -> None:
        self.sock.sendall(b"".join(packed(frame) for frame in frames))

    def try_send(self, *frames: Frame) -> None:
        """The same to a connection that the broker may have closed already."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(*frames)

    def send_bytes(self, data: bytes) -> None:
        self.sock.sendall(data)

    # Reading.

    def _next(self) -> Frame | None:
        """A complete frame of what was read."""
        buffer = self._buffer
        while len(buffer) >= 4:
            (length,) = struct.unpack_from(">I", buffer)
            assert 0 < length <= 1_048_576, f"the broker sent a frame of {length} bytes"
            if len(buffer) < 4 + length:
                return None
            frame: Frame = json.loads(buffer[4 : 4 + length])
            del buffer[: 4 + length]
            if frame["type"] not in PRESENCE:
                return frame
        return None

    def _read(self) -> bool:
        """Read once; False at the end."""
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        self.ended = not data
        return bool(data)

    def recv(self) -> Frame | None:
        """The next frame; None at the end of the stream."""
        while (frame := self._next()) is None:
            if not self._read():
                assert not self._buffer, "the stream ended inside a frame"
                return None
        return frame

    def arrived(self) -> Iterator[Frame]:
        """Read once, which waits if nothing is there, and give the frames that are complete."""
        self._read()
        while (frame := self._next()) is not None:
            yield frame

    def expect(self, frame: Frame) -> None:
        got = self.recv()
        assert got == frame, got

    def expect_end(self) -> None:
        got = self.recv()
        assert got is None, got

    def hung_up(self) -> bool:
        """Whether the broker has closed this connection."""
        if not self.ended:
            waiting = select.poll()
            waiting.register(self.sock, select.POLLRDHUP)
            self.ended = bool(waiting.poll(0))
        return self.ended

    # What clients do.

    def health(self, endpoint: str = "local") -> None:
        """Probe, and require the only right answer."""
        request_id = fresh("probe")
        self.send(health(request_id))
        self.expect(health_ok(request_id, endpoint))

    def register(self, session_id: str, scope: str | None = None, **claims: Any) -> Peer:
        self.send(register(session_id, scope, **claims))
        self.expect({"type": "registered", "sessionId": session_id, "protocol": "pi-intercom", "version": 4})
        self.id = session_id
        return self

    def list(self) -> list[Frame]:
        request_id = fresh("list")
        self.send({"type": "list", "requestId": request_id})
        answer = self.recv()
        assert answer is not None and answer["type"] == "sessions" and answer["requestId"] == request_id, answer
        sessions: list[Frame] = answer["sessions"]
        return sessions

    def accepted(self, message_id: str) -> str:
        """The next frame accepts the message; its delivery id."""
        frame = self.recv()
        assert frame is not None and frame["type"] == "delivery_accepted", frame
        assert frame["messageId"] == message_id
        delivery: str = frame["deliveryId"]
        return delivery

    def message(self) -> tuple[str, Frame]:
        """The next frame is a message; its delivery id and itself."""
        frame = self.recv()
        assert frame is not None and frame["type"] == "message", frame
        return frame["deliveryId"], frame["message"]

    def deliver(self, to: Peer, message_id: str, text: str = "hi", **members: Any) -> None:
        """Send to a peer of the same test and see it through to `delivered`."""
        self.send(send(to.id, message_id, text, **members))
        delivery = self.accepted(message_id)
        got, message = to.message()
        assert (got, message["id"], message["content"]["text"]) == (delivery, message_id, text)
        to.send(received(delivery))
        self.expect({"type": "delivered", "messageId": message_id, "deliveryId": delivery})


class Door:
    """Connects as a user of the testbed, or as root. What it handed out is closed with it."""

    def __init__(self, bed: Any, user: str | None = "alice") -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[str] = bed.popen(user, bed.python_command(_DOOR), stdin=theirs)
        self._line.settimeout(HANG)
        self._open: list[Peer] = []

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._open:
            peer.close()
        self._line.close()

    def fall_shut(self) -> None:
        """End the process that connected; what it handed out stays open."""
        self._line.shutdown(socket.SHUT_WR)
        self._process.wait(HANG)

    def connect(self, path: str = LOCAL[0]) -> Peer:
        """A connection, closed with the door. Raises OSError as connect(2) does."""
        self._line.send(path.encode())
        answer, fds, _, _ = socket.recv_fds(self._line, 16, 1)
        if not fds:
            assert answer, "the door fell shut"
            raise OSError(int(answer), os.strerror(int(answer)))
        peer = Peer(socket.socket(fileno=fds[0]))
        self._open.append(peer)
        return peer

    def join(self, session_id: str | None = None, path: str = LOCAL[0], **claims: Any) -> Peer:
        """A registered connection."""
        return self.connect(path).register(session_id or fresh("s"), **claims)

    def probe(self, path: str = LOCAL[0], endpoint: str = "local") -> None:
        """What a client does before anything else."""
        peer = self.connect(path)
        peer.health(endpoint)
        self.hang_up(peer)

    def hang_up(self, peer: Peer) -> None:
        peer.close()
        self._open.remove(peer)


def configure(bed: Any, **settings: int) -> None:
    """Write alice's intercom.toml; the next broker reads it."""
    directory = bed.root / "home/alice/.config/agent-intercom"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "intercom.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))


def main_pid(bed: Any, user: str = "alice") -> int:
    """The broker's process as the testbed numbers it; 0 without one."""
    return int(bed.show(user, "intercom.service", "MainPID"))


def states(bed: Any, user: str = "alice") -> Mapping[str, str]:
    """ActiveState of the three units."""
    units = ("intercom.socket", "intercom-gateway.socket", "intercom.service")
    shown = bed.as_user(user, ["systemctl", "--user", "show", "-p", "Id", "-p", "ActiveState", *units]).stdout
    pairs = (dict(line.split("=", 1) for line in block.splitlines()) for block in shown.strip().split("\n\n"))
    return {pair["Id"]: pair["ActiveState"] for pair in pairs}


def listening(bed: Any, user: str = "alice") -> bool:
    found = states(bed, user)
    return found["intercom.socket"] == found["intercom-gateway.socket"] == "active"


def without_mounts(bed: Any, user: str = "alice") -> None:
    """Take the mount hardening away: a drop-in of the user's with the same name replaces the installed one."""
    bed.drop_in(user, "intercom.service", "", "50-mounts.conf")


def events(bed: Any, event: str, user: str = "alice") -> list[dict[str, Any]]:
    """The journal's entries of one event since the test began.

    They are picked here: systemd 252's journalctl passes over the first entry that a match lets through when it is
    also given a cursor.
    """
    return [entry for entry in bed.journal(user) if entry.get("INTERCOM_EVENT") == event]


@contextlib.contextmanager
def changed_module(bed: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Replace a piece of an installed module, for brokers that start inside the `with`."""
    installed = f"/usr/lib/agent-intercom/site/{name}"
    compiled = ["python3", "-m", "compileall", "-qf", "--invalidation-mode=unchecked-hash", installed]
    path = bed.root / installed.lstrip("/")
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    bed.run(compiled)
    try:
        yield
    finally:
        path.write_text(source)
        bed.run(compiled)
