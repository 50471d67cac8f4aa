# SPDX-License-Identifier: Apache-2.0
"""Ending a run (orchestration spec, sections 4.9 and 11.2)."""

from __future__ import annotations

import argparse
import contextlib
import os

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate import targets, texts
from agent_intercom.cli.orchestrate.answer import Answer, CommandFailure
from agent_intercom.host.manager import Manager
from agent_intercom.orchestration import hosting, rundir, runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.runs import Entry


def stop(options: argparse.Namespace) -> Answer:
    """`stop`: end broker, socket and workers of a run, and see that nothing of it is left."""
    entry = targets.live(options.session, None)
    texts.refuse_unless(options.yes, f"stop ends every agent of {entry.session}")
    runtime_dir = runtime.runtime_dir(os.environ)
    with targets.managing(Manager()) as manager, runtime.lock(runtime_dir):
        end(manager, entry, runtime_dir)
    data = {
        "session": entry.session,
        "run_id": entry.run_id,
        "stopped": True,
        "state_retained": True,
        "paths": {"coordination": entry.directory},
        "registry_finalization": {"failed_roles": []},
    }
    return Answer(
        data,
        [
            f"{output.printable(entry.session)}: stopped, and no process of it is left",
            f"Retained: {output.printable(entry.directory)} (`orchestrate prune` removes what is old)",
        ],
    )


def end(manager: Manager, entry: Entry, runtime_dir: str) -> None:
    """End a live run and forget what only a running one needs. Raises CommandFailure `stop_failed`."""
    unit = entry.unit or ""
    try:
        hosting.end(manager, unit, runtime_dir)
    except Refusal as refusal:
        hint = f"`systemctl --user status {hosting.slice_unit(unit)}` shows them; then stop it again."
        raise CommandFailure(refusal.code, refusal.text, hint) from refusal
    runtime.remove(runtime_dir, unit)
    with contextlib.suppress(Refusal):
        # The bodies that a run which never began would have begun with. `doctor` finds what is left.
        rundir.delete_startup(entry.directory)
