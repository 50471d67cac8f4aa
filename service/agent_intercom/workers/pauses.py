# SPDX-License-Identifier: Apache-2.0
"""Which workers of a run are paused, as the kernel tells whoever looks (cgroups(7), cgroup.events). Asks nobody."""

from __future__ import annotations

import contextlib
from os import path
from typing import Final

from agent_intercom.host import cgroups, processes
from agent_intercom.workers import places

EVENTS_NAME: Final = "cgroup.events"
"""The file of a control group that is modified when it freezes or thaws; inotify(7) tells it of its directory."""

_FROZEN: Final = "frozen 1"


def directories(runtime_dir: str, unit: str) -> dict[str, str]:
    """Where the control groups of the workers that run are, by role."""
    found = {}
    for worker in places.run_workers(runtime_dir, unit):
        # A number is used again: the process counts only while it is in that unit.
        group = processes.cgroup_of(worker.pid) or ""
        if path.basename(group) == worker.unit and (directory := cgroups.directory(group)) is not None:
            found[worker.role] = directory
    return found


def frozen(directory: str) -> bool:
    """Whether every process of a control group stands still; not where it is gone, or the kernel freezes none."""
    with contextlib.suppress(OSError), open(path.join(directory, EVENTS_NAME), encoding="ascii") as events:
        return _FROZEN in events.read().splitlines()
    return False


def roles(runtime_dir: str, unit: str) -> list[str]:
    """The roles of a run whose worker is paused."""
    return [role for role, directory in directories(runtime_dir, unit).items() if frozen(directory)]
