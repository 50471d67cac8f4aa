# SPDX-License-Identifier: Apache-2.0
"""Usage objects: what workers may send, and what observers get (orchestration spec, 2.9, 2.10 and 3.3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration import rows, usage
from agent_intercom.orchestration.contract import MAX_INTEGER, Code
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire.codec import encode

LEGACY: dict[str, Any] = {"input": 10, "output": 20, "cacheRead": 30, "cacheWrite": 40, "cost": {"total": 0.5}}
PLAIN: dict[str, Any] = {**LEGACY, "providerCalls": 3}
FULL: dict[str, Any] = {
    **PLAIN, "reasoning": 5, "contextTokens": 600, "contextWindow": 7000, "contextPercent": 8.5,
}
SHARE: dict[str, Any] = {**FULL, "peakContextTokens": 900}

NOT_COUNTS: list[Any] = [-1, 1.0, 1.5, True, False, "1", [], {}, MAX_INTEGER + 1, float("inf"), float("nan")]
NOT_NUMBERS: list[Any] = [-1, -0.5, True, False, "1", [], {}, MAX_INTEGER + 1, float("inf"), float("nan")]
COUNTS = ("input", "output", "cacheRead", "cacheWrite")
OPTIONAL_COUNTS = ("reasoning", "contextTokens", "contextWindow")

Reader = Callable[[Any], rows.Usage | None]


def from_lifecycle(value: Any) -> rows.Usage | None:
    return usage.lifecycle(value)[0]


def from_cumulative(value: Any) -> rows.Usage | None:
    read = usage.report({"cumulative": value, "assignment": SHARE})
    assert read is not None
    return read.cumulative


def from_assignment(value: Any) -> rows.Usage | None:
    read = usage.report({"cumulative": FULL, "assignment": value})
    assert read is not None
    return read.assignment


READERS: list[Any] = [
    pytest.param(from_lifecycle, "Provider usage is invalid", id="lifecycle"),
    pytest.param(usage.progress, "Worker progress usage is invalid", id="progress"),
    pytest.param(from_cumulative, "Assignment provider usage is invalid", id="cumulative"),
    pytest.param(from_assignment, "Assignment provider usage is invalid", id="assignment"),
]
every_reader = pytest.mark.parametrize(("read", "text"), READERS)


def refused(read: Callable[[Any], Any], value: Any, text: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(value)
    assert (caught.value.code, caught.value.text) == (Code.INVALID_PROTOCOL, text)


@every_reader
def test_every_key_is_read(read: Reader, text: str) -> None:
    got = read(FULL)
    assert got is not None
    assert (got.provider_calls, got.input_tokens, got.output_tokens) == (3, 10, 20)
    assert (got.cache_read_tokens, got.cache_write_tokens, got.cost_total) == (30, 40, 0.5)
    assert (got.reasoning_tokens, got.context_tokens, got.context_window, got.context_percent) == (5, 600, 7000, 8.5)


@every_reader
def test_optional_keys_are_none_when_absent_or_null(read: Reader, text: str) -> None:
    nulls = dict.fromkeys((*OPTIONAL_COUNTS, "contextPercent"))
    for value in (PLAIN, {**PLAIN, **nulls}):
        got = read(value)
        assert got is not None
        assert (got.reasoning_tokens, got.context_tokens, got.context_window, got.context_percent) == (None,) * 4


@every_reader
@pytest.mark.parametrize("key", LEGACY)
def test_required_keys(read: Reader, text: str, key: str) -> None:
    refused(read, {name: value for name, value in FULL.items() if name != key}, text)
    refused(read, {**FULL, key: None}, text)


@every_reader
@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_counts_are_integers_of_63_bits(read: Reader, text: str, value: Any) -> None:
    for key in (*COUNTS, *OPTIONAL_COUNTS, "providerCalls"):
        refused(read, {**FULL, key: value}, text)


@every_reader
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_cost_and_percent_are_finite_numbers(read: Reader, text: str, value: Any) -> None:
    refused(read, {**FULL, "cost": {"total": value}}, text)
    refused(read, {**FULL, "contextPercent": value}, text)


@every_reader
@pytest.mark.parametrize("cost", [{}, {"total": None}, {"total": 1, "input": 1}, {"input": 1}, 1, 1.5, [], "1", True])
def test_cost_is_exactly_a_total(read: Reader, text: str, cost: Any) -> None:
    refused(read, {**FULL, "cost": cost}, text)


@every_reader
def test_unknown_keys(read: Reader, text: str) -> None:
    for key in ("totalTokens", "", "\ud800", "cost.total"):
        refused(read, {**FULL, key: 1}, text)


@every_reader
@pytest.mark.parametrize("value", [0, 1, 1.5, True, False, "", "x", [], [FULL], {}], ids=repr)
def test_not_a_usage_object(read: Reader, text: str, value: Any) -> None:
    refused(read, value, text)


@every_reader
def test_bounds_are_legal(read: Reader, text: str) -> None:
    numbers = dict.fromkeys((*COUNTS, *OPTIONAL_COUNTS, "providerCalls"), MAX_INTEGER)
    got = read({**numbers, "cost": {"total": 1e300}, "contextPercent": 0})
    assert got is not None
    assert (got.input_tokens, got.cost_total, got.context_percent) == (MAX_INTEGER, 1e300, 0)
    got = read({**dict.fromkeys(numbers, 0), "cost": {"total": 2}, "contextPercent": 140})
    assert got is not None
    assert (got.provider_calls, got.cost_total, got.context_percent) == (0, 2, 140)
    assert type(got.cost_total) is type(got.context_percent) is float
    got = read({**PLAIN, "cost": {"total": 0.0}, "contextPercent": 0.0})
    assert got is not None
    assert (got.cost_total, got.context_percent) == (0.0, 0.0)


@every_reader
def test_peak_belongs_to_the_assignment_alone(read: Reader, text: str) -> None:
    if read is not from_assignment:
        refused(read, SHARE, text)
        refused(read, {**FULL, "peakContextTokens": None}, text)
        return
    got = read(SHARE)
    assert isinstance(got, rows.AssignmentUsage) and got.peak_context_tokens == 900
    for value in (FULL, {**FULL, "peakContextTokens": None}):
        got = read(value)
        assert isinstance(got, rows.AssignmentUsage) and got.peak_context_tokens is None
    for wrong in NOT_COUNTS:
        refused(read, {**FULL, "peakContextTokens": wrong}, text)


def test_lifecycle_calls_given_null_and_absent() -> None:
    assert usage.lifecycle(None) == (None, False)
    unavailable = {**LEGACY, "providerCalls": None}
    for value, calls, told in ((PLAIN, 3, True), (unavailable, None, True), (LEGACY, None, False)):
        got, calls_given = usage.lifecycle(value)
        assert got is not None
        assert (got.provider_calls, calls_given) == (calls, told)


def test_calls_are_required_elsewhere() -> None:
    for param in READERS[1:]:
        read, text = param.values
        refused(read, LEGACY, text)
        refused(read, {**LEGACY, "providerCalls": None}, text)


def test_null_is_no_usage() -> None:
    assert usage.progress(None) is None
    assert usage.report(None) is None


@pytest.mark.parametrize(
    "value",
    [{}, {"cumulative": FULL}, {"assignment": SHARE}, {"cumulative": FULL, "assignment": SHARE, "extra": None},
     {"cumulative": None, "assignment": SHARE}, {"cumulative": FULL, "assignment": None}, FULL, [], 1, "", False],
    ids=repr,
)
def test_report_usage_is_exactly_two_objects(value: Any) -> None:
    refused(usage.report, value, "Assignment provider usage is invalid")


def test_public_form_reads_back() -> None:
    share = from_assignment(SHARE)
    assert isinstance(share, rows.AssignmentUsage)
    assert json.loads(encode(usage.public(share))) == SHARE


@pytest.mark.parametrize("value", [PLAIN, {**SHARE, **dict.fromkeys((*OPTIONAL_COUNTS, "contextPercent"))}, SHARE])
def test_public_form_has_no_null(value: dict[str, Any]) -> None:
    share = from_assignment(value)
    assert isinstance(share, rows.AssignmentUsage)
    assert usage.public(share) == {key: item for key, item in value.items() if item is not None}


def test_zeros_stay_in_the_public_form() -> None:
    zeros = {**dict.fromkeys(SHARE, 0), "cost": {"total": 0}}
    share = from_assignment(zeros)
    assert isinstance(share, rows.AssignmentUsage)
    assert usage.public(share) == zeros


def test_public_form_without_calls() -> None:
    assert usage.public(rows.AssignmentUsage()) == {
        "input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0, "cost": {"total": 0.0},
    }


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SHARE, "total", "x"]), inner),
    max_leaves=12,
)


shaped = st.fixed_dictionaries(
    dict.fromkeys(LEGACY, anything), optional=dict.fromkeys(SHARE.keys() - LEGACY.keys(), anything)
)


@given(st.one_of(anything, shaped))
def test_nothing_but_a_refusal_comes_out(value: Any) -> None:
    for param in READERS:
        try:
            got = param.values[0](value)
        except Refusal:
            continue
        if got is not None:
            encode(got)
