# SPDX-License-Identifier: Apache-2.0
"""Section 2.4 and 3.1: health, and the rows of the registration table in their order."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.contract.boss import boss
from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Frame, compact, fresh, fresh_scope, info, register, session

REGISTER = "Invalid register message"
METADATA = "Registration metadata is invalid"
MISMATCH = "Unsupported intercom protocol; expected pi-intercom v4"
SESSION_ID = "Invalid register sessionId"
DUPLICATE = "Received duplicate register message"
BOSS = "Boss registration denied: BOSS_FEATURE_NOT_ADVERTISED"


def refuse(broker: Broker, frame: Any, text: str, code: str = "INVALID_REQUEST") -> None:
    peer = broker.connect()
    peer.send_payload(compact(frame))
    peer.expect_error(code, text)


# health.

HEALTH_OK: Frame = {
    "type": "health_ok",
    "requestId": "r",
    "protocol": "pi-intercom",
    "version": 4,
    "endpoint": "local",
    "remoteAccess": {
        "feature": "remote-access-v1",
        "policySemanticsVersion": 2,
        "policySemanticsHash": "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0",
    },
}


def test_health_answer_is_exact(broker: Broker) -> None:
    peer = broker.connect()
    peer.send({"type": "health", "requestId": "r"})
    answer = peer.recv()
    assert answer == HEALTH_OK
    assert type(answer["version"]) is int


@pytest.mark.parametrize("request_id", ["", " ", "r" * 100_000, "\u00e9\U0001f600\u2028", "\0"])
def test_health_request_id_is_any_string(broker: Broker, request_id: str) -> None:
    peer = broker.connect()
    peer.send({"type": "health", "requestId": request_id})
    peer.expect({**HEALTH_OK, "requestId": request_id})


@pytest.mark.parametrize("request_id", [None, 1, True, [], {}, ["r"]])
def test_health_request_id_of_another_type(broker: Broker, request_id: Any) -> None:
    refuse(broker, {"type": "health", "requestId": request_id}, "Invalid health message")


def test_health_without_a_request_id(broker: Broker) -> None:
    refuse(broker, {"type": "health"}, "Invalid health message")


def test_health_ignores_the_state_id_on_unix(broker: Broker) -> None:
    peer = broker.connect()
    peer.send({"type": "health", "requestId": "r", "stateId": "whatever"})
    peer.expect(HEALTH_OK)


# Row 1: outer keys.


@pytest.mark.parametrize("key", ["protocol", "version", "session"])
def test_row_1_missing_key(broker: Broker, key: str) -> None:
    frame = register(fresh())
    del frame[key]
    refuse(broker, frame, REGISTER)


@pytest.mark.parametrize(
    "key", ["extra", "name", "cwd", "registrationKind", "compatibility", "SessionId", "", "__proto__"]
)
def test_row_1_extra_key(broker: Broker, key: str) -> None:
    refuse(broker, {**register(fresh()), key: "x"}, REGISTER)


def test_row_1_precedes_row_2(broker: Broker) -> None:
    refuse(broker, {**register(fresh()), "version": 3, "extra": 1}, REGISTER)


def test_row_1_client_of_the_original_protocol(broker: Broker) -> None:
    refuse(broker, {"type": "register", "session": session()}, REGISTER)


@pytest.mark.parametrize("access", [None, 1, {}, {"enrollmentToken": "x" * 43}])
def test_row_1_access_is_ignored_on_the_local_socket(broker: Broker, access: Any) -> None:
    session_id, scope = fresh(), fresh_scope()
    peer = broker.connect()
    peer.send({**register(session_id, scope), "access": access})
    peer.expect({"type": "registered", "sessionId": session_id, "protocol": "pi-intercom", "version": 4})
    assert peer.roster() == [info(session_id)]


@pytest.mark.parametrize("state_id", ["x", 5, None])
def test_row_1_state_id_is_ignored_on_unix(broker: Broker, state_id: Any) -> None:
    peer = broker.connect()
    peer.send({**register(fresh()), "stateId": state_id})
    peer.expect_type("registered")


# Row 2: protocol and version.


@pytest.mark.parametrize("protocol", ["Pi-Intercom", "pi-intercom ", "", None, 4, ["pi-intercom"]])
def test_row_2_other_protocol(broker: Broker, protocol: Any) -> None:
    refuse(broker, {**register(fresh()), "protocol": protocol}, MISMATCH, "PROTOCOL_MISMATCH")


@pytest.mark.parametrize("version", [3, 5, 4.5, "4", None, True, [4], {}, -4, 10**30])
def test_row_2_other_version(broker: Broker, version: Any) -> None:
    refuse(broker, {**register(fresh()), "version": version}, MISMATCH, "PROTOCOL_MISMATCH")


@pytest.mark.parametrize("version", [b"4.0", b"4e0", b"40e-1", b"0.4E+1"])
def test_row_2_number_four_in_any_spelling(broker: Broker, version: bytes) -> None:
    peer = broker.connect()
    peer.send_payload(compact(register(fresh())).replace(b'"version":4', b'"version":' + version))
    peer.expect_type("registered")


def test_row_2_precedes_row_3(broker: Broker) -> None:
    refuse(broker, {**register(fresh(), "short"), "version": 3}, MISMATCH, "PROTOCOL_MISMATCH")


# Row 3: scope.


@pytest.mark.parametrize(
    "scope",
    [
        None,
        42,
        True,
        [],
        {},
        ["A" * 16],
        "A" * 15,
        "A" * 129,
        " " + "A" * 16,
        "A" * 16 + " ",
        "A" * 16 + "\n",
        "Scope.AAAAAAAAAA",
        "\u00e9" + "A" * 15,
        "\uff21" * 16,
        "A" * 15 + "\0",
        " ",
    ],
)
def test_row_3_invalid_scope(broker: Broker, scope: Any) -> None:
    peer = broker.connect()
    peer.send({**register(fresh()), "scopeId": scope})
    peer.expect_error("INVALID_REQUEST", METADATA)


@pytest.mark.parametrize("scope", ["A" * 16, "A" * 128, "Scope_AAAAAAAAAA", "0123456789-_abcd", "-" * 16])
def test_row_3_valid_scope(broker: Broker, scope: str) -> None:
    peer = broker.join(fresh(), scope)
    assert peer.ids() == [peer.id]


def test_row_3_empty_scope_is_unscoped(broker: Broker) -> None:
    unscoped, peer = broker.join(fresh()), broker.connect()
    peer.send({**register(fresh()), "scopeId": ""})
    peer.expect_type("registered")
    assert unscoped.id in peer.ids()


def test_row_3_precedes_row_4(broker: Broker) -> None:
    refuse(broker, {**register(fresh(), "short"), "session": None}, METADATA)


# Row 4: session (section 3.1).


@pytest.mark.parametrize("value", [None, 1, "x", [], [session()], True, {}], ids=repr)
def test_row_4_session_is_no_valid_object(broker: Broker, value: Any) -> None:
    refuse(broker, {**register(fresh()), "session": value}, REGISTER)


@pytest.mark.parametrize("key", ["cwd", "model", "pid", "startedAt", "lastActivity"])
def test_row_4_missing_member(broker: Broker, key: str) -> None:
    frame = register(fresh())
    del frame["session"][key]
    refuse(broker, frame, REGISTER)


@pytest.mark.parametrize("key", ["id", "scopeId", "trustedLocal", "origin", "peerUid", "generation", "extra", ""])
def test_row_4_extra_member(broker: Broker, key: str) -> None:
    refuse(broker, register(fresh(), **{key: True}), REGISTER)


STRINGS = ["cwd", "model", "name", "status", "runtimeInstanceId"]
NUMBERS = ["pid", "startedAt", "lastActivity"]


@pytest.mark.parametrize("key", STRINGS)
@pytest.mark.parametrize("value", [None, 1, True, [], {}, ["x"]], ids=repr)
def test_row_4_string_of_another_type(broker: Broker, key: str, value: Any) -> None:
    refuse(broker, register(fresh(), **{key: value}), REGISTER)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [None, "1", True, False, [], {}, [1]], ids=repr)
def test_row_4_number_of_another_type(broker: Broker, key: str, value: Any) -> None:
    refuse(broker, register(fresh(), **{key: value}), REGISTER)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("text", [b"1e400", b"-1e400", b"9" * 400])
def test_row_4_number_that_is_infinite_as_a_double(broker: Broker, key: str, text: bytes) -> None:
    peer = broker.connect()
    frame = register(fresh(), **{key: 987654321})
    peer.send_payload(compact(frame).replace(b"987654321", text))
    peer.expect_error("INVALID_REQUEST", REGISTER)


@pytest.mark.parametrize("value", [0, -5, 1.5, 1e300, 2**53 + 2, 10**25, -0.25])
def test_row_4_any_finite_number_is_kept(broker: Broker, value: float) -> None:
    session_id = fresh()
    peer = broker.join(session_id, fresh_scope(), pid=value, startedAt=value, lastActivity=value)
    (entry,) = peer.roster()
    assert [float(entry[key]) for key in NUMBERS] == [float(value)] * 3


LIMITS = {"cwd": 4096, "model": 512, "name": 256, "status": 512, "runtimeInstanceId": 256}


@pytest.mark.parametrize(("key", "limit"), LIMITS.items())
@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_row_4_longest_string_in_utf_16_units(broker: Broker, key: str, limit: int, letter: str) -> None:
    value = letter * (limit // (2 if letter == "\U0001f600" else 1))
    session_id = fresh()
    peer = broker.join(session_id, fresh_scope(), **{key: value})
    assert peer.roster() == [info(session_id, **{key: value})]


@pytest.mark.parametrize(("key", "limit"), LIMITS.items())
@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600"])
def test_row_4_string_too_long(broker: Broker, key: str, limit: int, letter: str) -> None:
    refuse(broker, register(fresh(), **{key: "a" + letter * (limit // (2 if letter == "\U0001f600" else 1))}), REGISTER)


@pytest.mark.parametrize("key", ["cwd", "model", "runtimeInstanceId"])
def test_row_4_string_may_not_be_empty(broker: Broker, key: str) -> None:
    refuse(broker, register(fresh(), **{key: ""}), REGISTER)


@pytest.mark.parametrize("key", ["name", "status"])
def test_row_4_string_may_be_empty(broker: Broker, key: str) -> None:
    session_id = fresh()
    peer = broker.join(session_id, fresh_scope(), **{key: ""})
    assert peer.roster() == [info(session_id, **{key: ""})]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\0", "\n", "\u202e", "\ufffd"])
def test_row_4_any_character_is_kept(broker: Broker, text: str) -> None:
    session_id = fresh()
    peer = broker.join(session_id, fresh_scope(), name=text, status=text, cwd=text, model=text)
    assert peer.roster() == [info(session_id, name=text, status=text, cwd=text, model=text)]


def test_row_4_precedes_row_7(broker: Broker) -> None:
    refuse(broker, {**register(), "sessionId": "", "session": session(pid="x")}, REGISTER)


@pytest.mark.parametrize("bad", [{"version": 3}, {"scopeId": "short"}, {"session": None}, {"extra": 1}], ids=repr)
def test_rows_1_to_4_never_disturb_the_session_of_that_id(broker: Broker, bad: Frame) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    intruder = broker.connect()
    intruder.send({**register(peer.id, scope), **bad})
    intruder.expect_type("error")
    intruder.expect_eof()
    peer.expect_silence()
    observer.expect_silence()


# Row 5: Boss.


def test_row_5_well_formed_boss_metadata(broker: Broker) -> None:
    refuse(broker, register(fresh(), boss=boss()), BOSS, "BOSS_FEATURE_UNAVAILABLE")


def test_row_5_precedes_row_6(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(register(fresh(), boss=boss()))
    peer.expect_error("BOSS_FEATURE_UNAVAILABLE", BOSS)


def test_row_3_precedes_row_5(broker: Broker) -> None:
    refuse(broker, register(fresh(), "short", boss=boss()), METADATA)


# Row 6: twice.


def test_row_6_duplicate_registration(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.send(register(peer.id, scope))
    peer.expect_error("INVALID_REQUEST", DUPLICATE)
    observer.expect({"type": "session_left", "sessionId": peer.id})
    observer.expect_silence()


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"extra": 1}, "INVALID_REQUEST", REGISTER),
        ({"version": 3}, "PROTOCOL_MISMATCH", MISMATCH),
        ({"scopeId": "short"}, "INVALID_REQUEST", METADATA),
        ({"session": None}, "INVALID_REQUEST", REGISTER),
    ],
    ids=["1", "2", "3", "4"],
)
def test_rows_1_to_4_precede_row_6(broker: Broker, change: Frame, code: str, text: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({**register(fresh()), **change})
    peer.expect_error(code, text)


def test_row_6_precedes_row_7(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({**register(), "sessionId": 5})
    peer.expect_error("INVALID_REQUEST", DUPLICATE)


# Row 7: sessionId.


@pytest.mark.parametrize(
    "value",
    [None, 1, True, [], {}, "", " ", "\t\n\r\x0b\x0c", "\u00a0", "\ufeff", "\ufeff \ufeff", "\u3000\u2028\u2029"],
)
def test_row_7_invalid_session_id(broker: Broker, value: Any) -> None:
    refuse(broker, {**register(), "sessionId": value}, SESSION_ID)


@pytest.mark.parametrize("suffix", ["", " ", "\n", "\u00e9\U0001f600", "\ud800", '"\\', "\0", "/../", "x" * 5000])
def test_row_7_any_other_string_is_kept_as_it_is(broker: Broker, suffix: str) -> None:
    session_id = " " + fresh() + suffix
    peer = broker.join(session_id, fresh_scope())
    assert peer.ids() == [session_id]


@pytest.mark.parametrize("value", ["\x1c", "\x1f", "\x85", "\u200b", "\u180e", "\0"])
def test_row_7_characters_that_javascript_does_not_trim(broker: Broker, value: str) -> None:
    peer = broker.join(value, fresh_scope())
    assert peer.ids() == [value]


def test_row_7_absent_id_becomes_a_random_uuid(broker: Broker) -> None:
    ids = {broker.join().id for _ in range(8)}
    assert len(ids) == 8
    for session_id in ids:
        assert str(uuid.UUID(session_id)) == session_id
        assert uuid.UUID(session_id).version == 4


# Row 8: cap.


def test_row_8_too_many_sessions(start: StartBroker) -> None:
    broker = start({})
    peers = [broker.join(fresh()) for _ in range(128)]
    refuse(broker, register(fresh()), "Too many registered intercom sessions", "TOO_MANY_SESSIONS")
    refuse(broker, register(fresh(), fresh_scope()), "Too many registered intercom sessions", "TOO_MANY_SESSIONS")
    refuse(broker, {**register(), "sessionId": ""}, SESSION_ID)  # row 7 comes first
    replaced = broker.join(peers[0].id)  # the id is in use: the cap does not apply
    peers[1].send({"type": "unregister"})
    peers[1].barrier()
    broker.join(fresh())
    replaced.barrier()


# Row 9: in use. Section 4.4 has the cases.


def test_row_9_id_of_another_runtime(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope, pid=1)
    observer.expect_type("session_joined")
    text = (
        f'Session ID "{peer.id}" is already active in another local runtime; '
        "close the existing session or use a different session ID"
    )
    refuse(broker, register(peer.id, scope, pid=2), text, "SESSION_ID_IN_USE")
    observer.expect_silence()
    peer.expect_silence()
    assert peer.id in observer.ids()


# Row 10.


def test_row_10_registered_comes_first_and_alone(broker: Broker) -> None:
    scope = fresh_scope()
    first = broker.join(fresh(), scope)
    second = broker.connect()
    second.send(register("x" + first.id, scope))
    second.expect({"type": "registered", "sessionId": "x" + first.id, "protocol": "pi-intercom", "version": 4})
    second.expect_silence()
    first.expect({"type": "session_joined", "session": info("x" + first.id)})
    first.expect_silence()


# unregister.


@pytest.mark.parametrize("value", [None, 0, 1, "true", [], {}], ids=repr)
def test_unregister_preserve_asks_is_a_boolean(broker: Broker, value: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send({"type": "unregister", "preserveAsks": value})
    peer.expect_error("INVALID_REQUEST", "Invalid unregister preserveAsks value")


@pytest.mark.parametrize("extra", [{}, {"preserveAsks": True}, {"preserveAsks": False}], ids=repr)
def test_unregister_leaves_and_keeps_the_connection(broker: Broker, extra: Frame) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.send({"type": "unregister", **extra})
    peer.expect_silence()
    observer.expect({"type": "session_left", "sessionId": peer.id})
    assert observer.ids() == [observer.id]


@pytest.mark.parametrize("same", [True, False])
def test_unregister_then_register_again(broker: Broker, same: bool) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    first = peer.id
    second = first if same else fresh()
    peer.send({"type": "unregister"})
    peer.register(second, scope, pid=99)
    observer.expect(
        {"type": "session_joined", "session": info(first)},
        {"type": "session_left", "sessionId": first},
        {"type": "session_joined", "session": info(second, pid=99)},
    )
    assert observer.ids() == [observer.id, second]


def test_closing_an_unregistered_connection_tells_nobody(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.join(fresh(), scope)
    observer.expect_type("session_joined")
    peer.send({"type": "unregister"})
    observer.expect_type("session_left")
    peer.barrier()
    peer.close()
    broker.connect().barrier()
    observer.expect_silence()
