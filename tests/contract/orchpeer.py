# SPDX-License-Identifier: Apache-2.0
"""Workers, observers and control clients that know the wire of coordination protocol 1 and nothing else.

They share no code with the broker. Sockets block; every wait has a bound that only a hanging broker can reach.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.contract.peer import HANG, Frame, Peer, compact, packed, strict

MAX_FRAME = 262_144
HEX32 = re.compile(r"[a-f0-9]{32}\Z")
RETRY = 0.02
"""Seconds between attempts where the broker gives no sign of what is waited for."""

USAGE = {"input": 1, "output": 2, "cacheRead": 3, "cacheWrite": 4, "cost": {"total": 0.5}}
CALLS = {**USAGE, "providerCalls": 1}

RESPONSE_KEYS = {"version", "type", "id", "success", "status", "error"}

BACK = {"verdict": "changes_requested"}
VERDICTS = {"reviewer": "approved", "playwright": "pass", "django": "advisory_approved"}
KINDS = {"implementer": "implementation", "reviewer": "review"}


def fresh_id() -> str:
    return uuid.uuid4().hex


def body(role: str, **members: Any) -> Frame:
    """The smallest valid report of `role`, with `members` over it."""
    report: Frame = {"kind": KINDS.get(role, role), "summary": f"what the {role} found"}
    if role in VERDICTS:
        report["verdict"] = VERDICTS[role]
    return {**report, **members}


def plan(**members: Any) -> Frame:
    """A valid plan report."""
    lists = ("relevant_paths", "relevant_symbols", "intended_changes", "required_checks", "risks", "open_questions")
    return {"kind": "plan", "summary": "what is to be done", **{name: [] for name in lists}, **members}


def normalised(report: Frame) -> Frame:
    """The form in which observers get a report that is no plan."""
    lists = {name: [] for name in ("changed_paths", "checks", "findings", "risks", "limitations")}
    ordered = {"kind": report["kind"], "summary": report["summary"], **lists, "verdict": None}
    return {**ordered, **report}


def eventually(attempt: Callable[[], bool]) -> None:
    """Wait until `attempt` is true."""
    deadline = time.monotonic() + HANG
    while not attempt():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(RETRY)


class OrchPeer(Peer):
    """One connection of any kind."""

    def __init__(self, path: Path | str) -> None:
        try:
            super().__init__(path)
        except OSError:
            self._socket.close()
            raise

    def recv(self) -> Frame:
        """The next frame. It has to be compact JSON of this protocol, not longer than a frame may be."""
        payload = self.recv_payload()
        assert payload is not None, "the broker closed the connection"
        frame = strict(payload)
        assert len(payload) <= MAX_FRAME
        assert compact(frame) == payload, payload[:200]
        assert frame["version"] == 1 and isinstance(frame["version"], int) and isinstance(frame["type"], str)
        assert isinstance(frame, dict)
        return frame

    def recv_or_end(self) -> Frame | None:
        """The next frame, or None at the end of the stream."""
        payload = self.recv_payload()
        return None if payload is None else strict(payload)

    def fileno(self) -> int:
        return self._socket.fileno()

    def refused_silently(self) -> None:
        """The broker closes without a frame."""
        assert self.recv_or_end() is None
        self.close()


class Worker(OrchPeer):
    """A role's worker: requests one after another; what comes in between waits in `inbox`."""

    def __init__(self, path: Path | str, role: str, token: str, generation: int = 1) -> None:
        super().__init__(path)
        self.role = role
        self.token = token
        self.generation = generation
        self.inbox: list[Frame] = []

    # Requests.

    def envelope(self, kind: str, /, **keys: Any) -> Frame:
        """A request of this worker; `keys` may overwrite what all requests have."""
        return {"version": 1, "type": kind, "role": self.role, "token": self.token, "id": fresh_id(), **keys}

    def ask(self, kind: str, /, **keys: Any) -> Frame:
        """Send a request and return its response; frames that come before that go to the inbox."""
        request = self.envelope(kind, **keys)
        self.send(request)
        return self.response(request["id"])

    def response(self, request_id: str) -> Frame:
        while True:
            frame = self.recv()
            if frame["type"] == "response":
                assert set(frame) == RESPONSE_KEYS, frame
                assert frame["id"] == request_id, frame
                return frame
            self.inbox.append(frame)

    def succeed(self, status: str, kind: str, /, **keys: Any) -> None:
        """Send a request that succeeds with `status`."""
        request = self.envelope(kind, **keys)
        self.send(request)
        expected = {"version": 1, "type": "response", "id": request["id"], "success": True, "status": status}
        assert self.response(request["id"]) == {**expected, "error": None}

    def answered(self, code: str, text: str, kind: str, /, **keys: Any) -> None:
        """Send a request that is refused under its own id; the connection stays open."""
        request = self.envelope(kind, **keys)
        self.send(request)
        expected = {"version": 1, "type": "response", "id": request["id"], "success": False, "status": code}
        assert self.response(request["id"]) == {**expected, "error": text}

    def refused(self, code: str, text: str, kind: str, /, **keys: Any) -> None:
        """Send a request that is refused under its own id, after which the broker closes."""
        self.answered(code, text, kind, **keys)
        self.expect_eof()
        self.close()

    def refused_payload(self, code: str, text: str, payload: bytes, request_id: str | None = None) -> None:
        """Send a payload that is refused; without `request_id` under an id of the broker's. Then the broker closes."""
        self.refused_bytes(code, text, packed(payload), request_id)

    def refused_bytes(self, code: str, text: str | None, data: bytes, request_id: str | None = None) -> None:
        self.flood(data)
        frame = self.recv()
        while frame["type"] != "response":
            self.inbox.append(frame)
            frame = self.recv()
        assert HEX32.match(frame["id"]) if request_id is None else frame["id"] == request_id
        assert (frame["success"], frame["status"]) == (False, code), frame
        if text is not None:
            assert frame["error"] == text
        assert set(frame) == RESPONSE_KEYS
        self.expect_eof()
        self.close()

    # What the protocol has.

    def hello(self) -> Self:
        self.succeed("connected", "hello", generation=self.generation)
        return self

    def lifecycle(self, state: str, usage: Any = None) -> None:
        self.succeed("recorded", "lifecycle", state=state, usage=usage)

    def ack(self, delivery_id: str, status: str = "accepted") -> None:
        self.succeed("recorded", "ack", delivery_id=delivery_id, status=status)

    def progress(self, assignment_id: str, phase: str = "thinking", usage: Any = None) -> None:
        self.succeed("recorded", "progress", assignment_id=assignment_id, phase=phase, usage=usage)

    def report(self, assignment: Frame, report: Frame | None = None, status: str = "accepted", **keys: Any) -> None:
        report = body(self.role) if report is None else report
        self.succeed(status, "report", assignment_id=assignment["assignment_id"], report=report, **keys)

    # What the broker sends unasked.

    def incoming(self) -> Frame:
        """The next frame that is no response."""
        frame = self.inbox.pop(0) if self.inbox else self.recv()
        check_delivery(frame)
        return frame

    def context(self, kind: str, round_: int = 1, *, trigger: bool = False) -> Frame:
        """The next frame is this context."""
        frame = self.incoming()
        assert (frame["type"], frame["kind"], frame["round"], frame["trigger"]) == ("context", kind, round_, trigger)
        return frame

    def assignment(self, kind: str, round_: int = 1) -> Frame:
        """The next frame is an assignment of `kind`."""
        frame = self.incoming()
        assert (frame["type"], frame.get("kind"), frame["round"]) == ("assignment", kind, round_), frame
        return frame

    def begin(self, kind: str, round_: int = 1) -> Frame:
        """Take an assignment as a bridge does: acknowledge, then be active."""
        work = self.assignment(kind, round_)
        self.ack(work["id"])
        self.lifecycle("active")
        return work

    def do(self, kind: str, round_: int = 1, report: Frame | None = None) -> Frame:
        """Take an assignment, report on it, be idle."""
        work = self.begin(kind, round_)
        self.report(work, report)
        self.lifecycle("idle")
        return work

    def waiting(self) -> list[Frame]:
        """Everything that the broker has sent so far and that was not looked at."""
        self.ack(fresh_id())
        frames, self.inbox = self.inbox, []
        for frame in frames:
            check_delivery(frame)
        return frames

    def waiting_until_end(self) -> list[Frame]:
        """Everything up to the end, which the broker has made."""
        while (frame := self.recv_or_end()) is not None:
            self.inbox.append(frame)
        self.close()
        frames, self.inbox = self.inbox, []
        return frames

    def quiet(self) -> None:
        """Nothing has been sent."""
        assert self.waiting() == []


