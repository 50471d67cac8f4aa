# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the socket server, and what becomes of connections: adoption, death, descriptors, closing."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import agent_intercom
from agent_intercom.wire.clock import Now
from agent_intercom.wire.connection import Connection
from agent_intercom.wire.peer import PeerCredentials, peer_pidfd
from tests.unit.wirestage import GUARD_S, Stage, play


def test_adopt_goes_on_where_an_earlier_process_stopped() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        me = PeerCredentials(os.getpid(), os.getuid(), os.getgid())
        connection = stage.reactor.adopt(ours, "remote", 17, sent=1_000, unsent=b"rest of a frame")
        assert connection is not None
        assert (connection.number, connection.origin, connection.peer) == (17, "remote", me)
        assert (connection.sent, connection.queued) == (1_000, 15)
        assert stage.reactor.next_number == 18
        stage.reactor.flush()
        assert await stage.read(client, 15) == b"rest of a frame"
        assert stage.tape.sends() == [1_015]
        client.send(b"hello again")
        await stage.handler.call("received", 17, b"hello again")
        assert not stage.handler.named("accepted")

    play(test)


def test_adopt_of_a_connection_whose_peer_left_meanwhile() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        client.close()
        assert stage.reactor.adopt(ours, "local", 5) is not None
        await stage.handler.call("lost", 5, "eof")

    play(test)


@pytest.mark.parametrize("flushed", [False, True])
def test_drained_is_told_of_a_congested_peer_that_takes_all_at_once(flushed: bool) -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        connection = stage.reactor.adopt(ours, "local", 5, unsent=b"what waited")
        assert connection is not None
        if flushed:
            connection.congested = True
            stage.reactor.flush()
        else:

            def resume(_now: Now) -> None:
                connection.congested = True

            stage.reactor.run_batch(resume)
        assert stage.handler.named("drained") == [("drained", 5)]
        assert not connection.congested
        stage.push(connection, b" and more")
        assert await stage.read(client, 20) == b"what waited and more"
        assert len(stage.handler.named("drained")) == 1

    play(test)


def test_adopt_refuses_another_user() -> None:
    async def test(stage: Stage) -> None:
        ours, client = stage.pair()
        stage.reactor._uid = os.getuid() + 1
        assert stage.reactor.adopt(ours, "local", 5) is None
        assert stage.handler.named("refused") == [("refused", "local", os.getuid())]
        assert await stage.read_to_end(client) == b""
        assert stage.reactor.next_number == 6

    play(test)


def test_adopt_refuses_a_peer_that_cannot_be_identified() -> None:
    async def test(stage: Stage) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            stage.clients.append(client)
            ours, _ = server.accept()
        assert stage.reactor.adopt(ours, "local", 5) is None
        assert stage.handler.named("refused") == [("refused", "local", None)]

    play(test)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to connect as another user")
def test_another_user_is_refused_before_a_byte_is_read() -> None:
    async def test(stage: Stage) -> None:
        # The modes are open on purpose: the kernel's word alone must do.
        os.chmod(Path(stage.path).parent, 0o755)
        os.chmod(stage.path, 0o777)
        foreigner = 65_534
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresuid(foreigner, foreigner, foreigner)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(stage.path)
                    code = 0
                    sock.sendall(b"let me in")
            except BrokenPipeError:
                pass
            finally:
                os._exit(code)
        await stage.handler.call("refused", "local", foreigner)
        assert os.waitpid(child, 0)[1] == 0
        assert not stage.handler.named("accepted")
        assert not stage.tape.notes
        assert stage.reactor.connections == {}
        client, _ = await stage.connect()
        client.send(b"x")
        await stage.handler.call("received", 1, b"x")

    play(test)


PEER_WITH_HEIR = """
import os, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
    os.write(1, b"heir done")
    os._exit(0)
assert peer.recv(2) == b"go"
peer.sendall(b"last words")
os._exit(0)
"""


def has_peer_pidfd() -> bool:
    left, right = socket.socketpair()
    with left, right:
        pidfd = peer_pidfd(left)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


@pytest.mark.skipif(not has_peer_pidfd(), reason="this kernel has no SO_PEERPIDFD (Linux 6.5)")
@pytest.mark.parametrize("paused", [False, True])
def test_peer_death_is_noticed_although_another_process_holds_the_socket(paused: bool) -> None:
    async def test(stage: Stage) -> None:
        gate_read, gate_write = os.pipe()

        def watch(connection: Connection) -> None:
            assert stage.reactor.watch_peer_death(connection)
            assert stage.reactor.watch_peer_death(connection)
            if paused:
                stage.reactor.pause(connection)

        stage.handler.on["accepted"] = watch
        # The process that connects may end before it is accepted, and then there is no descriptor for it.
        child = subprocess.Popen(
            [sys.executable, "-c", PEER_WITH_HEIR, stage.path], stdin=gate_read, stdout=subprocess.PIPE
        )
        os.close(gate_read)
        await stage.handler.call("accepted", 1)
        connection = stage.handler.by_number[1]
        connection.queue(b"go")
        stage.reactor.flush()
        if paused:
            assert child.wait() == 0
            await stage.idle()
            assert not stage.handler.named("lost")
            stage.reactor.resume(connection)
        await stage.handler.call("lost", 1, "peer-died")
        assert stage.handler.received_bytes[1] == b"last words"
        os.close(gate_write)
        assert child.stdout is not None
        assert child.stdout.read() == b"heir done"
        child.stdout.close()
        assert child.wait() == 0

    play(test)


