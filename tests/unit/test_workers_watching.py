# SPDX-License-Identifier: Apache-2.0
"""How a worker ended, from all that is seen of it; and what its place holds."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import cgroups
from agent_intercom.workers import places
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Ending, Placed
from agent_intercom.workers.watching import Watch

PLACED = Placed(control_group="/gone", invocation_id="a" * 32, pid=1, start_ticks=1, boot_id="b")


def ending(exit_file: Path, *, result: str = "", reason: str = "") -> Ending:
    """How a worker ended that is gone."""

    async def run() -> Ending:
        gone = asyncio.Event()
        watch = Watch(PLACED, str(exit_file), None, lambda: None, gone.set)
        watch.result = result
        async with asyncio.timeout(20):
            await gone.wait()
        found = watch.ending(reason, 99)
        await watch.closed()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("written", "result", "reason", "oom", "outcome"),
    [
        ({"code": 0, "signal": None, "at": 5}, "", "", 0, "exited"),
        ({"code": 7, "signal": None, "at": 5}, "", "", 3, "exited"),
        ({"code": None, "signal": 15, "at": 5}, "", "manager-requested", 0, "signaled"),
        ({"code": None, "signal": 9, "at": 5}, "timeout", "", 0, "signaled"),
        ({"code": None, "signal": 9, "at": 5}, "", "", 1, "oom-kill"),
        ({"code": None, "signal": 9, "at": 5}, "oom-kill", "", 0, "oom-kill"),
        ({"code": None, "signal": 15, "at": 5}, "", "runtime-expired", 0, "timeout"),
        (None, "", "", 0, "unknown"),
        (None, "oom-kill", "", 0, "oom-kill"),
    ],
)
def test_how_it_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, Any] | None,
    result: str,
    reason: str,
    oom: int,
    outcome: str,
) -> None:
    monkeypatch.setattr(cgroups.Counters, "read", lambda _: cgroups.Counts(oom_kill=oom))
    file = tmp_path / "exit.json"
    if written is not None:
        file.write_text(json.dumps(written))
    found = ending(file, result=result, reason=reason)
    assert found.outcome == outcome
    assert found.at == (99 if written is None else 5)
    told = (None, None) if written is None else (written["code"], written["signal"])
    assert (found.exit_code, found.exit_signal) == told


def test_whoever_cannot_be_followed_is_seen_to_have_gone_all_the_same(tmp_path: Path) -> None:
    """A file is no process: it cannot be waited for."""

    async def run() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        gone = asyncio.Event()
        leader = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        watch = Watch(PLACED, str(tmp_path / "exit.json"), leader, lambda: None, gone.set)
        async with asyncio.timeout(20):
            await gone.wait()
        await watch.closed()
        assert [type(context["exception"]) for context in told] == [PermissionError]

    asyncio.run(run())


PLACE = places.Place(
    arguments=("/bin/true", "\udcff"), directory="/", environment={"A": "\udcfe"}, scope="s" * 16, writable=("/tmp",)
)


def test_a_place_is_private_and_read_as_it_was_written(tmp_path: Path) -> None:
    place = places.of_worker(str(tmp_path), "0123456789ab")
    places.make(place)
    places.write(place, PLACE)
    places.write_task(place, "do \ud800 this".encode("utf-8", "replace").decode())
    assert places.read(place) == PLACE
    assert places.worker_ids(str(tmp_path)) == ["0123456789ab"]
    for found in (Path(place), *Path(place).iterdir()):
        assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600)
    assert "s" * 16 not in repr(PLACE)
    assert places.remove(place) and places.worker_ids(str(tmp_path)) == []


def _torn(place: Path) -> None:
    (place / places.PLACE_NAME).write_text("{")


def _linked(place: Path) -> None:
    os.rename(place / places.PLACE_NAME, place / "other")
    (place / places.PLACE_NAME).symlink_to(place / "other")


def _opened(place: Path) -> None:
    (place / places.PLACE_NAME).chmod(0o644)


def _removed(place: Path) -> None:
    (place / places.PLACE_NAME).unlink()


@pytest.mark.parametrize("spoil", [_torn, _linked, _opened, _removed])
def test_a_place_that_is_not_as_it_was_written_is_lost(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    place = places.of_worker(str(tmp_path), "0123456789ab")
    places.make(place)
    places.write(place, PLACE)
    spoil(Path(place))
    with pytest.raises(WorkerError) as caught:
        places.read(place)
    assert caught.value.code == "place_lost"


def test_removing_follows_no_link_and_opens_what_was_closed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    scratch = places.scratch_of(str(tmp_path), "0123456789ab")
    places.make_scratch(scratch)
    Path(scratch, "link").symlink_to(outside)
    closed = Path(scratch, "a/b")
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    closed.parent.chmod(0o500)
    assert places.leftovers(str(tmp_path), []) == [scratch]
    assert places.leftovers(str(tmp_path), ["0123456789ab"]) == []
    assert places.remove(scratch)
    assert (outside / "kept").exists()


def test_the_workers_of_a_run_are_told_without_asking_anybody(tmp_path: Path) -> None:
    assert places.run_workers(str(tmp_path), "abc") == []
    for number, role in enumerate(("reviewer", "implementer")):
        place = places.of_run_worker(str(tmp_path), "abc", f"{number:012x}")
        places.make(place)
        places.write_role(place, places.RoleWorker(role=role, generation=1, unit="worker-x.scope", pid=7))
    broken = places.of_run_worker(str(tmp_path), "abc", "f" * 12)
    places.make(broken)
    Path(broken, places.ROLE_NAME).write_text("{}")
    assert [worker.role for worker in places.run_workers(str(tmp_path), "abc")] == ["implementer", "reviewer"]


@pytest.mark.parametrize("number", ["", "../../etc", "0123456789AB", "0123456789abc"])
def test_only_ids_become_paths(tmp_path: Path, number: str) -> None:
    for make in (
        lambda: places.of_worker(str(tmp_path), number),
        lambda: places.of_run_worker(str(tmp_path), "a", number),
        lambda: places.scratch_of(str(tmp_path), number),
    ):
        with pytest.raises(WorkerError):
            make()
