# SPDX-License-Identifier: Apache-2.0
"""What a worker is started as."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_intercom.orchestration import budget, contract, harness, policies

GIVEN: dict[str, Any] = {
    "program": "/opt/pi",
    "bridge": "/opt/b/orchestrator-worker.js",
    "role": "reviewer",
    "project": "/home/alice/my shop",
    "coord": "/state/s/r",
    "provider": "openai",
    "model": "m",
    "thinking": "high",
    "tools": "read,bash,grep,find,ls",
    "session_dir": "/state/s/r/sessions/reviewer",
    "session_id": "r-reviewer",
    "skills": [],
    "approve": False,
}


def test_the_command_line_of_pi() -> None:
    assert harness.arguments(**GIVEN) == [
        *("/opt/pi", "--mode", "rpc", "--session-dir", "/state/s/r/sessions/reviewer"),
        *("--name", "my shop reviewer", "--session-id", "r-reviewer"),
        *("--provider", "openai", "--model", "m", "--thinking", "high"),
        *("--tools", "read,bash,grep,find,ls,orchestrator_report"),
        *("--extension", "/opt/b/orchestrator-worker.js"),
        *("--no-skills", "--system-prompt", "/state/s/r/reviewer.system.md"),
    ]


def test_who_may_write_has_the_tools_for_it() -> None:
    line = harness.arguments(**GIVEN | {"tools": None})
    assert line[line.index("--tools") + 1] == "read,bash,edit,write,grep,find,ls,orchestrator_report"


def test_trust_and_skills_are_given_only_where_they_were_chosen() -> None:
    line = harness.arguments(**GIVEN | {"approve": True, "skills": ["/k/a.md", "/k/b.md"]})
    plain = harness.arguments(**GIVEN)
    assert [word for word in line if word not in plain] == ["--approve", "--skill", "/k/a.md", "--skill", "/k/b.md"]
    assert line[-4:] == ["--skill", "/k/a.md", "--skill", "/k/b.md"]


def environment(**changes: Any) -> dict[str, str]:
    given: dict[str, Any] = {
        "role": "reviewer",
        "token": "0" * 32,
        "socket": "/run/u/a1.sock",
        "generation": 3,
        "policy": budget.PACKAGED,
    }
    return harness.variables(**given | changes)


def test_what_the_bridge_reads() -> None:
    assert environment() == {
        "PI_TMUX_ORCHESTRATOR_ROLE": "reviewer",
        "PI_TMUX_ORCHESTRATOR_TOKEN": "0" * 32,
        "PI_TMUX_ORCHESTRATOR_SOCKET": "/run/u/a1.sock",
        "PI_TMUX_ORCHESTRATOR_GENERATION": "3",
        "PI_TMUX_ORCHESTRATOR_GUARDRAILS": '{"enforcement":"warn-only","hard":{},"warning":{}}',
        "PI_TMUX_ORCHESTRATOR_CONTEXT_MODE": "prune",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }


def test_thresholds_of_assignments_are_the_guardrails() -> None:
    policy = budget.merge(budget.PACKAGED, budget.overrides(["hard.assignment.provider_calls=9"], budget.HARD))
    made = environment(policy=policy, context_mode=policies.RETAIN)
    guardrails = json.loads(made["PI_TMUX_ORCHESTRATOR_GUARDRAILS"])
    assert guardrails == {"enforcement": "hard", "hard": {"provider_calls": 9}, "warning": {}}
    assert made["PI_TMUX_ORCHESTRATOR_CONTEXT_MODE"] == "retain"


def test_what_a_harness_needs() -> None:
    assert harness.programs(["pi", "external", "pi"]) == [harness.PROGRAM, harness.PI_BRIDGE] == ["pi", "pi-bridge"]
    assert harness.programs(["external"]) == []
    assert harness.PROGRAMS.keys() == harness.HARNESSES


@pytest.mark.parametrize("role", contract.ROLES)
def test_each_role_has_a_system_prompt_of_its_own(role: str) -> None:
    assert harness.system_prompt_file("/c", role) == f"/c/{role}.system.md"
