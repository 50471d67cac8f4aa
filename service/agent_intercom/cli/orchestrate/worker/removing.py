# SPDX-License-Identifier: Apache-2.0
"""`worker forget`, `prune` and `cleanup`: nothing is kept for ever, and nothing goes that nobody agreed to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from agent_intercom.cli.orchestrate.answer import LOCAL_RUNTIME_ERROR, Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.worker import calling, telling
from agent_intercom.cli.orchestrate.worker.looking import nobody, now
from agent_intercom.cli.orchestrate.workerflags import exit_of
from agent_intercom.workers.contract import TERMINAL, Code
from agent_intercom.workers.errors import WorkerError


def forget(options: argparse.Namespace) -> Answer:
    """`worker forget`: one that has ended. Without `--yes` it only tells what there is to think about."""
    with calling.asking(options) as service:
        if options.yes:
            result = service.request("forget", {"worker": options.worker, "acknowledge": True})
            data = {"dry_run": False, "candidates": [], **result}
            return Answer(data, telling.safe(telling.removed("forgot", result["forgotten"])))
        data, why = forgettable(service, options.worker)
    again = f"`{_again(options, 'forget')} --yes` does it"
    return Answer(data, telling.safe(telling.forgettable(data["candidates"], why, again)))


def forgettable(service: calling.Asking, worker: str) -> tuple[JsonObject, str]:
    """What a `forget` would remove, and what there is to think about. Raises WorkerError where it would be refused."""
    why = "its record and private files are deleted"
    found = prunable(service, worker, False)
    # An acknowledgement that is denied is refused, whoever asks: leaving it out would do it for a worker.
    try:
        service.request("forget", {"worker": found[0]["id"], "acknowledge": False})
    except WorkerError as error:
        if error.code != Code.ACKNOWLEDGE:
            raise
        why = error.text.removesuffix("; acknowledge that")
    return {"dry_run": True, "candidates": found, "forgotten": []}, why


def prune(options: argparse.Namespace) -> Answer:
    """`worker prune`: all that have ended. Without `--yes` it only tells which those are."""
    if options.all and not options.override:
        raise calling.refuse("prune --all removes what is not yours", "Say --override, too, if you may.")
    params: JsonObject = {"all": options.all, "acknowledge": True}
    if options.worker is not None:
        params["worker"] = options.worker
    try:
        with calling.asking(options) as service:
            if not options.yes:
                return _preview(options, prunable(service, options.worker, options.all))
            result = service.request("prune", params)
    except CommandFailure as failure:
        if options.yes or options.worker is not None:
            raise
        return nobody(failure)
    data = {"dry_run": False, "candidates": [], **result}
    return _with_errors(data, telling.removed("pruned", result["pruned"], result.get("more", 0)), result["errors"])


def _preview(options: argparse.Namespace, found: list[JsonObject]) -> Answer:
    data: JsonObject = {"dry_run": True, "candidates": found, "pruned": [], "errors": []}
    return Answer(data, telling.safe(telling.prunable(found, _again(options, "prune"), now())))


def prunable(service: calling.Asking, worker: str | None, everyone: bool) -> list[JsonObject]:
    """The workers that a prune would remove. Raises WorkerError for one that lives, or that there is not."""
    if worker is not None:
        found = service.request("status", {"worker": worker})["worker"]
        if found["state"] not in TERMINAL:
            raise WorkerError(Code.LIVE, "the worker has not ended", "worker")
        return [found]
    listed = service.request("list", {"all": everyone, "history": True})["workers"]
    return [each for each in listed if each["state"] in TERMINAL]


def cleanup(options: argparse.Namespace) -> Answer:
    """`worker cleanup`: end what has expired, remove what is retained no longer; without `--yes` tell what that is."""
    try:
        with calling.asking(options) as service:
            result = service.request("cleanup", {"execute": options.yes})
    except CommandFailure as failure:
        if options.yes:
            raise
        return nobody(failure)
    data = {"dry_run": not options.yes, **result}
    lines = telling.cleanup(result, options.yes, f"{options.program} worker cleanup", now())
    return _with_errors(data, lines, result.get("errors") or [])


def _with_errors(data: JsonObject, lines: Any, errors: Sequence[Any] | int) -> Answer:
    """An answer, which is a failure where some of it could not be done."""
    number = errors if isinstance(errors, int) else len(errors)
    told = telling.safe(lines)
    if not number:
        return Answer(data, told)
    first = errors[0] if isinstance(errors, Sequence) and errors else {}
    code = str(first.get("code") or LOCAL_RUNTIME_ERROR) if isinstance(first, dict) else LOCAL_RUNTIME_ERROR
    text = "1 of them could not be handled" if number == 1 else f"{number} of them could not be handled"
    return Answer(data, told, (code, f"{text} ({code}); what is left is tried again"), exit_of(code))


def _again(options: argparse.Namespace, command: str) -> str:
    words = [options.program, "worker", command]
    words += [options.worker] if options.worker is not None else []
    words += ["--all"] if getattr(options, "all", False) else []
    words += ["--override"] if options.override else []
    return " ".join(words)
