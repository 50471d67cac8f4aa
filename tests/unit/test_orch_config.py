# SPDX-License-Identifier: Apache-2.0
"""`orchestrate.toml`: what it takes, what it refuses and how, which file counts for what, and `orchestrate config`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from agent_intercom.orchestration import budget, contract, harness, manifest
from agent_intercom.orchestration.config import model, packaged
from agent_intercom.orchestration.config.files import MAX_BYTES
from agent_intercom.orchestration.config.plan import Asked, plan
from agent_intercom.orchestration.config.shapes import Choice, Configuration
from tests.unit.orchcli import Home
from tests.unit.orchconfig import ROLES, Files, files

__all__ = ["files"]

FAST = "[profiles.fast]\n" + "".join(f'{role} = "low"\n' for role in ROLES)

EVERYTHING = f"""
default_profile = "fast"

{FAST}

[defaults]
provider = "anthropic"
model = "claude"
thinking = "high"
harness = "external"

[roles.reviewer]
provider = "openai"
model = "gpt"
thinking = "max"
harness = "pi"

[[projects]]
directory = "PROJECT"
profile = "economy"
implementation_flow = "phased"
specialists = ["django", "probe"]
workspace_capsule = true
defaults = {{ thinking = "low", harness = "pi" }}
roles.probe = {{ provider = "p", model = "m", harness = "external" }}

[[projects]]
directory = "OTHER"
specialists = []

[budget]
version = 1
enforcement = "hard"
warning.run.operational_tokens = "off"
hard.assignment.context_percent = 90

[harness.pi]
command = "pi-next"
bridge = "BRIDGE"

[environment]
pass = ["DATABASE_URL", "FOO_*"]
drop = ["AWS_*"]

[retention]
keep_days = 7
keep_runs = 10
"""


def everything(files: Files) -> Configuration:
    bridge = files.home / "orchestrator-worker.js"
    bridge.write_text("")
    text = EVERYTHING.replace("PROJECT", str(files.project)).replace("OTHER", str(files.other))
    files.toml(text.replace("BRIDGE", str(bridge)))
    return files.load()


def documented() -> str:
    return (Path(__file__).resolve().parents[2] / "docs/configuration.md").read_text()


def test_the_example_of_the_documents_is_one(files: Files) -> None:
    text = documented()
    example = text[text.index("    # ~/.config/agent-intercom/orchestrate.toml") :]
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), example.splitlines())
    files.toml("\n".join(line[4:] for line in lines).replace("/home/me/src/shop", str(files.project)))
    found = files.load()
    assert found.files[0].counted == ("models", "budget", "harness", "workers", "environment", "retention")
    made = plan(found, Asked(project=str(files.project)))
    assert (made.profile.name, made.flow, list(made.roles)) == (
        "quick",
        "phased",
        ["implementer", "reviewer", "django"],
    )


def test_the_documents_name_every_key_and_every_packaged_value() -> None:
    text = documented()
    text = text[text.index("## Runs: ") :]
    keys = {name for table in tables(model.OrchestrateFile) for name in model._known(table, ())}
    assert not [key for key in keys if not re.search(rf"[`.]{key}\b", text)]
    assert not [metric for metric in budget.METRICS if f"`{metric}`" not in text]
    for role, (provider, name) in packaged.MODELS.items():
        levels = " | ".join(levels[role] for levels in packaged.PROFILES.values())
        assert f"| {role} | {provider} / {name} | {levels} |" in text


def tables(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A table of the file and all that are in it."""
    yield table
    for field in table.model_fields.values():
        for inner in model._models(field.annotation):
            yield from tables(inner)


def test_the_schema_speaks_of_the_same_things_as_the_rest() -> None:
    assert get_args(model.Role) == contract.ROLES
    assert get_args(model.Specialist) == contract.SPECIALISTS
    assert set(get_args(model.Harness)) == harness.HARNESSES
    assert get_args(model.Thinking) == contract.THINKING
    assert packaged.FLOWS == ("single", "phased")
    assert [*packaged.PROFILES] == ["thorough", "balanced", "economy"]
    assert all(tuple(levels) == contract.ROLES for levels in packaged.PROFILES.values())
    assert all(level in contract.THINKING for levels in packaged.PROFILES.values() for level in levels.values())
    assert tuple(packaged.MODELS) == contract.ROLES


