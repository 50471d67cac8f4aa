# SPDX-License-Identifier: Apache-2.0
"""Budget policy, version 1 (orchestration spec, section 7.6): thresholds that are watched and never enforced.

Every function raises Refusal `INVALID_BUDGET`, with the field as it stands in the file, such as
`warning.run.operational_tokens`. The code never reaches the wire.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from agent_intercom.orchestration.errors import Refusal

INVALID_BUDGET: Final = "invalid_budget"

VERSION: Final = 1
WARN_ONLY: Final = "warn-only"
HARD: Final = "hard"
ENFORCEMENTS: Final = (WARN_ONLY, HARD)
LEVELS: Final = ("warning", "hard")
SCOPES: Final = ("run", "role", "assignment")
ASSIGNMENT_METRICS: Final = ("context_percent", "context_tokens", "provider_calls")
"""What a worker bridge evaluates of the scope `assignment`."""
MAX_OVERRIDES: Final = 60

_MAX_COUNT: Final = 10**12
_COUNTS: Final = (
    "provider_calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "operational_tokens",
    "context_tokens",
)
_AMOUNTS: Final = {"cost_total": 10**9, "context_percent": 100}
METRICS: Final = (*_COUNTS, *_AMOUNTS)

# Sixteen digits are more than any threshold has, and too few to make a long integer of.
_COUNT = re.compile(r"[0-9]{1,16}")
_AMOUNT = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?")

Number = int | float
Thresholds = dict[str, dict[str, Number | None]]
"""Scope to metric to threshold. Every scope is there; None takes away what would be inherited."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of both levels. `enforcement` is None where it is inherited; a merged policy holds no None."""

    enforcement: str | None = None
    warning: Thresholds
    hard: Thresholds


class Crossed(NamedTuple):
    """A threshold that was crossed; of two for the same thing, the hard one. `role` is None for the scope `run`."""

    scope: str
    role: str | None
    level: str
    metric: str
    observed: Number
    threshold: Number


PACKAGED: Final = Policy(
    enforcement=WARN_ONLY,
    warning={"run": {"operational_tokens": 600_000}, "role": {"operational_tokens": 200_000}, "assignment": {}},
    hard={"run": {}, "role": {}, "assignment": {}},
)


def parse(value: object) -> Policy:
    """Read a policy from the value of a JSON text. What is absent is inherited."""
    fields = _object(value, "", ("version", "enforcement", *LEVELS))
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise _refusal("version", f"must be {VERSION}")
    enforcement = _enforcement(fields["enforcement"]) if "enforcement" in fields else None
    policy = Policy(
        enforcement=enforcement,
        warning=_thresholds(fields.get("warning", {}), "warning"),
        hard=_thresholds(fields.get("hard", {}), "hard"),
    )
    _check_order(policy)
    return policy


