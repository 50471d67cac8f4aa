# SPDX-License-Identifier: Apache-2.0
"""What a command prints: text for a person on stdout, one line per fault on stderr, or one JSON object."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agent_intercom.cli.exits import JsonObject


class Untold(OSError):
    """A command was carried out, and standard output does not take its answer."""


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Have the answer of a command that was carried out written. Raises Untold, and BrokenPipeError."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Untold(*error.args) from error


def prepare() -> set[str]:
    """Let nothing that a peer wrote make printing fail. Returns the names of standard streams that were closed.

    Something else takes their place, or what is opened next would get their descriptors, and what is printed with them.
    """
    closed = {name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None}
    while closed and (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    if closed:
        os.close(descriptor)
    for name in closed - {"stdin"}:
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    return closed


def silence() -> None:
    """Throw away what is not written yet: Python would complain once more when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """`text` on one line, without a character that could move the cursor, hide text or end the line.

    Names, paths and messages come from other sessions: a terminal must not obey them.
    """
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else _escape(part) for part in text)


def block(text: str, indent: str) -> str:
    """`text` with its line breaks, further lines behind `indent`, so that none can pass for other output."""
    lines = text.replace("\r\n", "\n").expandtabs(4).split("\n")
    return ("\n" + indent).join(printable(line) for line in lines)


def json_line(value: Any) -> str:
    """`value` as one line of JSON; lone surrogates stay escapes."""
    import json

    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def emit(text: str) -> None:
    """Print a line and have it out at once, so that a reader of a pipe sees events as they happen."""
    print(text, flush=True)


def complain(text: str, hint: str = "", program: str = "intercom") -> None:
    """One line on stderr, with the way out."""
    whole = f"{text.rstrip('.')}. {hint}" if hint else text
    print(f"{program}: {printable(whole)}", file=sys.stderr)


def finish(as_json: bool, result: JsonObject, lines: Iterable[str]) -> None:
    """Print the result of a command that was carried out, as JSON or as `lines`. Raises as `telling`."""
    # Lines may be made as they are asked for; what goes wrong then is not the printing.
    said = [json_line(result)] if as_json else list(lines)
    with telling():
        for line in said:
            print(line)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _escape(character: str) -> str:
    point = ord(character)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