def test_without_any_file_everything_is_packaged(files: Files) -> None:
    found = files.load()
    assert [(file.kind, file.present, file.counted) for file in found.files] == [
        ("orchestrate.toml", False, ()),
        ("original-models", False, ()),
        ("original-budget", False, ()),
    ]
    assert (found.models.file, found.budget.policy) == (str(files.models), None)
    assert (found.passed, found.dropped) == ((), ())
    assert (found.retention.keep_days, found.retention.keep_runs) == (30, 200)
    assert (found.harness.pi_command, found.harness.pi_bridge) == ("pi", None)


def test_everything_that_it_takes(files: Files) -> None:
    found = everything(files)
    assert found.files[0].counted == ("models", "budget", "harness", "environment", "retention")
    models = found.models
    assert (models.file, models.default_profile) == (str(files.own), "fast")
    assert models.profiles == {"fast": dict.fromkeys(ROLES, "low")}
    assert models.defaults == Choice(provider="anthropic", model="claude", thinking="high")
    assert models.roles == {"reviewer": Choice(provider="openai", model="gpt", thinking="max")}
    first, second = models.projects
    assert (first.key, first.directory, first.profile) == ("projects[0]", str(files.project), "economy")
    assert (first.implementation_flow, first.specialists) == ("phased", ("django", "probe"))
    assert (first.workspace_capsule, first.defaults) == (True, Choice(thinking="low"))
    assert first.roles == {"probe": Choice(provider="p", model="m")}
    assert (second.key, second.specialists, second.workspace_capsule) == ("projects[1]", (), None)
    assert found.harness.default == "external"
    assert found.harness.roles == {"reviewer": "pi"}
    project = found.harness.projects[str(files.project)]
    assert (project.key, project.default, project.roles) == ("projects[0]", "pi", {"probe": "external"})
    assert found.harness.pi_command == "pi-next"
    assert found.harness.pi_bridge == str(files.home / "orchestrator-worker.js")
    policy = found.budget.policy
    assert policy is not None
    assert policy.warning["run"] == {"operational_tokens": None}
    assert policy.hard["assignment"] == {"context_percent": 90}
    assert (found.passed, found.dropped) == (("DATABASE_URL", "FOO_*"), ("AWS_*",))
    assert (found.retention.keep_days, found.retention.keep_runs) == (7, 10)
    assert {"harness.pi.command", "environment.pass", "retention.keep_days"} <= found.own_keys


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("colour = 1", "colour", "unknown key; known here: default_profile, profiles, defaults, roles, projects"),
        ("default_profile = 1", "default_profile", "must be text"),
        ('default_profile = "Fast"', "default_profile", "must be the name of a profile"),
        ('default_profile = "fast"', "default_profile", "Unknown execution profile: fast (known: thorough, balanced"),
        ("profiles = 1", "profiles", "must be a table"),
        ('[profiles."no name"]' + FAST[15:], "profiles.no name", "must be the name of a profile"),
        (FAST.replace("fast", "thorough"), "profiles.thorough", "is a packaged profile"),
        (FAST.replace('probe = "low"\n', ""), "profiles.fast", "must say something about every role; missing: probe"),
        (FAST + 'tester = "low"', "profiles.fast.tester", "must be one of 'implementer', 'reviewer'"),
        (FAST.replace('probe = "low"', 'probe = "lowest"'), "profiles.fast.probe", "must be one of 'off', 'minimal'"),
        ("".join(FAST.replace("fast", f"p{n}") for n in range(17)), "profiles", "must have at most 16 entries"),
        ("[defaults]\nprovider = 'a'", "defaults", "must give provider and model both or neither"),
        ("[defaults]\nmodel = 'a'", "defaults", "must give provider and model both or neither"),
        ("[defaults]\nprovider = 'a b'\nmodel = 'm'", "defaults.provider", "must have no blank, control or"),
        ("[defaults]\nprovider = 'p'\nmodel = \"m\\u007f\"", "defaults.model", "must have no blank, control or"),
        ("[defaults]\nprovider = 'p'\nmodel = '-m'", "defaults.model", "must not begin with a dash"),
        ("[defaults]\nprovider = ''\nmodel = 'm'", "defaults.provider", "must have 1 to 256 characters"),
        (f"[defaults]\nprovider = '{'p' * 257}'\nmodel = 'm'", "defaults.provider", "must have 1 to 256 characters"),
        ("[defaults]\nthinking = 'deep'", "defaults.thinking", "must be one of 'off'"),
        ("[defaults]\nharness = 'codex'", "defaults.harness", "must be one of 'pi', 'command' or 'external'"),
        ("[roles.reviewer]\napiKey = 'k'", "roles.reviewer.apiKey", "unknown key; known here: provider, model, thin"),
        ("[roles.tester]\nthinking = 'low'", "roles.tester", "must be one of 'implementer'"),
        ("projects = 'x'", "projects", "must be a list"),
        ("projects = 5", "projects", "must be a list"),
        ("projects = [5]", "projects[0]", "must be a table"),
        ("roles = 5", "roles", "must be a table"),
        ("roles.probe = 5", "roles.probe", "must be a table"),
        ("defaults = 5", "defaults", "must be a table"),
        ("[[projects]]\nprofile = 'economy'", "projects[0].directory", "must be there"),
        ("[[projects]]\ndirectory = 'x'", "projects[0].directory", "must be an absolute path"),
        ('[[projects]]\ndirectory = "/a\\u0000b"', "projects[0].directory", "must be an absolute path"),
        ("[[projects]]\ndirectory = 'PROJECT/'", "projects[0].directory", "must be canonical: PROJECT"),
        ("[[projects]]\ndirectory = 'PROJECT'\n" * 2, "projects[1].directory", "must not be the directory of another"),
        ("[[projects]]\ndirectory = 'PROJECT'\nprofile = 'fast'", "projects[0].profile", "Unknown execution profile"),
        ("[[projects]]\ndirectory = 'PROJECT'\napprove = true", "projects[0].approve", "unknown key; known here: dir"),
        ("[[projects]]\ndirectory = 'PROJECT'\nspecialists = ['probe', 'probe']", "projects[0].specialists", "must n"),
        ("[[projects]]\ndirectory = 'PROJECT'\nspecialists = ['a']", "projects[0].specialists[0]", "must be one of"),
        ("[[projects]]\ndirectory = 'PROJECT'\nspecialists = 'probe'", "projects[0].specialists", "must be a list"),
        ("[[projects]]\ndirectory = 'PROJECT'\nworkspace_capsule = 1", "projects[0].workspace_capsule", "must be true"),
        ("[[projects]]\ndirectory = 'PROJECT'\nimplementation_flow = 'x'", "projects[0].implementation_flow", "must"),
        ("[[projects]]\ndirectory = 'PROJECT'\n[projects.defaults]\nmodel = 'm'", "projects[0].defaults", "must give"),
        (
            "".join(f"[[projects]]\ndirectory = '/gone/{n}'\n" for n in range(65)),
            "projects",
            "must have at most 64 entries",
        ),
        ("budget = 1", "budget", "must be a table"),
        ("[budget]\nversion = 2", "budget.version", "must be 1"),
        ("[budget]\nlimit = 2", "budget.limit", "unknown key; known here: version, enforcement, warning, hard"),
        ("[budget]\nwarning = 2", "budget.warning", "must be an object"),
        ("[budget]\nwarning.run = 2", "budget.warning.run", "must be an object"),
        ("[budget]\nwarning.runs.cost_total = 2", "budget.warning.runs", "unknown key; known here: run, role, assig"),
        ("[budget]\nenforcement = 'off'", "budget.enforcement", "must be one of warn-only hard"),
        ("[budget]\nwarning.run.cost_total = nan", "budget.warning.run.cost_total", "must be a number above 0 and at"),
        ("[budget]\nwarning.run.provider_calls = 0", "budget.warning.run.provider_calls", "must be an integer from 1"),
        (
            "[budget]\nhard.run.operational_tokens = 5",
            "budget.warning.run.operational_tokens",
            "cannot exceed its hard threshold",
        ),
        ("[harness.codex]", "harness.codex", "unknown key; known here: pi"),
        ("[harness.pi]\ncommand = 'bin/pi'", "harness.pi.command", "must be the name of a program in PATH or an abs"),
        ("[harness.pi]\nbridge = 'x.js'", "harness.pi.bridge", "must be an absolute path, with neither . nor .. in it"),
        ("[environment]\nkeep = []", "environment.keep", "unknown key; known here: pass, drop"),
        ("[environment]\npass = 'A'", "environment.pass", "must be a list"),
        ("[environment]\npass = ['A', '*_KEY']", "environment.pass[1]", "must be the name of a variable"),
        ("[environment]\ndrop = ['A=1']", "environment.drop[0]", "must be the name of a variable"),
        ("[environment]\npass = ['AGENT_INTERCOM_SCOPE_ID']", "environment.pass[0]", "is never passed on (the scope"),
        ("[environment]\npass = ['LISTEN_*']", "environment.pass[0]", "is never passed on (the service manager"),
        ("[retention]\nkeep_days = 0", "retention.keep_days", "must be at least 1"),
        ("[retention]\nkeep_runs = 100001", "retention.keep_runs", "must be at most 100000"),
        ("[retention]\nkeep_runs = true", "retention.keep_runs", "must be a whole number"),
        ("[retention]\nkeep_runs = 1.0", "retention.keep_runs", "must be a whole number"),
    ],
)
def test_what_it_refuses(files: Files, text: str, key: str, rule: str) -> None:
    files.toml(text.replace("PROJECT", str(files.project)))
    found_key, found_rule = files.problem()
    assert found_key == key
    assert found_rule.startswith(rule.replace("PROJECT", str(files.project)))


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"x = ", "must be TOML: "),
        (b"x = 1\nx = 2", "must be TOML: "),
        (b"\xff", "must be TOML in UTF-8"),
        (b"x = " + b"[" * 30_000, "must be TOML: "),
        (b"x = " + b"1" * 5_000, "must be TOML: "),
        (b"#" * (MAX_BYTES + 1), "must have at most 65536 bytes"),
    ],
)
def test_what_is_no_such_file(files: Files, content: bytes, rule: str) -> None:
    files.own.write_bytes(content)
    key, found = files.problem()
    assert key == ""
    assert found.startswith(rule)


