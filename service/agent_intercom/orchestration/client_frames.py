# SPDX-License-Identifier: Apache-2.0
"""What the client reads and writes, typed (orchestration spec, sections 2.8, 3.2 and 3.3).

Towards control clients and observers the key sets are exact; frames to workers may carry keys that nobody knows yet.
Every reader here raises Refusal `orchestration_error` for a frame that is not what the contract has.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from agent_intercom.orchestration.contract import (
    MAX_FRAME,
    MAX_MESSAGE_UNITS,
    MAX_REPORT,
    VERSION,
    Code,
)
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire import codec

MAX_SUMMARY_UNITS: Final = 2_000

Hex32: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-f0-9]{32}$", max_length=32)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Round: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Version: TypeAlias = Literal[1]
WorkflowState: TypeAlias = Literal[
    "starting", "connecting", "initializing", "active", "needs_attention", "ready", "uncertain"
]
WorkerState: TypeAlias = Literal["disconnected", "idle", "active", "waiting", "uncertain", "restarting", "recovering"]


class ControlResponse(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="response"):
    """The one answer to a `control` request."""

    version: Version
    id: Hex32
    success: bool
    status: Literal["accepted", "uncertain", "conflict"]
    duplicate: bool


class Response(msgspec.Struct, tag_field="type", tag="response"):
    """The answer to a worker's request. `status` is the error code where `success` is false."""

    version: Version
    id: Hex32
    success: bool
    status: Text
    error: str | None = None


class Context(msgspec.Struct, tag_field="type", tag="context", kw_only=True):
    """Text for the worker; with `trigger` it begins a turn. `id` is the delivery to acknowledge."""

    version: Version
    id: Hex32
    round: Round
    kind: str
    content: str
    trigger: bool


class Assignment(msgspec.Struct, tag_field="type", tag="assignment", kw_only=True):
    """Work for the worker, to be ended by a report. `id` is the delivery to acknowledge."""

    version: Version
    id: Hex32
    assignment_id: Hex32
    round: Round
    kind: str
    content: str
    trigger: bool


class Abort(msgspec.Struct, tag_field="type", tag="abort"):
    """The running operation is to be aborted. `id` is the control command, and the delivery to acknowledge."""

    version: Version
    id: Hex32


class Observing(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="response"):
    """The first frame of an observer."""

    version: Version
    id: Hex32
    success: Literal[True]
    status: Literal["observing"]


class RoleOf(msgspec.Struct, forbid_unknown_fields=True):
    """A role within a snapshot."""

    role: Text
    state: WorkerState


class Snapshot(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="snapshot"):
    """Where the run stands, once per observer. Without `report_replay_complete` earlier reports are lost."""

    version: Version
    session: Text
    state: WorkflowState
    round: Round
    roles: Annotated[list[RoleOf], msgspec.Meta(max_length=5)]
    report_count: Count
    report_replay_complete: bool


class WorkflowChanged(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="workflow"):
    """The workflow changed."""

    version: Version
    session: Text
    state: WorkflowState
    round: Round


class RoleChanged(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="lifecycle"):
    """A worker told its state."""

    version: Version
    session: Text
    role: Text
    state: WorkerState


class Cost(msgspec.Struct, forbid_unknown_fields=True):
    """Money, in the provider's currency."""

    total: Amount


