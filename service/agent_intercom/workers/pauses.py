# SPDX-License-Identifier: Apache-2.0
"""Which workers of a run are paused, and which have ended, as the kernel tells (cgroups(7)). Asks nobody.

Whoever stands still counts, be it that only its slice is frozen: the manager and the registry call a worker paused
where its own unit is frozen, and the kernel does not tell the two apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from os import path

from agent_intercom.host import cgroups, processes
from agent_intercom.host.errors import HostError
from agent_intercom.workers import places


def groups(runtime_dir: str, unit: str) -> dict[str, str]:
    """The control groups of the workers that run, by role."""
    found = {}
    for worker in places.run_workers(runtime_dir, unit):
        # A number is used again: the process counts only while it is in that unit.
        group = processes.cgroup_of(worker.pid) or ""
        if path.basename(group) == worker.unit:
            found[worker.role] = group
    return found


def gone(runtime_dir: str, unit: str, running: Collection[str]) -> list[str]:
    """The roles that have had a worker and are not among those that have one, which are `running`."""
    return sorted({worker.role for worker in places.run_workers(runtime_dir, unit)} - set(running))


def frozen(cgroup: str) -> bool:
    """Whether all of a control group stands still; not where nobody can see that."""
    with contextlib.suppress(HostError):
        return cgroups.frozen(cgroup)
    return False


def roles(runtime_dir: str, unit: str) -> list[str]:
    """The roles of a run whose worker is paused."""
    return [role for role, group in groups(runtime_dir, unit).items() if frozen(group)]
