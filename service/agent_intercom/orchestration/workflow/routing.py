# SPDX-License-Identifier: Apache-2.0
"""Who gets what next: start, assignments, run states and the way of a report (sections 4.3, 4.4, 7.1 and 7.3)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from agent_intercom.orchestration import activation, capsules, encode, policies, rows
from agent_intercom.orchestration.contract import (
    IMPLEMENTER,
    MAX_REPLAY,
    PROBE,
    REVIEWER,
    SPECIALISTS,
    AssignmentState,
    Flow,
    Kind,
    RoleState,
    Workflow,
    report_kind,
)
from agent_intercom.orchestration.effects import ForgetStartup
from agent_intercom.orchestration.workflow.ledger import Ledger
from agent_intercom.orchestration.workflow.state import NEVER, Owed, Remembered


class Routing:
    """The broker alone decides who works next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state

    def specialists(self) -> list[str]:
        """The specialists of this run, in the order in which they are decided on."""
        return [role for role in SPECIALISTS if role in self._state.roles]

    # Start.

    def start(self) -> None:
        """All workers are there: hand out the baselines and the first assignments (section 4.3).

        One commit for all of it: a broker that is killed on the way starts the workflow again, or has started it.
        """
        ledger, state = self._ledger, self._state
        state.waiting_since = NEVER
        ledger.set_workflow(Workflow.INITIALIZING)
        ledger.event("workflow_started", Workflow.INITIALIZING, round=state.round)
        for role in sorted(state.roles):
            self.baseline(role)
        ledger.set_workflow(Workflow.ACTIVE)
        ledger.event("workflow_active", Workflow.ACTIVE, round=state.round)
        probing = False
        if PROBE in state.roles:
            task = state.startup.task if state.startup else ""
            probing = self._activate(PROBE, activation.initial_probe(task, PROBE in state.settings.forced))
        ledger.show_workflow()
        self.assign(IMPLEMENTER, Kind.PLAN if state.settings.flow == Flow.PHASED else Kind.IMPLEMENTATION)
        if probing:
            self.assign(PROBE, PROBE)
        state.startup = None
        ledger.effects.append(ForgetStartup())

    def baseline(self, role: str) -> None:
        """Send a worker its baseline."""
        ledger, state = self._ledger, self._state
        delivery = state.unread[role] = ledger.fresh_id()
        self._say_unread()
        ledger.event("context_delivered", "delivered", role=role, round=state.round, delivery=delivery)
        self.repeat_baseline(role)

    def repeat_baseline(self, role: str) -> None:
        """Send a worker the baseline that it may have missed, under the same delivery id: who has it ignores it."""
        state = self._state
        payload = encode.context(state.unread[role], state.round, "baseline", state.baselines[role], False)
        self._ledger.write_role(role, payload)

    def uninformed(self, role: str) -> bool:
        """Whether the role may not know its task, and nobody can tell it any more."""
        return self._state.unread.get(role) == ""

    def baseline_read(self, role: str) -> None:
        """The worker has its baseline, or a person took it upon themselves to go on without."""
        if self._state.unread.pop(role, None) is not None:
            self._say_unread()

    def baseline_missing(self, role: str) -> None:
        """The role's next worker has no baseline until it says so."""
        self._state.unread[role] = self._ledger.fresh_id()
        self._say_unread()

    def _say_unread(self) -> None:
        self._ledger.meta("unread", json.dumps(sorted(self._state.unread), separators=(",", ":")))

    # Assignments.

    def assign(self, role: str, kind: str) -> None:
        """Give a role work in the current round. A role that is away is owed it, and gets it when it is back.

        A repair beyond the run's limit waits for an operator instead.
        """
        ledger, state = self._ledger, self._state
        if (role, kind) == (IMPLEMENTER, Kind.IMPLEMENTATION) and self._at_limit():
            self._pause()
            return
        if role not in state.workers:
            self._owe(role, Owed(state.round, kind))
            return
        if self.uninformed(role):
            self._owe(role, Owed(state.round, kind))
            ledger.handover_uncertain(role)
            return
        if role in state.deferred or self.retains(role):
            self.send_run_state(role)
        assignment = rows.Assignment(
            id=ledger.fresh_id(),
            role=role,
            round=state.round,
            kind=kind,
            state=AssignmentState.DELIVERING,
            delivery_id=ledger.fresh_id(),
            created_at=ledger.time,
            updated_at=ledger.time,
        )
        state.assignments[assignment.id] = assignment
        ledger.save(assignment)
        row = ledger.role(role)
        row.active_assignment_id = assignment.id
        row.state = RoleState.ACTIVE
        row.activity = row.activity_at = None
        ledger.event(
            "assignment_created",
            AssignmentState.DELIVERING,
            role=role,
            round=assignment.round,
            assignment=assignment.id,
            delivery=assignment.delivery_id,
        )
        self.send(assignment)

    # The limit of repair rounds (section 18).

    def _repairs(self) -> int:
        """How many rounds after the first the implementer was given."""
        return len(
            {
                each.round
                for each in self._state.assignments.values()
                if each.role == IMPLEMENTER and each.kind == Kind.IMPLEMENTATION and each.round > 1
            }
        )

    def _at_limit(self) -> bool:
        state = self._state
        return state.round > 1 and state.max_repair_rounds is not None and self._repairs() >= state.max_repair_rounds

    def _pause(self) -> None:
        """Begin no further repair before an operator says so."""
        ledger, state = self._ledger, self._state
        state.pending_repair_round = state.round
        ledger.meta(policies.PENDING_REPAIR, str(state.round))
        ledger.event("continuation_paused", "repair_round_limit", role=IMPLEMENTER, round=state.round)
        if state.workflow != Workflow.UNCERTAIN:
            ledger.set_workflow(Workflow.NEEDS_ATTENTION)
            ledger.show_workflow()

    def allow_repair(self) -> None:
        """An operator wants the round that waits: the limit is one more than there were."""
        ledger, state = self._ledger, self._state
        state.max_repair_rounds = self._repairs() + 1
        state.pending_repair_round = None
        ledger.meta(policies.CONTINUATION, policies.continuation(state.max_repair_rounds))
        ledger.meta(policies.PENDING_REPAIR, None)

    def send(self, assignment: rows.Assignment) -> None:
        """Send an assignment under the delivery id that it has."""
        content = capsules.assignment(assignment.role, assignment.kind, assignment.round)
        self._ledger.write_role(
            assignment.role,
            encode.assignment(assignment.delivery_id, assignment.id, assignment.round, assignment.kind, content),
        )

    def _owe(self, role: str, owed: Owed | None) -> None:
        state = self._state
        if owed is None:
            state.owed.pop(role, None)
        else:
            state.owed[role] = owed
            self._ledger.event("assignment_owed", "owed", role=role, round=owed.round)
        value = {name: [one.round, one.kind] for name, one in state.owed.items()}
        self._ledger.meta("owed", json.dumps(value, separators=(",", ":"), sort_keys=True))

    def pay(self, role: str) -> None:
        """Give a role that came back what it is owed, unless the run has moved on."""
        state = self._state
        owed = state.owed.get(role)
        row = state.roles[role]
        if owed is None or row.active_assignment_id is not None or row.state == RoleState.UNCERTAIN:
            return
        self._owe(role, None)
        if owed.round == state.round and not self._assigned(role, owed.kind):
            self.assign(role, owed.kind)

    def open_assignment(self, role: str) -> rows.Assignment | None:
        """The role's newest assignment that is not completed."""
        for assignment in reversed(self._state.assignments.values()):
            if assignment.role == role and assignment.state != AssignmentState.COMPLETED:
                return assignment
        return None

    def _assigned(self, role: str, kind: str) -> bool:
        state = self._state
        return any(
            each.role == role and each.kind == kind and each.round == state.round
            for each in state.assignments.values()
        )

    # Run states.

    def deliver_run_state(self, roles: Iterable[str]) -> None:
        """Give roles the newest evidence: at once, or with the next assignment of those that work or are away.

        A role that retains its context gets it with its next assignment in any case.
        """
        state = self._state
        text = self._render()
        for role in dict.fromkeys(roles):
            if role not in state.roles or self.retains(role):
                continue
            busy = state.roles[role].active_assignment_id is not None
            if role in state.deferred or busy or role not in state.workers:
                state.deferred[role] = state.round
            else:
                self._send_run_state(role, text, state.round)

    def replay_run_state(self, role: str) -> None:
        """What a replacement is told of the run: a run state that is due, else the one that the role had."""
        state = self._state
        if role in state.deferred or self.retains(role):
            self.send_run_state(role)
        elif role in state.delivered:
            self._send_run_state(role, state.delivered[role], state.round)

    def retains(self, role: str) -> bool:
        """Whether the role's worker keeps the context of its earlier assignments (section 18)."""
        return self._state.settings.worker_context.get(role) == policies.RETAIN

    def send_run_state(self, role: str) -> None:
        """Send a role what is known now."""
        self._send_run_state(role, self._render(), self._state.round)

    def _render(self) -> str:
        state = self._state
        evidence = {role: capsules.Evidence(last.round, last.body) for role, last in state.latest.items()}
        now = [row for row in state.activations if row.round == state.round]
        return capsules.run_state(evidence, state.round, now)

    def _send_run_state(self, role: str, text: str, round: int) -> None:
        ledger, state = self._ledger, self._state
        state.deferred.pop(role, None)
        state.delivered[role] = text
        delivery = ledger.fresh_id()
        ledger.event("context_delivered", "delivered", role=role, round=round, delivery=delivery)
        ledger.write_role(role, encode.context(delivery, round, "run_state", text, False))

    # Reports.

    def remember(self, report: Remembered) -> None:
        """Keep an accepted report and show it to the observers."""
        state = self._state
        latest = state.latest.get(report.role)
        if latest is None or report.round >= latest.round:
            # The order of acceptance is the order of this mapping.
            state.latest.pop(report.role, None)
            state.latest[report.role] = report
        state.remembered.append(report)
        del state.remembered[:-MAX_REPLAY]
        for link in state.links.values():
            if link.kind == "observer":
                self.show_report(link.number, report)

    def show_report(self, number: int, report: Remembered) -> None:
        """Show one report to one observer, which bears no more than a hundred different ones (section 3.3)."""
        state = self._state
        link = state.links[number]
        if len(link.shown) >= MAX_REPLAY:
            return
        link.shown.append(report.id)
        payload = encode.report(
            state.settings.session,
            report.id,
            report.assignment_id,
            report.role,
            report.round,
            report.body,
            report.usage,
            state.settings.report_usage,
        )
        self._ledger.write(number, payload)

    def route(self, report: Remembered, kind: str) -> None:
        """Decide what follows from an accepted report (section 4.4)."""
        state = self._state
        if report.round != state.round:
            # The run has moved on: this is evidence, and decides nothing any more.
            self.deliver_run_state([IMPLEMENTER, REVIEWER])
        elif report.role == REVIEWER:
            self._reviewed(report.body["verdict"])
        elif kind == Kind.PLAN:
            self.deliver_run_state([IMPLEMENTER])
            if state.settings.flow == Flow.PHASED:
                self.assign(IMPLEMENTER, Kind.IMPLEMENTATION)
        elif report.role == IMPLEMENTER:
            self._implemented(report.body["changed_paths"])
        else:
            self.deliver_run_state([IMPLEMENTER, REVIEWER])
            self.try_reviewer()

    def _implemented(self, changed_paths: object) -> None:
        state = self._state
        decided = {row.role for row in state.activations if row.round == state.round}
        running = []
        for role in self.specialists():
            if role not in decided:
                decision = activation.for_round(role, changed_paths, role in state.settings.forced)
                if self._activate(role, decision):
                    running.append(role)
        self.deliver_run_state([REVIEWER, *running])
        for role in running:
            self.assign(role, report_kind(role))
        self.try_reviewer()

    def _activate(self, role: str, decision: activation.Decision) -> bool:
        ledger, state = self._ledger, self._state
        row = rows.Activation(
            role=role,
            round=state.round,
            decision=decision.decision,
            rule_id=decision.rule_id,
            forced=decision.forced,
            created_at=ledger.time,
        )
        state.activations.append(row)
        ledger.save(row)
        ledger.event("specialist_activation", decision.decision, role=role, round=state.round)
        return decision.decision == activation.RUN

    def go_on(self) -> None:
        """An operator ended a doubt: whatever the accepted reports of this round still ask for is done now."""
        state = self._state
        if state.pending_repair_round is not None:
            return
        reported = {(row.role, row.kind): row for row in state.reports.values() if row.round == state.round}
        reviewed = reported.get((REVIEWER, Kind.REVIEW))
        if reviewed is not None:
            self._reviewed(reviewed.verdict or "")
            return
        phased = state.settings.flow == Flow.PHASED and state.round == 1
        if (IMPLEMENTER, Kind.IMPLEMENTATION) in reported:
            latest = state.latest.get(IMPLEMENTER)
            known = latest is not None and latest.round == state.round
            self._implemented(latest.body["changed_paths"] if latest is not None and known else None)
        elif phased and (IMPLEMENTER, Kind.PLAN) not in reported:
            self._assign_once(IMPLEMENTER, Kind.PLAN)
        else:
            self._assign_once(IMPLEMENTER, Kind.IMPLEMENTATION)
        for row in list(state.activations):
            if row.round == state.round and row.decision == activation.RUN:
                self._assign_once(row.role, report_kind(row.role))
        self.try_reviewer()

    def _assign_once(self, role: str, kind: str) -> None:
        owed = self._state.owed.get(role)
        if not self._assigned(role, kind) and (owed is None or owed.round != self._state.round):
            self.assign(role, kind)

    def try_reviewer(self) -> None:
        """Have the round reviewed once all evidence is in; once per round."""
        state = self._state
        reported = {(row.role, row.kind) for row in state.reports.values() if row.round == state.round}
        decisions = {row.role: row.decision for row in state.activations if row.round == state.round}
        complete = (IMPLEMENTER, Kind.IMPLEMENTATION) in reported and all(
            role in decisions and (decisions[role] == activation.SKIPPED or (role, role) in reported)
            for role in self.specialists()
        )
        if complete:
            self._assign_once(REVIEWER, Kind.REVIEW)

    def _reviewed(self, verdict: str) -> None:
        ledger, state = self._ledger, self._state
        uncertain = state.workflow == Workflow.UNCERTAIN
        if verdict == "approved":
            if not uncertain:
                ledger.set_workflow(Workflow.READY)
                ledger.event("workflow_ready", Workflow.READY, round=state.round)
                ledger.show_workflow()
            return
        self.deliver_run_state([IMPLEMENTER])
        ledger.set_round(state.round + 1)
        if not uncertain:
            ledger.set_workflow(Workflow.ACTIVE)
        ledger.show_workflow()
        self.assign(IMPLEMENTER, Kind.IMPLEMENTATION)
