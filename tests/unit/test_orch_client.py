# SPDX-License-Identifier: Apache-2.0
"""The orchestration client against a broker whose frames the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from agent_intercom.orchestration import client_frames, client_line, contract
from agent_intercom.orchestration.client import BROKER_REJECTED, ControlAnswer, ObserverLink, WorkerLink, control
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire import channel
from agent_intercom.wire.errors import WireError
from tests.unit.fakebroker import HANG, FakeBroker, Frame, Line, run

TOKEN = "0" * 31 + "a"
COMMAND = "c" * 32
OTHER = "d" * 32
V1 = {"version": 1}


def answer(request: Frame, **members: Any) -> Frame:
    return {**V1, "type": "response", "id": request["id"], **members}


def context(**members: Any) -> Frame:
    frame = {**V1, "type": "context", "id": COMMAND, "round": 1, "kind": "baseline", "content": "x", "trigger": False}
    return {**frame, **members}


def assignment(**members: Any) -> Frame:
    return {**context(type="assignment", kind="review", trigger=True, assignment_id=OTHER), **members}


async def refusal(awaitable: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        async with asyncio.timeout(HANG):
            await awaitable
    return caught.value


# control


def commanded(reply: Callable[[Line, Frame], None], **keys: Any) -> ControlAnswer | Refusal:
    """What `control` makes of what `reply` writes."""
    results: list[ControlAnswer | Refusal] = []

    async def scenario(broker: FakeBroker) -> None:
        sending = asyncio.ensure_future(control(broker.path, TOKEN, "abort", "reviewer", command_id=COMMAND, **keys))
        line = await broker.accept()
        request = await line.read()
        assert request == {
            **V1,
            "type": "control",
            "token": TOKEN,
            "id": COMMAND,
            "action": "abort",
            "role": "reviewer",
            "delivery": None,
            "message": None,
        }
        reply(line, request)
        async with asyncio.timeout(HANG):
            try:
                results.append(await sending)
            except Refusal as error:
                results.append(error)

    run(scenario)
    return results[0]


@pytest.mark.parametrize("duplicate", [True, False])
def test_control_answers(duplicate: bool) -> None:
    def reply(line: Line, request: Frame) -> None:
        line.write(answer(request, success=True, status="accepted", duplicate=duplicate))

    assert commanded(reply) == ControlAnswer(COMMAND, "accepted", duplicate)


@pytest.mark.parametrize(("status", "code"), [("uncertain", "broker_uncertain"), ("conflict", BROKER_REJECTED)])
def test_control_refused(status: str, code: str) -> None:
    def reply(line: Line, request: Frame) -> None:
        line.write(answer(request, success=False, status=status, duplicate=False))

    error = commanded(reply)
    assert isinstance(error, Refusal)
    assert (error.code, error.text) == (code, f"Broker reported {status} command delivery")


@pytest.mark.parametrize(
    "wrong",
    [
        {"success": True, "status": "accepted", "duplicate": False, "error": None},
        {"success": True, "status": "accepted"},
        {"success": True, "status": "conflict", "duplicate": False},
        {"success": False, "status": "accepted", "duplicate": False},
        {"success": True, "status": "recorded", "duplicate": False},
        {"success": 1, "status": "accepted", "duplicate": False},
        {"success": True, "status": "accepted", "duplicate": False, "id": OTHER},
        {"success": True, "status": "accepted", "duplicate": False, "version": 2},
        {"success": True, "status": "accepted", "duplicate": False, "version": True},
        {"success": True, "status": "accepted", "duplicate": False, "type": "abort"},
    ],
)
def test_control_answer_must_be_exact(wrong: Frame) -> None:
    error = commanded(lambda line, request: line.write(answer(request, **wrong)))
    assert isinstance(error, Refusal)
    assert (error.code, error.text) == ("orchestration_error", "Broker response is invalid")


@pytest.mark.parametrize("data", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1x", b"\0\4\0\1" + b" " * 262_145])
def test_control_answer_must_be_a_frame(data: bytes) -> None:
    error = commanded(lambda line, _: line.write_bytes(data))
    assert isinstance(error, Refusal)
    assert error.code == "orchestration_error"


@pytest.mark.parametrize("end", [Line.close, Line.abort])
def test_control_without_an_answer_is_uncertain(end: Callable[[Line], None]) -> None:
    error = commanded(lambda line, _: end(line))
    assert isinstance(error, Refusal)
    assert (error.code, error.text) == ("broker_uncertain", "Broker closed before acknowledging the command")


def test_control_without_an_answer_in_time_is_uncertain() -> None:
    error = commanded(lambda line, _: None, timeout=0.2)
    assert isinstance(error, Refusal)
    assert error.code == "broker_uncertain"


def test_control_without_a_broker(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / ("x" * 120)):
        error = asyncio.run(refusal(control(path, TOKEN, "abort", "reviewer")))
        assert error.code == "broker_not_ready"
        assert error.text == "Broker is unavailable; command delivery was not accepted"


@pytest.mark.parametrize("message", ["x" * 32_769, "😀" * 16_385])
def test_message_that_no_worker_takes_is_not_sent(tmp_path: Path, message: str) -> None:
    error = asyncio.run(refusal(control(tmp_path / "none", TOKEN, "send", "reviewer", message=message)))
    assert (error.code, error.field) == ("worker_context_too_large", "message")


@pytest.mark.parametrize("message", ["x" * 32_768, "😀" * 16_384, " \n" + "x" * 32_768 + "\n"])
def test_longest_message_is_sent(message: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        sending = asyncio.ensure_future(
            control(broker.path, TOKEN, "send", "reviewer", delivery="steer", message=message)
        )
        line = await broker.accept()
        request = await line.read()
        assert (request["message"], request["delivery"]) == (message, "steer")
        line.write(answer(request, success=True, status="accepted", duplicate=False))
        assert (await sending).id == request["id"]

    run(scenario)


def test_request_that_no_frame_holds_is_not_sent(tmp_path: Path) -> None:
    error = asyncio.run(refusal(control(tmp_path / "none", "t" * 300_000, "abort", "reviewer")))
    assert (error.code, error.field) == ("invalid_protocol", "length")


def test_foreign_listener_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(_: object) -> None:
        raise WireError("PEER_FOREIGN", "the socket belongs to another user", "uid")

    async def scenario(broker: FakeBroker) -> None:
        monkeypatch.setattr(channel, "check_listener", foreign)
        for attempt in (
            control(broker.path, TOKEN, "abort", "reviewer"),
            WorkerLink(broker.path, "reviewer", TOKEN).connect(),
            ObserverLink(broker.path, TOKEN).connect(),
        ):
            error = await refusal(attempt)
            assert (error.code, error.field) == ("unauthorized", "uid")
            assert await (await broker.accept()).at_end()

    run(scenario)


# worker


async def greeted(broker: FakeBroker, **keys: Any) -> tuple[WorkerLink, Line]:
    """A link that the broker took."""
    link = WorkerLink(broker.path, "reviewer", TOKEN, **keys)
    connecting = asyncio.ensure_future(link.connect())
    line = await broker.accept()
    hello = await line.read()
    assert hello == {
        **V1,
        "type": "hello",
        "role": "reviewer",
        "token": TOKEN,
        "id": hello["id"],
        "generation": keys.get("generation", 1),
    }
    line.write(answer(hello, success=True, status="connected", error=None))
    async with asyncio.timeout(HANG):
        await connecting
    return link, line


def test_requests_are_sent_one_after_another() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker, generation=3)
        first = asyncio.ensure_future(link.lifecycle("idle"))
        second = asyncio.ensure_future(link.acknowledge(COMMAND))
        request = await line.read()
        assert (request["type"], request["state"], request["usage"]) == ("lifecycle", "idle", None)
        line.write(assignment(), answer(request, success=True, status="recorded", error=None, more="x"))
        request = await line.read()
        assert first.done()
        assert (request["type"], request["delivery_id"], request["status"]) == ("ack", COMMAND, "accepted")
        line.write(context(extra=1), answer(request, success=True, status="recorded", error=None))
        await second
        work, text = await anext(link), await anext(link)
        assert isinstance(work, client_frames.Assignment) and work.assignment_id == OTHER
        assert isinstance(text, client_frames.Context) and not text.trigger
        await link.close()
        assert [frame async for frame in link] == []

    run(scenario)


@pytest.mark.parametrize("status", ["accepted", "duplicate"])
@pytest.mark.parametrize("usage", [None, {"cumulative": {}, "assignment": {}}])
def test_report(status: str, usage: Frame | None) -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        reporting = asyncio.ensure_future(link.report(OTHER, {"kind": "review"}, usage))
        request = await line.read()
        expected = {**V1, "type": "report", "role": "reviewer", "token": TOKEN, "id": request["id"]}
        expected |= {"assignment_id": OTHER, "report": {"kind": "review"}}
        assert request == (expected if usage is None else {**expected, "usage": usage})
        line.write(answer(request, success=True, status=status, error=None))
        assert await reporting is (status == "accepted")
        await link.close()

    run(scenario)


def test_progress_and_guardrail() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        going = asyncio.ensure_future(link.progress(OTHER, "tool"))
        request = await line.read()
        assert (request["type"], request["phase"], request["usage"]) == ("progress", "tool", None)
        line.write(answer(request, success=True, status="recorded", error=None))
        await going
        crossing = asyncio.ensure_future(link.guardrail(OTHER, "warning", "context_percent", 81.5, 80))
        request = await line.read()
        assert (request["observed"], request["threshold"], request["metric"]) == (81.5, 80, "context_percent")
        line.write(answer(request, success=True, status="duplicate", error=None))
        assert await crossing is False
        await link.close()

    run(scenario)


@pytest.mark.parametrize("own", [True, False])
def test_refusal_by_the_broker(own: bool) -> None:
    """Under the request's id, or under one that the broker made up before it closed."""

    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        asking = asyncio.ensure_future(link.lifecycle("asleep"))
        request = await line.read()
        request["id"] = request["id"] if own else COMMAND
        line.write(answer(request, success=False, status="invalid_protocol", error="Worker lifecycle state is invalid"))
        line.close()
        error = await refusal(asking)
        assert (error.code, error.text) == ("invalid_protocol", "Worker lifecycle state is invalid")
        assert [frame async for frame in link] == []
        assert (await refusal(link.lifecycle("idle"))).code == "broker_not_ready"
        assert not link.connected
        await link.close()

    run(scenario)


