# SPDX-License-Identifier: Apache-2.0
"""A worker's requests, one by one: effects, answers and refusals (orchestration spec, sections 2.2 to 2.10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.orchpeer import CALLS, USAGE, Worker, body, fresh_id, plan
from tests.contract.orchruns import Run
from tests.contract.peer import Frame

INVALID = "invalid_protocol"
FORBIDDEN = "forbidden"
ZERO = "0" * 32
FULL = {**CALLS, "reasoning": 5, "contextTokens": 6, "contextWindow": 100, "contextPercent": 6.5}
THRESHOLDS = ("warning.assignment.provider_calls=3", "hard.assignment.context_percent=90.5")
COLUMNS = (
    "provider_calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "cost_total",
    "context_tokens",
    "context_window",
    "context_percent",
)


class Working:
    """A run whose implementer has accepted its assignment; a test has its connection until it breaks a rule."""

    def __init__(self, run: Run) -> None:
        self.run = run
        team = run.team()
        self.reviewer = team["reviewer"]
        self.work = team["implementer"].begin("implementation")
        run.leave(team["implementer"])


@pytest.fixture(scope="module")
def working() -> Iterator[Working]:
    with Run(thresholds=THRESHOLDS) as run:
        yield Working(run)


@pytest.fixture
def worker(working: Working) -> Iterator[Worker]:
    """The implementer, come back to the assignment that it has."""
    worker = working.run.returned("implementer")
    again = worker.assignment("implementation")
    assert (again["id"], again["assignment_id"]) == (working.work["id"], working.work["assignment_id"])
    worker.ack(again["id"], "duplicate")
    yield worker
    worker.close()
    assert working.run.alive(), working.run.errors()
    assert working.run.workflow() == ("active", 1)
    (row,) = working.run.assignments("implementer")
    assert (row["state"], row["boundary_effective"]) == ("accepted", 1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Run]:
    """A run that never gets beyond `connecting`."""
    with Run() as run:
        yield run


@pytest.fixture
def idle(shared: Run) -> Iterator[Worker]:
    """The implementer of a run that has not begun."""
    yield shared.returned("implementer")
    shared.empty()


def usage_of(run: Run, role: str) -> tuple[Any, ...]:
    row = run.role(role)
    return tuple(row[column] for column in COLUMNS)


# hello


def test_hello_is_recorded(shared: Run, idle: Worker) -> None:
    row = shared.role("implementer")
    assert (row["state"], row["connected"], row["generation"], row["activity"]) == ("idle", 1, 1, None)
    event = shared.events("worker_connected")[-1]
    assert (event["role"], event["status"]) == ("implementer", "idle")
    idle.quiet()
    assert shared.workflow() == ("connecting", 1)


def test_departure_is_recorded(shared: Run, idle: Worker) -> None:
    shared.leave(idle)
    assert shared.role("implementer")["state"] == "disconnected"
    assert shared.events("worker_disconnected")[-1]["role"] == "implementer"
    assert shared.workflow() == ("connecting", 1)


@pytest.mark.parametrize("state", ["active", "waiting", "idle"])
def test_return_without_work_makes_idle(shared: Run, state: str) -> None:
    worker = shared.returned("implementer")
    worker.lifecycle(state)
    shared.leave(worker)
    assert shared.role("implementer")["state"] == "disconnected"
    shared.returned("implementer")
    assert shared.role("implementer")["state"] == "idle"
    shared.empty()


def test_last_hello_starts_the_workflow() -> None:
    with Run() as run:
        first = run.worker("reviewer")
        first.quiet()
        last = run.worker("implementer")
        # Whatever came before the response would be in the inbox.
        assert last.inbox == []
        last.context("baseline")
        last.assignment("implementation")
        first.context("baseline")
        first.quiet()
        last.quiet()


# lifecycle


@pytest.mark.parametrize("state", ["idle", "active", "waiting"])
def test_lifecycle_states(shared: Run, idle: Worker, state: str) -> None:
    """Without an assignment none of them changes the workflow."""
    observer = shared.watch()
    idle.lifecycle(state)
    observer.expect_seen(("lifecycle", "implementer", state))
    assert shared.role("implementer")["state"] == state
    event = shared.events("worker_lifecycle")[-1]
    assert (event["role"], event["status"]) == ("implementer", state)
    assert shared.workflow() == ("connecting", 1)
    observer.close()


def test_uncertain_is_left_by_an_operator_only() -> None:
    """Neither the worker's word nor its return makes up for what it could not prove."""
    with Run() as run:
        worker = run.worker("implementer")
        observer = run.watch()
        for state in ("uncertain", "idle", "active", "waiting"):
            worker.lifecycle(state)
            observer.expect_seen(("lifecycle", "implementer", "uncertain"))
        run.leave(worker)
        worker = run.returned("implementer")
        assert run.role("implementer")["state"] == "uncertain"
        run.accepted("redeliver", "implementer")
        assert run.role("implementer")["state"] == "idle"
        worker.lifecycle("active")
        observer.expect_seen(("lifecycle", "implementer", "active"))
        assert run.workflow() == ("connecting", 1)


