# SPDX-License-Identifier: Apache-2.0
"""Who is on the other end of a Unix socket, as the kernel recorded it at `connect(2)` (unix(7), pidfd_open(2))."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

from agent_intercom.wire.errors import WireError

_UCRED: Final = struct.Struct("iII")
_NO_ID: Final = 0xFFFFFFFF
# Linux 6.5; the socket module does not name it.
_SO_PEERPIDFD: Final = 77


class PeerCredentials(NamedTuple):
    """`struct ucred` of the process that connected: numbers in this process's PID and user namespaces.

    `pid` is 0 where the peer has no number in this PID namespace; `uid` is the overflow id (65534) where the user has
    none in this user namespace.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Read SO_PEERCRED of a connected Unix socket.

    Raises WireError `PEER_UNREADABLE` where the kernel does not tell, which a server must treat as a refusal.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError as error:
        raise WireError("PEER_UNREADABLE", "the peer's credentials cannot be read", "SO_PEERCRED") from error
    if len(raw) != _UCRED.size:
        raise WireError("PEER_UNREADABLE", "the peer's credentials have an unexpected size", "SO_PEERCRED")
    credentials = PeerCredentials(*_UCRED.unpack(raw))
    # The kernel answers for a socket without a Unix peer too, with ids of -1.
    if credentials.uid == _NO_ID:
        raise WireError("PEER_UNREADABLE", "the socket has no peer with credentials", "SO_PEERCRED")
    return credentials


def peer_pidfd(sock: socket.socket) -> int | None:
    """Open a descriptor for the process that connected; it becomes readable when that process ends.

    The caller owns and closes it. None where the kernel is older than 6.5, the process is gone already, or the call
    fails for any other reason: death notice is an extra and must never cost a connection.
    """
    try:
        descriptor = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None
    return descriptor if descriptor >= 0 else None
