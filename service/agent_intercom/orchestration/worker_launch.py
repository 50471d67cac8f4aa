# SPDX-License-Identifier: Apache-2.0
"""Becoming the worker of a run (orchestration spec, sections 12.1 and 12.6).

This process reads what the worker is to be told where the run keeps it, and is then replaced by the worker's program,
which gets that and nothing of what this one inherited. systemd starts it as `orchestrate-RUN-ROLE-gN.service`; started
by hand it does the same.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import (
    budget,
    contract,
    harness,
    manifest,
    policies,
    prompts,
    reader,
    rundir,
    runtime,
)
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import Skill

USAGE: Final = """\
usage: orchestrate-worker RUN ROLE GENERATION

Become the worker of ROLE in the run RUN (its unit id), as GENERATION, which the run's broker has to expect.
systemd starts this as orchestrate-RUN-ROLE-gGENERATION.service; `orchestrate restart` replaces a worker.

example: orchestrate-worker a1b2c3 reviewer 1

exit codes:
  125  not started; the line on standard error says why
  126  the worker's program cannot be executed
  127  the worker's program, or what interprets it, was not found
  any other is the worker's
"""

REFUSED: Final = 125
CANNOT_EXECUTE: Final = 126
NOT_FOUND: Final = 127

_MAX_GENERATION: Final = 999_999_999


class Command(NamedTuple):
    """What this process becomes: a program with its arguments and environment, in a directory."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str

    def __repr__(self) -> str:
        return "Command()"


def main(argv: Sequence[str] = ()) -> int:
    """Become a worker. Returns the exit status where that fails."""
    arguments = list(argv)
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(USAGE)
        return 0
    if len(arguments) != 3:
        return _give_up(REFUSED, "a run, a role and a generation are needed; see --help")
    unit, role, generation = arguments
    if not (generation.isascii() and generation.isdecimal() and 1 <= int(generation[:10]) <= _MAX_GENERATION):
        return _give_up(REFUSED, "the generation is not a number from 1 on")
    try:
        command = prepare(runtime.runtime_dir(os.environ), unit, role, int(generation))
        os.chdir(command.directory)
    except Refusal as refusal:
        return _give_up(REFUSED, refusal.text)
    except OSError as error:
        return _give_up(REFUSED, f"the project cannot be entered: {os.strerror(error.errno or 0)}")
    try:
        become(command)
    except (FileNotFoundError, NotADirectoryError):
        return _give_up(NOT_FOUND, "the worker's program, or what interprets it, was not found")
    except OSError as error:
        return _give_up(CANNOT_EXECUTE, f"the worker's program cannot be executed: {os.strerror(error.errno or 0)}")


def prepare(runtime_dir: str, unit: str, role: str, generation: int) -> Command:
    """What the worker of a role is; writes the role's system prompt.

    Raises Refusal: what `runtime.read`, `rundir.open_run` and `reader.overview` raise, `role_invalid` for a role that
    is not in the run, `run_foreign` for a directory of another run, `harness_external` for a role whose worker somebody
    else starts, `skill_changed`, `program_missing` for a place that does not name the harness's programs,
    `database_invalid`, `prompt_missing` where the installation is not whole.
    """
    place = runtime.read(runtime_dir, unit)
    run = rundir.open_run(place.directory)
    if run.manifest.unit != unit:
        raise Refusal("run_foreign", "the run's directory is that of another run", "unit")
    record = run.manifest.roles.get(role)
    if record is None:
        raise Refusal("role_invalid", "the run has no such role", "role")
    if record.harness == harness.EXTERNAL:
        raise Refusal("harness_external", "the worker of this role is started by somebody else", role)
    for name in harness.PROGRAMS[harness.PI]:
        if name not in place.programs:
            raise Refusal("program_missing", f"the run does not say where {name} is", "programs")
    for skill in record.skills or ():
        _check_skill(skill)
    meta = reader.overview(run.database).meta
    try:
        policy = budget.from_json(meta.get("budget_policy", ""))
        modes = policies.read_worker_context(meta.get(policies.WORKER_CONTEXT) or policies.worker_context({}))
    except ValueError as error:
        raise Refusal("database_invalid", "the run's database does not say how workers keep context", "meta") from error
    _write_system_prompt(run, role, meta.get("implementation_flow") == contract.Flow.PHASED)
    scope = {} if place.scope is None else {runtime.SCOPE_ENVIRONMENT: place.scope}
    return Command(
        harness.arguments(
            program=place.programs[harness.PROGRAM],
            bridge=place.programs[harness.BRIDGE],
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
        ),
        harness.environment(
            {**place.environment, **scope},
            role=role,
            token=run.tokens[role],
            socket=runtime.socket_path(runtime_dir, unit),
            generation=generation,
            policy=policy,
            context_mode=modes.get(role, policies.PRUNE),
        ),
        run.manifest.project,
    )


def become(command: Command) -> NoReturn:
    """Replace this process. Raises OSError where the program cannot be executed.

    Its standard input never ends and never has anything in it: the agent would take the end for its own. What it
    inherits besides standard output and error is the descriptor that keeps it so.
    """
    program = command.arguments[0]
    # Before anybody is told that it will succeed. Only a missing interpreter shows later.
    os.stat(program)
    if not os.access(program, os.X_OK):
        raise PermissionError(errno.EACCES, "not executable")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and what is ignored stays so across execve(2).
        signal.signal(number, signal.SIG_DFL)
    _tell(os.environ, "READY=1\nSTATUS=launched")
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.dup2(writing, 3)
    for descriptor in (0, 3):
        # One that was free has come out of pipe(2) as it is.
        os.set_inheritable(descriptor, True)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    os.execve(program, command.arguments, command.environment)


def _check_skill(skill: Skill) -> None:
    try:
        found = manifest.read_skill(skill.path)
    except Refusal as refusal:
        raise Refusal("skill_changed", f"a skill of the run {refusal.text}", "skills") from refusal
    if found != skill:
        raise Refusal("skill_changed", "a skill was changed after the run was started with it", "skills")


def _write_system_prompt(run: rundir.Run, role: str, plan_first: bool) -> None:
    try:
        text = prompts.system_prompt(role, run.manifest.project, plan_first)
    except OSError as error:
        raise Refusal("prompt_missing", "the installation lacks the system prompt of this role", role) from error
    try:
        privatefiles.replace(harness.system_prompt_file(run.path, role), text.encode())
    except OSError as error:
        text = f"the system prompt cannot be written into the run's directory: {os.strerror(error.errno or 0)}"
        raise Refusal("run_unwritable", text, role) from error


def _give_up(status: int, why: str) -> int:
    sys.stderr.write(f"orchestrate-worker: {why}\n")
    _tell(os.environ, f"STATUS={why}")
    return status


def _tell(environ: Mapping[str, str], state: str) -> None:
    """Say something to the service manager, if there is one: `start_worker` waits for it (sd_notify(3))."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
        try:
            line.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
        except OSError as error:
            # A start that nobody hears of times out.
            sys.stderr.write(
                f"orchestrate-worker: the service manager does not listen: {os.strerror(error.errno or 0)}\n"
            )
