# SPDX-License-Identifier: Apache-2.0
"""`doctor`: every check, whatever is missing, and the way out of what it finds; `--take-over` ends a foreign broker."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import chain
from typing import Final

from agent_intercom.cli import checks, output, verdicts
from agent_intercom.cli.exits import DEGRADED, OK, CommandError
from agent_intercom.cli.sockdiag import Connection, DiagnosisUnavailable, look
from agent_intercom.cli.verdicts import Check, State
from agent_intercom.intercom import ownership, paths
from agent_intercom.intercom.foreign import OwnershipError, Probe, foreign_sessions, is_manager, probe, take_over

SECOND_LOOK: Final = 0.3
"""Seconds after which a client with the same unread bytes or more counts as one that does not read."""


def doctor(options: argparse.Namespace) -> int:
    """`intercom doctor`."""
    if options.take_over:
        return _take_over(options)
    # Before the manager is asked: a broker that does not run has no status.
    heard = checks.hear()
    units = checks.ask_manager()
    found = list(
        chain(
            checks.protocol(),
            checks.environment(),
            checks.sockets(units),
            checks.service(units),
            checks.addresses(units, heard),
            checks.agent_directory(units),
            checks.owner_file(units),
            checks.login(),
            _settings(),
            _connections(),
        )
    )
    failed = verdicts.failed_names(found)
    result: dict[str, object] = {"ok": not failed, "checks": [check.result() for check in found]}
    if failed:
        result["error"] = {"code": "DEGRADED", "text": f"failed checks: {failed}"}
    output.finish(options.json, result, verdicts.lines(found))
    return DEGRADED if failed else OK


def _settings() -> Iterator[Check]:
    from agent_intercom.cli.config import problems

    wrong = problems()
    if wrong:
        yield Check("settings", "fail", f"{len(wrong)} invalid: {', '.join(wrong)}", "intercom config check")
    else:
        yield Check("settings", "ok", "the settings are valid")


def _connections() -> Iterator[Check]:
    addresses = _addresses()
    try:
        first = look(addresses)
        time.sleep(SECOND_LOOK)
        second = look(addresses)
    except DiagnosisUnavailable as error:
        yield Check("connections", "unknown", str(error), "install pyroute2 to see backlog and unread bytes")
        return
    waiting = sum(listener.waiting for listener in second.listeners)
    stuck = waiting and waiting == sum(listener.waiting for listener in first.listeners)
    state: State = "warn" if stuck else "ok"
    hint = "the broker does not accept; journalctl --user -u intercom.service" if state == "warn" else ""
    unread = sum(connection.unread for connection in second.connections)
    details = {"backlog": waiting, "connections": [_connection(connection) for connection in second.connections]}
    text = f"{len(second.connections)} connections, {waiting} waiting to be accepted, {unread} bytes unread by clients"
    yield Check("connections", state, text, hint, details)
    before = {connection.inode: connection.unread for connection in first.connections}
    for connection in second.connections:
        if connection.unread and before.get(connection.inode, 0) and connection.unread >= before[connection.inode]:
            yield _not_reading(connection)


def _not_reading(connection: Connection) -> Check:
    who = f"process {connection.pid} ({connection.command})" if connection.pid else "a client"
    text = f"{who} is not reading: {connection.unread} bytes wait for it"
    hint = "end or wake that process; the broker disconnects it when too much waits"
    return Check("not-reading", "warn", text, hint, _connection(connection))


def _connection(connection: Connection) -> dict[str, int | str | None]:
    return {
        "pid": connection.pid,
        "command": connection.command,
        "unreadBytes": connection.unread,
        "unsentBytes": connection.unsent,
    }


def _addresses() -> list[str]:
    runtime = paths.runtime_dir(os.environ)
    found = [paths.compat_socket(os.environ), paths.compat_gateway_socket(os.environ)]
    if runtime is not None:
        found += [os.path.join(runtime, paths.SOCKET_NAME), os.path.join(runtime, paths.GATEWAY_NAME)]
    return found


def _take_over(options: argparse.Namespace) -> int:
    """Say whom a foreign broker serves, then ask it to end."""
    address, found = _foreign()
    ours = ownership.self_bound(os.path.dirname(address), found.pid)
    if ours and found.state == "compatible" and not checks.wanted(checks.ask_manager()):
        text = f"process {found.pid} is an `intercom broker` in the foreground that is well, and in nobody's way"
        hint = f"To end it: Ctrl-C in its terminal, or kill {found.pid}."
        raise CommandError("NOT_FOREIGN", text, hint=hint)
    sessions = foreign_sessions(address)
    shown = None if sessions is None else [{"id": session_id, "name": name} for session_id, name in sessions]
    if not options.json:
        for line in _holds(found, sessions, ours):
            output.emit(line)
    try:
        ended = take_over(address)
    except OwnershipError as error:
        raise CommandError(error.code, str(error), sessions=shown) from error
    result = {"ok": True, "endedPid": ended.pid, "sessions": shown, "next": ended.next_command}
    output.finish(options.json, result, [f"process {ended.pid} has ended", f"now run: {ended.next_command}"])
    return OK


def _foreign() -> tuple[str, Probe]:
    candidates = [paths.compat_socket(os.environ)]
    if runtime := paths.runtime_dir(os.environ):
        candidates.append(os.path.join(runtime, paths.SOCKET_NAME))
    for address in candidates:
        found = probe(address)
        if found.listening and not is_manager(found.pid):
            return address, found
    raise CommandError("NOTHING_TO_TAKE_OVER", "no foreign broker listens at our addresses")


def _holds(found: Probe, sessions: list[tuple[str, str]] | None, ours: bool) -> Iterator[str]:
    kind = "no proper" if found.state == "unreachable" else f"a {found.state}"
    what = "an `intercom broker` in the foreground" if ours else f"{kind} broker"
    yield f"process {found.pid or 'unknown'} listens, {what}"
    if sessions is None:
        yield "which sessions it holds cannot be told; they will be disconnected"
        return
    if not sessions:
        yield "it shows no sessions; those in a scope are hidden, and would be disconnected"
        return
    yield f"it shows {len(sessions)} sessions (those in a scope are hidden); they will be disconnected:"
    for session_id, name in sessions:
        yield f"  {output.printable(name) or '(no name)'}  {output.printable(session_id)}"
