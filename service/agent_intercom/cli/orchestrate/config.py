# SPDX-License-Identifier: Apache-2.0
"""`config check` and `config show`: what is configured for a project, where each value comes from, what is wrong."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from os import path
from typing import Any, Final, NamedTuple

import msgspec

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import ERROR, Answer, JsonObject, bounded
from agent_intercom.cli.orchestrate.preparing import project_of
from agent_intercom.orchestration import places
from agent_intercom.orchestration.config.load import Examined, examine
from agent_intercom.orchestration.config.plan import Asked, Plan, custom_roles, plan, thresholds
from agent_intercom.orchestration.config.shapes import ORCHESTRATE, Configuration, File, Problem
from agent_intercom.orchestration.config.sources import PACKAGED, Source
from agent_intercom.orchestration.config.workerplan import RULES
from agent_intercom.orchestration.contract import SPECIALISTS
from agent_intercom.orchestration.errors import Refusal


class Setting(NamedTuple):
    """The value of one setting as JSON has it, and where it comes from."""

    value: Any
    source: Source


MAX_PROBLEMS: Final = 100
"""How many faults an answer has: callers read a quarter of a MiB."""


def check(options: argparse.Namespace) -> Answer:
    """`config check`: every fault of the files and variables that count for a project."""
    project = project_of(options.project)
    found, problems = _examined(project)
    if problems or found.tolerated:
        return _failed(found, problems, project)
    settings = _settings(found.configuration, project)
    counted = [file.path for file in found.files if file.counted]
    lines = [f"ok ({', '.join(map(output.printable, counted)) or 'nothing is configured'})"]
    lines += [f"{output.printable(file.path)} does not count: {instead(file)}" for file in passed_over(found)]
    return Answer(_data(found, settings, []), lines)


def show(options: argparse.Namespace) -> Answer:
    """`config show`: every setting as a start in a project would use it. With faults that prevent it, only those."""
    project = project_of(options.project)
    found, problems = _examined(project)
    if problems:
        return _failed(found, problems, project)
    settings = _settings(found.configuration, project)
    return Answer(_data(found, settings, found.tolerated), _lines(found, settings, project))


def _examined(project: str) -> tuple[Examined, list[Problem]]:
    found = examine(os.environ, project)
    problems = list(found.problems)
    if found.configuration is not None and (problem := custom_roles(found.configuration.models, project)) is not None:
        problems.append(problem)
    try:
        places.state_root(os.environ)
    except Refusal as refusal:
        problems.append(Problem(refusal.field, "", refusal.text.removeprefix(f"{refusal.field} ")))
    return found, problems


def _failed(found: Examined, problems: Sequence[Problem], project: str) -> Answer:
    every = [*problems, *found.tolerated]
    count = "1 fault" if len(every) == 1 else f"{len(every)} faults"
    consequence = "no run starts before that is put right" if problems else "runs that do without what is named start"
    settings = {} if problems else _settings(found.configuration, project)
    lines = [output.printable(problem.text) for problem in every[:MAX_PROBLEMS]]
    if len(every) > MAX_PROBLEMS:
        lines.append(f"and {len(every) - MAX_PROBLEMS} more")
    return Answer(_data(found, settings, every), lines, (ERROR, f"{count} in the settings; {consequence}"))


def _data(found: Examined, settings: dict[str, Setting], problems: Sequence[Problem]) -> JsonObject:
    return {
        "files": [
            {"path": file.path, "kind": file.kind, "present": file.present, "counted": list(file.counted)}
            for file in found.files
        ],
        "settings": {key: {"value": one.value, "source": one.source.text} for key, one in settings.items()},
        "problems": [
            {name: bounded(text) for name, text in problem._asdict().items()} for problem in problems[:MAX_PROBLEMS]
        ],
        "problems_total": len(problems),
    }


def _settings(configuration: Configuration | None, project: str) -> dict[str, Setting]:
    if configuration is None:
        return {}
    asked = Asked(project=project, project_custom_roles=False, need_commands=False)
    made = plan(configuration, asked)
    of_all = plan(configuration, msgspec.structs.replace(asked, specialists=dict.fromkeys(SPECIALISTS, True)))
    settings = {
        "runs": Setting(places.state_root(os.environ), _root_source()),
        "profile": Setting(made.profile.name, made.sources["profile"]),
        "implementation_flow": Setting(made.flow, made.sources["flow"]),
        "specialists": Setting(list(made.specialists), made.sources["specialists"]),
        "workspace_capsule": Setting(made.workspace_capsule, made.sources["workspace_capsule"]),
    }
    for role, worker in of_all.roles.items():
        for key in ("provider", "model", "thinking", "harness"):
            settings[f"roles.{role}.{key}"] = Setting(getattr(worker, key), worker.sources[key])
    settings |= _budget(made)
    settings |= _workers(configuration, of_all)
    own: dict[str, Any] = {
        "harness.pi.command": made.pi_command,
        "harness.pi.bridge": made.pi_bridge,
        "environment.pass": list(made.passed),
        "environment.drop": list(made.dropped),
        "retention.keep_days": made.retention.keep_days,
        "retention.keep_runs": made.retention.keep_runs,
    }
    for key, value in own.items():
        source = Source("user", configuration.own_file, key) if key in configuration.own_keys else PACKAGED
        settings[key] = Setting(value, source)
    return settings


def _workers(configuration: Configuration, made: Plan) -> dict[str, Setting]:
    """What every worker may do and use, and what a table of one role says of that."""
    every, own, file = configuration.workers.every, configuration.harness, configuration.own_file
    found: dict[str, Setting] = {}
    for key, packaged in RULES.items():
        value = getattr(every, key)
        packaged = list(packaged) if isinstance(packaged, tuple) else packaged
        found[f"workers.{key}"] = Setting(packaged, PACKAGED) if value is None else _own(value, file, f"workers.{key}")
    for role, worker in made.roles.items():
        for key in RULES:
            if worker.sources[key].word == "role":
                name = f"workers.roles.{role}.{key}"
                found[name] = _own(getattr(worker, key), file, name)
    key = "harness.command.command"
    found[key] = Setting(None, PACKAGED) if own.command is None else _own(own.command, file, key)
    for role, words in own.role_commands.items():
        found[f"harness.command.roles.{role}"] = _own(words, file, f"harness.command.roles.{role}")
    return found


def _own(value: Any, file: str, key: str) -> Setting:
    return Setting(list(value) if isinstance(value, tuple) else value, Source("user", file, key))


def _budget(made: Plan) -> dict[str, Setting]:
    """What is set, and what somebody took away."""
    values = {"enforcement": made.budget_policy.enforcement, **dict(thresholds(made.budget_policy))}
    return {
        key: Setting(values.get(key.removeprefix("budget.")), source)
        for key, source in made.sources.items()
        if key.startswith("budget.")
    }


def _root_source() -> Source:
    for variable in (places.RUNS_ENVIRONMENT, places.ORIGINAL_RUNS_ENVIRONMENT):
        if os.environ.get(variable):
            return Source("environment", key=variable)
    return Source("environment", key="XDG_STATE_HOME") if path.isabs(os.environ.get("XDG_STATE_HOME", "")) else PACKAGED


def passed_over(found: Examined) -> list[File]:
    """The original's files that are there and do not count, because ours speaks of the same."""
    return [file for file in found.files if file.present and not file.counted and file.kind != ORCHESTRATE]


def instead(file: File) -> str:
    """Why such a file does not count."""
    return f"{places.CONFIG_NAME} says something about {'models' if 'models' in file.kind else 'budgets'}"


def _lines(found: Examined, settings: dict[str, Setting], project: str) -> Iterator[str]:
    yield f"# for {output.printable(project)}"
    for file in found.files:
        state = ", ".join(file.counted) if file.counted else "says nothing" if file.present else "not there"
        if file in passed_over(found):
            state = f"does not count: {instead(file)}"
        yield f"# {output.printable(file.path)}: {state}"
    for problem in found.tolerated:
        yield f"# fault: {output.printable(problem.text)}"
    for key, (value, source) in settings.items():
        where = ": ".join(part for part in (path.basename(source.file), source.key) if part)
        note = f"  # from {output.printable(where)}" if where and source.word != PACKAGED.word else ""
        if value is None:
            yield f"# {key}: {'off' if key.startswith('budget.') else 'not set'}{note}"
        else:
            yield f"{key} = {output.printable(json.dumps(value, ensure_ascii=False))}{note}"
