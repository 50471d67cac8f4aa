# SPDX-License-Identifier: Apache-2.0
"""What was read from the files of a configuration, whichever they were, and the fault that a file can have.

Paths are absolute. A key is written as a person looks for it in the file: `projects[0].roles.reviewer.model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from agent_intercom.orchestration import budget
from agent_intercom.orchestration.config import packaged
from agent_intercom.orchestration.errors import Refusal

INVALID: Final = "config_invalid"

ORCHESTRATE: Final = "orchestrate.toml"
ORIGINAL_MODELS: Final = "original-models"
ORIGINAL_BUDGET: Final = "original-budget"
"""Kinds of files."""

PROFILE_VARIABLE: Final = "AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE"
MAX_NAME: Final = 256


class Problem(NamedTuple):
    """A fault: the file (or the variable) that has it, the key, empty for the whole file, and the rule it breaks."""

    file: str
    key: str
    rule: str

    @property
    def text(self) -> str:
        """`FILE: KEY: RULE`."""
        return ": ".join(part for part in self if part)

    def refusal(self, further: int = 0) -> Refusal:
        """The same as Refusal `config_invalid`, with the number of further faults."""
        more = f" (and {further} more)" if further else ""
        return Refusal(INVALID, self.text + more, self.key)


class File(NamedTuple):
    """A file that may hold configuration: its kind, whether it is there, and what it counted for.

    `counted` is of `models`, `budget`, `harness`, `workers`, `environment` and `retention`.
    """

    path: str
    kind: str
    present: bool
    counted: tuple[str, ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer says about a worker. Provider and model are there both or not at all."""

    provider: str | None = None
    model: str | None = None
    thinking: str | None = None

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return self.provider is None and self.thinking is None


NOTHING: Final = Choice()


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """What is configured for one project; `key` is where it stands in the file."""

    key: str
    directory: str
    profile: str | None = None
    defaults: Choice = NOTHING
    roles: Mapping[str, Choice] = {}
    implementation_flow: str | None = None
    specialists: tuple[str, ...] | None = None
    workspace_capsule: bool | None = None
    custom_roles: bool = False


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """The model policy of the one file that counts for it; `file` need not be there."""

    file: str
    kind: str
    default_profile: str | None = None
    profiles: Mapping[str, Mapping[str, str]] = {}
    defaults: Choice = NOTHING
    roles: Mapping[str, Choice] = {}
    projects: tuple[Project, ...] = ()


class Harnesses(msgspec.Struct, frozen=True, kw_only=True):
    """Which harness runs a role, as `orchestrate.toml` has it: layer to role or, for a layer's defaults, '' to name.

    `projects` maps a directory to the key of its table and its two layers. `command` are the words of the harness
    `command` in every role, `role_commands` those in one.
    """

    default: str | None = None
    roles: Mapping[str, str] = {}
    projects: Mapping[str, ProjectHarness] = {}
    pi_command: str = packaged.PI_COMMAND
    pi_bridge: str | None = None
    command: tuple[str, ...] | None = None
    role_commands: Mapping[str, tuple[str, ...]] = {}


class ProjectHarness(msgspec.Struct, frozen=True, kw_only=True):
    """The same for one project; `key` is where it stands in the file."""

    key: str
    default: str | None = None
    roles: Mapping[str, str] = {}


class WorkerRules(msgspec.Struct, frozen=True, kw_only=True):
    """What one table says of what workers may do and use; None where it says nothing. Sizes are bytes."""

    confine: bool | None = None
    required: bool | None = None
    writable: tuple[str, ...] | None = None
    network: bool | None = None
    memory_max: int | None = None
    memory_high: int | None = None
    tasks_max: int | None = None
    runtime_minutes: int | None = None


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """`[workers]`: what holds for every worker that is hosted here, and for that of one role."""

    every: WorkerRules = WorkerRules()
    roles: Mapping[str, WorkerRules] = {}


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget policy of the one file that counts for it, or None; `key` is what stands before its keys there."""

    file: str
    kind: str
    key: str = ""
    policy: budget.Policy | None = None


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what has ended is kept: days, and runs of each root."""

    keep_days: int = packaged.KEEP_DAYS
    keep_runs: int = packaged.KEEP_RUNS


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is configured, before it is asked for one run.

    `own_file` is the path of `orchestrate.toml`, there or not; `own_keys` the keys that it sets, for what it alone
    configures; `profile_variable` the default profile that the environment names.
    """

    files: tuple[File, ...]
    own_file: str
    own_keys: frozenset[str] = frozenset()
    profile_variable: str | None = None
    models: Models
    budget: Budget
    harness: Harnesses = Harnesses()
    workers: Workers = Workers()
    passed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    retention: Retention = Retention()


def suggestion(word: str, known: Iterable[str]) -> str:
    """What somebody who wrote `word` where one of `known` belongs may have meant, for the end of a text."""
    import difflib  # only where something is wrong

    found = difflib.get_close_matches(word[:MAX_NAME], list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def name_fault(value: str) -> str | None:
    """Why `value` cannot name a provider or a model, or None."""
    if not 1 <= len(value) <= MAX_NAME:
        return f"must have 1 to {MAX_NAME} characters"
    if any(not c.isprintable() or c.isspace() for c in value):
        return "must have no blank, control or invisible character"
    # An agent would take it for an option.
    return "must not begin with a dash" if value.startswith("-") else None
