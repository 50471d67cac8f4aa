# SPDX-License-Identifier: Apache-2.0
"""Reading a `register` frame: the checks of contract section 2.4, rows 1 to 5 and 7, in their order."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from agent_intercom.intercom import contract
from agent_intercom.intercom.contract import ErrorCode, Limits, Text
from agent_intercom.wire.codec import encode, trimmed, utf16_length

MAX_SESSION_ID_BYTES: Final = 16_384
"""Bytes of an id as JSON. The contract sets no bound; without one a single id could fill every frame."""

MAX_SHOWN_BYTES: Final = 131_072
"""Bytes of what others are shown of a session, as JSON. Out of reach with the contract's own limits."""

_REQUIRED: Final = frozenset({"type", "protocol", "version", "session"})
_ALLOWED: Final = _REQUIRED | {"sessionId", "stateId", "access", "scopeId"}
_CLAIMS_REQUIRED: Final = frozenset({"cwd", "model", "pid", "startedAt", "lastActivity"})
_CLAIMS_ALLOWED: Final = _CLAIMS_REQUIRED | {"name", "status", "runtimeInstanceId", "boss"}

_BOSS_CONTRACT: Final = {
    "feature": "boss-run-v1",
    "version": 1,
    "baseProtocolVersion": 4,
    "semanticsHash": "8943eb60d29afa5264322b5cc7df3de245b01b1cf48a8cbf9cfb6188b02fcfa9",
    "controlEnvelopeVersion": 1,
}
_BOSS_DIGEST: Final = "239bee8bb64cc8c149d49ac00c7396f33f375a89a1d6dea6bd86ff840d551a59"
_BOSS_ROLES: Final = frozenset({"boss", "manager", "adversary", "scout", "worker", "council", "controller"})
_BOSS_TEXTS: Final = ("credentialId", "credential", "bossRunId", "participantId", "issuedAt", "expiresAt", "nonce")
_IDENTIFIER: Final = re.compile(r"[^\x00-\x20\x7f\ud800-\udfff]+")
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_BOSS_CREDENTIAL: Final = frozenset(
    {"version", "namespace", "credentialKind", "role", "communicationProfile", "bindingEpoch", *_BOSS_TEXTS}
)


class Refused(Exception):
    """A registration that is refused with an `error` frame of this code and text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def number(value: object) -> int | float | None:
    """A finite JSON number as JavaScript would print it, else None. Booleans are no numbers."""
    if type(value) is int:
        return value
    if type(value) is float and math.isfinite(value):
        return int(value) if value.is_integer() and abs(value) < 2.0**53 else value
    return None


def text(value: object, shortest: int, longest: int) -> bool:
    """Whether `value` is a string of that many UTF-16 units."""
    return type(value) is str and shortest <= utf16_length(value) <= longest


def read_envelope(frame: dict[str, Any], limits: Limits) -> tuple[str | None, dict[str, Any]]:
    """Rows 1 to 5: the scope and the session's claims. Raises `Refused`."""
    if not (frame.keys() >= _REQUIRED and frame.keys() <= _ALLOWED):
        raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_REGISTER)
    version = frame["version"]
    if frame["protocol"] != contract.PROTOCOL or number(version) != contract.VERSION:
        raise Refused(ErrorCode.PROTOCOL_MISMATCH, Text.PROTOCOL_MISMATCH)
    scope = frame.get("scopeId", "")
    if scope is None:
        raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_SCOPE)
    try:
        parsed = contract.parse_scope(scope)
    except ValueError as error:
        raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_SCOPE) from error
    claims = frame["session"]
    if not _claims_valid(claims, limits):
        raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_REGISTER)
    if "boss" in claims:
        raise Refused(ErrorCode.BOSS_FEATURE_UNAVAILABLE, Text.BOSS_UNAVAILABLE)
    return parsed, claims


def read_session_id(frame: dict[str, Any]) -> str | None:
    """Row 7: the id that the client asks for, None when it leaves the choice to the broker. Raises `Refused`."""
    if "sessionId" not in frame:
        return None
    value = frame["sessionId"]
    if type(value) is not str or not trimmed(value) or len(encode(value)) > MAX_SESSION_ID_BYTES:
        raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_SESSION_ID)
    return value


def public_info(session_id: str, claims: dict[str, Any], origin: str) -> dict[str, Any]:
    """What others are shown (contract section 3.2), in the order in which it is written."""
    info: dict[str, Any] = {"id": session_id}
    if "name" in claims:
        info["name"] = claims["name"]
    info["cwd"] = claims["cwd"]
    info["model"] = claims["model"]
    for key in ("pid", "startedAt", "lastActivity"):
        info[key] = number(claims[key])
    if "status" in claims:
        info["status"] = claims["status"]
    info["trustedLocal"] = origin == contract.ORIGIN_LOCAL
    info["origin"] = origin
    return info


def _claims_valid(claims: object, limits: Limits) -> bool:
    if type(claims) is not dict or not (claims.keys() >= _CLAIMS_REQUIRED and claims.keys() <= _CLAIMS_ALLOWED):
        return False
    return (
        text(claims["cwd"], 1, limits.cwd)
        and text(claims["model"], 1, limits.model)
        and all(number(claims[key]) is not None for key in ("pid", "startedAt", "lastActivity"))
        and text(claims.get("name", ""), 0, limits.name)
        and text(claims.get("status", ""), 0, limits.status)
        and text(claims.get("runtimeInstanceId", "-"), 1, limits.runtime_instance_id)
        and ("boss" not in claims or _boss_well_formed(claims["boss"]))
    )


def _boss_well_formed(boss: object) -> bool:
    """Contract section 2.10: the one shape that is refused as unavailable rather than as malformed."""
    if type(boss) is not dict or boss.keys() != {"featureContract", "capabilityDigest", "credential"}:
        return False
    credential = boss["credential"]
    return (
        _same(boss["featureContract"], _BOSS_CONTRACT)
        and boss["capabilityDigest"] == _BOSS_DIGEST
        and type(credential) is dict
        and credential.keys() == _BOSS_CREDENTIAL
        and _boss_credential_well_formed(credential)
    )


def _boss_credential_well_formed(credential: dict[str, Any]) -> bool:
    """Contract section 8.9; identifiers and times as its section 8 defines them."""
    epoch = number(credential["bindingEpoch"])
    times = [credential["issuedAt"], credential["expiresAt"]]
    return (
        credential["version"] == "boss.participant-credential.v1"
        and credential["namespace"] == "boss-run-v1"
        and credential["credentialKind"] in ("enrollment", "reconnect")
        and type(credential["role"]) is str
        and credential["role"] in _BOSS_ROLES
        and credential["communicationProfile"] == credential["role"]
        and type(epoch) is int
        and 1 <= epoch < 2**53
        and all(type(credential[key]) is str and _IDENTIFIER.fullmatch(credential[key]) for key in _BOSS_TEXTS)
        and all(_timestamp(value) for value in times)
        and times[0] < times[1]
    )


def _same(value: object, expected: dict[str, Any]) -> bool:
    """Equal in types too: True is no 1."""
    return (
        type(value) is dict
        and value.keys() == expected.keys()
        and all(
            value[key] == wanted and (number(value[key]) is not None if type(wanted) is int else True)
            for key, wanted in expected.items()
        )
    )


def _timestamp(value: object) -> bool:
    if type(value) is not str or not _TIMESTAMP.fullmatch(value):
        return False
    # Not needed before the first such frame, which no client sends today.
    from datetime import datetime

    try:
        datetime.fromisoformat(value[:-1])
    except ValueError:
        return False
    return True
