# SPDX-License-Identifier: Apache-2.0
"""The published extensions in their drivers, against a broker of a few lines: what the drivers promise, they do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.contract.nodepeers import HANG, Child, Parent, Worker

Frame: TypeAlias = dict[str, Any]

TOKEN = "0123456789abcdef" * 2


def fresh() -> str:
    return secrets.token_hex(16)


class Line:
    """One accepted connection of the scripted broker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> Frame:
        (size,) = struct.unpack(">I", await self._reader.readexactly(4))
        frame: Frame = json.loads(await self._reader.readexactly(size))
        return frame

    async def write(self, **frame: object) -> Frame:
        payload = json.dumps({"version": 1, **frame}, separators=(",", ":")).encode()
        self._writer.write(struct.pack(">I", len(payload)) + payload)
        await self._writer.drain()
        return frame

    async def answer(self, frame: Frame, status: str, success: bool = True) -> None:
        error = None if success else status
        await self.write(type="response", id=frame["id"], success=success, status=status, error=error)

    async def until(self, kind: str, **members: object) -> Frame:
        """The next frame of this type with these members; everything before it is answered with `recorded`."""
        while True:
            frame = await asyncio.wait_for(self.read(), HANG)
            if frame["type"] == kind and members.items() <= frame.items():
                return frame
            await self.answer(frame, "recorded")

    async def recorded(self, kind: str, **members: object) -> Frame:
        frame = await self.until(kind, **members)
        await self.answer(frame, "recorded")
        return frame

    async def hello(self) -> Frame:
        hello = await self.until("hello")
        await self.answer(hello, "connected")
        await self.recorded("lifecycle")
        return hello

    async def context(self, kind: str, content: str, trigger: bool = False, round_: int = 1) -> Frame:
        delivery = {"id": fresh(), "round": round_, "kind": kind, "content": content, "trigger": trigger}
        return await self.write(type="context", **delivery)

    async def assign(self, kind: str, round_: int = 1, **members: object) -> Frame:
        delivery = {"id": fresh(), "assignment_id": fresh(), "round": round_, "kind": kind, "trigger": True}
        content = f"Active assignment\nRound: {round_}"
        return await self.write(type="assignment", **delivery, **{"content": content, **members})

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Stage:
    """The socket of a scripted broker; `accept` is the next connection."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "broker.sock"
        self._waiting: asyncio.Queue[Line] = asyncio.Queue()
        self._lines: list[Line] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        self._lines.append(line)
        await self._waiting.put(line)

    async def accept(self) -> Line:
        return await asyncio.wait_for(self._waiting.get(), HANG)

    def worker(self, role: str = "implementer", **options: Any) -> Worker:
        return Worker(role, TOKEN, self.socket, **options)

    async def hang_up(self) -> None:
        for line in self._lines:
            await line.close()


@contextlib.asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="ai", dir="/tmp") as root:
        place = Stage(Path(root))
        server = await asyncio.start_unix_server(place.connected, place.socket)
        try:
            yield place
        finally:
            server.close()
            await place.hang_up()
            await server.wait_closed()


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_an_assignment_is_taken_worked_on_and_reported() -> None:
    async def scene() -> None:
        async with stage() as place, place.worker(context_usage={"tokens": 10, "contextWindow": 100}) as worker:
            line = await place.accept()
            hello = await line.hello()
            assert (hello["role"], hello["token"], hello["generation"]) == ("implementer", TOKEN, 1)
            baseline = await line.context("baseline", "Task")
            assert (await line.recorded("ack"))["delivery_id"] == baseline["id"]
            assert (await worker.delivery("baseline"))["content"] == "Task"
            assigned = await line.assign("implementation")
            details = await worker.assignment("implementation", 1)
            assert details["assignment_id"] == assigned["assignment_id"]
            report = await line.until("report")
            assert report["report"]["changed_paths"] == ["src/feature.py"]
            assert report["usage"]["assignment"]["providerCalls"] == 1
            await line.answer(report, "accepted")
            await line.recorded("lifecycle", state="idle")
            assert (await worker.event("tool_result"))["ok"]
            await worker.event("settled")
            tool = (await worker.event("registered"))["tool"]
            assert tool["parameters"]["properties"]["kind"]["enum"] == ["plan", "implementation"]

    run(scene())


def test_a_repeated_delivery_makes_no_second_turn() -> None:
    async def scene() -> None:
        async with stage() as place, place.worker(rules=[{"do": "ignore"}]) as worker:
            line = await place.accept()
            await line.hello()
            assigned = await line.assign("implementation")
            assert (await line.recorded("ack"))["status"] == "accepted"
            await line.write(type="assignment", **{k: v for k, v in assigned.items() if k != "type"})
            assert (await line.recorded("ack"))["status"] == "duplicate"
            await worker.event("ignored")
            assert not worker.untaken("ignored")
            assert not worker.untaken("turn")

    run(scene())


def test_an_agent_that_ends_its_turn_without_a_report_is_waiting() -> None:
    async def scene() -> None:
        rules = [{"kind": "implementation", "do": "settle", "times": 1}]
        async with stage() as place, place.worker(rules=rules) as worker:
            line = await place.accept()
            await line.hello()
            await line.assign("implementation")
            await line.recorded("lifecycle", state="active")
            await line.recorded("lifecycle", state="waiting")
            await worker.send(op="turn")
            await line.answer(await line.until("report"), "accepted")
            await line.recorded("lifecycle", state="idle")

    run(scene())


def test_a_held_turn_is_ended_by_an_abort() -> None:
    async def scene() -> None:
        async with stage() as place, place.worker("reviewer", rules=[{"hold": True}]) as worker:
            line = await place.accept()
            await line.hello()
            await line.assign("review")
            await worker.event("held")
            abort = await line.write(type="abort", id=fresh())
            await line.until("ack", delivery_id=abort["id"])
            await worker.event("abort")
            await worker.event("settled")

    run(scene())


def test_a_held_turn_goes_on_when_told() -> None:
    async def scene() -> None:
        rules = [{"hold": True, "report": {"verdict": "changes_requested", "summary": "No."}}]
        async with stage() as place, place.worker("reviewer", rules=rules) as worker:
            line = await place.accept()
            await line.hello()
            await line.assign("review")
            await worker.event("held")
            await worker.send(op="continue")
            report = await line.until("report")
            assert (report["report"]["verdict"], report["report"]["summary"]) == ("changes_requested", "No.")
            await line.answer(report, "accepted")

    run(scene())


def test_a_plan_takes_the_tools_that_write() -> None:
    async def scene() -> None:
        rules = [{"kind": "plan", "tools": [{"name": "edit"}]}]
        async with stage() as place, place.worker(rules=rules) as worker:
            line = await place.accept()
            await line.hello()
            await line.assign("plan")
            await worker.event("active_tools", lambda event: "edit" not in event["tools"])
            assert (await worker.event("tool_call"))["blocked"]
            report = await line.until("report")
            assert report["report"]["relevant_paths"] == ["src/feature.py"]
            await line.answer(report, "accepted")
            await line.assign("implementation")
            await line.answer(await line.until("report"), "accepted")
            assert (await worker.event("tool_call"))["name"] == "orchestrator_report"
            await worker.event("settled")
            assert "edit" in [event for event in worker.events if event["event"] == "active_tools"][-1]["tools"]

    run(scene())


def test_a_refused_report_is_an_error_of_the_tool() -> None:
    async def scene() -> None:
        async with stage() as place, place.worker(rules=[{"attempts": 2}]) as worker:
            line = await place.accept()
            await line.hello()
            await line.assign("implementation")
            await line.answer(await line.until("report"), "conflict", success=False)
            refused = await worker.event("tool_result")
            assert (refused["ok"], refused["error"]) == (False, "conflict")
            await line.answer(await line.until("report"), "accepted")
            assert (await worker.event("tool_result"))["ok"]

    run(scene())


def test_a_killed_worker_goes_on_with_its_session() -> None:
    async def scene() -> None:
        async with stage() as place:
            async with place.worker(rules=[{"do": "ignore"}]) as first:
                line = await place.accept()
                await line.hello()
                assigned = await line.assign("implementation")
                await line.recorded("ack")
                await first.kill()
            async with place.worker(entries=first.entries, generation=2) as second:
                line = await place.accept()
                assert (await line.hello())["generation"] == 2
                await line.write(type="assignment", **{k: v for k, v in assigned.items() if k != "type"})
                assert (await line.recorded("ack"))["status"] == "duplicate"
                await second.send(op="turn")
                report = await line.until("report", assignment_id=assigned["assignment_id"])
                await line.answer(report, "accepted")
                assert (await second.event("tool_result"))["ok"]

    run(scene())


def test_the_projection_leaves_finished_work_out() -> None:
    async def scene() -> None:
        bulky = [{"name": "read", "result": "x" * 10_000}] * 4
        async with stage() as place, place.worker(rules=[{"round": 1, "tools": bulky}]) as worker:
            line = await place.accept()
            await line.hello()
            for round_ in (1, 2):
                await line.assign("implementation", round_)
                await line.answer(await line.until("report"), "accepted")
                projection = await worker.event("projection")
            assert projection["after"] < projection["before"] / 2
            assert projection["roles"] == ["custom"]

    run(scene())


def test_a_worker_that_ends_tells_so() -> None:
    async def scene() -> None:
        async with stage() as place, place.worker() as worker:
            await (await place.accept()).hello()
            await worker.kill()
            await worker.event("end")
            with pytest.raises(AssertionError, match="ended, awaiting settled"):
                await worker.event("settled")

    run(scene())


def test_an_environment_that_the_bridge_refuses_is_a_fault() -> None:
    async def scene() -> None:
        async with stage() as place:
            worker = place.worker(guardrails="")
            worker.started = lambda: Child.started(worker)  # type: ignore[method-assign]
            async with worker:
                await worker.send(op="start")
                assert "environment" in (await worker.event("fault"))["error"]

    run(scene())


async def observed(line: Line) -> Frame:
    frame = await line.until("observe", token=TOKEN)
    return await line.write(type="response", id=frame["id"], success=True, status="observing")


def snapshot(state: str, **members: object) -> Frame:
    roles = [{"role": role, "state": "idle"} for role in ("implementer", "reviewer")]
    members = {"report_count": 0, "report_replay_complete": True, **members}
    return {"type": "snapshot", "session": "s", "state": state, "round": 1, "roles": roles, **members}


def report_frame(**members: object) -> Frame:
    body = {"kind": "review", "summary": "Looks right.", "verdict": "approved"}
    ids = {"id": fresh(), "assignment_id": fresh()}
    return {"type": "report", "session": "s", **ids, "role": "reviewer", "round": 1, "report": body, **members}


@contextlib.asynccontextmanager
async def parent(place: Stage) -> AsyncIterator[Parent]:
    secret = place.root / "control.token"
    secret.touch(mode=0o600)
    secret.write_text(TOKEN + "\n")
    async with Parent("s", place.root, place.socket, ["implementer", "reviewer"]) as observer:
        yield observer


def test_the_parent_is_told_that_a_run_is_ready_and_stops() -> None:
    async def scene() -> None:
        async with stage() as place, parent(place) as observer:
            line = await place.accept()
            await observed(line)
            await line.write(**snapshot("active"))
            assert (await observer.ready())["ok"]
            await line.write(**report_frame())
            assert "reviewer" in await observer.update("reviewer", triggers=False)
            await line.write(type="workflow", session="s", state="ready", round=1)
            assert "Looks right." in await observer.update(triggers=True)
            await observer.event("stopped")

    run(scene())


def test_the_parent_refuses_a_frame_with_a_key_too_many() -> None:
    async def scene() -> None:
        async with stage() as place, parent(place) as observer:
            line = await place.accept()
            await observed(line)
            await line.write(**snapshot("active", extra=1))
            again = await place.accept()
            await observed(again)
            await again.write(**snapshot("uncertain"))
            await observer.update(triggers=True)

    run(scene())
