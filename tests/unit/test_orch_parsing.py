# SPDX-License-Identifier: Apache-2.0
"""Payloads into frames: check order, every text, every wrong type (orchestration spec, 1.4, 1.5, 2, 3.2, 3.3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.orchestration import frames, parsing, rows
from agent_intercom.orchestration.contract import MAX_INTEGER, ROLES, Code
from agent_intercom.orchestration.errors import Refusal

ID = "0123456789abcdef" * 2
TOKEN = "a" * 32
WORK = "b" * 32

ENVELOPE: dict[str, Any] = {"version": 1, "role": "implementer", "token": TOKEN, "id": ID}
USED: dict[str, Any] = {
    "input": 1, "output": 2, "cacheRead": 3, "cacheWrite": 4, "cost": {"total": 0.25}, "providerCalls": 5,
}
USAGE = rows.Usage(
    provider_calls=5, input_tokens=1, output_tokens=2, cache_read_tokens=3, cache_write_tokens=4, cost_total=0.25
)
HELLO: dict[str, Any] = {**ENVELOPE, "type": "hello", "generation": 1}
LIFECYCLE: dict[str, Any] = {**ENVELOPE, "type": "lifecycle", "state": "idle", "usage": None}
ACK: dict[str, Any] = {**ENVELOPE, "type": "ack", "delivery_id": WORK, "status": "accepted"}
REPORT: dict[str, Any] = {
    **ENVELOPE, "type": "report", "assignment_id": WORK, "report": {"kind": "implementation", "summary": "done"},
}
PROGRESS: dict[str, Any] = {**ENVELOPE, "type": "progress", "assignment_id": WORK, "phase": "tool", "usage": None}
GUARDRAIL: dict[str, Any] = {
    **ENVELOPE, "type": "guardrail", "assignment_id": WORK, "level": "warning", "metric": "provider_calls",
    "observed": 12, "threshold": 10,
}
WORKER = {frame["type"]: frame for frame in (HELLO, LIFECYCLE, ACK, REPORT, PROGRESS, GUARDRAIL)}
SEND: dict[str, Any] = {
    **ENVELOPE, "type": "control", "action": "send", "delivery": None, "message": "go on",
}
RESTART: dict[str, Any] = {**SEND, "action": "restart", "message": None}
OBSERVE: dict[str, Any] = {"version": 1, "type": "observe", "token": TOKEN, "id": ID}

every_worker_frame = pytest.mark.parametrize("frame", WORKER.values(), ids=WORKER)

FIELDS = "Broker message has missing or unknown fields"
CONTROL = "Control message is invalid"
CONTROL_FIELDS = "Control message fields are invalid"

SCALARS: list[Any] = [None, True, False, 0, 1, -1, 1.0, 1.5, "", "x", [], ["x"], {}, {"x": 1}, "\ud800", 2**63, 10**30]
"""One of everything that JSON has, and what goes wrong most easily."""

NOT_HEX: list[Any] = [*SCALARS, ID[:-1], ID + "0", ID.upper(), ID + "\n", "g" * 32, "\u0660" * 32, [ID], {ID: ID}]

Parse = Callable[[bytes], Any]


def packed(frame: Any) -> bytes:
    return json.dumps(frame).encode()


def without(frame: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in frame.items() if name != key}


def as_worker(payload: bytes) -> Any:
    return parsing.worker(payload, "implementer")


def refused(
    parse: Parse, frame: Any, text: str, *, request: str | None = ID, code: str = Code.INVALID_PROTOCOL
) -> Refusal:
    payload = frame if isinstance(frame, bytes) else packed(frame)
    with pytest.raises(Refusal) as caught:
        parse(payload)
    refusal = caught.value
    assert (refusal.code, refusal.text, refusal.request) == (code, text, request)
    return refusal


# Bytes and JSON.


@pytest.mark.parametrize("parse", [parsing.first, as_worker])
@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"nonsense", b"\xff", b'{"version":1}x', b"\xef\xbb\xbf{}", b'{"a":"\xed\xa0\x80"}', b'{"a":NaN}',
     b'{"a":Infinity}', b'{"a":-Infinity}', b"[" * 200_000, b'{"a":' * 40_000, b"{'a':1}", b'{"a":01}',
     packed(HELLO)[:-2] + b'\xc3"}', b"\0"],
)
def test_not_json(parse: Parse, payload: bytes) -> None:
    refused(parse, payload, "Broker message is not valid JSON", request=None)


@pytest.mark.parametrize("parse", [parsing.first, as_worker])
@pytest.mark.parametrize("value", [None, True, 1, 1.5, "x", [], [HELLO]], ids=repr)
def test_not_an_object(parse: Parse, value: Any) -> None:
    refused(parse, value, "Broker message must be an object", request=None)


def test_last_of_two_equal_keys_wins() -> None:
    payload = packed(HELLO)[:-1] + b',"generation":7}'
    assert parsing.first(payload) == frames.Hello("implementer", TOKEN, ID, 7)


def test_nan_is_refused_inside_a_frame() -> None:
    payload = packed({**GUARDRAIL, "metric": "context_percent", "observed": float("nan")})
    refused(as_worker, payload, "Broker message is not valid JSON", request=None)


def test_a_number_too_large_is_infinite_and_refused() -> None:
    payload = packed({**GUARDRAIL, "metric": "context_percent"}).replace(b": 12", b": 1e999")
    refused(as_worker, payload, "Guardrail values are invalid")


# What all frames of a worker share.


@every_worker_frame
@pytest.mark.parametrize("version", [value for value in [*SCALARS, 2, "1"] if value is True or value != 1], ids=repr)
def test_version(frame: dict[str, Any], version: Any) -> None:
    text = "Unsupported broker protocol version"
    refused(as_worker, {**frame, "version": version}, text)
    refused(as_worker, without(frame, "version"), text)
    refused(as_worker, {**frame, "version": 1.0}, text)


@pytest.mark.parametrize("kind", [*SCALARS, "Hello", "control", "observe", "response", "assignment"], ids=repr)
def test_type(kind: Any) -> None:
    refused(as_worker, {**HELLO, "type": kind}, "Unsupported broker message type")


def test_type_is_missing() -> None:
    refused(as_worker, without(HELLO, "type"), "Unsupported broker message type")
    refused(parsing.first, without(HELLO, "type"), "Unsupported broker message type")


@every_worker_frame
def test_keys(frame: dict[str, Any]) -> None:
    for key in frame.keys() - {"version", "type", "id"}:
        refused(as_worker, without(frame, key), FIELDS)
    refused(as_worker, without(frame, "id"), FIELDS, request=None)
    for key in ("extra", "", "\ud800", "Version"):
        refused(as_worker, {**frame, key: None}, FIELDS)


def test_keys_of_another_type() -> None:
    for one in WORKER.values():
        for other in WORKER.values():
            if one is not other:
                refused(as_worker, {**one, "type": other["type"]}, FIELDS)


@every_worker_frame
@pytest.mark.parametrize("role", [*SCALARS, "Implementer", "probe ", ["probe"]], ids=repr)
def test_role(frame: dict[str, Any], role: Any) -> None:
    refused(as_worker, {**frame, "role": role}, "Broker role is invalid")


@every_worker_frame
@pytest.mark.parametrize("value", NOT_HEX, ids=repr)
def test_token_and_id(frame: dict[str, Any], value: Any) -> None:
    refused(as_worker, {**frame, "token": value}, "Broker token is invalid")
    refused(as_worker, {**frame, "id": value}, "Broker message ID is invalid", request=None)


@every_worker_frame
def test_order_of_checks(frame: dict[str, Any]) -> None:
    """What is repaired last is refused first."""
    own = next(key for key in frame if key not in ENVELOPE and key != "type")
    broken = {**frame, "version": 2, "type": "x", "role": "x", "token": "x", "id": "x", "extra": 1, own: "?"}
    for key, text in (
        ("version", "Unsupported broker protocol version"),
        ("type", "Unsupported broker message type"),
        ("extra", FIELDS),
        ("role", "Broker role is invalid"),
        ("token", "Broker token is invalid"),
        ("id", "Broker message ID is invalid"),
    ):
        refused(as_worker, broken, text, request=None)
        broken = without(broken, "extra") if key == "extra" else {**broken, key: frame[key]}
    with pytest.raises(Refusal) as caught:
        as_worker(packed(broken))
    assert caught.value.request == ID


@every_worker_frame
@pytest.mark.parametrize("role", ROLES)
def test_role_and_token_are_taken_as_they_are(frame: dict[str, Any], role: str) -> None:
    """Whether they are the connection's is not decided here."""
    got = as_worker(packed({**frame, "role": role, "token": WORK}))
    assert (got.role, got.token, got.id) == (role, WORK, ID)


