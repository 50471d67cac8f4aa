# SPDX-License-Identifier: Apache-2.0
"""`start`: a run, or with `--dry-run` what it would be (orchestration spec, sections 11.2 and 11.3)."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from os import path
from typing import Final

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate import confining, limiting
from agent_intercom.cli.orchestrate.answer import ERROR, Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.preparing import Prepared, prepare
from agent_intercom.cli.place import MEMORY_FILE_SYSTEMS, file_system
from agent_intercom.orchestration import budget, harness, places, policies, runs, runtime, snapshot
from agent_intercom.orchestration.contract import IMPLEMENTER
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers.environment import finds_command

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def start(options: argparse.Namespace) -> Answer | int:
    """`orchestrate start`."""
    if options.attach:
        _refuse_to_attach(options)
    with _places():
        prepared = prepare(options)
    warned = list(_warnings(prepared))
    facts = [*_facts(prepared), "", *(f"Warning: {output.printable(text)}" for text in warned)]
    if options.dry_run:
        return Answer(_data(prepared, None, warned), [*facts, "This is what would be; nothing was made."])
    from agent_intercom.cli.orchestrate.launching import launch

    with _places():
        run = launch(prepared)
    lines = [*facts, *_outcome(options.program, prepared, run.path)]
    if not options.attach:
        return Answer(_data(prepared, run.path, warned), lines)
    for line in lines:
        print(line, flush=True)
    from agent_intercom.cli.orchestrate.watching import dashboard

    options.session, options.run = prepared.session, prepared.run_id
    return dashboard(options)


def _refuse_to_attach(options: argparse.Namespace) -> None:
    """Raises CommandFailure `interactive_only` where nobody could see the dashboard."""
    from agent_intercom.tui.terminal import is_screen

    if options.json:
        raise CommandFailure("interactive_only", "--attach is for a person in a terminal", "Leave out --json.")
    if not is_screen(os.environ):
        hint = f"Leave it out; `{options.program} watch` tells as lines what happens."
        raise CommandFailure("interactive_only", "--attach is for a person in a terminal", hint)


@contextlib.contextmanager
def _places() -> Iterator[None]:
    """Tells of a place that cannot be written why, and which it is."""
    try:
        yield
    except Refusal as refusal:
        if refusal.code != "run_unwritable":
            raise
        cause = refusal.__cause__
        full = refusal.field == "STATE_FULL"
        number = errno.ENOSPC if full else cause.errno if isinstance(cause, OSError) else None
        text = f"{refusal.text}: {os.strerror(number)}" if number else refusal.text
        where = f"{places.state_root(os.environ)}, or name another directory in {places.RUNS_ENVIRONMENT}"
        if "runtime" in refusal.text:
            where = f"{runtime.runtime_dir(os.environ)} (XDG_RUNTIME_DIR)"
        what = "Make room in" if number in _FULL else "Make it possible to write to"
        raise CommandFailure(ERROR, text, f"{what} {where}.") from refusal


def _warnings(prepared: Prepared) -> Iterator[str]:
    """What a person should know before workers write in the project; none of it keeps a run from starting."""
    project = prepared.spec.project
    for entry in runs.live_runs(os.environ).entries:
        other = entry.manifest.project
        if _meet(project, other):
            where = "this directory" if other == project else other
            yield f"another run works in {where}: {entry.session}; two implementers would write in one tree"
    home = path.realpath(path.expanduser("~"))
    if path.commonpath((project, home)) == project:
        what = "the root of the file system" if project == "/" else "your home directory"
        yield f"the project holds {what} and everything in it, and workers may write there"
    elif not _in_git(project):
        yield "the project is in no Git work tree: what workers change is not seen and not undone there"
    for role, worker in prepared.workers.items():
        if worker.confined and role != IMPLEMENTER and any(_meet(project, name) for name in worker.writable):
            yield f"{role} may write in the project: a directory of [workers] writable is in it, or has it in it"
    programs = [role for role, worker in prepared.workers.items() if worker.command]
    if programs and not finds_command(prepared.environment):
        yield f"no directory of PATH has `orchestrate`, by which a program reports: {', '.join(programs)}"
    if why := _no_copy(prepared, copied := [role for role in programs if _reads_only(prepared, role)]):
        yield f"these programs get no copy of the project and do not start: {', '.join(copied)}: {why}"
    if lacks := _lacking(prepared):
        yield f"limits of its workers are not enforced: {limiting.lacking(lacks)} (`orchestrate doctor`)"
    directory = runtime.runtime_dir(os.environ)
    kind = file_system(directory)
    if kind is not None and kind not in MEMORY_FILE_SYSTEMS:
        yield f"XDG_RUNTIME_DIR is on {kind}: the keys in the environment of the run are written to a disk"


def _reads_only(prepared: Prepared, role: str) -> bool:
    return role != IMPLEMENTER and prepared.workers[role].confined


def _no_copy(prepared: Prepared, roles: Sequence[str]) -> str | None:
    """Why no copy of the project can be made for programs of `roles`; None where one may be, and where none is made."""
    if not roles:
        return None
    from agent_intercom.workers import checkout

    return checkout.hopeless(prepared.spec.project, prepared.environment.get("PATH", os.defpath))


def _lacking(prepared: Prepared) -> tuple[str, ...]:
    """The controllers that the limits of the workers take and the user's manager does not have."""
    from agent_intercom.workers import limits

    if not limits.asked(prepared.workers.values()):
        return ()
    from agent_intercom.host.manager import Manager, ManagerError

    try:
        with Manager() as manager:
            return limits.lacking(prepared.workers.values(), manager.control_group())
    except ManagerError:
        # Without a manager nothing is started.
        return ()


