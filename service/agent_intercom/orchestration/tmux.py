# SPDX-License-Identifier: Apache-2.0
"""Which runs of the original program live in tmux (orchestration spec, section 11.2). Asked, and never told anything.

Everything is empty or False where there is no tmux, no server of it runs, or none answers in time.
"""

from __future__ import annotations

import os
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
    """What tmux prints; it starts no server for these questions."""
    if not _was_here(environ):
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


def _was_here(environ: Mapping[str, str]) -> bool:
    """Whether a server may run: its socket lies in a directory of its own (tmux(1), TMUX_TMPDIR)."""
    directory = path.join(environ.get("TMUX_TMPDIR") or "/tmp", f"tmux-{os.geteuid()}")
    return bool(environ.get("TMUX")) or path.isdir(directory)
