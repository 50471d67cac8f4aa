# SPDX-License-Identifier: Apache-2.0
"""The system prompts of the roles (orchestration spec, section 13). They are Markdown files beside this module.

`common.md` is what every role is told and has `$role`, `$project` and `$part`, for which the role's own file is put
in. That of the implementer has `$plan`, for `plan.md` in a run that begins with a plan; `readonly.md` follows those of
all others. A task is never in them: it comes in the baseline.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Template

from agent_intercom.orchestration.contract import IMPLEMENTER, ROLES


def system_prompt(role: str, project: str, plan_first: bool = True) -> str:
    """What a worker of `role` is told before anything else, as Markdown that ends with a newline.

    `plan_first`: whether the run begins with a plan (flow `phased`). Raises ValueError for a role that is none of
    `contract.ROLES`, and OSError where the installation lacks a file.
    """
    if role not in ROLES:
        raise ValueError("no such role")
    part = _text(role)
    if role == IMPLEMENTER:
        part = Template(part).substitute(plan=f"\n\n{_text('plan')}" if plan_first else "")
    else:
        part += f"\n\n{_text('readonly')}"
    # A line end in a path would begin a line of the prompt.
    shown = project if project.isprintable() else json.dumps(project)
    return Template(_text("common")).substitute(role=role, project=shown, part=part) + "\n"


def _text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.md").read_text(encoding="utf-8").rstrip()
