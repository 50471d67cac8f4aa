# SPDX-License-Identifier: Apache-2.0
"""`doctor`: everything that a run needs, and everything that runs left; with the way out of what is wrong.

The contract's members of its answer are in orchestration spec, section 11.3; `systemd`, `runs` and `checks` are ours.
Nothing is changed or started by looking.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate import findings, pruning, runfindings
from agent_intercom.cli.orchestrate.answer import ERROR, MISSING_PREREQUISITE, Answer, JsonObject
from agent_intercom.cli.orchestrate.findings import Finding
from agent_intercom.cli.orchestrate.preparing import project_of
from agent_intercom.orchestration import budget, environment, inventory, models, pipackage, places, runs, runtime, tmux
from agent_intercom.orchestration.config.load import Examined, examine
from agent_intercom.orchestration.config.plan import Asked, Plan, plan
from agent_intercom.orchestration.config.shapes import ORCHESTRATE
from agent_intercom.orchestration.errors import Refusal

TMUX_TIMEOUT_S: Final = 2


class _Settings(NamedTuple):
    """The configuration, what a run of the project would be like, and what its harnesses need; None where invalid."""

    examined: Examined
    plan: Plan | None
    problem: str
    program: str | None
    package: pipackage.PiPackage | None
    checked: Sequence[models.ModelCheck]


def doctor(options: argparse.Namespace) -> Answer:
    """`orchestrate doctor`."""
    project = project_of(options.project)
    now = time.time()
    live = runs.live_runs(os.environ)
    systemd = findings.ask_manager([entry.unit for entry in live.entries if entry.unit])
    settings = _look_at_settings(project, options.skip_model_check)
    lying, unreadable = _inventory(now)
    stale = inventory.stale_places(os.environ) if lying is not None else []
    found = list(
        chain(
            findings.manager(systemd),
            findings.units(systemd),
            findings.runtime_directory(os.environ),
            findings.modules(),
            _settings(settings),
            runfindings.live_runs(live, systemd),
            runfindings.failed_units(systemd),
            unreadable,
            _lying(lying, stale, settings, now, systemd),
            runfindings.in_tmux(tmux.hosted(os.environ)),
        )
    )
    error = _error(found)
    data = {
        "commands": _commands(settings),
        "tmux": None if error is not None and error[0] == MISSING_PREREQUISITE else _tmux(os.environ),
        # A model that nobody was asked about is none that is missing, and callers count those that are available.
        "model_checks": [dict(one._asdict()) for one in settings.checked if one.available is not None],
        "model_policy": _model_policy(settings),
        "budget_policy": _budget_policy(settings),
        "paths": _paths(project),
        "systemd": systemd.result(),
        "runs": runfindings.count(live, systemd, lying, stale).result(),
        "checks": [finding.result() for finding in found],
    }
    return Answer(data, _lines(found), error)


def _error(found: Sequence[Finding]) -> tuple[str, str] | None:
    failed = [finding for finding in found if finding.status == "fail"]
    if not failed:
        return None
    missing = [finding for finding in failed if finding.needed]
    first = (missing or failed)[0]
    names = ", ".join(dict.fromkeys(finding.name for finding in failed))
    text = f"failed checks: {names}; {first.name}: {first.detail}. {first.way_out[:1].upper()}{first.way_out[1:]}"
    return MISSING_PREREQUISITE if missing else ERROR, text


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.name) for finding in found)
    for finding in found:
        yield f"{finding.status:<8}{finding.name:<{width}}  {output.printable(finding.detail)}"
        if finding.way_out:
            yield f"{'':<8}{'':<{width}}  -> {output.printable(finding.way_out)}"


def _look_at_settings(project: str, skip_model_check: bool) -> _Settings:
    examined = examine(os.environ, project)
    made, problem, program, package = None, "", None, None
    checked: Sequence[models.ModelCheck] = ()
    if examined.configuration is not None:
        try:
            made = plan(examined.configuration, Asked(project=project))
            given = environment.choose(os.environ, made.passed, made.dropped)
        except Refusal as refusal:
            problem = refusal.text
    if made is not None and not problem:
        program = findings.program_of(made, given)
        if not skip_model_check:
            checked = models.check(made.roles, program or made.pi_command, given)
    package = pipackage.find(os.environ, (made.pi_bridge if made else None) or "")
    return _Settings(examined, made, problem, program, package, checked)


def _settings(found: _Settings) -> Iterator[Finding]:
    yield from findings.settings(found.examined)
    if found.problem:
        yield Finding("settings", "fail", found.problem, "orchestrate config show tells where every value comes from")
    if found.plan is not None:
        yield from findings.programs(found.plan, found.program, found.package)
        if found.program is not None:
            yield from findings.models(found.checked)


def _inventory(now: float) -> tuple[inventory.Inventory | None, list[Finding]]:
    try:
        return inventory.take(os.environ, now, original=False), []
    except Refusal as refusal:
        if refusal.code == "runtime_missing":
            return None, []
        return None, [Finding("state-root", "fail", refusal.text, "make it a directory of your own, mode 0700")]


def _lying(
    lying: inventory.Inventory | None, stale: Sequence[str], settings: _Settings, now: float, systemd: findings.Systemd
) -> Iterator[Finding]:
    if lying is None:
        return
    yield from runfindings.leftovers(lying, stale, runtime.runtime_dir(os.environ))
    if settings.examined.configuration is not None:
        rules = pruning.rules_in(settings.examined.configuration)
        yield from runfindings.old_runs(lying, rules, now, systemd)


def _commands(settings: _Settings) -> list[JsonObject]:
    """The programs that a run of the project needs; callers count those that fail as missing prerequisites."""
    found = {"systemctl": shutil.which("systemctl")}
    if settings.plan is None or findings.needs_pi(settings.plan):
        found["pi"] = settings.program
        found["pi-bridge"] = settings.package.bridge if settings.package else None
    # Nobody needs it here, so that it is not there is no fault.
    if there := shutil.which("tmux"):
        found["tmux"] = there
    return [{"name": name, "status": "ok" if where else "fail", "path": where} for name, where in found.items()]


def _tmux(environ: Mapping[str, str]) -> JsonObject:
    """What tmux is like, for callers of the original; no run of ours has to do with it. No server is started."""

    def asked(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["tmux", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=TMUX_TIMEOUT_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip()[:64] if done.returncode == 0 else None

    version = asked("-V")
    sockets = os.path.join(environ.get("TMUX_TMPDIR") or "/tmp", f"tmux-{os.geteuid()}")
    # Asking makes that directory, and looking is to make nothing.
    may_run = version is not None and (bool(environ.get("TMUX")) or os.path.isdir(sockets))
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
