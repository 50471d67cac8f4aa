# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start --dry-run`: every flag, what it makes of the run, and what bad input gets (section 11.2)."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_intercom.cli.orchestrate import parser
from agent_intercom.cli.orchestrate.preparing import Prepared, prepare
from agent_intercom.orchestration import contract, manifest
from agent_intercom.orchestration.startup import Startup
from tests.unit import orchruns
from tests.unit.orchcli import Home
from tests.unit.test_orch_main import subparsers

TASK = ("--task", "Make the parser accept empty lines.")
EXTERNAL = tuple(word for role in ("implementer", "reviewer") for word in ("--harness", f"{role}=external"))

DATA_KEYS = {
    "project",
    "session",
    "implementation_flow",
    "forced_specialists",
    "roles",
    "monitor",
    "transport",
    "coordination_protocol",
    "budget_policy",
    "execution_profile",
    "project_config",
    "orchestration_config",
    "worker_resources",
    "trust",
    "dry_run",
    "paths",
    "state_retained_on_stop",
    "context_capsule",
    "workspace_capsule",
    "continuation_policy",
    "worker_context_policy",
}
"""Of the contract (section 11.3)."""

OWN_KEYS = {"run_id", "unit", "host", "harness", "environment", "scoped", "external", "warnings", "workers"}


def dry(home: Home, *words: str) -> dict[str, Any]:
    """What a run would be."""
    task = () if any(word.startswith("--task") for word in words) else TASK
    return home.json("start", *task, *words, "--dry-run").data


def refused(home: Home, *words: str) -> tuple[str, str]:
    """The code and the text of a refusal, which is one line for a person too and leaves nothing behind."""
    before = home.tree()
    said = home.call("start", *words)
    assert said.code != 0 and said.out == ""
    assert said.err.startswith("orchestrate: ") and said.err.count("\n") == 1, said.err
    error = home.json("start", *words).error
    assert error[1] in said.err.replace("\n", "") or said.err.strip().endswith(error[1])
    assert home.tree() == before
    return error


def roles(data: dict[str, Any]) -> list[str]:
    return [role["name"] for role in data["roles"]]


