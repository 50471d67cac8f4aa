# SPDX-License-Identifier: Apache-2.0
"""What `list`, `status`, `events` and `usage` print for a person. Pure: lines out of the data of their answers.

Names, states and words of every kind come out of files that anybody may have written: no line has a character in it
that a terminal would obey, and none is made two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec

from agent_intercom.cli.orchestrate import limiting
from agent_intercom.cli.orchestrate.steps import ago
from agent_intercom.cli.output import printable, table
from agent_intercom.orchestration import snapshot
from agent_intercom.orchestration.contract import REVIEWER, ROLES, RoleState, Workflow
from agent_intercom.orchestration.reader import Overview
from agent_intercom.orchestration.standing import MESSAGE, Awaited
from agent_intercom.tui.view import count, moment, told, words

_LIST: Final = ("SESSION", "RUN", "STATE", "ROUND", "WORKERS", "TOKENS", "NOW", "PROJECT")
_ROLE_HEADER: Final = ("ROLE", "WORKER", "STATE", "WORK", "FOR", "LAST REPORT", "TOKENS", "CONTEXT", "MODEL")
_EVENTS: Final = ("NUMBER", "TIME", "ROLE", "EVENT", "ROUND", "STATUS")
_USED: Final = ("CALLS", "INPUT", "OUTPUT", "CACHE READ", "CACHE WRITE", "TOGETHER", "COST")
_UNTOLD: Final = "-"
_HUGE: Final = 1e15
"""From here on a cost has more digits than anybody reads, and more than are known."""

_SESSION: Final = ".jsonl"
_UP: Final = frozenset({"active", "activating", "reloading"})
_COMING: Final = frozenset({Workflow.STARTING, Workflow.CONNECTING, RoleState.RESTARTING, RoleState.RECOVERING})

_WHY: Final = {
    "legacy-run": "The run is of a time before brokers: nothing more is known of it.",
    "unavailable_legacy_coordination": "The run is of a time before brokers: nothing was counted.",
    "temporarily-unavailable": "Its database is being written just now; try again.",
}


_Given = ParamSpec("_Given")


def _printable(lines: Callable[_Given, Iterator[str]]) -> Callable[_Given, Iterator[str]]:
    """`lines`, each of them safe for a terminal as a whole."""

    @functools.wraps(lines)
    def safe(*given: _Given.args, **named: _Given.kwargs) -> Iterator[str]:
        return map(printable, lines(*given, **named))

    return safe


@_printable
def list_lines(rows: Sequence[Sequence[str]], everything: bool, program: str, total: int) -> Iterator[str]:
    """The table of runs."""
    if not rows:
        more = "" if everything else f" `{program} list --all` shows those that have ended."
        yield ("No runs." if everything else "No runs live.") + more
        return
    yield from table(_LIST, rows)
    if total > len(rows):
        yield f"({total - len(rows)} more, which are older)"


@_printable
def status_lines(
    data: Mapping[str, Any], overview: Overview | None, waiting: Sequence[Awaited], now_ms: int
) -> Iterator[str]:
    """Where a run stands, who works or waits, and what to do next."""
    yield f"run: {data['session']}, {data['run_id']}, {_life(data, now_ms)}"
    if data["unit"] is not None:
        yield f"unit: orchestrate@{data['unit']}.service"
    yield f"project: {data['project']}"
    profile = data["execution_profile"]["name"]
    if profile:
        yield f"profile: {profile} ({data['execution_profile']['source']})"
    shown = data["broker"]
    if shown is None or overview is None:
        yield f"state: {_WHY[data['availability']]}"
        yield from table(("ROLE", "MODEL"), [(role["name"], _model(role, data)) for role in data["roles"]])
        return
    workflow, used = shown["workflow"], shown["usage"]
    since = ago(workflow["updated_at"], now_ms)
    changed = f", last changed {since} ago" if since else ""
    state = words(workflow["state"]) + ("" if data["live"] else " when it ended")
    yield f"state: {state}, round {workflow['round']}, {words(workflow['implementation_flow'])} flow{changed}"
    yield from _unit_lines(data)
    limit = f" of {count(used['soft_total_tokens'])}" if used["soft_total_tokens"] else ""
    cost = snapshot.added_up(role["cost_total"] for role in shown["roles"])
    yield f"tokens: {count(used['total_tokens'])}{limit}, {_calls(used['provider_calls'])}, cost {_cost(cost)}"
    yield from _budget_lines(data)
    yield from _round_lines(shown)
    roles = sorted(data["roles"], key=lambda role: _place(role["name"]))
    yield from table(_ROLE_HEADER, [_role(role, data, overview, now_ms) for role in roles])
    yield from _place_lines(data, waiting)
    for each in waiting:
        since = ago(each.since, now_ms)
        yield f"now: {each.phrase}" + (f" (since {since})" if since else "")
    for step in data["next"]:
        yield f"next: {step['why']}: {step['command']}"


@_printable
def event_lines(data: Mapping[str, Any], program: str, older: int, commands: Mapping[str, str]) -> Iterator[str]:
    """Events, oldest first. `older` were left out before them; `commands` has actions by the ids of commands."""
    cursor = data["cursor"]
    roles = "".join(f" --role {role}" for role in data["roles"])
    again = f"{program} events {data['session']} --run {data['run_id']}{roles} --after"
    if older:
        yield f"({older} older: {again} 0)"
    if cursor["gap"]:
        yield f"(events before {cursor['earliest_retained']} are not retained)"
    if not data["events"]:
        yield "No events."
        return
    yield from table(
        _EVENTS,
        [
            (
                str(event["sequence"]),
                f"{event['timestamp'][:10]} {moment(event['timestamp'])}",
                event["role"] or _UNTOLD,
                what,
                _number(event["round"]),
                status,
            )
            for event in data["events"]
            for what, status in [told(event["event"], event["status"], event["delivery_id"], commands)]
        ],
    )
    if cursor["truncated"]:
        yield f"(more: {again} {cursor['next']})"


@_printable
def usage_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """What roles and assignments used."""
    yield f"run: {data['session']}, {data['run_id']}"
    if not data["available"]:
        yield f"usage: {_WHY[data['availability']]}"
        return
    rows = [
        (role["role"], *_used(role["cumulative"]), _percent(role["cumulative"]["context_percent"]))
        for role in sorted(data["roles"], key=lambda role: _place(role["role"]))
    ]
    yield from table(
        ("ROLE", *_USED, "CONTEXT"), [*rows, ("all", *_used(data["cumulative"]), "")] if len(rows) > 1 else rows
    )
    yield from _budget_lines(data)
    found = [(role["role"], each) for role in data["roles"] for each in role["assignments"]]
    if not found:
        yield "No assignment has been reported yet."
        return
    found.sort(key=lambda one: (one[1]["round"], _place(one[0])))
    yield ""
    nothing = (_UNTOLD,) * (len(_USED) + 1)
    rows = []
    for role, each in found:
        used = each["usage"]
        cells = nothing if used is None else (*_used(used), _number(used["peak_context_tokens"]))
        rows.append((str(each["round"]), role, words(each["kind"]), *cells))
    yield from table(("ROUND", "ROLE", "KIND", *_USED, "PEAK CONTEXT"), rows)
    if data["truncated"]:
        yield f"(the newest {data['limit']} assignments; there are more)"
    yield "What providers reported; a dash is what they did not. The cost is no invoice."


def _life(data: Mapping[str, Any], now_ms: int) -> str:
    since = ago(data["created_at"], now_ms)
    started = f", started {since} ago" if since else ""
    if data["unit"] is not None:
        return f"lives{started}"
    if data["live"]:
        return f"lives in tmux, under the program that started it{started}"
    return f"has ended{started}"


def _unit_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """What the service manager says that the database does not."""
    broker = data["broker_unit"]
    if broker is not None:
        text = f" ({broker['status_text']})" if broker["status_text"] else ""
        if broker["active"] == "failed":
            yield f"broker: failed, {broker['result']}{text}"
        elif broker["active"] == "active":
            yield f"broker: runs{text}"
        else:
            yield f"broker: {broker['active']}; the first worker that connects starts it"
    for worker in data["workers"] or ():
        if worker["active"] not in _UP:
            yield f"worker: {worker['role']} {_ended(worker)}"
        elif worker["exit"]:
            # Its unit goes on with what it has started.
            yield f"worker: {worker['role']} {_how(worker)}; what it left behind is ended within seconds"
    for role, silent in data["silent"].items():
        yield f"worker: {role}: its program {_fell_silent(silent)} ({words(silent['kind'])}, round {silent['round']})"
    yield from _enforced(data["workers"] or ())
    for worker in data["workers"] or ():
        if worker.get("unenforced"):
            yield f"not enforced: {worker['role']}: {limiting.told(worker['unenforced'])}"


def _ended(worker: Mapping[str, Any]) -> str:
    """How a worker ended, as far as anybody can tell."""
    if worker["active"] not in {"inactive", "failed"}:
        return f"is {worker['active']}"
    return _how(worker)


def _how(worker: Mapping[str, Any]) -> str:
    told = worker["exit"] or {"code": None, "signal": None}
    why = f" ({worker['result']})" if worker["result"] not in {"", "success", "exit-code", "signal"} else ""
    if told["signal"] is not None:
        return f"has ended, by signal {told['signal']}{why}"
    if told["code"] is not None:
        return f"has ended, with exit status {told['code']}{why}"
    return f"has ended{why}; nobody can tell how"


def _fell_silent(silent: Mapping[str, Any]) -> str:
    """How a program ended that has not reported."""
    if silent["signal"] is not None:
        return f"was ended by signal {silent['signal']}, without a report"
    if silent["code"] is not None:
        return f"ended with exit status {silent['code']}, without a report"
    return "could not be run"


def _enforced(workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the kernel refuses the workers that run, roles with the same in one line."""
    roles: dict[str, list[str]] = {}
    for worker in workers:
        if worker["active"] in _UP:
            roles.setdefault(", ".join(worker["enforced"]) or "nothing", []).append(worker["role"])
    for what, whose in roles.items():
        yield f"enforced: {' and '.join(whose)}: {what}"


