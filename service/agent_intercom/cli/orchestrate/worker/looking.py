# SPDX-License-Identifier: Apache-2.0
"""`worker list`, `status`, `logs` and `wait`: what workers are, do and did. Nothing is changed by them."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from os import path
from typing import Final

from agent_intercom.cli.orchestrate import amounts
from agent_intercom.cli.orchestrate.answer import Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.worker import calling, telling
from agent_intercom.cli.orchestrate.workerflags import exit_of
from agent_intercom.cli.output import complain
from agent_intercom.workers.client import Gone
from agent_intercom.workers.contract import TERMINAL, WORKER_ENVIRONMENT, Code, State
from agent_intercom.workers.errors import WorkerError

_PIECE: Final = 60.0
"""Seconds of one request of `wait`: the service may be asked to wait for no longer."""

_MARGIN: Final = 8.0
"""Seconds more that an answer may take."""


_PATIENCE: Final = 30.0
_PAUSE: Final = 0.2
"""Seconds for a service that has ended to be there again, and between two looks at that."""

_BEGINNING: Final = frozenset({Code.UNREACHABLE, Code.STORE})
"""What can be wrong with a service that begins again, and not for long."""

_ASKED: Final = "asked for a checkpoint"


def list_workers(options: argparse.Namespace) -> Answer:
    """`worker list`: the caller's own that live; with `--all` those of others, with `--history` those that ended."""
    try:
        with calling.asking(options) as service:
            result = found(service, options.all, options.history)
    except CommandFailure as failure:
        return nobody(failure)
    data = {**result, "service": True}
    lines = telling.listed(data, options.program, options.all, now(), history=options.history)
    return Answer(data, telling.safe(lines))


def found(service: calling.Asking, everyone: bool, history: bool) -> JsonObject:
    """The workers that live, and how many more have ended; with `history` those too. Raises WorkerError."""
    result = service.request("list", {"all": everyone, "history": history})
    result = {**result, "sessions": sessions(result["workers"], os.environ)}
    if history:
        return {**result, "hidden": 0}
    live = [worker for worker in result["workers"] if worker["state"] not in TERMINAL]
    ended = result["hidden"] + len(result["workers"]) - len(live) + result.get("more", 0)
    return {**result, "workers": live, "hidden": ended, "more": 0}


def sessions(workers: Iterable[JsonObject], environ: Mapping[str, str]) -> dict[str, str]:
    """The sessions of the runs that workers are of, by unit id, as far as the places of those runs tell.

    A run's directory lies in that of its session. The service itself knows runs by their units alone.
    """
    units = {str(worker["run"]) for worker in workers if worker.get("run")}
    if not units:
        return {}
    from agent_intercom.orchestration import runtime
    from agent_intercom.orchestration.errors import Refusal

    known = {}
    for unit in units:
        with contextlib.suppress(Refusal):
            directory = runtime.read(runtime.runtime_dir(environ), unit).directory
            known[unit] = path.basename(path.dirname(directory))
    return known


def status(options: argparse.Namespace) -> Answer:
    """`worker status`: one worker, its unit and its processes; or the service, and every worker."""
    if options.worker is None:
        return _overview(options)
    with calling.asking(options) as service:
        result = whole(service, options.worker)
        result["given"] = given(result["worker"], service.caller, os.environ)
    return Answer(result, telling.safe(telling.status(result, now())))


def whole(service: calling.Asking, worker: str) -> JsonObject:
    """What `status` tells of one worker, with its live children where it may have some. Raises WorkerError."""
    result = service.request("status", {"worker": worker})
    record = result["worker"]
    result = {**result, "sessions": sessions([record], os.environ)}
    if record["state"] in TERMINAL or not record.get("grant"):
        return {**result, "children": []}
    seen = service.request("list", {"all": True, "history": False})["workers"]
    live = [each for each in seen if each["state"] not in TERMINAL]
    return {**result, "children": [each for each in live if each.get("parent") == record["incarnation"]]}