@pytest.mark.parametrize("state", ["disconnected", "restarting", "recovering", "busy", "", "IDLE", None, 1, True])
def test_lifecycle_state_that_there_is_not(idle: Worker, state: Any) -> None:
    idle.refused(INVALID, "Worker lifecycle state is invalid", "lifecycle", state=state, usage=None)


def test_usage_is_stored(shared: Run, idle: Worker) -> None:
    """What is absent becomes unavailable, but for the calls, which stay."""
    idle.lifecycle("idle", FULL)
    assert usage_of(shared, "implementer") == (1, 1, 2, 3, 4, 5, 0.5, 6, 100, 6.5)
    idle.lifecycle("active")
    assert usage_of(shared, "implementer") == (1, 1, 2, 3, 4, 5, 0.5, 6, 100, 6.5)
    idle.lifecycle("idle", {**USAGE, "input": 10, "cost": {"total": 2}})
    assert usage_of(shared, "implementer") == (1, 10, 2, 3, 4, None, 2.0, None, None, None)
    idle.lifecycle("idle", {**USAGE, "providerCalls": None, "reasoning": None, "contextPercent": None})
    assert usage_of(shared, "implementer") == (None, 1, 2, 3, 4, None, 0.5, None, None, None)
    idle.lifecycle("idle", {**CALLS, "providerCalls": 7, "contextTokens": None, "contextWindow": 0})
    assert usage_of(shared, "implementer") == (7, 1, 2, 3, 4, None, 0.5, None, 0, None)


@pytest.mark.parametrize("number", [0, 2**53, 2**62])
def test_largest_counts(shared: Run, idle: Worker, number: int) -> None:
    idle.lifecycle("idle", {**CALLS, "input": number, "contextWindow": number})
    assert usage_of(shared, "implementer")[1] == number


BAD_USAGE: list[Any] = [
    {},
    [],
    "x",
    0,
    True,
    {**USAGE, "input": -1},
    {**USAGE, "input": 1.5},
    {**USAGE, "input": True},
    {**USAGE, "input": "1"},
    {**USAGE, "input": None},
    {**USAGE, "output": 2**63},
    {**USAGE, "cacheWrite": 10**30},
    {**USAGE, "cost": 0.5},
    {**USAGE, "cost": None},
    {**USAGE, "cost": {}},
    {**USAGE, "cost": {"total": 1, "input": 1}},
    {**USAGE, "cost": {"total": -0.1}},
    {**USAGE, "cost": {"total": True}},
    {**USAGE, "cost": {"total": None}},
    {**USAGE, "cost": {"total": "1"}},
    {**USAGE, "cost": {"total": 10**400}},
    {**USAGE, "providerCalls": -1},
    {**USAGE, "providerCalls": 1.5},
    {**USAGE, "providerCalls": True},
    {**CALLS, "reasoning": -1},
    {**CALLS, "reasoning": "x"},
    {**CALLS, "contextTokens": False},
    {**CALLS, "contextWindow": 2**64},
    {**CALLS, "contextPercent": -1},
    {**CALLS, "contextPercent": True},
    {**CALLS, "contextPercent": "50"},
    {**CALLS, "peakContextTokens": 1},
    {**CALLS, "total": 1},
    {key: value for key, value in USAGE.items() if key != "cacheRead"},
    {key: value for key, value in USAGE.items() if key != "cost"},
]


