# SPDX-License-Identifier: Apache-2.0
"""Section 2.10: the dormant Boss feature is refused, well-formed or not, before anything else happens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.boss import CONTROL_TYPES, boss, contract, credential, envelope
from tests.contract.brokers import Broker
from tests.contract.peer import Frame, fresh, fresh_scope, message, refused, register, send

UNAVAILABLE = "Boss typed control is unavailable until the durable Controller delivery authority is installed"


def without(frame: Frame, key: str) -> Frame:
    return {name: value for name, value in frame.items() if name != key}


MALFORMED: list[Any] = [None, True, 1, "boss", [], {}, [boss()]]
MALFORMED += [without(boss(), key) for key in boss()]
MALFORMED += [boss(extra=1), boss(capabilityDigest="0" * 64), boss(capabilityDigest=None)]
MALFORMED += [boss(featureContract=without(contract(), key)) for key in contract()]
MALFORMED += [
    boss(featureContract=contract(**change))
    for change in (
        {"extra": 1},
        {"feature": "boss-run-v2"},
        {"version": 2},
        {"version": "1"},
        {"version": True},
        {"baseProtocolVersion": 3},
        {"semanticsHash": "0" * 64},
        {"controlEnvelopeVersion": 2},
    )
]
MALFORMED += [boss(credential=without(credential(), key)) for key in credential()]
MALFORMED += [
    boss(credential=credential(**change))
    for change in (
        {"extra": 1},
        {"version": "boss.participant-credential.v2"},
        {"version": 1},
        {"namespace": "boss-run-v2"},
        {"credentialKind": "other"},
        {"credentialId": ""},
        {"credentialId": "a b"},
        {"credentialId": "a\n"},
        {"credential": 1},
        {"credential": ""},
        {"bossRunId": "\x7f"},
        {"participantId": None},
        {"participantId": "\ud800"},
        {"role": "captain", "communicationProfile": "captain"},
        {"communicationProfile": "scout"},
        {"bindingEpoch": 0},
        {"bindingEpoch": 1.5},
        {"bindingEpoch": True},
        {"bindingEpoch": 2**53},
        {"issuedAt": "2026-01-01T00:00:00Z"},
        {"issuedAt": "2026-02-30T00:00:00.000Z"},
        {"issuedAt": 1},
        {"expiresAt": "2026-01-01T00:00:00.000Z"},
        {"expiresAt": "2025-01-01T00:00:00.000Z"},
        {"nonce": ""},
    )
]


@pytest.mark.parametrize("value", MALFORMED, ids=[str(number) for number in range(len(MALFORMED))])
def test_malformed_boss_registration(broker: Broker, value: Any) -> None:
    peer = broker.connect()
    peer.send(register(fresh(), fresh_scope(), boss=value))
    peer.expect_error("INVALID_REQUEST", "Invalid register message")


ROLES = ["boss", "manager", "adversary", "scout", "worker", "council", "controller"]


@pytest.mark.parametrize("kind", ["enrollment", "reconnect"])
@pytest.mark.parametrize("role", ROLES)
def test_well_formed_boss_registration(broker: Broker, role: str, kind: str) -> None:
    scope = fresh_scope()
    observer, peer = broker.join(fresh(), scope), broker.connect()
    token = credential(role=role, communicationProfile=role, credentialKind=kind)
    peer.send(register(fresh(), scope, boss=boss(credential=token)))
    peer.expect_error("BOSS_FEATURE_UNAVAILABLE", "Boss registration denied: BOSS_FEATURE_NOT_ADVERTISED")
    observer.expect_silence()


def boss_message(control: Any, message_id: str = "boss-message", **members: Any) -> Frame:
    return message(message_id, content={"text": "", "control": control}, **members)


@pytest.mark.parametrize("kind", CONTROL_TYPES)
def test_boss_control_is_refused_before_any_resolution(broker: Broker, kind: str) -> None:
    peer = broker.join(fresh(), fresh_scope())
    body = boss_message(envelope("boss-message", kind))
    for target in (fresh(), peer.id):
        peer.send(send(target, body))
        peer.expect(refused("boss-message", "CONTROL_DISPATCH_UNAVAILABLE", UNAVAILABLE))
    peer.expect_silence()


@pytest.mark.parametrize(
    "extra", [{"causationId": "c"}, {"replyTo": "r"}, {"causationId": "c", "replyTo": "r"}], ids=str
)
def test_boss_control_with_optional_members(broker: Broker, extra: Frame) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, boss_message(envelope("boss-message", **extra))))
    peer.expect(refused("boss-message", "CONTROL_DISPATCH_UNAVAILABLE", UNAVAILABLE))


MALFORMED_CONTROLS: list[Any] = [without(envelope("boss-message"), key) for key in envelope("x") if key != "type"]
MALFORMED_CONTROLS += [
    {"type": "boss.worker.health", "version": 1},
    envelope("another-message"),
    envelope("boss-message", "boss.unknown"),
    envelope("boss-message", "boss."),
    envelope("boss-message", version=2),
    envelope("boss-message", version=True),
    envelope("boss-message", extra=1),
    envelope("boss-message", bossRunId=""),
    envelope("boss-message", participantId=1),
    envelope("boss-message", bindingEpoch=0),
    envelope("boss-message", idempotencyKey=None),
    envelope("boss-message", causationId=""),
    envelope("boss-message", replyTo=None),
]


@pytest.mark.parametrize("control", MALFORMED_CONTROLS, ids=[str(number) for number in range(len(MALFORMED_CONTROLS))])
def test_malformed_boss_control(broker: Broker, control: Any) -> None:
    peer = broker.join(fresh(), fresh_scope())
    peer.send(send(peer.id, boss_message(control)))
    peer.expect(refused("boss-message", "INVALID_MESSAGE", "Invalid message format"))
    peer.expect_silence()
