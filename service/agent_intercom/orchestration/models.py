# SPDX-License-Identifier: Apache-2.0
"""Whether the models of a run are there, as its harness tells (orchestration spec, section 10.4)."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from agent_intercom.orchestration import harness
from agent_intercom.orchestration.errors import Refusal

TIMEOUT_S: Final = 20.0
"""For all questions together: whoever called waits, and what calls the caller waits for thirty seconds."""

MAX_LIST: Final = 1_048_576
"""Bytes of one list. The longest that there are have some hundred lines."""


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


class Listed(NamedTuple):
    """What a program has said, and how it ended: its status, None where it said more than `MAX_LIST`."""

    output: bytes
    status: int | None


Run = Callable[[Sequence[str], Mapping[str, str] | None, float], Listed]
"""Runs a program with arguments, an environment and a limit of seconds. Raises OSError and TimeoutError."""


def ask(line: Sequence[str], environ: Mapping[str, str] | None, seconds: float) -> Listed:
    """Run a program and read what it says. Where it has not come to an end by itself, all that it started is ended.

    Raises OSError where it cannot be run, TimeoutError where it takes longer than `seconds`.
    """
    end = time.monotonic() + seconds
    with subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=None if environ is None else dict(environ),
        # What a directory that nobody trusts yet has to say about Pi does not count.
        cwd="/",
        start_new_session=True,
    ) as process:
        try:
            output = _read(process, end)
            if len(output) <= MAX_LIST:
                return Listed(output, process.wait(max(end - time.monotonic(), 0)))
            _end(process)
            return Listed(output, None)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise TimeoutError from error
        except BaseException:
            _end(process)
            raise


def _read(process: subprocess.Popen[bytes], end: float) -> bytes:
    """What it says, at most one piece more than `MAX_LIST`. Raises TimeoutError after `end`."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    output = b""
    while len(output) <= MAX_LIST:
        if not poll.poll(max(end - time.monotonic(), 0) * 1_000):
            raise TimeoutError
        piece = os.read(descriptor, 65_536)
        if not piece:
            break
        output += piece
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it started. Nobody has waited for it, so that its number is no other's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def check(
    roles: Mapping[str, Worker],
    program: str,
    environ: Mapping[str, str] | None = None,
    run: Run = ask,
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
    if seconds <= 0:
        return f"`{program}` did not answer in time"
    try:
        output, status = run([program, "--list-models", provider], environ, seconds)
    except FileNotFoundError:
        if shutil.which(program, path=(os.environ if environ is None else environ).get("PATH")) is None:
            return f"`{program}` is not found in PATH"
        return f"`{program}` cannot be run: the interpreter that its first line names is not there"
    except TimeoutError:
        return f"`{program}` did not answer in time"
    except OSError as error:
        return f"`{program}` cannot be run: {os.strerror(error.errno or 0)}"
    if status is None:
        return f"`{program} --list-models` says more than {MAX_LIST // 1024} KiB"
    if status != 0:
        return f"`{program} --list-models` failed with status {status}"
    return parse(output.decode(errors="replace"))
