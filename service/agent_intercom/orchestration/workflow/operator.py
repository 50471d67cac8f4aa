# SPDX-License-Identifier: Apache-2.0
"""What an operator commands (sections 3.2, 4.5 and 4.8). One command a connection."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from agent_intercom.orchestration import encode, frames, rows
from agent_intercom.orchestration.contract import (
    IMPLEMENTER,
    MAX_COMMANDS,
    MAX_MESSAGE_UNITS,
    AssignmentState,
    Code,
    CommandStatus,
    Kind,
    RoleState,
    Workflow,
)
from agent_intercom.orchestration.effects import Drop
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.ledger import Ledger
from agent_intercom.orchestration.workflow.routing import Routing
from agent_intercom.orchestration.workflow.state import Link
from agent_intercom.orchestration.workflow.workers import Workers
from agent_intercom.wire.codec import utf16_length

Decided: TypeAlias = tuple[str, Callable[[frames.Control], None]]
"""The status of a command, and what is done after the answer if it is accepted."""

_DELIVER_AS: Final = {"steer": "steer", "follow-up": "followUp"}


class Operator:
    """Decides on commands. What is decided is remembered by the command's id, so that a retry changes nothing."""

    def __init__(self, ledger: Ledger, routing: Routing, workers: Workers) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._routing = routing
        self._workers = workers
        self._actions: dict[str, Callable[[frames.Control], Decided]] = {
            "send": self._send,
            "abort": self._abort,
            "restart": self._restart,
            "restart_failed": self._restart_failed,
            "redeliver": self._redeliver,
            "continue": self._continue,
        }

    def command(self, link: Link, frame: frames.Control) -> None:
        """Decide, record, answer, then do what must follow the answer. Raises Refusal and records nothing."""
        state = self._state
        if not hmac.compare_digest(state.settings.control_token, frame.token):
            raise Refusal(Code.UNAUTHORIZED, "Control authentication failed", "token", frame.id)
        if frame.role not in state.roles:
            raise Refusal(Code.INVALID_PROTOCOL, "Control message is invalid", "role", frame.id)
        known = state.commands.get(frame.id)
        if known is not None:
            self._again(known, frame)
            self._answer(link, frame.id, known.status, duplicate=True)
            return
        settling = state.roles[frame.role].state in (RoleState.RESTARTING, RoleState.RECOVERING)
        # What leads out of a doubt or a pause must stay possible.
        doubt = state.workflow == Workflow.UNCERTAIN or self._doubted(frame.role)
        leads_out = (
            (frame.action == "redeliver" and doubt)
            or (frame.action == "restart_failed" and settling)
            or (frame.action == "continue" and self._may_continue())
        )
        if len(state.commands) >= MAX_COMMANDS and not leads_out:
            raise Refusal(Code.REJECTED, "Broker command registry is full", "id", frame.id)
        if frame.message is not None and utf16_length(frame.message.strip()) > MAX_MESSAGE_UNITS:
            raise Refusal(Code.CONFLICT, "Message exceeds what a worker takes", "message", frame.id)
        status, following = self._actions[frame.action](frame)
        self._record(frame, status)
        self._answer(link, frame.id, status, duplicate=False)
        if status == CommandStatus.ACCEPTED:
            following(frame)

    def _again(self, known: rows.Command, frame: frames.Control) -> None:
        same = (known.action, known.role, known.delivery) == (frame.action, frame.role, frame.delivery)
        digest = self._state.digests.get(frame.id)
        if not same or (digest is not None and digest != _digest(frame.message)):
            raise Refusal(Code.CONFLICT, "Control command ID conflicts", "id", frame.id)

    def _record(self, frame: frames.Control, status: str) -> None:
        ledger, state = self._ledger, self._state
        row = rows.Command(
            id=frame.id,
            action=frame.action,
            role=frame.role,
            delivery=frame.delivery,
            status=status,
            received_at=ledger.time,
            updated_at=ledger.time,
        )
        state.commands[frame.id] = row
        state.digests[frame.id] = _digest(frame.message)
        ledger.save(row)
        ledger.event("control_command", status, role=frame.role, round=state.round, delivery=frame.id)

    def _answer(self, link: Link, request: str, status: str, *, duplicate: bool) -> None:
        self._ledger.write(link.number, encode.control_response(request, status, duplicate))
        self._ledger.finish(link.number)

    def _nothing(self, frame: frames.Control) -> None:
        return

    # send

    def _send(self, frame: frames.Control) -> Decided:
        state = self._state
        row = state.roles[frame.role]
        if frame.role not in state.workers:
            return CommandStatus.UNCERTAIN, self._nothing
        if state.workflow == Workflow.NEEDS_ATTENTION:
            current = state.assignments.get(row.active_assignment_id or "")
            owner = current is not None and current.state == AssignmentState.ACCEPTED
            if row.state != RoleState.WAITING or not owner:
                return CommandStatus.CONFLICT, self._nothing
        if state.workflow == Workflow.READY and frame.role == IMPLEMENTER:
            self._reopen(frame)
            return CommandStatus.ACCEPTED, self._reopened
        self._message(frame, trigger=True)
        return CommandStatus.ACCEPTED, self._nothing

    def _reopen(self, frame: frames.Control) -> None:
        """A message to the implementer of a run that is ready begins another round (section 4.5)."""
        ledger, state = self._ledger, self._state
        if self._routing.retains(IMPLEMENTER):
            self._routing.send_run_state(IMPLEMENTER)
        elif IMPLEMENTER in state.deferred or state.latest:
            self._routing.deliver_run_state([IMPLEMENTER])
        ledger.set_round(state.round + 1)
        self._message(frame, trigger=False)
        ledger.set_workflow(Workflow.ACTIVE)
        ledger.event("workflow_reopened", Workflow.ACTIVE, role=IMPLEMENTER, round=state.round, delivery=frame.id)

    def _reopened(self, frame: frames.Control) -> None:
        self._ledger.show_workflow()
        self._routing.assign(IMPLEMENTER, Kind.IMPLEMENTATION)

    def _message(self, frame: frames.Control, *, trigger: bool) -> None:
        ledger, state = self._ledger, self._state
        delivery = ledger.fresh_id()
        ledger.event("context_delivered", "delivered", role=frame.role, round=state.round, delivery=delivery)
        deliver_as = _DELIVER_AS.get(frame.delivery or "")
        text = (frame.message or "").strip()
        payload = encode.context(delivery, state.round, "operator_message", text, trigger, deliver_as)
        ledger.write_role(frame.role, payload)

    # abort

    def _abort(self, frame: frames.Control) -> Decided:
        if frame.role not in self._state.workers:
            return CommandStatus.UNCERTAIN, self._nothing
        self._ledger.write_role(frame.role, encode.abort(frame.id))
        return CommandStatus.ACCEPTED, self._nothing

    # restart

    def _restart(self, frame: frames.Control) -> Decided:
        ledger, state = self._ledger, self._state
        if frame.role not in state.workers or frame.role not in state.baselines:
            return CommandStatus.UNCERTAIN, self._nothing
        row = ledger.role(frame.role)
        row.generation += 1
        row.state = RoleState.RESTARTING
        # Whatever becomes of the handover: the replacement has no baseline yet.
        self._routing.baseline_missing(frame.role)
        ledger.event("worker_restart_requested", row.state, role=frame.role, round=state.round, delivery=frame.id)
        return CommandStatus.ACCEPTED, self._restarted

    def _restarted(self, frame: frames.Control) -> None:
        """The old worker must not go on: it is refused from here on, because its generation is stale."""
        ledger, state = self._ledger, self._state
        number = state.workers.get(frame.role)
        link = state.links.pop(number, None) if number is not None else None
        if link is not None:
            ledger.effects.append(Drop(link.number))
            self._workers.gone(link)

    def _restart_failed(self, frame: frames.Control) -> Decided:
        row = self._state.roles[frame.role]
        if row.state in (RoleState.RESTARTING, RoleState.RECOVERING):
            self._ledger.handover_uncertain(frame.role, frame.id)
        elif row.state != RoleState.UNCERTAIN:
            return CommandStatus.CONFLICT, self._nothing
        return CommandStatus.ACCEPTED, self._nothing

    # continue

    def _continue(self, frame: frames.Control) -> Decided:
        """One repair round more than the run's limit allows (section 18)."""
        if not self._may_continue():
            return CommandStatus.CONFLICT, self._nothing
        return CommandStatus.ACCEPTED, self._continued

    def _may_continue(self) -> bool:
        state = self._state
        settled = (RoleState.IDLE, RoleState.DISCONNECTED)
        return (
            state.workflow == Workflow.NEEDS_ATTENTION
            and state.pending_repair_round is not None
            and all(row.active_assignment_id is None and row.state in settled for row in state.roles.values())
        )

    def _continued(self, frame: frames.Control) -> None:
        ledger, state = self._ledger, self._state
        facts: dict[str, Any] = {"role": IMPLEMENTER, "round": state.round, "delivery": frame.id}
        self._routing.allow_repair()
        ledger.set_workflow(Workflow.ACTIVE)
        ledger.event("continuation_approved", Workflow.ACTIVE, **facts)
        ledger.show_workflow()
        self._routing.assign(IMPLEMENTER, Kind.IMPLEMENTATION)
        if state.workflow == Workflow.UNCERTAIN:
            ledger.event("continuation_uncertain", Workflow.UNCERTAIN, **facts)

    # redeliver

    def _redeliver(self, frame: frames.Control) -> Decided:
        """The way out of `uncertain`: the operator has looked, and says that the role is to have its work again."""
        state = self._state
        if frame.role not in state.workers:
            return CommandStatus.UNCERTAIN, self._nothing
        if state.workflow != Workflow.UNCERTAIN and not self._doubted(frame.role):
            return CommandStatus.CONFLICT, self._nothing
        if not self._doubted(frame.role) and self._routing.open_assignment(frame.role) and self._doubts():
            # It works on what it has; the doubt is another's.
            return CommandStatus.CONFLICT, self._nothing
        if state.startup is not None and state.workspace_fault:
            # All that it leads to is the start, which hands the capsule on.
            return CommandStatus.CONFLICT, self._nothing
        return CommandStatus.ACCEPTED, self._redelivered

    def _redelivered(self, frame: frames.Control) -> None:
        state = self._state
        if self._doubted(frame.role):
            self._workers.redeliver(frame.role)
        if state.workflow == Workflow.UNCERTAIN and not self._doubts():
            self._resume(frame)
        self._routing.pay(frame.role)

    def _resume(self, frame: frames.Control) -> None:
        """Nothing is in doubt any more: go on where the run was."""
        ledger, state = self._ledger, self._state
        if state.startup is not None:
            to = Workflow.CONNECTING
        elif self._approved():
            to = Workflow.READY
        else:
            paused = state.pending_repair_round is not None
            to = Workflow.NEEDS_ATTENTION if paused or self._waiting() else Workflow.ACTIVE
        ledger.set_workflow(to)
        ledger.event("workflow_resumed", to, role=frame.role, round=state.round, delivery=frame.id)
        if to != Workflow.CONNECTING:
            ledger.show_workflow()
        elif len(state.workers) == len(state.roles):
            self._routing.start()
        if to in (Workflow.ACTIVE, Workflow.NEEDS_ATTENTION):
            self._routing.go_on()

    def _doubted(self, role: str) -> bool:
        """Whether it is uncertain what a role has, or does."""
        current = self._routing.open_assignment(role)
        doubtful = current is not None and current.state == AssignmentState.UNCERTAIN
        return doubtful or self._state.roles[role].state == RoleState.UNCERTAIN

    def _doubts(self) -> bool:
        """Whether any role is in doubt."""
        return any(map(self._doubted, self._state.roles))

    def _waiting(self) -> bool:
        """Whether a worker has stopped without a report."""
        rows = self._state.roles.values()
        return any(row.state == RoleState.WAITING and row.active_assignment_id is not None for row in rows)

    def _approved(self) -> bool:
        state = self._state
        return any(row.verdict == "approved" and row.round == state.round for row in state.reports.values())


def _digest(message: str | None) -> bytes:
    """Enough to tell another message with the same command id; memory only."""
    return blake2b((message or "").strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
