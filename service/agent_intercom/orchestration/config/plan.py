# SPDX-License-Identifier: Apache-2.0
"""What one run is started with: a configuration and what its flags ask for (orchestration spec, section 10.3). Pure.

Raises Refusal: `config_invalid` for what a file or a variable says, `invalid_arguments` for what a flag says, and
`orchestration_error` for a profile that does not exist or a specialist that is forced and not enabled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from agent_intercom.orchestration import activation, budget, contract, harness, manifest
from agent_intercom.orchestration.config import packaged
from agent_intercom.orchestration.config.flagfaults import not_forced, specialist_flag, unknown_threshold
from agent_intercom.orchestration.config.shapes import (
    INVALID,
    ORCHESTRATE,
    ORIGINAL_MODELS,
    PROFILE_VARIABLE,
    Choice,
    Configuration,
    Models,
    Problem,
    Project,
    Retention,
    name_fault,
)
from agent_intercom.orchestration.config.sources import PACKAGED, Source, first
from agent_intercom.orchestration.config.workerplan import check_commands, command_of, rules_of
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.policies import MAX_REPAIR_ROUNDS

CONFIG_VERSION: Final = 4
"""The schema of this loader, as manifests record it; the version of the file may be another."""

INVALID_ARGUMENTS: Final = "invalid_arguments"
ERROR: Final = "orchestration_error"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of one start say. What is absent or None is not asked for.

    `project` is the canonical path of the project; `models` maps a role to any of `provider`, `model` and `thinking`,
    `commands` one to the words of the harness `command`; `specialists` a role to whether it takes part.
    `budget_overrides` are texts of `--budget-override`. `project_custom_roles` False: custom roles that are configured
    for the project are left out, not refused; `need_commands` False: the harness `command` may have no program, because
    nothing is started.
    """

    project: str
    profile: str | None = None
    models: Mapping[str, Mapping[str, str | None]] = {}
    harness: Mapping[str, str] = {}
    commands: Mapping[str, Sequence[str]] = {}
    flow: str | None = None
    specialists: Mapping[str, bool | None] = {}
    workspace_capsule: bool | None = None
    budget_enforcement: str | None = None
    budget_overrides: Sequence[str] = ()
    forced: Sequence[str] = ()
    max_repair_rounds: int | None = None
    project_custom_roles: bool = True
    need_commands: bool = True


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """One worker; `sources` says for each field where it comes from.

    `command` are the words of the harness `command`, and empty for any other. `confine`: it may change no files but its
    own, those in `writable` and, as the implementer, those of the project; `required`: it does not begin where the
    kernel cannot see to that. Sizes are bytes; None is no limit.
    """

    provider: str
    model: str
    thinking: str
    harness: str
    command: tuple[str, ...] = ()
    confine: bool
    required: bool = False
    writable: tuple[str, ...] = ()
    network: bool = True
    memory_max: int | None = None
    memory_high: int | None = None
    tasks_max: int = packaged.TASKS_MAX
    runtime_minutes: int | None = None
    sources: Mapping[str, Source]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one run is started with.

    `roles` are in the order of creation, `forced` and `specialists` in the order in which specialists are decided on.
    `budget_policy` is merged. `sources` holds a Source for `profile`, `flow`, `specialists`, `workspace_capsule`,
    `budget.enforcement` and every threshold (`budget.warning.run.cost_total`) that somebody set or took away.
    """

    roles: Mapping[str, PlannedRole]
    profile: manifest.Profile
    flow: str
    specialists: tuple[str, ...]
    forced: tuple[str, ...]
    workspace_capsule: bool
    max_repair_rounds: int | None
    project_config: manifest.ProjectConfig
    orchestration_config: manifest.OrchestrationConfig
    budget_policy: budget.Policy
    sources: Mapping[str, Source]
    pi_command: str
    pi_bridge: str | None
    passed: tuple[str, ...]
    dropped: tuple[str, ...]
    retention: Retention


class _Layer(NamedTuple):
    word: str
    file: str
    key: str
    choice: Choice


def plan(configuration: Configuration, asked: Asked) -> Plan:
    """What a run that is asked for like this is started with."""
    models = configuration.models
    matched = next((one for one in models.projects if one.directory == asked.project), None)
    project = matched or Project(key="", directory="")
    if asked.project_custom_roles and (problem := custom_roles(models, asked.project)) is not None:
        raise problem.refusal()
    check_flags(asked)
    profile, thinking, profile_source = _profile(configuration, project, asked)
    specialists, specialists_source = _specialists(models, project, asked)
    flow, flow_source = first(
        (asked.flow, Source("flag", key="--implementation-flow")),
        (project.implementation_flow, _project_source(models, project, "implementation_flow")),
        default=packaged.FLOW,
    )
    capsule, capsule_source = first(
        (asked.workspace_capsule, Source("flag", key=_capsule_flag(asked.workspace_capsule))),
        (project.workspace_capsule, _project_source(models, project, "workspace_capsule")),
        default=False,
    )
    policy, budget_sources = _budget(configuration, asked)
    enabled = (contract.IMPLEMENTER, contract.REVIEWER, *specialists)
    roles = {role: _role(role, configuration, project, asked, thinking, profile) for role in enabled}
    check_commands(roles, asked.commands, asked.need_commands)
    return Plan(
        roles=roles,
        profile=profile,
        flow=flow,
        specialists=specialists,
        forced=_forced(asked, enabled),
        workspace_capsule=capsule,
        max_repair_rounds=asked.max_repair_rounds,
        project_config=_project_config(matched),
        orchestration_config=manifest.OrchestrationConfig(_config_file(configuration), CONFIG_VERSION),
        budget_policy=policy,
        sources={
            "profile": profile_source,
            "flow": flow_source,
            "specialists": specialists_source,
            "workspace_capsule": capsule_source,
            **budget_sources,
        },
        pi_command=configuration.harness.pi_command,
        pi_bridge=configuration.harness.pi_bridge,
        passed=configuration.passed,
        dropped=configuration.dropped,
        retention=configuration.retention,
    )


def custom_roles(models: Models, project: str) -> Problem | None:
    """What is wrong where custom roles are configured for a project: this program has none."""
    for one in models.projects:
        if one.directory == project and one.custom_roles:
            rule = "there are no custom roles; take them out, or pass --no-project-custom-roles"
            return Problem(models.file, f"{one.key}.customRoles", rule)
    return None


def known_profiles(models: Models) -> list[str]:
    """The names that a profile can have: the packaged ones first."""
    return [*packaged.PROFILES, *models.profiles]


def unknown_profile(name: str, models: Models) -> str:
    """What is said of a profile that does not exist."""
    return f"Unknown execution profile: {name} (known: {', '.join(known_profiles(models))})"


def file_key(models: Models, name: str) -> str:
    """A key of ours as the file of `models` spells it: the original's files are in camel case."""
    if models.kind == ORIGINAL_MODELS:
        first, *rest = name.split("_")
        return first + "".join(part.capitalize() for part in rest)
    return name


