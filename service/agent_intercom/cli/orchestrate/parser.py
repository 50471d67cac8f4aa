# SPDX-License-Identifier: Apache-2.0
"""The command line of `orchestrate` (orchestration spec, section 11.2). Everything but the parser is imported later."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeAlias

from agent_intercom.cli.formatting import Formatter, HelpfulParser
from agent_intercom.cli.orchestrate import amounts, startflags, workerflags
from agent_intercom.cli.orchestrate.answer import MEANINGS, WAITING, Answer, usage
from agent_intercom.cli.orchestrate.startflags import text, whole
from agent_intercom.orchestration.contract import ROLES, THINKING

Command: TypeAlias = Callable[[argparse.Namespace], Answer | int]

DESCRIPTION: Final = "Put agents to work as a team: start, watch, steer and inspect runs."
COMMANDS: Final = (
    "start",
    "list",
    "status",
    "watch",
    "wait",
    "attach",
    "dashboard",
    "send",
    "abort",
    "restart",
    "continue",
    "redeliver",
    "stop",
    "events",
    "usage",
    "doctor",
    "prune",
    "config",
    "supervisor",
    "worker",
    "report",
    "progress",
    "controller",
    "role-registry",
)
"""The words that name a command in the envelope of `--json`."""

UNTIL: Final = ("settled", "ready", "end")
"""What a run can be waited for."""

_SESSION: Final = "name of a session (default: that of this directory, or the only one that runs)"


class Parser(HelpfulParser):
    """Complains in one line, and as JSON where that was asked for."""

    behind = ""
    """What is to get everything that stands behind two dashes, and nothing else, where a command has that."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse has it, and with what is `behind`: argparse would take a first word there for any other."""
        if not self.behind or args is None:
            return super().parse_known_args(args, namespace)
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        found, rest = super().parse_known_args(words[:end], namespace)
        if getattr(found, self.behind):
            self.error(f"{getattr(found, self.behind)[0]}: what is to run stands behind two dashes")
        setattr(found, self.behind, words[end + 1 :])
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise usage(message, f"See `{self.prog} --help`.")


def build(program: str, version: str) -> Parser:
    """The whole command line; `program` is the name that it was called by."""
    parser = Parser(
        prog=program,
        description=DESCRIPTION,
        epilog=f"example:\n  {program} start --task 'Make the parser accept empty lines.' --with-probe\n\n{_exits()}",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{program} {version}")
    _json(parser)
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True, parser_class=Parser)
    adding = Adding(program, commands, _exits())
    _start(adding)
    _looking(adding)
    _waiting(Adding(program, commands, _exits(WAITING)))
    _steering(adding)
    _tending(adding)
    _supervisor(adding)
    workerflags.add_reporting(Adding(program, commands, workerflags.REPORTING_EXITS), _lazy)
    _worker(Adding(program, commands, workerflags.EXITS), program)
    return parser


def _json(sub: Parser) -> None:
    """Shown everywhere; the command line is read without it."""
    sub.add_argument("--json", action="store_true", help="print one JSON object; may stand anywhere")


def _exits(meanings: Mapping[int, str] = MEANINGS) -> str:
    return "exit codes:\n" + "".join(f"  {code}  {text}\n" for code, text in meanings.items())


class Adding:
    """Adds commands, all with the same kind of help."""

    def __init__(self, program: str, commands: argparse._SubParsersAction[Parser], exits: str) -> None:
        self._program = program
        self._commands = commands
        self._exits = exits

    @contextmanager
    def command(self, name: str, run: Command, summary: str, example: str) -> Iterator[Parser]:
        sub = self._commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {self._program} {example}\n\n{self._exits}",
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        _json(sub)
        sub.set_defaults(command=run)
        yield sub


def _lazy(module: str, function: str) -> Command:
    """A command of the module `module` of this package, which is imported when the command runs."""

    def command(options: argparse.Namespace) -> Answer | int:
        from importlib import import_module

        run: Command = getattr(import_module(f"agent_intercom.cli.orchestrate.{module}"), function)
        return run(options)

    return command


def _config(options: argparse.Namespace) -> Answer | int:
    return _lazy("config", options.action)(options)


def _start(adding: Adding) -> None:
    example = "start --task-file task.md --with-probe --implementation-flow phased --dry-run"
    with adding.command("start", _lazy("starting", "start"), "start a run", example) as sub:
        startflags.add(sub)


def _session(sub: Parser, *, needed: bool = False) -> None:
    if needed:
        sub.add_argument("session", metavar="SESSION", help="name of a session")
    else:
        sub.add_argument("session", nargs="?", metavar="SESSION", help=_SESSION)


def _run(sub: Parser) -> None:
    sub.add_argument("--run", metavar="ID", help="the run that is meant (default: the one that lives, else the newest)")


