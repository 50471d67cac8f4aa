# SPDX-License-Identifier: Apache-2.0
"""From the flags of `start` to a run that could be made; nothing is made here (orchestration spec, section 11.2)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.cli.orchestrate import texts
from agent_intercom.cli.orchestrate.answer import ERROR, CommandFailure, usage
from agent_intercom.orchestration import (
    environment,
    harness,
    models,
    pipackage,
    places,
    rootscan,
    rundir,
    runs,
    runtime,
    tmux,
)
from agent_intercom.orchestration.config.flagfaults import specialist_flag
from agent_intercom.orchestration.config.load import load
from agent_intercom.orchestration.config.plan import Asked, Plan, PlannedRole, check_flags, plan
from agent_intercom.orchestration.contract import MAX_CAPSULE, ROLES, SPECIALISTS
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import MAX_SKILLS, Manifest, Skill, read_skill
from agent_intercom.wire.clock import system_now
from agent_intercom.workers.environment import commands_of, with_command

MAX_SESSION: Final = 100
"""Characters of the name of a new session: it is part of paths, of units' descriptions and of tables."""

_REST_OF_PLACE: Final = 65_536
"""Bytes of the run's place that are not for its environment."""

DEFAULT_TASKS: Final = {
    "probe": "Look for the assumption of this work that is most likely to be wrong: integration, contracts between"
    " parts, behaviour at run time, security. Test it with evidence that you make up.",
    "playwright": "After each implementation, try the local test application in a browser: the main path, and one path"
    " that must fail, with data that you make up.",
    "django": "Review each implementation for queries and transactions, settings, life cycle, database, security, tests"
    " and operation. Tell what blocks from what would be nice.",
}
"""What a specialist looks at where nobody says more."""


class Prepared(NamedTuple):
    """A run that can be made. `environment` is what its workers inherit, `scope` the private scope id or None.

    `programs` are the absolute paths of what its harnesses need, `workers` what each worker that is hosted here is, may
    do and use, `report_usage` the observers' age (section 0.2), `called_as` the name that this program was called by.
    """

    root: str
    session: str
    run_id: str
    spec: rundir.RunSpec
    manifest: Manifest
    plan: Plan
    environment: Mapping[str, str]
    scope: str | None
    programs: Mapping[str, str]
    workers: Mapping[str, runtime.WorkerPlace]
    report_usage: bool
    called_as: str


class _Said(NamedTuple):
    """What the flags of one start say, with the files that they name read. The three mappings are by role."""

    session: str
    asked: Asked
    task: str
    capsule: str | None
    tasks: Mapping[str, str]
    context: Mapping[str, str]
    skills: Mapping[str, Sequence[Skill]]


def prepare(options: argparse.Namespace) -> Prepared:
    """Check everything that can be checked without making anything. Raises CommandFailure or Refusal.

    What a person has typed is looked at first, then what the settings say, and then the machine.
    """
    said = _said(options)
    made = plan(load(os.environ, said.asked.project), said.asked)
    given = with_command(environment.choose(os.environ, made.passed, made.dropped), own_commands())
    _check_size(given)
    scope = environment.scope(os.environ)
    spec = _spec(options, said, made)
    run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    root = places.state_root(os.environ)
    manifest = rundir.check(root, said.session, run_id, spec, system_now())
    _check_runtime_directory(spec.unit)
    refuse_collision(said.session, options.program)
    package = pipackage.find(os.environ, made.pi_bridge or "")
    programs = _programs(made, given, package)
    workers = {role: _worker(role, chosen, given) for role, chosen in made.roles.items() if _is_hosted(chosen)}
    if not options.skip_model_check:
        models.require(made.roles, programs.get(harness.PROGRAM, made.pi_command), given)
    report_usage = package is not None and package.observer_report_usage
    return Prepared(
        root=root,
        session=said.session,
        run_id=run_id,
        spec=spec,
        manifest=manifest,
        plan=made,
        environment=given,
        scope=scope,
        programs=programs,
        workers=workers,
        report_usage=report_usage,
        called_as=options.program,
    )


def project_of(directory: str | None) -> str:
    """The canonical path of a project, by default the current directory. Raises CommandFailure `invalid_arguments`."""
    if directory == "":
        raise usage("--project is empty", "Leave it out for this directory.")
    try:
        project = path.realpath(os.getcwd() if directory is None else directory)
    except FileNotFoundError as error:
        raise usage("this directory is gone", "Say --project.") from error
    if not path.isdir(project):
        raise usage("--project is not a directory that is there")
    return project


