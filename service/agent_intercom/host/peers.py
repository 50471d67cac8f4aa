# SPDX-License-Identifier: Apache-2.0
"""Where somebody who has connected to a Unix socket is, as the kernel has it (unix(7), cgroups(7))."""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from agent_intercom.host import processes
from agent_intercom.wire.peer import peer_pidfd

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What a call ends with where this process (EMFILE), or the machine, may have no more descriptors."""


def cgroup_of(connection: socket.socket, pid: int) -> str | None:
    """The control group of whoever has connected, `pid` by its credentials; None where that process has ended.

    Raises OSError with one of `NO_DESCRIPTOR` where nobody can tell for want of one.
    """
    pidfd = peer_pidfd(connection)
    try:
        group = processes.read_cgroup(pid) if pid > 0 else None
        # The number may be another process's by now.
        gone = pidfd is not None and bool(select.select([pidfd], [], [], 0)[0])
        return None if gone else group
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    finally:
        if pidfd is not None:
            os.close(pidfd)
