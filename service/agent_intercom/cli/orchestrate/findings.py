# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` finds out about the machine and the settings, and the way out of what is wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.cli.place import MEMORY_FILE_SYSTEMS, file_system
from agent_intercom.host.manager import Manager, ManagerError, lingering
from agent_intercom.orchestration import harness, hosting, runtime
from agent_intercom.orchestration.config.load import Examined
from agent_intercom.orchestration.config.plan import Plan
from agent_intercom.orchestration.config.shapes import ORCHESTRATE
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.models import ModelCheck
from agent_intercom.orchestration.pipackage import PiPackage

Status: TypeAlias = Literal["ok", "warn", "fail"]

SYSTEMD_FLOOR: Final = 252
MODULES: Final = ("msgspec", "apsw", "systemd", "jeepney", "pydantic_settings")
TIMER: Final = "orchestrate-prune.timer"
PRUNE: Final = "orchestrate-prune.service"
REAPER: Final = "orchestrate-reaper@{}.service"

_NO_RUN: Final = "0"
"""A unit id of no run: `start` makes longer ones. Its units are loaded to see what their files say, and not started."""

_INSTALL: Final = "install the units: make install, or make install-user"
_LOG_IN: Final = "log in through systemd-logind, or set XDG_RUNTIME_DIR to /run/user/UID"


class Finding(NamedTuple):
    """One check. `way_out` is empty where there is nothing to do; `needed`: without it no run can be started."""

    name: str
    status: Status
    detail: str
    way_out: str = ""
    needed: bool = False

    def result(self) -> JsonObject:
        """What `--json` prints."""
        return {"name": self.name, "status": self.status, "detail": self.detail, "way_out": self.way_out or None}


class Systemd(NamedTuple):
    """What the user's service manager says; `problem` is why it says nothing. `failed` are names of units.

    `brokers` has one entry for every run that lives, by its unit id; None: systemd has not loaded its service.
    """

    problem: str = ""
    version: str = ""
    lingering: bool | None = None
    units: Mapping[str, Mapping[str, Any] | None] = {}
    failed: Sequence[str] = ()
    brokers: Mapping[str, hosting.BrokerUnit | None] = {}

    @property
    def reachable(self) -> bool:
        """Whether a manager answered."""
        return not self.problem

    @property
    def installed(self) -> bool:
        """Whether it knows the units of runs."""
        return self.reachable and all(self.units.get(name) is not None for name in _run_units())

    @property
    def current(self) -> bool:
        """Whether what it has loaded is what the unit files say now, and their programs are there."""
        changed = any(unit and unit.get("NeedDaemonReload") for unit in self.units.values())
        return self.installed and not changed and not self.missing_programs()

    def missing_programs(self) -> list[str]:
        """The programs of the broker's unit, and of the workers that it stands for, which cannot be run."""
        service = self.units.get(hosting.service_unit(_NO_RUN)) or {}
        commands = service.get("ExecStart")
        if not commands:
            return []
        broker = str(commands[0][0])
        programs = [broker, path.join(path.dirname(broker), hosting.LAUNCHER)]
        return [program for program in programs if not os.access(program, os.X_OK)]

    def result(self) -> JsonObject:
        """What `--json` prints."""
        return {
            "reachable": self.reachable,
            "version": self.version or None,
            "lingering": self.lingering,
            "units_installed": self.installed if self.reachable else None,
            "units_current": self.current if self.reachable else None,
        }


def _run_units() -> tuple[str, ...]:
    return hosting.socket_unit(_NO_RUN), hosting.service_unit(_NO_RUN), REAPER.format(_NO_RUN)


def ask_manager(live: Sequence[str]) -> Systemd:
    """Everything that is asked of the manager, in one go; `live` are the unit ids of the runs that live."""
    try:
        with Manager() as manager:
            kinds = {name: "Socket" if name.endswith(".socket") else "Service" for name in _run_units()}
            units = {name: manager.unit(name, kind) for name, kind in kinds.items()}
            states = manager.units("orchestrate@*", "orchestrate-*.service")
            return Systemd(
                version=manager.version(),
                lingering=lingering(),
                units={**units, TIMER: manager.unit(TIMER, "Timer")},
                failed=[state.name for state in states if state.active == "failed"],
                brokers={unit: hosting.broker(manager, unit) for unit in live},
            )
    except ManagerError as error:
        return Systemd(problem=str(error), lingering=lingering())


def manager(found: Systemd) -> Iterator[Finding]:
    """Whether there is a manager that can host runs, and whether it outlives the login."""
    if not found.reachable:
        detail = f"no user service manager answers: {found.problem}"
        yield Finding("systemd", "fail", detail, "log in through systemd-logind, or loginctl enable-linger", True)
    else:
        number = found.version.partition(".")[0].partition(" ")[0]
        old = number.isdecimal() and int(number) < SYSTEMD_FLOOR
        hint = f"runs need systemd {SYSTEMD_FLOOR} or newer" if old else ""
        yield Finding("systemd", "fail" if old else "ok", f"the user manager answers, {found.version}", hint, True)
    if found.lingering:
        yield Finding("lingering", "ok", "the user manager goes on after logout")
    elif found.lingering is False:
        hint = "loginctl enable-linger, if runs are to go on while nobody is logged in"
        yield Finding("lingering", "warn", "runs end with the last logout", hint)


