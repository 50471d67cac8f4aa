# SPDX-License-Identifier: Apache-2.0
"""What the commands about workers print for a person. Pure: lines out of the data of their answers.

Labels, roles and what a worker printed come from anybody: `safe` is what every line goes through.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from agent_intercom.cli.orchestrate import limiting
from agent_intercom.cli.orchestrate.amounts import spoken
from agent_intercom.cli.output import printable, table
from agent_intercom.workers.contract import (
    LEFT_UNIT,
    STOP_IN_PROGRESS,
    TERMINAL,
    UNIT_CHANGED,
    Outcome,
    State,
    StopReason,
)

Worker = Mapping[str, Any]
"""`records.Worker` as JSON."""

HEADER: Final = ("WORKER", "ID", "ROLE", "STATE", "FOR", "OWNER", "NOTE")
_CHILDREN: Final = ("CHILD", "ID", "STATE", "NOTE")
_EVENTS: Final = ("TIME", "EVENT", "CODE")
_UP: Final = frozenset({State.READY, State.WORKING, State.WAITING})
UNTOLD: Final = "-"

_DONE: Final = {
    "restart": "started again",
    "adopt": "yours from now on",
    "release": "released: whoever shares its scope can adopt it",
    "pause": "paused; its times stand still",
    "resume": "goes on",
    "notify": "told",
}
_EMPTY: Final = "; nobody is left in its unit"
_SAYS_ENOUGH: Final = {"stop": frozenset({State.STOPPED}), "pause": frozenset({State.PAUSED})}
"""States that what was done says already."""

_REASONS: Final = {
    StopReason.REQUESTED: "on request",
    StopReason.IDLE: "was idle for too long",
    StopReason.RUNTIME: "its time was over",
    StopReason.START_FAILED: "",
    StopReason.PARENT: "what had started it ended",
    StopReason.RUN: "its run ended",
    StopReason.RESTART: "to be started again",
    StopReason.CHILDREN: "its command had left processes behind",
}
_OUTCOMES: Final = {Outcome.UNKNOWN: "", Outcome.OOM: "its memory was full", Outcome.TIMEOUT: ""}
_LEFT: Final = {
    LEFT_UNIT: "what had left the unit before may go on elsewhere",
    UNIT_CHANGED: "a unit of its name is somebody else's now, and was left alone",
}

_LACKING: Final = {"OOMPolicy": "where a worker's memory is full, what of it ends is not said"}


def safe(lines: Iterable[str]) -> Iterator[str]:
    """`lines`, of which none has a character that a terminal would obey."""
    return map(printable, lines)


def words(name: str) -> str:
    """A name of the contract, as a person reads it."""
    return name.replace("_", " ")


def started(
    result: Mapping[str, Any], now: int, *, kept: bool, confined: bool, program: str | None = None
) -> Iterator[str]:
    """What became of a start: `started` is said only of one that has told so itself.

    `kept` is whether what it prints is kept, `confined` whether it may not change every file. `program` is what a
    person calls to see more; None: an agent has read this, which has its own way.
    """
    worker = result["worker"]
    how = "started" if worker["state"] in _UP else "launched"
    stands = f"{words(worker['state'])}, generation {worker['generation']}"
    if result.get("repeated"):
        before = "could not be started" if never_began(worker) else "was started"
        yield f"{worker['name']}: {before} under this key before, nothing is started now: {stands}"
        if worker["state"] in TERMINAL and (note := _note(worker, now)):
            yield f"note: {note}"
    else:
        yield f"{worker['name']}: {how}, {stands}"
    if never_began(worker):
        yield f"id: {worker['id']}"
        return
    yield f"id: {worker['id']}, unit: {worker['unit']}"
    if worker.get("enforced"):
        yield f"enforced by the kernel: {', '.join(map(words, worker['enforced']))}"
    yield from _unenforced(result)
    if told := _until(worker, now):
        yield f"{told}; alive is what uses the processor, or says so (worker notify, worker renew)"
    shown = "logs with output" if program is None else f"`{program} worker logs {worker['name']} --output`"
    flag = "keepOutput" if program is None else "--keep-output"
    yield f"output: {f'kept, see {shown}' if kept else f'not kept ({flag} keeps it)'}"
    if confined:
        more = "writable" if program is None else "--writable DIR"
        yield f"scratch: AGENT_INTERCOM_SCRATCH, which is deleted when it ends; for what is to stay, {more} or {flag}"
    if program is not None:
        yield f"next: {program} worker status {worker['name']}"


def never_began(worker: Worker) -> bool:
    """Whether a worker has failed because nothing of it could be started."""
    return worker["state"] == State.FAILED and worker.get("stop_reason") == StopReason.START_FAILED


def listed(
    data: Mapping[str, Any], program: str | None, everyone: bool, now: int, *, history: bool = False
) -> Iterator[str]:
    """The table of workers, with `history` those that have ended, too.

    `program` is None for an agent, which has other words than a command line.
    """
    found = data["workers"]
    other = "all:true" if program is None else f"`{program} worker list --all{' --history' if history else ''}`"
    old = "action history" if program is None else "--history"
    if found:
        yield from table(HEADER, [row(worker, now, data.get("sessions")) for worker in found])
    elif everyone:
        yield "No workers live." if data["hidden"] else "No workers."
    else:
        yield f"You have no workers{' that live' if data['hidden'] else ''}. {other} shows those of others."
    if "health" not in data:
        yield from _set_aside(data)
    if not everyone and any(worker.get("grant") for worker in found):
        yield f"(what they have started themselves: {other})"
    if hidden := data["hidden"]:
        yield f"({hidden} more {'has' if hidden == 1 else 'have'} ended: {old})"
    if more := data.get("more"):
        yield f"({more} that ended before are left out: there are too many; prune removes what is not wanted any more)"


def status(data: Mapping[str, Any], now: int) -> Iterator[str]:
    """One worker: its record, its unit, its processes, and under `children` what it has started and lives."""
    worker = data["worker"]
    yield f"worker: {worker['name']}, {worker['id']}"
    yield f"state: {_state(worker)}, for {spoken(now - worker['entered_at'])}"
    if _silent(worker):
        yield "unverified: it says nothing of itself (`orchestrate worker notify`, from inside it)"
    if note := _note(worker, now, silence=False):
        yield f"note: {note}"
    begun = f"{time_of(worker['created_at'])}, {spoken(now - worker['created_at'])} ago"
    yield f"{'started' if worker['generation'] == 1 else 'first started'}: {begun}; generation {worker['generation']}"
    if worker["role"]:
        yield f"role: {worker['role']}"
    yield f"harness: {worker['harness']}"
    yield f"owner: {_owner(worker)}"
    if given := data.get("given"):
        yield f"command: {shlex.join(given['command'])}"
        yield f"directory: {given['directory']}"
        if limits := _limits(given):
            yield f"limits: {limits}"
    yield from _unenforced(data)
    if worker.get("run"):
        session = (data.get("sessions") or {}).get(worker["run"])
        yield f"run: {f'session {session}, ' if session else ''}orchestrate@{worker['run']}.service"
    if worker.get("parent"):
        yield f"started by: worker {worker['parent']}, depth {worker['depth']}"
    if grant := worker.get("grant"):
        many = f"{grant['children']} of its own, {grant['descendants']} with theirs"
        yield f"may start: {many}, {grant['depth']} deep"
    yield f"enforced by the kernel: {', '.join(map(words, worker.get('enforced') or ['nothing']))}"
    if worker["state"] not in TERMINAL | {State.BLOCKED} and not worker.get("run"):
        yield f"lives on for: {_spans(worker)}"
    yield f"unit: {worker['unit']}{_unit(data.get('unit'))}"
    if children := data.get("children"):
        rows = [(each["name"], each["id"], _state(each), _note(each, now)) for each in children]
        yield from table(_CHILDREN, rows)
    processes = data.get("processes") or []
    if processes:
        yield from table(("PID", "PROGRAM"), [(str(each["pid"]), each["name"]) for each in processes])


def _limits(given: Mapping[str, Any]) -> str:
    sizes = (("memory", given["memory_max"]), ("memory slowed down from", given["memory_high"]))
    parts = [f"{name} {size / 1_048_576:.0f} MiB" for name, size in sizes if size is not None]
    parts += [f"{given['tasks_max']} tasks"] if given["tasks_max"] is not None else []
    return ", ".join(parts)


def _unenforced(result: Mapping[str, Any]) -> Iterator[str]:
    if names := result.get("unenforced"):
        yield f"not enforced: {limiting.told(names)}"


def _spans(worker: Worker) -> str:
    """Its lifetimes, as they were given."""
    idle, runtime = worker.get("idle_ms"), worker.get("runtime_ms")
    grace = worker.get("grace_ms")
    quiet = f"{spoken(idle)} without a sign of life and {spoken(grace)} more" if idle and grace else ""
    longest = f"{spoken(runtime)} in all" if runtime else ""
    return ", ".join(filter(None, (quiet, longest))) or "ever"


def _set_aside(data: Mapping[str, Any]) -> Iterator[str]:
    if name := data.get("set_aside"):
        yield f"a damaged registry is set aside as {name}: workers that only it knew of are not listed. Remove it when"
        yield "it is of no use any more; `orchestrate worker cleanup` shows what of them lives"


def health(data: Mapping[str, Any]) -> Iterator[str]:
    """The worker service."""
    confined = ", ".join(map(words, data.get("confinement") or [])) or "nothing"
    manager = f"systemd {data['systemd']}" if data["systemd"] else "no service manager answers it"
    yield f"worker service: version {data['version']}, {data['live']} live, {manager}"
    yield f"the kernel can enforce: {confined}"
    if why := data.get("unusable"):
        yield f"its registry cannot be used ({words(why)}): no worker is started, shown or stopped; they go on"
    elif code := data.get("store"):
        yield f"its registry cannot be written ({words(code)}): workers go on and can be stopped, none can be started"
    for name in data.get("lacking") or []:
        yield f"this systemd knows no {name}= for scope units: {_LACKING.get(name, 'workers are without it')}"
    yield from _set_aside(data)
    if unknown := data.get("strays"):
        yield f"{strays(unknown)}: `orchestrate worker cleanup` shows them"
    if behind := data.get("left"):
        yield f"{left(behind)}: `orchestrate worker cleanup --yes` tries again"


def logs(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Events, oldest first."""
    if events:
        rows = [(time_of(event["at"]), words(event["kind"]), words(event["code"]) or UNTOLD) for event in events]
        yield from table(_EVENTS, rows)
    else:
        yield "No events."


