# SPDX-License-Identifier: Apache-2.0
"""What a run was started with beside its budget: how often it may repair, and how its workers keep their context.

Both are entries of `meta` (orchestration spec, sections 8.2 and 18). Without them nothing is limited, and every worker
gets the context of its own assignments only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from agent_intercom.orchestration.contract import ROLES
from agent_intercom.orchestration.errors import Refusal

CONTINUATION: Final = "continuation_policy"
WORKER_CONTEXT: Final = "worker_context_policy"
"""The entries of `meta`."""

PENDING_REPAIR: Final = "pending_repair_round"
"""The entry of `meta` that is there while a round waits for an operator's `continue`: its number."""

MAX_REPAIR_ROUNDS: Final = 1_000_000
RETAIN: Final = "retain"
PRUNE: Final = "prune"
CONTEXT_MODES: Final = (RETAIN, PRUNE)

_VERSION: Final = 1


def check_repair_rounds(limit: int | None) -> None:
    """Whether a run may be started with this limit. Raises Refusal `repair_rounds_invalid`."""
    if limit is not None and not 0 <= limit <= MAX_REPAIR_ROUNDS:
        text = f"the limit of repair rounds is not between 0 and {MAX_REPAIR_ROUNDS}"
        raise Refusal("repair_rounds_invalid", text, "max_repair_rounds")


def check_worker_context(overrides: Mapping[str, str], roles: Collection[str]) -> None:
    """Whether a run of `roles` may be started with these modes by role. Raises Refusal `worker_context_invalid`."""
    for role, mode in overrides.items():
        if role not in roles:
            raise Refusal(
                "worker_context_invalid", "a context mode for a role that is not in the run", "worker_context"
            )
        if mode not in CONTEXT_MODES:
            raise Refusal("worker_context_invalid", "a context mode is neither retain nor prune", "worker_context")


def continuation(limit: int | None) -> str:
    """The entry for at most `limit` repair rounds; None: as many as the reviewer asks for."""
    return _json({"version": _VERSION, "max_repair_rounds": limit})


def read_continuation(text: str) -> int | None:
    """The limit in an entry. Raises ValueError for one that is none."""
    limit = _members(text, "max_repair_rounds")
    if limit is None or (type(limit) is int and limit >= 0):
        return limit
    raise ValueError("no limit of rounds")


def worker_context(overrides: Mapping[str, str]) -> str:
    """The entry for roles whose mode was chosen."""
    return _json({"version": _VERSION, "overrides": dict(sorted(overrides.items()))})


def read_worker_context(text: str) -> dict[str, str]:
    """The modes in an entry, by role. Raises ValueError for one that is none."""
    overrides = _members(text, "overrides")
    if isinstance(overrides, dict) and all(role in ROLES and mode in CONTEXT_MODES for role, mode in overrides.items()):
        return overrides
    raise ValueError("no context modes")


def _members(text: str, key: str) -> Any:
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError("not a policy") from error
    version = record.get("version") if isinstance(record, dict) else None
    if type(version) is not int or version != _VERSION or record.keys() != {"version", key}:
        raise ValueError("not a policy of this version")
    return record[key]


def _json(record: Mapping[str, object]) -> str:
    return json.dumps(record, separators=(",", ":"))
