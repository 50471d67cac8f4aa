# SPDX-License-Identifier: Apache-2.0
"""What a service manager handed over: listening sockets, and descriptors that an earlier process stored.

The protocol is sd_listen_fds(3): `LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`, descriptors from 3 on. Listeners and
stored descriptors arrive in one list; the kernel, not the name, tells which is which.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import MutableMapping
from typing import NamedTuple

from agent_intercom.host.errors import HostError

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
# What the manager says of a descriptor that was passed, or stored, without a name.
_NAMELESS = frozenset({"", "unknown", "stored"})


class Inherited(NamedTuple):
    """Descriptors of this process by their origin; all are close-on-exec and non-blocking.

    `listeners` pairs the `FileDescriptorName=` of the socket unit with its socket, in the manager's order (several
    sockets of one unit share a name). `stored` maps `FDNAME=` to the descriptor. `unknown` has what can be neither:
    descriptors without a name, and second descriptors of a name. Who gets it should remove it from the store and
    close it.
    """

    listeners: list[tuple[str, socket.socket]]
    stored: dict[str, int]
    unknown: list[tuple[str, int]]


def inherited(environ: MutableMapping[str, str] = os.environ) -> Inherited:
    """Take over what was inherited and remove the variables, so that no child mistakes them for its own.

    Nothing inherited gives three empty collections. `environ` is the process's own environment: the library reads that
    and nothing else. Raises `HostError` `MODULE_MISSING` when there is something to take over and systemd-python
    is not installed, `ACTIVATION_INVALID` when the variables contradict themselves.
    """
    found = Inherited([], {}, [])
    if "LISTEN_FDS" in environ:
        for fd, name in _passed().items():
            _classify(found, fd, name)
    for variable in _VARIABLES:
        environ.pop(variable, None)
    return found


def _passed() -> dict[int, str]:
    try:
        from systemd.daemon import listen_fds_with_names
    except ImportError as error:
        raise HostError(
            "MODULE_MISSING",
            "sockets were inherited from systemd, but the Python module systemd is missing: install python3-systemd"
            " (Debian, Fedora), python-systemd (Arch) or systemd-python (PyPI)",
            "systemd",
        ) from error
    try:
        passed: dict[int, str] = listen_fds_with_names(unset_environment=True)
    except OSError as error:
        raise HostError("ACTIVATION_INVALID", "LISTEN_FDS and its companions are malformed", "LISTEN_FDS") from error
    return passed


def _classify(found: Inherited, fd: int, name: str) -> None:
    try:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError as error:
        raise HostError(
            "ACTIVATION_INVALID", "LISTEN_FDS counts a descriptor that is not open", "LISTEN_FDS"
        ) from error
    if is_socket:
        candidate = socket.socket(fileno=fd)
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.listeners.append((name, candidate))
            return
        candidate.detach()
    if name in _NAMELESS or name in found.stored:
        found.unknown.append((name, fd))
    else:
        found.stored[name] = fd
