# SPDX-License-Identifier: Apache-2.0
"""`supervisor`: runs as other programs read them (orchestration spec, sections 11.5 and 11.6)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from agent_intercom.cli.orchestrate.answer import Answer, JsonObject
from agent_intercom.cli.orchestrate.resolving import ways_out
from agent_intercom.cli.output import printable
from agent_intercom.orchestration import places


def supervisor(options: argparse.Namespace) -> Answer:
    """One operation of the Supervisor API."""
    with ways_out(options):
        data = _data(options)
    return Answer(data, _lines(data, ""))


def _data(options: argparse.Namespace) -> JsonObject:
    from agent_intercom.orchestration import runs
    from agent_intercom.orchestration import supervisor as api

    operation: str = options.operation
    if operation == "capabilities":
        return api.capabilities()
    roots = places.roots(os.environ)
    if operation == "sessions":
        return api.sessions(roots)
    session: str = options.session
    if operation == "runs":
        return api.runs_of(session, roots, options.limit)
    entry = runs.find(session, options.run, roots)
    with ways_out(options, entry):
        if operation == "snapshot":
            return api.snapshot_of(entry)
        if operation == "usage":
            return api.usage(entry, options.limit)
        if operation == "events":
            return api.events(entry, options.role, options.cursor, options.limit)
        return api.command(entry, options.role, options.command_id)


def _lines(value: Any, indent: str) -> Iterator[str]:
    """The same facts as text: one line for each, objects and lists indented below their name."""
    members = value.items() if isinstance(value, dict) else ((f"- {n}", item) for n, item in enumerate(value, 1))
    for name, item in members:
        if isinstance(item, dict | list) and item:
            yield f"{indent}{printable(str(name))}:"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{printable(str(name))}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value))
