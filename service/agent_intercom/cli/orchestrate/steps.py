# SPDX-License-Identifier: Apache-2.0
"""How a person does their part before a run goes on. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime

from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.orchestration import standing
from agent_intercom.orchestration.contract import IMPLEMENTER, ROLES
from agent_intercom.orchestration.standing import Awaited


def steps(
    found: Iterable[Awaited],
    session: str,
    program: str,
    *,
    ready: bool,
    down: Collection[str],
    new_id: str,
    printing: Mapping[str, str] | None = None,
    paused: Mapping[str, str] | None = None,
) -> Iterator[JsonObject]:
    """What a person can do next: `why`, and the `command` line.

    `down` are the roles whose worker we host and whose unit has ended; `new_id` is an id that no command has had;
    `printing` has the names of workers of which it is kept what their program prints, by role, `paused` those of
    workers that are paused.
    """
    name = shlex.quote(session)
    found, missing = list(found), [role for role in ROLES if role in down]
    silent = {*missing, *(each.role for each in found if each.what == standing.MESSAGE)}
    for role, worker in (printing or {}).items():
        if role in silent:
            yield _step(f"to read what the program of {role} printed", f"{program} worker logs {worker} --output")
    for role, worker in (paused or {}).items():
        yield _step(f"to have {role} go on", f"{program} worker resume {worker}")
    for role in missing:
        yield _step(f"to start {role} again", f"{program} restart {name} --role {role} --yes")
    for each in found:
        if each.role not in {None, *ROLES}:
            # Whatever that is, no command takes it.
            continue
        role = each.role or "ROLE"
        if each.what == standing.MESSAGE and role not in missing:
            yield _step(f"to answer {role}", f"{program} send {name} --role {role} --message TEXT")
        elif each.what == standing.REDELIVERY:
            yield _step("to hand it over again, once seen", f"{program} redeliver {name} --role {role} --yes")
        elif each.what == standing.CONTINUATION:
            yield _step("to admit one more", continuing(session, program, new_id))
    if ready:
        yield _step("to have something changed", f"{program} send {name} --role {IMPLEMENTER} --message TEXT")
        yield _step("to end the run", f"{program} stop {name} --yes")


def continuing(session: str, program: str, new_id: str) -> str:
    """The command line that admits one more round of repair; `new_id` is an id that no command has had."""
    return f"{program} continue {shlex.quote(session)} --yes --command-id {new_id}"


def _step(why: str, command: str) -> JsonObject:
    return {"why": why, "command": command}


def ago(timestamp: str | None, now_ms: int) -> str:
    """How long ago something was, short; empty where the time cannot be read."""
    try:
        then = datetime.fromisoformat(timestamp or "")
    except ValueError:
        return ""
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0, int(now_ms / 1000 - then.timestamp()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