def test_the_longest_file_is_read(files: Files) -> None:
    files.own.write_bytes(b"#" * MAX_BYTES)
    assert files.load().files[0].present


def test_tables_in_tables_end_somewhere(files: Files) -> None:
    files.toml("[budget]\n" + "a." * 2_000 + "a = 1")
    assert files.problem() == ("budget.a", "unknown key; known here: version, enforcement, warning, hard")


def test_a_link_is_followed_but_never_into_the_project(files: Files) -> None:
    real = files.other / "settings.toml"
    real.write_text("[retention]\nkeep_days = 3")
    files.own.symlink_to(real)
    assert files.load().retention.keep_days == 3
    files.own.unlink()
    files.own.symlink_to(files.project / "settings.toml")
    assert files.problem()[1].startswith("is a link to nothing")
    (files.project / "settings.toml").write_text("")
    assert files.problem() == ("", "must lie outside the project that it configures; move it")


def test_a_pipe_a_directory_and_what_cannot_be_read(files: Files) -> None:
    os.mkfifo(files.own)
    assert files.problem() == ("", "must be a regular file")
    files.own.unlink()
    files.own.mkdir()
    assert files.problem() == ("", "must be a regular file")
    files.own.rmdir()
    files.own.symlink_to(files.own)
    assert files.problem()[0] == ""


