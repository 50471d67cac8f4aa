# SPDX-License-Identifier: Apache-2.0
"""Any order of events, with brokers that die in between: what must hold of a run however it goes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_intercom.orchestration import rows
from tests.unit.runstage import Stage, hex_id, usage

TEAM = ("implementer", "reviewer", "probe", "playwright", "django")
PATHS = (["README.md"], ["src/a.py"], ["web/a.tsx"], ["app/models.py"], [])

WORK = ("plan", "implementation", "review", "probe", "playwright", "django")

roles = st.sampled_from(TEAM)


class Run(RuleBasedStateMachine):
    @initialize(
        size=st.integers(2, 5),
        flow=st.sampled_from(["single", "phased"]),
        forced=st.booleans(),
        docs=st.booleans(),
        rounds=st.integers(0, 2),
        limit=st.sampled_from([None, None, 0, 1, 2]),
        retained=st.sets(roles),
        workspace=st.sampled_from(["", "{}"]),
    )
    def begin(
        self,
        size: int,
        flow: str,
        forced: bool,
        docs: bool,
        rounds: int,
        limit: int | None,
        retained: set[str],
        workspace: str,
    ) -> None:
        team = TEAM[:size]
        task = "Fix a typo in the readme" if docs else "Make the thing work"
        self.limit = limit
        self.retained = retained & set(team)
        self.stage = Stage(
            team,
            flow=flow,
            forced=["probe"] if forced and size > 2 else [],
            task=task,
            max_repair_rounds=limit,
            worker_context=dict.fromkeys(sorted(self.retained), "retain"),
            workspace=workspace,
        )
        self.operator = False
        self.forgetful = False
        self.pardoned: set[str] = set()
        self.was = self.stage.workflow
        self.stage.observe()
        if rounds:
            self.everybody_comes()
            self.check("")
            for turn in range(rounds):
                self.everybody_works(good=turn > 0, paths=["src/a.py"])

    def here(self, role: str) -> bool:
        return role in self.stage.workers and role in self.stage.engine.workflow.state.workers

    # Workers.

    @rule(role=roles)
    def come(self, role: str) -> None:
        if role in self.stage.roles and role not in self.stage.workers:
            self.stage.hello(role)

    @rule()
    def everybody_comes(self) -> None:
        for role in self.stage.roles:
            self.come(role)

    @rule(role=roles)
    def come_again_or_stale(self, role: str) -> None:
        if self.here(role):
            assert self.stage.hello(role) == []
        elif role in self.stage.roles:
            assert self.stage.hello(role, generation=self.stage.generations[role] + 1) == []

    @rule(role=roles)
    def leave(self, role: str) -> None:
        if self.here(role):
            self.stage.leave(role)

    @rule(role=roles, state=st.sampled_from(["idle", "active", "waiting", "uncertain"]))
    def lifecycle(self, role: str, state: str) -> None:
        if self.here(role):
            self.stage.lifecycle(role, state)

    @rule(
        role=roles, pick=st.integers(0, 8), status=st.sampled_from(["accepted", "duplicate", "accepted", "uncertain"])
    )
    def acknowledge_something(self, role: str, pick: int, status: str) -> None:
        known = [each for each in self.stage.database.of(rows.Assignment) if each.role == role]
        if self.here(role):
            done = {each.id for each in known if each.state == "completed"}
            chosen = known[-1 - pick % len(known)].delivery_id if known else hex_id(pick)
            self.stage.ack(role, chosen, status)
            after = {each.id: each.state for each in self.stage.database.of(rows.Assignment)}
            assert all(after[each] == "completed" for each in done)

    @rule(role=roles)
    def accept(self, role: str) -> None:
        if self.here(role) and self.stage.current(role) is not None:
            self.stage.accept(role)

    @rule(role=roles, good=st.booleans(), paths=st.sampled_from(PATHS))
    def report(self, role: str, good: bool, paths: list[str]) -> None:
        if self.here(role) and self.stage.current(role) is not None:
            self.stage.report(role, "changes_requested" if role == "reviewer" and not good else None, paths)

    @rule(role=roles, good=st.booleans(), paths=st.sampled_from(PATHS))
    def work(self, role: str, good: bool, paths: list[str]) -> None:
        self.accept(role)
        self.report(role, good, paths)

    @rule(good=st.booleans(), paths=st.sampled_from(PATHS))
    def everybody_works(self, good: bool, paths: list[str]) -> None:
        for role in ("implementer", "implementer", "probe", "playwright", "django", "reviewer"):
            self.work(role, good, paths)

    @rule(role=roles)
    def progress(self, role: str) -> None:
        assignment = self.stage.current(role) if self.here(role) else None
        if assignment is not None:
            answers = self.stage.worker("progress", role, assignment_id=assignment.id, phase="tool", usage=usage(3))
            assert [frame["status"] for frame in answers] == ["recorded"]

    @rule(fault=st.sampled_from(["", "", "workspace_capsule_stale"]))
    def check(self, fault: str) -> None:
        while self.stage.checks:
            # A command may have waited for it.
            self.operator = True
            self.stage.check(fault)

    # The operator.

    @rule(role=roles, action=st.sampled_from(["send", "abort", "restart", "restart_failed", "redeliver"]))
    def command(self, role: str, action: str) -> None:
        if role not in self.stage.roles:
            return
        self.operator = action == "redeliver"
        if action == "redeliver" and self.forgetful:
            self.pardoned.add(role)
        if action == "send":
            self.stage.send(role)
        elif action == "restart":
            self.stage.restart(role)
        else:
            self.stage.control(action, role)

    @rule()
    def go_on(self) -> None:
        state = self.stage.engine.workflow.state
        paused, quiet = state.pending_repair_round, not any(row.active_assignment_id for row in state.roles.values())
        attention = state.workflow == "needs_attention"
        answer = self.stage.control("continue", "implementer")
        assert answer["status"] == "conflict" or (paused is not None and quiet and attention)
        assert state.pending_repair_round == (None if answer["success"] else paused)

    # The broker's process, and time.

    @rule(remembers=st.booleans())
    def crash(self, remembers: bool) -> None:
        if remembers or self.stage.startup is None or self.stage.workflow in ("connecting", "starting"):
            self.forgetful |= not remembers
            self.stage.crash(remembers=remembers)

    @rule(ms=st.sampled_from([1, 500, 70_000]))
    def pass_time(self, ms: int) -> None:
        self.stage.pass_time(ms)

    # What must hold.

    @invariant()
    def uncertain_is_left_by_an_operator_only(self) -> None:
        if not hasattr(self, "stage"):
            return
        for state in self.stage.states:
            assert not (self.was == "uncertain" and state != "uncertain" and not self.operator)
            self.was = state
        self.stage.states.clear()
        self.operator = False

    @invariant()
    def one_report_and_one_open_assignment(self) -> None:
        if not hasattr(self, "stage"):
            return
        database = self.stage.database
        assignments = database.of(rows.Assignment)
        opened = Counter(each.role for each in assignments if each.state != "completed")
        assert all(count == 1 for count in opened.values()), opened
        reported = {each.assignment_id for each in database.of(rows.Report)}
        assert {each.id for each in assignments if each.state == "completed"} == reported
        deliveries = Counter(each.delivery_id for each in assignments)
        assert all(count == 1 for count in deliveries.values())

    @invariant()
    def nothing_is_assigned_twice_in_a_round(self) -> None:
        if hasattr(self, "stage"):
            given = Counter((each.role, each.kind, each.round) for each in self.stage.database.of(rows.Assignment))
            assert all(count == 1 for count in given.values()), given

    @invariant()
    def no_assignment_without_its_predecessor(self) -> None:
        if not hasattr(self, "stage"):
            return
        database = self.stage.database
        reports = {(each.role, each.kind, each.round): each for each in database.of(rows.Report)}
        decisions = {(each.role, each.round): each.decision for each in database.of(rows.Activation)}
        reopened = [each.round for each in database.of(rows.Event) if each.event == "workflow_reopened"]
        for each in database.of(rows.Assignment):
            before = each.round - 1
            if each.role == "reviewer":
                assert ("implementer", "implementation", each.round) in reports
                for role in set(self.stage.roles) - {"implementer", "reviewer"}:
                    decision = decisions[role, each.round]
                    assert decision == "skipped" or (role, role, each.round) in reports
            elif each.role == "implementer" and each.round > 1:
                verdict = reports[("reviewer", "review", before)].verdict
                assert verdict == "changes_requested" or each.round in reopened
            elif each.role == "implementer" and each.kind == "implementation" and self.phased():
                assert ("implementer", "plan", 1) in reports
            elif each.role != "implementer":
                assert decisions[each.role, each.round] == "run"

    def phased(self) -> bool:
        return self.stage.engine.workflow.state.settings.flow == "phased"

    @invariant()
    def the_database_is_the_state(self) -> None:
        if not hasattr(self, "stage"):
            return
        state, database = self.stage.engine.workflow.state, self.stage.database
        assert database.meta["workflow_state"] == state.workflow
        assert database.meta["round"] == str(state.round)
        pending = state.pending_repair_round
        assert database.meta.get("pending_repair_round") == (None if pending is None else str(pending))
        policy = {"version": 1, "max_repair_rounds": state.max_repair_rounds}
        assert json.loads(database.meta["continuation_policy"]) == policy
        assert {row.role: row for row in database.of(rows.Role)} == state.roles
        assert {row.id: row for row in database.of(rows.Assignment)} == state.assignments
        assert {row.assignment_id: row for row in database.of(rows.Report)} == state.reports
        assert {row.id: row for row in database.of(rows.Command)} == state.commands
        sequences = sorted(event.sequence for event in database.of(rows.Event))
        assert sequences == list(range(1, len(sequences) + 1))

    @precondition(lambda self: hasattr(self, "stage"))
    @rule()
    def a_replay_gives_the_same_state(self) -> None:
        assert self.stage.replayed().snapshot() == self.stage.engine.snapshot()

    @invariant()
    def no_silent_stall(self) -> None:
        """Whatever is to be done next is with somebody, owed to somebody, or an operator's to decide."""
        if not hasattr(self, "stage"):
            return
        state = self.stage.engine.workflow.state
        if state.workflow in ("active", "needs_attention"):
            opened = [each for each in state.assignments.values() if each.state != "completed"]
            paused = state.pending_repair_round is not None
            assert opened or state.owed or paused, "nobody has anything to do"
            assert not paused or state.workflow == "needs_attention", "nobody is told that it pauses"
            for role in state.owed:
                assert role not in state.workers or state.roles[role].state == "uncertain"
            stopped = [each.role for each in opened if state.roles[each.role].state == "waiting"]
            assert not stopped or state.workflow == "needs_attention", "nobody is told who has stopped"

    @invariant()
    def nobody_repairs_more_often_than_was_allowed(self) -> None:
        if not hasattr(self, "stage") or self.limit is None:
            return
        database = self.stage.database
        commands = database.of(rows.Command)
        allowed = sum(each.action == "continue" and each.status == "accepted" for each in commands)
        repairs = [each for each in database.of(rows.Assignment) if each.kind == "implementation" and each.round > 1]
        assert len(repairs) <= self.limit + allowed
        state = self.stage.engine.workflow.state
        assert state.pending_repair_round in (None, state.round)

    @invariant()
    def who_retains_is_told_with_its_work_only(self) -> None:
        if not hasattr(self, "stage"):
            return
        for number, (role, _) in self.stage.been.items():
            told = [frame.get("kind") or frame["type"] for frame in self.stage.frames[number]]
            for kind, following in pairwise([*told, ""]):
                if role in self.retained and kind == "run_state":
                    # A replacement without work, a run that is reopened, or work.
                    assert following in ("", "response", "operator_message", *WORK) or "baseline" in told
                if role in self.retained and following in WORK:
                    assert kind in ("run_state", "response", "baseline")

    @invariant()
    def nobody_works_without_a_baseline(self) -> None:
        """But for whom a person sent on without one, after the broker had lost it."""
        if not hasattr(self, "stage"):
            return
        told = set()
        given = set()
        for number, who in self.stage.been.items():
            for frame in self.stage.frames[number]:
                if frame.get("kind") == "baseline":
                    told.add(who)
                elif frame["type"] == "assignment" and who not in told:
                    given.add(who)
        assert {role for role, _ in given} <= self.pardoned

    @invariant()
    def snapshots_are_whole(self) -> None:
        if hasattr(self, "stage"):
            assert msgspec.msgpack.decode(self.stage.engine.snapshot())


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRun = Run.TestCase
