# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` finds out about the machine and the settings, and the way out of what is wrong."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Any, Final, NamedTuple

from agent_intercom.cli.orchestrate import config
from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.cli.orchestrate.preparing import needs_pi
from agent_intercom.cli.place import file_system
from agent_intercom.cli.verdicts import LOG_IN, Check, in_memory, no_manager
from agent_intercom.cli.verdicts import lingering as lingering_check
from agent_intercom.host.manager import Manager, ManagerError, UnitState, lingering
from agent_intercom.orchestration import hosting, runtime
from agent_intercom.orchestration.config.load import Examined
from agent_intercom.orchestration.config.plan import Plan
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.models import ModelCheck
from agent_intercom.orchestration.pipackage import PiPackage

SYSTEMD_FLOOR: Final = 252
TIMER: Final = "orchestrate-prune.timer"
PRUNE: Final = "orchestrate-prune.service"
REAPER: Final = "orchestrate-reaper@{}.service"

_NO_RUN: Final = "0"
"""A unit id of no run: `start` makes longer ones. Its units are loaded to see what their files say, and not started."""

_SLICE: Final = re.compile(r"orchestrate-([a-z0-9]{1,32})\.slice", re.ASCII)

MAX_PROBLEMS: Final = 20
"""How many faults of the settings are told; `config check` tells more."""

_INSTALL: Final = "install the units: `make install`, or `make install-user`"
_LOG_IN: Final = "log in through systemd-logind, or set XDG_RUNTIME_DIR to /run/user/UID"


_EXTERNAL: Final = 'where somebody else starts the workers say so there ([defaults] harness = "external")'

_WORKER: Final = re.compile(r"orchestrate-([a-z0-9]{1,32})-([a-z]+)-g(\d{1,9})\.service", re.ASCII)


class Worker(NamedTuple):
    """Whose the unit of a worker is: its run, its role, and which of the role's workers it is."""

    unit: str
    role: str
    generation: int


def worker(name: str) -> Worker | None:
    """The worker of a service of that name; None: it is another unit's."""
    match = _WORKER.fullmatch(name)
    return Worker(match[1], match[2], int(match[3])) if match else None


class Systemd(NamedTuple):
    """What the user's service manager says; `problem` is why it says nothing. `failed` are names of units.

    `brokers` has one entry for every run that lives, by its unit id; None: systemd has not loaded its service.
    `left` has the number of processes of every run that goes on although nobody listens for it, `workers` the newest
    generation that is loaded of each role, by unit id and role.
    """

    problem: str = ""
    version: str = ""
    lingering: bool | None = None
    units: Mapping[str, Mapping[str, Any] | None] = {}
    failed: Sequence[str] = ()
    brokers: Mapping[str, hosting.BrokerUnit | None] = {}
    left: Mapping[str, int] = {}
    workers: Mapping[tuple[str, str], int] = {}

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


def ask_manager(runtime_dir: str | None) -> Systemd:
    """Everything that is asked of the manager, in one go; without a runtime directory, nothing about runs that live."""
    live = [] if runtime_dir is None else runtime.live(runtime_dir)
    try:
        with Manager() as manager:
            kinds = {name: "Socket" if name.endswith(".socket") else "Service" for name in _run_units()}
            units = {name: manager.unit(name, kind) for name, kind in kinds.items()}
            states = manager.units("orchestrate@*", "orchestrate-*.service", "orchestrate-*.slice")
            return Systemd(
                version=manager.version(),
                lingering=lingering(),
                units={**units, TIMER: manager.unit(TIMER, "Timer")},
                failed=[state.name for state in states if state.active == "failed"],
                brokers={each.unit: hosting.broker(manager, each.unit) for each in live},
                left={} if runtime_dir is None else _left_running(manager, states, runtime_dir),
                workers=_generations(states),
            )
    except ManagerError as error:
        return Systemd(problem=str(error), lingering=lingering())


