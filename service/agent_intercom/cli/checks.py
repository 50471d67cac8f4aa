# SPDX-License-Identifier: Apache-2.0
"""The checks of `doctor`, but for those of connections. Each tells a state, and the way out of a bad one."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from agent_intercom.cli.exits import CommandError, JsonObject, way_out
from agent_intercom.cli.place import chosen_session_id, file_system, here
from agent_intercom.cli.setup import RELOAD
from agent_intercom.cli.status import degraded, verdict
from agent_intercom.cli.verdicts import Check, State, in_memory, no_manager
from agent_intercom.cli.verdicts import lingering as lingering_check
from agent_intercom.host.manager import Manager, ManagerError, lingering
from agent_intercom.intercom import contract, ownership, paths
from agent_intercom.intercom.foreign import (
    ADDRESS_BYTES,
    PROBE_SECONDS,
    START_COMMAND,
    Probe,
    fits,
    is_manager,
    probe,
)

SOCKETS: Final = ("intercom.socket", "intercom-gateway.socket")
SERVICE: Final = "intercom.service"

PATIENCE: Final = 3.0
"""Seconds that an address gets to answer: a first start on a cold, busy machine takes longer than a client waits."""

_LIMITS_HIT: Final = {"start-limit-hit", "trigger-limit-hit", "service-start-limit-hit"}

_DEGRADED: Final = {
    "CONFIG_INVALID": "run `intercom config check` and correct the settings",
    "STATE_LOCKED": "another broker holds the state directory; end it, then: systemctl --user restart intercom.service",
    "OUT_OF_DESCRIPTORS": "close sessions, or raise LimitNOFILE= of intercom.service",
}
_DEGRADED_OTHERWISE: Final = "make room for and write access to the state directory; see journalctl --user -u intercom"


class Units(NamedTuple):
    """What the user manager says; `problem` is why it says nothing."""

    manager_pid: int | None = None
    units: dict[str, dict[str, Any] | None] = {}
    problem: str = ""


class Heard(NamedTuple):
    """Who answered at an address, after how many milliseconds."""

    probe: Probe
    took: int


def hear() -> dict[str, Heard]:
    """Probe every address at the same time: one that hangs must not keep a person waiting more than once."""
    from concurrent.futures import ThreadPoolExecutor

    addresses = [paths.compat_socket(os.environ)]
    if runtime := paths.runtime_dir(os.environ):
        addresses.append(os.path.join(runtime, paths.SOCKET_NAME))
    with ThreadPoolExecutor(len(addresses)) as pool:
        return dict(zip(addresses, pool.map(_heard, addresses), strict=True))


def _heard(address: str) -> Heard:
    began = time.monotonic()
    found = probe(address, PATIENCE)
    return Heard(found, int((time.monotonic() - began) * 1000))


def ask_manager() -> Units:
    """Everything that is asked of the manager, in one go."""
    try:
        with Manager() as manager:
            units = {name: manager.unit(name, "Socket") for name in SOCKETS}
            return Units(manager.pid(), {**units, SERVICE: manager.settled_service(SERVICE)})
    except ManagerError as error:
        return Units(problem=str(error))


def environment() -> Iterator[Check]:
    """Names and directories that the environment gives."""
    try:
        here()
    except CommandError as error:
        text = f"{error}; commands that talk refuse to start"
        yield Check("scope", "fail", text, way_out(error.code))
    try:
        chosen_session_id()
    except CommandError as error:
        yield Check("session-id", "fail", str(error), "correct or unset AGENT_INTERCOM_SESSION_ID")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if paths.runtime_dir(os.environ) is None:
        hint = "log in through systemd-logind, or set XDG_RUNTIME_DIR to a private directory in memory"
        text = f"XDG_RUNTIME_DIR is {'not an absolute path' if runtime else 'not set'}"
        yield Check("runtime-directory", "warn", text, hint)
        return
    if not os.path.isdir(runtime):
        hint = "make it a private directory in memory, or set XDG_RUNTIME_DIR to one"
        yield Check("runtime-directory", "warn", "XDG_RUNTIME_DIR names no directory", hint)
        return
    yield in_memory(file_system(runtime), "a watch keeps messages there")


def protocol() -> Iterator[Check]:
    """What this installation speaks."""
    details = {
        "version": contract.VERSION,
        "protocolSemanticsHash": contract.PROTOCOL_SEMANTICS_HASH,
        "policySemanticsHash": contract.POLICY_SEMANTICS_HASH,
    }
    text = f"{contract.PROTOCOL} version {contract.VERSION}, semantics {contract.PROTOCOL_SEMANTICS_HASH[:12]}"
    yield Check("contract", "ok", text, details=details)


def sockets(found: Units) -> Iterator[Check]:
    """The two socket units: enabled, active, failed and why."""
    for name in SOCKETS:
        if found.problem:
            yield no_manager(name, found.problem)
        else:
            yield _socket(name, found.units.get(name))


def service(found: Units) -> Iterator[Check]:
    """The broker's service: failed, degraded, or well."""
    if found.problem:
        yield no_manager(SERVICE, found.problem)
        return
    unit = found.units.get(SERVICE)
    if unit is None:
        yield Check(SERVICE, "fail", "is not installed", _INSTALL)
        return
    state, result = unit.get("ActiveState"), unit.get("Result")
    if state == "failed" or result in _LIMITS_HIT:
        hint = f"{_RESTARTS}, then: systemctl --user reset-failed intercom.service; {START_COMMAND}"
        yield Check(SERVICE, "fail", f"failed ({result})", hint)
        return
    # A unit that has stopped keeps its last words.
    text = str(unit.get("StatusText") or "") if state == "active" else ""
    for code in degraded(text):
        yield Check("degraded", "fail", f"the broker is degraded: {code}", _DEGRADED.get(code, _DEGRADED_OTHERWISE))
    restarts = unit.get("NRestarts") or 0
    words = f"{state}{f', {text}' if text else ''}{f', restarted {restarts} times' if restarts else ''}"
    yield Check(SERVICE, "warn" if restarts else "ok", words, _RESTARTS if restarts else "")


