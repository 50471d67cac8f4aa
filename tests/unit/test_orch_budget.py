# SPDX-License-Identifier: Apache-2.0
"""Budget policy: every bound of every metric, every way to be refused, and what is made of a policy."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_intercom.orchestration import budget
from agent_intercom.orchestration.budget import PACKAGED, Policy
from agent_intercom.orchestration.errors import Refusal

COUNTS = [
    "provider_calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "operational_tokens",
    "context_tokens",
]
AMOUNTS = {"cost_total": 10**9, "context_percent": 100}
SCOPES = ["run", "role", "assignment"]
PLACES = [(level, scope) for level in ("warning", "hard") for scope in SCOPES]


def refused(call: Any, *args: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args)
    assert caught.value.code == budget.INVALID_BUDGET
    return caught.value


def policy(**fields: Any) -> Policy:
    return budget.parse({"version": 1, **fields})


def scopes(**given_scopes: Any) -> dict[str, Any]:
    return {"run": {}, "role": {}, "assignment": {}} | given_scopes


def test_the_packaged_policy() -> None:
    assert PACKAGED.enforcement == "warn-only"
    assert PACKAGED.warning == scopes(run={"operational_tokens": 600000}, role={"operational_tokens": 200000})
    assert PACKAGED.hard == scopes()
    assert budget.soft_tokens(PACKAGED) == (200000, 600000)
    assert budget.guardrails(PACKAGED) == '{"enforcement":"warn-only","hard":{},"warning":{}}'


def test_a_policy_that_says_nothing_inherits_everything() -> None:
    assert policy() == Policy(warning=scopes(), hard=scopes())
    assert budget.merge(PACKAGED, policy()) == PACKAGED == budget.merge(PACKAGED)


@pytest.mark.parametrize(("level", "scope"), PLACES)
@pytest.mark.parametrize("metric", COUNTS)
def test_counts_are_bounded_integers(level: str, scope: str, metric: str) -> None:
    for value in (1, 10**12):
        assert getattr(policy(**{level: {scope: {metric: value}}}), level)[scope] == {metric: value}
    for value in (0, -1, 10**12 + 1, 10**400, 1.0, 1.5, True, False, "1", [], {}, math.nan):
        error = refused(budget.parse, {"version": 1, level: {scope: {metric: value}}})
        assert error.field == f"{level}.{scope}.{metric}"
        assert error.text == f"Budget {error.field} must be an integer from 1 to 1000000000000 or null"


@pytest.mark.parametrize(("level", "scope"), PLACES)
@pytest.mark.parametrize(("metric", "most"), AMOUNTS.items())
def test_amounts_are_bounded_numbers(level: str, scope: str, metric: str, most: int) -> None:
    for value in (5e-324, 0.5, 1, most, float(most)):
        assert getattr(policy(**{level: {scope: {metric: value}}}), level)[scope] == {metric: value}
    above = math.nextafter(most, math.inf)
    for value in (0, 0.0, -0.5, above, most + 1, 10**400, True, False, "1", [], {}, math.nan, math.inf):
        error = refused(budget.parse, {"version": 1, level: {scope: {metric: value}}})
        assert error.field == f"{level}.{scope}.{metric}"
        assert error.text == f"Budget {error.field} must be a number above 0 and at most {most} or null"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "budget"),
        ([], "budget"),
        ("", "budget"),
        ({}, "version"),
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"version": 1.0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": 1, "limits": {}}, "budget"),
        ({"version": 1, "enforcement": None}, "enforcement"),
        ({"version": 1, "enforcement": "soft"}, "enforcement"),
        ({"version": 1, "enforcement": ["hard"]}, "enforcement"),
        ({"version": 1, "warning": None}, "warning"),
        ({"version": 1, "hard": []}, "hard"),
        ({"version": 1, "warning": {"session": {}}}, "warning"),
        ({"version": 1, "warning": {"run": None}}, "warning.run"),
        ({"version": 1, "hard": {"role": 5}}, "hard.role"),
        ({"version": 1, "hard": {"assignment": {"total_tokens": 5}}}, "hard.assignment"),
        ({"version": 1, "hard": {"assignment": {"total_tokens": None}}}, "hard.assignment"),
    ],
)
def test_another_shape_is_refused_by_the_name_of_its_field(value: object, field: str) -> None:
    error = refused(budget.parse, value)
    assert error.field == field
    assert field == "budget" or f"Budget {field} " in error.text


def test_a_refusal_quotes_nothing_of_the_file() -> None:
    canary = "x-canary-x"
    for value in ({canary: 1}, {"version": canary}, {"version": 1, "enforcement": canary},
                  {"version": 1, "warning": {canary: {}}}, {"version": 1, "warning": {"run": {canary: 1}}},
                  {"version": 1, "warning": {"run": {"cost_total": canary}}}):  # fmt: skip
        assert canary not in refused(budget.parse, value).text
        assert canary not in refused(budget.from_json, json.dumps(value)).text
    for text in (canary, f"{canary}=1", f"{canary}.run.cost_total=1", f"warning.{canary}.cost_total=1",
                 f"warning.run.{canary}=1", f"warning.run.cost_total={canary}"):  # fmt: skip
        assert canary not in refused(budget.override, text).text


@pytest.mark.parametrize("metric", [*COUNTS, *AMOUNTS])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_warning_comes_no_later_than_its_hard_threshold(scope: str, metric: str) -> None:
    low, high = {scope: {metric: 7}}, {scope: {metric: 8}}
    text = f"Budget warning.{scope}.{metric} cannot exceed its hard threshold"
    error = refused(budget.parse, {"version": 1, "warning": high, "hard": low})
    assert (error.text, error.field) == (text, f"warning.{scope}.{metric}")
    assert refused(budget.merge, policy(warning=high), policy(hard=low)).text == text
    assert refused(budget.overrides, [f"warning.{scope}.{metric}=8", f"hard.{scope}.{metric}=7"]).text == text
    policy(warning=low, hard=high)
    policy(warning=high, hard=high)
    policy(warning=high, hard={scope: {metric: None}})
    policy(warning={scope: {metric: None}}, hard=low)
    for other in SCOPES:
        if other != scope:
            policy(warning=high, hard={other: {metric: 7}})


def test_a_later_policy_wins_and_null_takes_away() -> None:
    file = policy(
        enforcement="hard",
        warning={"run": {"operational_tokens": None, "cost_total": 2.5}, "role": {"operational_tokens": 5}},
        hard={"assignment": {"provider_calls": 9}},
    )
    assert budget.merge(PACKAGED, file) == Policy(
        enforcement="hard",
        warning=scopes(run={"cost_total": 2.5}, role={"operational_tokens": 5}),
        hard=scopes(assignment={"provider_calls": 9}),
    )
    line = budget.overrides(["hard.assignment.provider_calls=off", "warning.run.operational_tokens=1"], "warn-only")
    assert budget.merge(PACKAGED, file, line) == Policy(
        enforcement="warn-only",
        warning=scopes(run={"operational_tokens": 1, "cost_total": 2.5}, role={"operational_tokens": 5}),
        hard=scopes(),
    )
    assert budget.soft_tokens(PACKAGED) == (200000, 600000)


def test_a_command_line_may_mend_what_a_file_makes_of_the_packaged_policy() -> None:
    file = policy(hard={"role": {"operational_tokens": 100}})
    assert refused(budget.merge, PACKAGED, file).field == "warning.role.operational_tokens"
    merged = budget.merge(PACKAGED, file, budget.override("warning.role.operational_tokens=off"))
    assert merged.hard["role"] == {"operational_tokens": 100}
    assert budget.soft_tokens(merged) == (0, 600000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("warning.role.operational_tokens=1", 1),
        ("warning.role.operational_tokens=1000000000000", 10**12),
        ("warning.role.operational_tokens=007", 7),
        ("warning.role.operational_tokens=off", None),
        ("warning.role.cost_total=0.25", 0.25),
        ("warning.role.cost_total=1000000000", 10**9),
        ("warning.role.context_percent=100.0", 100.0),
        ("warning.role.context_percent=off", None),
    ],
)
def test_an_override_is_a_policy_of_one_threshold(text: str, value: float | None) -> None:
    metric = text.split(".", 2)[2].partition("=")[0]
    assert budget.override(text) == Policy(warning=scopes(role={metric: value}), hard=scopes())


@pytest.mark.parametrize(
    "text",
    ["", "=", "off", "warning", "warning.run=1", "warning.run.cost_total", "warning.run.cost.total=1",
     "Warning.run.cost_total=1", "soft.run.cost_total=1", "warning.session.cost_total=1", "warning.run.total=1",
     " warning.run.cost_total=1", "warning.run.cost_total =1"],
)  # fmt: skip
def test_an_override_of_nothing_known_is_refused(text: str) -> None:
    assert refused(budget.override, text).field == "budget_override"


@pytest.mark.parametrize("metric", ["input_tokens", "cost_total"])
@pytest.mark.parametrize(
    "value",
    ["", "OFF", "null", "0", "-1", "+1", " 1", "1 ", "1\n", "1_000", "0x10", "1e3", "1.", ".5", "nan", "inf", "true",
     "\u0661", "1=1", "1000000000001", "9" * 5000],
)  # fmt: skip
def test_an_override_by_another_value_is_refused(metric: str, value: str) -> None:
    assert refused(budget.override, f"hard.run.{metric}={value}").field == f"hard.run.{metric}"


def test_fractions_and_amounts_above_the_bound_are_refused_in_overrides_too() -> None:
    for text in ("warning.run.input_tokens=1.5", "warning.run.input_tokens=1.0", "hard.role.context_percent=100.01",
                 "hard.role.cost_total=1000000000.5", "hard.role.cost_total=0.0"):  # fmt: skip
        assert refused(budget.override, text).field == text.partition("=")[0]


def test_overrides_are_bounded_and_touch_no_threshold_twice() -> None:
    every = [f"{level}.{scope}.{metric}=5" for level, scope in PLACES for metric in (*COUNTS, *AMOUNTS)]
    assert len(every) == 60
    full = budget.overrides(every)
    assert full.hard == full.warning == {scope: dict.fromkeys((*COUNTS, *AMOUNTS), 5) for scope in SCOPES}
    assert refused(budget.overrides, [*every, "hard.run.cost_total=5"]).text == "Budget takes at most 60 overrides"
    for again in ("hard.run.cost_total=off", "hard.run.cost_total=5"):
        error = refused(budget.overrides, ["hard.run.cost_total=off", again])
        assert (error.field, error.text) == ("hard.run.cost_total", "Budget hard.run.cost_total is overridden twice")
    assert budget.overrides([], "hard") == Policy(enforcement="hard", warning=scopes(), hard=scopes())
    assert refused(budget.overrides, [], "off").field == "enforcement"


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"version":1}x', '{"version":1,"version":1}', b"\xff", '{"version":' + "9" * 5000 + "}",
     '{"version":1,"warning":{"run":{},"run":{}}}', '{"version":1,"warning":{"run":{"cost_total":1,"cost_total":2}}}',
     "[" * 100_000],
)  # fmt: skip
def test_what_is_not_plain_json_is_refused(text: str | bytes) -> None:
    assert refused(budget.from_json, text).text == "Budget is not valid JSON"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_by_their_field(value: str) -> None:
    error = refused(budget.from_json, f'{{"version":1,"warning":{{"run":{{"cost_total":{value}}}}}}}')
    assert error.field == "warning.run.cost_total"


def test_json_is_compact_and_sorted() -> None:
    assert budget.to_json(PACKAGED) == (
        '{"enforcement":"warn-only","hard":{"assignment":{},"role":{},"run":{}},"version":1,"warning":{"assignment":{},'
        '"role":{"operational_tokens":200000},"run":{"operational_tokens":600000}}}'
    )


def values(metric: str) -> st.SearchStrategy[Any]:
    if metric in COUNTS:
        return st.none() | st.integers(1, 10**12)
    return st.none() | st.floats(0, AMOUNTS[metric], exclude_min=True) | st.integers(1, AMOUNTS[metric])


LEVEL = st.fixed_dictionaries(
    {},
    optional={
        scope: st.fixed_dictionaries({}, optional={metric: values(metric) for metric in (*COUNTS, *AMOUNTS)})
        for scope in SCOPES
    },
)


@hypothesis_settings(deadline=None)
@given(st.sampled_from(["warning", "hard"]), LEVEL, st.sampled_from(["warn-only", "hard", None]))
def test_a_policy_survives_json(level: str, thresholds: dict[str, Any], enforcement: str | None) -> None:
    mode = {} if enforcement is None else {"enforcement": enforcement}
    read = policy(**{level: thresholds}, **mode)
    assert budget.from_json(budget.to_json(read)) == read
    bare = Policy(enforcement="warn-only", warning=scopes(), hard=scopes())
    merged = budget.merge(bare, read)
    assert budget.from_json(budget.to_json(merged)) == merged == budget.merge(merged, read) == budget.merge(merged)
    assert all(value is not None for scope in getattr(merged, level).values() for value in scope.values())


def test_a_bridge_is_told_of_three_metrics_of_assignments() -> None:
    everything = dict.fromkeys((*COUNTS, *AMOUNTS), 5)
    full = budget.merge(
        PACKAGED,
        policy(enforcement="hard", warning=scopes(assignment=everything), hard=scopes(run=everything)),
        policy(hard={"assignment": {"context_percent": 87.5}, "role": {"operational_tokens": 300000}}),
        policy(hard={"run": {"operational_tokens": None}}),
    )
    assert budget.guardrails(full) == (
        '{"enforcement":"hard","hard":{"context_percent":87.5},'
        '"warning":{"context_percent":5,"context_tokens":5,"provider_calls":5}}'
    )
    assert budget.threshold(full, "hard", "context_percent") == 87.5
    assert budget.threshold(full, "warning", "provider_calls") == 5
    assert budget.threshold(full, "hard", "provider_calls") is None
    assert budget.threshold(full, "soft", "provider_calls") is None
    assert budget.soft_tokens(full) == (200000, 600000)
    off = budget.overrides(["warning.run.operational_tokens=off", "warning.role.operational_tokens=off"])
    assert budget.soft_tokens(budget.merge(PACKAGED, off)) == (0, 0)


@pytest.mark.parametrize("scope", budget.SCOPES)
@pytest.mark.parametrize("metric", budget.METRICS)
def test_every_threshold_is_looked_at(scope: str, metric: str) -> None:
    policy = budget.overrides([f"warning.{scope}.{metric}=5", f"hard.{scope}.{metric}=9"])
    reached = scope == "assignment"

    def levels(value: float | None) -> list[str]:
        return [each.level for each in budget.crossed(policy, [(scope, "probe", {metric: value})])]

    assert levels(None) == levels(4) == [] and levels(6) == ["warning"] and levels(10) == ["hard"]
    assert levels(5) == (["warning"] if reached else []) and levels(9) == (["hard"] if reached else ["warning"])
    others = [(other, "probe", {metric: 99}) for other in budget.SCOPES if other != scope]
    assert list(budget.crossed(policy, others)) == []
    [found] = budget.crossed(policy, [(scope, None, {metric: 6})])
    assert found == budget.Crossed(scope, None, "warning", metric, 6, 5)