def _role(sub: Parser) -> None:
    sub.add_argument("--role", required=True, choices=ROLES, metavar="ROLE", help="the worker that is meant")


def _command_id(sub: Parser, *, needed: bool = False) -> None:
    sub.add_argument(
        "--command-id",
        required=needed,
        metavar="HEX",
        help="32 hexadecimal digits; the same id again is the same command",
    )


def _yes(sub: Parser, what: str) -> None:
    sub.add_argument("--yes", action="store_true", help=what)


def _looking(adding: Adding) -> None:
    with adding.command("list", _lazy("looking", "list_runs"), "list the runs that live", "list --all") as sub:
        sub.add_argument("--all", action="store_true", help="with those that have ended")
    with adding.command("status", _lazy("looking", "status"), "tell where a run stands", "status --json") as sub:
        _session(sub)
        _run(sub)
    with adding.command("watch", _lazy("watching", "watch"), "show what happens in a run", "watch") as sub:
        _session(sub)
        _run(sub)
    with adding.command(
        "dashboard", _lazy("watching", "dashboard"), "show a run on the whole screen", "dashboard"
    ) as sub:
        _session(sub)
        _run(sub)
    with adding.command("attach", _lazy("watching", "attach"), "show a run that goes on", "attach") as sub:
        _session(sub)
    with adding.command(
        "events",
        _lazy("looking", "events"),
        "list what has happened in a run",
        "events demo --role reviewer --after 40",
    ) as sub:
        _session(sub)
        _run(sub)
        sub.add_argument(
            "--role", action="append", default=[], choices=ROLES, metavar="ROLE", help="of this role only; repeatable"
        )
        which = sub.add_mutually_exclusive_group()
        which.add_argument("--after", type=whole, metavar="N", help="those after event N (with --json: 0)")
        which.add_argument("--last", type=_page, metavar="N", help="the newest N, 1 to 100 (without --json: 50)")
        sub.add_argument("--limit", type=_page, metavar="N", help="with --after: at most N, 1 to 100 (default 50)")
    with adding.command("usage", _lazy("looking", "usage"), "tell the tokens and the cost of a run", "usage") as sub:
        _session(sub)
        _run(sub)
        sub.add_argument("--limit", type=_page, default=100, metavar="N", help="newest assignments, 1 to 100 (100)")


def _waiting(adding: Adding) -> None:
    example = "wait demo --until ready --timeout 2h"
    with adding.command("wait", _lazy("waiting", "wait"), "wait for a run", example) as sub:
        sub.description = (
            "Wait until a run is ready, or needs a person, or has ended. Nobody is asked meanwhile: the kernel tells\n"
            "when the run's files change."
        )
        _session(sub)
        _run(sub)
        sub.add_argument(
            "--until",
            choices=UNTIL,
            default=UNTIL[0],
            metavar="WHAT",
            help="settled: it is ready, needs a person or has ended; ready; end (default: settled)",
        )
        sub.add_argument("--timeout", type=_span, metavar="SPAN", help="for so long (default: for ever)")


def _steering(adding: Adding) -> None:
    example = "send demo --role implementer --message 'Keep the old format readable.'"
    with adding.command("send", _lazy("steering", "send"), "say something to a worker", example) as sub:
        _session(sub)
        _role(sub)
        text(sub, "message", "what to say", required=True)
        _run(sub)
        _command_id(sub)
        sub.add_argument(
            "--delivery",
            choices=("steer", "follow-up"),
            default="steer",
            metavar="steer|follow-up",
            help="into what it is doing, or after it, as far as its harness can (default: steer)",
        )
    with adding.command(
        "abort", _lazy("steering", "abort"), "ask a worker to stop what it is doing", "abort demo --role probe"
    ) as sub:
        _session(sub, needed=True)
        _role(sub)
        _run(sub)
        _command_id(sub)
    example = "restart demo --role reviewer --thinking high --yes"
    with adding.command("restart", _lazy("steering", "restart"), "replace a worker by a new one", example) as sub:
        _session(sub, needed=True)
        _role(sub)
        sub.add_argument("--provider", metavar="P", help="provider of the new worker's model")
        sub.add_argument("--model", metavar="M", help="model of the new worker")
        sub.add_argument("--thinking", choices=THINKING, metavar="LEVEL", help="thinking level of the new worker")
        sub.add_argument("--skip-model-check", action="store_true", help="do not ask whether the model is available")
        _run(sub)
        _yes(sub, "really end the worker that runs")
    with adding.command(
        "continue",
        _lazy("steering", "continue_run"),
        "admit one more round of repair",
        "continue demo --yes",
    ) as sub:
        _session(sub, needed=True)
        _run(sub)
        _command_id(sub)
        _yes(sub, "really go on")
    with adding.command(
        "redeliver", _lazy("steering", "redeliver"), "hand a worker its work again", "redeliver demo --role probe --yes"
    ) as sub:
        sub.description = (
            "Hand a worker its work again, after it has become uncertain whether it had it. Look first: what was\n"
            "delivered already may be done twice."
        )
        _session(sub, needed=True)
        _role(sub)
        _run(sub)
        _command_id(sub)
        _yes(sub, "really hand it over again")
    with adding.command(
        "stop", _lazy("stopping", "stop"), "end a run and all that runs in its slice", "stop demo --yes"
    ) as sub:
        _session(sub)
        _run(sub)
        _yes(sub, "really end it; what it has done and its files stay")