def evidence(worker: Worker, round_: int, *parts: str) -> str:
    """The next frame is a run state in which the parts are, in this order; its text."""
    content: str = worker.context("run_state", round_)["content"]
    places = [content.index(part) for part in parts]
    assert places == sorted(places) and len(content.encode()) <= 16_384
    return content


def review(worker: Worker, round_: int = 1, **members: Any) -> Frame:
    """The reviewer is given the evidence and the review, and reports."""
    evidence(worker, round_, f"Current round: {round_}", f"## implementer · round {round_} · implementation")
    return worker.do("review", round_, body("reviewer", **members))


def lifecycles(role: str, *states: str) -> list[tuple[Any, ...]]:
    return [("lifecycle", role, state) for state in states]


def check_delivery(frame: Frame) -> None:
    """What the broker sends to a worker has the keys and values that bridges demand."""
    keys = {
        "context": ["version", "type", "id", "round", "kind", "content", "trigger"],
        "assignment": ["version", "type", "id", "assignment_id", "round", "kind", "content", "trigger"],
        "abort": ["version", "type", "id"],
    }
    more = {"deliver_as"} if frame.get("kind") == "operator_message" else set()
    assert set(frame) - more == set(keys[frame["type"]]), frame
    assert frame.get("deliver_as", "steer") in {"steer", "followUp"}
    assert HEX32.match(frame["id"])
    if frame["type"] == "abort":
        return
    assert type(frame["round"]) is int and frame["round"] > 0
    assert type(frame["trigger"]) is bool and isinstance(frame["kind"], str)
    assert frame["content"].strip() and len(frame["content"].encode("utf-16-le")) // 2 <= 32_768
    if frame["type"] == "assignment":
        assert HEX32.match(frame["assignment_id"]) and frame["trigger"] is True
        assert f"Round: {frame['round']}" in frame["content"].splitlines()
    else:
        assert frame["kind"] in {"baseline", "run_state", "operator_message"}


