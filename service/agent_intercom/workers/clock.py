# SPDX-License-Identifier: Apache-2.0
"""The time that workers live by. Deadlines are of the wall clock, which people read; they are kept when it is set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

STEP_MS: Final = 1000
"""What is less is a clock that is slowed down or hastened, or two that are not read at once."""


class Clock:
    """The wall clock, and whether somebody sets it: every other clock goes on then, so that no time has passed.

    `stepped` is called with the milliseconds that it was set forward, before `now` answers with anything of that.
    """

    def __init__(self) -> None:
        self.stepped: Callable[[int], None] = lambda _: None
        self._ahead = self._read()[1]

    def now(self) -> int:
        """Milliseconds since the epoch."""
        now, ahead = self._read()
        by, self._ahead = ahead - self._ahead, ahead
        if abs(by) >= STEP_MS:
            self.stepped(by)
        return now

    def _read(self) -> tuple[int, int]:
        """The wall clock, and how far it is ahead of the one that counts from the boot, with the time of sleep."""
        now = time.time_ns() // 1_000_000
        return now, now - time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


CLOCK: Final = Clock()


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return CLOCK.now()
