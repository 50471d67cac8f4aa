# SPDX-License-Identifier: Apache-2.0
"""The `orchestrate` command, which is also `pi-tmux-agents` (orchestration spec, section 11.1)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from agent_intercom import __version__
from agent_intercom.cli import output
from agent_intercom.cli.ending import status_of
from agent_intercom.cli.orchestrate import parser
from agent_intercom.cli.orchestrate.answer import (
    ERROR,
    EXITS,
    INTERNAL_ERROR,
    LOCAL_RUNTIME_ERROR,
    MISSING_PREREQUISITE,
    OK,
    REFUSED,
    Answer,
    CommandFailure,
    bounded,
    exit_of,
    see_help,
    usage,
    way_out,
)
from agent_intercom.orchestration.errors import Refusal

PROGRAM: Final = "orchestrate"
CALLED_AS: Final = "AGENT_INTERCOM_CALLED_AS"
"""The other name that the program was called by; whoever stands in for that name sets it."""

_NAMES: Final = (PROGRAM, "pi-tmux-agents")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code (`answer.MEANINGS`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = program_name(os.environ)
    if "stdout" in output.prepare():
        output.complain("standard output is closed; nothing was done", program=program)
        return REFUSED
    return status_of(program, lambda: _run(program, arguments), exit_of(LOCAL_RUNTIME_ERROR))


def program_name(environ: Mapping[str, str]) -> str:
    """The name by which the program was called."""
    name = environ.get(CALLED_AS, PROGRAM)
    return name if name in _NAMES else PROGRAM


def _run(program: str, arguments: list[str]) -> int:
    if arguments[:1] == ["_complete"]:
        from agent_intercom.cli.orchestrate.completing import print_words

        return print_words(program, arguments[1:])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    as_json = "--json" in arguments[:end]
    words = [word for word in arguments[:end] if word != "--json"] + arguments[end:]
    try:
        answer = _answered(program, words, as_json)
    except CommandFailure as failure:
        answer = Answer({}, error=(failure.code, failure.message))
        if as_json:
            _print_envelope(words, None, answer.error)
        else:
            output.complain(failure.text, failure.hint, program)
        return failure.status
    if isinstance(answer, int):
        return answer
    # What failed was not carried out.
    with output.telling() if answer.error is None else contextlib.nullcontext():
        if as_json:
            _print_envelope(words, answer.data, answer.error)
        else:
            for line in answer.lines:
                print(line)
    if answer.error is None:
        return OK
    if not as_json:
        output.complain(answer.error[1], program=program)
    return exit_of(answer.error[0]) if answer.status is None else answer.status


def _answered(program: str, words: list[str], as_json: bool) -> Answer | int:
    """What the command answers; whatever goes wrong is a CommandFailure."""
    try:
        if as_json and words[:1] == ["--version"]:
            return Answer({"version": __version__})
        if words[:1] == ["help"]:
            words = [*words[1:2], "--help"]
        if as_json and _asks_for_help(words):
            raise CommandFailure("interactive_help_only", "help is for people", "Ask for it without --json.")
        options = _parsed(program, words)
        options.json, options.program = as_json, program
        return _carried_out(options)
    except Refusal as refusal:
        code = refusal.code if refusal.code in EXITS else ERROR
        raise CommandFailure(code, _told(refusal), way_out(refusal.code, program)) from refusal


def _parsed(program: str, words: list[str]) -> argparse.Namespace:
    options: argparse.Namespace
    options, rest = parser.build(program, __version__).parse_known_args(words)
    if rest:
        text = f"unrecognized: {' '.join(map(output.printable, rest))}"
        raise usage(text, see_help(program, options))
    return options


def _carried_out(options: argparse.Namespace) -> Answer | int:
    command: parser.Command = options.command
    try:
        answer = command(options)
        # Lines may be made as they are printed; what goes wrong then is not the printing.
        return answer if isinstance(answer, int) else answer._replace(lines=list(answer.lines))
    except (BrokenPipeError, Refusal, CommandFailure):
        raise
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "unknown error"
        raise CommandFailure(LOCAL_RUNTIME_ERROR, f"the operating system refused: {why}") from error
    except ModuleNotFoundError as error:
        from agent_intercom.cli.dependencies import missing_module

        text = missing_module(error)
        raise (CommandFailure(MISSING_PREREQUISITE, text) if text else _internal(error)) from error
    except Exception as error:  # the outermost place: whoever reads JSON is owed an envelope
        raise _internal(error) from error


def _internal(error: Exception) -> CommandFailure:
    """A fault of this program, told by its place: its text may be anybody's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else "unknown"
    text = f"a fault of this program ({type(error).__name__} at {place})"
    return CommandFailure(INTERNAL_ERROR, text, "Please report it.")


def _told(refusal: Refusal) -> str:
    """The text of a refusal, with what it is about where that is not said."""
    field = refusal.field
    return refusal.text if not field or field in refusal.text else f"{refusal.text} ({field})"


def _asks_for_help(words: list[str]) -> bool:
    end = words.index("--") if "--" in words else len(words)
    return not {"-h", "--help"}.isdisjoint(words[:end])


def _print_envelope(words: list[str], data: object, error: tuple[str, str] | None) -> None:
    import json

    name = words[0] if words else ""
    command = "version" if name == "--version" else name if name in parser.COMMANDS else "unknown"
    told = None if error is None else {"code": error[0], "message": bounded(error[1])}
    envelope = {"schema_version": "1", "command": command, "success": error is None, "data": data, "error": told}
    output.emit(json.dumps(envelope, sort_keys=True, separators=(",", ":"), allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
