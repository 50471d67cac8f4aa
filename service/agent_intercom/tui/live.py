# SPDX-License-Identifier: Apache-2.0
"""What goes on, as it goes on: a run is read again and shown again when the kernel tells of it, and at no other time.

Between events the process sleeps in one poll(2) without a timeout. The only timer is the one that keeps two drawings
apart, and it is armed by an event.
"""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from agent_intercom.host.inotify import Inotify
from agent_intercom.orchestration import rows
from agent_intercom.tui import layout, text, view
from agent_intercom.tui.source import Reading, RunSource
from agent_intercom.tui.terminal import HEARD, Signals, Terminal
from agent_intercom.tui.text import Style
from agent_intercom.tui.view import MAX_EVENTS, Life, View

INTERVAL_S: Final = 0.1
"""Between two drawings."""

_LONGEST_MS: Final = 2**31 - 1
"""poll(2) takes no more."""

_LEAVE: Final = frozenset("qQ\x03\x04")


class Shown(Protocol):
    """Something that shows a run."""

    def show(self, reading: Reading) -> None:
        """Show what is new."""

    def again(self) -> None:
        """Show the same once more: the terminal has another size, or was somebody else's meanwhile."""

    def let_go(self) -> None:
        """Leave what was shown as it is: somebody else writes next."""


class Pace:
    """When something is to be shown: at once after a while of nothing, else when `INTERVAL_S` is over. Pure.

    Times are seconds of a clock that never goes back.
    """

    def __init__(self) -> None:
        self._due: float | None = None
        self._done = float("-inf")

    def heard(self, now: float) -> None:
        """There is something to show."""
        if self._due is None:
            self._due = max(now, self._done + INTERVAL_S)

    def wait(self, now: float) -> float | None:
        """Seconds until something is due; 0 where it is, None where there is nothing."""
        return None if self._due is None else max(self._due - now, 0.0)

    def done(self, now: float) -> None:
        """It was shown."""
        self._due = None
        self._done = now


class Picture:
    """The view of a run, kept over readings that found nothing: the newest events, and the last that was known."""

    def __init__(self) -> None:
        self.view: View | None = None
        self._snapshot: view.Snapshot | None = None
        self._over: Sequence[str] = ()
        self._paused: Sequence[str] = ()
        self._events: list[rows.Event] = []
        self._commands: dict[str, str] = {}

    def take(self, reading: Reading) -> View:
        """The view with what is new."""
        self._events = view.folded([*self._events, *reading.events])[-MAX_EVENTS:]
        kept = {each.delivery_id for each in self._events}
        self._commands = {k: v for k, v in {**self._commands, **reading.commands}.items() if k in kept}
        if reading.snapshot is not None:
            self._snapshot, self._over, self._paused = reading.snapshot, reading.over, reading.paused
        made = view.make(
            self._snapshot,
            reading.facts,
            self._events,
            reading.life,
            over=self._over,
            commands=self._commands,
            paused=self._paused,
        )
        self.view = made if reading.snapshot is not None else view.unreadable(made)
        return self.view


