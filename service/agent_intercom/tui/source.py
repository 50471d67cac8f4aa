# SPDX-License-Identifier: Apache-2.0
"""A run, read again whenever something in its directory says that there is something new.

Nobody is connected to and nothing is written, so the run never notices. Its database is in journal mode DELETE: every
commit ends with the removal of the journal beside it, which inotify(7) tells. A broker that ends closes the file
that it holds the lock of; a run that is stopped loses its address and its place in the runtime directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.host import cgroups, inotify
from agent_intercom.orchestration import contract, harness, manifest, reader, rows, runs, runtime, snapshot
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.tui.view import CONTROL, Facts, Life, Model, Snapshot
from agent_intercom.workers import pauses
from agent_intercom.workers.bridge import traces

_NAMES: Final = {
    contract.DATABASE: inotify.DELETE | inotify.MOVED_TO,
    f"{contract.DATABASE}-journal": inotify.DELETE,
    f"{contract.DATABASE}.lock": inotify.CLOSE_WRITE,
    manifest.NAME: inotify.MOVED_TO | inotify.DELETE,
}
"""Names in a run's directory, and what has to happen to them to be worth a look."""

_GONE: Final = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.IGNORED
_RUN: Final = inotify.DELETE | inotify.CLOSE_WRITE | inotify.MOVED_TO | inotify.DELETE_SELF | inotify.MOVE_SELF
_PLACE: Final = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.DELETE_SELF | inotify.MOVE_SELF
_ABOVE: Final = inotify.DELETE | inotify.MOVED_FROM
_PAGE: Final = 500

DEEP: Final = 500
"""How many of the newest events a screen looks through for those that it shows."""

FEW: Final = 8
"""How many of the newest events a view that scrolls begins with."""


class Reading(NamedTuple):
    """What is known now. `snapshot` None: the database could not be read, and everything else but `life` is as before.

    `events` are those since the reading before, oldest first (the first has the newest few), `lost` how many more
    there were that the run no longer keeps. `over` are who crossed a threshold of the budget: `run`, and roles.
    `commands` has the actions of the control commands that events are of, by their ids; `paused` are the roles whose
    worker is, `down` those of which we had one that has ended.
    """

    facts: Facts
    life: Life
    snapshot: Snapshot | None
    events: list[rows.Event]
    lost: int
    over: Sequence[str] = ()
    commands: Mapping[str, str] = {}
    paused: Sequence[str] = ()
    down: Sequence[str] = ()


