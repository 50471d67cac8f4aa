# SPDX-License-Identifier: Apache-2.0
"""What runs in a role of a run: the command line of its harness, and what that needs (orchestration spec, 12.1).

The harness `pi` is Pi itself, with its bridge in it. The harness `command` is our bridge, which calls a program of any
kind once for each assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import path, pathsep
from typing import Final, NamedTuple

from agent_intercom.orchestration import contract, harness
from agent_intercom.orchestration.manifest import RoleRecord
from agent_intercom.orchestration.rundir import Run
from agent_intercom.orchestration.runtime import RunPlace, WorkerPlace
from agent_intercom.workers.contract import STATE_ENVIRONMENT, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.spec import Confinement

BRIDGE_PROGRAM: Final = "orchestrate-bridge"
"""The bridge of the harness `command`, beside the other launchers of an installation."""

SKILLS_ENVIRONMENT: Final = "AGENT_INTERCOM_SKILLS"
"""The files of the role's skills for a program of the harness `command`, as PATH has directories."""

_PI_DIRECTORY: Final = "PI_CODING_AGENT_DIR"
_PI_DEFAULT: Final = ".pi/agent"


class Driven(NamedTuple):
    """What is started for a role: its words, the variables that its harness needs, the directories that it writes where
    they are there, and whether its input must not end."""

    arguments: list[str]
    variables: dict[str, str]
    writable: list[str]
    stdin: bool


def drive(run: Run, role: str, place: RunPlace, library: str) -> Driven:
    """What is started for a role. `library` is the directory of the launchers of this installation.

    Raises WorkerError `start_failed` where the place of the run does not say what it must.
    """
    record = run.manifest.roles[role]
    if record.harness == harness.COMMAND:
        return _command(record, place.workers.get(role, WorkerPlace()), library, role)
    return _pi(run, role, record, place)


def confinement(worker: WorkerPlace, role: str, project: str, optional: Sequence[str] = ()) -> Confinement | None:
    """What the kernel is to refuse the worker of a role; None: nothing.

    `optional` are the directories that its harness writes where they are there; those that are not are left out, and no
    others: whoever confines by this refuses them. The implementer may always change the project. One that is not
    confined and may not use the network writes everywhere.
    """
    if not worker.confined:
        return None if worker.network else Confinement(["/"], False, worker.required)
    # What is configured comes first: a fault is told by its number.
    granted = [*worker.writable, *([project] if role == contract.IMPLEMENTER else [])]
    return Confinement([*granted, *filter(path.isdir, optional)], worker.network, worker.required)


def _command(record: RoleRecord, worker: WorkerPlace, library: str, role: str) -> Driven:
    if not worker.command:
        raise WorkerError(Code.START_FAILED, "the run does not say what runs in this role", role)
    state, skills = record.session_dir, [skill.path for skill in record.skills or ()]
    variables = {STATE_ENVIRONMENT: state} | ({SKILLS_ENVIRONMENT: pathsep.join(skills)} if skills else {})
    return Driven([path.join(library, BRIDGE_PROGRAM), "--", *worker.command], variables, [state], False)


def _pi(run: Run, role: str, record: RoleRecord, place: RunPlace) -> Driven:
    for name in harness.PROGRAMS[harness.PI]:
        if name not in place.programs:
            raise WorkerError(Code.START_FAILED, f"the run does not say where {name} is", "programs")
    arguments = harness.arguments(
        program=place.programs[harness.PROGRAM],
        bridge=place.programs[harness.PI_BRIDGE],
        role=role,
        project=run.manifest.project,
        coord=run.path,
        provider=record.provider,
        model=record.model,
        thinking=record.thinking,
        tools=record.tools,
        session_dir=record.session_dir,
        session_id=record.session_id or "",
        skills=[skill.path for skill in record.skills or ()],
        approve=run.manifest.approve_project,
    )
    return Driven(arguments, {}, [record.session_dir, *_pi_state(place.environment)], True)


def _pi_state(environment: Mapping[str, str]) -> list[str]:
    """Where Pi keeps its login, its settings and locks of both; nothing where nobody can tell."""
    told = environment.get(_PI_DIRECTORY, "")
    found = path.join(environment.get("HOME", ""), told[2:] if told.startswith("~/") else told or _PI_DEFAULT)
    # A home may be a link, and nothing is granted through one.
    return [path.realpath(found)] if path.isabs(found) else []
