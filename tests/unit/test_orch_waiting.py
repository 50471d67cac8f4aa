# SPDX-License-Identifier: Apache-2.0
"""`wait`: when a run is what it is waited for, when it cannot be any more, and that nothing is asked meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_intercom.host import cgroups
from agent_intercom.orchestration import rows
from agent_intercom.tui.source import Reading, RunSource
from agent_intercom.workers import pauses, places
from tests.unit.homeruns import SESSION, Runs, change
from tests.unit.orchcli import Home
from tests.unit.orchrows import role
from tests.unit.orchruns import Alive, make, tree

READY = rows.Meta(key="workflow_state", value="ready")
ATTENTION = rows.Meta(key="workflow_state", value="needs_attention")
WORK = "b" * 32
KEYS = {"session", "run_id", "until", "reached", "life", "workflow", "paused", "down", "awaited"}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Reading]]:
    """Has something done once it is certain that the command waits; what was read afterwards is in the list."""

    def then(*changes: Callable[[], object]) -> list[Reading]:
        left = list(changes)
        found: list[Reading] = []
        read = RunSource.read

        def reading(source: RunSource) -> Reading:
            result = read(source)
            # The first reading is before anything is watched.
            if found and left:
                left.pop(0)()
            found.append(result)
            return result

        monkeypatch.setattr(RunSource, "read", reading)
        return found

    return then


def away(directory: Path) -> None:
    """The implementer of a run is away, and its work is open."""
    change(directory, role("implementer", state="disconnected", active_assignment_id=WORK))


@pytest.mark.parametrize("until", ["settled", "ready"])
def test_what_is_ready_already_is_told_at_once(home: Home, runs: Runs, until: str) -> None:
    directory = runs.make()
    change(directory, READY)
    with runs.alive(directory):
        before = tree(directory, home.runtime)
        found = home.json("wait", "--until", until)
        assert tree(directory, home.runtime) == before
        assert home.call("wait", "--until", until).out == f"{SESSION}: ready, round 2\n"
    assert found.data.keys() == KEYS
    assert (found.data["reached"], found.data["life"], found.data["until"]) == (True, "live", until)
    assert found.data["workflow"] == {"state": "ready", "round": 2, "implementation_flow": "single"}


@pytest.mark.parametrize(
    ("until", "news", "told"),
    [
        ("settled", READY, "ready, round 2"),
        ("ready", READY, "ready, round 2"),
        ("settled", ATTENTION, "needs attention, round 2"),
        ("settled", role("implementer", state="waiting", active_assignment_id=WORK, connected=True), "active"),
    ],
)
def test_a_change_of_the_database_wakes_it(
    home: Home, runs: Runs, waits: Callable[..., list[Reading]], until: str, news: rows.Change, told: str
) -> None:
    directory = runs.make()
    # Not every change is the one.
    found = waits(lambda: change(directory, rows.Meta(key="round", value="2")), lambda: change(directory, news))
    with runs.alive(directory):
        said = home.call("wait", "--until", until)
    assert said.code == 0 and said.out.startswith(f"{SESSION}: {told}"), said
    assert len(found) == 4
    assert (f"`orchestrate status {SESSION}`" in said.out) is (news is not READY)


def test_it_needs_a_person_and_is_not_ready(home: Home, runs: Runs, waits: Callable[..., list[Reading]]) -> None:
    directory = runs.make()
    found = waits(lambda: change(directory, ATTENTION), lambda: change(directory, READY))
    with runs.alive(directory):
        assert home.call("wait", "--until", "ready").code == 0
    assert len(found) == 4


@pytest.mark.parametrize(("until", "code"), [("settled", 0), ("end", 0), ("ready", 1)])
def test_the_end_of_the_run_ends_it(
    home: Home, runs: Runs, waits: Callable[..., list[Reading]], until: str, code: int
) -> None:
    directory = runs.make()
    alive = runs.alive(directory)
    waits(lambda: os.unlink(alive.path))
    with alive:
        said = home.json("wait", "--until", until)
    data = said.envelope["data"]
    assert (said.code, data["reached"], data["life"]) == (code, not code, "stopped")
    if code:
        assert said.error == ("run_over", "it has ended and will not be ready any more")


@pytest.mark.parametrize(("until", "code"), [("settled", 0), ("end", 0), ("ready", 1)])
def test_one_that_has_ended(home: Home, runs: Runs, until: str, code: int) -> None:
    directory = runs.make()
    said = home.call("wait", "--until", until)
    assert (said.code, said.out) == (code, f"{SESSION}: active, round 2; it has ended\n")
    change(directory, READY)
    said = home.call("wait", "--until", until)
    assert (said.code, said.out) == (0, f"{SESSION}: ready, round 2; it has ended\n")


def test_the_time_is_over(home: Home, runs: Runs) -> None:
    with runs.alive(runs.make()):
        for until, text in (("settled", "is not settled yet"), ("ready", "is not ready yet"), ("end", "goes on")):
            said = home.json("wait", "--until", until, "--timeout", "1ms")
            assert said.code == 1 and said.error == ("timed_out", f"the time is over, and it {text}")
            assert said.envelope["data"]["reached"] is False
        said = home.call("wait", "--timeout", "1ms")
        assert said.code == 1 and said.out == f"{SESSION}: active, round 2; implementer at work\n"
        assert said.err == "orchestrate: the time is over, and it is not settled yet\n"


@pytest.mark.parametrize("words", [("--timeout", "9"), ("--timeout", "0s"), ("--until", "idle")])
def test_wrong_usage(home: Home, words: tuple[str, ...]) -> None:
    said = home.call("wait", *words)
    assert said.code == 2 and said.err.count("\n") == 1 and words[0] in said.err and said.out == ""


def test_a_worker_that_has_ended_needs_a_person(
    home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch, waits: Callable[..., list[Reading]]
) -> None:
    """Nothing of the run's own tells that nobody will connect; that its control group goes does."""
    directory = runs.make()
    away(directory)
    group = home.root / "group"
    group.mkdir()
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr(pauses, "groups", lambda *_: {"implementer": "/g"} if group.exists() else {})
    monkeypatch.setattr(cgroups, "directory", lambda name: str(group) if group.exists() else None)
    with runs.alive(directory):
        place = places.of_run_worker(str(home.runtime), "u1", "a" * 12)
        places.make(place)
        places.write_role(place, places.RoleWorker(role="implementer", generation=1, unit="x.scope", pid=7))

        def ends() -> None:
            (group / "cgroup.events").unlink()
            group.rmdir()

        waits(ends)
        said = home.call("wait")
        data = home.json("wait").data
    assert said.code == 0
    assert "waiting for implementer to connect; the worker of implementer has ended" in said.out
    assert (data["down"], [each["what"] for each in data["awaited"]]) == (["implementer"], ["connection"])


