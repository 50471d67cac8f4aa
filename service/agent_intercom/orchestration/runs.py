# SPDX-License-Identifier: Apache-2.0
"""Which runs there are: those that lie on disk, and which of them live (orchestration spec, sections 9.1 and 11.2).

Read-only to the letter: nothing is made, closed to others or touched, no link is followed, and nobody is connected to,
so that looking never wakes a broker. A run of ours lives while systemd listens on its socket. A run of another host may
live in tmux, which `in_tmux` asks.

Functions raise Refusal with codes of the command line: `orchestration_error`, and those that they name besides. A run
that cannot be read is an `Issue` wherever several are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.orchestration import contract, manifest, rootscan, runtime
from agent_intercom.orchestration import places as locations
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import Manifest

MAX_ITEMS: Final = 100
"""How many runs and issues a page has, and how many runs of one session a page of sessions looks at."""

ERROR: Final = "orchestration_error"
UNKNOWN: Final = "orchestration_state_not_found"
NOT_LIVE: Final = "broker_not_live"
FOREIGN: Final = "foreign_host"


class Entry(NamedTuple):
    """A run with a readable manifest. `directory` and `root` are canonical.

    `unit` is the id of its units while it lives under systemd; None says nothing about tmux, nor where nobody looked.
    """

    session: str
    run_id: str
    directory: str
    root: str
    manifest: Manifest
    unit: str | None = None

    @property
    def host(self) -> str:
        """What hosts it or did: `systemd` for ours, `tmux` for the original's."""
        return self.manifest.host

    @property
    def database(self) -> str:
        """Where its database lies, if a broker ever led it."""
        return path.join(self.directory, contract.DATABASE)


class Issue(NamedTuple):
    """What lies among sessions or runs and is none, or cannot be read. `name` is its file name, `text` one line."""

    name: str
    text: str
    directory: str


class Runs(NamedTuple):
    """Runs, newest first, and what lies among them. `truncated`: there are more than were read; `total`: how many."""

    entries: list[Entry]
    issues: list[Issue]
    truncated: bool
    total: int


class Session(NamedTuple):
    """A session by its newest readable run. `truncated`: more lies there than was looked at.

    `issues` counts, among the newest hundred, what is newer and cannot be read, and what is no directory or has no name
    of a run. Whether older runs can be read is not looked at.
    """

    newest: Entry
    truncated: bool
    issues: int


class Sessions(NamedTuple):
    """Sessions by name. `truncated`: there are more than are in `sessions` and `issues` together."""

    sessions: list[Session]
    issues: list[Issue]
    truncated: bool


def slug(project: str) -> str:
    """What a project's directory is called in the name of a session: at most 48 of `a-z0-9-`."""
    return re.sub(r"[^a-z0-9]+", "-", path.basename(path.normpath(project)).lower())[:48].strip("-") or "project"


def default_session(project: str) -> str:
    """The name of a project's session where nobody chose another."""
    return f"pi-{slug(project)}-agents"


def sessions(roots: Sequence[str]) -> Sessions:
    """The newest readable run of every session, by name; at most 100 sessions and issues."""
    found: list[Session] = []
    places, strangers, truncated = rootscan.sessions(roots)
    issues = [Issue(*each) for each in strangers]
    for name in sorted(places):
        if len(found) + len(issues) >= MAX_ITEMS:
            truncated = True
            break
        session = _session(name, places[name])
        if isinstance(session, Session):
            found.append(session)
        else:
            issues.append(session)
    return Sessions(found, issues[: MAX_ITEMS - len(found)], truncated or len(found) + len(issues) > MAX_ITEMS)


def runs_of(session: str, roots: Sequence[str], limit: int = rootscan.MAX_SCAN) -> Runs:
    """The newest runs of a session and the issues among them, at most `limit` together.

    Raises Refusal `orchestration_state_not_found` where no root has the session.
    """
    places = rootscan.places_of(session, roots)
    if not places:
        raise Refusal(UNKNOWN, "no such session is retained", "session")
    return _runs_in(session, places, limit)


def newest(roots: Sequence[str], limit: int = MAX_ITEMS) -> Runs:
    """The newest runs of all sessions and the issues among them, at most `limit` together."""
    places, strangers, truncated = rootscan.sessions(roots)
    issues = [Issue(*each) for each in strangers]
    found = []
    for session, where in places.items():
        for root in where:
            try:
                candidates, more = rootscan.candidates(session, [root])
            except Refusal as refusal:
                issues.append(Issue(session, refusal.text, path.join(root, session)))
                continue
            found += [(each.run_id, session, each.root) for each in candidates]
            truncated = truncated or more
    found.sort(reverse=True)
    total = len(found) + len(issues)
    entries: list[Entry] = []
    for run_id, session, root in found[: max(limit - len(issues), 0)]:
        try:
            entries.append(_read(root, session, run_id))
        except Refusal as refusal:
            issues.append(Issue(session, _text(refusal), path.join(root, session, run_id)))
    return Runs(entries, issues[:limit], truncated or total > limit, total)