def _round_lines(shown: Mapping[str, Any]) -> Iterator[str]:
    """What was decided for this round, and what was crossed in it."""
    limit = (shown["workflow"].get("continuation") or {}).get("max_repair_rounds")
    if limit is not None:
        yield f"repair rounds: {shown['workflow']['continuation']['admitted_repair_rounds']} of {limit}"
    for each in shown["specialist_activations"]:
        forced = ", forced" if each["forced"] else ""
        verb = "takes part" if each["decision"] == "run" else "skips this round"
        yield f"{each['role']}: {verb} ({each['rule_id']}{forced})"
    for role in shown["roles"]:
        for fact in role["assignment_guardrails"]:
            what = f"{words(fact['metric'])} {fact['observed']:g} of {fact['threshold']:g}"
            yield f"guardrail: {role['role']}, {fact['level']}: {what} (nothing is stopped by it)"


def _budget_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Every threshold that is crossed; the worker's own findings are told elsewhere."""
    for each in data["budget_crossed"]:
        who = "run" if each["role"] is None else each["role"]
        whose = f"{who}'s assignment" if each["scope"] == "assignment" else who
        what = f"{words(each['metric'])} {_measure(each, 'observed')} of {_measure(each, 'threshold')}"
        yield f"over budget: {whose}, {each['level']}: {what} (nothing is stopped by it)"


