# SPDX-License-Identifier: Apache-2.0
"""What the worker service tells where there is nobody whom it could ask."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.host.manager import ManagerUnreachable
from agent_intercom.workers import places
from tests.unit.orchcli import Home
from tests.unit.test_workers_service import Run, Stage, run
from tests.unit.toldservice import serving, worker

__all__ = ["run"]


def test_a_unit_that_nobody_can_be_asked_of_is_not_told_as_gone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        answers: list[Exception | None] = [ManagerUnreachable("there is no bus"), None]

        async def state(_: str) -> Any:
            answer = answers.pop(0)
            if answer is not None:
                raise answer
            return answer

        monkeypatch.setattr(stage.scopes, "state", state, raising=False)
        begun = await stage.start()
        unit = (await stage.ask("status", worker=begun["id"]))["unit"]
        assert [unit[name] for name in ("active", "sub", "result", "freezer")] == [None] * 4 and "tasks" in unit
        assert (await stage.ask("status", worker=begun["id"]))["unit"] is None

    run(body)


def test_what_could_not_be_removed_is_not_none_where_nobody_can_tell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        async def states(_: str) -> Any:
            raise ManagerUnreachable("there is no bus")

        places.make_scratch(places.scratch_of(str(stage.state), "0" * 12))
        assert (await stage.ask("health"))["left"] == 1
        monkeypatch.setattr(stage.scopes, "states", states)
        assert (await stage.ask("health"))["left"] is None

    run(body)


def test_a_unit_that_nobody_can_be_asked_of_is_shown_as_that(home: Home) -> None:
    unit = {"active": None, "sub": None, "result": None, "freezer": None, "memory_bytes": 1_048_576, "tasks": 3}
    with serving(home.runtime) as service:
        service.answers["status"] = {"worker": worker(), "processes": [], "unit": unit}
        said = home.call("worker", "status", "review")
    assert ".scope, no service manager answers how it is, 1.0 MiB, 3 tasks\n" in said.out
