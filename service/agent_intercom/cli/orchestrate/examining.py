# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` looks at, and what its answer has of it.

Whatever hangs, it comes to an end before whoever calls the command line gives up (orchestration spec, section 11.1):
the manager and the files of runs are asked meanwhile and not waited for longer than `PATIENCE_S`, and programs are
asked one after the other, all with a limit of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from agent_intercom.cli.orchestrate import confining, doctor, findings, pruning, runfindings
from agent_intercom.cli.orchestrate.answer import Answer, JsonObject
from agent_intercom.cli.orchestrate.findings import Systemd
from agent_intercom.cli.orchestrate.preparing import needs_pi, pi_program, project_of
from agent_intercom.cli.orchestrate.runfindings import Lying
from agent_intercom.cli.verdicts import Check
from agent_intercom.orchestration import (
    budget,
    environment,
    harness,
    inventory,
    models,
    pipackage,
    places,
    runs,
    runtime,
    tmux,
)
from agent_intercom.orchestration.config import load
from agent_intercom.orchestration.config.load import Examined
from agent_intercom.orchestration.config.plan import Asked, Plan, plan
from agent_intercom.orchestration.config.shapes import ORCHESTRATE
from agent_intercom.orchestration.errors import Refusal

PATIENCE_S: Final = 24.0
"""Seconds from the beginning until nobody waits any more for what is asked meanwhile."""

TMUX_TIMEOUT_S: Final = 2.0
"""For all questions about tmux together. They come last."""

T = TypeVar("T")


class _Settings(NamedTuple):
    """The configuration, what a run of the project would be like, and what its harnesses need; None where invalid."""

    examined: Examined
    plan: Plan | None
    problem: str
    program: str | None
    package: pipackage.PiPackage | None
    checked: Sequence[models.ModelCheck]


def examine(options: argparse.Namespace, modules: Check) -> Answer:
    """Everything that `orchestrate doctor` tells; `modules` is what it has found out about Python modules."""
    deadline = time.monotonic() + PATIENCE_S
    project, program = project_of(options.project), options.program
    now = time.time()
    asked = _meanwhile(findings.ask_manager, _runtime_dir())
    read = _meanwhile(_files, now)
    settings = _look_at_settings(project, options.skip_model_check)
    in_tmux = tmux.hosted(os.environ)
    systemd = _answer(asked, deadline) or findings.silent_manager()
    lying = _answer(read, deadline) or Lying(None, None, problem="the files of runs cannot be read in reasonable time")
    found = list(
        chain(
            findings.manager(systemd),
            findings.units(systemd),
            findings.workers(systemd),
            findings.runtime_directory(os.environ),
            [modules],
            _settings(settings, program, _without_pi(lying)),
            runfindings.live_runs(lying, systemd),
            runfindings.left_running(lying, systemd, program),
            runfindings.failed_units(lying, systemd, program),
            _lying(lying, settings, now, systemd, program),
            runfindings.in_tmux(in_tmux, program),
        )
    )
    blocked = any(check.failed and check.needed for check in found)
    data = {
        "commands": _commands(settings),
        "tmux": None if blocked else _tmux(os.environ),
        # A model that nobody was asked about is none that is missing, and callers count those that are available.
        "model_checks": [dict(one._asdict()) for one in settings.checked if one.available is not None],
        "model_policy": _model_policy(settings),
        "budget_policy": _budget_policy(settings),
        "paths": _paths(project),
        "systemd": systemd.result(),
        "confinement": confining.machine(),
        "runs": runfindings.count(lying, systemd).result(),
    }
    return doctor.answer(data, found, told=not options.json)