def _config_file(configuration: Configuration) -> str:
    """The file that a run is configured by: that of the models, or ours where it is there and the other is not."""
    present = {file.kind for file in configuration.files if file.present}
    ours = ORCHESTRATE in present and ORIGINAL_MODELS not in present
    return configuration.own_file if ours else configuration.models.file


def _profile(
    configuration: Configuration, project: Project, asked: Asked
) -> tuple[manifest.Profile, Mapping[str, str], Source]:
    """The profile, its thinking for each role, and what chose it."""
    models = configuration.models
    variable = configuration.profile_variable
    chosen = [
        (asked.profile, "per-run", Source("flag", key="--profile")),
        (project.profile, "project", _project_source(models, project, "profile")),
        (variable, "user-global", Source("environment", key=PROFILE_VARIABLE)),
        (models.default_profile, "user-global", Source("user", models.file, file_key(models, "default_profile"))),
        (packaged.DEFAULT_PROFILE, "packaged-default", PACKAGED),
    ]
    name, why, source = next((name, why, source) for name, why, source in chosen if name is not None)
    thinking = packaged.PROFILES.get(name) or models.profiles.get(name)
    if thinking is None:
        text = unknown_profile(name, models)
        if why == "per-run":
            raise Refusal(ERROR, text, "profile")
        raise Refusal(INVALID, f"{source.text}: {text}", source.key)
    kind = "packaged" if name in packaged.PROFILES else "custom"
    return manifest.Profile(name, kind, why), thinking, source


