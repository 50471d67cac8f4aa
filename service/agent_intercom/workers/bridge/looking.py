# SPDX-License-Identifier: Apache-2.0
"""Which generation a run expects of a role: what a bridge asks when its broker turns it away without a word.

The database is read by a process of its own, which is gone with all that this needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from os import path


def begin(socket_path: str, role: str) -> tuple[int, int]:
    """Start to look; the process, and a descriptor that gives the generation in digits, or nothing, and then ends."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            os.dup2(writing, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            os.write(3, str(generation(socket_path, role) or "").encode())
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def end(pid: int, reading: int) -> int | None:
    """What was found. To be called when the descriptor can be read; closes it."""
    content = b""
    with open(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return int(content) if content.isdigit() else None


def generation(socket_path: str, role: str) -> int | None:
    """The generation that the run at this address expects of `role`; None where that cannot be read."""
    from agent_intercom.orchestration import contract, reader, runtime
    from agent_intercom.orchestration.errors import Refusal

    unit = path.basename(socket_path).removesuffix(".sock")
    runtime_dir = path.dirname(path.dirname(path.dirname(socket_path)))
    with contextlib.suppress(Refusal):
        place = runtime.read(runtime_dir, unit)
        rows = reader.overview(path.join(place.directory, contract.DATABASE)).roles
        return next((row.generation for row in rows if row.role == role), None)
    return None


def gone(socket_path: str) -> bool:
    """Whether nothing is left of a run: its address, and the place that it has until it is stopped."""
    return not path.lexists(socket_path) and not path.lexists(socket_path.removesuffix(".sock"))