class RunSource:
    """One run. `entry` is what `runs.resolve` found, `environ` where it was looked for.

    The first reading has at most the newest `first` events.
    """

    def __init__(self, entry: runs.Entry, environ: Mapping[str, str], first: int = FEW) -> None:
        self.entry = entry
        self._first = first
        self._environ = environ
        self._facts = facts_of(entry.manifest, self._programs())
        self._lives_in_tmux = entry.unit is None and runs.in_tmux(entry, environ)
        self._places: dict[int, str] = {}
        self._kernel: inotify.Inotify | None = None
        self._groups: dict[str, int] = {}
        """The control groups of workers that are watched, and the numbers of the watches."""
        self._after: int | None = None
        self._restarted = False
        """Whether a role may have another model by now."""

    def watch(self, kernel: inotify.Inotify) -> None:
        """Have `kernel` tell of everything that `heard` knows. Raises OSError; what is not there is not watched."""
        self._kernel = kernel
        self._places[kernel.watch(self.entry.directory, _RUN)] = self.entry.directory
        # As long as somebody has a file of a directory open, the kernel does not tell that the directory itself went.
        above = path.dirname(self.entry.directory)
        self._places[kernel.watch(above, _ABOVE)] = above
        if self.entry.unit is not None:
            place = path.dirname(runtime.socket_path(runtime.runtime_dir(self._environ), self.entry.unit))
            with contextlib.suppress(FileNotFoundError):
                self._places[kernel.watch(place, _PLACE)] = place

    def heard(self, event: inotify.Event) -> bool:
        """Take note of `event`; whether it is a reason to read again."""
        if event.mask & inotify.IGNORED and event.watch in self._groups.values():
            self._groups = {group: watch for group, watch in self._groups.items() if watch != event.watch}
            return True
        if event.mask & (inotify.OVERFLOW | _GONE):
            self._restarted = True
            return True
        place = self._places.get(event.watch)
        if event.watch in self._groups.values():
            return event.name == cgroups.EVENTS_NAME
        if place == path.dirname(self.entry.directory):
            return event.name == path.basename(self.entry.directory)
        if place != self.entry.directory:
            return event.name in {self.entry.unit, f"{self.entry.unit}.sock"}
        self._restarted |= event.name == manifest.NAME
        return bool(event.mask & _NAMES.get(event.name, 0))

    def read(self) -> Reading:
        """Read everything that can have changed."""
        # Whether it lives comes first: of a run that has stopped, nothing is missed that was committed before.
        life = self.life()
        if self._restarted:
            with contextlib.suppress(Refusal):
                self._facts = facts_of(manifest.read(self.entry.directory), self._programs())
                self._restarted = False
        try:
            overview = reader.overview(self.entry.database)
            found = snapshot.broker(overview)
            events, lost = self._events(overview.latest)
            commands = self._commands(events)
        except Refusal:
            return Reading(self._facts, life, None, [], 0)
        return Reading(self._facts, life, found, events, lost, snapshot.over(overview), commands, *self._workers())

    def life(self) -> Life:
        """Whether the run goes on."""
        if not path.lexists(self.entry.directory):
            return Life.GONE
        if self.entry.unit is None:
            return Life.UNKNOWN if self._lives_in_tmux else Life.STOPPED
        if runs.seen_live(self.entry, self._environ).unit is None:
            return Life.STOPPED
        # A broker that binds for itself removes its address first, and closes it later.
        address = runtime.socket_path(runtime.runtime_dir(self._environ), self.entry.unit)
        return Life.LIVE if path.lexists(address) else Life.STOPPED

    def _programs(self) -> dict[str, str]:
        if self.entry.unit is None:
            return {}
        return runtime.programs(runtime.runtime_dir(self._environ), self.entry.unit)

    def _workers(self) -> tuple[list[str], list[str]]:
        """The roles whose worker is paused, and those whose has ended; from now on the kernel tells of changes."""
        if self.entry.unit is None:
            return [], []
        runtime_dir = runtime.runtime_dir(self._environ)
        groups = pauses.groups(runtime_dir, self.entry.unit)
        for group in groups.values():
            place = cgroups.directory(group)
            if self._kernel is not None and place is not None and group not in self._groups:
                # One that goes just now; or there are no more watches, and it is only seen at the next reason to read.
                with contextlib.suppress(OSError):
                    self._groups[group] = self._kernel.watch(place, inotify.MODIFY)
        # Looked at afterwards: what happens now is told.
        paused = [role for role, group in groups.items() if pauses.frozen(group)]
        return paused, pauses.gone(runtime_dir, self.entry.unit, pauses.groups(runtime_dir, self.entry.unit))

    def _events(self, latest: int) -> tuple[list[rows.Event], int]:
        after = max(latest - self._first, 0) if self._after is None else self._after
        found: list[rows.Event] = []
        while page := reader.events(self.entry.database, found[-1].sequence if found else after, _PAGE):
            found += page
            if len(page) < _PAGE:
                break
        lost = found[0].sequence - after - 1 if found and self._after is not None else 0
        self._after = found[-1].sequence if found else after
        return found, lost

    def _commands(self, events: Sequence[rows.Event]) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in events:
            if each.event == CONTROL and each.delivery_id:
                command = reader.command(self.entry.database, each.delivery_id)
                found |= {} if command is None else {command.id: command.action}
        return found


def facts_of(found: manifest.Manifest, programs: Mapping[str, str]) -> Facts:
    """What is shown of a manifest. `programs` are the file names of those that work instead of a model, by role, as far
    as the run has told them; those that have worked are known without.
    """
    return Facts(
        session=found.session,
        project=found.project,
        host=found.host,
        profile=found.execution_profile.name,
        protocol=found.protocol_version,
        models={
            name: Model("", f"program {programs.get(name) or traces.program(role.session_dir)}".rstrip(), "")
            if role.harness == harness.COMMAND
            else Model(role.provider, role.model, role.thinking)
            for name, role in found.roles.items()
        },
    )