def role(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(role for role in data["roles"] if role["name"] == name)
    return found


def test_every_key_of_a_preview(home: Home) -> None:
    before = home.tree()
    data = dry(home)
    assert data.keys() == DATA_KEYS | OWN_KEYS
    assert home.tree() == before
    assert data["project"] == str(home.project)
    assert data["session"] == "pi-project-agents"
    assert data["implementation_flow"] == "single" and data["forced_specialists"] == []
    assert roles(data) == ["implementer", "reviewer"]
    assert role(data, "implementer") == {
        "name": "implementer",
        "transport": "rpc",
        "provider": "openai-codex",
        "model": "gpt-5.6-sol",
        "thinking": "xhigh",
        "tool_policy": "default",
    }
    assert role(data, "reviewer")["tool_policy"] == "workflow-read-only-with-bash"
    assert data["monitor"] == {"kind": "broker/status"}
    assert data["transport"] == "rpc"
    assert data["coordination_protocol"] == {
        "name": "broker-v1",
        "version": 1,
        "payload_files": False,
        "polling": False,
    }
    assert data["budget_policy"]["enforcement"] == "warn-only" and data["budget_policy"]["version"] == 1
    assert data["budget_policy"]["warning"]["run"] == {"operational_tokens": 600_000}
    assert data["execution_profile"] == {"name": "thorough", "kind": "packaged", "source": "packaged-default"}
    assert data["project_config"]["matched"] is False
    assert data["orchestration_config"]["path"] == str(home.root / "home/.pi/agent/tmux-orchestrator.json")
    assert data["worker_resources"] == {"skill_discovery": False, "skills": {"implementer": [], "reviewer": []}}
    assert data["trust"] == {"child_bypass": False, "policy": "saved-or-global-policy"}
    assert data["dry_run"] is True and data["state_retained_on_stop"] is True
    root = str(home.root / "home/.local/state/agent-intercom/runs")
    assert data["paths"] == {"state_root": root, "coordination": None, "observer_socket": None}
    assert data["context_capsule"] == {"present": False, "chars": 0}
    assert data["workspace_capsule"] == {
        "enabled": False,
        "schema_version": None,
        "validation": "disabled",
        "instruction_count": 0,
        "marker_count": 0,
        "relevant_path_count": 0,
        "bytes": 0,
        "digest": None,
    }
    assert data["continuation_policy"] == {"version": 1, "max_repair_rounds": None}
    assert data["worker_context_policy"] == {"version": 1, "overrides": {}}
    assert (data["run_id"], data["unit"], data["host"]) == (None, None, "systemd")
    assert data["harness"] == {"implementer": "pi", "reviewer": "pi"}
    confined = {name: (one["confined"], one["writable"]) for name, one in data["workers"].items()}
    assert confined == {"implementer": (False, ["/"]), "reviewer": (True, [])}
    assert {"PATH", "HOME"} <= set(data["environment"]) and data["scoped"] is False


def test_what_a_person_is_shown(home: Home) -> None:
    said = home.call("start", *TASK, "--dry-run")
    assert said.code == 0 and said.err == ""
    for word in (
        "Session:      pi-project-agents",
        "implementer  pi",
        "openai-codex/gpt-5.6-sol",
        "PATH",
        "nothing was",
    ):
        assert word in said.out
    assert "empty lines" not in said.out


class Case(NamedTuple):
    """A flag as `words`, and what then stands at `keys` of the answer, which without it says something else.

    `beside` are words that are there both times, `config` what `orchestrate.toml` says meanwhile. A key that is the
    name of a role leads to its entry in `roles`.
    """

    words: tuple[str, ...]
    keys: tuple[str, ...]
    expected: Any
    beside: tuple[str, ...] = ()
    config: str = ""


WITH = {"probe": "--with-probe", "playwright": "--with-playwright", "django": "--with-django-expert"}
PROJECT = '[[projects]]\ndirectory = "{project}"\n'

FLAGS = {
    "--session": Case(("--session", "mine"), ("session",), "mine"),
    "--context-capsule": Case(("--context-capsule", "It is."), ("context_capsule",), {"present": True, "chars": 7}),
    "--context-capsule-file": Case(
        ("--context-capsule-file", "{task}"), ("context_capsule",), {"present": True, "chars": 10}
    ),
    "--implementation-flow": Case(("--implementation-flow", "phased"), ("implementation_flow",), "phased"),
    "--max-repair-rounds": Case(("--max-repair-rounds", "2"), ("continuation_policy", "max_repair_rounds"), 2),
    "--force-specialist": Case(("--force-specialist", "probe"), ("forced_specialists",), ["probe"], (WITH["probe"],)),
    "--profile": Case(
        ("--profile", "economy"),
        ("execution_profile",),
        {"name": "economy", "kind": "packaged", "source": "per-run"},
    ),
    "--harness": Case(EXTERNAL, ("harness",), {"implementer": "external", "reviewer": "external"}),
    "--worker-command": Case(
        ("--worker-command", "reviewer=cat '-n' \"a b\""),
        ("workers", "reviewer", "command"),
        ["/usr/bin/cat", "-n", "a b"],
        ("--harness", "reviewer=command"),
        '[harness.command]\ncommand = ["true"]\n',
    ),
    "--worker-skill": Case(
        ("--worker-skill", "reviewer={task}"), ("worker_resources", "skills", "reviewer"), ["{task}"]
    ),
    "--worker-context": Case(
        ("--worker-context", "reviewer=retain"), ("worker_context_policy", "overrides"), {"reviewer": "retain"}
    ),
    "--approve-project": Case(("--approve-project",), ("trust",), {"child_bypass": True, "policy": "approve"}),
    "--budget-enforcement": Case(("--budget-enforcement", "hard"), ("budget_policy", "enforcement"), "hard"),
    "--budget-override": Case(
        ("--budget-override", "hard.run.cost_total=5"), ("budget_policy", "hard", "run"), {"cost_total": 5}
    ),
}
for _name in contract.ROLES:
    _beside = ("--skip-model-check", *((WITH[_name],) if _name in WITH else ()))
    _model = ("--{0}-provider", "other", "--{0}-model", "m")
    _pair = tuple(word.format(_name) for word in _model)
    FLAGS[f"--{_name}-provider"] = Case(_pair, (_name, "provider"), "other", _beside)
    FLAGS[f"--{_name}-model"] = Case(_pair, (_name, "model"), "m", _beside)
    FLAGS[f"--{_name}-thinking"] = Case((f"--{_name}-thinking", "minimal"), (_name, "thinking"), "minimal", _beside)
for _name, _flag in WITH.items():
    FLAGS[_flag] = Case((_flag,), (_name, "name"), _name)
    FLAGS[_flag.replace("with", "without")] = Case(
        (_flag.replace("with", "without"),), (_name,), None, config=PROJECT + f"specialists = {[*WITH]}"
    )

ELSEWHERE = {
    "--help": "test_orch_main.test_help_is_for_people",
    "--json": "test_orch_main.test_json_may_stand_anywhere",
    "--dry-run": "test_orch_start.test_every_key_of_a_preview",
    "--project": "test_orch_start.test_the_project",
    "--attach": "test_orch_start.test_attach_is_for_people",
    **dict.fromkeys(("--task", "--task-file"), "test_orch_start.test_the_task_is_the_run_s"),
    **dict.fromkeys(
        (f"--{role}-{word}" for role in WITH for word in ("task", "task-file")),
        "test_orch_start.test_the_task_of_a_specialist",
    ),
    **dict.fromkeys(("--workspace-capsule", "--workspace-relevant-path"), "test_orch_start.test_a_workspace_capsule"),
    "--no-workspace-capsule": "test_orch_start.test_no_workspace_capsule_where_one_is_configured",
    "--skip-model-check": "test_orch_start.test_a_model_that_is_not_checked",
    "--no-project-custom-roles": "test_orch_start.test_custom_roles_that_are_configured",
    "--rpc-workers": "test_orch_start.test_workers_have_no_terminal_anyway",
    **dict.fromkeys(("--custom-role", "--role-registry"), "test_orch_start.test_custom_roles_are_refused"),
}
"""Flag to module and name of the test that is its own."""


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_seen_in_the_preview(home: Home, flag: str) -> None:
    case = FLAGS[flag]
    assert flag in case.words
    task = home.file("task.md", "Do it.\n\nx")
    if case.config:
        home.config(case.config.replace("{project}", str(home.project)))
    words = tuple(word.replace("{task}", task) for word in case.words)
    expected = [task] if case.expected == ["{task}"] else case.expected
    assert found_at(dry(home, *case.beside, *words), case.keys) == expected
    assert found_at(dry(home, *case.beside), case.keys) != expected


def found_at(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    found: Any = data
    for key in keys:
        if found is data and key in contract.ROLES:
            found = next((role for role in data["roles"] if role["name"] == key), None)
        else:
            found = None if found is None else found.get(key)
    return found


def prepared(*words: str) -> Prepared:
    """What a run would be, with the bodies that a preview does not show."""
    options = parser.build("orchestrate", "1").parse_args(["start", *words])
    options.program, options.json = "orchestrate", False
    return prepare(options)


def test_the_task_is_the_run_s(home: Home) -> None:
    task = home.file("task.md", "  Do it.\n\nx ")
    for words, text in ((TASK, f"{TASK[1]}\n"), (("--task-file", task), "Do it.\n\nx\n")):
        startup = prepared(*words).spec.startup
        assert startup == Startup(task=text, role_tasks={})


def test_the_capsule_is_the_run_s(home: Home) -> None:
    file = home.file("capsule.md", "It is new.")
    for words, text in (
        (("--context-capsule", "It is old."), "It is old.\n"),
        (
            ("--context-capsule-file", file),
            "It is new.\n",
        ),
    ):
        startup = prepared(*TASK, *words).spec.startup
        assert startup == Startup(task=f"{TASK[1]}\n", role_tasks={}, context_capsule=text)


LOOKS_FOR = {"probe": "assumption", "playwright": "browser", "django": "queries"}
"""A word that the packaged task of one specialist has, and that of no other."""


def test_the_task_of_a_specialist(home: Home) -> None:
    file = home.file("look.md", "Look there.")
    everybody = (*TASK, *WITH.values())
    default = prepared(*everybody).spec.startup.role_tasks
    found = {role: [word for word in LOOKS_FOR.values() if word in text] for role, text in default.items()}
    assert found == {role: [word] for role, word in LOOKS_FOR.items()}
    for role, flag in WITH.items():
        assert prepared(*TASK, flag).spec.startup.role_tasks == {role: default[role]}
        for words, text in (((f"--{role}-task", "Look."), "Look.\n"), ((f"--{role}-task-file", file), "Look there.\n")):
            startup = prepared(*everybody, *words).spec.startup
            assert startup == Startup(task=f"{TASK[1]}\n", role_tasks={**default, role: text})


def test_no_workspace_capsule_where_one_is_configured(home: Home) -> None:
    home.config(f'[[projects]]\ndirectory = "{home.project}"\nworkspace_capsule = true\n')
    # The project is no repository.
    assert refused(home, *TASK, "--dry-run")[0] == "workspace_capsule_invalid"
    assert dry(home, "--no-workspace-capsule")["workspace_capsule"]["enabled"] is False


def test_a_model_that_is_not_checked(home: Home) -> None:
    home.program("pi", "#!/bin/sh\nexit 3\n")
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "implementer model unavailable" in text and "--skip-model-check" in text
    assert role(dry(home, "--skip-model-check"), "implementer")["model"] == "gpt-5.6-sol"


def test_custom_roles_that_are_configured(home: Home) -> None:
    project = {"directory": str(home.project), "implementationFlow": "phased", "customRoles": {"x": 1}}
    home.file("home/.pi/agent/tmux-orchestrator.json", json.dumps({"version": 4, "projects": [project]}))
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "--no-project-custom-roles" in text and "config check" in text
    assert dry(home, "--no-project-custom-roles")["implementation_flow"] == "phased"


def test_workers_have_no_terminal_anyway(home: Home) -> None:
    data = dry(home, "--rpc-workers")
    assert data == dry(home) and data["transport"] == "rpc"


def test_every_flag_of_start_has_a_test() -> None:
    start = dict(subparsers(parser.build("orchestrate", "1")))[("start",)]
    flags = {word for action in start._actions for word in action.option_strings if word.startswith("--")}
    assert flags == FLAGS.keys() | ELSEWHERE.keys()
    assert not FLAGS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_the_test_of_a_flag_is_there(where: str) -> None:
    module, name = where.split(".")
    assert callable(getattr(importlib.import_module(f"tests.unit.{module}"), name))


def test_the_project(home: Home) -> None:
    other = home.root / "other/Sub Project"
    other.mkdir(parents=True)
    link = home.root / "link"
    link.symlink_to(other)
    data = dry(home, "--project", str(link))
    assert data["project"] == str(other) and data["session"] == "pi-sub-project-agents"
    assert refused(home, *TASK, "--project", "nowhere", "--dry-run")[0] == "invalid_arguments"


def test_attach_is_for_people(home: Home) -> None:
    assert home.json("start", *TASK, "--attach").error[0] == "interactive_only"


def test_custom_roles_are_refused(home: Home) -> None:
    for words in (("--custom-role", "custom-x", "p", "m", "low"), ("--role-registry", "f.json")):
        code, text = refused(home, *TASK, *words, "--dry-run")
        assert code == "invalid_arguments" and "custom roles" in text


def test_a_workspace_capsule(home: Home) -> None:
    git = ["git", "-C", str(home.project), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (home.project / "pyproject.toml").write_text("")
    (home.project / "AGENTS.md").write_text("Be kind.")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    data = dry(home, "--workspace-capsule", "--workspace-relevant-path", "pyproject.toml")["workspace_capsule"]
    assert data["enabled"] is True and data["instruction_count"] == 1 and data["marker_count"] == 1
    assert data["relevant_path_count"] == 1 and data["bytes"] > 0 and data["digest"]


def test_a_workspace_capsule_needs_a_repository(home: Home) -> None:
    assert refused(home, *TASK, "--workspace-capsule", "--dry-run")[0] == "workspace_capsule_invalid"
    code, text = refused(home, *TASK, "--workspace-relevant-path", "a", "--dry-run")
    assert code == "invalid_arguments" and "--workspace-capsule" in text


def test_skills_are_recorded_by_their_digest(home: Home) -> None:
    content = b"x" * manifest.MAX_SKILL
    skill = home.file("skill.md", content)
    words = ("--worker-skill", f"probe={skill}", WITH["probe"], "--skip-model-check")
    found = prepared(*TASK, *words).manifest.roles["probe"].skills
    assert found == [manifest.Skill(skill, hashlib.sha256(content).hexdigest())]


def test_a_scope_is_told_and_not_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "scope-canary-0123456789")
    said = home.json("start", *TASK, "--dry-run")
    assert said.data["scoped"] is True and "canary" not in said.out
    assert "canary" not in home.call("start", *TASK, "--dry-run").out
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "canary!")
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "AGENT_INTERCOM_SCOPE_ID" in text and "canary" not in text


def test_values_of_the_environment_are_not_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    for said in (home.call("start", *TASK, "--dry-run"), home.json("start", *TASK, "--dry-run")):
        assert "OPENAI_API_KEY" in said.out and "canary" not in said.out


BAD: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no task": ((), "invalid_arguments", "--task"),
    "a blank task": (("--task", " \n"), "invalid_arguments", "Task cannot be empty"),
    "two tasks": ((*TASK, "--task-file", "x"), "invalid_arguments", "--task-file"),
    "no file": (("--task-file", "nowhere"), "invalid_arguments", "--task-file cannot be read"),
    "a directory": (("--task-file", "."), "invalid_arguments", "--task-file cannot be read"),
    "not UTF-8": (("--task-file", "{binary}"), "invalid_arguments", "not UTF-8"),
    "a long task": (("--task-file", "{long}"), "invalid_arguments", "64 KiB safety limit"),
    "a task too long for a worker": (("--task-file", "{large}"), "worker_context_too_large", "a file of the project"),
    "a long capsule": ((*TASK, "--context-capsule-file", "{long}"), "invalid_arguments", "12 KiB safety limit"),
    "a capsule at the limit": ((*TASK, "--context-capsule-file", "{limit}"), "invalid_arguments", "12 KiB"),
    "a session": ((*TASK, "--session", "a b"), "invalid_arguments", "--session"),
    "a session of dots": ((*TASK, "--session", ".."), "invalid_arguments", "--session"),
    "a profile": ((*TASK, "--profile", "quick"), "orchestration_error", "Unknown execution profile: quick"),
    "a task without its role": ((*TASK, "--probe-task", "x"), "invalid_arguments", "requires --with-probe"),
    "a task without its expert": ((*TASK, "--django-task", "x"), "invalid_arguments", "requires --with-django-expert"),
    "forced, not there": ((*TASK, "--force-specialist", "probe"), "orchestration_error", "say --with-probe, too"),
    "forced twice": (
        (*TASK, WITH["probe"], *["--force-specialist", "probe"] * 2),
        "orchestration_error",
        "names a specialist twice",
    ),
    "a metric": (
        (*TASK, "--budget-override", "warning.run.cost_totl=5"),
        "invalid_arguments",
        "no metric cost_totl; metrics are provider_calls",
    ),
    "a metric that was meant": (
        (*TASK, "--budget-override", "hard.run.operational_token=5"),
        "invalid_arguments",
        "(did you mean operational_tokens?)",
    ),
    "a scope": ((*TASK, "--budget-override", "hard.runs.cost_total=5"), "invalid_arguments", "did you mean run?"),
    "thinking": ((*TASK, "--probe-thinking", "deep"), "invalid_arguments", "--probe-thinking"),
    "provider alone": ((*TASK, "--reviewer-provider", "p"), "orchestration_error", "reviewer"),
    "an unknown model": (
        (*TASK, "--reviewer-provider", "openai-codex", "--reviewer-model", "m"),
        "orchestration_error",
        "reviewer model unavailable",
    ),
    "a harness": ((*TASK, "--harness", "reviewer=word"), "invalid_arguments", "--harness"),
    "a harness of nobody": ((*TASK, "--harness", "writer=pi"), "invalid_arguments", "--harness"),
    "a harness alone": ((*TASK, "--harness", "pi"), "invalid_arguments", "ROLE=VALUE"),
    "a skill of nobody": ((*TASK, "--worker-skill", "probe={task}"), "invalid_arguments", "no probe"),
    "a skill that is not there": ((*TASK, "--worker-skill", "reviewer=no"), "invalid_arguments", "--worker-skill"),
    "an empty skill": ((*TASK, "--worker-skill", "reviewer={empty}"), "invalid_arguments", "--worker-skill"),
    "a large skill": ((*TASK, "--worker-skill", "reviewer={oversize}"), "invalid_arguments", "longer than 256 KiB"),
    "a pipe for a skill": ((*TASK, "--worker-skill", "reviewer={pipe}"), "invalid_arguments", "not a regular file"),
    "a device for a skill": (
        (*TASK, "--worker-skill", "reviewer=/dev/zero"),
        "invalid_arguments",
        "not a regular file",
    ),
    "a directory for a skill": ((*TASK, "--worker-skill", "reviewer=."), "invalid_arguments", "not a regular file"),
    "a skill twice": (
        (*TASK, "--worker-skill", "reviewer={task}", "--worker-skill", "reviewer={task}"),
        "invalid_arguments",
        "twice",
    ),
    "a context mode": ((*TASK, "--worker-context", "reviewer=some"), "orchestration_error", "retain"),
    "a context of nobody": ((*TASK, "--worker-context", "probe=retain"), "invalid_arguments", "no probe"),
    "a budget": ((*TASK, "--budget-override", "x"), "invalid_arguments", "LEVEL.SCOPE.METRIC"),
    "a threshold over the hard one": (
        (*TASK, "--budget-override", "hard.run.operational_tokens=5"),
        "invalid_arguments",
        "warning.run.operational_tokens",
    ),
    "rounds": ((*TASK, "--max-repair-rounds", "-1"), "invalid_arguments", "a whole number, 0 or more"),
    "many rounds": ((*TASK, "--max-repair-rounds", "1000001"), "invalid_arguments", "--max-repair-rounds"),
    "a flow": ((*TASK, "--implementation-flow", "loose"), "invalid_arguments", "--implementation-flow"),
    "an unknown flag": ((*TASK, "--fast"), "invalid_arguments", "--fast"),
    "a word too many": ((*TASK, "now"), "invalid_arguments", "now"),
    "half a flag": ((*TASK, "--dry"), "invalid_arguments", "--dry"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing_behind(home: Home, what: str) -> None:
    words, code, text = BAD[what]
    files = {
        "task": home.file("task.md", "Do it."),
        "binary": home.file("binary", b"\xff\xfe"),
        "long": home.file("long", "x" * 65_537),
        "large": home.file("large", "x" * 60_000),
        "limit": home.file("limit", "x" * 12_288),
        "empty": home.file("empty", ""),
        "oversize": home.file("oversize", "x" * (manifest.MAX_SKILL + 1)),
        "pipe": str(home.root / "pipe"),
    }
    os.mkfifo(files["pipe"])
    for name, path in files.items():
        words = tuple(word.replace(f"{{{name}}}", path) for word in words)
    found = refused(home, *words, "--dry-run")
    assert found[0] == code and text in found[1], found


def test_a_task_from_standard_input(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"Do it.")
    os.close(writing)
    with open(reading) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert prepared("--task-file", "-").spec.startup.task == "Do it.\n"


def test_a_task_from_a_pipe(home: Home) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"Do it.")
        os.close(writing)
        assert prepared("--task-file", f"/dev/fd/{reading}").spec.startup.task == "Do it.\n"
    finally:
        os.close(reading)


def test_pi_and_its_bridge_must_be_there(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.bin / "pi").unlink()
    said = home.json("start", *TASK, "--dry-run")
    assert said.code == 1 and said.error[0] == "missing_prerequisite" and "Pi" in said.error[1]
    assert home.json("start", *TASK, *EXTERNAL, "--dry-run").data["harness"]["reviewer"] == "external"
    home.program("pi", "#!/bin/sh\n")
    monkeypatch.delenv("AGENT_INTERCOM_PI_PACKAGE")
    said = home.json("start", *TASK, "--dry-run")
    assert said.error[0] == "missing_prerequisite" and "bridge" in said.error[1]


def test_a_bridge_that_is_configured_and_gone_stops_only_runs_with_pi(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.config(f"[harness.pi]\nbridge = '/nowhere/x.js'\n[[projects]]\ndirectory = '{home.root}/gone'")
    assert dry(home, *EXTERNAL)["harness"]["reviewer"] == "external"
    # That of the package that calls comes first.
    assert dry(home)["harness"]["reviewer"] == "pi"
    monkeypatch.delenv("AGENT_INTERCOM_PI_PACKAGE")
    home.file("home/.pi/agent/npm/node_modules/pi-tmux-orchestrator/extensions/orchestrator-worker.js", "")
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "missing_prerequisite" and "/nowhere/x.js" in text and "[harness.pi] bridge" in text
    assert dry(home, *EXTERNAL)["harness"]["reviewer"] == "external"


def test_without_a_service_manager_nothing_is_left_behind(home: Home) -> None:
    before = home.tree()
    code, text = home.json("start", *TASK).error
    assert code == "manager_unreachable" and "systemd" in text
    assert home.tree() == before


def test_without_a_runtime_directory_nothing_is_left_behind(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    before = home.tree()
    code, text = home.json("start", *TASK).error
    assert code == "orchestration_error" and "XDG_RUNTIME_DIR" in text
    assert home.tree() == before


def test_a_run_names_the_file_that_configures_it(home: Home) -> None:
    def named() -> str:
        return str(dry(home)["orchestration_config"]["path"])

    ours = str(home.root / "home/.config/agent-intercom/orchestrate.toml")
    original = str(home.root / "home/.pi/agent/tmux-orchestrator.json")
    assert named() == original
    home.config("[retention]\nkeep_days = 3\n")
    assert named() == ours
    home.file("home/.pi/agent/tmux-orchestrator.json", '{"version": 1}')
    assert named() == original
    home.config('default_profile = "economy"\n')
    assert named() == ours


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "there is no task"),
        ((*TASK, "--session", "a b"), "--session"),
        ((*TASK, "--probe-task", " "), "Probe task cannot be empty"),
        ((*TASK, "--harness", "reviewer=word"), "--harness"),
        ((*TASK, "--budget-override", "x"), "LEVEL.SCOPE.METRIC"),
        ((*TASK, "--worker-context", "nobody=prune"), "--worker-context"),
        ((*TASK, "--worker-skill", "reviewer=nowhere"), "--worker-skill"),
        ((*TASK, "--task-file", "x"), "--task-file"),
    ],
)
def test_what_was_typed_is_looked_at_before_settings_and_machine(
    home: Home, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str
) -> None:
    (home.bin / "pi").unlink()
    home.config("colour = 1")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    code, said = refused(home, *words, "--dry-run")
    assert code == "invalid_arguments" and text in said