def _meet(one: str, other: str) -> bool:
    """Whether one of two directories is, or lies in, the other."""
    return path.commonpath((one, other)) in {one, other}


def _in_git(directory: str) -> bool:
    """Whether it or a directory above it is a Git work tree. A repository that a variable names does not count."""
    while not path.lexists(path.join(directory, ".git")):
        directory, below = path.dirname(directory), directory
        if directory == below:
            return False
    return True


def _data(prepared: Prepared, directory: str | None, warned: Sequence[str]) -> JsonObject:
    """Everything that the contract has, and of ours `run_id` and what comes after it."""
    spec, manifest = prepared.spec, prepared.manifest
    capsule = spec.startup.context_capsule
    return {
        "session": prepared.session,
        "implementation_flow": spec.implementation_flow,
        "forced_specialists": list(spec.forced_specialists),
        "roles": [snapshot.role_object(role, record, spec.transport) for role, record in manifest.roles.items()],
        "monitor": {"kind": "broker/status"},
        "transport": spec.transport,
        "coordination_protocol": {"name": "broker-v1", "version": 1, "payload_files": False, "polling": False},
        "budget_policy": json.loads(budget.to_json(spec.budget_policy)),
        **snapshot.provenance(manifest),
        "worker_resources": {
            "skill_discovery": False,
            "skills": {role: [skill.path for skill in chosen.skills] for role, chosen in spec.roles.items()},
        },
        "trust": {
            "child_bypass": spec.approve_project,
            "policy": "approve" if spec.approve_project else "saved-or-global-policy",
        },
        "dry_run": directory is None,
        "paths": {
            "state_root": prepared.root,
            "coordination": directory,
            "observer_socket": None if directory is None else _address(prepared),
        },
        "state_retained_on_stop": True,
        "context_capsule": {"present": capsule is not None, "chars": len(capsule or "")},
        "workspace_capsule": _workspace(spec.startup.workspace_capsule),
        "continuation_policy": json.loads(policies.continuation(spec.max_repair_rounds)),
        "worker_context_policy": json.loads(policies.worker_context(spec.worker_context)),
        "run_id": None if directory is None else prepared.run_id,
        "unit": None if directory is None else spec.unit,
        "host": manifest.host,
        "harness": {role: chosen.harness for role, chosen in spec.roles.items()},
        "environment": sorted(prepared.environment),
        "scoped": prepared.scope is not None,
        "workers": confining.result(prepared.workers, spec.project),
        "external": None if directory is None else _external(prepared, directory),
        "warnings": list(warned),
    }


def _external(prepared: Prepared, directory: str) -> JsonObject:
    """What somebody who starts the worker of a role has to give to it."""
    return {
        role: {"socket": _address(prepared), "token_file": path.join(directory, f"{role}.token"), "generation": 1}
        for role, chosen in prepared.spec.roles.items()
        if chosen.harness == harness.EXTERNAL
    }


