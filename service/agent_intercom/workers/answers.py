# SPDX-License-Identifier: Apache-2.0
"""Workers as the worker service tells of them: JSON, without digests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from agent_intercom.workers.records import Worker
from agent_intercom.workers.terms import Caller

Method = Callable[[Caller, Any], Awaitable[dict[str, Any]]]
"""Carries out an action, for somebody and with its parameters; the JSON of its result."""

Known = dict[str, tuple[type[msgspec.Struct], Method, bool]]
"""Actions by their names: each one's parameters and method, and whether it changes anything."""

_UNTOLD: Final = ("directory_digest", "task_digest", "scoped")


def told(worker: Worker) -> dict[str, Any]:
    """One worker. A digest of a path that somebody can guess tells that path. Who sees it knows its scope id."""
    record: dict[str, Any] = msgspec.to_builtins(worker)
    for name in _UNTOLD:
        del record[name]
    return record
