# SPDX-License-Identifier: Apache-2.0
"""First frames, envelopes and how a connection ends that breaks a rule (orchestration spec, 1.1, 1.4, 1.5 and 2.1)."""

from __future__ import annotations

import os
import signal
import stat
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.orchpeer import CALLS, MAX_FRAME, USAGE, body, fresh_id
from tests.contract.orchruns import Run
from tests.contract.peer import HANG, Frame, compact, packed

INVALID = "invalid_protocol"
ZERO = "0" * 32


@pytest.fixture(scope="module")
def shared() -> Iterator[Run]:
    """A run that never gets beyond `connecting`: its reviewer stays away."""
    with Run("probe") as run:
        yield run


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    yield shared
    shared.empty()
    assert shared.alive(), shared.errors()


def hello(run: Run, **keys: Any) -> Frame:
    frame: Frame = {"version": 1, "type": "hello", "role": "implementer", "token": run.tokens["implementer"]}
    return {**frame, "id": fresh_id(), "generation": 1, **keys}


def without(frame: Frame, key: str) -> Frame:
    return {name: value for name, value in frame.items() if name != key}


# Before a worker is authenticated: closed without a frame.


@pytest.mark.parametrize(
    "payload",
    [
        b"x",
        b"{",
        b"null",
        b"[]",
        b'"hello"',
        b"1",
        b"{}",
        b"\xff\xfe",
        b'{"version":1}',
        b'{"version":1,"type":"\xff"}',
        b'{"version":1,"type":null}',
        b'{"version":1,"type":["hello"]}',
        b'{"version":1,"type":{}}',
        b'{"type":"hello"}',
        b"[" * 100_000,
        b'{"version":1,"type":"hello","role":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
)
def test_first_payload_that_is_no_frame(run: Run, payload: bytes) -> None:
    peer = run.connect()
    peer.send_payload(payload)
    peer.refused_silently()


@pytest.mark.parametrize(
    "kind", ["lifecycle", "ack", "report", "progress", "guardrail", "response", "HELLO", "", "ping"]
)
def test_first_frame_of_another_type(run: Run, kind: str) -> None:
    peer = run.connect()
    keys: Frame = {"state": "idle", "usage": None} if kind == "lifecycle" else {}
    peer.send({**without(hello(run), "generation"), "type": kind, **keys})
    peer.refused_silently()


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 0},
        {"version": 2},
        {"version": "1"},
        {"version": None},
        {"role": "architect"},
        {"role": "playwright"},
        {"role": "Implementer"},
        {"role": ""},
        {"role": None},
        {"role": ["implementer"]},
        {"token": ZERO},
        {"token": "A" * 32},
        {"token": "a" * 31},
        {"token": "a" * 33},
        {"token": ""},
        {"token": None},
        {"token": 1},
        {"token": "é" * 32},
        {"id": "x"},
        {"id": "A" * 32},
        {"id": "a" * 32 + "\n"},
        {"id": None},
        {"generation": 0},
        {"generation": -1},
        {"generation": True},
        {"generation": "1"},
        {"generation": 1.5},
        {"generation": None},
        {"generation": 2},
        {"generation": 2**63},
        {"generation": 2**70},
        {"extra": None},
        {"usage": None},
    ],
)
def test_hello_that_is_refused(run: Run, changed: Frame) -> None:
    peer = run.connect()
    peer.send(hello(run, **changed))
    peer.refused_silently()
    assert not run.role("implementer")["connected"]


@pytest.mark.parametrize("key", ["version", "type", "role", "token", "id", "generation"])
def test_hello_with_a_key_missing(run: Run, key: str) -> None:
    peer = run.connect()
    peer.send(without(hello(run), key))
    peer.refused_silently()


def test_token_of_another_role(run: Run) -> None:
    for token in (run.tokens["reviewer"], run.control_token):
        peer = run.connect()
        peer.send(hello(run, token=token))
        peer.refused_silently()


def test_role_that_is_connected_already(run: Run) -> None:
    first = run.worker("implementer")
    for _ in range(3):
        peer = run.connect()
        peer.send(hello(run))
        peer.refused_silently()
    first.quiet()


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_length_that_is_refused_at_once(run: Run, length: int) -> None:
    """The four bytes are enough; nothing of the payload has to come."""
    peer = run.connect()
    peer.send_bytes(struct.pack(">I", length))
    peer.refused_silently()


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 60])
def test_stream_that_ends_inside_a_frame(run: Run, cut: int) -> None:
    peer = run.connect()
    peer.send_bytes(packed(compact(hello(run)))[:cut])
    peer.shutdown_write()
    peer.refused_silently()
    assert not run.role("implementer")["connected"]