def printed(output: str) -> Iterator[str]:
    """What a worker has printed, and nothing else: for a program, or a file. Tabs move no cursor where they may not."""
    for line in output.replace("\r\n", "\n").split("\n")[: None if output[-1:] not in {"", "\n"} else -1]:
        yield "\t".join(map(printable, line.split("\t")))


NOT_KEPT: Final = "its output is not kept (`start --keep-output`; of runs, that of programs, until the run is over)"
NOTHING: Final = "it has printed nothing"


def waited(worker: Worker, until: str, now: int) -> Iterator[str]:
    """Where a worker is that was waited for."""
    note = _note(worker, now)
    yield f"{worker['name']}: {_state(worker)}" + (f" ({note})" if note else "")


def changed(action: str, result: Mapping[str, Any], now: int) -> Iterator[str]:
    """What was done with a worker, and with those that it had started."""
    worker = result["worker"]
    before = action == "stop" and all(each["id"] != worker["id"] for each in result.get("stopped") or [])
    if action == "stop":
        done = _stopped(worker, before=before)
    else:
        done = f"now called {worker['name']}" if action == "rename" else _DONE[action]
    name = worker["id"] if action == "rename" else worker["name"]
    yield f"{name}: {done}{_aside(worker, '' if before else action, now)}"
    if result.get("recorded") is False:
        yield "The worker service cannot write this down now; it says so until it can (`orchestrate doctor`)."
    if action == "restart":
        yield from _unenforced(result)
    others = [each for each in result.get("stopped") or [] if each["id"] != worker["id"]]
    for each in others:
        done = "ended with it" if each["state"] in TERMINAL else "is being ended with it"
        told = each["state"] == State.STOPPED
        yield f"{each['name']}: " + ("stopped with it" if told else f"{done}{_aside(each, '', now)}")


