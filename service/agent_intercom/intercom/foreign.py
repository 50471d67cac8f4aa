# SPDX-License-Identifier: Apache-2.0
"""A broker that is not ours, at an address that should be: is there one, whom does it serve, and asking it to end.

Blocking sockets and the standard library only, since the socket unit runs the probe before it binds. Who listens is
what the kernel says: a client reads from `SO_PEERCRED` the process that called `listen(2)` (unix(7)), which for a
socket unit is the user manager. What `broker.pid` claims is never the ground for a signal.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import time
from typing import Any, Final, NamedTuple

from agent_intercom.intercom.contract import (
    MAX_FRAME,
    POLICY_SEMANTICS_HASH,
    POLICY_SEMANTICS_VERSION,
    PROTOCOL,
    REMOTE_ACCESS_FEATURE,
    VERSION,
)

REMOTE_ACCESS: Final = {
    "feature": REMOTE_ACCESS_FEATURE,
    "policySemanticsVersion": POLICY_SEMANTICS_VERSION,
    "policySemanticsHash": POLICY_SEMANTICS_HASH,
}

PROBE_SECONDS: Final = 1.0
ADDRESS_BYTES: Final = 107
"""What the path of a Unix socket may have (unix(7)), without the terminating zero."""

START_COMMAND: Final = (
    "systemctl --user reset-failed intercom.socket intercom-gateway.socket; "
    "systemctl --user start intercom.socket intercom-gateway.socket"
)
"""What to run once a foreign broker is gone."""

_HEADER = struct.Struct(">I")
_UCRED = struct.Struct("iII")
_TIMEVAL = struct.Struct("@ll")


class OwnershipError(Exception):
    """An address or a file of the intercom belongs to somebody else. `code` is machine-readable; no path in the text.

    `OWNED`, `UNOBTAINABLE` (the owner file); `NOTHING_LISTENS`, `NOT_A_BROKER`, `UNKNOWN_PROCESS`, `STILL_RUNNING`
    (taking over).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Probe(NamedTuple):
    """What was found at an address.

    `state` is `compatible`, `incompatible`, `unreachable` (contract section 1.5) or `absent`: nothing listens there,
    though a dead socket file may. `listening` tells an `unreachable` that accepts connections from one that could not
    be tried. `pid` and `uid` are the listener's, None where unknown. `heard` says what an `unreachable` that listens
    did instead of answering: `closed` (the connection), `other` (said something else), or nothing in time.
    """

    state: str
    listening: bool = False
    pid: int | None = None
    uid: int | None = None
    heard: str = ""


class TakenOver(NamedTuple):
    """A foreign broker that has ended: its process, and what to run now."""

    pid: int
    next_command: str


def probe(address: str, timeout: float = PROBE_SECONDS, endpoint: str = "local") -> Probe:
    """Do the health exchange at the Unix socket `address`, within `timeout` seconds. Never raises."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        found = _connect(sock, address, timeout)
        if not found.listening or found.pid is None:
            return found
        request = f"guard-{os.getpid()}-{time.monotonic_ns()}"
        try:
            _send(sock, {"type": "health", "requestId": request}, deadline)
            answer = _receive(sock, deadline)
        except TimeoutError:
            return found
        except OSError:
            return found._replace(heard="closed")
        except ValueError:
            return found._replace(heard="other")
    if not isinstance(answer, dict) or answer.get("type") != "health_ok" or answer.get("requestId") != request:
        return found._replace(heard="other")
    wanted = {"protocol": PROTOCOL, "version": VERSION, "endpoint": endpoint, "remoteAccess": REMOTE_ACCESS}
    fits = all(answer.get(key) == value for key, value in wanted.items())
    return found._replace(state="compatible" if fits else "incompatible")


def fits(address: str | os.PathLike[str]) -> bool:
    """Whether the path can be a Unix socket's."""
    return len(os.fsencode(address)) <= ADDRESS_BYTES


def is_manager(pid: int | None) -> bool:
    """Whether `pid` is a systemd manager (or PID 1): such a listener is a socket unit, and no process to end."""
    if pid is None:
        return False
    if pid == 1:
        return True
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip() == "systemd"
    except OSError:
        return False


