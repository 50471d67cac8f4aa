# SPDX-License-Identifier: Apache-2.0
"""Limits that a worker was given and nobody is held to, because the user's manager has no such controller (cgroups(7)).

systemd takes a limit all the same and says nothing; what counts is the file of the worker's own control group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from agent_intercom.host import cgroups

_FILES: Final = {"memory_max": "memory.max", "memory_high": "memory.high", "tasks_max": "pids.max"}
"""By their names here, the files of the kernel that have them."""

CONTROLLERS: Final = {name: file.partition(".")[0] for name, file in _FILES.items()}
"""The controller that each takes."""


class Limited(Protocol):
    """Whatever says how a worker is limited: its place, or its run's. None is no limit."""

    @property
    def memory_max(self) -> int | None: ...

    @property
    def memory_high(self) -> int | None: ...

    @property
    def tasks_max(self) -> int | None: ...


def unheld(given: Limited, cgroup: str) -> tuple[str, ...]:
    """The names of the limits that were `given` to the worker in a control group, and are none there."""
    files = {_FILES[name]: name for name in _given(given)}
    return tuple(files[file] for file in cgroups.unheld(cgroup, files))


def lacking(given: Iterable[Limited], manager: str) -> tuple[str, ...]:
    """The controllers that such limits take and that a manager cannot give; `manager` is its control group."""
    there = cgroups.controllers(manager)
    return () if there is None else tuple(sorted(asked(given) - there))


def asked(given: Iterable[Limited]) -> set[str]:
    """The controllers that such limits take."""
    return {CONTROLLERS[name] for each in given for name in _given(each)}


def _given(given: Limited) -> list[str]:
    return [name for name in _FILES if getattr(given, name) is not None]
