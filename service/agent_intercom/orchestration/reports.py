# SPDX-License-Identifier: Apache-2.0
"""Structured reports: what a role may say in one, and the form in which it is kept (orchestration spec, section 6).

Lengths are code points, except that a summary is counted in UTF-16 units, as every observer counts it; the whole is
measured as compact UTF-8 JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from agent_intercom.orchestration.contract import (
    DJANGO,
    IMPLEMENTER,
    MAX_INTEGER,
    MAX_REPORT,
    PLAYWRIGHT,
    REVIEWER,
    Code,
    Kind,
    report_kind,
)
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire.codec import encode, trimmed, utf16_length

_MAX_SUMMARY: Final = 2_000
_MAX_ITEMS: Final = 50
_MAX_ITEM: Final = 500
_MAX_PLAN_SUMMARY: Final = 1_000
_MAX_PLAN_ITEMS: Final = 12
_MAX_PLAN_ITEM: Final = 300

_KNOWN: Final = frozenset({"kind", "summary", "changed_paths", "checks", "findings", "risks", "limitations", "verdict"})
_REQUIRED: Final = frozenset({"kind", "summary"})
_PLAN_LISTS: Final = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "open_questions")
_PLAN: Final = frozenset({"kind", "summary", "risks", *_PLAN_LISTS})
CLAIMS: Final = ("changed_paths", "checks", "findings", "limitations")
"""Lists that a plan has with `verdict`, all of them and empty, or none of them."""

_PLAN_WITH_CLAIMS: Final = _PLAN.union(CLAIMS, {"verdict"})

CHECK: Final = frozenset({"name", "status"})
CHECK_STATUSES: Final = ("passed", "failed", "skipped", "unknown")
FINDING: Final = frozenset({"severity", "path", "line", "summary", "acceptance"})
FINDING_REQUIRED: Final = frozenset({"severity", "summary"})
SEVERITIES: Final = ("critical", "high", "medium", "low", "info")
_VERDICTS: Final = {
    REVIEWER: frozenset({"approved", "changes_requested"}),
    PLAYWRIGHT: frozenset({"pass", "fail"}),
    DJANGO: frozenset({"advisory_approved", "issues_found"}),
}
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")


class Report(msgspec.Struct, frozen=True):
    """An accepted report. `body` is the normalised form, every key present, in the order in which it is sent on."""

    kind: str
    verdict: str | None
    body: dict[str, Any]
    summary_chars: int
    changed_path_count: int
    check_count: int
    finding_count: int
    risk_count: int
    limitation_count: int


class Field(NamedTuple):
    """A field of a report: how many entries it has at most (None: it is no list), and how long a text in it may be."""

    name: str
    entries: int | None
    length: int


def fields(role: str, kind: str) -> list[Field]:
    """What a report of this role and kind can say, without `kind` and `verdict`. All of a plan are to be there."""
    if kind == Kind.PLAN:
        lists = [Field(name, _MAX_PLAN_ITEMS, _MAX_PLAN_ITEM) for name in (*_PLAN_LISTS[:-1], "risks", _PLAN_LISTS[-1])]
        return [Field("summary", None, _MAX_PLAN_SUMMARY), *lists]
    names = ("changed_paths", "checks", "findings", "risks", "limitations")[0 if role == IMPLEMENTER else 1 :]
    return [Field("summary", None, _MAX_SUMMARY), *(Field(name, _MAX_ITEMS, _MAX_ITEM) for name in names)]


def accept(role: str, raw: object) -> Report:
    """`raw` as the report of `role`, whatever assignment it is for.

    Raises Refusal `forbidden` for what is not this role's to say, and `invalid_protocol` for everything else.
    """
    if not isinstance(raw, dict):
        raise _invalid("Report must be an object")
    body = _plan(role, raw) if raw.get("kind") == Kind.PLAN else _standard(role, raw)
    if len(encode(body)) > MAX_REPORT:
        raise _invalid("Report exceeds the protocol limit")
    return Report(
        kind=body["kind"],
        verdict=body["verdict"],
        body=body,
        summary_chars=len(body["summary"]),
        changed_path_count=len(body["changed_paths"]),
        check_count=len(body["checks"]),
        finding_count=len(body["findings"]),
        risk_count=len(body["risks"]),
        limitation_count=len(body["limitations"]),
    )


def blank(text: str) -> bool:
    """Whether nothing is left of `text` without white space, as Python and as JavaScript see it."""
    return not trimmed(text.strip())


def encodable(text: str) -> bool:
    """Whether `text` is free of lone surrogates, which UTF-8 cannot have."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _standard(role: str, raw: dict[str, Any]) -> dict[str, Any]:
    if not _REQUIRED <= raw.keys() <= _KNOWN:
        raise _invalid("Report has missing or unknown fields")
    kind = raw["kind"]
    if not isinstance(kind, str):
        raise _invalid("Report kind is invalid", "kind")
    if kind != report_kind(role):
        raise Refusal(Code.FORBIDDEN, "Report kind is not permitted for this role", "kind")
    return {
        "kind": kind,
        "summary": _summary(raw["summary"], "Report summary", _MAX_SUMMARY),
        "changed_paths": _changed_paths(role, raw.get("changed_paths", [])),
        "checks": _entries(raw, "checks", _check),
        "findings": _entries(raw, "findings", _finding),
        "risks": _texts(raw.get("risks", []), "risks", _MAX_ITEMS, _MAX_ITEM),
        "limitations": _texts(raw.get("limitations", []), "limitations", _MAX_ITEMS, _MAX_ITEM),
        "verdict": _verdict(role, raw.get("verdict")),
    }


