# SPDX-License-Identifier: Apache-2.0
"""What the worker of a role in a run is started with (orchestration spec, sections 12.1 and 12.6).

Everything private is read where the run keeps it, which is memory and its directory, each time that a worker is
started: so a restart gives exactly what the start gave.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from os import path
from typing import NamedTuple

from agent_intercom.host import privatefiles
from agent_intercom.host.manager import Variant
from agent_intercom.orchestration import (
    budget,
    contract,
    harness,
    hosting,
    manifest,
    policies,
    prompts,
    reader,
    rundir,
    runtime,
)
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import Skill
from agent_intercom.orchestration.runtime import WorkerPlace
from agent_intercom.workers import environment, places
from agent_intercom.workers.contract import INCARNATION_ENVIRONMENT, STATE_ENVIRONMENT, WORKER_ENVIRONMENT, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.harness import confinement, drive
from agent_intercom.workers.provisioning import limited
from agent_intercom.workers.spec import Launch


class Prepared(NamedTuple):
    """A worker that can be started.

    `unnamed` is for its launcher alone, and lacks which worker it is: see `launch`. `slice` and `part_of` are what its
    scope unit belongs to, `properties` its limits by their D-Bus names. `harness` is `pi` or `command`; `confined` is
    whether it may not change files but its own and, as the implementer, those of the project; `runtime_ms` is after how
    long it is ended (None: as any worker).
    """

    unnamed: Launch
    slice: str
    part_of: list[str]
    properties: Mapping[str, Variant]
    harness: str
    confined: bool
    runtime_ms: int | None

    def __repr__(self) -> str:
        return "Prepared()"


def prepare(runtime_dir: str, unit: str, role: str, generation: int, *, library: str | None = None) -> Prepared:
    """What the worker of a role is started with; makes the directory of its sessions and writes its system prompt.

    `generation` is the one that the run's broker expects, `library` the directory of the launchers, by default that of
    this program. It looks at directories of the project and at skills, which may be on a disk that does not answer.

    Raises WorkerError `start_failed` with why the run cannot be read or the worker not be made: a run that is not
    there, a role that is not in it or whose worker somebody else starts, a skill that was changed, a directory that is
    to be writable and is gone, an installation that is not whole.
    """
    library = library or path.dirname(path.abspath(sys.argv[0]))
    try:
        place = runtime.read(runtime_dir, unit)
        run = rundir.open_run(place.directory)
        _check(run, unit, role)
        added = _added(run, runtime_dir, unit, role, generation)
    except Refusal as refusal:
        raise WorkerError(Code.START_FAILED, refusal.text, refusal.field) from refusal
    own = place.workers.get(role) or WorkerPlace(confined=role != contract.IMPLEMENTER)
    _check_writable(own)
    driven = drive(run, role, place, library)
    name = run.manifest.roles[role].harness or harness.PI
    scratch = places.scratch_of_role(run.path, role, generation)
    variables = environment.build(
        place.environment,
        scope=place.scope,
        identity=environment.Identity("", "", generation),
        scratch=scratch,
        confined=own.confined,
        read_only=own.confined and role != contract.IMPLEMENTER,
        added=added | driven.variables,
        commands=environment.commands_of(library),
    )
    unnamed = Launch(
        arguments=driven.arguments,
        environment=variables,
        directory=run.manifest.project,
        exit_file="",
        scratch=scratch,
        confinement=confinement(own, role, run.manifest.project, driven.writable),
        # What Pi prints is its protocol, and what was said is in its sessions.
        output=places.output_of_role(runtime_dir, unit, role) if name == harness.COMMAND else None,
        stdin=driven.stdin,
    )
    return Prepared(
        unnamed=unnamed,
        slice=hosting.slice_unit(unit),
        part_of=[hosting.socket_unit(unit), hosting.service_unit(unit)],
        # What is killed is what takes most, such as a compiler; the agent sees that it failed.
        properties=limited("continue", own.memory_max, own.memory_high, own.tasks_max),
        harness=name,
        confined=own.confined,
        runtime_ms=own.runtime_ms,
    )


def launch(prepared: Prepared, exit_file: str, worker: str, incarnation: str) -> Launch:
    """What the launcher of this worker is given; looks at no file."""
    named = {WORKER_ENVIRONMENT: worker, INCARNATION_ENVIRONMENT: incarnation}
    unnamed = prepared.unnamed
    return unnamed._replace(exit_file=exit_file, environment={**unnamed.environment, **named})


def _added(run: rundir.Run, runtime_dir: str, unit: str, role: str, generation: int) -> dict[str, str]:
    """What a role's harness finds itself by; makes the directory of its sessions and its prompt. Raises Refusal."""
    added = _bridge_variables(run, runtime_dir, unit, role, generation)
    record = run.manifest.roles[role]
    _make_state(record.session_dir, role)
    if record.harness != harness.PI:
        return added | {STATE_ENVIRONMENT: record.session_dir}
    _write_system_prompt(run, role)
    return added


