# SPDX-License-Identifier: Apache-2.0
"""The place of a running run: private, in memory, and refused where it is not."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.runtime import Live, RunPlace

PLACE = RunPlace(
    directory="/state/pi-demo-agents/r1",
    scope="scope-0123456789abcdef",
    environment={"PATH": "/usr/bin", "KEY": "s3cret", "BYTES": os.fsdecode(b"\xff\xfe"), "EMPTY": ""},
    observer_report_usage=True,
    programs={"pi": "/opt/pi/pi", "pi-bridge": "/opt/b/orchestrator-worker.js"},
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where `write` puts the run `a1`."""
    return tmp_path / "agent-intercom/run/a1"


def code(call: Any, *args: Any) -> str:
    with pytest.raises(Refusal) as caught:
        call(*args)
    shown = f"{caught.value} {caught.value.field}"
    assert "s3cret" not in shown and "scope-0123" not in shown and "/state" not in shown
    return caught.value.code


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_written_and_read(tmp_path: Path, place: Path) -> None:
    previous = os.umask(0o022)
    try:
        assert runtime.write(str(tmp_path), "a1", PLACE) == str(place)
    finally:
        os.umask(previous)
    assert runtime.read(str(tmp_path), "a1") == PLACE
    assert {mode(place), mode(place.parent), mode(place.parents[1])} == {0o700}
    assert mode(place / "run.json") == 0o600
    assert json.loads((place / "run.json").read_text())["version"] == 1


def test_unscoped(tmp_path: Path) -> None:
    runtime.write(str(tmp_path), "a1", msgspec.structs.replace(PLACE, scope=None))
    assert runtime.read(str(tmp_path), "a1").scope is None


def test_directories_that_are_there_are_closed(tmp_path: Path, place: Path) -> None:
    place.parents[1].mkdir(mode=0o755)
    runtime.write(str(tmp_path), "a1", PLACE)
    assert mode(place.parents[1]) == 0o700


def test_a_second_start_of_a_run_is_refused(tmp_path: Path, place: Path) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    (place / "gate").touch()
    other = msgspec.structs.replace(PLACE, observer_report_usage=not PLACE.observer_report_usage)
    assert code(runtime.write, str(tmp_path), "a1", other) == "run_exists"
    assert runtime.read(str(tmp_path), "a1") == PLACE


def test_removed_with_all_that_is_in_it(tmp_path: Path, place: Path) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    (place / "gate").touch()
    assert runtime.remove(str(tmp_path), "a1") is True
    assert not place.exists()
    assert runtime.remove(str(tmp_path), "a1") is False
    with pytest.raises(Refusal, match="the run is over, or was never started") as caught:
        runtime.read(str(tmp_path), "a1")
    assert caught.value.code == "run_unknown"


def test_removing_does_not_follow(tmp_path: Path, place: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    place.parent.mkdir(parents=True)
    place.symlink_to(kept)
    assert runtime.remove(str(tmp_path), "a1") is True
    assert (kept / "file").exists()


@pytest.mark.parametrize("unit_id", ["", "A1", "a-b", "a.b", "a/b", "..", "a" * 33, "a\n", "é"])
def test_what_is_no_unit_id(tmp_path: Path, unit_id: str) -> None:
    for call in (runtime.read, runtime.remove, runtime.directory_of, runtime.socket_path):
        assert code(call, str(tmp_path), unit_id) == "unit_invalid"
    assert code(runtime.write, str(tmp_path), unit_id, PLACE) == "unit_invalid"


@pytest.mark.parametrize("depth", range(3))
def test_open_directories_are_refused(tmp_path: Path, place: Path, depth: int) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    (place, *place.parents)[depth].chmod(0o750)
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"


@pytest.mark.parametrize("depth", range(3))
def test_links_are_refused(tmp_path: Path, place: Path, depth: int) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    directory = (place, *place.parents)[depth]
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"


def test_a_file_that_is_not_private_is_refused(tmp_path: Path, place: Path) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    (place / "run.json").chmod(0o640)
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"
    (place / "run.json").rename(tmp_path / "moved")
    (place / "run.json").symlink_to(tmp_path / "moved")
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"
    (place / "run.json").unlink()
    os.mkfifo(place / "run.json", 0o600)
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"
    (place / "run.json").unlink()
    assert code(runtime.read, str(tmp_path), "a1") == "run_unknown"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["", "run.json"])
def test_what_another_user_owns_is_refused(tmp_path: Path, place: Path, name: str) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    os.chown(place / name, 4242, 4242)
    assert code(runtime.read, str(tmp_path), "a1") == "run_foreign"


@pytest.mark.parametrize(
    "change",
    [
        {"directory": "relative"},
        {"directory": "/a/../b"},
        {"scope": "short"},
        {"scope": "scope 0123456789abcdef"},
        {"scope": "scope-0123456789abcdef\n"},
        {"scope": ""},
        {"environment": {"A=B": "x"}},
        {"environment": {"A": "x\0"}},
        {"environment": {"A": 1}},
        {"environment": {"AGENT_INTERCOM_SCOPE_ID": "scope-0123456789abcdef"}},
        {"environment": {"A": "x" * runtime.MAX_BYTES}},
        {"observer_report_usage": 1},
        {"programs": {"pi": "bin/pi"}},
        {"programs": {"pi": "/bin/pi\0"}},
        {"programs": {"Pi": "/bin/pi"}},
        {"programs": {"pi": 1}},
    ],
)
def test_only_what_can_be_read_is_written(tmp_path: Path, place: Path, change: dict[str, Any]) -> None:
    assert code(runtime.write, str(tmp_path), "a1", msgspec.structs.replace(PLACE, **change)) == "run_invalid"
    assert not place.parents[1].exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version":1,"version":1}'])
