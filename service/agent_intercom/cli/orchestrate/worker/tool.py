# SPDX-License-Identifier: Apache-2.0
"""`agent-intercom-fleet`: managed workers for agents, as a program that reads and writes JSON (section 1.6).

One object on standard input, `{"managerSessionId"?, "cwd"?, "params": {"action", ...}}`, and one line on standard
output: `{"ok": true, "result": {"text", "details"}}`, or `{"ok": false, "error", "code"}` with exit code 1. `text` is
for a model to read, `details` for programs. Clients whose schemas are strict fill in what they do not mean: `null` and
`auto` are the same as nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent_intercom.cli import output
from agent_intercom.cli.ending import status_of
from agent_intercom.cli.orchestrate.worker import toolterms
from agent_intercom.cli.orchestrate.worker.toolterms import ACTIONS, PARAMETERS, RETIRED, Invalid

PROGRAM: Final = "agent-intercom-fleet"
MAX_INPUT: Final = 4 * 1_048_576
CHECKPOINT_FRESH_MS: Final = 90_000
"""How long a request for a checkpoint is told by `_heartbeat`, which is called every minute."""

_CALL: Final = frozenset({"managerSessionId", "cwd", "params"})


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one call. Returns 0, or 1 for a failure; 2 for arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "stdout" in output.prepare():
        return 1
    return status_of(PROGRAM, lambda: _run(words), 1)


def _run(words: list[str]) -> int:
    if words == ["--schema"]:
        output.emit(output.json_line(toolterms.schema()))
        return 0
    if words in (["--help"], ["-h"]):
        print(toolterms.usage(PROGRAM), end="")
        return 0
    if words:
        output.complain("it takes one JSON object on standard input", f"See `{PROGRAM} --help`.", PROGRAM)
        return 2
    answer = answered(sys.stdin.buffer.read(MAX_INPUT + 1) if sys.stdin is not None else b"", os.environ)
    with output.telling() if answer["ok"] else contextlib.nullcontext():
        output.emit(output.json_line(answer))
    return 0 if answer["ok"] else 1


def answered(content: bytes, environ: Mapping[str, str]) -> dict[str, Any]:
    """The answer to a call. Whatever goes wrong is in it."""
    from agent_intercom.cli.orchestrate.answer import CommandFailure, bounded
    from agent_intercom.cli.orchestrate.worker import calling
    from agent_intercom.orchestration.errors import Refusal
    from agent_intercom.workers.errors import WorkerError

    try:
        return {"ok": True, "result": _carried_out(content, environ)}
    except Invalid as error:
        code, text = "invalid_request", str(error)
    except WorkerError as error:
        code, text = str(error.code), calling.told(error)
    except Refusal as error:
        code, text = "invalid_request", error.text
    except CommandFailure as error:
        code, text = error.code, error.message
    except OSError as error:
        code, text = "local_runtime_error", f"the operating system refused: {os.strerror(error.errno or 0)}"
    except ModuleNotFoundError as error:
        from agent_intercom.cli.dependencies import missing_module

        code, text = "missing_prerequisite", missing_module(error) or "a module of this program is missing"
    except Exception as error:  # the outermost place: whoever reads JSON is owed an answer, without anybody's text
        code, text = "internal_error", f"a fault of this program ({type(error).__name__}); please report it"
    return {"ok": False, "error": bounded(text), "code": code}


def _carried_out(content: bytes, environ: Mapping[str, str]) -> dict[str, Any]:
    from agent_intercom.cli.orchestrate.worker import calling

    call = _call(content)
    params = _without_sentinels(call["params"])
    action = params.pop("action", None)
    if not isinstance(action, str):
        raise Invalid(f"params.action is missing; it is one of {', '.join(toolterms.offered())}")
    if action not in ACTIONS:
        raise Invalid(toolterms.unknown(action))
    _check(action, params)
    # Nothing, for clients whose schemas are strict.
    session = call.get("managerSessionId") or None
    caller = calling.caller_of(session, environ)
    here = _directory(call.get("cwd"))
    try:
        with calling.connected(caller, environ, begin=action == "spawn") as service:
            text, details = _Acting(service, params, here, environ).do(action)
    except calling.NobodyListens:
        if action not in _NOBODY or "id" in params:
            raise
        text, details = [f"Nothing to show: {calling.NOBODY}."], dict(_NOBODY[action])
    return {"text": "\n".join(text), "details": details}


def _call(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_INPUT:
        raise Invalid(f"standard input has more than {MAX_INPUT} bytes")
    try:
        call = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Invalid("standard input is not one JSON object in UTF-8") from error
    if not isinstance(call, dict) or not isinstance(call.get("params"), dict):
        raise Invalid('standard input is not an object with "params", an object')
    if unknown := call.keys() - _CALL:
        raise Invalid(f"there is no {min(unknown)} beside params; there is managerSessionId and cwd")
    for name in ("managerSessionId", "cwd"):
        if call.get(name) is not None and not isinstance(call[name], str):
            raise Invalid(f"{name} is not text")
    return call


def _without_sentinels(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value not in (None, "auto", "", [], {})}


def _check(action: str, params: dict[str, Any]) -> None:
    """Refuse what no action, or not this one, takes; drop what says nothing."""
    for name in [name for name in params if name in RETIRED]:
        if params.pop(name) not in RETIRED[name].nothing:
            raise Invalid(f"{name} is not available: {RETIRED[name].why}")
    taken = ACTIONS[action].takes
    for name, value in params.items():
        if name not in PARAMETERS:
            raise Invalid(f"there is no parameter {name}; {action} takes {', '.join(taken) or 'none'}")
        if not PARAMETERS[name].fits(value):
            raise Invalid(f"{name} is not {PARAMETERS[name].kind}: {PARAMETERS[name].meaning}")
    for name in [name for name in params if name not in taken]:
        # A switch that is off says nothing either.
        if params.pop(name) is not False:
            raise Invalid(f"{action} takes no {name}; it takes {', '.join(taken) or 'nothing'}")
    if params.pop("harness", "command") != "command":
        raise Invalid("only command is driven outside runs: give command, the program and its arguments")
    for name in ACTIONS[action].needs:
        if name not in params:
            raise Invalid(f"{action} needs {name}: {PARAMETERS[name].meaning}")


def _directory(name: str | None) -> str:
    if name is not None and os.path.isabs(name):
        return name
    if name is not None:
        raise Invalid("cwd is not an absolute path")
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise Invalid("the current directory is gone; say cwd") from error


class _Acting:
    """One action, its parameters checked. Methods answer with lines of text and with details."""

    def __init__(self, service: Any, params: dict[str, Any], here: str, environ: Mapping[str, str]) -> None:
        self._service = service
        self._params = params
        self._here = here
        self._environ = environ

    def do(self, action: str) -> tuple[Iterable[str], dict[str, Any]]:
        """What became of it. Raises WorkerError, Invalid."""
        if action in _ONE:
            return self._one(action)
        found: tuple[Iterable[str], dict[str, Any]] = getattr(self, "_" + action.lstrip("_"))()
        return found

    def _one(self, action: str) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import changing, looking, telling

        more: dict[str, Any] = {n: self._params[n] for n in ("name", "fresh", "state") if n in self._params}
        wanted = more if action == "notify" else {"worker": self._params["id"], **more}
        timeout = changing.STOP_TIMEOUT if action in {"stop", "restart"} else None
        result = self._service.request(action, wanted, timeout)
        return telling.safe(telling.changed(action, result, looking.now())), result

    def _spawn(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, starting, telling
        from agent_intercom.workers.contract import Code
        from agent_intercom.workers.errors import WorkerError

        params = self._params
        writable = params.get("writable")
        confined = params.get("readOnly", False) or writable is not None
        offline = params.get("noNetwork", False)
        if offline and not confined:
            raise Invalid("noNetwork takes a worker with readOnly or writable")
        directory = starting.directory_of(params.get("cwd"), self._here, "cwd")
        wanted = starting.params(
            arguments=params["command"],
            directory=directory,
            environ=self._environ,
            name=params.get("id"),
            role=params.get("role"),
            task=params.get("task"),
            writable=[starting.directory_of(n, directory, "writable") for n in writable or ()] if confined else None,
            network=not offline,
            limits={ours: toolterms.size(params, name) for name, ours in toolterms.LIMITS.items()},
            lifetimes={ours: toolterms.span(params, name) for name, ours in toolterms.LIFETIMES.items()},
            grant=self._grant(looking.now()),
            keep_output=params.get("keepOutput", False),
            key=params.get("key"),
        )
        try:
            result = self._service.request("start", wanted, starting.TIMEOUT)
        except WorkerError as error:
            if error.code != Code.COMMAND_NOT_FOUND:
                raise
            text = f"{error.text}: {output.printable(params['command'][0])}"
            raise WorkerError(error.code, text, error.field) from error
        if telling.never_began(result["worker"]) and (found := starting.not_running(result)):
            raise WorkerError(*found, "key")
        lines = telling.started(result, looking.now(), kept=wanted["keep_output"], confined=confined)
        return telling.safe(lines), result

    def _grant(self, now: int) -> dict[str, Any] | None:
        names = [name for name in ("delegationGrant", "childGrant") if name in self._params]
        if len(names) > 1:
            raise Invalid("delegationGrant and childGrant say the same thing: give one of them")
        found = toolterms.grant(self._params[names[0]]) if names else None
        if found is not None and found.get("expires_at", now) < now:
            raise Invalid("expiresAt of a grant is over already; it is a time in milliseconds since 1970")
        return found

    def _list(self, history: bool = False) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, telling

        everyone = self._params.get("all", False)
        result = looking.found(self._service, everyone, history)
        lines = telling.listed(result, None, everyone, looking.now(), history=history)
        details = {**result, "scope": "all" if everyone else "manager", "view": "history" if history else "current"}
        return telling.safe(lines), details

    def _history(self) -> tuple[Iterable[str], dict[str, Any]]:
        return self._list(history=True)

    def _status(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, telling

        if "id" not in self._params:
            return self._list()
        result = looking.whole(self._service, self._params["id"])
        return telling.safe(telling.status(result, looking.now())), result

    def _logs(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import telling
        from agent_intercom.workers.contract import MAX_EVENTS

        lines = min(max(int(self._params.get("lines", 80)), 1), MAX_EVENTS)
        wanted = self._params.get("output", False)
        result = self._service.request("logs", {"worker": self._params["id"], "lines": lines, "output": wanted})
        if not wanted:
            return telling.safe(telling.logs(result["events"])), result
        output = result.get("output")
        return ["Its output is not kept: keepOutput of spawn."] if output is None else telling.printed(output), result

    def _wait(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, telling

        until, ms = self._params.get("until", "end"), toolterms.span(self._params, "timeout")
        result = looking.wait_for(self._service, self._params["id"], until, 60.0 if ms is None else ms / 1000)
        lines = list(telling.waited(result["worker"], until, looking.now()))
        if not result["reached"]:
            lines.append(looking.not_reached(result, until)[1])
        return telling.safe(lines), result

    def _renew(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, telling

        result = self._service.request("renew", {"worker": self._params["id"]} if "id" in self._params else {})
        return telling.safe(telling.renewed(result, looking.now())), result

    def _forget(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import telling, tellingremoved

        wanted = {"worker": self._params["id"]}
        if not self._params.get("acknowledge", False):
            result = self._service.request("forget", {**wanted, "preview": True})
            lines = tellingremoved.forgettable(result, "acknowledge:true removes it")
            return telling.safe(lines), {"dry_run": True, **result}
        result = self._service.request("forget", {**wanted, "acknowledge": True})
        return telling.safe(tellingremoved.forgot(result["forgotten"])), {"dry_run": False, **result}

    def _prune(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, removing, telling, tellingremoved

        really = self._params.get("acknowledge", False)
        result = self._service.request("prune", removing.pruning(self._params.get("id"), False, really))
        lines = tellingremoved.pruned(result)
        if not really:
            lines = tellingremoved.prunable(result, "acknowledge:true removes these", looking.now())
        return telling.safe(lines), {"dry_run": not really, **result}

    def _cleanup(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import looking, telling, tellingremoved

        execute = self._params.get("execute", False)
        result = self._service.request("cleanup", {"execute": execute})
        lines = tellingremoved.cleanup(result, execute, "orchestrate worker cleanup", looking.now())
        return telling.safe(lines), result

    def _doctor(self) -> tuple[Iterable[str], dict[str, Any]]:
        from agent_intercom.cli.orchestrate.worker import telling

        result = self._service.request("health", {})
        return telling.safe(telling.health(result)), result

    def _heartbeat(self) -> tuple[Iterable[str], dict[str, Any]]:
        """The owner is there; and what its host has to deliver: who was asked for a checkpoint lately."""
        from agent_intercom.cli.orchestrate.worker import looking
        from agent_intercom.workers.contract import TERMINAL, Code
        from agent_intercom.workers.errors import WorkerError
        from agent_intercom.workers.lifecycle import PAUSABLE

        now = looking.now()
        try:
            renewed = [worker["id"] for worker in self._service.request("heartbeat", {})["workers"]]
        except WorkerError as error:
            # What cannot be written down now keeps nobody from being asked for a checkpoint.
            if error.code != Code.STORE:
                raise
            renewed = []
        result = self._service.request("list", {"all": False, "history": False})
        live = [worker for worker in result["workers"] if worker["state"] not in TERMINAL]
        asked = [worker for worker in live if worker.get("checkpoint_requested_at") is not None]
        # Of the others the times stand still, or it is being ended.
        going = [worker for worker in asked if worker["state"] in PAUSABLE]
        requests = [
            toolterms.checkpoint(worker, now)
            for worker in going
            if now - (worker.get("checkpoint_attempted_at") or worker["checkpoint_requested_at"]) < CHECKPOINT_FRESH_MS
        ]
        details = {"renewed": renewed, "checkpointRequested": [w["id"] for w in asked], "checkpointRequests": requests}
        return [f"{len(requests)} to be asked for a checkpoint"], details


_ONE: Final = frozenset({"stop", "restart", "rename", "adopt", "release", "pause", "resume", "notify"})
"""Actions on one worker that answer with it."""

_NONE: Final = {"workers": [], "hidden": 0, "service": False}
_NOBODY: Final[Mapping[str, Mapping[str, Any]]] = {
    "list": _NONE,
    "history": _NONE,
    "status": _NONE,
    "renew": _NONE,
    "_heartbeat": {"renewed": [], "checkpointRequested": [], "checkpointRequests": []},
}
"""Actions that have an answer where there is no worker service."""

if __name__ == "__main__":
    sys.exit(main())
