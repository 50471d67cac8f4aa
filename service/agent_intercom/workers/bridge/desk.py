# SPDX-License-Identifier: Apache-2.0
"""The rules for what a command says through the bridge: its report, and signs of life (docs/workers.md). Pure.

A report is kept in the memory first; whoever reports is told what the broker answered, or that it has not answered yet.
Times are milliseconds of the monotonic clock.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agent_intercom.orchestration import contract, reports
from agent_intercom.orchestration.contract import Code, Kind
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers.bridge import events, fields
from agent_intercom.workers.bridge.memory import Kept, Memory, Work

PROGRESS_MS: Final = 2_000
"""The least time between two signs of life of the same phase."""

PATIENCE_MS: Final = 25_000
"""How long somebody who reports waits for the broker's answer."""

NOT_ACCEPTED: Final = "not_accepted_yet"
PHASES: Final = ("thinking", "streaming", "tool", "reporting")

_GOES_ON: Final = "the broker is told when it can be"
_NONE_OPEN: Final = "no assignment is open"
_NOT_OPEN: Final = "that is not the open assignment of this worker"


class Sign(msgspec.Struct):
    """A sign of life that was not told yet. `ticket`: who waits for it."""

    assignment_id: str
    phase: str
    ticket: int | None


class Desk:
    """Who waits for an answer, and what is to be said for them.

    `retold` has reports on assignments that were reported on before, by ticket: the broker knows which one counts.
    """

    def __init__(self, memory: Memory, effects: list[events.Effect]) -> None:
        self.memory = memory
        self.changed = False
        self.retold: dict[int, Kept] = {}
        self._effects = effects
        self._reporters: dict[int, int] = {}
        self._sign: Sign | None = None
        self._signed_at: int | None = None
        self._signed_phase = ""

    # What a command says.

    def reporting(self, event: events.Reporting, now: int, *, running: bool) -> None:
        """Somebody reports. `running`: the command runs, so that its usage counts."""
        memory, work = self.memory, self.memory.work
        about = event.assignment_id or (work.assignment_id if work else None)
        open_work = work if work is not None and work.assignment_id == about else None
        if about is None or (open_work is None and about not in memory.done):
            self.refuse(event.ticket, Code.CONFLICT, _NONE_OPEN if about is None else _NOT_OPEN)
            return
        try:
            body = self._body(event.report, about, open_work)
            if event.usage is not None and open_work is not None and running:
                self._spend(event.usage)
        except Refusal as refusal:
            self.refuse(event.ticket, refusal.code, refusal.text, refusal.field)
            return
        if open_work is None:
            self.retold[event.ticket] = Kept(about, body)
        elif memory.report is None:
            memory.report = Kept(about, body, memory.spending.report(), open_work.round)
            self.changed = True
        elif (memory.report.assignment_id, memory.report.report) != (about, body):
            text = "another report is kept already, and the broker has not answered it yet"
            self.refuse(event.ticket, Code.CONFLICT, text)
            return
        self._reporters[event.ticket] = now + PATIENCE_MS

    def progressing(self, event: events.Progressing, now: int, *, running: bool, greeted: bool) -> None:
        """Somebody says how it goes. `greeted`: the broker has taken this worker."""
        work, phase = self.memory.work, event.phase
        about = event.assignment_id or (work.assignment_id if work else None)
        if work is None or about != work.assignment_id:
            self.refuse(event.ticket, Code.CONFLICT, _NONE_OPEN if about is None else _NOT_OPEN)
            return
        if not isinstance(phase, str) or phase not in PHASES:
            self.refuse(event.ticket, Code.INVALID_PROTOCOL, f"the phase must be one of {' '.join(PHASES)}", "phase")
            return
        try:
            if event.usage is not None and running:
                self._spend(event.usage)
        except Refusal as refusal:
            self.refuse(event.ticket, refusal.code, refusal.text, refusal.field)
            return
        self._drop_sign("a later one took its place")
        waits = greeted and (phase != self._signed_phase or not self._soon(now))
        self._sign = Sign(work.assignment_id, phase, event.ticket if waits else None)
        if not waits:
            often = f"the broker is told at most every {PROGRESS_MS // 1000} seconds"
            self._note(event.ticket, often if greeted else _GOES_ON)

    def left(self, ticket: int) -> None:
        """Nobody waits for the answer any more."""
        self._reporters.pop(ticket, None)
        self.retold.pop(ticket, None)
        if self._sign is not None and self._sign.ticket == ticket:
            self._sign.ticket = None

    # What the broker answers.

    def answered(self, answer: dict[str, Any], ticket: int | None = None) -> None:
        """Tell what became of the report that is kept, or, with a `ticket`, of one that was told again."""
        found = [ticket] if ticket is not None else [each for each in self._reporters if each not in self.retold]
        for each in found:
            self.retold.pop(each, None)
            if self._reporters.pop(each, None) is not None:
                self.answer(each, answer)

    def over(self, assignment_id: str) -> None:
        """There is nothing to be told of an assignment any more."""
        if self._sign is not None and self._sign.assignment_id == assignment_id:
            self._drop_sign("the assignment is over")

    def cut(self, ticket: int | None) -> None:
        """The connection is gone, and with it the answer to a sign of life that `ticket` waits for."""
        self._note(ticket, _GOES_ON)
        if self._sign is not None:
            self._note(self._sign.ticket, _GOES_ON)
            self._sign.ticket = None

    def answer(self, ticket: int | None, answer: dict[str, Any]) -> None:
        """Answer whoever waits."""
        if ticket is not None:
            self._effects.append(events.Reply(ticket, answer))

    def refuse(self, ticket: int, code: str, text: str, field: str = "") -> None:
        """Refuse what the broker is not told."""
        self.answer(ticket, {"ok": False, "code": code, "text": text, "field": field, "by": "bridge"})

    # Time.

    def wake_at(self, *, free: bool) -> int | None:
        """When `clock` or `sign` is due. `free`: the broker could be told something."""
        times = list(self._reporters.values())
        if free and self._sign is not None and self._signed_at is not None:
            times.append(self._signed_at + PROGRESS_MS)
        return min(times, default=None)

    def clock(self, now: int) -> None:
        """Tell those who have waited long enough that there is no answer."""
        for ticket in [each for each, until in self._reporters.items() if now >= until]:
            del self._reporters[ticket]
            if self.retold.pop(ticket, None) is not None:
                text = "the broker does not answer; an earlier report on this assignment was accepted, and counts"
                self.refuse(ticket, Code.BROKER_NOT_READY, text)
                continue
            text = "the broker has not answered; the bridge keeps the report on disk, and says it again until it does"
            told = {"ok": False, "code": NOT_ACCEPTED, "text": text, "field": "", "by": "bridge", "kept": True}
            self.answer(ticket, told)

    def sign(self, now: int) -> Sign | None:
        """The sign of life that is to be told now, if any."""
        sign = self._sign
        if sign is None or (sign.phase == self._signed_phase and self._soon(now)):
            return None
        self._sign = None
        self._signed_at, self._signed_phase = now, sign.phase
        return sign

    def _soon(self, now: int) -> bool:
        return self._signed_at is not None and now < self._signed_at + PROGRESS_MS

    def _drop_sign(self, why: str) -> None:
        if self._sign is not None:
            self._note(self._sign.ticket, why)
            self._sign = None

    def _note(self, ticket: int | None, why: str) -> None:
        self.answer(ticket, {"ok": True, "status": "noted", "text": why})

    def _body(self, report: object, about: str, work: Work | None) -> dict[str, Any]:
        """The report as it is to be sent. What the broker would refuse is refused here, where the connection stays."""
        if not isinstance(report, dict):
            raise Refusal(Code.INVALID_PROTOCOL, "Report must be an object", "report")
        kind = work.kind if work else self._kind_of_done(about, report.get("kind"))
        body = fields.complete(report, self.memory.role, kind)
        reports.accept(self.memory.role, body)
        return body

    def _kind_of_done(self, about: str, said: object) -> str:
        """The kind of an assignment that is over. Its first report counts, so that what is `said` does no harm."""
        planned = about in self.memory.plans or said == Kind.PLAN
        return Kind.PLAN if planned else contract.report_kind(self.memory.role)

    def _spend(self, usage: object) -> None:
        if not isinstance(usage, dict):
            raise Refusal(Code.INVALID_PROTOCOL, "Usage must be an object", "usage")
        self.memory.spending.said(usage)
        self.changed = True