def _measure(crossed: Mapping[str, Any], name: str) -> str:
    metric, value = crossed["metric"], crossed[name]
    if metric.endswith("_tokens"):
        return count(int(value))
    return _cost(value) if metric == "cost_total" else f"{value:g}%" if metric == "context_percent" else f"{value:,}"


def _place_lines(data: Mapping[str, Any], waiting: Sequence[Awaited]) -> Iterator[str]:
    """Where external workers that are away connect to, and where what was said can be read."""
    here = {row["role"] for row in data["broker"]["roles"] if row["connected"]}
    for role, place in data["external"].items():
        if place["socket"] is not None and role not in here:
            yield (
                f"external: {role} is started by whoever runs it; it connects to {place['socket']} as generation "
                f"{place['generation']}, with the token in {place['token_file']}"
            )
    sessions: Mapping[str, str] = data["sessions"]
    if sessions:
        yield f"sessions: {data['paths']['coordination']}/sessions/ROLE has what the agent of a role said and did"
    for role in [each.role or "" for each in waiting if each.what == MESSAGE and each.role in sessions]:
        yield f"read: why {role} stopped without a report, such as an error of its provider: {sessions[role]}"
    said = sessions.get(REVIEWER, "")
    if data["broker"]["workflow"]["state"] in {Workflow.READY, Workflow.NEEDS_ATTENTION} and said.endswith(_SESSION):
        yield f"read: what the {REVIEWER} said: {said}"
    for role, file in sorted(data["reports"].items(), key=lambda item: _place(item[0])):
        yield f"read: what {role} reported last: {file}"


