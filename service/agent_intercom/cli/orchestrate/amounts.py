# SPDX-License-Identifier: Apache-2.0
"""Amounts as people write them: spans of time, sizes of memory, numbers of children. Pure.

Nothing heavy: the parser of the command line imports this. Everything raises ValueError, of which the text is
what there may be.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from agent_intercom.workers.contract import MAX_DURATION_MS

NEVER: Final = 0
"""What `infinity` is in milliseconds: that end does not come."""

_MIN_BYTES: Final = 16 * 1_048_576
_MAX_BYTES: Final = 2**50
_MIN_TASKS: Final = 8
_MAX_TASKS: Final = 100_000
"""Bounds as the settings of runs have them: with less nothing begins, and why is hard to see."""

_INFINITY: Final = "infinity"
_SPAN: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]+)\s*", re.ASCII)
_MS: Final = {
    "us": 0.001,
    "ms": 1,
    "s": 1_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
    "month": 2_629_800_000,
    "year": 31_557_600_000,
}
"""Milliseconds of each unit (managed-workers spec, section 3.10). A lone `m` could be two of them."""

_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(?:iB)?", re.ASCII | re.IGNORECASE)
_BYTES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)


class Children(NamedTuple):
    """How many workers a worker may have at one time: of its own, and with theirs."""

    children: int
    descendants: int


def span(text: str) -> int:
    """`90min`, `2h 30min` or `infinity` in milliseconds, `NEVER` for the last. A bare number has no unit: refused."""
    rest = text.strip().lower()
    if rest == _INFINITY:
        return NEVER
    total = 0.0
    while rest:
        found = _SPAN.match(rest)
        if found is None or found[2] not in _MS:
            raise ValueError("must be a time such as 90min or 2h 30min (us ms s min h d w month year), or infinity")
        total += float(found[1]) * _MS[found[2]]
        rest = rest[found.end() :]
    if not 0 < total <= MAX_DURATION_MS:
        raise ValueError("must be more than nothing and at most a hundred years, or infinity")
    return max(round(total), 1)


def size(text: str) -> int:
    """`512M` or `2G` in bytes; a bare number is bytes. Powers of 1024, as systemd has it (systemd.syntax(7))."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("must be a size such as 512M or 2G")
    number = round(float(found[1]) * _BYTES[found[2].upper()])
    if not _MIN_BYTES <= number < _MAX_BYTES:
        raise ValueError("must be a size of at least 16M, such as 512M or 2G; a number alone is bytes")
    return number


def tasks(text: str) -> int:
    """How many processes and threads a worker may have."""
    if _NUMBER.fullmatch(text) is None or not _MIN_TASKS <= int(text) <= _MAX_TASKS:
        raise ValueError(f"must be a whole number from {_MIN_TASKS} to {_MAX_TASKS}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if _NUMBER.fullmatch(text) is None or int(text) == 0:
        raise ValueError("must be a whole number from 1 on")
    return int(text)


def children(text: str) -> Children:
    """`3`, or `3/10`: that many workers of its own, and ten with theirs; without it as many as of its own."""
    parts = text.split("/")
    if len(parts) > 2 or not all(_NUMBER.fullmatch(part) for part in parts):
        raise ValueError("must be N or N/DESCENDANTS, both whole numbers")
    numbers = [int(part) for part in parts]
    own, all_of_them = numbers[0], numbers[-1]
    if not 0 < own <= all_of_them <= 10_000:
        raise ValueError("must be N or N/DESCENDANTS with 1 <= N <= DESCENDANTS <= 10000")
    return Children(own, all_of_them)


def spoken(ms: int) -> str:
    """A span for a person, in its largest unit: `0 s`, `12 min`, `3 h`, `2 d`."""
    for amount, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= amount:
            return f"{ms // amount} {unit}"
    return f"{max(ms, 0) // 1_000} s"
