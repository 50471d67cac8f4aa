# SPDX-License-Identifier: Apache-2.0
"""Asking the `watch` that holds the seat to carry out a request: one line of JSON there, one back.

Both ends check by SO_PEERCRED that the other is the same user. Blocking code without an event loop, so that a command
that finds a seat starts faster than one that has to register.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final

from agent_intercom.cli.exits import CommandError, JsonObject
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.peer import peer_credentials

MAX_LINE: Final = 8 * 1024 * 1024
CONNECT_TIMEOUT: Final = 2.0
GRACE: Final = 30.0
"""Seconds beyond an operation's own timeout before the asking side gives up."""


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user; False where the kernel does not tell."""
    try:
        return peer_credentials(sock).uid == os.geteuid()
    except WireError:
        return False


def ask_seat(path: str, request: JsonObject, timeout: float = 0.0) -> tuple[int, JsonObject] | None:
    """Exit code and result of `request`, or None where no watch holds the seat.

    `timeout` is what the operation itself may take. Raises CommandError `PEER_FOREIGN`, `TIMEOUT` or `CONNECTION_LOST`;
    then the watch may have carried the request out.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_TIMEOUT)
        try:
            sock.connect(path)
        except OSError:
            return None
        if not same_user(sock):
            raise CommandError("PEER_FOREIGN", "the seat's socket belongs to another user")
        sock.settimeout(timeout + GRACE)
        try:
            sock.sendall(json.dumps(request).encode() + b"\n")
            line = _read(sock)
        except TimeoutError as error:
            raise CommandError("TIMEOUT", "the watch that holds the seat did not answer in time") from error
        except OSError as error:
            raise CommandError("CONNECTION_LOST", "the watch that holds the seat ended meanwhile") from error
    return _outcome(line)


def _read(sock: socket.socket) -> bytes:
    """The answer. Until it is there this end stays open: closing it, as an interrupted command does, calls it off."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_LINE and (part := sock.recv(65_536)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _outcome(line: bytes) -> tuple[int, JsonObject]:
    try:
        answer: Any = json.loads(line)
        exit_code, result = answer["exit"], answer["result"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError("CONNECTION_LOST", "the watch that holds the seat ended meanwhile") from error
    if not isinstance(exit_code, int) or not isinstance(result, dict):
        raise CommandError("CONNECTION_LOST", "the watch that holds the seat gave no usable answer")
    return exit_code, result
