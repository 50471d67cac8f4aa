# SPDX-License-Identifier: Apache-2.0
"""What the shell may offer after `orchestrate` beside what its parser says: sessions, workers, words like ROLE=NAME."""

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

_OF_THE_LIVING: Final = {"send", "abort", "restart", "continue", "redeliver", "stop", "attach", "wait"}
"""Commands for which a run must be going on; the others look at runs that have ended, too."""

_AFTER_ROLE: Final = {"--harness": ("pi", "external"), "--worker-context": ("prune", "retain")}
_OF_OTHERS: Final = {"status", "logs", "wait", "adopt"}
"""Commands for which a worker may be somebody else's."""

_OF_THE_ENDED: Final = {"forget", "prune"}
_OF_ALL: Final = {"status", "logs", "wait", "restart", "rename"}
"""Commands for workers that have ended, and for those and the living; the others are for the living."""

_PATIENCE: Final = 1.0
"""Seconds that a key may take."""

_VALUES: Final = {"--profile": ("thorough", "balanced", "economy"), "--role": ROLES}


def print_words(program: str, words: Sequence[str]) -> int:
    """Print what may stand in place of the last of `words`; the exit status."""
    return completion.print_words(parser.build(program, __version__), words, _words, anywhere=("--json",))


def _words(command: Sequence[str], action: argparse.Action) -> Iterable[str]:
    if command[:1] == ("worker",):
        return _workers(command[-1]) if action.dest == "worker" else ()
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


def _workers(command: str) -> set[str]:
    """Names of workers. Their service is asked where somebody listens for it, and nothing is asked to listen."""
    from agent_intercom.cli.orchestrate.worker import calling
    from agent_intercom.orchestration import runtime
    from agent_intercom.workers import client
    from agent_intercom.workers.contract import TERMINAL
    from agent_intercom.workers.errors import WorkerError

    with contextlib.suppress(Refusal, WorkerError):
        address = client.socket_path(runtime.runtime_dir(os.environ))
        if address not in runtime.listening():
            return set()
        caller = calling.caller_of(None, os.environ)
        with calling.connected(caller, os.environ) as service:
            wanted = {"all": command in _OF_OTHERS, "history": command in _OF_THE_ENDED | _OF_ALL}
            found = service.request("list", wanted, _PATIENCE)["workers"]
        ended = {worker["name"] for worker in found if worker["state"] in TERMINAL}
        names = {worker["name"] for worker in found}
        kept = names if command in _OF_ALL else ended if command in _OF_THE_ENDED else names - ended
        return {name for name in kept if not name.startswith("-")}
    return set()
