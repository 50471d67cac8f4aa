# SPDX-License-Identifier: Apache-2.0
"""Which of the runs that have ended are not kept. Pure: ages are handed in, and nothing is removed here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final, NamedTuple

DAY_S: Final = 86_400

AGE: Final = "age"
NUMBER: Final = "number"
"""Why a run is not kept: it ended too long ago, or there are enough newer ones."""


class Candidate(NamedTuple):
    """A run of the state root `root` that was at work last at `ended` (seconds since 1970).

    One that is `held` (it lives, or something uses it) is counted and never chosen.
    """

    root: str
    directory: str
    ended: float
    held: bool = False


class Chosen(NamedTuple):
    """A run that is not kept, and the rule that says so."""

    candidate: Candidate
    reason: str


def choose(candidates: Iterable[Candidate], now: float, keep_days: int | None, keep_runs: int | None) -> list[Chosen]:
    """The runs that are not kept, by root and oldest first.

    A run goes when it ended more than `keep_days` days before `now`, or when `keep_runs` runs of its root are newer.
    None: the rule does not count. One that seems to end in the future is as new as can be.
    """
    newest_first = sorted(candidates, key=lambda each: (each.root, -each.ended, each.directory))
    chosen: list[Chosen] = []
    for _, group in groupby(newest_first, key=lambda each: each.root):
        of_root = [
            Chosen(candidate, reason)
            for rank, candidate in enumerate(group)
            if (reason := _reason(candidate, rank, now, keep_days, keep_runs)) and not candidate.held
        ]
        chosen += reversed(of_root)
    return chosen


def _reason(candidate: Candidate, rank: int, now: float, keep_days: int | None, keep_runs: int | None) -> str:
    if keep_days is not None and now - candidate.ended > keep_days * DAY_S:
        return AGE
    return NUMBER if keep_runs is not None and rank >= keep_runs else ""
