# SPDX-License-Identifier: Apache-2.0
"""Ending a run (orchestration spec, sections 4.9 and 11.2)."""

from __future__ import annotations

import argparse
import contextlib
import os
from os import path
from typing import NamedTuple

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate import targets, texts
from agent_intercom.cli.orchestrate.answer import Answer, CommandFailure
from agent_intercom.cli.signals import undisturbed
from agent_intercom.host.manager import Manager
from agent_intercom.orchestration import hosting, rundir, runs, runtime, startup
from agent_intercom.orchestration.errors import Refusal


class _Target(NamedTuple):
    """What is to end. `listens`: systemd listens for it, or did when it was looked for. `project`: where it works."""

    session: str
    directory: str
    unit: str
    listens: bool
    project: str | None = None


def stop(options: argparse.Namespace) -> Answer:
    """`stop`: end broker, socket and workers of a run, and see that nobody is left in its slice."""
    target = _target(options.session, options.run)
    if options.session is None:
        targets.check_here(target.session, target.project, f"{options.program} stop {target.session} --yes")
    texts.refuse_unless(options.yes, f"stop ends every agent of {target.session}")
    try:
        target = _stopped(target, options.program)
    except CommandFailure as failure:
        if failure.code != "manager_unreachable" or target.listens:
            raise
        # Without a manager there is nothing that could be left of it.
        raise Refusal(runs.NOT_LIVE, "the run does not live any more", "session") from failure
    data = {
        "session": target.session,
        "run_id": path.basename(target.directory),
        "stopped": True,
        "state_retained": True,
        "paths": {"coordination": target.directory},
        "registry_finalization": {"failed_roles": []},
    }
    lines = [
        f"{output.printable(target.session)}: stopped, and nobody is left in its slice",
        f"Retained: {output.printable(target.directory)} (`{options.program} prune` removes what is old)",
    ]
    return Answer(data, lines)


def _stopped(target: _Target, program: str) -> _Target:
    """End it; what was ended."""
    runtime_dir = runtime.runtime_dir(os.environ)
    with targets.managing(Manager()) as manager, runtime.lock(runtime_dir, target.session):
        # Whoever had the lock may have ended it.
        target = _target(target.session, path.basename(target.directory))
        if not target.listens and not hosting.lingers(manager, target.unit):
            raise Refusal(runs.NOT_LIVE, "the run does not live any more, and nobody is left in its slice", "session")
        with undisturbed():
            _end(manager, target, runtime_dir, program)
    return target


def _target(session: str | None, run_id: str | None) -> _Target:
    """The run that lives; else, of a session that is named, the newest that may have left something behind.

    A manifest is not needed for it: what cannot be read can be ended all the same.
    """
    try:
        entry = runs.resolve(session, targets.here(), os.environ, True, run_id)
    except Refusal as refusal:
        found = None if session is None else _unlisted(session, run_id)
        if found is None or refusal.code == runs.FOREIGN:
            raise
        return found
    return _Target(entry.session, entry.directory, entry.unit or "", True, entry.manifest.project)


def _unlisted(session: str, run_id: str | None) -> _Target | None:
    """A run of a session that cannot be resolved as one that lives."""
    for live in runtime.live(runtime.runtime_dir(os.environ)):
        directory, name = path.split(live.directory)
        if path.basename(directory) == session and run_id in {None, name}:
            return _Target(session, live.directory, live.unit, True)
    with contextlib.suppress(Refusal):
        entry = runs.resolve(session, targets.here(), os.environ, False, run_id)
        if entry.manifest.unit is not None:
            return _Target(session, entry.directory, entry.manifest.unit, False)
    return None


def _end(manager: Manager, target: _Target, runtime_dir: str, program: str) -> None:
    """End the run and forget what only a running one needs. Raises CommandFailure `stop_failed`."""
    try:
        hosting.end(manager, target.unit, runtime_dir)
    except Refusal as refusal:
        hint = f"`systemctl --user status {hosting.slice_unit(target.unit)}` shows them; then `{program} stop` again."
        raise CommandFailure(refusal.code, refusal.text, hint) from refusal
    runtime.remove(runtime_dir, target.unit)
    try:
        rundir.delete_startup(target.directory)
    except Refusal as refusal:
        if refusal.code != "run_gone":
            text = f"the run was stopped, and its task could not be deleted: {refusal.text}"
            hint = f"Delete {output.printable(path.join(target.directory, startup.NAME))}."
            raise CommandFailure("stop_failed", text, hint) from refusal
