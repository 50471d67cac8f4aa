# SPDX-License-Identifier: Apache-2.0
"""Identity, limits, codes and texts of protocol `pi-intercom` version 4. Standard library only."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT, SCOPE_PATTERN

PROTOCOL: Final = "pi-intercom"
VERSION: Final = 4

PROTOCOL_SEMANTICS_HASH: Final = "ef23cae55b3cca7683fee60e5f2421350cde731dc5424c82286a33a8b9cdf6cb"
"""Hash of the 48 acceptance vectors of protocol 4 (contract section 7); tests compute it again."""

POLICY_SEMANTICS_VERSION: Final = 2
POLICY_SEMANTICS_HASH: Final = "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0"
"""Hash of the remote-access policy vectors, told to every health probe (contract sections 2.4 and 8.1)."""

REMOTE_ACCESS_FEATURE: Final = "remote-access-v1"

CONTROL_TYPE_PATTERN: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/-]*", re.ASCII)
BOSS_CONTROL_PREFIX: Final = "boss."

ORIGIN_LOCAL: Final = "local"
ORIGIN_REMOTE: Final = "remote"

MAX_FRAME: Final = 1_048_576
"""Largest frame payload in bytes, either way."""


class Limits(NamedTuple):
    """The numbers of the contract (appendix A), as a broker applies them.

    Lengths of strings are in UTF-16 units unless the name says bytes; times end in `_ms`.
    """

    text_bytes: int = 262_144
    attachment_bytes: int = 524_288
    attachments: int = 16
    attachment_name: int = 256
    control_bytes: int = 16_384
    control_type: int = 128
    message_id: int = 256
    request_id: int = 256
    target: int = 512
    reject_reason: int = 1_024
    name: int = 256
    cwd: int = 4_096
    model: int = 512
    status: int = 512
    runtime_instance_id: int = 256
    sessions: int = 128
    unregistered: int = 32
    registration_ms: int = 1_000
    idle_exit_ms: int = 5_000
    presence_ms: int = 1_000
    ack_ms: int = 8_000
    recent_ms: int = 600_000
    recent_entries: int = 65_536
    pending_total: int = 1_024
    pending_per_sender: int = 64
    asks_per_sender: int = 64
    ask_expiry_ms: int = 600_000
    rate_capacity: int = 240
    rate_per_second: int = 120
    remote_rate_capacity: int = 60
    remote_rate_per_second: int = 30
    bytes_per_token: int = 8_192
    stall_ms: int = 2_000


DEFAULT_LIMITS: Final = Limits()


class ErrorCode:
    """Codes of the `error` frame (contract section 2.3)."""

    PROTOCOL_MISMATCH: Final = "PROTOCOL_MISMATCH"
    INVALID_REQUEST: Final = "INVALID_REQUEST"
    SESSION_ID_IN_USE: Final = "SESSION_ID_IN_USE"
    ACCESS_DENIED: Final = "ACCESS_DENIED"
    BOSS_FEATURE_UNAVAILABLE: Final = "BOSS_FEATURE_UNAVAILABLE"
    RATE_LIMITED: Final = "RATE_LIMITED"
    TOO_MANY_SESSIONS: Final = "TOO_MANY_SESSIONS"


class DeliveryCode:
    """Codes of `delivery_failed`: a closed set of fifteen (contract section 2.3)."""

    INVALID_MESSAGE: Final = "INVALID_MESSAGE"
    CONTROL_DISPATCH_UNAVAILABLE: Final = "CONTROL_DISPATCH_UNAVAILABLE"
    SESSION_NOT_FOUND: Final = "SESSION_NOT_FOUND"
    AMBIGUOUS_TARGET: Final = "AMBIGUOUS_TARGET"
    SENDER_NOT_FOUND: Final = "SENDER_NOT_FOUND"
    INVALID_REPLY_TARGET: Final = "INVALID_REPLY_TARGET"
    MUTUAL_ASK: Final = "MUTUAL_ASK"
    ASK_ALREADY_PENDING: Final = "ASK_ALREADY_PENDING"
    DUPLICATE_MESSAGE_ID: Final = "DUPLICATE_MESSAGE_ID"
    CONFLICTING_MESSAGE_ID: Final = "CONFLICTING_MESSAGE_ID"
    TOO_MANY_PENDING_DELIVERIES: Final = "TOO_MANY_PENDING_DELIVERIES"
    TOO_MANY_PENDING_ASKS: Final = "TOO_MANY_PENDING_ASKS"
    RECIPIENT_DISCONNECTED: Final = "RECIPIENT_DISCONNECTED"
    SENDER_DISCONNECTED: Final = "SENDER_DISCONNECTED"
    DELIVERY_TIMEOUT: Final = "DELIVERY_TIMEOUT"


class CancelReason:
    """Reasons of `ask_cancelled` (contract section 2.3)."""

    CANCELLED: Final = "cancelled"
    EXPIRED: Final = "expired"
    DELIVERY_FAILED: Final = "delivery_failed"
    SESSION_DISCONNECTED: Final = "session_disconnected"
    AUTHORIZATION_REVOKED: Final = "authorization_revoked"


class Text:
    """Reason texts that existing clients may match."""

    INVALID_CLIENT_MESSAGE: Final = "Invalid client message"
    INVALID_HEALTH: Final = "Invalid health message"
    INVALID_REGISTER: Final = "Invalid register message"
    INVALID_SCOPE: Final = "Registration metadata is invalid"
    PROTOCOL_MISMATCH: Final = "Unsupported intercom protocol; expected pi-intercom v4"
    DUPLICATE_REGISTER: Final = "Received duplicate register message"
    INVALID_SESSION_ID: Final = "Invalid register sessionId"
    TOO_MANY_SESSIONS: Final = "Too many registered intercom sessions"
    BOSS_UNAVAILABLE: Final = "Boss registration denied: BOSS_FEATURE_NOT_ADVERTISED"
    BOSS_CONTROL_UNAVAILABLE: Final = (
        "Boss typed control is unavailable until the durable Controller delivery authority is installed"
    )
    INVALID_UNREGISTER: Final = "Invalid unregister preserveAsks value"
    INVALID_LIST: Final = "Invalid list message"
    INVALID_RECEIVED: Final = "Invalid message_received message"
    INVALID_REJECTED: Final = "Invalid message_rejected message"
    INVALID_DEFER: Final = "Invalid defer_ask message"
    INVALID_CANCEL: Final = "Invalid cancel_ask message"
    RATE_LIMITED: Final = "Intercom broker rate limit exceeded"
    ACCESS_REJECTED: Final = "Remote access control credential or request was rejected"
    ACCESS_ON_SESSION: Final = "Remote access control requires a short-lived control connection"
    REMOTE_REGISTRATION_REJECTED: Final = "Remote registration credential was rejected"
    REMOTE_REGISTRATION_MISSING: Final = "Remote registration requires an access credential"
    REMOTE_CONTROL_REJECTED: Final = "Remote control request was rejected"
    INVALID_MESSAGE: Final = "Invalid message format"
    MESSAGE_TOO_LARGE: Final = "Message frame would exceed the size limit"
    DUPLICATE_SETTLED: Final = "Message ID was already used with a different payload"
    DUPLICATE_PENDING: Final = "Message ID is already pending with a different payload"
    TOO_MANY_DELIVERIES: Final = "Too many messages are waiting for receiver acknowledgement"
    RECIPIENT_NOT_READING: Final = "Recipient is not reading; too many bytes are waiting for it"
    NOT_FOUND: Final = "Session not found"
    SENDER_NOT_FOUND: Final = "Sender session not found"
    REPLY_UNMATCHED: Final = "Reply target does not match a pending ask"
    REPLY_MISMATCHED: Final = "Reply target does not match the pending ask"
    ASK_PENDING: Final = (
        "Another ask to this session is still unresolved. "
        "Wait for its reply or use intercom_send for a non-blocking follow-up."
    )
    MUTUAL_ASK: Final = "Mutual ask refused: target session is already waiting for a reply from this session."
    TOO_MANY_ASKS: Final = "Too many asks are already waiting for replies"
    ASKS_UNAVAILABLE: Final = "Asks cannot be recorded at the moment; see the status of the intercom broker"
    ACK_TIMEOUT: Final = "Recipient did not acknowledge the message in time"
    RECIPIENT_GONE: Final = "Recipient disconnected before acknowledging the message"
    SENDER_GONE: Final = "Sender disconnected before delivery was acknowledged"


def ready_line(pid: int) -> str:
    """What a broker that binds for itself prints once both sockets listen (contract section 1.3)."""
    return f"Intercom broker started (pid: {pid}, {REMOTE_ACCESS_FEATURE})"


def session_in_use(session_id: str) -> str:
    """The refusal of an id that another runtime holds (contract section 2.4, row 9)."""
    return (
        f'Session ID "{session_id}" is already active in another local runtime; '
        "close the existing session or use a different session ID"
    )


def ambiguous(target: str) -> str:
    """The refusal of a selector that more than one session matches (contract section 5)."""
    return f'Multiple sessions named "{target}" are connected. Use the session ID instead.'


def parse_scope(value: object) -> str | None:
    """The scope that `value` names; None is unscoped. Raises ValueError without the value in its text."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and SCOPE_PATTERN.fullmatch(value):
        return value
    raise ValueError(f"{SCOPE_ENVIRONMENT} must match ^[A-Za-z0-9_-]{{16,128}}$")