def test_a_report_is_judged_by_the_authenticated_role() -> None:
    refused(
        lambda payload: parsing.worker(payload, "probe"), REPORT, "Report kind is not permitted for this role",
        code=Code.FORBIDDEN,
    )


# The types of a worker.


@pytest.mark.parametrize("parse", [parsing.first, as_worker])
@pytest.mark.parametrize("generation", [1, 2, 10**15])
def test_hello(parse: Parse, generation: int) -> None:
    got = parse(packed({**HELLO, "generation": generation}))
    assert got == frames.Hello("implementer", TOKEN, ID, generation)


@pytest.mark.parametrize("value", [value for value in SCALARS if value is True or value != 1] + [1.0, "1"], ids=repr)
def test_hello_generation(value: Any) -> None:
    for parse in (parsing.first, as_worker):
        refused(parse, {**HELLO, "generation": value}, "Broker worker generation is invalid")


@pytest.mark.parametrize("state", ["idle", "active", "waiting", "uncertain"])
def test_lifecycle(state: str) -> None:
    def got(usage: Any) -> Any:
        return as_worker(packed({**LIFECYCLE, "state": state, "usage": usage}))

    assert got(None) == frames.Lifecycle("implementer", TOKEN, ID, state, None, False)
    assert got(USED) == frames.Lifecycle("implementer", TOKEN, ID, state, USAGE, True)
    for usage, told in ((without(USED, "providerCalls"), False), ({**USED, "providerCalls": None}, True)):
        frame = got(usage)
        assert (frame.usage.provider_calls, frame.calls_given) == (None, told)


