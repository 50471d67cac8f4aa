# SPDX-License-Identifier: Apache-2.0
"""Asks that an earlier broker of the Node line left in `broker-asks.json`, taken over once (contract section 6).

Two steps, so that nothing is lost between them: `load` reads, the caller stores, `done` renames the file out of the
way.
"""

from __future__ import annotations

import contextlib
import math
import os
from os import path
from typing import Any, Final

from agent_intercom.host import privatefiles
from agent_intercom.intercom.contract import DEFAULT_LIMITS
from agent_intercom.intercom.edge import AskEdge
from agent_intercom.wire.codec import decode, trimmed, utf16_length
from agent_intercom.wire.errors import WireError

FILE: Final = "broker-asks.json"
MAX_BYTES: Final = 64 * 1_048_576
"""More than every session's every ask with ids of the greatest length; what is longer is not an asks file."""

_STATES: Final = ("blocking", "deferred")
_LATEST: Final = 2**53 - 1


def load(intercom_dir: str, wall: int) -> list[AskEdge] | None:
    """The asks in the file; None where there is none that can be read. `wall` is the time in Unix ms.

    Invalid and expired entries are left out, and every edge is deferred. A file that is not an asks file is renamed to
    `broker-asks.json.corrupt-<ms>`; one that cannot be read stays for the next start. Never raises.
    """
    name = path.join(intercom_dir, FILE)
    try:
        entries = _entries(privatefiles.read(name, MAX_BYTES))
    except WireError:
        with contextlib.suppress(OSError):
            os.rename(name, f"{name}.corrupt-{wall}")
        return []
    except OSError:
        return None
    edges: dict[tuple[str, str], AskEdge] = {}
    for entry in entries:
        edge = _edge(entry, wall)
        if edge is not None:
            edges[edge.sender, edge.message_id] = edge
    return list(edges.values())


def done(intercom_dir: str, wall: int) -> bool:
    """Rename the file to `broker-asks.json.taken-over-<ms>`, now that its edges are stored; whether that worked.

    Where it does not, the next start reads the file again, and the edges that were answered meanwhile come back.
    """
    name = path.join(intercom_dir, FILE)
    try:
        os.rename(name, f"{name}.taken-over-{wall}")
        privatefiles.sync_directory(intercom_dir)
    except OSError:
        return False
    return True


def _entries(content: bytes) -> list[Any]:
    """The entries of an asks file. Raises WireError where `content` is not one."""
    root = decode(content)
    entries = root.get("edges") if isinstance(root, dict) else None
    # JSON's `true` is Python's 1.
    if not isinstance(entries, list) or isinstance(root.get("version"), bool) or root.get("version") != 1:
        raise WireError("JSON_INVALID", "not an asks file")
    return entries


def _edge(entry: Any, wall: int) -> AskEdge | None:
    if not isinstance(entry, dict) or entry.get("state") not in _STATES:
        return None
    message_id, sender, target = entry.get("messageId"), entry.get("from"), entry.get("to")
    created_at, expires_at = _time(entry.get("createdAt")), _time(entry.get("expiresAt"))
    if not isinstance(message_id, str) or not 0 < utf16_length(message_id) <= DEFAULT_LIMITS.message_id:
        return None
    if not isinstance(sender, str) or not trimmed(sender) or not isinstance(target, str) or not trimmed(target):
        return None
    if created_at is None or expires_at is None or expires_at <= wall:
        return None
    return AskEdge(sender, message_id, target, created_at, expires_at, False)


def _time(value: Any) -> int | None:
    """A finite JSON number as whole milliseconds, within what a double holds exactly."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(max(-_LATEST, min(value, _LATEST)))
