# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` finds out about the machine and the settings, and the way out of what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Any, Final, NamedTuple

from agent_intercom.cli.orchestrate import config, limiting
from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.cli.orchestrate.preparing import needs_pi, program_fault
from agent_intercom.cli.place import file_system
from agent_intercom.cli.verdicts import LOG_IN, Check, State, in_memory, no_manager
from agent_intercom.cli.verdicts import lingering as lingering_check
from agent_intercom.host import cgroups
from agent_intercom.host.manager import CALL_TIMEOUT, Manager, ManagerError, UnitState, lingering
from agent_intercom.orchestration import hosting, runtime
from agent_intercom.orchestration.config.load import Examined
from agent_intercom.orchestration.config.plan import Plan
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.harness import COMMAND
from agent_intercom.orchestration.models import ModelCheck
from agent_intercom.orchestration.pipackage import PiPackage
from agent_intercom.workers import confinement, hosted, limits
from agent_intercom.workers.contract import SERVICE_UNIT, SLICE_UNIT, SOCKET_UNIT, UNIT
from agent_intercom.workers.spec import Confinement

SYSTEMD_FLOOR: Final = 252
TIMER: Final = "orchestrate-prune.timer"
PRUNE: Final = "orchestrate-prune.service"
REAPER: Final = "orchestrate-reaper@{}.service"

_NO_RUN: Final = "0"
"""A unit id of no run: `start` makes longer ones. Its units are loaded to see what their files say, and not started."""

_SLICE: Final = re.compile(r"orchestrate-([a-z0-9]{1,32})\.slice", re.ASCII)

_UP: Final = frozenset({"active", "activating", "deactivating"})

_CONTROLLERS: Final = frozenset(limits.CONTROLLERS.values())

_WHOLE_ABI: Final = 3
"""The ABI of Landlock from which on nothing that changes a file is left out."""

MAX_PROBLEMS: Final = 20
"""How many faults of the settings are told; `config check` tells more."""

_INSTALL: Final = "install the units: `make install`, or `make install-user`"
_LOG_IN: Final = "log in through systemd-logind, or set XDG_RUNTIME_DIR to /run/user/UID"


_OTHERS: Final = (
    "where programs of another kind work, or somebody else starts the workers, say so there ([defaults] harness = "
    '"command" or "external"), or to `start` (--harness ROLE=command --worker-command ROLE=PROGRAM)'
)


class Systemd(NamedTuple):
    """What the user's service manager says; `problem` is why it says nothing. `failed` are names of units.

    `brokers` has one entry for every run that lives, by its unit id; None: systemd has not loaded its service.
    `left` has the number of processes of every run that goes on although nobody listens for it, `workers` the workers
    of every run that lives, by its unit id. `service` is the state of the worker service, of its socket and of itself;
    `freezer` whether what is in a control group can be paused, `controllers` which of them the manager has (`kernel`:
    and the kernel; both None where that cannot be seen), `oom_policy` whether scope units have OOMPolicy=. `strays` is
    how many workers live that the worker service does not know of, `unwritten` the code of what prevents it
    from writing down what happens, `unusable` why it cannot even read what there is.
    """

    problem: str = ""
    version: str = ""
    lingering: bool | None = None
    units: Mapping[str, Mapping[str, Any] | None] = {}
    failed: Sequence[str] = ()
    brokers: Mapping[str, hosting.BrokerUnit | None] = {}
    left: Mapping[str, int] = {}
    workers: Mapping[str, Sequence[hosted.WorkerUnit]] = {}
    service: Sequence[UnitState] = ()
    freezer: bool | None = None
    controllers: frozenset[str] | None = None
    kernel: frozenset[str] | None = None
    oom_policy: bool | None = None
    strays: int = 0
    unwritten: str = ""
    unusable: str = ""

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
        """The programs of the units, and of the workers that the worker service starts, which cannot be run."""
        programs = []
        for name in (hosting.service_unit(_NO_RUN), SERVICE_UNIT):
            commands = (self.units.get(name) or {}).get("ExecStart")
            programs += [str(commands[0][0])] if commands else []
        if len(programs) == 2:
            programs += [path.join(path.dirname(programs[1]), each) for each in hosted.PROGRAMS]
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
    of_run = hosting.socket_unit(_NO_RUN), hosting.service_unit(_NO_RUN), REAPER.format(_NO_RUN)
    return (*of_run, SOCKET_UNIT, SERVICE_UNIT)


