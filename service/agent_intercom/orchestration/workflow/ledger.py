# SPDX-License-Identifier: Apache-2.0
"""The shared ledger of the rules: state, and the effects of the input at hand."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from agent_intercom.orchestration import encode, rows
from agent_intercom.orchestration.contract import MAX_FRAME, RoleState, Workflow
from agent_intercom.orchestration.effects import Bound, Effect, Finish, Note, Save, Tell, Write
from agent_intercom.orchestration.workflow.state import State
from agent_intercom.wire.clock import Now
from agent_intercom.wire.framing import pack


def stamp(now: Now) -> str:
    """The time as in section 0.3: ISO 8601, UTC, microseconds."""
    return datetime.fromtimestamp(now.wall / 1000, UTC).isoformat(timespec="microseconds")


def event_note(row: rows.Event) -> Note:
    """The line of the journal for an event."""
    fields = {"sequence": row.sequence, "run_event": row.event, "role": row.role, "round": row.round}
    return Note("RUN_EVENT", {**fields, "status": row.status})


class Ledger:
    """State and outgoing effects; what all rule modules share.

    Rows are changed in place and saved; the commit that follows writes what they are by then.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.effects: list[Effect] = []
        self.now = Now(0, 0)

    @property
    def time(self) -> str:
        """The time of the input at hand, for rows."""
        return stamp(self.now)

    def fresh_id(self) -> str:
        """128 bits that nobody can guess and a replay makes again."""
        self.state.fresh_ids += 1
        return blake2b(f"{self.state.seed}-{self.state.fresh_ids}".encode(), digest_size=16).hexdigest()

    # Rows.

    def save(self, row: rows.Change) -> None:
        """Have the row committed."""
        self.effects.append(Save(row))

    def meta(self, key: str, value: str | None) -> None:
        """Set an entry of `meta`; None takes it away."""
        self.save(rows.Meta(key=key, value=value))
        self.save(rows.Meta(key="updated_at", value=self.time))

    def role(self, name: str) -> rows.Role:
        """The row of a role that is about to be changed: it is saved."""
        role = self.state.roles[name]
        role.updated_at = self.time
        self.save(role)
        return role

    def assignment(self, assignment: rows.Assignment, state: str) -> None:
        """Put an assignment into a state."""
        assignment.state = state
        assignment.updated_at = self.time
        self.save(assignment)

    def event(
        self,
        name: str,
        status: str,
        *,
        role: str | None = None,
        round: int | None = None,
        assignment: str | None = None,
        delivery: str | None = None,
    ) -> None:
        """Record that something happened, in the database and in the journal."""
        self.state.sequence += 1
        row = rows.Event(
            sequence=self.state.sequence,
            timestamp=self.time,
            event=name,
            role=role,
            round=round,
            assignment_id=assignment,
            delivery_id=delivery,
            status=status,
        )
        self.save(row)
        self.effects.append(event_note(row))

    # The workflow's state.

    def set_workflow(self, state: str) -> None:
        """Enter a state of the workflow."""
        self.state.workflow = state
        self.meta("workflow_state", state)
        self.effects.append(Tell())

    def set_round(self, number: int) -> None:
        """Begin a round."""
        self.state.round = number
        self.meta("round", str(number))
        self.effects.append(Tell())

    def become_uncertain(self, event: str = "workflow_uncertain", **facts: Any) -> None:
        """Fail closed: only an operator leads out of it. `event` is recorded, and the observers are told."""
        already = self.state.workflow == Workflow.UNCERTAIN
        if not already:
            self.set_workflow(Workflow.UNCERTAIN)
        if event != "workflow_uncertain" or not already:
            self.event(event, Workflow.UNCERTAIN, round=self.state.round, **facts)
        self.show_workflow()

    def handover_uncertain(self, name: str, delivery: str | None = None) -> None:
        """A replacement cannot be proven to have taken over (section 4.8)."""
        role = self.role(name)
        role.state = RoleState.UNCERTAIN
        self.become_uncertain(
            "worker_handover_uncertain", role=name, assignment=role.active_assignment_id, delivery=delivery
        )

    # Frames.

    def write(self, number: int, payload: bytes) -> None:
        """Queue a frame for a connection that still exists."""
        if number in self.state.links:
            self.effects.append(Write(number, pack(payload, MAX_FRAME)))

    def write_role(self, name: str, payload: bytes) -> None:
        """Queue a frame for the role's worker, if it is connected."""
        number = self.state.workers.get(name)
        if number is not None:
            self.write(number, payload)

    def finish(self, number: int) -> None:
        """Let the connection go once it was sent what is queued for it."""
        if self.state.links.pop(number, None) is not None:
            self.effects.append(Finish(number))

    def bind(self, number: int, *, watches: bool) -> None:
        """The connection proved who it is."""
        self.effects.append(Bound(number, watches))
        self.effects.append(Tell())

    # Observers.

    def show(self, payload: bytes) -> None:
        """Send a frame to every observer."""
        for link in self.state.links.values():
            if link.kind == "observer":
                self.write(link.number, payload)

    def show_workflow(self) -> None:
        """Tell the observers the state of the workflow."""
        state = self.state
        self.show(encode.workflow(state.settings.session, state.workflow, state.round))

    def shown_role(self, role: rows.Role) -> str:
        """A role's state as this run's observers know it (section 0.2, point 3)."""
        return role.state if self.state.settings.report_usage else encode.old_parent_state(role.state)

    def show_role(self, role: rows.Role) -> None:
        """Tell the observers a role's state."""
        self.show(encode.lifecycle(self.state.settings.session, role.role, self.shown_role(role)))