@pytest.mark.parametrize("state", [*SCALARS, "disconnected", "restarting", "recovering", "Idle"], ids=repr)
def test_lifecycle_state(state: Any) -> None:
    for usage in (None, "wrong"):
        refused(as_worker, {**LIFECYCLE, "state": state, "usage": usage}, "Worker lifecycle state is invalid")


@pytest.mark.parametrize("usage", SCALARS[1:], ids=repr)
def test_usage_of_the_wrong_type(usage: Any) -> None:
    refused(as_worker, {**LIFECYCLE, "usage": usage}, "Provider usage is invalid")
    refused(as_worker, {**PROGRESS, "usage": usage}, "Worker progress usage is invalid")
    refused(as_worker, {**REPORT, "usage": usage}, "Assignment provider usage is invalid")


@pytest.mark.parametrize("value", [2**63, MAX_INTEGER + 2**40, 10**30, -1, 1.0])
def test_counts_are_bounded_on_the_wire(value: Any) -> None:
    usage = {**USED, "input": value}
    refused(as_worker, {**LIFECYCLE, "usage": usage}, "Provider usage is invalid")
    refused(as_worker, {**PROGRESS, "usage": usage}, "Worker progress usage is invalid")
    both = {"cumulative": usage, "assignment": USED}
    refused(as_worker, {**REPORT, "usage": both}, "Assignment provider usage is invalid")
    refused(as_worker, {**GUARDRAIL, "observed": value}, "Guardrail values are invalid")


@pytest.mark.parametrize("status", ["accepted", "duplicate", "uncertain"])
def test_ack(status: str) -> None:
    assert as_worker(packed({**ACK, "status": status})) == frames.Ack("implementer", TOKEN, ID, WORK, status)


@pytest.mark.parametrize("value", [*SCALARS, "Accepted", "rejected"], ids=repr)
def test_ack_status(value: Any) -> None:
    refused(as_worker, {**ACK, "status": value}, "Delivery acknowledgement is invalid")


