# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and the error that ends a command. Standard library only: `--help` imports this."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
TIMED_OUT: Final = 4
INCOMPATIBLE: Final = 5
DEGRADED: Final = 6
SIGNALLED: Final = 128
"""And the number of the signal: what a shell says of a process that a signal ended."""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

MEANINGS: Final = {
    OK: "done",
    REFUSED: "refused, or not delivered",
    USAGE: "wrong usage or configuration; nothing was sent",
    UNREACHABLE: "no broker could be reached",
    TIMED_OUT: "no answer in time",
    INCOMPATIBLE: "what listens is another protocol, another version or another user's",
    DEGRADED: "working, but degraded; or a check failed (status, doctor)",
}

JsonObject: TypeAlias = dict[str, Any]

_BY_CODE: Final = {
    "SCOPE_INVALID": USAGE,
    "INVALID_SESSION": USAGE,
    "FRAME_TOO_LARGE": USAGE,
    "USAGE": USAGE,
    "PATH_TOO_LONG": USAGE,
    "CONFIG_INVALID": USAGE,
    "BROKER_UNREACHABLE": UNREACHABLE,
    "CONNECTION_LOST": UNREACHABLE,
    "CLOSED": UNREACHABLE,
    "TIMEOUT": TIMED_OUT,
    "INCOMPATIBLE": INCOMPATIBLE,
    "PROTOCOL_MISMATCH": INCOMPATIBLE,
    "PROTOCOL_VIOLATION": INCOMPATIBLE,
    "PEER_FOREIGN": INCOMPATIBLE,
    "PEER_UNREADABLE": INCOMPATIBLE,
    "DEGRADED": DEGRADED,
}

_WAYS_OUT: Final = {
    "SCOPE_INVALID": "Correct or unset AGENT_INTERCOM_SCOPE_ID.",
    "PATH_TOO_LONG": "Shorten PI_CODING_AGENT_DIR, or without it HOME and XDG_RUNTIME_DIR.",
    "BROKER_UNREACHABLE": "Run `systemctl --user start intercom.socket intercom-gateway.socket` (no such units: "
    "`make install-user`), or `intercom broker`; `intercom doctor` tells more.",
    "CONNECTION_LOST": "Try again; `intercom doctor` tells more.",
    "INCOMPATIBLE": "`intercom doctor` tells what listens there and how to take over.",
    "PROTOCOL_MISMATCH": "`intercom doctor` tells what listens there and how to take over.",
    "PEER_FOREIGN": "Nothing was sent. `intercom doctor` tells who listens there.",
    "PEER_UNREADABLE": "Nothing was sent. `intercom doctor` tells who listens there.",
    "CONFIG_INVALID": "`intercom config show` tells every setting and its range.",
    "ASK_ALREADY_PENDING": "Wait for that answer, or use `intercom send`, which asks for none.",
    "SESSION_NOT_FOUND": "`intercom list` shows who is there.",
    "SESSION_ID_IN_USE": "Unset AGENT_INTERCOM_SESSION_ID, or end the other session.",
    "AMBIGUOUS_TARGET": "`intercom list` shows the ids.",
    "INVALID_REPLY_TARGET": "It was answered, cancelled or has expired; `intercom send` still works.",
}


_SET_UP: Final = (
    "PI_CODING_AGENT_DIR is set, and the units listen elsewhere before `intercom setup` was run: run it, or "
    "`intercom broker`; `intercom doctor` tells more."
)


class CommandError(Exception):
    """Ends a command. `code` is machine-readable, the text one line for a person, `details` further JSON members."""

    def __init__(
        self, code: str, text: str, *, exit_code: int | None = None, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(text)
        self.code = code
        self.hint = hint
        self.exit_code = exit_for(code) if exit_code is None else exit_code
        self.details = details

    def result(self) -> JsonObject:
        """What `--json` prints."""
        return failure(self.code, str(self), self.hint, **self.details)


def epilog(codes: Iterable[int] = tuple(MEANINGS)) -> str:
    """What `--help` says of exit codes."""
    return "exit codes:\n" + "".join(f"  {code}  {MEANINGS[code]}\n" for code in codes)


def exit_for(code: str) -> int:
    """The exit code for an error code; a refusal where the code says nothing else."""
    return _BY_CODE.get(code, REFUSED)


def way_out(code: str) -> str:
    """What to do about an error code, or an empty string."""
    if code == "BROKER_UNREACHABLE" and os.environ.get("PI_CODING_AGENT_DIR", "").strip():
        from agent_intercom.cli.setup import is_set_up

        return _WAYS_OUT[code] if is_set_up() else _SET_UP
    return _WAYS_OUT.get(code, "")


def failure(code: str, text: str, hint: str | None = None, /, **details: Any) -> JsonObject:
    """The JSON shape of every failure. `hint` is the way out; without one it is that of the code."""
    error = {"code": code, "text": text}
    if found := way_out(code) if hint is None else hint:
        error["hint"] = found
    return {"ok": False, "error": error, **details}