def test_watching_degrades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_intercom.wire.pool.peer_pidfd", lambda _sock: None)

    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        assert not stage.reactor.watch_peer_death(connection)
        client.close()
        await stage.handler.call("lost", 1, "eof")
        assert not stage.reactor.watch_peer_death(connection)

    play(test)


def test_close_hangs_up_even_where_the_descriptor_store_has_a_copy() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        with connection.sock.dup():
            stage.reactor.close()
            assert await stage.read_to_end(client) == b""
        stage.reactor.close()

    play(test)


def test_close_with_detach_leaves_the_peer_connected() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.push(connection, b"before")
        with connection.sock.dup() as stored:
            stage.reactor.close(detach=True)
            client.send(b"meanwhile")
            assert stored.recv(100) == b"meanwhile"
            stored.send(b" and after")
            assert await stage.read(client, 16) == b"before and after"
        assert not stage.handler.named("lost")

    play(test)


def test_a_closed_connection_with_a_stored_copy_wakes_nobody() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        with connection.sock.dup():
            stage.reactor.run_batch(lambda _now: stage.reactor.destroy(connection))
            assert await stage.read_to_end(client) == b""
            batches = stage.handler.batches
            await stage.idle()
            assert stage.handler.batches == batches

    play(test)


def test_the_reactor_may_be_closed_inside_any_callback() -> None:
    async def test(stage: Stage) -> None:
        stage.handler.on["accepted"] = lambda _connection: stage.reactor.close()
        clients = [stage.dial(), stage.dial()]
        await stage.handler.call("accepted", 1)
        assert await stage.read_to_end(clients[0]) == b""
        assert stage.handler.named("accepted") == [("accepted", 1)]

    play(test)


def test_after_stop_listening_peers_wait_in_the_queue() -> None:
    async def test(stage: Stage) -> None:
        client, connection = await stage.connect()
        stage.reactor.stop_listening()
        late = stage.dial()
        client.send(b"still served")
        await stage.handler.call("received", 1, b"still served")
        await stage.idle()
        assert stage.handler.named("accepted") == [("accepted", 1)]
        # The queue outlives this reactor, as it does with a listener that a manager keeps.
        stage.listener.accept()[0].close()
        assert await stage.read_to_end(late) == b""

    play(test)


def test_listeners_idle() -> None:
    async def test(stage: Stage) -> None:
        assert stage.reactor.listeners_idle()
        stage.dial()
        assert not stage.reactor.listeners_idle()
        await stage.handler.call("accepted", 1)
        assert stage.reactor.listeners_idle()

    play(test)


class Starving(socket.socket):
    """A listener in a process that has no descriptor left, as long as `starved` says so."""

    starved = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self.starved:
            raise OSError(errno.EMFILE, "no descriptor")
        return super().accept()


def test_without_descriptors_peers_wait_and_a_freed_one_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_intercom.wire.listeners._RETRY_S", 3_600)

    async def test(stage: Stage) -> None:
        first, connection = await stage.connect()
        listener = Starving(socket.AF_UNIX)
        stage.path += "2"
        listener.bind(stage.path)
        listener.listen()
        stage.reactor.listen(listener, "local")
        listener.starved = True
        client = stage.dial()
        client.send(b"patient")
        await stage.handler.call("out_of_descriptors", True)
        batches = stage.handler.batches
        await stage.idle()
        assert stage.handler.batches == batches
        first.send(b"others are served")
        await stage.handler.call("received", 1, b"others are served")
        listener.starved = False
        stage.reactor.destroy(connection)
        await stage.handler.call("received", 2, b"patient")
        assert stage.handler.named("out_of_descriptors") == [
            ("out_of_descriptors", True),
            ("out_of_descriptors", False),
        ]

    play(test)


STARVE = """
import asyncio, os, resource, socket, sys
from agent_intercom.wire.reactor import NullTape, Reactor

class Handler:
    calls = []
    def accepted(self, connection, now): self.calls.append("accepted")
    def received(self, connection, data, now): connection.queue(bytes(data))
    def lost(self, connection, reason, now): self.calls.append("lost " + reason)
    def congested(self, connection, now): pass
    def drained(self, connection, now): pass
    def refused(self, origin, uid): self.calls.append("refused")
    def out_of_descriptors(self, active):
        self.calls.append(f"out of descriptors {active}")
        if active:
            # Freed behind the reactor's back, so only its own retry can notice.
            loop.call_soon(os.close, ballast.pop())
    def batch_done(self, now): pass

async def main():
    global loop
    loop = asyncio.get_running_loop()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    client.connect(sys.argv[1])
    reactor = Reactor(loop, Handler(), NullTape(), uid=os.getuid())
    reactor.listen(listener, "local")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            ballast.append(os.dup(0))
    except OSError:
        pass
    await loop.sock_sendall(client, b"answer me")
    assert await loop.sock_recv(client, 100) == b"answer me"
    reactor.close()
    print(*Handler.calls, sep="|")

ballast = []
asyncio.run(main())
"""


def test_with_the_limit_of_descriptors_reached_for_real() -> None:
    with tempfile.TemporaryDirectory(prefix="aic-", dir="/tmp") as directory:
        done = subprocess.run(
            [sys.executable, "-c", STARVE, str(Path(directory, "s"))],
            env=os.environ | {"PYTHONPATH": str(Path(agent_intercom.__file__).parent.parent)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=GUARD_S,
        )
    assert done.stdout.strip() == "out of descriptors True|out of descriptors False|accepted"
