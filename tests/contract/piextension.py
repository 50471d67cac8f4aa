# SPDX-License-Identifier: Apache-2.0
"""The published extension over a command line tool: ours as a person installs it, or one that answers what it is told.

with Desk(run.runtime) as desk:
    async with desk.extension() as extension:
        result = await extension.call("list")
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.contract.nodepeers import ROOT, Event, Extension, here, package_with

SCRIPT = ROOT / "packaging/pi-tmux-agents"
LAUNCHER = "/usr/bin/orchestrate"
"""What the script calls where it is installed for everybody."""

MODELS = [{"provider": "p", "id": "m", "name": "M"}]

_CANNED = """\
#!/usr/bin/env python3
import json, sys
words = [word for word in sys.argv[1:] if word != "--json"]
with open({answers!r}) as file:
    answers = json.load(file)
data = answers["preview" if "--dry-run" in words else words[0]]
print(json.dumps({{"schema_version": "1", "command": words[0], "success": True, "data": data, "error": None}}))
"""


class Desk:
    """A person's home with the package in it, and a project. The runtime directory may be that of a run of the tests.

    With `answers`, which has data by command and the preview of a start as `preview`, the tool is not ours.
    """

    def __init__(self, runtime: Path | None = None, answers: Mapping[str, Any] | None = None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pe", dir="/tmp"))
        self.home = self.root / "home"
        self.project = self.root / "project"
        self.runtime = runtime or self.root / "run"
        for directory in (self.home, self.project, self.runtime):
            directory.mkdir(mode=0o700, exist_ok=True)
        self._answers = self.root / "answers.json"
        script = self._canned() if answers is not None else self._ours()
        if answers is not None:
            self.answers(answers)
        self.package = package_with(script, self.root / "package")

    def _ours(self) -> Path:
        """Our script as the installer lays it out, with the checkout's program behind it."""
        launcher = self.root / "orchestrate"
        argv = shlex.join([sys.executable, "-P", "-m", "agent_intercom.cli.orchestrate.main"])
        launcher.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT / "service"))} exec {argv} "$@"\n')
        launcher.chmod(0o755)
        script = self.root / "pi-tmux-agents"
        script.write_text(SCRIPT.read_text().replace(LAUNCHER, str(launcher)))
        return script

    def _canned(self) -> Path:
        script = self.root / "pi-tmux-agents"
        script.write_text(_CANNED.format(answers=str(self._answers)))
        return script

    def answers(self, answers: Mapping[str, Any]) -> None:
        """What the tool answers from here on."""
        self._answers.write_text(json.dumps(answers))

    def commit(self) -> None:
        """Make the project a repository with all that is in it."""
        git = ["git", "-C", str(self.project), "-c", "user.name=n", "-c", "user.email=n@example.org"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "Begin"]):
            subprocess.run([*git, *words], check=True)

    def config(self, text: str) -> None:
        """Write the person's `orchestrate.toml`."""
        file = self.home / ".config/agent-intercom/orchestrate.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def extension(self, models: Sequence[Mapping[str, object]] = MODELS, **environment: str) -> Extension:
        """The extension in a Pi that was started in the project."""
        python = os.path.dirname(sys.executable)
        variables = {
            "HOME": str(self.home),
            "PATH": f"{python}:/usr/bin:/bin",
            "TMPDIR": str(self.root),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }
        return Extension(self.project, {**variables, **environment}, models, here()._replace(package=self.package))

    def tree(self) -> set[str]:
        """Every file and directory of the person, the project and the runtime directory; temporary ones, too."""
        return {str(path) for path in self.root.rglob("*") if self.package not in path.parents}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def assert_calm(extension: Extension) -> None:
    """Nothing went wrong in the scripted Pi, and it was asked for nothing that it has not."""
    faults: list[Event] = [event for event in extension.events if event["event"] in {"fault", "noise"}]
    assert not faults, faults
