# SPDX-License-Identifier: Apache-2.0
"""A worker service that ends begins nothing: no worker, and no connection to a manager."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers.contract import Code
from agent_intercom.workers.listening import Door
from agent_intercom.workers.refusals import Refusals
from tests.unit.test_workers_peers import HANG, Told, frame
from tests.unit.test_workers_peers import run as bounded
from tests.unit.test_workers_service import Run, Stage, run
from tests.unit.workerstage import refused

__all__ = ["run"]


def test_a_start_that_is_considered_while_the_service_ends_begins_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        looking, looked = asyncio.Event(), asyncio.Event()

        async def jobs() -> int:
            looking.set()
            await looked.wait()
            return 0

        monkeypatch.setattr(stage.scopes, "jobs", jobs)
        starting = asyncio.create_task(stage.start())
        await looking.wait()
        await stage.service.settle(HANG)
        looked.set()
        with refused(Code.UNREACHABLE):
            await starting
        assert stage.orders == [] and not stage.registry.live() and stage.untouched()

    run(body)


def test_nothing_is_carried_out_and_no_manager_is_asked_after_the_end(run: Run) -> None:
    async def body(stage: Stage) -> None:
        made = len(stage.scopes.on_return)
        await stage.service.close(0)
        with refused(Code.UNREACHABLE):
            stage.service.spawn(stage.service.end_all([]))
        with refused(Code.MANAGER_UNREACHABLE):
            await stage.service.managers.scopes()
        with refused(Code.MANAGER_UNREACHABLE):
            await stage.start()
        assert len(stage.scopes.on_return) == made and not stage.service.busy

    run(body)


def test_a_request_that_is_still_carried_out_when_the_door_closes_is_let_be(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def for_ever(*_: Any) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b"x"

    async def body() -> None:
        door = Door(for_ever, Refusals(Told()), Told(), lambda: None)
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
            listening.bind(str(tmp_path / "s"))
            listening.listen()
            door.listen(listening)
            client.connect(str(tmp_path / "s"))
            client.sendall(frame(b"{}"))
            await begun.wait()
            await door.close()

    bounded(body)