def _check(run: rundir.Run, unit: str, role: str) -> None:
    """Whether there is such a worker, and what it is given is what the run was started with. Raises Refusal."""
    if run.manifest.unit != unit:
        raise Refusal("run_foreign", "the run's directory is that of another run", "unit")
    record = run.manifest.roles.get(role)
    if record is None:
        raise Refusal("role_invalid", "the run has no such role", "role")
    if record.harness == harness.EXTERNAL:
        raise Refusal("harness_external", "the worker of this role is started by somebody else", role)
    for skill in record.skills or ():
        _check_skill(skill)


def _bridge_variables(run: rundir.Run, runtime_dir: str, unit: str, role: str, generation: int) -> dict[str, str]:
    """What a bridge finds its broker by. Raises Refusal."""
    meta = reader.overview(run.database).meta
    try:
        policy = budget.from_json(meta.get("budget_policy", ""))
        modes = policies.read_worker_context(meta.get(policies.WORKER_CONTEXT) or policies.worker_context({}))
    except ValueError as error:
        raise Refusal("database_invalid", "the run's database does not say how workers keep context", "meta") from error
    return harness.variables(
        role=role,
        token=run.tokens[role],
        socket=runtime.socket_path(runtime_dir, unit),
        generation=generation,
        policy=policy,
        context_mode=modes.get(role, policies.PRUNE),
    )


def _check_writable(worker: WorkerPlace) -> None:
    """Whether what it was granted is there. Raises WorkerError `start_failed`, by number: a path is nobody else's."""
    for number, name in enumerate(worker.writable if worker.confined else (), 1):
        if not path.isdir(name):
            text = f"entry {number} of [workers] writable is no directory that is there any more: make it again"
            raise WorkerError(Code.START_FAILED, text, "writable")


def _check_skill(skill: Skill) -> None:
    try:
        found = manifest.read_skill(skill.path)
    except Refusal as refusal:
        raise Refusal("skill_changed", f"a skill of the run {refusal.text}", "skills") from refusal
    if found != skill:
        raise Refusal("skill_changed", "a skill was changed after the run was started with it", "skills")


def _make_state(directory: str, role: str) -> None:
    """Make the directory that a role's workers have in common: one that is confined cannot make it itself."""
    try:
        for step in (path.dirname(directory), directory):
            if not path.lexists(step):
                os.mkdir(step, 0o700)
            privatefiles.check_directory(step)
    except OSError as error:
        text = f"the directory of its sessions cannot be made: {os.strerror(error.errno or 0)}"
        raise Refusal("run_unwritable", text, role) from error


def _write_system_prompt(run: rundir.Run, role: str) -> None:
    plan_first = reader.overview(run.database).meta.get("implementation_flow") == contract.Flow.PHASED
    try:
        text = prompts.system_prompt(role, run.manifest.project, plan_first)
    except OSError as error:
        raise Refusal("prompt_missing", "the installation lacks the system prompt of this role", role) from error
    try:
        privatefiles.replace(harness.system_prompt_file(run.path, role), text.encode())
    except OSError as error:
        text = f"the system prompt cannot be written into the run's directory: {os.strerror(error.errno or 0)}"
        raise Refusal("run_unwritable", text, role) from error
