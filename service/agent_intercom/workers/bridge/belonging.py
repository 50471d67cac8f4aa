# SPDX-License-Identifier: Apache-2.0
"""Which processes are a bridge's own: those of its control group, where the worker service has put it, and below.

A worker has a scope unit of its own, which nothing in it leaves but by systemd's doing. The user is the same for all.
"""

from __future__ import annotations

import os
import socket
from os import path

from agent_intercom.host import peers, processes
from agent_intercom.wire.peer import peer_credentials


def own() -> str | None:
    """The control group of this process; None where there is none of version 2."""
    return processes.cgroup_of(os.getpid())


def within(group: str | None, other: str | None) -> bool:
    """Whether a control group is `other`, or below it. One that cannot be told is nowhere."""
    if group is None or other is None or ".." in group.split("/"):
        return False
    return group == other or group.startswith(f"{other.rstrip('/')}/")


def connected(connection: socket.socket) -> bool:
    """Whether who has connected is of the bridge's own.

    Raises WireError where the kernel does not tell who that is, and OSError where there is no descriptor to find out.
    """
    return within(peers.cgroup_of(connection, peer_credentials(connection).pid), own())


def all_of_the_run(group: str | None, run_socket: str) -> str | None:
    """The control group of all workers of the run at this address, of which `group` is one; else `group` itself.

    A bridge whose worker was started anew is in another scope unit of the same slice.
    """
    unit = path.basename(run_socket).removesuffix(".sock")
    above = path.dirname(group) if group is not None else ""
    return above if path.basename(above) == f"orchestrate-{unit}.slice" else group