def find(session: str, run_id: str | None, roots: Sequence[str]) -> Entry:
    """The run `run_id` of a session, or its newest readable one. Whether it lives is not looked at."""
    places = rootscan.places_of(session, roots)
    if not places:
        raise Refusal(ERROR, "no such session is retained", "session")
    if run_id is None:
        newest = _newest(session, places)
        if newest is None:
            raise Refusal(ERROR, "the session has no run that can be read", "session")
        return newest
    for root in places:
        if rootscan.is_name(run_id) and path.lexists(path.join(root, session, run_id)):
            return _read(root, session, run_id)
    raise Refusal(ERROR, "Requested coordination run is unavailable", "run")


def at(directory: str) -> Entry:
    """The run in a directory that somebody names. Whether it lives is not looked at."""
    session_directory, run_id = path.split(directory)
    root, session = path.split(session_directory)
    entry = _read(rootscan.canonical(root), session, run_id)
    if entry.directory != directory:
        raise Refusal(ERROR, "the run's directory is not named by its canonical path", "directory")
    return entry


def live_runs(environ: Mapping[str, str]) -> Runs:
    """Every run of ours that lives, by session and newest first, wherever it lies."""
    entries: list[Entry] = []
    issues: list[Issue] = []
    for unit, directory in _live(environ).items():
        try:
            entry = at(directory) if directory else _of_unit(unit, environ)
            if entry.manifest.unit != unit:
                raise Refusal(ERROR, "the run does not have the unit that lives for it", "unit")
        except Refusal as refusal:
            name = path.basename(path.dirname(directory)) or f"orchestrate@{unit}"
            issues.append(Issue(name, _text(refusal), directory))
        else:
            entries.append(entry._replace(unit=unit))
    entries.sort(key=lambda entry: entry.run_id, reverse=True)
    entries.sort(key=lambda entry: entry.session)
    return Runs(entries, issues, False, len(entries) + len(issues))


def _of_unit(unit: str, environ: Mapping[str, str]) -> Entry:
    """The run that a unit is of, looked for among the newest: its place, which would tell, cannot be read."""
    for entry in newest(locations.roots(environ)).entries:
        if entry.manifest.unit == unit:
            return entry
    raise Refusal(ERROR, "it lives, and nobody can tell where: its run.json cannot be read", "unit")


def seen_live(entry: Entry, environ: Mapping[str, str]) -> Entry:
    """The same run, with its unit if it lives."""
    unit = entry.manifest.unit
    lives = unit is not None and _live(environ).get(unit) in {entry.directory, ""}
    return entry._replace(unit=unit if lives else None)


def resolve(
    name: str | None,
    cwd: str,
    environ: Mapping[str, str],
    live_only: bool,
    run_id: str | None = None,
) -> Entry:
    """The run that a command is about (section 11.2).

    With a `name`: the session's live run, else its newest retained one, or with `run_id` exactly that one. Without:
    what lives under the conventional name of the project `cwd`; else the only one that lives for that project; else
    what is retained under the conventional name; else the only one that lives at all. `live_only` leaves out what does
    not live; a run that lives in tmux is then refused with `foreign_host`. Raises Refusal besides:
    `orchestration_state_not_found` where nothing fits, `broker_not_live` where what fits does not live.
    """
    live = live_runs(environ)
    roots = locations.roots(environ)
    if name is None:
        return _implied(cwd, live, environ, live_only, run_id, roots)
    if not rootscan.is_name(name):
        raise Refusal(ERROR, "a session's name is made of letters, digits, dots, dashes and underscores", "session")
    entry = _lives(name, run_id, live)
    if entry is not None:
        return entry
    _refuse_unreadable(name, run_id, live)
    try:
        entry = find(name, run_id, roots)
    except Refusal as refusal:
        if refusal.field == "session" and not rootscan.places_of(name, roots):
            raise Refusal(UNKNOWN, f"there is no session of that name{_those(live)}", "session") from refusal
        raise
    if live_only:
        _refuse_dead(entry, live, environ)
    return entry


def lies_in(directory: str, roots: Sequence[str]) -> bool:
    """Whether a run's directory is among those that `newest` counts."""
    return path.dirname(path.dirname(directory)) in map(rootscan.canonical, roots) and path.lexists(directory)


def in_tmux(entry: Entry, environ: Mapping[str, str]) -> bool:
    """Whether the tmux session of a run of the original still hosts exactly that run."""
    if entry.host != "tmux":
        return False
    from agent_intercom.orchestration import tmux  # only for runs of another host

    return tmux.hosts(entry.session, entry.directory, environ)


