# SPDX-License-Identifier: Apache-2.0
"""The real Pi as a worker, with a scripted stand-in for the model and no network (see tests/mockmodel.py).

For a product that finds `pi` on its PATH and launches its workers itself, here in the testbed:

    programs = realpi.programs(bed.root)
    realpi.executable(bed.root / "home/alice/bin", programs)         # a directory with a `pi` in it
    realpi.prepare(bed.root / "home/alice/agent", model.url)         # its PI_CODING_AGENT_DIR

and for a test that launches a worker against a broker of its own:

    launch = realpi.Launch("implementer", token, socket, agent, project, home)
    async with realpi.Pi(launch) as pi:                              # or bed.popen("alice", launch.command())
        await pi.event("agent_end")

The testbed shares the machine's loopback interface, so its users reach the stand-in as the test does.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.contract.nodepeers import (
    CACHE,
    NO_GUARDRAILS,
    Child,
    Event,
    bridge_environment,
    bridge_module,
    node,
    pi_script,
    tools_of,
)

PROVIDER, MODEL = "stand-in", "m"

COPIES = Path("/opt/agent-intercom-tests")
"""Where the programs go in a root file system that does not have the checkout."""


class Programs(NamedTuple):
    """Where Node, the script of Pi and the module of the worker bridge lie for those who run them."""

    node: Path
    pi: Path
    bridge: Path


def programs(root: Path = Path("/")) -> Programs:
    """The programs as they are reached by every user of the root file system `root`; skips where they cannot be had.

    What cannot be reached there, because the checkout is private or not in it at all, is copied into it.
    """
    found = Programs(node(), pi_script(), bridge_module())
    if all(_reachable(program, root) for program in found):
        return found
    copies = root / COPIES.relative_to("/")
    if not copies.exists():
        subprocess.run(["cp", "-a", CACHE, copies], check=True)
    return Programs(*(COPIES / each.relative_to(CACHE) if CACHE in each.parents else each for each in found))


def _reachable(program: Path, root: Path) -> bool:
    path = root / program.relative_to("/")
    inside = [parent for parent in path.parents if root in parent.parents]
    return path.exists() and all(parent.stat().st_mode & 0o001 for parent in inside)


def prepare(agent: Path, url: str) -> Path:
    """Make Pi's own directory, which knows nothing but the stand-in at `url`; returns it."""
    agent.mkdir(parents=True, exist_ok=True)
    model = {"id": MODEL, "contextWindow": 128_000, "maxTokens": 8_000}
    provider = {
        "baseUrl": url,
        "api": "openai-completions",
        "apiKey": "none",
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
        "models": [model],
    }
    settings = {"defaultProvider": PROVIDER, "defaultModel": MODEL}
    (agent / "models.json").write_text(json.dumps({"providers": {PROVIDER: provider}}))
    (agent / "settings.json").write_text(json.dumps(settings))
    # Pi keeps what it has learnt there, and who runs it is not always who made it.
    owner = agent.parent.stat()
    for path in (agent, *agent.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)
    return agent


def executable(directory: Path, of: Programs | None = None) -> Path:
    """Put a program `pi` into a directory, for a PATH; returns the directory."""
    chosen = of or programs()
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "pi"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(chosen.node))} {shlex.quote(str(chosen.pi))} "$@"\n')
    program.chmod(0o755)
    return directory


@dataclass(frozen=True)
class Launch:
    """A worker as section 12.6 launches it over RPC. `agent` is what `prepare` made; `home` takes the sessions.

    Paths are those of the user that runs it. Skips the test where Node or Pi cannot be had.
    """

    role: str
    token: str
    socket: Path
    agent: Path
    project: Path
    home: Path
    generation: int = 1
    guardrails: str = NO_GUARDRAILS
    mode: str = "prune"
    system_prompt: str = "You are a worker."
    """Text, or the path of a file with it."""
    programs: Programs = field(default_factory=programs)
    session: str = field(default_factory=lambda: str(uuid.uuid4()))

    def words(self) -> list[str]:
        """The command line."""
        return [
            *(str(self.programs.node), str(self.programs.pi), "--mode", "rpc"),
            *("--session-dir", str(self.home / "sessions" / self.role), "--session-id", self.session),
            *("--name", f"{self.project.name} {self.role}"),
            *("--provider", PROVIDER, "--model", MODEL, "--thinking", "off", "--approve"),
            *("--tools", ",".join(tools_of(self.role)), "--extension", str(self.programs.bridge)),
            *("--no-skills", "--system-prompt", self.system_prompt),
        ]

    def environment(self) -> dict[str, str]:
        """All variables of the process."""
        return {
            **bridge_environment(self.role, self.token, self.socket, self.generation, self.guardrails, self.mode),
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PI_CODING_AGENT_DIR": str(self.agent),
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }

    def command(self) -> list[str]:
        """The command line with the environment in it, for `bed.popen`; its standard input has to stay open."""
        variables = [f"{name}={value}" for name, value in self.environment().items()]
        return ["env", "-i", "-C", str(self.project), *variables, *self.words()]


class Pi(Child):
    """A running Pi. Its events are those of its RPC mode, named by their `type`."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch.words(), launch.environment(), launch.project)

    @staticmethod
    def name_of(event: Event) -> object:
        return event.get("type", event.get("event"))