def test_a_home_that_is_the_project_has_no_configuration_of_its_own(files: Files) -> None:
    files.project = files.home
    files.load()
    files.toml("")
    assert files.problem() == ("", "must lie outside the project that it configures; move it")


def test_every_fault_is_told(files: Files) -> None:
    files.toml(
        "default_profile = 'fast'\n[[projects]]\ndirectory = 'nowhere'\n[budget]\nhard.run.x = 1\n"
        "[harness.pi]\nbridge = '/nowhere'"
    )
    files.environ["AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE"] = "Slow"
    found = files.examine()
    assert [(os.path.basename(file), key) for file, key, _ in found.problems] == [
        ("orchestrate.toml", "budget.hard.run.x"),
        ("AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE", ""),
        ("orchestrate.toml", "default_profile"),
        ("orchestrate.toml", "projects[0].directory"),
    ]
    with pytest.raises(Exception, match=r"\(and 3 more\)$"):
        files.load()
    assert [one.key for one in found.tolerated] == ["harness.pi.bridge"]


@pytest.mark.parametrize("models", [False, True])
@pytest.mark.parametrize("what", ["gone", "file", "link", "loop", "elsewhere/"])
def test_a_directory_of_another_project_that_is_gone_stops_no_run(files: Files, what: str, models: bool) -> None:
    """Be it of a project that says something about models or about its harness only."""
    (files.home / "file").write_text("")
    (files.home / "elsewhere").mkdir()
    (files.home / "link").symlink_to(files.home / "elsewhere")
    (files.home / "loop").symlink_to(files.home / "loop")
    said = "profile = 'economy'" if models else "defaults.harness = 'external'"
    name = f"{files.home}/{what}"
    files.toml(
        f"[[projects]]\ndirectory = '{name}'\n{said}\n[[projects]]\ndirectory = '{files.project}'\nprofile = 'balanced'"
    )
    made = plan(files.load(), Asked(project=str(files.project)))
    assert made.profile.name == "balanced"
    found = files.examine()
    assert found.problems == [] and [one.key for one in found.tolerated] == ["projects[0].directory"]
    assert found.tolerated[0].file == str(files.own)
    files.project = files.home / "elsewhere"
    # There, somebody would miss what is written for it under another name.
    assert bool(files.examine().problems) is (what in {"link", "elsewhere/"})


