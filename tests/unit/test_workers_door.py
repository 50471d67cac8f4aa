# SPDX-License-Identifier: Apache-2.0
"""What the worker service lets in: texts that can be stored, and answers that can be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_intercom.workers.listening import Origin, Peer
from agent_intercom.workers.requests import Requests
from agent_intercom.workers.terms import Changes
from tests.unit.test_workers_service import SCOPE, Run, Stage, run

__all__ = ["run"]


async def _never(*_: Any) -> bytes:
    raise AssertionError


async def asked(stage: Stage, action: str, params: dict[str, Any], **caller: Any) -> dict[str, Any]:
    """The answer to a request from outside every worker."""
    origin = Origin(1, None)
    caller = {"scope": SCOPE, **caller}
    request = {"version": 1, "id": "a" * 32, "action": action, "params": params, "caller": caller}
    peer = Peer(origin, _never, lambda _: None)
    payload = await Requests(stage.service, "/nonexistent").answer(json.dumps(request).encode(), origin, peer)
    answer: dict[str, Any] = json.loads(payload)
    return answer


def wanted(stage: Stage, **more: Any) -> dict[str, Any]:
    return {"command": ["/bin/true"], "directory": str(stage.project), "environment": {"PATH": "/bin"}, **more}


@pytest.mark.parametrize(
    ("params", "caller", "field"),
    [
        ({"role": "\ud800"}, {}, "role"),
        ({"role": "caf\udce9"}, {}, "role"),
        ({"role": "two\nlines"}, {}, "role"),
        ({"role": "x" * 81}, {}, "role"),
        ({"driver": "x" * 81}, {}, "driver"),
        ({"key": "\udcff"}, {}, "key"),
        ({"task": "\ud800"}, {}, "task"),
        ({"environment": {"A": "\ud800"}}, {}, "environment"),
        ({"command": ["/bin/true", "\ud800"]}, {}, "command"),
        ({"\ud800": 1}, {}, "params"),
        ({}, {"session": "\ud800"}, "session"),
    ],
)
def test_what_can_be_neither_stored_nor_passed_on_is_refused(
    run: Run, params: dict[str, Any], caller: dict[str, Any], field: str
) -> None:
    async def body(stage: Stage) -> None:
        answer = await asked(stage, "start", wanted(stage, **params), **caller)
        assert (answer["error"]["code"], answer["error"]["field"]) == ("invalid_request", field)
        assert not stage.registry.live() and stage.untouched()

    run(body)


def test_bytes_that_are_no_text_may_be_in_what_the_kernel_gets(run: Run) -> None:
    async def body(stage: Stage) -> None:
        given = wanted(
            stage, command=["/bin/echo", "caf\udce9"], environment={"A": "\udcff"}, name="mine", role="code review"
        )
        assert (await asked(stage, "start", given))["ok"]

    run(body)


class Faulty:
    """A store with a fault of its own."""

    def apply(self, changes: Changes) -> None:
        if changes:
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")


def test_a_fault_while_a_request_is_written_down_leaves_no_worker_behind(run: Run) -> None:
    async def body(stage: Stage) -> None:
        stage.service._store = Faulty()
        with pytest.raises(UnicodeEncodeError):
            await stage.start()
        assert not stage.registry.live() and not stage.registry.take()

    run(body)


def test_a_fault_while_a_fact_is_written_down_keeps_the_fact(run: Run) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        good, stage.service._store = stage.service._store, Faulty()
        stage.registry.lost(worker["incarnation"], 1)
        with pytest.raises(UnicodeEncodeError):
            stage.service.record()
        stage.service._store = good
        assert [row.id for row in stage.registry.take().workers] == [worker["id"]]

    run(body)
