# SPDX-License-Identifier: Apache-2.0
"""What the worker service lets in: texts that can be stored, starts under a key, and answers that can be sent."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from agent_intercom.host.journal import Event
from agent_intercom.wire.errors import WireError
from agent_intercom.workers import contract, refusals
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import Code, Limits
from agent_intercom.workers.listening import Origin, Peer
from agent_intercom.workers.refusals import Refusals
from agent_intercom.workers.requests import Requests
from agent_intercom.workers.terms import Caller, Changes
from tests.unit import workerstage
from tests.unit.test_workers_service import SCOPE, Run, Stage, run
from tests.unit.workerstage import refused

__all__ = ["run"]


async def _never(*_: Any) -> bytes:
    raise AssertionError


async def asked(stage: Stage, action: str, params: dict[str, Any], **caller: Any) -> dict[str, Any]:
    """The answer to a request from outside every worker."""
    origin = Origin(1, None)
    caller = {"scope": SCOPE, **caller}
    request = {"version": 1, "id": "a" * 32, "action": action, "params": params, "caller": caller}
    peer = Peer(origin, _never, lambda _: None)
    payload = await Requests(stage.service, "/nonexistent", Refusals(stage.journal)).answer(
        json.dumps(request).encode(), origin, peer
    )
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
        ({"harness": "x" * 81}, {}, "harness"),
        ({"key": "\udcff"}, {}, "key"),
        ({"task": "\ud800"}, {}, "task"),
        ({"environment": {"A": "\ud800"}}, {}, "environment"),
        ({"command": ["/bin/true", "\ud800"]}, {}, "command"),
        ({"\ud800": 1}, {}, "params"),
        ({"memory_max": 10**30}, {}, "memory_max"),
        ({"lifetimes": {"idle_ms": 10**30}}, {}, "lifetimes.idle_ms"),
        ({"grant": {"children": 1, "descendants": 1, "expires_at": 10**30}}, {}, "grant.expires_at"),
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


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"lifetimes": {"runtime_ms": 10**16}}, "`int` <= 3162240000000"),
        ({"task": "x" * 262_145}, "`str` of length <= 262144"),
        ({"memory_max": 0}, "`int` >= 1"),
        ({"network": 1}, "`bool`"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_expected(run: Run, params: dict[str, Any], expected: str) -> None:
    async def body(stage: Stage) -> None:
        answer = await asked(stage, "start", wanted(stage, **params))
        assert answer["error"]["text"] == f"this has the wrong type or value: {expected} is expected"

    run(body)


@pytest.mark.parametrize("name", ["name", "\ud800"])
def test_what_is_nested_deep_is_refused_like_any_other(run: Run, name: str) -> None:
    async def body(stage: Stage) -> None:
        for depth in (100, 480, 900):
            nested: Any = {name: 1}
            for _ in range(depth):
                nested = [nested]
            answer = await asked(stage, "start", wanted(stage, **{name: nested}))
            assert answer["error"]["code"] == "invalid_request" and stage.untouched()

    run(body)


def test_bytes_that_are_no_text_may_be_in_what_the_kernel_gets(run: Run) -> None:
    async def body(stage: Stage) -> None:
        given = wanted(
            stage, command=["/bin/echo", "caf\udce9"], environment={"A": "\udcff"}, name="mine", role="code review"
        )
        assert (await asked(stage, "start", given))["ok"]

    run(body)


def test_refusals_that_were_only_counted_are_told_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        told: list[tuple[Event, dict[str, Any]]] = []
        monkeypatch.setattr(stage.journal, "emit", lambda event, **fields: told.append((event, fields)))
        counted = Refusals(stage.journal)
        door = Requests(stage.service, "/nonexistent", counted)
        origin = Origin(1, None)
        for _ in range(refusals.LINES + 7):
            await door.answer(b"{", origin, Peer(origin, _never, lambda _: None))
        assert [event for event, _ in told] == [Event.WORKER_REQUEST_REFUSED] * refusals.LINES
        counted.close()
        assert told[-1] == (Event.WORKER_REQUESTS_REFUSED, {"count": 7, "inside": False})

    run(body)


class Faulty:
    """A store with a fault of its own."""

    def apply(self, changes: Changes) -> None:
        if changes:
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")


def test_a_fault_while_a_request_is_written_down_leaves_no_worker_behind(run: Run) -> None:
    async def body(stage: Stage) -> None:
        stage.service.store = Faulty()
        with pytest.raises(UnicodeEncodeError):
            await stage.start()
        assert not stage.registry.live() and not stage.registry.take()

    run(body)


def test_a_fault_while_a_fact_is_written_down_keeps_the_fact(run: Run) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        good, stage.service.store = stage.service.store, Faulty()
        stage.registry.lost(worker["incarnation"], 1)
        with pytest.raises(UnicodeEncodeError):
            stage.service.record()
        stage.service.store = good
        assert [row.id for row in stage.registry.take().workers] == [worker["id"]]

    run(body)


def test_an_answer_that_is_too_long_is_told_as_that(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        await stage.start()
        monkeypatch.setattr(contract, "MAX_FRAME", 300)
        answer = await asked(stage, "list", {"all": True})
        assert (answer["id"], answer["error"]["code"]) == ("a" * 32, "limit_reached")

    run(body)


def test_a_connection_does_not_outlive_an_answer_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            peer = Peer(Origin(1, None), _endless, lambda _: None)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, theirs)
            await asyncio.get_running_loop().sock_sendall(ours, b"\0\0\0\1x")
            async with asyncio.timeout(20):
                assert await asyncio.get_running_loop().sock_recv(ours, 1) == b""
            assert peer._task is not None
            with pytest.raises(WireError):
                await peer._task

    monkeypatch.setattr(contract, "MAX_FRAME", 300)
    asyncio.run(body())


async def _endless(*_: Any) -> bytes:
    return b"x" * 301


def test_of_those_that_have_ended_the_last_are_listed_and_the_others_counted() -> None:
    stage = workerstage.Stage(Limits(listed=2))
    live = stage.run()
    ended = []
    for _ in range(4):
        stage.now += 1
        ended.append(stage.end(stage.run()).id)
    listed = stage.it.list(workerstage.PERSON, stage.now, history=True)
    assert [worker.id for worker in listed.workers] == [live.id, *ended[2:]]
    assert listed.more == 2


def test_no_more_are_pruned_at_once_than_can_be_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        for _ in range(3):
            stage.registry.lost((await stage.start())["incarnation"], 1)
        monkeypatch.setattr(contract, "Limits", lambda: Limits(listed=2))
        preview = await stage.ask("prune", preview=True)
        assert (len(preview["candidates"]), preview["more"], preview["pruned"]) == (2, 1, [])
        one = await stage.ask("forget", worker=preview["candidates"][0]["id"], preview=True)
        assert one["candidates"] == preview["candidates"][:1] and one["why"].startswith("its record")
        first = await stage.ask("prune", acknowledge=True)
        assert (len(first["pruned"]), first["more"]) == (2, 1)
        second = await stage.ask("prune", acknowledge=True)
        assert (len(second["pruned"]), second["more"]) == (1, 0)

    run(body)


def test_what_nobody_sees_any_more_is_cleaned_up_by_any_person_and_not_named(run: Run) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start(name="secret")
        stage.registry.lost(worker["incarnation"], 1)
        stage.registry._scopes.clear()
        for who, others in ((Caller(), 1), (Caller(session="somebody"), 0)):
            found = await stage.ask("cleanup", who)
            assert (found["candidates"], found["others"]) == ([], others)
        named = await stage.ask("cleanup", Caller(override=True))
        kept = 1 + contract.Lifetimes().dirty_retention_ms
        assert [(each["name"], each["deadline"]) for each in named["candidates"]] == [("secret", kept)]
        await stage.ask("cleanup", Caller("scope-of-somebody-else"), execute=True)
        assert stage.registry.get(worker["id"]) is None

    run(body)


@pytest.mark.parametrize(
    "other",
    [
        {"command": ["/bin/true", "again"]},
        {"environment": {"PATH": "/bin", "TOKEN": "\udcff"}},
        {"writable": []},
        {"writable": [], "network": False},
        {"memory_max": 1_000_000},
        {"memory_high": 1_000_000},
        {"tasks_max": 9},
        {"keep_output": True},
    ],
)
def test_a_key_is_of_one_start_with_all_that_it_was_given(run: Run, other: dict[str, Any]) -> None:
    async def body(stage: Stage) -> None:
        found = [await stage.ask("start", key="once", **wanted(stage)) for _ in range(2)]
        assert found[0]["worker"]["id"] == found[1]["worker"]["id"]
        assert [each["repeated"] for each in found] == [False, True]
        with refused(Code.CONFLICT, "key"):
            await stage.start(key="once", **other)
        assert len(stage.orders) == 1

    run(body)


@pytest.mark.parametrize("known", [True, False])
def test_what_has_another_scope_id_is_forgotten_with_time_by_a_person_who_learns_nothing_of_it(
    run: Run, known: bool
) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start(name="secret")
        stage.registry.lost(worker["incarnation"], 1)
        if not known:
            stage.registry._scopes.clear()
        young = await stage.start(name="young")
        stage.registry.lost(young["incarnation"], now_ms())
        shown = await stage.ask("cleanup", Caller("another-scope-id-1"))
        assert shown["others"] == 1 and worker["id"] not in json.dumps(shown) and "secret" not in json.dumps(shown)
        agent = await stage.ask("cleanup", Caller("another-scope-id-1", "agent"))
        assert agent["others"] == 0
        done = await stage.ask("cleanup", Caller("another-scope-id-1"), execute=True)
        assert (done["handled"], done["others"], done["errors"]) == (1, 1, 0)
        assert stage.registry.get(worker["id"]) is None and stage.registry.get(young["id"]) is not None

    run(body)
