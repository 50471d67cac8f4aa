# SPDX-License-Identifier: Apache-2.0
"""What an installation for one person leads to beyond its own files: runs that go on, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
from pathlib import Path

from manifest import say

# what a Pi extension calls; another package installs a command of that name, too
PI_SCRIPT = "pi-tmux-agents"


def live_runs() -> list[str]:
    """The sessions of the caller's runs that go on, by their units; the unit's own name where that is not known."""
    if not shutil.which("systemctl"):
        return []
    command = ["systemctl", "--user", "list-units", "--plain", "--no-legend", "--state=active,activating,reloading"]
    listed = subprocess.run([*command, "orchestrate@*.socket", "orchestrate@*.service"], check=False, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout  # fmt: skip
    units = sorted(set(re.findall(r"^orchestrate@([a-z0-9]{1,32})\.", listed, re.MULTILINE)))
    return sorted(map(session_of, units))


def live_workers() -> list[str]:
    """The scope units of the caller's workers that go on and belong to no run."""
    if not shutil.which("systemctl"):
        return []
    command = ["systemctl", "--user", "show", "--property=Id,Slice", "worker-*.scope"]
    told = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    units = (set(block.splitlines()) for block in told.split("\n\n"))
    own = [lines for lines in units if "Slice=orchestrate-workers.slice" in lines]
    return sorted(line.removeprefix("Id=") for lines in own for line in lines if line.startswith("Id="))


def session_of(unit: str) -> str:
    """The session of a run by what its start has written for its units."""
    place = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "agent-intercom/run", unit, "run.json")
    try:
        session = Path(json.loads(place.read_text())["directory"]).parent.name
    except (OSError, ValueError, KeyError, TypeError):
        session = ""
    return session if re.fullmatch(r"[A-Za-z0-9_.-]+", session) else f"orchestrate@{unit}"


def after_remove() -> None:
    """Remove the sockets that the units left, and say what else stays."""

    def base(name: str, default: str) -> Path:
        value = os.environ.get(name, "")
        return Path(value) if os.path.isabs(value) else Path.home() / default

    state, config = base("XDG_STATE_HOME", ".local/state"), base("XDG_CONFIG_HOME", ".config")
    runtime = base("XDG_RUNTIME_DIR", "/nowhere") / "agent-intercom"
    compat = Path(os.environ.get("PI_CODING_AGENT_DIR", "").strip() or Path.home() / ".pi/agent", "intercom")
    made = [compat / "broker.sock", compat / "remote-gateway.sock"]
    made += [runtime / name for name in ("intercom.sock", "gateway.sock", "workers.sock")]
    for path in filter(dead, made):
        path.unlink()
        say(f"removed a socket at which nobody listens any more: {path}")
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    runs = state / "agent-intercom/runs"
    for path, why in (
        (
            state / "agent-intercom",
            f"the databases with the ids and times of open asks and of workers{', and runs' * runs.is_dir()}",
        ),
        (config / "agent-intercom", "your settings"),
        (runtime, "until the last logout: seats and their messages"),
    ):
        if path.is_dir():
            say(f"kept, {why}: {path} (to remove it: rm -r {shlex.quote(str(path))})")
    for link in filter(dangles, pi_links()):
        say(f"leads nowhere now: {link} ({undo(link)})")
    for path in sorted(config.glob("systemd/user/intercom*.d/agent-dir.conf")):
        say(f"kept, made by `intercom setup`: {path} (to remove it: rm {shlex.quote(str(path))})")


def pi_links() -> list[Path]:
    """Where a Pi package has the script that ours may be linked in the place of (docs/pi-extension.md)."""
    pi_home = Path(os.environ.get("PI_CODING_AGENT_DIR", "").strip() or Path.home() / ".pi/agent")
    return [pi_home / "npm/node_modules/pi-tmux-orchestrator/bin" / PI_SCRIPT]


def dangles(link: Path) -> bool:
    return link.is_symlink() and not link.exists()


def undo(link: Path) -> str:
    """How the Pi package comes to its own script again."""
    saved = sorted(link.parent.glob(f"{link.name}.~*~"))
    if saved:
        return f"to undo it: mv {shlex.quote(str(saved[0]))} {shlex.quote(str(link))}"
    return f"to undo it: rm {shlex.quote(str(link))}, and install the package anew"


def dead(path: Path) -> bool:
    """Whether `path` is a socket of the caller's at which nobody listens."""
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(str(path))
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
