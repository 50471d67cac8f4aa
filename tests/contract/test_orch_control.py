# SPDX-License-Identifier: Apache-2.0
"""Control commands: fields, answers, retries, and what the actions do (orchestration spec, 3.2, 4.5, 4.7 and 4.8)."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from agent_intercom.orchestration.client import BROKER_REJECTED, ControlAnswer, control
from agent_intercom.orchestration.errors import Refusal
from tests.contract.orchpeer import OrchPeer, fresh_id, review
from tests.contract.orchruns import Run
from tests.contract.peer import Frame

ZERO = "0" * 32
TIME = "2026-08-01T12:00:00.000000+00:00"


@pytest.fixture(scope="module")
def shared() -> Iterator[Run]:
    """A run that never gets beyond `connecting`: the reviewer stays away."""
    with Run("probe") as run:
        yield run


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    yield shared
    shared.empty()
    assert shared.alive(), shared.errors()


def request(run: Run, **keys: Any) -> Frame:
    frame: Frame = {"version": 1, "type": "control", "token": run.control_token, "id": fresh_id()}
    return {**frame, "action": "send", "role": "implementer", "delivery": None, "message": "Go on.", **keys}


def abort(run: Run, **keys: Any) -> Frame:
    return request(run, **{"action": "abort", "message": None, **keys})


def failure(identity: str, status: str = "conflict", *, duplicate: bool = False) -> Frame:
    common = {"version": 1, "type": "response", "id": identity}
    return {**common, "success": False, "status": status, "duplicate": duplicate}


def success(identity: str, *, duplicate: bool = False) -> Frame:
    common = {"version": 1, "type": "response", "id": identity}
    return {**common, "success": True, "status": "accepted", "duplicate": duplicate}


def commands(run: Run) -> list[dict[str, Any]]:
    return run.rows("SELECT * FROM control_commands ORDER BY rowid")


# Requests that are refused: a real answer where there is an id to answer under, and nothing is recorded.


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"version": "1"},
        {"version": None},
        {"token": ZERO},
        {"token": "x"},
        {"token": None},
        {"token": 1},
        {"action": "stop"},
        {"action": "SEND"},
        {"action": "budget_override"},
        {"action": None},
        {"action": ["send"]},
        {"role": "architect"},
        {"role": "playwright"},
        {"role": None},
        {"role": ["implementer"]},
        {"delivery": "now"},
        {"delivery": 1},
        {"delivery": ["steer"]},
        {"delivery": ""},
        {"message": None},
        {"message": ""},
        {"message": " \n\t"},
        {"message": 1},
        {"message": ["x"]},
        {"message": "\ud800"},
        {"extra": None},
        {"type": "control", "status": "accepted"},
        {"action": "abort"},
        {"action": "restart"},
        {"action": "restart_failed"},
        {"action": "redeliver"},
        {"action": "abort", "message": None, "delivery": "steer"},
        {"action": "restart", "message": None, "delivery": "follow-up"},
        {"action": "redeliver", "message": None, "delivery": "steer"},
    ],
)
def test_request_that_is_refused(run: Run, changed: Frame) -> None:
    run.worker("implementer")
    asked = request(run, **changed)
    before = commands(run)
    assert run.exchange(asked) == failure(asked["id"])
    assert commands(run) == before


@pytest.mark.parametrize("token", ["implementer", "reviewer"])
def test_roles_token_is_not_the_control_token(run: Run, token: str) -> None:
    asked = request(run, token=run.tokens[token])
    assert run.exchange(asked) == failure(asked["id"])


@pytest.mark.parametrize("key", ["version", "token", "action", "role", "delivery", "message"])
def test_request_with_a_key_missing(run: Run, key: str) -> None:
    asked = request(run)
    del asked[key]
    assert run.exchange(asked) == failure(asked["id"])


@pytest.mark.parametrize("identity", ["x", "A" * 32, "a" * 31, "", None, 1, ["a" * 32]])
def test_request_without_an_id_is_closed_silently(run: Run, identity: Any) -> None:
    assert run.exchange(request(run, id=identity)) is None
    asked = request(run)
    del asked["id"]
    assert run.exchange(asked) is None


def test_refused_request_leaves_the_broker_as_it_was(run: Run) -> None:
    worker = run.worker("implementer")
    run.exchange(request(run, token=ZERO))
    run.exchange(request(run, extra=1))
    worker.quiet()


# One request per connection.


def test_connection_is_closed_after_the_answer(run: Run) -> None:
    run.worker("implementer")
    peer = run.connect()
    first, second = abort(run), abort(run)
    peer.send(first, second)
    assert peer.recv() == success(first["id"])
    peer.expect_eof()
    assert [each["id"] for each in commands(run)][-1] == first["id"]


def test_answer_comes_although_the_client_has_ended_its_side(run: Run) -> None:
    run.worker("implementer")
    peer = run.connect()
    asked = abort(run)
    peer.send(asked)
    peer.shutdown_write()
    assert peer.recv() == success(asked["id"])
    peer.expect_eof()


def test_client_that_does_not_wait(run: Run) -> None:
    """The command is carried out all the same."""
    worker = run.worker("implementer")
    peer = OrchPeer(run.socket)
    asked = abort(run)
    peer.send(asked)
    peer.close()
    assert worker.incoming() == {"version": 1, "type": "abort", "id": asked["id"]}
    worker.quiet()


# Retries.


@pytest.mark.parametrize("delivery", [None, "steer", "follow-up"])
def test_retry_is_a_duplicate(run: Run, delivery: str | None) -> None:
    """Nothing happens again. Another body is another command."""
    worker = run.worker("implementer")
    asked = request(run, delivery=delivery)
    assert run.exchange(asked) == success(asked["id"])
    frame = worker.context("operator_message", trigger=True)
    assert frame["content"] == "Go on."
    assert frame.get("deliver_as") == {None: None, "steer": "steer", "follow-up": "followUp"}[delivery]
    stored = commands(run)
    assert (stored[-1]["id"], stored[-1]["action"], stored[-1]["role"]) == (asked["id"], "send", "implementer")
    assert (stored[-1]["delivery"], stored[-1]["status"]) == (delivery, "accepted")
    assert stored[-1]["received_at"] == stored[-1]["updated_at"]
    assert run.exchange(asked) == success(asked["id"], duplicate=True)
    assert run.exchange({**asked, "message": " Go on.\n"}) == success(asked["id"], duplicate=True)
    assert run.exchange({**asked, "message": "Something else."}) == failure(asked["id"])
    worker.quiet()
    assert commands(run) == stored
    events = [event for event in run.events("control_command") if event["delivery_id"] == asked["id"]]
    assert [event["status"] for event in events] == ["accepted"]


@pytest.mark.parametrize(
    "changed",
    [
        {"delivery": "follow-up"},
        {"delivery": None},
        {"role": "reviewer"},
        {"action": "abort", "delivery": None, "message": None},
        {"action": "redeliver", "delivery": None, "message": None},
    ],
)
def test_id_that_was_another_command(run: Run, changed: Frame) -> None:
    worker = run.worker("implementer")
    asked = request(run, delivery="steer")
    assert run.exchange(asked) == success(asked["id"])
    worker.context("operator_message", trigger=True)
    stored = commands(run)
    assert run.exchange({**asked, **changed}) == failure(asked["id"])
    worker.quiet()
    assert commands(run) == stored
    assert run.exchange(asked) == success(asked["id"], duplicate=True)


def test_retry_of_what_was_uncertain(run: Run) -> None:
    """What was decided stays decided, although the role is there now."""
    asked = abort(run)
    assert run.exchange(asked) == failure(asked["id"], "uncertain")
    worker = run.worker("implementer")
    assert run.exchange(asked) == failure(asked["id"], "uncertain", duplicate=True)
    worker.quiet()
    assert commands(run)[-1]["status"] == "uncertain"


def test_registry_is_bounded() -> None:
    """Known commands are still answered, and a restart that failed can still be told."""
    run = Run()
    known = [f"{number:032x}" for number in range(4_095)]
    with closing(sqlite3.connect(run.database)) as database, database:
        rows = [(each, "abort", "reviewer", None, "accepted", TIME, TIME) for each in known]
        database.executemany("INSERT INTO control_commands VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    with run:
        team = run.team()
        team["implementer"].begin("implementation")
        run.accepted("restart", "implementer")
        for action, message in (("send", "x"), ("abort", None), ("redeliver", None)):
            asked = request(run, action=action, message=message, role="reviewer")
            assert run.exchange(asked) == failure(asked["id"])
        asked = abort(run, id=known[0], role="reviewer")
        assert run.exchange(asked) == success(known[0], duplicate=True)
        team["reviewer"].quiet()
        run.accepted("restart_failed", "implementer")
        assert len(commands(run)) == 4_097


# send


def test_message_is_sent_stripped(run: Run) -> None:
    worker = run.worker("implementer")
    run.send("implementer", " \n Größe — 😀 \n\t")
    frame = worker.context("operator_message", trigger=True)
    assert frame["content"] == "Größe — 😀"
    (event,) = [each for each in run.events("context_delivered") if each["delivery_id"] == frame["id"]]
    assert (event["role"], event["status"]) == ("implementer", "delivered")
    events = len(run.events())
    worker.ack(frame["id"])
    assert len(run.events()) == events


@pytest.mark.parametrize("message", ["x" * 32_768, "😀" * 16_384, "  " + "é" * 32_768 + "\n"])
def test_longest_message(run: Run, message: str) -> None:
    worker = run.worker("implementer")
    run.send("implementer", message)
    assert worker.context("operator_message", trigger=True)["content"] == message.strip()


@pytest.mark.parametrize("message", ["x" * 32_769, "😀" * 16_384 + "x", "é" * 40_000, "x" * 250_000])
def test_message_that_no_worker_takes(run: Run, message: str) -> None:
    """It is refused before anything is recorded, so the id is still free."""
    worker = run.worker("implementer")
    before, events = commands(run), len(run.events())
    asked = request(run, message=message)
    assert run.exchange(asked) == failure(asked["id"])
    assert (commands(run), len(run.events())) == (before, events)
    worker.quiet()
    shorter = {**asked, "message": "shorter"}
    assert run.exchange(shorter) == success(asked["id"])
    assert worker.context("operator_message", trigger=True)["content"] == "shorter"


def test_role_that_is_not_there(run: Run) -> None:
    """Nothing happens, and that is what is recorded."""
    for action, message in (("send", "x"), ("abort", None), ("restart", None)):
        run.declined("uncertain", action, "implementer", message=message)
        assert commands(run)[-1]["status"] == "uncertain"
        assert run.events("control_command")[-1]["status"] == "uncertain"
    assert run.role("implementer")["generation"] == 1


# abort


def test_abort(run: Run) -> None:
    worker = run.worker("implementer")
    before = run.role("implementer")["state"]
    identity = run.accepted("abort", "implementer")
    assert worker.incoming() == {"version": 1, "type": "abort", "id": identity}
    worker.ack(identity)
    assert run.role("implementer")["state"] == before
    assert commands(run)[-1]["status"] == "accepted"


# restart and restart_failed


def test_restart_before_the_workflow_has_begun() -> None:
    """There is nothing to hand over: the replacement is like any other worker when the workflow starts."""
    with Run() as run:
        reviewer = run.worker("reviewer")
        answer = run.command("restart", "reviewer")
        assert answer is not None and answer["status"] in {"accepted", "uncertain"}
        generation = 2 if answer["success"] else 1
        assert run.role("reviewer")["generation"] == generation
        reviewer.close()
        reviewer = run.returned("reviewer", generation)
        implementer = run.worker("implementer")
        reviewer.context("baseline")
        implementer.context("baseline")
        assert run.role("reviewer")["state"] == "idle"
        run.leave(reviewer)
        assert (run.role("reviewer")["state"], run.workflow()) == ("disconnected", ("active", 1))


def test_restart_failed_of_a_role_that_is_not_restarted(run: Run) -> None:
    run.declined("conflict", "restart_failed", "implementer")
    run.worker("implementer")
    run.declined("conflict", "restart_failed", "implementer")
    assert commands(run)[-1]["status"] == "conflict"


def test_restart_is_idempotent() -> None:
    with Run() as run:
        team = run.team()
        asked = request(run, action="restart", message=None)
        assert run.exchange(asked) == success(asked["id"])
        team["implementer"].assignment("implementation")
        team["implementer"].expect_eof()
        assert (run.role("implementer")["generation"], run.role("implementer")["state"]) == (2, "restarting")
        (event,) = run.events("worker_restart_requested")
        assert (event["role"], event["delivery_id"]) == ("implementer", asked["id"])
        assert run.exchange(asked) == success(asked["id"], duplicate=True)
        assert run.role("implementer")["generation"] == 2


# redeliver


def test_redeliver() -> None:
    """An assignment whose delivery is uncertain is sent again under a new delivery id, and the workflow goes on."""
    with Run() as run:
        team = run.team()
        observer = run.watch()
        implementer = team["implementer"]
        work = implementer.assignment("implementation")
        run.leave(implementer)
        implementer = run.returned("implementer")
        implementer.quiet()
        assert run.workflow() == ("uncertain", 1)
        assert run.role("implementer")["state"] == "uncertain"
        observer.expect_seen(("workflow", "uncertain", 1))
        asked = request(run, action="redeliver", message=None)
        assert run.exchange(asked) == success(asked["id"])
        again = implementer.assignment("implementation")
        assert again["assignment_id"] == work["assignment_id"] and again["id"] != work["id"]
        observer.expect_seen(("workflow", "active", 1))
        assert run.workflow() == ("active", 1)
        (row,) = run.assignments("implementer")
        assert (row["state"], row["delivery_id"]) == ("delivering", again["id"])
        assert run.exchange(asked) == success(asked["id"], duplicate=True)
        implementer.quiet()
        implementer.ack(again["id"])
        assert run.role("implementer")["state"] == "active"
        (row,) = run.assignments("implementer")
        assert (row["state"], row["boundary_effective"]) == ("accepted", 1)
        implementer.report(again)
        team["reviewer"].context("run_state")
        team["reviewer"].assignment("review")


def test_redeliver_after_the_worker_said_uncertain() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.assignment("implementation")
        implementer.ack(work["id"], "uncertain")
        assert run.workflow() == ("uncertain", 1)
        run.accepted("redeliver", "implementer")
        again = implementer.assignment("implementation")
        assert again["assignment_id"] == work["assignment_id"] and again["id"] != work["id"]
        implementer.ack(work["id"])
        assert run.assignments("implementer")[0]["state"] == "delivering"
        implementer.ack(again["id"])
        assert (run.assignments("implementer")[0]["state"], run.workflow()) == ("accepted", ("active", 1))


def test_redeliver_where_nothing_is_uncertain() -> None:
    with Run() as run:
        team = run.team()
        run.declined("conflict", "redeliver", "reviewer")
        team["reviewer"].quiet()
        work = team["implementer"].begin("implementation")
        run.declined("conflict", "redeliver", "implementer")
        team["implementer"].quiet()
        assert run.assignments("implementer")[0]["delivery_id"] == work["id"]
        team["implementer"].report(work)
        run.declined("conflict", "redeliver", "implementer")
        assert run.workflow() == ("active", 1)


def test_redeliver_to_a_role_that_is_not_there() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.assignment("implementation")
        implementer.ack(work["id"], "uncertain")
        run.leave(implementer)
        run.declined("uncertain", "redeliver", "implementer")
        assert run.workflow() == ("uncertain", 1)
        assert run.assignments("implementer")[0]["delivery_id"] == work["id"]


# continue


def test_continue_and_a_broker_that_is_killed_over_it() -> None:
    run = Run(repairs=0)
    with run:
        team, watching = run.team(), run.watch()
        team["implementer"].do("implementation")
        review(team["reviewer"], verdict="changes_requested")
        said = [watching.seen() for _ in range(8)]
        assert [event[1:] for event in said if event[0] == "workflow"] == [("active", 2), ("needs_attention", 2)]
        run.stop(signal.SIGKILL)
        run.start()
        team = {role: run.worker(role) for role in run.roles}
        run.declined("conflict", "send", "implementer", message="Go on.")
        identity = run.accepted("continue", "implementer")
        team["implementer"].assignment("implementation", 2)
        run.stop(signal.SIGKILL)
        run.start()
        answer = run.command("continue", "implementer", id=identity)
        assert answer == success(identity, duplicate=True)
        assert [row["round"] for row in run.assignments("implementer")] == [1, 2]
        assert [row["status"] for row in run.events("continuation_paused")] == ["repair_round_limit"]
        assert [row["delivery_id"] for row in run.events("continuation_approved")] == [identity]


def test_continue_is_the_implementers(run: Run) -> None:
    frame = request(run, action="continue", role="reviewer", message=None)
    assert run.exchange(frame) == failure(frame["id"])
    assert not any(row["id"] == frame["id"] for row in commands(run))


# The client library.


def test_client(run: Run) -> None:
    async def scenario() -> None:
        token = run.control_token
        with pytest.raises(Refusal) as caught:
            await control(run.socket, token, "abort", "implementer")
        assert caught.value.code == "broker_uncertain"
        worker = run.worker("implementer")
        identity = fresh_id()
        keys = {"message": "Hello.", "delivery": "steer", "command_id": identity}
        answer = await control(run.socket, token, "send", "implementer", **keys)
        assert answer == ControlAnswer(identity, "accepted", False)
        assert await control(run.socket, token, "send", "implementer", **keys) == answer._replace(duplicate=True)
        worker.context("operator_message", trigger=True)
        for wrong in ({"action": "abort", "command_id": identity}, {"action": "stop"}, {"action": "restart_failed"}):
            with pytest.raises(Refusal) as caught:
                await control(run.socket, token, **{"role": "implementer", **wrong})
            assert caught.value.code == BROKER_REJECTED
        with pytest.raises(Refusal) as caught:
            await control(run.socket, ZERO, "abort", "implementer")
        assert caught.value.code == BROKER_REJECTED

    asyncio.run(scenario())