def _stopped(worker: Worker, *, before: bool) -> str:
    """What became of a worker that was to be stopped; `before`: there was nothing to end any more."""
    if worker["state"] not in TERMINAL:
        return "is being ended"
    ended = "stopped" if worker["state"] == State.STOPPED else "has ended"
    return ("had ended before" if before else ended) + (_EMPTY if worker.get("error_code") != UNIT_CHANGED else "")


def _aside(worker: Worker, action: str, now: int) -> str:
    """What is to be known besides what was done."""
    if worker["state"] in _SAYS_ENOUGH.get(action, ()):
        left = _LEFT.get(str(worker.get("error_code")), "")
        told = ", ".join(filter(None, (left, "work tree changed" if worker.get("dirty") else "")))
        return f" ({told})" if told else ""
    note = _note(worker, now)
    return f" ({_state(worker)}{', ' + note if note else ''})"


def renewed(result: Mapping[str, Any], now: int) -> Iterator[str]:
    """What counts as alive again, and what lives and was left out."""
    workers, left = result["workers"], result.get("left") or []
    if not workers and not left:
        yield "Nothing to renew: you have no workers that live."
    for worker in workers:
        note = _note(worker, now)
        yield f"{worker['name']}: renewed" + (f", {note}" if note else "")
    for worker in left:
        yield f"{worker['name']}: not renewed ({', '.join(filter(None, (_state(worker), _note(worker, now))))})"


