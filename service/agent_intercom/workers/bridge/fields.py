# SPDX-License-Identifier: Apache-2.0
"""The fields of a report as a command says them: what it reads about them, and which of them is wrong. Pure.

The broker refuses a report without naming what it lacks, and a plan without one of its lists; a bridge names the field,
and puts the empty list (docs/workers.md; orchestration spec, section 6).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, Final

from agent_intercom.orchestration import reports
from agent_intercom.orchestration.contract import Code, Kind
from agent_intercom.orchestration.errors import Refusal

_MAX_NAME: Final = 40
"""Characters of the name of a field that a refusal quotes."""

_PATHS: Final = ("changed_paths", "relevant_paths")
_ENTRIES: Final = {
    "checks": (reports.CHECK, reports.CHECK, "status", reports.CHECK_STATUSES),
    "findings": (reports.FINDING_REQUIRED, reports.FINDING, "severity", reports.SEVERITIES),
}
"""Of the lists of objects: the keys that each has, those that it may have, and the one with a choice."""

_OBJECTS: Final = {
    "checks": f"`name`, `status` ({', '.join(reports.CHECK_STATUSES)})",
    "findings": f"`severity` ({', '.join(reports.SEVERITIES)}), `summary`, where known `path`, `line`, `acceptance`",
}
_EXAMPLES: Final[dict[str, Any]] = {
    "changed_paths": ["src/parser.py"],
    "checks": [{"name": "unit tests", "status": "passed"}],
    "findings": [{"severity": "high", "summary": "It loses the last line.", "path": "src/parser.py", "line": 12}],
    "relevant_paths": ["src/parser.py"],
    "relevant_symbols": ["Parser.next"],
    "intended_changes": ["Parser.next returns the last line"],
    "required_checks": ["unit tests"],
    "open_questions": ["Is a file without a newline valid?"],
    "risks": ["Callers may count on the empty line."],
    "limitations": ["Not tried on other systems."],
}


def complete(report: dict[str, Any], role: str, kind: str) -> dict[str, Any]:
    """`report` with the kind, where it has none, and the empty lists of a plan.

    Raises Refusal for a field that is missing, unknown or has none of its values; `reports.accept` knows the rest.
    """
    body = {"kind": kind, **report}
    if body["kind"] != kind:
        raise Refusal(Code.FORBIDDEN, f"the kind of this report is `{kind}`; it may be left out", "kind")
    known = [field.name for field in reports.fields(role, kind)]
    verdicts = reports.verdicts(role) if kind != Kind.PLAN else []
    others = (*reports.CLAIMS, "verdict")  # Of another role or kind: whether they are empty is for the rest to see.
    _names(body, ["summary"], {"kind", *known, *others}, f"fields of this report: {', '.join(known)}", "")
    if verdicts and body.get("verdict") not in verdicts:
        how = f"one of {', '.join(verdicts)}"
        if body.get("verdict") is None:
            raise _wrong(f"the verdict is missing: --verdict, or the field `verdict` of a file, with {how}", "verdict")
        raise _wrong(f"the verdict is to be {how}", "verdict")
    for name, rules in _ENTRIES.items():
        if name in known and isinstance(body.get(name), list):
            _entries(body[name], name, *rules)
    if kind == Kind.PLAN:
        for name in known:
            body.setdefault(name, [])
        if not body.keys().isdisjoint(others):
            body = {**dict.fromkeys(reports.CLAIMS, []), "verdict": None, **body}
    return body


def told(role: str, kind: str) -> str:
    """What a command reads about the fields, with an example of such a report."""
    known = reports.fields(role, kind)
    verdicts = reports.verdicts(role) if kind != Kind.PLAN else []
    lines = [f"- `{field.name}`: {_rule(field)}" for field in known]
    example: dict[str, Any] = {"summary": "What is to be known, in a few sentences."}
    example |= {field.name: _EXAMPLES[field.name] for field in known if field.entries is not None}
    if verdicts:
        lines.insert(1, f"- `verdict`: required; {' or '.join(verdicts)}")
        example["verdict"] = verdicts[-1]
    return (
        f"Its fields, of which all but those that are required may be left out (`kind` is `{kind}`):\n\n"
        + "\n".join(lines)
        + f"\n\nFor example, in one line:\n\n    {json.dumps(example)}"
    )


def _rule(field: reports.Field) -> str:
    if field.entries is None:
        return f"required; text, at most {field.length} characters"
    of = f"at most {field.length} characters each"
    if field.name in _OBJECTS:
        return f"at most {field.entries} objects with {_OBJECTS[field.name]}; texts have {of}"
    return f"at most {field.entries} {'relative paths' if field.name in _PATHS else 'texts'}, {of}"


def _entries(
    entries: list[Any], name: str, required: Collection[str], known: Collection[str], key: str, choice: Collection[str]
) -> None:
    for number, entry in enumerate(entries, start=1):
        where = f"{name}, entry {number}: "
        if not isinstance(entry, dict):
            raise _wrong(f"{where}it is no object", name)
        _names(entry, sorted(required), known, f"it has {', '.join(sorted(known))}", where)
        if entry[key] not in choice:
            raise _wrong(f"{where}`{key}` is to be one of {', '.join(choice)}", name)


def _names(found: Collection[str], required: Iterable[str], known: Collection[str], which: str, where: str) -> None:
    """Raise Refusal for a field that is not in `found` and is required, or is there and not known."""
    for name in found:
        if name not in known:
            raise _wrong(f"{where}there is no field `{name[:_MAX_NAME]}`; {which}", where.partition(",")[0] or "report")
    for name in required:
        if name not in found:
            raise _wrong(f"{where}the field `{name}` is missing", where.partition(",")[0] or name)


def _wrong(text: str, field: str) -> Refusal:
    return Refusal(Code.INVALID_PROTOCOL, text, field)
