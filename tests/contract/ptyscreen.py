# SPDX-License-Identifier: Apache-2.0
"""A program on a terminal of the tests' own, and what a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.contract.peer import HANG

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Glass:
    """A screen that knows the few sequences that a view may use, and fails at any other."""

    def __init__(self, columns: int, rows: int) -> None:
        self.cursor_shown = True
        self.alternate = False
        self._pending = ""
        self._other: list[str] = []
        self.columns, self.rows = columns, rows
        self._lines = [""]
        self._row = self._column = 0

    def resize(self, columns: int, rows: int) -> None:
        """Another size: on the normal screen, lines that are too long for it are wrapped."""
        self.columns, self.rows = columns, rows
        if self.alternate:
            return
        lines, self._lines = self._lines, []
        row, column = self._row, self._column
        for number, line in enumerate(lines):
            if number == row:
                self._row, self._column = len(self._lines) + column // columns, column % columns
            self._lines += [line[at : at + columns] for at in range(0, len(line), columns)] or [""]

    def clear(self) -> None:
        self._lines = [""]
        self._row = self._column = 0

    @property
    def text(self) -> str:
        """What is on the screen; on the normal one also what has scrolled away."""
        return "\n".join(line.rstrip() for line in self._lines)

    def feed(self, data: str) -> None:
        data = self._pending + data
        self._pending = ""
        while data:
            if data[0] == "\x1b":
                found = _SEQUENCE.match(data)
                if found is None:
                    assert len(data) < 16 and data[1:2] in {"", "["}, f"an unknown sequence: {data[:16]!r}"
                    self._pending = data
                    return
                self._obey(*found.groups())
                data = data[found.end() :]
            else:
                self._put(data[0])
                data = data[1:]

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            assert not self.alternate or self._row < self.rows, "the other screen scrolled"
            if self._row == len(self._lines):
                self._lines.append("")
        else:
            assert character.isprintable(), repr(character)
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
            assert self._column < self.columns, f"a line fills the width: {self._lines[self._row]!r}"

    def _obey(self, private: str, arguments: str, command: str) -> None:
        match private, arguments, command:
            case "", _, "m":
                assert arguments in {"0", "1", "2", "31", "32", "33", "36"}
            case "", "", "H":
                self._row = self._column = 0
            case "", "", "K":
                self._lines[self._row] = self._lines[self._row][: self._column]
            case "", "", "J":
                self._lines[self._row] = self._lines[self._row][: self._column]
                del self._lines[self._row + 1 :]
            case "", "2", "J":
                self.clear()
            case "", _, "A":
                self._row -= int(arguments)
                assert self._row >= 0
            case "?", "25", "l" | "h":
                self.cursor_shown = command == "h"
            case "?", "1049", "h" | "l":
                assert self.alternate is (command == "l")
                self.alternate = command == "h"
                self._lines, self._other = self._other or [""], self._lines
                self._row, self._column = len(self._lines) - 1, 0
            case _:
                raise AssertionError(f"an unknown sequence: {private}{arguments}{command}")


class OnTerminal:
    """A program whose terminal is ours. `raw` is everything that it wrote."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, size: tuple[int, int]
    ) -> None:
        self._master, self._slave = pty.openpty()
        self.before = self.modes()
        self.glass = Glass(*size)
        self.raw = ""
        self._size(*size)
        # A session's leader that opens a terminal gets it: with it, keys send signals and a new size tells.
        opening = 'exec "$@" <>"$TESTS_TERMINAL" >&0 2>&0'
        self.process = subprocess.Popen(
            ["sh", "-c", opening, "sh", *command],
            env={**environment, "TESTS_TERMINAL": os.ttyname(self._slave)},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def modes(self) -> list[Any]:
        """The modes of the terminal: echo, lines, keys that send signals."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, rows: int) -> None:
        """Another size, which the kernel tells the program with SIGWINCH."""
        self.glass.resize(columns, rows)
        self._size(columns, rows)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def pump(self, seconds: float) -> bool:
        """Read what was written within that time; whether there was something."""
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return False
        data = os.read(self._master, 65_536).decode()
        self.raw += data
        self.glass.feed(data)
        return True

    def until(self, *parts: str, but: Sequence[str] = ()) -> str:
        """Wait until all parts are on the screen, and none of `but`; the screen."""
        return self.wait_for(lambda text: all(p in text for p in parts) and not any(p in text for p in but))

    def wait_for(self, wanted: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + HANG
        while not wanted(self.glass.text):
            assert self.pump(max(deadline - time.monotonic(), 0)), f"it was never shown:\n{self.glass.text}"
        return self.glass.text

    def end(self) -> int:
        """Wait for the program's end and read everything that it wrote; its exit status."""
        deadline = time.monotonic() + HANG
        while self.process.poll() is None:
            # It may wait for its output to be taken.
            self.pump(0.02)
            assert time.monotonic() < deadline, f"it never ended:\n{self.glass.text}"
        while self.pump(0):
            pass
        return self.process.returncode

    def hang_up(self) -> int:
        """Take the terminal away; the program's exit status."""
        master, self._master = self._master, os.open(os.devnull, os.O_RDONLY)
        os.close(master)
        return self.process.wait(HANG)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
