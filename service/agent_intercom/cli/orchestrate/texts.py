# SPDX-License-Identifier: Apache-2.0
"""Texts that a person hands over, on the command line or in a file (orchestration spec, section 11.2)."""

from __future__ import annotations

import os
import sys
from typing import Final

from agent_intercom.cli.orchestrate.answer import CommandFailure, usage
from agent_intercom.orchestration.contract import MAX_TEXT

STDIN: Final = "-"


def given(label: str, flag: str, text: str | None, file: str | None, limit: int = MAX_TEXT) -> str | None:
    """The text, stripped and with one newline at its end; None where neither `text` nor `file` is given.

    `flag` is what the person typed, without the dashes; the limit is of UTF-8 bytes, as the text was given and as it
    is handed on. Raises CommandFailure `invalid_arguments` for both, a blank one, one over the limit, one that is not
    UTF-8, and a file that cannot be read.
    """
    if text is not None and file is not None:
        raise usage(f"--{flag} and --{flag}-file say the same thing", "Give one of them.")
    if text is None and file is None:
        return None
    content = _encoded(text, flag) if file is None else _read(file, flag, limit)
    too_long = f"{label} exceeds the {limit // 1024} KiB safety limit"
    if len(content) > limit:
        raise usage(too_long, f"Shorten --{flag}, or put the details into a file of the project and name it.")
    try:
        stripped = content.decode().strip()
    except UnicodeDecodeError as error:
        raise usage(f"--{flag}-file is not UTF-8") from error
    if not stripped:
        raise usage(f"{label} cannot be empty", f"Say it with --{flag} or --{flag}-file.")
    if len(stripped.encode()) + 1 > limit:
        raise usage(too_long, f"Shorten --{flag}.")
    return stripped + "\n"


def _encoded(text: str | None, flag: str) -> bytes:
    try:
        return (text or "").encode()
    except UnicodeEncodeError as error:
        # What the shell handed over was not UTF-8.
        raise usage(f"--{flag} is not valid UTF-8") from error


def _read(file: str, flag: str, limit: int) -> bytes:
    """At most one byte more than the limit, which is enough to know."""
    if file == STDIN:
        if sys.stdin is None:
            raise usage(f"--{flag}-file is -, and standard input is closed")
        return sys.stdin.buffer.read(limit + 1)
    try:
        with open(file, "rb") as source:
            return source.read(limit + 1)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "unknown error"
        raise usage(f"--{flag}-file cannot be read: {why}") from error


def pairs(flag: str, values: list[str], keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """Repeatable `KEY=VALUE`s. Raises CommandFailure `invalid_arguments` for an unknown key or a missing value."""
    found = []
    for value in values:
        key, separator, rest = value.partition("=")
        if not separator or not rest:
            raise usage(f"--{flag} takes ROLE=VALUE", f"ROLE is one of {', '.join(keys)}.")
        if key not in keys:
            raise usage(f"--{flag}: there is no role {key}", f"ROLE is one of {', '.join(keys)}.")
        found.append((key, rest))
    return found


def refuse_unless(yes: bool, what: str) -> None:
    """Raises CommandFailure `invalid_arguments` where a person has not said that they mean it."""
    if not yes:
        raise CommandFailure("invalid_arguments", what, "Say --yes to do it; nothing was done.")
