# SPDX-License-Identifier: Apache-2.0
"""In which order the workers of a cascade are ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from agent_intercom.workers import ending
from agent_intercom.workers.contract import Code, State
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Worker
from agent_intercom.workers.terms import Caller, Wanted
from tests.unit.test_workers_service import PERSON, Run, Stage, run
from tests.unit.workerstage import PLACED, WIDE, inside, refused

__all__ = ["run"]


def family(stage: Stage) -> tuple[Worker, list[Worker], list[Worker]]:
    """A worker, its children, and theirs."""

    def made(caller: Caller) -> Worker:
        above = None if caller.worker is None else stage.registry.of(caller.worker)
        grant = WIDE if above is None else replace(WIDE, depth=WIDE.depth - above.depth - 1)
        worker = stage.registry.start(
            caller, Wanted("command", f"w{len(stage.registry.live())}", grant=grant), 1
        ).worker
        stage.registry.placed(worker.incarnation, PLACED, 1)
        stage.registry.released(worker.incarnation, 1)
        return worker

    top = made(PERSON)
    children = [made(inside(top)) for _ in range(2)]
    grandchildren = [made(inside(child)) for child in children]
    stage.service.commit()
    return top, children, grandchildren


class Manager:
    """Ends units once as many as `together` says are waiting for it; the one of `deaf` never."""

    def __init__(self, stage: Stage, together: dict[int, int], deaf: str = "") -> None:
        self._stage, self._together, self._deaf = stage, together, deaf
        self._waiting: dict[int, int] = {}
        self._all = {depth: asyncio.Event() for depth in together}
        self.order: list[int] = []

    async def end(self, _: object, unit: str, *args: Any, **more: Any) -> None:
        depth = next(row.depth for row in self._stage.registry.live() if row.unit == unit)
        self.order.append(depth)
        self._waiting[depth] = self._waiting.get(depth, 0) + 1
        if self._waiting[depth] == self._together[depth]:
            self._all[depth].set()
        async with asyncio.timeout(20):
            await self._all[depth].wait()
        if unit == self._deaf:
            raise WorkerError(Code.STOP_FAILED, "it is deaf", "worker")


def test_those_of_one_depth_are_ended_together_and_the_deepest_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        top, children, grandchildren = family(stage)
        manager = Manager(stage, {2: 2, 1: 2, 0: 1})
        monkeypatch.setattr(ending, "end", manager.end)
        answer = await stage.ask("stop", worker=top.id)
        assert manager.order == [2, 2, 1, 1, 0]
        assert {each["id"] for each in answer["stopped"]} == {row.id for row in (top, *children, *grandchildren)}

    run(body)


def test_one_that_cannot_be_ended_keeps_none_of_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        top, _, grandchildren = family(stage)
        manager = Manager(stage, {2: 2, 1: 2, 0: 1}, grandchildren[0].unit)
        monkeypatch.setattr(ending, "end", manager.end)
        with refused(Code.STOP_FAILED):
            await stage.ask("stop", worker=top.id)
        (left,) = stage.registry.live()
        assert left.id == grandchildren[0].id and left.state == State.BLOCKED

    run(body)
