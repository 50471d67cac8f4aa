# SPDX-License-Identifier: Apache-2.0
"""The real Pi with the published bridge, against a broker of a few lines and a scripted stand-in for the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.contract.test_orch_harness import TOKEN, Stage, fresh, run, stage
from tests.mockmodel import Model, call, report, saved
from tests.system import realpi


@contextlib.asynccontextmanager
async def pi(place: Stage, model: Model, role: str) -> AsyncIterator[realpi.Pi]:
    project = place.root / "project"
    project.mkdir()
    agent = realpi.prepare(place.root / "agent", model.url)
    launch = realpi.Launch(role, TOKEN, place.socket, agent, project, place.root)
    async with realpi.Pi(launch) as worker:
        yield worker


def test_two_rounds_of_an_implementer_cost_half_of_the_history() -> None:
    steps = [call("write", path="notes.txt", content="words " * 400), call("read", path="notes.txt"), report()]

    async def scene(model: Model) -> None:
        async with stage() as place, pi(place, model, "implementer"):
            line = await place.accept()
            await line.hello()
            await line.context("baseline", "Role: implementer\nThe task.")
            for round_ in (1, 2):
                await line.assign("implementation", round_)
                sent = await line.until("report")
                assert sent["report"]["summary"] == f"implementation of round {round_} is done."
                assert sent["usage"]["assignment"]["providerCalls"] == 3
                await line.answer(sent, "accepted")
                await line.recorded("lifecycle", state="idle")
            assert Path(place.root / "project/notes.txt").exists()

    with Model({("implementer", "implementation", None): steps}) as model:
        run(scene(model))
    assert [(each.round, each.step) for each in model.requests] == [(r, s) for r in (1, 2) for s in range(3)]
    assert saved(model.requests, "implementer", "implementation") > 0.5


def test_a_plan_is_asked_for_without_tools_that_write() -> None:
    async def scene(model: Model) -> None:
        async with stage() as place, pi(place, model, "implementer"):
            line = await place.accept()
            await line.hello()
            for kind in ("plan", "implementation"):
                await line.assign(kind)
                sent = await line.until("report")
                assert sent["report"]["kind"] == kind
                await line.answer(sent, "accepted")
            await line.recorded("lifecycle", state="idle")

    with Model() as model:
        run(scene(model))
    plan, implementation = model.requests
    assert not {"edit", "write"} & set(plan.tools)
    assert {"edit", "write"} <= set(implementation.tools)


def test_an_abort_ends_an_answer_that_never_ends() -> None:
    async def scene(model: Model) -> None:
        async with stage() as place, pi(place, model, "reviewer"):
            line = await place.accept()
            await line.hello()
            await line.assign("review")
            await line.recorded("ack")
            assert await asyncio.to_thread(model.held, "thought")
            abort = await line.write(type="abort", id=fresh())
            await line.recorded("ack", delivery_id=abort["id"])
            await line.recorded("lifecycle", state="waiting")

    with Model({("reviewer", "review", 1): [{"hold": "thought"}, report()]}) as model:
        run(scene(model))
    assert model.aborted == 1
