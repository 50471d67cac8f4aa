# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start --dry-run`: every flag, what it makes of the run, and what bad input gets (section 11.2)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import parser
from agent_intercom.orchestration import manifest
from tests.unit.orchcli import Home

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

OWN_KEYS = {"run_id", "unit", "host", "harness", "environment", "scoped"}


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


MODEL_FLAGS = {
    f"--{name}-{key}": ((f"--{name}-{key}", value, *more), ("role", name, key), value)
    for name in parser.ROLES
    for key, value, more in (
        ("provider", "other", (f"--{name}-model", "m")),
        ("model", "m", ()),
        ("thinking", "low", ()),
    )
}
"""Flag to: the words, where in the answer it shows, and as what."""

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Any]] = {
    "--session": (("--session", "mine"), ("session",), "mine"),
    "--dry-run": ((), ("dry_run",), True),
    "--task": (TASK, ("dry_run",), True),
    "--task-file": (("--task-file", "{task}"), ("dry_run",), True),
    "--context-capsule": (
        ("--context-capsule", "It is old."),
        ("context_capsule",),
        {"present": True, "chars": 11},
    ),
    "--context-capsule-file": (
        ("--context-capsule-file", "{task}"),
        ("context_capsule",),
        {"present": True, "chars": 10},
    ),
    "--implementation-flow": (("--implementation-flow", "phased"), ("implementation_flow",), "phased"),
    "--max-repair-rounds": (("--max-repair-rounds", "2"), ("continuation_policy", "max_repair_rounds"), 2),
    "--no-workspace-capsule": (("--no-workspace-capsule",), ("workspace_capsule", "enabled"), False),
    "--force-specialist": (("--with-probe", "--force-specialist", "probe"), ("forced_specialists",), ["probe"]),
    "--no-project-custom-roles": (("--no-project-custom-roles",), ("dry_run",), True),
    "--profile": (
        ("--profile", "economy"),
        ("execution_profile",),
        {"name": "economy", "kind": "packaged", "source": "per-run"},
    ),
    "--skip-model-check": (("--skip-model-check",), ("dry_run",), True),
    "--harness": (EXTERNAL, ("harness",), {"implementer": "external", "reviewer": "external"}),
    "--worker-skill": (("--worker-skill", "reviewer={task}"), ("worker_resources", "skills", "reviewer"), ["{task}"]),
    "--worker-context": (
        ("--worker-context", "reviewer=retain"),
        ("worker_context_policy", "overrides"),
        {"reviewer": "retain"},
    ),
    "--approve-project": (("--approve-project",), ("trust",), {"child_bypass": True, "policy": "approve"}),
    "--rpc-workers": (("--rpc-workers",), ("transport",), "rpc"),
    "--budget-enforcement": (("--budget-enforcement", "hard"), ("budget_policy", "enforcement"), "hard"),
    "--budget-override": (
        ("--budget-override", "hard.run.cost_total=5"),
        ("budget_policy", "hard", "run"),
        {"cost_total": 5},
    ),
    **MODEL_FLAGS,
}
for _name, _flag in (("probe", "probe"), ("playwright", "playwright"), ("django", "django-expert")):
    FLAGS[f"--with-{_flag}"] = ((f"--with-{_flag}",), ("role", _name, "name"), _name)
    FLAGS[f"--without-{_flag}"] = ((f"--without-{_flag}",), ("harness",), {"implementer": "pi", "reviewer": "pi"})
    FLAGS[f"--{_name}-task"] = ((f"--with-{_flag}", f"--{_name}-task", "Look."), ("role", _name, "name"), _name)
    FLAGS[f"--{_name}-task-file"] = (
        (f"--with-{_flag}", f"--{_name}-task-file", "{task}"),
        ("role", _name, "name"),
        _name,
    )

