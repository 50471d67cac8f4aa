# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run that is started may change and use, and what of it the kernel of this machine enforces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.orchestration.contract import IMPLEMENTER
from agent_intercom.orchestration.runtime import WorkerPlace
from agent_intercom.workers import confinement, harness
from agent_intercom.workers.spec import Confinement

_LIMITS = ("memory_max", "memory_high", "tasks_max", "runtime_ms")


def result(workers: Mapping[str, WorkerPlace], project: str) -> JsonObject:
    """By role, as `--json` has it. Sizes are bytes; null is no limit."""
    found: dict[str, Any] = {}
    for role, worker in workers.items():
        found[role] = {
            "command": list(worker.command),
            "confined": worker.confined,
            "required": worker.required,
            "writable": _writable(worker, role, project),
            "network": worker.network,
            "enforced": list(enforced(worker, role, project)),
            **{name: getattr(worker, name) for name in _LIMITS},
        }
    return found


def machine() -> JsonObject:
    """What this kernel could enforce of a confined worker without network."""
    found = confinement.means()
    words = confinement.plan(Confinement((), False), found)
    return {"landlock_abi": found.abi, "filters": found.filters, "enforced": list(words)}


def lines(workers: Mapping[str, WorkerPlace], project: str) -> Iterator[str]:
    """The same for a person, roles of which the same is told in one line."""
    together: dict[str, list[str]] = {}
    for role, worker in workers.items():
        together.setdefault(_told(worker, role, project), []).append(role)
    title = "Workers:"
    for told, roles in together.items():
        yield output.printable(f"{title:13} {', '.join(roles)}: {told}")
        title = ""


def enforced(worker: WorkerPlace, role: str, project: str) -> tuple[str, ...]:
    """The words of what the kernel of this machine enforces of a worker."""
    return confinement.plan(harness.confinement(worker, role, project), confinement.means())


def _writable(worker: WorkerPlace, role: str, project: str) -> list[str]:
    if not worker.confined:
        return ["/"]
    return [*worker.writable, *([project] if role == IMPLEMENTER else [])]


def _told(worker: WorkerPlace, role: str, project: str) -> str:
    words = ", ".join(enforced(worker, role, project))
    if not worker.confined:
        may = "may write what you may"
    else:
        places = ", ".join(_writable(worker, role, project))
        may = f"may write {places} and its scratch directory" if places else "may write its scratch directory only"
    network = "" if worker.network else ", and may not use the network"
    return f"{may}{network}; the kernel enforces: {words}"
