# SPDX-License-Identifier: Apache-2.0
"""The states of a worker, and what has to be observed for it to go from one to another (managed-workers spec, 2.2).

Pure: a worker goes in, the worker as it is then comes out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from agent_intercom.workers import leases
from agent_intercom.workers.contract import CHILDREN_REMAIN, STOP_IN_PROGRESS, TERMINAL, Code, State, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Worker


class Evidence(StrEnum):
    """What was observed."""

    CONFIRMED = "state_confirmation"
    REGISTRATION_STARTED = "registration_started"
    READINESS = "readiness_reconciled"
    TURN_STARTED = "turn_started"
    TURN_SETTLED = "turn_settled"
    PAUSED = "intentional_pause"
    RESUMED = "parked_resume"
    BLOCKED = "blocker_detected"
    CLEARED = "blocker_cleared"
    FAILURE = "failure_observed"
    STOPPED = "stop_observed"
    RECONNECTED = "connectivity_recovered"


LIVE: Final = frozenset(State) - TERMINAL
PAUSABLE: Final = frozenset({State.REGISTERING, State.READY, State.WORKING, State.WAITING})
_INTERRUPTING: Final = frozenset({State.PAUSED, State.BLOCKED, State.UNREACHABLE})


def _table() -> dict[tuple[State, State], Evidence]:
    table = {(state, state): Evidence.CONFIRMED for state in State}
    for state in LIVE:
        table[state, State.FAILED] = table[state, State.LOST] = Evidence.FAILURE
        table[state, State.STOPPED] = Evidence.STOPPED
        if state is not State.BLOCKED:
            table[state, State.UNREACHABLE] = Evidence.FAILURE
            table[state, State.BLOCKED] = Evidence.BLOCKED
    for state in PAUSABLE:
        table[state, State.PAUSED] = Evidence.PAUSED
        table[State.PAUSED, state] = Evidence.RESUMED
        table[State.BLOCKED, state] = Evidence.CLEARED
    table[State.PROVISIONING, State.REGISTERING] = Evidence.REGISTRATION_STARTED
    table[State.REGISTERING, State.READY] = Evidence.READINESS
    table[State.READY, State.WORKING] = table[State.WAITING, State.WORKING] = Evidence.TURN_STARTED
    table[State.WORKING, State.WAITING] = Evidence.TURN_SETTLED
    table[State.BLOCKED, State.UNREACHABLE] = Evidence.FAILURE
    table[State.BLOCKED, State.PAUSED] = Evidence.CLEARED
    table[State.UNREACHABLE, State.REGISTERING] = Evidence.RECONNECTED
    del table[State.PROVISIONING, State.BLOCKED]
    return table


TABLE: Final = _table()
"""What it takes to go from one state to another within a generation; what is not there cannot be.

Wider than the contract in three places, each for a reason. A worker that is frozen goes on exactly where it was, so one
in `registering` or `ready` may be paused as well, and every one resumes what it was interrupted in. What a leader left
behind blocks in any state that has a process. Beside the table, a stop fence (`fence`) may come in every live state.
"""


def alive(worker: Worker) -> bool:
    """Whether a worker has not ended, as far as is known."""
    return worker.state not in TERMINAL


def fenced(worker: Worker) -> bool:
    """Whether a live worker is being ended. Nothing takes it out of that again."""
    return worker.stop_requested_at is not None and alive(worker)


def move(worker: Worker, state: State, evidence: Evidence, now: int, reason: str = "") -> Worker:
    """The worker in another state, for which `evidence` was observed. Raises WorkerError, `conflict`."""
    before = State(worker.state)
    if TABLE.get((before, state)) is not evidence or (fenced(worker) and state in LIVE):
        raise WorkerError(Code.CONFLICT, "a worker cannot go from its state to that one", "state")
    interrupted = ""
    if state in _INTERRUPTING:
        interrupted = worker.interrupted if before in _INTERRUPTING and worker.interrupted else before
    entered = worker.entered_at if (before, worker.state_reason) == (state, reason) else now
    return replace(
        worker, state=state, state_reason=reason, interrupted=interrupted, updated_at=now, entered_at=entered
    )


def fence(worker: Worker, reason: str, now: int) -> Worker:
    """The live worker with the durable stop fence; the first reason stays, but a restart gives way to any other."""
    if fenced(worker):
        if worker.stop_reason == StopReason.RESTART and reason != StopReason.RESTART:
            return replace(worker, stop_reason=reason, updated_at=now)
        return worker
    interrupted = worker.interrupted if worker.state == State.BLOCKED else worker.state
    return replace(
        worker,
        state=State.BLOCKED,
        state_reason=STOP_IN_PROGRESS,
        interrupted=interrupted,
        stop_requested_at=now,
        stop_reason=reason,
        updated_at=now,
        entered_at=now,
    )


def advance(worker: Worker, state: State, now: int) -> Worker:
    """The worker in `ready`, `working` or `waiting`, by way of what lies between; as it is where no way leads there."""
    steps = {
        State.REGISTERING: (State.READY, Evidence.READINESS),
        State.READY: (State.WORKING, Evidence.TURN_STARTED),
        State.WORKING: (State.WAITING, Evidence.TURN_SETTLED),
        State.WAITING: (State.WORKING, Evidence.TURN_STARTED),
    }
    if state not in PAUSABLE - {State.REGISTERING}:
        return worker
    # A turn that was begun is no way back to `ready`: to have settled is all that can be said.
    goal = State.WAITING if state is State.READY and worker.state == State.WORKING else state
    if state is State.READY and worker.state == State.WAITING:
        return worker
    while worker.state != goal:
        if State(worker.state) not in steps:
            return worker
        worker = move(worker, *steps[State(worker.state)], now)
    return worker


def recover(worker: Worker, now: int) -> Worker:
    """The worker that is proved to be there, in what `unreachable` interrupted."""
    before = State(worker.interrupted or State.REGISTERING)
    if worker.state != State.UNREACHABLE:
        return worker
    worker = move(worker, State.REGISTERING, Evidence.RECONNECTED, now)
    if worker.paused_at is not None:
        return replace(move(worker, State.PAUSED, Evidence.PAUSED, now), interrupted=before)
    if worker.ended is not None:
        return move(worker, State.BLOCKED, Evidence.BLOCKED, now, CHILDREN_REMAIN)
    return advance(worker, before, now)


def finish(worker: Worker, state: State, now: int, **fields: object) -> Worker:
    """The worker that has ended, `failed`, `lost` or `stopped`, with nothing left that a timer would act on."""
    evidence = Evidence.STOPPED if state is State.STOPPED else Evidence.FAILURE
    ended = leases.cleared(move(worker, state, evidence, now))
    return replace(ended, interrupted="", placed=None, **fields)


def reached(worker: Worker, until: str) -> bool:
    """Whether a worker is where `wait` waits for: `ready`, `idle`, `end`, `checkpoint` or the name of a state.

    Raises WorkerError, `invalid_request`.
    """
    match until:
        case "ready":
            return worker.state in (State.READY, State.WORKING, State.WAITING)
        case "idle":
            return worker.state == State.WAITING
        case "end":
            return not alive(worker)
        case "checkpoint":
            return worker.checkpoint_requested_at is not None
        case _ if until in set(State):
            return worker.state == until
        case _:
            raise WorkerError(Code.INVALID, "it is ready, idle, end, checkpoint or a state", "until")
