# SPDX-License-Identifier: Apache-2.0
"""What a command of `orchestrate` ends with, and the closed lists of codes (orchestration spec, section 11.1).

Standard library only: `--help` imports this.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

OK: Final = 0
RUNTIME: Final = 1
REFUSED: Final = 2

MEANINGS: Final = {
    OK: "done",
    RUNTIME: "the machine or this program failed, or something that is needed is missing (doctor)",
    REFUSED: "refused, or wrong usage; nothing was changed unless the text says so",
}

WAITING: Final = {
    OK: "it is what it was waited for",
    RUNTIME: "it is not: the time is over, or the run; or the machine or this program failed",
    REFUSED: MEANINGS[REFUSED],
}
"""The same of `wait`."""

JsonObject: TypeAlias = dict[str, Any]

ERROR: Final = "orchestration_error"
INVALID_ARGUMENTS: Final = "invalid_arguments"
LOCAL_RUNTIME_ERROR: Final = "local_runtime_error"
INTERNAL_ERROR: Final = "internal_error"
MISSING_PREREQUISITE: Final = "missing_prerequisite"
TIMED_OUT: Final = "timed_out"
RUN_OVER: Final = "run_over"
MAX_MESSAGE: Final = 512

EXITS: Final = {
    **dict.fromkeys(
        (
            ERROR,
            INVALID_ARGUMENTS,
            "interactive_only",
            "interactive_help_only",
            "broker_not_ready",
            "broker_uncertain",
            "broker_rejected",
            "broker_not_live",
            "broker_command_not_found",
            "worker_context_too_large",
            "workspace_capsule_invalid",
            "workspace_capsule_stale",
            "startup_failed",
            "stop_failed",
            "orchestration_state_not_found",
            "session_collision",
            "foreign_host",
            "manager_unreachable",
        ),
        REFUSED,
    ),
    **dict.fromkeys((MISSING_PREREQUISITE, LOCAL_RUNTIME_ERROR, INTERNAL_ERROR, TIMED_OUT, RUN_OVER), RUNTIME),
}
"""Every code of an error, and the exit status that it ends with.

`timed_out` and `run_over` (of `wait`: the time is over; the run is, and was not what it was waited for) are ours too.
`foreign_host` (the run lives in tmux), `manager_unreachable` (no user service manager answers) and `stop_failed` (a
run that was told to end has processes left) are ours; the others are the contract's.
"""

REPORTING_EXITS: Final = {
    INVALID_ARGUMENTS: REFUSED,
    INTERNAL_ERROR: RUNTIME,
    "invalid_protocol": REFUSED,
    "forbidden": 6,
    "conflict": 5,
    "not_accepted_yet": 3,
    "unauthorized": 3,
    "broker_not_ready": 3,
    "broker_uncertain": 3,
}
"""The same for `report` and `progress`: codes of the protocol, and statuses as commands about workers have them."""

_WAYS_OUT: Final = {
    "orchestration_state_not_found": "`{0} list --all` shows what there is.",
    "broker_not_live": "`{0} list` shows those that live; `{0} status` reads what has ended.",
    "foreign_host": "Use that program for it; `{0} status` reads it.",
    "config_invalid": "`{0} config check` tells every fault.",
    "broker_not_ready": "Try again; `{0} doctor` tells more.",
}


def way_out(code: str, program: str) -> str:
    """What to do about an error of this code where nobody closer to it says more, or an empty string."""
    return _WAYS_OUT.get(code, "").format(program)


class Answer(NamedTuple):
    """What a command found or did: `data` for `--json`, `lines` for a person.

    An answer with an `error`, a code and a text, is a failure that has data nevertheless. It ends with `status`, or
    where that is None with what the code ends with.
    """

    data: JsonObject
    lines: Iterable[str] = ()
    error: tuple[str, str] | None = None
    status: int | None = None


class CommandFailure(Exception):
    """Ends a command. `code` is one of `EXITS`, or of the list that its command has of its own.

    The text is one line with the fault, `hint` the way out.

    `status` is what it ends with; None: what the code does.
    """

    def __init__(self, code: str, text: str, hint: str = "", status: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.hint = hint
        self.status = exit_of(code) if status is None else status

    @property
    def message(self) -> str:
        """The fault and the way out on one line, bounded."""
        return bounded(f"{self.text.rstrip('.')}. {self.hint}" if self.hint else self.text)


def bounded(text: str) -> str:
    """`text` as the message of an error: one line of at most 512 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def usage(text: str, hint: str = "") -> CommandFailure:
    """A command line that cannot be carried out."""
    return CommandFailure(INVALID_ARGUMENTS, text, hint)


def see_help(program: str, options: argparse.Namespace) -> str:
    """The way out of a wrong command line: the help of the command that was typed."""
    words = (program, options.name, getattr(options, "operation", None))
    return f"See `{' '.join(filter(None, words))} --help`."


def exit_of(code: str) -> int:
    """The exit status of an error code."""
    return EXITS.get(code, REFUSED)
