# SPDX-License-Identifier: Apache-2.0
"""`worker checkout`: inside a worker, a copy of the project to test in."""

from __future__ import annotations

import argparse
import os
from typing import Final

from agent_intercom.cli.orchestrate.answer import INVALID_ARGUMENTS, LOCAL_RUNTIME_ERROR, Answer, CommandFailure
from agent_intercom.cli.output import complain, printable
from agent_intercom.workers import checkout as copies
from agent_intercom.workers.checkout import Checkout
from agent_intercom.workers.contract import SCRATCH_ENVIRONMENT, Code
from agent_intercom.workers.errors import WorkerError

_HINTS: Final = {
    "directory": "Name a directory of the project, such as the one that you were started in.",
    "scratch": f"{SCRATCH_ENVIRONMENT} must be what the worker was started with.",
}


def checkout(options: argparse.Namespace) -> Answer:
    """Copy the worktree that `options.directory` (without: the current one) is in to the worker's scratch directory.

    Raises CommandFailure.
    """
    scratch = os.environ.get(SCRATCH_ENVIRONMENT, "")
    if not os.path.isabs(scratch):
        raise CommandFailure(
            INVALID_ARGUMENTS,
            f"{SCRATCH_ENVIRONMENT} names no scratch directory",
            "Only workers have one: this is a command for inside them.",
        )
    try:
        made = copies.make(options.directory or os.getcwd(), scratch)
    except FileNotFoundError as error:
        raise CommandFailure(INVALID_ARGUMENTS, "the current directory is gone", _HINTS["directory"]) from error
    except WorkerError as error:
        code = LOCAL_RUNTIME_ERROR if error.code == Code.START_FAILED else INVALID_ARGUMENTS
        raise CommandFailure(code, error.text, _hint(error)) from error
    if not options.json:
        complain(_told(made), program=options.program)
    # Alone, for `cd "$(orchestrate worker checkout)"`.
    return Answer(made._asdict(), [printable(made.directory)])


def _hint(error: WorkerError) -> str:
    if error.code == Code.CONFLICT:
        return "Wait for it to end."
    return _HINTS.get(error.field, "See how much room there is.")


def _told(made: Checkout) -> str:
    told = f"{_count(made.files, 'file')} copied, {_count(made.links, 'link')} to what the project ignores"
    return f"{told}; {_count(made.left_out, 'file')} left out: cannot be read" if made.left_out else told


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
