# SPDX-License-Identifier: Apache-2.0
"""Reading `orchestrate.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from os import path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from agent_intercom.orchestration import budget
from agent_intercom.orchestration.config import files, model, original
from agent_intercom.orchestration.config.shapes import Problem
from agent_intercom.orchestration.harness import BRIDGE_FILE

OFF: Final = "off"
"""What takes an inherited threshold away in a file that cannot say null."""


class Own(NamedTuple):
    """What `orchestrate.toml` says: `file` is empty where there is none, and None where it cannot be used.

    `content` is what is written there, as far as that is TOML;
    `keys` are the keys that have a value, without those of `[budget]`, as `shapes.Problem` writes them; `tolerated`
    the faults that are told and keep no run from starting.
    """

    file: model.OrchestrateFile | None
    policy: budget.Policy | None
    keys: frozenset[str]
    present: bool
    problems: list[Problem]
    tolerated: Sequence[Problem] = ()
    content: Mapping[str, Any] | None = None

    def counted(self) -> tuple[str, ...]:
        """What the file counts for."""
        if self.file is None:
            return ()
        tables = [
            name for name in ("harness", "workers", "environment", "retention") if name in self.file.model_fields_set
        ]
        if "harness" not in tables and any(key.endswith(".harness") for key in self.keys):
            tables.insert(0, "harness")
        said = {"models": self.file.says_models(), "budget": bool(self.file.budget)}
        return (*(name for name, says in said.items() if says), *tables)


def read(name: str, project: str | None) -> Own:
    """What the file `name` says. `project` is the canonical path of the project that it is read for."""

    def refused(rule: str) -> Own:
        return Own(None, None, frozenset(), True, [Problem(name, "", rule)])

    try:
        content = files.read(name, follow=True, project=project)
    except files.FileFault as error:
        return refused(error.rule)
    if content is None:
        return Own(model.OrchestrateFile(), None, frozenset(), False, [])
    try:
        value = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        return refused("must be TOML in UTF-8")
    except (ValueError, RecursionError) as error:
        return refused(f"must be TOML: {error}")
    return parse(value, name)


def parse(value: Mapping[str, Any], name: str) -> Own:
    """What the content of the file `name` says."""
    policy, problems = _budget(value.get("budget"), name)
    try:
        file = model.OrchestrateFile.model_validate(value)
    except ValidationError as error:
        problems = model.problems(error, name, model.OrchestrateFile) + problems
        return Own(None, None, frozenset(), True, problems, content=value)
    return Own(file, policy, frozenset(_keys(value)), True, problems, _check_bridge(file, name), value)


def _budget(value: Any, name: str) -> tuple[budget.Policy | None, list[Problem]]:
    """The policy of `[budget]`, where the version may be left out and `off` takes a threshold away."""
    if not value or not isinstance(value, dict):
        return None, []
    policy, problems = original.parse_budget({"version": budget.VERSION, **_with_null(value, 3)}, name, "budget")
    return policy, [one._replace(rule=one.rule.replace("or null", f'or "{OFF}"')) for one in problems]


def _with_null(value: Any, depth: int) -> Any:
    """`value` with None for `off` where thresholds stand, which is `depth` tables down."""
    if depth == 0:
        return None if value == OFF else value
    return {key: _with_null(entry, depth - 1) for key, entry in value.items()} if isinstance(value, dict) else value


def _check_bridge(file: model.OrchestrateFile, name: str) -> list[Problem]:
    """Another bridge than the one that is named would be a surprise."""
    bridge = file.harness.pi.bridge
    if bridge is None or path.isfile(bridge):
        return []
    return [Problem(name, "harness.pi.bridge", f"must be a file that is there: {BRIDGE_FILE} of the Pi package")]


def _keys(value: Mapping[str, Any], before: str = "") -> Iterable[str]:
    for key, entry in value.items():
        name = f"{before}{key}"
        if isinstance(entry, dict):
            yield from _keys(entry, f"{name}.") if name != "budget" else ()
        elif key == "projects":
            for index, one in enumerate(entry):
                yield from _keys(one, f"{name}[{index}].")
        else:
            yield name
