# SPDX-License-Identifier: Apache-2.0
"""The whole environment of a worker, made in this one place (managed-workers spec, section 4).

What a worker is given comes from whoever asks for it and never from the process that forks it. What belongs to one
session, worker, run or service is taken out of that, by the same list that decides what leaves a shell
(`orchestration.environment.NEVER`), and what belongs to this worker is put in. So a start, a restart, a resumption, an
adoption and a worker of a worker have the same scope id, whatever the user manager's own environment says. Nothing is
read but where `orchestrate` lies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import path
from typing import Final, NamedTuple

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT, SCOPE_PATTERN
from agent_intercom.orchestration import environment
from agent_intercom.workers.contract import (
    GENERATION_ENVIRONMENT,
    INCARNATION_ENVIRONMENT,
    READ_ONLY_ENVIRONMENT,
    SCRATCH_ENVIRONMENT,
    WORKER_ENVIRONMENT,
    Code,
)
from agent_intercom.workers.errors import WorkerError

_COMMAND: Final = "orchestrate"
_TEMPORARY: Final = ("TMPDIR", "TMP", "TEMP")
_CACHE: Final = "XDG_CACHE_HOME"
_UNCONFINING: Final = ("DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "CONTAINER_HOST")
"""Ways to somebody who would do for a confined worker what it may not; the kernel refuses no such connection."""


class Identity(NamedTuple):
    """Which worker it is: the id that it keeps, this start of it, and the number of that, from 1 on."""

    worker: str
    incarnation: str
    generation: int


def build(
    given: Mapping[str, str],
    *,
    scope: str | None,
    identity: Identity,
    scratch: str,
    confined: bool,
    read_only: bool | None = None,
    added: Mapping[str, str] | None = None,
    commands: str | None = None,
) -> dict[str, str]:
    """All variables of a worker.

    `given` is what whoever asked for the worker chose, `scope` the private scope id (None: unscoped, whatever `given`
    says), `scratch` its own directory, `added` what its harness needs, such as the address and the token of a bridge;
    `commands` is the directory of `orchestrate`, for a worker that would not find it.
    A confined worker finds its temporary files and its caches there; `read_only` (as a rule: whether it is confined)
    is whether it may not write where it works.

    Raises WorkerError `invalid_request` for a scope id that is none, without the value.
    """
    if scope is not None and SCOPE_PATTERN.fullmatch(scope) is None:
        raise WorkerError(Code.INVALID, "the scope id is not valid", SCOPE_ENVIRONMENT)
    made = with_command(environment.of_nobody(_left_behind(given)), commands)
    if confined:
        for name in _UNCONFINING:
            made.pop(name, None)
        made |= dict.fromkeys(_TEMPORARY, scratch)
        made[_CACHE] = path.join(scratch, "cache")
    if confined if read_only is None else read_only:
        # `git status` would refresh the index of a worktree that cannot be written.
        made |= {"GIT_OPTIONAL_LOCKS": "0", READ_ONLY_ENVIRONMENT: "1"}
    made |= {
        WORKER_ENVIRONMENT: identity.worker,
        INCARNATION_ENVIRONMENT: identity.incarnation,
        GENERATION_ENVIRONMENT: str(identity.generation),
        SCRATCH_ENVIRONMENT: scratch,
    }
    if scope is not None:
        made[SCOPE_ENVIRONMENT] = scope
    return made | dict(added or {})


def commands_of(directory: str) -> str | None:
    """The directory with the `orchestrate` of an installation; None where it cannot be told.

    `directory` is where one of its programs lies: a command itself, or a launcher in `lib/agent-intercom`.
    """
    for found in (directory, path.normpath(path.join(directory, "../../bin"))):
        if _executable(path.join(found, _COMMAND)):
            return found
    return None


def finds_command(environ: Mapping[str, str]) -> bool:
    """Whether who has this environment finds `orchestrate`, wherever it works."""
    return any(path.isabs(name) and _executable(path.join(name, _COMMAND)) for name in _search(environ))


def with_command(environ: Mapping[str, str], commands: str | None) -> dict[str, str]:
    """`environ`, with the directory `commands` behind those of PATH where `orchestrate` is in none of them.

    Without a PATH nothing is added: each program has places of its own then.
    """
    if commands is None or "PATH" not in environ or finds_command(environ):
        return dict(environ)
    return {**environ, "PATH": os.pathsep.join([*_search(environ), commands])}


def _search(environ: Mapping[str, str]) -> list[str]:
    return environ.get("PATH", os.defpath).split(os.pathsep)


def _executable(name: str) -> bool:
    return path.isfile(name) and os.access(name, os.X_OK)


def _left_behind(given: Mapping[str, str]) -> dict[str, str]:
    """Without the places in the scratch directory of the worker that asks: they go with it."""
    scratch = given.get(SCRATCH_ENVIRONMENT, "")
    if not scratch:
        return dict(given)
    return {
        name: value
        for name, value in given.items()
        if name not in {*_TEMPORARY, _CACHE} or path.commonprefix((f"{scratch}/", f"{value}/")) != f"{scratch}/"
    }