def refuse_collision(session: str, program: str) -> None:
    """Raises CommandFailure `session_collision` where a run of a session lives, be it one that cannot be read.

    `program` is the name that this program was called by.
    """
    live = runs.live_runs(os.environ)
    another = "--session gives the new one another name."
    if any(entry.session == session for entry in live.entries):
        hint = f"`{program} stop {session} --yes` ends it; {another}"
        raise CommandFailure("session_collision", f"a run of the session {session} is going on", hint)
    if unreadable := next((issue for issue in live.issues if issue.name == session), None):
        text = f"a run of the session {session} is going on, and it cannot be read: {unreadable.text}"
        raise CommandFailure("session_collision", text, f"`{program} doctor` tells more; {another}")
    if session in tmux.hosted(os.environ).values():
        raise CommandFailure("session_collision", f"a run of the session {session} is going on in tmux", another)


def own_commands() -> str | None:
    """The directory of this `orchestrate`, which workers are to find too; None where it cannot be told."""
    return commands_of(path.dirname(path.abspath(sys.argv[0])))


def needs_pi(made: Plan) -> bool:
    """Whether a run has a worker that is Pi."""
    return any(chosen.harness == harness.PI for chosen in made.roles.values())


def pi_program(made: Plan, given: Mapping[str, str]) -> str | None:
    """The absolute path of Pi, as workers find it; None where it is not there. `given` is their environment."""
    found = shutil.which(made.pi_command, path=given.get("PATH", ""))
    return path.abspath(found) if found else None


def _said(options: argparse.Namespace) -> _Said:
    """Raises CommandFailure `invalid_arguments`, or Refusal for what a flag cannot say."""
    if options.custom_role or options.role_registry:
        raise usage(
            "there are no custom roles", "Use the built-in ones: --with-probe, --with-playwright, --with-django-expert."
        )
    _refuse_empty(options)
    project = project_of(options.project)
    session = runs.default_session(project) if options.session is None else _session(options.session)
    asked = _asked(options, project)
    check_flags(asked)
    context = dict(texts.pairs("worker-context", options.worker_context, ROLES))
    task = texts.given("Task", "task", options.task, options.task_file)
    if task is None:
        raise usage("there is no task", "Say it with --task or --task-file.")
    capsule = texts.given(
        "Context capsule", "context-capsule", options.context_capsule, options.context_capsule_file, MAX_CAPSULE
    )
    tasks = {}
    for role in SPECIALISTS:
        text, file = getattr(options, f"{role}_task"), getattr(options, f"{role}_task_file")
        if (own := texts.given(f"{role.capitalize()} task", f"{role}-task", text, file)) is not None:
            tasks[role] = own
    return _Said(session, asked, task, capsule, tasks, context, _skills(options.worker_skill))


def _refuse_empty(options: argparse.Namespace) -> None:
    """What is given and empty is no choice, and none that was left out. Texts are looked at where they are read."""
    for name, value in vars(options).items():
        if not name.endswith(("task", "capsule")) and (value == "" or (isinstance(value, list) and "" in value)):
            raise usage(f"--{name.replace('_', '-')} is empty", "Give it a value, or leave it out.")


def _session(name: str) -> str:
    """The name of a new session. Raises CommandFailure `invalid_arguments`."""
    if not rootscan.is_name(name):
        hint = "Use letters, digits, dots, dashes and underscores."
        raise usage("--session is not a name that a session can have", hint)
    if name.startswith("-"):
        raise usage("--session begins with a dash, and every other command would take it for a flag")
    if len(name) > MAX_SESSION:
        raise usage(f"--session has more than {MAX_SESSION} characters")
    return name


def _asked(options: argparse.Namespace, project: str) -> Asked:
    chosen = {}
    for role in ROLES:
        given = {key: getattr(options, f"{role}_{key}") for key in ("provider", "model", "thinking")}
        if given := {key: value for key, value in given.items() if value is not None}:
            chosen[role] = given
    return Asked(
        project=project,
        profile=options.profile,
        models=chosen,
        harness=dict(texts.pairs("harness", options.harness, ROLES)),
        commands={role: _words(line) for role, line in texts.pairs("worker-command", options.worker_command, ROLES)},
        flow=options.implementation_flow,
        specialists={role: getattr(options, f"with_{role}") for role in SPECIALISTS},
        workspace_capsule=options.workspace_capsule,
        budget_enforcement=options.budget_enforcement,
        budget_overrides=options.budget_override,
        forced=options.force_specialist,
        max_repair_rounds=options.max_repair_rounds,
        project_custom_roles=not options.no_project_custom_roles,
    )


