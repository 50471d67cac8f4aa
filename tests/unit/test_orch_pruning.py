# SPDX-License-Identifier: Apache-2.0
"""`orchestrate prune`: what it would remove, what it removes, and what it never touches."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import pruning
from agent_intercom.orchestration import inventory, manifest, removal, rundir, runtime, tmux
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
from agent_intercom.orchestration.rundir import RoleSpec, RunSpec
from agent_intercom.orchestration.startup import Startup
from agent_intercom.wire.clock import Now
from tests.unit.orchcli import Home

DAY = 86_400
CANARY = "canary-4d1c the task"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Home]:
    """One with a path that is short enough for addresses of sockets."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as directory:
        yield Home(Path(directory), monkeypatch, capfd)


def root_of(home: Home) -> Path:
    return home.root / "home/.local/state/agent-intercom/runs"


def make(home: Home, session: str, run_id: str, days: float, *, begun: bool = True, root: Path | None = None) -> Path:
    """A run that was at work last so many days ago."""
    unit = re.sub("[^a-z0-9]", "", f"{session}{run_id}".lower())[:32]
    roles = dict.fromkeys(("implementer", "reviewer"), RoleSpec(provider="p", model="m", thinking="high"))
    spec = RunSpec(
        unit=unit,
        project=str(home.project),
        approve_project=False,
        transport="rpc",
        execution_profile=Profile("thorough", "packaged", "packaged-default"),
        orchestration_config=OrchestrationConfig("/c.json", 3),
        project_config=UNMATCHED,
        roles=roles,
        implementation_flow="single",
        startup=Startup(task=CANARY, role_tasks={}),
    )
    run = rundir.create(str(root or root_of(home)), session, run_id, spec, Now(0, 1_785_585_600_123))
    if begun:
        rundir.delete_startup(run.path)
    age(Path(run.path), days)
    return Path(run.path)


def age(directory: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (then, then), follow_symlinks=False)


def place(home: Home, run: Path) -> str:
    """Have a run placed, as a start does; the address at which it would be listened for."""
    unit = json.loads((run / "manifest.json").read_text())["unit"]
    given = runtime.RunPlace(directory=str(run), scope=None, environment={}, observer_report_usage=False)
    runtime.write(str(home.runtime), unit, given)
    return runtime.socket_path(str(home.runtime), unit)


def half_made(home: Home, session: str, run_id: str, days: float) -> Path:
    """What a start leaves that is killed early, so many days ago; no start writes the manifest after the database."""
    run = make(home, session, run_id, days, begun=False)
    for name in ("manifest.json", "broker.sqlite3", "broker.sqlite3.lock"):
        (run / name).unlink(missing_ok=True)
    age(run, days)
    return run


def directories(home: Home) -> set[str]:
    return {path.name for path in root_of(home).glob("*/*")}


def removed(home: Home, *words: str) -> list[str]:
    return [run["run_id"] for run in home.json("prune", *words, "--yes").data["runs"] if run["removed"]]


def test_the_preview_changes_nothing_and_the_removal_removes_that(home: Home) -> None:
    old, new = make(home, "a", "old", 40), make(home, "a", "new", 2)
    other = make(home, "b", "other", 50)
    before = home.tree()
    preview = home.json("prune", "--older-than", "30").data
    assert home.tree() == before
    assert [(run["session"], run["run_id"], run["reason"]) for run in preview["runs"]] == [
        ("b", "other", "age"),
        ("a", "old", "age"),
    ]
    assert preview["dry_run"] and not any(run["removed"] for run in preview["runs"])
    done = home.json("prune", "--older-than", "30", "--yes").data
    assert done["runs"] == [run | {"removed": True} for run in preview["runs"]]
    assert done["bytes"] == preview["bytes"] == sum(run["bytes"] for run in done["runs"]) > 0
    assert (old.exists(), new.exists(), other.parent.exists()) == (False, True, False)
    assert home.json("prune", "--older-than", "30").data["runs"] == []