ELSEWHERE = {
    "--help": "tests/unit/test_orch_main.py",
    "--json": "tests/unit/test_orch_main.py",
    "--project": "test_the_project",
    "--attach": "test_attach_is_for_people",
    "--workspace-capsule": "test_a_workspace_capsule",
    "--workspace-relevant-path": "test_a_workspace_capsule",
    "--custom-role": "test_custom_roles_are_refused",
    "--role-registry": "test_custom_roles_are_refused",
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_seen_in_the_preview(home: Home, flag: str) -> None:
    words, keys, expected = FLAGS[flag]
    task = home.file("task.md", "Do it.\n\nx")
    words = tuple(word.replace("{task}", task) for word in words)
    if flag in MODEL_FLAGS:
        _, name, _ = keys
        words += ("--skip-model-check",)
        if name not in ("implementer", "reviewer"):
            words += (f"--with-{'django-expert' if name == 'django' else name}",)
        if flag.endswith("-model"):
            words += (f"--{name}-provider", "p")
    found: Any = dry(home, *words)
    for key in keys:
        found = role(found, keys[1]) if key == "role" else found if found.get("name") == key else found[key]
    expected = [task] if expected == ["{task}"] else expected
    assert found == expected


def test_every_flag_of_start_has_a_test() -> None:
    made = parser.build("orchestrate", "1")
    start = next(action for action in made._actions if action.dest == "name").choices["start"]  # type: ignore[index, call-overload]
    flags = {word for action in start._actions for word in action.option_strings if word.startswith("--")}
    assert flags == FLAGS.keys() | ELSEWHERE.keys()
    assert not FLAGS.keys() & ELSEWHERE.keys()


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
    from agent_intercom.cli.orchestrate.preparing import prepare

    content = b"x" * manifest.MAX_SKILL
    skill = home.file("skill.md", content)
    options = parser.build("orchestrate", "1").parse_args(
        ["start", *TASK, "--worker-skill", f"probe={skill}", "--with-probe", "--skip-model-check"]
    )
    options.program = "orchestrate"
    found = prepare(options).manifest.roles["probe"].skills
    assert found is not None
    assert [(one.path, one.sha256) for one in found] == [(skill, hashlib.sha256(content).hexdigest())]


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
    "a task too long for a worker": (("--task-file", "{large}"), "worker_context_too_large", ""),
    "a long capsule": ((*TASK, "--context-capsule-file", "{long}"), "invalid_arguments", "12 KiB safety limit"),
    "a capsule at the limit": ((*TASK, "--context-capsule-file", "{limit}"), "invalid_arguments", "12 KiB"),
    "a session": ((*TASK, "--session", "a b"), "invalid_arguments", "--session"),
    "a session of dots": ((*TASK, "--session", ".."), "invalid_arguments", "--session"),
    "a profile": ((*TASK, "--profile", "quick"), "orchestration_error", "Unknown execution profile: quick"),
    "a task without its role": ((*TASK, "--probe-task", "x"), "invalid_arguments", "requires --with-probe"),
    "a task without its expert": ((*TASK, "--django-task", "x"), "invalid_arguments", "requires --with-django-expert"),
    "forced, not there": ((*TASK, "--force-specialist", "probe"), "orchestration_error", "--force-specialist"),
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
    "rounds": ((*TASK, "--max-repair-rounds", "-1"), "invalid_arguments", "--max-repair-rounds"),
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
        assert dry(home, "--task-file", "-")["dry_run"] is True


def test_pi_and_its_bridge_must_be_there(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.bin / "pi").unlink()
    said = home.json("start", *TASK, "--dry-run")
    assert said.code == 1 and said.error[0] == "missing_prerequisite" and "Pi" in said.error[1]
    assert home.json("start", *TASK, *EXTERNAL, "--dry-run").data["harness"]["reviewer"] == "external"
    home.program("pi", "#!/bin/sh\n")
    monkeypatch.delenv("AGENT_INTERCOM_PI_PACKAGE")
    said = home.json("start", *TASK, "--dry-run")
    assert said.error[0] == "missing_prerequisite" and "bridge" in said.error[1]


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


def test_the_names_of_files_are_not_obeyed_by_the_terminal(home: Home) -> None:
    project = Path(home.root / "pro\x1b[31mject")
    project.mkdir()
    said = home.call("start", *TASK, "--project", str(project), "--dry-run")
    assert said.code == 0 and "\x1b" not in said.out