@pytest.mark.parametrize("usage", BAD_USAGE)
def test_usage_that_is_none(shared: Run, idle: Worker, usage: Any) -> None:
    before = usage_of(shared, "implementer")
    idle.refused(INVALID, "Provider usage is invalid", "lifecycle", state="active", usage=usage)
    assert usage_of(shared, "implementer") == before


@pytest.mark.parametrize("literal", [b"1e999", b"NaN", b"Infinity", b"-Infinity"])
def test_number_that_is_not_finite(shared: Run, idle: Worker, literal: bytes) -> None:
    """`1e999` is JSON and infinite; the others are no JSON at all."""
    head = f'{{"version":1,"type":"lifecycle","role":"implementer","token":"{idle.token}","id":"{ZERO}",'
    tail = b'"state":"idle","usage":{"input":1,"output":1,"cacheRead":1,"cacheWrite":1,"cost":{"total":' + literal
    idle.send_payload(head.encode() + tail + b"}}}")
    answer = idle.recv()
    assert (answer["success"], answer["status"]) == (False, INVALID)
    idle.expect_eof()


# ack


@pytest.mark.parametrize("status", ["delivered", "", "ACCEPTED", None, True, 1])
def test_ack_status_that_there_is_not(worker: Worker, working: Working, status: Any) -> None:
    keys = {"delivery_id": working.work["id"], "status": status}
    worker.refused(INVALID, "Delivery acknowledgement is invalid", "ack", **keys)


@pytest.mark.parametrize("delivery", ["x", "A" * 32, "", None, 5, ["a"]])
def test_ack_of_what_is_no_id(worker: Worker, delivery: Any) -> None:
    """Not an id that was ever given out; what is no id at all may be told apart from that."""
    request = worker.envelope("ack", delivery_id=delivery, status="accepted")
    worker.send(request)
    answer = worker.response(request["id"])
    assert answer["status"] in {"recorded", INVALID}


@pytest.mark.parametrize("status", ["accepted", "duplicate", "uncertain"])
def test_ack_of_another_delivery_changes_nothing(worker: Worker, working: Working, status: str) -> None:
    events = len(working.run.events())
    worker.ack(fresh_id(), status)
    working.reviewer.ack(working.work["id"], status)
    assert len(working.run.events()) == events


def test_boundary_is_effective_once(worker: Worker, working: Working) -> None:
    worker.ack(working.work["id"], "accepted")
    worker.ack(working.work["id"], "duplicate")
    (event,) = working.run.events("context_boundary")
    assert (event["role"], event["status"], event["assignment_id"]) == (
        "implementer",
        "effective",
        working.work["assignment_id"],
    )


# report