class ReportedUsage(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """What an assignment used: tokens and calls. What is unknown is absent, never null."""

    input: Count
    output: Count
    cache_read: Count
    cache_write: Count
    cost: Cost
    provider_calls: Count
    reasoning: Count | msgspec.UnsetType = msgspec.UNSET
    context_tokens: Count | msgspec.UnsetType = msgspec.UNSET
    context_window: Count | msgspec.UnsetType = msgspec.UNSET
    context_percent: Amount | msgspec.UnsetType = msgspec.UNSET
    peak_context_tokens: Count | msgspec.UnsetType = msgspec.UNSET


class Reported(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="report"):
    """A report was accepted; `report` is its body. `usage` is there only where the run is set so."""

    version: Version
    session: Text
    id: Hex32
    assignment_id: Hex32
    role: Text
    round: Round
    report: dict[str, Any]
    usage: ReportedUsage | None | msgspec.UnsetType = msgspec.UNSET


Delivery: TypeAlias = Context | Assignment | Abort
WorkerBound: TypeAlias = Response | Context | Assignment | Abort
Observed: TypeAlias = Snapshot | WorkflowChanged | RoleChanged | Reported

_Frame = TypeVar("_Frame")

_control_response = msgspec.json.Decoder(ControlResponse)
_observing = msgspec.json.Decoder(Observing)
_observed: msgspec.json.Decoder[Observed] = msgspec.json.Decoder(Observed)
_worker_bound: msgspec.json.Decoder[WorkerBound] = msgspec.json.Decoder(WorkerBound)
_worker_bound_types: Final = frozenset({"response", "context", "assignment", "abort"})


class _Envelope(msgspec.Struct):
    version: Any = None
    type: Any = None


_envelope = msgspec.json.Decoder(_Envelope)


def random_id() -> str:
    """128 random bits, as every id of the protocol has them."""
    return os.urandom(16).hex()


def encode(kind: str, **keys: Any) -> bytes:
    """The payload of a frame. Raises Refusal `invalid_protocol` where it would be longer than a frame may be."""
    try:
        payload = codec.encode({"version": VERSION, "type": kind, **keys})
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(Code.INVALID_PROTOCOL, f"the {kind} cannot be written as JSON") from error
    if len(payload) > MAX_FRAME:
        raise Refusal(Code.INVALID_PROTOCOL, f"the {kind} is longer than a frame may be", "length")
    return payload


def control_response(payload: bytes, request_id: str) -> ControlResponse:
    """Read the answer to the request `request_id`."""
    response = _read(_control_response, payload)
    if response.id != request_id or response.success != (response.status == "accepted"):
        raise _invalid()
    return response


def observing(payload: bytes, request_id: str) -> None:
    """Read the first frame after `observe`."""
    if _read(_observing, payload).id != request_id:
        raise _invalid()


def observed(payload: bytes) -> Observed:
    """Read a frame that an observer gets. Roles of a snapshot are in the order of their names, each once."""
    frame = _read(_observed, payload)
    if isinstance(frame, Snapshot):
        names = [entry.role for entry in frame.roles]
        if any(first >= second for first, second in zip(names, names[1:], strict=False)):
            raise _invalid()
    elif isinstance(frame, Reported):
        _check_body(frame.report)
    return frame


def worker_bound(payload: bytes) -> WorkerBound | None:
    """Read a frame that a worker gets; None for another version or an unknown type, which a worker passes over."""
    envelope = _read(_envelope, payload)
    if type(envelope.version) is not int or envelope.version != VERSION:
        return None
    if not isinstance(envelope.type, str) or envelope.type not in _worker_bound_types:
        return None
    frame = _read(_worker_bound, payload)
    if isinstance(frame, Context | Assignment):
        content = frame.content
        if not codec.trimmed(content) or codec.utf16_length(content) > MAX_MESSAGE_UNITS:
            raise _invalid()
    return frame


def _check_body(report: dict[str, Any]) -> None:
    summary = report.get("summary")
    if not isinstance(summary, str) or codec.utf16_length(summary) > MAX_SUMMARY_UNITS:
        raise _invalid()
    if len(codec.encode(report)) > MAX_REPORT:
        raise _invalid()


def _read(decoder: msgspec.json.Decoder[_Frame], payload: bytes) -> _Frame:
    if len(payload) > MAX_FRAME:
        raise _invalid()
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid() from error


def _invalid() -> Refusal:
    return Refusal(Code.ERROR, "Broker response is invalid")
