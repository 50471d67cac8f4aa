# SPDX-License-Identifier: Apache-2.0
"""Observers: admission, order, key sets, the settings for older ones, and what they never see (3.3 and 0.2)."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator
from typing import Any

import pytest

from agent_intercom.orchestration.client import ObserverLink
from agent_intercom.orchestration.client_frames import Reported, Snapshot
from tests.contract.orchpeer import CALLS, Observer, OrchPeer, Worker, body, fresh_id, normalised, plan
from tests.contract.orchruns import SESSION, Run
from tests.contract.peer import Frame

ZERO = "0" * 32


@pytest.fixture(scope="module")
def shared() -> Iterator[Run]:
    with Run("probe", "django") as run:
        yield run


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    yield shared
    shared.empty()
    assert shared.alive(), shared.errors()


def observe(run: Run, **keys: Any) -> Frame:
    return {"version": 1, "type": "observe", "token": run.control_token, "id": fresh_id(), **keys}


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": None},
        {"token": ZERO},
        {"token": "x"},
        {"token": None},
        {"id": "x"},
        {"id": None},
        {"role": "implementer"},
        {"extra": 1},
    ],
)
def test_request_that_is_refused(run: Run, changed: Frame) -> None:
    peer = run.connect()
    peer.send(observe(run, **changed))
    peer.refused_silently()


@pytest.mark.parametrize("key", ["version", "token", "id"])
def test_request_with_a_key_missing(run: Run, key: str) -> None:
    peer = run.connect()
    asked = observe(run)
    del asked[key]
    peer.send(asked)
    peer.refused_silently()


def test_roles_token_does_not_observe(run: Run) -> None:
    peer = run.connect()
    peer.send(observe(run, token=run.tokens["reviewer"]))
    peer.refused_silently()


def test_snapshot_of_a_run_that_has_not_begun(run: Run) -> None:
    run.worker("probe")
    observer = run.observer()
    assert observer.observe() == {
        "version": 1,
        "type": "snapshot",
        "session": SESSION,
        "state": "connecting",
        "round": 1,
        "roles": [
            {"role": "django", "state": "disconnected"},
            {"role": "implementer", "state": "disconnected"},
            {"role": "probe", "state": "idle"},
            {"role": "reviewer", "state": "disconnected"},
        ],
        "report_count": 0,
        "report_replay_complete": True,
    }
    assert observer.replayed == []


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\2{}", b"x" * 70_000])
def test_observer_that_says_something(run: Run, data: bytes) -> None:
    observer, other = run.watch(), run.watch()
    worker = run.worker("implementer")
    observer.flood(data)
    observer.refused_silently()
    worker.lifecycle("active")
    other.expect_seen(("lifecycle", "implementer", "active"))


def test_byte_right_behind_the_request(run: Run) -> None:
    peer = run.connect()
    asked = observe(run)
    peer.send(asked, asked)
    peer.may_be_torn = True
    frames = peer.drain()
    assert all(frame["type"] in {"response", "snapshot"} for frame in frames)


def test_observer_that_ends_its_side(run: Run) -> None:
    """That is no byte, but it is the end."""
    observer = run.watch()
    observer.shutdown_write()
    observer.refused_silently()


def test_lifecycle_is_told_and_arrival_is_not(run: Run) -> None:
    observer = run.watch()
    run.leave(run.worker("django"))
    worker = run.worker("implementer")
    worker.ack(fresh_id())
    for state in ("active", "waiting", "idle"):
        worker.lifecycle(state)
    observer.expect_seen(*[("lifecycle", "implementer", state) for state in ("active", "waiting", "idle")])


def test_all_observers_are_told(run: Run) -> None:
    observers = [run.watch() for _ in range(5)]
    run.worker("implementer").lifecycle("active")
    for observer in observers:
        observer.expect_seen(("lifecycle", "implementer", "active"))


def test_lifecycle_comes_before_workflow() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        implementer.begin("implementation")
        observer = run.watch()
        implementer.lifecycle("waiting")
        observer.expect_seen(("lifecycle", "implementer", "waiting"), ("workflow", "needs_attention", 1))
        implementer.lifecycle("active")
        observer.expect_seen(("lifecycle", "implementer", "active"), ("workflow", "active", 1))


def test_reports_are_told_and_replayed() -> None:
    """In order of acceptance, plans included, in the form that the broker keeps."""
    with Run(flow="phased") as run:
        team = run.team()
        observer = run.watch()
        planned = team["implementer"].do("plan", report=plan(risks=["r"], relevant_paths=["a/b"]))
        finding = {"severity": "high", "summary": "größer", "path": None, "line": None, "acceptance": None}
        members = {"changed_paths": ["a/b"], "findings": [finding], "checks": [{"name": "c", "status": "failed"}]}
        team["implementer"].context("run_state")
        done = team["implementer"].do("implementation", report=body("implementer", **members))
        observer.expect_seen(("lifecycle", "implementer", "active"))
        first = observer.event()
        assert (first["assignment_id"], first["role"], first["round"]) == (planned["assignment_id"], "implementer", 1)
        assert first["report"] == {
            **normalised({"kind": "plan", "summary": "what is to be done", "risks": ["r"]}),
            "relevant_paths": ["a/b"],
            "relevant_symbols": [],
            "intended_changes": [],
            "required_checks": [],
            "open_questions": [],
        }
        # The implementation's assignment was accepted and begun in between.
        observer.expect_seen(*[("lifecycle", "implementer", state) for state in ("idle", "active")])
        second = observer.event()
        assert second["assignment_id"] == done["assignment_id"]
        assert second["report"] == normalised(body("implementer", **members))
        assert list(second["report"]) == [
            "kind",
            "summary",
            "changed_paths",
            "checks",
            "findings",
            "risks",
            "limitations",
            "verdict",
        ]
        assert second["session"] == SESSION and "usage" not in second
        observer.expect_seen(("lifecycle", "implementer", "idle"))
        late = run.observer()
        snapshot = late.observe()
        assert late.replayed == [first, second]
        assert (snapshot["report_count"], snapshot["report_replay_complete"], snapshot["state"]) == (2, True, "active")


def test_observer_never_sees_bodies_of_others() -> None:
    """Neither task, nor capsule, nor message, nor assignment, nor token, nor progress."""
    secrets = {"task": "canary-task authentication", "capsule": "canary-capsule"}
    with Run(task=secrets["task"], capsule=secrets["capsule"]) as run:
        team = run.team()
        observer = run.watch()
        implementer = team["implementer"]
        work = implementer.begin("implementation")
        implementer.progress(work["assignment_id"], "tool")
        run.send("implementer", "canary-message")
        implementer.context("operator_message", trigger=True)
        run.accepted("abort", "implementer")
        implementer.report(work)
        implementer.lifecycle("idle")
        seen: list[Frame] = []
        while not seen or seen[-1].get("state") != "idle":
            seen.append(observer.event())
        assert [frame["type"] for frame in seen] == ["lifecycle", "report", "lifecycle"]
        text = repr(seen)
        assert "canary" not in text and not any(token in text for token in [*run.tokens.values(), run.control_token])


USAGE: Frame = {"cumulative": CALLS, "assignment": {**CALLS, "peakContextTokens": 8, "contextTokens": 4}}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("sent", ["absent", "null", "full", "nulls"])
def test_usage_in_reports(told: bool, sent: str) -> None:
    """Only where the run is set so; what is unknown is absent and never null within it."""
    nothing = dict.fromkeys(("reasoning", "contextTokens", "contextWindow", "contextPercent", "peakContextTokens"))
    nulls = {"cumulative": CALLS, "assignment": {**CALLS, **nothing}}
    keys: Frame = {} if sent == "absent" else {"usage": {"null": None, "full": USAGE, "nulls": nulls}[sent]}
    with Run(report_usage=told) as run:
        implementer = run.team()["implementer"]
        observer = run.watch()
        work = implementer.begin("implementation")
        implementer.report(work, **keys)
        observer.expect_seen(("lifecycle", "implementer", "active"))
        live = observer.event()
        late = run.observer()
        late.observe()
        assert late.replayed == [live]
        if not told:
            assert "usage" not in live
        elif sent in {"absent", "null"}:
            assert live.get("usage") is None
        else:
            assert live["usage"] == (USAGE["assignment"] if sent == "full" else CALLS)


def restarted(run: Run) -> Worker:
    """A run whose implementer was restarted; the connection that the broker closed for it."""
    implementer = run.team()["implementer"]
    implementer.begin("implementation")
    run.accepted("restart", "implementer")
    implementer.expect_eof()
    return implementer


def state_of(run: Run, role: str) -> str:
    observer = run.observer()
    (found,) = [entry["state"] for entry in observer.observe()["roles"] if entry["role"] == role]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("told", [False, True])
def test_restarting_is_shown_to_those_who_know_it(told: bool) -> None:
    with Run(report_usage=told) as run:
        restarted(run)
        assert run.role("implementer")["state"] == "restarting"
        assert state_of(run, "implementer") == ("restarting" if told else "disconnected")
        run.worker("implementer", generation=2)
        assert run.role("implementer")["state"] == "recovering"
        assert state_of(run, "implementer") == ("recovering" if told else "disconnected")


def test_replay_is_bounded() -> None:
    """A hundred reports at most, the newest; that some are missing is told."""
    with Run() as run:
        team = run.team()
        implementer, reviewer = team["implementer"], team["reviewer"]
        for round_ in range(1, 52):
            work = implementer.assignment("implementation", round_)
            implementer.ack(work["id"])
            implementer.report(work, body("implementer", summary=f"made {round_}"))
            while (frame := reviewer.incoming())["type"] == "context":
                pass
            reviewer.ack(frame["id"])
            reviewer.report(frame, body("reviewer", verdict="changes_requested", summary=f"seen {round_}"))
            implementer.context("run_state", round_)
        observer = run.observer()
        snapshot = observer.observe()
        assert (snapshot["report_count"], snapshot["report_replay_complete"]) == (102, False)
        assert [frame["report"]["summary"] for frame in observer.replayed] == [
            f"{what} {round_}" for round_ in range(2, 52) for what in ("made", "seen")
        ]


def test_observer_that_does_not_read_is_dropped_and_delays_nobody() -> None:
    with Run() as run:
        team = run.team()
        implementer = team["implementer"]
        work = implementer.begin("implementation")
        reader = run.watch()
        sleeper = OrchPeer(run.socket)
        sleeper.send(observe(run))
        gone = select.poll()
        gone.register(sleeper.fileno(), select.POLLRDHUP)
        # A socket's buffers hold some hundred frames; then the broker's patience begins to run.
        number = 0
        while not gone.poll(0):
            number += 1
            assert number < 20_000
            usual = ("active", "idle")[number % 2]
            implementer.lifecycle(usual)
            reader.expect_seen(("lifecycle", "implementer", usual))
        implementer.report(work)
        assert reader.seen() == ("report", "implementer", 1, "implementation")
        sleeper.may_be_torn = True
        assert len(sleeper.drain()) < number
        sleeper.close()


def test_observers_are_limited(run: Run) -> None:
    """More than enough, and not without end; who is turned away disturbs nobody."""
    observers = [run.watch() for _ in range(16)]
    extra: list[Observer] = [run.observer() for _ in range(3)]
    for observer in extra:
        observer.send(observe(run))
        observer.refused_silently()
    run.worker("implementer").lifecycle("active")
    for observer in observers:
        observer.expect_seen(("lifecycle", "implementer", "active"))


def test_client() -> None:
    async def scenario(run: Run, work: Frame) -> None:
        async with ObserverLink(run.socket, run.control_token) as link:
            replayed = await anext(link)
            assert isinstance(replayed, Reported)
            assert replayed.assignment_id == work["assignment_id"]
            assert isinstance(replayed.usage, object)
            snapshot = await anext(link)
            assert isinstance(snapshot, Snapshot)
            assert [entry.role for entry in snapshot.roles] == ["implementer", "reviewer"]

    with Run(report_usage=True) as run:
        implementer = run.team()["implementer"]
        work = implementer.begin("implementation")
        implementer.report(work, usage=USAGE)
        asyncio.run(scenario(run, work))
