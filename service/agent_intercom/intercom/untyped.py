# SPDX-License-Identifier: Apache-2.0
"""Frames that the typed decoder refuses: what exactly is wrong, or, for the odd legal one, the same handling.

`register` and `access_control` always come here, because their checks are ordered key by key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from agent_intercom.intercom.contract import ErrorCode, Text
from agent_intercom.intercom.frames import (
    CancelAsk,
    ClientFrame,
    DeferAsk,
    List,
    MessageReceived,
    MessageRejected,
    Presence,
    Unregister,
)
from agent_intercom.intercom.router import Router
from agent_intercom.intercom.router.encode import quote
from agent_intercom.intercom.router.state import Link
from agent_intercom.wire.clock import Now
from agent_intercom.wire.codec import convert

_LONGEST_ECHO: Final = 256

_KINDS: Final[dict[str, tuple[type[Any], str]]] = {
    "list": (List, Text.INVALID_LIST),
    "unregister": (Unregister, Text.INVALID_UNREGISTER),
    "message_received": (MessageReceived, Text.INVALID_RECEIVED),
    "message_rejected": (MessageRejected, Text.INVALID_REJECTED),
    "defer_ask": (DeferAsk, Text.INVALID_DEFER),
    "cancel_ask": (CancelAsk, Text.INVALID_CANCEL),
    "presence": (Presence, ""),
}


def handle_untyped(router: Router, link: Link, value: Any, next_id: Callable[[], str], now: Now) -> None:
    """Do with a parsed frame what contract section 2.1 says from step 2 on."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        router.fail(link, ErrorCode.INVALID_REQUEST, Text.INVALID_CLIENT_MESSAGE, now)
    elif kind == "health":
        request_id = value.get("requestId")
        if isinstance(request_id, str):
            router.health(link, request_id, now)
        else:
            router.fail(link, ErrorCode.INVALID_REQUEST, Text.INVALID_HEALTH, now)
    elif kind == "access_control":
        router.access_control(link, now)
    elif kind == "register":
        router.register(link, value, next_id() if "sessionId" not in value else "", now)
    elif link.session is None:
        router.fail(link, ErrorCode.INVALID_REQUEST, f"Received {kind[:_LONGEST_ECHO]} before register", now)
    elif kind == "send":
        session = router.book.sessions[link.session]
        router.send_untyped(link, session, value.get("to"), quote(value.get("message")), now)
    else:
        _known_or_not(router, link, kind, value, now)


def _known_or_not(router: Router, link: Link, kind: str, value: dict[str, Any], now: Now) -> None:
    known = _KINDS.get(kind)
    if known is None:
        text = f"Unknown client message type: {kind[:_LONGEST_ECHO]}"
        router.fail(link, ErrorCode.INVALID_REQUEST, text, now)
        return
    struct, text = known
    try:
        frame: ClientFrame = convert(value, struct)
    except (msgspec.ValidationError, RecursionError):
        router.fail(link, ErrorCode.INVALID_REQUEST, text or _presence_text(value), now)
        return
    router.frame(link, frame, now)


def _presence_text(value: dict[str, Any]) -> str:
    wrong = next(key for key in ("name", "status", "model") if key in value and not isinstance(value[key], str))
    return f"Invalid presence {wrong}"