def _plan(role: str, raw: dict[str, Any]) -> dict[str, Any]:
    if role != IMPLEMENTER:
        raise Refusal(Code.FORBIDDEN, "Plan reports are permitted only for the implementer", "kind")
    if raw.keys() not in (_PLAN, _PLAN_WITH_CLAIMS):
        raise _invalid("Plan report has missing or unknown fields")
    # One of the two forms of a bridge carries the keys of the other kinds, to say that it claims nothing.
    if any(raw.get(key, []) != [] for key in CLAIMS) or raw.get("verdict") is not None:
        raise _invalid("Plan report cannot contain implementation or review claims")
    summary = _summary(raw["summary"], "Plan summary", _MAX_PLAN_SUMMARY)
    lists = {key: _texts(raw[key], key, _MAX_PLAN_ITEMS, _MAX_PLAN_ITEM) for key in (*_PLAN_LISTS, "risks")}
    _relative_paths(lists["relevant_paths"], "relevant_paths")
    return {
        "kind": Kind.PLAN,
        "summary": summary,
        "changed_paths": [],
        "checks": [],
        "findings": [],
        "risks": lists.pop("risks"),
        "limitations": [],
        "verdict": None,
        **lists,
    }


def _changed_paths(role: str, value: object) -> list[str]:
    paths = _texts(value, "changed_paths", _MAX_ITEMS, _MAX_ITEM)
    _relative_paths(paths, "changed_paths")
    if paths and role != IMPLEMENTER:
        raise Refusal(Code.FORBIDDEN, "Read-only roles cannot report changed paths", "changed_paths")
    return paths


def _entries(raw: dict[str, Any], label: str, read: Callable[[object], dict[str, Any]]) -> list[dict[str, Any]]:
    value = raw.get(label, [])
    if not isinstance(value, list):
        raise _invalid(f"{label} must be a bounded array", label)
    if len(value) > _MAX_ITEMS:
        raise _invalid(f"Too many {label}", label)
    return [read(entry) for entry in value]


def _check(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.keys() != CHECK:
        raise _invalid("Check entries are invalid", "checks")
    name = _text(entry["name"], "Check name", _MAX_ITEM)
    status = entry["status"]
    if not isinstance(status, str) or status not in CHECK_STATUSES:
        raise _invalid("Check status is invalid", "checks")
    return {"name": name, "status": status}


def _finding(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise _invalid("Finding entries are invalid", "findings")
    if not FINDING_REQUIRED <= entry.keys() <= FINDING:
        raise _invalid("Finding fields are invalid", "findings")
    severity = entry["severity"]
    if not isinstance(severity, str) or severity not in SEVERITIES:
        raise _invalid("Finding severity is invalid", "findings")
    path = _optional_text(entry.get("path"), "Finding path")
    line = entry.get("line")
    if line is not None and (type(line) is not int or not 0 < line <= MAX_INTEGER):
        raise _invalid("Finding line is invalid", "findings")
    return {
        "severity": severity,
        "path": path,
        "line": line,
        "summary": _text(entry["summary"], "Finding summary", _MAX_ITEM),
        "acceptance": _optional_text(entry.get("acceptance"), "Finding acceptance"),
    }


def verdicts(role: str) -> list[str]:
    """The verdicts of which a report of this role has one; none for a role without any."""
    return sorted(_VERDICTS.get(role, ()))


def _verdict(role: str, value: object) -> str | None:
    allowed = _VERDICTS.get(role)
    if allowed is None:
        if value is not None:
            raise Refusal(Code.FORBIDDEN, "This role cannot submit a verdict", "verdict")
        return None
    if not isinstance(value, str) or value not in allowed:
        raise _invalid("Report verdict is invalid for this role", "verdict")
    return value


def _summary(value: object, label: str, limit: int) -> str:
    text = _text(value, label, limit)
    if utf16_length(text) > limit:
        raise _invalid(f"{label} exceeds the protocol limit", label)
    return text


def _texts(value: object, label: str, items: int, limit: int) -> list[str]:
    if not isinstance(value, list) or len(value) > items:
        raise _invalid(f"{label} must be a bounded array", label)
    return [_text(item, f"{label} entry", limit) for item in value]


def _optional_text(value: object, label: str) -> str | None:
    return None if value is None else _text(value, label, _MAX_ITEM)


def _text(value: object, label: str, limit: int) -> str:
    if not isinstance(value, str) or blank(value):
        raise _invalid(f"{label} must be a non-empty string", label)
    if len(value) > limit or "\0" in value:
        raise _invalid(f"{label} exceeds the protocol limit", label)
    if not encodable(value):
        raise _invalid(f"{label} must be valid Unicode", label)
    return value


def _relative_paths(paths: list[str], label: str) -> None:
    for path in paths:
        if path.startswith("/") or path == "." or ".." in path.split("/") or _CONTROLS.search(path):
            raise _invalid(f"{label} must contain bounded relative paths", label)


def _invalid(text: str, field: str = "report") -> Refusal:
    return Refusal(Code.INVALID_PROTOCOL, text, field)
