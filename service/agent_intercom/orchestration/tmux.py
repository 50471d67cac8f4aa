# SPDX-License-Identifier: Apache-2.0
"""Which runs of the original program live in tmux (orchestration spec, section 11.2). Asked, and never told anything.

Everything is empty or False where there is no tmux, no server of it runs, or none answers in time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from os import path
from typing import Final

TIMEOUT_S: Final = 2
_WINDOW: Final = "agents"
_OPTION: Final = "@pi_agents_coord"
_FORMAT: Final = f"#{{session_name}}:#{{window_name}}:#{{{_OPTION}}}"
"""A session's name has no colon in it; a tab would not be printed."""


def hosted(environ: Mapping[str, str]) -> dict[str, str]:
    """From the directory of every run that a server of tmux hosts to the session that it is in."""
    found = {}
    for line in _asked(["list-windows", "-a", "-F", _FORMAT], environ).split("\n"):
        session, _, rest = line.partition(":")
        window, _, directory = rest.partition(":")
        if window == _WINDOW and path.isabs(directory):
            found[directory] = session
    return found


def hosts(session: str, directory: str, environ: Mapping[str, str]) -> bool:
    """Whether the session of that name, and no other, hosts the run at `directory`."""
    shown = _asked(["show-options", "-w", "-q", "-v", "-t", f"={session}:={_WINDOW}", _OPTION], environ)
    return shown.removesuffix("\n") == directory


def _asked(arguments: list[str], environ: Mapping[str, str]) -> str:
    """What tmux prints; it starts no server for these questions, and is not started where there is none."""
    if not _is_socket(address(environ)):
        return ""
    import shutil  # where there is no tmux, nobody waits for these
    import subprocess

    program = shutil.which("tmux", path=environ.get("PATH", ""))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            # UTF-8 whatever the locale is: paths would be changed otherwise.
            [program, "-u", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""


def address(environ: Mapping[str, str]) -> str:
    """Where the server listens that tmux would ask: that of the terminal, or the default one (tmux(1), TMUX_TMPDIR)."""
    if inside := environ.get("TMUX"):
        return inside.partition(",")[0]
    top = environ.get("TMUX_TMPDIR") or "/tmp"
    # tmux passes over a directory that is not there.
    return path.join(top if path.isdir(top) else "/tmp", f"tmux-{os.geteuid()}", "default")


def _is_socket(address: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(address).st_mode)
    except (OSError, ValueError):
        return False