def addresses(found: Units, heard: dict[str, Heard]) -> Iterator[Check]:
    """Who listens where clients look."""
    compat = paths.compat_socket(os.environ)
    for address, (who, took) in reversed(heard.items()):
        if address == compat:
            yield _address("compatibility-path", address, who, took, found)
            continue
        alone = heard[compat].probe
        if who.state == "absent" and not alone.heard and alone.state != "incompatible" and foreground(alone):
            text = "nobody listens, as it has to be: a broker in the foreground has the compatibility path only"
            yield Check("canonical-path", "ok", text, details=_details(who, took))
        else:
            yield _address("canonical-path", address, who, took, found)


def agent_directory(found: Units) -> Iterator[Check]:
    """Whether the socket unit listens where PI_CODING_AGENT_DIR sends the agents of this shell."""
    unit = found.units.get("intercom.socket")
    if unit is None:
        return
    if paths.compat_socket(os.environ) in _listening(unit):
        yield Check("agent-directory", "ok", "the socket unit listens where agents of this shell look")
        return
    if paths.island(os.environ):
        text = "PI_CODING_AGENT_DIR is set here, and the socket unit listens elsewhere: agents of this shell are alone"
    else:
        text = "PI_CODING_AGENT_DIR is not set here and the socket unit listens for one that sets it"
    yield Check("agent-directory", "fail", text, _move())


def wanted(found: Units) -> bool:
    """Whether the socket unit would listen if it could: it is active, or its start was refused."""
    unit = found.units.get("intercom.socket")
    return unit is not None and unit.get("ActiveState") in {"active", "activating", "failed"}


def foreground(found: Probe) -> bool:
    """Whether a process listens that is no service manager."""
    return found.listening and not is_manager(found.pid)


def owner_file(found: Units) -> Iterator[Check]:
    """Whether `broker.owner` claims for the service manager a directory in which no socket unit listens."""
    directory = paths.intercom_dir(os.environ)
    owner = ownership.owner(directory)
    if owner is None or not is_manager(owner):
        return
    unit = found.units.get("intercom.socket")
    active = unit is not None and unit.get("ActiveState") in {"active", "activating"}
    if found.problem or (active and paths.compat_socket(os.environ) in _listening(unit or {})):
        return
    text = "broker.owner names the service manager, which does not listen there: no other broker can start"
    yield Check("owner-file", "fail", text, f"rm {os.path.join(directory, ownership.OWNER)}")


def login() -> Iterator[Check]:
    """Lingering, and whether this user can read the journal."""
    yield lingering_check(lingering(), "the broker and its sockets")
    yield _journal()


_INSTALL: Final = "install the units: make install, or make install-user"
_RESTARTS: Final = "see `journalctl --user -u intercom.service` for the reason"


