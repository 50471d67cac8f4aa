# SPDX-License-Identifier: Apache-2.0
"""The run that a command looks at, and the way out where there is none, or it cannot be read."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Final

from agent_intercom.cli.orchestrate.answer import ERROR, EXITS, INVALID_ARGUMENTS, CommandFailure, see_help, way_out
from agent_intercom.orchestration import runs
from agent_intercom.orchestration.contract import Code
from agent_intercom.orchestration.errors import Refusal

_BY_FIELD: Final = {
    "session": "`{program} list --all` shows what there is.",
    "run": "`{program} supervisor runs {session}` shows those of the session.",
    "command_id": "`{program} events {session}` tells what was commanded.",
    "root": "`{program} doctor` tells more.",
    "directory": "`{program} doctor` tells more.",
}
_DATABASE: Final = (
    "Its files stay in {directory}, where its workers' sessions can be read; `{program} list --all` shows other runs."
)
_UNREADABLE: Final = "Other runs can be read all the same; `{program} list --all` shows them."


def resolved(options: argparse.Namespace, *, live_only: bool = False) -> runs.Entry:
    """The run that is meant (section 11.2). Raises CommandFailure."""
    with ways_out(options):
        return runs.resolve(options.session, _here(), os.environ, live_only, getattr(options, "run", None))


@contextlib.contextmanager
def ways_out(options: argparse.Namespace, entry: runs.Entry | None = None) -> Iterator[None]:
    """Make a Refusal of what is inside a CommandFailure with the way out: what shows the ids that there are.

    With an `entry`, its database is what is read inside: a fault of that names the run.
    """
    try:
        yield
    except Refusal as refusal:
        code = refusal.code if refusal.code in EXITS else ERROR
        if entry is not None and not refusal.field and code in {ERROR, Code.BROKER_NOT_READY}:
            hint = way_out(code, options.program) or _DATABASE.format(
                directory=entry.directory, program=options.program
            )
            text = f"the state of {entry.session}, {entry.run_id} cannot be read: {refusal.text}"
            raise CommandFailure(code, text, hint) from refusal
        raise CommandFailure(code, refusal.text, _way_out(code, refusal, options)) from refusal


def _way_out(code: str, refusal: Refusal, options: argparse.Namespace) -> str:
    if refusal.code == "path_invalid":
        return "Correct it, or unset it."
    if code == INVALID_ARGUMENTS:
        return see_help(options.program, options)
    if found := way_out(code, options.program):
        return found
    session = getattr(options, "session", None)
    hint = _BY_FIELD.get(refusal.field, _UNREADABLE)
    if refusal.field in {"run", "command_id"} and session is None:
        hint = _BY_FIELD["session"]
    return hint.format(program=options.program, session=session)


def _here() -> str:
    """The current directory; where it is gone, the root, which is no project of any run."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
