# SPDX-License-Identifier: Apache-2.0
"""What a worker is: the programs of each harness, their arguments and variables (orchestration spec, 12.1 and 12.6).

Pure: nothing is read, and a name is not looked up anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import path
from typing import Final

from agent_intercom.orchestration import budget, policies

PI: Final = "pi"
COMMAND: Final = "command"
EXTERNAL: Final = "external"
HARNESSES: Final = frozenset({PI, COMMAND, EXTERNAL})
"""`pi` is the real Pi with its worker bridge, and `command` any program, called for each assignment by our bridge; both
are hosted by us. An `external` worker is started by somebody else."""

PROGRAM: Final = "pi"
PI_BRIDGE: Final = "pi-bridge"
PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {PI: (PROGRAM, PI_BRIDGE), COMMAND: (), EXTERNAL: ()}
"""What a harness needs, by the names in `runtime.RunPlace.programs`: Pi itself, and its module `BRIDGE_FILE`."""

BRIDGE_FILE: Final = "orchestrator-worker.js"

REPORT_TOOL: Final = "orchestrator_report"
WRITER_TOOLS: Final = "read,bash,edit,write,grep,find,ls"

_PREFIX: Final = "PI_TMUX_ORCHESTRATOR_"


def arguments(
    *,
    program: str,
    bridge: str,
    role: str,
    project: str,
    coord: str,
    provider: str,
    model: str,
    thinking: str,
    tools: str | None,
    session_dir: str,
    session_id: str,
    skills: Sequence[str],
    approve: bool,
) -> list[str]:
    """The command line of Pi as the worker `role`, its own name first.

    `tools` is what the manifest says, where None stands for a writer's; `skills` are the paths of files. There is no
    prompt among them: work comes through the broker.
    """
    line = [program, "--mode", "rpc", "--session-dir", session_dir]
    line += ["--name", f"{path.basename(project)} {role}", "--session-id", session_id]
    line += ["--provider", provider, "--model", model, "--thinking", thinking]
    line += ["--approve"] if approve else []
    line += ["--tools", f"{tools or WRITER_TOOLS},{REPORT_TOOL}", "--extension", bridge]
    line += ["--no-skills", "--system-prompt", system_prompt_file(coord, role)]
    for skill in skills:
        line += ["--skill", skill]
    return line


def variables(
    *,
    role: str,
    token: str,
    socket: str,
    generation: int,
    policy: budget.Policy,
    context_mode: str = policies.PRUNE,
) -> dict[str, str]:
    """What the bridge of a worker reads, Pi's as well as ours. `context_mode` is one of `policies.CONTEXT_MODES`."""
    return {
        f"{_PREFIX}ROLE": role,
        f"{_PREFIX}TOKEN": token,
        f"{_PREFIX}SOCKET": socket,
        f"{_PREFIX}GENERATION": str(generation),
        f"{_PREFIX}GUARDRAILS": budget.guardrails(policy),
        f"{_PREFIX}CONTEXT_MODE": context_mode,
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }


def system_prompt_file(coord: str, role: str) -> str:
    """Where the system prompt of a role is written for its worker, in the run's directory `coord`."""
    return path.join(coord, f"{role}.system.md")


def programs(harnesses: Sequence[str]) -> list[str]:
    """The names of all that these harnesses need, each once."""
    return list(dict.fromkeys(name for harness in harnesses for name in PROGRAMS[harness]))