def _spec(options: argparse.Namespace, said: _Said, made: Plan) -> rundir.RunSpec:
    by_flag: Mapping[str, Mapping[str, object]] = {
        "--worker-context": said.context,
        "--worker-skill": said.skills,
        "--harness": said.asked.harness,
        "--worker-command": said.asked.commands,
    }
    for flag, by_role in by_flag.items():
        if absent := by_role.keys() - made.roles.keys():
            role = min(absent)
            raise usage(f"{flag}: the run has no {role}", f"Say {specialist_flag(role, True)}, or leave it out.")
    for role, skills in said.skills.items():
        if made.roles[role].harness == harness.COMMAND and any(os.pathsep in skill.path for skill in skills):
            text = f"--worker-skill: a skill of {role} has a colon in its path"
            raise usage(text, "Its program is told the paths with colons between them.")
    return rundir.RunSpec(
        unit=os.urandom(8).hex(),
        project=said.asked.project,
        approve_project=options.approve_project,
        transport="rpc",
        execution_profile=made.profile,
        orchestration_config=made.orchestration_config,
        project_config=made.project_config,
        roles={
            role: rundir.RoleSpec(
                provider=chosen.provider,
                model=chosen.model,
                thinking=chosen.thinking,
                skills=said.skills.get(role, ()),
                harness=chosen.harness,
            )
            for role, chosen in made.roles.items()
        },
        implementation_flow=made.flow,
        forced_specialists=made.forced,
        budget_policy=made.budget_policy,
        max_repair_rounds=made.max_repair_rounds,
        worker_context=said.context,
        startup=_startup(options, said, made),
    )


def _startup(options: argparse.Namespace, said: _Said, made: Plan) -> rundir.Startup:
    tasks = {}
    for role in SPECIALISTS:
        if role in made.roles:
            tasks[role] = said.tasks.get(role) or f"{DEFAULT_TASKS[role]}\n"
        elif role in said.tasks:
            raise usage(f"--{role}-task requires {specialist_flag(role, True)}")
    workspace_capsule = None
    if made.workspace_capsule:
        from agent_intercom.orchestration import workspace

        workspace_capsule = workspace.build(said.asked.project, options.workspace_relevant_path)
    elif options.workspace_relevant_path:
        raise usage("--workspace-relevant-path requires --workspace-capsule")
    return rundir.Startup(
        task=said.task, role_tasks=tasks, context_capsule=said.capsule, workspace_capsule=workspace_capsule
    )


def _skills(values: list[str]) -> dict[str, list[Skill]]:
    found: dict[str, list[Skill]] = {}
    for role, name in texts.pairs("worker-skill", values, ROLES):
        skills = found.setdefault(role, [])
        file = path.realpath(name)
        if len(skills) >= MAX_SKILLS:
            raise usage(f"--worker-skill: {role} has more than {MAX_SKILLS} skills")
        if any(skill.path == file for skill in skills):
            raise usage(f"--worker-skill: {name} is named twice for {role}")
        try:
            skills.append(read_skill(file))
        except Refusal as refusal:
            raise usage(f"--worker-skill: {name} {refusal.text}", "A skill is a text file.") from refusal
    return found


def _check_size(given: Mapping[str, str]) -> None:
    """Whether the environment of workers fits into the run's place. Raises CommandFailure `orchestration_error`."""
    size, limit = len(json.dumps(dict(given))), runtime.MAX_BYTES - _REST_OF_PLACE
    if size > limit:
        largest = sorted(given, key=lambda name: len(given[name]), reverse=True)[:3]
        text = f"the environment that workers would get is too large: {size // 1024} KiB, of which {limit // 1024} fit"
        hint = f"Drop what they do not need in orchestrate.toml ([environment] drop); largest: {', '.join(largest)}."
        raise CommandFailure(ERROR, text, hint)


