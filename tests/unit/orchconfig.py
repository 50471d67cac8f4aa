# SPDX-License-Identifier: Apache-2.0
"""A home with the files of a configuration in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration.config.load import Examined, examine, load
from agent_intercom.orchestration.config.shapes import Configuration
from agent_intercom.orchestration.errors import Refusal

ROLES = ("implementer", "reviewer", "probe", "playwright", "django")
LEVELS = dict.fromkeys(ROLES, "low")


class Files:
    """The three files, and a project outside the home."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        self.home, self.project, self.other = root / "home", root / "project", root / "other"
        self.own = self.home / ".config/agent-intercom/orchestrate.toml"
        self.models = self.home / ".pi/agent/tmux-orchestrator.json"
        self.budgets = self.home / ".pi/agent/tmux-orchestrator-budgets.json"
        for directory in (self.own.parent, self.models.parent, self.project, self.other):
            directory.mkdir(parents=True)
        self.environ = {"HOME": str(self.home)}

    def toml(self, text: str) -> None:
        self.own.write_text(text)

    def json(self, value: Any) -> None:
        self.models.write_text(value if isinstance(value, str) else json.dumps(value))

    def budget(self, value: Any) -> None:
        self.budgets.write_text(value if isinstance(value, str) else json.dumps(value))

    def examine(self) -> Examined:
        return examine(self.environ, str(self.project))

    def load(self) -> Configuration:
        return load(self.environ, str(self.project))

    def problem(self) -> tuple[str, str]:
        """Key and rule of the only fault, which `load` tells with the file."""
        found = self.examine()
        assert found.configuration is None
        (problem,) = found.problems
        with pytest.raises(Refusal) as caught:
            self.load()
        assert (caught.value.code, caught.value.field) == ("config_invalid", problem.key)
        assert caught.value.text == ": ".join(part for part in problem if part)
        assert "\n" not in caught.value.text
        return problem.key, problem.rule


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
