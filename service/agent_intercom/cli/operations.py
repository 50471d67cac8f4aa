# SPDX-License-Identifier: Apache-2.0
"""The operations behind the commands, on a connected client: a request in, an exit code and a result out.

A request is a JSON object with an `op`. A watch that holds the seat carries out the same requests for other commands
(`control`), so a result is what `--json` prints.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from agent_intercom.cli.exits import OK, REFUSED, TIMED_OUT, JsonObject, exit_for, failure
from agent_intercom.intercom.client import IntercomClient
from agent_intercom.intercom.client_errors import (
    AskCancelledError,
    AskTimeout,
    ClientError,
    DeliveryFailed,
    SendTimeout,
)
from agent_intercom.intercom.client_types import Message, SessionInfo

Outcome: TypeAlias = tuple[int, JsonObject]

_ASK_DOCTOR = "`intercom doctor` tells whether the broker is well."


async def perform(client: IntercomClient, request: JsonObject, *, lasting: bool) -> Outcome:
    """Carry `request` out. `lasting` tells whether the session stays, so that an unanswered ask may stay open too."""
    try:
        match request:
            case {"op": "list"}:
                return OK, await _list(client)
            case {"op": "send", "to": str(to), "text": str(text)}:
                return OK, await _send(client, to, text, request.get("replyTo"))
            case {"op": "ask", "to": str(to), "text": str(text), "timeout": float() | int() as timeout}:
                return OK, await _ask(client, to, text, float(timeout), lasting)
    except DeliveryFailed as error:
        return REFUSED, _not_delivered(error)
    except SendTimeout as error:
        details = {"state": "unknown", "messageId": error.message_id, "accepted": error.accepted}
        return TIMED_OUT, failure(error.code, _unknown(error), _ASK_DOCTOR, **details)
    except AskTimeout as error:
        return TIMED_OUT, _unanswered(error)
    except AskCancelledError as error:
        return REFUSED, failure(error.code, str(error), state="cancelled", messageId=error.message_id)
    except ClientError as error:
        return (2 if error.code == "INVALID_MESSAGE" else exit_for(error.code)), failure(
            error.code, str(error), _ASK_DOCTOR if error.code == "TIMEOUT" else None
        )
    return REFUSED, failure("USAGE", "unknown operation")


def session_json(session: SessionInfo) -> JsonObject:
    """A session under the contract's keys; absent ones stay absent."""
    found: JsonObject = msgspec.to_builtins(session)
    return found


def message_json(message: Message) -> JsonObject:
    """A message as `watch --json`, `ask --json` and the inbox have it."""
    found: JsonObject = {
        "id": message.id,
        "from": session_json(message.sender),
        "timestamp": message.timestamp,
        "text": message.text,
        "expectsReply": message.expects_reply,
    }
    if message.reply_to is not None:
        found["replyTo"] = message.reply_to
    if message.attachments:
        found["attachments"] = msgspec.to_builtins(message.attachments)
    if message.control is not None:
        found["control"] = msgspec.to_builtins(message.control)
    return found


async def _list(client: IntercomClient) -> JsonObject:
    sessions = [{**session_json(s), "self": s.id == client.session_id} for s in await client.list()]
    return {"ok": True, "sessions": sessions}


async def _send(client: IntercomClient, to: str, text: str, reply_to: Any) -> JsonObject:
    delivery = await client.send(to, text, reply_to=reply_to if isinstance(reply_to, str) else None)
    ids = {"messageId": delivery.message_id, "deliveryId": delivery.delivery_id}
    return {"ok": True, "state": "delivered", "to": to, **ids}


async def _ask(client: IntercomClient, to: str, text: str, timeout: float, lasting: bool) -> JsonObject:
    reply = await client.ask(to, text, timeout=timeout, keep_open=lasting)
    return {"ok": True, "state": "replied", "to": to, "messageId": reply.asked_id, "reply": message_json(reply.message)}


def _not_delivered(error: DeliveryFailed) -> JsonObject:
    state = "failed" if error.accepted else "refused"
    return failure(error.code, error.reason, state=state, messageId=error.message_id, accepted=error.accepted)


def _unknown(error: SendTimeout) -> str:
    taken = "accepted" if error.accepted else "sent, and not accepted in time"
    return f"{taken}; whether it was delivered is unknown"


def _unanswered(error: AskTimeout) -> JsonObject:
    details = {"messageId": error.message_id, "delivered": error.delivered}
    if error.deferred:
        hint = "The reply will arrive at the watch that holds your seat."
        return failure(error.code, "no reply in time; the ask stays open", hint, state="deferred", **details)
    if error.cancelled:
        hint = "With `intercom watch` running, asks come from your seat and stay open."
        return failure(error.code, "no reply in time; the ask was taken back", hint, state="cancelled", **details)
    text = "no reply in time, and no word from the broker; whether the ask stays open is unknown"
    return failure(error.code, text, _ASK_DOCTOR, state="unknown", **details)
