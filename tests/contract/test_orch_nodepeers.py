# SPDX-License-Identifier: Apache-2.0
"""The broker with the published worker bridges, the published parent observer and the real Pi (section 17.5)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.nodepeers import Parent, Worker
from tests.contract.orchpeer import eventually
from tests.contract.orchruns import SESSION, Run
from tests.mockmodel import Model, call, report, saved
from tests.system import realpi

Rules = Sequence[Mapping[str, object]]

REPAIR: Rules = [{"round": 1, "report": {"verdict": "changes_requested", "summary": "Not yet."}}]
HELD: Rules = [{"hold": True, "times": 1}]


def peer(run: Run, role: str, rules: Rules = (), **options: Any) -> Worker:
    return Worker(role, run.tokens[role], run.socket, rules=rules, **options)


@contextlib.asynccontextmanager
async def team(run: Run, rules: Mapping[str, Rules]) -> AsyncIterator[tuple[dict[str, Worker], Parent]]:
    """A bridge for every role, and the parent."""
    async with contextlib.AsyncExitStack() as peers:
        workers = {role: await peers.enter_async_context(peer(run, role, rules.get(role, ()))) for role in run.roles}
        parent = Parent(SESSION, run.directory, run.socket, run.roles)
        yield workers, await peers.enter_async_context(parent)


def assert_undisturbed(*workers: Worker) -> None:
    """No bridge was refused anything, and no script stumbled."""
    for worker in workers:
        faults = [event for event in worker.events if event["event"] == "fault" or event.get("ok") is False]
        assert not faults, worker.story()


def turns(worker: Worker) -> list[tuple[str, int]]:
    return [(event["kind"], event["round"]) for event in worker.events if event["event"] == "turn"]


@pytest.mark.parametrize("report_usage", [False, True])
def test_a_phased_run_with_every_specialist_and_a_repair_becomes_ready(report_usage: bool) -> None:
    async def scene(run: Run) -> None:
        async with team(run, {"reviewer": REPAIR}) as (workers, parent):
            last = await parent.update(triggers=True)
            assert "review of round 2 is done." in last
            await parent.event("stopped")
            assert turns(workers["implementer"]) == [("plan", 1), ("implementation", 1), ("implementation", 2)]
            for role in ("probe", "playwright", "django"):
                assert turns(workers[role]) == [(role, 1), (role, 2)]
            await workers["reviewer"].event("settled")
            assert_undisturbed(*workers.values())

    specialists = ("probe", "playwright", "django")
    with Run(*specialists, flow="phased", forced=specialists, report_usage=report_usage) as run:
        asyncio.run(scene(run))
        assert run.workflow() == ("ready", 2)


def test_a_worker_that_hangs_is_restarted_and_its_successor_finishes() -> None:
    async def scene(run: Run) -> None:
        async with peer(run, "reviewer") as reviewer:
            async with peer(run, "implementer", HELD) as first:
                await first.event("held")
                run.accepted("restart", "implementer")
            async with peer(run, "implementer", entries=first.entries, generation=2) as second:
                assert "Make authentication sound." in (await second.delivery("baseline"))["content"]
                await second.event("settled")
                await reviewer.event("settled")
                assert turns(second) == [("implementation", 1)]
            assert_undisturbed(reviewer, second)

    with Run() as run:
        asyncio.run(scene(run))
        assert run.workflow() == ("ready", 1)


def test_a_worker_that_was_killed_goes_on_with_its_session_when_asked_to() -> None:
    async def scene(run: Run) -> None:
        async with peer(run, "reviewer") as reviewer:
            async with peer(run, "implementer", HELD) as first:
                await first.event("held")
                await first.kill()
            await asyncio.to_thread(eventually, lambda: not run.role("implementer")["connected"])
            async with peer(run, "implementer", entries=first.entries) as second:
                await asyncio.to_thread(eventually, lambda: run.role("implementer")["connected"])
                run.send("implementer", "Your process was killed; go on.")
                await second.delivery("operator_message")
                await second.send(op="turn")
                await reviewer.event("settled")
                assert turns(second) == [("operator_message", 1), ("implementation", 1)]
            assert_undisturbed(reviewer, second)

    with Run() as run:
        asyncio.run(scene(run))
        assert run.workflow() == ("ready", 1)


def test_an_abort_and_a_message_of_the_operator_reach_the_agent() -> None:
    async def scene(run: Run) -> None:
        async with team(run, {"implementer": HELD}) as (workers, parent):
            implementer = workers["implementer"]
            await implementer.event("held")
            run.accepted("abort", "implementer")
            await implementer.event("abort")
            assert "implementer" in await parent.update(triggers=True)
            run.send("implementer", "Go on, please.")
            assert "Go on, please." in (await implementer.delivery("operator_message"))["content"]
            await implementer.send(op="turn")
            assert "review of round 1 is done." in await parent.update("orchestration ready", triggers=True)
            assert_undisturbed(*workers.values())

    with Run() as run:
        asyncio.run(scene(run))
        assert run.workflow() == ("ready", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_bridges_and_the_parent_come_back_to_a_broker_that_was_away(number: signal.Signals) -> None:
    async def scene(run: Run) -> None:
        async with team(run, {"implementer": HELD}) as (workers, parent):
            await workers["implementer"].event("held")
            await asyncio.to_thread(run.stop, number)
            run.start()
            await asyncio.to_thread(eventually, lambda: all(run.role(role)["connected"] for role in run.roles))
            await workers["implementer"].send(op="continue")
            assert "review of round 1 is done." in await parent.update(triggers=True)
            assert_undisturbed(*workers.values())

    with Run() as run:
        asyncio.run(scene(run))
        assert run.workflow() == ("ready", 1)


def test_the_real_pi_needs_two_rounds_and_half_of_the_history() -> None:
    writing = [call("write", path="notes.txt", content="words " * 400), call("read", path="notes.txt"), report()]
    reading = [call("read", path="notes.txt")]
    script = {
        ("implementer", "implementation", None): writing,
        ("reviewer", "review", 1): [*reading, report(verdict="changes_requested", summary="Not yet.")],
        ("reviewer", "review", 2): [*reading, report()],
    }

    async def scene(run: Run, model: Model) -> None:
        agent = realpi.prepare(run.root / "agent", model.url)
        async with contextlib.AsyncExitStack() as peers:
            for role in run.roles:
                launch = realpi.Launch(role, run.tokens[role], run.socket, agent, run.project, run.root)
                await peers.enter_async_context(realpi.Pi(launch))
            parent = await peers.enter_async_context(Parent(SESSION, run.directory, run.socket, run.roles))
            assert "review of round 2 is done." in await parent.update(triggers=True)

    with Run() as run, Model(script) as model:
        asyncio.run(scene(run, model))
        assert run.workflow() == ("ready", 2)
        assert Path(run.project / "notes.txt").exists()
    assert len(model.requests) == 3 + 2 + 3 + 2
    for role, kind in (("implementer", "implementation"), ("reviewer", "review")):
        assert saved(model.requests, role, kind) > 0.5
