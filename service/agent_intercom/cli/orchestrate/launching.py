# SPDX-License-Identifier: Apache-2.0
"""Making a run and starting it; whatever fails takes back exactly what was made (orchestration spec, section 11.2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from os import path
from typing import Final

from agent_intercom.cli.orchestrate import targets
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.cli.orchestrate.preparing import Prepared, refuse_collision
from agent_intercom.host.manager import Manager, ManagerError
from agent_intercom.orchestration import harness, hosting, rundir, runtime
from agent_intercom.orchestration.client import ObserverLink
from agent_intercom.orchestration.client_frames import Snapshot
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.rundir import Run
from agent_intercom.wire.clock import system_now

SERVING_TIMEOUT: Final = 20.0
"""Seconds that a broker's first answer may take: a first start on a cold, busy machine."""


def launch(prepared: Prepared) -> Run:
    """Make the run, have systemd listen for it, see its broker answer, and start its workers.

    Raises CommandFailure `session_collision`, `manager_unreachable`, `startup_failed`.
    """
    runtime_dir = runtime.runtime_dir(os.environ)
    unit = prepared.spec.unit
    with targets.managing(Manager()) as manager, runtime.lock(runtime_dir), contextlib.ExitStack() as undo:
        # Again, now that nobody else can start or stop one.
        refuse_collision(prepared.session, prepared.called_as)
        _take_back_directories(prepared, undo)
        run = rundir.create(prepared.root, prepared.session, prepared.run_id, prepared.spec, system_now())
        undo.callback(_quietly, lambda: rundir.remove(run.path))
        place = runtime.RunPlace(
            directory=run.path,
            scope=prepared.scope,
            environment=prepared.environment,
            observer_report_usage=prepared.report_usage,
            programs=prepared.programs,
        )
        undo.callback(_quietly, lambda: runtime.remove(runtime_dir, unit))
        runtime.write(runtime_dir, unit, place)
        undo.callback(_quietly, lambda: hosting.end(manager, unit, runtime_dir))
        hosting.listen(manager, unit)
        _see_it_serve(runtime.socket_path(runtime_dir, unit), run.control_token)
        for role, record in run.manifest.roles.items():
            if record.harness != harness.EXTERNAL:
                hosting.start_worker(manager, unit, role, 1)
        rundir.write_startup_state(run.path, rundir.RUNNING)
        undo.pop_all()
    return run


def _take_back_directories(prepared: Prepared, undo: contextlib.ExitStack) -> None:
    """Have those removed again that are not there yet, the deepest first, unless somebody else uses them by then."""
    step = path.join(prepared.root, prepared.session)
    missing = []
    while not path.lexists(step):
        missing.append(step)
        step = path.dirname(step)
    for directory in reversed(missing):
        undo.callback(_quietly, partial(os.rmdir, directory))


def _see_it_serve(address: str, token: str) -> None:
    """Wait until the broker has told how the run stands. Raises CommandFailure `startup_failed`."""
    try:
        asyncio.run(_snapshot(address, token))
    except (Refusal, TimeoutError) as error:
        why = error.text if isinstance(error, Refusal) else "it did not say how the run stands"
        hint = "`journalctl --user -t orchestrate-broker` may tell why."
        raise CommandFailure("startup_failed", f"the broker of the run does not serve it: {why}", hint) from error


async def _snapshot(address: str, token: str) -> None:
    async with asyncio.timeout(SERVING_TIMEOUT), ObserverLink(address, token, timeout=SERVING_TIMEOUT) as observer:
        async for frame in observer:
            if isinstance(frame, Snapshot):
                return
    raise Refusal("broker_not_ready", "the broker closed the connection")


def _quietly(step: Callable[[], object]) -> None:
    """Take one thing back; that this fails must not hide what failed before."""
    with contextlib.suppress(OSError, Refusal, ManagerError):
        step()