def test_a_bridge_that_is_gone_stops_no_configuration(files: Files) -> None:
    files.toml("[harness.pi]\nbridge = '/nowhere/x.js'")
    assert files.load().harness.pi_bridge == "/nowhere/x.js"
    found = files.examine().tolerated
    assert [(one.key, one.rule.startswith("must be a file that is there")) for one in found] == [
        ("harness.pi.bridge", True)
    ]


def test_one_fault_does_not_hide_another(files: Files) -> None:
    files.toml(
        "default_profile = 'fast'\n[[projects]]\nprofile = 'slow'\n[[projects]]\ndirectory = 'x'\nprofile = 'mine'\n"
        f"[[projects]]\ndirectory = '{files.home}/gone'\n[profiles.mine]\nprobe = 'low'\n"
        "[environment]\npass = ['AGENT_INTERCOM_SCOPE_ID']\n"
        "[budget]\nversion = 2\nwarning.run = { cost_totl = 1, cost_total = 0, context_tokens = 'x' }\nhard.run = 5\n"
    )
    files.environ["AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE"] = "slow"
    found = files.examine()
    assert found.configuration is None
    assert [key for _, key, _ in found.problems] == [
        "profiles.mine",
        "projects[0].directory",
        "environment.pass[0]",
        "budget.warning.run.cost_totl",
        "budget.version",
        "budget.warning.run.cost_total",
        "budget.warning.run.context_tokens",
        "budget.hard.run",
        "default_profile",
        "projects[0].profile",
        "",
        "projects[1].directory",
    ]
    assert [key for _, key, _ in found.tolerated] == ["projects[2].directory"]


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("[roles.implmenter]\nthinking = 'low'", "roles.implmenter", "implementer"),
        ("[defaults]\nthinkin = 'low'", "defaults.thinkin", "thinking"),
        ("[defaults]\nthinking = 'hihg'", "defaults.thinking", "high"),
        ("defaultProfile = 'economy'", "defaultProfile", "default_profile"),
        ("[budget]\nwarning.run.operational_token = 5", "budget.warning.run.operational_token", "operational_tokens"),
        ("[budget]\nwarnings.run.cost_total = 5", "budget.warnings", "warning"),
        ("[budget]\nhard.rnu.cost_total = 5", "budget.hard.rnu", "run"),
    ],
)
def test_what_was_probably_meant(files: Files, text: str, key: str, meant: str) -> None:
    files.toml(text)
    found, rule = files.problem()
    assert found == key and rule.endswith(f" (did you mean {meant}?)")


