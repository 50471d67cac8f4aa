# SPDX-License-Identifier: Apache-2.0
"""The user's service manager over D-Bus (org.freedesktop.systemd1(5)): what it says of units, and jobs for it.

jeepney is imported with the connection, not with this module.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Self

CALL_TIMEOUT: Final = 3.0
JOB_TIMEOUT: Final = 30.0
SETTLING: Final = 1.0
"""Seconds after which a broker has opened its database and told its status."""

SYSTEMD: Final = "org.freedesktop.systemd1"
MANAGER_PATH: Final = "/org/freedesktop/systemd1"
MANAGER: Final = f"{SYSTEMD}.Manager"
PROPERTIES: Final = "org.freedesktop.DBus.Properties"
_NOBODY: Final = tuple(
    f"org.freedesktop.DBus.Error.{name}"
    for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected", "Timeout", "Spawn.")
)
"""What the bus says where there is nobody to answer (the D-Bus specification, and sd-bus-errors(3))."""

NO_SUCH_UNIT: Final = f"{SYSTEMD}.NoSuchUnit"
"""The name of the error for a unit of which there is no file."""

Variant = tuple[str, Any]
"""A D-Bus signature and a value of it."""


class ManagerError(Exception):
    """The service manager did not do, or not say, what it was asked for. The text is one line."""


class ManagerUnreachable(ManagerError):
    """There is no user manager to ask, or no bus to ask it over."""


class ManagerRefused(ManagerError):
    """The manager answered with an error. `name` is the error's D-Bus name, `unit` what it was asked about, or ""."""

    def __init__(self, name: str, unit: str = "") -> None:
        super().__init__(f"the user's service manager refused: {name.rpartition('.')[2]}")
        self.name = name
        self.unit = unit


class JobFailed(ManagerError):
    """A job ended otherwise than `done`.

    `result` is what JobRemoved says (`canceled`, `timeout`, `failed`, `dependency`, `skipped`, ...), or `unfinished`
    for a job that did not end in the time that the caller gave it: it goes on.
    """

    def __init__(self, unit: str, result: str) -> None:
        super().__init__(f"the job for {unit} ended with {result}" if result != "unfinished" else f"{unit} is not done")
        self.unit = unit
        self.result = result


class UnitState(NamedTuple):
    """A loaded unit: its name, LoadState, ActiveState and SubState."""

    name: str
    load: str
    active: str
    sub: str


