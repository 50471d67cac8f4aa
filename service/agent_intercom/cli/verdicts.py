# SPDX-License-Identifier: Apache-2.0
"""What a check of `intercom doctor` or `orchestrate doctor` comes to, and how both commands tell it.

Standard library only at first: a doctor comes up whatever is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agent_intercom.cli.output import printable

State: TypeAlias = Literal["ok", "warn", "fail", "unknown"]

LOG_IN: Final = "run this in a login session, or have the user manager run without one: `loginctl enable-linger`"


class Check(NamedTuple):
    """One finding. `way_out` is empty where there is nothing to do; `details` are further JSON members.

    `needed`: nothing can be done without it, so that it is a failure too when nobody can tell whether it is there.
    """

    name: str
    state: State
    text: str
    way_out: str = ""
    details: dict[str, Any] = {}
    needed: bool = False

    @property
    def failed(self) -> bool:
        """Whether the command ends with an error because of it."""
        return self.state == "fail" or (self.needed and self.state == "unknown")

    def result(self) -> dict[str, Any]:
        """What `--json` prints."""
        hint = {"wayOut": self.way_out} if self.way_out else {}
        return {"check": self.name, "state": self.state, "text": self.text, **hint, **self.details}


def no_manager(name: str, problem: str, *, needed: bool = False) -> Check:
    """The check of something that only the user's service manager knows, where none answers."""
    return Check(name, "unknown", f"no user service manager answers: {problem}", LOG_IN, needed=needed)


def lingering(lingers: bool | None, what: str) -> Check:
    """Whether `what` outlives the login; None: that cannot be told."""
    match lingers:
        case True:
            return Check("lingering", "ok", "the user manager goes on after logout")
        case False:
            hint = "`loginctl enable-linger`, if they are to go on while nobody is logged in"
            return Check("lingering", "warn", f"{what} end with the last logout", hint)
        case None:
            return Check("lingering", "unknown", "cannot be told on this system")


def in_memory(kind: str | None, consequence: str) -> Check:
    """Whether XDG_RUNTIME_DIR, on a file system of this kind, is in memory; what follows if it is not.

    None: the kind cannot be told.
    """
    from agent_intercom.cli.place import MEMORY_FILE_SYSTEMS  # more than the standard library

    name = "runtime-directory"
    if kind is None:
        return Check(name, "unknown", "the file system of XDG_RUNTIME_DIR cannot be told")
    if kind in MEMORY_FILE_SYSTEMS:
        return Check(name, "ok", "XDG_RUNTIME_DIR is in memory")
    hint = "set XDG_RUNTIME_DIR to a directory in memory, such as /run/user/UID"
    return Check(name, "warn", f"XDG_RUNTIME_DIR is on {kind}: {consequence}", hint)


def failed_names(found: Sequence[Check]) -> str:
    """The names of the checks that failed, each once; empty where all is well."""
    return ", ".join(dict.fromkeys(check.name for check in found if check.failed))


def lines(found: Sequence[Check]) -> Iterator[str]:
    """The checks for a person, the way out below each."""
    width = max(len(check.name) for check in found)
    for check in found:
        yield f"{check.state:<8}{check.name:<{width}}  {printable(check.text)}"
        if check.way_out:
            yield f"{'':<8}{'':<{width}}  -> {printable(check.way_out)}"
