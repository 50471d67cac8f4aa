# SPDX-License-Identifier: Apache-2.0
"""The engine against the naive rules, driven by Hypothesis.

One machine, three claims: every connection sees exactly what the naive rules say; the promises of sections 2.8, 4.2 and
4.4 hold whatever happens; and an engine that is written down and read back, or made of a snapshot and the inputs since,
goes on as if nothing had been.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.comparison import Comparison
from tests.naive import END, Numbers

NUMBERS = Numbers(
    sessions=5,
    unregistered=3,
    registration_ms=50_000,
    presence_ms=1_000,
    ack_ms=8_000,
    recent_ms=60_001,
    pending_total=5,
    pending_per_sender=3,
    asks_per_sender=2,
    ask_expiry_ms=200_000,
)
STEP = 7
"""Time moves in steps that no sum of the limits above is a multiple of, so that "at" and "after" cannot be confused."""

IDS = ["a", "ab", "abc", "B", "z\U0001f600"]
NAMES = ["a", "worker", "Worker", "ab", "\u00c9", "\u00e9"]
SCOPES = ["S" * 16, "T" * 16]
MESSAGES = ["m1", "m2", "m3", "m4", "m5", "m6", "\ud800"]

KEYS = {
    "health_ok": {"requestId", "protocol", "version", "endpoint", "remoteAccess"},
    "registered": {"sessionId", "protocol", "version"},
    "sessions": {"requestId", "sessions"},
    "session_joined": {"session"},
    "presence_update": {"session"},
    "session_left": {"sessionId"},
    "message": {"deliveryId", "from", "message"},
    "delivery_accepted": {"messageId", "deliveryId"},
    "delivered": {"messageId", "deliveryId"},
    "delivery_failed": {"messageId", "accepted", "code", "reason"},
    "ask_deferred": {"messageId", "fromSessionId"},
    "ask_cancelled": {"messageId", "fromSessionId", "reason"},
    "ask_control_result": {"requestId", "action", "messageId", "applied"},
    "error": {"code", "error"},
}

mostly = st.sampled_from([True, True, True, False])
selectors = st.sampled_from([*IDS, *IDS, "WORKER", "a", "\u00e9", "nobody"])
claims = st.fixed_dictionaries(
    {
        "cwd": st.just("/"),
        "model": st.sampled_from(["m", "n"]),
        "pid": st.sampled_from([1, 1, 1, 2.5]),
        "startedAt": st.just(1),
        "lastActivity": st.just(1),
    },
    optional={
        "name": st.sampled_from(NAMES),
        "status": st.sampled_from(["", "busy"]),
        "runtimeInstanceId": st.sampled_from(["r1", "r2"]),
    },
)
registrations = st.fixed_dictionaries(
    {
        "type": st.just("register"),
        "protocol": st.just("pi-intercom"),
        "version": st.just(4),
        "session": claims,
        "sessionId": st.sampled_from(IDS),
    },
    optional={"scopeId": st.sampled_from(["", *SCOPES])},
)
contents = st.fixed_dictionaries(
    {"text": st.sampled_from(["x", "y\u00e9"])},
    optional={"attachments": st.just([{"type": "file", "name": "n", "content": "c"}])},
)
messages = st.fixed_dictionaries(
    {"id": st.sampled_from(MESSAGES), "timestamp": st.sampled_from([1, 2]), "content": contents},
    optional={"expectsReply": st.sampled_from([True, True, True, False])},
)
presences = st.fixed_dictionaries(
    {"type": st.just("presence")},
    optional={
        "name": st.sampled_from(NAMES),
        "status": st.sampled_from(["", "busy", "idle"]),
        "model": st.sampled_from(["m", "n"]),
        "scopeId": st.sampled_from(SCOPES),
    },
)
MISTAKES: list[Any] = [
    [],
    {"type": 1},
    {"type": "nonsense"},
    {"type": "list"},
    {"type": "presence", "name": 1},
    {"type": "presence", "name": "new", "model": None},
    {"type": "unregister", "preserveAsks": None},
    {"type": "message_received"},
    {"type": "message_rejected", "deliveryId": "x", "code": "OTHER", "reason": ""},
    {"type": "defer_ask", "requestId": "r"},
    {"type": "cancel_ask", "requestId": "r", "messageId": "x" * 257},
    {"type": "register"},
    {"type": "access_control", "requestId": "r", "action": "inspect_tree"},
    {"type": "health"},
]
BROKEN: list[Any] = [b"{", b"\xef\xbb\xbf{}", b'{"type":NaN}', b"\xff"]
REGISTER: Any = {
    "type": "register",
    "protocol": "pi-intercom",
    "version": 4,
    "session": {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1},
    "sessionId": "a",
}
DEPARTURES: list[Any] = [
    *["close", {"type": "unregister"}] * 4,
    *[{"type": "unregister", "preserveAsks": True}, {"type": "unregister", "preserveAsks": False}] * 3,
    *MISTAKES,
    *BROKEN,
    {**REGISTER, "sessionId": "abc"},
]
STRANGERS: list[Any] = [*["local", "remote", "register", "register", "begin to register"] * 4, *MISTAKES, *BROKEN]
ODD_SENDS: list[Any] = [
    {"type": "send"},
    {"type": "send", "to": "", "message": {"id": "m1", "timestamp": 1, "content": {"text": "x"}}},
    {"type": "send", "to": "a", "message": {"id": "m1", "timestamp": 1, "content": {"text": "x"}, "more": 1}},
    {"type": "send", "to": "a", "message": {"id": "", "timestamp": 1, "content": {"text": "x"}}},
    {
        "type": "send",
        "to": "a",
        "message": {"id": "m1", "timestamp": 1, "content": {"text": "", "control": {"type": "c", "version": 1}}},
    },
]


class EngineAgainstRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.both = Comparison(NUMBERS)
        self.watched = self.looked = 0
        self.bound: dict[str, int] = {}
        self.scopes: dict[int, Any] = {}
        self.accepted: set[tuple[int, str]] = set()
        self.settled: set[tuple[int, str]] = set()
        self.sent: list[tuple[int, Any]] = []

    # Choosing.

    def connection(self, index: int) -> int:
        """An open connection; a new one if there is none."""
        numbers = self.both.open
        return numbers[index % len(numbers)] if numbers else self.both.connect()

    def session(self, index: int) -> int:
        """A connection that is a session's; a new one if there is none."""
        if not self.both.naive.sessions:
            self.both.send(self.both.connect(), REGISTER)
        bound = [session.connection for session in self.both.naive.sessions]
        return bound[index % len(bound)]

    def session_id(self, number: int) -> str | None:
        connection = self.both.naive.connections.get(number)
        return connection.session if connection else None

    # Steps.

    @initialize(frames=st.lists(registrations, min_size=3, max_size=4))
    def populate(self, frames: list[Any]) -> None:
        for session_id, frame in zip(IDS, frames, strict=False):
            self.both.send(self.both.connect(), {**frame, "sessionId": session_id})

    @rule(frame=registrations, again=st.booleans(), index=st.integers(0, 9))
    def join(self, frame: Any, again: bool, index: int) -> None:
        """A new connection registers, perhaps in place of a session that is there."""
        sessions = self.both.naive.sessions
        number = self.both.connect()
        if again and sessions:
            old = sessions[index % len(sessions)]
            claimed = {**frame["session"], "pid": old.pid, "startedAt": old.started}
            claimed.pop("runtimeInstanceId", None)
            if old.runtime is not None:
                claimed["runtimeInstanceId"] = old.runtime
            frame = {**frame, "sessionId": old.id, "session": claimed}
        begin = len(self.both.history)
        self.both.send(number, frame)
        self.check_replacement(number, self.both.history[begin:])

    def check_replacement(self, number: int, seen: list[tuple[int, Any]]) -> None:
        """4.4: every `session_left` before `registered`, that before every `session_joined`, the old end last."""
        kinds = [END if frame == END else frame["type"] for _, frame in seen]
        if "registered" in kinds and END in kinds[1:] and seen[-1] != (number, END):
            turn = kinds.index("registered")
            assert seen[turn][0] == number
            assert "session_left" not in kinds[turn:]
            assert "session_joined" not in kinds[:turn]
            assert kinds.count(END) == 1 and kinds[-1] == END

    @precondition(lambda self: self.both.host.ended)
    @rule(which=st.integers(0, 99), frame=presences | registrations | st.sampled_from(MISTAKES))
    def send_late(self, which: int, frame: Any) -> None:
        ended = sorted(self.both.host.ended)
        self.both.late(ended[which % len(ended)], frame)

    @rule(index=st.integers(0, 9), to=st.integers(0, 9), message=messages, selector=selectors, exact=mostly)
    def send(self, index: int, to: int, message: Any, selector: str, exact: bool) -> None:
        number = self.session(index)
        sessions = self.both.naive.sessions
        target = sessions[to % len(sessions)].id if exact else selector
        self.sent.append((index, {"type": "send", "to": target, "message": message}))
        self.both.send(number, self.sent[-1][1])

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 2))
    def send_again(self, which: int) -> None:
        index, frame = self.sent[-1 - which % len(self.sent)]
        self.both.send(self.session(index), frame)

    @precondition(lambda self: self.both.naive.edges)
    @rule(index=st.integers(0, 9), message=messages, honest=mostly)
    def reply(self, index: int, message: Any, honest: bool) -> None:
        edge = self.both.naive.edges[index % len(self.both.naive.edges)]
        replier = self.both.naive.session(edge.target) if honest else None
        number = replier.connection if replier else self.session(index)
        frame = {"type": "send", "to": edge.sender, "message": {**message, "replyTo": edge.message_id}}
        self.both.send(number, frame)

    @rule(index=st.integers(0, 9), to=st.integers(0, 9), message=messages, patience=st.integers(1, 4))
    def converse(self, index: int, to: int, message: Any, patience: int) -> None:
        """An ask that arrives, and perhaps what often follows."""
        number = self.session(index)
        asker, sessions = self.session_id(number), self.both.naive.sessions
        target = sessions[to % len(sessions)]
        body = {**message, "expectsReply": True}
        self.both.send(number, {"type": "send", "to": target.id, "message": body})
        self.acknowledge_all()
        control = {"requestId": "r", "messageId": body["id"]}
        if patience < 3:
            self.both.send(number, {"type": "defer_ask", **control})
        if patience < 2:
            self.both.send(target.connection, {"type": "send", "to": asker, "message": {**body, "id": "back"}})
            self.acknowledge_all()

    def acknowledge_all(self) -> None:
        for item in list(self.both.naive.pending):
            self.both.send(item.sink, {"type": "message_received", "deliveryId": self.name_of(item.delivery)})

    @precondition(lambda self: self.both.naive.pending)
    @rule(which=st.integers(0, 9))
    def acknowledge(self, which: int) -> None:
        item = self.both.naive.pending[which % len(self.both.naive.pending)]
        self.both.send(item.sink, {"type": "message_received", "deliveryId": self.name_of(item.delivery)})

    @precondition(lambda self: self.both.naive.pending)
    @rule(which=st.integers(0, 9), index=st.integers(0, 9), honest=st.booleans())
    def reject(self, which: int, index: int, honest: bool) -> None:
        item = self.both.naive.pending[which % len(self.both.naive.pending)]
        frame = {"type": "message_rejected", "code": "CONFLICTING_MESSAGE_ID", "reason": "r"}
        number = item.sink if honest else self.session(index)
        self.both.send(number, {**frame, "deliveryId": self.name_of(item.delivery)})

    def name_of(self, delivery: int) -> str:
        return next(name for name, number in self.both.naive.names.items() if number == delivery)

    @precondition(lambda self: self.both.naive.names)
    @rule(which=st.integers(0, 99), index=st.integers(0, 9))
    def acknowledge_anything(self, which: int, index: int) -> None:
        names = list(self.both.naive.names)
        self.both.send(self.session(index), {"type": "message_received", "deliveryId": names[which % len(names)]})

    @rule(index=st.integers(0, 9), kind=st.sampled_from(["defer_ask", "cancel_ask"]), own=mostly)
    def control(self, index: int, kind: str, own: bool) -> None:
        edges = self.both.naive.edges
        number, message_id = self.session(index), MESSAGES[index % len(MESSAGES)]
        asker = self.both.naive.session(edges[index % len(edges)].sender) if edges and own else None
        if asker is not None:
            number, message_id = asker.connection, edges[index % len(edges)].message_id
        self.both.send(number, {"type": kind, "requestId": "r", "messageId": message_id})

    @rule(index=st.integers(0, 9), frame=presences)
    def presence(self, index: int, frame: Any) -> None:
        self.both.send(self.session(index), frame)

    @rule(index=st.integers(0, 9), kind=st.sampled_from(["list", "health"]))
    def ask_broker(self, index: int, kind: str) -> None:
        self.both.send(self.session(index), {"type": kind, "requestId": "r\ud800"})

    @rule(index=st.integers(0, 9), how=st.sampled_from(DEPARTURES))
    def leave(self, index: int, how: Any) -> None:
        number = self.session(index)
        if how == "close":
            self.both.close(number)
        elif isinstance(how, bytes):
            self.both.payload(number, how)
        else:
            self.both.send(number, how)

    @rule(index=st.integers(0, 9), frame=st.sampled_from(ODD_SENDS))
    def send_oddly(self, index: int, frame: Any) -> None:
        self.both.send(self.session(index), frame)

    @rule(index=st.integers(0, 9), what=st.sampled_from(STRANGERS), frame=registrations, cut=st.integers(0, 400))
    def be_unregistered(self, index: int, what: Any, frame: Any, cut: int) -> None:
        """What connections do that are no session's."""
        alone = [number for number in self.both.open if self.session_id(number) is None]
        number = alone[index % len(alone)] if alone else self.both.connect()
        if what in ("local", "remote"):
            self.both.connect(what)
        elif what == "register":
            self.both.send(number, frame)
        elif what == "begin to register":
            self.both.begin(number, frame, cut)
        elif isinstance(what, bytes):
            self.both.payload(number, what)
        else:
            self.both.send(number, what)

    @rule(index=st.integers(0, 9), frame=presences, cut=st.integers(0, 60))
    def send_half_a_frame(self, index: int, frame: Any, cut: int) -> None:
        self.both.begin(self.session(index), frame, cut)

    @precondition(lambda self: self.both.rest)
    @rule()
    def send_the_other_half(self) -> None:
        self.both.finish(next(iter(self.both.rest)))

    @rule(steps=st.sampled_from([1, 20, 200]))
    def wait(self, steps: int) -> None:
        self.both.advance(steps * STEP)

    @rule(steps=st.sampled_from([1_200, 9_000, 40_000]))
    def wait_long(self, steps: int) -> None:
        self.both.advance(steps * STEP)

    @rule()
    def write_down_and_read_back(self) -> None:
        self.both.restore()

    @rule(restart=st.sampled_from([False, False, False, True]))
    def checkpoint(self, restart: bool) -> None:
        self.both.replay()
        if restart:
            self.both.restart()
            self.accepted.clear()
            self.settled.clear()
        else:
            self.both.checkpoint()

    # Promises.

    @invariant()
    def frames_have_exact_keys(self) -> None:
        """2.3 and 2.8: nothing more, nothing less, and never null."""
        for _, frame in self.both.history[self.watched :]:
            if isinstance(frame, dict):
                assert set(frame) == KEYS[frame["type"]] | {"type"}
                shown = [frame.get("session"), frame.get("from"), *frame.get("sessions", [])]
                for entry in shown:
                    assert entry is None or None not in entry.values()

    @invariant()
    def deliveries_settle_once_and_after_acceptance(self) -> None:
        """2.8: `delivery_accepted` first, with the same delivery id; a failure says whether it was seen."""
        for number, frame in self.both.history[self.watched :]:
            if not isinstance(frame, dict):
                continue
            key = (number, frame.get("messageId", ""))
            if frame["type"] == "delivery_accepted":
                self.accepted.add(key)
                self.settled.discard(key)
            elif frame["type"] == "delivered" or frame.get("accepted") is True:
                assert key in self.accepted
                assert key not in self.settled
                self.settled.add(key)
        self.watched = len(self.both.history)

    @invariant()
    def scopes_are_partitioned(self) -> None:
        """4.2: nobody is told of a session in another scope, unless the two exchange a message by exact id."""
        for number, frame in self.both.history[self.looked :]:
            if not isinstance(frame, dict):
                continue
            if frame["type"] == "registered":
                self.bound[frame["sessionId"]] = number
                self.scopes[number] = self.both.announced[number]
            told = [entry["id"] for entry in frame.get("sessions", [])]
            if frame["type"] in ("session_joined", "presence_update"):
                told = [frame["session"]["id"]]
            elif frame["type"] == "session_left":
                told = [frame["sessionId"]]
            for session_id in told:
                assert self.scopes[self.bound[session_id]] == self.scopes[number]
        self.looked = len(self.both.history)

    @invariant()
    def stored_asks_are_the_open_ones(self) -> None:
        self.both.check_store()

    def teardown(self) -> None:
        self.both.replay()


@pytest.mark.timeout(1_200)  # a failure is shrunk for up to five minutes
class TestEngineAgainstRules(EngineAgainstRules.TestCase):  # type: ignore[misc, valid-type, name-defined]
    settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
