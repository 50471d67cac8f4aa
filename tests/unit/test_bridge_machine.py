# SPDX-License-Identifier: Apache-2.0
"""The bridge's rules under everything that may happen to them, in any order: nothing is lost, and nothing done twice.

What must never be is asserted by the stage; what has to be true in the end, here.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.bridgestage import Stage


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()

    @initialize(greeted=st.booleans())
    def begin(self, greeted: bool) -> None:
        if greeted:
            self.stage.settle()
            self.stage.assign()

    @rule()
    def settle(self) -> None:
        self.stage.settle()

    @rule(ms=st.sampled_from([1, 100, 2_000, 10_000]))
    def time(self, ms: int) -> None:
        self.stage.tick(ms)

    @precondition(lambda self: self.stage.wanted)
    @rule(there=st.booleans())
    def connect(self, there: bool) -> None:
        self.stage.connect() if there else self.stage.refuse()

    @precondition(lambda self: self.stage.linked)
    @rule()
    def drop(self) -> None:
        self.stage.drop()

    @precondition(lambda self: self.stage.request is not None)
    @rule(times=st.integers(1, 5))
    def answer(self, times: int) -> None:
        for _ in range(times):
            if self.stage.request is not None:
                self.stage.answer()

    @precondition(lambda self: self.stage.greeted and self.stage.active is None)
    @rule(lost=st.booleans())
    def assign(self, lost: bool) -> None:
        self.stage.assign(lost)
        if lost:
            self.stage.drop()

    @precondition(lambda self: self.stage.greeted and self.stage.active is not None)
    @rule()
    def redeliver(self) -> None:
        self.stage.redeliver()

    @precondition(lambda self: self.stage.greeted)
    @rule(trigger=st.booleans(), deliver_as=st.sampled_from([None, "steer", "followUp"]))
    def message(self, trigger: bool, deliver_as: str | None) -> None:
        self.stage.context("operator_message", "Words.", trigger, deliver_as)

    @precondition(lambda self: self.stage.greeted)
    @rule(kind=st.sampled_from(["baseline", "run_state"]))
    def context(self, kind: str) -> None:
        self.stage.context(kind, "Text.")

    @precondition(lambda self: self.stage.greeted)
    @rule()
    def abort(self) -> None:
        self.stage.abort()

    @precondition(lambda self: self.stage.child is not None)
    @rule()
    def end(self) -> None:
        self.stage.end()

    @rule(summary=st.sampled_from(["Done.", "Otherwise.", ""]), again=st.booleans())
    def report(self, summary: str, again: bool) -> None:
        last = next(iter(self.stage.accepted), None) if again else None
        self.stage.report(last, summary)

    @rule(phase=st.sampled_from(["tool", "thinking", "dancing"]))
    def progress(self, phase: str) -> None:
        self.stage.progress(phase)

    @rule()
    def crash(self) -> None:
        self.stage.crash()

    @invariant()
    def alive(self) -> None:
        assert self.stage.status is None

    def teardown(self) -> None:
        """With a broker that answers everything comes to rest, and the broker has been told what is true."""
        stage = self.stage
        stage.settle()
        if stage.active is not None and stage.active not in stage.received:
            stage.redeliver()
            stage.settle()
        truth = "idle" if stage.active is None else "active" if stage.child == stage.active else "waiting"
        if stage.child is not None and stage.child != stage.active:
            # One that is being ended, for work that is over.
            truth = "idle" if stage.active is None else "active"
        assert stage.state == truth
        assert stage.active is None or stage.deliveries[stage.active] in stage.acked
        # A sign of life may wait for its time; who reports does not.
        stage.tick(70_000)
        stage.settle()
        assert not stage.waiting
        if stage.child is not None:
            stage.end()
            stage.settle()
        known = stage.kept() if stage.disk is not None else None
        assert known is None or known.report is None
        assert (known.work.assignment_id if known and known.work else None) == stage.active


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