def test_a_file_that_may_not_count_is_not_judged(files: Files) -> None:
    files.toml("colour = 1")
    files.json("{")
    assert files.problem()[0] == "colour"
    assert [file.counted for file in files.examine().files] == [(), (), ()]
    assert [file.present for file in files.examine().files] == [True, True, False]


MODELS = {"version": 1, "defaults": {"provider": "p", "model": "json", "thinking": "low"}}
BUDGET = {"version": 1, "enforcement": "hard"}


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("", False),
        ("[retention]\nkeep_days = 3", False),
        ("[defaults]\nharness = 'external'", False),
        ("[profiles]\n[defaults]\n[roles]", False),
        ("[[projects]]\ndirectory = 'PROJECT'\n[projects.defaults]\nharness = 'external'", False),
        ("[[projects]]\ndirectory = 'PROJECT'", False),
        ("default_profile = 'economy'", True),
        (FAST, True),
        ("[defaults]\nthinking = 'low'", True),
        ("[roles.probe]\nprovider = 'p'\nmodel = 'm'", True),
        ("[[projects]]\ndirectory = 'PROJECT'\nspecialists = []", True),
        ("[[projects]]\ndirectory = 'PROJECT'\nworkspace_capsule = false", True),
        ("[[projects]]\ndirectory = 'PROJECT'\n[projects.roles.probe]\nthinking = 'low'", True),
    ],
)
def test_which_file_counts_for_models(files: Files, text: str, ours: bool) -> None:
    files.toml(text.replace("PROJECT", str(files.project)))
    files.json(MODELS)
    files.budget(BUDGET)
    found = files.load()
    assert found.models.file == str(files.own if ours else files.models)
    assert found.models.defaults.model != "json" if ours else found.models.defaults.model == "json"
    assert found.budget.file == str(files.budgets)
    assert [("models" in file.counted) for file in found.files] == [ours, not ours, False]
    made = plan(found, Asked(project=str(files.project)))
    assert made.orchestration_config == manifest.OrchestrationConfig(found.models.file, 4)
    assert made.roles["reviewer"].harness == ("external" if "external" in text else "pi")


def test_which_file_counts_for_budgets(files: Files) -> None:
    files.json(MODELS)
    files.budget(BUDGET)
    files.toml("[budget]")
    assert files.load().budget.file == str(files.budgets)
    files.toml("[budget]\nwarning.role.cost_total = 2.5")
    found = files.load()
    assert found.budget.file == str(files.own)
    assert [file.counted for file in found.files] == [("budget",), ("models",), ()]
    assert plan(found, Asked(project=str(files.project))).budget_policy.enforcement == budget.WARN_ONLY


def test_what_does_not_count_is_not_even_opened(files: Files) -> None:
    files.toml("default_profile = 'economy'\n[budget]\nenforcement = 'hard'")
    files.json("{")
    files.budget("{")
    assert [file.present for file in files.load().files] == [True, True, True]


def test_places_that_the_environment_names(files: Files) -> None:
    elsewhere = files.other / "models.json"
    elsewhere.write_text('{"version": 2, "defaultProfile": "economy"}')
    files.environ["PI_TMUX_ORCHESTRATOR_CONFIG"] = str(elsewhere)
    assert files.load().models.default_profile == "economy"
    files.environ["PI_TMUX_ORCHESTRATOR_CONFIG"] = "models.json"
    found = files.examine()
    assert found.problems == [("PI_TMUX_ORCHESTRATOR_CONFIG", "", "must be an absolute path")]
    files.environ["PI_TMUX_ORCHESTRATOR_CONFIG"] = "~/models.json"
    (files.home / "models.json").write_text('{"version": 2, "defaultProfile": "balanced"}')
    assert files.load().models.default_profile == "balanced"


def test_the_default_profile_of_the_environment(files: Files) -> None:
    variable = "AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE"
    files.toml("default_profile = 'economy'\n" + FAST)
    for value, expected in (("", "economy"), ("fast", "fast"), ("balanced", "balanced")):
        files.environ[variable] = value
        made = plan(files.load(), Asked(project=str(files.project)))
        assert (made.profile.name, made.profile.source) == (expected, "user-global")
        assert made.sources["profile"].word == ("environment" if value else "user")
    files.environ[variable] = "slow"
    assert files.problem() == ("", "Unknown execution profile: slow (known: thorough, balanced, economy, fast)")
    for value in ("Fast", "x y", "a" * 33, "\udcff"):
        files.environ[variable] = value
        assert files.problem() == ("", "must be the name of a profile (a-z, 0-9 and -)")


