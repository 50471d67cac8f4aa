# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run are, may do and use, from what is configured and asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from agent_intercom.orchestration import contract, harness
from agent_intercom.orchestration.config import packaged
from agent_intercom.orchestration.config.shapes import Configuration, WorkerRules
from agent_intercom.orchestration.config.sources import PACKAGED, Source, first
from agent_intercom.orchestration.errors import Refusal

INVALID_ARGUMENTS: Final = "invalid_arguments"

RULES: Final[Mapping[str, Any]] = {
    "confine": packaged.CONFINE,
    "required": False,
    "writable": (),
    "network": True,
    "memory_max": None,
    "memory_high": None,
    "tasks_max": packaged.TASKS_MAX,
    "runtime_minutes": None,
}
"""What a worker may do and use, by the names of `plan.PlannedRole` and of `[workers]`, with what is packaged."""


class Hosted(Protocol):
    """A worker as far as it matters which program it is."""

    @property
    def harness(self) -> str: ...
    @property
    def command(self) -> Sequence[str]: ...


def check_commands(roles: Mapping[str, Hosted], flags: Mapping[str, Sequence[str]], needed: bool) -> None:
    """Whether a program that a flag names is called by its role, and every role has one that needs it.

    Raises Refusal `invalid_arguments`. `needed` False: a role may have none, because nothing is started.
    """
    for role, chosen in roles.items():
        if role in flags and chosen.harness != harness.COMMAND:
            text = f"--worker-command: the harness of {role} is {chosen.harness}; say --harness {role}=command, too"
            raise Refusal(INVALID_ARGUMENTS, text, "--worker-command")
        if chosen.harness == harness.COMMAND and not chosen.command and needed:
            text = f"nobody says which program works as {role}: --worker-command {role}=PROGRAM, or in orchestrate.toml"
            raise Refusal(INVALID_ARGUMENTS, f"{text} ([harness.command] command)", "--worker-command")


def command_of(
    role: str, configuration: Configuration, flags: Mapping[str, Sequence[str]], chosen: str
) -> tuple[tuple[str, ...], Source]:
    """The words of the harness `command`; none for another, whatever is configured."""
    if chosen != harness.COMMAND:
        return (), PACKAGED
    found, file = configuration.harness, configuration.own_file
    flag = flags.get(role)
    words, source = first(
        (None if flag is None else tuple(flag), Source("flag", key="--worker-command")),
        (found.role_commands.get(role), Source("role", file, f"harness.command.roles.{role}")),
        (found.command, Source("user", file, "harness.command.command")),
        default=(),
    )
    return words, source


def rules_of(role: str, configuration: Configuration) -> tuple[dict[str, Any], dict[str, Source]]:
    """What a worker may do and use, by the names of `PlannedRole`, and where each comes from.

    That every role is to be confined is said of those that may not write: an implementer is confined by its own table.
    """
    found, file = configuration.workers, configuration.own_file
    own, writes = found.roles.get(role, WorkerRules()), role == contract.IMPLEMENTER
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, packaged_value in RULES.items():
        if name == "confine" and writes:
            every, packaged_value = None, False
        else:
            every = getattr(found.every, name)
        values[name], sources[name] = first(
            (getattr(own, name), Source("role", file, f"workers.roles.{role}.{name}")),
            (every, Source("user", file, f"workers.{name}")),
            default=packaged_value,
        )
    return values, sources
