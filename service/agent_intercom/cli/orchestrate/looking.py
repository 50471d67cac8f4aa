# SPDX-License-Identifier: Apache-2.0
"""`list`, `status`, `events` and `usage`: what runs are doing and did (orchestration spec, section 11.3).

Everything comes from the runs' files, of live runs as of retained ones; no broker is connected to. Only `status` asks
the service manager, for the units of the one live run that it is about, and does without its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_intercom.cli.orchestrate import telling
from agent_intercom.cli.orchestrate.answer import Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.resolving import resolved, ways_out
from agent_intercom.cli.orchestrate.steps import steps as next_steps
from agent_intercom.orchestration import harness, places, reader, rows, runs, runtime, snapshot, standing, tmux
from agent_intercom.orchestration.contract import MAX_EVENTS as MAX_RETAINED
from agent_intercom.orchestration.contract import REVIEWER, Workflow
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.tui.view import CONTROL, count, folded, words
from agent_intercom.workers import pauses
from agent_intercom.workers.bridge import traces

LEGACY: Final = "legacy-run"
BUSY: Final = "temporarily-unavailable"
AVAILABLE: Final = "available"
MAX_FILES: Final = 100
NEWEST: Final = 50
"""How many events are shown where nobody says how many."""

_ENDED: Final = "ended"
_IN_TMUX: Final = "in tmux"


def list_runs(options: argparse.Namespace) -> Answer:
    """`list`: the runs that live; with `--all`, also those that have ended."""
    with ways_out(options):
        return _list(options)


def _list(options: argparse.Namespace) -> Answer:
    live = runs.live_runs(os.environ)
    entries, issues = list(live.entries), list(live.issues)
    known = {entry.directory for entry in entries} | {issue.directory for issue in issues}
    roots = places.roots(os.environ)
    hosted = tmux.hosted(os.environ)
    others = known | hosted.keys()
    total, truncated = len(others), False
    if options.all:
        retained = runs.newest(roots)
        entries += [entry for entry in retained.entries if entry.directory not in known]
        issues += [issue for issue in retained.issues if issue.directory not in known]
        truncated = retained.truncated
        total = retained.total + sum(not runs.lies_in(directory, roots) for directory in others)
    for directory in sorted(hosted.keys() - {entry.directory for entry in entries}):
        try:
            entries.append(runs.at(directory))
        except Refusal as refusal:
            issues.append(runs.Issue(hosted[directory], refusal.text, directory))
    shown: list[JsonObject] = []
    cells: list[Sequence[str]] = []
    for entry in entries[: runs.MAX_ITEMS]:
        data, row = _listed(entry, hosted)
        shown.append(data)
        cells.append(row)
    for issue in issues[: runs.MAX_ITEMS - len(shown)]:
        shown.append(_issue(issue))
        cells.append((issue.name, os.path.basename(issue.directory), "unreadable", "", "", "", issue.text, ""))
    truncated = truncated or len(shown) < len(entries) + len(issues)
    data = {"sessions": shown, "truncated": truncated, "total_sessions": total}
    return Answer(data, telling.list_lines(cells, options.all, options.program, total))


def status(options: argparse.Namespace) -> Answer:
    """`status`: where a run stands, whether it lives or not."""
    entry = resolved(options)
    with ways_out(options, entry):
        overview, availability = _overview(entry)
        shown = None if overview is None else snapshot.broker(overview)
        crossed = [] if overview is None else snapshot.crossed(overview)
        over = [] if overview is None else snapshot.over(overview)
    lives = entry.unit is not None or runs.in_tmux(entry, os.environ)
    broker_unit, workers = _units(entry)
    paused = [worker["role"] for worker in workers or () if worker.get("paused")]
    waiting = standing.awaited(shown, _begun(overview), paused) if shown and overview and lives else []
    ready = shown is not None and shown["workflow"]["state"] == Workflow.READY
    steps: list[JsonObject] = []
    if entry.unit is not None:
        new_id, down = os.urandom(16).hex(), _down(entry, workers)
        printing = {
            role: f"{entry.unit}/{role}"
            for role, record in entry.manifest.roles.items()
            if record.harness == harness.COMMAND
        }
        found = next_steps(
            waiting,
            entry.session,
            options.program,
            ready=ready,
            down=down,
            new_id=new_id,
            printing=printing,
            paused={role: f"{entry.unit}/{role}" for role in paused},
        )
        steps = list(found)
    files, more_files = _files(entry.directory)
    by_role = {} if shown is None else {row["role"]: row for row in shown["roles"]}
    rpc = {"rpc_state": None, "rpc_registry": None} if snapshot.transport(entry.manifest) == "rpc" else {}
    data: JsonObject = {
        "session": entry.session,
        "run_id": entry.run_id,
        "created_at": entry.manifest.created_at,
        **snapshot.provenance(entry.manifest),
        "paths": {**snapshot.paths(entry.manifest), "observer_socket": _socket(entry)},
        "roles": [
            {**role, "broker_state": by_role.get(role["name"]), **rpc} for role in snapshot.role_objects(entry.manifest)
        ],
        "panes": [],
        "broker": shown,
        "files": files,
        "truncated": {"panes": False, "files": more_files},
        "availability": availability,
        "host": entry.host,
        "unit": entry.unit,
        "live": lives,
        "broker_unit": broker_unit,
        "workers": workers,
        "budget_exceeded": over,
        "budget_crossed": [each._asdict() for each in crossed],
        "external": _external(entry, shown),
        "sessions": _sessions(entry, shown, waiting),
        "programs": _programs(entry),
        **_traces(entry),
        "awaited": [each._asdict() for each in waiting],
        "next": steps,
    }
    return Answer(data, telling.status_lines(data, overview, waiting, int(time.time() * 1000)))


def events(options: argparse.Namespace) -> Answer:
    """`events`: what has happened in a run, of all roles and of none, or of some roles only.

    Programs get it from an event on; a person who does not say which gets the newest, with every sign of life of a
    worker folded into its newest one.
    """
    if options.last is not None and options.limit is not None:
        raise CommandFailure("invalid_arguments", "--limit does not go with --last", "Leave one of them out.")
    said = options.json or options.after is not None or options.limit is not None
    newest = options.last or (None if said else NEWEST)
    after, limit = options.after or 0, options.limit or NEWEST
    entry = resolved(options)
    for role in options.role:
        if role not in entry.manifest.roles:
            raise CommandFailure(
                "invalid_arguments", f"the run has no {role}", f"It has {', '.join(sorted(entry.manifest.roles))}."
            )
    streams: list[str | None] = list(dict.fromkeys(options.role)) or [*sorted(entry.manifest.roles), None]
    if entry.manifest.coordination is None:
        hint = f"`{options.program} status {entry.session}` tells what is known of it."
        raise CommandFailure("orchestration_error", "the run is too old to have events of a broker", hint)
    with ways_out(options, entry):
        cursors = dict.fromkeys(streams, after)
        found = reader.event_pages(entry.database, cursors, limit if newest is None else MAX_RETAINED)
    together = sorted((each for page in found.pages.values() for each in page.events), key=lambda each: each.sequence)
    rows_ = together if options.json else folded(together)
    page = rows_[:limit] if newest is None else rows_[-newest:]
    older = 0 if newest is None else len(rows_) - len(page)
    truncated = newest is None and (len(rows_) > len(page) or any(each.truncated for each in found.pages.values()))
    if newest is not None:
        after = page[0].sequence - 1 if page else found.latest
    data: JsonObject = {
        "session": entry.session,
        "run_id": entry.run_id,
        "roles": options.role,
        "events": [_fields(each) for each in page],
        "cursor": {
            "after": after,
            "next": page[-1].sequence if page else after,
            "earliest_retained": found.earliest,
            "latest": found.latest,
            "gap": newest is None and found.earliest > after + 1,
            "truncated": truncated,
        },
        "paths": snapshot.paths(entry.manifest),
    }
    commands = {} if options.json else _commands(entry, page)
    return Answer(data, telling.event_lines(data, options.program, older, commands))


def usage(options: argparse.Namespace) -> Answer:
    """`usage`: what providers reported of each role and of the newest assignments."""
    from agent_intercom.orchestration import supervisor

    entry = resolved(options)
    with ways_out(options, entry):
        data = supervisor.usage(entry, options.limit)
        overview, _ = _overview(entry)
        crossed = [] if overview is None else snapshot.crossed(overview)
    data["budget_crossed"] = [each._asdict() for each in crossed]
    return Answer(data, telling.usage_lines(data))


def _overview(entry: runs.Entry) -> tuple[reader.Overview | None, str]:
    """Where a run stands, and whether that could be read. Raises Refusal for a database that is not as it must be."""
    if entry.manifest.coordination is None:
        return None, LEGACY
    try:
        return reader.overview(entry.database), AVAILABLE
    except Refusal as refusal:
        if reader.is_busy(refusal):
            return None, BUSY
        raise


def _listed(entry: runs.Entry, hosted: Mapping[str, str]) -> tuple[JsonObject, Sequence[str]]:
    """A run as an item of a list, and as a row of a table."""
    in_tmux = entry.host == "tmux" and hosted.get(entry.directory) == entry.session
    lives = entry.unit is not None or in_tmux
    cells = ("", "", "", "")
    try:
        overview, reason = _overview(entry)
        dashboard = snapshot.no_dashboard(reason) if overview is None else snapshot.dashboard(overview)
        if overview is not None:
            still = [] if entry.unit is None else pauses.roles(runtime.runtime_dir(os.environ), entry.unit)
            cells = _cells(overview, dashboard, lives, still)
    except Refusal:
        dashboard, reason = snapshot.no_dashboard(BUSY), "unreadable"
    state, round_, tokens, now = cells
    if not dashboard["available"]:
        state = reason.replace("-", " ")
    life = "" if entry.unit is not None else _IN_TMUX if in_tmux else _ENDED
    manifest = entry.manifest
    data: JsonObject = {
        "session": entry.session,
        "valid": True,
        **snapshot.provenance(manifest),
        "dashboard": dashboard,
        "roles": snapshot.role_objects(manifest),
        "paths": snapshot.paths(manifest),
        "run_id": entry.run_id,
        "live": lives,
        "host": entry.host,
        "unit": entry.unit,
    }
    workers = dashboard["roles"] if dashboard["available"] and lives else None
    up = "" if workers is None else f"{workers['connected']}/{workers['total']}"
    state = f"{state}, {life}" if life else state
    return data, (entry.session, entry.run_id, state, round_, up, tokens, now, manifest.project)


def _cells(
    overview: reader.Overview, dashboard: JsonObject, lives: bool, paused: Sequence[str]
) -> tuple[str, str, str, str]:
    """State, round, tokens, and who has to do what. `paused` are the roles whose worker is."""
    shown = snapshot.broker(overview)
    tokens = count(dashboard["usage"]["operational_tokens"])
    if snapshot.over(overview):
        tokens += "!"
    now = ""
    if lives:
        away = standing.away(shown)
        now = standing.told(standing.awaited(shown, paused=paused)) or (f"{', '.join(away)} away" if away else "")
    return words(dashboard["workflow"]["state"]), str(dashboard["workflow"]["round"]), tokens, now


def _begun(overview: reader.Overview) -> dict[str, str]:
    """When the active assignment of every role that has one was made."""
    return {role: assignment.created_at for role, assignment in overview.active.items()}


def _issue(issue: runs.Issue) -> JsonObject:
    return {
        "session": issue.name,
        "valid": False,
        "project": None,
        "roles": [],
        "paths": {"coordination": issue.directory},
        "error": {"code": runs.ERROR, "message": issue.text},
    }


def _units(entry: runs.Entry) -> tuple[JsonObject | None, list[JsonObject] | None]:
    """The broker's and the workers' units of a live run; None where there is none, or nobody tells."""
    if entry.unit is None:
        return None, None
    from agent_intercom.host.manager import Manager, ManagerError
    from agent_intercom.orchestration import hosting
    from agent_intercom.workers import hosted

    try:
        with Manager() as manager:
            broker = hosting.broker(manager, entry.unit)
            workers = hosted.workers(manager, runtime.runtime_dir(os.environ), entry.unit)
    except ManagerError:
        return None, None
    return None if broker is None else broker._asdict(), [worker.as_json() for worker in workers]


def _down(entry: runs.Entry, workers: Sequence[JsonObject] | None) -> set[str]:
    """The roles whose worker we host and that has ended; none where nobody tells."""
    if workers is None:
        return set()
    ours = {name for name, role in entry.manifest.roles.items() if role.harness != harness.EXTERNAL}
    return ours - {worker["role"] for worker in workers if worker["active"] in {"active", "activating", "reloading"}}


def _commands(entry: runs.Entry, events_: Sequence[rows.Event]) -> dict[str, str]:
    """The actions of the control commands that events are of, by their ids, as far as they can be read."""
    found: dict[str, str] = {}
    for each in events_:
        with contextlib.suppress(Refusal):
            if each.event == CONTROL and each.delivery_id:
                command = reader.command(entry.database, each.delivery_id)
                found |= {} if command is None else {command.id: command.action}
    return found


def _external(entry: runs.Entry, shown: Mapping[str, Any] | None) -> dict[str, JsonObject]:
    """By role, what whoever starts its worker needs: the address, the file with the token, and the generation."""
    generations = {} if shown is None else {row["role"]: row["generation"] for row in shown["roles"]}
    return {
        name: {
            "socket": _socket(entry),
            "token_file": os.path.join(entry.directory, f"{name}.token"),
            "generation": generations.get(name),
        }
        for name, role in entry.manifest.roles.items()
        if role.harness == harness.EXTERNAL
    }


def _sessions(
    entry: runs.Entry, shown: Mapping[str, Any] | None, waiting: Sequence[standing.Awaited]
) -> dict[str, str]:
    """By role, where what its agent said can be read: the directory, and of roles that are to be read, the file."""
    silent = {harness.EXTERNAL, harness.COMMAND}
    found = {name: role.session_dir for name, role in entry.manifest.roles.items() if role.harness not in silent}
    wanted = {each.role for each in waiting if each.by_person}
    if shown is not None and shown["workflow"]["state"] in {Workflow.READY, Workflow.NEEDS_ATTENTION}:
        wanted.add(REVIEWER)
    return {name: _newest_file(place) if name in wanted else place for name, place in found.items()}


def _programs(entry: runs.Entry) -> dict[str, str]:
    """What works instead of a model, by role: the file name of a program, empty where nobody can tell any more."""
    known = {} if entry.unit is None else runtime.programs(runtime.runtime_dir(os.environ), entry.unit)
    found = entry.manifest.roles.items()
    commands = [(name, role) for name, role in found if role.harness == harness.COMMAND]
    return {name: known.get(name) or traces.program(role.session_dir) for name, role in commands}


def _traces(entry: runs.Entry) -> JsonObject:
    """By role, what bridges have left of commands: how one ended that has not reported, and the newest report."""
    found = {name: role for name, role in entry.manifest.roles.items() if role.harness == harness.COMMAND}
    silent = {name: traces.silent(role.session_dir) for name, role in found.items()}
    newest = {name: traces.newest_report(role.session_dir) for name, role in found.items()}
    return {
        "silent": {
            name: {key: getattr(each, key) for key in each.__struct_fields__} for name, each in silent.items() if each
        },
        "reports": {name: file for name, file in newest.items() if file},
    }


def _newest_file(directory: str) -> str:
    """An agent's newest session, whose name begins with the time; the directory where it has none yet."""
    try:
        names = [name for name in os.listdir(directory) if name.endswith(".jsonl")]
    except OSError:
        return directory
    return os.path.join(directory, max(names)) if names else directory


def _socket(entry: runs.Entry) -> str | None:
    """Where observers connect to; None where nobody listens, or another program's broker does."""
    return None if entry.unit is None else runtime.socket_path(runtime.runtime_dir(os.environ), entry.unit)


def _files(directory: str) -> tuple[list[str], bool]:
    """The names in a run's directory, and whether there are more than are listed."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return [], False
    return names[:MAX_FILES], len(names) > MAX_FILES


def _fields(event: Any) -> JsonObject:
    return {name: getattr(event, name) for name in event.__struct_fields__}
