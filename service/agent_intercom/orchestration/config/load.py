# SPDX-License-Identifier: Apache-2.0
"""Reading what is configured: `orchestrate.toml`, and the original's files for what that does not speak of.

Where `orchestrate.toml` says anything about models (a profile, a provider, a model, a thinking level, or a flow,
specialists or a workspace capsule of a project), the original's file of models does not count at all, and likewise for
budgets. Two files are never mixed. Nothing is created, and a file that does not count is not opened.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from os import path
from typing import Any, NamedTuple

from pydantic import ValidationError

from agent_intercom.orchestration import places
from agent_intercom.orchestration.config import files, model, original, packaged, shapes
from agent_intercom.orchestration.config.plan import file_key, unknown_profile
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
from agent_intercom.orchestration.harness import BRIDGE_FILE

OFF = "off"
"""What takes an inherited threshold away in a file that cannot say null."""


class Examined(NamedTuple):
    """What was found. With problems there is no configuration: nothing starts by half of one."""

    configuration: Configuration | None
    files: tuple[File, ...]
    problems: list[Problem]


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
    problems: list[Problem] = []
    try:
        own_file = places.config_file(environ)
        model_file = places.model_config(environ)
        budget_file = places.budget_config(environ)
    except Refusal as error:
        return Examined(None, (), [Problem(error.field, "", error.text.removeprefix(f"{error.field} "))])
    own, keys, own_present, found = _read_own(own_file, project)
    problems += found
    problems += _check_bridge(own, own_file)
    variable, found = model.profile_variable(environ)
    problems += found

    own_models = own.says_models()
    if own_models:
        models, models_present = own.shape(own_file, ORCHESTRATE), path.lexists(model_file)
    else:
        models, models_present, found = original.read_models(model_file, project)
        problems += found
    problems += _check_policy(models, own, own_file, variable)

    budgets = shapes.Budget(file=own_file, kind=ORCHESTRATE, key="budget")
    if own.budget:
        policy, found = _own_budget(own.budget, own_file)
        budgets, budget_present = (
            shapes.Budget(file=own_file, kind=ORCHESTRATE, key="budget", policy=policy),
            path.lexists(budget_file),
        )
    else:
        budgets, budget_present, found = original.read_budget(budget_file, project)
    problems += found

    tables = [name for name in ("harness", "environment", "retention") if name in own.model_fields_set]
    if "harness" not in tables and any(key.endswith(".harness") for key in keys):
        tables.insert(0, "harness")
    counted = (*(["models"] if own_models else []), *(["budget"] if own.budget else []), *tables)
    looked_at = (
        File(own_file, ORCHESTRATE, own_present, counted),
        File(model_file, ORIGINAL_MODELS, models_present, ("models",) if models_present and not own_models else ()),
        File(budget_file, ORIGINAL_BUDGET, budget_present, ("budget",) if budget_present and not own.budget else ()),
    )
    if problems:
        return Examined(None, looked_at, problems)
    return Examined(
        Configuration(
            files=looked_at,
            own_file=own_file,
            own_keys=frozenset(keys),
            profile_variable=variable,
            models=models,
            budget=budgets,
            harness=own.harnesses(),
            passed=tuple(own.environment.passed),
            dropped=tuple(own.environment.drop),
            retention=shapes.Retention(keep_days=own.retention.keep_days, keep_runs=own.retention.keep_runs),
        ),
        looked_at,
        [],
    )


def _read_own(file: str, project: str | None) -> tuple[model.OrchestrateFile, set[str], bool, list[Problem]]:
    """What `orchestrate.toml` says, the keys that it sets, whether it is there, and what is wrong with it."""
    nothing = model.OrchestrateFile()
    try:
        content = files.read(file, follow=True, project=project)
    except files.FileFault as error:
        return nothing, set(), True, [Problem(file, "", error.rule)]
    if content is None:
        return nothing, set(), False, []
    try:
        value = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        return nothing, set(), True, [Problem(file, "", "must be TOML in UTF-8")]
    except (ValueError, RecursionError) as error:
        return nothing, set(), True, [Problem(file, "", f"must be TOML: {error}")]
    try:
        return model.OrchestrateFile.model_validate(value), set(_keys(value)), True, []
    except ValidationError as error:
        return nothing, set(), True, model.problems(error, file, model.OrchestrateFile)


def _own_budget(value: Mapping[str, Any], file: str) -> tuple[Any, list[Problem]]:
    """The policy of `[budget]`, where the version may be left out and `off` takes a threshold away."""
    return original.parse_budget({"version": 1, **_with_null(value)}, file, "budget")


def _with_null(value: Any) -> Any:
    """`value` with None for `off` where thresholds stand: level, scope, metric."""

    def metrics(scope: Any) -> Any:
        return {key: None if entry == OFF else entry for key, entry in scope.items()} if _table(scope) else scope

    def scopes(level: Any) -> Any:
        return {key: metrics(entry) for key, entry in level.items()} if _table(level) else level

    return {key: scopes(entry) for key, entry in value.items()}


def _check_policy(
    models: shapes.Models, own: model.OrchestrateFile, own_file: str, variable: str | None
) -> list[Problem]:
    """What no key says by itself: profiles that exist, directories that do, and no directory twice."""
    known = {*packaged.PROFILES, *models.profiles}
    named = [(models.default_profile, file_key(models, "default_profile"), models.file)]
    named += [(one.profile, f"{one.key}.profile", models.file) for one in models.projects]
    named.append((variable, "", PROFILE_VARIABLE))
    found = [
        Problem(file, key, unknown_profile(name, models)) for name, key, file in named if name and name not in known
    ]
    found += _check_directories(models.file, [(one.key, one.directory) for one in models.projects])
    if models.kind != ORCHESTRATE:
        # Projects of ours that say nothing about models, only about harnesses.
        ours = [(f"projects[{index}]", one.directory) for index, one in enumerate(own.projects)]
        found += _check_directories(own_file, ours)
    return found


def _check_bridge(own: model.OrchestrateFile, file: str) -> list[Problem]:
    """Another bridge than the one that is named would be a surprise."""
    bridge = own.harness.pi.bridge
    if bridge is None or path.isfile(bridge):
        return []
    return [Problem(file, "harness.pi.bridge", f"must be a file that is there: {BRIDGE_FILE} of the Pi package")]


def _check_directories(file: str, projects: Iterable[tuple[str, str]]) -> list[Problem]:
    found: list[Problem] = []
    seen: set[str] = set()
    for key, directory in projects:
        fault = files.directory_fault(directory)
        if fault is None and directory in seen:
            fault = "must not be the directory of another project"
        seen.add(directory)
        if fault is not None:
            found.append(Problem(file, f"{key}.directory", fault))
    return found


def _keys(value: Mapping[str, Any], before: str = "") -> Iterable[str]:
    """Every key of a file that has a value, as `problems` writes them. Those of `[budget]` can be anything so far."""
    for key, entry in value.items():
        name = f"{before}{key}"
        if name == "budget":
            continue
        if isinstance(entry, dict):
            yield from _keys(entry, f"{name}.")
        elif isinstance(entry, list) and entry and all(_table(one) for one in entry):
            for index, one in enumerate(entry):
                yield from _keys(one, f"{name}[{index}].")
        else:
            yield name


def _table(value: Any) -> bool:
    return isinstance(value, dict)
