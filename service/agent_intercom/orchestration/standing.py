# SPDX-License-Identifier: Apache-2.0
"""Who has to do what before a run goes on: one answer for everybody who shows a run. Pure.

`shown` is always a broker snapshot (orchestration spec, section 11.4) of a run that lives, whoever hosts it; of one
that has ended nothing is awaited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from agent_intercom.orchestration.contract import IMPLEMENTER, AssignmentState, RoleState, Workflow

Snapshot: TypeAlias = Mapping[str, Any]

BROKER: Final = "broker"
CONNECTION: Final = "connection"
ACCEPTANCE: Final = "acceptance"
REPORT: Final = "report"
RESTART: Final = "restart"
PAUSED: Final = "paused"
MESSAGE: Final = "message"
CONTINUATION: Final = "continuation"
REDELIVERY: Final = "redelivery"
DECISION: Final = "decision"

_PHRASES: Final = {
    MESSAGE: "waiting for a person: {roles} stopped without a report",
    PAUSED: "waiting for a person: {roles} paused",
    REDELIVERY: "waiting for a person: what {roles} did is uncertain",
    CONTINUATION: "waiting for a person: continue, or stop; the limit of repair rounds is reached",
    DECISION: "waiting for a person",
    REPORT: "{roles} at work",
    ACCEPTANCE: "waiting for {roles} to take the work",
    RESTART: "waiting for {roles} to be replaced",
    CONNECTION: "waiting for {roles} to connect",
    BROKER: "waiting for the broker",
}
"""By what has to come, in the order in which it is told: what a person has to do, who works, who is missing."""

_BY_PERSONS: Final = frozenset({MESSAGE, PAUSED, REDELIVERY, CONTINUATION, DECISION})
_BEGINNING: Final = frozenset({Workflow.STARTING, Workflow.CONNECTING})
_SETTLED: Final = frozenset({RoleState.IDLE, RoleState.DISCONNECTED})


class Awaited(NamedTuple):
    """Something that has to come: `what` is a key of `_PHRASES`, from `role`, None where no role is known.

    `since` is a timestamp, None where it is not known.
    """

    role: str | None
    what: str
    since: str | None

    @property
    def phrase(self) -> str:
        """As a phrase."""
        return _phrase(self.what, [self])

    @property
    def by_person(self) -> bool:
        """Whether nothing moves before a person does something."""
        return self.what in _BY_PERSONS


def awaited(shown: Snapshot, begun: Mapping[str, str] | None = None, paused: Collection[str] = ()) -> list[Awaited]:
    """What a run waits for, what persons have to do first; empty where it is ready.

    `begun` has when the active assignment of a role was made, as far as somebody knows; `paused` are the roles whose
    worker stands still until a person resumes it.
    """
    workflow = shown["workflow"]
    state, changed = workflow["state"], workflow.get("updated_at")
    if state == Workflow.READY:
        return []
    if may_continue(shown):
        return [Awaited(IMPLEMENTER, CONTINUATION, changed)]
    rows = shown["roles"]
    idle = all(row["assignment"] is None for row in rows)
    found = []
    for row in rows:
        what = _of(row, expected=state in _BEGINNING or (idle and state != Workflow.NEEDS_ATTENTION))
        if what is not None:
            role = row["role"]
            if role in paused and what != REDELIVERY:
                found.append(Awaited(role, PAUSED, None))
                continue
            since = (begun or {}).get(role) if what in {REPORT, ACCEPTANCE} else None
            found.append(Awaited(role, what, since or row["updated_at"]))
    if state == Workflow.UNCERTAIN and not any(each.what == REDELIVERY for each in found):
        found.append(Awaited(None, REDELIVERY, changed))
    elif state == Workflow.NEEDS_ATTENTION and not found:
        found.append(Awaited(None, DECISION, changed))
    elif state in _BEGINNING and not found:
        found.append(Awaited(None, BROKER, changed))
    order = list(_PHRASES)
    return sorted(found, key=lambda each: order.index(each.what))


def told(found: Iterable[Awaited]) -> str:
    """All of that as one line; who is waited for in the same way is named together."""
    by_what: dict[str, list[Awaited]] = {}
    for each in found:
        by_what.setdefault(each.what, []).append(each)
    return "; ".join(_phrase(what, same) for what, same in by_what.items())


def pending_round(shown: Snapshot) -> int | None:
    """The round of repair that waits until a person admits it."""
    pending: int | None = (shown["workflow"].get("continuation") or {}).get("pending_repair_round")
    return pending


def unsettled(shown: Snapshot) -> list[str]:
    """The roles that have to come to rest before a round of repair can be admitted (section 18)."""
    return [row["role"] for row in shown["roles"] if row["assignment"] is not None or row["state"] not in _SETTLED]


def may_continue(shown: Snapshot) -> bool:
    """Whether the broker would admit the round of repair that waits."""
    waits = pending_round(shown) is not None and shown["workflow"]["state"] == Workflow.NEEDS_ATTENTION
    return waits and not unsettled(shown)


def away(shown: Snapshot) -> list[str]:
    """The roles whose worker is not connected."""
    return [row["role"] for row in shown["roles"] if not row["connected"]]


def doubted(row: Snapshot) -> bool:
    """Whether it is uncertain what a role got or did."""
    assignment = row["assignment"]
    lost = assignment is not None and assignment["state"] == AssignmentState.UNCERTAIN
    return bool(lost or row["state"] == RoleState.UNCERTAIN)


def _of(row: Snapshot, *, expected: bool) -> str | None:
    """What has to come from a role, if anything. `expected`: it has to be there, though it has no work."""
    assignment = row["assignment"]
    open_work = assignment is not None and assignment["state"] != AssignmentState.COMPLETED
    if doubted(row):
        return REDELIVERY
    if row["state"] in {RoleState.RESTARTING, RoleState.RECOVERING}:
        return RESTART
    if not row["connected"]:
        return CONNECTION if open_work or expected else None
    if row["state"] == RoleState.WAITING:
        return MESSAGE
    if not open_work:
        return None
    return ACCEPTANCE if assignment["state"] == AssignmentState.DELIVERING else REPORT


def _phrase(what: str, found: Iterable[Awaited]) -> str:
    return _PHRASES[what].format(roles=", ".join(each.role or "a role" for each in found))
