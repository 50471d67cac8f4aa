# SPDX-License-Identifier: Apache-2.0
"""Scope units asked of a stand-in for the bus and the manager: other versions, forgers and losses.

The real ones are in tests/system.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jeepney import DBusAddress, HeaderFields, Parser, new_error, new_method_return, new_signal

from agent_intercom.host import processes
from agent_intercom.host.manager import JobFailed, ManagerRefused, ManagerUnreachable
from agent_intercom.host.scopes import NotPlaced, Scopes, Started

UNIT = "worker-0123456789ab.scope"
OBJECT = "/org/freedesktop/systemd1/unit/worker_2d0123456789ab_2escope"
SYSTEMD = "org.freedesktop.systemd1"
OWNER = ":1.5"
JOB = "/org/freedesktop/systemd1/job/7"


class Refused(Exception):
    """What a method of the stand-in is answered with."""


class FakeBus(threading.Thread):
    """One connection: what is called is in `calls`, and answered by what `answers` has for the name of the method."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.address = f"unix:path={directory}/bus"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/bus")
        self._listener.listen()
        self.connection: socket.socket | None = None
        self.agrees = b"AGREE_UNIX_FD\r\n"
        self.version = "257.9-1~deb13u1"
        self.calls: list[tuple[str, Any]] = []
        self.passed: list[int] = []
        self.answers: dict[str, Callable[[], Any]] = {
            "Hello": lambda: ("s", (":1.9",)),
            "AddMatch": lambda: ("", ()),
            "GetNameOwner": lambda: ("s", (OWNER,)),
            "Subscribe": lambda: ("", ()),
            "Get": lambda: ("v", (("s", self.version),)),
        }
        self._serial = 0

    def run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self.connection = connection
            with contextlib.suppress(OSError):
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        while b"BEGIN\r\n" not in data:
            data = connection.recv(1024)
            if not data:
                return
            if b"AUTH" in data:
                connection.sendall(b"OK 0123\r\n")
            elif b"NEGOTIATE" in data:
                connection.sendall(self.agrees)
        parser = Parser()
        data = data.partition(b"BEGIN\r\n")[2]
        fds: list[int] = []
        while True:
            parser.add_data(data, fds=fds)
            while (message := parser.get_next_message()) is not None:
                self._answer(message)
            data, fds, _, _ = socket.recv_fds(connection, 65_536, 4)
            self.passed += fds
            if not data:
                return

    def _answer(self, message: Any) -> None:
        member = message.header.fields[HeaderFields.member]
        self.calls.append((member, message.body))
        try:
            answer = self.answers[member]()
        except Refused as refused:
            self.send(new_error(message, str(refused)))
            return
        if answer is not None:
            self.send(new_method_return(message, answer[0] or None, answer[1]))

    def send(self, message: Any, sender: str = OWNER) -> None:
        message.header.fields[HeaderFields.sender] = sender
        self._serial += 1
        assert self.connection is not None
        self.connection.sendall(message.serialise(self._serial))

    def signal(
        self, member: str, signature: str, body: Any, path: str = "/org/freedesktop/systemd1", sender: str = OWNER
    ) -> None:
        properties = member == "PropertiesChanged"
        interface = "org.freedesktop.DBus.Properties" if properties else f"{SYSTEMD}.Manager"
        self.send(new_signal(DBusAddress(path, interface=interface), member, signature, body), sender)

    def removed(self, result: str, sender: str = OWNER) -> None:
        self.signal("JobRemoved", "uoss", (7, JOB, UNIT, result), sender=sender)

    def changed(self, kind: str, sender: str = OWNER, **properties: str) -> None:
        body: Any = (f"{SYSTEMD}.{kind}", {key: ("s", value) for key, value in properties.items()}, [])
        self.signal("PropertiesChanged", "sa{sv}as", body, OBJECT, sender)

    def names(self) -> list[str]:
        return [member for member, _ in self.calls]

    def close(self) -> None:
        # For a thread that still waits for somebody.
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(self.address.partition("=")[2])
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.join()
        self._listener.close()
        for fd in self.passed:
            os.close(fd)


@pytest.fixture
def fake() -> Iterator[FakeBus]:
    with tempfile.TemporaryDirectory(prefix="sc", dir="/tmp") as directory:
        fake = FakeBus(directory)
        fake.start()
        yield fake
        fake.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        yield process


def placed(fake: FakeBus, cgroup: str | None = None) -> Started:
    """Have the manager start the unit; what it says of it."""
    group = cgroup or processes.cgroup_of(os.getpid())
    assert group is not None
    found: dict[str, Any] = {"LoadState": ("s", "loaded"), "ActiveState": ("s", "active"), "SubState": ("s", "running")}
    found |= {"ControlGroup": ("s", group), "InvocationID": ("ay", bytes(range(16)))}

    def start() -> Any:
        # It is done before the answer that says what it is called, and somebody claims that it was not.
        fake.removed("failed", sender=":1.66")
        fake.changed("Unit", ActiveState="inactive", SubState="dead")
        fake.changed("Unit", ActiveState="active", SubState="running")
        fake.removed("done")
        return "o", (JOB,)

    fake.answers |= {
        "StartTransientUnit": start,
        "GetUnit": lambda: ("o", (OBJECT,)),
        "GetAll": lambda: ("a{sv}", (found,)),
        "StopUnit": lambda: ("o", (JOB,)),
        "ResetFailedUnit": lambda: ("", ()),
    }
    return Started(group, bytes(range(16)).hex())


