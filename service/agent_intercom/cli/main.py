# SPDX-License-Identifier: Apache-2.0
"""The `intercom` command. Everything but the parser is imported by the command that needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from agent_intercom import __version__
from agent_intercom.cli.ending import status_of
from agent_intercom.cli.exits import REFUSED, USAGE, CommandError, epilog
from agent_intercom.cli.formatting import Formatter, HelpfulParser
from agent_intercom.intercom.client_errors import ClientError

Command: TypeAlias = Callable[[argparse.Namespace], int]

DESCRIPTION = "Find the agents on this machine, send them messages, ask them questions and answer theirs."


class Parser(HelpfulParser):
    """Complains in one line, and as JSON where that was asked for."""

    def error(self, message: str) -> NoReturn:
        raise CommandError("USAGE", f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code (see `exits.MEANINGS`)."""
    from agent_intercom.cli import output

    arguments = list(sys.argv[1:] if argv is None else argv)
    closed = output.prepare()
    if "stdout" in closed and arguments[:1] != ["broker"]:
        output.complain("standard output is closed; nothing was done")
        return USAGE
    return status_of("intercom", lambda: _run(arguments), REFUSED)


def _run(arguments: list[str]) -> int:
    from agent_intercom.cli import output

    if arguments[:1] == ["_complete"]:
        from agent_intercom.cli import completion

        return completion.print_words(build_parser(), arguments[1:], completion.nothing)
    try:
        options, rest = build_parser().parse_known_args(_ordered(arguments))
        if rest:
            raise CommandError("USAGE", f"unrecognized: {' '.join(rest)} (see `intercom {options.name} --help`)")
        command: Command = options.command
        return _translated(command, options)
    except CommandError as error:
        if error.code == "USAGE" and error.hint is None and _dashed(arguments) and "--timeout" not in str(error):
            error.hint = "Put -- before a text that begins with a dash."
        if "--json" in arguments[: arguments.index("--") if "--" in arguments else None]:
            output.emit(output.json_line(error.result()))
        else:
            output.complain(str(error), error.result()["error"].get("hint", ""))
        return error.exit_code


def _ordered(arguments: list[str]) -> list[str]:
    """Let `--json` be said in front of the command too, and `help` instead of `--help`."""
    if arguments[:1] == ["help"]:
        return [*arguments[1:2], "--help"]
    if arguments[:1] == ["--json"] and len(arguments) > 1:
        return [arguments[1], "--json", *arguments[2:]]
    return arguments


def _dashed(arguments: list[str]) -> bool:
    """Whether a text may have been taken for an option."""
    known = {"-", "--json", "--timeout", "-h", "--help"}
    begun = [word for word in arguments[1:] if word.startswith("-")]
    return arguments[:1] in (["send"], ["ask"], ["reply"]) and "--" not in begun and not known.issuperset(begun)


def _translated(command: Command, options: argparse.Namespace) -> int:
    """Run `command`; the client's errors become the command line's."""
    from agent_intercom.cli import output

    try:
        return command(options)
    except (BrokenPipeError, output.Untold):
        raise
    except ModuleNotFoundError as error:
        from agent_intercom.cli.dependencies import missing_module

        if not (text := missing_module(error)):
            raise
        raise CommandError("MODULE_MISSING", text) from error
    except OSError as error:
        text = f"the operating system refused: {os.strerror(error.errno) if error.errno else 'unknown error'}"
        raise CommandError("OS_ERROR", text) from error
    except ClientError as error:
        hint = None
        if error.code == "TIMEOUT":
            hint = "`intercom doctor` tells whether the broker is well."
        elif error.code == "INVALID_SESSION" and error.field == "name":
            hint = "The name is that of AGENT_INTERCOM_SESSION_NAME."
        from agent_intercom.cli.place import here, told

        raise CommandError(error.code, told(error, here().addresses), hint=hint) from error


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="intercom",
        description=DESCRIPTION,
        epilog=epilog() + "\nexample:\n  intercom ask reviewer 'Is the parser done?' --timeout 300",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"intercom {__version__}")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True, parser_class=Parser)

    def add(
        name: str, command: Command, summary: str, example: str, codes: str = "012345", *, json: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}\n\n{epilog(map(int, codes))}",
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        if json:
            sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.set_defaults(command=command, json=False)
        return sub

    _add_talking(add)
    _add_tending(add)
    return parser


