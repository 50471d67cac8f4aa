# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON and its framed hash, as Appendix C of the contract has them.

The broker never computes either: it carries the two resulting constants. This module lets the tests recompute them
from the vector files.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_DOMAIN = re.compile(r"[\x21-\x7e]+")
_SAFE_INTEGER = 2**53 - 1


def _order(key: str) -> tuple[int, int, bytes]:
    """Array indices come first and by number; every other key follows by UTF-16 code unit."""
    if _INDEX.fullmatch(key) and int(key) < 2**32 - 1:
        return 0, int(key), b""
    return 1, 0, key.encode("utf-16-be", "surrogatepass")


def canonical(value: Any) -> str:
    """The canonical text of a JSON value made of objects, arrays, strings, safe integers, booleans and null.

    Raises ValueError for a float, an integer beyond 2**53 - 1 and a string with a lone surrogate, and TypeError for
    anything that is no JSON value.
    """
    if isinstance(value, str):
        value.encode("utf-8")
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        if abs(value) > _SAFE_INTEGER:
            raise ValueError("integer is not safe")
        return str(value)
    if isinstance(value, float):
        raise ValueError("fractions have no canonical text")
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("object key is no string")
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value, key=_order)) + "}"
    raise TypeError(type(value).__name__)


def canonical_hash(domain: str, value: Any) -> str:
    """Lower-case hexadecimal SHA-256 of `value` framed under `domain`; both lengths are counted in bytes."""
    if not _DOMAIN.fullmatch(domain):
        raise ValueError("domain must be printable ASCII")
    name, payload = domain.encode(), canonical(value).encode()
    frame = b"agent-intercom-canonical-frame-v1:%d:%s:%d:%s" % (len(name), name, len(payload), payload)
    return hashlib.sha256(frame).hexdigest()


def insertion_hash(value: Any) -> str:
    """SHA-256 of plain compact JSON in insertion order: how the policy corpus alone is hashed (section 8.1)."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