class Observer(OrchPeer):
    """A read-only observer. Every frame is held against its exact keys."""

    KEYS = {
        "snapshot": ("session", "state", "round", "roles", "report_count", "report_replay_complete"),
        "workflow": ("session", "state", "round"),
        "lifecycle": ("session", "role", "state"),
        "report": ("session", "id", "assignment_id", "role", "round", "report"),
    }

    def __init__(self, path: Path | str, token: str) -> None:
        super().__init__(path)
        self.token = token

    def request(self, **keys: Any) -> Frame:
        return {"version": 1, "type": "observe", "token": self.token, "id": fresh_id(), **keys}

    def observe(self) -> Frame:
        """Be admitted; the snapshot. The reports that were replayed before it are in `replayed`."""
        request = self.request()
        self.send(request)
        response = self.recv()
        assert response == {
            "version": 1,
            "type": "response",
            "id": request["id"],
            "success": True,
            "status": "observing",
        }
        self.replayed: list[Frame] = []
        while (frame := self.event())["type"] == "report":
            self.replayed.append(frame)
        assert frame["type"] == "snapshot"
        names = [entry["role"] for entry in frame["roles"]]
        assert names == sorted(names) and all(set(entry) == {"role", "state"} for entry in frame["roles"])
        return frame

    def event(self) -> Frame:
        """The next frame."""
        frame = self.recv()
        keys = {"version", "type", *self.KEYS[frame["type"]]}
        assert set(frame) - ({"usage"} if frame["type"] == "report" else set()) == keys, frame
        return frame

    def seen(self) -> tuple[Any, ...]:
        """The next frame in short: its type and what it says."""
        frame = self.event()
        if frame["type"] == "report":
            return ("report", frame["role"], frame["round"], frame["report"]["kind"])
        return tuple(frame[key] for key in ("type", *self.KEYS[frame["type"]][1:]))

    def expect_seen(self, *events: tuple[Any, ...]) -> None:
        """The next frames are exactly these."""
        for event in events:
            assert self.seen() == event


def command(path: Path | str, token: str, action: str, role: str, **keys: Any) -> Frame | None:
    """Send one control request and return the answer, after which the broker must have closed."""
    request: Frame = {"version": 1, "type": "control", "token": token, "id": fresh_id(), "action": action, "role": role}
    request |= {"delivery": None, "message": None, **keys}
    return exchange(path, request)


def exchange(path: Path | str, request: Frame) -> Frame | None:
    """Send `request` on a connection of its own; its one answer, None where there is none."""
    peer = OrchPeer(path)
    try:
        peer.send(request)
        answer = peer.recv_or_end()
        if answer is not None:
            assert set(answer) == {"version", "type", "id", "success", "status", "duplicate"}, answer
            assert answer["success"] is (answer["status"] == "accepted")
            peer.expect_eof()
        return answer
    finally:
        peer.close()
