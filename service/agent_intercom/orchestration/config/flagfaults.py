# SPDX-License-Identifier: Apache-2.0
"""How flags of a start are written, and what is said of those that cannot be carried out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent_intercom.orchestration import budget, contract
from agent_intercom.orchestration.config.shapes import suggestion

_THRESHOLD: Final = (("level", budget.LEVELS), ("scope", budget.SCOPES), ("metric", budget.METRICS))
"""What the three parts of a threshold's name are, and can be."""


def specialist_flag(role: str, wanted: bool) -> str:
    """The flag that has a specialist take part, or not."""
    name = "django-expert" if role == contract.DJANGO else role
    return f"--with-{name}" if wanted else f"--without-{name}"


def not_forced(forced: Sequence[str], enabled: Sequence[str]) -> str:
    """Why specialists cannot be forced in a run whose roles are `enabled`."""
    for role in forced:
        if role not in contract.SPECIALISTS:
            return f"--force-specialist must name one of {', '.join(contract.SPECIALISTS)}"
        if role not in enabled:
            return f"--force-specialist: the run has no {role}; say {specialist_flag(role, True)}, too"
    return "--force-specialist names a specialist twice"


def unknown_threshold(override: str) -> str:
    """What part of a `--budget-override` names nothing that there is, or an empty string."""
    parts = override.partition("=")[0].split(".")
    if len(parts) == len(_THRESHOLD):
        for part, (label, known) in zip(parts, _THRESHOLD, strict=True):
            if part not in known:
                text = f"there is no {label} {part}; {label}s are {', '.join(known)}"
                return f"--budget-override: {text}{suggestion(part, known)}"
    return ""
