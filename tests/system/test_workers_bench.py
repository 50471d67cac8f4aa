# SPDX-License-Identifier: Apache-2.0
"""The bench of workers works: an installed launcher is started into scope units and measured, however fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from benchlib import report

BENCH = Path(__file__).resolve().parents[1] / "bench" / "workers.py"


def test_every_figure_is_measured(bed: Any) -> None:
    inside = "/usr/local/lib/bench-workers.py"
    (bed.root / inside[1:]).write_bytes(BENCH.read_bytes())
    command = ["/usr/bin/python3", "-B", inside, "--inside", "--rounds", "1", "--together", "2"]
    found = json.loads(bed.as_user("alice", command).stdout)
    figures = {name: values for one in found for name, values in one.items()}
    assert set(figures) == {row[0] for row in report.WORKER_FIGURES}
    assert set(figures["workers.start"]) == {"worker", "bare", "interpreter"}
    assert all(value > 0 for values in figures.values() for value in values.values())
    verdicts = report.judge(report.WORKER_TARGETS, found)
    assert [verdict.title for verdict in verdicts] == [target.title for target in report.WORKER_TARGETS]
    table = report.table(found).splitlines()
    for title in (*(row[1] for row in report.WORKER_FIGURES), *(verdict.title for verdict in verdicts)):
        assert any(line.startswith(title) for line in table), title
    left = "systemctl --user list-units --all --plain --no-legend 'worker-*.scope'"
    assert bed.as_user("alice", left).stdout == ""
    bed.as_user("alice", "systemctl --user stop bench.slice")