def test_connection_that_says_nothing_and_goes(run: Run) -> None:
    peer = run.connect()
    peer.shutdown_write()
    peer.refused_silently()


def test_silent_connection_is_closed_after_the_handshake_time() -> None:
    with Run(environment={"AGENT_INTERCOM_HANDSHAKE_MS": "200"}) as run:
        worker = run.worker("implementer")
        observer = run.watch()
        silent, partial = run.connect(), run.connect()
        partial.send_bytes(packed(compact(hello(run)))[:-1])
        silent.refused_silently()
        partial.refused_silently()
        worker.quiet()
        worker.lifecycle("active")
        observer.expect_seen(("lifecycle", "implementer", "active"))


def test_connections_that_say_nothing_make_room(run: Run) -> None:
    """The oldest of them, so that nobody can keep the others out."""
    silent = [run.connect() for _ in range(40)]
    run.worker("implementer").quiet()
    for peer in silent[:8]:
        peer.refused_silently()
    last = silent[-1]
    last.send(hello(run, role="probe", token=run.tokens["probe"]))
    assert last.recv()["status"] == "connected"


# The socket and the process.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_clean_end(number: int) -> None:
    run = Run().start()
    try:
        mode = run.socket.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        assert stat.S_IMODE(run.socket.parent.stat().st_mode) == 0o700
        worker, observer = run.worker("implementer"), run.watch()
        os.kill(run.pid, number)
        worker.expect_eof()
        observer.expect_eof()
        # A second signal could meet an interpreter that has no handler for it any more.
        assert run.wait() == run.stop() == 0
        assert not run.socket.exists()
        assert run.workflow() == ("connecting", 1)
        assert not run.role("implementer")["connected"]
        assert "Traceback" not in run.errors()
    finally:
        run.remove()


def test_socket_that_was_left_behind() -> None:
    run = Run().start()
    try:
        run.stop(signal.SIGKILL)
        assert run.socket.exists()
        run.start()
        run.worker("implementer").quiet()
        assert run.stop() == 0
    finally:
        run.remove()


def test_something_else_in_the_sockets_place() -> None:
    run = Run()
    try:
        run.socket.write_text("mine")
        process = run.spawn()
        out, _ = process.communicate(timeout=HANG)
        assert process.returncode != 0 and out == b""
        assert run.socket.read_text() == "mine"
    finally:
        run.remove()


def test_second_broker_fails_and_the_first_goes_on() -> None:
    with Run() as run:
        worker = run.worker("implementer")
        process = run.spawn()
        out, _ = process.communicate(timeout=HANG)
        assert process.returncode != 0 and out == b""
        worker.quiet()
        # The first one's address is still its own.
        run.watch()


# Nobody waits for a peer that does not read.


def test_worker_that_does_not_read_delays_nobody() -> None:
    with Run() as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        message = "x" * 30_000
        for _ in range(30):
            run.send("reviewer", message)
        team["implementer"].report(work)
        reviewer = team["reviewer"]
        for _ in range(30):
            assert reviewer.context("operator_message", trigger=True)["content"] == message
        reviewer.context("run_state")
        reviewer.assignment("review")


# Frames in pieces, and as large as they may be.


def test_first_frame_byte_by_byte(run: Run) -> None:
    worker = run.caller("implementer")
    request = worker.envelope("hello", generation=1)
    for byte in packed(compact(request)):
        worker.send_bytes(bytes([byte]))
    assert worker.response(request["id"])["status"] == "connected"
    worker.quiet()


def test_requests_in_one_write_are_answered_in_order(run: Run) -> None:
    worker = run.caller("implementer")
    requests = [worker.envelope("hello", generation=1)]
    requests += [worker.envelope("lifecycle", state=state, usage=None) for state in ("active", "idle", "active")]
    requests += [worker.envelope("ack", delivery_id=fresh_id(), status="accepted")]
    worker.send(*requests)
    for request in requests:
        assert worker.response(request["id"])["success"]
    assert run.role("implementer")["state"] == "active"


@pytest.mark.parametrize("size", [MAX_FRAME - 1, MAX_FRAME])
def test_largest_frame(run: Run, size: int) -> None:
    worker = run.worker("implementer")
    request = worker.envelope("lifecycle", state="idle", usage=None)
    payload = compact(request)
    worker.send_payload(payload + b" " * (size - len(payload)))
    assert worker.response(request["id"])["status"] == "recorded"