Add: TypeAlias = Callable[..., argparse.ArgumentParser]


def _add_talking(add: Add) -> None:
    listing = add("list", _talk("list_sessions"), "list the sessions of this scope", "intercom list --json")
    listing.add_argument("--all", action="store_true", help="with those that live only as long as a command")

    sending = add(
        "send", _talk("send"), "send a message and wait until it is delivered", "intercom send builder 'Go on.'"
    )
    sending.add_argument("to", metavar="TO", help="session id, name, or the start of an id")
    sending.add_argument("text", metavar="TEXT", help="the message; - reads standard input")

    asking = add("ask", _talk("ask"), "ask a question and wait for the reply", "git diff | intercom ask reviewer -")
    asking.add_argument("to", metavar="TO", help="session id, name, or the start of an id")
    asking.add_argument("text", metavar="TEXT", help="the question; - reads standard input")
    asking.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="S", help="seconds to wait for the reply (default 120)"
    )

    add("pending", _talk("pending"), "list the asks to this seat that wait for an answer", "intercom pending", "012")

    replying = add("reply", _talk("reply"), "answer an ask to this seat", "intercom reply latest 'Yes, merge it.'")
    replying.usage = "intercom reply [-h] [--json] [MESSAGE-ID|latest|oldest] TEXT"
    replying.add_argument(
        "words",
        nargs="+",
        metavar="TEXT",
        help="the answer, behind the ask that it is for where several wait; - reads standard input",
    )

    watching = add("watch", _watch, "hold this user's seat and show what happens", "intercom watch --json")
    watching.add_argument("--all", action="store_true", help="show sessions too that come and go with a command")
    add("whoami", _talk("whoami"), "print the full session id of this user's seat", "intercom whoami")


def _add_tending(add: Add) -> None:
    add("status", _status, "tell whether the broker is there and well", "intercom status --json", "0123456")

    running = add(
        "broker",
        _broker,
        "run the broker in the foreground",
        "AGENT_INTERCOM_IDLE_EXIT_MS=3600000 intercom broker",
        "012",
        json=False,
    )
    running.description = (
        "Run the broker in the foreground, binding for itself in the agent directory (PI_CODING_AGENT_DIR, else\n"
        "~/.pi/agent). It ends when there was no session for five seconds; AGENT_INTERCOM_IDLE_EXIT_MS, or\n"
        "idle_exit_ms in intercom.toml, lets it wait longer (at most 86400000, a day)."
    )
    running.add_argument("ignored", nargs="*", metavar="ARGUMENT", help="ignored: clients that start a broker add one")

    config = add("config", _config, "check or show the settings", "intercom config check", "012")
    config.add_argument(
        "action",
        choices=("check", "show"),
        metavar="check|show",
        help="tell what is wrong with the settings, or show every one",
    )

    doctor = add("doctor", _doctor, "look for what is wrong and tell the way out", "intercom doctor", "0126")
    doctor.add_argument(
        "--take-over",
        action="store_true",
        help="ask a foreign broker at our address to end, after telling whom it serves; foreign is what systemd did "
        "not start, a healthy `intercom broker` only where it keeps intercom.socket from listening",
    )

    setup = add(
        "setup",
        _setup,
        "move the compatibility sockets to PI_CODING_AGENT_DIR",
        "PI_CODING_AGENT_DIR=~/work/pi intercom setup",
        "012",
    )
    setup.add_argument("--undo", action="store_true", help="take the change back")


def _talk(name: str) -> Command:
    def command(options: argparse.Namespace) -> int:
        from agent_intercom.cli import talk

        run: Command = getattr(talk, name)
        return run(options)

    return command


def _watch(options: argparse.Namespace) -> int:
    from agent_intercom.cli.watch import watch

    return watch(options)


def _status(options: argparse.Namespace) -> int:
    from agent_intercom.cli.status import status

    return status(options)


def _broker(options: argparse.Namespace) -> int:
    from agent_intercom.intercom.launch import main as run_broker

    return run_broker([])


def _config(options: argparse.Namespace) -> int:
    from agent_intercom.cli.config import config

    return config(options)


def _doctor(options: argparse.Namespace) -> int:
    from agent_intercom.cli.doctor import doctor

    return doctor(options)


def _setup(options: argparse.Namespace) -> int:
    from agent_intercom.cli.setup import setup

    return setup(options)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError("must be a number of seconds above 0, at most 86400")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