@pytest.mark.parametrize("value", NOT_HEX, ids=repr)
def test_ids_of_assignments_and_deliveries(value: Any) -> None:
    refused(as_worker, {**ACK, "delivery_id": value}, "Delivery acknowledgement is invalid")
    refused(as_worker, {**REPORT, "assignment_id": value}, "Assignment ID is invalid")
    refused(as_worker, {**PROGRESS, "assignment_id": value}, "Progress assignment ID is invalid")
    refused(as_worker, {**GUARDRAIL, "assignment_id": value}, "Guardrail assignment ID is invalid")


@pytest.mark.parametrize("role", ROLES)
def test_report(role: str) -> None:
    kind = {"implementer": "implementation", "reviewer": "review"}.get(role, role)
    verdict = {"reviewer": "approved", "playwright": "fail", "django": "issues_found"}.get(role)
    body = {"kind": kind, "summary": "done", "verdict": verdict}
    got = parsing.worker(packed({**REPORT, "role": role, "report": body}), role)
    assert isinstance(got, frames.ReportFrame)
    assert (got.role, got.token, got.id, got.assignment_id, got.usage) == (role, TOKEN, ID, WORK, None)
    assert (got.report.kind, got.report.verdict) == (kind, verdict)


def test_report_with_usage() -> None:
    assert as_worker(packed({**REPORT, "usage": None})).usage is None
    share = {**USED, "peakContextTokens": 9}
    got = as_worker(packed({**REPORT, "usage": {"cumulative": USED, "assignment": share}}))
    assert got.usage.cumulative == USAGE
    assert (got.usage.assignment.input_tokens, got.usage.assignment.peak_context_tokens) == (1, 9)


def test_report_order_of_checks() -> None:
    frame = {**REPORT, "report": 1, "usage": 1, "assignment_id": 1}
    refused(as_worker, frame, "Report must be an object")
    frame["report"] = REPORT["report"]
    refused(as_worker, frame, "Assignment provider usage is invalid")
    frame["usage"] = None
    refused(as_worker, frame, "Assignment ID is invalid")


@pytest.mark.parametrize("body", SCALARS, ids=repr)
def test_report_body_of_the_wrong_type(body: Any) -> None:
    text = "Report has missing or unknown fields" if isinstance(body, dict) else "Report must be an object"
    refused(as_worker, {**REPORT, "report": body}, text)


def test_report_text_that_utf_8_does_not_have() -> None:
    body = {"kind": "implementation", "summary": "a\ud800"}
    refused(as_worker, {**REPORT, "report": body}, "Report summary must be valid Unicode")


@pytest.mark.parametrize("phase", ["thinking", "streaming", "tool", "reporting"])
def test_progress(phase: str) -> None:
    for given_, read in ((None, None), (USED, USAGE)):
        got = as_worker(packed({**PROGRESS, "phase": phase, "usage": given_}))
        assert got == frames.Progress("implementer", TOKEN, ID, WORK, phase, read)


@pytest.mark.parametrize("phase", [*SCALARS, "Tool", "idle"], ids=repr)
def test_progress_phase(phase: Any) -> None:
    refused(as_worker, {**PROGRESS, "phase": phase, "usage": 1}, "Worker progress phase is invalid")


def test_progress_usage_needs_calls() -> None:
    usage = without(USED, "providerCalls")
    refused(as_worker, {**PROGRESS, "usage": usage}, "Worker progress usage is invalid")


@pytest.mark.parametrize("level", ["warning", "hard"])
@pytest.mark.parametrize(
    ("metric", "observed", "threshold"),
    [("provider_calls", 10, 10), ("provider_calls", 11, 1), ("context_tokens", 10**15, 1),
     ("context_percent", 80, 80), ("context_percent", 80.5, 80), ("context_percent", 0.5, 0.25)],
)
def test_guardrail(level: str, metric: str, observed: float, threshold: float) -> None:
    values = {"level": level, "metric": metric, "observed": observed, "threshold": threshold}
    got = as_worker(packed({**GUARDRAIL, **values}))
    assert got == frames.GuardrailFrame("implementer", TOKEN, ID, WORK, level, metric, observed, threshold)
    assert (type(got.observed), type(got.threshold)) == (type(observed), type(threshold))


