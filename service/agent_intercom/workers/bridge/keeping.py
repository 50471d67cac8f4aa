# SPDX-License-Identifier: Apache-2.0
"""The file with the memory of a bridge, and which faults of a disk pass: then it stands still, and tries again."""

from __future__ import annotations

import errno
import os
from os import path
from typing import Final

from agent_intercom.host import privatefiles
from agent_intercom.workers.bridge import memory
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""What a person, or time, mends while the bridge waits: a full disk, a device, a file system that is read-only."""


class Standstill(Exception):
    """Something cannot be written just now, and may be later; its text tells what, and why."""


def read(file: str, role: str, generation: int) -> memory.Memory:
    """What a bridge of this role and generation knew. Raises WorkerError where that is damaged, or OSError."""
    try:
        return memory.decode(privatefiles.read(file, memory.MAX_BYTES), role, generation)
    except FileNotFoundError:
        return memory.Memory(role, generation)
    except ValueError as error:
        text = "the memory of this bridge is damaged: have the role restarted (`orchestrate restart`)"
        raise WorkerError(Code.STORE, text, path.basename(file)) from error


def write(file: str, known: memory.Memory) -> None:
    """Bring what is known to the disk. Raises Standstill, or WorkerError where waiting helps nothing."""
    try:
        privatefiles.replace(file, memory.encode(known))
    except OSError as error:
        check(error, "the memory of this bridge")
        # What cannot be kept must not be acknowledged, and there is nobody else to tell.
        text = f"the memory of this bridge cannot be written: {os.strerror(error.errno or 0)}"
        raise WorkerError(Code.STORE, text, path.basename(file)) from error


def check(error: OSError, what: str) -> None:
    """Raise Standstill about `what` if that is a fault which passes."""
    if error.errno in _PASSING:
        raise Standstill(f"{what} cannot be written: {os.strerror(error.errno)}") from error
