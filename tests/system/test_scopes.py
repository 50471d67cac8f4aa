# SPDX-License-Identifier: Apache-2.0
"""Scope units of a real user manager: what `host.scopes` promises, and the traps that it goes around.

What is done is in scopeprobe.py, which runs as alice in the testbed; here is what has to come of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROBE = Path(__file__).with_name("scopeprobe.py")

Probe = Callable[[str], Any]


@pytest.fixture
def probe(bed: Any) -> Iterator[Probe]:
    """Runs one function of scopeprobe.py as alice; nothing of it may be left."""
    directory = bed.root / "usr/local/lib/probes"
    directory.mkdir(exist_ok=True)
    (directory / PROBE.name).write_bytes(PROBE.read_bytes())
    script = "import runpy; sys.dont_write_bytecode = True; runpy.run_path(sys.argv[2], run_name='__main__')"

    def run(name: str) -> Any:
        return json.loads(bed.python("alice", script, name, f"/usr/local/lib/probes/{PROBE.name}"))

    yield run
    left = bed.as_user("alice", "systemctl --user list-units --all --plain --no-legend 'probe-*.scope'").stdout
    bed.as_user("alice", "systemctl --user stop probe.slice 'probe-*'; systemctl --user reset-failed")
    assert left == ""


# The start.


def test_a_process_is_in_its_unit_when_the_start_is_over(bed: Any, probe: Probe) -> None:
    told = probe("started")
    version = int(bed.run("systemctl --version").stdout.split()[1])
    assert told.pop("version") == version
    pid = told["in it"][0][0]
    assert told == {
        "placed": True,
        "in it": [[pid], True],
        "state": ["active", "running", "success", "running"],
        "states": True,
        "slice": "probe.slice",
        "description": "probe",
        "alive": True,
        "names": True,
        "stop": [True, False],
        "exit": -15,
        "gone": [None, True],
        "dead": False,
        "unknown": [False] * 4,
        "jobs": 0,
    }


def test_many_are_started_and_stopped_beside_each_other(probe: Probe) -> None:
    assert probe("many_at_once") == [True, True, True, {}]


def test_what_a_unit_is_where_nothing_is_said(probe: Probe) -> None:
    """It is in the slice of applications, takes a minute and a half to end, and its failure stays."""
    told = probe("without_properties")
    description = told.pop("Description")
    assert told == {"Slice": "app.slice", "TimeoutStopUSec": "1min 30s", "CollectMode": "inactive"}
    assert description.endswith(".scope")


def test_an_answer_is_not_a_start(probe: Probe) -> None:
    """The job waits, for as long as a unit takes that it is ordered after: the process is where it was."""
    assert probe("reply_means_queued") == {
        "queued": [True, True, "inactive"],
        "jobs": True,
        "waited": ["JobFailed", "unfinished"],
        "left": [True, None, None],
        "still": True,
    }


def test_jobs_that_end_otherwise(probe: Probe) -> None:
    assert probe("results_of_jobs") == [["JobFailed", "canceled"], ["JobFailed", "dependency"], True, {}]


def test_a_second_unit_takes_the_process_without_a_word(probe: Probe) -> None:
    """So a process is not placed that was placed before."""
    assert probe("second_unit_moves") == [[True, True], ["NotPlaced", "elsewhere"], True, None]


def test_a_name_is_used_once(probe: Probe) -> None:
    assert probe("names_are_used_once") == [[["ManagerRefused", "UnitExists"]] * 3, True, True]


def test_what_a_scope_unit_does_not_take_moves_nobody(probe: Probe) -> None:
    told = probe("refused_calls")
    assert len(told) == 10
    assert told == dict.fromkeys(told, ["ManagerRefused", True, None])


def test_a_process_that_has_ended_is_placed_nowhere(probe: Probe) -> None:
    ours, theirs, manager = probe("ended_processes")
    assert ours == [["NotPlaced", "ended"]] * 2
    assert [answer[0] for answer in theirs] == ["ManagerRefused"] * 2
    assert manager == ["NotPlaced", "elsewhere"]


def test_a_process_that_is_not_where_the_job_put_it(probe: Probe) -> None:
    assert probe("moved_while_started") == [["NotPlaced", "moved"], 1, -15, ["inactive", "success"]]


# The end.


def test_mixed_kills_at_once(probe: Probe) -> None:
    """Why units say control-group: with mixed nobody is asked first."""
    assert probe("kill_modes") == {"control-group": 33, "mixed": -9}


def test_who_left_the_session_and_hears_no_signal_is_gone(probe: Probe) -> None:
    assert probe("stubborn_tree") == [True, True, -9, True, True]


def test_children_that_a_leader_left_behind(probe: Probe) -> None:
    assert probe("leader_gone") == [["active", "running"], True, True, True]


def test_hundreds_of_children_are_gone(probe: Probe) -> None:
    told = probe("many_children")
    assert told["end"] == [True, True]
    assert told["members"] == told["made"] + 1
    # A machine whose controllers belong to version 1 takes the limit and has none.
    assert (told["members"] == 128 and told["refused"] > 0) if told["limited"] else told["made"] == 300


def test_the_kernel_tells_when_the_last_one_is_gone(probe: Probe) -> None:
    assert probe("killed_at_once") == [[True, False, False, False], True, True, -9, False]


def test_why_a_unit_ended_is_told_once(probe: Probe) -> None:
    """One that is collected is gone when somebody asks."""
    assert probe("results_and_collecting") == {
        "inactive-or-failed": [["failed", "timeout"], None, False],
        "inactive": [["failed", "timeout"], ["failed", "failed", "timeout"], True],
    }


def test_no_unit_knows_an_exit_status(probe: Probe) -> None:
    assert probe("exit_status") == [7, ["inactive", "success"]]


# Freezing.


def test_freezing_and_the_stop_of_what_is_frozen(probe: Probe) -> None:
    freezers = [[True, "frozen", True], [True, "running", False], [True, "frozen", True]]
    assert probe("freezing") == [freezers, True, 33]


def test_what_is_frozen_can_be_killed(probe: Probe) -> None:
    assert probe("killing_frozen") == [True, -9]


def test_a_runtime_of_systemds_counts_while_frozen(probe: Probe) -> None:
    """Why units have no RuntimeMaxUSec=: a pause would end them."""
    assert probe("runtime_of_frozen") == ["frozen", ["failed", "timeout"], -15, True]


# The run, and the manager.


def test_part_of_a_run(probe: Probe) -> None:
    """A stop of the run takes workers with it, and theirs; a restart or a crash does not."""
    assert probe("with_its_run") == {
        "restarted": [True, True, True],
        "crashed": [True, True],
        "started again": True,
        "stopped": [-15, -15, ["inactive", "success"], ["inactive", "success"]],
    }


def test_what_is_ordered_after_its_run_ends_before_it(probe: Probe) -> None:
    """Why units have no After=: the run would hear of its end when its workers are gone."""
    assert probe("ordered_after_its_run") == {"ordered": False, "not": True}


def test_a_manager_that_reads_its_units_again_or_becomes_another(probe: Probe) -> None:
    told = probe("reloads")
    assert [kept[:2] for kept in told["kept"]] == [[True, True]] * 2
    assert not told["kept"][0][2]
    # What was under way in the one is done by the other.
    assert told["pending"]
    assert told["result"][0].startswith("probe-")
    assert told["ends"] == [True, ["inactive", "success"], True]
    assert not told["lost"]


def test_who_moves_itself_is_found(probe: Probe) -> None:
    """It lives on when its unit has ended: only its control group says so."""
    assert probe("moves_itself") == [True, True, True, ["inactive", "success"], True, -9]
