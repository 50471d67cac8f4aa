# SPDX-License-Identifier: Apache-2.0
"""JSON as the protocols have it: what JavaScript's parser accepts, and nothing else.

Ordinary frames never come here: they are decoded by typed `msgspec` decoders. This is the path for frames that those
refuse, and for values whose shape is not known beforehand. Malformed UTF-8 is read as U+FFFD, an escaped lone surrogate
is kept and written as a lower-case escape, the last of two equal keys wins, a number too large for a double is
infinite.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn, TypeVar

import msgspec

from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import Bytes

MAX_DEPTH = 2_500
"""Deepest nesting that is read: peers pass 2,000 levels and refuse 5,000."""

# A comprehension of this Python takes two frames for each level.
_RECURSION_LIMIT = 3 * MAX_DEPTH + 1_000
_SAFE_DIGITS = 17
_WHITESPACE = (
    "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
# Linear on hostile input: nothing is given back, and a string that never ends is one match.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)

_Kind = TypeVar("_Kind")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def allow_deep_nesting() -> None:
    """Raise the interpreter's recursion limit to what `MAX_DEPTH` needs. Called once by a process that decodes."""
    if sys.getrecursionlimit() < _RECURSION_LIMIT:
        sys.setrecursionlimit(_RECURSION_LIMIT)


def check_depth(payload: bytes) -> None:
    """Raise WireError `JSON_TOO_DEEP` where `payload` nests deeper than `MAX_DEPTH`, whatever Python could read."""
    if len(payload) < 2 * MAX_DEPTH or payload.count(b"[") + payload.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRUCTURE.finditer(payload):
        mark = payload[match.start()]
        if mark in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise WireError("JSON_TOO_DEEP", f"JSON nested deeper than {MAX_DEPTH} levels")
        elif mark != 0x22:
            depth -= 1


def decode(payload: Bytes) -> Any:
    """Read one JSON value. Raises WireError `JSON_INVALID` or `JSON_TOO_DEEP`."""
    try:
        text = bytes(payload).decode("utf-8", "replace")
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_integer)
    except RecursionError as error:
        raise WireError("JSON_TOO_DEEP", f"JSON nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise WireError("JSON_INVALID", "payload is not JSON") from error


def encode(value: Any) -> bytes:
    """Write `value` as compact UTF-8 JSON; structs of `msgspec` included. Lone surrogates become escapes."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        plain = _without_infinity(msgspec.to_builtins(value))
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def convert(value: Any, kind: type[_Kind]) -> _Kind:
    """`value` as `kind`, lone surrogates in keys and texts allowed. Raises `msgspec.ValidationError`."""
    try:
        return msgspec.convert(value, kind)
    except UnicodeEncodeError:
        # A key that no field is called by: which one it is does not matter, only whether it may be there.
        plain = _without_surrogate_keys(value)
    try:
        return msgspec.convert(plain, kind)
    except UnicodeEncodeError as error:
        raise msgspec.ValidationError("text where another value belongs") from error


def compact_length(payload: bytes) -> int:
    """Length in bytes of `payload` once it is parsed and written compactly again."""
    try:
        return len(_encoder.encode(_decoder.decode(payload)))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return len(encode(decode(payload)))


def utf16_length(text: str) -> int:
    """Length in UTF-16 code units: JavaScript's `length`."""
    if text.isascii():
        return len(text)
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def utf8_length(text: str) -> int:
    """Length in UTF-8 bytes; a lone surrogate counts three."""
    if text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))


def trimmed(text: str) -> str:
    """`text` without the white space that JavaScript's `trim` takes off, which is not quite what Python's does."""
    return text.strip(_WHITESPACE)


def _without_infinity(value: Any) -> Any:
    """`value` with null for what JavaScript writes as null."""
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_surrogate_keys(value: Any) -> Any:
    if isinstance(value, dict):
        items = value.items()
        return {k.encode("utf-8", "replace").decode(): _without_surrogate_keys(item) for k, item in items}
    if isinstance(value, list):
        return [_without_surrogate_keys(item) for item in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _SAFE_DIGITS else _large_integer(digits)


def _large_integer(digits: str) -> int | float:
    value = float(digits)
    return int(value) if abs(value) < 2.0**63 else value
