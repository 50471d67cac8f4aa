# SPDX-License-Identifier: Apache-2.0
"""The bench itself works: programs compile, every server is measured, figures exist. Nothing here is about speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run
import workers
from benchlib import measure, report, runs, servers


@pytest.fixture(scope="module")
def rounds() -> report.Rounds:
    """One round with tiny counts."""
    return run.run(measure.TINY, say=False)


def test_every_figure_exists_and_is_positive(rounds: report.Rounds) -> None:
    broker = ["broker"] if servers.broker_present() else []
    figures = report.figures(rounds)
    for figure, title, _unit in report.FIGURES:
        if figure in {"start.ready", "start.warm"}:
            expected = broker  # the bare process reports no readiness and answers once
        elif figure.startswith(("start.", "memory.")):
            expected = ["bare", *broker]
        else:
            expected = ["relay", "router", *broker]
        values = figures.get(figure, {})
        assert sorted(values) == sorted(expected), title
        assert all(value >= 0 if "cpu" in figure else value > 0 for value in values.values()), title


def test_every_target_has_a_positive_ratio(rounds: report.Rounds) -> None:
    verdicts = report.judge(report.TARGETS, rounds)
    assert len(verdicts) == (len(report.TARGETS) if servers.broker_present() else 0)
    assert len(report.judge(report.CALIBRATION, rounds)) == len(report.CALIBRATION)
    assert all(verdict.ratio > 0 for verdict in verdicts)


def test_table_names_every_target(rounds: report.Rounds) -> None:
    table = report.table(rounds)
    titles = [verdict.title for verdict in report.judge((*report.TARGETS, *report.ROOM, *report.CALIBRATION), rounds)]
    assert titles
    assert all(title in table for title in titles)


def test_a_ratio_is_taken_within_a_round() -> None:
    target = report.Target("t", "rate", "relay", 0.2, at_least=True)
    slow, fast = {"rate": {"broker": 10.0, "relay": 40.0}}, {"rate": {"broker": 100.0, "relay": 200.0}}
    assert report.judge([target], [slow, fast, {}, fast]) == [report.Verdict("t", 0.5, 0.25, 0.5, 0.2, True, True)]


def test_a_target_can_be_missed() -> None:
    rounds = [{"p50": {"broker": 30.0, "relay": 10.0}}]
    at_most, at_least = report.Target("t", "p50", "relay", 2.5), report.Target("t", "p50", "relay", 3.5, at_least=True)
    assert [verdict.holds for verdict in report.judge([at_most, at_least], rounds)] == [False, False]


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no room')"]
    with pytest.raises(servers.BenchError, match="status 1.*no room"):
        servers.spawn_bound(command, servers.environment(tmp_path), tmp_path / "s")


@pytest.fixture(scope="module")
def led() -> report.Rounds:
    """One round of runs with tiny counts, and a crowd of two."""
    return run.run_runs(runs.TINY, say=False)


def test_every_figure_of_runs_exists_and_is_positive(led: report.Rounds) -> None:
    figures = report.figures(led)
    for figure, title, _unit in report.RUN_FIGURES:
        _, group, name = figure.split(".")
        if group in runs.PLACES:
            expected = {"fsync": ["commit"], "server_us": ["run"]}.get(name, ["commit", "relay", "run"])
        elif group == "look" and name != "status":
            expected = ["bare"]
        else:
            expected = ["run"] if group == "bytes" or name == "ready" else ["bare", "run"]
        values = figures[figure]
        assert sorted(values) == expected, title
        assert all(value >= 0 if group == "wait" else value > 0 for value in values.values()), title


def test_workers_are_measured_where_a_testbed_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured in one is tried in one: tests/system/test_workers_bench.py."""
    both = {"worker": 3.0, "bare": 1.0, "interpreter": 2.0, "one": 4.0}
    measured = [{row[0]: both} for row in report.WORKER_FIGURES]
    file = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "workers", "--json", str(file)])
    monkeypatch.setattr(workers, "in_testbed", lambda plan: measured)
    monkeypatch.setattr(workers, "why_not", lambda: "")
    assert run.main() == 0
    told = json.loads(file.read_text())["workers"]
    assert [verdict["title"] for verdict in told] == [target.title for target in report.WORKER_TARGETS]
    assert all(verdict["bound"] is not None for verdict in told)
    monkeypatch.setattr(workers, "why_not", lambda: "the testbed needs root")
    assert run.main() == 1


def test_every_target_of_runs_has_a_verdict_and_a_line(led: report.Rounds) -> None:
    verdicts = report.judge(report.RUN_TARGETS, led)
    assert [verdict.title for verdict in verdicts] == [target.title for target in report.RUN_TARGETS]
    assert all(verdict.ratio > 0 for verdict in verdicts if verdict.bound is None)
    lines = report.table(led).splitlines()
    for title in (*(row[1] for row in report.RUN_FIGURES), *(target.title for target in report.RUN_TARGETS)):
        assert any(line.startswith(title) for line in lines), title