def test_whitespace_and_any_order_of_keys(run: Run) -> None:
    worker = run.caller("implementer")
    request = worker.envelope("hello", generation=1)
    text = ",\n ".join(f'"{key}" : "{value}"' for key, value in reversed(request.items()) if isinstance(value, str))
    worker.send_payload(b'\t{"generation":1,"version":1,' + text.encode() + b"}\r\n")
    assert worker.response(request["id"])["status"] == "connected"


# An authenticated worker: one failure response, then closed.


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack(">I", MAX_FRAME + 1), INVALID),
        (struct.pack(">I", 0), INVALID),
        (packed(b"x" * 5), INVALID),
        (packed(b"null"), INVALID),
        (packed(b"[]"), INVALID),
        (packed(b'{"version":1,"type":"\xff"}'), INVALID),
        (packed(b"[" * 200_000), INVALID),
    ],
)
def test_worker_frame_that_is_none(run: Run, data: bytes, code: str) -> None:
    """There is no id to answer under, so the broker takes one of its own."""
    run.worker("implementer").refused_bytes(code, None, data)


FIELDS = "Broker message has missing or unknown fields"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": 2}, "Unsupported broker protocol version"),
        ({"version": "1"}, "Unsupported broker protocol version"),
        ({"version": None}, "Unsupported broker protocol version"),
        ({"type": "poll"}, "Unsupported broker message type"),
        ({"type": "control"}, "Unsupported broker message type"),
        ({"type": "observe"}, "Unsupported broker message type"),
        ({"type": None}, "Unsupported broker message type"),
        ({"type": ["lifecycle"]}, "Unsupported broker message type"),
        ({"extra": 1}, FIELDS),
        ({"generation": 1}, FIELDS),
        ({"token": "x"}, "Broker token is invalid"),
        ({"token": None}, "Broker token is invalid"),
    ],
)
def test_envelope_is_checked(run: Run, changed: Frame, text: str) -> None:
    """The request's own id is used wherever it can be read."""
    worker = run.worker("implementer")
    worker.refused(INVALID, text, "lifecycle", **{"state": "idle", "usage": None, **changed})


@pytest.mark.parametrize("role", ["architect", "", None, 1, ["implementer"], {"a": 1}])
def test_role_that_there_is_not(run: Run, role: Any) -> None:
    worker = run.worker("implementer")
    request = worker.envelope("lifecycle", state="idle", usage=None, role=role)
    worker.send(request)
    answer = worker.response(request["id"])
    assert (answer["success"], answer["status"]) == (False, INVALID)
    assert answer["error"] in {"Broker role is invalid", "Broker role is not registered"}
    worker.expect_eof()


@pytest.mark.parametrize("identity", ["x", "A" * 32, "a" * 31, "a" * 33, "", None, 7, ["a" * 32]])
def test_id_that_is_none(run: Run, identity: Any) -> None:
    worker = run.worker("implementer")
    payload = compact(worker.envelope("lifecycle", state="idle", usage=None, id=identity))
    worker.refused_payload(INVALID, "Broker message ID is invalid", payload)


@pytest.mark.parametrize("key", ["type", "role", "token", "id", "version", "state", "usage"])
def test_missing_keys(run: Run, key: str) -> None:
    worker = run.worker("implementer")
    request = worker.envelope("lifecycle", state="idle", usage=None)
    texts = {"version": "Unsupported broker protocol version", "type": "Unsupported broker message type"}
    own = None if key == "id" else request["id"]
    worker.refused_payload(INVALID, texts.get(key, FIELDS), compact(without(request, key)), own)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"version": 2, "type": "x", "extra": 1, "role": 1, "token": 1}, "Unsupported broker protocol version"),
        ({"type": "x", "extra": 1, "role": 1, "token": 1}, "Unsupported broker message type"),
        ({"extra": 1, "role": "architect", "token": 1}, FIELDS),
        ({"token": "x", "state": "x"}, "Broker token is invalid"),
    ],
)
def test_order_of_checks(run: Run, broken: Frame, text: str) -> None:
    worker = run.worker("implementer")
    worker.refused(INVALID, text, "lifecycle", **{"state": "idle", "usage": None, **broken})


