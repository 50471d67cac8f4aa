# SPDX-License-Identifier: Apache-2.0
"""The flags of `worker`, `report` and `progress` (managed-workers spec, sections 1.2 and 1.9)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeVar

from agent_intercom.cli.orchestrate import amounts, startflags
from agent_intercom.workers.contract import Code, State

if TYPE_CHECKING:
    from agent_intercom.cli.orchestrate.parser import Adding, Command, Parser

    Lazy = Callable[[str, str], Command]

MEANINGS: Final = {
    0: "done",
    1: "failed; the code tells what",
    2: "wrong usage, or not acknowledged; nothing was done",
    3: "blocked: no worker service or service manager, a limit, or the kernel cannot do it",
    4: "there is no such worker",
    5: "it is not, or no longer, as the command needs it",
    6: "not permitted",
}
REPORTING: Final = {
    0: "accepted, or told; the answer says which",
    1: "failed; the code tells what",
    2: "wrong usage, or a report that is no report; nothing was told",
    3: "no answer yet, or none: the code tells whether to say it again or to end",
    5: "nobody waits for it any more",
    6: "the role may not say this",
}


def _exits(meanings: Mapping[int, str]) -> str:
    return "exit codes:\n" + "".join(f"  {code}  {text}\n" for code, text in meanings.items())


EXITS: Final = _exits(MEANINGS)
REPORTING_EXITS: Final = _exits(REPORTING)
"""What `--help` of commands about workers says of exit codes, and that of `report` and `progress`."""

UNTIL: Final = ("ready", "idle", "end", "checkpoint", *(state.value for state in State if state != State.READY))
NOTICES: Final = (State.READY.value, State.WORKING.value, State.WAITING.value)
MAX_LINES: Final = 500

_WORKER: Final = "a worker: its name, its id, or the start of its id"

_Amount = TypeVar("_Amount")


def add(adding: Adding, lazy: Lazy) -> None:
    """Give `worker` its commands."""
    _start(adding, lazy)
    _looking(adding, lazy)
    _changing(adding, lazy)
    _removing(adding, lazy)
    _inside(adding, lazy)


def add_reporting(adding: Adding, lazy: Lazy) -> None:
    """`report` and `progress`, which the command of a worker in a run calls."""
    with adding.command(
        "report", lazy("reporting", "report"), "report what became of an assignment", "report --summary 'It is done.'"
    ) as sub:
        sub.description = (
            "Report what became of an assignment. For the command of a worker in a run, whose assignment file ends "
            "with the fields of its report. A role with verdicts needs one: --verdict, or a field of FILE."
        )
        said = sub.add_mutually_exclusive_group()
        said.add_argument("--file", metavar="FILE", help="the report, JSON; - reads standard input (default)")
        said.add_argument("--summary", metavar="TEXT", help="a report in words only, of any kind")
        sub.add_argument("--verdict", metavar="VERDICT", help="with --summary: what its role decides")
        sub.add_argument("--usage-file", metavar="FILE", help="what it has used, JSON; - reads standard input")
    with adding.command(
        "progress", lazy("reporting", "progress"), "tell what a worker is at", "progress --phase tool"
    ) as sub:
        sub.description = "Tell what a worker is at. For the command of a worker in a run."
        sub.add_argument("--phase", required=True, metavar="PHASE", help="what it is at, a phase of the protocol")
        sub.add_argument("--usage-file", metavar="FILE", help="what it has used so far, JSON; - reads standard input")


def _start(adding: Adding, lazy: Lazy) -> None:
    example = "worker start review --read-only --max-runtime 2h -- make test"
    with adding.command("start", lazy("worker.starting", "start"), "start a worker", example) as sub:
        sub.usage = "%(prog)s [NAME] [--read-only] [--task TEXT] [flags] -- COMMAND…"
        sub.behind = "arguments"
        sub.add_argument("worker_name", nargs="?", metavar="NAME", help="its name (default: made up)")
        sub.add_argument("arguments", nargs="*", metavar="COMMAND…", help="what runs, behind --")
        sub.add_argument("--role", metavar="ROLE", help="what it is for, as free text")
        sub.add_argument("--directory", metavar="DIR", help="where it works (default: this directory)")
        sub.add_argument("--key", metavar="KEY", help="the same key again is the same start, and gives the same worker")
        _as(sub)
        startflags.text(sub.add_argument_group("what is to be done"), "task", "its task, which it finds in a file")
        _confinement(sub.add_argument_group("what the kernel keeps it from"))
        _limits(sub.add_argument_group("what it may use"))
        _lifetimes(sub.add_argument_group("when it is ended by itself; `infinity` is never"))
        grant = sub.add_argument_group("workers of its own")
        grant.add_argument(
            "--may-start",
            type=_amount(amounts.children),
            metavar="N[/DESCENDANTS]",
            help="let it have N workers at a time, and DESCENDANTS with those of its workers",
        )
        grant.add_argument(
            "--depth", type=_amount(amounts.positive), metavar="N", help="how far below it they may be (1: its own)"
        )
        sub.add_argument(
            "--keep-output", action="store_true", help="keep the end of what it prints, for `worker logs --output`"
        )


def _confinement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--read-only", action="store_true", help="it may change no file but in its scratch directory")
    group.add_argument(
        "--writable", action="append", default=[], metavar="DIR", help="--read-only, but for this directory; repeatable"
    )
    group.add_argument("--no-network", action="store_true", help="local sockets only; with --read-only or --writable")


def _limits(group: argparse._ArgumentGroup) -> None:
    size = _amount(amounts.size)
    group.add_argument("--memory-max", type=size, metavar="SIZE", help="memory, such as 2G, beyond which it is killed")
    group.add_argument("--memory-high", type=size, metavar="SIZE", help="memory beyond which it is slowed down")
    group.add_argument("--tasks-max", type=_amount(amounts.tasks), metavar="N", help="processes and threads (512)")


def _lifetimes(group: argparse._ArgumentGroup) -> None:
    span = _amount(amounts.span)
    group.add_argument("--max-runtime", type=span, metavar="SPAN", help="after running for so long, pauses apart (12h)")
    group.add_argument("--idle-timeout", type=span, metavar="SPAN", help="after so long without a sign of life (1h) …")
    group.add_argument("--grace", type=span, metavar="SPAN", help="… and so much longer (15min)")


def _looking(adding: Adding, lazy: Lazy) -> None:
    with adding.command(
        "list", lazy("worker.looking", "list_workers"), "list your workers that live", "worker list --all"
    ) as sub:
        sub.add_argument("--all", action="store_true", help="those of others too, as far as they share the scope")
        sub.add_argument("--history", action="store_true", help="those that have ended, too")
        _override(sub)
    with adding.command(
        "status", lazy("worker.looking", "status"), "tell where a worker stands", "worker status review"
    ) as sub:
        sub.add_argument("worker", nargs="?", metavar="WORKER", help=f"{_WORKER} (default: all, and the service)")
        _override(sub)
    with adding.command(
        "logs", lazy("worker.looking", "logs"), "list what happened to a worker", "worker logs review --output"
    ) as sub:
        _worker(sub)
        sub.add_argument("--lines", type=_lines, default=80, metavar="N", help="the newest N, 1 to 500 (80)")
        sub.add_argument("--output", action="store_true", help="instead, what it printed (`start --keep-output`)")
        _override(sub)
    with adding.command(
        "wait", lazy("worker.looking", "wait"), "wait for a worker", "worker wait review --until end --timeout 10min"
    ) as sub:
        _worker(sub)
        sub.add_argument(
            "--until", choices=UNTIL, default="end", metavar="WHAT", help=f"{', '.join(UNTIL)} (default: end)"
        )
        sub.add_argument(
            "--timeout", type=_amount(amounts.span), metavar="SPAN", help="for so long (default: for ever)"
        )
        _override(sub)


def _changing(adding: Adding, lazy: Lazy) -> None:
    def one(name: str, summary: str, more: str = "") -> AbstractContextManager[Parser]:
        return adding.command(name, lazy("worker.changing", name), summary, f"worker {name} review{more}")

    with one("stop", "end a worker and all that runs in its scope unit", more=" --yes") as sub:
        sub.description = (
            "End a worker, all that runs in its scope unit, and every worker that it has started; what has left the\n"
            "unit before is not found. What it was started with goes too: `worker restart` does both in one, and one\n"
            "that was stopped is started anew with `worker start`. Of one that has ended by itself nothing changes."
        )
        _worker(sub)
        _yes(sub, "really end it")
        _override(sub)
    with one("restart", "end a worker and start it again", more=" --yes") as sub:
        sub.description = "Start a worker again with exactly what it was started with; one that lives is ended first."
        _worker(sub)
        sub.add_argument("--fresh", action="store_true", help="do not go on with the session of the agent in it")
        _yes(sub, "really do it")
        _override(sub)
    with one("rename", "give a worker another name", more=" audit") as sub:
        _worker(sub)
        sub.add_argument("worker_name", metavar="NAME", help="its new name")
        _override(sub)
    for name, summary in (
        ("adopt", "make a worker of another yours"),
        ("release", "give up a worker, which goes on and can be adopted"),
        ("pause", "freeze a worker and all that runs in its scope unit"),
        ("resume", "let a frozen worker go on"),
    ):
        with one(name, summary) as sub:
            _worker(sub)
            _override(sub)
    with one("renew", "keep a worker, or all of yours, from being ended for idleness") as sub:
        sub.add_argument("worker", nargs="?", metavar="WORKER", help=f"{_WORKER} (default: all of yours)")
        _override(sub)


def _removing(adding: Adding, lazy: Lazy) -> None:
    with adding.command(
        "forget", lazy("worker.removing", "forget"), "remove the record of a worker that has ended",
        "worker forget review --yes",
    ) as sub:  # fmt: skip
        sub.description = (
            "Remove the record and private files of a worker that has ended, with those of the workers that it had\n"
            "started."
        )
        _worker(sub)
        _yes(sub, "really remove it; without it, only tell what there is to think about")
        _override(sub)
    with adding.command(
        "prune", lazy("worker.removing", "prune"), "remove the records of workers that have ended", "worker prune --yes"
    ) as sub:
        sub.description = (
            "Remove the records and private files of your workers that have ended, with those of the workers that\n"
            "they had started. Those below which one lives are kept, and named."
        )
        sub.add_argument("worker", nargs="?", metavar="WORKER", help=f"{_WORKER} (default: all of yours)")
        sub.add_argument(
            "--all", action="store_true", help="those of others too; with --override, if they are not yours"
        )
        _yes(sub, "really remove them; without it, only tell which")
        _override(sub)
    with adding.command(
        "cleanup", lazy("worker.removing", "cleanup"), "end and remove what is due", "worker cleanup --yes"
    ) as sub:
        sub.description = (
            "End workers whose time is over, which the worker service does by itself while it runs, and remove what\n"
            "is retained no longer, which it does only when it is told to: by this command, or every day after\n"
            "`systemctl --user enable --now orchestrate-cleanup.timer`.\n"
            "Workers without a record, because that was damaged, are listed, and ended only with --yes --override:\n"
            "they may be somebody's work."
        )
        sub.add_argument(
            "--yes", "--execute", action="store_true", help="really do it; without it, only tell what would be done"
        )
        _override(sub)


def _inside(adding: Adding, lazy: Lazy) -> None:
    with adding.command(
        "notify", lazy("worker.changing", "notify"), "tell how it is with the worker that says this",
        "worker notify waiting",
    ) as sub:  # fmt: skip
        sub.description = "Tell how it is with the worker that says this: only from inside a worker."
        sub.add_argument("state", choices=NOTICES, metavar="ready|working|waiting", help="how it is")
    with adding.command(
        "checkout", lazy("worker.checkout", "checkout"), "make a copy of a work tree that may be changed",
        "worker checkout",
    ) as sub:  # fmt: skip
        sub.description = (
            "Make a copy of a work tree in the scratch directory of the worker that says this. Standard output has\n"
            "the path of the copy alone, for `cd \"$(orchestrate worker checkout)\"`; standard error tells how much\n"
            "it is. What git lists is copied, and small files that it ignores; links lead to dependencies, to other\n"
            "directories that it ignores and to files such as .env; what builds and tools leave is left out."
        )
        sub.add_argument("directory", nargs="?", metavar="DIR", help="the work tree (default: this directory)")
    with adding.command(
        "run", lazy("worker.bridging", "run"), "be the worker of a role in a run", "worker run -- ./agent"
    ) as sub:
        sub.usage = "%(prog)s -- COMMAND…"
        sub.description = (
            "Be the worker of a role in a run, with COMMAND started once for each assignment. The run starts this\n"
            "itself for roles with the harness `command`."
        )
        sub.behind = "arguments"
        sub.add_argument("arguments", nargs="*", metavar="COMMAND…", help="what does the work, behind --")


def _worker(sub: Parser) -> None:
    sub.add_argument("worker", metavar="WORKER", help=_WORKER)


def _as(sub: Parser) -> None:
    sub.add_argument(
        "--as", dest="session", metavar="SESSION", help="for the session of this id (AGENT_INTERCOM_SESSION_ID)"
    )


def _override(sub: Parser) -> None:
    _as(sub)
    of_a_person = "as the person whose machine it is, whosever worker it is; never for a session"
    sub.add_argument("--override", action="store_true", help=of_a_person)


def _yes(sub: Parser, what: str) -> None:
    sub.add_argument("--yes", action="store_true", help=what)


def _lines(value: str) -> int:
    number = startflags.whole(value)
    if not 1 <= number <= MAX_LINES:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_LINES}")
    return number


def _amount(read: Callable[[str], _Amount]) -> Callable[[str], _Amount]:
    """A type of arguments, whose faults are told by what there may be."""

    def typed(value: str) -> _Amount:
        try:
            return read(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def exit_of(code: str) -> int:
    """What a command about workers ends with for the code of an error."""
    from agent_intercom.workers.contract import EXITS as BY_CODE

    return BY_CODE.get(Code(code), 1) if code in set(Code) else 1
