# SPDX-License-Identifier: Apache-2.0
"""The activation rules: every row of every table, every example, and paths split as pathlib splits them."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_intercom.orchestration import activation
from agent_intercom.orchestration.activation import RUN, SKIPPED, Decision
from agent_intercom.orchestration.contract import DJANGO, PLAYWRIGHT, PROBE, ROLES, SPECIALISTS, Code
from agent_intercom.orchestration.errors import Refusal

RISK = [
    *("api", "authentication", "authorization", "concurrency", "credential", "database", "integration", "migration"),
    *("protocol", "runtime", "security", "transaction"),
]
DOCUMENTATION = ["changelog", "documentation", "readme", "spelling", "typo"]
CODE = ["code", "implement", "logic", "refactor", "test"]
NOT_FORCIBLE = "Forced specialists must be unique enabled specialist roles"
NO_LIST = "Forced specialists are invalid"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], ()),
        ((), ()),
        (["django", "probe"], (PROBE, DJANGO)),
        (("playwright",), (PLAYWRIGHT,)),
        (["django", "playwright", "probe"], SPECIALISTS),
    ],
)
def test_a_forced_list_is_put_in_canonical_order(value: object, expected: tuple[str, ...]) -> None:
    assert activation.forced_list(value, ROLES) == expected


@pytest.mark.parametrize(
    ("value", "enabled", "text"),
    [
        (None, ROLES, NO_LIST),
        ("probe", ROLES, NO_LIST),
        ({"probe"}, ROLES, NO_LIST),
        ({"probe": 1}, ROLES, NO_LIST),
        (["probe", "playwright", "django", "probe"], ROLES, NO_LIST),
        (["probe", "probe"], ROLES, NOT_FORCIBLE),
        (["reviewer"], ROLES, NOT_FORCIBLE),
        (["implementer"], ROLES, NOT_FORCIBLE),
        (["Probe"], ROLES, NOT_FORCIBLE),
        ([1], ROLES, NOT_FORCIBLE),
        ([None], ROLES, NOT_FORCIBLE),
        ([["probe"]], ROLES, NOT_FORCIBLE),
        ([{}], ROLES, NOT_FORCIBLE),
        (["django"], ("implementer", "reviewer", "probe"), NOT_FORCIBLE),
        (["probe"], (), NOT_FORCIBLE),
    ],
)
def test_what_cannot_be_forced_is_refused(value: object, enabled: tuple[str, ...], text: str) -> None:
    with pytest.raises(Refusal) as caught:
        activation.forced_list(value, enabled)
    assert (caught.value.code, caught.value.text) == (Code.INVALID_PROTOCOL, text)
    assert caught.value.field == "forced_specialists"


@pytest.mark.parametrize(
    ("task", "decision", "rule"),
    [
        (None, RUN, "probe-ambiguous-task-v1"),
        (7, RUN, "probe-ambiguous-task-v1"),
        (["readme"], RUN, "probe-ambiguous-task-v1"),
        ("", RUN, "probe-ambiguous-task-v1"),
        (" \n\t", RUN, "probe-ambiguous-task-v1"),
        ("Make it faster", RUN, "probe-ambiguous-task-v1"),
        ("Update README documentation for a typo.", SKIPPED, "probe-docs-only-task-v1"),
        ("Update authentication documentation.", RUN, "probe-high-risk-task-v1"),
        ("readme: the apis and their tests", SKIPPED, "probe-docs-only-task-v1"),
        ("CHANGELOG", SKIPPED, "probe-docs-only-task-v1"),
        ("fix-typo_in README.md", SKIPPED, "probe-docs-only-task-v1"),
        ("readme2spelling", SKIPPED, "probe-docs-only-task-v1"),
        ("typos", RUN, "probe-ambiguous-task-v1"),
        ("documentation of the runtime", RUN, "probe-high-risk-task-v1"),
        *((f"Touch the {word} now", RUN, "probe-high-risk-task-v1") for word in RISK),
        *((f"Fix the readme {word}", RUN, "probe-high-risk-task-v1") for word in RISK),
        *((f"A {word}", SKIPPED, "probe-docs-only-task-v1") for word in DOCUMENTATION),
        *((f"readme {word}", RUN, "probe-ambiguous-task-v1") for word in CODE),
    ],
)
def test_the_first_probe_is_decided_by_the_words_of_the_task(task: object, decision: str, rule: str) -> None:
    assert activation.initial_probe(task, False) == Decision(decision, rule, False)


@pytest.mark.parametrize("task", [None, "", "Update README for a typo", "security"])
def test_a_forced_probe_runs_whatever_the_task(task: object) -> None:
    assert activation.initial_probe(task, True) == Decision(RUN, "probe-forced-v1", True)


DOCS = ["README.md", "a/b.MDX", "x.rst", "y.txt", "LICENSE", "security.py", "readme.html", "docs\\Guide.md",
        "CONTRIBUTING", "Changelog.old", "a.b.md", "docs.md/", "./x.md"]
AMBIGUOUS = ["service/domain.py", "a.md.py", ".md", "notes.", "md", "license.a.b", "..", ".", "my-readme", "a.js.o"]
FRONTEND = ["a.css", "b.js", "c.jsx", "d.sass", "e.scss", "f.svelte", "g.ts", "web/app.tsx", "i.vue", "DIR\\J.TS"]
DJANGO_NAMES = ["asgi.py", "admin.py", "apps.py", "manage.py", "middleware.py", "models.py", "settings.py", "urls.py",
                "views.py", "wsgi.py"]  # fmt: skip
DJANGO_PATHS = [*(f"app/{name}" for name in DJANGO_NAMES), "MANAGE.PY", "app/migrations/0001.py", "a\\templates\\b.py",
                "templates/x.txt", "migrations", "app/Templates"]  # fmt: skip


def per_role(probe: str, playwright: str, django: str) -> tuple[str, str, str]:
    return probe, playwright, django


ALL_DOCS = per_role("docs-only", "docs-only", "docs-only")
ALL_AMBIGUOUS = per_role("ambiguous", "ambiguous", "ambiguous")
SKIPPING = {"docs-only", "frontend-only"}
RULES = {
    "docs-only": "docs-only-paths",
    "frontend-only": "frontend-only-paths",
    "ambiguous": "ambiguous-paths",
    "browser": "browser-path",
    "framework": "framework-path",
}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        *((value, ALL_AMBIGUOUS) for value in (None, "README.md", 3, {}, ("README.md",), [])),
        *((["README.md", bad], ALL_AMBIGUOUS) for bad in ("", None, 5, b"x.md", ["x.md"])),
        (["a.html", ""], ALL_AMBIGUOUS),
        *(([path], ALL_DOCS) for path in DOCS if not path.endswith(".html")),
        (["readme.html"], per_role("docs-only", "browser", "docs-only")),
        *(([path], ALL_AMBIGUOUS) for path in AMBIGUOUS),
        *(([path], per_role("ambiguous", "browser", "frontend-only")) for path in FRONTEND),
        *(([path], per_role("ambiguous", "browser", "ambiguous")) for path in ("x.html", "y/Z.HTM")),
        *(
            ([path], per_role("docs-only" if path.endswith(".txt") else "ambiguous",
                              "docs-only" if path.endswith(".txt") else "ambiguous", "framework"))
            for path in DJANGO_PATHS
        ),
        (["frontend/app.ts", "styles/app.css"], per_role("ambiguous", "browser", "frontend-only")),
        (["templates/x.html"], per_role("ambiguous", "browser", "framework")),
        (["docs/a.md", "src/a.js"], per_role("ambiguous", "browser", "ambiguous")),
        (["README.md", "a.html"], per_role("ambiguous", "browser", "ambiguous")),
        (["README.md", "LICENSE"], ALL_DOCS),
        (["README.md", "service/domain.py"], ALL_AMBIGUOUS),
        (["a.ts", "b.html"], per_role("ambiguous", "browser", "ambiguous")),
        (["a.ts", "app/models.py"], per_role("ambiguous", "browser", "framework")),
        (["models.py.bak", "mymodels.py", "templates.py"], ALL_AMBIGUOUS),
    ],
)  # fmt: skip
def test_later_rounds_are_decided_by_what_changed(paths: object, expected: tuple[str, str, str]) -> None:
    for role, reason in zip(SPECIALISTS, expected, strict=True):
        decision = SKIPPED if reason in SKIPPING else RUN
        assert activation.for_round(role, paths, False) == Decision(decision, f"{role}-{RULES[reason]}-v1", False), role


@pytest.mark.parametrize("role", SPECIALISTS)
@pytest.mark.parametrize("paths", [None, [], ["README.md"], ["a.ts"]])
def test_a_forced_specialist_runs_whatever_changed(role: str, paths: object) -> None:
    assert activation.for_round(role, paths, True) == Decision(RUN, f"{role}-forced-v1", True)


@pytest.mark.parametrize("role", ["implementer", "reviewer", "", "Probe"])
@pytest.mark.parametrize("forced", [True, False])
def test_only_specialists_are_decided_on(role: str, forced: bool) -> None:
    with pytest.raises(ValueError, match="no specialist"):
        activation.for_round(role, [], forced)


def name_of(path: str) -> PurePosixPath:
    return PurePosixPath(path.replace("\\", "/").lower())


@hypothesis_settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab./\\.MDmd "), min_size=1, max_size=9), min_size=1, max_size=4))
def test_suffixes_and_stems_are_those_of_pathlib(paths: list[str]) -> None:
    documentation = all(name_of(path).suffix in {".md", ".mdx", ".rst", ".txt"} for path in paths)
    assert activation.for_round(PROBE, paths, False).decision == (SKIPPED if documentation else RUN)


@hypothesis_settings(deadline=None)
@given(st.sampled_from(SPECIALISTS), st.one_of(st.none(), st.lists(st.text(max_size=20))), st.booleans(), st.text())
def test_whatever_is_decided_can_be_retained(role: str, paths: object, forced: bool, task: str) -> None:
    activation.check_retained(role, *activation.for_round(role, paths, forced))
    activation.check_retained(PROBE, *activation.initial_probe(task, forced))


@pytest.mark.parametrize("forced", [True, False, 0, 1])
@pytest.mark.parametrize("decision", [RUN, SKIPPED])
def test_a_retained_decision_is_accepted(decision: str, forced: object) -> None:
    activation.check_retained(DJANGO, decision, "django-x", forced)
    activation.check_retained(DJANGO, decision, "django-" + "x" * 57, forced)


@pytest.mark.parametrize(
    "row",
    [
        ("probe", "ran", "probe-forced-v1", 1),
        ("probe", None, "probe-forced-v1", 1),
        ("probe", [], "probe-forced-v1", 1),
        ("probe", "run", "django-forced-v1", 1),
        ("probe", "run", "probe", 1),
        ("probe", "run", "probe-Forced", 1),
        ("probe", "run", "probe-forced\n", 1),
        ("probe", "run", "probe-" + "x" * 59, 1),
        ("probe", "run", b"probe-forced-v1", 1),
        ("probe", "run", None, 1),
        ("probe", "run", "probe-forced-v1", 2),
        ("probe", "run", "probe-forced-v1", -1),
        ("probe", "run", "probe-forced-v1", None),
        ("probe", "run", "probe-forced-v1", "1"),
        ("probe", "run", "probe-forced-v1", 1.0),
        (None, "run", "None-forced", 1),
    ],
)
def test_a_retained_decision_that_cannot_be_one_is_refused(row: tuple[object, ...]) -> None:
    with pytest.raises(Refusal, match="^Retained specialist activation is invalid$") as caught:
        activation.check_retained(*row)
    assert caught.value.code == Code.ERROR
