# SPDX-License-Identifier: Apache-2.0
"""What a bridge leaves in the directory of its role for persons to read: reports that counted, and a silent end.

    report-ROUND-KIND.json   a report, as the broker took it
    program                  the file name of the command
    silent.json              how the command ended last, while nobody has reported since

0600, in a directory of 0700 which goes with the run. Whoever the command is may write there: nothing here is believed,
only shown. Nothing that the bridge does depends on it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from os import path
from typing import Any, Final

import msgspec

from agent_intercom.host import privatefiles

_PROGRAM: Final = "program"
_MAX_NAME: Final = 255
_SILENT: Final = "silent.json"
_REPORT: Final = re.compile(r"report-[0-9]{1,9}-[a-z]{1,32}\.json", re.ASCII)
_MAX_SILENT: Final = 4_096


class Silent(msgspec.Struct, frozen=True):
    """A command that ended without a report on its assignment, and when (milliseconds since 1970).

    `code` is what it exited with, `signal` what ended it; both None: it could not be run.
    """

    kind: str
    round: int
    code: int | None
    signal: int | None
    at: int


def works(state: str, program: str) -> None:
    """Leave which program works, by its path; never its arguments, which may be private. Raises OSError."""
    privatefiles.replace(path.join(state, _PROGRAM), os.fsencode(path.basename(program)))


def program(state: str) -> str:
    """The file name of the program that works, or has worked; empty where nobody can tell."""
    with contextlib.suppress(OSError, ValueError):
        return os.fsdecode(privatefiles.read(path.join(state, _PROGRAM), _MAX_NAME, closed=True))
    return ""


def publish(state: str, round_: int, kind: str, report: Mapping[str, Any]) -> None:
    """Leave a report that counts. Raises OSError."""
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    privatefiles.replace(path.join(state, f"report-{round_}-{kind}.json"), content + b"\n")
    forget(state)


def fell_silent(state: str, silent: Silent) -> None:
    """Leave how a command ended that has not reported. Raises OSError."""
    privatefiles.replace(path.join(state, _SILENT), msgspec.json.encode(silent))


def forget(state: str) -> None:
    """The command runs again, or somebody has reported."""
    with contextlib.suppress(OSError):
        os.unlink(path.join(state, _SILENT))


def silent(state: str) -> Silent | None:
    """How the command of a role ended that has not reported; None where it runs, has reported, or nobody can tell."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        content = privatefiles.read(path.join(state, _SILENT), _MAX_SILENT, closed=True)
        return msgspec.json.decode(content, type=Silent)
    return None


def newest_report(state: str) -> str | None:
    """The file with the report of a role that was left last; None where there is none yet."""
    found = []
    with contextlib.suppress(OSError), os.scandir(state) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _REPORT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return max(found)[1] if found else None