def test_the_shape_of_the_answer(home: Home) -> None:
    run = make(home, "a", "old", 40)
    data = home.json("prune", "--keep", "0").data
    assert data.keys() == {"dry_run", "rules", "runs", "leftovers", "total", "unreadable_sessions", "bytes", "kept"}
    assert data["total"] == {"runs": 1, "leftovers": 0, "unreadable_sessions": 0}
    assert data["rules"] == {"keep_days": None, "keep_runs": 0, "source": "command line"}
    (told,) = data["runs"]
    assert told.pop("ended_at").endswith("+00:00")
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    expected = {"session": "a", "run_id": "old", "host": "systemd", "coordination": str(run), "age_days": 40}
    assert told == expected | {"bytes": size, "reason": "number", "removed": False, "error": None}
    assert data["kept"] == {"total": 0, "held": {}}


def test_what_a_person_reads(home: Home) -> None:
    make(home, "a", "old", 40)
    said = home.call("prune", "--older-than", "30")
    assert said.code == 0 and said.err == ""
    assert "a        old  40 days ago" in said.out and "older than is kept" in said.out
    assert "`orchestrate prune --older-than 30 --yes` looks again, and removes what is due then." in said.out
    said = home.call("prune", "--older-than", "30", "--yes")
    assert said.out.startswith("removed a old (") and "Removed 1 run and 0 leftovers" in said.out
    assert "Nothing to remove: 0 runs" in home.call("prune", "--older-than", "30").out


def test_the_number_counts_by_directory_of_runs_and_a_session_can_be_chosen(home: Home) -> None:
    for day in range(4):
        make(home, "a" if day % 2 else "b", f"r{day}", day)
    assert [run["run_id"] for run in home.json("prune", "--keep", "3").data["runs"]] == ["r3"]
    assert removed(home, "--keep", "1", "--session", "b") == ["r2"]
    assert directories(home) == {"r0", "r1", "r3"}


def test_the_settings_are_the_rules_where_nothing_is_said(home: Home) -> None:
    make(home, "a", "old", 40)
    make(home, "a", "new", 2)
    data = home.json("prune").data
    assert data["rules"] == {"keep_days": 30, "keep_runs": 200, "source": "default"}
    assert [run["run_id"] for run in data["runs"]] == ["old"]
    home.config("[retention]\nkeep_days = 1\n")
    data = home.json("prune").data
    assert data["rules"]["keep_days"] == 1
    assert data["rules"]["source"] == str(home.root / "home/.config/agent-intercom/orchestrate.toml")
    assert [run["run_id"] for run in data["runs"]] == ["old", "new"]


def test_a_run_that_lives_or_is_being_started_stays(home: Home) -> None:
    live, placed, dead = (make(home, "a", name, 100) for name in ("live", "placed", "dead"))
    place(home, placed)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place(home, live))
        listener.listen()
        data = home.json("prune", "--keep", "0", "--yes").data
    assert [run["run_id"] for run in data["runs"]] == ["dead"]
    assert data["kept"] == {"total": 2, "held": {"live": 1, "placed": 1}}
    assert (live.exists(), placed.exists(), dead.exists()) == (True, True, False)


def test_a_run_that_lives_stays_though_its_place_cannot_be_read(home: Home) -> None:
    run = make(home, "a", "live", 100)
    with socket.socket(socket.AF_UNIX) as listener:
        address = place(home, run)
        listener.bind(address)
        listener.listen()
        (Path(address.removesuffix(".sock")) / "run.json").write_text("{")
        data = home.json("prune", "--keep", "0", "--yes").data
    assert data["kept"]["held"] == {"live": 1} and run.exists()
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["kept"]["held"] == {"placed": 1} and run.exists()


def test_a_run_that_somebody_has_open_stays(home: Home) -> None:
    run = make(home, "a", "r", 100)
    with open(run / "sessions/implementer/log.jsonl", "wb"):
        age(run, 100)
        assert home.json("prune", "--keep", "0", "--yes").data["kept"]["held"] == {"in-use": 1}
    assert removed(home, "--keep", "0") == ["r"]