UNKNOWN_FIELDS = "Report has missing or unknown fields"
LIMIT = "exceeds the protocol limit"
EMPTY = "must be a non-empty string"
ARRAY = "must be a bounded array"


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (None, "Report must be an object"),
        ([], "Report must be an object"),
        ("done", "Report must be an object"),
        ({}, UNKNOWN_FIELDS),
        ({"kind": "implementation"}, UNKNOWN_FIELDS),
        ({"summary": "x"}, UNKNOWN_FIELDS),
        (body("implementer", extra=1), UNKNOWN_FIELDS),
        (body("implementer", kind=None), "Report kind is invalid"),
        (body("implementer", summary=""), EMPTY),
        (body("implementer", summary=" \n"), EMPTY),
        (body("implementer", summary=None), EMPTY),
        (body("implementer", summary="x" * 2_001), LIMIT),
        (body("implementer", summary="😀" * 1_001), LIMIT),
        (body("implementer", summary="a\0b"), LIMIT),
        (body("implementer", risks=["x"] * 51), ARRAY),
        (body("implementer", risks="x"), ARRAY),
        (body("implementer", risks=None), ARRAY),
        (body("implementer", limitations=None), ARRAY),
        (body("implementer", changed_paths=None), ARRAY),
        (body("implementer", risks=[" "]), EMPTY),
        (body("implementer", risks=[1]), EMPTY),
        (body("implementer", risks=["x" * 501]), LIMIT),
        (body("implementer", changed_paths=["/etc/passwd"]), "bounded relative paths"),
        (body("implementer", changed_paths=["a/../b"]), "bounded relative paths"),
        (body("implementer", changed_paths=["."]), "bounded relative paths"),
        (body("implementer", changed_paths=["a\x7fb"]), "bounded relative paths"),
        (body("implementer", checks=[1]), "Check entries are invalid"),
        (body("implementer", checks=[{"name": "x"}]), "Check entries are invalid"),
        (body("implementer", checks=[{"name": "x", "status": "green"}]), "Check status is invalid"),
        (body("implementer", checks=[{"name": "x", "status": "passed"}] * 51), "Too many checks"),
        (body("implementer", findings=[1]), "Finding entries are invalid"),
        (body("implementer", findings=[{"severity": "low"}]), "Finding fields are invalid"),
        (body("implementer", findings=[{"severity": "low", "summary": "x", "y": 1}]), "Finding fields are invalid"),
        (body("implementer", findings=[{"severity": "bad", "summary": "x"}]), "Finding severity is invalid"),
        (body("implementer", findings=[{"severity": "low", "summary": "x", "line": 0}]), "Finding line is invalid"),
        (body("implementer", findings=[{"severity": "low", "summary": "x", "line": True}]), "Finding line is invalid"),
        (body("implementer", findings=[{"severity": "low", "summary": "x"}] * 51), "Too many findings"),
        (body("implementer", risks=["é" * 500] * 40), "Report exceeds the protocol limit"),
    ],
)
def test_report_body_is_refused(worker: Worker, working: Working, report: Any, text: str) -> None:
    request = worker.envelope("report", assignment_id=working.work["assignment_id"], report=report)
    worker.send(request)
    answer = worker.response(request["id"])
    assert (answer["success"], answer["status"]) == (False, INVALID), answer
    assert text in answer["error"]
    worker.expect_eof()


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (body("reviewer"), "Report kind is not permitted for this role"),
        ({"kind": "summary", "summary": "x"}, "Report kind is not permitted for this role"),
        (body("implementer", verdict="approved"), "This role cannot submit a verdict"),
        (plan(), "Report kind does not match the active assignment"),
    ],
)
def test_report_that_is_not_the_roles(worker: Worker, working: Working, report: Any, text: str) -> None:
    keys = {"assignment_id": working.work["assignment_id"], "report": report}
    worker.refused(FORBIDDEN, text, "report", **keys)


PLAN_FIELDS = "Plan report has missing or unknown fields"
CLAIMS = {"changed_paths": [], "checks": [], "findings": [], "limitations": [], "verdict": None}


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (plan(extra=1), PLAN_FIELDS),
        ({key: value for key, value in plan().items() if key != "risks"}, PLAN_FIELDS),
        (plan(changed_paths=[]), PLAN_FIELDS),
        (plan(**{**CLAIMS, "changed_paths": ["a"]}), "Plan report cannot contain implementation or review claims"),
        (plan(**{**CLAIMS, "verdict": "approved"}), "Plan report cannot contain implementation or review claims"),
        (plan(risks=["x"] * 13), ""),
        (plan(risks=["x" * 301]), LIMIT),
        (plan(summary="x" * 1_001), LIMIT),
        (plan(relevant_paths=["/a"]), ""),
    ],
)
def test_plan_body_is_refused(worker: Worker, working: Working, report: Any, text: str) -> None:
    """Its body is judged before the kind of the assignment is."""
    request = worker.envelope("report", assignment_id=working.work["assignment_id"], report=report)
    worker.send(request)
    answer = worker.response(request["id"])
    assert (answer["success"], answer["status"]) == (False, INVALID), answer
    assert text in answer["error"]
    worker.expect_eof()


