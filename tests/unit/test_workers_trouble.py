# SPDX-License-Identifier: Apache-2.0
"""The worker service where something fails beside what it does: disks, descriptors, managers, and others at work."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import cgroups, processes
from agent_intercom.host.errors import HostError
from agent_intercom.host.journal import Journal
from agent_intercom.host.manager import ManagerError, ManagerRefused, ManagerUnreachable
from agent_intercom.host.scopes import ScopeState, Started
from agent_intercom.workers import actions, ending, pausing, provisioning, reattach, recording, service
from agent_intercom.workers.clock import STEP_MS, Clock, now_ms
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import CHANGED, FULL, Unusable, WorkerError
from agent_intercom.workers.managers import Managers
from agent_intercom.workers.records import Worker
from agent_intercom.workers.service import Running
from agent_intercom.workers.store import StoreError
from agent_intercom.workers.terms import Caller, Due, Wanted, Work
from agent_intercom.workers.timers import Timers
from agent_intercom.workers.watching import Watch
from tests.unit.test_workers_service import PERSON, Run, Scopes, Stage, staged, unit_ends
from tests.unit.workerstage import PLACED, refused
from tests.unit.workerstage import ending as exited

UNREADABLE = HostError("cgroup_unreadable", "no", "x")
UNIT = "worker-0123456789ab.scope"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test with a stage."""
    return staged(tmp_path, monkeypatch)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that were ended."""
    return unit_ends(monkeypatch)


def row(stage: Stage, worker: dict[str, Any]) -> Worker:
    found = stage.registry.get(worker["id"])
    assert found is not None
    return found


# A disk that is full.


class Full(Unusable):
    def __init__(self) -> None:
        super().__init__(FULL, "full", "store")


def test_a_full_disk_prevents_no_stop_and_the_answer_says_that_it_is_not_written_down(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        worker, other = await stage.start(name="one"), await stage.start(name="other")
        kept, broken = stage.store.apply, True

        def apply(changes: Any) -> None:
            if changes and broken:
                raise Full
            kept(changes)

        monkeypatch.setattr(stage.store, "apply", apply)
        answer = await stage.ask("stop", worker=worker["id"])
        assert ended == [worker["unit"]] and answer["worker"]["state"] == "stopped"
        assert not answer["recorded"] and (await stage.ask("health"))["store"] == "store_unusable"
        # Neither is refused where something could not be written before.
        assert not stage.actions.known["stop"][2] and not stage.actions.known["stop_role"][2]
        assert (await stage.ask("stop_role", run="abc", role="reviewer"))["recorded"] is False
        broken = False
        assert (await stage.ask("health"))["store"] is None
        assert worker["id"] in {each.id for each in stage.store.applied[-1].workers}
        assert (await stage.ask("stop", worker=other["id"]))["recorded"]

    run(body)


@pytest.mark.parametrize("how", ["after a while", "at the end"])
def test_what_could_not_be_written_is_tried_again_by_itself(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(recording, "RETRY", 0.01 if how == "after a while" else 3600)

    async def body(stage: Stage) -> None:
        worker = await stage.start()
        kept, room = stage.store.apply, asyncio.Event()
        tried: list[bool] = []

        def apply(changes: Any) -> None:
            if changes and not room.is_set():
                tried.append(True)
                raise Full
            kept(changes)

        monkeypatch.setattr(stage.store, "apply", apply)
        await stage.ask("stop", worker=worker["id"])
        assert stage.service.owing
        if how == "after a while":
            before = len(tried)
            async with asyncio.timeout(20):
                while len(tried) == before:
                    await asyncio.sleep(0.01)
                room.set()
                while stage.service.behind:
                    await asyncio.sleep(0.01)
        else:
            room.set()
            await stage.service.close(0)
        assert not stage.service.behind
        assert [each.state for each in stage.store.applied[-1].workers if each.id == worker["id"]] == ["stopped"]

    run(body)


def test_what_this_service_can_never_write_is_left_to_the_next_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        await stage.start()

        def apply(changes: Any) -> None:
            raise StoreError(CHANGED)

        monkeypatch.setattr(stage.store, "apply", apply)
        stage.service.record()
        assert stage.service.behind and not stage.service.owing

    run(body)


# Starts that fail when the command may run.


class Launched:
    """A launcher that starts whatever it is told."""

    def __init__(self) -> None:
        self.pid, self.abandoned = os.getpid(), False

    async def release(self, launch: object) -> None: ...

    def abandon(self) -> None:
        self.abandoned = True

    async def ended(self) -> tuple[int | None, int | None]:
        return None, 9


class Placing(Scopes):
    async def start(self, *_: object) -> Started:
        return Started("/x.scope", "0" * 32)

    async def stop(self, *_: object) -> bool:
        return True

    async def reset_failed(self, unit: str) -> bool:
        return True


@pytest.mark.parametrize("empty", [True, False])
def test_a_worker_that_cannot_be_watched_is_taken_back_or_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    launched = Launched()

    async def spawn(_: str) -> Any:
        return launched

    async def emptied(*_: object) -> bool:
        return empty

    monkeypatch.setattr(provisioning, "spawn", spawn)
    monkeypatch.setattr(provisioning, "emptied", emptied)
    monkeypatch.setattr(processes, "cgroup_of", lambda _: "/x.scope")

    def unwatched(*_: object) -> None:
        raise UNREADABLE

    async def main() -> None:
        stage = Stage.__new__(Stage)
        with monkeypatch.context() as patched:
            begin = provisioning.begin
            stage.__init__(tmp_path.resolve(), patched)  # type: ignore[misc]
            stage.scopes = Placing()
            patched.setattr(provisioning, "begin", begin)
            patched.setattr(stage.service, "_watch", unwatched)
            with refused(Code.START_FAILED if empty else Code.STOP_FAILED, "unit"):
                await stage.start()
            (worker,) = stage.registry.live() or stage.registry.ended_workers()
            assert launched.abandoned
            assert (worker.state, worker.placed is None) == ("failed" if empty else "unreachable", empty)
            await stage.service.close(0)
            stage.journal.close()

    asyncio.run(main())


def test_counters_that_cannot_be_read_hold_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: object) -> None:
        raise UNREADABLE

    monkeypatch.setattr(cgroups.Counters, "read", unreadable)

    async def main() -> None:
        gone = asyncio.Event()
        watch = Watch(PLACED, str(tmp_path / "exit"), None, lambda: None, gone.set)
        async with asyncio.timeout(20):
            await gone.wait()
        assert watch.ending("", 1).outcome == "unknown"
        await watch.closed()

    asyncio.run(main())


# Others at work.


def test_a_pause_that_comes_after_a_stop_is_refused(run: Run) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        seen = stage.registry.pause(PERSON, worker["id"], now_ms())
        stage.registry.stop(PERSON, worker["id"], now_ms())
        with refused(Code.CONFLICT, "worker"):
            await pausing.pause(stage.service, seen)

    run(body)


class Seen:
    """A watch of a worker that has exited."""

    def __init__(self, left: bool) -> None:
        self.left = left

    def ending(self, *_: object) -> Any:
        return exited()


def of_run(stage: Stage, role: str) -> Worker:
    wanted = Wanted(harness="pi", role=role, run="abc", generation=1)
    worker = stage.registry.start(Caller(), wanted, now_ms()).worker
    stage.registry.placed(worker.incarnation, PLACED, now_ms())
    stage.registry.released(worker.incarnation, now_ms())
    return worker


def seen(stage: Stage, incarnation: str, *, left: bool = False, tree: str = "") -> Running:
    running = Running(Seen(left), "", "", tree, asyncio.Event(), [])  # type: ignore[arg-type]
    stage.service.running[incarnation] = running
    return running


def test_workers_of_a_run_that_is_over_are_all_ended(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over(_: object, run: str) -> bool:
        return True

    monkeypatch.setattr(service.Service, "_run_ended", over)

    async def body(stage: Stage) -> None:
        workers = {role: of_run(stage, role) for role in ("reviewer", "implementer")}
        first = workers["reviewer"].incarnation
        seen(stage, first)
        await stage.service._gone(first)
        while stage.service.busy:
            await asyncio.sleep(0)
        assert ended == [workers["implementer"].unit]
        assert not stage.registry.live()

    run(body)


def test_a_worker_is_proved_once_and_not_while_it_is_being_stopped(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        stage.registry.unreachable(worker["incarnation"], "manager_unreachable", now_ms())
        proved = []

        async def prove(_: object, found: Worker) -> None:
            proved.append(found.state)

        monkeypatch.setattr(reattach, "_one", prove)
        lock = stage.service.lock(worker["id"])
        await lock.acquire()
        proving = asyncio.ensure_future(reattach.prove_again(stage.service))
        await asyncio.sleep(0)
        assert not proved
        stage.registry.lost(worker["incarnation"], now_ms())
        lock.release()
        await proving
        assert not proved

    run(body)


@pytest.mark.parametrize("fault", [True, False])
def test_what_is_asked_of_a_worker_while_its_run_is_looked_at_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    told: list[dict[str, object]] = []

    async def body(stage: Stage) -> None:
        worker = of_run(stage, "reviewer")

        async def over(_: object, run: str) -> bool:
            stage.registry.stop_role(Caller(), run, None, now_ms())
            if fault:
                raise RuntimeError
            return False

        monkeypatch.setattr(service.Service, "_run_ended", over)
        monkeypatch.setattr(stage.journal, "emit", lambda event, **fields: told.append({"event": event.name, **fields}))
        running = seen(stage, worker.incarnation, left=True)
        await stage.service._gone(worker.incarnation)
        assert running.done.is_set() and not stage.registry.live()
        assert [each["event"] for each in told] == ["INTERNAL_ERROR"] * fault + ["WORKER_ENDED"]
        assert (told[-1]["reason"], told[-1]["code"]) == ("run-ended", "left_unit")

    run(body)


def test_what_git_says_last_counts_and_who_is_watched_meanwhile_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        first, other = await stage.start(name="first"), await stage.start(name="other")
        answers, running = [True, False], seen(stage, first["incarnation"], tree="/tree")

        async def dirty(_: str) -> bool:
            return answers.pop(0)

        async def end(_: object, unit: str, *__: object) -> None:
            if answers:
                raise WorkerError(Code.STOP_FAILED, "it does not end")
            if unit == other["unit"]:
                # As where an earlier service's worker is found again just now.
                seen(stage, other["incarnation"])
                stage.service.spawn(stage.service._gone(other["incarnation"]))
            else:
                await stage.service._gone(first["incarnation"])

        monkeypatch.setattr(ending, "dirty", dirty)
        monkeypatch.setattr(ending, "end", end)
        with refused(Code.STOP_FAILED):
            await stage.ask("stop", worker="first")
        assert (await stage.ask("stop", worker="first"))["worker"]["dirty"] is False is running.dirty[0]
        assert (await stage.ask("stop", worker="other"))["worker"]["ended"]["outcome"] == "exited"

    run(body)


class Silent(Scopes):
    """A manager that knows no unit, or answers with an error."""

    def __init__(self, error: ManagerError | None) -> None:
        super().__init__()
        self.error = error

    async def state(self, unit: str) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "unproved"),
        (ManagerRefused("org.freedesktop.DBus.Error.Failed"), "unproved"),
        (ManagerUnreachable("gone"), "manager_unreachable"),
    ],
)
def test_why_a_worker_is_unreachable_and_that_it_is_looked_at_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: ManagerError | None, reason: str
) -> None:
    monkeypatch.setattr(processes, "boot_id", lambda: PLACED.boot_id)
    monkeypatch.setattr(processes, "alive", lambda _: False)
    monkeypatch.setattr(cgroups, "populated", lambda _: True)
    monkeypatch.setattr(reattach, "AGAIN", 0)

    async def body(stage: Stage) -> None:
        stage.scopes = Silent(error)
        worker = await stage.start()
        again, proved = reattach.Again(stage.service), asyncio.Event()
        again.arm()
        await reattach.reattach(stage.service)
        assert (row(stage, worker).state, row(stage, worker).state_reason) == ("unreachable", reason)

        async def prove(_: object, found: Worker) -> None:
            proved.set()

        monkeypatch.setattr(reattach, "_one", prove)
        again.arm()
        if reason == "unproved":
            async with asyncio.timeout(20):
                await proved.wait()
        else:
            # A manager that can be asked is what it waits for.
            assert again._handle is None
        again.close()

    run(body)


def test_a_worker_that_is_being_ended_is_not_proved_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        proved = []

        async def prove(_: object, found: Worker) -> None:
            proved.append(found)

        monkeypatch.setattr(reattach, "_one", prove)
        async with stage.service.lock(worker["id"]):
            finding = asyncio.ensure_future(reattach.reattach(stage.service))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stage.registry.lost(worker["incarnation"], now_ms())
        await finding
        assert not proved

    run(body)


@pytest.mark.parametrize(("where", "alone"), [("", True), ("/x.scope", True), ("/elsewhere.scope", False)])
def test_what_is_in_another_start_of_a_unit_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, where: str, alone: bool
) -> None:
    """Nor is it while there is nobody to ask (an empty place here). What is left of ours elsewhere is."""

    class Other(Scopes):
        async def __aenter__(self) -> Scopes:
            if not where:
                raise ManagerUnreachable("no bus")
            return self

        async def state(self, unit: str) -> ScopeState:
            return ScopeState("active", "running", "success", "running", where, "f" * 32)

    killed: list[str] = []

    async def emptied(cgroup: str, timeout: float) -> bool:
        return bool(killed)

    def kill(cgroup: str) -> bool:
        killed.append(cgroup)
        return True

    monkeypatch.setattr(cgroups, "emptied", emptied)
    monkeypatch.setattr(cgroups, "kill", kill)
    monkeypatch.setattr(cgroups, "members", lambda _: [])

    async def main() -> None:
        journal = Journal(path="/nonexistent")
        managers = Managers(Other, lambda *_: None, journal)  # type: ignore[arg-type]
        if alone:
            with pytest.raises(ending.AnotherUnit):
                await ending.end(managers, UNIT, "/x.scope", "0" * 32, changed=True)
        else:
            await ending.end(managers, UNIT, "/x.scope", "0" * 32, changed=True)
        assert killed == ([] if alone else ["/x.scope"])
        await managers.close()
        journal.close()

    asyncio.run(main())


# Managers that come and go.


def test_a_bus_that_was_never_there_is_looked_for_without_anybody_asking() -> None:
    async def main() -> None:
        tried: list[Scopes] = []
        told = asyncio.Event()

        class Coming(Scopes):
            async def __aenter__(self) -> Scopes:
                tried.append(self)
                if len(tried) == 1:
                    raise ManagerUnreachable("no bus")
                return self

        journal = Journal(path="/nonexistent")
        managers = Managers(Coming, lambda *_: None, journal)  # type: ignore[arg-type]
        managers.on_connect = told.set
        with refused(Code.MANAGER_UNREACHABLE):
            await managers.scopes()
        async with asyncio.timeout(20):
            await told.wait()
        assert len(tried) == 2
        await managers.close()
        journal.close()

    asyncio.run(main())


def test_who_asks_for_a_manager_at_the_same_time_waits_for_one_attempt() -> None:
    async def main() -> None:
        tried: list[Scopes] = []
        answers = [asyncio.Event(), asyncio.Event()]

        class Deaf(Scopes):
            async def __aenter__(self) -> Scopes:
                tried.append(self)
                await answers[len(tried) - 1].wait()
                if len(tried) == 1:
                    raise ManagerUnreachable("no bus")
                return self

        journal = Journal(path="/nonexistent")
        managers = Managers(Deaf, lambda *_: None, journal)  # type: ignore[arg-type]
        for answer in answers:
            asked = [asyncio.ensure_future(managers.scopes()) for _ in range(13)]
            await asyncio.sleep(0)
            gone = asked.pop()
            gone.cancel()
            answer.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
            if len(tried) == 1:
                assert {getattr(each, "code", "") for each in found} == {Code.MANAGER_UNREACHABLE}
        assert set(map(id, found)) == {id(tried[1])} and len(tried) == 2
        await managers.close()
        journal.close()

    asyncio.run(main())


def test_a_bus_that_has_gone_is_connected_to_again_without_anybody_asking() -> None:
    async def main() -> None:
        made: list[Scopes] = []
        told = asyncio.Event()

        def connect() -> Any:
            made.append(Scopes())
            return made[-1]

        managers = Managers(connect, lambda *_: None, Journal(path="/nonexistent"))
        managers.on_connect = told.set
        await managers.scopes()
        told.clear()
        made[0].lost.set()
        async with asyncio.timeout(20):
            await told.wait()
        assert len(made) == 2
        # Another process behind the same bus: what it did meanwhile was not told either.
        told.clear()
        for back in made[1].on_return:
            back()
        assert told.is_set()
        await managers.close()

    asyncio.run(main())


# Time.


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processor time that every worker has used, in microseconds."""
    found = [0]
    monkeypatch.setattr(cgroups, "cpu_usec", lambda _: found[0])
    yield found


