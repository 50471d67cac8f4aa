# SPDX-License-Identifier: Apache-2.0
"""What the commands about workers print for a person. Pure: lines out of the data of their answers.

Labels, roles and what a worker printed come from anybody: `safe` is what every line goes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from agent_intercom.cli.orchestrate.amounts import spoken
from agent_intercom.cli.output import printable, table
from agent_intercom.workers.contract import TERMINAL, State

Worker = Mapping[str, Any]
"""`records.Worker` as JSON."""

_HEADER: Final = ("WORKER", "ID", "ROLE", "STATE", "FOR", "OWNER", "NOTE")
_EVENTS: Final = ("TIME", "EVENT", "CODE")
_UP: Final = frozenset({State.READY, State.WORKING, State.WAITING})
_UNTOLD: Final = "-"

_DONE: Final = {
    "stop": "stopped, and no process of it is left",
    "restart": "started again",
    "adopt": "yours from now on",
    "release": "released: whoever shares its scope can adopt it",
    "pause": "paused",
    "resume": "goes on",
    "notify": "told",
}


_LACKING: Final = {"OOMPolicy": "where a worker's memory is full, what of it ends is not said"}


def safe(lines: Iterable[str]) -> Iterator[str]:
    """`lines`, of which none has a character that a terminal would obey."""
    return map(printable, lines)


def words(name: str) -> str:
    """A name of the contract, as a person reads it."""
    return name.replace("_", " ")


def started(worker: Worker, program: str) -> Iterator[str]:
    """What became of a start: `started` is said only of one that has told so itself."""
    how = "started" if worker["state"] in _UP else "launched"
    yield f"{worker['name']}: {how}, {words(worker['state'])}, generation {worker['generation']}"
    yield f"id: {worker['id']}, unit: {worker['unit']}"
    if worker.get("enforced"):
        yield f"enforced by the kernel: {', '.join(map(words, worker['enforced']))}"
    yield f"next: {program} worker status {worker['id']}"


def listed(data: Mapping[str, Any], program: str, now: int, everyone: bool, history: bool) -> Iterator[str]:
    """The table of workers."""
    found = data["workers"]
    if found:
        yield from table(_HEADER, [_row(worker, now) for worker in found])
    else:
        yield (
            "No workers." if everyone else f"You have no workers. `{program} worker list --all` shows those of others."
        )
    if data["hidden"] and not history:
        yield f"({data['hidden']} more, which have ended: --history)"


def status(data: Mapping[str, Any], now: int) -> Iterator[str]:
    """One worker: its record, its unit and its processes."""
    worker = data["worker"]
    yield f"worker: {worker['name']}, {worker['id']}"
    yield f"state: {_state(worker)}, for {spoken(now - worker['updated_at'])}"
    if note := _note(worker, now):
        yield f"note: {note}"
    yield f"role: {_role(worker)}, generation {worker['generation']}"
    yield f"owner: {_owner(worker)}"
    if worker.get("run"):
        yield f"run: orchestrate@{worker['run']}.service"
    if worker.get("parent"):
        yield f"started by: worker {worker['parent']}, depth {worker['depth']}"
    if grant := worker.get("grant"):
        many = f"{grant['children']} of its own, {grant['descendants']} with theirs"
        yield f"may start: {many}, {grant['depth']} deep"
    yield f"enforced by the kernel: {', '.join(map(words, worker.get('enforced') or ['nothing']))}"
    yield f"unit: {worker['unit']}{_unit(data.get('unit'))}"
    processes = data.get("processes") or []
    if processes:
        yield from table(("PID", "PROGRAM"), [(str(each["pid"]), each["name"]) for each in processes])


def health(data: Mapping[str, Any]) -> Iterator[str]:
    """The worker service."""
    confined = ", ".join(map(words, data.get("confinement") or [])) or "nothing"
    manager = f"systemd {data['systemd']}" if data["systemd"] else "no service manager answers it"
    yield f"worker service: version {data['version']}, {data['live']} live, {manager}"
    yield f"the kernel can enforce: {confined}"
    for name in data.get("lacking") or []:
        yield f"this systemd knows no {name}= for scope units: {_LACKING.get(name, 'workers are without it')}"
    if strays := data.get("strays"):
        yield f"{_strays(strays)}: `orchestrate worker cleanup` shows them"


def logs(data: Mapping[str, Any], wanted: bool) -> Iterator[str]:
    """Events, oldest first, and the end of what the worker printed."""
    events = data["events"]
    if events:
        rows = [(_time(event["at"]), words(event["kind"]), words(event["code"]) or _UNTOLD) for event in events]
        yield from table(_EVENTS, rows)
    else:
        yield "No events."
    if not wanted:
        return
    output = data.get("output")
    if output is None:
        yield "Its output is not kept (`start --keep-output`; of runs, that of programs, until the run is over)."
        return
    yield "output:" if output else "It has printed nothing."
    for line in output.replace("\r\n", "\n").expandtabs(4).splitlines():
        yield f"  {line}"


def waited(worker: Worker, until: str, now: int) -> Iterator[str]:
    """Where a worker is that was waited for."""
    note = _note(worker, now)
    yield f"{worker['name']}: {_state(worker)}" + (f" ({note})" if note else "")


def changed(action: str, result: Mapping[str, Any], now: int) -> Iterator[str]:
    """What was done with a worker, and with those that it had started."""
    worker = result["worker"]
    done = f"now called {worker['name']}" if action == "rename" else _DONE[action]
    name = worker["id"] if action == "rename" else worker["name"]
    note = _note(worker, now)
    yield f"{name}: {done} ({_state(worker)}{', ' + note if note else ''})"
    others = [each for each in result.get("stopped") or [] if each["id"] != worker["id"]]
    for each in others:
        yield f"{each['name']}: stopped with it ({_state(each)})"


def renewed(workers: Sequence[Worker], now: int) -> Iterator[str]:
    """What counts as alive again."""
    if not workers:
        yield "Nothing to renew: you have no workers that live."
    for worker in workers:
        note = _note(worker, now)
        yield f"{worker['name']}: renewed" + (f", {note}" if note else "")


def removed(word: str, workers: Sequence[Any]) -> Iterator[str]:
    """What is gone."""
    for worker in workers:
        yield f"{word} {_named(worker)}"
    if not workers:
        yield "Nothing was removed."


def prunable(workers: Sequence[Worker], again: str, now: int) -> Iterator[str]:
    """What a prune would remove."""
    if not workers:
        yield "Nothing to remove: no worker of yours that has ended is retained."
        return
    yield from table(_HEADER, [_row(worker, now) for worker in workers])
    yield f"Would remove {len(workers)}. Nothing was removed; `{again} --yes` looks again, and removes what is there."


def cleanup(result: Mapping[str, Any], execute: bool, again: str, now: int) -> Iterator[str]:
    """What a cleanup did, or would do."""
    found = result["candidates"]
    if found:
        yield from table(("WORKER", "WHAT", "WHY"), [_candidate(each) for each in found])
    unknown = result.get("strays") or []
    if unknown:
        yield from table(("UNIT", "RUN", "PROGRAMS"), [_stray(each) for each in unknown])
        yield f"{_strays(len(unknown))}; it may be somebody's work."
    left = len(unknown) - len(result.get("strays_ended") or [])
    if not execute:
        what = f"{len(found)} due" if found else "Nothing is due"
        yield f"{what}. Nothing was done{f'; `{again} --yes` does it' if found else ''}."
    else:
        handled = result["handled"]
        yield f"Handled {handled if isinstance(handled, int) else len(handled)}."
    if left:
        yield f"`{again} --yes --override` ends {'them' if left > 1 else 'it'}, if you may."
    elif unknown:
        yield f"Ended {len(unknown)} of them."
    if deferred := result.get("deferred"):
        yield f"{deferred if isinstance(deferred, int) else len(deferred)} more are left for the next time."


def _strays(count: int) -> str:
    return f"{count} live worker{'' if count == 1 else 's'} of which there is no record"


def _stray(each: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(each["unit"]), str(each.get("run") or _UNTOLD), ", ".join(each.get("programs") or []) or _UNTOLD


def _candidate(each: Mapping[str, Any]) -> tuple[str, str, str]:
    what = str(each.get("work") or each.get("action") or _UNTOLD)
    return _named(each), words(what), words(str(each.get("reason") or "")) or _UNTOLD


def _named(worker: Any) -> str:
    """A worker by what the service tells of it."""
    if not isinstance(worker, Mapping):
        return str(worker)
    known = (worker.get("name"), worker.get("id"), worker.get("worker"))
    return ", ".join(str(part) for part in known if part) or _UNTOLD


def _row(worker: Worker, now: int) -> tuple[str, ...]:
    since = spoken(now - worker["updated_at"])
    return worker["name"], worker["id"], _role(worker), _state(worker), since, _owner(worker), _note(worker, now)


def _role(worker: Worker) -> str:
    return f"{worker['driver']}/{worker['role']}" if worker["role"] else str(worker["driver"])


def _state(worker: Worker) -> str:
    state, reason = words(worker["state"]), worker.get("state_reason") or ""
    told = f"{state}: {words(reason)}" if reason else state
    return f"{told}, unverified" if worker.get("readiness") == "unverified" and worker["state"] in _UP else told


def _owner(worker: Worker) -> str:
    owner = worker["owner"]
    return f"{owner['kind']} {owner['name']}" if owner.get("name") else str(owner["kind"])


def _note(worker: Worker, now: int) -> str:
    """What is to be known of a worker: how it ended, or what will become of it, and until when."""
    parts: list[str] = []
    if worker["state"] in TERMINAL:
        parts += _ending(worker)
    else:
        if (due := worker.get("checkpoint_deadline_at")) is not None and worker.get("checkpoint_requested_at"):
            parts.append(f"asked for a checkpoint, ended in {spoken(due - now)}")
        elif (due := worker.get("idle_deadline_at")) is not None:
            parts.append(f"idle in {spoken(due - now)}")
        if (due := worker.get("runtime_deadline_at")) is not None:
            parts.append(f"time over in {spoken(due - now)}")
    if worker.get("error_code"):
        parts.append(words(worker["error_code"]))
    return ", ".join(parts)


def _ending(worker: Worker) -> Iterator[str]:
    ended = worker.get("ended") or {}
    if (code := ended.get("exit_code")) is not None:
        yield f"exit {code}"
    elif (number := ended.get("exit_signal")) is not None:
        yield f"signal {number}"
    elif outcome := ended.get("outcome"):
        yield words(outcome)
    if reason := worker.get("stop_reason"):
        yield words(reason.replace("-", " "))
    if worker.get("dirty"):
        yield "work tree changed"


def _unit(unit: Mapping[str, Any] | None) -> str:
    """What systemd and the kernel say of a scope unit."""
    if unit is None:
        return ", gone"
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


def _time(at: int) -> str:
    try:
        return datetime.fromtimestamp(at / 1000).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return _UNTOLD
