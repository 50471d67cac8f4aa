# SPDX-License-Identifier: Apache-2.0
"""Limits of workers that nobody is held to, as they are told. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WORDS: Final = {"memory_max": "memory", "memory_high": "memory from which it is slowed down", "tasks_max": "tasks"}


def told(names: Iterable[str]) -> str:
    """The limits with these names, and why they are none; `orchestrate doctor` says what is missing."""
    limits = ", ".join(_WORDS.get(name, name) for name in names)
    return f"{limits} (its control group has no such limit; `orchestrate doctor` tells more)"


def lacking(controllers: Iterable[str]) -> str:
    """That a manager cannot give these controllers."""
    return f"the user's service manager has no {' and no '.join(controllers)} controller"
