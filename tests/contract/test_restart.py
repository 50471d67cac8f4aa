# SPDX-License-Identifier: Apache-2.0
"""Section 6 and the last row of 2.7: what a broker that binds for itself keeps over a restart."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.brokers import Home
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, Peer, fresh, fresh_scope, info, message, refused, send
from tests.contract.test_asks import ALREADY, UNMATCHED, ask, cancelled, carry, is_refused

LIVE: list[int] = [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("number", LIVE, ids=["SIGTERM", "SIGKILL"])
def test_row_broker_restart_keeps_edges_deferred(start: StartBroker, number: int) -> None:
    broker = start({})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    broker.stop(number)
    broker = start({})
    new_asker, new_target = broker.join(asker.id, fresh_scope()), broker.join(target.id, fresh_scope())
    new_target.expect_silence()
    ask(new_target, new_asker)  # deferred, or else this were a mutual ask
    is_refused(new_asker, new_target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)
    carry(new_target, new_asker, message(replyTo=question))
    is_refused(new_target, new_asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)


@pytest.mark.parametrize("end", ["reply", "cancel", "unregister"])
def test_edge_that_ended_stays_ended_over_a_restart(start: StartBroker, end: str) -> None:
    broker = start({})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    if end == "reply":
        carry(target, asker, message(replyTo=question))
    elif end == "cancel":
        asker.send({"type": "cancel_ask", "requestId": "r", "messageId": question})
        asker.expect_type("ask_control_result")
    else:
        asker.send({"type": "unregister"})
        asker.barrier()
    broker.stop(signal.SIGKILL)
    broker = start({})
    new_asker, new_target = broker.join(asker.id, fresh_scope()), broker.join(target.id, fresh_scope())
    is_refused(new_target, new_asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=question)


def test_lost_ask_is_renewed_by_its_replay(start: StartBroker) -> None:
    """The broker died between acceptance and acknowledgement; the asker's outbox sends the same ask again."""
    broker = start({})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    broker.stop(signal.SIGKILL)
    broker = start({})
    new_asker, new_target = broker.join(asker.id, fresh_scope()), broker.join(target.id, fresh_scope())
    is_refused(new_asker, new_target, "ASK_ALREADY_PENDING", ALREADY, expectsReply=True)  # another id is another ask
    carry(new_asker, new_target, body)
    mutual = "Mutual ask refused: target session is already waiting for a reply from this session."
    is_refused(new_target, new_asker, "MUTUAL_ASK", mutual, expectsReply=True)  # blocking again
    carry(new_target, new_asker, message(replyTo=body["id"]))


def test_renewed_ask_still_obeys_the_mutual_rule(start: StartBroker) -> None:
    broker = start({})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    broker.stop()
    broker = start({})
    new_asker, new_target = broker.join(asker.id, fresh_scope()), broker.join(target.id, fresh_scope())
    ask(new_target, new_asker)
    new_asker.send(send(new_target.id, body))
    mutual = "Mutual ask refused: target session is already waiting for a reply from this session."
    new_asker.expect(refused(body["id"], "MUTUAL_ASK", mutual))


def test_expired_edges_are_dropped_at_start(start: StartBroker) -> None:
    broker = start({"ask_expiry_ms": 1_000})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    body = message(expectsReply=True)
    asker.send(send(target.id, body))
    asker.accepted(body["id"])
    watcher = broker.join(fresh(), fresh_scope())
    carry(watcher, target_after(target), message())
    broker.stop()
    wait_for_wall_clock(1_100)
    broker = start({"ask_expiry_ms": 1_000})
    new_asker, new_target = broker.join(asker.id, fresh_scope()), broker.join(target.id, fresh_scope())
    is_refused(new_target, new_asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo=body["id"])
    ask(new_asker, new_target)


def target_after(peer: Peer) -> Peer:
    """`peer`, once it has read the message that waits for it."""
    peer.expect_type("message")
    return peer


def wait_for_wall_clock(milliseconds: int) -> None:
    """What is stored expires by the wall clock, which only time moves."""
    until = time.time() + milliseconds / 1_000
    while time.time() < until:
        time.sleep(0.01)


# What an earlier Node broker left.


def edge(**members: Any) -> Frame:
    now = time.time_ns() // 1_000_000
    return {
        "messageId": "left",
        "from": "asker",
        "to": "target",
        "createdAt": now,
        "expiresAt": now + 600_000,
        "state": "blocking",
        **members,
    }


def leave_asks(home: Home, document: Any) -> Path:
    home.intercom.mkdir(parents=True, mode=0o700)
    path = home.intercom / "broker-asks.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("state", ["blocking", "deferred"])
