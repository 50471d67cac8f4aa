# SPDX-License-Identifier: Apache-2.0
"""The recomputation that the semantics hashes rest on has to be right itself (contract 7.1, Appendix C)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.canonical import canonical, canonical_hash, insertion_hash

SAFE = 2**53 - 1
well_formed = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-SAFE, SAFE) | well_formed,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(well_formed, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"-": 1, "10": 2, "2": 3}, '{"2":3,"10":2,"-":1}'),
        ({"01": 1, "1": 2, "4294967294": 3, "4294967295": 4}, '{"1":2,"4294967294":3,"01":1,"4294967295":4}'),
        ({"\uffff": 1, "\U00010000": 2}, '{"\U00010000":2,"\uffff":1}'),
        ({"²": 1, "1": 2}, '{"1":2,"²":1}'),
        (["b", "a"], '["b","a"]'),
        ('"\\\b\f\n\r\t\x01\x1f/\u2028\x7f\u00e9', '"\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f/\u2028\x7f\u00e9"'),
        ("e\u0301", '"e\u0301"'),
        ([None, True, False, 0, -1, SAFE], f"[null,true,false,0,-1,{SAFE}]"),
        ({}, "{}"),
    ],
)
def test_canonical_text(value: Any, text: str) -> None:
    assert canonical(value) == text


@pytest.mark.parametrize("value", [1.5, -0.0, float("nan"), float("inf"), 2**53, -(2**53), "\ud800", {"\udc00": 1}])
def test_values_without_a_canonical_text(value: Any) -> None:
    with pytest.raises(ValueError):
        canonical(value)


@pytest.mark.parametrize("value", [(1,), {1: 2}, b"x", object()])
def test_values_that_are_no_json(value: Any) -> None:
    with pytest.raises(TypeError):
        canonical(value)


def test_hash_is_framed_with_byte_lengths() -> None:
    expected = hashlib.sha256('agent-intercom-canonical-frame-v1:1:d:4:"é"'.encode()).hexdigest()
    assert canonical_hash("d", "é") == expected


@pytest.mark.parametrize("domain", ["", "a b", "é", "a\n"])
def test_domain_is_printable_ascii(domain: str) -> None:
    with pytest.raises(ValueError):
        canonical_hash(domain, None)


def test_insertion_hash_keeps_the_order() -> None:
    assert insertion_hash({"b": 1, "a": "é"}) == hashlib.sha256('{"b":1,"a":"é"}'.encode()).hexdigest()
    assert insertion_hash({"b": 1, "a": 2}) != insertion_hash({"a": 2, "b": 1})


@given(values)
def test_canonical_text_is_json_of_the_same_value(value: Any) -> None:
    assert json.loads(canonical(value)) == value


@given(st.dictionaries(well_formed, values, min_size=2, max_size=5), st.randoms())
def test_order_of_insertion_does_not_matter(value: dict[str, Any], random: Any) -> None:
    keys = list(value)
    random.shuffle(keys)
    assert canonical_hash("d", {key: value[key] for key in keys}) == canonical_hash("d", value)
