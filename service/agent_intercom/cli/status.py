# SPDX-License-Identifier: Apache-2.0
"""`status`: is the broker there, who started it, is it well, how many sessions are in this scope."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from agent_intercom.cli import output
from agent_intercom.cli.exits import DEGRADED, INCOMPATIBLE, OK, UNREACHABLE, CommandError, JsonObject, failure
from agent_intercom.cli.place import EPHEMERAL_PREFIX, MODEL, Place, here
from agent_intercom.cli.systemd import Manager, ManagerUnreachable
from agent_intercom.intercom.foreign import Probe, is_manager, probe

DEGRADED_MARK = "; degraded: "
"""How the broker's status line begins to tell what is wrong (`Broker.status_text`)."""

PATIENCE = 5.0
"""Seconds that a person waits for an answer: a first start on a cold, busy machine takes longer than a client waits."""

FAILED_STATES = {"incompatible": "INCOMPATIBLE", "foreign": "PEER_FOREIGN"}


def status(options: argparse.Namespace) -> int:
    """`intercom status`."""
    place = here()
    address, found = look(place.addresses)
    text = status_text() if found.listening and is_manager(found.pid) else None
    broker = {
        "reachable": found.state == "compatible",
        "state": found.state,
        "address": address,
        "activation": _activation(found),
        "listenerPid": found.pid,
        "statusText": text,
        "degraded": degraded(text),
    }
    if found.state != "compatible":
        code = FAILED_STATES.get(found.state, "BROKER_UNREACHABLE")
        result = failure(code, _why(found), broker=broker)
        if options.json:
            output.emit(output.json_line(result))
        else:
            output.complain(result["error"]["text"], code)
        return INCOMPATIBLE if code in FAILED_STATES.values() else UNREACHABLE
    sessions = _count(place)
    result = {"ok": True, "broker": broker, "sessions": sessions, "scoped": place.scope is not None}
    output.finish(options.json, result, _lines(result))
    return DEGRADED if broker["degraded"] else OK


def look(addresses: list[str]) -> tuple[str, Probe]:
    """The first address where something listens, and what; the last one where nothing does."""
    import os

    found = Probe("absent")
    address = addresses[0]
    for address in addresses:
        found = probe(address, PATIENCE)
        if found.listening:
            if found.uid is not None and found.uid != os.geteuid():
                found = found._replace(state="foreign")
            break
    return address, found


def status_text() -> str | None:
    """The service's own status line, or None where it has none."""
    try:
        with Manager() as manager:
            service = manager.settled_service("intercom.service")
    except ManagerUnreachable:
        return None
    text = (service or {}).get("StatusText")
    return str(text) if text else None


def degraded(text: str | None) -> list[str]:
    """The codes of what is wrong, out of the service's status line."""
    _, mark, codes = (text or "").partition(DEGRADED_MARK)
    return codes.split(", ") if mark else []


def _activation(found: Probe) -> str | None:
    if not found.listening or found.pid is None:
        return None
    return "systemd" if is_manager(found.pid) else "foreground"


def _why(found: Probe) -> str:
    match found.state:
        case "incompatible":
            return "what listens is not a broker of this protocol and version"
        case "foreign":
            return "another user's process listens at the broker's address"
        case "absent":
            return "no broker listens"
    return "what listens gives no answer in time" if found.listening else "the broker's address cannot be reached"


def _count(place: Place) -> int:
    """Sessions in this scope, those that live only as long as a command left out."""
    from agent_intercom.cli.passing import carry_out

    code, result = carry_out(place, {"op": "list"})
    if code != OK:
        error = result["error"]
        raise CommandError(error["code"], error["text"], exit_code=code)
    sessions: list[dict[str, Any]] = result["sessions"]
    return sum(1 for s in sessions if s["model"] != MODEL or not s["id"].startswith(EPHEMERAL_PREFIX))


def _lines(result: JsonObject) -> Iterator[str]:
    broker = result["broker"]
    how = (
        "started by systemd"
        if broker["activation"] == "systemd"
        else f"in the foreground (process {broker['listenerPid']})"
    )
    yield f"broker: reachable, {how}"
    if broker["statusText"]:
        yield f"state: {output.printable(broker['statusText'])}"
    if broker["degraded"]:
        yield "degraded: see intercom doctor"
    yield f"sessions: {result['sessions']} {'in this scope' if result['scoped'] else 'unscoped'}"