@pytest.mark.parametrize("value", [*SCALARS, "Warning", "cost"], ids=repr)
def test_guardrail_enums(value: Any) -> None:
    refused(as_worker, {**GUARDRAIL, "level": value, "metric": value}, "Guardrail level is invalid")
    refused(as_worker, {**GUARDRAIL, "metric": value, "observed": value}, "Guardrail metric is invalid")


NOT_NUMBERS: list[Any] = [None, True, False, "", "1", [], [1], {}, -1, "\ud800", 2**63]


@pytest.mark.parametrize("metric", ["provider_calls", "context_tokens", "context_percent"])
def test_guardrail_values(metric: str) -> None:
    def wrong(observed: Any, threshold: Any) -> None:
        values = {"metric": metric, "observed": observed, "threshold": threshold}
        refused(as_worker, {**GUARDRAIL, **values}, "Guardrail values are invalid")

    for value in NOT_NUMBERS:
        if metric == "context_percent" and value == 2**63:
            continue
        wrong(value, 1)
        wrong(5, value)
        wrong(value, value)
    wrong(0, 0)
    wrong(5, 0)
    wrong(9, 10)
    wrong(-5, -6)
    if metric != "context_percent":
        wrong(2.0, 1)
        wrong(2, 1.0)


# Control.


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("delivery", [None, "steer", "follow-up"])
def test_send(role: str, delivery: str | None) -> None:
    got = parsing.first(packed({**SEND, "role": role, "delivery": delivery, "message": " \u00e9\0 "}))
    assert got == frames.Control(ID, TOKEN, "send", role, delivery, " \u00e9\0 ")


@pytest.mark.parametrize("action", ["abort", "restart", "restart_failed", "redeliver", "continue"])
def test_actions_without_a_message(action: str) -> None:
    frame = {**RESTART, "action": action}
    assert parsing.first(packed(frame)) == frames.Control(ID, TOKEN, action, "implementer", None, None)
    for value in SCALARS[1:]:
        refused(parsing.first, {**frame, "message": value}, CONTROL_FIELDS)
        refused(parsing.first, {**frame, "delivery": value}, CONTROL_FIELDS)
    refused(parsing.first, {**frame, "message": "text"}, CONTROL_FIELDS)
    refused(parsing.first, {**frame, "delivery": "steer"}, CONTROL_FIELDS)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "implementer"])
def test_only_the_implementer_is_to_continue(role: str) -> None:
    refused(parsing.first, {**RESTART, "action": "continue", "role": role}, CONTROL_FIELDS)


@pytest.mark.parametrize("action", [*SCALARS, "Send", "Continue", "budget_override", "stop"], ids=repr)
def test_unknown_actions(action: Any) -> None:
    refused(parsing.first, {**SEND, "action": action}, CONTROL_FIELDS)
    refused(parsing.first, {**RESTART, "action": action}, CONTROL_FIELDS)


@pytest.mark.parametrize(
    "message",
    [value for value in SCALARS if value != "x"] + [" ", "\n\t", "\ufeff", "\x1c", "\x1c\ufeff", "a\ud800", "\udfffb"],
    ids=ascii,
)
def test_send_needs_text(message: Any) -> None:
    refused(parsing.first, {**SEND, "message": message}, CONTROL_FIELDS)


def test_long_messages_are_not_measured_here() -> None:
    message = "x" * 65_536
    got = parsing.first(packed({**SEND, "message": message}))
    assert isinstance(got, frames.Control) and got.message == message


@pytest.mark.parametrize("value", [*SCALARS[1:], "Steer", "followUp", ["steer"]], ids=repr)
def test_send_delivery(value: Any) -> None:
    refused(parsing.first, {**SEND, "delivery": value}, CONTROL_FIELDS)


@pytest.mark.parametrize("value", NOT_HEX, ids=repr)
def test_control_identity(value: Any) -> None:
    refused(parsing.first, {**SEND, "id": value}, CONTROL_FIELDS, request=None)
    refused(parsing.first, {**SEND, "token": value}, CONTROL_FIELDS)
    refused(parsing.first, {**SEND, "role": value}, CONTROL_FIELDS)