def test_what_write_does_not_write(tmp_path: Path, place: Path, text: str) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    (place / "run.json").write_text(text)
    assert code(runtime.read, str(tmp_path), "a1") == "run_invalid"


@pytest.mark.parametrize("version", [True, 2, "1"])
def test_another_version(tmp_path: Path, place: Path, version: object) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    record = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps(record | {"version": version}))
    assert code(runtime.read, str(tmp_path), "a1") == "run_invalid"


def test_a_failed_write_takes_back_what_it_made(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    place.parents[1].mkdir()
    monkeypatch.setattr(os, "fsync", full)
    assert code(runtime.write, str(tmp_path), "a1", PLACE) == "run_unwritable"
    assert list(place.parents[1].iterdir()) == []


def test_the_address_fits(tmp_path: Path) -> None:
    assert len(runtime.socket_path("/run/user/4294967295", "a" * 32)) < 100
    deep = str(tmp_path / ("d" * 100))
    os.mkdir(deep)
    assert code(runtime.write, deep, "a1", PLACE) == "runtime_path_long"


def test_where_it_is() -> None:
    assert runtime.runtime_dir({"XDG_RUNTIME_DIR": "/run/user/1"}) == "/run/user/1"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "run"}):
        assert code(runtime.runtime_dir, environ) == "runtime_missing"


def test_nothing_private_is_shown() -> None:
    assert repr(PLACE) == str(PLACE) == "RunPlace()"


def test_a_place_that_is_older_than_programs(tmp_path: Path, place: Path) -> None:
    runtime.write(str(tmp_path), "a1", PLACE)
    record = json.loads((place / "run.json").read_text())
    del record["programs"]
    (place / "run.json").write_text(json.dumps(record))
    assert runtime.read(str(tmp_path), "a1") == msgspec.structs.replace(PLACE, programs={})


@pytest.fixture
def short() -> Iterator[Path]:
    """A runtime directory of which the path leaves room for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as name:
        yield Path(name)


@contextlib.contextmanager
def listener(runtime_dir: Path, unit: str, listens: bool = True) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(runtime.socket_path(str(runtime_dir), unit))
        if listens:
            sock.listen()
        yield sock


def test_live_runs_have_a_place_and_somebody_who_listens(short: Path) -> None:
    assert runtime.live(str(short)) == []
    for unit in ("b2", "a1", "c3", "d4", "e5"):
        runtime.write(str(short), unit, msgspec.structs.replace(PLACE, directory=f"/state/s/{unit}"))
    (short / "agent-intercom/run/e5/run.json").write_text("{}")
    (short / "agent-intercom/run/odd name").touch()
    with contextlib.ExitStack() as stack:
        heard = [stack.enter_context(listener(short, unit)) for unit in ("a1", "b2", "e5", "f6")]
        # c3 is bound, and nobody listens; f6 has no place, e5 a broken one.
        stack.enter_context(listener(short, "c3", listens=False))
        up = [Live("a1", "/state/s/a1"), Live("b2", "/state/s/b2"), Live("e5", ""), Live("f6", "")]
        assert runtime.live(str(short)) == up
        for sock in heard:
            # Looking is not connecting.
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.accept()
    # The socket's file is there, and no socket.
    assert runtime.live(str(short)) == []


def test_one_at_a_time_may_start_and_stop(tmp_path: Path) -> None:
    file = tmp_path / "agent-intercom/run/.lock"
    with runtime.lock(str(tmp_path)), open(file, "rb") as other:
        assert mode(file) == 0o600
        assert {mode(file.parent), mode(file.parents[1])} == {0o700}
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(file, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(KeyError), runtime.lock(str(tmp_path)):
        raise KeyError
    with runtime.lock(str(tmp_path)):
        assert runtime.live(str(tmp_path)) == []


def test_a_lock_that_is_none(tmp_path: Path) -> None:
    def locked() -> None:
        with runtime.lock(str(tmp_path)):
            pass

    locked()
    file = tmp_path / "agent-intercom/run/.lock"
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert code(locked) == "run_foreign"
    assert not (tmp_path / "elsewhere").exists()
    file.unlink()
    os.mkfifo(file)
    assert code(locked) == "run_foreign"
    file.unlink()
    file.mkdir()
    assert code(locked) == "run_unwritable"


def test_the_lock_of_a_session_keeps_out_its_own_and_who_wants_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "LOCK_TIMEOUT", 0.0)
    place = str(tmp_path)

    def locked(session: str | None) -> str:
        try:
            with runtime.lock(place, session):
                return "held"
        except Refusal as refusal:
            assert "has not finished" in refusal.text
            return refusal.code

    with runtime.lock(place, "a"):
        assert [locked(session) for session in ("a", "b", None)] == ["broker_not_ready", "held", "broker_not_ready"]
    with runtime.lock(place):
        assert [locked(session) for session in ("a", None)] == ["broker_not_ready", "broker_not_ready"]
    assert [locked(session) for session in ("a", None)] == ["held", "held"]
