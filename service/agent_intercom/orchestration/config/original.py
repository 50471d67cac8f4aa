# SPDX-License-Identifier: Apache-2.0
"""The original's two JSON files: models and profiles (orchestration spec, section 10.1) and budgets (section 7.6)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import budget
from agent_intercom.orchestration.config import files, model, shapes
from agent_intercom.orchestration.config.references import references
from agent_intercom.orchestration.config.shapes import ORIGINAL_BUDGET, ORIGINAL_MODELS, Problem, suggestion
from agent_intercom.orchestration.errors import Refusal

_FIRST: Final = ("version", "defaults", "roles")
_SECOND: Final = (*_FIRST, "defaultProfile", "profiles")
_THIRD: Final = (*_SECOND, "projects")
_KEYS: Final = {1: _FIRST, 2: _SECOND, 3: _THIRD, 4: _THIRD}
"""Version of a file to its keys. In version 4 a project may have `customRoles` besides."""

_BUDGET_KEYS: Final = (("version", "enforcement", *budget.LEVELS), budget.SCOPES, budget.METRICS)
"""The keys of a budget policy: of itself, of a level and of a scope."""

_JSON: Final = "must be JSON in UTF-8 in which no key stands twice and every number is one"


class OriginalProject(model.ProjectTable):
    """One of `projects`; `custom_roles` is looked at only to say that there are some."""

    model_config = ConfigDict(alias_generator=to_camel)

    custom_roles: Any = None


class OriginalFile(model.ModelPolicy):
    """A file of any version; `parse` looks at which version has which key."""

    model_config = ConfigDict(alias_generator=to_camel)

    version: int
    projects: Annotated[Sequence[OriginalProject], Field(max_length=model.MAX_PROJECTS)] = ()


def read_models(file: str, project: str | None) -> tuple[shapes.Models, bool, list[Problem]]:
    """The model policy of `file`, whether the file is there, and what is wrong with it. No file says nothing.

    With faults, the policy has what the file names nevertheless.
    """
    nothing = shapes.Models(file=file, kind=ORIGINAL_MODELS)
    value, present, problems = _read(file, project)
    if not present or problems:
        return nothing, present, problems
    parsed, problems = parse(value, file)
    if parsed is not None:
        return parsed.shape(file, ORIGINAL_MODELS), True, []
    named = value if isinstance(value, dict) else {}
    return references(named, file, ORIGINAL_MODELS, "defaultProfile"), True, problems


def parse(value: Any, file: str) -> tuple[OriginalFile | None, list[Problem]]:
    """The model policy in the value of a JSON text, or None and what is wrong with it."""
    if not isinstance(value, dict):
        return None, [Problem(file, "", "must be an object")]
    version = value.get("version")
    if type(version) is not int or version not in _KEYS:
        return None, [Problem(file, "version", f"must be one of {', '.join(map(str, _KEYS))}")]
    known = _KEYS[version]
    rule = f"unknown key in version {version}; known here: {', '.join(known)}"
    found = [Problem(file, str(key), rule + suggestion(str(key), known)) for key in value if key not in known]
    if version < max(_KEYS):
        found += _custom_roles(value, file)
    try:
        parsed = OriginalFile.model_validate({key: value[key] for key in known if key in value})
    except ValidationError as error:
        return None, found + model.problems(error, file, OriginalFile)
    return (None, found) if found else (parsed, [])


def read_budget(file: str, project: str | None) -> tuple[shapes.Budget, bool, list[Problem]]:
    """The budget policy of `file`, whether the file is there, and what is wrong with it. No file says nothing."""
    nothing = shapes.Budget(file=file, kind=ORIGINAL_BUDGET)
    value, present, problems = _read(file, project)
    if not present or problems:
        return nothing, present, problems
    policy, problems = parse_budget(value, file, "")
    return shapes.Budget(file=file, kind=ORIGINAL_BUDGET, policy=policy), True, problems


def parse_budget(value: Any, file: str, key: str) -> tuple[budget.Policy | None, list[Problem]]:
    """The budget policy in the value of a JSON text; `key` is where it stands in the file."""
    unknown = {where: rule for where, rule in _unknown(value) if where}
    if unknown:
        value = _without(value, unknown)
    problems = [Problem(file, _joined(key, where), rule) for where, rule in unknown.items()]
    for part in _parts(value):
        try:
            budget.parse(part)
        except Refusal as error:
            problems.append(budget_problem(error, file, key))
    if problems:
        return None, problems
    try:
        policy = budget.parse(value)
        budget.merge(budget.PACKAGED, policy)
    except Refusal as error:
        return None, [budget_problem(error, file, key)]
    return policy, []


def _unknown(value: Any, depth: int = 0, where: str = "") -> Iterator[tuple[str, str]]:
    """Keys of a policy that there are none of, and the rule that each breaks."""
    if not isinstance(value, dict) or depth == len(_BUDGET_KEYS):
        return
    known = _BUDGET_KEYS[depth]
    for name, entry in value.items():
        if name not in known:
            yield _joined(where, name), f"unknown key; known here: {', '.join(known)}{suggestion(name, known)}"
        elif depth or name in budget.LEVELS:
            yield from _unknown(entry, depth + 1, _joined(where, name))


def _without(value: Any, keys: Container[str], where: str = "") -> Any:
    """The same without what is known to be wrong."""
    if not isinstance(value, dict):
        return value
    kept = {name: entry for name, entry in value.items() if _joined(where, name) not in keys}
    return {name: _without(entry, keys, _joined(where, name)) for name, entry in kept.items()}


def _parts(value: Any) -> Iterator[Any]:
    """The value of a policy as policies that say one thing each, so that one fault does not hide another."""
    if not isinstance(value, dict):
        yield value
        return
    yield {name: entry for name, entry in value.items() if name not in budget.LEVELS}
    for level in budget.LEVELS:
        scopes = value.get(level, {})
        for one in _single(scopes):
            for scope, metrics in one.items() if isinstance(one, dict) else ():
                yield from ({"version": budget.VERSION, level: {scope: single}} for single in _single(metrics))
            if not isinstance(one, dict):
                yield {"version": budget.VERSION, level: one}


def _single(table: Any) -> Iterator[Any]:
    """A table as tables of one entry; what is none, as it is."""
    yield from ({name: entry} for name, entry in table.items()) if isinstance(table, dict) else (table,)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def budget_problem(error: Refusal, file: str, key: str) -> Problem:
    """A refusal of a budget as a fault of the file that has it."""
    field = "" if error.field == "budget" else error.field
    rule = error.text.removeprefix(f"Budget {error.field} ").removeprefix("Budget ")
    return Problem(file, _joined(key, field), rule)


def _read(file: str, project: str | None) -> tuple[Any, bool, list[Problem]]:
    try:
        content = files.read(file, follow=False, project=project)
    except files.FileFault as error:
        return None, True, [Problem(file, "", error.rule)]
    if content is None:
        return None, False, []
    try:
        return privatefiles.decode(content), True, []
    except ValueError:
        return None, True, [Problem(file, "", _json_fault(content))]


def _json_fault(content: bytes) -> str:
    """Why a text is not the JSON that it must be, and where; of the text itself at most one character is quoted."""
    import json  # only where something is wrong

    try:
        json.loads(content.decode())
    except json.JSONDecodeError as error:
        return f"must be JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
    except (ValueError, RecursionError):
        pass
    return _JSON


def _custom_roles(value: Mapping[str, Any], file: str) -> list[Problem]:
    projects = value.get("projects")
    rule = "unknown key; it came with version 4"
    return [
        Problem(file, f"projects[{index}].customRoles", rule)
        for index, project in enumerate(projects if isinstance(projects, list) else [])
        if isinstance(project, dict) and "customRoles" in project
    ]
