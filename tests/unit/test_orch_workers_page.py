# SPDX-License-Identifier: Apache-2.0
"""docs/workers.md against the code: its tables name the fields, values and limits that the broker has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from agent_intercom.orchestration import contract, encode, parsing, reports, usage
from agent_intercom.orchestration.errors import Refusal

Table: TypeAlias = list[list[str]]

PAGE = (Path(__file__).parents[2] / "docs/workers.md").read_text(encoding="utf-8")
ID = "0123456789abcdef" * 2
NUMBERS = {"input": 1, "output": 2, "cacheRead": 3, "cacheWrite": 4, "cost": {"total": 0.5}}
VALUES: dict[str, dict[str, Any]] = {
    "hello": {"generation": 1},
    "lifecycle": {"state": "idle", "usage": None},
    "ack": {"delivery_id": ID, "status": "accepted"},
    "report": {"assignment_id": ID, "report": {"kind": "probe", "summary": "s"}, "usage": None},
    "progress": {"assignment_id": ID, "phase": "tool", "usage": None},
    "guardrail": {"assignment_id": ID, "level": "hard", "metric": "context_tokens", "observed": 2, "threshold": 1},
}


def table(head: str) -> Table:
    """The rows of the table whose head begins so."""
    lines = PAGE[PAGE.index(f"\n| {head}") + 1 :].splitlines()
    length = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:length]]


def names(cell: str) -> list[str]:
    """What is in back quotes."""
    return re.findall(r"`([^`]+)`", cell)


def keys(cell: str) -> tuple[set[str], set[str]]:
    """The required and the optional keys of a frame."""
    required, _, optional = cell.partition("optional")
    return set(names(required)), set(names(optional))


def accepted(kind: str, **members: Any) -> bool:
    """Whether a worker's frame with these members is one."""
    frame = {"version": 1, "type": kind, "role": "probe", "token": ID, "id": ID, **members}
    try:
        parsing.worker(json.dumps(frame).encode(), "probe")
    except Refusal:
        return False
    return True


def reported(role: str, body: dict[str, Any]) -> bool:
    """Whether the report would be taken."""
    try:
        reports.accept(role, body)
    except Refusal:
        return False
    return True


def test_the_limits_are_those_of_the_contract() -> None:
    found = {what: int(value.split()[-1]) for what, value in table("Limit ")}
    limits = contract.Limits()
    expected = {
        "a frame, ": contract.MAX_FRAME,
        "a report ": contract.MAX_REPORT,
        "text of a `context`": contract.MAX_MESSAGE_UNITS,
        "text of an `error`": contract.MAX_ERROR,
        "an integer, ": contract.MAX_INTEGER + 1,
        "milliseconds until": limits.handshake_ms,
        "connections without": limits.unauthenticated,
    }
    assert len(found) == len(expected)
    for (what, value), (begins, limit) in zip(found.items(), expected.items(), strict=True):
        assert what.startswith(begins) and value == limit, what
    # The largest double below the limit, and the first integer that is read as the limit.
    assert accepted("hello", generation=2**63 - 1024) and not accepted("hello", generation=2**63 - 1)


def test_the_requests_have_the_keys_of_the_page() -> None:
    rows = {names(row[0])[0]: keys(row[1]) for row in table("`type` | Keys |")}
    assert rows.keys() == parsing._KEYS.keys()
    for kind, (required, optional) in rows.items():
        assert parsing._KEYS[kind] == required | parsing._ENVELOPE
        assert parsing._OPTIONAL_KEYS.get(kind, frozenset()) == optional
        values = VALUES[kind]
        assert values.keys() == required | optional and accepted(kind, **values)
        for key in values:
            assert accepted(kind, **{name: values[name] for name in values if name != key}) is (key in optional)
    envelope = PAGE[PAGE.index("Every frame of a worker") :].partition("and exactly")[0]
    assert set(names(envelope)) == parsing._ENVELOPE


def test_the_values_are_those_that_are_taken() -> None:
    found: dict[str, list[str]] = {}
    for row in table("Key | Value |"):
        found.setdefault(names(row[0])[0], []).append(names(row[1])[0])
    assert found == {
        "lifecycle.state": list(parsing._LIFECYCLE_STATES),
        "ack.status": list(parsing._ACK_STATUSES),
        "progress.phase": list(parsing._PHASES),
        "guardrail.level": list(parsing._LEVELS),
        "guardrail.metric": list(parsing._METRICS),
    }
    for row in table("Key | Value |"):
        kind, key = names(row[0])[0].split(".")
        assert accepted(kind, **{**VALUES[kind], key: names(row[1])[0]})
        if key == "metric":
            assert accepted(kind, **{**VALUES[kind], key: names(row[1])[0], "observed": 2.5}) is (row[2] == "numbers")


def test_the_roles_have_the_kinds_and_verdicts_of_the_page() -> None:
    rows = table("Role | `kind`")
    assert [names(row[0])[0] for row in rows] == list(contract.ROLES)
    for row in rows:
        role, kinds, verdicts = names(row[0])[0], names(row[1]), names(row[2])
        extra = ["plan"] if role == contract.IMPLEMENTER else []
        assert kinds == [contract.report_kind(role), *extra]
        assert set(verdicts) == reports._VERDICTS.get(role, frozenset())
        body = {"kind": kinds[0], "summary": "s"}
        assert reported(role, body) == reported(role, {**body, "verdict": None}) == (not verdicts)
        for verdict in {verdict for each in reports._VERDICTS.values() for verdict in each}:
            assert reported(role, {**body, "verdict": verdict}) is (verdict in verdicts)