BAD_REPORT_USAGE: list[Any] = [
    {},
    [],
    CALLS,
    {"cumulative": CALLS},
    {"cumulative": CALLS, "assignment": None},
    {"cumulative": None, "assignment": CALLS},
    {"cumulative": USAGE, "assignment": CALLS},
    {"cumulative": CALLS, "assignment": USAGE},
    {"cumulative": {**CALLS, "peakContextTokens": 1}, "assignment": CALLS},
    {"cumulative": CALLS, "assignment": {**CALLS, "peakContextTokens": -1}},
    {"cumulative": CALLS, "assignment": {**CALLS, "providerCalls": None}},
    {"cumulative": CALLS, "assignment": CALLS, "total": CALLS},
    {"cumulative": {**CALLS, "input": 2**63}, "assignment": CALLS},
]


@pytest.mark.parametrize("usage", BAD_REPORT_USAGE)
def test_report_usage_that_is_none(worker: Worker, working: Working, usage: Any) -> None:
    keys = {"assignment_id": working.work["assignment_id"], "report": body("implementer"), "usage": usage}
    worker.refused(INVALID, "Assignment provider usage is invalid", "report", **keys)


@pytest.mark.parametrize("assignment", ["x", "A" * 32, "", None, 1, [ZERO]])
def test_assignment_id_that_is_none(worker: Worker, assignment: Any) -> None:
    keys = {"assignment_id": assignment, "report": body("implementer")}
    worker.refused(INVALID, "Assignment ID is invalid", "report", **keys)


def test_report_on_an_assignment_that_there_is_not(worker: Worker) -> None:
    keys = {"assignment_id": fresh_id(), "report": body("implementer")}
    worker.refused("conflict", "Assignment is not active for this role", "report", **keys)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"report": [], "usage": [], "assignment_id": "x"}, "Report must be an object"),
        ({"usage": [], "assignment_id": "x"}, "Assignment provider usage is invalid"),
        ({"assignment_id": "x"}, "Assignment ID is invalid"),
    ],
)
def test_order_of_checks_of_a_report(worker: Worker, broken: Frame, text: str) -> None:
    worker.refused(INVALID, text, "report", **{"report": body("implementer"), **broken})


def test_report_of_another_role_on_an_assignment() -> None:
    with Run() as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        keys = {"assignment_id": work["assignment_id"], "report": body("reviewer")}
        team["reviewer"].refused("conflict", "Assignment is not active for this role", "report", **keys)
        team["implementer"].report(work)


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        (body("reviewer", changed_paths=["a"]), FORBIDDEN, "Read-only roles cannot report changed paths"),
        (body("reviewer", verdict="pass"), INVALID, "Report verdict is invalid for this role"),
        (body("reviewer", verdict=None), INVALID, "Report verdict is invalid for this role"),
        ({"kind": "review", "summary": "x"}, INVALID, "Report verdict is invalid for this role"),
        (plan(), FORBIDDEN, "Plan reports are permitted only for the implementer"),
        (body("implementer"), FORBIDDEN, "Report kind is not permitted for this role"),
    ],
)
def test_what_a_reviewer_may_not_report(shared: Run, report: Frame, code: str, text: str) -> None:
    worker = shared.returned("reviewer")
    worker.refused(code, text, "report", assignment_id=ZERO, report=report)
    shared.empty()