def _meanwhile(ask: Callable[..., T], *arguments: object) -> Future[T]:
    """Have something asked that may hang, and that nobody waits for when the command ends."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(ask(*arguments))
        except BaseException as error:  # for whoever asks for the answer
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def _answer(future: Future[T], deadline: float) -> T | None:
    """What was found out, or None where that takes longer than until `deadline`."""
    try:
        return future.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return None


def _without_pi(lying: Lying) -> bool:
    """Whether runs live, and Pi works in none of them."""
    live = lying.live.entries if lying.live else ()
    records = [role for entry in live for role in entry.manifest.roles.values()]
    return bool(records) and all(role.harness in {harness.COMMAND, harness.EXTERNAL} for role in records)


def _runtime_dir() -> str | None:
    try:
        return runtime.runtime_dir(os.environ)
    except Refusal:
        return None


def _files(now: float) -> Lying:
    directory = _runtime_dir()
    if directory is None:
        # `runtime-directory` says so.
        return Lying(None, None)
    live, units = None, {}
    try:
        live = runs.live_runs(os.environ)
        units = {each.directory: each.unit for each in runtime.live(directory)}
        taken = inventory.take(os.environ, now, original=False)
        return Lying(live, taken, inventory.stale_places(os.environ), units)
    except Refusal as refusal:
        return Lying(live, None, units=units, problem=refusal.text)


def _look_at_settings(project: str, skip_model_check: bool) -> _Settings:
    examined = load.examine(os.environ, project)
    made, problem, program, package = None, "", None, None
    checked: Sequence[models.ModelCheck] = ()
    if examined.configuration is not None:
        try:
            made = plan(examined.configuration, Asked(project=project, need_commands=False))
            given = environment.choose(os.environ, made.passed, made.dropped)
        except Refusal as refusal:
            problem = refusal.text
    if made is not None and not problem:
        program = pi_program(made, given)
        if not skip_model_check:
            checked = models.check(made.roles, program or made.pi_command, given)
    package = pipackage.find(os.environ, (made.pi_bridge if made else None) or "")
    return _Settings(examined, made, problem, program, package, checked)


def _settings(found: _Settings, program: str, without_pi: bool) -> Iterator[Check]:
    yield from findings.settings(found.examined, program)
    if found.problem:
        yield Check("settings", "fail", found.problem, f"`{program} config show` tells where every value comes from")
    if found.plan is not None:
        yield from findings.programs(found.plan, found.program, found.package, without=without_pi)
        if found.program is not None:
            yield from findings.models(found.checked, program)


def _lying(lying: Lying, settings: _Settings, now: float, systemd: Systemd, program: str) -> Iterator[Check]:
    if lying.problem:
        yield Check(
            "state-root",
            "fail",
            lying.problem,
            "make it a directory of your own, mode 0700, on a file system that answers",
        )
    if lying.inventory is None:
        return
    yield from runfindings.leftovers(lying, systemd, runtime.runtime_dir(os.environ), program)
    if settings.examined.configuration is not None:
        rules = pruning.rules_in(settings.examined.configuration)
        yield from runfindings.old_runs(lying.inventory, rules, now, systemd, program)


def _commands(settings: _Settings) -> list[JsonObject]:
    """The programs that a run of the project needs; callers count those that fail as missing prerequisites."""
    found = {"systemctl": shutil.which("systemctl")}
    if settings.plan is None or needs_pi(settings.plan):
        found["pi"] = settings.program
        found["pi-bridge"] = settings.package.bridge if settings.package else None
    # Nobody needs it here, so that it is not there is no fault.
    if there := shutil.which("tmux"):
        found["tmux"] = there
    return [{"name": name, "status": "ok" if where else "fail", "path": where} for name, where in found.items()]


def _tmux(environ: Mapping[str, str]) -> JsonObject:
    """What tmux is like, for callers of the original; no run of ours has to do with it. No server is started."""

    end = time.monotonic() + TMUX_TIMEOUT_S

    def asked(*words: str) -> str | None:
        left = end - time.monotonic()
        if left <= 0:
            return None
        try:
            done = subprocess.run(
                ["tmux", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=left, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip()[:64] if done.returncode == 0 else None

    version = asked("-V")
    # Asking makes a directory for it, and looking is to make nothing.
    may_run = version is not None and os.path.exists(tmux.address(environ))
    keys = asked("show-options", "-s", "-v", "extended-keys") if may_run else None
    return {
        "version": version.removeprefix("tmux ") if version else None,
        "server_running": may_run and asked("list-sessions", "-F", "") is not None,
        "extended_keys": keys or None,
        "extended_keys_format": (asked("show-options", "-s", "-v", "extended-keys-format") if keys else None) or None,
    }


def _model_policy(settings: _Settings) -> JsonObject:
    profile = project_config = None
    if settings.plan is not None:
        profile = msgspec.to_builtins(settings.plan.profile)
        project_config = msgspec.to_builtins(settings.plan.project_config)
    return {**_policy(settings, "models"), "execution_profile": profile, "project_config": project_config}


def _budget_policy(settings: _Settings) -> JsonObject:
    effective: Any = None
    if settings.plan is not None:
        effective = json.loads(budget.to_json(settings.plan.budget_policy))
    return {**_policy(settings, "budget"), "effective": effective}


def _policy(settings: _Settings, what: str) -> JsonObject:
    """The file that counts for models or budgets, or where one would be; and whether one does."""
    counted = next((file.path for file in settings.examined.files if what in file.counted), None)
    own = next((file.path for file in settings.examined.files if file.kind == ORCHESTRATE), None)
    return {"config_path": counted or own, "configured": counted is not None}


def _paths(project: str) -> JsonObject:
    def path(of: Any) -> str | None:
        try:
            return str(of(os.environ))
        except Refusal:
            return None

    return {
        "state_root": path(places.state_root),
        "config": path(places.config_file),
        "model_config": path(places.model_config),
        "budget_config": path(places.budget_config),
        "project": project,
    }
