# SPDX-License-Identifier: Apache-2.0
"""Making a run and starting it; whatever fails takes back exactly what was made (orchestration spec, section 11.2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from os import path
from typing import Final

from agent_intercom.cli.orchestrate import targets
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.cli.orchestrate.preparing import Prepared, refuse_collision
from agent_intercom.cli.signals import undisturbed
from agent_intercom.host.manager import Manager, ManagerError
from agent_intercom.orchestration import harness, hosting, rundir, runtime
from agent_intercom.orchestration.client import ObserverLink
from agent_intercom.orchestration.client_frames import Snapshot
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.rundir import Run
from agent_intercom.wire.clock import system_now
from agent_intercom.workers import hosted
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

SERVING_TIMEOUT: Final = 12.0
"""Seconds that a broker's first answer may take: a first start on a cold, busy machine."""

TIMEOUT: Final = 28.0
"""Seconds for everything together, what is taken back included: whoever calls the command line gives it thirty (section
11.1)."""

STARTING_TIMEOUT: Final = 18.0
"""Seconds of these after which a start has failed."""

_END_TIMEOUT: Final = 6.0
"""Seconds that are left for the end of a run in any case: a worker is killed after five."""

_LEFT_HINT: Final = "`{0} doctor` shows what is left, `systemctl --user stop {1}` ends it."


def launch(prepared: Prepared) -> Run:
    """Make the run, have systemd listen for it, see its broker answer, and start its workers.

    Raises CommandFailure `session_collision`, `manager_unreachable`, `startup_failed`; `stop_failed` where what was
    made could not be taken back.
    """
    since = time.monotonic()
    runtime_dir = runtime.runtime_dir(os.environ)
    with targets.managing(Manager()) as manager, runtime.lock(runtime_dir, prepared.session):
        refuse_collision(prepared.session, prepared.called_as)
        made = _Made(prepared, runtime_dir)
        try:
            return made.run(manager, since + STARTING_TIMEOUT)
        except BaseException as error:
            with undisturbed():
                left = made.take_back(manager, since + TIMEOUT)
            if left:
                hint = _LEFT_HINT.format(prepared.called_as, hosting.slice_unit(prepared.spec.unit))
                text = f"{_why(error)}; and what was made could not be taken back: {left}"
                raise CommandFailure("stop_failed", text, hint) from error
            raise


class _Made:
    """What there is of a run so far."""

    def __init__(self, prepared: Prepared, runtime_dir: str) -> None:
        self._prepared = prepared
        self._unit = prepared.spec.unit
        self._runtime_dir = runtime_dir
        self._directories = _missing(path.join(prepared.root, prepared.session))
        self._run: Run | None = None
        self._told = self._listens = False
        self._answers = True
        self._started: list[str] = []

    def run(self, manager: Manager, deadline: float) -> Run:
        """Make everything."""
        prepared = self._prepared
        run = rundir.create(prepared.root, prepared.session, prepared.run_id, prepared.spec, system_now())
        self._run = run
        place = runtime.RunPlace(
            directory=run.path,
            scope=prepared.scope,
            environment=prepared.environment,
            observer_report_usage=prepared.report_usage,
            programs=prepared.programs,
            workers=prepared.workers,
        )
        self._told = True
        runtime.write(self._runtime_dir, self._unit, place)
        self._listens = True
        hosting.listen(manager, self._unit)
        patience = min(SERVING_TIMEOUT, max(deadline - time.monotonic(), 1.0))
        _see_it_serve(runtime.socket_path(self._runtime_dir, self._unit), run.control_token, patience)
        roles = [role for role, record in run.manifest.roles.items() if record.harness != harness.EXTERNAL]
        if roles:
            self._start(manager, roles, deadline)
        rundir.write_startup_state(run.path, rundir.RUNNING)
        return run

    def _start(self, manager: Manager, roles: Sequence[str], deadline: float) -> None:
        """Start the workers of roles. Raises CommandFailure `startup_failed`."""
        with targets.worker_service(manager, self._runtime_dir) as service:
            for role in roles:
                self._started.append(role)
                left = max(deadline - time.monotonic(), 1.0)
                try:
                    hosted.start_role(service, self._unit, role, 1, min(left, hosted.START_TIMEOUT))
                except WorkerError as error:
                    self._answers = error.code not in {Code.TIMEOUT, Code.UNREACHABLE}
                    raise

    def take_back(self, manager: Manager, deadline: float) -> str:
        """Take back everything that was made; what prevents it, in one line.

        While a process may be left, what it could be found by stays: its directory, which says that the start failed.
        """
        run = self._run
        # Its registry need not have started workers that have gone; that they have is seen to by the slice's end.
        with contextlib.suppress(WorkerError, ManagerError, CommandFailure):
            self._stop(manager, deadline - _END_TIMEOUT)
        try:
            if self._listens:
                hosting.end(manager, self._unit, self._runtime_dir, max(deadline - time.monotonic(), _END_TIMEOUT))
            if self._told:
                runtime.remove(self._runtime_dir, self._unit)
            if run is not None:
                rundir.remove(run.path)
        except (Refusal, ManagerError, OSError) as error:
            if run is not None:
                with contextlib.suppress(Refusal):
                    rundir.write_startup_state(run.path, rundir.FAILED)
                    rundir.delete_startup(run.path)
            return _why(error)
        for directory in self._directories:
            # Somebody else may use it by now.
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        return ""

    def _stop(self, manager: Manager, deadline: float) -> None:
        """End the workers that were started, or may have been, unless nobody has answered who could."""
        if self._started and self._answers:
            with hosted.service(manager, self._runtime_dir) as service:
                for role in self._started:
                    left = max(deadline - time.monotonic(), 1.0)
                    hosted.stop_role(service, self._unit, role, min(left, hosted.STOP_TIMEOUT))


def _missing(directory: str) -> list[str]:
    """The directory and those above it that are not there, the deepest first."""
    missing = []
    while not path.lexists(directory):
        missing.append(directory)
        directory = path.dirname(directory)
    return missing


def _see_it_serve(address: str, token: str, timeout: float) -> None:
    """Wait until the broker has told how the run stands, for seconds. Raises CommandFailure `startup_failed`."""
    try:
        asyncio.run(_snapshot(address, token, timeout))
    except (Refusal, TimeoutError) as error:
        why = error.text if isinstance(error, Refusal) else "it did not say how the run stands"
        hint = "Nothing of the run is left; `journalctl --user -t orchestrate-broker` may tell why."
        raise CommandFailure("startup_failed", f"the broker of the run does not serve it: {why}", hint) from error


async def _snapshot(address: str, token: str, timeout: float) -> None:
    async with asyncio.timeout(timeout), ObserverLink(address, token, timeout=timeout) as observer:
        async for frame in observer:
            if isinstance(frame, Snapshot):
                return
    raise Refusal("broker_not_ready", "the broker closed the connection")


def _why(error: BaseException) -> str:
    """What happened, in one line without what an exception of the system may quote."""
    if isinstance(error, Refusal | CommandFailure | ManagerError):
        return str(error).rstrip(".")
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    return "the start was interrupted"