def test_what_a_worker_used_before_its_last_activity_does_not_count(run: Run, used: list[int]) -> None:
    async def body(stage: Stage) -> None:
        used[0] = 3_600_000_000
        worker = await stage.start()
        clock = Timers(stage.service)
        clock.arm()
        due = Due(Work.CHECKPOINT, worker["id"], worker["incarnation"], now_ms())
        await asyncio.sleep(0)
        assert not clock._worked(due)
        used[0] += 10_000_000
        assert clock._worked(due)
        assert not clock._worked(due)
        clock.close()

    run(body)


@pytest.mark.parametrize("held", [True, False])
def test_who_stands_still_is_not_ended_for_the_sake_of_time(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Frozen itself it is taken as paused; with its slice it is looked at again."""
    frozen = [True]
    monkeypatch.setattr(cgroups, "frozen", lambda _: frozen[0])
    monkeypatch.setattr(cgroups, "frozen_itself", lambda _: held)

    async def body(stage: Stage) -> None:
        worker = await stage.start(lifetimes=actions.Durations(runtime_ms=1))
        clock = Timers(stage.service)
        await asyncio.sleep(0.01)
        clock._fire()
        assert row(stage, worker).state == ("paused" if held else "registering") and not ended
        if not held:
            assert clock._handle is not None and clock._held > asyncio.get_running_loop().time()
        frozen[0] = False
        pausing.stilled(stage.service, worker["incarnation"], False)
        await asyncio.sleep(0.01)
        clock._fire()
        while stage.service.busy:
            await asyncio.sleep(0)
        assert ended == [worker["unit"]] and row(stage, worker).stop_reason == "runtime-expired"
        clock.close()

    run(body)


def test_a_clock_that_is_set_ends_nobody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = Clock(), time.time_ns

    async def body(stage: Stage) -> None:
        clock.stepped = stage.registry.stepped
        worker = await stage.start(lifetimes=actions.Durations(runtime_ms=60_000))
        before = row(stage, worker)
        for by in (86_400_000, -2 * 86_400_000):
            monkeypatch.setattr(time, "time_ns", lambda by=by: wall() + by * 1_000_000)
            now = clock.now()
            assert not stage.registry.due(now)
            after = row(stage, worker)
            for name in ("runtime_deadline_at", "idle_deadline_at", "lease_expires_at", "checkpoint_deadline_at"):
                assert abs(getattr(after, name) - getattr(before, name) - by) < STEP_MS

    run(body)


def test_a_clock_that_goes_on_is_never_set() -> None:
    clock, told = Clock(), list[int]()
    clock.stepped = told.append
    assert clock.now() <= clock.now() and not told