def _socket(name: str, unit: dict[str, Any] | None) -> Check:
    if unit is None:
        return Check(name, "fail", "is not installed", _INSTALL)
    state, result, enabled = unit.get("ActiveState"), unit.get("Result"), unit.get("UnitFileState")
    details = {"activeState": state, "unitFileState": enabled, "result": result}
    if state == "failed":
        if result in _LIMITS_HIT:
            text, hint = f"failed: the broker was started too often ({result})", _RESTARTS + f", then: {START_COMMAND}"
        else:
            text = f"failed ({result}); a foreign broker may be in the way"
            hint = f"intercom doctor --take-over, if one is reported below; then: {START_COMMAND}"
        return Check(name, "fail", text, hint, details)
    if state != "active":
        return Check(name, "fail", f"is {state}", f"systemctl --user enable --now {name}", details)
    if enabled not in {"enabled", "enabled-runtime", "static", "linked", "generated", "alias"}:
        text = f"active, but {enabled or 'not enabled'}: gone after the next login"
        return Check(name, "warn", text, f"systemctl --user enable {name}", details)
    return Check(name, "ok", "enabled and active", details=details)


def _details(found: Probe, took: int) -> JsonObject:
    return {"listener": found.state, "listenerPid": found.pid, "answerMs": took}


def _address(name: str, address: str, found: Probe, took: int, units: Units) -> Check:
    details = _details(found, took)
    if not fits(address):
        text = f"the path is longer than the {ADDRESS_BYTES} bytes that a socket's may have"
        return Check(name, "fail", text, way_out("PATH_TOO_LONG"), details)
    if found.state == "absent":
        state: State = "fail" if name == "compatibility-path" else "warn"
        return Check(name, state, f"nobody listens at {address}", _start(name, address, units), details)
    if not found.listening:
        return Check(name, "fail", "cannot be reached", "see the permissions of the directory", details)
    if found.uid is not None and found.uid != os.geteuid():
        return Check(name, "fail", "another user's process listens", "find out who made the directory", details)
    return _listener(name, address, found, units, details)


def _start(name: str, address: str, units: Units) -> str:
    """What to do where nobody listens at `address`."""
    alone = "or `intercom broker`"
    unit = units.units.get("intercom.socket")
    if unit is None and not units.problem:
        return f"{_INSTALL}; {alone}"
    if unit is not None and name == "compatibility-path" and address not in _listening(unit):
        return f"{_move()}; {alone}" if paths.island(os.environ) else _move()
    return f"{START_COMMAND}, {alone}"


def _listening(unit: dict[str, Any]) -> list[str]:
    return [str(address) for _, address in unit.get("Listen", [])]


def _move() -> str:
    """How the socket unit and the agents of this shell come to look at the same place."""
    if paths.island(os.environ):
        return f"intercom setup && {RELOAD}"
    return f"set PI_CODING_AGENT_DIR here too, or: intercom setup --undo && {RELOAD}"


def _listener(name: str, address: str, found: Probe, units: Units, details: JsonObject) -> Check:
    if found.state != "compatible":
        _, text, hint = verdict(found)
        return Check(name, "fail", text, hint, details)
    if is_manager(found.pid) and units.manager_pid in {None, found.pid}:
        took = details["answerMs"]
        if took <= PROBE_SECONDS * 1000:
            return Check(name, "ok", "systemd listens and the broker answers", details=details)
        text = f"the broker answers after {took} ms; existing clients wait one second, then start their own"
        hint = "a first start may take long; otherwise look for what loads the machine"
        return Check(name, "warn", text, hint, details)
    ours = ownership.self_bound(os.path.dirname(address), found.pid)
    what = "`intercom broker` runs in the foreground" if ours else "a broker that systemd did not start listens"
    who = f"process {found.pid}" if found.pid else "an unknown process"
    if (units.units.get("intercom.socket") or {}).get("ActiveState") == "active":
        text = f"{what} where systemd should ({who})"
        return Check(name, "fail", text, "intercom doctor --take-over", details)
    own_end = ours and not wanted(units)
    end = f"end it (Ctrl-C, or kill {found.pid})" if own_end else "intercom doctor --take-over"
    hint = f"fine for `intercom broker`; to have systemd start it: {end}; then: {START_COMMAND}"
    return Check(name, "warn", f"{what} ({who})", hint, details)


def _journal() -> Check:
    uid = os.getuid()
    roots = ("/var/log/journal", "/run/log/journal")
    own = [f for root in roots for f in glob.glob(f"{root}/*/user-{uid}.journal")]
    shared = [f for root in roots for f in glob.glob(f"{root}/*/system.journal")]
    if any(os.access(name, os.R_OK) for name in own + shared):
        return Check("journal", "ok", "this user can read the broker's log: journalctl --user -u intercom")
    if own or shared:
        hint = "ask for membership in the group systemd-journal"
        return Check("journal", "warn", "this user cannot read the journal", hint)
    if any(os.path.isdir(root) for root in roots):
        hint = "a journal per user needs Storage=persistent (journald.conf(5)), or the group systemd-journal"
        return Check("journal", "warn", "this user sees no journal files", hint)
    return Check("journal", "unknown", "there is no journal on this system")
