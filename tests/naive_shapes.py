# SPDX-License-Identifier: Apache-2.0
"""The naive rules' view of one value: what JSON it is, and whether it has the shape that the contract asks for.

Every rule names its section of the contract.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeAlias

Frame: TypeAlias = dict[str, Any]

ABSENT: Any = object()


class NotJson(Exception):
    """The payload is nothing that JSON.parse accepts."""


def _number(text: str) -> Any:
    value = float(text)
    return int(text) if abs(value) < 2**53 else value


def _refuse(name: str) -> Any:
    raise ValueError(name)


_decoder = json.JSONDecoder(parse_constant=_refuse, parse_int=_number)


def parse(payload: bytes) -> Any:
    """1.1: lenient UTF-8, then JSON.parse; numbers are doubles."""
    try:
        return _decoder.decode(payload.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise NotJson from error


def units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def octets(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def is_text(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, str) and least <= units(value) <= most


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def blank(text: str) -> bool:
    """JavaScript's `trim` leaves nothing."""
    white = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200B)))
    return all(letter in white for letter in text)


def scope_of(value: Any) -> str | None:
    """4.1. Raises ValueError."""
    if value is ABSENT or value == "":
        return None
    if isinstance(value, str) and re.fullmatch("[A-Za-z0-9_-]{16,128}", value):
        return value
    raise ValueError


def claims_ok(value: Any) -> bool:
    """3.1, without Boss metadata."""
    required = {"cwd", "model", "pid", "startedAt", "lastActivity"}
    if not isinstance(value, dict) or not required <= set(value) <= required | {"name", "status", "runtimeInstanceId"}:
        return False
    return (
        is_text(value["cwd"], 1, 4096)
        and is_text(value["model"], 1, 512)
        and all(is_number(value[key]) for key in ("pid", "startedAt", "lastActivity"))
        and is_text(value.get("name", ""), 0, 256)
        and is_text(value.get("status", ""), 0, 512)
        and is_text(value.get("runtimeInstanceId", "x"), 1, 256)
    )


def attachment_ok(value: Any) -> bool:
    required = {"type", "name", "content"}
    if not isinstance(value, dict) or not required <= set(value) <= required | {"language"}:
        return False
    return (
        value["type"] in ("file", "snippet", "context")
        and is_text(value["name"], 0, 256)
        and isinstance(value["content"], str)
        and octets(value["content"]) <= 524_288
        and isinstance(value.get("language", ""), str)
    )


def control_ok(value: Any) -> bool:
    """2.6, without Boss envelopes."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("type"), str)
        and re.fullmatch("[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,127}", value["type"]) is not None
        and not value["type"].startswith("boss.")
        and is_number(value.get("version"))
        and value["version"] == math.floor(value["version"])
        and value["version"] >= 1
        and ("data" not in value or len(written(value["data"])) <= 16_384)
    )


def written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def message_ok(to: Any, value: Any) -> bool:
    """2.6, the message's shape."""
    required, optional = {"id", "timestamp", "content"}, {"replyTo", "expectsReply"}
    if not is_text(to, 1, 512) or not isinstance(value, dict) or not required <= set(value) <= required | optional:
        return False
    content = value["content"]
    if not isinstance(content, dict) or not {"text"} <= set(content) <= {"text", "attachments", "control"}:
        return False
    attachments = content.get("attachments", [])
    threaded = "replyTo" in value or value.get("expectsReply") is True
    return (
        is_text(value["id"], 1, 256)
        and is_number(value["timestamp"])
        and is_text(value.get("replyTo", "x"), 1, 256)
        and isinstance(value.get("expectsReply", False), bool)
        and isinstance(content["text"], str)
        and octets(content["text"]) <= 262_144
        and isinstance(attachments, list)
        and len(attachments) <= 16
        and all(map(attachment_ok, attachments))
        and ("control" not in content or (control_ok(content["control"]) and not threaded))
    )
