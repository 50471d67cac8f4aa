# SPDX-License-Identifier: Apache-2.0
"""Whether a message is well-formed (contract section 2.6). Types were checked when the frame was read."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from agent_intercom.intercom.contract import BOSS_CONTROL_PREFIX, CONTROL_TYPE_PATTERN, Limits
from agent_intercom.intercom.frames import Attachment, Control, Message
from agent_intercom.wire.codec import encode, utf8_length, utf16_length

_UNSET: Final = msgspec.UNSET
_DOUBLE_RANGE: Final = 2**1024 - 2**970
_BOSS_ENVELOPE: Final = frozenset(
    {"type", "version", "messageId", "bossRunId", "participantId", "bindingEpoch", "idempotencyKey", "payload"}
)
_BOSS_OPTIONAL: Final = frozenset({"causationId", "replyTo"})
_BOSS_TYPES: Final = frozenset(
    "boss." + name
    for name in (
        *(f"assignment.{end}" for end in ("created", "accepted", "checkpoint", "submitted", "rejected", "cancelled")),
        *("staffing.requested", "staffing.resolved", "review.requested", "review.submitted"),
        *("council.requested", "council.submitted", "proof.submitted", "decision.required"),
        *(f"worker.{end}" for end in ("health", "blocked", "failed", "notice", "notice_delivery_failed")),
    )
)


def usable_id(message_id: object, limits: Limits) -> bool:
    """Whether a message id can be named in an answer."""
    return type(message_id) is str and _within(message_id, limits.message_id)


def well_formed(to: str, message: Message, limits: Limits) -> bool:
    """Whether the limits hold; the control slot is judged by `control_well_formed`."""
    content = message.content
    text = content.text
    return (
        _within(message.id, limits.message_id)
        and _within(to, limits.target)
        and _finite(message.timestamp)
        and (message.replyTo is _UNSET or _within(message.replyTo, limits.message_id))
        and (len(text) * 4 <= limits.text_bytes or utf8_length(text) <= limits.text_bytes)
        and (content.attachments is _UNSET or _attachments_fit(content.attachments, limits))
    )


def control_well_formed(raw: object, message: Message, limits: Limits) -> bool:
    """Whether `raw`, the control slot as parsed, may travel with `message`."""
    control = message.content.control
    if not isinstance(control, Control) or type(raw) is not dict:
        return False
    version = control.version
    return (
        message.replyTo is msgspec.UNSET
        and message.expectsReply is not True
        and 1 <= len(control.type) <= limits.control_type
        and CONTROL_TYPE_PATTERN.fullmatch(control.type) is not None
        and type(version) is not bool
        and _finite(version)
        and version >= 1
        and (type(version) is int or float(version).is_integer())
        and ("data" not in raw or len(encode(raw["data"])) <= limits.control_bytes)
        and (not control.type.startswith(BOSS_CONTROL_PREFIX) or _boss_envelope(raw, message.id))
    )


def _finite(value: int | float) -> bool:
    """Whether the number is finite as a double, which is what every peer reads it as."""
    if type(value) is int:
        return -_DOUBLE_RANGE < value < _DOUBLE_RANGE
    return math.isfinite(value)


def _within(text: str, longest: int) -> bool:
    """Whether `text` has 1 to `longest` UTF-16 units; a character has at most two."""
    return 0 < len(text) * 2 <= longest or 0 < utf16_length(text) <= longest


def _fits(text: str, limit: int) -> bool:
    return len(text) * 4 <= limit or utf8_length(text) <= limit


def _attachments_fit(attachments: list[Attachment], limits: Limits) -> bool:
    return len(attachments) <= limits.attachments and all(
        utf16_length(attachment.name) <= limits.attachment_name and _fits(attachment.content, limits.attachment_bytes)
        for attachment in attachments
    )


def _boss_envelope(raw: dict[str, Any], message_id: str) -> bool:
    keys = raw.keys()
    if not (_BOSS_ENVELOPE <= keys <= _BOSS_ENVELOPE | _BOSS_OPTIONAL):
        return False
    texts = ("bossRunId", "participantId", "idempotencyKey", *(keys & _BOSS_OPTIONAL))
    epoch = raw["bindingEpoch"]
    return (
        raw["type"] in _BOSS_TYPES
        and raw["version"] == 1
        and raw["messageId"] == message_id
        and type(epoch) is int
        and epoch >= 1
        and all(type(raw[key]) is str and raw[key] for key in texts)
    )
