# SPDX-License-Identifier: Apache-2.0
"""Reading what is configured: `orchestrate.toml`, and the original's files for what that does not speak of.

Where `orchestrate.toml` says anything about models (a profile, a provider, a model, a thinking level, or a flow,
specialists or a workspace capsule of a project), the original's file of models does not count at all, and likewise for
budgets. Two files are never mixed. Nothing is created, and a file that does not count is not opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import path
from typing import NamedTuple

from agent_intercom.orchestration import places
from agent_intercom.orchestration.config import files, model, original, own, shapes
from agent_intercom.orchestration.config.plan import file_key, known_profiles, unknown_profile
from agent_intercom.orchestration.config.references import references
from agent_intercom.orchestration.config.shapes import (
    ORCHESTRATE,
    ORIGINAL_BUDGET,
    ORIGINAL_MODELS,
    PROFILE_VARIABLE,
    Configuration,
    File,
    Problem,
)
from agent_intercom.orchestration.errors import Refusal


class Examined(NamedTuple):
    """What was found. With problems there is no configuration: nothing starts by half of one.

    `tolerated` are the faults that keep nobody from starting a run: what our own file names and what is not, or no
    longer, there. Such a project matches no directory, and only a run that needs it is refused for a bridge.
    """

    configuration: Configuration | None
    files: tuple[File, ...]
    problems: list[Problem]
    tolerated: Sequence[Problem] = ()


def load(environ: Mapping[str, str], project: str | None = None) -> Configuration:
    """What is configured. `project` is the canonical path of the project that it is asked for.

    Raises Refusal `config_invalid` for the first fault: its text is `FILE: KEY: RULE`, its field the key.
    """
    found = examine(environ, project)
    if found.configuration is None:
        raise found.problems[0].refusal(len(found.problems) - 1)
    return found.configuration


def examine(environ: Mapping[str, str], project: str | None = None) -> Examined:
    """The same with every fault, and without an exception."""
    names, problems = _places(environ)
    if problems:
        return Examined(None, (), problems)
    own_name, model_name, budget_name = names
    ours = own.read(own_name, project)
    variable, problems = model.profile_variable(environ)
    problems = ours.problems + problems
    if ours.file is None:
        # Nobody can tell what the others would count for.
        kinds = zip(names, (ORCHESTRATE, ORIGINAL_MODELS, ORIGINAL_BUDGET), strict=True)
        looked_at = tuple(File(name, kind, path.lexists(name)) for name, kind in kinds)
        if ours.content is None:
            return Examined(None, looked_at, problems)
        named = references(ours.content, own_name, ORCHESTRATE, "default_profile")
        faults, tolerated = _of_projects(named, project)
        return Examined(None, looked_at, _once(problems + _check_profiles(named, variable) + faults), tolerated)

    counted = ours.counted()
    models, models_there, found = _models(ours.file, own_name, model_name, project)
    problems += found + _check_profiles(models, variable)
    if models.kind != ORCHESTRATE:
        problems += [problem for problem, _ in _directories(models, project)]
    # Projects of ours that say nothing about models have a directory all the same.
    found, tolerated = _of_projects(ours.file.shape(own_name, ORCHESTRATE), project)
    problems, tolerated = _once(problems + found), [*ours.tolerated, *tolerated]
    if "budget" in counted:
        budgets = shapes.Budget(file=own_name, kind=ORCHESTRATE, key="budget", policy=ours.policy)
        budget_there = path.lexists(budget_name)
    else:
        budgets, budget_there, found = original.read_budget(budget_name, project)
        problems += found
    looked_at = (
        File(own_name, ORCHESTRATE, ours.present, counted),
        _original(model_name, ORIGINAL_MODELS, models_there, "models", counted),
        _original(budget_name, ORIGINAL_BUDGET, budget_there, "budget", counted),
    )
    if problems:
        return Examined(None, looked_at, problems, tolerated)
    configuration = _configuration(ours.file, looked_at, ours.keys, variable, models, budgets)
    return Examined(configuration, looked_at, [], tolerated)


def _places(environ: Mapping[str, str]) -> tuple[list[str], list[Problem]]:
    """Where the three files are, and the variables that cannot say it."""
    names, problems = [], []
    for place in (places.config_file, places.model_config, places.budget_config):
        try:
            names.append(place(environ))
        except Refusal as error:
            problems.append(Problem(error.field, "", error.text.removeprefix(f"{error.field} ")))
    return names, _once(problems)


def _models(
    file: model.OrchestrateFile, own_name: str, model_name: str, project: str | None
) -> tuple[shapes.Models, bool, list[Problem]]:
    """The policy that counts, whether the original's file is there, and what is wrong with that."""
    if file.says_models():
        return file.shape(own_name, ORCHESTRATE), path.lexists(model_name), []
    return original.read_models(model_name, project)


def _original(name: str, kind: str, present: bool, what: str, taken: Sequence[str]) -> File:
    return File(name, kind, present, (what,) if present and what not in taken else ())


def _configuration(
    file: model.OrchestrateFile,
    looked_at: tuple[File, ...],
    keys: frozenset[str],
    variable: str | None,
    models: shapes.Models,
    budgets: shapes.Budget,
) -> Configuration:
    return Configuration(
        files=looked_at,
        own_file=looked_at[0].path,
        own_keys=keys,
        profile_variable=variable,
        models=models,
        budget=budgets,
        harness=file.harnesses(),
        workers=file.worker_rules(),
        passed=tuple(file.environment.passed),
        dropped=tuple(file.environment.drop),
        retention=shapes.Retention(keep_days=file.retention.keep_days, keep_runs=file.retention.keep_runs),
    )


def _check_profiles(models: shapes.Models, variable: str | None) -> list[Problem]:
    """Profiles that are named and do not exist."""
    named = [(models.default_profile, file_key(models, "default_profile"), models.file)]
    named += [(one.profile, f"{one.key}.profile", models.file) for one in models.projects]
    named.append((variable, "", PROFILE_VARIABLE))
    known = known_profiles(models)
    unknown = [(name, key, file) for name, key, file in named if name is not None and name not in known]
    return [Problem(file, key, unknown_profile(name, models)) for name, key, file in unknown]


def _once(problems: list[Problem]) -> list[Problem]:
    """The first fault of every key: what follows from it is none of its own."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.file, problem.key), problem)
    return list(first.values())


def _of_projects(models: shapes.Models, project: str | None) -> tuple[list[Problem], list[Problem]]:
    """The faults of directories in our own file, and those of them that are tolerated."""
    found = _directories(models, project)
    return [one for one, tolerable in found if not tolerable], [one for one, tolerable in found if tolerable]


def _directories(models: shapes.Models, project: str | None) -> list[tuple[Problem, bool]]:
    """Directories of projects that are not what they must be, and whether a run in `project` can do without."""
    found: list[tuple[Problem, bool]] = []
    seen: set[str] = set()
    for one in models.projects:
        fault = files.directory_fault(one.directory)
        # What a link leads to is asked for by its own name, and would not have what is written for it.
        tolerable = files.is_place(one.directory) and (project is None or path.realpath(one.directory) != project)
        if one.directory in seen:
            fault, tolerable = "must not be the directory of another project", False
        seen.add(one.directory)
        if fault is not None:
            found.append((Problem(models.file, f"{one.key}.directory", fault), tolerable))
    return found
