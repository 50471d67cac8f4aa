# SPDX-License-Identifier: Apache-2.0
"""What a provider reported, read from worker frames and written for observers (orchestration spec, 2.9, 2.10, 3.3).

Counts are integers of at most 63 bits, costs and percentages finite floats; booleans are neither. Everything that a
worker sends wrong is refused with `invalid_protocol`; nothing is estimated or filled in.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.contract import MAX_INTEGER, Code
from agent_intercom.orchestration.errors import Refusal

_LIFECYCLE: Final = "Provider usage is invalid"
_PROGRESS: Final = "Worker progress usage is invalid"
_REPORT: Final = "Assignment provider usage is invalid"

_COUNTS: Final = {
    "input": "input_tokens",
    "output": "output_tokens",
    "cacheRead": "cache_read_tokens",
    "cacheWrite": "cache_write_tokens",
}
_COST: Final = "cost"
_CALLS: Final = "providerCalls"
_OPTIONAL_COUNTS: Final = {
    "reasoning": "reasoning_tokens",
    "contextTokens": "context_tokens",
    "contextWindow": "context_window",
}
_PERCENT: Final = "contextPercent"
_PEAK: Final = "peakContextTokens"

_REQUIRED: Final = frozenset({*_COUNTS, _COST})
_REQUIRED_WITH_CALLS: Final = _REQUIRED | {_CALLS}
_KNOWN: Final = _REQUIRED_WITH_CALLS | frozenset({*_OPTIONAL_COUNTS, _PERCENT})
_KNOWN_WITH_PEAK: Final = _KNOWN | {_PEAK}
_TOTAL: Final = frozenset({"total"})
_BOTH: Final = frozenset({"cumulative", "assignment"})


class ReportUsage(msgspec.Struct, frozen=True):
    """Usage that comes with a report: the role's so far, and the assignment's own share of it."""

    cumulative: rows.Usage
    assignment: rows.AssignmentUsage


def lifecycle(value: object) -> tuple[rows.Usage | None, bool]:
    """Usage of a `lifecycle` frame, and whether it says anything about provider calls.

    Calls that are null are given, as unavailable; calls that are absent are not, and leave what is stored alone. Raises
    Refusal `invalid_protocol`.
    """
    if value is None:
        return None, False
    given = _members(value, _REQUIRED, _KNOWN, _LIFECYCLE)
    calls = _optional_count(given.get(_CALLS), _LIFECYCLE)
    return rows.Usage(provider_calls=calls, **_shared(given, _LIFECYCLE)), _CALLS in given


def progress(value: object) -> rows.Usage | None:
    """Usage of a `progress` frame, provider calls included. Raises Refusal `invalid_protocol`."""
    return None if value is None else _cumulative(value, _PROGRESS)


def report(value: object) -> ReportUsage | None:
    """Usage of a `report` frame. Raises Refusal `invalid_protocol`."""
    if value is None:
        return None
    given = _members(value, _BOTH, _BOTH, _REPORT)
    share = _members(given["assignment"], _REQUIRED_WITH_CALLS, _KNOWN_WITH_PEAK, _REPORT)
    return ReportUsage(
        cumulative=_cumulative(given["cumulative"], _REPORT),
        assignment=rows.AssignmentUsage(
            provider_calls=_count(share[_CALLS], _REPORT),
            peak_context_tokens=_optional_count(share.get(_PEAK), _REPORT),
            **_shared(share, _REPORT),
        ),
    )


def public(usage: rows.AssignmentUsage) -> dict[str, Any]:
    """`usage` as an observer gets it. What is unavailable is absent: observers refuse a null in its place."""
    shown: dict[str, Any] = {key: getattr(usage, name) for key, name in _COUNTS.items()}
    shown[_COST] = {"total": usage.cost_total}
    shown[_CALLS] = usage.provider_calls
    shown |= {key: getattr(usage, name) for key, name in _OPTIONAL_COUNTS.items()}
    shown[_PERCENT] = usage.context_percent
    shown[_PEAK] = usage.peak_context_tokens
    return {key: value for key, value in shown.items() if value is not None}


def count(value: object) -> int | None:
    """`value` if it is a count: an integer from 0 that 63 bits hold, and not a boolean. None for anything else."""
    return value if type(value) is int and 0 <= value <= MAX_INTEGER else None


def number(value: object) -> int | float | None:
    """`value` if it is a count or a finite float from 0. None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) and value >= 0 else None
    return count(value)


def _cumulative(value: object, text: str) -> rows.Usage:
    given = _members(value, _REQUIRED_WITH_CALLS, _KNOWN, text)
    return rows.Usage(provider_calls=_count(given[_CALLS], text), **_shared(given, text))


def _shared(given: dict[str, Any], text: str) -> dict[str, Any]:
    """The fields of `rows.Usage` that every usage object has, provider calls aside."""
    fields: dict[str, Any] = {name: _count(given[key], text) for key, name in _COUNTS.items()}
    fields |= {name: _optional_count(given.get(key), text) for key, name in _OPTIONAL_COUNTS.items()}
    fields["cost_total"] = _float(_members(given[_COST], _TOTAL, _TOTAL, text)["total"], text)
    percent = given.get(_PERCENT)
    fields["context_percent"] = None if percent is None else _float(percent, text)
    return fields


def _members(value: object, required: frozenset[str], known: frozenset[str], text: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not required <= value.keys() <= known:
        raise _refusal(text)
    return value


def _optional_count(value: object, text: str) -> int | None:
    return None if value is None else _count(value, text)


def _count(value: object, text: str) -> int:
    counted = count(value)
    if counted is None:
        raise _refusal(text)
    return counted


def _float(value: object, text: str) -> float:
    measured = number(value)
    if measured is None:
        raise _refusal(text)
    return float(measured)


def _refusal(text: str) -> Refusal:
    return Refusal(Code.INVALID_PROTOCOL, text, "usage")