class Manager:
    """A connection to the user's bus. Use as a context manager; raises ManagerUnreachable from the start on.

    Every method raises ManagerRefused where the manager answers with an error that the method does not explain.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._address = bus_address(os.environ if environ is None else environ)
        self._connection: Any = None
        self._subscribed = False

    def __enter__(self) -> Self:
        if self._address is None:
            raise ManagerUnreachable(
                "there is no user bus: neither DBUS_SESSION_BUS_ADDRESS nor XDG_RUNTIME_DIR names one"
            )
        try:
            from jeepney.io.blocking import open_dbus_connection
        except ImportError as error:
            raise ManagerUnreachable("jeepney is not installed") from error
        try:
            self._connection = open_dbus_connection(self._address, auth_timeout=CALL_TIMEOUT)
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise ManagerUnreachable("the user's bus does not answer") from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._subscribed = False

    # What it says.

    def pid(self) -> int | None:
        """The user manager's process, or None where it is not on the bus."""
        with suppress(ManagerError):
            return int(self._bus("GetConnectionUnixProcessID", "s", SYSTEMD)[0])
        return None

    def version(self) -> str:
        """What systemd calls its version, such as `257.9-1~deb13u1`."""
        return self._property("Version")

    def control_group(self) -> str:
        """The control group that everything of the manager is in, such as `/user.slice/.../user@1000.service`."""
        return self._property("ControlGroup")

    def unit(self, name: str, kind: str) -> dict[str, Any] | None:
        """Properties of the unit `name` by their D-Bus names, those of `kind` (`Socket`, `Service`) included.

        None where no such unit file exists.
        """
        path = self._call(MANAGER_PATH, MANAGER, "LoadUnit", "s", name)[0]
        found: dict[str, Any] = {}
        for interface in (f"{SYSTEMD}.Unit", f"{SYSTEMD}.{kind}"):
            body = self._call(path, PROPERTIES, "GetAll", "s", interface)
            found.update({key: value for key, (_, value) in body[0].items()})
        return found if found.get("LoadState") != "not-found" else None

    def settled_service(self, name: str) -> dict[str, Any] | None:
        """Properties of a service, which had a second since it began in which to say how it is."""
        found = self.unit(name, "Service")
        if found is None or found.get("ActiveState") != "active":
            return found
        age = time.monotonic() - int(found.get("ActiveEnterTimestampMonotonic") or 0) / 1_000_000
        if age >= SETTLING:
            return found
        time.sleep(max(SETTLING - age, 0.0))
        return self.unit(name, "Service")

    def units(self, *patterns: str) -> list[UnitState]:
        """The loaded units of which the name matches one of the patterns (glob(7)), by name."""
        body = self._call(MANAGER_PATH, MANAGER, "ListUnitsByPatterns", "asas", [], list(patterns))
        return sorted(UnitState(name, load, active, sub) for name, _, load, active, sub, *_ in body[0])

    def processes(self, unit: str) -> list[tuple[int, str]]:
        """The processes in the cgroup of a unit and below it: their ids and control groups. Empty for no such unit."""
        try:
            body = self._call(MANAGER_PATH, MANAGER, "GetUnitProcesses", "s", unit)
        except ManagerRefused as error:
            if error.name == NO_SUCH_UNIT:
                return []
            raise
        return [(int(pid), str(cgroup)) for cgroup, pid, _ in body[0]]

    # Jobs.

    def start(self, unit: str, timeout: float = JOB_TIMEOUT) -> None:
        """Start a unit and wait until it is started, at most `timeout` seconds. Raises JobFailed."""
        self._job(unit, timeout, "StartUnit", "ss", unit, "fail")

    def stop(self, unit: str, timeout: float = JOB_TIMEOUT) -> bool:
        """Stop a unit and wait until it is stopped, at most `timeout` seconds; False where none is loaded.

        Raises JobFailed. Units that are to stop with it (a slice's, PartOf=) have stopped too.
        """
        try:
            self._call(MANAGER_PATH, MANAGER, "GetUnit", "s", unit)
            # A start under way is to give way.
            self._job(unit, timeout, "StopUnit", "ss", unit, "replace")
        except ManagerRefused as error:
            if error.name == NO_SUCH_UNIT:
                return False
            raise
        return True

    def reset_failed(self, unit: str) -> bool:
        """Forget that a unit has failed; False where none of that name is loaded."""
        try:
            self._call(MANAGER_PATH, MANAGER, "ResetFailedUnit", "s", unit)
        except ManagerRefused as error:
            if error.name == NO_SUCH_UNIT:
                return False
            raise
        return True

    def _job(self, unit: str, timeout: float, member: str, signature: str, *arguments: Any) -> None:
        from jeepney import MatchRule

        rule = MatchRule(type="signal", sender=SYSTEMD, path=MANAGER_PATH, interface=MANAGER, member="JobRemoved")
        if not self._subscribed:
            self._call(MANAGER_PATH, MANAGER, "Subscribe", "")
            self._bus("AddMatch", "s", rule.serialise())
            self._subscribed = True
        # The signal carries the unique name of its sender, which the bus has compared.
        ours = MatchRule(type="signal", path=MANAGER_PATH, interface=MANAGER, member="JobRemoved")
        removed: deque[Any] = deque()
        deadline = time.monotonic() + timeout
        # The filter is there before the call: the signal may come before the answer.
        with self._connection.filter(ours, queue=removed):
            patience = max(timeout, CALL_TIMEOUT)
            job = self._ask(SYSTEMD, MANAGER_PATH, MANAGER, member, signature, arguments, unit, patience)[0]
            path = result = None
            while path != job:
                left = max(deadline - time.monotonic(), 0)
                try:
                    with _reaching():
                        _, path, _, result = self._connection.recv_until_filtered(removed, timeout=left).body
                except TimeoutError as error:
                    raise JobFailed(unit, "unfinished") from error
        if result != "done":
            raise JobFailed(unit, str(result))

    # Messages.

    def _property(self, name: str) -> str:
        return str(self._call(MANAGER_PATH, PROPERTIES, "Get", "ss", MANAGER, name)[0][1])

    def _call(self, path: str, interface: str, member: str, signature: str, *arguments: Any) -> tuple[Any, ...]:
        return self._ask(SYSTEMD, path, interface, member, signature, arguments)

    def _bus(self, member: str, signature: str, *arguments: Any) -> tuple[Any, ...]:
        name = "org.freedesktop.DBus"
        return self._ask(name, "/org/freedesktop/DBus", name, member, signature, arguments)

    def _ask(
        self,
        name: str,
        path: str,
        interface: str,
        member: str,
        signature: str,
        arguments: tuple[Any, ...],
        unit: str = "",
        timeout: float = CALL_TIMEOUT,
    ) -> tuple[Any, ...]:
        message = method_call(name, path, interface, member, signature, arguments)
        try:
            with _reaching():
                answer = self._connection.send_and_get_reply(message, timeout=timeout)
        except TimeoutError as error:
            raise ManagerUnreachable("the user's service manager does not answer") from error
        return answered(answer, unit)


def method_call(name: str, path: str, interface: str, member: str, signature: str, arguments: tuple[Any, ...]) -> Any:
    """The message that calls a method of whoever has the bus name `name`."""
    from jeepney import DBusAddress, new_method_call

    address = DBusAddress(path, bus_name=name, interface=interface)
    return new_method_call(address, member, signature or None, arguments)


def answered(answer: Any, unit: str = "") -> tuple[Any, ...]:
    """What an answer says. Raises ManagerRefused for an error, ManagerUnreachable where the bus found nobody."""
    from jeepney import HeaderFields, MessageType

    if answer.header.message_type is MessageType.error:
        error_name = str(answer.header.fields.get(HeaderFields.error_name, ""))
        if error_name.startswith(_NOBODY):
            raise ManagerUnreachable("no service manager is on the user's bus, or it does not answer")
        raise ManagerRefused(error_name, unit)
    body: tuple[Any, ...] = answer.body
    return body


@contextmanager
def _reaching() -> Iterator[None]:
    """Raises ManagerUnreachable for a bus that has gone; TimeoutError goes through."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise ManagerUnreachable("the user's service manager does not answer") from error


def bus_address(environ: Mapping[str, str]) -> str | None:
    """The address of the user's bus (the D-Bus specification, Server Addresses); None where nothing names one."""
    if address := environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return address
    # Where pam_systemd(8) makes it, for those who call without a session.
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return f"unix:path={runtime}/bus" if os.path.exists(f"{runtime}/bus") else None


def lingering() -> bool | None:
    """Whether this user's manager goes on after logout (loginctl(1), enable-linger); None where it cannot be told."""
    import pwd

    if not os.path.isdir("/var/lib/systemd"):
        return None
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        return os.path.exists(f"/var/lib/systemd/linger/{name}")
    except (KeyError, OSError):
        return None
