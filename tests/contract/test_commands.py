# SPDX-License-Identifier: Apache-2.0
"""The command line against the project's own broker."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext

import pytest

from tests.contract.brokers import Broker
from tests.contract.peer import HANG, fresh
from tests.contract.shell import Shell, put_ask, until

TEXT = "naïve \U0001f600 line\nbreak"


@pytest.fixture
def shell(broker: Broker) -> Shell:
    return Shell(broker)


def test_list_hides_passing_sessions_unless_asked(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent \x1b[31m")
    code, found = shell.json("list")
    assert code == 0
    assert [s["id"] for s in found["sessions"]] == [agent.id]
    assert found["hidden"] == 0
    code, found = shell.json("list", "--all")
    assert [s["self"] for s in found["sessions"]] == [False, True]
    assert found["sessions"][1]["id"].startswith("cli-")
    assert found["sessions"][1]["model"] == "human"
    code, out, _ = shell.run("list")
    assert code == 0
    assert "\x1b" not in out
    assert agent.id in out


def test_send_says_delivered_only_after_delivered(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.popen("send", "agent", "-", "--json", AGENT_INTERCOM_SESSION_ID=agent.id) as process:
        assert process.stdin is not None
        process.stdin.write(TEXT + "\n")
        process.stdin.close()
        got = until(agent, "message")
        assert got["message"]["content"]["text"] == TEXT
        assert got["from"]["id"].startswith("cli-"), "a command must not take an agent's id"
        assert process.poll() is None
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert (found["ok"], found["state"]) == (True, "delivered")


def test_send_tells_refused_from_accepted_and_failed(shell: Shell) -> None:
    code, found = shell.json("send", "nobody", "x")
    assert (code, found["state"], found["accepted"]) == (1, "refused", False)
    assert found["error"]["code"] == "SESSION_NOT_FOUND"
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.popen("send", "agent", "x", "--json") as process:
        until(agent, "message")
        agent.close()
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert process.returncode == 1
    assert (found["state"], found["accepted"]) == ("failed", True)
    assert found["error"]["code"] == "RECIPIENT_DISCONNECTED"


def test_ask_prints_the_reply(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.popen("ask", "agent", "?") as process:
        got = until(agent, "message")
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        reply = {"id": "r", "timestamp": 1, "replyTo": got["message"]["id"], "content": {"text": "4\x1b2\nlines"}}
        agent.send({"type": "send", "to": got["from"]["id"], "message": reply})
        assert process.stdout is not None
        assert process.stdout.read() == "4\\x1b2\nlines\n"
    assert process.returncode == 0


def test_an_ask_of_a_passing_session_is_taken_back_when_nobody_answers(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.popen("ask", "agent", "?", "--timeout", "0.2", "--json") as process:
        got = until(agent, "message")
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        assert until(agent, "ask_cancelled")["reason"] == "cancelled"
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert process.returncode == 4
    assert (found["error"]["code"], found["state"]) == ("TIMEOUT", "cancelled")


def test_a_person_watches_is_asked_and_answers(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    code, me = shell.json("whoami")
    assert (code, me["connected"], me["watching"]) == (0, False, False)
    with shell.watch() as watch:
        assert watch.session_id == me["sessionId"]
        assert shell.json("whoami")[1]["connected"] is True
        put_ask(agent, watch.session_id, "q1", "first?")
        asked = watch.until("message")["message"]
        assert (asked["id"], asked["text"], asked["expectsReply"]) == ("q1", "first?", True)
        until(agent, "delivered")
        pending = shell.json("pending")[1]["asks"]
        assert [(ask["id"], ask["text"], ask["state"]) for ask in pending] == [("q1", "first?", "waiting")]
        with shell.popen("reply", "yes") as process:
            answer = until(agent, "message")
            assert answer["from"]["id"] == watch.session_id
            assert (answer["message"]["replyTo"], answer["message"]["content"]["text"]) == ("q1", "yes")
            agent.send({"type": "message_received", "deliveryId": answer["deliveryId"]})
            process.communicate(timeout=HANG)
        assert process.returncode == 0
        assert shell.json("pending")[1]["asks"] == []
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(HANG) == 0
    assert shell.json("reply", "x")[1]["error"]["code"] == "NO_PENDING_ASK"


def test_asks_go_from_the_seat_and_a_late_reply_arrives_there(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.watch() as watch:
        with shell.popen("ask", "agent", "?", "--timeout", "0.2", "--json") as process:
            got = until(agent, "message")
            assert got["from"]["id"] == watch.session_id
            agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
            assert process.stdout is not None
            found = json.loads(process.stdout.read())
        assert (process.returncode, found["state"]) == (4, "deferred")
        reply = {"id": "r", "timestamp": 1, "replyTo": got["message"]["id"], "content": {"text": "late"}}
        agent.send({"type": "send", "to": watch.session_id, "message": reply})
        late = watch.until("message")["message"]
        assert (late["text"], late["replyTo"]) == ("late", got["message"]["id"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("watched", [False, True])
def test_an_interrupted_ask_is_taken_back(shell: Shell, watched: bool, number: signal.Signals) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.watch() if watched else nullcontext(), shell.popen("ask", "agent", "?") as process:
        got = until(agent, "message")
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        process.send_signal(number)
        assert until(agent, "ask_cancelled")["messageId"] == got["message"]["id"]
        process.communicate(timeout=HANG)
    assert process.returncode == 128 + number


def test_a_reply_without_a_watch_comes_from_the_seat(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.watch() as watch:
        put_ask(agent, watch.session_id, "q1", "first?")
        until(agent, "delivered")
        watch.process.terminate()
        assert watch.process.wait(HANG) == 0
    with shell.popen("reply", "q1", "yes", "--json") as process:
        answer = until(agent, "message")
        assert answer["from"]["id"] == watch.session_id
        agent.send({"type": "message_received", "deliveryId": answer["deliveryId"]})
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["state"] == "delivered"
    assert shell.json("pending")[1]["asks"] == []


def test_one_watch_holds_a_seat(shell: Shell) -> None:
    with shell.watch():
        code, found = shell.json("watch")
        assert (code, found["error"]["code"]) == (1, "SEAT_BUSY")


def test_the_seat_takes_the_id_of_the_environment(shell: Shell) -> None:
    chosen = fresh("me")
    with shell.watch(AGENT_INTERCOM_SESSION_ID=f" {chosen} ") as watch:
        assert watch.session_id == chosen
    assert shell.json("whoami", AGENT_INTERCOM_SESSION_ID=chosen)[1]["sessionId"] == chosen


def test_a_seat_that_somebody_else_holds_is_refused(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    code, _, err = shell.run("watch", AGENT_INTERCOM_SESSION_ID=agent.id)
    assert code == 1
    assert "AGENT_INTERCOM_SESSION_ID" in err


def test_messages_lie_in_the_runtime_directory_only_and_are_private(shell: Shell) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    canary = fresh("canary")
    with shell.watch() as watch:
        put_ask(agent, watch.session_id, "q1", canary)
        watch.until("message")
    home = shell.broker.home
    holding = [path for path in home.root.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert [path.parent for path in holding] == [home.runtime / "agent-intercom"]
    for path in (home.runtime / "agent-intercom").iterdir():
        assert path.stat().st_mode & 0o077 == 0
        assert shell.scope not in path.name
        assert path.is_socket() or shell.scope.encode() not in path.read_bytes()