def test_somebody_works_in_a_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(home, "a", "r", 100)
    monkeypatch.chdir(run / "sessions")
    assert removed(home, "--keep", "0") == []


def test_nobody_can_start_a_run_meanwhile(home: Home) -> None:
    """A start holds the lock from before the directory is made until somebody listens."""
    run = make(home, "a", "r", 100)
    codes: list[int] = []
    with runtime.lock(str(home.runtime)):
        other = threading.Thread(target=lambda: codes.append(pruning_code()))
        other.start()
        place(home, run)
        assert codes == []
    other.join()
    assert codes == [0]
    assert run.exists()


def pruning_code() -> int:
    from agent_intercom.cli.orchestrate.parser import build

    options = build("orchestrate", "0").parse_args(["prune", "--keep", "0", "--yes"])
    options.program = "orchestrate"
    answer = pruning.prune(options)
    return 0 if answer.error is None else 1


def test_runs_of_the_tmux_program_only_where_asked_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    original = home.root / "home/.pi/agent/orchestrations"
    theirs = make(home, "a", "theirs", 100, root=original)
    as_original(theirs)
    mixed = make(home, "b", "mixed", 100)
    as_original(mixed)
    data = home.json("prune", "--keep", "0").data
    assert data["runs"] == [] and data["kept"]["held"] == {"original": 1}
    data = home.json("prune", "--keep", "0", "--original").data
    assert {run["run_id"]: run["host"] for run in data["runs"]} == {"theirs": "tmux", "mixed": "tmux"}
    monkeypatch.setattr(tmux, "hosted", lambda environ: {str(theirs): "a"})
    assert removed(home, "--keep", "0", "--original") == ["mixed"]
    assert theirs.exists()


def as_original(run: Path) -> None:
    """Rewrite the manifest as one of version 3."""
    record = json.loads((run / "manifest.json").read_text())
    kept = ("created_at", "session", "window", "project", "coord", "approve_project", "transport", "coordination")
    roles = {
        name: {key: role[key] for key in ("provider", "model", "thinking", "tools", "session_dir", "session_id")}
        | {"pane_id": f"%{number}"}
        for number, (name, role) in enumerate(record["roles"].items())
    }
    old = {key: record[key] for key in kept} | {"protocol_version": 1, "monitor_pane_id": "%9", "roles": roles}
    (run / "manifest.json").write_text(json.dumps(old | {"version": 3}))
    age(run, 100)


def test_what_belongs_to_no_run_goes_too(home: Home) -> None:
    kept = make(home, "a", "kept", 1, begun=False)
    half, young = half_made(home, "a", "20260801T120000Z-42", 3), half_made(home, "a", "20260801T120000Z-43", 0)
    empty = root_of(home) / "empty"
    empty.mkdir(mode=0o700)
    age(half, 3)
    age(empty, 3)
    preview = home.json("prune").data
    assert [(each["kind"], each["path"]) for each in preview["leftovers"]] == [
        ("empty-session", str(empty)),
        ("half-made-run", str(half)),
        ("startup-file", str(kept / "startup.json")),
    ]
    assert (kept / "startup.json").exists()
    done = home.json("prune", "--yes").data
    assert all(each["removed"] for each in done["leftovers"])
    assert (kept.exists(), half.exists(), young.exists(), empty.exists()) == (True, False, True, False)
    assert not (kept / "startup.json").exists()
    assert CANARY not in json.dumps(done)


