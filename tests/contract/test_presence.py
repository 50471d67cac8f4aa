# SPDX-License-Identifier: Apache-2.0
"""Sections 2.5, 3.2 and 4.2: list, presence, lifecycle events, what a SessionInfo holds, and who sees it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, Peer, fresh, fresh_scope, info


def pair(broker: Broker, **claims: Any) -> tuple[Peer, Peer]:
    """An observer and a subject in one scope of their own; the observer has seen the subject join."""
    scope = fresh_scope()
    observer, subject = broker.join(fresh(), scope), broker.join(fresh(), scope, **claims)
    observer.expect({"type": "session_joined", "session": info(subject.id, **claims)})
    return observer, subject


def presence(**fields: Any) -> Frame:
    return {"type": "presence", **fields}


# list.


def test_list_answer_is_exact(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope(), name="alpha")
    peer.send({"type": "list", "requestId": "r"})
    peer.expect({"type": "sessions", "requestId": "r", "sessions": [info(peer.id, name="alpha")]})


@pytest.mark.parametrize("request_id", ["", "r" * 10_000, "\u00e9\U0001f600"])
def test_list_request_id_has_no_limit(broker: Broker, request_id: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "list", "requestId": request_id})
    assert peer.expect_type("sessions")["requestId"] == request_id


@pytest.mark.parametrize("request_id", [None, 1, True, [], {}], ids=repr)
def test_list_request_id_of_another_type(broker: Broker, request_id: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "list", "requestId": request_id})
    peer.expect_error("INVALID_REQUEST", "Invalid list message")


def test_list_is_in_order_of_registration(broker: Broker) -> None:
    scope = fresh_scope()
    ids = [broker.join(fresh(letter), scope).id for letter in "zamkb"]
    last = broker.join("0" + fresh(), scope)
    assert last.ids() == [*ids, last.id]


def test_replaced_id_keeps_its_place_in_the_list(broker: Broker) -> None:
    scope = fresh_scope()
    first, second, third = (broker.join(fresh(), scope) for _ in range(3))
    replacement = broker.join(first.id, scope)
    assert replacement.ids() == [first.id, second.id, third.id]


def test_id_that_left_and_came_back_is_last_in_the_list(broker: Broker) -> None:
    scope = fresh_scope()
    first, second = broker.join(fresh(), scope), broker.join(fresh(), scope)
    first.send({"type": "unregister"})
    first.barrier()
    first.register(first.id, scope)
    assert first.ids() == [second.id, first.id]


def test_list_shows_only_its_scope(broker: Broker) -> None:
    one, other = fresh_scope(), fresh_scope()
    peers = {scope: [broker.join(fresh(), scope) for _ in range(2)] for scope in (one, other, None)}
    for joined in peers.values():
        joined[0].expect_type("session_joined")
    for scope in (one, other):
        assert peers[scope][0].ids() == [peer.id for peer in peers[scope]]
    unscoped = peers[None][0].ids()
    assert [peer.id for peer in peers[None]] == [name for name in unscoped if name in {p.id for p in peers[None]}]
    assert not {peer.id for scope in (one, other) for peer in peers[scope]} & set(unscoped)


def test_scopes_differ_by_case(broker: Broker) -> None:
    scope = fresh_scope()
    lower = broker.join(fresh(), scope.lower())
    upper = broker.join(fresh(), scope.upper())
    assert lower.ids() == [lower.id]
    assert upper.ids() == [upper.id]


# SessionInfo.


@pytest.mark.parametrize("claims", [{}, {"name": "n"}, {"status": "s"}, {"name": "", "status": ""}], ids=repr)
def test_session_info_has_exactly_these_keys(broker: Broker, claims: Frame) -> None:
    observer, subject = pair(broker, runtimeInstanceId="private", **claims)
    expected = info(subject.id, **claims)
    assert subject.roster()[1] == observer.roster()[1] == expected


def test_session_info_keys_in_order(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope(), status="s", name="n")
    order = ["id", "name", "cwd", "model", "pid", "startedAt", "lastActivity", "status", "trustedLocal", "origin"]
    assert list(peer.roster()[0]) == order


def test_name_and_status_set_by_presence_come_last(broker: Broker) -> None:
    observer, subject = pair(broker)
    subject.send(presence(name="n", status="s"))
    entry = observer.expect_type("presence_update")["session"]
    order = ["id", "cwd", "model", "pid", "startedAt", "lastActivity", "trustedLocal", "origin", "name", "status"]
    assert list(entry) == order


@pytest.mark.parametrize("secret", ["scopeId", "runtimeInstanceId", "stateId", "access"])
def test_private_registration_members_never_go_out(broker: Broker, secret: str) -> None:
    scope, token = fresh_scope(), fresh("token")
    observer, subject = broker.join(fresh(), scope), broker.connect()
    frame: Frame = {"type": "register", "protocol": "pi-intercom", "version": 4, "sessionId": fresh()}
    frame["session"] = {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1}
    frame["session"]["runtimeInstanceId"] = frame["stateId"] = token
    frame["access"] = {"enrollmentToken": token}
    frame["scopeId"] = scope
    subject.send(frame, {"type": "list", "requestId": "r"}, presence(name="x"), {"type": "unregister"})
    seen = [subject.recv_payload(), subject.recv_payload(), *(observer.recv_payload() for _ in range(3))]
    value = scope if secret == "scopeId" else token
    for payload in seen:
        assert payload is not None
        assert value.encode() not in payload
        assert secret.encode() not in payload


# presence.

FIELDS = {"name": 256, "status": 512, "model": 512}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 1, True, [], {}], ids=repr)
def test_presence_field_of_another_type(broker: Broker, field: str, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(presence(**{field: value}))
    peer.expect_error("INVALID_REQUEST", f"Invalid presence {field}")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("letter", ["a", "\U0001f600"])
def test_presence_field_too_long(broker: Broker, field: str, letter: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    units = FIELDS[field] // len(letter.encode("utf-16-le")) * 2
    peer.send(presence(**{field: letter * units + "a"}))
    peer.expect_error("INVALID_REQUEST", f"Invalid presence {field}")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_presence_field_as_long_as_allowed(broker: Broker, field: str, letter: str) -> None:
    observer, subject = pair(broker)
    value = letter * (FIELDS[field] // (len(letter.encode("utf-16-le")) // 2))
    subject.send(presence(**{field: value}))
    assert observer.expect_type("presence_update")["session"][field] == value


@pytest.mark.parametrize("field", FIELDS)
def test_presence_field_may_be_empty(broker: Broker, field: str) -> None:
    observer, subject = pair(broker, name="n", status="s")
    subject.send(presence(**{field: ""}))
    assert observer.expect_type("presence_update")["session"][field] == ""


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": 1, "status": 1, "model": 1}, "Invalid presence name"),
        ({"name": "x", "status": 1, "model": 1}, "Invalid presence status"),
        ({"name": "x", "status": "x", "model": 1}, "Invalid presence model"),
        ({"model": 1, "status": 1}, "Invalid presence status"),
    ],
    ids=repr,
)
def test_presence_is_checked_as_name_status_model(broker: Broker, fields: Frame, text: str) -> None:
    observer, subject = pair(broker)
    subject.send(presence(**fields))
    subject.expect_error("INVALID_REQUEST", text)
    observer.expect({"type": "session_left", "sessionId": subject.id})
    observer.expect_silence()


def test_presence_update_is_exact(broker: Broker) -> None:
    observer, subject = pair(broker, name="old", status="s", pid=7)
    begin = time.time_ns() // 1_000_000
    subject.send(presence(name="new", model="other"))
    frame = observer.recv()
    seen = frame["session"]["lastActivity"]
    assert begin <= seen <= time.time_ns() // 1_000_000
    expected = info(subject.id, name="new", status="s", pid=7, model="other", lastActivity=seen)
    assert frame == {"type": "presence_update", "session": expected}
    subject.expect_silence()


def test_presence_always_renews_last_activity(broker: Broker) -> None:
    observer, subject = pair(broker)
    subject.send(presence())
    (entry,) = [entry for entry in subject.roster() if entry["id"] == subject.id]
    assert entry["lastActivity"] > 1
    observer.expect_silence()


def test_send_does_not_renew_last_activity(broker: Broker) -> None:
    observer, subject = pair(broker)
    subject.send({"type": "send", "to": observer.id, "message": {"id": "m", "timestamp": 1, "content": {"text": ""}}})
    assert observer.expect_type("message")["from"] == info(subject.id)


def test_presence_that_changes_nothing_is_coalesced(broker: Broker) -> None:
    """Registration was the first broadcast; a second has not passed (or else the broadcast is due)."""
    begin = time.monotonic()
    observer, subject = pair(broker, name="n", status="s")
    for _ in range(50):
        subject.send(presence(name="n", status="s", model="m"))
    subject.barrier()
    seen = observer.barrier()
    assert len(seen) <= time.monotonic() - begin


def test_presence_that_changes_something_is_always_told(broker: Broker) -> None:
    observer, subject = pair(broker)
    for number in range(20):
        subject.send(presence(status=str(number)))
    assert [observer.expect_type("presence_update")["session"]["status"] for _ in range(20)] == [
        str(number) for number in range(20)
    ]


def test_presence_that_changes_nothing_is_told_after_the_interval(start: StartBroker) -> None:
    broker = start({"presence_interval_ms": 1})
    observer, subject = pair(broker, name="n")
    for _ in range(200):
        subject.send(presence(name="n"))
        subject.barrier()
        if observer.barrier():
            return
    pytest.fail("no presence_update within 200 turns")


def test_presence_fields_cannot_be_removed(broker: Broker) -> None:
    observer, subject = pair(broker, name="n", status="s")
    subject.send(presence(model="other"))
    entry = observer.expect_type("presence_update")["session"]
    assert (entry["name"], entry["status"], entry["model"]) == ("n", "s", "other")


def test_presence_cannot_change_the_scope(broker: Broker) -> None:
    other = fresh_scope()
    stranger = broker.join(fresh(), other)
    observer, subject = pair(broker)
    subject.send(presence(name="moved", scopeId=other))
    observer.expect_type("presence_update")
    stranger.expect_silence()
    assert stranger.ids() == [stranger.id]


def test_presence_changes_what_later_frames_show(broker: Broker) -> None:
    observer, subject = pair(broker, name="old")
    subject.send(presence(name="new"))
    entry = observer.expect_type("presence_update")["session"]
    assert observer.roster()[1] == entry
    subject.send({"type": "send", "to": observer.id, "message": {"id": "m", "timestamp": 1, "content": {"text": ""}}})
    assert observer.expect_type("message")["from"] == entry


# Lifecycle events.


def test_events_reach_every_other_session_of_the_scope_in_order(broker: Broker) -> None:
    scope = fresh_scope()
    observers = [broker.join(fresh(), scope) for _ in range(3)]
    for index, observer in enumerate(observers):
        for later in observers[index + 1 :]:
            observer.expect({"type": "session_joined", "session": info(later.id)})
    subject = broker.connect()
    subject.register(fresh(), scope)
    subject.send(presence(status="s"), {"type": "unregister"})
    subject.expect_silence()
    for observer in observers:
        observer.expect({"type": "session_joined", "session": info(subject.id)})
        assert observer.expect_type("presence_update")["session"]["status"] == "s"
        observer.expect({"type": "session_left", "sessionId": subject.id})
        observer.expect_silence()


def test_events_stay_in_their_scope(broker: Broker) -> None:
    strangers = [broker.join(fresh(), fresh_scope()), broker.join(fresh(), None)]
    observer, subject = pair(broker)
    subject.send(presence(status="s"))
    observer.expect_type("presence_update")
    subject.close()
    observer.expect_type("session_left")
    assert [stranger.barrier() for stranger in strangers] == [[], []]


def test_unscoped_events_stay_unscoped(broker: Broker) -> None:
    observer, stranger = broker.join(fresh()), broker.join(fresh(), fresh_scope())
    subject = broker.join(fresh())
    subject.close()
    mine = [frame for frame in _until_left(observer, subject.id) if subject.id in str(frame)]
    assert [frame["type"] for frame in mine] == ["session_joined", "session_left"]
    stranger.expect_silence()


def _until_left(observer: Peer, session_id: str) -> list[Frame]:
    frames = [observer.recv()]
    while frames[-1] != {"type": "session_left", "sessionId": session_id}:
        frames.append(observer.recv())
    return frames
