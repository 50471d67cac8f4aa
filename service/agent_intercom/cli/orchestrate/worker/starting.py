# SPDX-License-Identifier: Apache-2.0
"""`worker start`: a program as a worker of whoever asks (managed-workers spec, sections 1.2 and 2.4)."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from os import path
from typing import Any, Final

from agent_intercom.cli.orchestrate import amounts, texts
from agent_intercom.cli.orchestrate.answer import Answer
from agent_intercom.cli.orchestrate.worker import calling, telling
from agent_intercom.cli.orchestrate.worker.looking import now
from agent_intercom.cli.orchestrate.workerflags import exit_of
from agent_intercom.cli.output import printable
from agent_intercom.orchestration import environment
from agent_intercom.workers.contract import MAX_TASK, NAME, TERMINAL, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.terms import KEY_LENGTH

HARNESS: Final = "command"
"""What drives a program that speaks no protocol."""

TIMEOUT: Final = 60.0
"""Seconds: for a service that has to be started first, and then for the job of a scope unit."""


def start(options: argparse.Namespace) -> Answer:
    """`worker start`: check what was typed, then have it started; the worker."""
    with calling.failing(options.program):
        params = _params(options)
    with calling.asking(options, begin=True, hints=_ways_out(options)) as service:
        result = service.request("start", params, TIMEOUT)
    confined = params["writable"] is not None
    lines = telling.started(result, now(), kept=params["keep_output"], confined=confined, program=options.program)
    found = not_running(result)
    if found is None:
        return Answer(result, telling.safe(lines))
    code, text = found
    error = (code, f"{text}; another start takes another key")
    return Answer(result, telling.safe(lines), error, exit_of(code))


def not_running(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The code and the text where a key is of a start that failed, or of a worker that has ended; None: it lives.

    Who starts the same twice is told the second time what the first time told.
    """
    worker = result["worker"]
    if not result.get("repeated") or worker["state"] not in TERMINAL:
        return None
    if telling.never_began(worker):
        code = worker.get("error_code") or Code.START_FAILED
        return code, f"the start under this key has failed ({telling.words(code)}), and nothing is started now"
    return Code.NOT_LIVE, "what was started under this key has ended, and nothing is started now"


def _ways_out(options: argparse.Namespace) -> dict[str, str]:
    """What to do about faults of which more is known here than the service may say."""
    program, name = options.arguments[0], options.worker_name
    where = "in the directory that it starts in" if "/" in program else "in PATH"
    shell = any(character in program for character in " \t;|&<>$")
    line = f"; a line for a shell is run with `-- sh -c {shlex.quote(program)}`" if shell else ""
    found: dict[str, str] = {
        Code.COMMAND_NOT_FOUND: f"{program!r} was looked for {where}{line}.",
        Code.CONFLICT: f"`{options.program} worker status ID` shows that worker; another start takes another key.",
    }
    if name is not None:
        again = f"`{options.program} worker restart {name} --yes` starts it again"
        found[Code.NAME_TAKEN] = f"`{options.program} worker status {name}` shows it, {again}; or take another name."
    return found


def _params(options: argparse.Namespace) -> dict[str, Any]:
    if not options.arguments:
        raise calling.refuse("nothing is to run", f"`{options.program} worker start NAME -- COMMAND…` says what.")
    confined = options.read_only or bool(options.writable)
    if options.no_network and not confined:
        hint = "Say --read-only, and --writable DIR for what it may change."
        raise calling.refuse("--no-network takes a worker that may not change every file", hint)
    if options.depth is not None and options.may_start is None:
        raise calling.refuse("--depth says nothing without --may-start", "Say --may-start N, or leave it out.")
    task = texts.given("the task", "task", options.task, options.task_file)
    directory = directory_of(options.directory, _here())
    return params(
        arguments=options.arguments,
        directory=directory,
        environ=os.environ,
        name=options.worker_name,
        role=options.role,
        task=task,
        writable=[directory_of(name, _here(), "--writable") for name in options.writable] if confined else None,
        network=not options.no_network,
        limits={"memory_max": options.memory_max, "memory_high": options.memory_high, "tasks_max": options.tasks_max},
        lifetimes={"idle_ms": options.idle_timeout, "grace_ms": options.grace, "runtime_ms": options.max_runtime},
        grant=grant_of(options.may_start, options.depth),
        keep_output=options.keep_output,
        key=options.key,
    )


def params(
    *,
    arguments: Sequence[str],
    directory: str,
    environ: Mapping[str, str],
    name: str | None,
    role: str | None,
    task: str | None,
    writable: Sequence[str] | None,
    network: bool,
    limits: Mapping[str, int | None],
    lifetimes: Mapping[str, int | None],
    grant: Mapping[str, Any] | None,
    keep_output: bool,
    key: str | None,
) -> dict[str, Any]:
    """What `start` asks the service for. Raises WorkerError `invalid_request`, Refusal for faults of the settings.

    What is None is left to the service. The environment is what the settings let pass of `environ`.
    """
    if not arguments[0]:
        raise WorkerError(Code.INVALID, "the name of the program to run is empty", "command")
    if name is not None and NAME.fullmatch(name) is None:
        text = "a name has 2 to 80 of A-Z a-z 0-9 _ . - and begins with a letter or a digit"
        raise WorkerError(Code.INVALID, text, "name")
    if key is not None and not 1 <= len(key) <= KEY_LENGTH:
        raise WorkerError(Code.INVALID, f"a key has 1 to {KEY_LENGTH} characters", "key")
    if task is not None and len(task) > MAX_TASK:
        text = f"a task has at most {MAX_TASK} characters: put the rest into a file, and name that"
        raise WorkerError(Code.INVALID, text, "task")
    from agent_intercom.orchestration.config.load import load  # what was typed is looked at first

    settings = load(environ, path.realpath(directory))
    given = {"name": name, "role": role, "task": task, "key": key, **limits}
    return {
        "harness": HARNESS,
        "command": list(arguments),
        "directory": directory,
        "environment": environment.choose(environ, settings.passed, settings.dropped),
        "writable": None if writable is None else list(writable),
        "network": network,
        "lifetimes": {what: ms for what, ms in lifetimes.items() if ms is not None},
        "grant": grant,
        "keep_output": keep_output,
        **{what: value for what, value in given.items() if value is not None},
    }


def grant_of(children: amounts.Children | None, depth: int | None) -> dict[str, Any] | None:
    """What a worker may start. Whose workers may go deeper than its own may let them start some, too."""
    if children is None:
        return None
    deep = depth or 1
    return {**children._asdict(), "depth": deep, "subdelegate": deep > 1}


def directory_of(name: str | None, here: str, what: str = "--directory") -> str:
    """The absolute path of a directory that is there; None is `here`. Raises WorkerError `invalid_request`."""
    if name == "":
        raise WorkerError(Code.INVALID, f"{what} is empty; leave it out, or name a directory", what)
    found = path.abspath(path.join(here, name or ""))
    if not path.isdir(found):
        raise WorkerError(Code.INVALID, f"{what}: {printable(found)} is not a directory that is there", what)
    return found


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise WorkerError(Code.INVALID, "this directory is gone; say --directory", "--directory") from error
