# SPDX-License-Identifier: Apache-2.0
"""The original's two JSON files: versions, strict rules, and what is read from them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from agent_intercom.orchestration import budget, manifest
from agent_intercom.orchestration.config.plan import Asked, plan
from agent_intercom.orchestration.config.shapes import Choice
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchconfig import LEVELS, ROLES, Files, files

__all__ = ["files"]

CANARY = "x-canary-x"


def project(files: Files, **fields: Any) -> dict[str, Any]:
    return {"directory": str(files.project), **fields}


def version_four(files: Files) -> dict[str, Any]:
    return {
        "version": 4,
        "defaultProfile": "fast",
        "profiles": {"fast": LEVELS},
        "defaults": {"provider": "p", "model": "m", "thinking": "off"},
        "roles": {"probe": {"thinking": "xhigh"}, "reviewer": {}},
        "projects": [
            project(
                files,
                profile="balanced",
                defaults={"thinking": "minimal"},
                roles={"reviewer": {"provider": "rp", "model": "rm"}, "django": {}, "implementer": {"thinking": "low"}},
                implementationFlow="phased",
                specialists=["django"],
                workspaceCapsule=True,
            ),
            {"directory": str(files.other), "specialists": None},
        ],
    }


def test_all_that_a_file_can_say(files: Files) -> None:
    files.json(version_four(files))
    found = files.load()
    assert [file.counted for file in found.files] == [(), ("models",), ()]
    models = found.models
    assert (models.file, models.default_profile, models.profiles) == (str(files.models), "fast", {"fast": LEVELS})
    assert models.defaults == Choice(provider="p", model="m", thinking="off")
    assert models.roles == {"probe": Choice(thinking="xhigh"), "reviewer": Choice()}
    first, second = models.projects
    assert first.key == "projects[0]"
    assert (first.profile, first.implementation_flow, first.specialists) == ("balanced", "phased", ("django",))
    assert (first.workspace_capsule, first.custom_roles) == (True, False)
    assert (second.directory, second.specialists) == (str(files.other), None)
    made = plan(found, Asked(project=str(files.project)))
    assert made.project_config == manifest.ProjectConfig(
        matched=True,
        directory=str(files.project),
        profile="balanced",
        implementation_flow="phased",
        specialists=["django"],
        workspace_capsule=True,
        model_defaults=True,
        role_overrides=["implementer", "reviewer"],
    )
    assert made.sources["flow"].text == f"{files.models}: projects[0].implementationFlow"
    assert made.roles["reviewer"].sources["model"].text == f"{files.models}: projects[0].roles.reviewer.model"


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("key", ["defaultProfile", "profiles", "projects", "customRoles", "budgets", "default_profile"])
def test_every_version_has_its_own_keys(files: Files, version: int, key: str) -> None:
    values = {"defaultProfile": "economy", "profiles": {"fast": LEVELS}, "projects": [project(files)]}
    since = {"defaultProfile": 2, "profiles": 2, "projects": 3}
    files.json({"version": version, "defaults": {}, "roles": {}, key: values.get(key, {})})
    if version >= since.get(key, 5):
        files.load()
    else:
        found, rule = files.problem()
        assert found == key
        assert rule.startswith(f"unknown key in version {version}; known here: version, defaults, roles")


def test_the_smallest_file(files: Files) -> None:
    for version in (1, 2, 3, 4):
        files.json({"version": version})
        assert files.load().models.defaults == Choice()


@pytest.mark.parametrize("version", [0, 5, True, 1.0, "1", None, [1]])
def test_other_versions_are_refused(files: Files, version: Any) -> None:
    files.json({"version": version})
    assert files.problem() == ("version", "must be one of 1, 2, 3, 4")


@pytest.mark.parametrize(
    ("fields", "key", "rule"),
    [
        ({"defaults": None}, "defaults", "must be a table"),
        ({"defaults": []}, "defaults", "must be a table"),
        ({"defaults": {"provider": "p"}}, "defaults", "must give provider and model both or neither"),
        ({"defaults": {"provider": "p", "model": None}}, "defaults.model", "must not be null"),
        ({"defaults": {"provider": "p", "model": "m\n"}}, "defaults.model", "must have no blank"),
        ({"defaults": {"provider": "\ud800", "model": "m"}}, "defaults.provider", "must have no blank"),
        ({"defaults": {"provider": 1, "model": "m"}}, "defaults.provider", "must be text"),
        ({"defaults": {"thinking": None}}, "defaults.thinking", "must not be null"),
        ({"defaults": {"thinking": "High"}}, "defaults.thinking", "must be one of"),
        ({"defaults": {"apiKey": "k"}}, "defaults.apiKey", "unknown key; known here: provider, model, thinking"),
        ({"defaults": {"harness": "pi"}}, "defaults.harness", "unknown key"),
        ({"roles": {"custom-a": {}}}, "roles.custom-a", "must be one of"),
        ({"roles": {"probe": {"tools": "read"}}}, "roles.probe.tools", "unknown key"),
        ({"defaultProfile": None}, "defaultProfile", "must not be null"),
        ({"defaultProfile": "slow"}, "defaultProfile", "Unknown execution profile: slow"),
        ({"profiles": {"economy": LEVELS}}, "profiles.economy", "is a packaged profile"),
        ({"profiles": {"a" * 33: LEVELS}}, f"profiles.{'a' * 33}", "must be the name of a profile"),
        ({"profiles": {"fast\n": LEVELS}}, "profiles.fast\n", "must be the name of a profile"),
        ({"profiles": {"fast": {**LEVELS, "tester": "low"}}}, "profiles.fast.tester", "must be one of"),
        ({"profiles": {"fast": {"probe": "low"}}}, "profiles.fast", "must say something about every role"),
        ({"profiles": {f"p{n}": LEVELS for n in range(17)}}, "profiles", "must have at most 16 entries"),
        ({"projects": {}}, "projects", "must be a list"),
        ({"projects": [{"directory": "PROJECT"}] * 65}, "projects", "must have at most 64 entries"),
        ({"projects": [{}]}, "projects[0].directory", "must be there"),
        ({"projects": [{"directory": "~"}]}, "projects[0].directory", "must be an absolute path"),
        ({"projects": [{"directory": "PROJECT/."}]}, "projects[0].directory", "must be canonical: "),
        ({"projects": [{"directory": "PROJECT"}] * 2}, "projects[1].directory", "must not be the directory of an"),
        ({"projects": [{"directory": "PROJECT", "workspaceCapsule": 1}]}, "projects[0].workspaceCapsule", "must be"),
        ({"projects": [{"directory": "PROJECT", "workspaceCapsule": None}]}, "projects[0].workspaceCapsule", "must"),
        ({"projects": [{"directory": "PROJECT", "specialists": ["reviewer"]}]}, "projects[0].specialists[0]", "must"),
        ({"projects": [{"directory": "PROJECT", "implementation_flow": "single"}]}, "projects[0].implementation_flow",
         "unknown key; known here: directory, profile, defaults, roles, implementationFlow, specialists"),
        ({"projects": [{"directory": "PROJECT", "forcedSpecialists": []}]}, "projects[0].forcedSpecialists", "unknown"),
        ({"projects": [{"directory": "PROJECT", "profile": "slow"}]}, "projects[0].profile", "Unknown execution"),
    ],
)  # fmt: skip
def test_what_a_file_of_models_is_refused_for(files: Files, fields: dict[str, Any], key: str, rule: str) -> None:
    text = json.dumps({"version": 4, **fields}).replace("PROJECT", str(files.project))
    files.json(text)
    found_key, found_rule = files.problem() if "\n" not in key else _first(files)
    assert found_key == key
    assert found_rule.startswith(rule)


def _first(files: Files) -> tuple[str, str]:
    (problem,) = files.examine().problems
    return problem.key, problem.rule


def test_directories_are_canonical_and_there(files: Files) -> None:
    link = files.home / "link"
    link.symlink_to(files.project)
    (files.home / "file").write_text("")
    for directory, rule in (
        (link, f"must be canonical: {files.project}"),
        (files.home / "gone", "must exist; correct it or take the project out"),
        (files.home / "file", "must be a directory"),
    ):
        files.json({"version": 3, "projects": [{"directory": str(directory)}]})
        assert files.problem() == ("projects[0].directory", rule)


def test_custom_roles_are_refused_where_they_would_count(files: Files) -> None:
    here, elsewhere = project(files, customRoles={"custom-a": {}}), {"directory": str(files.other), "customRoles": [1]}
    files.json({"version": 3, "projects": [here]})
    assert files.problem() == ("projects[0].customRoles", "unknown key; it came with version 4")
    files.json({"version": 4, "projects": [elsewhere, here]})
    asked = Asked(project=str(files.project))
    with pytest.raises(Refusal) as caught:
        plan(files.load(), asked)
    assert (caught.value.code, caught.value.field) == ("config_invalid", "projects[1].customRoles")
    assert caught.value.text == (
        f"{files.models}: projects[1].customRoles: there are no custom roles; take them out, or pass"
        " --no-project-custom-roles"
    )
    assert plan(files.load(), Asked(project=str(files.project), project_custom_roles=False)).project_config.matched
    files.json({"version": 4, "projects": [elsewhere, project(files, customRoles=[])]})
    assert plan(files.load(), asked).project_config.matched


NOT_JSON = "must be JSON in UTF-8 in which no key stands twice and every number is one"
AT = "must be JSON: {} (at line {}, column {})"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", AT.format("Expecting value", 1, 1)),
        (b'{"version": 1,\n  }', AT.format("Expecting property name enclosed in double quotes", 2, 3)),
        (b"\xff", NOT_JSON),
        (b'\xef\xbb\xbf{"version":1}', AT.format("Unexpected UTF-8 BOM (decode using utf-8-sig)", 1, 1)),
        (b'{"version":1,"version":1}', NOT_JSON),
        (b'{"version":1,"roles":{"probe":{},"probe":{}}}', NOT_JSON),
        (b'{"version":NaN}', NOT_JSON),
        (b'{"version":1}//', AT.format("Extra data", 1, 14)),
        (b"[" * 60_000, NOT_JSON),
        (b"1" * 5_000, NOT_JSON),
        (b'{"version":1}' + b" " * 65_536, "must have at most 65536 bytes"),
    ],
)
@pytest.mark.parametrize("which", ["models", "budgets"])
def test_what_is_no_such_file(files: Files, which: str, content: bytes, rule: str) -> None:
    file = getattr(files, which)
    file.write_bytes(content)
    assert files.problem() == ("", rule)
    assert files.examine().problems[0].file == str(file)


def test_the_longest_file_is_read(files: Files) -> None:
    for file in (files.models, files.budgets):
        file.write_bytes(b'{"version":1}'.ljust(65_536))
    assert files.load().budget.policy is not None


@pytest.mark.parametrize("which", ["models", "budgets"])
def test_links_and_other_kinds_are_refused(files: Files, which: str) -> None:
    file, real = getattr(files, which), files.other / "real.json"
    real.write_text('{"version":1}')
    file.symlink_to(real)
    assert files.problem() == ("", "must not be a link")
    file.unlink()
    os.mkfifo(file)
    assert files.problem() == ("", "must be a regular file")
    file.unlink()
    file.mkdir()
    assert files.problem() == ("", "must be a regular file")


@pytest.mark.parametrize(
    ("which", "variable"),
    [("models", "PI_TMUX_ORCHESTRATOR_CONFIG"), ("budgets", "PI_TMUX_ORCHESTRATOR_BUDGET_CONFIG")],
)
def test_a_file_in_the_project_is_refused(files: Files, which: str, variable: str) -> None:
    inside = files.project / "sub/config.json"
    inside.parent.mkdir()
    files.environ[variable] = str(inside)
    files.load()
    inside.write_text('{"version":1}')
    assert files.problem() == ("", "must lie outside the project that it configures; move it")
    files.environ[variable] = f"{files.other}/../project/sub/config.json"
    assert files.problem()[1].startswith("must lie outside")
    link = files.other / "link"
    link.symlink_to(inside.parent)
    files.environ[variable] = str(link / "config.json")
    assert files.problem()[1].startswith("must lie outside")
    files.project = files.other
    files.environ[variable] = str(inside)
    files.load()
    files.environ[variable] = "config.json"
    (problem,) = files.examine().problems
    assert problem == (variable, "", "must be an absolute path")


@pytest.mark.parametrize(
    ("fields", "key", "rule"),
    [
        ([], "", "must be an object"),
        ({}, "version", "must be 1"),
        ({"version": 2}, "version", "must be 1"),
        ({"version": 1, "enforcement": "soft"}, "enforcement", "must be one of warn-only hard"),
        ({"version": 1, "warning": {"run": {"cost_total": 0}}}, "warning.run.cost_total", "must be a number above 0"),
        (
            {"version": 1, "hard": {"role": {"operational_tokens": 199_999}}},
            "warning.role.operational_tokens",
            "cannot exceed its hard threshold",
        ),
    ],
)
def test_what_a_file_of_budgets_is_refused_for(files: Files, fields: Any, key: str, rule: str) -> None:
    files.budget(fields)
    found_key, found_rule = files.problem()
    assert found_key == key
    assert found_rule.startswith(rule)


def test_a_file_of_budgets(files: Files) -> None:
    files.budget({"version": 1, "enforcement": "hard", "warning": {"run": {"operational_tokens": None}}})
    made = plan(files.load(), Asked(project=str(files.project), budget_overrides=["hard.run.cost_total=5"]))
    assert made.budget_policy == budget.merge(
        budget.PACKAGED,
        budget.parse(
            {
                "version": 1,
                "enforcement": "hard",
                "warning": {"run": {"operational_tokens": None}},
                "hard": {"run": {"cost_total": 5}},
            }
        ),
    )
    assert {key: one.text for key, one in made.sources.items() if key.startswith("budget")} == {
        "budget.enforcement": f"{files.budgets}: enforcement",
        "budget.warning.run.operational_tokens": f"{files.budgets}: warning.run.operational_tokens",
        "budget.warning.role.operational_tokens": "packaged",
        "budget.hard.run.cost_total": "--budget-override hard.run.cost_total",
    }


def test_no_fault_quotes_a_value(files: Files) -> None:
    for fields in (
        {"defaults": {"apiKey": CANARY}},
        {"defaults": {"provider": f"{CANARY} ", "model": "m"}},
        {"defaults": {"thinking": CANARY}},
        {"version": CANARY},
        {"roles": {role: CANARY for role in ROLES}},
    ):
        files.json({"version": 4, **fields})
        with pytest.raises(Refusal) as caught:
            files.load()
        assert CANARY not in caught.value.text
    files.models.write_text(CANARY)
    assert CANARY not in files.problem()[1]


def test_every_variable_that_names_no_place_is_told(files: Files) -> None:
    wrong = ["PI_TMUX_ORCHESTRATOR_CONFIG", "PI_TMUX_ORCHESTRATOR_BUDGET_CONFIG"]
    files.environ |= dict.fromkeys(wrong, "x.json")
    assert files.examine().problems == [(name, "", "must be an absolute path") for name in wrong]
    files.environ = {"HOME": str(files.home), "PI_CODING_AGENT_DIR": "x"}
    (problem,) = files.examine().problems
    assert problem.file == "PI_CODING_AGENT_DIR"


def test_a_broken_file_of_models_hides_no_profile_that_is_not_there(files: Files) -> None:
    mine = dict.fromkeys(ROLES, "low")
    files.json({"version": 2, "defaultProfile": "fast", "profiles": {"mine": mine, "bad": {}}, "defaults": {"x": 1}})
    found = files.examine().problems
    assert sorted(one.key for one in found) == ["defaultProfile", "defaults.x", "profiles.bad"]
    files.environ["AGENT_INTERCOM_ORCHESTRATE_DEFAULT_PROFILE"] = "mine"
    assert files.examine().problems == found