def _generations(states: Sequence[UnitState]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for each in filter(None, (worker(state.name) for state in states)):
        found[each.unit, each.role] = max(each.generation, found.get((each.unit, each.role), 0))
    return found


def silent_manager() -> Systemd:
    """A manager that does not come to an end with what it has to say."""
    return Systemd(problem="it does not answer in reasonable time", lingering=lingering())


def _left_running(manager: Manager, states: Sequence[UnitState], runtime_dir: str) -> dict[str, int]:
    """How many processes each run has that nobody listens for, by its unit id. One that is just ending has none."""
    ending = [state.name for state in states if state.active == "deactivating"]
    left = {}
    for state in states:
        match = _SLICE.fullmatch(state.name)
        if match is None or any(
            name.startswith((f"orchestrate@{match[1]}.", f"orchestrate-{match[1]}-")) for name in ending
        ):
            continue
        processes = manager.processes(state.name)
        # Looked at afterwards: who starts a run has systemd listen first.
        if processes and runtime.socket_path(runtime_dir, match[1]) not in runtime.listening():
            left[match[1]] = len(processes)
    return left


def manager(found: Systemd) -> Iterator[Check]:
    """Whether there is a manager that can host runs, and whether it outlives the login."""
    if not found.reachable:
        yield no_manager("systemd", found.problem, needed=True)._replace(way_out=_to_a_manager())
    else:
        number = found.version.partition(".")[0].partition(" ")[0]
        old = number.isdecimal() and int(number) < SYSTEMD_FLOOR
        hint = f"runs need systemd {SYSTEMD_FLOOR} or newer" if old else ""
        text = f"the user manager answers, {found.version}"
        yield Check("systemd", "fail" if old else "ok", text, hint, needed=True)
    yield lingering_check(found.lingering, "runs")


def _to_a_manager() -> str:
    """How to come to a manager; the address of another bus hides the one that it is on."""
    if not os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return LOG_IN
    return (
        f"{LOG_IN}; or `unset DBUS_SESSION_BUS_ADDRESS`, where that is a bus without it (`dbus-run-session` makes one)"
    )


def units(found: Systemd) -> Iterator[Check]:
    """Whether the units of runs are installed, loaded as they are now, and lead to programs that are there."""
    if not found.reachable:
        yield no_manager("units", found.problem)
        return
    missing = [name.replace(f"@{_NO_RUN}.", "@.") for name in _run_units() if found.units.get(name) is None]
    if missing:
        yield Check("units", "fail", f"not installed: {', '.join(missing)}", _INSTALL, needed=True)
        return
    if gone := found.missing_programs():
        yield Check("units", "fail", f"cannot be run: {', '.join(gone)}", "install agent-intercom again", needed=True)
    elif not found.current:
        detail = "unit files were changed since they were loaded"
        yield Check("units", "warn", detail, "`systemctl --user daemon-reload`")
    else:
        yield Check("units", "ok", "the units of runs are installed and loaded")


def runtime_directory(environ: Mapping[str, str]) -> Iterator[Check]:
    """Where a run's place and socket are: private, in memory, and not too long."""
    name = "runtime-directory"
    try:
        directory = runtime.runtime_dir(environ)
        found = os.stat(directory)
    except Refusal as refusal:
        yield Check(name, "fail", refusal.text, _LOG_IN, needed=True)
        return
    except OSError:
        yield Check(name, "fail", "XDG_RUNTIME_DIR names no directory", _LOG_IN, needed=True)
        return
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        detail = "XDG_RUNTIME_DIR is another user's, or others may enter it"
        yield Check(name, "fail", detail, _LOG_IN, needed=True)
    elif len(os.fsencode(runtime.socket_path(directory, "0" * 32))) > runtime.MAX_SOCKET_PATH:
        yield Check(name, "fail", "XDG_RUNTIME_DIR is too long for the address of a socket", _LOG_IN, needed=True)
    else:
        yield in_memory(file_system(directory), "the environment of runs, with its keys, is written there")


def settings(found: Examined, program: str) -> Iterator[Check]:
    """Whether the configuration is valid, and which of several files counts."""
    for problem in found.problems[:MAX_PROBLEMS]:
        yield Check("settings", "fail", problem.text, f"correct it; `{program} config check` tells all")
    if len(found.problems) > MAX_PROBLEMS:
        text = f"{len(found.problems) - MAX_PROBLEMS} more faults"
        yield Check("settings", "fail", text, f"`{program} config check` tells them")
    if not found.problems:
        counted = [f"{file.path} ({', '.join(file.counted)})" for file in found.files if file.counted]
        yield Check("settings", "ok", f"valid; what counts: {', '.join(counted) or 'the packaged values'}")
        for file in config.passed_over(found):
            text = f"{file.path} does not count: {config.instead(file)}"
            yield Check("settings-unused", "warn", text, "move what is still wanted to orchestrate.toml")


def programs(made: Plan, program: str | None, package: PiPackage | None) -> Iterator[Check]:
    """What the harnesses of a run need."""
    if not needs_pi(made):
        yield Check("harness", "ok", "every worker is started by somebody else")
        return
    if program is None:
        hint = f"install Pi, or name it in orchestrate.toml ([harness.pi] command), or {_EXTERNAL}"
        yield Check("pi", "fail", f"{made.pi_command} is not in PATH", hint, needed=True)
    else:
        yield Check("pi", "ok", program)
    if package is None:
        hint = "`pi install npm:pi-tmux-orchestrator`, or name its file in orchestrate.toml ([harness.pi] bridge), or "
        hint += _EXTERNAL
        yield Check("worker-bridge", "fail", "the worker bridge of Pi is not there", hint, needed=True)
    else:
        yield Check("worker-bridge", "ok", f"{package.bridge} (version {package.version or 'unknown'})")


def models(checked: Sequence[ModelCheck], program: str) -> Iterator[Check]:
    """Whether the models that a run would have are there."""
    for one in checked:
        if one.available is False:
            hint = f"log in to the provider, or choose another model (`{program} config show`)"
            yield Check("model", "warn", f"{one.role}: {one.provider}/{one.model}: {one.detail}", hint)
    available = [one.role for one in checked if one.available]
    if available:
        yield Check("models", "ok", f"available for {', '.join(available)}")
