# SPDX-License-Identifier: Apache-2.0
"""Payloads into typed frames (orchestration spec, sections 1.4, 2.1 to 2.7, 3.2 and 3.3).

Whatever the bytes are, the outcome is a frame or a Refusal. A refusal has the id of its request in `request` whenever
that could be read, so that an answer reaches who waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard

from agent_intercom.orchestration import reports, usage
from agent_intercom.orchestration.contract import HEX32, IMPLEMENTER, MAX_INTEGER, ROLES, VERSION, Code, RoleState
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.frames import (
    Ack,
    Control,
    FirstFrame,
    GuardrailFrame,
    Hello,
    Lifecycle,
    Observe,
    Progress,
    ReportFrame,
    WorkerFrame,
)
from agent_intercom.wire.codec import decode
from agent_intercom.wire.errors import WireError

_ENVELOPE: Final = frozenset({"version", "type", "role", "token", "id"})
_KEYS: Final = {
    "hello": _ENVELOPE | {"generation"},
    "lifecycle": _ENVELOPE | {"state", "usage"},
    "ack": _ENVELOPE | {"delivery_id", "status"},
    "report": _ENVELOPE | {"assignment_id", "report"},
    "progress": _ENVELOPE | {"assignment_id", "phase", "usage"},
    "guardrail": _ENVELOPE | {"assignment_id", "level", "metric", "observed", "threshold"},
}
_OPTIONAL_KEYS: Final[dict[str, frozenset[str]]] = {"report": frozenset({"usage"})}
_CONTROL_KEYS: Final = _ENVELOPE | {"action", "delivery", "message"}
_OBSERVE_KEYS: Final = frozenset({"version", "type", "token", "id"})

_LIFECYCLE_STATES: Final = (RoleState.IDLE, RoleState.ACTIVE, RoleState.WAITING, RoleState.UNCERTAIN)
_ACK_STATUSES: Final = ("accepted", "duplicate", "uncertain")
_PHASES: Final = ("thinking", "streaming", "tool", "reporting")
_LEVELS: Final = ("warning", "hard")
_PERCENT: Final = "context_percent"
_METRICS: Final = ("provider_calls", "context_tokens", _PERCENT)

_SEND: Final = "send"
_CONTINUE: Final = "continue"
_OTHER_ACTIONS: Final = ("abort", "restart", "restart_failed", "redeliver", _CONTINUE)
_DELIVERIES: Final = (None, "steer", "follow-up")


def first(payload: bytes) -> FirstFrame:
    """The frame that decides what a connection is. Raises Refusal `invalid_protocol`."""
    frame = _members(payload)
    try:
        return _first(frame)
    except Refusal as refusal:
        refusal.request = _request(frame)
        raise


def worker(payload: bytes, role: str) -> WorkerFrame:
    """A frame of a worker that is authenticated as `role`, by which its report is judged.

    The role and the token that the frame itself names are only well-formed; comparing them is the caller's part. Raises
    Refusal `invalid_protocol`, and `forbidden` for a report that is not this role's to make.
    """
    frame = _members(payload)
    try:
        kind = _worker_kind(frame)
        return _READERS[kind](frame, role)
    except Refusal as refusal:
        refusal.request = _request(frame)
        raise


def _members(payload: bytes) -> dict[str, Any]:
    try:
        # The codec would read malformed UTF-8 as replacement characters; here it is refused.
        payload.decode()
        frame = decode(payload)
    except (UnicodeDecodeError, WireError) as error:
        raise _invalid("Broker message is not valid JSON", "payload") from error
    if not isinstance(frame, dict):
        raise _invalid("Broker message must be an object", "payload")
    return frame


def _request(frame: dict[str, Any]) -> str | None:
    request = frame.get("id")
    return request if _is_hex(request) else None


def _first(frame: dict[str, Any]) -> FirstFrame:
    kind = frame.get("type")
    if kind == "control":
        return _control(frame)
    if kind == "observe":
        return _observe(frame)
    kind = _worker_kind(frame)
    if kind != "hello":
        raise _invalid("Unsupported broker message type", "type")
    return _hello(frame, frame["role"])


def _control(frame: dict[str, Any]) -> Control:
    if not _is_version(frame.get("version")) or frame.keys() != _CONTROL_KEYS:
        raise _invalid("Control message is invalid", "control")
    action, delivery, message = frame["action"], frame["delivery"], frame["message"]
    if action == _SEND:
        fits = delivery in _DELIVERIES and _is_message(message)
    else:
        fits = action in _OTHER_ACTIONS and delivery is None and message is None
    if action == _CONTINUE:
        fits = fits and frame["role"] == IMPLEMENTER
    if not (fits and _is_hex(frame["id"]) and _is_hex(frame["token"]) and frame["role"] in ROLES):
        raise _invalid("Control message fields are invalid", "control")
    return Control(frame["id"], frame["token"], action, frame["role"], delivery, message)


def _observe(frame: dict[str, Any]) -> Observe:
    if not _is_version(frame.get("version")) or frame.keys() != _OBSERVE_KEYS:
        raise _invalid("Observer hello is invalid", "observe")
    if not (_is_hex(frame["id"]) and _is_hex(frame["token"])):
        raise _invalid("Observer identity is invalid", "observe")
    return Observe(frame["id"], frame["token"])


def _worker_kind(frame: dict[str, Any]) -> str:
    """The type of a worker's frame, once everything that all of them share has passed, in the order that binds."""
    if not _is_version(frame.get("version")):
        raise _invalid("Unsupported broker protocol version", "version")
    kind = frame.get("type")
    keys = _KEYS.get(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or keys is None:
        raise _invalid("Unsupported broker message type", "type")
    if not keys <= frame.keys() <= keys | _OPTIONAL_KEYS.get(kind, frozenset()):
        raise _invalid("Broker message has missing or unknown fields", kind)
    if frame["role"] not in ROLES:
        raise _invalid("Broker role is invalid", "role")
    if not _is_hex(frame["token"]):
        raise _invalid("Broker token is invalid", "token")
    if not _is_hex(frame["id"]):
        raise _invalid("Broker message ID is invalid", "id")
    return kind


def _hello(frame: dict[str, Any], _role: str) -> Hello:
    generation = frame["generation"]
    if type(generation) is not int or not 1 <= generation <= MAX_INTEGER:
        raise _invalid("Broker worker generation is invalid", "generation")
    return Hello(frame["role"], frame["token"], frame["id"], generation)


def _lifecycle(frame: dict[str, Any], _role: str) -> Lifecycle:
    state = frame["state"]
    if state not in _LIFECYCLE_STATES:
        raise _invalid("Worker lifecycle state is invalid", "state")
    used, calls_given = usage.lifecycle(frame["usage"])
    return Lifecycle(frame["role"], frame["token"], frame["id"], state, used, calls_given)


def _ack(frame: dict[str, Any], _role: str) -> Ack:
    delivery, status = frame["delivery_id"], frame["status"]
    if not _is_hex(delivery) or status not in _ACK_STATUSES:
        raise _invalid("Delivery acknowledgement is invalid", "ack")
    return Ack(frame["role"], frame["token"], frame["id"], delivery, status)


def _report(frame: dict[str, Any], role: str) -> ReportFrame:
    report = reports.accept(role, frame["report"])
    used = usage.report(frame.get("usage"))
    assignment = _assignment(frame, "Assignment ID is invalid")
    return ReportFrame(frame["role"], frame["token"], frame["id"], assignment, report, used)


def _progress(frame: dict[str, Any], _role: str) -> Progress:
    assignment = _assignment(frame, "Progress assignment ID is invalid")
    phase = frame["phase"]
    if phase not in _PHASES:
        raise _invalid("Worker progress phase is invalid", "phase")
    return Progress(frame["role"], frame["token"], frame["id"], assignment, phase, usage.progress(frame["usage"]))


def _guardrail(frame: dict[str, Any], _role: str) -> GuardrailFrame:
    assignment = _assignment(frame, "Guardrail assignment ID is invalid")
    level, metric = frame["level"], frame["metric"]
    if level not in _LEVELS:
        raise _invalid("Guardrail level is invalid", "level")
    if metric not in _METRICS:
        raise _invalid("Guardrail metric is invalid", "metric")
    read = usage.number if metric == _PERCENT else usage.count
    observed, threshold = read(frame["observed"]), read(frame["threshold"])
    if observed is None or threshold is None or not 0 < threshold <= observed:
        raise _invalid("Guardrail values are invalid", "observed")
    return GuardrailFrame(
        frame["role"], frame["token"], frame["id"], assignment, level, metric, observed, threshold
    )


def _assignment(frame: dict[str, Any], text: str) -> str:
    assignment = frame["assignment_id"]
    if not _is_hex(assignment):
        raise _invalid(text, "assignment_id")
    return assignment


def _is_version(value: object) -> bool:
    return type(value) is int and value == VERSION


def _is_hex(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and HEX32.fullmatch(value) is not None


def _is_message(value: object) -> bool:
    return isinstance(value, str) and not reports.blank(value) and reports.encodable(value)


def _invalid(text: str, field: str) -> Refusal:
    return Refusal(Code.INVALID_PROTOCOL, text, field)


_READERS: Final[dict[str, Callable[[dict[str, Any], str], WorkerFrame]]] = {
    "hello": _hello,
    "lifecycle": _lifecycle,
    "ack": _ack,
    "report": _report,
    "progress": _progress,
    "guardrail": _guardrail,
}
