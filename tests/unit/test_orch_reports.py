# SPDX-License-Identifier: Apache-2.0
"""Structured reports: every rule and text of orchestration spec section 6."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration.contract import MAX_INTEGER, MAX_REPORT, ROLES, Code
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.reports import Report, accept, blank, encodable
from agent_intercom.wire.codec import encode

KINDS = {
    "implementer": "implementation", "reviewer": "review", "probe": "probe", "playwright": "playwright",
    "django": "django",
}
VERDICTS = {
    "reviewer": ("approved", "changes_requested"),
    "playwright": ("pass", "fail"),
    "django": ("advisory_approved", "issues_found"),
}
STANDARD_KEYS = ["kind", "summary", "changed_paths", "checks", "findings", "risks", "limitations", "verdict"]
PLAN_KEYS = ["relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "open_questions"]
PLAN_LISTS = [*PLAN_KEYS, "risks"]
FINDING = {"severity": "low", "summary": "s"}
NO_CLAIMS: dict[str, Any] = {
    "changed_paths": [], "checks": [], "findings": [], "limitations": [], "verdict": None,
}


def standard(role: str = "implementer", **members: Any) -> dict[str, Any]:
    raw = {"kind": KINDS[role], "summary": "done"}
    if role in VERDICTS:
        raw["verdict"] = VERDICTS[role][0]
    return {**raw, **members}


def plan(**members: Any) -> dict[str, Any]:
    return {"kind": "plan", "summary": "the plan", **{key: [] for key in PLAN_LISTS}, **members}


def refused(role: str, raw: Any, text: str, code: str = Code.INVALID_PROTOCOL) -> None:
    with pytest.raises(Refusal) as caught:
        accept(role, raw)
    assert (caught.value.code, caught.value.text) == (code, text)


@pytest.mark.parametrize("role", ROLES)
def test_smallest_report(role: str) -> None:
    report = accept(role, standard(role))
    assert list(report.body) == STANDARD_KEYS
    assert report.body == {
        "kind": KINDS[role], "summary": "done", "changed_paths": [], "checks": [], "findings": [], "risks": [],
        "limitations": [], "verdict": VERDICTS.get(role, (None,))[0],
    }
    assert (report.kind, report.verdict) == (KINDS[role], VERDICTS.get(role, (None,))[0])


def test_full_report_and_its_shape() -> None:
    raw = {
        "verdict": None, "limitations": ["l"], "risks": ["r", "r"],
        "checks": [{"status": "passed", "name": "unit"}] * 4,
        "findings": [{"summary": "f", "severity": "high"}] * 3, "changed_paths": ["a"] * 5, "summary": "grün 😀",
        "kind": "implementation",
    }
    report = accept("implementer", raw)
    assert list(report.body) == STANDARD_KEYS
    assert report.body["checks"][0] == {"name": "unit", "status": "passed"}
    assert list(report.body["checks"][0]) == ["name", "status"]
    assert report == Report(
        kind="implementation", verdict=None, body=report.body, summary_chars=6, changed_path_count=5, check_count=4,
        finding_count=3, risk_count=2, limitation_count=1,
    )


@pytest.mark.parametrize("raw", [None, True, 0, 1.5, "", "report", [], [standard()]], ids=repr)
def test_not_an_object(raw: Any) -> None:
    refused("implementer", raw, "Report must be an object")


@pytest.mark.parametrize(
    "raw",
    [{}, {"kind": "implementation"}, {"summary": "s"}, standard(extra=1), standard(relevant_paths=[]),
     {"kind": 5}, {**standard(), "\ud800": 1}],
    ids=repr,
)
def test_key_set(raw: Any) -> None:
    refused("implementer", raw, "Report has missing or unknown fields")


@pytest.mark.parametrize("kind", [None, True, 1, 1.5, [], ["plan"], {}], ids=repr)
def test_kind_is_text(kind: Any) -> None:
    refused("implementer", standard(kind=kind), "Report kind is invalid")


@pytest.mark.parametrize("role", ROLES)
def test_kind_is_the_role_s(role: str) -> None:
    for kind in ({*KINDS.values(), "", "Plan", "nonsense", "\ud800"}) - {KINDS[role]}:
        refused(role, standard(role, kind=kind), "Report kind is not permitted for this role", Code.FORBIDDEN)


NOT_TEXT: list[Any] = [None, True, 0, 1.5, [], ["x"], {}, "", " ", "\t\n", "\ufeff", "\x1c", "\u00a0", "\x1c\ufeff\x1c"]


@pytest.mark.parametrize("value", NOT_TEXT, ids=repr)
def test_texts_are_not_blank(value: Any) -> None:
    empty = "must be a non-empty string"
    refused("implementer", standard(summary=value), f"Report summary {empty}")
    refused("implementer", plan(summary=value), f"Plan summary {empty}")
    for key in ("changed_paths", "risks", "limitations"):
        refused("implementer", standard(**{key: ["fine", value]}), f"{key} entry {empty}")
    for key in PLAN_LISTS:
        refused("implementer", plan(**{key: ["fine", value]}), f"{key} entry {empty}")
    refused("implementer", standard(checks=[{"name": value, "status": "passed"}]), f"Check name {empty}")
    refused("implementer", standard(findings=[{**FINDING, "summary": value}]), f"Finding summary {empty}")
    if value is not None:
        refused("implementer", standard(findings=[{**FINDING, "path": value}]), f"Finding path {empty}")
        refused("implementer", standard(findings=[{**FINDING, "acceptance": value}]), f"Finding acceptance {empty}")


TEXTS: list[Any] = [
    pytest.param(lambda text: standard(summary=text), "Report summary", 2000, id="summary"),
    pytest.param(lambda text: plan(summary=text), "Plan summary", 1000, id="plan-summary"),
    *(pytest.param(lambda text, key=key: standard(**{key: [text]}), f"{key} entry", 500, id=key)
      for key in ("changed_paths", "risks", "limitations")),
    *(pytest.param(lambda text, key=key: plan(**{key: [text]}), f"{key} entry", 300, id=f"plan-{key}")
      for key in PLAN_LISTS),
    pytest.param(lambda text: standard(checks=[{"name": text, "status": "failed"}]), "Check name", 500, id="check"),
    *(pytest.param(lambda text, key=key: standard(findings=[{**FINDING, key: text}]), f"Finding {key}", 500,
                   id=f"finding-{key}") for key in ("path", "summary", "acceptance")),
]
every_text = pytest.mark.parametrize(("build", "label", "limit"), TEXTS)


@every_text
def test_lengths(build: Any, label: str, limit: int) -> None:
    accept("implementer", build("ä" * limit))
    refused("implementer", build("x" * (limit + 1)), f"{label} exceeds the protocol limit")


@every_text
def test_nul(build: Any, label: str, limit: int) -> None:
    refused("implementer", build("a\0b"), f"{label} exceeds the protocol limit")


@every_text
@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc00\ud800", "é\ud83d"], ids=ascii)
def test_lone_surrogates(build: Any, label: str, limit: int, text: str) -> None:
    refused("implementer", build(text), f"{label} must be valid Unicode")


@every_text
def test_astral_text_counts_units_in_summaries_only(build: Any, label: str, limit: int) -> None:
    accept("implementer", build("😀" * (limit // 2)))
    if label.endswith("summary") and not label.startswith("Finding"):
        refused("implementer", build("😀" * (limit // 2) + "x"), f"{label} exceeds the protocol limit")
    else:
        accept("implementer", build("😀" * limit))
        refused("implementer", build("😀" * (limit + 1)), f"{label} exceeds the protocol limit")


NOT_ARRAYS: list[Any] = [None, True, False, 0, 1.5, "", "x", {}, {"0": "x"}]


@pytest.mark.parametrize("value", NOT_ARRAYS, ids=repr)
def test_arrays(value: Any) -> None:
    for key in ("changed_paths", "checks", "findings", "risks", "limitations"):
        refused("implementer", standard(**{key: value}), f"{key} must be a bounded array")
    for key in PLAN_LISTS:
        refused("implementer", plan(**{key: value}), f"{key} must be a bounded array")


def test_array_bounds() -> None:
    check = {"name": "n", "status": "skipped"}
    texts = (("changed_paths", "p"), ("risks", "r"), ("limitations", "l"))
    for key, item in (*texts, ("checks", check), ("findings", FINDING)):
        assert len(accept("implementer", standard(**{key: [item] * 50})).body[key]) == 50
        too_many = "Too many " + key if key in ("checks", "findings") else f"{key} must be a bounded array"
        refused("implementer", standard(**{key: [item] * 51}), too_many)
    for key in PLAN_LISTS:
        assert len(accept("implementer", plan(**{key: ["x"] * 12})).body[key]) == 12
        refused("implementer", plan(**{key: ["x"] * 13}), f"{key} must be a bounded array")


@pytest.mark.parametrize("role", [role for role in ROLES if role != "implementer"])
def test_only_the_writer_changes_paths(role: str) -> None:
    accept(role, standard(role, changed_paths=[]))
    refused(role, standard(role, changed_paths=["a"]), "Read-only roles cannot report changed paths", Code.FORBIDDEN)


OUTSIDE = [
    "/", "/etc", ".", "..", "../x", "a/..", "a/../b", "./..", "a\nb", "a\tb", "\x01", "a\x1f", "a\x7f", "..//", "//x",
]
INSIDE = [
    "a", "a/b", "./x", "a/", "a//b", "~", "~/x", "a\\b", "..\\x", "...", "..a", "a..", ".a", "a/.", "a/./b", "\x80",
    "é/😀", " a",
]


@pytest.mark.parametrize("path", OUTSIDE, ids=ascii)
def test_paths_that_leave(path: str) -> None:
    relative = "must contain bounded relative paths"
    refused("implementer", standard(changed_paths=["fine", path]), f"changed_paths {relative}")
    refused("implementer", plan(relevant_paths=["fine", path]), f"relevant_paths {relative}")


@pytest.mark.parametrize("path", INSIDE, ids=ascii)
def test_paths_that_stay(path: str) -> None:
    assert accept("implementer", standard(changed_paths=[path])).body["changed_paths"] == [path]
    assert accept("implementer", plan(relevant_paths=[path])).body["relevant_paths"] == [path]


def test_other_texts_may_look_like_any_path() -> None:
    for path in (*OUTSIDE, "/abs"):
        if not blank(path):
            accept("implementer", standard(risks=[path], findings=[{**FINDING, "path": path}]))
            accept("implementer", plan(relevant_symbols=[path]))


@pytest.mark.parametrize(
    "entry",
    [None, True, 1, "x", [], {}, {"name": "n"}, {"status": "passed"}, {"name": "n", "status": "passed", "x": 1}],
    ids=repr,
)
def test_check_entries(entry: Any) -> None:
    refused("implementer", standard(checks=[entry]), "Check entries are invalid")


@pytest.mark.parametrize("status", ["passed", "failed", "skipped", "unknown"])
def test_check_statuses(status: str) -> None:
    assert accept("probe", standard("probe", checks=[{"name": "n", "status": status}])).check_count == 1


NOT_ENUMS: list[Any] = [None, True, 1, 1.5, [], ["passed"], {}, {"low": 1}, "", "Passed", "low ", "\ud800"]


@pytest.mark.parametrize("value", NOT_ENUMS, ids=repr)
def test_enums(value: Any) -> None:
    refused("implementer", standard(checks=[{"name": "n", "status": value}]), "Check status is invalid")
    refused("implementer", standard(findings=[{**FINDING, "severity": value}]), "Finding severity is invalid")
    for role in VERDICTS:
        refused(role, standard(role, verdict=value), "Report verdict is invalid for this role")


@pytest.mark.parametrize("entry", [None, True, 1, "x", []], ids=repr)
def test_finding_entries(entry: Any) -> None:
    refused("implementer", standard(findings=[entry]), "Finding entries are invalid")


@pytest.mark.parametrize("entry", [{}, {"severity": "low"}, {"summary": "s"}, {**FINDING, "x": 1}], ids=repr)
def test_finding_fields(entry: Any) -> None:
    refused("implementer", standard(findings=[entry]), "Finding fields are invalid")


@pytest.mark.parametrize("severity", ["critical", "high", "medium", "low", "info"])
def test_finding_is_normalised(severity: str) -> None:
    (found,) = accept("probe", standard("probe", findings=[{"summary": "s", "severity": severity}])).body["findings"]
    assert list(found.items()) == [
        ("severity", severity), ("path", None), ("line", None), ("summary", "s"), ("acceptance", None),
    ]
    full = {"acceptance": "a", "summary": "s", "line": 7, "path": "/p", "severity": severity}
    (found,) = accept("probe", standard("probe", findings=[full])).body["findings"]
    assert found == full
    assert list(found) == ["severity", "path", "line", "summary", "acceptance"]


@pytest.mark.parametrize("line", [0, -1, True, False, 1.0, "1", [], {}, MAX_INTEGER + 1, 2.0**70], ids=repr)
def test_finding_line(line: Any) -> None:
    refused("implementer", standard(findings=[{**FINDING, "line": line}]), "Finding line is invalid")


@pytest.mark.parametrize("line", [None, 1, MAX_INTEGER])
def test_finding_lines_that_fit(line: int | None) -> None:
    (found,) = accept("probe", standard("probe", findings=[{**FINDING, "line": line}])).body["findings"]
    assert found["line"] == line


@pytest.mark.parametrize("role", VERDICTS)
def test_verdicts(role: str) -> None:
    for verdict in VERDICTS[role]:
        report = accept(role, standard(role, verdict=verdict))
        assert report.verdict == report.body["verdict"] == verdict
    for verdict in {item for verdicts in VERDICTS.values() for item in verdicts} - set(VERDICTS[role]):
        refused(role, standard(role, verdict=verdict), "Report verdict is invalid for this role")
    raw = standard(role)
    del raw["verdict"]
    refused(role, raw, "Report verdict is invalid for this role")


@pytest.mark.parametrize("role", ["implementer", "probe"])
def test_roles_without_verdict(role: str) -> None:
    assert accept(role, standard(role, verdict=None)).verdict is None
    for verdict in ("approved", "", False, 0, [], {}):
        refused(role, standard(role, verdict=verdict), "This role cannot submit a verdict", Code.FORBIDDEN)


# Plans.


@pytest.mark.parametrize("claims", [{}, NO_CLAIMS], ids=["short", "long"])
def test_plan_in_both_forms(claims: dict[str, Any]) -> None:
    lists = {key: [f"{key} {index}" for index in range(2)] for key in PLAN_LISTS}
    report = accept("implementer", plan(**lists, **claims))
    assert list(report.body) == [*STANDARD_KEYS, *PLAN_KEYS]
    assert report.body == {"kind": "plan", "summary": "the plan", **NO_CLAIMS, **lists}
    assert report == Report(
        kind="plan", verdict=None, body=report.body, summary_chars=8, changed_path_count=0, check_count=0,
        finding_count=0, risk_count=2, limitation_count=0,
    )


@pytest.mark.parametrize("role", [role for role in ROLES if role != "implementer"])
def test_plan_of_another_role(role: str) -> None:
    refused(role, plan(), "Plan reports are permitted only for the implementer", Code.FORBIDDEN)


def test_plan_key_sets() -> None:
    text = "Plan report has missing or unknown fields"
    for key in (*PLAN_LISTS, "summary"):
        refused("implementer", {name: value for name, value in plan().items() if name != key}, text)
        whole = plan(**NO_CLAIMS)
        refused("implementer", {name: value for name, value in whole.items() if name != key}, text)
    for key, value in NO_CLAIMS.items():
        refused("implementer", plan(**{key: value}), text)
        refused("implementer", {name: item for name, item in plan(**NO_CLAIMS).items() if name != key}, text)
    refused("implementer", plan(extra=[]), text)
    refused("implementer", plan(**NO_CLAIMS, extra=[]), text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("changed_paths", ["a"]), ("checks", [{"name": "n", "status": "passed"}]), ("findings", [FINDING]),
        ("limitations", ["l"]), ("verdict", "approved"), ("verdict", []), ("verdict", False), ("checks", None),
        ("findings", 0), ("limitations", ""), ("changed_paths", {}),
    ],
)
def test_plan_claims_nothing(key: str, value: Any) -> None:
    text = "Plan report cannot contain implementation or review claims"
    refused("implementer", plan(**{**NO_CLAIMS, key: value}), text)


# The whole.


def sized(kind: str, size: int, unit: str) -> dict[str, Any]:
    """A report whose normalised form is `size` bytes, made of `unit` as far as it goes."""
    raw, keys, items, longest = (
        (plan(), PLAN_LISTS, 12, 300) if kind == "plan" else (standard(), ["risks", "limitations"], 50, 500)
    )
    left = size - len(encode(accept("implementer", raw).body))
    for key in keys:
        raw[key] = []
        while len(raw[key]) < items and left > 20:
            overhead = 3 if raw[key] else 2
            count = min(longest, (left - overhead) // len(unit.encode()))
            raw[key].append(unit * count)
            left -= overhead + count * len(unit.encode())
    raw["summary"] += "x" * left
    return raw


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("implementation", "x"), ("implementation", "é"), ("implementation", "😀"), ("plan", "é"), ("plan", "😀")],
)
def test_whole_report_is_capped_in_bytes(kind: str, unit: str) -> None:
    fits = sized(kind, MAX_REPORT, unit)
    assert len(encode(accept("implementer", fits).body)) == MAX_REPORT
    refused("implementer", sized(kind, MAX_REPORT + 1, unit), "Report exceeds the protocol limit")


def test_escapes_count_as_written() -> None:
    escaped = standard(risks=["\x01" * 500] * 10, limitations=["\x01" * 500])
    refused("implementer", escaped, "Report exceeds the protocol limit")


def test_normalised_form_is_what_is_sent_on() -> None:
    raw = standard("reviewer", summary="ü\u2028\"\\😀", limitations=["\x7f"])
    body = accept("reviewer", raw).body
    assert encode(body).decode() == json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    assert accept("reviewer", body).body == body


def test_plan_reads_back() -> None:
    body = accept("implementer", plan(risks=["r"], open_questions=["?"])).body
    assert accept("implementer", body).body == body


# Whatever comes.

json_text = st.text(st.characters(), max_size=4)
words = st.sampled_from(["approved", "low", "passed"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | json_text | words,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "status", "severity", "path", "line", "summary", "acceptance"]), inner)
    | st.dictionaries(json_text, inner, max_size=2),
    max_leaves=10,
)
valid_kinds = st.sampled_from([*KINDS.values(), "plan"])


def _keys(keys: list[str]) -> dict[str, st.SearchStrategy[Any]]:
    return dict.fromkeys(keys, anything)


shaped = st.one_of(
    st.fixed_dictionaries({"kind": valid_kinds, "summary": anything}, optional=_keys(STANDARD_KEYS[2:])),
    st.fixed_dictionaries({"kind": st.just("plan"), "summary": json_text, **_keys(PLAN_LISTS)}),
    st.fixed_dictionaries(
        {"kind": st.just("plan"), "summary": json_text, **_keys(PLAN_LISTS), **_keys(list(NO_CLAIMS))}
    ),
)


@given(st.sampled_from(ROLES), st.one_of(anything, shaped))
def test_nothing_but_a_refusal_comes_out(role: str, raw: Any) -> None:
    try:
        report = accept(role, raw)
    except Refusal as refusal:
        assert refusal.code in (Code.INVALID_PROTOCOL, Code.FORBIDDEN)
        return
    assert len(encode(report.body)) <= MAX_REPORT
    assert accept(role, report.body) == report


@given(st.text(st.characters()))
def test_encodable_is_what_utf_8_takes(text: str) -> None:
    assert encodable(text) == (not any(0xD800 <= ord(char) <= 0xDFFF for char in text))
