# SPDX-License-Identifier: Apache-2.0
"""What a command says that a bridge runs: its report, and how it goes (docs/workers.md).

    orchestrate report   [--file FILE | --summary TEXT [--verdict VERDICT]] [--usage-file FILE]
    orchestrate progress --phase PHASE [--usage-file FILE]

FILE may be `-`, standard input, once, which is what a report is read from where nothing is said. Options of `report`:
`file`, `summary`, `verdict`, `usage_file`; of `progress`: `phase` and `usage_file`. Its environment names the bridge.
Whatever is printed as accepted was accepted by the broker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from os import path
from typing import Any, Final

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import INTERNAL_ERROR, REPORTING_EXITS, Answer, CommandFailure, usage

SOCKET: Final = "AGENT_INTERCOM_BRIDGE_SOCKET"
ASSIGNMENT: Final = "AGENT_INTERCOM_ASSIGNMENT_ID"
KIND: Final = "AGENT_INTERCOM_ASSIGNMENT_KIND"
MAX_FILE: Final = 131_072
"""Bytes of a file that is read: several times what a report may have."""

_TIMEOUT: Final = 35.0
"""Seconds; the bridge answers before that, whatever the broker does."""

_MAX_ADDRESS: Final = 100
_PIECE: Final = 65_536
_STDIN: Final = "-"
_WAYS_OUT: Final = {
    "invalid_protocol": "Correct it and say it again; the assignment file ends with every field.",
    "forbidden": "Correct it and say it again; the assignment file ends with what may be said.",
    "conflict": "End: nobody waits for this any more.",
    "unauthorized": "End: the role has another worker by now.",
    "not_accepted_yet": "Nothing has to be done; to say the same again waits for the answer again.",
    "broker_not_ready": "Try again later.",
}

_FOREIGN: Final = "Say it from the program that the bridge runs, or from what that has started in the same unit."


def report(options: argparse.Namespace) -> Answer:
    """`report`: say the result of the assignment, and what the broker answers."""
    file, summary = options.file or _STDIN, options.summary
    if summary is not None and file != _STDIN:
        raise usage("--file and --summary are two reports")
    if options.verdict is not None and summary is None:
        raise usage("--verdict goes with --summary; in a file it is a field")
    if summary is None and (file, options.usage_file) == (_STDIN, _STDIN):
        raise usage("only one of the files can be standard input")
    body = _object(file, "--file") if summary is None else {"summary": summary}
    if options.verdict is not None:
        body["verdict"] = options.verdict
    if kind := os.environ.get(KIND):
        body.setdefault("kind", kind)
    answer = _asked({"request": "report", "report": body, "usage": _usage(options.usage_file)})
    status = str(answer.get("status", ""))
    told = "the broker had a report on this assignment before, which counts" if status == "duplicate" else ""
    return Answer(
        {"status": status, "assignment_id": answer.get("assignment_id")},
        [output.printable(f"{status}: {told}" if told else status)],
    )


def progress(options: argparse.Namespace) -> Answer:
    """`progress`: say how it goes, and what the assignment has used."""
    answer = _asked({"request": "progress", "phase": options.phase, "usage": _usage(options.usage_file)})
    status, why = str(answer.get("status", "")), str(answer.get("text", ""))
    crossed = [each for each in answer.get("crossed", ()) if isinstance(each, dict)]
    lines = [output.printable(f"{status}: {why}" if why else status), *map(_threshold, crossed)]
    return Answer({"status": status, "crossed": crossed}, lines)


def _threshold(crossed: Mapping[str, Any]) -> str:
    level, metric, observed, threshold = (crossed.get(key) for key in ("level", "metric", "observed", "threshold"))
    return output.printable(f"{level}: {metric} is {observed}, and the threshold {threshold}")


def _usage(name: str | None) -> object:
    return None if name is None else _object(name, "--usage-file")


def _object(name: str, option: str) -> dict[str, Any]:
    """The JSON object in a file, or on standard input."""
    import json

    try:
        if name == _STDIN:
            content = sys.stdin.buffer.read(MAX_FILE + 1)
        else:
            with open(name, "rb") as file:
                content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise usage(f"{option}: cannot be read: {os.strerror(error.errno or 0)} ({output.printable(name)})") from error
    if len(content) > MAX_FILE:
        raise usage(f"{option}: longer than {MAX_FILE} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise usage(f"{option}: not JSON", "A report in words only: --summary.") from error
    if not isinstance(found, dict):
        raise usage(f"{option}: not a JSON object")
    return found


def _asked(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the bridge; its answer, where that is no refusal."""
    address = os.environ.get(SOCKET, "")
    if not path.isabs(address):
        text = f"this is not run by a bridge: {SOCKET} is not set"
        raise usage(text, "Only the command of a worker of a run has something to report.")
    answer = _exchange(address, {**request, "assignment_id": os.environ.get(ASSIGNMENT) or None})
    if answer.get("ok") is True:
        return answer
    code, text, field = (str(answer.get(key) or "") for key in ("code", "text", "field"))
    by = "the broker refused it" if answer.get("by") == "broker" else "it was not told to the broker"
    if code == "not_accepted_yet":
        by = "not accepted yet"
    told = f"{by}: {text}" + (f" ({field})" if field and field not in text else "")
    way_out = _FOREIGN if code == "unauthorized" and answer.get("by") == "bridge" else _WAYS_OUT.get(code, "")
    raise _failure(code if code in REPORTING_EXITS else INTERNAL_ERROR, told, way_out)


def _failure(code: str, text: str, hint: str = "") -> CommandFailure:
    return CommandFailure(code, text, hint, REPORTING_EXITS[code])


def _exchange(address: str, request: dict[str, Any]) -> dict[str, Any]:
    from agent_intercom.wire import codec
    from agent_intercom.wire.errors import WireError
    from agent_intercom.wire.peer import peer_credentials

    asked = False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as line, _short(address) as name:
            line.settimeout(_TIMEOUT)
            line.connect(name)
            if peer_credentials(line).uid != os.geteuid():
                raise _failure("unauthorized", "another user listens at its address", "End: it is not the bridge.")
            asked = True
            line.sendall(codec.encode(request) + b"\n")
            content = b""
            while not content.endswith(b"\n"):
                piece = line.recv(_PIECE)
                if not piece:
                    raise ConnectionResetError
                content += piece
        answer = codec.decode(content)
    except (OSError, WireError) as error:
        text = "the bridge did not answer; it is not known whether it has it" if asked else "the bridge is not there"
        code = "broker_uncertain" if asked else "broker_not_ready"
        raise _failure(code, text, "Try again.") from error
    if not isinstance(answer, dict):
        raise _failure(INTERNAL_ERROR, "the bridge answers something else")
    return answer


@contextlib.contextmanager
def _short(address: str) -> Iterator[str]:
    """`address` as a path that an address of a socket has room for (unix(7))."""
    if len(os.fsencode(address)) <= _MAX_ADDRESS:
        yield address
        return
    descriptor = os.open(path.dirname(address), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.basename(address)}"
    finally:
        os.close(descriptor)