@pytest.mark.parametrize("usage", ["absent", None, "full"])
def test_report_is_accepted_once(usage: Any) -> None:
    """The first report and its usage stay; a second is a duplicate whatever it says."""
    sent = {"cumulative": {**FULL, "input": 100}, "assignment": {**FULL, "peakContextTokens": 9}}
    keys: Frame = {} if usage == "absent" else {"usage": sent if usage else None}
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.begin("implementation")
        implementer.progress(work["assignment_id"], "reporting")
        finding = {"severity": "low", "summary": "x", "path": None, "line": 3, "acceptance": "y"}
        lists = {"changed_paths": ["a.py"], "checks": [{"name": "n", "status": "passed"}] * 2, "findings": [finding]}
        implementer.report(work, body("implementer", risks=["r"], limitations=["l"] * 3, **lists), **keys)
        role = run.role("implementer")
        assert (role["state"], role["active_assignment_id"], role["activity"]) == ("idle", None, None)
        (row,) = run.rows("SELECT * FROM reports")
        counts = [row[f"{name}_count"] for name in ("changed_path", "check", "finding", "risk", "limitation")]
        assert (counts, row["verdict"], row["kind"]) == ([1, 2, 1, 1, 3], None, "implementation")
        stored = tuple(row[column] for column in (*COLUMNS, "peak_context_tokens"))
        assert stored == ((1, 1, 2, 3, 4, 5, 0.5, 6, 100, 6.5, 9) if usage == "full" else (None,) * 11)
        assert role["input_tokens"] == (100 if usage == "full" else 0)
        (event,) = run.events("report_accepted")
        assert (event["status"], event["role"], event["round"]) == ("completed", "implementer", 1)
        again = {"cumulative": CALLS, "assignment": CALLS}
        implementer.report(work, body("implementer", summary="other"), "duplicate", usage=again)
        assert run.rows("SELECT * FROM reports") == [row]
        assert run.role("implementer") == role
        assert [each["state"] for each in run.assignments("implementer")] == ["completed"]


# progress


def test_progress(worker: Worker, working: Working) -> None:
    run, assignment = working.run, working.work["assignment_id"]
    before = run.role("implementer")["activity_sequence"]
    for number, phase in enumerate(("thinking", "streaming", "tool", "reporting"), before + 1):
        worker.progress(assignment, phase)
        row = run.role("implementer")
        assert (row["activity"], row["activity_sequence"]) == (phase, number)
        assert row["activity_at"] == row["updated_at"]
    worker.progress(assignment, "tool", {**FULL, "input": 55})
    assert usage_of(run, "implementer")[:2] == (1, 55)
    worker.lifecycle("active")
    assert run.role("implementer")["activity"] == "tool"
    worker.lifecycle("idle")
    row = run.role("implementer")
    assert (row["activity"], row["activity_at"], row["activity_sequence"]) == (None, None, before + 5)
    worker.progress(assignment, "tool")
    run.leave(worker)
    row = run.role("implementer")
    assert (row["activity"], row["activity_at"], row["activity_sequence"]) == (None, None, before + 6)


def test_progress_is_not_shown_to_observers(worker: Worker, working: Working) -> None:
    observer = working.run.watch()
    worker.progress(working.work["assignment_id"])
    worker.lifecycle("active")
    observer.expect_seen(("lifecycle", "implementer", "active"))
    observer.close()


def test_progress_of_other_work_is_answered_and_nothing_else(worker: Worker, working: Working) -> None:
    row = working.run.role("implementer")
    for assignment in (fresh_id(), ZERO):
        keys = {"assignment_id": assignment, "phase": "tool", "usage": CALLS}
        worker.answered("conflict", "Worker progress assignment is not active", "progress", **keys)
    assert working.run.role("implementer") == row
    worker.progress(working.work["assignment_id"])


