# SPDX-License-Identifier: Apache-2.0
"""The command line where something is wrong: no broker, one that hangs, is degraded or foreign, names that collide."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import suppress

import pytest

from agent_intercom.cli import status
from agent_intercom.cli.main import main
from agent_intercom.intercom.client_errors import ClientError
from tests.contract.brokers import Broker, Home
from tests.contract.conftest import StartBroker
from tests.contract.peer import HANG, fresh
from tests.contract.shell import Shell, until


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker)


def test_status_of_a_broker_in_the_foreground(shell: Shell) -> None:
    shell.broker.join(fresh(), shell.scope, name="agent")
    code, found = shell.json("status")
    assert (code, found["sessions"], found["scoped"]) == (0, 1, True)
    broker = found["broker"]
    assert (broker["reachable"], broker["activation"], broker["listenerPid"]) == (
        True,
        "foreground",
        shell.broker.pid,
    )


def test_doctor_sees_who_does_not_read(shell: Shell) -> None:
    pytest.importorskip("pyroute2")
    scope = shell.scope
    deaf = shell.broker.join(fresh(), scope, name="deaf")
    for _ in range(20):
        shell.broker.join(fresh(), scope).close()
    _, found = shell.json_any("doctor")
    checks = {check["check"]: check for check in found["checks"]}
    assert checks["compatibility-path"]["listenerPid"] == shell.broker.pid
    connections = checks["connections"]["connections"]
    assert any(entry["pid"] == os.getpid() and entry["unreadBytes"] > 0 for entry in connections)
    assert checks["not-reading"]["pid"] == os.getpid()
    deaf.close()


def test_take_over_says_whom_it_disconnects(start: StartBroker) -> None:
    foreign = start({})
    shell = Shell(foreign)
    agent = foreign.join(fresh(), None, name="agent")
    # One that the directory does not name as its owner is of another make.
    (foreign.home.intercom / "broker.owner").unlink()
    code, found = shell.json("doctor", "--take-over")
    assert code == 0
    assert found["endedPid"] == foreign.pid
    assert {"id": agent.id, "name": "agent"} in found["sessions"]
    assert foreign.wait() == 0
    code, found = shell.json("doctor", "--take-over")
    assert (code, found["error"]["code"]) == (1, "NOTHING_TO_TAKE_OVER")
    assert shell.json("list")[0] == 3
    assert shell.json("status")[0] == 3
    assert shell.json("watch")[0] == 3


def test_a_healthy_broker_in_the_foreground_is_not_taken_over(shell: Shell) -> None:
    code, found = shell.json("doctor", "--take-over")
    assert (code, found["error"]["code"]) == (1, "NOT_FOREIGN")
    assert str(shell.broker.pid) in found["error"]["text"]
    assert f"kill {shell.broker.pid}" in found["error"]["hint"]
    assert shell.json("list")[0] == 0


@pytest.mark.parametrize(
    ("answer", "code", "exit_code"),
    [(None, "CONNECTION_LOST", 3), (b"220 ready\r\n", "INCOMPATIBLE", 5)],
)
def test_a_listener_that_is_no_broker_is_the_same_to_every_command(
    answer: bytes | None, code: str, exit_code: int
) -> None:
    home = Home()
    home.intercom.mkdir(parents=True, mode=0o700)
    shell = Shell(Broker(home))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.socket))
        listener.listen(16)
        serving = threading.Thread(target=serve_nonsense, args=(listener, answer))
        serving.start()
        try:
            said = [shell.json(*command) for command in (("status",), ("list",), ("send", "a", "b"), ("watch",))]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()
            home.remove()
    assert [(found[0], found[1]["error"]["code"]) for found in said] == [(exit_code, code)] * 4
    words = {found[1]["error"]["text"].replace(f" (process {os.getpid()})", "") for found in said}
    assert len(words) == 1


def serve_nonsense(listener: socket.socket, answer: bytes | None) -> None:
    """Give every connection `answer`, or nothing, and close it."""
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer, suppress(OSError):
            if answer is not None:
                peer.sendall(answer)
                peer.recv(65_536)


@pytest.mark.parametrize("command", [("list",), ("send", "a", "b"), ("status",)])
def test_on_an_island_the_way_out_is_the_island_s(command: tuple[str, ...]) -> None:
    home = Home()
    try:
        code, found = Shell(Broker(home)).json(*command)
        assert (code, "intercom setup" in found["error"]["hint"]) == (3, True)
        assert "systemctl" not in found["error"]["hint"]
    finally:
        home.remove()


TALKING = [("list",), ("send", "a", "b"), ("ask", "a", "b"), ("watch",), ("status",), ("whoami",), ("pending",)]


@pytest.mark.parametrize("command", [*TALKING, ("reply", "a")])
def test_an_invalid_scope_stops_every_command_that_connects(broker: Broker, command: tuple[str, ...]) -> None:
    shell = Shell(broker)
    code, out, err = shell.run(*command, AGENT_INTERCOM_SCOPE_ID="s3cret")
    assert code == 2
    assert "s3cret" not in out + err
    assert err.startswith("intercom: AGENT_INTERCOM_SCOPE_ID is invalid: 16 to 128 characters of A-Z a-z 0-9 _ -")


def test_a_reader_that_goes_away_is_no_fault(shell: Shell) -> None:
    with shell.watch() as watch:
        assert watch.process.stdout is not None
        watch.process.stdout.close()
        shell.broker.join(fresh(), shell.scope)
        assert watch.process.stderr is not None
        assert watch.process.stderr.read() == ""
        assert watch.process.wait(HANG) == 141


def test_a_seat_without_a_broker_says_so_and_queues_nothing(start: StartBroker) -> None:
    first = start({})
    shell = Shell(first)
    with shell.watch() as watch:
        first.stop()
        watch.until("disconnected")
        for command in (("send", "agent", "lost"), ("ask", "agent", "lost?", "--timeout", "60"), ("list",)):
            code, found = shell.json(*command)
            assert (code, found["error"]["code"]) == (3, "BROKER_UNREACHABLE"), command
            assert str(first.home.socket) in found["error"]["text"]
            assert "intercom broker" in found["error"]["hint"]
        first.start()
        agent = first.join(fresh(), shell.scope, name="agent")
        with shell.popen("send", "agent", "new", "--json") as process:
            got = until(agent, "message")
            assert (got["from"]["id"], got["message"]["content"]["text"]) == (watch.session_id, "new")
            agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
            assert process.stdout is not None
            assert json.loads(process.stdout.read())["state"] == "delivered"


def test_a_command_does_not_make_its_persons_name_ambiguous(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="ada")
    with shell.popen("send", "ada", "x", "--json", AGENT_INTERCOM_SESSION_NAME="ada") as process:
        got = until(agent, "message")
        assert got["from"]["name"] == "ada (command)"
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["state"] == "delivered"
    shell.broker.join(fresh(), shell.scope, name="ada")
    code, _, err = shell.run("send", "ada", "x")
    assert (code, ".." in err) == (1, False)
    assert "ada (this command)" in shell.run("list", "--all", AGENT_INTERCOM_SESSION_NAME="ada")[1]


@pytest.mark.parametrize("command", [("list",), ("send", "a", "b"), ("watch",), ("status",)])
def test_an_address_that_is_too_long_is_named_as_that(shell: Shell, command: tuple[str, ...]) -> None:
    code, found = shell.json(*command, PI_CODING_AGENT_DIR=f"/tmp/{'x' * 100}")
    assert (code, found["error"]["code"]) == (2, "PATH_TOO_LONG")
    assert "PI_CODING_AGENT_DIR" in found["error"]["hint"]


def test_status_says_who_does_not_answer(start: StartBroker) -> None:
    broker = start({})
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        code, found = Shell(broker).json("status")
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert (code, found["broker"]["state"], found["broker"]["listenerPid"]) == (4, "unreachable", broker.pid)
    assert found["error"]["code"] == "TIMEOUT"
    assert str(broker.pid) in found["error"]["text"]
    assert f"kill -KILL {broker.pid}" in found["error"]["hint"]


def test_a_broker_in_the_foreground_tells_that_it_is_degraded(start: StartBroker) -> None:
    broker = start({"max_sessions": 0})
    note = broker.home.intercom / "broker.status"
    code, found = Shell(broker).json_any("status")
    assert (code, found["broker"]["degraded"]) == (6, ["CONFIG_INVALID"])
    assert note.stat().st_mode & 0o777 == 0o600
    broker.stop()
    assert not note.exists()


def test_status_keeps_its_shape_when_the_broker_ends_just_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broker: Broker
) -> None:
    def gone(place: object) -> int:
        raise ClientError("BROKER_UNREACHABLE", "no broker listens")

    for name, value in Shell(broker).environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(status, "_count", gone)
    assert main(["status", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["error"]["code"], found["broker"]["reachable"]) == ("BROKER_UNREACHABLE", False)


def test_a_broker_that_may_not_start_says_where_and_why(start: StartBroker) -> None:
    first = start({})
    shell = Shell(first)
    owner = first.home.intercom / "broker.owner"
    code, out, err = shell.run("broker")
    assert (code, out) == (1, "")
    assert err == f"intercom broker: Intercom broker already owned by live process {first.pid} ({owner})\n"
    first.stop()
    owner.write_text("1")
    code, _, err = shell.run("broker")
    assert code == 1
    assert "already owned by live process 1, the service manager, but nothing listens there" in err
    assert err.endswith(f"rm {owner}\n")
    owner.unlink()