def test_one_that_is_only_on_its_way_is_waited_for(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs.make()
    away(directory)
    monkeypatch.setattr(pauses, "groups", lambda *_: {"implementer": "/g"})
    with runs.alive(directory):
        assert home.json("wait", "--timeout", "1ms").error[0] == "timed_out"


def test_one_that_is_paused_needs_a_person(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs.make()
    monkeypatch.setattr(pauses, "groups", lambda *_: {"implementer": "/g"})
    monkeypatch.setattr(pauses, "frozen", lambda group: True)
    with runs.alive(directory):
        data = home.json("wait").data
    assert (data["reached"], data["paused"]) == (True, ["implementer"])


def test_of_a_run_that_cannot_be_read_it_is_said(home: Home, runs: Runs) -> None:
    directory = runs.make()
    (directory / "broker.sqlite3").write_bytes(b"no database" * 999)
    with runs.alive(directory):
        code, text = home.json("wait").error
        assert code == "orchestration_error" and "cannot be read" in text
        assert home.json("wait", "--until", "end", "--timeout", "1ms").error[0] == "timed_out"
    assert home.json("wait", "--until", "ready").error[0] == "orchestration_error"
    assert home.json("wait").data["workflow"] is None
    assert home.call("wait", "--until", "end").out == f"{SESSION}: it has ended\n"


def test_of_a_run_of_tmux_the_end_is_not_seen(home: Home, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    make(runs.root, "theirs", project=home.project, version=5, schema_version=8)
    monkeypatch.setattr("agent_intercom.orchestration.runs.in_tmux", lambda *_: True)
    code, text = home.json("wait", "theirs", "--until", "end").error
    assert code == "foreign_host" and "`--until ready`" in text
    said = home.call("wait", "theirs", "--until", "ready", "--timeout", "1ms")
    assert said.code == 1 and "its end is not seen from here" in said.err


def test_a_run_whose_directory_goes(home: Home, runs: Runs, waits: Callable[..., list[Reading]]) -> None:
    directory = runs.make()
    waits(lambda: directory.rename(home.root / "elsewhere"))
    with runs.alive(directory):
        data = home.json("wait").data
    assert (data["reached"], data["life"], data["workflow"]["state"]) == (True, "gone", "active")


def test_nobody_is_connected_to(home: Home, runs: Runs) -> None:
    """`Alive` takes it ill."""
    directory = runs.make()
    with Alive(home.runtime, "u1", directory):
        assert home.call("wait", "--until", "end", "--timeout", "1ms").code == 1