def test_worker_that_is_another_role(run: Run) -> None:
    """Whatever the code, it is refused and closed, and the other role is as it was."""
    reviewer = run.role("probe")
    for keys in ({"role": "probe"}, {"role": "probe", "token": run.tokens["probe"]}):
        worker = run.returned("implementer")
        request = worker.envelope("lifecycle", state="active", usage=None, **keys)
        worker.send(request)
        answer = worker.response(request["id"])
        assert not answer["success"] and answer["status"] in {"forbidden", "unauthorized"}
        worker.expect_eof()
        worker.close()
    assert run.role("probe") == reviewer


def test_worker_with_another_token(run: Run) -> None:
    for token in (ZERO, run.control_token, run.tokens["probe"]):
        worker = run.returned("implementer")
        request = worker.envelope("lifecycle", state="active", usage=None, token=token)
        worker.send(request)
        answer = worker.response(request["id"])
        assert not answer["success"] and answer["status"] in {"forbidden", "unauthorized"}
        worker.expect_eof()
        worker.close()


def test_second_hello(run: Run) -> None:
    run.worker("implementer").refused(INVALID, "Unsupported worker message", "hello", generation=1)


def test_refused_worker_may_come_back(run: Run) -> None:
    run.worker("implementer").refused(INVALID, "Unsupported broker message type", "poll")
    run.returned("implementer").quiet()


def test_what_follows_a_refused_request_is_not_read(run: Run) -> None:
    worker = run.worker("implementer")
    wrong = worker.envelope("lifecycle", state="asleep", usage=None)
    worker.send(wrong, worker.envelope("lifecycle", state="active", usage=None))
    assert worker.response(wrong["id"])["status"] == INVALID
    worker.expect_eof()
    worker.close()
    assert not run.events("worker_lifecycle") or run.events("worker_lifecycle")[-1]["status"] != "asleep"
    run.returned("implementer")
    assert run.role("implementer")["state"] == "idle"


# Wrong types: refused with words, never closed in silence.


@pytest.mark.parametrize(
    ("kind", "keys", "text"),
    [
        ("lifecycle", {"state": ["idle"], "usage": None}, "Worker lifecycle state is invalid"),
        ("lifecycle", {"state": {"a": 1}, "usage": None}, "Worker lifecycle state is invalid"),
        ("lifecycle", {"state": "idle", "usage": {**USAGE, "input": 2**63}}, "Provider usage is invalid"),
        ("lifecycle", {"state": "idle", "usage": {**USAGE, "input": 2**70}}, "Provider usage is invalid"),
        ("lifecycle", {"state": "idle", "usage": {**USAGE, "contextTokens": 10**400}}, "Provider usage is invalid"),
        ("lifecycle", {"state": "idle", "usage": {**USAGE, "cost": [1]}}, "Provider usage is invalid"),
        ("ack", {"delivery_id": ZERO, "status": ["accepted"]}, "Delivery acknowledgement is invalid"),
        ("ack", {"delivery_id": ZERO, "status": {}}, "Delivery acknowledgement is invalid"),
        ("progress", {"assignment_id": ZERO, "phase": [], "usage": None}, "Worker progress phase is invalid"),
        ("progress", {"assignment_id": ZERO, "phase": {}, "usage": CALLS}, "Worker progress phase is invalid"),
    ],
)
def test_wrong_types_are_answered(run: Run, kind: str, keys: Frame, text: str) -> None:
    run.worker("implementer").refused(INVALID, text, kind, **keys)


@pytest.mark.parametrize(
    "members",
    [
        {"checks": 1},
        {"checks": None},
        {"checks": {"name": "x"}},
        {"checks": [{"name": "x", "status": ["passed"]}]},
        {"findings": 1},
        {"findings": None},
        {"findings": [{"severity": {}, "summary": "x"}]},
        {"verdict": ["approved"]},
        {"verdict": {}},
        {"summary": "\ud800"},
        {"risks": ["a\udfff"]},
        {"changed_paths": ["\ud83d"]},
        {"kind": ["implementation"]},
        {"kind": 7},
    ],
)
def test_report_of_wrong_types_is_answered(run: Run, members: Frame) -> None:
    """The reviewer's verdict of a wrong type is a wrong value; the implementer's is one that it may not give."""
    worker = run.worker("implementer")
    request = worker.envelope("report", assignment_id=ZERO, report=body("implementer", **members))
    worker.send(request)
    answer = worker.response(request["id"])
    assert not answer["success"] and answer["status"] in {INVALID, "forbidden"}
    assert answer["status"] == INVALID or "verdict" in members
    assert answer["error"] and len(answer["error"]) <= 512
    worker.expect_eof()
