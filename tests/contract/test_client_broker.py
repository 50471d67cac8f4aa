# SPDX-License-Identifier: Apache-2.0
"""The client, and the command line on top of it, against the project's own broker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import pytest

from agent_intercom.cli import status
from agent_intercom.cli.main import main
from agent_intercom.intercom.client import IntercomClient, health
from agent_intercom.intercom.client_errors import AskTimeout, ClientError, DeliveryFailed
from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Connected,
    Disconnected,
    Joined,
    Left,
    Message,
    Presence,
)
from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import HANG, Peer, fresh, fresh_scope, message, send

Scenario = Callable[[], Coroutine[Any, Any, None]]
JsonObject = dict[str, Any]

TEXT: Final = "naïve \U0001f600 \ud800 line\nbreak"


def session(broker: Broker, scope: str, name: str, **options: Any) -> IntercomClient:
    return IntercomClient(broker.home.socket, name=name, cwd="/src", model="m", scope=scope, **options)


class Reader:
    def __init__(self, client: IntercomClient) -> None:
        self._events = client.events()

    async def skip_to(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(HANG):
            while not isinstance(event := await anext(self._events), kind):
                pass
        return event


# The client.


def test_two_sessions_find_each_other_send_ask_and_reply(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta", status="idle") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            joined = await seen.skip_to(Joined)
            assert (joined.session.id, joined.session.name, joined.session.status) == (beta.session_id, "beta", "idle")
            assert [s.name for s in await beta.list()] == ["alpha", "beta"]

            await alpha.send("beta", TEXT)
            message = await heard.skip_to(Message)
            assert (message.text, message.sender.id, message.expects_reply) == (TEXT, alpha.session_id, False)

            asking = asyncio.create_task(alpha.ask("BETA", "?"))
            ask = await heard.skip_to(Message)
            assert ask.expects_reply
            await beta.reply(ask, "!")
            reply = await asking
            assert (reply.text, reply.message.sender.id) == ("!", beta.session_id)
            with pytest.raises(DeliveryFailed) as caught:
                await beta.reply(ask, "again")
            assert (caught.value.code, caught.value.accepted) == ("INVALID_REPLY_TARGET", False)

            await beta.presence(status="busy")
            assert (await seen.skip_to(Presence)).session.status == "busy"
            await beta.unregister()
            assert await seen.skip_to(Left) == Left(beta.session_id)

    asyncio.run(scenario())


def test_late_reply_cancel_and_defer(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            with pytest.raises(AskTimeout) as caught:
                await alpha.ask("beta", "?", timeout=0.1)
            ask = await heard.skip_to(Message)
            assert caught.value.deferred
            assert await heard.skip_to(AskDeferred) == AskDeferred(ask.id, alpha.session_id)
            await beta.reply(ask, "late")
            late = await seen.skip_to(Message)
            assert (late.text, late.reply_to) == ("late", ask.id)

            asking = asyncio.create_task(alpha.ask("beta", "?", timeout=None))
            ask = await heard.skip_to(Message)
            asking.cancel()
            gone = await heard.skip_to(AskCancelled)
            assert (gone.message_id, gone.reason) == (ask.id, "cancelled")
            assert not await alpha.cancel(ask.id)

    asyncio.run(scenario())


def test_refusals_of_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha", session_id=fresh()) as alpha, session(broker, scope, "beta"):
            with pytest.raises(DeliveryFailed) as caught:
                await alpha.send("nobody", "x")
            assert caught.value.code == "SESSION_NOT_FOUND"
            with pytest.raises(ClientError) as refused:
                await session(broker, scope, "thief", session_id=alpha.session_id).__aenter__()
            assert refused.value.code == "SESSION_ID_IN_USE"
            async with session(broker, scope, "beta"):
                with pytest.raises(DeliveryFailed) as caught:
                    await alpha.send("beta", "x")
                assert caught.value.code == "AMBIGUOUS_TARGET"

    asyncio.run(scenario())


def test_a_burst_stays_below_every_limit_of_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta") as beta:
            heard = Reader(beta)
            sends = [asyncio.create_task(alpha.send("beta", str(n))) for n in range(300)]
            texts = [(await heard.skip_to(Message)).text for _ in sends]
            await asyncio.gather(*sends)
            assert texts == [str(n) for n in range(300)]
            assert alpha.connected
            assert beta.connected

    asyncio.run(scenario())


def test_a_restarted_broker_is_found_again_and_the_ask_is_still_answered(start: StartBroker) -> None:
    first = start({})

    async def scenario() -> None:
        scope = fresh_scope()
        async with session(first, scope, "alpha") as alpha, session(first, scope, "beta") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            asking = asyncio.create_task(alpha.ask("beta", "?", timeout=HANG))
            ask = await heard.skip_to(Message)
            await asyncio.to_thread(first.stop)
            await seen.skip_to(Disconnected)
            await asyncio.to_thread(start, {})
            again = await seen.skip_to(Connected)
            assert again == Connected(alpha.session_id, resumed=True)
            await heard.skip_to(Connected)
            await beta.reply(ask, "!")
            assert (await asking).text == "!"

    asyncio.run(scenario())


def test_the_probe_knows_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        found = await health(broker.home.socket, HANG)
        assert (found.state, found.listener_pid) == ("compatible", broker.pid)
        assert (await health(broker.home.gateway, HANG)).state == "incompatible"

    asyncio.run(scenario())


# The command line.


class Shell:
    """Runs `intercom` in the broker's home, in a scope of its own."""

    def __init__(self, broker: Broker) -> None:
        self.scope = fresh_scope()
        self.broker = broker
        self.environment = {**broker.home.environment(), "AGENT_INTERCOM_SCOPE_ID": self.scope}

    def popen(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "agent_intercom.cli", *arguments],
            env={**self.environment, **more},
            cwd=os.getcwd(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def run(self, *arguments: str, stdin: str = "", **more: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        with self.popen(*arguments, **more) as process:
            out, err = process.communicate(stdin, timeout=HANG)
        assert self.scope not in out + err
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def json_any(self, *arguments: str) -> tuple[int, JsonObject]:
        """Exit code and what was printed, whatever it says."""
        code, out, _ = self.run(*arguments, "--json")
        found: JsonObject = json.loads(out)
        return code, found

    def json(self, *arguments: str, stdin: str = "", **more: str) -> tuple[int, JsonObject]:
        """Exit code and the object, whose shape is checked."""
        code, out, err = self.run(*arguments, "--json", stdin=stdin, **more)
        assert err == ""
        found = json.loads(out)
        assert found["ok"] is (code == 0)
        assert code == 0 or {"code", "text"} <= set(found["error"]) <= {"code", "text", "hint"}
        return code, found

    @contextmanager
    def watch(self, **more: str) -> Iterator[Watch]:
        with self.popen("watch", "--json", **more) as process:
            try:
                yield Watch(process)
            finally:
                process.kill()


class Watch:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.session_id = str(self.until("connected")["sessionId"])

    def until(self, kind: str) -> JsonObject:
        """The next event of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: JsonObject = json.loads(line)
            if event["event"] == kind:
                return event
        raise AssertionError("the watch ended")


def until(peer: Peer, kind: str) -> JsonObject:
    """The next frame of this type that the peer gets."""
    while (frame := peer.recv())["type"] != kind:
        pass
    return frame


def put_ask(peer: Peer, to: str, message_id: str, text: str) -> None:
    peer.send(send(to, message(message_id, text, expectsReply=True)))


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
        process.stdin.write(TEXT.replace("\ud800", "") + "\n")
        process.stdin.close()
        got = until(agent, "message")
        assert got["message"]["content"]["text"] == TEXT.replace("\ud800", "")
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


@pytest.mark.parametrize("watched", [False, True])
def test_an_interrupted_ask_is_taken_back(shell: Shell, watched: bool) -> None:
    agent = shell.broker.join(fresh(), shell.scope, name="agent")
    with shell.watch() if watched else nullcontext(), shell.popen("ask", "agent", "?") as process:
        got = until(agent, "message")
        agent.send({"type": "message_received", "deliveryId": got["deliveryId"]})
        process.send_signal(signal.SIGINT)
        assert until(agent, "ask_cancelled")["messageId"] == got["message"]["id"]
        process.communicate(timeout=HANG)
    assert process.returncode == 130


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


@pytest.mark.parametrize("command", [("list",), ("send", "a", "b"), ("watch",), ("status",), ("whoami",)])
def test_an_invalid_scope_stops_every_command_that_connects(broker: Broker, command: tuple[str, ...]) -> None:
    shell = Shell(broker)
    code, out, err = shell.run(*command, AGENT_INTERCOM_SCOPE_ID="s3cret")
    assert code == 2
    assert "s3cret" not in out + err
    assert "AGENT_INTERCOM_SCOPE_ID" in err


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
    assert (code, found["broker"]["state"], found["broker"]["listenerPid"]) == (3, "unreachable", broker.pid)
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
