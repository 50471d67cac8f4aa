# SPDX-License-Identifier: Apache-2.0
"""What `agent-intercom-fleet` takes: one table of actions and parameters, for its checks, its help and its schema.

The names are those that prompts for such a tool have (managed-workers spec, sections 1.1 and 1.2). Pure, and without
anything heavy: `--help` imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from agent_intercom.cli.orchestrate import amounts

WORKER: Final = "a worker: its name, its id, or the start of its id"
_GRANT_KEYS: Final = ("maxLiveDirectChildren", "maxLiveDescendants", "maxDepth", "canSubdelegate", "expiresAt")


class Invalid(Exception):
    """A call that cannot be carried out. The text is one line with the fault and the way out."""


class Action(NamedTuple):
    """What an action does, the parameters that it takes, and those among them that it needs."""

    meaning: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class Parameter(NamedTuple):
    """A parameter: what it has to be, and what it means."""

    kind: str
    meaning: str

    def fits(self, value: Any) -> bool:
        """Whether a value is of its kind."""
        if self.kind == _TEXTS:
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        if self.kind == _NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if self.kind == _AMOUNT:
            return isinstance(value, str | int) and not isinstance(value, bool)
        return isinstance(value, {_TEXT: str, _SWITCH: bool, _OBJECT: dict}[self.kind])


class Retired(NamedTuple):
    """A parameter that such tools have and this one has not: values that say nothing, and why."""

    nothing: tuple[Any, ...]
    why: str


_TEXT: Final = "text"
_TEXTS: Final = "a list of texts"
_SWITCH: Final = "true or false"
_NUMBER: Final = "a whole number"
_AMOUNT: Final = "a number or a text"
_OBJECT: Final = "an object"
_SCHEMA: Final[Mapping[str, Mapping[str, Any]]] = {
    _TEXT: {"type": "string"},
    _TEXTS: {"type": "array", "items": {"type": "string"}},
    _SWITCH: {"type": "boolean"},
    _NUMBER: {"type": "integer"},
    _AMOUNT: {"type": ["string", "integer"]},
    _OBJECT: {"type": ["object", "null"]},
}

PARAMETERS: Final = {
    "id": Parameter(_TEXT, WORKER + "; of spawn the name that it gets"),
    "command": Parameter(_TEXTS, "the program to run and its arguments, not for a shell"),
    "task": Parameter(_TEXT, "the assignment, which the worker finds in the file AGENT_INTERCOM_TASK_FILE"),
    "role": Parameter(_TEXT, "what the worker is for"),
    "cwd": Parameter(_TEXT, "where it works; the manager's own directory otherwise"),
    "readOnly": Parameter(_SWITCH, "the kernel keeps it from changing any file outside its scratch directory"),
    "writable": Parameter(_TEXTS, "readOnly, but for these directories"),
    "noNetwork": Parameter(_SWITCH, "with readOnly or writable: local sockets only"),
    "memoryMax": Parameter(_AMOUNT, "memory such as 2G beyond which it is killed"),
    "memoryHigh": Parameter(_AMOUNT, "memory such as 1G beyond which it is slowed down"),
    "tasksMax": Parameter(_NUMBER, "how many processes and threads it may have"),
    "maxRuntime": Parameter(_TEXT, "a time such as 2h 30min after which it is ended, or infinity"),
    "idleTimeout": Parameter(_TEXT, "a time without a sign of life after which its end is near, or infinity"),
    "grace": Parameter(_TEXT, "how much longer it lives then"),
    "delegationGrant": Parameter(_OBJECT, f"what it may start itself: {', '.join(_GRANT_KEYS)}"),
    "childGrant": Parameter(_OBJECT, "the same, of a worker that has such a grant"),
    "keepOutput": Parameter(_SWITCH, "keep the end of what it prints, for logs with output"),
    "key": Parameter(_TEXT, "the same key again is the same start"),
    "name": Parameter(_TEXT, "its new name"),
    "fresh": Parameter(_SWITCH, "do not go on with the session of the agent in it"),
    "state": Parameter(_TEXT, "ready, working or waiting"),
    "until": Parameter(_TEXT, "ready, idle, end, checkpoint or a state; end otherwise"),
    "timeout": Parameter(_TEXT, "for how long, such as 30s; 1min otherwise"),
    "all": Parameter(_SWITCH, "those of other managers too, as far as they share the scope"),
    "execute": Parameter(_SWITCH, "really do it; otherwise only tell what would be done"),
    "acknowledge": Parameter(_SWITCH, "really remove it"),
    "lines": Parameter(_NUMBER, "how many events, from 1 to 500, which more is taken for; 80 otherwise"),
    "output": Parameter(_SWITCH, "what it printed, instead of events"),
    "harness": Parameter(_TEXT, "command, or nothing"),
}

_SPAWN: Final = (
    "command id role task cwd readOnly writable noNetwork memoryMax memoryHigh tasksMax maxRuntime idleTimeout grace"
    " delegationGrant childGrant keepOutput key harness"
)

ACTIONS: Final = {
    "spawn": Action("start a worker", tuple(_SPAWN.split()), ("command",)),
    "list": Action("your workers that live", ("all",)),
    "history": Action("your workers, with all that have ended and are retained", ("all",)),
    "status": Action("where a worker stands, its unit and its processes; without id, all of yours", ("id", "all")),
    "stop": Action("end a worker for good, all its processes, and the workers that it has started", ("id",), ("id",)),
    "restart": Action("start a worker again with what it was started with", ("id", "fresh"), ("id",)),
    "rename": Action("give a worker another name", ("id", "name"), ("id", "name")),
    "adopt": Action("make a worker of another manager yours", ("id",), ("id",)),
    "release": Action("give up a worker, which goes on and can be adopted", ("id",), ("id",)),
    "renew": Action("keep a worker, or all of yours, from being ended for idleness", ("id",)),
    "pause": Action("freeze a worker", ("id",), ("id",)),
    "resume": Action("let a frozen worker go on", ("id",), ("id",)),
    "logs": Action(
        "what happened to a worker; with output what it printed instead", ("id", "lines", "output"), ("id",)
    ),
    "wait": Action("wait for a worker", ("id", "until", "timeout"), ("id",)),
    "notify": Action("from inside a worker: how it is", ("state",), ("state",)),
    "forget": Action(
        "remove the record of a worker that has ended, and of those that it had started",
        ("id", "acknowledge"),
        ("id",),
    ),
    "prune": Action(
        "remove the records of all of yours that have ended, and of those that they had started", ("id", "acknowledge")
    ),
    "cleanup": Action("end and remove what is due", ("execute",)),
    "doctor": Action("the worker service, and what the kernel can enforce"),
    "_heartbeat": Action("for the host of an agent, every minute: who is to be asked for a checkpoint"),
}

ELSEWHERE: Final = {
    "route": "there is nothing to choose from: a worker is the command that spawn gets",
    "capabilities": "there is one kind of worker, a command; doctor tells what the kernel can enforce",
    "profiles": "there are no launch profiles: spawn takes a command",
    "permissions": "there are no permission profiles: spawn takes readOnly, writable and noNetwork",
    "models": "models are chosen by the command of a worker",
    "variants": "models are chosen by the command of a worker",
    "versions": "nothing but this program itself is looked after here",
    "update": "nothing but this program itself is looked after here",
    "config": "`orchestrate config show` tells every setting",
}
"""Actions that such tools have and this one has not, and why."""

RETIRED: Final = {
    "profile": Retired((), "there are no launch profiles; give command"),
    "permissionProfile": Retired((), "give readOnly, writable and noNetwork"),
    "model": Retired((), "put it into command"),
    "effort": Retired(("off",), "put it into command"),
    "instructions": Retired((), "put them into task"),
    "subagents": Retired(("not-required",), "put it into command"),
    "requiresSubagents": Retired((False,), "put it into command"),
}

LIMITS: Final = {"memoryMax": "memory_max", "memoryHigh": "memory_high", "tasksMax": "tasks_max"}
LIFETIMES: Final = {"maxRuntime": "runtime_ms", "idleTimeout": "idle_ms", "grace": "grace_ms"}


def offered() -> list[str]:
    """The actions for a model: those that begin with `_` are for its host."""
    return [name for name in ACTIONS if not name.startswith("_")]


def unknown(action: str) -> str:
    """Why there is no such action."""
    if why := ELSEWHERE.get(action):
        return f"{action} is not available: {why}"
    return f"there is no such action; there are {', '.join(offered())}"


def schema() -> dict[str, Any]:
    """The JSON Schema of `params`, for whoever offers this to a model as a tool."""
    properties = {name: {**_SCHEMA[each.kind], "description": each.meaning} for name, each in PARAMETERS.items()}
    told = "; ".join(f"{name}: {ACTIONS[name].meaning}" for name in offered())
    action = {"type": "string", "enum": offered(), "description": told}
    return {
        "type": "object",
        "properties": {"action": action, **properties},
        "required": ["action"],
        "additionalProperties": False,
    }


def usage(program: str) -> str:
    """What `--help` prints."""
    lines = [
        f"usage: {program} < CALL.json",
        "",
        "Managed workers for agents: one JSON object on standard input, one line of JSON on standard output.",
        "",
        '  {"managerSessionId": "ID", "cwd": "/DIR", "params": {"action": "spawn", "command": ["make", "test"]}}',
        '  {"ok": true, "result": {"text": "…", "details": {…}}}',
        '  {"ok": false, "error": "…", "code": "worker_not_found"}, and exit code 1',
        "",
        "--schema prints the JSON Schema of params, for a tool of a model.",
        "",
        "actions, and what they take (* is needed):",
    ]
    for name, action in ACTIONS.items():
        taken = " ".join(each + "*" * (each in action.needs) for each in action.takes)
        lines += [f"  {name}: {action.meaning}", *([f"      {taken}"] if taken else [])]
    lines += ["", "parameters:"]
    lines += [f"  {name}: {each.meaning} ({each.kind})" for name, each in PARAMETERS.items()]
    return "\n".join(lines) + "\n"


def size(params: Mapping[str, Any], name: str) -> int | None:
    """A size or a number among the parameters, or None. Raises Invalid."""
    if name not in params:
        return None
    try:
        return amounts.size(str(params[name])) if name != "tasksMax" else amounts.tasks(str(int(params[name])))
    except ValueError as error:
        raise Invalid(f"{name} {error}") from error


def span(params: Mapping[str, Any], name: str) -> int | None:
    """A span of time among the parameters in milliseconds, or None. Raises Invalid."""
    if name not in params:
        return None
    try:
        return amounts.span(params[name])
    except ValueError as error:
        raise Invalid(f"{name} {error}") from error


def grant(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a worker may start itself, as the service takes it. Raises Invalid."""
    if given is None:
        return None
    said = {name: value for name, value in given.items() if value is not None}
    if unknown_ := sorted(said.keys() - set(_GRANT_KEYS)):
        raise Invalid(f"a grant has no {unknown_[0]}; it has {', '.join(_GRANT_KEYS)}")
    own, depth = said.get("maxLiveDirectChildren"), said.get("maxDepth", 1)
    everyone, deep = said.get("maxLiveDescendants", own), said.get("canSubdelegate", False)
    numbers = [value for value in (own, everyone, depth) if type(value) is int and value > 0]
    if len(numbers) != 3 or not isinstance(deep, bool):
        raise Invalid("a grant needs maxLiveDirectChildren, a whole number from 1 on; so are the other numbers in it")
    expiry = said.get("expiresAt")
    if expiry is not None and type(expiry) is not int:
        raise Invalid("expiresAt of a grant is not a time in milliseconds since 1970")
    found = {"children": own, "descendants": everyone, "depth": depth, "subdelegate": deep}
    return found if expiry is None else {**found, "expires_at": expiry}


def checkpoint(worker: Mapping[str, Any], now: int) -> dict[str, Any]:
    """What the host of an agent has to deliver to a worker that has been quiet for so long that it is asked to save.

    Its deadline is when it will be ended, whatever for; None: never, as things are.
    """
    idle, longest = worker.get("checkpoint_deadline_at"), worker.get("runtime_deadline_at")
    deadline = min((at for at in (idle, longest) if at is not None), default=None)
    left = "" if deadline is None else f"in {amounts.spoken(deadline - now)}"
    message = "You have given no sign of life for a while"
    if deadline is not None and deadline == idle:
        message += f" and will be ended {left}. Stop new work, save what you have, report how far you are,"
        message += " and ask to be renewed if you mean to work on quietly."
    else:
        message += f"; you will be ended {left}, for your time is over then." if left else ", which does not end you."
        message += " Save what you have, and report how far you are."
    return {
        "workerId": worker["id"],
        "runId": worker["incarnation"],
        "target": worker["name"],
        "attempt": worker.get("checkpoint_attempts", 0),
        "deadlineAt": deadline,
        "message": message,
    }