def _coming(role: str, row: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Whether a worker that is not connected is only on its way: its unit runs, and nobody has missed it yet."""
    runs = any(worker["role"] == role and worker["active"] in _UP for worker in data["workers"] or ())
    begins = not _COMING.isdisjoint({data["broker"]["workflow"]["state"], row["state"]})
    return bool(runs and begins and not row["connected"])


def _place(role: str) -> tuple[int, str]:
    """Roles in the order in which they are made, those that nobody knows last."""
    return (ROLES.index(role) if role in ROLES else len(ROLES), role)


def _role(role: Mapping[str, Any], data: Mapping[str, Any], overview: Overview, now_ms: int) -> Sequence[str]:
    """A role as a row of the table. Of a run that has ended, nothing is told that holds for now."""
    shown, row = data["broker"], role["broker_state"]
    if row is None:
        return (role["name"], *(_UNTOLD,) * (len(_ROLE_HEADER) - 2), _model(role, data))
    assignment, active = row["assignment"], overview.active.get(role["name"])
    work = _UNTOLD if assignment is None else f"{words(assignment['kind'])} r{assignment['round']}"
    if assignment is not None and assignment["state"] not in {"accepted", "completed"}:
        work += f", {assignment['state']}"
    report = overview.reports.get(role["name"])
    last = _UNTOLD if report is None else f"{words(report.verdict or report.kind)} r{report.round}"
    coming = _coming(role["name"], row, data)
    link = "up" if row["connected"] else "starting" if coming else "away"
    link += f", g{row['generation']}" + (", external" if role["name"] in data["external"] else "")
    paused = any(worker["role"] == role["name"] and worker.get("paused") for worker in data["workers"] or ())
    state = "starting" if coming else "paused" if paused else words(row["state"])
    soft = shown["usage"]["soft_role_tokens"]
    tokens = count(row["total_tokens"]) + (f" of {count(soft)}" if soft else "")
    if role["name"] in data["programs"] and not row["total_tokens"]:
        # A program need not say what it uses.
        tokens = _UNTOLD
    return (
        role["name"],
        link if data["live"] else _UNTOLD,
        state + (f", {words(row['activity'])}" if row["activity"] and active and not paused else ""),
        work,
        ago(active.created_at, now_ms) if active and data["live"] else "",
        last,
        tokens + ("!" if role["name"] in data["budget_exceeded"] else ""),
        _percent(row["context_percent"]),
        _model(role, data),
    )


def _model(role: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if (program := data["programs"].get(role["name"])) is not None:
        return f"program {program}".rstrip()
    return f"{role['provider']}/{role['model']} {role['thinking']}"


def _used(used: Mapping[str, Any]) -> tuple[str, ...]:
    names = (
        "provider_calls",
        "input_tokens",
        "output_tokens",
        "cache_read_tokens",
        "cache_write_tokens",
        "operational_tokens",
    )
    return (*(_number(used[name]) for name in names), _cost(used["cost_total"]))


def _cost(value: float) -> str:
    return f"{value:.4f}" if value < _HUGE else f"{value:.3g}"


def _number(value: int | None) -> str:
    return _UNTOLD if value is None else f"{value:,}"


def _calls(value: int | None) -> str:
    return "1 call" if value == 1 else f"{_number(value)} calls"


def _percent(value: float | None) -> str:
    return _UNTOLD if value is None else f"{value:.0f}%"