def left(count: int) -> str:
    """Scratch directories that are still there."""
    many = "1 scratch directory" if count == 1 else f"{count} scratch directories"
    return f"{many} of workers that have ended could not be removed"


def strays(count: int) -> str:
    """Workers that only the service manager knows of."""
    return f"{count} live worker{'' if count == 1 else 's'} of which there is no record"


def row(worker: Worker, now: int, sessions: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """A line of a table of workers."""
    since = spoken(now - worker["entered_at"])
    session = (sessions or {}).get(worker.get("run") or "")
    owner = f"run of {session}" if session else _owner(worker)
    return worker["name"], worker["id"], _role(worker), _state(worker), since, owner, _note(worker, now)


def _role(worker: Worker) -> str:
    return worker["role"] or UNTOLD


def _state(worker: Worker) -> str:
    state, reason = words(worker["state"]), worker.get("state_reason") or ""
    told = f"{state}: {words(reason)}" if reason else state
    return f"{told}, unverified" if worker.get("readiness") == "unverified" and worker["state"] in _UP else told


def _silent(worker: Worker) -> bool:
    """Whether nothing but its being there is known of a worker that runs."""
    return worker["state"] == State.REGISTERING and worker.get("readiness") == "unverified"


def _owner(worker: Worker) -> str:
    owner = worker["owner"]
    return f"{owner['kind']} {owner['name']}" if owner.get("name") else str(owner["kind"])


def _note(worker: Worker, now: int, *, silence: bool = True) -> str:
    """What is to be known of a worker: how it ended, or what will become of it, and when."""
    if worker["state"] in TERMINAL:
        return ", ".join(filter(None, _ending(worker)))
    silent = "says nothing of itself" if silence and _silent(worker) else ""
    return ", ".join(filter(None, (silent, _until(worker, now), words(worker.get("error_code") or ""))))


def _until(worker: Worker, now: int) -> str:
    """When a worker, or what its command left behind, will be ended by itself."""
    if worker["state"] == State.PAUSED:
        return "its times stand still"
    if worker["state"] == State.UNREACHABLE or worker.get("state_reason") == STOP_IN_PROGRESS:
        return ""
    if (children := worker.get("children_deadline_at")) is not None:
        how = ", ".join(filter(None, _ending(worker)))
        told = f"its command has ended ({how})" if how else "its command has ended"
        return f"{told}, what it left behind is ended in {spoken(children - now)}"
    idle, end = worker.get("checkpoint_deadline_at"), worker.get("runtime_deadline_at")
    asked = "asked for a checkpoint" if worker.get("checkpoint_requested_at") else ""
    if idle is None or (end is not None and end <= idle):
        told = "" if end is None else f"is ended at {_clock(end, now)} in any case"
    else:
        last = "" if end is None else f", at {_clock(end, now)} in any case"
        told = f"is ended at {_clock(idle, now)} if idle{last}"
    return ", ".join(filter(None, (asked, told)))


def _ending(worker: Worker) -> Iterator[str]:
    ended, error = worker.get("ended") or {}, str(worker.get("error_code") or "")
    outcome, number = str(ended.get("outcome") or ""), ended.get("exit_signal")
    yield _OUTCOMES.get(Outcome(outcome), "") if outcome in set(Outcome) else words(outcome)
    if (code := ended.get("exit_code")) is not None:
        yield f"exit {code}"
    elif number is not None and not _asked(worker, ended):
        yield f"killed by {_signal(number)}"
    elif number == signal.SIGKILL and outcome != Outcome.OOM:
        yield "had to be killed"
    reason = str(worker.get("stop_reason") or "")
    yield _REASONS[StopReason(reason)] if reason in set(StopReason) else words(reason)
    # The outcome and the reason have been told, in better words.
    told = {outcome, reason, str(Outcome.EXITED)}
    yield _LEFT.get(error) or (words(error) if error not in told else "")
    yield "work tree changed" if worker.get("dirty") else ""


def _asked(worker: Worker, ended: Mapping[str, Any]) -> bool:
    """Whether a worker's command was told to end before it did. It was not where only what it left behind was."""
    asked, at = worker.get("stop_requested_at"), ended.get("at")
    return bool(worker.get("stop_reason")) and (asked is None or at is None or asked <= at)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unit(unit: Mapping[str, Any] | None) -> str:
    """What systemd and the kernel say of a scope unit."""
    if unit is None:
        return ", gone"
    told = ", no service manager answers how it is"
    if unit["active"] is not None:
        told = f", {unit['active']} ({unit['sub']})"
    if unit.get("freezer") not in {None, "", "running"}:
        told += f", {unit['freezer']}"
    if (memory := unit.get("memory_bytes")) is not None:
        told += f", {memory / 1_048_576:.1f} MiB"
    if (tasks := unit.get("tasks")) is not None:
        told += f", {tasks} tasks"
    if (used := unit.get("cpu_usec")) is not None:
        told += f", {used / 1_000_000:.1f} s of processor"
    return told


def time_of(at: int) -> str:
    """A time for a person, or that nobody knows it."""
    try:
        return datetime.fromtimestamp(at / 1000).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return UNTOLD


def _clock(at: int, now: int) -> str:
    """A time to come, with its date where that is not today's."""
    told = time_of(at)[:-3]
    date, _, time = told.rpartition(" ")
    return time if date == time_of(now)[:-3].rpartition(" ")[0] else told
