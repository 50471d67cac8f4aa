# SPDX-License-Identifier: Apache-2.0
"""Alice's home as that of somebody who starts teams from inside Pi: the package, our script in its place, a project.

home = PiHome(bed)                       # skips where Node or a package cannot be had
async with home.extension() as extension:
    await extension.call("list")
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from tests.contract import nodepeers
from tests.contract.nodepeers import HOSTS, Extension, Where, Worker
from tests.system import realpi
from tests.system.wire import UID, until

HOME = Path("/home/alice")
AGENT = HOME / ".pi/agent"
PACKAGE = AGENT / "npm/node_modules/pi-tmux-orchestrator"
PROJECT = HOME / ".local/project"
DRIVERS = HOME / ".local/drivers"
RUNS = HOME / ".local/state/agent-intercom/runs"
CONFIG = HOME / ".config/agent-intercom/orchestrate.toml"

SCRIPT = "/usr/lib/agent-intercom/pi-tmux-agents"

LOGIN = {
    "HOME": str(HOME),
    "USER": "alice",
    "LOGNAME": "alice",
    "LANG": "C.UTF-8",
    "PATH": f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin",
    "XDG_RUNTIME_DIR": f"/run/user/{UID}",
    "DBUS_SESSION_BUS_ADDRESS": f"unix:path=/run/user/{UID}/bus",
    "PI_OFFLINE": "1",
    "PI_SKIP_VERSION_CHECK": "1",
    "PI_TELEMETRY": "0",
}
"""What alice's shell has."""

_FILES = """
import os, pathlib, sys
name, text = sys.argv[1:]
path = pathlib.Path(name)
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(text)
"""


class Terminal:
    """A tmux session of alice's, in her project; its first window has `command` in it. It ends with the context."""

    def __init__(self, bed: Any, command: str, rows: int = 30) -> None:
        if bed.run("command -v tmux", check=False).returncode != 0:
            pytest.skip("there is no tmux")
        self.bed = bed
        size = ["-x", "150", "-y", str(rows)]
        self._begin = [*_shell(), "tmux", "new-session", "-d", "-s", "desk", "-n", "first", *size, command]

    def __enter__(self) -> Self:
        self.bed.as_user("alice", self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self.bed.as_user("alice", ["tmux", "kill-server"], check=False)

    @property
    def inside(self) -> str:
        """The variable TMUX of what runs in it."""
        asked = ["tmux", "display-message", "-p", "-t", "desk", "#{socket_path},#{pid},0"]
        return str(self.bed.as_user("alice", asked).stdout.strip())

    def windows(self) -> list[str]:
        """The names of its windows."""
        asked = ["tmux", "list-windows", "-t", "desk", "-F", "#{window_name}"]
        return list(self.bed.as_user("alice", asked).stdout.split())

    def screen(self, window: str = "first") -> str:
        """What a window shows; nothing where it is not there."""
        return str(
            self.bed.as_user("alice", ["tmux", "capture-pane", "-p", "-t", f"desk:{window}"], check=False).stdout
        )

    def shows(self, *parts: str, window: str = "first") -> None:
        """Wait until a window shows all of it."""
        until(lambda: all(part in self.screen(window) for part in parts), f"a screen with {parts}")

    def type(self, *keys: str, window: str = "first") -> None:
        """Type into a window: text, or the names that tmux has for keys."""
        self.bed.as_user("alice", ["tmux", "send-keys", "-t", f"desk:{window}", *keys])


def _shell() -> list[str]:
    """What makes a command one of alice's shell, in her project."""
    return ["env", "-C", str(PROJECT), *(f"{name}={value}" for name, value in LOGIN.items())]


class PiHome:
    """What alice has installed and configured. Paths are hers. No run outlives the context."""

    def __init__(self, bed: Any, config: str) -> None:
        self.bed = bed
        self.programs = realpi.programs(bed.root)
        self._copy(nodepeers.here().package, PACKAGE)
        self._copy(HOSTS, DRIVERS)
        # As docs/pi-extension.md has it.
        bed.as_user("alice", ["ln", "-s", "--backup=numbered", SCRIPT, str(PACKAGE / nodepeers.TOOL)])
        self.write(CONFIG, config)
        self.write(PROJECT / "feature.py", "# Nothing yet\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bed.as_user("alice", ["systemctl", "--user", "stop", "orchestrate.slice"])

    def _copy(self, source: Path, to: Path) -> None:
        place = self.path(to)
        self.bed.as_user("alice", ["mkdir", "-p", str(to.parent)])
        shutil.copytree(source, place)
        for directory, _, files in os.walk(place):
            for path in (directory, *(f"{directory}/{file}" for file in files)):
                os.chown(path, UID, UID)

    def path(self, path: Path) -> Path:
        """A file of alice's as this process reaches it."""
        return Path(self.bed.root) / path.relative_to("/")

    def write(self, path: Path, text: str) -> None:
        self.bed.python("alice", _FILES, str(path), text)

    @property
    def where(self) -> Where:
        return Where(self.programs.node, DRIVERS, PACKAGE, partial(self.bed.argv, "alice"))

    def extension(self, models: Sequence[Mapping[str, object]] = (), **environment: str) -> Extension:
        """The extension in a scripted Pi of alice's, in her project."""
        return Extension(PROJECT, {**LOGIN, **environment}, models, self.where)

    def worker(self, role: str, run: Mapping[str, Any], rules: Sequence[Mapping[str, object]] = ()) -> Worker:
        """The worker bridge that alice starts for a role of a run; `run` is what `start` answered."""
        token = self.path(Path(run["paths"]["coordination"]) / f"{role}.token").read_text().strip()
        return Worker(role, token, Path(run["paths"]["observer_socket"]), rules=rules, where=self.where)

    def pi(self, url: str) -> None:
        """Install the real Pi, with the package, for a model at `url`."""
        realpi.executable(self.path(HOME / ".local/bin"), self.programs)
        settings = realpi.prepare(self.path(AGENT), url) / "settings.json"
        packages = {"packages": [f"npm:{PACKAGE.name}"]}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | packages))

    def units(self) -> list[str]:
        """The units of alice's runs that are there in any state."""
        listed = "systemctl --user list-units --all --plain --no-legend 'orchestrate@*' 'orchestrate-*'"
        lines = self.bed.as_user("alice", listed).stdout.splitlines()
        return [line.split()[0] for line in lines if not line.startswith(("orchestrate-prune", "orchestrate-workers"))]

    def left_in_tmp(self) -> list[str]:
        """What the extension wrote for our script and did not remove."""
        return list(self.bed.run("ls /tmp | grep pi-tmux-orchestrator || true").stdout.split())