@pytest.mark.parametrize("how", ["close", "silence"])
def test_request_without_an_answer_is_uncertain(how: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker, timeout=HANG if how == "close" else 0.2)
        asking = asyncio.ensure_future(link.acknowledge(COMMAND))
        request = await line.read()
        if how == "close":
            line.close()
        assert (await refusal(asking)).code == "broker_uncertain"
        if how == "silence":
            line.write(answer(request, success=True, status="recorded", error=None))
            assert link.connected
        await link.close()

    run(scenario)


@pytest.mark.parametrize("end", [Line.close, Line.abort])
def test_hello_that_is_not_taken(end: Callable[[Line], None]) -> None:
    async def scenario(broker: FakeBroker) -> None:
        connecting = asyncio.ensure_future(WorkerLink(broker.path, "reviewer", TOKEN).connect())
        line = await broker.accept()
        await line.expect("hello")
        end(line)
        assert (await refusal(connecting)).code == "unauthorized"

    run(scenario)


def test_hello_without_an_answer_in_time() -> None:
    async def scenario(broker: FakeBroker) -> None:
        connecting = asyncio.ensure_future(WorkerLink(broker.path, "reviewer", TOKEN, timeout=0.2).connect())
        line = await broker.accept()
        await line.expect("hello")
        assert (await refusal(connecting)).code == "broker_uncertain"
        assert await line.at_end()

    run(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        context(content=" \n"),
        context(content="x" * 32_769),
        context(content=1),
        context(round=0),
        context(trigger="yes"),
        context(id="A" * 32),
        assignment(assignment_id="x"),
        {**V1, "type": "abort"},
    ],
)
def test_delivery_that_is_none_ends_the_link(wrong: Frame) -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        line.write(context(), wrong)
        assert isinstance(await anext(link), client_frames.Context)
        assert (await refusal(anext(link))).code == "orchestration_error"
        assert await line.at_end()
        await link.close()

    run(scenario)


