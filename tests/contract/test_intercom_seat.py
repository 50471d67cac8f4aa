# SPDX-License-Identifier: Apache-2.0
"""The seat where others come and go: askers that are gone, sessions of commands, other scopes, a disk."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.brokers import Broker
from tests.contract.peer import HANG, fresh, fresh_scope
from tests.contract.shell import Shell, Watch, put_ask, until


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A runtime directory in memory."""
    with tempfile.TemporaryDirectory(prefix="ai", dir="/dev/shm") as directory:
        yield Path(directory)


def asked_and_killed(shell: Shell, watch: Watch) -> str:
    """Have a command ask the seat and die; the id of its ask."""
    with shell.popen("ask", watch.session_id, "?", AGENT_INTERCOM_SESSION_ID="other") as process:
        asked = watch.until("message")["message"]
        # The seat's answer comes after its acknowledgement: the ask is delivered.
        assert shell.json("list")[0] == 0
        process.kill()
        process.communicate(timeout=HANG)
    assert watch.until("ask_deferred")["messageId"] == asked["id"]
    return str(asked["id"])


def test_an_ask_whose_command_is_gone_leaves_pending_with_the_reply(shell: Shell) -> None:
    with shell.watch() as watch:
        message_id = asked_and_killed(shell, watch)
        (found,) = shell.json("pending")[1]["asks"]
        assert (found["id"], found["state"], found["askerEnded"]) == (message_id, "deferred", True)
        assert "the command that asked has ended" in shell.run("pending")[1]
        code, answer = shell.json("reply", "yes")
        assert (code, answer["error"]["code"]) == (1, "SESSION_NOT_FOUND")
        assert "no longer pending" in answer["error"]["hint"]
        assert shell.json("pending")[1]["asks"] == []


def test_the_same_without_a_watch(shell: Shell) -> None:
    with shell.watch() as watch:
        asked_and_killed(shell, watch)
    assert shell.json("reply", "yes")[1]["error"]["code"] == "SESSION_NOT_FOUND"
    assert shell.json("pending")[1]["asks"] == []


def test_an_asker_that_may_come_back_keeps_its_ask(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.watch() as watch:
        put_ask(agent, watch.session_id, "q1", "?")
        until(agent, "delivered")
        agent.close()
        watch.until("ask_deferred")
        code, answer = shell.json("reply", "yes")
        assert (code, answer["error"]["code"]) == (1, "SESSION_NOT_FOUND")
        assert "stays pending" in answer["error"]["hint"]
        (found,) = shell.json("pending")[1]["asks"]
        assert (found["id"], found["askerEnded"]) == ("q1", False)
        back = shell.broker.join(agent.id, shell.scope, name="agent")
        with shell.popen("reply", "yes", "--json") as process:
            late = until(back, "message")
            back.send({"type": "message_received", "deliveryId": late["deliveryId"]})
            assert process.stdout is not None
            assert json.loads(process.stdout.read())["state"] == "delivered"
        assert shell.json("pending")[1]["asks"] == []


def test_a_watch_promises_no_reply_to_a_command_that_is_gone(shell: Shell) -> None:
    with shell.popen("watch", AGENT_INTERCOM_SESSION_ID="me") as process:
        assert process.stdout is not None
        while "connected as" not in process.stdout.readline():
            pass
        with shell.popen("ask", "me", "?", AGENT_INTERCOM_SESSION_ID="other") as asking:
            while "answer: intercom reply" not in process.stdout.readline():
                pass
            assert shell.json("list", AGENT_INTERCOM_SESSION_ID="me")[0] == 0
            asking.kill()
            asking.communicate(timeout=HANG)
        said = process.stdout.readline()
        assert said.endswith("waits no more; a reply arrives only if it comes back\n")
        process.kill()
        process.communicate(timeout=HANG)


@pytest.mark.parametrize("everyone", [False, True])
def test_commands_that_come_and_go_are_shown_with_all_only(shell: Shell, everyone: bool) -> None:
    words = ["watch", "--json", *(["--all"] if everyone else [])]
    with shell.popen(*words, AGENT_INTERCOM_SESSION_ID="me") as process:
        watch = Watch(process)
        # From outside the seat, so that the command has a session of its own.
        assert shell.run("list", AGENT_INTERCOM_SESSION_ID="other")[0] == 0
        agent = shell.broker.join(fresh(), shell.scope)
        joined = watch.until("joined")["session"]["id"]
        assert joined.startswith("cli-") if everyone else joined == agent.id
        process.kill()
        process.communicate(timeout=HANG)


def test_whoami_tells_the_name_that_the_seat_has(shell: Shell) -> None:
    with shell.watch(AGENT_INTERCOM_SESSION_NAME="ada"):
        assert shell.json("whoami", AGENT_INTERCOM_SESSION_NAME="bob")[1]["name"] == "ada"
    assert shell.json("whoami", AGENT_INTERCOM_SESSION_NAME="bob")[1]["name"] == "bob"


def test_the_list_marks_the_seat(shell: Shell) -> None:
    with shell.watch(AGENT_INTERCOM_SESSION_NAME="ada"):
        assert "ada (this seat)" in shell.run("list")[1]


def test_a_watch_whose_messages_stay_in_memory_says_nothing_of_it(shell: Shell, memory: Path) -> None:
    with shell.popen("watch", "--json", XDG_RUNTIME_DIR=str(memory)) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "connected"
        process.kill()
        process.communicate(timeout=HANG)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_watch_that_is_told_to_end_leaves_no_socket(shell: Shell, number: signal.Signals) -> None:
    seats = shell.broker.home.runtime / "agent-intercom"
    before = set(seats.glob("seat-*.sock"))
    with shell.watch() as watch:
        assert len(set(seats.glob("seat-*.sock")) - before) == 1
        watch.process.send_signal(number)
        assert watch.process.wait(HANG) == 0
    assert set(seats.glob("seat-*.sock")) == before


def test_a_full_id_reaches_another_scope_and_a_name_does_not(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), fresh_scope(), name=fresh("name"))
    for there in (agent.id[:-1], "name"):
        assert shell.json("send", there, "x")[1]["error"]["code"] == "SESSION_NOT_FOUND"
    with shell.popen("send", agent.id, "x", "--json") as process:
        got = until(agent, "message")
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["state"] == "delivered"
    assert shell.json("list")[1]["sessions"] == []
