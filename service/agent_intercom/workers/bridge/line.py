# SPDX-License-Identifier: Apache-2.0
"""Sockets of the bridge: none of them makes it wait."""

from __future__ import annotations

import contextlib
import os
import socket
from os import path
from typing import Any, Final

import msgspec

from agent_intercom.orchestration import client_frames
from agent_intercom.orchestration.contract import MAX_FRAME
from agent_intercom.wire import codec, framing
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.peer import peer_credentials
from agent_intercom.workers import contract
from agent_intercom.workers.bridge import belonging, settings
from agent_intercom.workers.bridge.events import Received

MAX_LINE: Final = 262_144
"""Bytes of a request at the report socket."""

MAX_ADDRESS: Final = 100
"""Bytes of an address that every program can connect to."""

_PIECE: Final = 65_536


class _Deferred(msgspec.Struct):
    deliver_as: str | None = None


_deferred = msgspec.json.Decoder(_Deferred)


class Line:
    """A connection to a Unix socket, with what could not be written yet.

    Raises OSError where there is none or it ends, WireError `PEER_FOREIGN` where another user listens.
    """

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._unsent = bytearray()
        try:
            self.socket.connect(address)
            if peer_credentials(self.socket).uid != os.geteuid():
                raise WireError("PEER_FOREIGN", "another user listens", "socket")
        except BaseException:
            self.socket.close()
            raise

    @property
    def unsent(self) -> bool:
        """Whether something waits until the socket can be written."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Write `data`, or keep what the socket does not take."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> bytes | None:
        """What has come; empty at the end, None where nothing is there."""
        try:
            return self.socket.recv(_PIECE)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self.socket.close()


class ServiceLine(Line):
    """The connection to the worker service: what is done here is told, and nothing waits for the answers."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._decoder = framing.FrameDecoder(contract.MAX_FRAME)
        self._asked = ""

    def notify(self, state: str) -> None:
        """Tell what is done here."""
        self._asked = os.urandom(16).hex()
        request = {"version": contract.PROTOCOL_VERSION, "id": self._asked, "action": "notify"}
        caller = {"scope": None, "session": None, "override": False}
        payload = codec.encode({**request, "caller": caller, "params": {"state": state}})
        self.send(framing.pack(payload, contract.MAX_FRAME))

    def answered(self) -> bool:
        """Whether the service has answered what it was told last, of what has come.

        An answer to no request, with which somebody is turned away, is none. Raises EOFError at the end, and WireError
        for what is no answer.
        """
        data = self.receive()
        if data is None:
            return False
        if not data:
            raise EOFError
        self._decoder.feed(data)
        answered = False
        while (payload := self._decoder.next()) is not None:
            answer = codec.decode(payload)
            answered |= isinstance(answer, dict) and answer.get("id") == self._asked
        return answered


class BrokerLine(Line):
    """The connection to the run's broker."""

    def __init__(self, address: str, role: str, token: str) -> None:
        super().__init__(address)
        self._envelope = {"role": role, "token": token}
        self._decoder = framing.FrameDecoder(MAX_FRAME)

    def ask(self, identity: str, kind: str, keys: dict[str, Any]) -> None:
        """Send a request. Raises Refusal `invalid_protocol` for one that is longer than a frame may be."""
        payload = client_frames.encode(kind, **self._envelope, id=identity, **keys)
        self.send(framing.pack(payload, MAX_FRAME))

    def frames(self) -> list[Received]:
        """What has come, without what no worker has to know.

        Raises EOFError at the end, Refusal or WireError for what is no frame of the broker's.
        """
        data = self.receive()
        if data is None:
            return []
        if not data:
            raise EOFError
        self._decoder.feed(data)
        found = []
        while (payload := self._decoder.next()) is not None:
            frame = client_frames.worker_bound(payload)
            if frame is not None:
                found.append(Received(frame, _deliver_as(payload)))
        return found


class Client:
    """Somebody at the report socket: requests are lines of JSON, and so are the answers.

    `ours`: one of the bridge's own processes, and not of another worker's.
    """

    def __init__(self, connection: socket.socket, ours: bool = True) -> None:
        self.socket = connection
        self.ours = ours
        self._received = bytearray()

    def requests(self) -> list[dict[str, Any]]:
        """The requests that have come. Raises EOFError at the end, ValueError for what is none."""
        try:
            data = self.socket.recv(_PIECE)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._received += data
        found = []
        while (end := self._received.find(b"\n")) >= 0:
            request = codec.decode(self._received[:end])
            del self._received[: end + 1]
            if not isinstance(request, dict):
                raise ValueError("no object")
            found.append(request)
        if len(self._received) > MAX_LINE:
            raise ValueError("too long")
        return found

    def answer(self, answer: dict[str, Any]) -> None:
        """Send an answer; who does not read it does without, and is left."""
        self.socket.send(codec.encode(answer) + b"\n")

    def close(self) -> None:
        self.socket.close()


def address_of(state: str, scratch: str, generation: int) -> str:
    """Where the report socket is: in the state directory; in the scratch directory where only its path is short."""
    name = f"bridge-g{generation}.sock"
    places = [path.join(state, name), path.join(scratch, name)]
    return next((place for place in places if len(os.fsencode(place)) <= MAX_ADDRESS), places[0])


def listen(address: str) -> socket.socket:
    """Listen at `address` (0600), in the place of whoever did before. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        descriptor, directory = settings.directory_reference(path.dirname(address))
        try:
            listener.bind(path.join(directory, path.basename(address)))
        finally:
            os.close(descriptor)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def accepted(listener: socket.socket) -> Client | None:
    """The next one who comes; None for nobody, somebody of another user, or one that cannot be told."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    try:
        foreign = peer_credentials(connection).uid != os.geteuid()
        ours = not foreign and belonging.connected(connection)
    except (WireError, OSError):
        foreign, ours = True, False
    if foreign:
        connection.close()
        return None
    connection.setblocking(False)
    return Client(connection, ours)


def _deliver_as(payload: bytes) -> str | None:
    try:
        told = _deferred.decode(payload).deliver_as
    except msgspec.DecodeError:
        return None
    return told if told in {"steer", "followUp"} else None


class Waiting:
    """Tickets: numbers for those who wait for an answer."""

    def __init__(self) -> None:
        self._clients: dict[int, Client] = {}
        self._next = 0

    def issue(self, client: Client) -> int:
        self._next += 1
        self._clients[self._next] = client
        return self._next

    def redeem(self, ticket: int) -> Client | None:
        """Who waited with this ticket."""
        return self._clients.pop(ticket, None)

    def leave(self, client: Client) -> list[int]:
        """The tickets of one who goes."""
        found = [ticket for ticket, holder in self._clients.items() if holder is client]
        for ticket in found:
            del self._clients[ticket]
        return found