def run(fake: FakeBus, ask: Callable[[Scopes], Any]) -> Any:
    async def asked() -> Any:
        async with Scopes({"DBUS_SESSION_BUS_ADDRESS": fake.address}) as scopes:
            return await ask(scopes)

    return asyncio.run(asked())


def given(fake: FakeBus) -> dict[str, Any]:
    (body,) = [body for member, body in fake.calls if member == "StartTransientUnit"]
    assert body[:2] == (UNIT, "fail")
    return dict(body[2])


# The start.


def test_a_process_is_named_by_a_descriptor_where_the_manager_takes_one(
    fake: FakeBus, child: subprocess.Popen[bytes]
) -> None:
    expected = placed(fake)
    told: list[tuple[str, ...]] = []

    async def ask(scopes: Scopes) -> Started:
        scopes.changes(lambda *change: told.append(change))
        return await scopes.start(UNIT, child.pid, {"TasksMax": ("t", 512)}, 10)

    assert run(fake, ask) == expected
    properties = given(fake)
    assert set(properties) == {"TasksMax", "PIDFDs"} and properties["PIDFDs"][0] == "ah"
    (fd,) = fake.passed
    info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    assert f"Pid:\t{child.pid}\n" in info
    # That it has not begun yet is no news.
    assert told == [(UNIT, "active", "running", "")]
    assert fake.names().index("Subscribe") < fake.names().index("StartTransientUnit")


def test_an_older_manager_takes_a_number(fake: FakeBus, child: subprocess.Popen[bytes]) -> None:
    expected = placed(fake)
    fake.version = "252.39-1~deb12u1"
    assert run(fake, lambda scopes: scopes.start(UNIT, child.pid, {}, 10)) == expected
    assert given(fake) == {"PIDs": ("au", [child.pid])}
    assert fake.passed == []


def test_a_process_that_is_elsewhere_when_all_is_done(fake: FakeBus, child: subprocess.Popen[bytes]) -> None:
    placed(fake, "/elsewhere.scope")
    with pytest.raises(NotPlaced) as raised:
        run(fake, lambda scopes: scopes.start(UNIT, child.pid, {}, 10))
    assert (raised.value.reason, raised.value.unit) == ("moved", UNIT)
    assert fake.names()[-2:] == ["StopUnit", "ResetFailedUnit"]


@pytest.mark.parametrize("version", ["252", "257"])
def test_a_process_that_is_not_there_is_not_asked_for(fake: FakeBus, version: str) -> None:
    fake.version = version
    with pytest.raises(NotPlaced) as raised:
        run(fake, lambda scopes: scopes.start(UNIT, 1 << 22, {}, 10))
    assert raised.value.reason == "ended"
    assert "StartTransientUnit" not in fake.names()


@pytest.mark.parametrize("result", ["canceled", "timeout", "failed", "dependency", "skipped"])
def test_a_job_that_ends_otherwise(fake: FakeBus, child: subprocess.Popen[bytes], result: str) -> None:
    placed(fake)

    def start() -> Any:
        fake.removed(result)
        return "o", (JOB,)

    fake.answers["StartTransientUnit"] = start
    with pytest.raises(JobFailed) as raised:
        run(fake, lambda scopes: scopes.start(UNIT, child.pid, {}, 10))
    assert raised.value.result == result
    assert fake.names()[-2:] == ["StopUnit", "ResetFailedUnit"]


def test_what_was_refused_is_not_withdrawn(fake: FakeBus, child: subprocess.Popen[bytes]) -> None:
    """A unit that has the name is another one."""

    def start() -> Any:
        raise Refused(f"{SYSTEMD}.UnitExists")

    fake.answers["StartTransientUnit"] = start
    with pytest.raises(ManagerRefused) as raised:
        run(fake, lambda scopes: scopes.start(UNIT, child.pid, {}, 10))
    assert (raised.value.name, raised.value.unit) == (f"{SYSTEMD}.UnitExists", UNIT)
    assert fake.names()[-1] == "StartTransientUnit"


# Who is believed.