def test_worker_passes_over_what_it_does_not_know() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        line.write({**V1, "type": "weather"}, context(version=2), {"version": True, "type": "abort"}, {"type": None})
        line.write({**V1, "type": "abort", "id": COMMAND, "why": "x"}, context(content="x" * 32_768))
        assert await anext(link) == client_frames.Abort(1, COMMAND)
        assert isinstance(await anext(link), client_frames.Context)
        await link.close()

    run(scenario)


def test_link_that_nobody_reads_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_line, "MAX_WAITING", 2)

    async def scenario(broker: FakeBroker) -> None:
        link, line = await greeted(broker)
        line.write(context(), context(), context())
        assert await line.at_end()
        await anext(link)
        await anext(link)
        assert (await refusal(anext(link))).code == "orchestration_error"
        await link.close()

    run(scenario)


def test_link_is_one_connection() -> None:
    async def scenario(broker: FakeBroker) -> None:
        link, _ = await greeted(broker)
        await link.close()
        assert (await refusal(link.connect())).code == "broker_not_ready"

    run(scenario)


# observer

BODY = {"kind": "review", "summary": "s"}
SNAPSHOT = {
    **V1,
    "type": "snapshot",
    "session": "pi",
    "state": "active",
    "round": 1,
    "roles": [{"role": "implementer", "state": "idle"}, {"role": "reviewer", "state": "recovering"}],
    "report_count": 0,
    "report_replay_complete": True,
}
REPORT = {
    **V1,
    "type": "report",
    "session": "pi",
    "id": COMMAND,
    "assignment_id": OTHER,
    "role": "reviewer",
    "round": 1,
    "report": BODY,
}
WORKFLOW = {**V1, "type": "workflow", "session": "pi", "state": "ready", "round": 2}
ROLE = {**V1, "type": "lifecycle", "session": "pi", "role": "probe", "state": "waiting"}
USAGE = {"input": 1, "output": 2, "cacheRead": 3, "cacheWrite": 4, "cost": {"total": 0.5}, "providerCalls": 1}


