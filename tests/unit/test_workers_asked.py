# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked to be started with: what is refused before it is looked at, and what is looked at beside."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agent_intercom.workers import confinement, environment, lookers, orders, pausing, places, removing, runworker
from agent_intercom.workers.contract import Code
from agent_intercom.workers.places import Place
from agent_intercom.workers.records import Worker
from agent_intercom.workers.spec import Confinement, Launch
from agent_intercom.workers.terms import Caller, Due, Work
from tests.unit.test_workers_service import PERSON, Run, Stage, run
from tests.unit.workerstage import refused

__all__ = ["run"]


def test_until_it_is_known_that_a_worker_may_start_others_no_path_is_looked_at(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start(writable=[])
        monkeypatch.setattr(orders, "plausible", None)
        with refused(Code.GRANT, "grant"):
            await stage.start(stage.actions.inside(worker["incarnation"]), writable=["/."])

    run(body)


def test_paths_are_no_longer_and_no_more_than_can_be_looked_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "settled", None)

    async def body(stage: Stage) -> None:
        for field, given in (
            ("directory", {"directory": "/." * 2048}),
            ("writable", {"writable": ["/." * 2048]}),
            ("writable", {"writable": ["/"] * (orders.MAX_WRITABLE + 1)}),
        ):
            with refused(Code.INVALID, field):
                await stage.start(**given)
        assert stage.untouched()

    run(body)


def test_a_disk_that_does_not_answer_keeps_nobody_else_waiting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, answers = threading.Event(), threading.Event()

    def hang(place: Place, _: str) -> Place:
        looked.set()
        assert answers.wait(20)
        return place

    async def body(stage: Stage) -> None:
        monkeypatch.setattr(orders, "settled", hang)
        start = asyncio.create_task(stage.start())
        try:
            assert await asyncio.to_thread(looked.wait, 20)
            assert (await stage.ask("list"))["workers"] == []
        finally:
            answers.set()
        await start
        answers.clear()
        monkeypatch.setattr(lookers, "_LOOKING", 0.0)
        with refused(Code.TIMEOUT, "directory"):
            await stage.start()
        answers.set()

    run(body)


def test_a_role_is_looked_at_once_and_beside_the_service(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[str] = []

    def prepare(*_: object, **__: object) -> runworker.Prepared:
        found.append(threading.current_thread().name)
        launch = Launch(["/bin/true"], {}, str(tmp_path), "", str(tmp_path / "scratch/role-g1"))
        return runworker.Prepared(launch, "orchestrate-a1.slice", [], {}, "pi", True, None)

    async def body(stage: Stage) -> None:
        monkeypatch.setattr(runworker, "prepare", prepare)
        (stage.runtime / "agent-intercom/run/a1").mkdir(0o700, parents=True)
        (tmp_path / "scratch").mkdir(0o700)
        answer = await stage.ask("start_role", Caller(), run="a1", role="reviewer", generation=1)
        assert found == ["paths"]
        (order,) = stage.orders
        named = order.launch.environment
        assert named["AGENT_INTERCOM_WORKER_ID"] == answer["worker"]["id"]
        assert order.launch.exit_file.endswith(f"worker-{named['AGENT_INTERCOM_WORKER_INCARNATION_ID']}/exit.json")

    run(body)


def test_nothing_but_its_own_is_looked_at_in_the_service_when_a_person_starts_a_worker(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looked: set[str] = set()
    real = environment.finds_command

    def finds(environ: Mapping[str, str]) -> bool:
        looked.add(threading.current_thread().name)
        return real(environ)

    async def body(stage: Stage) -> None:
        (tmp_path / "orchestrate").touch(0o755)
        monkeypatch.setattr(stage.actions, "_library", str(tmp_path))
        monkeypatch.setattr(environment, "finds_command", finds)
        worker = await stage.start(environment={"PATH": "/nonexistent"})
        stage.registry.lost(worker["incarnation"], 1)
        await stage.ask("restart", worker=worker["id"])
        assert looked == {"paths"}
        assert [order.launch.environment["PATH"] for order in stage.orders] == [f"/nonexistent:{tmp_path}"] * 2

    run(body)


@pytest.mark.parametrize("value", ["\u00e9" * 60_000, "\udcff" * 10_000, "\x01" * 30_000, "\x7f" * 120_000])
def test_what_is_started_can_be_read_again_and_what_cannot_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    async def body(stage: Stage) -> None:
        environment = {f"V{number}": value for number in range(15)}
        worker = await stage.start(name="large", environment=environment)
        place = places.read(stage.service.place_of(stage.registry.get(worker["id"])))  # type: ignore[arg-type]
        assert place.environment == environment
        stage.registry.lost(worker["incarnation"], 1)
        await stage.ask("restart", worker="large")
        written = len(stage.store.applied)
        monkeypatch.setattr(places, "_MAX_PLACE", 65_536)
        with refused(Code.INVALID, "environment"):
            await stage.start(environment=environment)
        assert len(stage.store.applied) == written and len(os.listdir(stage.runtime / "agent-intercom/worker")) == 1

    run(body)


def test_links_are_followed_as_far_as_the_kernel_follows_them(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to("/")
    for number in range(1, 1500):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    confinement.settled(Confinement([str(tmp_path / "39")]))
    with refused(Code.INVALID, "writable"):
        confinement.settled(Confinement([str(tmp_path / "1499")]))


@pytest.mark.parametrize("action", ["restart", "pause", "resume"])
def test_who_was_looked_at_by_a_name_is_meant_whoever_has_it_then(
    run: Run, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    async def body(stage: Stage) -> None:
        meant, other = [await stage.start(name=name) for name in ("mine", "other")]
        if action == "resume":
            for worker in (meant, other):
                stage.registry.paused(worker["incarnation"], 1)

        async def look(*_: object) -> None:
            stage.registry.rename(PERSON, meant["id"], "away", 2)
            stage.registry.rename(PERSON, other["id"], "mine", 2)

        async def changed(_: object, worker: Worker) -> Worker:
            return worker

        async def end_all(fenced: Sequence[Worker]) -> list[Worker]:
            for worker in fenced:
                stage.registry.lost(worker.incarnation, 3)
            return list(fenced)

        monkeypatch.setattr(stage.actions, "_admit", look)
        monkeypatch.setattr(pausing, "look", look)
        monkeypatch.setattr(pausing, action, changed, raising=False)
        monkeypatch.setattr(stage.service, "end_all", end_all)
        assert (await stage.ask(action, worker="mine"))["worker"]["id"] == meant["id"]
        assert stage.registry.get(other["id"]).generation == 1  # type: ignore[union-attr]

    run(body)


def test_a_cleanup_ends_before_it_deletes_what_only_time_decides_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Work] = []

    async def handle(_: object, due: Due) -> bool:
        done.append(due.work)
        return True

    async def body(stage: Stage) -> None:
        monkeypatch.setattr(removing.Removing, "_handle", handle)
        monkeypatch.setattr(removing, "now_ms", lambda: 2**50)
        other = await stage.start(Caller())
        stage.registry.lost(other["incarnation"], 1)
        await stage.start()
        answer = await stage.ask("cleanup", execute=True)
        assert done == [Work.STOP, Work.PRUNE] and answer["handled"] == 2
        assert [each["work"] for each in answer["candidates"]] == ["stop"] and answer["others"] == 1

    run(body)