def test_only_the_manager_is_believed(fake: FakeBus) -> None:
    told: list[tuple[str, ...]] = []

    def version() -> Any:
        fake.changed("Scope", sender=":1.66", Result="oom-kill")
        fake.changed("Unit", sender=":1.66", ActiveState="failed", SubState="failed")
        fake.signal("NameOwnerChanged", "sss", (SYSTEMD, OWNER, ":1.66"), "/org/freedesktop/DBus", ":1.66")
        fake.changed("Scope", Result="timeout")
        fake.changed("Unit", ActiveState="failed", SubState="failed")
        fake.changed("Unit", ActiveState="inactive", SubState="dead")
        return "v", (("s", "257"),)

    async def ask(scopes: Scopes) -> int:
        scopes.changes(lambda *change: told.append(change))
        return await scopes.version()

    fake.answers["Get"] = version
    assert run(fake, ask) == 257
    # What was said of one that has ended is not said of another.
    assert told == [(UNIT, "failed", "failed", "timeout"), (UNIT, "inactive", "dead", "")]


# Losses.


def test_a_bus_that_goes_while_a_job_is_waited_for(fake: FakeBus) -> None:
    async def ask(scopes: Scopes) -> list[str]:
        stop = asyncio.create_task(scopes.stop(UNIT, 10))
        while "StopUnit" not in fake.names():
            await asyncio.sleep(0.001)
        assert not scopes.lost.is_set() and fake.connection is not None
        fake.connection.shutdown(socket.SHUT_RDWR)
        await scopes.lost.wait()
        said = []
        for asked in (stop, scopes.version(), scopes.stop(UNIT, 10)):
            with pytest.raises(ManagerUnreachable) as raised:
                await asked
            said.append(str(raised.value))
        return said

    fake.answers["StopUnit"] = lambda: ("o", (JOB,))
    assert run(fake, ask) == ["the user's bus has gone"] * 3


def test_what_is_no_message_is_a_loss(fake: FakeBus) -> None:
    async def ask(scopes: Scopes) -> bool:
        assert fake.connection is not None
        fake.connection.sendall(b"x" * 64)
        await scopes.lost.wait()
        return True

    assert run(fake, ask)


def test_who_gave_up_waiting_takes_nothing_with_it(fake: FakeBus) -> None:
    async def ask(scopes: Scopes) -> int:
        fake.answers["KillUnit"] = lambda: None
        waiting = asyncio.create_task(scopes.kill(UNIT, 15))
        while "KillUnit" not in fake.names():
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.wait({waiting})
        with pytest.raises(JobFailed) as raised:
            await scopes.stop(UNIT, 0.01)
        assert raised.value.result == "unfinished"
        return await scopes.version()

    fake.answers["StopUnit"] = lambda: ("o", (JOB,))
    assert run(fake, ask) == 257


def test_a_manager_that_comes_back_is_subscribed_to_again(fake: FakeBus) -> None:
    """The job that was waited for has ended without anybody being told; the unit shows how."""
    bus = "org.freedesktop.DBus"

    async def ask(scopes: Scopes) -> bool:
        returned = asyncio.Event()
        scopes.returned(returned.set)
        stop = asyncio.create_task(scopes.stop(UNIT, 10))
        while "StopUnit" not in fake.names():
            await asyncio.sleep(0.001)
        fake.answers |= {"Subscribe": subscribed, "Get": gone, "GetUnit": unloaded}
        for old, new in ((OWNER, ""), ("", ":1.70")):
            address = DBusAddress("/org/freedesktop/DBus", interface=bus)
            fake.send(new_signal(address, "NameOwnerChanged", "sss", (SYSTEMD, old, new)), bus)
        await returned.wait()
        return await stop

    def subscribed() -> Any:
        raise Refused(f"{SYSTEMD}.AlreadySubscribed")

    def gone() -> Any:
        raise Refused(f"{bus}.Error.UnknownObject")

    def unloaded() -> Any:
        raise Refused(f"{SYSTEMD}.NoSuchUnit")

    fake.answers["StopUnit"] = lambda: ("o", (JOB,))
    assert run(fake, ask) is True
    assert fake.names().count("Subscribe") == 2


def test_a_bus_that_takes_no_descriptors(fake: FakeBus) -> None:
    fake.agrees = b"ERROR\r\n"
    with pytest.raises(ManagerUnreachable, match="does not answer"):
        run(fake, lambda scopes: scopes.version())


def test_a_bus_without_a_manager(fake: FakeBus) -> None:
    def nobody() -> Any:
        raise Refused("org.freedesktop.DBus.Error.NameHasNoOwner")

    fake.answers["GetNameOwner"] = nobody
    with pytest.raises(ManagerUnreachable, match="no service manager"):
        run(fake, lambda scopes: scopes.version())


def test_no_bus_is_said_as_what_it_is() -> None:
    async def ask(environ: dict[str, str]) -> None:
        async with Scopes(environ):
            pass

    for environ in (
        {"XDG_RUNTIME_DIR": "/nonexistent"},
        {"DBUS_SESSION_BUS_ADDRESS": "nonsense"},
        {"DBUS_SESSION_BUS_ADDRESS": "tcp:host=localhost"},
        {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/nonexistent"},
    ):
        with pytest.raises(ManagerUnreachable):
            asyncio.run(ask(environ))
