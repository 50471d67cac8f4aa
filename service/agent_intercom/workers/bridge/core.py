# SPDX-License-Identifier: Apache-2.0
"""The rules of the bridge: an event and the time in, effects out (docs/workers.md; orchestration spec, section 2).

Pure: no socket, file, clock or process. What is to be said to the broker is not queued but follows from what is true
when it can be said, so that nothing has to be taken back when a connection ends. The effects of one event are carried
out in order, and `Remember` comes first: nothing is acknowledged, begun or answered that a crash would lose.

Times are milliseconds of the monotonic clock.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from agent_intercom.orchestration.budget import Number
from agent_intercom.orchestration.client_frames import Abort, Assignment, Context, Response
from agent_intercom.orchestration.contract import Code
from agent_intercom.workers.bridge import events, spending
from agent_intercom.workers.bridge.desk import Desk
from agent_intercom.workers.bridge.memory import Memory, Work
from agent_intercom.workers.bridge.volatile import Child, Request

FIRST_DELAY: Final = 100
LAST_DELAY: Final = 5_000
"""Between attempts to connect; doubled each time."""

HELLO_MS: Final = 10_000
ANSWER_MS: Final = 60_000
"""How long the broker may take to answer before it is connected to again."""

LINGER_MS: Final = 10_000
"""How long a command may go on after its report was accepted."""

KILL_MS: Final = 5_000
"""From SIGTERM to SIGKILL."""

ENDED: Final = 0
FAILED: Final = 1
REPLACED: Final = 3
"""What the bridge exits with: the run has ended; a fault; another worker has taken over."""

_FINAL: Final = frozenset({Code.INVALID_PROTOCOL, Code.FORBIDDEN, Code.CONFLICT})
"""Refusals of what is not to be said again."""

_NOTIFIED: Final = {"idle": "ready", "active": "working", "waiting": "waiting"}


class Bridge:
    """One worker of a role, in one generation.

    `thresholds` are the guardrails by level and metric; `random_id` makes the ids of requests.
    """

    def __init__(
        self,
        memory: Memory,
        thresholds: Mapping[str, Mapping[str, Number]],
        random_id: Callable[[], str] = lambda: os.urandom(16).hex(),
    ) -> None:
        self.memory = memory
        self.thresholds = thresholds
        self.child: Child | None = None
        self.over = False
        self._random_id = random_id
        self._effects: list[events.Effect] = []
        self._left: list[events.Effect] = []
        self._desk = Desk(memory, self._effects)
        self._changed = False
        self._begin = False
        self._terminated = False
        # The connection.
        self._linked = False
        self._greeted = False
        self._looking = False
        self._delay = FIRST_DELAY
        self._connect_at: int | None = None
        self._request: Request | None = None
        # What the broker, and the worker service, were told.
        self._acks: list[tuple[str, str]] = []
        self._told: str | None = None
        self._notified = ""

    # Events.

    def start(self, now: int) -> list[events.Effect]:
        """Begin, after whatever a bridge of this generation before has left running was ended."""
        work = self.memory.work
        if self.memory.spending.running is not None:
            self.memory.spending.ended()
            self._changed = True
        if work is not None:
            # It may have been lost with its connection; that it is said twice is harmless.
            self._acks.append((work.delivery, "accepted"))
            self._begin = not work.begun and self.memory.report is None
        self._connect_at = now
        return self._settled(now)

    def step(self, event: events.Event, now: int) -> list[events.Effect]:
        """What is to be done because of `event`."""
        if self.over:
            return []
        match event:
            case events.Connected():
                self._linked, self._greeted, self._connect_at = True, False, None
            case events.Lost():
                self._lost(event, now)
            case events.Received():
                self._received(event, now)
            case events.Ended():
                self._command_ended(event.code)
            case events.Looked():
                self._looked(event.generation)
            case events.Reporting():
                self._desk.reporting(event, now, running=self.child is not None)
            case events.Progressing():
                self._desk.progressing(event, now, running=self.child is not None, greeted=self._greeted)
            case events.Left():
                self._desk.left(event.ticket)
            case events.Terminated():
                self._terminated = True
                self._stop(now)
            case events.Tick():
                pass
        return self._settled(now)

    @property
    def wake_at(self) -> int | None:
        """When a `Tick` is due; None: never."""
        times = [self._connect_at, self._desk.wake_at(free=self._greeted and self._request is None)]
        times += [self.child.stop_at, self.child.kill_at] if self.child else []
        times += [self._request.overdue_at] if self._request else []
        return min((time for time in times if time is not None), default=None)

    # The connection.

    def _lost(self, event: events.Lost, now: int) -> None:
        silent = self._linked and not self._greeted
        self._hang_up(now)
        if event.gone:
            self._exit(ENDED)
        elif silent:
            self._look()

    def _hang_up(self, now: int) -> None:
        """There is no connection any more: what was asked is asked again, but what nobody needs to know."""
        request, self._request = self._request, None
        self._desk.cut(request.ticket if request is not None and request.kind == "progress" else None)
        self._linked = self._greeted = False
        self._told = None
        self._connect_at = now + self._delay
        self._delay = min(2 * self._delay, LAST_DELAY)

    def _leave(self, now: int) -> None:
        self._effects.append(events.Disconnect())
        self._hang_up(now)

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self._effects.append(events.Look())

    def _looked(self, generation: int | None) -> None:
        self._looking = False
        if generation is not None and generation != self.memory.generation:
            self._exit(REPLACED)

    def _exit(self, status: int) -> None:
        """Be over at once: nothing that the command would still do is wanted."""
        self._effects += [events.Signal(signal.SIGKILL)] if self.child else []
        self._effects.append(events.Exit(status))
        self.over = True

    # What the broker sends.

    def _received(self, event: events.Received, now: int) -> None:
        match event.frame:
            case Response() as response:
                self._answered(response, now)
            case Context() as context:
                self._context(context, event.deliver_as)
            case Assignment() as assignment:
                self._assignment(assignment, now)
            case Abort() as abort:
                if not self._seen(abort.id):
                    self._begin = False
                    self._stop(now)

    def _seen(self, delivery: str) -> bool:
        """Note a delivery, and that it is to be acknowledged; whether it was there before."""
        again = self.memory.see(delivery)
        self._changed |= not again
        self._acks.append((delivery, "duplicate" if again else "accepted"))
        return again

    def _context(self, frame: Context, deliver_as: str | None) -> None:
        if self._seen(frame.id):
            return
        memory, child, how = self.memory, self.child, deliver_as or "followUp"
        if frame.kind == "baseline":
            memory.baseline = frame.content
        elif frame.kind == "run_state":
            memory.run_state = frame.content
        else:
            message = memory.take_message(frame.content, how)
            if child is not None and child.kill_at is None:
                self._effects.append(events.Hand(message))
        if not frame.trigger or memory.work is None or memory.report is not None:
            return
        if child is None:
            self._begin = True
        elif how == "followUp" or child.kill_at is not None:
            child.again = True

    def _assignment(self, frame: Assignment, now: int) -> None:
        if self._seen(frame.id) or frame.assignment_id in self.memory.done:
            return
        work, memory, child = self.memory.work, self.memory, self.child
        if work is None or work.assignment_id != frame.assignment_id:
            memory.spending.assigned()
            memory.work = Work(frame.id, frame.assignment_id, frame.round, frame.kind, frame.content)
            self._begin = True
            if child is not None and child.stop_at is None:
                self._stop(now)
            return
        work.delivery, work.round, work.content = frame.id, frame.round, frame.content
        if memory.report is None and (child is None or child.kill_at is not None):
            self._begin = True

    # The command.

    def _stop(self, now: int) -> None:
        """End the command, if it runs: SIGTERM now."""
        if self.child is not None and self.child.kill_at is None:
            self.child.again = False
            self.child.stop_at, self.child.kill_at = None, now + KILL_MS
            self._effects.append(events.Signal(signal.SIGTERM))

    def _command_ended(self, code: int | None) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        self.memory.spending.ended()
        self._changed = True
        work = self.memory.work
        if work is not None and work.assignment_id == child.assignment_id and self.memory.report is None:
            self._begin |= child.again
            self._effects.append(events.Silent(work.kind, work.round, code))

    def _forget(self, assignment_id: str, now: int) -> None:
        """The broker does not know this assignment as ours: what is done for it is not wanted."""
        memory = self.memory
        if memory.report is not None and memory.report.assignment_id == assignment_id:
            memory.report = None
        if memory.work is not None and memory.work.assignment_id == assignment_id:
            memory.work = None
            self._begin = False
        if self.child is not None and self.child.assignment_id == assignment_id:
            self._stop(now)
        self._desk.over(assignment_id)
        self._changed = True

    # What the broker answers.

    def _answered(self, frame: Response, now: int) -> None:
        request = self._request
        if request is None or (frame.id != request.id and frame.success):
            return
        # Under an id of the broker's own it refuses what it could not read: the one request that there is.
        self._request = None
        if frame.success:
            self._succeeded(request, frame.status, now)
            return
        self._refused(request, frame, now)
        if request.kind != "progress" or frame.status != Code.CONFLICT:
            if frame.status == Code.UNAUTHORIZED:
                self._look()
            self._leave(now)

    def _succeeded(self, request: Request, status: str, now: int) -> None:
        match request.kind:
            case "hello":
                self._greeted = True
            case "ack":
                self._acks.pop(0)
            case "lifecycle":
                self._told = request.about
            case "guardrail":
                self._crossing_told(request)
            case "progress":
                found = spending.crossings(self.memory.spending, self.thresholds)
                crossed = [msgspec.structs.asdict(each) for each in found]
                self._desk.answer(request.ticket, {"ok": True, "status": status, "crossed": crossed})
            case "report":
                self._report_taken(request, status, now)

    def _report_taken(self, request: Request, status: str, now: int) -> None:
        answer = {"ok": True, "status": status, "assignment_id": request.about}
        if request.ticket is None:
            kept = self.memory.report
            if kept is not None and kept.assignment_id == request.about:
                self._left.append(events.Publish(kept.round, str(kept.report.get("kind")), kept.report))
            self.memory.reported(request.about)
            self._changed = True
            self._desk.over(request.about)
            if self.memory.work is None:
                self._told, self._begin = None, False
            if self.child is not None and self.child.assignment_id == request.about and self.child.kill_at is None:
                self.child.stop_at = now + LINGER_MS
        self._desk.answered(answer, request.ticket)

    def _refused(self, request: Request, frame: Response, now: int) -> None:
        told = {"ok": False, "code": frame.status, "text": frame.error or "refused", "field": "", "by": "broker"}
        if request.kind == "progress":
            self._desk.answer(request.ticket, told)
        if frame.status not in _FINAL:
            return
        match request.kind:
            case "ack":
                self._acks.pop(0)
            case "guardrail":
                self._crossing_told(request)
            case "report":
                if request.ticket is None:
                    self.memory.report = None
                    self._changed = True
                self._desk.answered(told, request.ticket)
        own = request.kind == "progress" or (request.kind == "report" and request.ticket is None)
        if own and frame.status == Code.CONFLICT:
            self._forget(request.about, now)

    def _crossing_told(self, request: Request) -> None:
        work = self.memory.work
        if work is not None and work.assignment_id == request.about and request.crossing is not None:
            work.crossed.append(request.crossing)
            self._changed = True

    # What follows.

    def _settled(self, now: int) -> list[events.Effect]:
        """Whatever is due, after all that was done about the event."""
        if not self.over:
            self._clock(now)
        if self.over:
            # Nothing is touched any more, the memory included.
            return self._taken()
        begun = self._begun()
        if self._linked and self._request is None:
            self._say(now)
        if self._greeted and (state := _NOTIFIED[self._state()]) != self._notified:
            self._notified = state
            self._effects.append(events.Notify(state))
        if self._terminated and self.child is None:
            self._effects.append(events.Exit(128 + signal.SIGTERM))
            self.over = True
        effects = self._taken()
        if self._changed or self._desk.changed:
            self._changed = self._desk.changed = False
            effects.insert(0, events.Remember(self.memory))
        # Before that: after a crash in between, the report is said and left once more.
        effects, self._left = [*self._left, *effects], []
        return effects if begun is None else [*effects, begun]

    def _taken(self) -> list[events.Effect]:
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _clock(self, now: int) -> None:
        child, request = self.child, self._request
        if child is not None and child.kill_at is not None and now >= child.kill_at:
            child.kill_at = now + KILL_MS
            self._effects.append(events.Signal(signal.SIGKILL))
        elif child is not None and child.stop_at is not None and now >= child.stop_at:
            self._stop(now)
        self._desk.clock(now)
        if request is not None and now >= request.overdue_at:
            self._leave(now)
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            self._effects.append(events.Connect())

    def _begun(self) -> events.Begin | None:
        """Run the command, if that is due and none runs."""
        work = self.memory.work
        if not self._begin or self.child is not None or work is None or self._terminated:
            return None
        self._begin = False
        work.begun = self._changed = True
        self.child = Child(work.assignment_id)
        return events.Begin(work.assignment_id, work.kind, work.round, self.memory.text())

    def _state(self) -> str:
        """What is true of this worker, as `lifecycle` says it."""
        if self.memory.work is None:
            return "idle"
        return "active" if self.child is not None or self._begin else "waiting"

    def _say(self, now: int) -> None:
        """Make the next request, if there is one."""
        memory, state = self.memory, self._state()
        if not self._greeted:
            self._ask(now, "hello", "", generation=memory.generation)
        elif self._acks:
            delivery, status = self._acks[0]
            self._ask(now, "ack", "", delivery_id=delivery, status=status)
        elif self._told is None and memory.report is None:
            self._lifecycle(now, state)
        elif (crossing := self._untold()) is not None:
            assert memory.work is not None
            keys = msgspec.structs.asdict(crossing)
            request = self._ask(now, "guardrail", memory.work.assignment_id, named=True, **keys)
            request.crossing = crossing.level, crossing.metric
        elif (kept := memory.report) is not None:
            usage: dict[str, Any] = {} if kept.usage is None else {"usage": kept.usage}
            self._ask(now, "report", kept.assignment_id, named=True, report=kept.report, **usage)
        elif self._desk.retold:
            ticket, kept = next(iter(self._desk.retold.items()))
            self._ask(now, "report", kept.assignment_id, named=True, report=kept.report).ticket = ticket
        elif self._told != state:
            self._lifecycle(now, state)
        elif (sign := self._desk.sign(now)) is not None:
            usage = {"usage": memory.spending.cumulative()}
            self._ask(now, "progress", sign.assignment_id, named=True, phase=sign.phase, **usage).ticket = sign.ticket
        else:
            # Not before: what the broker takes of it may be less than all, each time anew.
            self._delay = FIRST_DELAY

    def _lifecycle(self, now: int, state: str) -> None:
        self._ask(now, "lifecycle", state, state=state, usage=self.memory.spending.cumulative())

    def _untold(self) -> spending.Crossing | None:
        """A threshold that the assignment has crossed, and that was not told."""
        work = self.memory.work
        if work is None:
            return None
        found = spending.crossings(self.memory.spending, self.thresholds)
        return next((each for each in found if (each.level, each.metric) not in work.crossed), None)

    def _ask(self, now: int, kind: str, about: str, *, named: bool = False, **keys: Any) -> Request:
        """Make a request; with `named` it has the key `assignment_id`."""
        patience = HELLO_MS if kind == "hello" else ANSWER_MS
        self._request = request = Request(self._random_id(), kind, about, now + patience)
        self._effects.append(events.Send(request.id, kind, {"assignment_id": about, **keys} if named else keys))
        return request