def from_json(text: str | bytes) -> Policy:
    """Read a policy from JSON: of a file, or as a database retains it. A key that is there twice is refused."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(INVALID_BUDGET, "Budget is not valid JSON", "budget") from error
    return parse(value)


def to_json(policy: Policy) -> str:
    """`policy` as compact JSON with sorted keys: the inverse of `from_json`."""
    fields: dict[str, Any] = {"version": VERSION, "warning": policy.warning, "hard": policy.hard}
    if policy.enforcement is not None:
        fields["enforcement"] = policy.enforcement
    return _compact(fields)


def merge(base: Policy, *overrides: Policy) -> Policy:
    """`base` under `overrides`, of which the later wins. Thresholds that are None are gone from the result.

    Warning and hard thresholds are compared in the result only: a later policy may mend what an earlier one makes of
    the base.
    """
    policies = (base, *overrides)
    merged = Policy(
        enforcement=next((one.enforcement for one in reversed(policies) if one.enforcement is not None), WARN_ONLY),
        warning=_merged([one.warning for one in policies]),
        hard=_merged([one.hard for one in policies]),
    )
    _check_order(merged)
    return merged


def override(text: str) -> Policy:
    """One `LEVEL.SCOPE.METRIC=VALUE` of a command line as a policy; the value `off` takes the threshold away."""
    return overrides([text])


def overrides(texts: Sequence[str], enforcement: str | None = None) -> Policy:
    """What a command line overrides: at most 60 texts, no threshold twice, and an enforcement mode or None."""
    if len(texts) > MAX_OVERRIDES:
        raise Refusal(INVALID_BUDGET, f"Budget takes at most {MAX_OVERRIDES} overrides", "budget_override")
    levels: dict[str, Thresholds] = {level: {scope: {} for scope in SCOPES} for level in LEVELS}
    for text in texts:
        level, scope, metric, value = _override(text)
        if metric in levels[level][scope]:
            raise _refusal(f"{level}.{scope}.{metric}", "is overridden twice")
        levels[level][scope][metric] = value
    mode = None if enforcement is None else _enforcement(enforcement)
    policy = Policy(enforcement=mode, warning=levels["warning"], hard=levels["hard"])
    _check_order(policy)
    return policy


def guardrails(policy: Policy) -> str:
    """What a worker bridge is told of a merged `policy`: compact JSON with sorted keys."""
    levels = {level: {m: v for m in ASSIGNMENT_METRICS if (v := threshold(policy, level, m))} for level in LEVELS}
    return _compact({"enforcement": policy.enforcement or WARN_ONLY, **levels})


def threshold(policy: Policy, level: str, metric: str) -> Number | None:
    """The threshold of an assignment, or None where there is none by that level and metric."""
    thresholds = {"warning": policy.warning, "hard": policy.hard}.get(level, {})
    return thresholds.get("assignment", {}).get(metric)


def soft_tokens(policy: Policy) -> tuple[int, int]:
    """The warning thresholds of a role's and of the run's operational tokens; 0 where there is none."""
    role, run = (policy.warning.get(scope, {}).get("operational_tokens") for scope in ("role", "run"))
    return int(role or 0), int(run or 0)


def crossed(
    policy: Policy, measured: Iterable[tuple[str, str | None, Mapping[str, Number | None]]]
) -> Iterator[Crossed]:
    """Every threshold that `measured` crosses: scope, role and what was observed, by metric.

    What is None or absent is not known, and crosses nothing. An assignment crosses a threshold that it reaches, as the
    worker bridge has it; a role and a run cross one that they exceed, as their soft budgets do.
    """
    levels = tuple(reversed(tuple(zip(LEVELS, (policy.warning, policy.hard), strict=True))))
    for scope, role, observed in measured:
        for metric in METRICS:
            value = observed.get(metric)
            for level, thresholds in levels:
                limit = thresholds.get(scope, {}).get(metric)
                if value is None or limit is None:
                    continue
                if value > limit or (scope == "assignment" and value == limit):
                    yield Crossed(scope, role, level, metric, value, limit)
                    break


def _thresholds(value: object, level: str) -> Thresholds:
    scopes = _object(value, level, SCOPES)
    result: Thresholds = {scope: {} for scope in SCOPES}
    for scope, metrics in scopes.items():
        for metric, number in _object(metrics, f"{level}.{scope}", METRICS).items():
            result[scope][metric] = None if number is None else _number(number, f"{level}.{scope}.{metric}", metric)
    return result


def _number(value: object, field: str, metric: str) -> Number:
    """`value` if the metric allows it. Exact types, for a bool is an integer to Python."""
    if metric in _COUNTS:
        if type(value) is int and 1 <= value <= _MAX_COUNT:
            return value
        raise _refusal(field, f"must be an integer from 1 to {_MAX_COUNT} or null")
    if type(value) in {int, float} and isinstance(value, (int, float)) and 0 < value <= _AMOUNTS[metric]:
        return value
    raise _refusal(field, f"must be a number above 0 and at most {_AMOUNTS[metric]} or null")


def _override(text: str) -> tuple[str, str, str, Number | None]:
    name, separator, value = text.partition("=")
    parts = name.split(".")
    if not separator or len(parts) != 3:
        raise Refusal(INVALID_BUDGET, "Budget override must be LEVEL.SCOPE.METRIC=VALUE|off", "budget_override")
    for part, known, label in zip(parts, (LEVELS, SCOPES, METRICS), ("level", "scope", "metric"), strict=True):
        if part not in known:
            wanted = f"Budget override names no {label} of {' '.join(known)}"
            raise Refusal(INVALID_BUDGET, wanted, "budget_override")
    level, scope, metric = parts
    if value == "off":
        return level, scope, metric, None
    number: object = None
    if _COUNT.fullmatch(value):
        number = int(value)
    elif _AMOUNT.fullmatch(value):
        number = float(value)
    if number is None:
        raise _refusal(name, "must be a plain decimal number or off")
    return level, scope, metric, _number(number, name, metric)


def _merged(levels: Iterable[Thresholds]) -> Thresholds:
    result: Thresholds = {scope: {} for scope in SCOPES}
    for level in levels:
        for scope, metrics in level.items():
            result[scope].update(metrics)
    return {scope: {m: value for m, value in metrics.items() if value is not None} for scope, metrics in result.items()}


def _check_order(policy: Policy) -> None:
    for scope, metrics in policy.warning.items():
        for metric, warning in metrics.items():
            hard = policy.hard[scope].get(metric)
            if warning is not None and hard is not None and warning > hard:
                raise _refusal(f"warning.{scope}.{metric}", "cannot exceed its hard threshold")


def _enforcement(value: object) -> str:
    if not isinstance(value, str) or value not in ENFORCEMENTS:
        raise _refusal("enforcement", f"must be one of {' '.join(ENFORCEMENTS)}")
    return value


def _object(value: object, field: str, keys: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _refusal(field, "must be an object")
    if any(key not in keys for key in value):
        # The key itself is left out: it is whatever the file says.
        raise _refusal(field, f"takes only the keys {' '.join(keys)}")
    return value


def _refusal(field: str, text: str) -> Refusal:
    return Refusal(INVALID_BUDGET, f"Budget {field} {text}" if field else f"Budget {text}", field or "budget")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("key given twice")
    return result


def _no_constant(_name: str) -> float:
    # Refused as a threshold later, with the name of its field.
    return math.nan


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