def standard() -> dict[str, Any]:
    return {"kind": "implementation", "summary": "s"}


def plan() -> dict[str, Any]:
    return {"kind": "plan", "summary": "s", **{names(row[0])[0]: [] for row in table("Field of a plan")[2:]}}


def item(field: str, length: int) -> Any:
    """An entry of the list with the longest text that it has of this length."""
    text = "x" * length
    if field == "checks":
        return {"name": text, "status": "passed"}
    return {"severity": "low", "summary": text} if field == "findings" else text


@pytest.mark.parametrize(
    ("head", "base", "known"), [("report", standard, reports._KNOWN), ("plan", plan, reports._PLAN)]
)
def test_the_fields_of_reports_have_the_limits_of_the_page(head: str, base: Any, known: frozenset[str]) -> None:
    rows = table(f"Field of a {head}")
    assert {names(row[0])[0] for row in rows} == known
    for field, what, entries, length in [(names(row[0])[0], *row[1:]) for row in rows]:
        body = base()
        assert reported("implementer", {key: body[key] for key in body if key != field}) is ("required" not in what)
        if entries:
            most, longest = int(entries), int(length)
            assert reported("implementer", {**body, field: [item(field, 1)] * most})
            assert not reported("implementer", {**body, field: [item(field, 1)] * (most + 1)})
            assert reported("implementer", {**body, field: [item(field, longest)]})
            assert not reported("implementer", {**body, field: [item(field, longest + 1)]})
            assert reported("implementer", {**body, field: [item(field, 2), "../x"]}) is (what.endswith("texts"))
            assert reported("reviewer", {**body, "kind": "review", "verdict": "approved", field: [item(field, 1)]}) is (
                head == "report" and "implementer" not in what
            )
        elif length:
            assert reported("implementer", {**body, field: "x" * int(length)})
            assert not reported("implementer", {**body, field: "x" * (int(length) + 1)})
            assert not reported("implementer", {**body, field: "\U0001f600" * (int(length) // 2 + 1)})


def test_checks_and_findings_are_as_the_page_says() -> None:
    rows = {names(row[0])[0]: keys(row[1]) for row in table("Field of a report")}
    assert rows["checks"][0] == reports.CHECK and not rows["checks"][1]
    required, optional = rows["findings"]
    assert required == reports.FINDING_REQUIRED and required | optional == reports.FINDING
    text = PAGE[PAGE.index("The status of a check is") :]
    statuses, severities = (
        text.partition("; the severity")[0],
        text.partition("; the severity")[2].partition(", its")[0],
    )
    assert set(names(statuses)) == set(reports.CHECK_STATUSES) and set(names(severities)) == set(reports.SEVERITIES)
    assert "does not begin with `/`, is not `.`, has no component `..`" in " ".join(PAGE.split())


def test_usage_has_the_keys_of_the_page() -> None:
    rows = {names(row[0])[0]: row[2] for row in table("Key | What | Required")}
    assert rows.keys() == usage._KNOWN_WITH_PEAK
    required = {key for key, needed in rows.items() if needed != "no"}
    assert required == usage._REQUIRED_WITH_CALLS
    assert usage.lifecycle(NUMBERS)[0] is not None
    full = {**NUMBERS, "providerCalls": 1}
    everything = {key: full.get(key, 1) for key in rows}
    without_peak = {key: value for key, value in everything.items() if key != "peakContextTokens"}
    assert usage.report({"cumulative": without_peak, "assignment": everything}) is not None
    assert usage.report({"cumulative": full, "assignment": full}) is not None
    for wrong in (
        {"cumulative": everything, "assignment": full},
        {"cumulative": NUMBERS, "assignment": full},
        {"cumulative": full, "assignment": NUMBERS},
        {"cumulative": full, "assignment": {**full, "input": -1}},
        {"cumulative": full},
    ):
        with pytest.raises(Refusal):
            usage.report(wrong)
    with pytest.raises(Refusal):
        usage.progress(NUMBERS)


def test_the_frames_of_the_broker_have_the_keys_of_the_page() -> None:
    rows = {names(row[0])[0]: keys(row[1]) for row in table("`type` | Keys besides")}
    made = {
        "response": encode.response(ID, True, "recorded", None),
        "context": encode.context(ID, 1, "operator_message", "text", True, "steer"),
        "assignment": encode.assignment(ID, ID, 1, "review", "text"),
        "abort": encode.abort(ID),
    }
    assert rows.keys() == made.keys()
    for kind, payload in made.items():
        required, optional = rows[kind]
        assert json.loads(payload).keys() == {"version", "type"} | required | optional
    assert "deliver_as" not in json.loads(encode.context(ID, 1, "baseline", "text", False))


def test_every_code_that_a_worker_meets_is_on_the_page() -> None:
    codes = {value for name, value in vars(contract.Code).items() if name.isupper()}
    others = {contract.Code.ERROR, contract.Code.REJECTED, contract.Code.CONTEXT_TOO_LARGE}
    assert {names(row[0])[0] for row in table("`status` | Why")} == codes - others
