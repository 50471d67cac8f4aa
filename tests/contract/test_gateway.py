# SPDX-License-Identifier: Apache-2.0
"""Section 2.9 as far as this broker goes: the gateway answers, and grants nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.peer import Frame, Peer, compact, fresh, fresh_scope, register

MISSING = "Remote registration requires an access credential"
REJECTED = "Remote registration credential was rejected"
LOCAL_CONTROL = "Remote access control credential or request was rejected"
TOKEN = "x" * 43


# Registration on the gateway.


def refuse(peer: Peer, frame: Any, code: str, text: str) -> None:
    peer.send_payload(compact(frame))
    peer.expect_error(code, text)


def test_gateway_health_says_remote(broker: Broker) -> None:
    peer = broker.connect_remote()
    peer.send({"type": "health", "requestId": "r"})
    answer = peer.recv()
    assert answer["endpoint"] == "remote"
    local = broker.connect()
    local.send({"type": "health", "requestId": "r"})
    assert {**local.recv(), "endpoint": "remote"} == answer


@pytest.mark.parametrize("access", [None, 1, "x", [], True], ids=repr)
def test_gateway_registration_without_an_access_object(broker: Broker, access: Any) -> None:
    refuse(broker.connect_remote(), {**register(fresh()), "access": access}, "ACCESS_DENIED", MISSING)


def test_gateway_registration_without_access(broker: Broker) -> None:
    refuse(broker.connect_remote(), register(), "ACCESS_DENIED", MISSING)


@pytest.mark.parametrize(
    "access",
    [
        {},
        {"enrollmentToken": TOKEN},
        {"enrollmentToken": 1},
        {"sessionCredential": TOKEN, "sessionId": "s", "generation": 1},
        {"sessionCredential": TOKEN, "sessionId": "s", "generation": 1, "extra": 1},
    ],
    ids=repr,
)
def test_gateway_registration_with_any_credential(broker: Broker, access: Frame) -> None:
    scope = fresh_scope()
    observer = broker.join(fresh(), scope)
    refuse(broker.connect_remote(), {**register(None, scope), "access": access}, "ACCESS_DENIED", REJECTED)
    observer.expect_silence()


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"extra": 1}, "INVALID_REQUEST", "Invalid register message"),
        ({"version": 3}, "PROTOCOL_MISMATCH", "Unsupported intercom protocol; expected pi-intercom v4"),
        ({"scopeId": "short"}, "INVALID_REQUEST", "Registration metadata is invalid"),
        ({"session": None}, "INVALID_REQUEST", "Invalid register message"),
    ],
    ids=["1", "2", "3", "4"],
)
def test_gateway_registration_is_checked_before_its_credential(
    broker: Broker, change: Frame, code: str, text: str
) -> None:
    frame = {**register(), "access": {"enrollmentToken": TOKEN}, **change}
    refuse(broker.connect_remote(), frame, code, text)


def test_gateway_registration_never_touches_a_local_session(broker: Broker) -> None:
    peer = broker.join(fresh(), fresh_scope())
    frame = {**register(peer.id), "access": {"enrollmentToken": TOKEN}}
    refuse(broker.connect_remote(), frame, "ACCESS_DENIED", REJECTED)
    peer.expect_silence()
    assert peer.ids() == [peer.id]


@pytest.mark.parametrize("kind", ["list", "send", "presence", "unregister", "message_received", "nonsense"])
def test_gateway_anything_else_before_register(broker: Broker, kind: str) -> None:
    refuse(broker.connect_remote(), {"type": kind}, "INVALID_REQUEST", f"Received {kind} before register")


@pytest.mark.parametrize("value", [[], 1, None, "x", {"type": 1}], ids=repr)
def test_gateway_invalid_frames(broker: Broker, value: Any) -> None:
    refuse(broker.connect_remote(), value, "INVALID_REQUEST", "Invalid client message")


def test_gateway_health_is_checked(broker: Broker) -> None:
    refuse(broker.connect_remote(), {"type": "health"}, "INVALID_REQUEST", "Invalid health message")


def test_gateway_framing_errors_end_the_connection(broker: Broker) -> None:
    peer = broker.connect_remote()
    peer.send_payload(b"{")
    peer.expect_eof()


# access_control.

ACTIONS = ["issue_enrollment", "inspect_tree", "revoke_subtree", "adopt_subtree", "nonsense"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    "members",
    [
        {"requestId": "r", "adminToken": TOKEN},
        {"requestId": "r"},
        {"requestId": "r", "adminToken": None},
        {"adminToken": TOKEN},
        {"requestId": 1, "adminToken": TOKEN},
        {"requestId": "r" * 257, "adminToken": TOKEN},
    ],
    ids=["token", "no token", "null token", "no request id", "number", "long"],
)
def test_local_access_control_is_rejected(broker: Broker, action: str, members: Frame) -> None:
    refuse(broker.connect(), {"type": "access_control", "action": action, **members}, "ACCESS_DENIED", LOCAL_CONTROL)


@pytest.mark.parametrize("frame", [{"type": "access_control"}, {"type": "access_control", "action": 1}], ids=repr)
def test_local_access_control_malformed(broker: Broker, frame: Frame) -> None:
    refuse(broker.connect(), frame, "ACCESS_DENIED", LOCAL_CONTROL)


@pytest.mark.parametrize("frame", [{}, {"action": "inspect_tree"}], ids=repr)
def test_remote_access_control_malformed(broker: Broker, frame: Frame) -> None:
    peer = broker.connect_remote()
    peer.send({"type": "access_control", **frame})
    assert peer.recv()["code"] == "ACCESS_DENIED"
    peer.expect_eof()


@pytest.mark.parametrize("action", ["inspect_tree", "issue_child_enrollment", "nonsense"])
def test_remote_access_control_with_any_credential(broker: Broker, action: str) -> None:
    peer = broker.connect_remote()
    access = {"sessionCredential": TOKEN, "sessionId": "s", "generation": 1}
    peer.send({"type": "access_control", "requestId": "r", "action": action, "access": access})
    answer = peer.recv()
    assert set(answer) == {"type", "code", "error"}
    assert (answer["type"], answer["code"]) == ("error", "ACCESS_DENIED")
    peer.expect_eof()


def test_frames_behind_access_control_are_not_read(broker: Broker) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.connect()
    peer.send({"type": "access_control", "requestId": "r"}, register(fresh(), scope))
    peer.expect_error("ACCESS_DENIED", LOCAL_CONTROL)
    observer.expect_silence()