def _check_runtime_directory(unit: str) -> None:
    """What the address of the run `unit` is to be in. Raises Refusal, or CommandFailure `orchestration_error`."""
    directory = runtime.runtime_dir(os.environ)
    hint = "Log in through systemd-logind, or set it to /run/user/UID."
    if not path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise CommandFailure(ERROR, "XDG_RUNTIME_DIR names no directory of yours", hint)
    if len(os.fsencode(runtime.socket_path(directory, unit))) > runtime.MAX_SOCKET_PATH:
        raise CommandFailure(ERROR, "XDG_RUNTIME_DIR is too long for the address of a socket", hint)


def _words(line: str) -> list[str]:
    """The words of a command as a shell would part them. Raises CommandFailure `invalid_arguments`."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise usage("--worker-command has a quotation mark that nothing closes", "Quote it as for a shell.") from error
    if not words or not words[0]:
        raise usage("--worker-command names no program", "Say --worker-command ROLE='PROGRAM WORD...'.")
    # Where the worker works need not be where this is called.
    return [path.abspath(words[0]), *words[1:]] if "/" in words[0] else words


def _is_hosted(chosen: PlannedRole) -> bool:
    return chosen.harness != harness.EXTERNAL


def _worker(role: str, chosen: PlannedRole, given: Mapping[str, str]) -> runtime.WorkerPlace:
    """What a run says of a worker that is hosted here. Raises CommandFailure `missing_prerequisite`."""
    command: tuple[str, ...] = ()
    if chosen.command:
        program = shutil.which(chosen.command[0], path=given.get("PATH", ""))
        if program is None:
            fault, hint = program_fault(chosen.command[0], given.get("PATH", ""))
            text = f"the program that is to work as {role} {fault} ({chosen.sources['command'].text})"
            raise CommandFailure("missing_prerequisite", text, hint)
        command = (path.abspath(program), *chosen.command[1:])
    return runtime.WorkerPlace(
        command=command,
        confined=chosen.confine,
        required=chosen.required,
        writable=tuple(_directories(role, chosen)),
        network=chosen.network,
        memory_max=chosen.memory_max,
        memory_high=chosen.memory_high,
        tasks_max=chosen.tasks_max,
        runtime_ms=None if chosen.runtime_minutes is None else chosen.runtime_minutes * 60_000,
    )


def program_fault(name: str, search: str) -> tuple[str, str]:
    """What is wrong with a program that `shutil.which` does not find, and the way out. `search` is PATH."""
    places_ = [name] if "/" in name else [path.join(each, name) for each in search.split(os.pathsep) if each]
    for place in places_:
        if path.isdir(place):
            return f"is a directory: {place}", "Name a program in it."
        if path.exists(place):
            return f"cannot be executed: {place}", f"`chmod +x {shlex.quote(place)}`, or name another."
    if "/" in name:
        return f"is not there: {name}", "Correct the path, or name another."
    hint = "Install it, or say its path; the words after it are its own."
    if len(name.split()) > 1:
        hint = "Write the words of a command one by one, or `sh -c 'LINE'`."
    return f"is not there: {name} is in no directory of PATH", hint


def _directories(role: str, chosen: PlannedRole) -> Iterator[str]:
    """What a confined worker may write besides, without links. Raises CommandFailure `orchestration_error`."""
    for name in chosen.writable if chosen.confine else ():
        real = path.realpath(name)
        if not path.isdir(real):
            text = f"{role} is to write in {name}, which is no directory that is there"
            raise CommandFailure(ERROR, text, f"Make it, or take it out of {chosen.sources['writable'].text}.")
        yield real


def _programs(made: Plan, given: Mapping[str, str], package: pipackage.PiPackage | None) -> dict[str, str]:
    """The absolute paths of what the harnesses of the run need. Raises CommandFailure `missing_prerequisite`."""
    if not needs_pi(made):
        return {}
    program = pi_program(made, given)
    if program is None:
        hint = "Install Pi, name it in orchestrate.toml ([harness.pi] command), or choose another harness (--harness)."
        raise CommandFailure("missing_prerequisite", "Pi is not there: no program of that name is in PATH", hint)
    if package is None:
        hint = (
            "Install it (`pi install npm:pi-tmux-orchestrator`), or name its file in orchestrate.toml "
            "([harness.pi] bridge)."
        )
        text = "the worker bridge of Pi is not there"
        if made.pi_bridge:
            hint = "Correct [harness.pi] bridge there, or take it out."
            text += f": orchestrate.toml names {made.pi_bridge}"
        raise CommandFailure("missing_prerequisite", text, hint)
    return {harness.PROGRAM: program, harness.PI_BRIDGE: package.bridge}
