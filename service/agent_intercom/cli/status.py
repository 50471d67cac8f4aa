# SPDX-License-Identifier: Apache-2.0
"""`status`: is the broker there, who started it, is it well, how many sessions are in this scope."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from agent_intercom.cli import output
from agent_intercom.cli.exits import DEGRADED, OK, CommandError, JsonObject
from agent_intercom.cli.place import EPHEMERAL_PREFIX, MODEL, Place, here, told
from agent_intercom.host import privatefiles
from agent_intercom.host.manager import Manager, ManagerError
from agent_intercom.intercom import contract, ownership
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.foreign import ADDRESS_BYTES, Probe, fits, is_manager, probe

DEGRADED_MARK = "; degraded: "
"""How the broker's status line begins to tell what is wrong (`Broker.status_text`)."""

_RESTART = "Run `systemctl --user restart intercom.service`; `journalctl --user -u intercom` may tell why."
_OTHER = "`intercom doctor --take-over` asks it to end"

PATIENCE = 5.0
"""Seconds that a person waits for an answer: a first start on a cold, busy machine takes longer than a client waits."""


def status(options: argparse.Namespace) -> int:
    """`intercom status`."""
    place = here()
    address, found = look(place.addresses)
    text = _status_text(address, found)
    broker: JsonObject = {
        "reachable": found.state == "compatible",
        "state": "incompatible" if found.heard == "other" else found.state,
        "address": address,
        "activation": _activation(found),
        "listenerPid": found.pid,
        "statusText": text,
        "degraded": degraded(text),
    }
    if found.state != "compatible":
        raise _unreached(place.addresses, address, found, broker)
    try:
        sessions = _count(place)
    except ClientError as error:
        # It was there a moment ago.
        broker |= {"reachable": False, "state": "unreachable"}
        raise CommandError(error.code, told(error, place.addresses), broker=broker) from error
    result: JsonObject = {"ok": True, "broker": broker, "sessions": sessions, "scoped": place.scope is not None}
    output.finish(options.json, result, _lines(result))
    return DEGRADED if broker["degraded"] else OK


def look(addresses: list[str]) -> tuple[str, Probe]:
    """The first address where something listens, and what; the last one where nothing does."""
    found = Probe("absent")
    address = addresses[0]
    for address in addresses:
        found = probe(address, PATIENCE)
        if found.listening:
            if found.uid is not None and found.uid != os.geteuid():
                found = found._replace(state="foreign")
            break
    return address, found


class Verdict(NamedTuple):
    """What to say of a listener that is no working broker: an error code, the text, and the way out."""

    code: str
    text: str
    way_out: str


def verdict(found: Probe) -> Verdict:
    """Of a listener that is not `compatible`, in the words that every other command has for it."""
    manager = is_manager(found.pid)
    process = f" (process {found.pid})" if found.pid else ""
    who = "systemd listens, and the broker" if manager else f"what listens{process}"
    if found.state == "incompatible" or found.heard == "other":
        text = f"{who} does not speak {contract.PROTOCOL} version {contract.VERSION}"
        return Verdict("INCOMPATIBLE", text, _RESTART if manager else _OTHER)
    if found.heard == "closed":
        return Verdict(
            "CONNECTION_LOST", f"{who} closed the connection without an answer", _RESTART if manager else _OTHER
        )
    if manager:
        return Verdict("TIMEOUT", f"{who} does not answer in time", _RESTART)
    end = f"; if that does not help: kill -KILL {found.pid}" if found.pid else ""
    return Verdict("TIMEOUT", f"{who} does not answer in time", f"{_OTHER}{end}")


def _status_text(address: str, found: Probe) -> str | None:
    """The broker's own status line: from the service manager, or from the file of a broker in the foreground."""
    if not found.listening:
        return None
    if is_manager(found.pid):
        return status_text()
    directory = os.path.dirname(address)
    if not ownership.self_bound(directory, found.pid):
        return None
    try:
        text = privatefiles.read(os.path.join(directory, ownership.STATUS), 4_096)
    except OSError:
        return None
    return text.decode("utf-8", "replace").strip() or None


def status_text() -> str | None:
    """The service's own status line, or None where it has none."""
    try:
        with Manager() as manager:
            service = manager.settled_service("intercom.service")
    except ManagerError:
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


def _unreached(addresses: list[str], address: str, found: Probe, broker: JsonObject) -> CommandError:
    """What `status` ends with where no broker answers."""
    if not any(map(fits, addresses)):
        text = f"the broker's address is longer than the {ADDRESS_BYTES} bytes that a socket's path may have"
        return CommandError("PATH_TOO_LONG", text, broker=broker)
    if found.state == "foreign":
        text = "another user's process listens at the broker's address"
        return CommandError("PEER_FOREIGN", text, broker=broker)
    if found.listening:
        code, text, hint = verdict(found)
        return CommandError(code, text, hint=hint, broker=broker)
    absent = found.state == "absent"
    text = f"no broker listens at {' or '.join(addresses)}" if absent else f"{address} cannot be reached"
    return CommandError("BROKER_UNREACHABLE", text, broker=broker)


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