def test_settings_are_looked_at_before_the_machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.bin / "pi").unlink()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    home.config("colour = 1\nsound = 2")
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "colour" in text and "(and 1 more)" in text
    assert "`orchestrate config check`" in text
    home.config("")
    assert "XDG_RUNTIME_DIR" in refused(home, *TASK, "--dry-run")[1]


def test_a_preview_says_what_the_runtime_directory_lacks(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, text in (("relative", "not set"), (str(home.root / "gone"), "no directory"), (__file__, "no directory")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        code, said = refused(home, *TASK, "--dry-run")
        assert code == "orchestration_error" and "XDG_RUNTIME_DIR" in said and text in said
    deep = home.root / ("d" * 60)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert "too long" in refused(home, *TASK, "--dry-run")[1]


def test_a_preview_says_that_the_session_goes_on(home: Home) -> None:
    root = home.root / "home/.local/state/agent-intercom/runs"
    run = orchruns.make(root, "mine", project=home.project)
    assert dry(home, "--session", "mine")["session"] == "mine"
    with orchruns.Alive(home.runtime, "u1", run):
        code, text = refused(home, *TASK, "--session", "mine", "--dry-run")
        assert code == "session_collision" and "`orchestrate stop mine --yes`" in text
        assert dry(home, "--session", "other")["session"] == "other"
        (run / "manifest.json").write_text("{")
        code, text = refused(home, *TASK, "--session", "mine", "--dry-run")
        assert code == "session_collision" and "cannot be read" in text and "orchestrate doctor" in text


def test_a_preview_says_that_tmux_has_the_session(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(home.root / "tmux")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        monkeypatch.setenv("TMUX", f"{address},1,0")
        home.program("tmux", "#!/bin/sh\necho mine:agents:/srv/run\n")
        code, text = refused(home, *TASK, "--session", "mine", "--dry-run")
        assert code == "session_collision" and "tmux" in text and "--session" in text
        assert dry(home, "--session", "other")["session"] == "other"


def test_the_names_of_files_are_not_obeyed_by_the_terminal(home: Home) -> None:
    project = Path(home.root / "pro\x1b[31mject")
    project.mkdir()
    said = home.call("start", *TASK, "--project", str(project), "--dry-run")
    assert said.code == 0 and "\x1b" not in said.out