def given(worker: JsonObject, caller: calling.Caller, environ: Mapping[str, str]) -> JsonObject | None:
    """What a worker was started with: its command, directory and limits. None for whoever is not its owner.

    It is read where the service keeps it for a restart, and is in no registry and no list. None, too, where it is gone.
    """
    owner = (worker["owner"]["kind"], worker["owner"].get("name") or None)
    mine = ("person", None) if caller.session is None else ("session", caller.session)
    if owner != mine or worker.get("run") or WORKER_ENVIRONMENT in environ:
        return None
    from agent_intercom.orchestration import runtime
    from agent_intercom.orchestration.errors import Refusal
    from agent_intercom.workers import places

    try:
        place = places.read(places.of_worker(runtime.runtime_dir(environ), worker["id"]))
    except (Refusal, WorkerError):
        return None
    limits = {name: getattr(place, name) for name in ("memory_max", "memory_high", "tasks_max")}
    return {"command": list(place.arguments), "directory": place.directory, **limits}


def logs(options: argparse.Namespace) -> Answer:
    """`worker logs`: its last events; on request the end of what it printed instead, and nothing else."""
    with calling.asking(options) as service:
        wanted = {"worker": options.worker, "lines": options.lines, "output": options.output}
        result = service.request("logs", wanted)
    if not options.output:
        return Answer(result, telling.safe(telling.logs(result["events"])))
    if not result.get("output") and not options.json:
        complain(telling.NOT_KEPT if result.get("output") is None else telling.NOTHING, program=options.program)
    return Answer(result, telling.printed(result.get("output") or ""))


def wait(options: argparse.Namespace) -> Answer:
    """`worker wait`: until a worker is where it is to be, or cannot get there any more, or the time is over."""
    with calling.asking(options) as service:
        limit = None if options.timeout in {None, amounts.NEVER} else options.timeout / 1000
        result = wait_for(service, options.worker, options.until, limit)
    lines = list(telling.safe(telling.waited(result["worker"], options.until, now())))
    if result["reached"]:
        return Answer(result, lines)
    code, text = not_reached(result, options.until)
    return Answer(result, lines, (code, text), exit_of(code))


def wait_for(service: calling.Asking, worker: str, until: str, seconds: float | None) -> JsonObject:
    """What `wait` answers last. `seconds` None: there is no end. Raises WorkerError.

    A service that is started again meanwhile is asked again.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    gone_at: float | None = None
    while True:
        piece = _PIECE if deadline is None else min(_PIECE, max(deadline - time.monotonic(), 0))
        params = {"worker": worker, "until": until, "timeout_ms": round(piece * 1000)}
        try:
            if gone_at is not None:
                service.reconnect()
            result = service.request("wait", params, piece + _MARGIN)
        except WorkerError as error:
            beginning = gone_at is not None and error.code in _BEGINNING
            gone_at = time.monotonic() if gone_at is None else gone_at
            if not (beginning or isinstance(error, Gone)) or time.monotonic() - gone_at >= _PATIENCE:
                raise
            time.sleep(_PAUSE)
            continue
        gone_at = None
        # Its name may be another's by the next time.
        worker = result["worker"]["id"]
        over = deadline is not None and time.monotonic() >= deadline
        if result["reached"] or result["worker"]["state"] in TERMINAL or over:
            return result


def not_reached(result: JsonObject, until: str) -> tuple[str, str]:
    """The code and the text for a worker that is not where it was waited for."""
    state = result["worker"]["state"]
    said = telling.words(until)
    if state in TERMINAL:
        what = _ASKED if until == "checkpoint" else said
        return Code.NOT_LIVE, f"it is {State(state)} and will not be {what} any more"
    lacks = {"end": "has not ended", "checkpoint": f"was not {_ASKED}"}.get(until, f"not {said}")
    return Code.TIMEOUT, f"it is {telling.words(state)} and {lacks} yet"


def now() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1000)


def _overview(options: argparse.Namespace) -> Answer:
    try:
        with calling.asking(options) as service:
            health = service.request("health", {})
            result = found(service, False, False)
    except CommandFailure as failure:
        return nobody(failure)
    data = {**result, "health": health, "service": True}
    lines = [*telling.health(health), *telling.listed(data, options.program, False, now())]
    return Answer(data, telling.safe(lines))


def nobody(failure: CommandFailure) -> Answer:
    """Where no worker service is up, none of its workers are either. Raises any other failure again."""
    if not isinstance(failure.__cause__, calling.NobodyListens):
        raise failure
    data: JsonObject = {"workers": [], "hidden": 0, "service": False}
    return Answer(data, [f"Nothing to show: {calling.NOBODY}. {calling.START}"])
