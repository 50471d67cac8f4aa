# SPDX-License-Identifier: Apache-2.0
"""The 48 acceptance vectors of protocol 4 against a running broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, Peer, info, message, refused, register, send

Vector: TypeAlias = dict[str, Any]

CORPUS = json.loads((Path(__file__).resolve().parent.parent / "vectors" / "protocol-v4.json").read_bytes())
VECTORS: list[Vector] = CORPUS["value"]["vectors"]
LETTERS = {"Scope_AAAAAAAAAA": "A", "Scope_BBBBBBBBBB": "B", None: "U"}
EVENTS = ("session_joined", "session_left", "presence_update")


def vectors(*operations: str) -> Any:
    chosen = [vector for vector in VECTORS if vector["operation"] in operations]
    assert chosen
    return pytest.mark.parametrize("vector", chosen, ids=[vector["name"] for vector in chosen])


class Stage:
    """The candidates of a vector as sessions, all of whose events so far have been read."""

    def __init__(self, broker: Broker, vector: Vector) -> None:
        self.broker = broker
        self.peers: dict[str, Peer] = {}
        self.claims: dict[str, Frame] = {}
        self.scopes: dict[str, str | None] = {}
        for candidate in vector.get("candidates") or default_candidates():
            self.claims[candidate["id"]] = {"name": candidate["name"]}
            self.scopes[candidate["id"]] = candidate["scope"]
            self.peers[candidate["id"]] = broker.join(candidate["id"], candidate["scope"], name=candidate["name"])
        self.settle()

    def settle(self) -> dict[str, list[Frame]]:
        """What every session has received since the last call."""
        return {session_id: peer.barrier() for session_id, peer in self.peers.items()}

    def info(self, session_id: str) -> Frame:
        return info(session_id, **self.claims[session_id])

    def ask(self, actor: str, target: str) -> str:
        """An acknowledged ask; its message id."""
        body = message(expectsReply=True)
        self.peers[actor].send(send(target, body))
        delivery = self.peers[actor].accepted(body["id"])
        self.peers[target].received(self.info(actor), body)
        self.peers[target].acknowledge(delivery)
        self.peers[actor].expect({"type": "delivered", "messageId": body["id"], "deliveryId": delivery})
        message_id: str = body["id"]
        return message_id


def default_candidates() -> list[Frame]:
    candidates: list[Frame] = next(vector["candidates"] for vector in VECTORS if vector["operation"] == "list")
    return candidates


@pytest.fixture
def alone(start: StartBroker) -> Iterator[Broker]:
    """The vectors name unscoped sessions, so each of them needs a broker of its own."""
    yield start({})


@vectors("validate_scope")
def test_validate_scope(broker: Broker, vector: Vector) -> None:
    peer = broker.connect()
    frame = register("scope-vector")
    if "scopeInput" in vector:
        frame["scopeId"] = vector["scopeInput"]
    peer.send(frame)
    if vector["expected"] == "invalid_scope":
        peer.expect_error("INVALID_REQUEST", "Registration metadata is invalid")
        return
    peer.expect_type("registered")
    assert ("Scope" not in str(peer.roster())) and vector["expected"] in ("valid_scoped", "valid_unscoped")
    peer.send({"type": "unregister"})
    peer.barrier()


@vectors("list")
def test_list(alone: Broker, vector: Vector) -> None:
    stage = Stage(alone, vector)
    assert stage.scopes[vector["actorId"]] == vector["actorScope"]
    assert stage.peers[vector["actorId"]].ids() == vector["expectedTargetIds"]


@vectors("session_joined", "session_left", "presence_update")
def test_audience(alone: Broker, vector: Vector) -> None:
    subject, kind = vector["subjectId"], vector["operation"]
    stage = Stage(alone, vector)
    peer = stage.peers[subject]
    if kind == "presence_update":
        peer.send({"type": "presence", "status": "changed"})
    else:
        peer.send({"type": "unregister"})
    peer.barrier()
    if kind == "session_joined":
        del stage.peers[subject]
        stage.settle()
        peer.register(subject, vector["subjectScope"], **stage.claims[subject])
        stage.peers[subject] = peer
    heard = {name for name, frames in stage.settle().items() if [frame["type"] for frame in frames] == [kind]}
    assert heard == set(vector["expectedAudienceIds"])


@vectors("resolve")
def test_resolve(alone: Broker, vector: Vector) -> None:
    stage = Stage(alone, vector)
    body = message()
    actor = stage.peers[vector["actorId"]]
    actor.send(send(vector["selector"], body))
    expected = vector["expected"]
    if expected == "SESSION_NOT_FOUND":
        actor.expect(refused(body["id"], expected, "Session not found"))
    elif expected == "AMBIGUOUS_TARGET":
        text = f'Multiple sessions named "{vector["selector"]}" are connected. Use the session ID instead.'
        actor.expect(refused(body["id"], expected, text))
    else:
        actor.accepted(body["id"])
        (target,) = vector["expectedTargetIds"]
        stage.peers[target].received(stage.info(vector["actorId"]), body)
    assert all(frames == [] for frames in stage.settle().values())


@vectors("send", "ask", "reply", "cancel_ask", "defer_ask")
def test_exact_edge(alone: Broker, vector: Vector) -> None:
    """Both ends in different scopes, named by their full ids only."""
    stage = Stage(alone, vector)
    actor, subject = vector["actorId"], vector["subjectId"]
    assert vector["selector"] == subject and vector["expectedTargetIds"] == [subject]
    operation = vector["operation"]
    if operation == "send":
        body = message()
        stage.peers[actor].send(send(subject, body))
        delivery = stage.peers[actor].accepted(body["id"])
        assert stage.peers[subject].received(stage.info(actor), body) == delivery
        stage.peers[subject].acknowledge(delivery)
        delivered = {"type": "delivered", "messageId": body["id"], "deliveryId": delivery}
        stage.peers[actor].expect(delivered)
    elif operation == "reply":
        body = message(replyTo=stage.ask(subject, actor))
        stage.peers[actor].send(send(subject, body))
        stage.peers[actor].accepted(body["id"])
        stage.peers[subject].received(stage.info(actor), body)
    else:
        # On the wire only the asker may defer, so the ends of that vector are taken the other way round.
        asker, other = (subject, actor) if operation == "defer_ask" else (actor, subject)
        question = stage.ask(asker, other)
        if operation != "ask":
            stage.peers[asker].send({"type": operation, "requestId": "r", "messageId": question})
            assert stage.peers[asker].expect_type("ask_control_result")["applied"] is True
            notice = "ask_deferred" if operation == "defer_ask" else "ask_cancelled"
            assert stage.peers[other].expect_type(notice)["fromSessionId"] == asker
    assert all(frames == [] for frames in stage.settle().values())


@vectors("replace")
def test_replacement(alone: Broker, vector: Vector) -> None:
    stage = Stage(alone, vector)
    subject = vector["actorId"]
    before, after = vector["actorScope"], vector["subjectScope"]
    old = stage.peers.pop(subject)
    new = alone.join(subject, after, **stage.claims[subject])
    old.expect_eof()
    heard = stage.settle()
    left, joined = f"left:{subject}:{LETTERS[before]}", f"joined:{subject}:{LETTERS[after]}"
    assert vector["expectedEvents"] == [left, joined]
    for name, frames in heard.items():
        expected: list[Frame] = []
        if stage.scopes[name] == before:
            expected.append({"type": "session_left", "sessionId": subject})
        if stage.scopes[name] == after:
            expected.append({"type": "session_joined", "session": stage.info(subject)})
        assert frames == expected
    new.expect_silence()


@vectors("late_frame")
def test_late_frame(alone: Broker, vector: Vector) -> None:
    kind = vector["name"].removeprefix("late old ").removesuffix(" discarded")
    stage = Stage(alone, vector)
    # Of the send and control vectors the subject is not the actor; whose late frame it is does not matter.
    subject = vector["actorId"]
    other = next(name for name in stage.peers if name != subject)
    question = stage.ask(subject, other)
    old = stage.peers.pop(subject)
    stage.peers[subject] = alone.join(subject, vector["subjectScope"], **stage.claims[subject])
    old.expect_eof()
    stage.settle()
    frames: dict[str, Frame] = {
        "list": {"type": "list", "requestId": "r"},
        "presence": {"type": "presence", "name": "late"},
        "send": send(other, message()),
        "control": {"type": "cancel_ask", "requestId": "r", "messageId": question},
    }
    old.try_send(frames[kind])
    old.expect_eof()
    alone.connect().barrier()
    assert vector["expectedEvents"] == []
    assert all(heard == [] for heard in stage.settle().values())
    assert stage.peers[subject].roster()[-1]["name"] != "late"


def test_every_vector_is_run() -> None:
    run = {"validate_scope", "list", *EVENTS, "resolve", "send", "ask", "reply", "cancel_ask", "defer_ask", "replace"}
    assert {vector["operation"] for vector in VECTORS} == run | {"late_frame"}
