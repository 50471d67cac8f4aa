# SPDX-License-Identifier: Apache-2.0
"""The Pi package whose extensions a run is worked and watched with: where it is, and how old.

Its worker bridge is what the harness `pi` loads, and its age says what its observers can read (orchestration spec,
section 0.2). The package that called us under its own name comes first, then the one of a configured bridge, then,
where none is configured, the one that Pi has installed for this user. Nothing is run or loaded; looking never fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import path
from typing import Final, NamedTuple

from agent_intercom.orchestration import places
from agent_intercom.orchestration.errors import Refusal

NAME: Final = "pi-tmux-orchestrator"
PACKAGE_ENVIRONMENT: Final = "AGENT_INTERCOM_PI_PACKAGE"
BRIDGE_PATH: Final = path.join("extensions", "orchestrator-worker.js")
"""Where the worker bridge is in the package."""

USAGE_SINCE: Final = (0, 9)
"""The version whose observers know `usage` in a report."""

_MAX_METADATA: Final = 262_144
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?:[.+-]|\Z)", re.ASCII)


class PiPackage(NamedTuple):
    """A package as it lies there. `version` is empty where it cannot be told; `bridge` is an absolute path."""

    directory: str
    version: str
    bridge: str

    @property
    def observer_report_usage(self) -> bool:
        """Whether its observers know `usage` in a report; every version can do without."""
        found = _VERSION.match(self.version)
        return found is not None and (int(found[1]), int(found[2])) >= USAGE_SINCE


def find(environ: Mapping[str, str], bridge: str = "") -> PiPackage | None:
    """The package to use, or None where there is none. `bridge` is the path of the worker bridge that is configured."""
    callers = _absolute(environ.get(PACKAGE_ENVIRONMENT, ""))
    candidates = [(caller, path.join(caller, BRIDGE_PATH)) for caller in callers]
    if bridge:
        # Where it is gone, another in its place would be a surprise.
        candidates += [(path.dirname(path.dirname(module)), module) for module in _absolute(bridge)]
    else:
        candidates += [(place, path.join(place, BRIDGE_PATH)) for place in _installed(environ)]
    for directory, module in candidates:
        if path.isfile(module):
            return PiPackage(directory, _version(path.join(directory, "package.json")), module)
    return None


def _absolute(name: str) -> list[str]:
    return [path.normpath(name)] if path.isabs(name) else []


def _installed(environ: Mapping[str, str]) -> list[str]:
    """Where Pi puts what `pi install npm:NAME` fetches."""
    try:
        return [path.join(places.pi_home(environ), "npm", "node_modules", NAME)]
    except Refusal:
        return []


def _version(name: str) -> str:
    import json  # not needed where nothing is found

    try:
        with open(name, "rb") as file:
            content = file.read(_MAX_METADATA + 1)
        record = json.loads(content) if len(content) <= _MAX_METADATA else None
    except (OSError, ValueError, RecursionError):
        return ""
    version = record.get("version") if isinstance(record, dict) else None
    return version if isinstance(version, str) and len(version) <= 64 and version.isprintable() else ""