def ask_manager(runtime_dir: str | None) -> Systemd:
    """Everything that is asked of the manager, in one go; without a runtime directory, nothing about runs that live."""
    live = [] if runtime_dir is None else runtime.live(runtime_dir)
    try:
        with Manager() as manager:
            kinds = {name: "Socket" if name.endswith(".socket") else "Service" for name in _run_units()}
            units = {name: manager.unit(name, kind) for name, kind in kinds.items()}
            states = manager.units(
                "orchestrate@*", "orchestrate-*.service", "orchestrate-*.socket", "orchestrate-*.slice"
            )
            return Systemd(
                version=manager.version(),
                lingering=lingering(),
                units={**units, TIMER: manager.unit(TIMER, "Timer")},
                failed=[state.name for state in states if state.active == "failed"],
                brokers={each.unit: hosting.broker(manager, each.unit) for each in live},
                left={} if runtime_dir is None else _left_running(manager, states, runtime_dir),
                workers={
                    each.unit: hosted.workers(manager, runtime_dir, each.unit)
                    for each in live
                    if runtime_dir is not None
                },
                service=[state for state in states if state.name in {SOCKET_UNIT, SERVICE_UNIT}],
                freezer=_freezer(manager.control_group()),
                controllers=cgroups.controllers(manager.control_group()),
                kernel=cgroups.controllers("/"),
                oom_policy=_oom_policy(manager),
                **({} if runtime_dir is None else _known(manager, states, runtime_dir)),
            )
    except ManagerError as error:
        return Systemd(problem=str(error), lingering=lingering())


def _freezer(control_group: str) -> bool | None:
    """Whether the kernel freezes control groups (cgroups(7), since 5.2); None where they cannot be seen."""
    directory = cgroups.directory(control_group)
    return None if directory is None else path.exists(path.join(directory, "cgroup.freeze"))


def _oom_policy(manager: Manager) -> bool | None:
    """Whether scope units have OOMPolicy= (systemd 253, and older ones that were given it); None: it is not told."""
    scope = manager.unit("init.scope", "Scope")
    return None if scope is None else "OOMPolicy" in scope


def _known(manager: Manager, states: Sequence[UnitState], runtime_dir: str) -> dict[str, Any]:
    """What the worker service says of workers and of its registry; it is asked where it runs, and not started."""
    alive = [state for state in manager.units("worker-*.scope") if UNIT.fullmatch(state.name) and state.active in _UP]
    service = next((state.active for state in states if state.name == SERVICE_UNIT), "inactive")
    if service == "inactive":
        # It has ended, which it does not while one lives that it knows of.
        return {"strays": len(alive)}
    if service != "active":
        return {}
    from agent_intercom.workers.client import Client, socket_path
    from agent_intercom.workers.errors import WorkerError

    try:
        with Client(socket_path(runtime_dir)) as client:
            health = client.request("health", {}, timeout=CALL_TIMEOUT)
    except WorkerError:
        return {}
    told = {name: str(health.get(key) or "") for name, key in (("unwritten", "store"), ("unusable", "unusable"))}
    return {"strays": int(health.get("strays") or 0), **told}


def silent_manager() -> Systemd:
    """A manager that does not come to an end with what it has to say."""
    return Systemd(problem="it does not answer in reasonable time", lingering=lingering())


