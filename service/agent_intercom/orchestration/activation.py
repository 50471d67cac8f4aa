# SPDX-License-Identifier: Apache-2.0
"""Which specialists take part in a round (orchestration spec, section 5).

Fixed rules over the task's words and the changed paths. Where there is no evidence, the specialist runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent_intercom.orchestration import contract
from agent_intercom.orchestration.contract import DJANGO, PLAYWRIGHT, PROBE, SPECIALISTS
from agent_intercom.orchestration.errors import Refusal

RUN: Final = "run"
SKIPPED: Final = "skipped"
DECISIONS: Final = (RUN, SKIPPED)

_WORD = re.compile(r"[a-z]+")
_RISK_WORDS = frozenset({
    *("api", "authentication", "authorization", "concurrency", "credential", "database", "integration", "migration"),
    *("protocol", "runtime", "security", "transaction"),
})
_DOC_WORDS = frozenset({"changelog", "documentation", "readme", "spelling", "typo"})
_CODE_WORDS = frozenset({"code", "implement", "logic", "refactor", "runtime", "test"})

_DOC_SUFFIXES = frozenset({".md", ".mdx", ".rst", ".txt"})
_DOC_STEMS = frozenset({"changelog", "contributing", "license", "readme", "security"})
_FRONTEND_SUFFIXES = frozenset({".css", ".js", ".jsx", ".sass", ".scss", ".svelte", ".ts", ".tsx", ".vue"})
_BROWSER_SUFFIXES = _FRONTEND_SUFFIXES | {".html", ".htm"}
_DJANGO_FILES = frozenset({
    *("asgi.py", "admin.py", "apps.py", "manage.py", "middleware.py", "models.py", "settings.py", "urls.py"),
    *("views.py", "wsgi.py"),
})
_DJANGO_DIRECTORIES = frozenset({"migrations", "templates"})


class Decision(NamedTuple):
    """What was decided for a specialist, by which rule, and whether the run forces it. The rule names its role."""

    decision: str
    rule_id: str
    forced: bool


def forced_list(value: object, enabled: Sequence[str]) -> tuple[str, ...]:
    """The specialists that a run forces, in canonical order; `enabled` are the roles of the run.

    Raises Refusal `invalid_protocol` where `value` is not a list of a few unique, enabled specialists (section 5.1).
    """
    if not isinstance(value, (list, tuple)) or len(value) > len(SPECIALISTS):
        raise Refusal(contract.Code.INVALID_PROTOCOL, "Forced specialists are invalid", "forced_specialists")
    allowed = [role for role in SPECIALISTS if role in enabled]
    # Membership of a list asks for no hash, so a list or an object among the names is refused like any other.
    if any(name not in allowed or value.count(name) > 1 for name in value):
        text = "Forced specialists must be unique enabled specialist roles"
        raise Refusal(contract.Code.INVALID_PROTOCOL, text, "forced_specialists")
    return tuple(role for role in allowed if role in value)


def initial_probe(task: object, forced: bool) -> Decision:
    """Whether the probe looks at the task of round 1 before anything is implemented (section 5.2)."""
    if forced:
        return _decision(PROBE, RUN, "forced", forced)
    if not isinstance(task, str) or not task.strip():
        return _decision(PROBE, RUN, "ambiguous-task", forced)
    words = frozenset(_WORD.findall(task.lower()))
    if words & _RISK_WORDS:
        return _decision(PROBE, RUN, "high-risk-task", forced)
    if words & _DOC_WORDS and not words & _CODE_WORDS:
        return _decision(PROBE, SKIPPED, "docs-only-task", forced)
    return _decision(PROBE, RUN, "ambiguous-task", forced)


def for_round(role: str, changed_paths: object, forced: bool) -> Decision:
    """Whether the specialist `role` looks at what an implementation changed (section 5.3).

    `changed_paths` is the list of the accepted report; anything else counts as no evidence. Raises ValueError where
    `role` is no specialist.
    """
    if role not in SPECIALISTS:
        raise ValueError("role is no specialist")
    if forced:
        return _decision(role, RUN, "forced", forced)
    paths = _evidence(changed_paths)
    if not paths:
        return _decision(role, RUN, "ambiguous-paths", forced)
    if role == PLAYWRIGHT and any(path.suffix in _BROWSER_SUFFIXES for path in paths):
        return _decision(role, RUN, "browser-path", forced)
    if role == DJANGO and any(path.is_django() for path in paths):
        return _decision(role, RUN, "framework-path", forced)
    if all(path.is_documentation() for path in paths):
        return _decision(role, SKIPPED, "docs-only-paths", forced)
    if role == DJANGO and all(path.suffix in _FRONTEND_SUFFIXES for path in paths):
        return _decision(role, SKIPPED, "frontend-only-paths", forced)
    return _decision(role, RUN, "ambiguous-paths", forced)


def check_retained(role: object, decision: object, rule_id: object, forced: object) -> None:
    """Raise Refusal `orchestration_error` where values read from a database cannot be a decision (section 5.4).

    `forced` may be the integer that SQLite stores or the flag that was made from it.
    """
    if (
        isinstance(role, str)
        and decision in DECISIONS
        and isinstance(rule_id, str)
        and contract.RULE_ID.fullmatch(rule_id)
        and rule_id.startswith(f"{role}-")
        and isinstance(forced, int)
        and forced in {0, 1}
    ):
        return
    raise Refusal(contract.Code.ERROR, "Retained specialist activation is invalid", "activation")


class _Path(NamedTuple):
    """A changed path in lower case. Suffix and stem are split as `pathlib` does, which is dear to import."""

    parts: tuple[str, ...]
    stem: str
    suffix: str

    def is_documentation(self) -> bool:
        return self.suffix in _DOC_SUFFIXES or self.stem in _DOC_STEMS

    def is_django(self) -> bool:
        return not _DJANGO_FILES.isdisjoint(self.parts[-1:]) or not _DJANGO_DIRECTORIES.isdisjoint(self.parts)


def _evidence(changed_paths: object) -> list[_Path]:
    """The paths, or nothing where they say nothing."""
    if not isinstance(changed_paths, list):
        return []
    paths = []
    for path in changed_paths:
        if not isinstance(path, str) or not path:
            return []
        paths.append(_split(path.replace("\\", "/").lower()))
    return paths


def _split(path: str) -> _Path:
    parts = tuple(part for part in path.split("/") if part not in {"", "."})
    name = parts[-1] if parts else ""
    dot = name.rfind(".")
    # A name that only begins or ends with its dot has no suffix.
    if not 0 < dot < len(name) - 1:
        dot = len(name)
    return _Path(parts, name[:dot], name[dot:])


def _decision(role: str, decision: str, rule: str, forced: bool) -> Decision:
    return Decision(decision, f"{role}-{rule}-v1", forced)
