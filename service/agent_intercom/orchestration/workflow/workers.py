# SPDX-License-Identifier: Apache-2.0
"""What workers say (section 2), and what their coming and going means (sections 4.6 to 4.8)."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from agent_intercom.orchestration import budget, encode, frames, rows, usage
from agent_intercom.orchestration.contract import (
    AssignmentState,
    Code,
    RoleState,
    Workflow,
)
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.ledger import Ledger
from agent_intercom.orchestration.workflow.routing import Routing
from agent_intercom.orchestration.workflow.state import Link, Remembered, Return

_KEPT = (RoleState.RECOVERING, RoleState.UNCERTAIN)


class Workers:
    """Authentication, lifecycle, acknowledgements, reports, and recovery."""

    def __init__(self, ledger: Ledger, routing: Routing) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._routing = routing

    # Coming.

    def hands_on(self, frame: frames.Hello) -> bool:
        """Whether the worker, if it is who it says, makes baselines leave: it is the last one to come, or a new one."""
        state = self._state
        row = state.roles.get(frame.role)
        if row is None or not hmac.compare_digest(row.auth_token, frame.token) or frame.generation != row.generation:
            return False
        if state.workflow == Workflow.CONNECTING:
            return state.roles.keys() - state.workers.keys() == {frame.role}
        return row.state == RoleState.RESTARTING

    def hello(self, link: Link, frame: frames.Hello) -> None:
        """`hello` (section 2.2). Raises Refusal before anything is changed."""
        ledger, state = self._ledger, self._state
        row = state.roles.get(frame.role)
        if row is None or not hmac.compare_digest(row.auth_token, frame.token):
            raise Refusal(Code.UNAUTHORIZED, "Worker authentication failed", "token", frame.id)
        if frame.generation != row.generation:
            raise Refusal(Code.UNAUTHORIZED, "Worker generation is stale", "generation", frame.id)
        if frame.role in state.workers:
            raise Refusal(Code.CONFLICT, "Worker role is already connected", "role", frame.id)
        before, workflow = row.state, state.workflow
        link.kind, link.role, link.generation = "worker", frame.role, frame.generation
        state.workers[frame.role] = link.number
        ledger.role(frame.role)
        row.connected = True
        row.state = self._state_of_return(row)
        row.activity = row.activity_at = None
        ledger.bind(link.number, watches=False)
        ledger.event("worker_connected", row.state, role=frame.role, round=state.round)
        ledger.write(link.number, encode.response(frame.id, True, "connected", None))
        if workflow == Workflow.CONNECTING:
            if len(state.workers) == len(state.roles):
                self._start(frame.role)
        elif before == RoleState.RECOVERING:
            ledger.handover_uncertain(frame.role)
        else:
            self._recover(frame.role, handover=before == RoleState.RESTARTING)
            self._routing.pay(frame.role)

    def _start(self, role: str) -> None:
        if self._state.workspace_fault:
            self._ledger.become_uncertain(role=role)
        else:
            self._routing.start()

    def _state_of_return(self, row: rows.Role) -> str:
        """A worker that is back has not settled anything that was open when it left."""
        if row.state == RoleState.RESTARTING and self._state.workflow != Workflow.CONNECTING:
            return RoleState.RECOVERING
        if row.state == RoleState.UNCERTAIN or (row.state == RoleState.WAITING and row.active_assignment_id):
            return row.state
        return RoleState.IDLE

    def _recover(self, role: str, *, handover: bool) -> None:
        """Section 4.7: go on with what can be proven, and with nothing else."""
        ledger, state, routing = self._ledger, self._state, self._routing
        row = state.roles[role]
        current = routing.open_assignment(role)
        if current is not None and current.state != AssignmentState.ACCEPTED:
            if current.state == AssignmentState.DELIVERING:
                ledger.assignment(current, AssignmentState.UNCERTAIN)
                ledger.event("assignment_uncertain", AssignmentState.UNCERTAIN, **_about(current))
            ledger.role(role).state = RoleState.UNCERTAIN
            ledger.become_uncertain(role=role, assignment=current.id)
            return
        if not handover and routing.uninformed(role):
            if current is not None:
                ledger.handover_uncertain(role)
            return
        if not handover and role in state.unread and state.startup is None:
            routing.repeat_baseline(role)
        if handover:
            if role not in state.baselines or state.workspace_fault:
                ledger.handover_uncertain(role)
                return
            routing.baseline(role)
            routing.replay_run_state(role)
        if current is None:
            if handover:
                ledger.role(role).state = RoleState.IDLE
                ledger.event("worker_handover_recovered", RoleState.IDLE, role=role, round=state.round)
            return
        if handover:
            current.delivery_id = ledger.fresh_id()
            ledger.assignment(current, AssignmentState.DELIVERING)
        else:
            state.returns[role] = Return()
        row.active_assignment_id = current.id
        routing.send(current)

    def redeliver(self, role: str) -> None:
        """An operator decided: the role gets its open assignment again, under a new delivery id."""
        ledger, routing = self._ledger, self._routing
        current = routing.open_assignment(role)
        row = ledger.role(role)
        if routing.uninformed(role):
            routing.baseline_read(role)
        elif role in self._state.unread and self._state.startup is None:
            routing.repeat_baseline(role)
        if current is None:
            row.state = RoleState.IDLE
            return
        routing.replay_run_state(role)
        row.state = RoleState.ACTIVE
        row.active_assignment_id = current.id
        current.delivery_id = ledger.fresh_id()
        ledger.assignment(current, AssignmentState.DELIVERING)
        ledger.event("assignment_redelivered", AssignmentState.DELIVERING, **_about(current))
        routing.send(current)

    # Going.

    def gone(self, link: Link) -> None:
        """The connection of a worker was lost (section 4.8)."""
        ledger, state = self._ledger, self._state
        if state.workers.get(link.role) != link.number:
            return
        del state.workers[link.role]
        state.returns.pop(link.role, None)
        row = ledger.role(link.role)
        row.connected = False
        row.activity = row.activity_at = None
        interrupted = row.state == RoleState.RECOVERING and row.generation == link.generation
        if row.state not in (RoleState.RESTARTING, RoleState.RECOVERING, RoleState.UNCERTAIN) and not (
            row.state == RoleState.WAITING and row.active_assignment_id
        ):
            row.state = RoleState.DISCONNECTED
        ledger.event("worker_disconnected", RoleState.DISCONNECTED, role=link.role, round=state.round)
        if interrupted:
            ledger.handover_uncertain(link.role)

    # Frames.

    def check(self, link: Link, role: str, token: str, request: str) -> None:
        """The frame is from whom the connection belongs to, and that one is still current. Raises Refusal."""
        row = self._state.roles[link.role]
        if role != link.role or not hmac.compare_digest(row.auth_token, token):
            raise Refusal(Code.UNAUTHORIZED, "Worker authentication failed", "role", request)
        if row.generation != link.generation:
            raise Refusal(Code.UNAUTHORIZED, "Worker generation is stale", "generation", request)

    def frame(
        self,
        link: Link,
        frame: frames.Hello
        | frames.Lifecycle
        | frames.Ack
        | frames.ReportFrame
        | frames.Progress
        | frames.GuardrailFrame,
    ) -> None:
        """A frame of an authenticated worker. Raises Refusal, which ends the connection."""
        self.check(link, frame.role, frame.token, frame.id)
        if isinstance(frame, frames.Progress):
            self._progress(link, frame)
        elif isinstance(frame, frames.Lifecycle):
            self._lifecycle(link, frame)
        elif isinstance(frame, frames.Ack):
            self._ack(link, frame)
        elif isinstance(frame, frames.ReportFrame):
            self._report(link, frame)
        elif isinstance(frame, frames.GuardrailFrame):
            self._guardrail(link, frame)
        else:
            raise Refusal(Code.INVALID_PROTOCOL, "Unsupported worker message", "type", frame.id)

    def _answer(self, link: Link, request: str, status: str) -> None:
        self._ledger.write(link.number, encode.response(request, True, status, None))

    def _lifecycle(self, link: Link, frame: frames.Lifecycle) -> None:
        ledger, state = self._ledger, self._state
        row = ledger.role(link.role)
        settled_again = frame.state == RoleState.IDLE and row.state == RoleState.WAITING and row.active_assignment_id
        if not settled_again and (row.state not in _KEPT or frame.state == RoleState.UNCERTAIN):
            row.state = frame.state
        if frame.usage is not None:
            row.usage = _overwritten(row.usage, frame.usage, frame.calls_given)
        if frame.state != RoleState.ACTIVE:
            row.activity = row.activity_at = None
        self._returned(row, idle=frame.state == RoleState.IDLE, over=frame.state != RoleState.IDLE)
        ledger.event("worker_lifecycle", row.state, role=link.role, round=state.round)
        changed = self._moved(row)
        ledger.show_role(row)
        if changed:
            ledger.show_workflow()
        self._answer(link, frame.id, "recorded")

    def _returned(self, row: rows.Role, *, knows: bool = False, idle: bool = False, over: bool = False) -> None:
        """A worker that came back says where it stands; if it has stopped without a report, it waits."""
        returns = self._state.returns
        told = returns.get(row.role)
        if told is None or over:
            returns.pop(row.role, None)
            return
        told.knows |= knows
        told.idle |= idle
        if told.knows and told.idle:
            del returns[row.role]
            if row.state == RoleState.IDLE and row.active_assignment_id is not None:
                row.state = RoleState.WAITING

    def _moved(self, row: rows.Role) -> bool:
        """Section 4.6: what a worker's state means for the workflow."""
        ledger, state = self._ledger, self._state
        if row.active_assignment_id is None:
            return False
        facts: dict[str, Any] = {"role": row.role, "round": state.round, "assignment": row.active_assignment_id}
        working = state.workflow in (Workflow.ACTIVE, Workflow.CONNECTING, Workflow.INITIALIZING)
        stopped = state.workflow == Workflow.NEEDS_ATTENTION
        held = state.pending_repair_round is not None
        if row.state == RoleState.UNCERTAIN and (working or stopped):
            to, event = Workflow.UNCERTAIN, "workflow_uncertain"
        elif row.state == RoleState.WAITING and working:
            to, event = Workflow.NEEDS_ATTENTION, "workflow_needs_attention"
        elif row.state == RoleState.ACTIVE and stopped and not self._others_wait(row) and not held:
            to, event = Workflow.ACTIVE, "workflow_resumed"
        else:
            return False
        ledger.set_workflow(to)
        ledger.event(event, to, **facts)
        return True

    def _others_wait(self, row: rows.Role) -> bool:
        return any(
            each.state == RoleState.WAITING and each.active_assignment_id is not None
            for each in self._state.roles.values()
            if each is not row
        )

    def _ack(self, link: Link, frame: frames.Ack) -> None:
        if self._state.unread.get(link.role) == frame.delivery_id:
            self._routing.baseline_read(link.role)
        found = next(
            (
                each
                for each in reversed(self._state.assignments.values())
                if each.role == link.role and each.delivery_id == frame.delivery_id
            ),
            None,
        )
        if found is not None and found.state != AssignmentState.COMPLETED:
            if frame.status != "uncertain":
                before = self._state.roles[link.role].state
                self._accepted(found, frame.status)
                self._settled(link, found, frame.status, before)
            elif found.state != AssignmentState.ACCEPTED:
                self._doubted(found)
        self._answer(link, frame.id, "recorded")

    def _settled(self, link: Link, assignment: rows.Assignment, status: str, before: str) -> None:
        """Tell what an acknowledgement showed: work taken up again, or work that nobody does any more."""
        ledger = self._ledger
        row = self._state.roles[link.role]
        if row.active_assignment_id == assignment.id:
            self._returned(row, knows=True, over=status != "duplicate")
        if row.state == before:
            return
        ledger.role(link.role)
        changed = self._moved(row)
        if row.state == RoleState.WAITING:
            ledger.event("worker_lifecycle", row.state, role=link.role, round=self._state.round)
            ledger.show_role(row)
        if changed:
            ledger.show_workflow()

    def _accepted(self, assignment: rows.Assignment, status: str) -> None:
        ledger = self._ledger
        ledger.assignment(assignment, AssignmentState.ACCEPTED)
        # Sent before it on the same connection.
        self._routing.baseline_read(assignment.role)
        ledger.event("assignment_delivery", status, **_about(assignment))
        if not assignment.boundary_effective:
            assignment.boundary_effective = True
            ledger.event("context_boundary", "effective", **_about(assignment))
        row = self._state.roles[assignment.role]
        if row.state in _KEPT:
            recovered = row.state == RoleState.RECOVERING
            ledger.role(assignment.role).state = RoleState.ACTIVE
            if recovered:
                ledger.event("worker_handover_recovered", RoleState.ACTIVE, **_about(assignment))

    def _doubted(self, assignment: rows.Assignment) -> None:
        ledger = self._ledger
        ledger.assignment(assignment, AssignmentState.UNCERTAIN)
        ledger.event("assignment_delivery", AssignmentState.UNCERTAIN, **_about(assignment))
        ledger.role(assignment.role).state = RoleState.UNCERTAIN
        ledger.become_uncertain(role=assignment.role, assignment=assignment.id)

    def _report(self, link: Link, frame: frames.ReportFrame) -> None:
        state = self._state
        assignment = state.assignments.get(frame.assignment_id)
        if assignment is None or assignment.role != link.role:
            raise Refusal(Code.CONFLICT, "Assignment is not active for this role", "assignment_id", frame.id)
        if frame.report.kind != assignment.kind:
            text = "Report kind does not match the active assignment"
            raise Refusal(Code.FORBIDDEN, text, "kind", frame.id)
        if assignment.id in state.reports:
            self._answer(link, frame.id, "duplicate")
            return
        row = state.roles[link.role]
        if row.active_assignment_id != assignment.id:
            raise Refusal(Code.CONFLICT, "Assignment is not active for this role", "assignment_id", frame.id)
        # Who worked on it got it after the baseline.
        self._routing.baseline_read(link.role)
        report = self._accept_report(row, assignment, frame)
        self._routing.remember(report)
        self._routing.route(report, assignment.kind)
        self._answer(link, frame.id, "accepted")

    def _accept_report(self, role: rows.Role, assignment: rows.Assignment, frame: frames.ReportFrame) -> Remembered:
        ledger, report = self._ledger, frame.report
        row = rows.Report(
            id=ledger.fresh_id(),
            assignment_id=assignment.id,
            role=role.role,
            round=assignment.round,
            kind=report.kind,
            verdict=report.verdict,
            summary_chars=report.summary_chars,
            changed_path_count=report.changed_path_count,
            check_count=report.check_count,
            finding_count=report.finding_count,
            risk_count=report.risk_count,
            limitation_count=report.limitation_count,
            usage=frame.usage.assignment if frame.usage else None,
            created_at=ledger.time,
        )
        self._state.reports[assignment.id] = row
        ledger.save(row)
        ledger.assignment(assignment, AssignmentState.COMPLETED)
        ledger.role(role.role)
        if frame.usage is not None:
            role.usage = frame.usage.cumulative
        role.active_assignment_id = role.activity = role.activity_at = None
        role.state = RoleState.IDLE
        ledger.event("report_accepted", report.verdict or AssignmentState.COMPLETED, **_about(assignment))
        shown = usage.public(frame.usage.assignment) if frame.usage else None
        return Remembered(row.id, assignment.id, role.role, assignment.round, report.body, shown)

    def _progress(self, link: Link, frame: frames.Progress) -> None:
        ledger, state = self._ledger, self._state
        if frame.assignment_id != state.roles[link.role].active_assignment_id:
            # Not worth a connection: the worker has just not heard yet that the assignment is over.
            text = "Worker progress assignment is not active"
            ledger.write(link.number, encode.response(frame.id, False, Code.CONFLICT, text))
            return
        row = ledger.role(link.role)
        if row.activity != frame.phase:
            ledger.event("worker_progress", frame.phase, role=link.role, round=state.round)
        row.activity = frame.phase
        row.activity_sequence += 1
        row.activity_at = row.updated_at
        if frame.usage is not None:
            row.usage = frame.usage
        self._answer(link, frame.id, "recorded")

    def _guardrail(self, link: Link, frame: frames.GuardrailFrame) -> None:
        ledger, state = self._ledger, self._state
        assignment = state.assignments.get(frame.assignment_id)
        if assignment is None or assignment.role != link.role:
            text = "Guardrail assignment is not owned by this role"
            raise Refusal(Code.FORBIDDEN, text, "assignment_id", frame.id)
        if budget.threshold(state.settings.policy, frame.level, frame.metric) != frame.threshold:
            text = "Guardrail threshold is not active for this run"
            raise Refusal(Code.FORBIDDEN, text, "threshold", frame.id)
        if any(each.assignment_id == assignment.id and each.level == frame.level for each in state.guardrails):
            self._answer(link, frame.id, "duplicate")
            return
        row = rows.Guardrail(
            assignment_id=assignment.id,
            role=link.role,
            level=frame.level,
            metric=frame.metric,
            observed=frame.observed,
            threshold=frame.threshold,
            created_at=ledger.time,
        )
        state.guardrails.append(row)
        ledger.save(row)
        ledger.event("assignment_guardrail", frame.level, **_about(assignment))
        self._answer(link, frame.id, "recorded")


def _about(assignment: rows.Assignment) -> dict[str, Any]:
    return {
        "role": assignment.role,
        "round": assignment.round,
        "assignment": assignment.id,
        "delivery": assignment.delivery_id,
    }


def _overwritten(before: rows.Usage, after: rows.Usage, calls_given: bool) -> rows.Usage:
    """The new snapshot; an absent count of calls leaves the one before (section 2.9)."""
    return after if calls_given else msgspec.structs.replace(after, provider_calls=before.provider_calls)
