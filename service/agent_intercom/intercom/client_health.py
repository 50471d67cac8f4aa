# SPDX-License-Identifier: Apache-2.0
"""The health probe: who answers on a path, without registering (contract section 1.5)."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal, NamedTuple

from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.contract import (
    POLICY_SEMANTICS_HASH,
    POLICY_SEMANTICS_VERSION,
    PROTOCOL,
    REMOTE_ACCESS_FEATURE,
    VERSION,
)
from agent_intercom.wire import codec
from agent_intercom.wire.channel import FrameChannel
from agent_intercom.wire.errors import WireError

PROBE_TIMEOUT = 1.0


class Health(NamedTuple):
    """Result of a probe.

    `state`: `compatible`, `incompatible` (something else answers there), `unreachable` (nobody, or not in time),
    `foreign` (another user's listener; nothing was sent to it). `listener_pid` is the process that called listen().
    """

    state: Literal["compatible", "incompatible", "unreachable", "foreign"]
    reason: str
    listener_pid: int | None = None


async def health(path: str | os.PathLike[str], timeout: float = PROBE_TIMEOUT) -> Health:
    """Ask what listens on the Unix socket `path` and wait at most `timeout` seconds. Never raises for a bad answer."""
    request_id = os.urandom(16).hex()
    answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def settle(payload: bytes | None) -> None:
        if not answer.done():
            answer.set_result(payload)

    try:
        async with asyncio.timeout(timeout):
            channel = await FrameChannel.connect(path, settle, lambda _: settle(None))
    except WireError as error:
        return Health("foreign", str(error))
    except OSError as error:
        return Health("unreachable", os.strerror(error.errno) if error.errno else "no answer in time")
    try:
        async with asyncio.timeout(timeout):
            channel.send(codec.encode({"type": "health", "requestId": request_id}))
            payload = await answer
    except TimeoutError:
        return Health("unreachable", "no answer in time", channel.peer.pid)
    except WireError:
        return Health("unreachable", "the connection was closed", channel.peer.pid)
    finally:
        channel.abort()
        await channel.wait_closed()
    return _judge(payload, request_id, channel.peer.pid)


def _judge(payload: bytes | None, request_id: str, pid: int) -> Health:
    if payload is None:
        return Health("unreachable", "the connection was closed", pid)
    try:
        frame = codec.decode(payload)
    except WireError:
        return Health("unreachable", "the answer is not JSON", pid)
    if not isinstance(frame, dict) or frame.get("type") != "health_ok" or frame.get("requestId") != request_id:
        return Health("unreachable", "the answer is not one to a health probe", pid)
    if not _same(frame):
        return Health("incompatible", f"what answers is not {PROTOCOL} version {VERSION}", pid)
    return Health("compatible", "", pid)


def _same(frame: dict[str, Any]) -> bool:
    access = frame.get("remoteAccess")
    return (
        frame.get("protocol") == PROTOCOL
        and not isinstance(frame.get("version"), bool)
        and frame.get("version") == VERSION
        and frame.get("endpoint") == "local"
        and isinstance(access, dict)
        and access.get("feature") == REMOTE_ACCESS_FEATURE
        and access.get("policySemanticsVersion") == POLICY_SEMANTICS_VERSION
        and access.get("policySemanticsHash") == POLICY_SEMANTICS_HASH
    )


def require(result: Health) -> None:
    """Raise ClientError `BROKER_UNREACHABLE`, `INCOMPATIBLE` or `PEER_FOREIGN` unless `result` is compatible."""
    codes = {"unreachable": "BROKER_UNREACHABLE", "incompatible": "INCOMPATIBLE", "foreign": "PEER_FOREIGN"}
    if result.state != "compatible":
        raise ClientError(codes[result.state], result.reason)
