# SPDX-License-Identifier: Apache-2.0
"""What the shell may offer after `orchestrate` beside what its parser says: sessions, and words like ROLE=NAME."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Final

from agent_intercom import __version__
from agent_intercom.cli import completion
from agent_intercom.cli.orchestrate import parser
from agent_intercom.orchestration.contract import ROLES
from agent_intercom.orchestration.errors import Refusal

_OF_THE_LIVING: Final = {"send", "abort", "restart", "continue", "redeliver", "stop", "attach"}
"""Commands for which a run must be going on; the others look at runs that have ended, too."""

_AFTER_ROLE: Final = {"--harness": ("pi", "external"), "--worker-context": ("prune", "retain")}
_VALUES: Final = {"--profile": ("thorough", "balanced", "economy"), "--role": ROLES}


def print_words(program: str, words: Sequence[str]) -> int:
    """Print what may stand in place of the last of `words`; the exit status."""
    return completion.print_words(parser.build(program, __version__), words, _words, anywhere=("--json",))


def _words(command: Sequence[str], action: argparse.Action) -> Iterable[str]:
    if action.dest == "session" and command[0] != "start":
        return _sessions(living=command[0] in _OF_THE_LIVING)
    for option in action.option_strings:
        if option in _AFTER_ROLE:
            return [f"{role}={name}" for role in ROLES for name in _AFTER_ROLE[option]]
        if option in _VALUES:
            return _VALUES[option]
    metavar = action.metavar
    if isinstance(metavar, str) and metavar.startswith("ROLE="):
        return [f"{role}=" for role in ROLES]
    return ()


def _sessions(living: bool) -> set[str]:
    """Names of sessions, by the names of directories alone: nothing in a run is read for this.

    What is no name of a session is not offered: a shell would take it for its own words, or a command for a flag.
    """
    from agent_intercom.orchestration import places, rootscan, runtime

    found: set[str] = set()
    with contextlib.suppress(Refusal):
        lives = runtime.live(runtime.runtime_dir(os.environ))
        found.update(os.path.basename(os.path.dirname(run.directory)) for run in lives)
    if not living:
        with contextlib.suppress(Refusal):
            for root in places.roots(os.environ):
                with contextlib.suppress(OSError), os.scandir(root) as scan:
                    found.update(item.name for item in scan if item.is_dir(follow_symlinks=False))
    return {name for name in found if rootscan.is_name(name) and not name.startswith((".", "-"))}
