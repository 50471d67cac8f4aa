# SPDX-License-Identifier: Apache-2.0
"""Outgoing frames, built from parts that are encoded once. Key order is that of contract section 2.3."""

from __future__ import annotations

import struct
from typing import Final

from agent_intercom.intercom import contract
from agent_intercom.wire.codec import encode

_length = struct.Struct(">I").pack

_REMOTE_ACCESS: Final = encode(
    {
        "feature": contract.REMOTE_ACCESS_FEATURE,
        "policySemanticsVersion": contract.POLICY_SEMANTICS_VERSION,
        "policySemanticsHash": contract.POLICY_SEMANTICS_HASH,
    }
)
_IDENTITY: Final = b'"protocol":%b,"version":%d' % (encode(contract.PROTOCOL), contract.VERSION)

_MESSAGE_REST: Final = len(b'{"type":"message","deliveryId":"","from":,"message":}')
ACCEPTED: Final = b'{"type":"delivery_accepted","messageId":'
DELIVERED: Final = b'{"type":"delivered","messageId":'
_OUTCOME_REST: Final = len(b',"deliveryId":""}')

quote = encode
"""A string as JSON."""


def prefixed(payload: bytes) -> bytes:
    """A frame around `payload`, whose size the caller has checked."""
    return _length(len(payload)) + payload


def message_frame(delivery: bytes, shown: bytes, body: bytes) -> bytes:
    """The frame of `message`, whose size the caller checks."""
    size = len(delivery) + len(shown) + len(body) + _MESSAGE_REST
    return b"".join(
        (_length(size), b'{"type":"message","deliveryId":"', delivery, b'","from":', shown, b',"message":', body, b"}")
    )


def outcome_frame(start: bytes, message_id: bytes, delivery: bytes) -> bytes:
    """The frame that begins with `ACCEPTED` or `DELIVERED`."""
    size = len(start) + len(message_id) + len(delivery) + _OUTCOME_REST
    return b"".join((_length(size), start, message_id, b',"deliveryId":"', delivery, b'"}'))


def health_ok(request_id: str, endpoint: str) -> bytes:
    return b'{"type":"health_ok","requestId":%b,%b,"endpoint":"%b","remoteAccess":%b}' % (
        encode(request_id),
        _IDENTITY,
        endpoint.encode(),
        _REMOTE_ACCESS,
    )


def registered(session_id: str) -> bytes:
    return b'{"type":"registered","sessionId":%b,%b}' % (encode(session_id), _IDENTITY)


def sessions(request_id: bytes, shown: list[bytes]) -> bytes:
    return b'{"type":"sessions","requestId":%b,"sessions":[%b]}' % (request_id, b",".join(shown))


def session_joined(shown: bytes) -> bytes:
    return b'{"type":"session_joined","session":%b}' % shown


def presence_update(shown: bytes) -> bytes:
    return b'{"type":"presence_update","session":%b}' % shown


def session_left(session_id: str) -> bytes:
    return b'{"type":"session_left","sessionId":%b}' % encode(session_id)


def delivery_failed(message_id: str, accepted: bool, code: str, reason: str) -> bytes:
    return b'{"type":"delivery_failed","messageId":%b,"accepted":%b,"code":"%b","reason":%b}' % (
        encode(message_id),
        b"true" if accepted else b"false",
        code.encode(),
        encode(reason),
    )


def ask_deferred(message_id: str, sender: str) -> bytes:
    return b'{"type":"ask_deferred","messageId":%b,"fromSessionId":%b}' % (encode(message_id), encode(sender))


def ask_cancelled(message_id: str, sender: str, reason: str) -> bytes:
    return b'{"type":"ask_cancelled","messageId":%b,"fromSessionId":%b,"reason":"%b"}' % (
        encode(message_id),
        encode(sender),
        reason.encode(),
    )


def ask_control_result(request_id: str, action: str, message_id: str, applied: bool) -> bytes:
    return b'{"type":"ask_control_result","requestId":%b,"action":"%b","messageId":%b,"applied":%b}' % (
        encode(request_id),
        action.encode(),
        encode(message_id),
        b"true" if applied else b"false",
    )


def error(code: str, text: str) -> bytes:
    return b'{"type":"error","code":"%b","error":%b}' % (code.encode(), encode(text))
