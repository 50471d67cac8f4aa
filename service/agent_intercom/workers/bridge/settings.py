# SPDX-License-Identifier: Apache-2.0
"""What a bridge is told by its environment, and the environment of what it runs (orchestration spec, section 12.1)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from os import path
from typing import Final, NamedTuple

from agent_intercom.orchestration.budget import ASSIGNMENT_METRICS, LEVELS, Number
from agent_intercom.orchestration.contract import HEX32, ROLES
from agent_intercom.workers.contract import (
    INCARNATION_ENVIRONMENT,
    READ_ONLY_ENVIRONMENT,
    SCRATCH_ENVIRONMENT,
    STATE_ENVIRONMENT,
    Code,
)
from agent_intercom.workers.errors import WorkerError

SOCKET_ENVIRONMENT: Final = "AGENT_INTERCOM_BRIDGE_SOCKET"
FILE_ENVIRONMENT: Final = "AGENT_INTERCOM_ASSIGNMENT_FILE"
ID_ENVIRONMENT: Final = "AGENT_INTERCOM_ASSIGNMENT_ID"
KIND_ENVIRONMENT: Final = "AGENT_INTERCOM_ASSIGNMENT_KIND"
ROUND_ENVIRONMENT: Final = "AGENT_INTERCOM_ROUND"
ROLE_ENVIRONMENT: Final = "AGENT_INTERCOM_ROLE"
MESSAGES_ENVIRONMENT: Final = "AGENT_INTERCOM_MESSAGES"
CHECKOUT_ENVIRONMENT: Final = "AGENT_INTERCOM_CHECKOUT"

_PREFIX: Final = "PI_TMUX_ORCHESTRATOR_"
_MAX_GENERATION: Final = 999_999_999


class Settings(NamedTuple):
    """A bridge's role and broker, where it keeps what it must, and what it runs.

    `thresholds` are the guardrails by level and metric. `managed`: the worker service watches over it.
    """

    role: str
    token: str
    socket: str
    generation: int
    thresholds: Mapping[str, Mapping[str, Number]]
    state: str
    scratch: str
    project: str
    read_only: bool
    managed: bool
    command: Sequence[str]
    environment: Mapping[str, str]

    def __repr__(self) -> str:
        return "Settings()"


def read(environ: Mapping[str, str], command: Sequence[str], project: str) -> Settings:
    """What `environ` says. `project` is the directory in which the command works.

    Raises WorkerError `invalid_request` with the variable that is missing or wrong, without its value.
    """
    role = _told(environ, f"{_PREFIX}ROLE")
    if role not in ROLES:
        raise _wrong(f"{_PREFIX}ROLE", "is no role")
    token = _told(environ, f"{_PREFIX}TOKEN")
    if HEX32.fullmatch(token) is None:
        raise _wrong(f"{_PREFIX}TOKEN", "is no token")
    generation = _told(environ, f"{_PREFIX}GENERATION")
    if not (generation.isascii() and generation.isdecimal() and 1 <= int(generation[:10]) <= _MAX_GENERATION):
        raise _wrong(f"{_PREFIX}GENERATION", "is no number from 1 on")
    state = _told(environ, STATE_ENVIRONMENT)
    if not path.isabs(state):
        raise _wrong(STATE_ENVIRONMENT, "is no absolute path")
    return Settings(
        role=role,
        token=token,
        socket=_told(environ, f"{_PREFIX}SOCKET"),
        generation=int(generation),
        thresholds=_thresholds(environ.get(f"{_PREFIX}GUARDRAILS", "{}")),
        state=state,
        scratch=environ.get(SCRATCH_ENVIRONMENT) or path.join(state, "scratch"),
        project=project,
        read_only=environ.get(READ_ONLY_ENVIRONMENT) == "1",
        managed=bool(environ.get(INCARNATION_ENVIRONMENT)),
        command=tuple(command),
        environment=inherited(environ),
    )


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What of its own environment the bridge hands on: everything but what would let somebody else be the worker."""
    return {name: value for name, value in environ.items() if not name.startswith((_PREFIX, STATE_ENVIRONMENT))}


def _thresholds(text: str) -> dict[str, dict[str, Number]]:
    """The thresholds of `budget.guardrails`."""
    try:
        told = json.loads(text)
        found = {level: dict(told.get(level, {})) for level in LEVELS}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _wrong(f"{_PREFIX}GUARDRAILS", "cannot be read") from error
    for thresholds in found.values():
        for metric, limit in thresholds.items():
            if metric not in ASSIGNMENT_METRICS or type(limit) not in {int, float} or not limit > 0:
                raise _wrong(f"{_PREFIX}GUARDRAILS", "has a threshold that is none")
    return found


def _told(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise _wrong(name, "is not set: `orchestrate start` gives it to the workers that it hosts")
    return value


def _wrong(name: str, what: str) -> WorkerError:
    return WorkerError(Code.INVALID, f"{name} {what}", name)


def directory_reference(directory: str) -> tuple[int, str]:
    """A descriptor of `directory` and a short path to it: an address of a socket has room for 107 bytes (unix(7))."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return descriptor, f"/proc/self/fd/{descriptor}"