def _left_running(manager: Manager, states: Sequence[UnitState], runtime_dir: str) -> dict[str, int]:
    """How many processes each run has that nobody listens for, by its unit id. One that is just ending has none."""
    ending = [state.name for state in states if state.active == "deactivating"]
    left = {}
    for state in states:
        match = _SLICE.fullmatch(state.name)
        if (
            match is None
            or state.name == SLICE_UNIT
            or any(name.startswith((f"orchestrate@{match[1]}.", f"orchestrate-{match[1]}-")) for name in ending)
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


def _confinement(means: confinement.Means) -> Check:
    words = ", ".join(confinement.plan(Confinement((), False), means))
    if means.abi < 1:
        text = "the kernel has no Landlock, or it is switched off: roles that may not write are kept from it by nobody"
        return Check("confinement", "warn", text, "Linux 5.13 or newer, with landlock in /sys/kernel/security/lsm")
    text = f"Landlock with ABI {means.abi}; of a confined worker without network the kernel enforces: {words}"
    hints = []
    if means.abi < _WHOLE_ABI:
        hints.append("a newer kernel (6.2) also refuses to truncate files")
    if not means.filters:
        hints.append("system calls are filtered where libseccomp.so.2 is installed and the kernel has seccomp")
    return Check("confinement", "warn" if hints else "ok", text, "; ".join(hints))


def workers(found: Systemd) -> Iterator[Check]:
    """What the kernel keeps workers from, whether they can be paused, and how the service is that starts them."""
    yield _confinement(confinement.means())
    if not found.reachable or found.units.get(SERVICE_UNIT) is None:
        return
    yield from _limits(found)
    states = {state.name: state.active for state in found.service}
    failed = [name for name, active in states.items() if active == "failed"]
    if failed:
        hint = f"`journalctl --user -x -u {failed[0]}` tells why; then: `systemctl --user reset-failed {failed[0]}`"
        yield Check("worker-service", "fail", f"{failed[0]} has failed: no worker can be started", hint)
    elif states.get(SOCKET_UNIT) != "active":
        text = f"{SOCKET_UNIT} does not listen; whoever starts a run has it listen"
        yield Check("worker-service", "ok", text)
    else:
        up = "runs" if states.get(SERVICE_UNIT) == "active" else "is started by whoever connects"
        yield Check("worker-service", "ok", f"{SOCKET_UNIT} listens, and the service {up}")
    if found.unusable:
        text = f"the registry cannot be used ({found.unusable}): no worker is started, shown or stopped; they go on"
        hint = "put that right: the worker service looks again every few seconds ($XDG_STATE_HOME/agent-intercom)"
        yield Check("worker-registry", "fail", text, hint)
    elif found.unwritten:
        text = f"the registry cannot be written ({found.unwritten}): workers go on and can be stopped, none is started"
        hint = "make room in, or mend, the state directory ($XDG_STATE_HOME/agent-intercom): nothing else is needed"
        yield Check("worker-registry", "fail", text, hint)
    if found.strays:
        many = f"{found.strays} workers live" if found.strays > 1 else "1 worker lives"
        hint = "`orchestrate worker cleanup` shows what they are, and how to end them"
        yield Check("stray-workers", "warn", f"{many} of which the worker service does not know", hint)
    if found.oom_policy is False:
        text = "this systemd knows no OOMPolicy= for scope units: what of a worker ends for lack of memory is not said"
        yield Check("oom-policy", "warn", text, "systemd 253 or newer")
    if found.freezer is False:
        yield Check("freezer", "warn", "the kernel freezes no control groups: workers cannot be paused", "Linux 5.2")
    elif found.freezer:
        yield Check("freezer", "ok", "workers can be paused")


def _limits(found: Systemd) -> Iterator[Check]:
    """Whether limits of workers are limits; systemd takes them all the same and says nothing."""
    if found.controllers is None:
        return
    lacks = sorted(_CONTROLLERS - found.controllers)
    if not lacks:
        yield Check("limits", "ok", "limits of memory and of tasks are enforced")
        return
    gone = [name for name in lacks if found.kernel is not None and name not in found.kernel]
    hint = "`sudo systemctl edit user@.service`: Delegate=yes below [Service]; then log in anew"
    if gone:
        hint = f"the kernel, or whoever runs this container, has to give it (cgroup_enable={gone[0]}; cgroups(7))"
    yield Check("limits", "warn", f"{limiting.lacking(lacks)}: such limits of workers are not enforced", hint)


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
    elif path.realpath(directory).startswith(f"{confinement.SHARED_MEMORY}/"):
        text = f"XDG_RUNTIME_DIR is below {confinement.SHARED_MEMORY}: confined workers may change what is in it"
        yield Check(name, "warn", text, f"{_LOG_IN}; or a directory elsewhere that is yours alone")
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


def programs(made: Plan, program: str | None, package: PiPackage | None, *, without: bool) -> Iterator[Check]:
    """What the harnesses of a run need. `without`: runs live, and none of them has to do with Pi."""
    for role, chosen in made.roles.items():
        if chosen.harness == COMMAND and (fault := _command_fault(chosen.command)):
            hint = "correct it in orchestrate.toml ([harness.command]), or say --worker-command when a run is started"
            yield Check("command", "warn", f"{role}: {fault}", hint)
    if not needs_pi(made):
        yield Check("harness", "ok", "no worker is Pi")
        return
    missing: State = "warn" if without else "fail"
    if program is None:
        hint = f"install Pi, or name it in orchestrate.toml ([harness.pi] command), or {_OTHERS}"
        yield Check("pi", missing, f"{made.pi_command} is not in PATH", hint, needed=True)
    else:
        yield Check("pi", "ok", program)
    if package is None:
        hint = "`pi install npm:pi-tmux-orchestrator`, or name its file in orchestrate.toml ([harness.pi] bridge), or "
        hint += _OTHERS
        yield Check("worker-bridge", missing, "the worker bridge of Pi is not there", hint, needed=True)
    else:
        yield Check("worker-bridge", "ok", f"{package.bridge} (version {package.version or 'unknown'})")


def _command_fault(words: Sequence[str]) -> str:
    """What is wrong with the program of a role, as a run that is started here would find it."""
    if not words:
        return "nobody says which program works"
    if shutil.which(words[0]):
        return ""
    return f"its program {program_fault(words[0], os.environ.get('PATH', ''))[0]}"


def models(checked: Sequence[ModelCheck], program: str) -> Iterator[Check]:
    """Whether the models that a run would have are there."""
    for one in checked:
        if one.available is False:
            hint = f"log in to the provider, or choose another model (`{program} config show`)"
            yield Check("model", "warn", f"{one.role}: {one.provider}/{one.model}: {one.detail}", hint)
    available = [one.role for one in checked if one.available]
    if available:
        yield Check("models", "ok", f"available for {', '.join(available)}")
