# SPDX-License-Identifier: Apache-2.0
"""Processes as the kernel shows them (proc(5)): whether one is still the same, and where it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Final, NamedTuple

SHOWN: Final = 64
"""How many processes of a worker are shown (managed-workers spec, section 2.13)."""

NAME_LENGTH: Final = 80

_ENDED: Final = frozenset("ZXx")
_STATE: Final = 0
_START_TICKS: Final = 19
"""Where these are in /proc/PID/stat behind the name, which may itself have spaces and brackets."""

_DELETED: Final = " (deleted)"


class Identity(NamedTuple):
    """A process that no later one can be taken for: a number is used again, but not with the same start and boot.

    `start_ticks` counts clock ticks from the boot to its start; `boot_id` is the kernel's random name of that boot.
    """

    pid: int
    start_ticks: int
    boot_id: str


@cache
def boot_id() -> str:
    """The kernel's random name of this boot (random(4))."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def identify(pid: int) -> Identity | None:
    """The process that has this id now; None for none, and for one that has ended and was not waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[_STATE].decode("ascii") in _ENDED:
            return None
        return Identity(pid, int(fields[_START_TICKS]), boot_id())
    except (OSError, IndexError):
        return None


def alive(identity: Identity) -> bool:
    """Whether it is still there, and has not ended."""
    return identify(identity.pid) == identity


def cgroup_of(pid: int) -> str | None:
    """The control group of version 2 that a process is in, as cgroups(7) writes it; None where there is no process.

    ` (deleted)` is at its end where the group is gone, so that it equals no group that is there.
    """
    try:
        return read_cgroup(pid)
    except OSError:
        return None


def read_cgroup(pid: int) -> str | None:
    """The same; raises OSError where the kernel does not tell, be it that there is no process."""
    with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)


def names(pids: Iterable[int]) -> list[tuple[int, str]]:
    """The processes that are there and what each runs, the first 64 by id: the file name of the executable.

    Never the arguments, nor a name that a process gives itself: either may be private. Empty for one that hides it.
    """
    found: list[tuple[int, str]] = []
    for pid in sorted(set(pids)):
        if len(found) == SHOWN:
            break
        try:
            name = os.path.basename(os.readlink(f"/proc/{pid}/exe").removesuffix(_DELETED))
        except PermissionError:
            name = ""
        except OSError:
            continue
        found.append((pid, name[:NAME_LENGTH]))
    return found
