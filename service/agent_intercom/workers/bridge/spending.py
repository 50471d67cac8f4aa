# SPDX-License-Identifier: Apache-2.0
"""What a role and an assignment have used, from what a command says of itself (orchestration spec, 2.9, 2.10, 7.5).

A command knows what it has used since it began; a role's usage is the sum over all that ran for it. Usage objects are
those of the wire, as dicts: nothing is estimated, and what nobody said is absent. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent_intercom.orchestration import usage as wire_usage
from agent_intercom.orchestration.budget import ASSIGNMENT_METRICS, LEVELS, Number
from agent_intercom.orchestration.contract import Code
from agent_intercom.orchestration.errors import Refusal

Usage = dict[str, Any]

_SUMMED: Final = ("input", "output", "cacheRead", "cacheWrite", "providerCalls")
_REASONING: Final = "reasoning"
_LATEST: Final = ("contextTokens", "contextWindow", "contextPercent")
_PEAK: Final = "peakContextTokens"
_DECIMALS: Final = 12


class Spending(msgspec.Struct):
    """What was used. `before` is the role's usage when its assignment came, `finished` that of commands that ended.

    `running` is what the command that runs said last. `peak` is the largest context of the assignment.
    """

    before: Usage | None = None
    finished: Usage | None = None
    running: Usage | None = None
    peak: int | None = None

    def assigned(self) -> None:
        """A new assignment begins: from here on its own share is counted."""
        self.before = self.cumulative()
        self.peak = None

    def said(self, usage: Usage) -> None:
        """Take what the command that runs has used since it began. Raises Refusal `invalid_protocol`."""
        wire_usage.progress(usage)
        checked = {key: value for key, value in usage.items() if value is not None}
        if not _can_be_said(_sum(self.finished, checked)):
            raise Refusal(Code.INVALID_PROTOCOL, "usage of the role is larger than the protocol can say", "usage")
        self.running = checked
        if (tokens := checked.get("contextTokens")) is not None:
            self.peak = max(tokens, self.peak or 0)

    def mend(self) -> None:
        """Know nothing, where any of it, or its sum, is no usage, as an earlier bridge may have kept it."""
        known = [each for each in (self.before, self.finished, self.running) if each is not None]
        if not all(map(_can_be_said, known)) or not _can_be_said(self.cumulative()):
            self.before = self.finished = self.running = self.peak = None

    def ended(self) -> None:
        """The command has ended; what the next one says counts anew."""
        self.finished, self.running = self.cumulative(), None

    def cumulative(self) -> Usage | None:
        """The role's usage; None where no command has said anything."""
        return self.finished if self.running is None else _sum(self.finished, self.running)

    def share(self) -> Usage | None:
        """The assignment's share of it, with its peak."""
        total = self.cumulative()
        if total is None:
            return None
        before = self.before or {}
        share = {**total, **{key: max(total[key] - before.get(key, 0), 0) for key in _SUMMED}}
        if _REASONING in total:
            share[_REASONING] = max(total[_REASONING] - before.get(_REASONING, 0), 0)
        cost = total["cost"]["total"] - before.get("cost", {"total": 0})["total"]
        share["cost"] = {"total": max(round(cost, _DECIMALS), 0)}
        if self.peak is not None:
            share[_PEAK] = self.peak
        return share

    def report(self) -> Usage | None:
        """The usage of a report."""
        total, share = self.cumulative(), self.share()
        return None if total is None or share is None else {"cumulative": total, "assignment": share}


class Crossing(msgspec.Struct, frozen=True):
    """A threshold of the assignment was reached."""

    level: str
    metric: str
    observed: Number
    threshold: Number


def crossings(spending: Spending, thresholds: Mapping[str, Mapping[str, Number]]) -> list[Crossing]:
    """Every threshold that the assignment has reached, by level and metric."""
    share = spending.share()
    if share is None:
        return []
    observed = {
        "provider_calls": share.get("providerCalls"),
        "context_tokens": share.get("contextTokens"),
        "context_percent": share.get("contextPercent"),
    }
    return [
        Crossing(level, metric, value, limit)
        for level in LEVELS
        for metric in ASSIGNMENT_METRICS
        if (value := observed[metric]) is not None
        and (limit := thresholds.get(level, {}).get(metric)) is not None
        and value >= limit
    ]


def is_report(usage: Usage | None) -> bool:
    """Whether that is the usage of a report, or none."""
    try:
        wire_usage.report(usage)
    except Refusal:
        return False
    return True


def _can_be_said(usage: Usage | None) -> bool:
    try:
        wire_usage.progress(usage)
    except Refusal:
        return False
    return True


def _sum(one: Usage | None, other: Usage) -> Usage:
    if one is None:
        return dict(other)
    total = {key: one[key] + other[key] for key in _SUMMED}
    if _REASONING in one or _REASONING in other:
        total[_REASONING] = one.get(_REASONING, 0) + other.get(_REASONING, 0)
    total["cost"] = {"total": round(one["cost"]["total"] + other["cost"]["total"], _DECIMALS)}
    return total | {key: other[key] for key in _LATEST if key in other}