def _tending(adding: Adding) -> None:
    with adding.command(
        "doctor", _lazy("doctor", "doctor"), "look for what is wrong and tell the way out", "doctor"
    ) as sub:
        sub.add_argument("--project", metavar="DIR", help="the project whose settings are looked at (this directory)")
        sub.add_argument("--skip-model-check", action="store_true", help="do not ask whether the models are available")
    with adding.command(
        "prune", _lazy("pruning", "prune"), "remove runs that have ended", "prune --older-than 30 --yes"
    ) as sub:
        sub.add_argument("--session", metavar="NAME", help="of this session only")
        sub.add_argument("--older-than", type=whole, metavar="DAYS", help="those that ended earlier (orchestrate.toml)")
        sub.add_argument("--keep", type=whole, metavar="N", help="keep the newest N at most (orchestrate.toml)")
        sub.add_argument("--original", action="store_true", help="those of the tmux program too")
        _yes(sub, "really remove them; without it, only tell which")
    with adding.command("config", _config, "check or show the settings", "config show") as sub:
        sub.add_argument(
            "action",
            choices=("check", "show"),
            metavar="check|show",
            help="tell what is wrong with the settings, or show every one and where it comes from",
        )
        sub.add_argument("--project", metavar="DIR", help="the project whose settings are meant (this directory)")
    with adding.command("controller", _lazy("steering", "controller"), "not available", "controller status") as sub:
        sub.description = "Not available: the controller is a tmux session of the original program."
        sub.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="ignored")
    with adding.command("role-registry", _lazy("steering", "role_registry"), "not available", "role-registry") as sub:
        sub.description = "Not available: this program has the five built-in roles."
        sub.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="ignored")


def _supervisor(adding: Adding) -> None:
    example = "supervisor events demo --role reviewer --cursor reviewer=12"
    with adding.command(
        "supervisor", _lazy("supervising", "supervisor"), "read runs as a program does", example
    ) as sub:
        sub.description = "Read runs as a program does: Supervisor API, version 2. Nothing is changed or started by it."
        operations = sub.add_subparsers(dest="operation", metavar="OPERATION", required=True, parser_class=Parser)

        def add(name: str, summary: str, *, session: bool = True) -> Parser:
            description = summary[0].upper() + summary[1:] + "."
            made = operations.add_parser(
                name, help=summary, description=description, formatter_class=Formatter, allow_abbrev=False
            )
            _json(made)
            if session:
                _session(made, needed=True)
            return made

        add("capabilities", "tell what this interface can do", session=False)
        add("sessions", "list the newest run of every session", session=False)
        runs = add("runs", "list the runs of a session")
        runs.add_argument("--limit", type=_page, default=100, metavar="N", help="at most N, 1 to 100 (100)")
        _run(add("snapshot", "tell everything about a run"))
        usage_page = add("usage", "tell what the assignments of a run have used")
        _run(usage_page)
        usage_page.add_argument("--limit", type=_page, default=100, metavar="N", help="newest, 1 to 100 (100)")
        events = add("events", "list events by role, from a cursor on")
        _run(events)
        events.add_argument("--role", action="append", default=[], metavar="ROLE", help="of this role; repeatable")
        events.add_argument(
            "--cursor",
            action="append",
            default=[],
            metavar="ROLE=SEQUENCE",
            help="after this event; `workflow` stands for those of no role; repeatable",
        )
        events.add_argument("--limit", type=_page, default=50, metavar="N", help="per role, 1 to 100 (50)")
        command = add("command", "tell what became of a command")
        command.add_argument("--role", required=True, metavar="ROLE", help="the role that it was for")
        _command_id(command, needed=True)
        _run(command)


def _worker(adding: Adding, program: str) -> None:
    with adding.command(
        "worker", _lazy("worker", ""), "start and look after workers outside runs", "worker list"
    ) as sub:
        sub.description = (
            "Start and look after workers outside runs: any program, in a scope unit of its own, known by a name."
        )
        operations = sub.add_subparsers(dest="operation", metavar="OPERATION", required=True, parser_class=Parser)
        workerflags.add(Adding(program, operations, workerflags.EXITS), _lazy)


def _span(value: str) -> int:
    try:
        return amounts.span(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _page(value: str) -> int:
    number = whole(value)
    if not 1 <= number <= 100:
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 100")
    return number
