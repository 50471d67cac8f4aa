# SPDX-License-Identifier: Apache-2.0
"""The rules of the intercom told a second time, as plainly as possible: lists, dictionaries and loops.

This is what the broker is compared with. It shares neither code nor data with it, keeps no index and saves no time.
Every rule names its section of the contract.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.naive_shapes import ABSENT, Frame, NotJson, blank, claims_ok, is_text, message_ok, parse, scope_of

END = "end"

ECHO = 256
"""Characters of an unknown type that are echoed; the contract sets no bound, but a frame has one."""


@dataclass
class Numbers:
    """The limits that a comparison may shrink."""

    sessions: int = 128
    unregistered: int = 32
    registration_ms: int = 1_000
    presence_ms: int = 1_000
    ack_ms: int = 8_000
    recent_ms: int = 600_000
    pending_total: int = 1_024
    pending_per_sender: int = 64
    asks_per_sender: int = 64
    ask_expiry_ms: int = 600_000


@dataclass
class Connection:
    number: int
    origin: str
    session: str | None = None
    alone_since: int = 0
    turn: int = 0
    """Counts how connections became unregistered one after another."""


@dataclass
class Session:
    id: str
    connection: int
    scope: str | None
    runtime: Any
    pid: float
    started: float
    info: Frame
    told_at: int


@dataclass
class Pending:
    delivery: int
    sender: str
    source: int
    target: str
    sink: int
    message: Frame
    payload: Any
    accepted_at: int


@dataclass
class Recent:
    payload: Any
    delivery: int
    target: str
    delivered: bool
    settled_at: int


@dataclass
class Edge:
    sender: str
    message_id: str
    target: str
    created_at: int
    expires_at: int
    blocking: bool


class Fail(Exception):
    """The frame is answered with `error` and ends the connection."""

    def __init__(self, text: str, code: str = "INVALID_REQUEST") -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Naive:
    """A broker made of rules only. `out` collects (connection, frame or END); delivery ids are counted from 1."""

    numbers: Numbers
    epoch: int
    now: int = 0
    connections: dict[int, Connection] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    recent: dict[tuple[str, str], Recent] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    out: list[tuple[int, Frame | str]] = field(default_factory=list)
    deliveries: int = 0
    turns: int = 0
    names: dict[str, int] = field(default_factory=dict)
    """What the broker that is compared calls the deliveries."""

    # Helpers.

    def tell(self, number: int, kind: str, **members: Any) -> None:
        if number in self.connections:
            self.out.append((number, {"type": kind, **members}))

    def end(self, number: int) -> None:
        if self.connections.pop(number, None) is not None:
            self.out.append((number, END))

    def session(self, session_id: str | None) -> Session | None:
        return next((session for session in self.sessions if session.id == session_id), None)

    def tell_session(self, session_id: str, kind: str, **members: Any) -> None:
        session = self.session(session_id)
        if session is not None:
            self.tell(session.connection, kind, **members)

    def tell_scope(self, subject: Session, kind: str, **members: Any) -> None:
        """2.5: every other session in the subject's scope."""
        for other in self.sessions:
            if other.scope == subject.scope and other.id != subject.id:
                self.tell(other.connection, kind, **members)

    def edge(self, sender: str, message_id: str) -> Edge | None:
        return next((edge for edge in self.edges if (edge.sender, edge.message_id) == (sender, message_id)), None)

    # Connections and time.

    def opened(self, number: int, origin: str) -> None:
        self.turns += 1
        self.connections[number] = Connection(number, origin, None, self.now, self.turns)
        alone = [connection for connection in self.connections.values() if connection.session is None]
        if len(alone) > self.numbers.unregistered:
            self.end(min(alone, key=lambda connection: connection.turn).number)

    def closed(self, number: int) -> None:
        connection = self.connections.pop(number, None)
        if connection is not None and connection.session is not None:
            self.leave(number, connection.session, keep_asks=True)

    def leave(self, number: int, session_id: str, *, keep_asks: bool) -> None:
        """2.5, last sentence; 2.4 unregister."""
        session = self.session(session_id)
        assert session is not None and session.connection == number
        self.tell_scope(session, "session_left", sessionId=session_id)
        self.sessions.remove(session)
        self.fail_pending_of(number, told=False)
        if keep_asks:
            self.defer_asks_of(session_id)
        else:
            self.remove_asks_of(session_id)

    def fail_pending_of(self, number: int, *, told: bool) -> None:
        """2.6, outcomes: the binding of `number` is gone. `told`: it can still be written to (a replaced session)."""
        for item in list(self.pending):
            if item.sink == number:
                text = "Recipient disconnected before acknowledging the message"
                self.fail(item, "RECIPIENT_DISCONNECTED", text, silent=number if not told else None)
            elif item.source == number:
                text = "Sender disconnected before delivery was acknowledged"
                self.fail(item, "SENDER_DISCONNECTED", text, silent=number if not told else None)

    def defer_asks_of(self, session_id: str) -> None:
        """2.7: blocking asks from and to the leaver; only the recipients of its own asks are told."""
        for edge in self.edges:
            if edge.blocking and session_id in (edge.sender, edge.target):
                edge.blocking = False
                if edge.sender == session_id:
                    self.tell_session(edge.target, "ask_deferred", messageId=edge.message_id, fromSessionId=session_id)

    def remove_asks_of(self, session_id: str) -> None:
        for edge in [edge for edge in self.edges if session_id in (edge.sender, edge.target)]:
            self.edges.remove(edge)
            other = edge.target if edge.sender == session_id else edge.sender
            reason = {"fromSessionId": session_id, "reason": "session_disconnected"}
            self.tell_session(other, "ask_cancelled", messageId=edge.message_id, **reason)

    def restarted(self) -> None:
        """2.7: edges stay, deferred; the expired ones are dropped. Everything else is forgotten."""
        self.connections.clear()
        self.sessions.clear()
        self.pending.clear()
        self.recent.clear()
        self.edges = [edge for edge in self.edges if edge.expires_at > self.now]
        for edge in self.edges:
            edge.blocking = False

    def ticked(self) -> None:
        for connection in list(self.connections.values()):
            if connection.session is None and self.now >= connection.alone_since + self.numbers.registration_ms:
                self.end(connection.number)
        for item in list(self.pending):
            if self.now >= item.accepted_at + self.numbers.ack_ms:
                self.fail(item, "DELIVERY_TIMEOUT", "Recipient did not acknowledge the message in time")
        for edge in [edge for edge in self.edges if self.now >= edge.expires_at]:
            self.edges.remove(edge)
            notice = {"messageId": edge.message_id, "fromSessionId": edge.sender, "reason": "expired"}
            self.tell_session(edge.target, "ask_cancelled", **notice)

    # 2.1: frames, in the check order.

    def received(self, number: int, payload: bytes) -> None:
        connection = self.connections.get(number)
        if connection is None:
            return
        try:
            value = parse(payload)
        except NotJson:
            self.break_off(connection)
            return
        try:
            self.check(connection, value)
        except Fail as failure:
            self.tell(number, "error", code=failure.code, error=str(failure))
            self.break_off(connection)

    def break_off(self, connection: Connection) -> None:
        self.end(connection.number)
        if connection.session is not None:
            self.leave(connection.number, connection.session, keep_asks=True)

    def check(self, connection: Connection, value: Any) -> None:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise Fail("Invalid client message")
        kind = value["type"]
        if kind == "health":
            self.health(connection, value)
        elif kind == "access_control":
            self.access_control(connection)
        elif kind == "register":
            self.register(connection, value)
        elif connection.session is None:
            raise Fail(f"Received {kind[:ECHO]} before register")
        else:
            session = self.session(connection.session)
            assert session is not None and session.connection == connection.number
            self.dispatch(connection, session, kind, value)

    def dispatch(self, connection: Connection, session: Session, kind: str, value: Frame) -> None:
        if kind == "list":
            if not isinstance(value.get("requestId"), str):
                raise Fail("Invalid list message")
            shown = [dict(other.info) for other in self.sessions if other.scope == session.scope]
            self.tell(connection.number, "sessions", requestId=value["requestId"], sessions=shown)
        elif kind == "presence":
            self.presence(session, value)
        elif kind == "unregister":
            self.unregister(connection, session, value)
        elif kind == "send":
            self.send(session, value.get("to"), value.get("message"))
        elif kind == "message_received":
            if not isinstance(value.get("deliveryId"), str):
                raise Fail("Invalid message_received message")
            self.acknowledge(connection, value["deliveryId"])
        elif kind == "message_rejected":
            known = value.get("code") == "CONFLICTING_MESSAGE_ID"
            if not (isinstance(value.get("deliveryId"), str) and known and is_text(value.get("reason"), 0, 1024)):
                raise Fail("Invalid message_rejected message")
            self.reject(connection, value["deliveryId"], value["reason"])
        elif kind in ("defer_ask", "cancel_ask"):
            if not (is_text(value.get("requestId"), 0, 256) and is_text(value.get("messageId"), 0, 256)):
                raise Fail(f"Invalid {kind} message")
            self.control(session, kind.removesuffix("_ask"), value["requestId"], value["messageId"])
        else:
            raise Fail(f"Unknown client message type: {kind[:ECHO]}")

    def health(self, connection: Connection, value: Frame) -> None:
        if not isinstance(value.get("requestId"), str):
            raise Fail("Invalid health message")
        self.tell(
            connection.number,
            "health_ok",
            requestId=value["requestId"],
            protocol="pi-intercom",
            version=4,
            endpoint=connection.origin,
            remoteAccess={
                "feature": "remote-access-v1",
                "policySemanticsVersion": 2,
                "policySemanticsHash": "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0",
            },
        )

    def access_control(self, connection: Connection) -> None:
        if connection.session is not None:
            raise Fail("Remote access control requires a short-lived control connection", "ACCESS_DENIED")
        if connection.origin == "local":
            raise Fail("Remote access control credential or request was rejected", "ACCESS_DENIED")
        raise Fail("Remote control request was rejected", "ACCESS_DENIED")

    def register(self, connection: Connection, value: Frame) -> None:
        """2.4, rows 1 to 10."""
        required = {"type", "protocol", "version", "session"}
        if not required <= set(value) <= required | {"sessionId", "stateId", "access", "scopeId"}:
            raise Fail("Invalid register message")
        version = value["version"]
        if value["protocol"] != "pi-intercom" or isinstance(version, bool) or version != 4:
            raise Fail("Unsupported intercom protocol; expected pi-intercom v4", "PROTOCOL_MISMATCH")
        try:
            scope = scope_of(value.get("scopeId", ABSENT))
        except ValueError as error:
            raise Fail("Registration metadata is invalid") from error
        claims = value["session"]
        if not claims_ok(claims):
            raise Fail("Invalid register message")
        if connection.session is not None:
            raise Fail("Received duplicate register message")
        if connection.origin == "remote":
            if not isinstance(value.get("access"), dict):
                raise Fail("Remote registration requires an access credential", "ACCESS_DENIED")
            raise Fail("Remote registration credential was rejected", "ACCESS_DENIED")
        session_id = value.get("sessionId")
        if not isinstance(session_id, str) or blank(session_id):
            raise Fail("Invalid register sessionId")
        old = self.session(session_id)
        if old is None and len(self.sessions) >= self.numbers.sessions:
            raise Fail("Too many registered intercom sessions", "TOO_MANY_SESSIONS")
        if old is not None and not self.same_runtime(old, claims):
            text = f'Session ID "{session_id}" is already active in another local runtime; '
            raise Fail(text + "close the existing session or use a different session ID", "SESSION_ID_IN_USE")
        new = self.new_session(connection, session_id, scope, claims)
        self.install(connection, old, new)

    def same_runtime(self, old: Session, claims: Frame) -> bool:
        """4.4."""
        runtime = claims.get("runtimeInstanceId")
        if old.runtime is not None or runtime is not None:
            return bool(old.runtime == runtime)
        return bool(old.pid == claims["pid"] and old.started == claims["startedAt"])

    def new_session(self, connection: Connection, session_id: str, scope: str | None, claims: Frame) -> Session:
        info = {"id": session_id, **claims, "trustedLocal": True, "origin": "local"}
        runtime = info.pop("runtimeInstanceId", None)
        return Session(
            session_id, connection.number, scope, runtime, claims["pid"], claims["startedAt"], info, self.now
        )

    def install(self, connection: Connection, old: Session | None, new: Session) -> None:
        """4.4, steps 1 to 7."""
        if old is None:
            self.sessions.append(new)
        else:
            self.tell_scope(old, "session_left", sessionId=old.id)
            self.fail_pending_of(old.connection, told=True)
            self.defer_asks_of(old.id)
            self.sessions[self.sessions.index(old)] = new
        connection.session = new.id
        self.tell(new.connection, "registered", sessionId=new.id, protocol="pi-intercom", version=4)
        self.tell_scope(new, "session_joined", session=dict(new.info))
        if old is not None:
            self.end(old.connection)

    def unregister(self, connection: Connection, session: Session, value: Frame) -> None:
        preserve = value.get("preserveAsks", False)
        if not isinstance(preserve, bool):
            raise Fail("Invalid unregister preserveAsks value")
        self.leave(connection.number, session.id, keep_asks=preserve)
        connection.session = None
        connection.alone_since = self.now
        self.turns += 1
        connection.turn = self.turns

    def presence(self, session: Session, value: Frame) -> None:
        """2.5."""
        for key, most in (("name", 256), ("status", 512), ("model", 512)):
            if key in value and not is_text(value[key], 0, most):
                raise Fail(f"Invalid presence {key}")
        given = {key: value[key] for key in ("name", "status", "model") if key in value}
        changed = any(session.info.get(key) != text for key, text in given.items())
        session.info.update(given)
        session.info["lastActivity"] = self.epoch + self.now
        if changed or self.now - session.told_at >= self.numbers.presence_ms:
            session.told_at = self.now
            self.tell_scope(session, "presence_update", session=dict(session.info))

    # 2.6: deliveries.

    def resolve(self, session: Session, selector: str) -> list[Session]:
        """5."""
        exact = [other for other in self.sessions if other.id == selector]
        if exact:
            return exact
        near = [other for other in self.sessions if other.scope == session.scope]
        named = [other for other in near if other.info.get("name", ABSENT) is not ABSENT]
        named = [other for other in named if other.info["name"].lower() == selector.lower()]
        return named or [other for other in near if other.id.startswith(selector)]

    def send(self, session: Session, to: Any, message: Any) -> None:
        if not message_ok(to, message):
            given = message.get("id") if isinstance(message, dict) else None
            self.refuse(session, str(given) if is_text(given, 1, 256) else "unknown", "INVALID_MESSAGE")
            return
        payload = self.payload(to, message)
        if self.is_repeated(session, message, payload):
            return
        own = [item for item in self.pending if item.sender == session.id]
        if len(self.pending) >= self.numbers.pending_total or len(own) >= self.numbers.pending_per_sender:
            self.refuse(session, message["id"], "TOO_MANY_PENDING_DELIVERIES")
            return
        targets = self.resolve(session, to)
        if len(targets) != 1:
            text = f'Multiple sessions named "{to}" are connected. Use the session ID instead.'
            found = ("AMBIGUOUS_TARGET", text) if targets else ("SESSION_NOT_FOUND", "Session not found")
            self.refuse(session, message["id"], *found)
            return
        refusal = self.check_ask(session, targets[0], message)
        if refusal is not None:
            self.refuse(session, message["id"], *refusal)
            return
        self.accept(session, targets[0], message, payload)

    @staticmethod
    def payload(to: Any, message: Frame) -> Any:
        """Step 1: what has to be equal in a repetition. The order of keys says nothing; absent is not false."""
        return to, message.get("replyTo", ABSENT), message.get("expectsReply", ABSENT), message["content"]

    REASONS = {
        "INVALID_MESSAGE": "Invalid message format",
        "TOO_MANY_PENDING_DELIVERIES": "Too many messages are waiting for receiver acknowledgement",
    }

    def refuse(self, session: Session, message_id: str, code: str, reason: str = "") -> None:
        members = {"accepted": False, "code": code, "reason": reason or self.REASONS[code]}
        self.tell(session.connection, "delivery_failed", messageId=message_id, **members)

    def is_repeated(self, session: Session, message: Frame, payload: Any) -> bool:
        """Steps 2 and 3."""
        key = (session.id, message["id"])
        self.recent = {
            name: item for name, item in self.recent.items() if self.now < item.settled_at + self.numbers.recent_ms
        }
        old = self.recent.get(key)
        if old is not None:
            if old.payload != payload:
                text = "Message ID was already used with a different payload"
                self.refuse(session, message["id"], "DUPLICATE_MESSAGE_ID", text)
                return True
            if old.delivered and self.session(old.target) is not None:
                for kind in ("delivery_accepted", "delivered"):
                    self.tell(session.connection, kind, messageId=message["id"], deliveryId=old.delivery)
                return True
            del self.recent[key]
        for item in self.pending:
            if (item.sender, item.message["id"]) == key:
                if item.payload != payload:
                    text = "Message ID is already pending with a different payload"
                    self.refuse(session, message["id"], "DUPLICATE_MESSAGE_ID", text)
                else:
                    accepted = {"messageId": message["id"], "deliveryId": item.delivery}
                    self.tell(session.connection, "delivery_accepted", **accepted)
                return True
        return False

    def check_ask(self, session: Session, target: Session, message: Frame) -> tuple[str, str] | None:
        """2.7, (a) to (d)."""
        if "replyTo" in message:
            answered = self.edge(target.id, message["replyTo"])
            if answered is None:
                return "INVALID_REPLY_TARGET", "Reply target does not match a pending ask"
            if answered.target != session.id:
                return "INVALID_REPLY_TARGET", "Reply target does not match the pending ask"
        if message.get("expectsReply") is not True:
            return None
        same = self.edge(session.id, message["id"])
        renews = same is not None and same.target == target.id
        if same is not None and not renews:
            # The contract is silent: a second edge under the same key would orphan the ask that is still open.
            return "DUPLICATE_MESSAGE_ID", "Message ID was already used with a different payload"
        for edge in self.edges:
            if (edge.sender, edge.target) == (session.id, target.id) and not (renews and edge is same):
                return (
                    "ASK_ALREADY_PENDING",
                    "Another ask to this session is still unresolved. "
                    "Wait for its reply or use intercom_send for a non-blocking follow-up.",
                )
        for edge in self.edges:
            back = edge.blocking and (edge.sender, edge.target) == (target.id, session.id)
            if back and edge.message_id != message.get("replyTo"):
                text = "Mutual ask refused: target session is already waiting for a reply from this session."
                return "MUTUAL_ASK", text
        own = [edge for edge in self.edges if edge.sender == session.id]
        if len(own) >= self.numbers.asks_per_sender and not renews:
            return "TOO_MANY_PENDING_ASKS", "Too many asks are already waiting for replies"
        return None

    def accept(self, session: Session, target: Session, message: Frame, payload: Any) -> None:
        self.deliveries += 1
        delivery = self.deliveries
        if message.get("expectsReply") is True:
            self.edges = [edge for edge in self.edges if (edge.sender, edge.message_id) != (session.id, message["id"])]
            until = self.now + self.numbers.ask_expiry_ms
            self.edges.append(Edge(session.id, message["id"], target.id, self.now, until, True))
        source, sink = session.connection, target.connection
        self.pending.append(Pending(delivery, session.id, source, target.id, sink, message, payload, self.now))
        self.tell(source, "delivery_accepted", messageId=message["id"], deliveryId=delivery)
        self.tell(sink, "message", **{"deliveryId": delivery, "from": dict(session.info), "message": message})

    def bound(self, connection: Connection, delivery: str) -> Pending | None:
        known = self.names.get(delivery)
        return next((item for item in self.pending if (item.delivery, item.sink) == (known, connection.number)), None)

    def acknowledge(self, connection: Connection, delivery: str) -> None:
        item = self.bound(connection, delivery)
        if item is None:
            return
        self.settle(item, delivered=True)
        if "replyTo" in item.message:
            edge = self.edge(item.target, item.message["replyTo"])
            if edge is not None and edge.target == item.sender:
                self.edges.remove(edge)
        self.tell(item.source, "delivered", messageId=item.message["id"], deliveryId=item.delivery)

    def reject(self, connection: Connection, delivery: str, reason: str) -> None:
        item = self.bound(connection, delivery)
        if item is not None:
            self.fail(item, "CONFLICTING_MESSAGE_ID", reason)

    def fail(self, item: Pending, code: str, reason: str, *, silent: int | None = None) -> None:
        """`silent` names a connection that is no session's any more and is told nothing."""
        self.settle(item, delivered=False)
        message_id = item.message["id"]
        edge = self.edge(item.sender, message_id)
        if item.message.get("expectsReply") is True and edge is not None:
            self.edges.remove(edge)
            if item.sink != silent:
                notice = {"messageId": message_id, "fromSessionId": item.sender, "reason": "delivery_failed"}
                self.tell(item.sink, "ask_cancelled", **notice)
        if item.source != silent:
            members = {"accepted": True, "code": code, "reason": reason}
            self.tell(item.source, "delivery_failed", messageId=message_id, **members)

    def settle(self, item: Pending, *, delivered: bool) -> None:
        self.pending.remove(item)
        key = (item.sender, item.message["id"])
        self.recent[key] = Recent(item.payload, item.delivery, item.target, delivered, self.now)

    # 2.7: controls.

    def control(self, session: Session, action: str, request_id: str, message_id: str) -> None:
        edge = self.edge(session.id, message_id)
        if edge is not None:
            notice = {"messageId": message_id, "fromSessionId": session.id}
            if action == "cancel":
                self.edges.remove(edge)
                self.tell_session(edge.target, "ask_cancelled", **notice, reason="cancelled")
            elif edge.blocking:
                edge.blocking = False
                self.tell_session(edge.target, "ask_deferred", **notice)
        result = {"requestId": request_id, "action": action, "messageId": message_id, "applied": edge is not None}
        self.tell(session.connection, "ask_control_result", **result)
