# SPDX-License-Identifier: Apache-2.0
"""`list`, `send`, `ask`, `pending`, `reply` and `whoami`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent_intercom.cli import output
from agent_intercom.cli.control import ask_seat
from agent_intercom.cli.exits import OK, CommandError, JsonObject
from agent_intercom.cli.place import COMMAND_SUFFIX, MODEL, Place, here, passing
from agent_intercom.cli.seat import Ask, Seat, select

if TYPE_CHECKING:
    from agent_intercom.cli.operations import Outcome

ASK_SLACK = 20.0
"""Seconds that delivery and deferring may add to an ask's own timeout."""

_GONE = "A command asked, and has ended; the ask is no longer pending."
_AWAY = "The asker is not connected. Its ask stays pending: try again when `intercom list` shows it."


def list_sessions(options: argparse.Namespace) -> int:
    """`intercom list`."""
    code, result = _carry_out(here(), {"op": "list"})
    if code != OK:
        return _report(options.json, code, result)
    everyone = result["sessions"]
    shown = everyone if options.all else [s for s in everyone if not _passing(s)]
    hidden = sum(1 for s in everyone if _passing(s) and not s["self"]) if not options.all else 0
    result = {"ok": True, "sessions": shown, "hidden": hidden}
    output.finish(options.json, result, _roster(shown, hidden))
    return OK


def send(options: argparse.Namespace) -> int:
    """`intercom send`."""
    request = {"op": "send", "to": options.to, "text": _text(options.text)}
    return _report(options.json, *_carry_out(here(), request))


def ask(options: argparse.Namespace) -> int:
    """`intercom ask`."""
    request = {"op": "ask", "to": options.to, "text": _text(options.text), "timeout": options.timeout}
    return _report(options.json, *_carry_out(here(), request, options.timeout + ASK_SLACK))


def pending(options: argparse.Namespace) -> int:
    """`intercom pending`."""
    now = time.time_ns() // 1_000_000
    asks = [found.result(now) for found in Seat(here()).inbox.asks()]
    output.finish(options.json, {"ok": True, "asks": asks}, _pending_lines(asks))
    return OK


def reply(options: argparse.Namespace) -> int:
    """`intercom reply`."""
    selector, text = _reply_words(options.words)
    place = here()
    seat = Seat(place)
    chosen = select(seat.inbox.asks(), selector)
    request = {"op": "send", "to": chosen.sender_id, "text": _text(text), "replyTo": chosen.message_id}
    outcome = ask_seat(seat.control_path, request)
    if outcome is None:
        outcome = _reply_alone(place, seat, chosen, request)
    code, result = outcome
    if result.get("error", {}).get("code") == "SESSION_NOT_FOUND":
        result["error"]["hint"] = _GONE if passing(chosen.sender_id) else _AWAY
    return _report(options.json, code, result)


def whoami(options: argparse.Namespace) -> int:
    """`intercom whoami`."""
    place = here()
    seat = Seat(place)
    outcome = ask_seat(seat.control_path, {"op": "whoami"})
    held = {} if outcome is None else outcome[1]
    identity = seat.identity()
    result = {
        "ok": True,
        "sessionId": identity.session_id,
        "name": held.get("name", place.name),
        "watching": outcome is not None,
        "connected": bool(held.get("connected")),
        "scoped": place.scope is not None,
    }
    output.finish(options.json, result, _whoami_lines(result))
    return OK


def _carry_out(place: Place, request: JsonObject, timeout: float = 0.0) -> Outcome:
    """From the seat where a watch holds it, so that answers arrive there; else as a session of its own."""
    seat = _seat_or_none(place)
    outcome = ask_seat(seat.control_path, request, timeout) if seat is not None else None
    if outcome is not None:
        return outcome
    from agent_intercom.cli.passing import carry_out

    return carry_out(place, request)


def _seat_or_none(place: Place) -> Seat | None:
    """None without a runtime directory: then nobody can hold a seat. The id of an agent around us does not matter."""
    try:
        return Seat(place)
    except CommandError as error:
        if error.code in {"NO_RUNTIME_DIRECTORY", "INVALID_SESSION"}:
            return None
        raise


