# SPDX-License-Identifier: Apache-2.0
"""Which runs are not kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration.retention import AGE, DAY_S, NUMBER, Candidate, choose

NOW = 1_785_585_600.0


def aged(name: str, days: float, root: str = "/r", held: bool = False) -> Candidate:
    return Candidate(root, f"{root}/s/{name}", NOW - days * DAY_S, held)


def names(candidates: list[Candidate], keep_days: int | None, keep_runs: int | None) -> list[tuple[str, str]]:
    chosen = choose(candidates, NOW, keep_days, keep_runs)
    return [(each.candidate.directory.rpartition("/")[2], each.reason) for each in chosen]


def test_what_ended_too_long_ago_goes_oldest_first() -> None:
    runs = [aged("b", 31), aged("a", 30), aged("c", 400), aged("d", 0)]
    assert names(runs, 30, None) == [("c", AGE), ("b", AGE)]


def test_what_has_enough_newer_ones_goes() -> None:
    runs = [aged(str(day), day) for day in range(5)]
    assert names(runs, None, 3) == [("4", NUMBER), ("3", NUMBER)]
    assert names(runs, 3, 3) == [("4", AGE), ("3", NUMBER)]


def test_each_root_is_counted_by_itself() -> None:
    runs = [aged("a", 1), aged("b", 2), aged("c", 3, "/q"), aged("d", 4, "/q")]
    assert names(runs, None, 1) == [("d", NUMBER), ("b", NUMBER)]


def test_what_is_held_stays_and_is_counted() -> None:
    runs = [aged("a", 100, held=True), aged("b", 1, held=True), aged("c", 2)]
    assert names(runs, 30, 1) == [("c", NUMBER)]


def test_no_rule_keeps_everything_and_nought_nothing_that_has_ended() -> None:
    runs = [aged("a", 4000), aged("b", 0.1), aged("c", -3)]
    assert names(runs, None, None) == []
    assert names(runs, 0, None) == [("a", AGE), ("b", AGE)]
    assert names(runs, None, 0) == [("a", NUMBER), ("b", NUMBER), ("c", NUMBER)]


CANDIDATES = st.lists(
    st.builds(
        aged,
        st.uuids().map(str),
        st.floats(-10, 1000),
        st.sampled_from(["/r", "/q"]),
        st.booleans(),
    ),
    unique_by=lambda each: each.directory,
    max_size=30,
)
LIMIT = st.none() | st.integers(0, 40)


@given(CANDIDATES, LIMIT, LIMIT)
def test_exactly_what_a_rule_names_goes(runs: list[Candidate], keep_days: int | None, keep_runs: int | None) -> None:
    chosen = {each.candidate.directory: each.reason for each in choose(runs, NOW, keep_days, keep_runs)}
    for run in runs:
        newer = [o for o in runs if o.root == run.root and (-o.ended, o.directory) < (-run.ended, run.directory)]
        old = keep_days is not None and NOW - run.ended > keep_days * DAY_S
        many = keep_runs is not None and len(newer) >= keep_runs
        expected = None if run.held or not (old or many) else AGE if old else NUMBER
        assert chosen.get(run.directory) == expected


@given(CANDIDATES, LIMIT, LIMIT)
def test_removing_what_was_chosen_leaves_nothing_to_choose(
    runs: list[Candidate], keep_days: int | None, keep_runs: int | None
) -> None:
    gone = {each.candidate for each in choose(runs, NOW, keep_days, keep_runs)}
    left = [run for run in runs if run not in gone]
    assert [each for each in choose(left, NOW, keep_days, keep_runs) if not each.candidate.held] == []
