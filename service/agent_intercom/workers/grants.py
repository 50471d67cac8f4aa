# SPDX-License-Identifier: Apache-2.0
"""What a worker may start below itself (managed-workers spec, section 2.12). Pure rules on grants alone."""

from __future__ import annotations

from msgspec.structs import replace

from agent_intercom.workers.contract import MAX_TIME, Code, Limits
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Grant


def check(grant: Grant, limits: Limits) -> None:
    """Refuse a grant that says nothing sensible. Raises WorkerError, `invalid_request`."""
    if not 1 <= grant.children <= grant.descendants:
        raise WorkerError(Code.INVALID, "it is at least 1 and at most what descendants says", "grant.children")
    if grant.descendants > limits.granted:
        raise WorkerError(Code.INVALID, f"it is at most {limits.granted}", "grant.descendants")
    if not 1 <= grant.depth <= limits.depth:
        raise WorkerError(Code.INVALID, f"it is from 1 to {limits.depth}", "grant.depth")
    if grant.expires_at is not None and not 0 <= grant.expires_at <= MAX_TIME:
        raise WorkerError(Code.INVALID, "it is no time in milliseconds since 1970", "grant.expires_at")


def narrowed(grant: Grant, holder: Grant) -> Grant:
    """The grant of a child of who holds `holder`, never wider than that; without an end it ends with it.

    Raises WorkerError, `grant_exceeded`.
    """
    if not holder.subdelegate:
        raise WorkerError(Code.GRANT, "your grant cannot be passed on", "grant")
    if grant.children > holder.children:
        raise WorkerError(Code.GRANT, "it is more than your own grant has", "grant.children")
    if grant.descendants > holder.descendants:
        raise WorkerError(Code.GRANT, "it is more than your own grant has", "grant.descendants")
    if grant.depth > holder.depth - 1:
        raise WorkerError(Code.GRANT, "it reaches further down than your own grant", "grant.depth")
    if holder.expires_at is None:
        return grant
    if grant.expires_at is None:
        return replace(grant, expires_at=holder.expires_at)
    if grant.expires_at > holder.expires_at:
        raise WorkerError(Code.GRANT, "it is later than the end of your own grant", "grant.expires_at")
    return grant


def held(grant: Grant | None, now: int) -> Grant:
    """The grant, where it is one that holds. Raises WorkerError, `grant_exceeded`."""
    if grant is None:
        raise WorkerError(Code.GRANT, "you have no grant to start workers", "grant")
    if grant.expires_at is not None and grant.expires_at <= now:
        raise WorkerError(Code.GRANT, "your grant has expired", "grant")
    return grant
