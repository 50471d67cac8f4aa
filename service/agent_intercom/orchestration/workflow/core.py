# SPDX-License-Identifier: Apache-2.0
"""The workflow of one run: one entry point per kind of input (section 4)."""

from __future__ import annotations

import hmac

from agent_intercom.orchestration import capsules, encode, frames
from agent_intercom.orchestration.contract import ROUTING, Code, CommandStatus, Limits, RoleState
from agent_intercom.orchestration.contract import Workflow as States
from agent_intercom.orchestration.effects import Check, Drop, Effect, Note, Tell
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.workflow.ledger import Ledger
from agent_intercom.orchestration.workflow.operator import Operator
from agent_intercom.orchestration.workflow.routing import Routing
from agent_intercom.orchestration.workflow.state import NEVER, Link, State
from agent_intercom.orchestration.workflow.workers import Workers
from agent_intercom.wire.clock import Now


class Workflow:
    """State and rules. `take` gives the effects since the last call; `wake_at` is when `tick` wants to be called."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self._ledger = Ledger(state)
        self._routing = Routing(self._ledger)
        self._workers = Workers(self._ledger, self._routing)
        self._operator = Operator(self._ledger, self._routing, self._workers)

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects = self._ledger.effects
        self._ledger.effects = []
        return effects

    # The broker's process.

    def started(self, now: Now, *, remembers: bool) -> None:
        """A broker serves this run from now on (section 4.2).

        `remembers`: it has its predecessor's memory and connections, so that nothing was interrupted.
        """
        self._ledger.now = now
        ledger, state = self._ledger, self.state
        if len(state.workers) < len(state.roles):
            state.waiting_since = now.mono
        if state.workflow == States.STARTING:
            ledger.set_workflow(States.CONNECTING)
        if remembers:
            # A broker that ended in order wrote that nobody is connected.
            for name in state.roles:
                ledger.role(name)
        else:
            self._forgotten()
        self.render_baselines()
        for link in state.links.values():
            if link.held:
                ledger.effects.append(Check(link.number))
        ledger.event("broker_started", state.workflow, round=state.round)
        ledger.effects.append(Tell())

    def _forgotten(self) -> None:
        """What the database says is all there is: no connection, and no proof of what was on its way."""
        ledger, state = self._ledger, self.state
        for name, row in state.roles.items():
            if row.connected or row.activity is not None:
                ledger.role(name)
                row.connected = False
                row.activity = row.activity_at = None
            if row.state in (RoleState.RESTARTING, RoleState.RECOVERING):
                ledger.handover_uncertain(name)
            elif row.state in (RoleState.IDLE, RoleState.ACTIVE):
                ledger.role(name).state = RoleState.DISCONNECTED
        if state.workflow in (States.INITIALIZING, ROUTING):
            ledger.become_uncertain()

    def render_baselines(self) -> None:
        """Have every role's baseline in memory. Raises Refusal `worker_context_too_large`."""
        state = self.state
        if state.startup is None or state.baselines:
            return
        state.workspace = state.startup.workspace_capsule
        for role in state.roles:
            state.baselines[role] = capsules.baseline(
                role,
                state.settings.project,
                state.startup.task,
                state.startup.context_capsule,
                state.startup.role_tasks.get(role, ""),
                state.startup.workspace_capsule,
            )

    # Connections.

    def opened(self, number: int, now: Now) -> None:
        """A connection was accepted. The oldest one without a first frame makes room when there are too many."""
        self._ledger.now = now
        links = self.state.links
        links[number] = Link(number, now.mono)
        silent = [link for link in links.values() if not link.kind]
        if len(silent) > self.limits.unauthenticated:
            self._drop(silent[0])

    def closed(self, number: int, now: Now) -> None:
        """The connection is gone."""
        self._ledger.now = now
        link = self.state.links.pop(number, None)
        if link is not None and link.kind == "worker":
            self._workers.gone(link)
            self._ledger.effects.append(Tell())

    def dismiss(self, link: Link, now: Now) -> None:
        """End a connection once it was sent what is queued for it."""
        self._ledger.now = now
        self._ledger.finish(link.number)
        if link.kind == "worker":
            self._workers.gone(link)
            self._ledger.effects.append(Tell())

    def _drop(self, link: Link) -> None:
        self.state.links.pop(link.number, None)
        self._ledger.effects.append(Drop(link.number))

    # Frames.

    def first(self, link: Link, frame: frames.Hello | frames.Control | frames.Observe, now: Now) -> None:
        """The frame that decides what a connection is. Raises Refusal; the connection is to be dismissed then."""
        self._ledger.now = now
        if isinstance(frame, frames.Hello):
            self._workers.hello(link, frame)
        elif isinstance(frame, frames.Control):
            self._operator.command(link, frame)
        else:
            self._observe(link, frame)

    def hands_on(self, frame: frames.Hello | frames.Control | frames.Observe) -> bool:
        """Whether the frame makes a baseline leave with a workspace capsule in it, which has to be checked first."""
        state = self.state
        if not state.workspace or isinstance(frame, frames.Observe):
            return False
        if isinstance(frame, frames.Hello):
            return self._workers.hands_on(frame)
        genuine = hmac.compare_digest(state.settings.control_token, frame.token)
        return genuine and frame.action == "redeliver" and state.startup is not None

    def hold(self, link: Link, payload: bytes, now: Now) -> None:
        """Ask for a check of the workspace capsule; the connection's first frame waits for it."""
        self._ledger.now = now
        link.held = payload
        self._ledger.effects.append(Check(link.number))

    def checked(self, fault: str, now: Now) -> None:
        """A check of the workspace capsule ended: the code of what is wrong with it, or nothing."""
        self._ledger.now = now
        if fault != self.state.workspace_fault:
            self.state.workspace_fault = fault
            self._ledger.effects.append(Tell())

    def worker(self, link: Link, frame: frames.WorkerFrame, now: Now) -> None:
        """A frame of an authenticated worker. Raises Refusal."""
        self._ledger.now = now
        self._workers.frame(link, frame)

    def refuse(self, link: Link, refusal: Refusal, now: Now) -> None:
        """Answer as far as the contract has an answer, and end the connection (section 1.5).

        A worker that is not authenticated and an observer get none. A control client gets `conflict`, the one status of
        its closed set that means that nothing was done.
        """
        self._ledger.now = now
        ledger = self._ledger
        kind = link.kind
        if kind == "worker":
            request = refusal.request or ledger.fresh_id()
            ledger.write(link.number, encode.response(request, False, refusal.code, refusal.text))
        elif kind == "control" and refusal.request is not None:
            ledger.write(link.number, encode.control_response(refusal.request, CommandStatus.CONFLICT, False))
        if kind == "worker":
            ledger.effects.append(Note("WORKER_REFUSED", {"role": link.role, "code": refusal.code}))
        self.dismiss(link, now)

    def failed(self, link: Link, now: Now) -> None:
        """The rules met a fault of their own while they served a connection.

        What a worker or a person had decided is half done, and nobody knows which half: the run is uncertain (section
        2.5). Who has not said who it is cannot have that effect.
        """
        self._ledger.now = now
        ledger = self._ledger
        if link.kind in ("worker", "control"):
            ledger.become_uncertain(role=link.role or None)
        if link.kind == "worker":
            text = "Report routing became uncertain"
            ledger.write(link.number, encode.response(ledger.fresh_id(), False, Code.BROKER_UNCERTAIN, text))
        self.dismiss(link, now)

    # Observers (section 3.3).

    def _observe(self, link: Link, frame: frames.Observe) -> None:
        ledger, state = self._ledger, self.state
        if not hmac.compare_digest(state.settings.control_token, frame.token):
            raise Refusal(Code.UNAUTHORIZED, "Observer authentication failed", "token", frame.id)
        if sum(each.kind == "observer" for each in state.links.values()) >= self.limits.observers:
            raise Refusal(Code.REJECTED, "Too many observers", "type", frame.id)
        link.kind = "observer"
        ledger.bind(link.number, watches=True)
        ledger.write(link.number, encode.observing(frame.id))
        for report in state.remembered:
            self._routing.show_report(link.number, report)
        roles = [(name, ledger.shown_role(state.roles[name])) for name in sorted(state.roles)]
        count = len(state.reports)
        payload = encode.snapshot(
            state.settings.session, state.workflow, state.round, roles, count, count <= len(state.remembered)
        )
        ledger.write(link.number, payload)

    # Time.

    @property
    def wake_at(self) -> int:
        """Monotonic time in ms at which `tick` wants to be called."""
        deadlines = [link.since + self.limits.handshake_ms for link in self.state.links.values() if not link.kind]
        overdue = self.state.waiting_since + self.limits.overdue_worker_ms
        return min([overdue if self.state.waiting_since != NEVER else NEVER, *deadlines])

    def tick(self, now: Now) -> None:
        """Do what is due by `now`."""
        self._ledger.now = now
        state = self.state
        for link in list(state.links.values()):
            if not link.kind and link.since + self.limits.handshake_ms <= now.mono:
                self._drop(link)
        if state.waiting_since != NEVER and state.waiting_since + self.limits.overdue_worker_ms <= now.mono:
            state.waiting_since = NEVER
            self._ledger.effects.append(Tell())

    def status(self) -> str:
        """One line for `systemctl status`: where the run stands and whom it waits for."""
        state = self.state
        text = f"{state.workflow}, round {state.round}; {len(state.workers)} of {len(state.roles)} workers connected"
        if state.pending_repair_round is not None:
            text += "; the limit of repair rounds is reached"
        if state.workspace_fault:
            text += f"; {state.workspace_fault}"
        away = [role for role in state.roles if role not in state.workers]
        if away and state.waiting_since == NEVER:
            text += f"; never came or away: {', '.join(away)}"
        for words, state_of in (("without a report", RoleState.WAITING), ("in doubt", RoleState.UNCERTAIN)):
            named = [role for role, row in state.roles.items() if row.state == state_of]
            text += f"; {words}: {', '.join(named)}" if named else ""
        return f"{text}; work waits for {', '.join(state.owed)}" if state.owed else text
