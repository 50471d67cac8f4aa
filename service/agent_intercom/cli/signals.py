# SPDX-License-Identifier: Apache-2.0
"""Signals that end a command: SIGTERM and SIGHUP let it clean up as SIGINT does, so that no ask stays behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asked the command to end; `number` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def heeded() -> list[signal.Signals]:
    """Those of `ENDING` that the command was not started to ignore, as nohup(1) does."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def raising() -> Iterator[None]:
    """Raise `Ended` where the command happens to be. Code in an event loop is told by the loop instead."""
    previous = {number: signal.signal(number, _raise) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no signal that ends the command come before what is begun here is at its end; it comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)