def _role(
    role: str,
    configuration: Configuration,
    project: Project,
    asked: Asked,
    thinking: Mapping[str, str],
    profile: manifest.Profile,
) -> PlannedRole:
    models = configuration.models
    flags = asked.models.get(role, {})
    layers = list(_layers(role, models, project))
    packaged_provider, packaged_model = packaged.MODELS[role]
    provider, provider_source = first(
        (flags.get("provider"), Source("flag", key=f"--{role}-provider")),
        *((one.choice.provider, Source(one.word, one.file, f"{one.key}.provider")) for one in layers),
        default=packaged_provider,
    )
    model, model_source = first(
        (flags.get("model"), Source("flag", key=f"--{role}-model")),
        *((one.choice.model, Source(one.word, one.file, f"{one.key}.model")) for one in layers),
        default=packaged_model,
    )
    where = models.file if profile.kind == "custom" else "packaged"
    level, level_source = first(
        (flags.get("thinking"), Source("flag", key=f"--{role}-thinking")),
        *((one.choice.thinking, Source(one.word, one.file, f"{one.key}.thinking")) for one in layers),
        (thinking[role], Source("profile", where, f"profiles.{profile.name}.{role}")),
        default="",
    )
    chosen, harness_source = _harness(role, configuration, asked)
    command, command_source = command_of(role, configuration, asked.commands, chosen)
    rules, rule_sources = rules_of(role, configuration)
    return PlannedRole(
        provider=provider,
        model=model,
        thinking=level,
        harness=chosen,
        command=command,
        **rules,
        sources={
            "provider": provider_source,
            "model": model_source,
            "thinking": level_source,
            "harness": harness_source,
            "command": command_source,
            **rule_sources,
        },
    )


def _layers(role: str, models: Models, project: Project) -> Iterator[_Layer]:
    """What the file says about a role; what comes first wins."""
    of_project = f"{project.key}.roles.{role}"
    yield _Layer("project-role", models.file, of_project, project.roles.get(role, Choice()))
    yield _Layer("project-defaults", models.file, f"{project.key}.defaults", project.defaults)
    yield _Layer("role", models.file, f"roles.{role}", models.roles.get(role, Choice()))
    yield _Layer("defaults", models.file, "defaults", models.defaults)


def _harness(role: str, configuration: Configuration, asked: Asked) -> tuple[str, Source]:
    found, file = configuration.harness, configuration.own_file
    of_project: list[tuple[str | None, Source]] = []
    if (project := found.projects.get(asked.project)) is not None:
        of_project = [
            (project.roles.get(role), Source("project-role", file, f"{project.key}.roles.{role}.harness")),
            (project.default, Source("project-defaults", file, f"{project.key}.defaults.harness")),
        ]
    return first(
        (asked.harness.get(role), Source("flag", key="--harness")),
        *of_project,
        (found.roles.get(role), Source("role", file, f"roles.{role}.harness")),
        (found.default, Source("defaults", file, "defaults.harness")),
        default=packaged.HARNESS,
    )


def _specialists(models: Models, project: Project, asked: Asked) -> tuple[tuple[str, ...], Source]:
    flags = {role: wanted for role, wanted in asked.specialists.items() if wanted is not None}
    configured = project.specialists
    enabled = tuple(role for role in contract.SPECIALISTS if flags.get(role, role in (configured or ())))
    if flags:
        names = " ".join(specialist_flag(role, flags[role]) for role in contract.SPECIALISTS if role in flags)
        return enabled, Source("flag", key=names)
    return enabled, PACKAGED if configured is None else _project_source(models, project, "specialists")


def _forced(asked: Asked, enabled: Sequence[str]) -> tuple[str, ...]:
    try:
        return activation.forced_list(list(asked.forced), enabled)
    except Refusal as error:
        raise Refusal(ERROR, not_forced(asked.forced, enabled), "--force-specialist") from error


