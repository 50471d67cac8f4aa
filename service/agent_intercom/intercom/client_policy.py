# SPDX-License-Identifier: Apache-2.0
"""What the client holds to: scope, timers, when it tries again and when it gives up."""

from __future__ import annotations

import os
from typing import NamedTuple

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.contract import PROTOCOL, VERSION, ErrorCode, parse_scope

RECONNECT_DELAYS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each attempt; the last repeats (contract section 1.5)."""

STEADY = 5.0
"""A connection that lived this many seconds starts the delays over."""

PASSING = frozenset(
    {
        "BROKER_UNREACHABLE",
        "CONNECTION_LOST",
        "PROTOCOL_VIOLATION",
        "FRAME_TOO_LARGE",
        "FRAME_EMPTY",
        "TIMEOUT",
        ErrorCode.INVALID_REQUEST,
        ErrorCode.RATE_LIMITED,
        ErrorCode.TOO_MANY_SESSIONS,
    }
)
"""Codes that end a connection and not the client, once it was registered."""

FIRST_ATTEMPTS = 3
"""How often the first connection is tried when the broker closes it without a word."""


class Timeouts(NamedTuple):
    """Seconds (contract section 1.5)."""

    connect: float = 10.0
    send: float = 10.0
    list: float = 5.0
    ask_control: float = 2.0
    close: float = 2.0


DEFAULT_TIMEOUTS = Timeouts()


class FromEnvironment:
    """Default of `scope`: AGENT_INTERCOM_SCOPE_ID, read once."""


FROM_ENVIRONMENT = FromEnvironment()


def capture_scope(value: str | None | FromEnvironment = FROM_ENVIRONMENT) -> str | None:
    """The scope for a client's whole life; None is unscoped. Raises ClientError `SCOPE_INVALID` without the value."""
    raw = os.environ.get(SCOPE_ENVIRONMENT) if isinstance(value, FromEnvironment) else value
    try:
        return parse_scope(raw)
    except ValueError:
        raise ClientError("SCOPE_INVALID", "Registration metadata is invalid", SCOPE_ENVIRONMENT) from None


def random_id() -> str:
    """A random UUID, version 4."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def registration_error(code: str | None) -> ClientError:
    """Why a connection that ended with `code` was not registered."""
    if code in {"INCOMPATIBLE", "PROTOCOL_VIOLATION", "FRAME_TOO_LARGE", "FRAME_EMPTY"}:
        return ClientError("INCOMPATIBLE", f"what listens does not speak {PROTOCOL} version {VERSION}")
    return ClientError(code or "CONNECTION_LOST", "what listens closed the connection without an answer")
