# SPDX-License-Identifier: Apache-2.0
"""What the client makes of a caller's words: frames to send, checked before anything is queued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from agent_intercom.intercom import client_frames as frames
from agent_intercom.intercom.client_policy import random_id
from agent_intercom.intercom.client_state import Outgoing
from agent_intercom.intercom.client_types import Attachment, Control
from agent_intercom.intercom.contract import DEFAULT_LIMITS


def compose(
    to: str,
    text: str,
    message_id: str | None,
    attachments: Sequence[Attachment] = (),
    reply_to: str | None = None,
    control: Control | None = None,
    *,
    expects_reply: bool,
) -> Outgoing:
    """A message ready to be sent. Raises ClientError `INVALID_MESSAGE` or `FRAME_TOO_LARGE`."""
    frames.check_text(to, "to", 1, DEFAULT_LIMITS.target, "INVALID_MESSAGE")
    chosen = random_id() if message_id is None else message_id
    message = frames.build_message(
        chosen,
        now(),
        text,
        reply_to=reply_to,
        expects_reply=expects_reply,
        attachments=attachments,
        control=control,
    )
    payload = frames.encode({"type": "send", "to": to, "message": message}, "message")
    return Outgoing(chosen, payload, asyncio.get_running_loop().create_future())


def ask_control(kind: str, request_id: str, message_id: str) -> bytes:
    """A `defer_ask` or `cancel_ask` frame."""
    return frames.encode({"type": kind, "requestId": request_id, "messageId": message_id})


def now() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
