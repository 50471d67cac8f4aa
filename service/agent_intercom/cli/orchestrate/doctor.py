# SPDX-License-Identifier: Apache-2.0
"""`doctor`: everything that a run needs, and everything that runs left; with the way out of what is wrong.

The contract's members of its answer are in orchestration spec, section 11.3; `systemd`, `runs` and `checks` are ours.
Nothing is changed or started by looking. Where a module is missing that looking needs, that alone is told: nothing here
needs more than the standard library.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Final

from agent_intercom.cli import dependencies, verdicts
from agent_intercom.cli.dependencies import Dependency
from agent_intercom.cli.orchestrate.answer import ERROR, MISSING_PREREQUISITE, Answer
from agent_intercom.cli.verdicts import Check

MAX_CHECKS: Final = 100
MAX_TEXT: Final = 1024
"""How many checks `--json` tells, and how much of a text; callers take no more than 256 KiB of an answer."""

_LOOKING: Final = frozenset({"msgspec", "pydantic", "pydantic_settings"})
"""The modules without which neither settings nor runs can be read."""


def doctor(options: argparse.Namespace) -> Answer:
    """`orchestrate doctor`."""
    lacking = dependencies.missing()
    if not _LOOKING.isdisjoint(each.module for each in lacking):
        return answer(_unseen(), [modules(lacking)])
    from agent_intercom.cli.orchestrate.examining import examine

    return examine(options, modules(lacking))


def modules(lacking: Sequence[Dependency]) -> Check:
    """Whether every module is there that runs need; `lacking` are those that are not."""
    if not lacking:
        return Check("modules", "ok", "every Python module is there")
    hint = dependencies.way_out(lacking)
    return Check("modules", "fail", f"missing: {dependencies.names(lacking)}", hint, needed=True)


def answer(data: dict[str, Any], found: Sequence[Check], *, told: bool = False) -> Answer:
    """What was found out, and the first fault as the error; one of what runs need comes before all others.

    `told`: whoever reads the error has read every check before.
    """
    failed = [check for check in found if check.failed]
    missing = [check for check in failed if check.needed]
    data = {**data, "checks": [check.result() for check in _page(found)], "checks_total": len(found)}
    if not failed:
        return Answer(data, verdicts.lines(found))
    first = (missing or failed)[0]
    text = f"failed checks: {verdicts.failed_names(found)}"
    if not told:
        # A command begins with a backquote, and stays as it is.
        text += f"; {first.name}: {first.text}. {first.way_out[:1].upper()}{first.way_out[1:]}"
    return Answer(data, verdicts.lines(found), (MISSING_PREREQUISITE if missing else ERROR, text))


def _page(found: Sequence[Check]) -> Iterator[Check]:
    """As many checks as a caller takes, in order, those that failed before others, with texts that come to an end."""
    ranked = sorted(range(len(found)), key=lambda number: (not found[number].failed, number))
    for number in sorted(ranked[:MAX_CHECKS]):
        check = found[number]
        yield check._replace(text=check.text[:MAX_TEXT], way_out=check.way_out[:MAX_TEXT])


def _unseen() -> dict[str, Any]:
    """The members of the answer where nothing can be read."""
    program = shutil.which("systemctl")
    return {
        "commands": [{"name": "systemctl", "status": "ok" if program else "fail", "path": program}],
        "tmux": None,
        "model_checks": [],
        "model_policy": dict.fromkeys(("config_path", "configured", "execution_profile", "project_config")),
        "budget_policy": dict.fromkeys(("config_path", "configured", "effective")),
        "paths": dict.fromkeys(("state_root", "config", "model_config", "budget_config", "project")),
        "systemd": None,
        "confinement": None,
        "runs": None,
    }