def _budget(configuration: Configuration, asked: Asked) -> tuple[budget.Policy, dict[str, Source]]:
    found = configuration.budget
    layers = [(budget.PACKAGED, PACKAGED)]
    if found.policy is not None:
        layers.append((found.policy, Source("user", found.file, found.key)))
    layers.append((_budget_flags(asked), Source("flag")))
    with _of_a_budget_flag():
        merged = budget.merge(*(policy for policy, _ in layers))
    sources: dict[str, Source] = {}
    for policy, source in layers:
        if policy.enforcement is not None:
            sources["budget.enforcement"] = _at(source, "enforcement", "--budget-enforcement")
        for key, _ in thresholds(policy):
            sources[f"budget.{key}"] = _at(source, key, f"--budget-override {key}")
    return merged, sources


def _budget_flags(asked: Asked) -> budget.Policy:
    for text in asked.budget_overrides:
        if fault := unknown_threshold(text):
            raise Refusal(INVALID_ARGUMENTS, fault, "--budget-override")
    with _of_a_budget_flag():
        return budget.overrides(asked.budget_overrides, asked.budget_enforcement)


@contextmanager
def _of_a_budget_flag() -> Iterator[None]:
    try:
        yield
    except Refusal as error:
        flag = "--budget-enforcement" if error.field == "enforcement" else "--budget-override"
        raise Refusal(INVALID_ARGUMENTS, error.text, flag) from error


def thresholds(policy: budget.Policy) -> Iterator[tuple[str, budget.Number | None]]:
    """Every threshold that a policy names, as `warning.run.cost_total`."""
    for level, scopes in (("warning", policy.warning), ("hard", policy.hard)):
        for scope, metrics in scopes.items():
            for metric, value in metrics.items():
                yield f"{level}.{scope}.{metric}", value


def _at(source: Source, key: str, flag: str) -> Source:
    if source.word == "flag":
        return source._replace(key=flag)
    return source._replace(key=_joined(source.key, key)) if source.word == "user" else source


def _project_config(project: Project | None) -> manifest.ProjectConfig:
    if project is None:
        return manifest.UNMATCHED
    return manifest.ProjectConfig(
        matched=True,
        directory=project.directory,
        profile=project.profile,
        implementation_flow=project.implementation_flow,
        specialists=None if project.specialists is None else list(project.specialists),
        workspace_capsule=project.workspace_capsule,
        model_defaults=not project.defaults.empty,
        role_overrides=sorted(role for role, choice in project.roles.items() if not choice.empty),
    )


def check_flags(asked: Asked) -> None:
    """Refuse what a flag cannot say, whatever is configured; what a parser has already refused does not come here.

    Raises Refusal `invalid_arguments`.
    """
    for role, fields in asked.models.items():
        _one_of(role, contract.ROLES, "--ROLE-model")
        for key, value in fields.items():
            flag = f"--{role}-{key}"
            if value is None:
                continue
            if key == "thinking":
                _one_of(value, contract.THINKING, flag)
            elif (fault := name_fault(value)) is not None:
                raise Refusal(INVALID_ARGUMENTS, f"{flag} {fault}", flag)
    for role, name in asked.harness.items():
        _one_of(role, contract.ROLES, "--harness")
        _one_of(name, sorted(harness.HARNESSES), "--harness")
    for role in asked.commands:
        _one_of(role, contract.ROLES, "--worker-command")
    if asked.profile == "":
        raise Refusal(INVALID_ARGUMENTS, "--profile is empty", "--profile")
    if asked.flow is not None:
        _one_of(asked.flow, packaged.FLOWS, "--implementation-flow")
    for role in asked.specialists:
        _one_of(role, contract.SPECIALISTS, "--with-SPECIALIST")
    rounds = asked.max_repair_rounds
    if rounds is not None and not 0 <= rounds <= MAX_REPAIR_ROUNDS:
        text = f"--max-repair-rounds must be a whole number from 0 to {MAX_REPAIR_ROUNDS}"
        raise Refusal(INVALID_ARGUMENTS, text, "--max-repair-rounds")
    _budget_flags(asked)


def _one_of(value: str, allowed: Iterable[str], flag: str) -> None:
    if value not in allowed:
        raise Refusal(INVALID_ARGUMENTS, f"{flag} must name one of {', '.join(allowed)}", flag)


def _project_source(models: Models, project: Project, name: str) -> Source:
    return Source("project", models.file, f"{project.key}.{file_key(models, name)}")


def _capsule_flag(wanted: bool | None) -> str:
    return "--workspace-capsule" if wanted else "--no-workspace-capsule"


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
