# SPDX-License-Identifier: Apache-2.0
"""`worker forget`, `prune` and `cleanup`: nothing is kept for ever, and nothing goes that nobody agreed to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from agent_intercom.cli.orchestrate.answer import LOCAL_RUNTIME_ERROR, Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.worker import calling, telling, tellingremoved
from agent_intercom.cli.orchestrate.worker.looking import nobody, now
from agent_intercom.cli.orchestrate.workerflags import exit_of


def forget(options: argparse.Namespace) -> Answer:
    """`worker forget`: one that has ended. Without `--yes` it only tells what there is to think about."""
    with calling.asking(options) as service:
        if options.yes:
            result = service.request("forget", {"worker": options.worker, "acknowledge": True})
            return Answer({"dry_run": False, **result}, telling.safe(tellingremoved.forgot(result["forgotten"])))
        found = service.request("forget", {"worker": options.worker, "preview": True})
    again = f"`{_again(options, 'forget')} --yes` does it"
    return Answer({"dry_run": True, **found}, telling.safe(tellingremoved.forgettable(found, again)))


def prune(options: argparse.Namespace) -> Answer:
    """`worker prune`: all that have ended. Without `--yes` it only tells which those are."""
    if options.all and not options.override:
        raise calling.refuse("prune --all removes what is not yours", "Say --override, too, if you may.")
    params = pruning(options.worker, options.all, options.yes)
    try:
        with calling.asking(options) as service:
            result = service.request("prune", params)
    except CommandFailure as failure:
        if options.yes or options.worker is not None:
            raise
        return nobody(failure)
    if not options.yes:
        again = f"`{_again(options, 'prune')} --yes` looks again, and removes what is there"
        return Answer({"dry_run": True, **result}, telling.safe(tellingremoved.prunable(result, again, now())))
    return _with_errors({"dry_run": False, **result}, tellingremoved.pruned(result), result["errors"])


def pruning(worker: str | None, everyone: bool, really: bool) -> JsonObject:
    """What a prune asks the service for: to do it, or for a preview of just that."""
    params: JsonObject = {"all": everyone, **({"acknowledge": True} if really else {"preview": True})}
    return params if worker is None else {**params, "worker": worker}


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
    lines = tellingremoved.cleanup(result, options.yes, f"{options.program} worker cleanup", now())
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
