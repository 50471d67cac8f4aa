# SPDX-License-Identifier: Apache-2.0
"""The workers of a run, as commands ask the worker service for them and as files and the manager tell of them.

`workers` asks nobody but the service manager: what a scope unit is for, its place in the run's runtime directory says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent_intercom.host.manager import NO_SUCH_UNIT, Manager, ManagerRefused
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import contract, limits, places
from agent_intercom.workers.client import Client, socket_path
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.harness import BRIDGE_PROGRAM

START_TIMEOUT: Final = 20.0
"""Seconds for a worker to be started, which takes less than one."""

STOP_TIMEOUT: Final = 20.0
"""Seconds for a worker to be gone: after five it is killed."""

PROGRAMS: Final = ("orchestrate-launcher", BRIDGE_PROGRAM)
"""What the worker service starts, beside its own program."""

_UP: Final = frozenset({"active", "activating", "reloading"})
_FROZEN: Final = "frozen"
"""What systemd calls FreezerState, of a unit that is paused. One whose slice is frozen is not."""


class WorkerUnit(NamedTuple):
    """The scope unit of one worker, or what it was.

    `active`, `sub` and `result` are what systemd calls ActiveState, SubState and Result; of one that is gone, `result`
    says how its command ended (`success`, `exit-code`, `signal`), as far as `exit` tells. `pid` is that of the first
    process in it, 0 where it has ended. `enforced` has the words for what the kernel refuses it. `paused`: it runs, and
    its unit is frozen until somebody resumes it. `unenforced` are the limits of the run's settings, by their names in
    its place, that nobody in the unit is held to.
    """

    role: str
    generation: int
    unit: str
    active: str
    sub: str
    pid: int
    result: str
    status_text: str
    enforced: tuple[str, ...]
    exit: places.Exit | None
    paused: bool = False
    unenforced: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.active in _UP

    def as_json(self) -> dict[str, Any]:
        """The same as `--json` has it."""
        told = None if self.exit is None else self.exit._asdict()
        return {**self._asdict(), "enforced": list(self.enforced), "exit": told, "unenforced": list(self.unenforced)}


@contextlib.contextmanager
def service(manager: Manager, runtime_dir: str) -> Iterator[Client]:
    """The worker service, for which systemd is made to listen first. Raises ManagerError, and WorkerError."""
    try:
        manager.start(contract.SOCKET_UNIT)
    except ManagerRefused as error:
        if error.name == NO_SUCH_UNIT:
            raise WorkerError(Code.UNREACHABLE, "the units of the worker service are not installed", "units") from error
        raise
    with Client(socket_path(runtime_dir)) as client:
        yield client


def start_role(client: Client, unit: str, role: str, generation: int, timeout: float = START_TIMEOUT) -> None:
    """Have the worker of a role started, in seconds at most; when this returns, its program has begun."""
    with _of_role(role, "start"):
        client.request("start_role", {"run": unit, "role": role, "generation": generation}, timeout=timeout)


def stop_role(client: Client, unit: str, role: str, timeout: float = STOP_TIMEOUT) -> None:
    """Have every worker of a role ended, in seconds at most; when this returns, nobody is left in their units."""
    with _of_role(role, "stop"):
        client.request("stop_role", {"run": unit, "role": role}, timeout=timeout)


@contextlib.contextmanager
def _of_role(role: str, what: str) -> Iterator[None]:
    """Says of whom it is that something is told. A role is one of five words and nobody's secret."""
    try:
        yield
    except WorkerError as error:
        raise WorkerError(error.code, f"the worker {role} did not {what}: {error.text}", role) from error


def workers(manager: Manager, runtime_dir: str, unit: str) -> list[WorkerUnit]:
    """The workers of a run by role and generation: those that run, and of roles without one the last that did.

    Raises ManagerError.
    """
    found = []
    given = _given(runtime_dir, unit)
    for worker in places.run_workers(runtime_dir, unit):
        match = contract.UNIT.fullmatch(worker.unit)
        if match is None:
            continue
        scope = _scope(manager, worker.unit)
        ended = places.read_exit(places.exit_file(places.of_run_worker(runtime_dir, unit, match["incarnation"])))
        active = str(scope["ActiveState"]) if scope else "inactive"
        found.append(
            WorkerUnit(
                worker.role,
                worker.generation,
                worker.unit,
                active,
                str(scope["SubState"]) if scope else "dead",
                worker.pid if active in _UP else 0,
                _result(scope, ended),
                "",
                worker.enforced,
                ended,
                active in _UP and scope is not None and scope.get("FreezerState") == _FROZEN,
                _unenforced(given.get(worker.role), scope if active in _UP else None),
            )
        )
    return [worker for worker in found if worker.up or worker == _last(found, worker.role)]


def _given(runtime_dir: str, unit: str) -> Mapping[str, limits.Limited]:
    """The limits of a run's workers, by role; none where they cannot be read."""
    with contextlib.suppress(Refusal):
        return runtime.read(runtime_dir, unit).workers
    return {}


def _unenforced(given: limits.Limited | None, scope: Mapping[str, Any] | None) -> tuple[str, ...]:
    group = str((scope or {}).get("ControlGroup", ""))
    return limits.unheld(given, group) if given is not None and group else ()


def _last(found: Sequence[WorkerUnit], role: str) -> WorkerUnit:
    """The worker of a role that counts where none runs: of the last generation, the one that ended last."""
    theirs = (worker for worker in found if worker.role == role)
    return max(theirs, key=lambda worker: (worker.up, worker.generation, worker.exit.at if worker.exit else 0))


def _scope(manager: Manager, name: str) -> dict[str, Any] | None:
    """What the manager says of a scope unit; None where it has none, or one that is no scope any more."""
    found = manager.unit(name, "Scope")
    return found if found and "SubState" in found and "Result" in found else None


def _result(scope: dict[str, Any] | None, ended: places.Exit | None) -> str:
    if scope is not None and (scope["ActiveState"] in _UP or scope["Result"] != "success"):
        return str(scope["Result"])
    if ended is None:
        return ""
    if ended.signal is not None:
        return "signal"
    return "exit-code" if ended.code else "success"
