# SPDX-License-Identifier: Apache-2.0
"""Payloads of the frames that the broker sends (orchestration spec, sections 1.1, 2.8, 3.2 and 3.3).

Each function gives compact JSON without the length in front. Observers and control clients compare key sets exactly;
workers ignore what they do not know.
"""

from __future__ import annotations

import re
from typing import Any, Final

from agent_intercom.orchestration.contract import MAX_ERROR, VERSION, CommandStatus, RoleState
from agent_intercom.wire import codec

_BLANKS: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")


def response(request_id: str, ok: bool, status: str, error: str | None) -> bytes:
    """The answer to a worker. `error` is shortened to what a line of a terminal can show."""
    text = None if error is None else _BLANKS.sub(" ", error).strip()[:MAX_ERROR]
    return _frame("response", id=request_id, success=ok, status=status, error=text)


def control_response(request_id: str, status: str, duplicate: bool) -> bytes:
    """The answer to a control client; only an accepted command is a success."""
    success = status == CommandStatus.ACCEPTED
    return _frame("response", id=request_id, success=success, status=status, duplicate=duplicate)


def observing(request_id: str) -> bytes:
    """The first frame to an observer."""
    return _frame("response", id=request_id, success=True, status="observing")


def context(
    delivery_id: str, round: int, kind: str, content: str, trigger: bool, deliver_as: str | None = None
) -> bytes:
    """Text for a worker beside its assignment. `deliver_as` says how to queue it, to bridges that ask."""
    extra = {} if deliver_as is None else {"deliver_as": deliver_as}
    return _frame("context", id=delivery_id, round=round, kind=kind, content=content, trigger=trigger, **extra)


def assignment(delivery_id: str, assignment_id: str, round: int, kind: str, content: str) -> bytes:
    """Work for a worker, which begins at once."""
    return _frame(
        "assignment",
        id=delivery_id,
        assignment_id=assignment_id,
        round=round,
        kind=kind,
        content=content,
        trigger=True,
    )


def abort(command_id: str) -> bytes:
    """End what the worker is doing; it acknowledges `command_id`."""
    return _frame("abort", id=command_id)


def snapshot(
    session: str, state: str, round: int, roles: list[tuple[str, str]], report_count: int, replay_complete: bool
) -> bytes:
    """How the run stands, after the replay. `roles` are pairs of role and state, in any order."""
    return _frame(
        "snapshot",
        session=session,
        state=state,
        round=round,
        roles=[{"role": role, "state": role_state} for role, role_state in sorted(roles)],
        report_count=report_count,
        report_replay_complete=replay_complete,
    )


def workflow(session: str, state: str, round: int) -> bytes:
    """The workflow changed."""
    return _frame("workflow", session=session, state=state, round=round)


def lifecycle(session: str, role: str, state: str) -> bytes:
    """A worker told its state."""
    return _frame("lifecycle", session=session, role=role, state=state)


def report(
    session: str,
    report_id: str,
    assignment_id: str,
    role: str,
    round: int,
    body: dict[str, Any],
    usage: dict[str, Any] | None,
    with_usage: bool,
) -> bytes:
    """An accepted report in its normalised form. Old observers take no `usage`, not even null: see `with_usage`."""
    extra = {"usage": usage} if with_usage else {}
    return _frame(
        "report",
        session=session,
        id=report_id,
        assignment_id=assignment_id,
        role=role,
        round=round,
        report=body,
        **extra,
    )


def old_parent_state(state: str) -> str:
    """The state of a role in words that old observers know."""
    return RoleState.DISCONNECTED if state in (RoleState.RESTARTING, RoleState.RECOVERING) else state


def _frame(kind: str, /, **members: Any) -> bytes:
    return codec.encode({"version": VERSION, "type": kind, **members})
