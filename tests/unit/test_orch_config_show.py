# SPDX-License-Identifier: Apache-2.0
"""`orchestrate config show`: every setting, and where it comes from."""

from __future__ import annotations

from agent_intercom.orchestration.contract import ROLES
from tests.unit.orchcli import Home
from tests.unit.test_orch_config import config


def test_show_tells_where_every_value_comes_from(home: Home) -> None:
    home.config(f"""
        default_profile = "economy"
        [roles.probe]
        thinking = "max"
        [budget]
        warning.run.operational_tokens = "off"
        [environment]
        pass = ["DATABASE_URL"]
        [harness.command.roles]
        probe = ["prober", "-q"]
        [workers]
        network = false
        memory_max = "2G"
        [workers.roles.reviewer]
        writable = ["/srv"]
        [[projects]]
        directory = "{home.project}"
        specialists = ["probe"]
    """)
    before = home.tree()
    data = home.json("config", "show").data
    assert home.tree() == before
    assert data["problems"] == []
    assert data["files"][0] == {
        "path": str(config(home)),
        "kind": "orchestrate.toml",
        "present": True,
        "counted": ["models", "budget", "harness", "workers", "environment"],
    }
    own = f"{config(home)}: "
    expected = {
        "runs": (str(home.root / "home/.local/state/agent-intercom/runs"), "packaged"),
        "profile": ("economy", own + "default_profile"),
        "implementation_flow": ("single", "packaged"),
        "specialists": (["probe"], own + "projects[0].specialists"),
        "workspace_capsule": (False, "packaged"),
        "roles.probe.provider": ("openai-codex", "packaged"),
        "roles.probe.thinking": ("max", own + "roles.probe.thinking"),
        "roles.django.thinking": ("medium", "packaged: profiles.economy.django"),
        "roles.django.harness": ("pi", "packaged"),
        "budget.enforcement": ("warn-only", "packaged"),
        "budget.warning.run.operational_tokens": (None, own + "budget.warning.run.operational_tokens"),
        "budget.warning.role.operational_tokens": (200_000, "packaged"),
        "harness.pi.command": ("pi", "packaged"),
        "harness.pi.bridge": (None, "packaged"),
        "environment.pass": (["DATABASE_URL"], own + "environment.pass"),
        "environment.drop": ([], "packaged"),
        "retention.keep_days": (30, "packaged"),
        "retention.keep_runs": (200, "packaged"),
        "harness.command.command": (None, "packaged"),
        "workers.confine": (True, "packaged"),
        "workers.required": (False, "packaged"),
        "workers.writable": ([], "packaged"),
        "workers.network": (False, own + "workers.network"),
        "workers.memory_max": (2 << 30, own + "workers.memory_max"),
        "workers.memory_high": (None, "packaged"),
        "workers.tasks_max": (512, "packaged"),
        "workers.runtime_minutes": (None, "packaged"),
        "workers.roles.reviewer.writable": (["/srv"], own + "workers.roles.reviewer.writable"),
        "harness.command.roles.probe": (["prober", "-q"], own + "harness.command.roles.probe"),
    }
    shown = {key: (one["value"], one["source"]) for key, one in data["settings"].items()}
    assert expected.items() <= shown.items()
    assert shown.keys() - expected.keys() == {
        f"roles.{role}.{key}" for role in ROLES for key in ("provider", "model", "thinking", "harness")
    } - {"roles.probe.provider", "roles.probe.thinking", "roles.django.thinking", "roles.django.harness"}

    said = home.call("config", "show")
    assert (said.code, said.err) == (0, "")
    assert f"# {config(home)}: models, budget, harness, workers, environment\n" in said.out
    assert 'roles.probe.thinking = "max"  # from orchestrate.toml: roles.probe.thinking\n' in said.out
    assert "# budget.warning.run.operational_tokens: off  # from orchestrate.toml: budget.warning" in said.out
    assert "# harness.pi.bridge: not set\n" in said.out
    assert "retention.keep_days = 30\n" in said.out


def test_show_is_for_a_project(home: Home) -> None:
    other = home.root / "other"
    other.mkdir()
    home.config(f"[[projects]]\ndirectory = '{other}'\nprofile = 'balanced'")
    assert home.json("config", "show").data["settings"]["profile"]["value"] == "thorough"
    data = home.json("config", "show", "--project", "../other").data
    assert data["settings"]["profile"] == {"value": "balanced", "source": f"{config(home)}: projects[0].profile"}
