# SPDX-License-Identifier: Apache-2.0
"""The schema of `orchestrate.toml` and of what the environment says, in pydantic.

Imported by commands that people call, and lazily: pydantic costs several hundred milliseconds. Everything is strict: a
number is a number, and an unknown key is refused. What the original's file has too, it has here with the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from agent_intercom.orchestration import contract, environment
from agent_intercom.orchestration.config import packaged, shapes
from agent_intercom.orchestration.config.shapes import PROFILE_VARIABLE, Problem, suggestion

MAX_PROFILES = 16
MAX_PROJECTS = 64
MAX_PATTERNS = 128
MAX_KEEP = 100_000
MAX_WORDS = 256
MAX_WRITABLE = 32
MAX_TASKS = 100_000
MAX_MINUTES = 527_040
MIN_MEMORY = 16 * 1_048_576

_SIZE = re.compile(r"([0-9]{1,12})([KMGT])", re.ASCII)

T = TypeVar("T")


def _not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("must not be null; leave the key out")
    return value


def _name(value: str) -> str:
    if (fault := shapes.name_fault(value)) is not None:
        raise ValueError(fault)
    return value


def _profile_name(value: str) -> str:
    if value in packaged.PROFILES:
        raise ValueError("is a packaged profile, which cannot be changed; choose another name")
    return value


def _levels(value: dict[str, str]) -> dict[str, str]:
    if missing := [role for role in contract.ROLES if role not in value]:
        raise ValueError(f"must say something about every role; missing: {', '.join(missing)}")
    return value


def _unique(value: list[str]) -> list[str]:
    if len(value) != len(set(value)):
        raise ValueError("must name nothing twice")
    return value


def _command(value: str) -> str:
    if not value or "\0" in value or ("/" in value and not path.isabs(value)):
        raise ValueError("must be the name of a program in PATH or an absolute path")
    return value


def _words(value: list[str]) -> list[str]:
    if not value:
        raise ValueError("must have a program in it")
    _command(value[0])
    if any("\0" in word for word in value):
        raise ValueError("must have no NUL in it")
    return value


def _bytes(value: Any) -> Any:
    """A size as systemd writes it too: a number, or one with K, M, G or T behind it."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        return int(match[1]) << (10 * ("KMGT".index(match[2]) + 1))
    return value


def _memory(value: int) -> int:
    if not MIN_MEMORY <= value < 1 << 50:
        raise ValueError('must be a number of bytes, or one with K, M, G or T ("2G"), and at least 16M')
    return value


def _absolute(value: str) -> str:
    if "\0" in value or not path.isabs(value) or path.normpath(value) != value:
        raise ValueError("must be an absolute path, with neither . nor .. in it")
    return value


def _pattern(value: str) -> str:
    if environment.PATTERN.fullmatch(value) is None:
        raise ValueError("must be the name of a variable, or the beginning of one and *")
    return value


def _passable(value: str) -> str:
    if reason := environment.never(value):
        raise ValueError(f"is never passed on ({reason}); take it out")
    return value


Given = Annotated[T | None, BeforeValidator(_not_null)]
"""A key that may be absent and, where it is there, says something."""