def _workspace(capsule: str | None) -> JsonObject:
    if capsule is None:
        counts = {"instruction_count": 0, "marker_count": 0, "relevant_path_count": 0, "bytes": 0}
        return {"enabled": False, "schema_version": None, "validation": "disabled", **counts, "digest": None}
    from agent_intercom.orchestration import workspace

    return workspace.describe(capsule)


def _facts(prepared: Prepared) -> Iterator[str]:
    spec = prepared.spec
    yield f"Session:      {output.printable(prepared.session)}"
    yield f"Project:      {output.printable(spec.project)}"
    yield f"Flow:         {spec.implementation_flow}{_repairs(spec.max_repair_rounds)}"
    yield f"Profile:      {spec.execution_profile.name} ({spec.execution_profile.source})"
    yield f"Budget:       {_budget(spec.budget_policy)}"
    yield f"Capsules:     {_capsules(prepared)}"
    yield f"Environment:  of this shell {', '.join(sorted(prepared.environment))}"
    yield f"Scope:        {'that of this shell' if prepared.scope else 'none'}"
    title = "Programs:"
    for role, worker in prepared.workers.items():
        if worker.command:
            # Whoever calls this has said the words, or the settings of this user.
            yield output.printable(f"{title:13} {role}: {shlex.join(worker.command)}")
            title = ""
    yield from confining.lines(prepared.workers, spec.project)
    yield ""
    rows = []
    for role, chosen in spec.roles.items():
        forced = " (in every round)" if role in spec.forced_specialists else ""
        model, thinking = f"{chosen.provider}/{chosen.model}", chosen.thinking
        if chosen.harness == harness.COMMAND:
            model, thinking = f"program {path.basename(prepared.workers[role].command[0])}", "-"
        access = _access(prepared, role)
        rows.append([role + forced, chosen.harness, model, thinking, access, str(len(chosen.skills) or "-")])
    yield from output.table(["ROLE", "HARNESS", "MODEL", "THINKING", "ACCESS", "SKILLS"], rows)


def _access(prepared: Prepared, role: str) -> str:
    """Whether a role writes; of one that does not, whether anything but its agent sees to that."""
    if prepared.manifest.roles[role].tools is None:
        return "writes"
    worker = prepared.workers.get(role)
    return "reads" if worker is None or worker.confined else "reads, unconfined"


def _outcome(program: str, prepared: Prepared, directory: str) -> Iterator[str]:
    session = output.printable(prepared.session)
    roles = prepared.spec.roles
    hosted = [role for role, chosen in roles.items() if chosen.harness != harness.EXTERNAL]
    external = [role for role in roles if role not in hosted]
    yield f"Run {prepared.run_id}: its broker answers (orchestrate@{prepared.spec.unit}.service)."
    if hosted:
        yield f"Started: {', '.join(hosted)}. Work begins when every worker has connected."
    if external:
        yield f"Waiting for workers that somebody else starts: {', '.join(external)}."
        yield f"They connect to {output.printable(_address(prepared))}"
        yield f"with the token in {output.printable(path.join(directory, 'ROLE.token'))}"
    yield f"Coordination: {output.printable(directory)}"
    yield f"Look:  {program} status {session}    {program} watch {session}    {program} attach {session}"
    yield f"Stop:  {program} stop {session} --yes"


def _address(prepared: Prepared) -> str:
    return runtime.socket_path(runtime.runtime_dir(os.environ), prepared.spec.unit)


def _repairs(limit: int | None) -> str:
    if limit is None:
        return ", repairs as often as the review asks for"
    return f", at most {limit} round{'' if limit == 1 else 's'} of repair before it pauses"


def _budget(policy: budget.Policy) -> str:
    """The thresholds on one line; nothing is stopped by them."""
    shown = [
        f"{level} {scope} {metric} {value}"
        for level, scopes in (("warning", policy.warning), ("hard", policy.hard))
        for scope, metrics in scopes.items()
        for metric, value in metrics.items()
    ]
    return f"{policy.enforcement}; {', '.join(shown) or 'no threshold'} (watched; nothing is stopped)"


def _capsules(prepared: Prepared) -> str:
    startup = prepared.spec.startup
    context = f"context {len(startup.context_capsule)} characters" if startup.context_capsule else "no context"
    described = _workspace(startup.workspace_capsule)
    return f"{context}, {'workspace ' + str(described['bytes']) + ' bytes' if described['enabled'] else 'no workspace'}"
