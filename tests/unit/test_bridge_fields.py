# SPDX-License-Identifier: Apache-2.0
"""What a bridge says about the fields of a report: which one is wrong, and that a plan in words only is one."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.orchestration import reports
from agent_intercom.orchestration.contract import ROLES, report_kind
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers.bridge import fields

LISTS = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "open_questions")
FINDING = {"severity": "low", "summary": "s"}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"risks": ["r"]},
        {"relevant_paths": ["a"], "changed_paths": []},
        {"verdict": None},
        {"kind": "plan", **dict.fromkeys((*LISTS, "risks"), ["x"])},
    ],
)
def test_what_a_plan_does_not_give_is_empty(said: dict[str, Any]) -> None:
    accepted = reports.accept("implementer", fields.complete({"summary": "s", **said}, "implementer", "plan"))
    assert accepted.kind == "plan"
    for name in (*LISTS, "risks"):
        assert accepted.body[name] == said.get(name, [])


@pytest.mark.parametrize(
    ("role", "kind", "body", "field", "told"),
    [
        ("implementer", "plan", {}, "summary", "the field `summary` is missing"),
        ("implementer", "plan", {"summary": "s", "steps": []}, "report", "no field `steps`; .*open_questions"),
        ("implementer", "implementation", {"summary": "s", "x" * 90: 1}, "report", "no field `x{40}`; .*changed_paths"),
        ("implementer", "implementation", {"summary": "s", "relevant_paths": []}, "report", "`relevant_paths`"),
        ("implementer", "plan", {"kind": "implementation", "summary": "s"}, "kind", "is `plan`"),
        ("reviewer", "review", {"summary": "s"}, "verdict", "--verdict.* approved, changes_requested"),
        ("reviewer", "review", {"summary": "s", "verdict": "fine"}, "verdict", "one of approved, changes_requested"),
        ("reviewer", "review", {"summary": "s", "verdict": []}, "verdict", "one of approved, changes_requested"),
        ("probe", "probe", {"summary": "s", "checks": [1]}, "checks", "checks, entry 1: it is no object"),
        ("probe", "probe", {"summary": "s", "checks": [{"name": "n"}]}, "checks", "entry 1: the field `status` is mis"),
        ("probe", "probe", {"summary": "s", "checks": [{"name": "n", "status": {}}]}, "checks", "one of passed, fai"),
        ("probe", "probe", {"summary": "s", "findings": [FINDING, {"severity": "low"}]}, "findings", "2: .*`summary`"),
        ("probe", "probe", {"summary": "s", "findings": [FINDING | {"file": "x"}]}, "findings", "`file`; it has acc"),
        ("probe", "probe", {"summary": "s", "findings": [FINDING | {"severity": "bad"}]}, "findings", "of critical"),
    ],
)
def test_the_field_that_is_wrong_is_named(role: str, kind: str, body: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(Refusal, match=told) as refused:
        fields.complete(body, role, kind)
    assert refused.value.field == field


@pytest.mark.parametrize("role", ROLES)
def test_what_it_says_nothing_about_is_as_the_broker_takes_it(role: str) -> None:
    kind, choice = report_kind(role), reports.verdicts(role)
    said = {"summary": "s", **({"verdict": choice[0]} if choice else {}), "changed_paths": [], "findings": [FINDING]}
    assert fields.complete(said, role, kind) == {"kind": kind, **said}
    assert reports.accept(role, {"kind": kind, **said}).finding_count == 1