class Screen:
    """The dashboard: the whole screen is the run. `program` is what its hints call this one."""

    def __init__(self, terminal: Terminal, style: Style, program: str) -> None:
        self._terminal = terminal
        self._style = style
        self._program = program
        self._picture = Picture()

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped, or gone, when it was last looked at."""
        return self._picture.view is not None and self._picture.view.life.over

    def show(self, reading: Reading) -> None:
        self.take(reading)
        self.again()

    def take(self, reading: Reading) -> None:
        """Have it without showing it."""
        self._picture.take(reading)

    def again(self) -> None:
        self._terminal.write("\x1b[H" + "\x1b[K\r\n".join(self.lines()) + "\x1b[K\x1b[J")

    def let_go(self) -> None:
        """The other screen keeps itself."""

    def lines(self) -> list[str]:
        """What is on the screen."""
        if self._picture.view is None:
            return []
        return layout.render(self._picture.view, *self._terminal.size, self._style, self._program)


class Block:
    """Events that scroll, and below them a few lines that are drawn over: where the run stands."""

    def __init__(self, terminal: Terminal, style: Style) -> None:
        self._terminal = terminal
        self._style = style
        self._picture = Picture()
        self._drawn: list[int] = []
        """Columns of the lines below the events that are on the screen now."""

    def show(self, reading: Reading) -> None:
        self._picture.take(reading)
        columns = self._terminal.size.columns
        lines = [f"{self._style.ellipsis} {reading.lost} older events are not kept"] if reading.lost else []
        lines += [layout.event_line(each, columns, self._style) for each in _told(reading)]
        self._draw(lines)

    def again(self) -> None:
        self._draw([])

    def let_go(self) -> None:
        """The cursor goes below everything."""
        if self._drawn:
            self._terminal.write("\r\n")
            self._drawn = []

    def _draw(self, above: list[str]) -> None:
        assert self._picture.view is not None
        columns, rows_ = self._terminal.size
        block = layout.block(self._picture.view, columns, rows_, self._style)
        # A terminal that became narrower has wrapped what was drawn before.
        used = min(sum(max(-(-cells // columns), 1) for cells in self._drawn), rows_)
        start = "\r" + (f"\x1b[{used - 1}A" if used > 1 else "") + "\x1b[J"
        self._terminal.write(start + "\r\n".join([*above, *block]))
        self._drawn = [text.width(text.plain(line)) for line in block]


def _told(reading: Reading) -> Iterator[view.EventView]:
    """The events that scroll by: signs of life do not, the lines below them say what workers are at."""
    return (view.event(row, commands=reading.commands) for row in reading.events if row.event != view.PROGRESS)


class Summaries:
    """One line for every change of what the dashboard says; for what is no screen."""

    def __init__(self, emit: Callable[[str], None], style: Style) -> None:
        self._emit = emit
        self._style = style
        self._picture = Picture()
        self._last = ""

    def show(self, reading: Reading) -> None:
        shown = self._picture.take(reading)
        if reading.events and all(each.event == view.PROGRESS for each in reading.events) and not reading.life.over:
            # A sign of life alone is no news; what it says is told with the next.
            return
        line = layout.summary(shown, self._style)
        if line != self._last:
            self._last = line
            time_ = shown.events[-1].time if shown.events else ""
            self._emit(f"{time_} {line}".lstrip())

    def again(self) -> None:
        """What was written is written."""

    let_go = again


class EventLines:
    """One line for every event, and one for what is none; for what is no screen."""

    def __init__(self, emit: Callable[[str], None], style: Style) -> None:
        self._emit = emit
        self._style = style
        self._readable = True
        self._begun = False

    def show(self, reading: Reading) -> None:
        if not self._begun and reading.life is Life.UNKNOWN:
            self._emit(f"the run is hosted by tmux; {view.END_UNSEEN}")
        self._begun = True
        if reading.lost:
            self._emit(f"{reading.lost} older events are not kept")
        for each in _told(reading):
            self._emit(layout.event_line(each, None, self._style))
        readable = reading.snapshot is not None
        if self._readable and not readable:
            self._emit(view.UNAVAILABLE)
        self._readable = readable
        if reading.life.over:
            self._emit("the run is stopped" if reading.life is Life.STOPPED else "the run's directory is gone")

    def again(self) -> None:
        """What was written is written."""

    let_go = again


def follow(
    source: RunSource,
    shown: Shown,
    terminal: Terminal | None = None,
    *,
    enough: Callable[[Reading], bool] | None = None,
    seconds: float | None = None,
) -> None:
    """Show the run until it is stopped or the person leaves (`q`). That a run of another host ends is not seen.

    It also ends where a reading is `enough`, or `seconds` are over.

    Raises OSError where the kernel tells of nothing (ENOSPC, EMFILE: a limit is reached), BrokenPipeError where nobody
    reads any more, and KeyboardInterrupt for Ctrl-C. Only in the main thread, which is the one that signals reach.
    """
    with Inotify() as kernel, Signals(() if terminal is None else HEARD) as signals:
        source.watch(kernel)
        deadline = None if seconds is None else time.monotonic() + seconds
        _Loop(source, shown, terminal, kernel, signals, enough or _never, deadline).run()


def _never(reading: Reading) -> bool:
    return False


class _Loop:
    def __init__(
        self,
        source: RunSource,
        shown: Shown,
        terminal: Terminal | None,
        kernel: Inotify,
        signals: Signals,
        enough: Callable[[Reading], bool],
        deadline: float | None,
    ) -> None:
        self._source = source
        self._shown = shown
        self._terminal = terminal
        self._kernel = kernel
        self._signals = signals
        self._enough = enough
        self._deadline = deadline
        self._pace = Pace()
        self._stale = True
        self._left = False
        self._poll = select.poll()
        self._poll.register(kernel, select.POLLIN)
        self._poll.register(signals, select.POLLIN)
        # Nothing is waited for there; that the other end is gone is told nevertheless.
        self._out = sys.stdout.fileno()
        self._poll.register(self._out, 0)
        if terminal is not None and terminal.keys is not None:
            self._poll.register(terminal.keys, select.POLLIN)

    def run(self) -> None:
        self._pace.heard(time.monotonic())
        while not self._left:
            now = time.monotonic()
            wait = self._pace.wait(now)
            rest = None if self._deadline is None else max(self._deadline - now, 0.0)
            if wait == 0.0 or (wait is not None and rest == 0.0):
                self._show()
            elif rest == 0.0:
                return
            else:
                self._hear(min((each for each in (wait, rest) if each is not None), default=None))

    def _show(self) -> None:
        if self._stale:
            self._stale = False
            reading = self._source.read()
            self._shown.show(reading)
            self._left = reading.life.over or self._enough(reading)
        else:
            self._shown.again()
        self._pace.done(time.monotonic())

    def _hear(self, wait: float | None) -> None:
        # A wait that is rounded down would be repeated at once.
        found = dict(self._poll.poll(None if wait is None else min(int(wait * 1_000) + 1, _LONGEST_MS)))
        if self._out in found:
            if self._terminal is None:
                raise BrokenPipeError
            # The terminal is gone, and whoever sat there; SIGHUP may be on its way.
            self._left = True
            return
        events = self._kernel.read() if self._kernel.fileno() in found else []
        # Every event has to be taken note of.
        if any([self._source.heard(event) for event in events]):
            self._stale = True
            self._pace.heard(time.monotonic())
        if self._signals.fileno() in found:
            self._signalled(self._signals.came())
        if self._terminal is not None and self._terminal.keys in found:
            self._pressed(self._terminal)

    def _signalled(self, numbers: set[int]) -> None:
        if self._terminal is None:
            return
        if signal.SIGTSTP in numbers:
            self._shown.let_go()
            self._terminal.suspend()
            # That it goes on is known here already.
            self._signals.came()
        elif signal.SIGCONT in numbers:
            self._shown.let_go()
            self._terminal.take()
        self._pace.heard(time.monotonic())

    def _pressed(self, terminal: Terminal) -> None:
        assert terminal.keys is not None
        keys = ""
        with contextlib.suppress(OSError):  # a terminal that is gone; SIGHUP says so too
            keys = terminal.pressed()
        if not keys:
            self._poll.unregister(terminal.keys)
        self._left = not _LEAVE.isdisjoint(keys)
