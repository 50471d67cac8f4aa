# SPDX-License-Identifier: Apache-2.0
"""Workers as the worker service tells of them: JSON, without digests."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agent_intercom.workers.records import Worker

_UNTOLD: Final = ("directory_digest", "task_digest", "scoped")


def told(worker: Worker) -> dict[str, Any]:
    """One worker. A digest of a path that somebody can guess tells that path. Who sees it knows its scope id."""
    record: dict[str, Any] = msgspec.to_builtins(worker)
    for name in _UNTOLD:
        del record[name]
    return record
