# SPDX-License-Identifier: Apache-2.0
"""What the user's service manager says, over D-Bus (org.freedesktop.systemd1(5)), for `status` and `doctor`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

CALL_TIMEOUT: Final = 3.0
SETTLING: Final = 1.0
"""Seconds after which a broker has opened its database and told its status."""

_NAME: Final = "org.freedesktop.systemd1"
_PATH: Final = "/org/freedesktop/systemd1"


class ManagerUnreachable(Exception):
    """There is no user manager to ask, or no bus to ask it over. The text is one line."""


class Manager:
    """A connection to the user's bus. Use as a context manager; raises ManagerUnreachable from the start on."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._address = _bus_address(os.environ if environ is None else environ)
        self._connection: Any = None

    def __enter__(self) -> Self:
        if self._address is None:
            raise ManagerUnreachable("neither DBUS_SESSION_BUS_ADDRESS nor XDG_RUNTIME_DIR is set")
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

    def pid(self) -> int | None:
        """The user manager's process, or None where it is not on the bus."""
        with suppress(ManagerUnreachable):
            body = self._call("org.freedesktop.DBus", "/org/freedesktop/DBus", "GetConnectionUnixProcessID", "s", _NAME)
            return int(body[0])
        return None

    def unit(self, name: str, kind: str) -> dict[str, Any] | None:
        """Properties of the unit `name` by their D-Bus names, those of `kind` (`Socket`, `Service`) included.

        None where no such unit file exists.
        """
        path = self._call(_NAME, _PATH, "LoadUnit", "s", name, interface=f"{_NAME}.Manager")[0]
        found: dict[str, Any] = {}
        for interface in (f"{_NAME}.Unit", f"{_NAME}.{kind}"):
            body = self._call(_NAME, path, "GetAll", "s", interface, interface="org.freedesktop.DBus.Properties")
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

    def _call(
        self, name: str, path: str, member: str, signature: str, *arguments: Any, interface: str | None = None
    ) -> tuple[Any, ...]:
        from jeepney import DBusAddress, MessageType, new_method_call

        address = DBusAddress(path, bus_name=name, interface=interface or name)
        message = new_method_call(address, member, signature, arguments)
        try:
            answer = self._connection.send_and_get_reply(message, timeout=CALL_TIMEOUT)
        except (OSError, EOFError, ValueError) as error:
            raise ManagerUnreachable("the user's service manager does not answer") from error
        if answer.header.message_type is MessageType.error:
            raise ManagerUnreachable("the user's service manager refused the question")
        body: tuple[Any, ...] = answer.body
        return body


def _bus_address(environ: Mapping[str, str]) -> str | None:
    if address := environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return address
    runtime = environ.get("XDG_RUNTIME_DIR")
    return f"unix:path={runtime}/bus" if runtime else None


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