def units(found: Systemd) -> Iterator[Finding]:
    """Whether the units of runs are installed, loaded as they are now, and lead to programs that are there."""
    if not found.reachable:
        return
    missing = [name.replace(f"@{_NO_RUN}.", "@.") for name in _run_units() if found.units.get(name) is None]
    if missing:
        yield Finding("units", "fail", f"not installed: {', '.join(missing)}", _INSTALL, True)
        return
    if gone := found.missing_programs():
        yield Finding("units", "fail", f"cannot be run: {', '.join(gone)}", "install agent-intercom again", True)
    elif not found.current:
        detail = "unit files were changed since they were loaded"
        yield Finding("units", "warn", detail, "systemctl --user daemon-reload")
    else:
        yield Finding("units", "ok", "the units of runs are installed and loaded")


def runtime_directory(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Where a run's place and socket are: private, in memory, and not too long."""
    name = "runtime-directory"
    try:
        directory = runtime.runtime_dir(environ)
        found = os.stat(directory)
    except Refusal as refusal:
        yield Finding(name, "fail", refusal.text, _LOG_IN, True)
        return
    except OSError:
        yield Finding(name, "fail", "XDG_RUNTIME_DIR names no directory", _LOG_IN, True)
        return
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        detail = "XDG_RUNTIME_DIR is another user's, or others may enter it"
        yield Finding(name, "fail", detail, _LOG_IN, True)
    elif len(os.fsencode(runtime.socket_path(directory, "0" * 32))) > runtime.MAX_SOCKET_PATH:
        yield Finding(name, "fail", "XDG_RUNTIME_DIR is too long for the address of a socket", _LOG_IN, True)
    elif file_system(directory) not in MEMORY_FILE_SYSTEMS:
        detail = "XDG_RUNTIME_DIR is not in memory: the environment of runs, with its keys, is written to a disk"
        yield Finding(name, "warn", detail, _LOG_IN)
    else:
        yield Finding(name, "ok", "XDG_RUNTIME_DIR is private and in memory")


def modules() -> Iterator[Finding]:
    """The Python modules that runs need."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        hint = "install them for this Python, or agent-intercom again with BUNDLE=1"
        yield Finding("modules", "fail", f"missing: {', '.join(missing)}", hint, True)
    else:
        yield Finding("modules", "ok", "every Python module is there")


def settings(found: Examined) -> Iterator[Finding]:
    """Whether the configuration is valid, and which of several files counts."""
    for problem in found.problems:
        yield Finding("settings", "fail", problem.text, "correct it; orchestrate config check tells all")
    if not found.problems:
        counted = [f"{file.path} ({', '.join(file.counted)})" for file in found.files if file.counted]
        yield Finding("settings", "ok", f"valid; what counts: {', '.join(counted) or 'the packaged values'}")
    own_counts = any(file.kind == ORCHESTRATE and file.counted for file in found.files)
    for file in found.files:
        if own_counts and file.kind != ORCHESTRATE and file.present and not file.counted:
            detail = f"{file.path} does not count: orchestrate.toml speaks of the same"
            yield Finding("settings-unused", "warn", detail, "move what is still wanted to orchestrate.toml")


def needs_pi(made: Plan) -> bool:
    """Whether a run has a worker that is Pi."""
    return any(chosen.harness == harness.PI for chosen in made.roles.values())


def program_of(made: Plan, given: Mapping[str, str]) -> str | None:
    """The absolute path of Pi, as workers would find it."""
    found = shutil.which(made.pi_command, path=given.get("PATH", ""))
    return path.abspath(found) if found else None


def programs(made: Plan, program: str | None, package: PiPackage | None) -> Iterator[Finding]:
    """What the harnesses of a run need."""
    if not needs_pi(made):
        yield Finding("harness", "ok", "every worker is started by somebody else")
        return
    if program is None:
        hint = "install Pi, or name it in orchestrate.toml ([harness.pi] command)"
        yield Finding("pi", "fail", f"{made.pi_command} is not in PATH", hint, True)
    else:
        yield Finding("pi", "ok", program)
    if package is None:
        hint = "pi install npm:pi-tmux-orchestrator, or name its file in orchestrate.toml ([harness.pi] bridge)"
        yield Finding("worker-bridge", "fail", "the worker bridge of Pi is not there", hint, True)
    else:
        yield Finding("worker-bridge", "ok", f"{package.bridge} (version {package.version or 'unknown'})")


def models(checked: Sequence[ModelCheck]) -> Iterator[Finding]:
    """Whether the models that a run would have are there."""
    for one in checked:
        if one.available is False:
            hint = "log in to the provider, or choose another model (orchestrate config show)"
            yield Finding("model", "warn", f"{one.role}: {one.provider}/{one.model}: {one.detail}", hint)
    available = [one.role for one in checked if one.available]
    if available:
        yield Finding("models", "ok", f"available for {', '.join(available)}")
