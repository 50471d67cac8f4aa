# SPDX-License-Identifier: Apache-2.0
"""The run that a command is for, and what the commands that change one do with it."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_intercom.cli.orchestrate.answer import CommandFailure, JsonObject, usage
from agent_intercom.orchestration import harness, manifest, reader, rundir, runs, runtime, snapshot
from agent_intercom.orchestration.config.packaged import PI_COMMAND
from agent_intercom.orchestration.config.shapes import name_fault
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import Manifest
from agent_intercom.orchestration.runs import Entry

if TYPE_CHECKING:
    from agent_intercom.host.manager import Manager
    from agent_intercom.workers.client import Client


class _Wanted(NamedTuple):
    """What a harness is asked for."""

    provider: str
    model: str
    harness: str


def here() -> str:
    """The current directory; the root where it is gone, which is no project of any run."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def live(session: str | None, run_id: str | None, role: str | None = None) -> Entry:
    """The live run of a session, which has `role`. Raises Refusal, or CommandFailure for a role that it has not."""
    entry = runs.resolve(session, here(), os.environ, True, run_id)
    if role is not None and role not in entry.manifest.roles:
        names = ", ".join(entry.manifest.roles)
        raise usage(f"the run has no {role}", f"It has {names}.")
    return entry


def check_here(session: str, project: str | None, line: str) -> None:
    """Whether the only run that lives, of which nobody has said the session, is one of this directory.

    Raises CommandFailure `invalid_arguments`, with the command `line` that says the session.
    """
    if project not in {None, os.path.realpath(here())}:
        text = f"no run of this directory lives, and {session} works elsewhere ({project})"
        raise usage(text, f"If that is meant: `{line}`.")


def still_live(entry: Entry) -> Entry:
    """The same run, read again. Raises Refusal `broker_not_live` where somebody has ended it meanwhile."""
    return runs.resolve(entry.session, here(), os.environ, True, entry.run_id)


def overview(entry: Entry) -> JsonObject | None:
    """The broker's snapshot of a run (section 11.4); None where its database cannot be read just now."""
    try:
        return snapshot.broker(reader.overview(entry.database))
    except Refusal:
        return None


def role_row(entry: Entry, role: str) -> Mapping[str, Any]:
    """What the broker has recorded of a role. Raises Refusal where its database cannot be read."""
    found: JsonObject = snapshot.broker(reader.overview(entry.database))
    row: Mapping[str, Any] = next(row for row in found["roles"] if row["role"] == role)
    return row


def control_token(entry: Entry) -> str:
    """What the broker knows its operator by."""
    return rundir.read_token(os.path.join(entry.directory, rundir.CONTROL_TOKEN))


def harness_of(entry: Entry, role: str) -> str:
    """What runs in a role."""
    return entry.manifest.roles[role].harness or harness.PI


def public_role(entry: Entry, role: str) -> JsonObject:
    """A role as every answer has it (section 11.3)."""
    return snapshot.role_object(role, entry.manifest.roles[role], snapshot.transport(entry.manifest))


def changed_models(entry: Entry, role: str, options: argparse.Namespace) -> dict[str, str]:
    """What the flags change of a role. Raises CommandFailure where the result is nothing that a run could have."""
    given = {key: getattr(options, key) for key in ("provider", "model", "thinking")}
    changed = {key: value for key, value in given.items() if value is not None}
    for key in ("provider", "model"):
        if key in changed and (fault := name_fault(changed[key])):
            raise usage(f"--{key} {fault}")
    trial = copy.deepcopy(entry.manifest)
    _change(trial, role, changed)
    if trial.version == manifest.VERSION:
        manifest.encode(trial)
    return changed


def save_models(entry: Entry, role: str, changed: Mapping[str, str]) -> None:
    """Write a role's new provider, model or thinking level into the manifest."""
    if not changed:
        return
    run = rundir.open_run(entry.directory, writer=True)
    _change(run.manifest, role, changed)
    _change(entry.manifest, role, changed)
    rundir.save_manifest(run)


def _change(of: Manifest, role: str, changed: Mapping[str, str]) -> None:
    for key, value in changed.items():
        setattr(of.roles[role], key, value)


def check_model(entry: Entry, role: str, provider: str, model: str) -> None:
    """Raises Refusal where the harness of a role does not know a model (section 10.4)."""
    from agent_intercom.orchestration import models

    place = runtime.read(runtime.runtime_dir(os.environ), entry.unit or "")
    wanted = _Wanted(provider, model, harness_of(entry, role))
    models.require({role: wanted}, place.programs.get(harness.PROGRAM, PI_COMMAND), place.environment)


def replace_worker(manager: Manager, entry: Entry, role: str, generation: int) -> None:
    """End every worker of a role and start one of `generation`. Raises CommandFailure."""
    from agent_intercom.workers import hosted

    with worker_service(manager, runtime.runtime_dir(os.environ)) as service:
        hosted.stop_role(service, entry.unit or "", role)
        hosted.start_role(service, entry.unit or "", role, generation)


@contextlib.contextmanager
def worker_service(manager: Manager, runtime_dir: str) -> Iterator[Client]:
    """The worker service, with what it does not do told as a CommandFailure."""
    from agent_intercom.workers import hosted
    from agent_intercom.workers.contract import SERVICE_UNIT, Code
    from agent_intercom.workers.errors import WorkerError

    try:
        with hosted.service(manager, runtime_dir) as client:
            yield client
    except WorkerError as error:
        hint = "`orchestrate doctor` tells more."
        if error.code in {Code.UNREACHABLE, Code.TIMEOUT, Code.STORE}:
            hint = f"`journalctl --user -u {SERVICE_UNIT}` may tell why; {hint}"
        code = "stop_failed" if error.code == Code.STOP_FAILED else "startup_failed"
        raise CommandFailure(code, error.text, hint) from error


@contextlib.contextmanager
def managing(manager: Manager) -> Iterator[Manager]:
    """The user's service manager, with what it does not do told as a CommandFailure."""
    from agent_intercom.host.manager import JobFailed, ManagerError, ManagerUnreachable

    try:
        with manager as opened:
            yield opened
    except ManagerUnreachable as error:
        hint = "Runs need a systemd user manager: log in through systemd-logind, or `loginctl enable-linger`."
        raise CommandFailure("manager_unreachable", f"no user service manager answers: {error}", hint) from error
    except JobFailed as error:
        hint = f"`systemctl --user status {error.unit}` tells more."
        raise CommandFailure("startup_failed", str(error), hint) from error
    except ManagerError as error:
        raise CommandFailure("orchestration_error", str(error), "`orchestrate doctor` tells more.") from error