def _implied(
    cwd: str, live: Runs, environ: Mapping[str, str], live_only: bool, run_id: str | None, roots: Sequence[str]
) -> Entry:
    """The run that is meant where no session is named."""
    project = path.realpath(cwd)
    conventional = default_session(project)
    entry = _lives(conventional, run_id, live)
    if entry is not None:
        return entry
    candidates = [entry for entry in live.entries if run_id in {None, entry.run_id}]
    here = [entry for entry in candidates if entry.manifest.project == project]
    if len(here) == 1:
        return here[0]
    _refuse_unreadable(conventional, run_id, live)
    places = rootscan.places_of(conventional, roots)
    retained = None
    if places and not here:
        retained = find(conventional, run_id, roots) if run_id is not None else _newest(conventional, places)
    if retained is not None and not live_only:
        return retained
    if len(candidates) == 1:
        return candidates[0]
    if retained is not None:
        _refuse_dead(retained, live, environ)
    text = "no session is named, and " + ("several runs live" if candidates else "no run lives")
    raise Refusal(UNKNOWN, text + _those(live), "session")


def _lives(session: str, run_id: str | None, live: Runs) -> Entry | None:
    """The live run of a session. Raises where two roots have one each and nobody says which."""
    found = [entry for entry in live.entries if entry.session == session and run_id in {None, entry.run_id}]
    if len(found) > 1:
        raise Refusal(ERROR, "several runs of that session live; say which with --run", "run")
    return found[0] if found else None


def _refuse_unreadable(session: str, run_id: str | None, live: Runs) -> None:
    """What lives and cannot be read must not be passed over for what is retained."""
    for issue in live.issues:
        if issue.name == session and run_id in {None, path.basename(issue.directory)}:
            raise Refusal(ERROR, f"the run that lives cannot be read: {issue.text}", "session")


def _refuse_dead(entry: Entry, live: Runs, environ: Mapping[str, str]) -> None:
    if in_tmux(entry, environ):
        raise Refusal(FOREIGN, "the run lives in tmux, under the program that started it", "session")
    raise Refusal(NOT_LIVE, f"the run does not live any more{_those(live)}", "session")


def _those(live: Runs) -> str:
    names = sorted({entry.session for entry in live.entries})
    if not names:
        return ""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f" (live: {', '.join(names[:8])}{more})"


def _live(environ: Mapping[str, str]) -> dict[str, str]:
    """From the unit of every run that lives to its directory, empty where that cannot be told.

    Raises Refusal `orchestration_error` where nobody can tell which runs live.
    """
    try:
        runtime_dir = runtime.runtime_dir(environ)
    except Refusal as refusal:
        raise Refusal(ERROR, f"nobody can tell which runs live: {refusal.text}", refusal.field) from refusal
    return {live.unit: live.directory for live in runtime.live(runtime_dir)}


def _session(name: str, places: Sequence[str]) -> Session | Issue:
    """A session by its newest readable run, the only one that is read."""
    try:
        found, truncated = rootscan.candidates(name, places)
    except Refusal as refusal:
        return Issue(name, refusal.text, path.join(places[0], name))
    newest, faults = None, []
    for each in found[:MAX_ITEMS]:
        fault = each.fault
        if not fault and newest is None:
            try:
                newest = _read(each.root, name, each.run_id)
            except Refusal as refusal:
                fault = _text(refusal)
        if fault:
            faults.append(fault)
    if newest is None:
        return Issue(name, faults[0] if faults else "no run is retained", path.join(places[0], name))
    return Session(newest, truncated or len(found) > MAX_ITEMS, len(faults))


def _runs_in(session: str, places: Sequence[str], limit: int) -> Runs:
    """At most `limit` runs and issues of a session, the newest of those that lie in `places`."""
    found, truncated = rootscan.candidates(session, places)
    entries: list[Entry] = []
    issues: list[Issue] = []
    for run_id, root, _ in found[:limit]:
        try:
            entries.append(_read(root, session, run_id))
        except Refusal as refusal:
            issues.append(Issue(run_id, _text(refusal), path.join(root, session, run_id)))
    return Runs(entries, issues, truncated or len(found) > limit, len(found))


def _newest(session: str, places: Sequence[str]) -> Entry | None:
    for run_id, root, _ in rootscan.candidates(session, places)[0]:
        try:
            return _read(root, session, run_id)
        except Refusal:
            continue
    return None


def _read(root: str, session: str, run_id: str) -> Entry:
    """The run below a canonical root. Raises Refusal `orchestration_error` with one line that says why it cannot."""
    if not (rootscan.is_name(session) and rootscan.is_name(run_id)):
        raise Refusal(ERROR, "not the name of a run", "run")
    directory = path.join(root, session, run_id)
    if not (rootscan.is_directory(path.join(root, session)) and rootscan.is_directory(directory)):
        raise Refusal(ERROR, rootscan.NO_DIRECTORY, "run")
    try:
        return Entry(session, run_id, directory, root, manifest.read(directory))
    except Refusal as refusal:
        raise Refusal(ERROR, _text(refusal), "run") from refusal


def _text(refusal: Refusal) -> str:
    named = refusal.code == "manifest_invalid" and refusal.field != manifest.NAME
    return f"{refusal.text} ({refusal.field})" if named else refusal.text
