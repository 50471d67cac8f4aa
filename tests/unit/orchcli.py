# SPDX-License-Identifier: Apache-2.0
"""`orchestrate` as a function: a home of its own, a project, and what a command prints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_intercom.cli.orchestrate.main import main
from agent_intercom.orchestration import runtime

PI = """\
#!/bin/sh
printf '%s\\n' 'provider model' 'openai-codex gpt-5.6-sol' 'openai-codex gpt-5.4' 'openai-codex gpt-5.4-mini'
"""
"""A program that tells the models of the packaged profiles, and nothing else."""


class Said(NamedTuple):
    """What a command said: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def envelope(self) -> dict[str, Any]:
        """The one line of `--json`, of which the form is checked here once and for all."""
        assert self.err == ""
        line, end = self.out[:-1], self.out[-1:]
        assert end == "\n" and "\n" not in line, self.out
        value: dict[str, Any] = json.loads(line)
        assert line == json.dumps(value, sort_keys=True, separators=(",", ":"))
        assert value.keys() == {"schema_version", "command", "success", "data", "error"}
        assert value["schema_version"] == "1" and value["success"] is (value["error"] is None)
        assert value["success"] is (self.code == 0)
        if value["error"] is not None:
            assert value["error"].keys() == {"code", "message"} and len(value["error"]["message"]) <= 512
        return value

    @property
    def data(self) -> dict[str, Any]:
        envelope = self.envelope
        assert envelope["success"], envelope["error"]
        found: dict[str, Any] = envelope["data"]
        return found

    @property
    def error(self) -> tuple[str, str]:
        """The code and the text of a failure."""
        error = self.envelope["error"]
        assert error is not None, self.envelope
        return error["code"], error["message"]


class Home:
    """A person's home, and the command line in it. The current directory is `project`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capfd = capfd
        self.project = root / "project"
        self.bin = root / "bin"
        self.runtime = root / "run"
        for directory in (self.project, self.bin, root / "home"):
            directory.mkdir()
        self.runtime.mkdir(mode=0o700)
        bridge = root / "package/extensions/orchestrator-worker.js"
        bridge.parent.mkdir(parents=True)
        bridge.write_text("")
        (root / "package/package.json").write_text('{"version": "0.10.0"}')
        monkeypatch.setattr(runtime, "LOGIND", str(root / "logind"))
        for name in list(os.environ):
            if name.startswith(("PI_", "AGENT_INTERCOM_", "XDG_", "TMUX", "DBUS_")):
                monkeypatch.delenv(name)
        self.program("pi", PI)
        self.environment = {
            "HOME": str(root / "home"),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "XDG_RUNTIME_DIR": str(self.runtime),
            "AGENT_INTERCOM_PI_PACKAGE": str(root / "package"),
        }
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.project)

    def program(self, name: str, text: str) -> None:
        """Put a program into PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def file(self, name: str, text: str | bytes) -> str:
        """A file beside the project."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def config(self, text: str) -> None:
        """Write `orchestrate.toml`."""
        self.file("home/.config/agent-intercom/orchestrate.toml", text)

    def call(self, *words: str) -> Said:
        """Run the command line."""
        self._capfd.readouterr()
        code = main(words)
        said = self._capfd.readouterr()
        return Said(code, said.out, said.err)

    def json(self, *words: str) -> Said:
        """Run it for a program."""
        return self.call("--json", *words)

    def tree(self) -> set[str]:
        """Every file and directory in the home, the runtime directory and the project."""
        places = (self.root / "home", self.runtime, self.project)
        return {str(path) for place in places for path in place.rglob("*")}
