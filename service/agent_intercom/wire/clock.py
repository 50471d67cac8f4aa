# SPDX-License-Identifier: Apache-2.0
"""Time as the pure cores see it: a value that is handed in."""

from __future__ import annotations

import time
from typing import NamedTuple


class Now(NamedTuple):
    """An instant, in integer milliseconds.

    `mono` is CLOCK_MONOTONIC (timers; comparable between processes of one boot); `wall` is the Unix epoch (what peers
    are shown and what is stored).
    """

    mono: int
    wall: int


_new = tuple.__new__


def system_now() -> Now:
    """Read both clocks of this machine."""
    # What Now(…) does, without its layer of Python: this is read on every wake.
    return _new(Now, (time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000))