def observed(*written: Frame) -> tuple[list[Any], str | None]:
    """What an observer gets of frames written to it, and the code that it ended with."""
    got: list[Any] = []
    codes: list[str] = []

    async def scenario(broker: FakeBroker) -> None:
        link = ObserverLink(broker.path, TOKEN)
        connecting = asyncio.ensure_future(link.connect())
        line = await broker.accept()
        request = await line.read()
        assert request == {**V1, "type": "observe", "token": TOKEN, "id": request["id"]}
        line.write(answer(request, success=True, status="observing"), *written)
        line.close()
        async with asyncio.timeout(HANG):
            await connecting
            try:
                async for frame in link:
                    got.append(frame)
            except Refusal as error:
                codes.append(error.code)
        await link.close()

    run(scenario)
    return got, codes[0] if codes else None


def test_observer() -> None:
    frames, code = observed(REPORT, SNAPSHOT, WORKFLOW, ROLE, {**REPORT, "usage": None}, {**REPORT, "usage": USAGE})
    assert code is None
    first, snapshot, workflow, role, without, used = frames
    assert first.report == BODY and first.role == "reviewer"
    assert [(entry.role, entry.state) for entry in snapshot.roles] == [
        ("implementer", "idle"),
        ("reviewer", "recovering"),
    ]
    assert (workflow.state, workflow.round, role.state) == ("ready", 2, "waiting")
    assert without.usage is None
    assert used.usage.cache_write == 4 and used.usage.cost.total == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {**SNAPSHOT, "extra": 1},
        {**SNAPSHOT, "roles": SNAPSHOT["roles"][::-1]},  # type: ignore[index]
        {**SNAPSHOT, "roles": [SNAPSHOT["roles"][0]] * 2},  # type: ignore[index]
        {**SNAPSHOT, "roles": [{"role": "probe", "state": "idle", "connected": True}]},
        {**SNAPSHOT, "state": "routing"},
        {**SNAPSHOT, "report_count": -1},
        {key: SNAPSHOT[key] for key in SNAPSHOT if key != "report_replay_complete"},
        {**WORKFLOW, "round": 0},
        {**WORKFLOW, "error": None},
        {**WORKFLOW, "version": 2},
        {**ROLE, "state": "busy"},
        {**ROLE, "round": 1},
        {**REPORT, "id": "x"},
        {**REPORT, "report": {"summary": "😀" * 1_001}},
        {**REPORT, "report": {"summary": "x", "risks": ["x" * 1_000] * 33}},
        {**REPORT, "report": []},
        {**REPORT, "report": {}},
        {**REPORT, "usage": {**USAGE, "reasoning": None}},
        {**REPORT, "usage": {**USAGE, "cost": {"total": 1, "input": 1}}},
        {**V1, "type": "progress", "session": "pi"},
    ],
)
def test_observer_demands_exact_frames(wrong: Frame) -> None:
    frames, code = observed(WORKFLOW, wrong, WORKFLOW)
    assert code == "orchestration_error"
    assert len(frames) == 1


@pytest.mark.parametrize(
    "first",
    [
        {"success": True, "status": "observing", "error": None},
        {"success": True, "status": "observing", "duplicate": False},
        {"success": False, "status": "unauthorized"},
        {"success": True, "status": "observing", "id": COMMAND},
        {"type": "snapshot"},
    ],
)
def test_observer_demands_the_response_first(first: Frame) -> None:
    async def scenario(broker: FakeBroker) -> None:
        connecting = asyncio.ensure_future(ObserverLink(broker.path, TOKEN).connect())
        line = await broker.accept()
        line.write(answer(await line.read(), **first))
        assert (await refusal(connecting)).code == "orchestration_error"
        assert await line.at_end()

    run(scenario)


def test_observer_that_is_not_taken() -> None:
    async def scenario(broker: FakeBroker) -> None:
        connecting = asyncio.ensure_future(ObserverLink(broker.path, TOKEN).connect())
        line = await broker.accept()
        await line.read()
        line.close()
        assert (await refusal(connecting)).code == "unauthorized"
        quick = asyncio.ensure_future(ObserverLink(broker.path, TOKEN, timeout=0.2).connect())
        assert (await refusal(quick)).code == "broker_not_ready"

    run(scenario)


def test_states_are_those_of_the_contract() -> None:
    def constants(kind: type) -> set[str]:
        return {value for name, value in vars(kind).items() if name.isupper()}

    assert set(get_args(client_frames.WorkflowState)) == constants(contract.Workflow)
    assert set(get_args(client_frames.WorkerState)) == constants(contract.RoleState)