def test_asks_of_a_node_broker_are_taken_over_deferred(start: StartBroker, home: Home, state: str) -> None:
    leave_asks(home, {"version": 1, "edges": [edge(state=state)]})
    broker = start({})
    asker, target = broker.join("asker", fresh_scope()), broker.join("target", fresh_scope())
    target.expect_silence()
    ask(target, asker)
    carry(target, asker, message(replyTo="left"))


def test_asks_of_a_node_broker_are_taken_over_once(start: StartBroker, home: Home) -> None:
    leave_asks(home, {"version": 1, "edges": [edge()]})
    broker = start({})
    asker = broker.join("asker", fresh_scope())
    target = broker.join("target", fresh_scope())
    carry(target, asker, message(replyTo="left"))
    broker.stop(signal.SIGKILL)
    broker = start({})
    asker, target = broker.join("asker", fresh_scope()), broker.join("target", fresh_scope())
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo="left")


BAD_EDGES: list[Any] = [{"messageId": value} for value in (None, 1, "", "x" * 257)]
BAD_EDGES += [{key: value} for key in ("from", "to") for value in (None, 1, "", " ", "\ufeff")]
BAD_EDGES += [{key: value} for key in ("createdAt", "expiresAt") for value in (None, "1", True, [])]
BAD_EDGES += [{"expiresAt": 1}, {"state": None}, {"state": "other"}]


@pytest.mark.parametrize("change", BAD_EDGES, ids=repr)
def test_invalid_edge_is_skipped_and_the_others_stay(start: StartBroker, home: Home, change: Frame) -> None:
    good = edge(messageId="good", **{"from": "other asker"})
    leave_asks(home, {"version": 1, "edges": [edge(**change), 5, None, good]})
    broker = start({})
    asker, target = broker.join("asker", fresh_scope()), broker.join("target", fresh_scope())
    other = broker.join("other asker", fresh_scope())
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo="left")
    carry(target, other, message(replyTo="good"))


@pytest.mark.parametrize(
    "document",
    ["", "{", "[]", "null", "5", {"version": 2, "edges": []}, {"version": 1}, {"version": 1, "edges": {}}, {}],
    ids=repr,
)
def test_unusable_ask_file_does_not_stop_the_broker(start: StartBroker, home: Home, document: Any) -> None:
    leave_asks(home, document)
    broker = start({})
    asker, target = broker.join("asker", fresh_scope()), broker.join("target", fresh_scope())
    is_refused(target, asker, "INVALID_REPLY_TARGET", UNMATCHED, replyTo="left")
    ask(asker, target)


# What is never on disk.


@pytest.mark.parametrize("number", LIVE, ids=["SIGTERM", "SIGKILL"])
def test_no_body_name_path_or_scope_reaches_a_file(start: StartBroker, home: Home, number: int) -> None:
    broker = start({})
    scope = fresh_scope()
    canaries = {key: fresh("canary") for key in ("name", "cwd", "model", "status", "runtimeInstanceId")}
    text, attached = fresh("canary"), fresh("canary")
    asker, target = broker.join(fresh(), scope, **canaries), broker.join(fresh(), scope)
    content = {"text": text, "attachments": [{"type": "file", "name": attached, "content": attached}]}
    body = message(content=content, expectsReply=True)
    asker.send(send(target.id, body))
    asker.expect_type("session_joined")
    delivery = asker.accepted(body["id"])
    asker.barrier()
    assert target.received(info(asker.id, **canaries), body) == delivery
    found = scan(home, [scope, text, attached, *canaries.values()])
    assert found == []
    broker.stop(number)
    assert scan(home, [scope, text, attached, *canaries.values()]) == []


def scan(home: Home, canaries: list[str]) -> list[str]:
    """Which canaries are in which file below the broker's directories."""
    files = [path for path in home.root.rglob("*") if path.is_file()]
    assert files
    return [f"{word} in {path.name}" for path in files for word in canaries if word.encode() in path.read_bytes()]


def test_edge_of_an_earlier_broker_is_cancelled_by_unregister(start: StartBroker) -> None:
    """An ask that ends by `unregister` says so to the other side, also after a restart."""
    broker = start({})
    asker, target = broker.join(fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    question = ask(asker, target)
    broker.stop()
    broker = start({})
    new_target, new_asker = broker.join(target.id, fresh_scope()), broker.join(asker.id, fresh_scope())
    new_asker.send({"type": "unregister"})
    new_target.expect(cancelled(question, new_asker, "session_disconnected"))