Name = Annotated[str, AfterValidator(_name)]
Role = Literal["implementer", "reviewer", "probe", "playwright", "django"]
Specialist = Literal["probe", "playwright", "django"]
Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"]
Harness = Literal["pi", "command", "external"]
Words = Annotated[list[str], Field(max_length=MAX_WORDS), AfterValidator(_words)]
Memory = Annotated[int, BeforeValidator(_bytes), AfterValidator(_memory)]
AnyProfile = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,31}$")]
OwnProfile = Annotated[AnyProfile, AfterValidator(_profile_name)]
Levels = Annotated[dict[Role, Thinking], AfterValidator(_levels)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Strict(BaseModel):
    """Unknown keys are refused, and values are of the type that they have."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ModelChoice(Strict):
    """What runs a worker. Provider and model are given both or not at all."""

    provider: Given[Name] = None
    model: Given[Name] = None
    thinking: Given[Thinking] = None

    @model_validator(mode="after")
    def _both(self) -> ModelChoice:
        if (self.provider is None) != (self.model is None):
            raise ValueError("must give provider and model both or neither")
        return self

    def shape(self) -> shapes.Choice:
        """What it says of models."""
        return shapes.Choice(provider=self.provider, model=self.model, thinking=self.thinking)


class ProjectTable(Strict):
    """One project."""

    directory: str
    profile: Given[AnyProfile] = None
    defaults: ModelChoice = ModelChoice()
    roles: Mapping[Role, ModelChoice] = {}
    implementation_flow: Given[Literal["single", "phased"]] = None
    # null is the original's word for "not configured".
    specialists: Annotated[list[Specialist], AfterValidator(_unique)] | None = None
    workspace_capsule: Given[bool] = None


class ModelPolicy(Strict):
    """What both files say about models."""

    default_profile: Given[AnyProfile] = None
    profiles: Annotated[dict[OwnProfile, Levels], Field(max_length=MAX_PROFILES)] = {}
    defaults: ModelChoice = ModelChoice()
    roles: Mapping[Role, ModelChoice] = {}
    projects: Annotated[Sequence[ProjectTable], Field(max_length=MAX_PROJECTS)] = ()

    def shape(self, file: str, kind: str) -> shapes.Models:
        """The same, for `plan`."""
        return shapes.Models(
            file=file,
            kind=kind,
            default_profile=self.default_profile,
            profiles={name: dict[str, str](levels.items()) for name, levels in self.profiles.items()},
            defaults=self.defaults.shape(),
            roles={role: choice.shape() for role, choice in self.roles.items()},
            projects=tuple(_project(f"projects[{index}]", one) for index, one in enumerate(self.projects)),
        )


class WorkerChoice(ModelChoice):
    """What runs a worker, and in which harness."""

    harness: Given[Harness] = None


class OwnProject(ProjectTable):
    """One `[[projects]]`."""

    defaults: WorkerChoice = WorkerChoice()
    roles: Mapping[Role, WorkerChoice] = {}


class PiTable(Strict):
    """`[harness.pi]`."""

    command: Annotated[str, AfterValidator(_command)] = packaged.PI_COMMAND
    bridge: Given[Annotated[str, AfterValidator(_absolute)]] = None


class CommandTable(Strict):
    """`[harness.command]`: the program that works in every role of that harness, and in one."""

    command: Given[Words] = None
    roles: Mapping[Role, Words] = {}


class HarnessTables(Strict):
    """`[harness]`."""

    pi: PiTable = PiTable()
    command: CommandTable = CommandTable()


class WorkerTable(Strict):
    """`[workers.roles.ROLE]`, and what `[workers]` says of every role."""

    confine: Given[bool] = None
    required: Given[bool] = None
    writable: Given[Annotated[list[Annotated[str, AfterValidator(_absolute)]], Field(max_length=MAX_WRITABLE)]] = None
    network: Given[bool] = None
    memory_max: Given[Memory] = None
    memory_high: Given[Memory] = None
    tasks_max: Given[Annotated[int, Field(ge=8, le=MAX_TASKS)]] = None
    runtime_minutes: Given[Annotated[int, Field(ge=1, le=MAX_MINUTES)]] = None

    def shape(self) -> shapes.WorkerRules:
        """The same, for `plan`."""
        return shapes.WorkerRules(
            confine=self.confine,
            required=self.required,
            writable=None if self.writable is None else tuple(self.writable),
            network=self.network,
            memory_max=self.memory_max,
            memory_high=self.memory_high,
            tasks_max=self.tasks_max,
            runtime_minutes=self.runtime_minutes,
        )


class WorkersTable(WorkerTable):
    """`[workers]`."""

    roles: Mapping[Role, WorkerTable] = {}


class EnvironmentTable(Strict):
    """`[environment]`."""

    passed: Annotated[
        list[Annotated[Pattern, AfterValidator(_passable)]], Field(max_length=MAX_PATTERNS, alias="pass")
    ] = []
    drop: Annotated[list[Pattern], Field(max_length=MAX_PATTERNS)] = []


class RetentionTable(Strict):
    """`[retention]`."""

    keep_days: Annotated[int, Field(ge=1, le=MAX_KEEP)] = packaged.KEEP_DAYS
    keep_runs: Annotated[int, Field(ge=1, le=MAX_KEEP)] = packaged.KEEP_RUNS


class OrchestrateFile(ModelPolicy):
    """`orchestrate.toml`. The rules of `[budget]` are those of `orchestration.budget`."""

    defaults: WorkerChoice = WorkerChoice()
    roles: Mapping[Role, WorkerChoice] = {}
    projects: Annotated[Sequence[OwnProject], Field(max_length=MAX_PROJECTS)] = ()
    budget: dict[str, Any] = {}
    harness: HarnessTables = HarnessTables()
    workers: WorkersTable = WorkersTable()
    environment: EnvironmentTable = EnvironmentTable()
    retention: RetentionTable = RetentionTable()

    def says_models(self) -> bool:
        """Whether it says anything about models, so that the original's file does not count for them."""
        choices = [self.defaults, *self.roles.values()]
        projects = any(
            one.model_fields_set - {"directory", "defaults", "roles"}
            or any(not choice.shape().empty for choice in (one.defaults, *one.roles.values()))
            for one in self.projects
        )
        return bool(self.default_profile or self.profiles or any(not one.shape().empty for one in choices) or projects)

    def harnesses(self) -> shapes.Harnesses:
        """Which harness runs whom."""
        projects = {
            one.directory: shapes.ProjectHarness(
                key=f"projects[{index}]", default=one.defaults.harness, roles=_harness_of(one.roles)
            )
            for index, one in enumerate(self.projects)
        }
        return shapes.Harnesses(
            default=self.defaults.harness,
            roles=_harness_of(self.roles),
            projects=projects,
            pi_command=self.harness.pi.command,
            pi_bridge=self.harness.pi.bridge,
            command=None if self.harness.command.command is None else tuple(self.harness.command.command),
            role_commands={role: tuple(words) for role, words in self.harness.command.roles.items()},
        )

    def worker_rules(self) -> shapes.Workers:
        """What workers may do and use."""
        roles: dict[str, shapes.WorkerRules] = {role: table.shape() for role, table in self.workers.roles.items()}
        return shapes.Workers(every=self.workers.shape(), roles=roles)


class FromEnvironment(BaseSettings):
    """What variables of the asking shell say; `variables` is that shell's environment."""

    model_config = SettingsConfigDict(
        env_prefix="AGENT_INTERCOM_ORCHESTRATE_",
        env_ignore_empty=True,
        case_sensitive=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )
    variables: ClassVar[Mapping[str, str]] = {}

    default_profile: AnyProfile | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Variables(settings_cls, cls.variables)


class _Variables(EnvSettingsSource):
    """The variables that count, from a mapping."""

    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        value = self._environ.get(PROFILE_VARIABLE)
        return {f"{self.env_prefix}default_profile": value} if value else {}


def profile_variable(environ: Mapping[str, str]) -> tuple[str | None, list[Problem]]:
    """The default profile that the environment names, and what is wrong with it."""

    class Here(FromEnvironment):
        variables = environ

    try:
        return Here().default_profile, []
    except ValidationError:
        return None, [Problem(PROFILE_VARIABLE, "", "must be the name of a profile (a-z, 0-9 and -)")]


def problems(error: ValidationError, file: str, model: type[BaseModel]) -> list[Problem]:
    """Every fault that pydantic found in a file, in our words."""
    return [Problem(file, key_text(entry["loc"]), _rule(entry, model)) for entry in error.errors(include_url=False)]


def key_text(location: Sequence[str | int]) -> str:
    """A place in a file as a person writes it: `projects[0].roles.reviewer`."""
    text = ""
    for part in location:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_RULES = {
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "dict_type": "must be a table",
    "mapping_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "list_type": "must be a list",
    "is_instance_of": "must be a list",
    "sequence_str": "must be a list",
    "missing": "must be there",
    "string_pattern_mismatch": "must be the name of a profile: 1 to 32 of a-z, 0-9 and -, a letter first",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_long": "must have at most {max_length} entries",
    "value_error": "{error}",
}


def _rule(entry: Mapping[str, Any], model: type[BaseModel]) -> str:
    """The rule that a value breaks. Of the value nothing is said but what a name was probably meant to be."""
    kind, context, location = entry["type"], entry.get("ctx", {}), entry["loc"]
    if kind == "extra_forbidden":
        known = list(_known(model, location[:-1]))
        return f"unknown key; known here: {', '.join(known)}{suggestion(str(location[-1]), known)}"
    rule = _RULES.get(kind, "has a value that is not allowed").format_map(context)
    if kind == "literal_error" and isinstance(entry["input"], str):
        rule += suggestion(entry["input"], re.findall("'([^']*)'", context["expected"]))
    return rule


def _known(model: type[BaseModel], location: Sequence[str | int]) -> Iterator[str]:
    """The keys of the table at a place of a file."""
    for part in location:
        field = {entry.alias or name: entry for name, entry in model.model_fields.items()}.get(str(part))
        if field is not None:
            model = next(_models(field.annotation), model)
    return (field.alias or name for name, field in model.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _harness_of(roles: Mapping[Role, WorkerChoice]) -> dict[str, str]:
    return {role: choice.harness for role, choice in roles.items() if choice.harness is not None}


def _project(key: str, table: ProjectTable) -> shapes.Project:
    return shapes.Project(
        key=key,
        directory=table.directory,
        profile=table.profile,
        defaults=table.defaults.shape(),
        roles={role: choice.shape() for role, choice in table.roles.items()},
        implementation_flow=table.implementation_flow,
        specialists=None if table.specialists is None else tuple(table.specialists),
        workspace_capsule=table.workspace_capsule,
        custom_roles=bool(getattr(table, "custom_roles", None)),
    )