def test_what_is_no_run_is_not_touched_wherever_the_runs_are_said_to_be(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have named a directory that has everything in it."""
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", str(home.root / "home"))
    (home.root / "home").chmod(0o700)
    named = make(home, "Documents", "20260801T120000Z-42", 3, root=home.root / "home")
    (named / "manifest.json").unlink()
    (named / "thesis.txt").write_text("mine")
    for name in ("Documents/letters", "Documents/empty", "Desktop", "Music/20260801"):
        (home.root / "home" / name).mkdir(parents=True)
    (home.root / "home/Documents/letters/one.txt").write_text("mine")
    age(home.root / "home", 300)
    before = home.tree()
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["runs"] == data["leftovers"] == []
    assert before <= home.tree()


def test_a_run_that_is_just_being_made_keeps_its_task(home: Home) -> None:
    run = make(home, "a", "r", 0, begun=False)
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["kept"]["held"] == {"placed": 1} and data["leftovers"] == []
    assert (run / "startup.json").exists()


def test_what_cannot_be_read_and_what_is_a_link_stays(home: Home) -> None:
    unreadable, linked = make(home, "a", "unreadable", 100), make(home, "b", "linked", 100)
    (unreadable / "manifest.json").write_text("{")
    age(unreadable, 100)
    elsewhere = home.root / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["runs"] == [] and data["kept"]["held"] == {"unreadable": 1}
    assert unreadable.exists() and (elsewhere / "manifest.json").exists()


def test_what_cannot_be_removed_is_told_and_the_rest_goes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "a", "one", 100)
    two = make(home, "a", "two", 90)
    real = rundir.remove

    def refuse(directory: str) -> None:
        if directory.endswith("one"):
            raise PermissionError(13, "Permission denied")
        real(directory)

    monkeypatch.setattr(rundir, "remove", refuse)
    said = home.json("prune", "--keep", "0", "--yes")
    assert said.code == 1
    assert said.envelope["error"]["code"] == "local_runtime_error"
    assert "1 of 2 could not be removed, the first because Permission denied" in said.envelope["error"]["message"]
    assert [(run["run_id"], run["removed"], run["error"]) for run in said.envelope["data"]["runs"]] == [
        ("one", False, "Permission denied"),
        ("two", True, None),
    ]
    assert said.envelope["data"]["bytes"] == said.envelope["data"]["runs"][1]["bytes"]
    assert not two.exists()


def test_what_is_overtaken_was_not_removed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the removal somebody uses the session, removes the run, and the broker deletes the task."""
    run, kept = make(home, "a", "one", 100), make(home, "b", "kept", 1, begun=False)
    used, gone = root_of(home) / "used", root_of(home) / "gone"
    for empty in (used, gone):
        empty.mkdir(mode=0o700)
        age(empty, 3)
    real = pruning._remove

    def overtaken(plan: pruning.Plan) -> pruning.Outcome:
        (used / "new").mkdir()
        gone.rmdir()
        shutil.rmtree(run)
        (kept / "startup.json").unlink()
        return real(plan)

    monkeypatch.setattr(pruning, "_remove", overtaken)
    said = home.json("prune", "--older-than", "30", "--yes")
    told = [*said.data["runs"], *said.data["leftovers"]]
    assert [(each["removed"], each["error"]) for each in told] == [(False, None)] * 4
    assert said.data["bytes"] == 0 and (used / "new").exists()


@contextlib.contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """No directory can be removed, because of an error of that number."""

    def refuse(name: str) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        yield


def test_what_a_person_reads_of_what_was_overtaken(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = root_of(home) / "empty"
    empty.mkdir(mode=0o700, parents=True)
    age(empty, 3)
    with refused(monkeypatch, errno.ENOTEMPTY):
        said = home.call("prune", "--yes")
    assert (said.code, said.err) == (0, "")
    assert f"gone, or in use by now: {empty}" in said.out and "Removed 0 runs and 0 leftovers" in said.out


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY])
def test_an_empty_session_that_cannot_be_removed_is_told(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    empty = root_of(home) / "empty"
    empty.mkdir(mode=0o700, parents=True)
    age(empty, 3)
    with refused(monkeypatch, number):
        said = home.json("prune", "--yes")
    assert said.code == 1 and said.error[0] == "local_runtime_error"
    (told,) = said.envelope["data"]["leftovers"]
    assert (told["removed"], told["error"]) == (False, os.strerror(number))


def test_what_goes_while_it_is_looked_at_is_left_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has gone, at whatever step: the rest is found."""
    kept = make(home, "z", "kept", 100)
    steps = ((manifest, "read"), (inventory, "_without_manifest"), (removal, "weigh"), (inventory, "_bytes"))
    for number, (module, name) in enumerate(steps):
        function = getattr(module, name)
        victim = (half_made if name == "_without_manifest" else make)(home, "a", f"20260801T120000Z-{number}", 100)

        def vanish(*arguments: Any, victim: Path = victim, function: Any = function) -> Any:
            if any(str(each).startswith(str(victim)) for each in arguments):
                shutil.rmtree(victim, ignore_errors=True)
            return function(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, vanish)
            data = home.json("prune", "--keep", "0").data
        assert "kept" in [run["run_id"] for run in data["runs"]], name
        assert not victim.exists()
    assert kept.exists()


def test_a_session_that_goes_while_it_is_looked_at(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "z", "kept", 100)
    (root_of(home) / "empty").mkdir(mode=0o700)
    real = inventory._empty

    def vanish(session: str, directory: str) -> Any:
        if session == "empty":
            os.rmdir(directory)
        return real(session, directory)

    monkeypatch.setattr(inventory, "_empty", vanish)
    assert [run["run_id"] for run in home.json("prune", "--keep", "0").data["runs"]] == ["kept"]


def test_the_settings_count_all_runs_of_a_directory_also_for_one_session(home: Home) -> None:
    home.config("[retention]\nkeep_runs = 2\nkeep_days = 9999\n")
    for day in range(4):
        make(home, "a" if day % 2 else "b", f"r{day}", day)
    assert [run["run_id"] for run in home.json("prune").data["runs"]] == ["r3", "r2"]
    data = home.json("prune", "--session", "a").data
    assert [run["run_id"] for run in data["runs"]] == ["r3"] and data["kept"]["total"] == 1
    # A number that is said with the session is one of the session's.
    assert home.json("prune", "--session", "a", "--keep", "2").data["runs"] == []
    assert "at most 2 of the session" in home.call("prune", "--session", "a", "--keep", "2").out


def test_leftovers_are_of_the_session_that_was_asked_for(home: Home) -> None:
    for session in ("a", "b"):
        make(home, session, "r", 1, begun=False)
        half_made(home, session, "20260801T120000Z-42", 3)
    paths = [each["path"] for each in home.json("prune", "--session", "b").data["leftovers"]]
    assert paths == [str(root_of(home) / "b" / name) for name in ("20260801T120000Z-42", "r/startup.json")]


def test_a_task_has_its_bytes(home: Home) -> None:
    run = make(home, "a", "r", 1, begun=False)
    size = (run / "startup.json").stat().st_size
    data = home.json("prune").data
    assert [each["bytes"] for each in data["leftovers"]] == [size] and data["bytes"] == size > 0


def test_a_run_with_processes_stays_though_nobody_listens(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(home, "a", "r", 100)
    monkeypatch.setattr(inventory, "with_processes", lambda: {"ar"})
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["runs"] == [] and data["kept"]["held"] == {"left": 1}
    assert run.exists()


def test_without_knowing_what_lives_nothing_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(home, "a", "r", 100)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(runtime, "LOGIND", "/nowhere")
    code, message = home.json("prune", "--keep", "0", "--yes").error
    assert code == "orchestration_error" and "XDG_RUNTIME_DIR" in message
    assert run.exists()


def test_a_root_that_is_a_link_is_refused(home: Home) -> None:
    real = home.root / "real"
    real.mkdir(mode=0o700)
    root_of(home).parent.mkdir(parents=True)
    root_of(home).symlink_to(real)
    assert home.json("prune", "--keep", "0").error[0] == "orchestration_error"


def test_nothing_anywhere_is_nothing_to_do(home: Home) -> None:
    before = home.tree()
    assert "Nothing to remove" in home.call("prune", "--keep", "0").out
    assert home.tree() == before
    assert home.json("prune", "--keep", "0", "--yes").data["runs"] == []
    assert not root_of(home).exists()


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB")])
def test_sizes(number: int, text: str) -> None:
    assert pruning.size(number) == text


def test_names_of_files_that_processes_have_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    with open(tmp_path / "ab/file", "wb"):
        assert inventory.in_use([str(tmp_path / "a"), str(tmp_path / "ab")]) == {str(tmp_path / "ab")}
