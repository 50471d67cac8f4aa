# SPDX-License-Identifier: Apache-2.0
"""Well-formed Boss metadata and control envelopes (sections 2.10 and 8.9), which every broker refuses."""

from __future__ import annotations

from tests.contract.peer import Frame

CONTROL_TYPES = (
    "boss.assignment.created",
    "boss.assignment.accepted",
    "boss.assignment.checkpoint",
    "boss.assignment.submitted",
    "boss.assignment.rejected",
    "boss.assignment.cancelled",
    "boss.staffing.requested",
    "boss.staffing.resolved",
    "boss.review.requested",
    "boss.review.submitted",
    "boss.council.requested",
    "boss.council.submitted",
    "boss.proof.submitted",
    "boss.worker.health",
    "boss.worker.blocked",
    "boss.worker.failed",
    "boss.worker.notice",
    "boss.worker.notice_delivery_failed",
    "boss.decision.required",
)


def credential(**members: object) -> Frame:
    """A participant credential."""
    return {
        "version": "boss.participant-credential.v1",
        "namespace": "boss-run-v1",
        "credentialKind": "enrollment",
        "credentialId": "credential-1",
        "credential": "secret",
        "bossRunId": "run-1",
        "participantId": "participant-1",
        "role": "worker",
        "communicationProfile": "worker",
        "bindingEpoch": 1,
        "issuedAt": "2026-01-01T00:00:00.000Z",
        "expiresAt": "2026-01-02T00:00:00.000Z",
        "nonce": "nonce-1",
        **members,
    }


def contract(**members: object) -> Frame:
    """The feature contract that Boss metadata names."""
    return {
        "feature": "boss-run-v1",
        "version": 1,
        "baseProtocolVersion": 4,
        "semanticsHash": "8943eb60d29afa5264322b5cc7df3de245b01b1cf48a8cbf9cfb6188b02fcfa9",
        "controlEnvelopeVersion": 1,
        **members,
    }


def boss(**members: object) -> Frame:
    """`register.session.boss`."""
    return {
        "featureContract": contract(),
        "capabilityDigest": "239bee8bb64cc8c149d49ac00c7396f33f375a89a1d6dea6bd86ff840d551a59",
        "credential": credential(),
        **members,
    }


def envelope(message_id: str, kind: str = "boss.worker.health", **members: object) -> Frame:
    """A Boss control envelope for the message `message_id`."""
    return {
        "type": kind,
        "version": 1,
        "messageId": message_id,
        "bossRunId": "run-1",
        "participantId": "participant-1",
        "bindingEpoch": 1,
        "idempotencyKey": "key-1",
        "payload": {},
        **members,
    }
