# SPDX-License-Identifier: Apache-2.0
"""Who has to do what before a run goes on, and how a person does their part. Pure.

`shown` is always a broker snapshot (orchestration spec, section 11.4), `overview` what it was made of.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.orchestration.contract import IMPLEMENTER, AssignmentState, RoleState, Workflow
from agent_intercom.orchestration.reader import Overview

CONNECTION: Final = "connection"
ACCEPTANCE: Final = "acceptance"
REPORT: Final = "report"
RESTART: Final = "restart"
MESSAGE: Final = "message"
CONTINUATION: Final = "continuation"
REDELIVERY: Final = "redelivery"

_PHRASES: Final = {
    CONNECTION: "{role} is not connected",
    ACCEPTANCE: "{role} has not taken its work yet",
    REPORT: "{role} works",
    RESTART: "{role} is being replaced",
    MESSAGE: "{role} stopped without a report, and waits for a message",
    CONTINUATION: "the limit of repair rounds is reached, and a person decides",
    REDELIVERY: "what {role} got or did is uncertain, and a person decides",
}
_SHORT: Final = {
    CONNECTION: "{role} is away",
    ACCEPTANCE: "{role} gets work",
    REPORT: "{role} works",
    RESTART: "{role} is replaced",
    MESSAGE: "{role} waits for a message",
    CONTINUATION: "waits for continue",
    REDELIVERY: "{role} is uncertain",
}
_BY_PERSONS: Final = (CONTINUATION, REDELIVERY, MESSAGE)


class Awaited(NamedTuple):
    """Something that has to come: `what` is a key of `_PHRASES`, from `role`, None where no role is known."""

    role: str | None
    what: str
    since: str | None

    @property
    def phrase(self) -> str:
        """As a sentence without its end."""
        return _PHRASES[self.what].format(role=self.role or "a role")

    @property
    def short(self) -> str:
        """As a cell of a table."""
        return _SHORT[self.what].format(role=self.role or "a role")

    @property
    def by_person(self) -> bool:
        """Whether nothing moves before a person does something."""
        return self.what in _BY_PERSONS


def awaited(shown: Mapping[str, Any], overview: Overview) -> list[Awaited]:
    """What a live run waits for, what persons have to do first; empty where it is ready."""
    workflow = shown["workflow"]
    state = workflow["state"]
    found = []
    if (workflow.get("continuation") or {}).get("pending_repair_round") is not None:
        found.append(Awaited(IMPLEMENTER, CONTINUATION, workflow["updated_at"]))
    if state != Workflow.READY:
        rows = {role.role: role for role in overview.roles}
        for row in shown["roles"]:
            what = _of(row, state)
            if what is not None:
                active = overview.active.get(row["role"])
                working = what in {REPORT, ACCEPTANCE} and active is not None
                since = active.created_at if working and active else rows[row["role"]].updated_at
                found.append(Awaited(row["role"], what, since))
    if state == Workflow.UNCERTAIN and not any(each.what == REDELIVERY for each in found):
        found.append(Awaited(None, REDELIVERY, workflow["updated_at"]))
    return sorted(found, key=lambda each: not each.by_person)


def _of(row: Mapping[str, Any], state: str) -> str | None:
    """What has to come from a role, if anything."""
    assignment = row["assignment"]
    open_work = assignment is not None and assignment["state"] != AssignmentState.COMPLETED
    if row["state"] == RoleState.UNCERTAIN or (open_work and assignment["state"] == AssignmentState.UNCERTAIN):
        return REDELIVERY
    if row["state"] in {RoleState.RESTARTING, RoleState.RECOVERING}:
        return RESTART
    if not row["connected"]:
        return CONNECTION if open_work or state in {Workflow.STARTING, Workflow.CONNECTING} else None
    if row["state"] == RoleState.WAITING:
        return MESSAGE
    if not open_work:
        return None
    return ACCEPTANCE if assignment["state"] == AssignmentState.DELIVERING else REPORT


def steps(
    found: Iterable[Awaited], session: str, program: str, *, ready: bool, down: Container[str], new_id: str
) -> Iterator[JsonObject]:
    """What a person can do next: `why`, and the `command` line.

    `down` are the roles whose worker's unit has ended; `new_id` is an id that no command has had.
    """
    for each in found:
        role = each.role or "ROLE"
        if each.what == MESSAGE:
            yield _step(f"to answer {role}", f"{program} send {session} --role {role} --message TEXT")
        elif each.what == REDELIVERY:
            yield _step("to hand it over again, once seen", f"{program} redeliver {session} --role {role} --yes")
        elif each.what == CONTINUATION:
            yield _step("to admit one more", f"{program} continue {session} --yes --command-id {new_id}")
        elif each.what in {CONNECTION, RESTART} and role in down:
            yield _step(f"to start {role} again", f"{program} restart {session} --role {role} --yes")
    if ready:
        yield _step("to have something changed", f"{program} send {session} --role {IMPLEMENTER} --message TEXT")
        yield _step("to end the run", f"{program} stop {session} --yes")


def _step(why: str, command: str) -> JsonObject:
    return {"why": why, "command": command}


def ago(timestamp: str | None, now_ms: int) -> str:
    """How long ago something was, short; empty where the time cannot be read."""
    try:
        then = datetime.fromisoformat(timestamp or "")
    except ValueError:
        return ""
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0, int(now_ms / 1000 - then.timestamp()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