def foreign_sessions(address: str, timeout: float = PROBE_SECONDS) -> list[tuple[str, str]] | None:
    """Id and name of the sessions that the broker at `address` shows to an unscoped client, or None.

    Registers for the moment that it takes. Sessions in a scope are hidden from everybody outside, so the list may be
    too short; None where the broker does not speak this protocol or does not answer in `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    now, pid = int(time.time() * 1000), os.getpid()
    session_id = f"intercom-doctor-{pid}-{time.monotonic_ns()}"
    session = {"name": "intercom-doctor", "cwd": "/", "model": "doctor", "pid": pid, "startedAt": now}
    register = {
        "type": "register",
        "protocol": PROTOCOL,
        "version": VERSION,
        "session": {**session, "lastActivity": now},
        "sessionId": session_id,
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            if not _connect(sock, address, timeout).listening:
                return None
            _send(sock, register, deadline)
            answer = _receive(sock, deadline)
            if not isinstance(answer, dict) or answer.get("type") != "registered":
                return None
            _send(sock, {"type": "list", "requestId": session_id}, deadline)
            while not isinstance(answer, dict) or answer.get("type") != "sessions":
                answer = _receive(sock, deadline)
            _send(sock, {"type": "unregister"}, deadline)
    except (OSError, ValueError):
        return None
    sessions = answer.get("sessions")
    found = [s for s in sessions if isinstance(s, dict)] if isinstance(sessions, list) else []
    return [(str(s.get("id", "")), str(s.get("name", ""))) for s in found if s.get("id") != session_id]


def take_over(address: str, *, timeout: float = 5.0) -> TakenOver:
    """Ask the process that listens at `address` to end (SIGTERM), and wait for that up to `timeout` seconds.

    Raises OwnershipError: `NOTHING_LISTENS`; `NOT_A_BROKER` where the listener is a socket unit, ourselves or another
    user's; `UNKNOWN_PROCESS` where the kernel cannot name it (it forked after listening, or lives in another PID
    namespace); `STILL_RUNNING`.
    """
    found = probe(address)
    if not found.listening:
        raise OwnershipError("NOTHING_LISTENS", "nothing listens there")
    pid = found.pid
    if not pid:
        raise OwnershipError("UNKNOWN_PROCESS", "the kernel does not tell which process listens there")
    if is_manager(pid) or pid == os.getpid():
        raise OwnershipError("NOT_A_BROKER", f"process {pid} is a service manager; this address is a socket unit's")
    if found.uid != os.geteuid():
        raise OwnershipError("NOT_A_BROKER", f"process {pid} belongs to another user")
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError as error:
        text = f"process {pid} began to listen there and is gone; one that inherited the socket goes on"
        raise OwnershipError("UNKNOWN_PROCESS", text) from error
    try:
        # Only a listener that is still attested after the descriptor was opened is the process behind it.
        if probe(address, timeout=0.2).pid == pid:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not _ended(descriptor, timeout):
            text = f"process {pid} was asked to end and has not; end it yourself: kill -KILL {pid}"
            raise OwnershipError("STILL_RUNNING", text)
    except ProcessLookupError:
        pass  # ended by itself meanwhile
    finally:
        os.close(descriptor)
    return TakenOver(pid, START_COMMAND)


def _ended(pidfd: int, timeout: float) -> bool:
    import select  # the probe alone does not need it

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(int(timeout * 1000)))


def _connect(sock: socket.socket, address: str, timeout: float) -> Probe:
    # Blocking with a send timeout: with a Python timeout, connect(2) fails at once where the backlog is full.
    seconds, microseconds = divmod(int(timeout * 1_000_000), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, microseconds))
    try:
        sock.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return Probe("absent")
    except OSError as error:
        return Probe("unreachable", listening=error.errno == errno.EAGAIN)
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Probe("unreachable", True, pid, uid)


def _send(sock: socket.socket, frame: dict[str, Any], deadline: float) -> None:
    import json  # only once somebody listens

    payload = json.dumps(frame, separators=(",", ":")).encode()
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.sendall(_HEADER.pack(len(payload)) + payload)


def _receive(sock: socket.socket, deadline: float) -> Any:
    """One frame. Raises OSError (TimeoutError, EOF) or ValueError."""
    import json

    (length,) = _HEADER.unpack(_read(sock, _HEADER.size, deadline))
    if not 0 < length <= MAX_FRAME:
        raise ValueError("frame length")
    try:
        return json.loads(_read(sock, length, deadline).decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("frame nesting") from error


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(min(size, 65_536))
        if not part:
            raise ConnectionResetError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
