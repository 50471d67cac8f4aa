# SPDX-License-Identifier: Apache-2.0
"""Sections 1.2 to 1.4: files, start, idle exit and end of a broker that binds for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.brokers import PATIENT, Broker, Home
from tests.contract.conftest import StartBroker
from tests.contract.peer import HANG, Peer, fresh


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def runs(home: Home) -> Iterator[Broker]:
    broker = Broker(home, PATIENT)
    yield broker
    broker.stop()


@pytest.fixture
def unstarted(home: Home) -> Iterator[Broker]:
    """A broker that the test starts itself."""
    yield from runs(home)


# Files.


def test_directory_and_socket_modes(start: StartBroker, home: Home) -> None:
    start({})
    assert mode(home.intercom) == 0o700
    for path in (home.socket, home.gateway):
        assert stat.S_ISSOCK(path.lstat().st_mode)
        assert mode(path) == 0o600


def test_wide_directory_is_narrowed(start: StartBroker, home: Home) -> None:
    home.intercom.mkdir(parents=True)
    home.intercom.chmod(0o755)
    start({})
    assert mode(home.intercom) == 0o700


def test_owner_and_pid_files_hold_the_pid_without_a_newline(start: StartBroker, home: Home) -> None:
    broker = start({})
    for name in ("broker.owner", "broker.pid"):
        assert (home.intercom / name).read_bytes() == str(broker.pid).encode()
        assert mode(home.intercom / name) == 0o600


def test_ready_line(start: StartBroker) -> None:
    broker = start({})
    assert broker.ready == f"Intercom broker started (pid: {broker.pid}, remote-access-v1)\n"


def test_trailing_argument_is_ignored(unstarted: Broker) -> None:
    """Node clients append the path of their own broker to the command that they start."""
    unstarted.start("/usr/lib/node_modules/intercom/broker/broker.ts")
    unstarted.join(fresh())


def test_relative_agent_directory_is_resolved_against_the_working_directory(home: Home) -> None:
    broker = Broker(home, PATIENT)
    environment = {**home.environment(), "PI_CODING_AGENT_DIR": " pi "}
    home.environment = lambda: environment  # type: ignore[method-assign]
    broker.start()
    try:
        broker.join(fresh())
    finally:
        broker.stop()


@pytest.mark.parametrize("value", ["", "  ", None], ids=repr)
def test_agent_directory_defaults_to_the_home_directory(home: Home, value: str | None) -> None:
    broker = Broker(home, PATIENT)
    environment = home.environment()
    del environment["PI_CODING_AGENT_DIR"]
    if value is not None:
        environment["PI_CODING_AGENT_DIR"] = value
    home.environment = lambda: environment  # type: ignore[method-assign]
    broker.start()
    try:
        Peer(home.root / ".pi" / "agent" / "intercom" / "broker.sock").close()
    finally:
        broker.stop()


# Ownership.


def ends(broker: Broker) -> tuple[int, str]:
    process = broker.spawn()
    status = process.wait(HANG)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    return status, broker.errors()


def test_second_broker_refuses_and_the_first_goes_on(start: StartBroker, home: Home) -> None:
    first = start({})
    peer = first.join(fresh())
    second = Broker(home, PATIENT)
    status, _ = ends(second)
    second.stop()
    assert status != 0
    peer.expect_silence()
    first.join(fresh())
    assert (home.intercom / "broker.owner").read_text() == str(first.pid)
    assert (home.intercom / "broker.pid").read_text() == str(first.pid)


def test_broker_that_is_refused_by_the_store_leaves_the_serving_one_alone(start: StartBroker, home: Home) -> None:
    """Where the owner file is lost, the lock of the state directory still tells."""
    first = start({})
    (home.intercom / "broker.owner").unlink()
    second = Broker(home, PATIENT)
    status, errors = ends(second)
    second.stop()
    assert status == 1
    assert "holds this state directory" in errors
    first.join(fresh())
    first.connect_remote().barrier()
    assert (home.intercom / "broker.pid").read_text() == str(first.pid)


def test_broker_that_cannot_bind_removes_only_what_it_bound(unstarted: Broker, home: Home) -> None:
    home.intercom.mkdir(parents=True, mode=0o700)
    home.gateway.write_text("no socket")
    (home.intercom / "broker.pid").write_text(str(os.getpid()))
    status, errors = ends(unstarted)
    assert status == 1
    assert "socket's path" in errors
    assert home.gateway.read_text() == "no socket"
    assert (home.intercom / "broker.pid").read_text() == str(os.getpid())
    assert not home.socket.exists()
    assert not (home.intercom / "broker.owner").exists()


def test_owner_that_lives_is_named(unstarted: Broker, home: Home) -> None:
    home.intercom.mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            (home.intercom / "broker.owner").write_text(str(other.pid))
            status, errors = ends(unstarted)
        finally:
            other.kill()
    assert status == 1
    assert f"Intercom broker already owned by live process {other.pid}" in errors
    assert not home.socket.exists()


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "1.5", "dead"])
def test_stale_owner_is_replaced(start: StartBroker, home: Home, text: str) -> None:
    if text == "dead":
        with subprocess.Popen(["true"]) as process:
            text = str(process.pid)
    home.intercom.mkdir(parents=True, mode=0o700)
    (home.intercom / "broker.owner").write_text(text)
    broker = start({})
    assert (home.intercom / "broker.owner").read_text() == str(broker.pid)


def test_sockets_of_a_dead_broker_are_taken_over(start: StartBroker, home: Home) -> None:
    start({}).stop(signal.SIGKILL)
    assert home.socket.exists()
    broker = start({})
    broker.join(fresh())
    broker.connect_remote().barrier()


# Idle exit.


def test_broker_exits_when_the_last_session_left(start: StartBroker, home: Home) -> None:
    broker = start({"idle_exit_ms": 200})
    peers = [broker.join(fresh()) for _ in range(3)]
    for peer in peers:
        peer.close()
    assert broker.wait() == 0
    assert_clean(home)


def test_broker_exits_after_unregister(start: StartBroker) -> None:
    """A connection that may yet register is waited for, but no longer than its timer allows."""
    broker = start({"idle_exit_ms": 200, "registration_timeout_ms": 300})
    peer = broker.join(fresh())
    peer.send({"type": "unregister"})
    assert broker.wait() == 0
    peer.expect_eof()


def test_broker_that_never_had_a_session_exits(start: StartBroker) -> None:
    broker = start({"idle_exit_ms": 200})
    assert broker.wait() == 0


def test_health_does_not_keep_the_broker(start: StartBroker) -> None:
    broker = start({"idle_exit_ms": 200, "registration_timeout_ms": 300})
    peer = broker.connect()
    peer.barrier()
    broker.connect_remote().barrier()
    assert broker.wait() == 0
    peer.expect_eof()


def test_session_keeps_the_broker(start: StartBroker) -> None:
    broker = start({"idle_exit_ms": 200, "registration_timeout_ms": 600})
    peer = broker.join(fresh())
    broker.connect().expect_eof()
    peer.expect_silence()
    assert broker.alive()


# The end.


def assert_clean(home: Home) -> None:
    left = set(os.listdir(home.intercom))
    assert not left & {"broker.sock", "remote-gateway.sock", "broker.pid", "broker.owner", "broker.port.json"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_ends_the_broker_and_its_files(start: StartBroker, home: Home, number: int) -> None:
    broker = start({})
    first, second = broker.join(fresh()), broker.join(fresh())
    first.expect_type("session_joined")
    os.kill(broker.pid, number)
    assert broker.wait() == 0
    first.expect_eof()  # no session_left, no delivery result
    second.expect_eof()
    assert_clean(home)


def test_files_of_another_owner_are_left_alone(start: StartBroker, home: Home) -> None:
    broker = start({})
    (home.intercom / "broker.owner").write_text("1")
    os.kill(broker.pid, signal.SIGTERM)
    assert broker.wait() == 0
    assert (home.intercom / "broker.owner").read_text() == "1"
    assert home.socket.exists()
    assert (home.intercom / "broker.pid").exists()


def test_over_long_path_is_refused(home: Home) -> None:
    broker = Broker(home, PATIENT)
    environment = {**home.environment(), "PI_CODING_AGENT_DIR": str(home.root / ("x" * 120))}
    home.environment = lambda: environment  # type: ignore[method-assign]
    status, errors = ends(broker)
    broker.stop()
    assert status != 0
    assert "Traceback" not in errors
    assert errors


def test_foreign_symlink_in_place_of_the_directory_is_refused(home: Home) -> None:
    elsewhere = home.root / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    home.agent.mkdir(mode=0o700)
    home.intercom.symlink_to(elsewhere)
    broker = Broker(home, PATIENT)
    status, errors = ends(broker)
    broker.stop()
    assert status != 0
    assert errors and "Traceback" not in errors
    assert list(elsewhere.iterdir()) == []


def test_mode_holds_from_the_first_moment(start: StartBroker, home: Home) -> None:
    """A socket bound under a wide umask and narrowed afterwards would be open for a moment."""
    before = os.umask(0)
    try:
        start({})
    finally:
        os.umask(before)
    for path in home.intercom.iterdir():
        # A file that is being replaced has its first name for a moment only.
        with contextlib.suppress(FileNotFoundError):
            assert mode(path) & 0o077 == 0, path.name


def test_many_connections_at_once_are_all_answered(start: StartBroker, home: Home) -> None:
    """The backlog holds a burst of starting clients."""
    start({})
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(30)]
    try:
        for end in sockets:
            end.settimeout(HANG)
            end.connect(str(home.socket))
        frame = b'{"type":"health","requestId":"r"}'
        for end in sockets:
            end.sendall(len(frame).to_bytes(4, "big") + frame)
        for end in sockets:
            assert b"health_ok" in end.recv(4_096)
    finally:
        for end in sockets:
            end.close()