def test_progress_without_work(idle: Worker) -> None:
    keys = {"assignment_id": ZERO, "phase": "tool", "usage": None}
    idle.answered("conflict", "Worker progress assignment is not active", "progress", **keys)
    idle.lifecycle("idle")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"assignment_id": "x"}, "Progress assignment ID is invalid"),
        ({"assignment_id": None}, "Progress assignment ID is invalid"),
        ({"phase": "resting"}, "Worker progress phase is invalid"),
        ({"phase": None}, "Worker progress phase is invalid"),
        ({"usage": {}}, "Worker progress usage is invalid"),
        ({"usage": USAGE}, "Worker progress usage is invalid"),
        ({"usage": {**CALLS, "providerCalls": None}}, "Worker progress usage is invalid"),
        ({"usage": {**CALLS, "peakContextTokens": 1}}, "Worker progress usage is invalid"),
    ],
)
def test_progress_that_is_refused(worker: Worker, working: Working, changed: Frame, text: str) -> None:
    keys = {"assignment_id": working.work["assignment_id"], "phase": "tool", "usage": None, **changed}
    worker.refused(INVALID, text, "progress", **keys)


# guardrail


def crossing(work: Frame, **changed: Any) -> Frame:
    keys = {"level": "warning", "metric": "provider_calls", "observed": 4, "threshold": 3}
    return {"assignment_id": work["assignment_id"], **keys, **changed}


def test_guardrail_is_recorded_once_per_level() -> None:
    with Run(thresholds=THRESHOLDS) as run:
        implementer = run.team()["implementer"]
        work = implementer.begin("implementation")
        implementer.succeed("recorded", "guardrail", **crossing(work))
        implementer.succeed("duplicate", "guardrail", **crossing(work, observed=9))
        hard = crossing(work, level="hard", metric="context_percent", observed=90.5, threshold=90.5)
        implementer.succeed("recorded", "guardrail", **hard)
        implementer.succeed("duplicate", "guardrail", **hard)
        rows = run.rows("SELECT level, metric, observed, threshold FROM assignment_guardrails ORDER BY level")
        assert [tuple(row.values()) for row in rows] == [
            ("hard", "context_percent", 90.5, 90.5),
            ("warning", "provider_calls", 4, 3),
        ]
        assert [event["status"] for event in run.events("assignment_guardrail")] == ["warning", "hard"]
        assert run.workflow() == ("active", 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"assignment_id": "x"}, "Guardrail assignment ID is invalid"),
        ({"assignment_id": None}, "Guardrail assignment ID is invalid"),
        ({"level": "soft"}, "Guardrail level is invalid"),
        ({"level": None}, "Guardrail level is invalid"),
        ({"metric": "cost_total"}, "Guardrail metric is invalid"),
        ({"metric": []}, "Guardrail metric is invalid"),
        ({"observed": 2}, "Guardrail values are invalid"),
        ({"observed": 4.5}, "Guardrail values are invalid"),
        ({"observed": True}, "Guardrail values are invalid"),
        ({"observed": "4"}, "Guardrail values are invalid"),
        ({"observed": None}, "Guardrail values are invalid"),
        ({"threshold": 0}, "Guardrail values are invalid"),
        ({"threshold": -1}, "Guardrail values are invalid"),
        ({"threshold": 3.0}, "Guardrail values are invalid"),
        ({"metric": "context_percent", "observed": True, "threshold": 1}, "Guardrail values are invalid"),
    ],
)
def test_guardrail_that_is_refused(worker: Worker, working: Working, changed: Frame, text: str) -> None:
    worker.refused(INVALID, text, "guardrail", **crossing(working.work, **changed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"assignment_id": ZERO}, "Guardrail assignment is not owned by this role"),
        ({"threshold": 4}, "Guardrail threshold is not active for this run"),
        ({"level": "hard"}, "Guardrail threshold is not active for this run"),
        (
            {"level": "hard", "metric": "context_percent", "observed": 95, "threshold": 90},
            "Guardrail threshold is not active for this run",
        ),
    ],
)
def test_guardrail_that_is_forbidden(worker: Worker, working: Working, changed: Frame, text: str) -> None:
    worker.refused(FORBIDDEN, text, "guardrail", **crossing(working.work, **changed))
    assert working.run.rows("SELECT level FROM assignment_guardrails") == []