def _reply_alone(place: Place, seat: Seat, chosen: Ask, request: JsonObject) -> Outcome:
    if not seat.hold():
        raise CommandError("SEAT_BUSY", "another command holds this seat at the moment; try again")
    try:
        from agent_intercom.cli.passing import carry_out_as_seat

        outcome = carry_out_as_seat(place, seat, request)
        seat.inbox.settle(chosen.sender_id, chosen.message_id, *outcome)
        return outcome
    finally:
        seat.release()


def _text(argument: str) -> str:
    if argument != "-":
        return _something(argument, "the text is empty")
    if sys.stdin is None:
        raise CommandError("USAGE", "standard input is closed")
    data = sys.stdin.buffer.read()
    try:
        return _something(data.decode("utf-8").removesuffix("\n"), "standard input is empty")
    except UnicodeDecodeError as error:
        raise CommandError("USAGE", "standard input is not UTF-8 text") from error


def _something(text: str, complaint: str) -> str:
    if not text:
        raise CommandError("USAGE", f"{complaint}; nothing was sent", hint="")
    return text


def _reply_words(words: list[str]) -> tuple[str | None, str]:
    if words in (["latest"], ["oldest"]):
        text = f"reply {words[0]} says which ask, and no answer to it"
        raise CommandError("USAGE", text, hint=f"Write: intercom reply {words[0]} TEXT")
    if len(words) <= 2:
        if words[-1] != "-":
            _text(words[-1])
        return (words[0] if len(words) == 2 else None), words[-1]
    raise CommandError("USAGE", "reply takes a text, or a message id and a text; quote a text with spaces")


def _passing(session: JsonObject) -> bool:
    return bool(session["model"] == MODEL and passing(session["id"]))


def _roster(sessions: list[JsonObject], hidden: int) -> Iterator[str]:
    if sessions:
        rows = [
            (
                s.get("name", "").removesuffix(COMMAND_SUFFIX) + " (this command)"
                if s["self"] and _passing(s)
                else s.get("name", "") + (" (this seat)" if s["self"] else ""),
                s["model"],
                s.get("status", ""),
                s["cwd"],
                s["id"],
            )
            for s in sessions
        ]
        yield from output.table(("NAME", "MODEL", "STATUS", "DIRECTORY", "ID"), rows)
    else:
        yield "No sessions in this scope."
    if hidden:
        yield f"({hidden} more that live only as long as a command: intercom list --all)"


def _pending_lines(asks: list[JsonObject]) -> Iterator[str]:
    if not asks:
        yield "No asks are waiting for an answer."
    for found in asks:
        sender = found["from"]
        name = output.printable(sender.get("name") or sender["id"])
        state = "asker waits" if found["state"] == "waiting" else "asker waits no more"
        state = "the command that asked has ended" if found["askerEnded"] else state
        old = ", may have expired" if found["mayHaveExpired"] else ""
        yield f"{output.printable(found['id'])}  from {name}  {found['ageSeconds']} s ago ({state}{old})"
        yield "    " + output.block(found["text"], "    ")


def _whoami_lines(result: JsonObject) -> Iterator[str]:
    yield result["sessionId"]
    state = (
        "connected" if result["connected"] else "watch runs, not connected" if result["watching"] else "no watch runs"
    )
    yield f"name {output.printable(result['name'])}, {state}, {'in a scope' if result['scoped'] else 'unscoped'}"


def _report(as_json: bool, code: int, result: JsonObject) -> int:
    if code == OK:
        replied = result["state"] == "replied"
        line = output.block(result["reply"]["text"], "") if replied else f"delivered ({result['messageId']})"
        output.finish(as_json, result, [line])
        return code
    if as_json:
        output.emit(output.json_line(result))
        return code
    error = result["error"]
    words = {
        "refused": "not delivered: ",
        "failed": "accepted, but not delivered: ",
        "unknown": "",
    }
    output.complain(words.get(result.get("state", ""), "") + error["text"], error.get("hint", ""))
    return code
