# SPDX-License-Identifier: Apache-2.0
"""What a run is started with: precedence against a naive model, provenance, and what flags are refused for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration import budget, contract, manifest
from agent_intercom.orchestration.config import packaged, shapes
from agent_intercom.orchestration.config.plan import PACKAGED, Asked, Plan, plan
from agent_intercom.orchestration.config.shapes import (
    Choice,
    Configuration,
    Harnesses,
    Models,
    Project,
    ProjectHarness,
)
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchconfig import LEVELS, ROLES

HERE, OWN, FILE = "/here", "/c/orchestrate.toml", "/c/models"
SPECIALISTS = ("probe", "playwright", "django")
EVERYBODY = dict.fromkeys(SPECIALISTS, True)


def configuration(models: Models | None = None, **fields: Any) -> Configuration:
    models = models or Models(file=FILE, kind=shapes.ORCHESTRATE)
    budgets = fields.pop("budget", shapes.Budget(file=FILE, kind=shapes.ORIGINAL_BUDGET))
    return Configuration(files=(), own_file=OWN, models=models, budget=budgets, **fields)


def models_of(**fields: Any) -> Models:
    return Models(file=FILE, kind=shapes.ORCHESTRATE, **fields)


def asked(**fields: Any) -> Asked:
    return Asked(project=HERE, **fields)


def refused(found: Configuration, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(found, asked(**fields))
    assert "\n" not in caught.value.text
    return caught.value


def test_with_nothing_said_everything_is_packaged() -> None:
    made = plan(configuration(), asked())
    assert list(made.roles) == ["implementer", "reviewer"]
    worker = made.roles["implementer"]
    assert (worker.provider, worker.model, worker.thinking) == ("openai-codex", "gpt-5.6-sol", "xhigh")
    assert worker.harness == "pi"
    assert worker.sources["thinking"] == ("profile", "packaged", "profiles.thorough.implementer")
    assert {worker.sources[key] for key in ("provider", "model", "harness")} == {PACKAGED}
    assert made.profile == manifest.Profile("thorough", "packaged", "packaged-default")
    assert (made.flow, made.specialists, made.forced, made.workspace_capsule) == ("single", (), (), False)
    assert made.max_repair_rounds is None
    assert made.project_config == manifest.UNMATCHED
    assert made.orchestration_config == manifest.OrchestrationConfig(FILE, 4)
    assert made.budget_policy == budget.PACKAGED
    assert set(made.sources.values()) == {PACKAGED}


@pytest.mark.parametrize(
    ("profile", "levels"),
    [
        ("thorough", ["xhigh", "high", "high", "high", "high"]),
        ("balanced", ["high", "high", "medium", "medium", "medium"]),
        ("economy", ["medium", "medium", "low", "medium", "medium"]),
    ],
)
def test_the_packaged_profiles(profile: str, levels: list[str]) -> None:
    made = plan(configuration(), asked(profile=profile, specialists=EVERYBODY))
    assert list(made.roles) == list(ROLES)
    assert [worker.thinking for worker in made.roles.values()] == levels
    models = ["gpt-5.6-sol", "gpt-5.4", "gpt-5.4-mini", "gpt-5.4", "gpt-5.4"]
    assert [worker.model for worker in made.roles.values()] == models
    assert made.profile == manifest.Profile(profile, "packaged", "per-run")


NAMES = st.sampled_from(["a", "b", "c"])
THINKING = st.sampled_from(contract.THINKING)
PAIRS = st.one_of(st.none(), st.tuples(NAMES, NAMES))
CHOICES = st.builds(
    lambda pair, thinking: Choice(provider=pair and f"p-{pair[0]}", model=pair and f"m-{pair[1]}", thinking=thinking),
    PAIRS,
    st.none() | THINKING,
)
BY_ROLE = st.dictionaries(st.sampled_from(ROLES), CHOICES)
FLAGS = st.dictionaries(
    st.sampled_from(ROLES),
    st.fixed_dictionaries({}, optional={"provider": NAMES, "model": NAMES, "thinking": THINKING}),
)
PROFILES = st.none() | st.sampled_from(["thorough", "balanced", "economy", "fast"])
FAST = {role: contract.THINKING[index] for index, role in enumerate(ROLES)}
HARNESS = st.sampled_from(["pi", "external"])
HARNESS_BY_ROLE = st.dictionaries(st.sampled_from(ROLES), HARNESS)
PROJECTS = st.builds(
    Project,
    key=st.just("projects[0]"),
    directory=st.sampled_from([HERE, "/elsewhere"]),
    profile=PROFILES,
    defaults=CHOICES,
    roles=BY_ROLE,
    implementation_flow=st.sampled_from([None, "single", "phased"]),
    specialists=st.none() | st.lists(st.sampled_from(SPECIALISTS), unique=True).map(tuple),
    workspace_capsule=st.sampled_from([None, True, False]),
)


def first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


@given(
    project=PROJECTS,
    profiles=st.tuples(PROFILES, PROFILES, PROFILES),
    defaults=CHOICES,
    roles=BY_ROLE,
    flags=FLAGS,
    specialists=st.dictionaries(st.sampled_from(SPECIALISTS), st.sampled_from([None, True, False])),
    flow=st.sampled_from([None, "single", "phased"]),
    capsule=st.sampled_from([None, True, False]),
)
def test_precedence(
    project: Project,
    profiles: tuple[str | None, str | None, str | None],
    defaults: Choice,
    roles: dict[str, Choice],
    flags: dict[str, dict[str, str | None]],
    specialists: dict[str, bool | None],
    flow: str | None,
    capsule: bool | None,
) -> None:
    flag, variable, default = profiles
    models = models_of(
        default_profile=default, profiles={"fast": FAST}, defaults=defaults, roles=roles, projects=(project,)
    )
    made = plan(
        configuration(models, profile_variable=variable),
        asked(profile=flag, models=flags, specialists=specialists, flow=flow, workspace_capsule=capsule),
    )
    here = project if project.directory == HERE else Project(key="", directory="")

    name = first(flag, here.profile, variable, default, "thorough")
    why = "per-run" if flag else "project" if here.profile else "user-global" if variable or default else None
    kind = "custom" if name == "fast" else "packaged"
    assert made.profile == manifest.Profile(name, kind, why or "packaged-default")

    enabled = [role for role in SPECIALISTS if first(specialists.get(role), role in (here.specialists or ()))]
    assert list(made.roles) == ["implementer", "reviewer", *enabled]
    assert made.specialists == tuple(enabled)
    assert made.flow == first(flow, here.implementation_flow, "single")
    assert made.workspace_capsule == first(capsule, here.workspace_capsule, False)

    levels = {**packaged.PROFILES, "fast": FAST}[name]
    for role, worker in made.roles.items():
        layers = [here.roles.get(role, Choice()), here.defaults, roles.get(role, Choice()), defaults]
        flagged = flags.get(role, {})
        provider, model = packaged.MODELS[role]
        assert worker.provider == first(flagged.get("provider"), *(one.provider for one in layers), provider)
        assert worker.model == first(flagged.get("model"), *(one.model for one in layers), model)
        assert worker.thinking == first(flagged.get("thinking"), *(one.thinking for one in layers), levels[role])
        for key, source in worker.sources.items():
            check_source(role, key, getattr(worker, key), source, here, models, flagged)

    if project.directory == HERE:
        assert made.project_config.matched
        manifest_reads(made)
    else:
        assert made.project_config == manifest.UNMATCHED


def check_source(
    role: str, key: str, value: str, source: Any, here: Project, models: Models, flags: dict[str, str | None]
) -> None:
    """What a source names holds the value."""
    places: dict[str, tuple[str, Any]] = {
        "flag": (f"--{role}-{key}", flags.get(key)),
        "project-role": (f"projects[0].roles.{role}.{key}", getattr(here.roles.get(role), key, None)),
        "project-defaults": (f"projects[0].defaults.{key}", getattr(here.defaults, key, None)),
        "role": (f"roles.{role}.{key}", getattr(models.roles.get(role), key, None)),
        "defaults": (f"defaults.{key}", getattr(models.defaults, key, None)),
    }
    if source.word in places:
        assert (source.key, value) == places[source.word]
        assert source.file == ("" if source.word == "flag" else FILE)
    else:
        assert source.word == ("profile" if key == "thinking" else "packaged")


def manifest_reads(made: Plan) -> None:
    """A manifest takes what was made of the project."""
    record = {name: getattr(made.project_config, name) for name in manifest.ProjectConfig.__struct_fields__}
    found = manifest._project_config(record, HERE, {})
    assert found == made.project_config


@given(
    flag=HARNESS_BY_ROLE,
    here=st.none() | st.tuples(st.none() | HARNESS, HARNESS_BY_ROLE),
    roles=HARNESS_BY_ROLE,
    default=st.none() | HARNESS,
)
def test_precedence_of_harnesses(
    flag: dict[str, str],
    here: tuple[str | None, dict[str, str]] | None,
    roles: dict[str, str],
    default: str | None,
) -> None:
    projects = {"/elsewhere": ProjectHarness(key="projects[0]", default="external", roles=dict.fromkeys(ROLES, "pi"))}
    if here is not None:
        projects[HERE] = ProjectHarness(key="projects[1]", default=here[0], roles=here[1])
    harnesses = Harnesses(default=default, roles=roles, projects=projects)
    made = plan(configuration(harness=harnesses), asked(harness=flag, specialists=EVERYBODY))
    of_project, of_role = here or (None, {})
    for role, worker in made.roles.items():
        layers = {
            "flag": flag.get(role),
            "project-role": of_role.get(role),
            "project-defaults": of_project,
            "role": roles.get(role),
            "defaults": default,
            "packaged": "pi",
        }
        word, value = next((word, value) for word, value in layers.items() if value is not None)
        assert (worker.harness, worker.sources["harness"].word) == (value, word)
        assert worker.sources["harness"].file == (OWN if word not in {"flag", "packaged"} else "")


def test_a_project_is_matched_by_its_directory_and_nothing_else() -> None:
    for directory in ("/", "/her", "/here/sub", "/here/"):
        models = models_of(projects=(Project(key="projects[0]", directory=directory, profile="economy"),))
        assert plan(configuration(models), asked()).profile.name == "thorough"


def test_the_project_as_the_manifest_has_it() -> None:
    here = Project(
        key="projects[0]",
        directory=HERE,
        roles={"reviewer": Choice(thinking="low"), "probe": Choice(), "django": Choice(provider="p", model="m")},
        specialists=("probe", "playwright"),
    )
    made = plan(configuration(models_of(projects=(here,))), asked())
    assert made.project_config == manifest.ProjectConfig(
        matched=True,
        directory=HERE,
        specialists=["probe", "playwright"],
        model_defaults=False,
        role_overrides=["django", "reviewer"],
    )
    manifest_reads(made)


def test_where_the_rest_comes_from() -> None:
    here = Project(key="projects[2]", directory=HERE, profile="fast", specialists=("probe",), workspace_capsule=False)
    original = Models(file=FILE, kind=shapes.ORIGINAL_MODELS, profiles={"fast": LEVELS}, projects=(here,))
    made = plan(configuration(original), asked())
    texts = {key: source.text for key, source in made.sources.items()}
    assert texts["profile"] == f"{FILE}: projects[2].profile"
    assert texts["specialists"] == f"{FILE}: projects[2].specialists"
    assert texts["workspace_capsule"] == f"{FILE}: projects[2].workspaceCapsule"
    assert texts["flow"] == "packaged"
    assert made.roles["probe"].sources["thinking"].text == f"{FILE}: profiles.fast.probe"
    default = Models(file=FILE, kind=shapes.ORIGINAL_MODELS, default_profile="economy")
    assert plan(configuration(default), asked()).sources["profile"].text == f"{FILE}: defaultProfile"
    made = plan(
        configuration(original),
        asked(
            profile="economy",
            specialists={"django": True, "probe": False},
            flow="phased",
            workspace_capsule=True,
            budget_enforcement="hard",
        ),
    )
    assert {key: source.text for key, source in made.sources.items() if source.word == "flag"} == {
        "profile": "--profile",
        "flow": "--implementation-flow",
        "specialists": "--without-probe --with-django-expert",
        "workspace_capsule": "--workspace-capsule",
        "budget.enforcement": "--budget-enforcement",
    }
    made = plan(configuration(original), asked(workspace_capsule=False))
    assert made.sources["workspace_capsule"].text == "--no-workspace-capsule"


def test_a_flag_may_name_a_model_alone() -> None:
    models = models_of(defaults=Choice(provider="anthropic", model="claude"))
    worker = plan(configuration(models), asked(models={"reviewer": {"model": "other"}})).roles["reviewer"]
    assert (worker.provider, worker.model) == ("anthropic", "other")
    assert (worker.sources["provider"].word, worker.sources["model"].word) == ("defaults", "flag")


def test_an_unknown_profile() -> None:
    found = configuration(models_of(profiles={"fast": LEVELS}))
    error = refused(found, profile="slow")
    assert (error.code, error.field) == ("orchestration_error", "profile")
    assert error.text == "Unknown execution profile: slow (known: thorough, balanced, economy, fast)"
    error = refused(configuration(profile_variable="fast"))
    assert (error.code, error.field) == ("config_invalid", "AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE")
    assert error.text.startswith("AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE: Unknown execution profile: fast (known:")


@pytest.mark.parametrize(
    ("forced", "specialists", "expected"),
    [
        ([], {}, ()),
        (["django", "probe"], EVERYBODY, ("probe", "django")),
        (["probe"], {"probe": True}, ("probe",)),
        (["probe"], {}, None),
        (["probe"], {"probe": False}, None),
        (["probe", "probe"], EVERYBODY, None),
        (["reviewer"], EVERYBODY, None),
        (["probe"] * 4, EVERYBODY, None),
    ],
)
def test_forced_specialists(forced: list[str], specialists: dict[str, Any], expected: tuple[str, ...] | None) -> None:
    if expected is not None:
        assert plan(configuration(), asked(forced=forced, specialists=specialists)).forced == expected
        return
    error = refused(configuration(), forced=forced, specialists=specialists)
    assert (error.code, error.field) == ("orchestration_error", "--force-specialist")
    assert error.text.startswith("--force-specialist")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"models": {"reviewer": {"thinking": "deep"}}}, "--reviewer-thinking"),
        ({"models": {"reviewer": {"provider": ""}}}, "--reviewer-provider"),
        ({"models": {"probe": {"model": "a b"}}}, "--probe-model"),
        ({"models": {"probe": {"model": "m" * 257}}}, "--probe-model"),
        ({"models": {"probe": {"model": "--extension=x"}}}, "--probe-model"),
        ({"models": {"tester": {}}}, "--ROLE-model"),
        ({"harness": {"tester": "pi"}}, "--harness"),
        ({"harness": {"probe": "codex"}}, "--harness"),
        ({"flow": "double"}, "--implementation-flow"),
        ({"specialists": {"reviewer": True}}, "--with-SPECIALIST"),
        ({"max_repair_rounds": -1}, "--max-repair-rounds"),
        ({"max_repair_rounds": 1_000_001}, "--max-repair-rounds"),
        ({"budget_enforcement": "soft"}, "--budget-enforcement"),
        ({"budget_overrides": ["warning.run.cost_total"]}, "--budget-override"),
        ({"budget_overrides": ["warning.run.cost_total=1", "warning.run.cost_total=2"]}, "--budget-override"),
        ({"budget_overrides": ["hard.run.operational_tokens=5"]}, "--budget-override"),
        ({"budget_overrides": ["warning.run.cost_total=1"] * 61}, "--budget-override"),
    ],
)
def test_what_flags_are_refused_for(fields: dict[str, Any], field: str) -> None:
    error = refused(configuration(), **fields)
    assert (error.code, error.field) == ("invalid_arguments", field)


def test_what_flags_may_say_at_most() -> None:
    made = plan(configuration(), asked(max_repair_rounds=1_000_000, models={"probe": {"model": "m" * 256}}))
    assert made.max_repair_rounds == 1_000_000
    assert plan(configuration(), asked(max_repair_rounds=0)).max_repair_rounds == 0


def test_budgets_of_file_and_flags() -> None:
    policy = budget.parse({"version": 1, "hard": {"role": {"cost_total": 3}}, "warning": {"role": {"cost_total": 2}}})
    found = configuration(
        budget=shapes.Budget(file=OWN, kind=shapes.ORCHESTRATE, key="budget", policy=policy),
    )
    made = plan(found, asked(budget_overrides=["hard.role.cost_total=off", "warning.role.cost_total=9"]))
    assert made.budget_policy.warning["role"] == {"operational_tokens": 200_000, "cost_total": 9}
    assert made.budget_policy.hard["role"] == {}
    assert made.sources["budget.hard.role.cost_total"].text == "--budget-override hard.role.cost_total"
    assert plan(found, asked()).sources["budget.hard.role.cost_total"].text == f"{OWN}: budget.hard.role.cost_total"


def test_what_is_handed_on() -> None:
    found = configuration(
        harness=Harnesses(pi_command="pi-next", pi_bridge="/x.js"),
        passed=("A",),
        dropped=("B*",),
        retention=shapes.Retention(keep_days=1, keep_runs=2),
    )
    made = plan(found, asked())
    assert (made.pi_command, made.pi_bridge, made.passed, made.dropped) == ("pi-next", "/x.js", ("A",), ("B*",))
    assert made.retention == found.retention