def test_control_keys() -> None:
    for frame in (SEND, RESTART):
        for key in frame.keys() - {"type", "id"}:
            refused(parsing.first, without(frame, key), CONTROL)
        refused(parsing.first, without(frame, "id"), CONTROL, request=None)
        refused(parsing.first, {**frame, "extra": 1}, CONTROL)
        for version in (0, 2, True, 1.0, "1", None, [1]):
            refused(parsing.first, {**frame, "version": version}, CONTROL)


# Observers.


def test_observe() -> None:
    assert parsing.first(packed(OBSERVE)) == frames.Observe(ID, TOKEN)


def test_observe_keys() -> None:
    text = "Observer hello is invalid"
    for key in ("version", "token"):
        refused(parsing.first, without(OBSERVE, key), text)
    refused(parsing.first, without(OBSERVE, "id"), text, request=None)
    refused(parsing.first, {**OBSERVE, "role": "probe"}, text)
    for version in (0, 2, True, 1.0, "1", None, [1]):
        refused(parsing.first, {**OBSERVE, "version": version}, text)


@pytest.mark.parametrize("value", NOT_HEX, ids=repr)
def test_observer_identity(value: Any) -> None:
    text = "Observer identity is invalid"
    refused(parsing.first, {**OBSERVE, "id": value}, text, request=None)
    refused(parsing.first, {**OBSERVE, "token": value}, text)


# The first frame.


@pytest.mark.parametrize("kind", [kind for kind in WORKER if kind != "hello"])
def test_first_frame_of_a_worker_is_hello(kind: str) -> None:
    refused(parsing.first, WORKER[kind], "Unsupported broker message type")


@pytest.mark.parametrize("kind", [*SCALARS, "Hello", "response", ["control"]], ids=repr)
def test_first_frame_of_no_kind(kind: Any) -> None:
    refused(parsing.first, {**HELLO, "type": kind}, "Unsupported broker message type")
    refused(parsing.first, {**HELLO, "type": kind, "version": 2}, "Unsupported broker protocol version")


def test_first_hello_has_a_worker_s_checks() -> None:
    refused(parsing.first, {**HELLO, "extra": 1}, FIELDS)
    refused(parsing.first, {**HELLO, "role": "boss"}, "Broker role is invalid")
    refused(parsing.first, {**HELLO, "token": "x"}, "Broker token is invalid")
    refused(parsing.first, {**HELLO, "id": "x"}, "Broker message ID is invalid", request=None)


# Whatever comes.

SOME_TEXT = st.text(st.characters(), max_size=3) | st.sampled_from([ID, TOKEN, "implementer", "send", "idle", "hard"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SOME_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SOME_TEXT, inner, max_size=3),
    max_leaves=8,
)
FRAMES = [*WORKER.values(), SEND, RESTART, OBSERVE]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A legal frame, of which some keys have another value or are gone."""
    frame = dict(draw(st.sampled_from(FRAMES)))
    for key in draw(st.lists(st.sampled_from(sorted(frame)), max_size=3, unique=True)):
        if draw(st.booleans()):
            frame[key] = draw(ANYTHING)
        else:
            del frame[key]
    return frame


def only_refuses(parse: Parse, payload: bytes) -> None:
    try:
        parse(payload)
    except Refusal as refusal:
        assert refusal.code in (Code.INVALID_PROTOCOL, Code.FORBIDDEN)
        assert refusal.request is None or parsing.HEX32.fullmatch(refusal.request)


@given(st.one_of(mutated(), ANYTHING), st.sampled_from(ROLES))
def test_nothing_but_a_refusal_comes_out_of_json(value: Any, role: str) -> None:
    payload = packed(value)
    only_refuses(parsing.first, payload)
    only_refuses(lambda data: parsing.worker(data, role), payload)


@given(st.sampled_from(FRAMES), st.integers(0, 400), st.binary(max_size=3))
def test_nothing_but_a_refusal_comes_out_of_bytes(frame: dict[str, Any], position: int, damage: bytes) -> None:
    payload = packed(frame)
    payload = payload[:position] + damage + payload[position + len(damage) :]
    only_refuses(parsing.first, payload)
    only_refuses(as_worker, payload)
