# SPDX-License-Identifier: Apache-2.0
"""The notifier against a manager's socket that the test holds."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from agent_intercom.host.errors import HostError
from agent_intercom.host.notify import Notifier


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def read(self) -> list[tuple[str, list[int]]]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 4096, 4)
                found.append((data.decode(), fds))
        return found

    def texts(self) -> list[str]:
        found = self.read()
        for _, fds in found:
            for fd in fds:
                os.close(fd)
        return [text for text, _ in found]

    def fill(self) -> int:
        """Send until the queue is full; how many went in."""
        count = before = 0
        while count == 0 or count != before:
            before = count
            # Each sender may have so much under way and no more: only the queue itself stops a fresh one.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise, contextlib.suppress(BlockingIOError):
                noise.setblocking(False)
                noise.connect(self.socket.getsockname())
                while True:
                    noise.send(b"NOISE=1")
                    count += 1
        return count


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    for variable in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(variable, raising=False)
    with tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory:
        path = f"{directory}/n"
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        made = Manager(path)
        yield made
        made.socket.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    made = Notifier()
    yield made
    made.close()


def test_without_a_manager_nothing_happens() -> None:
    async def run(notifier: Notifier) -> None:
        loop = asyncio.get_running_loop()
        notifier.ready("x")
        notifier.store("c1", 0)
        notifier.start_watchdog(loop)
        assert await notifier.barrier(loop) is True

    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    asyncio.run(run(notifier))
    assert not notifier.active
    assert (notifier.lost, notifier.waiting) == (0, 0)
    notifier.close()


def test_plain_state(manager: Manager, notifier: Notifier) -> None:
    assert notifier.active
    notifier.ready("Listening\nREADY=0 ü 字")
    notifier.status("2 sessions")
    notifier.watchdog()
    notifier.remove("c7")
    notifier.stopping()
    assert manager.texts() == [
        "READY=1\nSTATUS=Listening READY=0 ? ?",
        "STATUS=2 sessions",
        "WATCHDOG=1",
        "FDSTOREREMOVE=1\nFDNAME=c7",
        "STOPPING=1",
    ]


def test_store_passes_the_descriptor(manager: Manager, notifier: Notifier) -> None:
    read, write = os.pipe()
    notifier.store("c7", write)
    notifier.store("memory", write, poll=False)
    os.close(write)
    (first, (copy,)), (second, (other,)) = manager.read()
    assert first == "FDSTORE=1\nFDNAME=c7"
    assert second == "FDSTORE=1\nFDNAME=memory\nFDPOLL=0"
    os.write(copy, b"x")
    assert os.read(read, 2) == b"x"
    for fd in (read, copy, other):
        os.close(fd)


def test_a_full_queue_never_blocks_and_keeps_order(manager: Manager, notifier: Notifier) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        notifier.attach(loop)
        read, write = os.pipe()
        noise = manager.fill()
        assert noise
        notifier.status("old")
        notifier.store("c1", write)
        notifier.watchdog()
        notifier.remove("c2")
        notifier.status("new")
        notifier.watchdog()
        # The number of a closed descriptor comes to mean another file.
        os.close(write)
        null = os.open("/dev/null", os.O_RDONLY)
        assert notifier.waiting == 4
        barrier = notifier.barrier(loop)
        texts: list[str] = []
        readable = asyncio.Event()
        loop.add_reader(manager.socket, readable.set)
        barrier.add_done_callback(lambda _: readable.set())
        while not barrier.done():
            await readable.wait()
            readable.clear()
            for text, fds in manager.read():
                texts.append(text)
                for fd in fds:
                    if "c1" in text:
                        os.write(fd, b"still the pipe")
                    os.close(fd)
        loop.remove_reader(manager.socket)
        assert barrier.result() is True
        assert os.read(read, 100) == b"still the pipe"
        assert texts[noise:] == [
            "FDSTORE=1\nFDNAME=c1",
            "FDSTOREREMOVE=1\nFDNAME=c2",
            "STATUS=new",
            "WATCHDOG=1",
            "BARRIER=1",
        ]
        assert (notifier.waiting, notifier.lost) == (0, 0)
        os.close(read)
        os.close(null)

    asyncio.run(run())


def test_without_a_loop_the_next_call_delivers(manager: Manager, notifier: Notifier) -> None:
    noise = manager.fill()
    notifier.remove("c1")
    assert notifier.waiting == 1
    assert len(manager.texts()) == noise
    notifier.remove("c2")
    assert manager.texts() == ["FDSTOREREMOVE=1\nFDNAME=c1", "FDSTOREREMOVE=1\nFDNAME=c2"]


def test_closing_counts_what_waited(manager: Manager, notifier: Notifier) -> None:
    manager.fill()
    with socket.socket() as some:
        notifier.store("c1", some.fileno())
    notifier.stopping()
    notifier.close()
    assert (notifier.lost, notifier.active) == (2, False)
    notifier.status("ignored")


def test_a_vanished_manager_is_counted(manager: Manager, notifier: Notifier) -> None:
    manager.socket.close()
    notifier.status("x")
    with socket.socket() as some:
        notifier.store("c1", some.fileno())
    assert notifier.lost == 2
    assert notifier.active


def test_barrier(manager: Manager, notifier: Notifier) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        done = notifier.barrier(loop)
        ((text, (fd,)),) = manager.read()
        assert text == "BARRIER=1"
        assert not done.done()
        os.close(fd)
        assert await done is True

    asyncio.run(run())


def test_barrier_that_nobody_answers(manager: Manager, notifier: Notifier) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert await notifier.barrier(loop, 0.01) is False
        cancelled = notifier.barrier(loop)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        manager.texts()
        manager.socket.close()
        assert await notifier.barrier(loop) is False

    asyncio.run(run())


def test_watchdog_beats_from_the_loop(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    notifier = Notifier()
    assert notifier.watchdog_interval == 0.01

    async def run() -> None:
        loop = asyncio.get_running_loop()
        beats = asyncio.Semaphore(0)

        def heard() -> None:
            for text in manager.texts():
                assert text == "WATCHDOG=1"
                beats.release()

        loop.add_reader(manager.socket, heard)
        notifier.start_watchdog(loop)
        for _ in range(3):
            await beats.acquire()
        notifier.stop_watchdog()
        loop.remove_reader(manager.socket)

    asyncio.run(run())
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_interval(environ: dict[str, str], interval: float | None) -> None:
    assert Notifier(environ).watchdog_interval == interval


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # sdnotify drops its socket without closing it
def test_unreachable_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/notify")
    with pytest.raises(HostError) as caught:
        Notifier()
    assert caught.value.code == "NOTIFY_UNREACHABLE"


def test_missing_library(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "sdnotify":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(HostError) as caught:
        Notifier()
    assert (caught.value.code, caught.value.field) == ("MODULE_MISSING", "sdnotify")
    assert "python3-sdnotify" in str(caught.value)
