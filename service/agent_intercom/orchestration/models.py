# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a run are there, as its harness tells (orchestration spec, section 10.4)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from agent_intercom.orchestration import harness
from agent_intercom.orchestration.errors import Refusal

TIMEOUT_S: Final = 20.0
"""For all questions together: whoever called waits, and what calls the caller waits for thirty seconds."""


class Worker(Protocol):
    """What is asked about; `config.plan.PlannedRole` is one."""

    @property
    def provider(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def harness(self) -> str: ...


class ModelCheck(NamedTuple):
    """What a harness says of the model of one role. `available` None: there is nobody to ask. `detail` is one line."""

    role: str
    provider: str
    model: str
    available: bool | None
    detail: str


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def check(
    roles: Mapping[str, Worker],
    program: str,
    environ: Mapping[str, str] | None = None,
    run: Run = subprocess.run,
    clock: Callable[[], float] = time.monotonic,
) -> list[ModelCheck]:
    """Ask the harness of every role for its model, each provider once, and answer in the order of `roles`.

    `program` is Pi's name or path, `environ` what it runs with (None: what this process has). Never raises for what the
    program does: a list that cannot be had is a model that is not available, and the detail says why.
    """
    end = clock() + TIMEOUT_S
    listed: dict[str, frozenset[tuple[str, str]] | str] = {}
    answers = []
    for role, worker in roles.items():
        provider, model = worker.provider, worker.model
        if worker.harness != harness.PI:
            answers.append(ModelCheck(role, provider, model, None, f"harness {worker.harness} is not asked"))
            continue
        if provider not in listed:
            listed[provider] = _catalogue(provider, program, environ, run, end - clock())
        found = listed[provider]
        if isinstance(found, str):
            answers.append(ModelCheck(role, provider, model, False, found))
        elif (provider, model) in found:
            answers.append(ModelCheck(role, provider, model, True, "available"))
        else:
            answers.append(ModelCheck(role, provider, model, False, f"`{program}` does not list {provider}/{model}"))
    return answers


def require(roles: Mapping[str, Worker], program: str, environ: Mapping[str, str] | None = None) -> None:
    """The same, for what cannot go on without. Raises Refusal `model_unavailable` for the first that is not there."""
    for found in check(roles, program, environ):
        if found.available is False:
            text = f"{found.role} model unavailable: {found.detail}; choose another, or say --skip-model-check"
            raise Refusal("model_unavailable", text, found.role)


def parse(output: str) -> frozenset[tuple[str, str]]:
    """Provider and model of each line of Pi's list; its first line is a heading."""
    rows = (line.split() for line in output.splitlines()[1:])
    return frozenset((row[0], row[1]) for row in rows if len(row) >= 2)


def _catalogue(
    provider: str, program: str, environ: Mapping[str, str] | None, run: Run, seconds: float
) -> frozenset[tuple[str, str]] | str:
    """What Pi lists for a provider, or why that cannot be had. Its own words are not quoted: they may hold a key."""
    options: dict[str, Any] = {} if environ is None else {"env": dict(environ)}
    if seconds <= 0:
        return f"`{program}` did not answer in time"
    try:
        done = run(
            [program, "--list-models", provider],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
            # What a directory that nobody trusts yet has to say about Pi does not count.
            cwd="/",
            **options,
        )
    except FileNotFoundError:
        return f"`{program}` is not found in PATH"
    except subprocess.TimeoutExpired:
        return f"`{program}` did not answer in time"
    except OSError:
        return f"`{program}` cannot be run"
    if done.returncode != 0:
        return f"`{program} --list-models` failed with status {done.returncode}"
    return parse(done.stdout)
