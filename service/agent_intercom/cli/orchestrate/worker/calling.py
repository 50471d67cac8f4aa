# SPDX-License-Identifier: Apache-2.0
"""Who asks the worker service, and what becomes of its errors (managed-workers spec, sections 1.2 and 1.9)."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from agent_intercom.cli.orchestrate.answer import INVALID_ARGUMENTS, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.workerflags import exit_of
from agent_intercom.orchestration import environment
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers.client import Client, from_environment
from agent_intercom.workers.contract import SOCKET_UNIT, Code
from agent_intercom.workers.errors import WorkerError

SESSION_ENVIRONMENT: Final = "AGENT_INTERCOM_SESSION_ID"

_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)

_WAYS_OUT: Final = {
    Code.NOT_FOUND: "`{0} worker list --all --history` shows what there is.",
    Code.AMBIGUOUS: "Give more of its id.",
    Code.NOT_OWNER: "A person may say --override.",
    Code.LIVE: "`{0} worker stop {1} --yes{2}` ends it.",
    Code.NOT_LIVE: "`{0} worker restart {1} --yes{2}` starts it again; one that was stopped, `{0} worker start` anew.",
    Code.NAME_TAKEN: "`{0} worker list --all` shows whose; take another name.",
    Code.COMMAND_NOT_FOUND: "It is looked for in the PATH and the directory that the worker was first started with.",
    Code.PLACE_LOST: "`{0} worker start` does that.",
    Code.ACKNOWLEDGE: "Say --yes to do it; nothing was done.",
    Code.STORE: "`{0} doctor` tells more.",
    Code.BUSY: "Try again.",
}

_ADOPTABLE: Final = "; adopt it"
"""What the service says of a worker that whoever asks can adopt; a person is told with the words to type."""

_ADOPT: Final = "`{0} worker adopt {1}` makes it yours; a person may say --override instead."
_OF_A_SESSION: Final = f"As a person, leave out --as and unset {SESSION_ENVIRONMENT}."
_OF_A_RUN: Final = "`{0} restart SESSION --role ROLE --yes` starts it again, `{0} stop SESSION --yes` ends its run."

NOBODY: Final = "no worker service listens"
START: Final = f"`systemctl --user start {SOCKET_UNIT}` makes it; so does `worker start`."


class Caller(NamedTuple):
    """Whom the worker service is asked for. From inside a worker it is that worker, whatever is said here."""

    scope: str | None = None
    session: str | None = None
    override: bool = False

    def __repr__(self) -> str:
        return "Caller()"


class Asking:
    """A connection to the worker service, on which everything is asked for one caller. Raises WorkerError."""

    def __init__(self, client: Client, caller: Caller) -> None:
        self._client = client
        self.caller = caller

    def reconnect(self) -> None:
        """Begin anew, for the same caller. Raises WorkerError."""
        self._client.reconnect()

    def request(self, action: str, params: Mapping[str, Any], timeout: float | None = None) -> JsonObject:
        """The result of an action, with all that its kind of answer has."""
        result = self._client.request(action, params, timeout=timeout, **self.caller._asdict())
        records = [result["worker"]] if "worker" in result else result.get("workers", [])
        whole = isinstance(records, list) and all(isinstance(each, dict) and each.keys() >= _RECORD for each in records)
        if not (whole and result.keys() >= _ANSWERS.get(action, _WORKER)):
            text = "the worker service answers something else than what it was asked; it may be of another version"
            raise WorkerError(Code.UNREACHABLE, text, "answer")
        return result


_WORKER: Final = frozenset({"worker"})
_WORKERS: Final = frozenset({"workers"})
_ANSWERS: Final = {
    "list": frozenset({"workers", "hidden"}),
    "renew": _WORKERS,
    "heartbeat": _WORKERS,
    "logs": frozenset({"events"}),
    "wait": frozenset({"worker", "reached"}),
    "forget": frozenset({"forgotten", "candidates"}),
    "prune": frozenset({"pruned", "errors", "candidates", "kept"}),
    "cleanup": frozenset({"candidates", "handled"}),
    "health": frozenset({"version", "live", "systemd"}),
}
"""What there is in the answer to an action that does not answer with one worker."""

_RECORD: Final = frozenset({"id", "name", "state", "owner", "generation", "incarnation", "unit", "entered_at"})
"""What is read of a worker without asking whether it is there."""


class NobodyListens(WorkerError):
    """There is no worker service, and no socket that would start one."""

    def __init__(self) -> None:
        super().__init__(Code.UNREACHABLE, NOBODY, "socket")


def caller_of(session: str | None, environ: Mapping[str, str], *, override: bool = False) -> Caller:
    """Who asks. `session` is what the caller says beside the environment. Raises WorkerError `invalid_request`."""
    try:
        scope = environment.scope(environ)
    except Refusal as refusal:
        raise WorkerError(Code.INVALID, refusal.text, refusal.field) from refusal
    said = "the session" if session is not None else SESSION_ENVIRONMENT
    chosen = environ.get(SESSION_ENVIRONMENT, "").strip() if session is None else session
    if not chosen and session is None:
        return Caller(scope, None, override)
    if _SESSION.fullmatch(chosen) is None:
        raise WorkerError(Code.INVALID, f"{said} is no id of a session: 1 to 128 of A-Z a-z 0-9 _ -", "session")
    return Caller(scope, chosen, override)


@contextmanager
def connected(caller: Caller, environ: Mapping[str, str], *, begin: bool = False) -> Iterator[Asking]:
    """The worker service. Raises WorkerError, NobodyListens where there is none.

    With `begin` the service manager is asked to listen where nobody does.
    """
    client = from_environment(environ)
    try:
        opened = client.__enter__()
    except WorkerError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise
        if not begin:
            raise NobodyListens from error
        _listen(environ)
        opened = _entered(client)
    try:
        yield Asking(opened, caller)
    finally:
        client.close()


def _entered(client: Client) -> Client:
    """The connection where systemd has just said that it listens."""
    try:
        return client.__enter__()
    except WorkerError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise
        # Its address was removed, or is another one: systemd looks at neither.
        text = f"{SOCKET_UNIT} is up, and nobody listens at its address: `systemctl --user restart {SOCKET_UNIT}`"
        raise WorkerError(Code.UNREACHABLE, text, "socket") from error


@contextmanager
def asking(
    options: argparse.Namespace, *, begin: bool = False, hints: Mapping[str, str] | None = None
) -> Iterator[Asking]:
    """The worker service for a command, with every WorkerError inside made a CommandFailure.

    `hints` are ways out by code that the command knows better.
    """
    override = getattr(options, "override", False)
    with failing(options.program, getattr(options, "worker", None), hints or {}, override=override):
        caller = caller_of(getattr(options, "session", None), os.environ, override=override)
        with connected(caller, os.environ, begin=begin) as opened:
            yield opened


@contextmanager
def failing(
    program: str, worker: str | None = None, hints: Mapping[str, str] | None = None, *, override: bool = False
) -> Iterator[None]:
    """Make every WorkerError inside a CommandFailure, with the way out and the exit code of its code.

    `worker` is what the worker was called that is asked about.
    """
    try:
        yield
    except NobodyListens as error:
        raise CommandFailure(error.code, error.text, START, exit_of(error.code)) from error
    except WorkerError as error:
        named = ("WORKER" if worker is None else worker, " --override" if override else "")
        hint = (hints or {}).get(error.code) or _way_out(error).format(program, *named)
        about = f"{worker}: " if worker is not None and error.field == "worker" else ""
        text = about + told(error).removesuffix(_ADOPTABLE)
        raise CommandFailure(error.code, text, hint, exit_of(error.code)) from error


def _way_out(error: WorkerError) -> str:
    if error.code == Code.FORBIDDEN and error.field == "override" and "session" in error.text:
        return _OF_A_SESSION
    if error.code == Code.FORBIDDEN and "of a run" in error.text:
        return _OF_A_RUN
    if error.code == Code.NOT_OWNER and error.text.endswith(_ADOPTABLE):
        return _ADOPT
    return _WAYS_OUT[Code(error.code)] if error.code in _WAYS_OUT else ""


def told(error: WorkerError) -> str:
    """The text of an error, with the parameter that it is about where that is not said."""
    named = error.code == Code.INVALID and error.field and error.field not in error.text
    return f"{error.text} ({error.field})" if named else error.text


def refuse(text: str, hint: str) -> CommandFailure:
    """A command line about workers that cannot be carried out."""
    return CommandFailure(INVALID_ARGUMENTS, text, hint)


def _listen(environ: Mapping[str, str]) -> None:
    """Have systemd listen for the worker service."""
    from agent_intercom.host.manager import NO_SUCH_UNIT, Manager, ManagerError, ManagerRefused, ManagerUnreachable

    try:
        with Manager(environ) as manager:
            manager.start(SOCKET_UNIT)
    except ManagerUnreachable as error:
        text = f"workers need a systemd user manager, and none answers: {error}"
        raise WorkerError(Code.MANAGER_UNREACHABLE, text) from error
    except ManagerRefused as error:
        text = f"{SOCKET_UNIT} cannot be started: {error}"
        if error.name == NO_SUCH_UNIT:
            text = f"there is no {SOCKET_UNIT}: `make install-user` makes it"
        raise WorkerError(Code.UNREACHABLE, text) from error
    except ManagerError as error:
        text = f"{error}; `systemctl --user status {SOCKET_UNIT}` tells more"
        raise WorkerError(Code.UNREACHABLE, text) from error
