# SPDX-License-Identifier: Apache-2.0
"""The terminal that a live view is shown in: taken while it lasts, and given back as it was on every way out.

Written bytes go to the descriptor and never through `sys.stdout`, so that what is on the screen is what was drawn.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Final, NamedTuple, Self

from agent_intercom.tui.text import Style

_HIDE: Final = "\x1b[?25l"
_SHOW: Final = "\x1b[0m\x1b[?25h"
_ALTERNATE: Final = "\x1b[?1049h\x1b[2J"
_NORMAL: Final = "\x1b[?1049l"
_ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_PATIENCE_MS: Final = 500
"""How long a terminal that takes nothing (Ctrl-S) may hold up the way out."""

HEARD: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
"""Signals that a view in a terminal has to do something about, and goes on."""

_COERCED: Final = frozenset({"C.UTF-8", "C.utf8", "UTF-8"})


class Size(NamedTuple):
    """What fits on the screen."""

    columns: int
    rows: int


def is_screen(environ: Mapping[str, str], descriptor: int = 1) -> bool:
    """Whether lines can be drawn over: it is a terminal, and none that says of itself that it cannot."""
    return os.isatty(descriptor) and environ.get("TERM", "") not in {"", "dumb"}


def style_of(environ: Mapping[str, str], encoding: str, screen: bool) -> Style:
    """What to write with: colours on a screen without NO_COLOR (no-color.org), ASCII where text is not UTF-8."""
    utf8 = _is_utf8(encoding) and _is_utf8(_charset(environ))
    return Style(colour=screen and not environ.get("NO_COLOR"), unicode=utf8)


def _charset(environ: Mapping[str, str]) -> str:
    """The character set of the locale (locale(7)).

    Python puts a UTF-8 one into LC_CTYPE where there is none (PEP 538), which says nothing about the terminal.
    """
    kind = environ.get("LC_CTYPE", "")
    locale = environ.get("LC_ALL", "") or ("" if kind in _COERCED else kind) or environ.get("LANG", "")
    return locale.partition(".")[2].partition("@")[0]


def _is_utf8(name: str) -> bool:
    return name.lower().replace("-", "") == "utf8"


class Terminal:
    """A terminal without a cursor and, where keys can be read, without echo, for as long as the context lasts.

    `alternate` takes the other screen, so that what was there before comes back. Keys are read one by one; those that
    send signals still do. `descriptor` is what is drawn on; where `keys` is no terminal, nothing is read.
    """

    def __init__(self, alternate: bool, descriptor: int = 1, keys: int = 0) -> None:
        self._alternate = alternate
        self._out = descriptor
        self.keys = keys if os.isatty(keys) else None
        self._modes: list[int | list[bytes | int]] | None = None
        self._entered = False

    @property
    def size(self) -> Size:
        """The size now; a terminal that does not know has 80 columns and 24 rows."""
        try:
            columns, rows = os.get_terminal_size(self._out)
        except OSError:
            columns = rows = 0
        return Size(columns or 80, rows or 24)

    def write(self, text: str) -> None:
        """Write everything; characters that are no text are written as something else."""
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]

    def pressed(self) -> str:
        """The keys that were pressed; empty at the end of the input."""
        assert self.keys is not None
        return os.read(self.keys, 1_024).decode(errors="replace")

    def take(self) -> None:
        """Have the terminal as it is needed; again after another program had it."""
        if self.keys is not None:
            modes = termios.tcgetattr(self.keys)
            if self._modes is None:
                self._modes = modes
            wanted = [*modes[:3], modes[3] & ~(termios.ICANON | termios.ECHO), *modes[4:6], list(modes[6])]
            wanted[6][termios.VMIN], wanted[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self.keys, termios.TCSANOW, wanted)
        entering = self._alternate and not self._entered
        self._entered = True
        self.write((_ALTERNATE if entering else "") + _HIDE)

    def give_back(self) -> None:
        """Have it as it was. Whatever it refuses is left: it may be gone."""
        with _undisturbed():
            leaving, self._entered = self._alternate and self._entered, False
            if self.keys is not None and self._modes is not None:
                with contextlib.suppress(termios.error):
                    termios.tcflow(self.keys, termios.TCOON)
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self.keys, termios.TCSANOW, self._modes)
            if self._takes_bytes():
                with contextlib.suppress(OSError):
                    self.write(_SHOW + (_NORMAL if leaving else ""))

    def suspend(self) -> None:
        """Give it back, stop as Ctrl-Z asked, and take it again once this process goes on."""
        self.give_back()
        previous = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, previous)
        self.take()

    def __enter__(self) -> Self:
        try:
            self.take()
        except BaseException:
            self.give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def _takes_bytes(self) -> bool:
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        return bool(poll.poll(_PATIENCE_MS))


class Signals:
    """Signals that are no reason to end, as something to wait for.

    Those that end a process are left to whoever handles them already: their handlers raise.
    """

    def __init__(self, heard: Iterable[signal.Signals]) -> None:
        self._heard = tuple(heard)
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable once a signal came."""
        return self._read

    def came(self) -> set[int]:
        """The numbers of those that came."""
        try:
            return set(os.read(self._read, 4_096)) & set(map(int, self._heard))
        except BlockingIOError:
            return set()

    def __enter__(self) -> Self:
        # One that a shell without job control had us ignore stays ignored.
        heard = [number for number in self._heard if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, _nothing) for number in heard}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            os.close(self._read)
            os.close(self._write)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Only so that the signal has a handler, and is told through the pipe."""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No second signal ends the way out before it is at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