def test_no_other_variable_is_a_setting(files: Files) -> None:
    for name in ("PROFILES", "DEFAULTS", "RETENTION", "VARIABLES"):
        files.environ[f"AGENT_INTERCOM_ORCHESTRATE_{name}"] = "{"
    files.load()


def config(home: Home) -> Path:
    return home.root / "home/.config/agent-intercom/orchestrate.toml"


def test_check_tells_every_fault(home: Home) -> None:
    assert home.call("config", "check") == (0, "ok (nothing is configured)\n", "")
    home.config("[retention]\nkeep_days = 0\nkeep_runs = 'all'")
    said = home.call("config", "check")
    assert said == (
        2,
        f"{config(home)}: retention.keep_days: must be at least 1\n"
        f"{config(home)}: retention.keep_runs: must be a whole number\n",
        "orchestrate: 2 faults in the settings; no run starts before that is put right\n",
    )
    for action in ("check", "show"):
        envelope = home.json("config", action).envelope
        assert envelope["error"]["code"] == "orchestration_error"
        assert envelope["data"]["settings"] == {}
        assert envelope["data"]["problems"] == [
            {"file": str(config(home)), "key": "retention.keep_days", "rule": "must be at least 1"},
            {"file": str(config(home)), "key": "retention.keep_runs", "rule": "must be a whole number"},
        ]


def test_check_names_what_is_passed_over(home: Home) -> None:
    home.config("default_profile = 'economy'")
    original = home.file("home/.pi/agent/tmux-orchestrator.json", "{}")
    said = home.call("config", "check")
    assert said.code == 0
    assert said.out == f"ok ({config(home)})\n{original} does not count: orchestrate.toml says something about models\n"


def test_check_of_places_and_projects(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", "runs")
    problems = home.json("config", "check").envelope["data"]["problems"]
    assert problems == [{"file": "AGENT_INTERCOM_RUNS_DIR", "key": "", "rule": "must be an absolute path"}]
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", "/runs")
    data = home.json("config", "check").data
    assert data["settings"]["runs"] == {"value": "/runs", "source": "AGENT_INTERCOM_RUNS_DIR"}
    assert home.json("config", "check", "--project", "nowhere").error[0] == "invalid_arguments"


def test_nothing_that_a_file_says_moves_the_cursor(home: Home) -> None:
    home.config('"\\u001b[2J" = 1')
    for said in (home.call("config", "check"), home.call("config", "show"), home.call("prune")):
        assert said.code == 2
        assert "\x1b" not in said.out + said.err


def test_what_keeps_no_run_from_starting_is_a_fault_all_the_same(home: Home) -> None:
    home.config(f"[[projects]]\ndirectory = '{home.root}/gone'\n[harness.pi]\nbridge = '/nowhere/x.js'")
    said = home.call("config", "check")
    faults = (
        f"{config(home)}: harness.pi.bridge: must be a file",
        f"{config(home)}: projects[0].directory: must exist",
    )
    assert said.code == 2 and all(
        line.startswith(fault) for line, fault in zip(said.out.splitlines(), faults, strict=True)
    )
    assert said.err == "orchestrate: 2 faults in the settings; runs that do without what is named start\n"
    assert home.json("config", "check").envelope["data"]["settings"]["profile"]["value"] == "thorough"
    data = home.json("config", "show").data
    assert [one["key"] for one in data["problems"]] == ["harness.pi.bridge", "projects[0].directory"]
    shown = home.call("config", "show")
    assert shown.code == 0 and all(f"\n# fault: {fault}" in shown.out for fault in faults)
    assert home.call("prune").code == 0
    home.config(f"[[projects]]\ndirectory = '{home.root}/gone'\n[retention]\nkeep_days = 0")
    assert "2 faults in the settings; no run starts" in home.json("config", "check").error[1]
