# SPDX-License-Identifier: Apache-2.0
"""`wait`: until a run is where it is to be, or cannot get there any more, or the time is over.

The run is read as `watch` reads it: nobody is connected to, and between two changes of its files nothing happens.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from agent_intercom.cli.orchestrate import amounts
from agent_intercom.cli.orchestrate.answer import RUN_OVER, TIMED_OUT, Answer, CommandFailure, JsonObject
from agent_intercom.cli.orchestrate.resolving import ways_out
from agent_intercom.cli.orchestrate.watching import source_of, told_of_limits
from agent_intercom.cli.output import complain
from agent_intercom.orchestration import reader, runs, standing
from agent_intercom.orchestration.contract import Workflow
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.tui.live import follow
from agent_intercom.tui.source import Reading, RunSource
from agent_intercom.tui.view import END_UNSEEN, Life, words

READY: Final = "ready"
END: Final = "end"


def wait(options: argparse.Namespace) -> Answer:
    """`orchestrate wait`: `settled`, where a person has something to look at or to do; `ready`; or the `end`."""
    source = source_of(options, 0)
    waiting = Waiting(source, options)
    first = source.read()
    if first.life is Life.UNKNOWN:
        if options.until == END:
            hint = f"`--until {READY}` can be waited for."
            raise CommandFailure(runs.FOREIGN, f"the run is hosted by tmux; {END_UNSEEN}", hint)
        if not options.json:
            complain(f"the run is hosted by tmux; {END_UNSEEN}", program=options.program)
    waiting.show(first)
    if not waiting.decided(first):
        seconds = None if options.timeout in {None, amounts.NEVER} else options.timeout / 1_000
        try:
            with told_of_limits():
                follow(source, waiting, enough=waiting.decided, seconds=seconds)
        except FileNotFoundError:
            # Its directory went before it was watched.
            waiting.show(source.read())
    return waiting.answer()


class Waiting:
    """A run that is waited for, as it was read last."""

    def __init__(self, source: RunSource, options: argparse.Namespace) -> None:
        self._entry = source.entry
        self._options = options
        self._snapshot: Any = None
        self._life = Life.LIVE
        self._awaited: list[standing.Awaited] = []
        self._paused: list[str] = []
        self._down: list[str] = []
        self._person = False

    def show(self, reading: Reading) -> None:
        """Take note of what was read; what cannot be read later either ends it with CommandFailure."""
        self._life = reading.life
        if reading.snapshot is not None:
            self._snapshot, self._paused = reading.snapshot, list(reading.paused)
        elif not reading.life.over and self._options.until != END:
            self._refuse_unreadable()
        self._awaited, self._down, self._person = [], [], False
        if self._snapshot is not None and not reading.life.over:
            self._awaited = standing.awaited(self._snapshot, paused=self._paused)
            missed = {each.role for each in self._awaited if each.what == standing.CONNECTION}
            # Nobody but a person starts it again.
            self._down = [role for role in reading.down if role in missed]
            persons = any(each.by_person for each in self._awaited)
            self._person = persons or bool(self._down) or self._state == Workflow.NEEDS_ATTENTION

    def again(self) -> None:
        """Nothing is shown meanwhile."""

    let_go = again

    def decided(self, reading: Reading) -> bool:
        """Whether there is nothing more to wait for."""
        return reading.life.over or self.reached

    @property
    def reached(self) -> bool:
        """Whether the run is what it is waited for. One that has ended stays what it was."""
        if self._options.until == END:
            return self._life.over
        if self._state == Workflow.READY:
            return True
        return self._options.until != READY and (self._life.over or self._person)

    def answer(self) -> Answer:
        """Where the run is, and whether that is what it was waited for. Raises CommandFailure where nobody can tell."""
        if self._snapshot is None and self._life is Life.STOPPED and not self.reached:
            self._refuse_unreadable(even_busy=True)
        shown = self._snapshot
        keys = ("state", "round", "implementation_flow")
        data: JsonObject = {
            "session": self._entry.session,
            "run_id": self._entry.run_id,
            "until": self._options.until,
            "reached": self.reached,
            "life": self._life.value,
            "workflow": None if shown is None else {key: shown["workflow"][key] for key in keys},
            "paused": self._paused,
            "down": self._down,
            "awaited": [each._asdict() for each in self._awaited],
        }
        lines = [f"{self._entry.session}: {self._told()}"]
        if self.reached and self._person and not self._life.over:
            lines.append(f"`{self._options.program} status {self._entry.session}` tells what can be done.")
        if self.reached:
            return Answer(data, lines)
        if self._life.over:
            return Answer(data, lines, (RUN_OVER, f"it has ended and will not be {self._options.until} any more"))
        return Answer(data, lines, (TIMED_OUT, f"the time is over, and it {self._not_yet()}"))

    @property
    def _state(self) -> str | None:
        return None if self._snapshot is None else str(self._snapshot["workflow"]["state"])

    def _told(self) -> str:
        shown = self._snapshot
        parts = [] if shown is None else [f"{words(shown['workflow']['state'])}, round {shown['workflow']['round']}"]
        if self._life.over:
            parts.append("its directory is gone" if self._life is Life.GONE else "it has ended")
        parts += [standing.told(self._awaited)] if self._awaited else []
        parts += [f"the worker of {' and '.join(self._down)} has ended"] if self._down else []
        return "; ".join(parts) or "its state cannot be read just now"

    def _not_yet(self) -> str:
        return "goes on" if self._options.until == END else f"is not {self._options.until} yet"

    def _refuse_unreadable(self, *, even_busy: bool = False) -> None:
        with ways_out(self._options, self._entry):
            try:
                reader.overview(self._entry.database)
            except Refusal as refusal:
                if even_busy or not reader.is_busy(refusal):
                    raise
