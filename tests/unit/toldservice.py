# SPDX-License-Identifier: Apache-2.0
"""A worker service that answers as it is told, on a real socket, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_intercom.wire import codec, framing
from agent_intercom.workers import contract
from agent_intercom.workers.records import Ending, Owner, Worker

ID = "0123456789ab"
INCARNATION = "ba9876543210"
SCOPE = "scope-0123456789abcdef"
IDLE = 5_400_000
"""Milliseconds until `worker` is ended, unless something keeps it alive."""


def stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time stand in the middle of a minute."""
    stands = time.time() // 60 * 60 + 30
    monkeypatch.setattr(time, "time", lambda: stands)


def clock(after: int) -> str:
    """The time of the day, so many milliseconds from now, with the date if that is another day."""
    at, now = time.localtime(time.time() + after / 1000), time.localtime()
    return time.strftime("%H:%M" if at[:3] == now[:3] else "%Y-%m-%d %H:%M", at)


def worker(name: str = "review", **changed: Any) -> dict[str, Any]:
    """A worker as the service tells it: idle in an hour, and ready unless something else is said."""
    now = int(time.time() * 1000)
    usual: dict[str, Any] = {
        "id": ID,
        "name": name,
        "harness": "command",
        "state": "ready",
        "readiness": "verified",
        "generation": 1,
        "incarnation": INCARNATION,
        "owner": Owner(kind="person"),
        "unit": contract.scope_unit(INCARNATION),
        "created_at": now - 120_000,
        "updated_at": now - 30_000,
        "entered_at": now - 120_000,
        "active_at": now,
        "idle_deadline_at": now + IDLE - 900_000,
        "checkpoint_deadline_at": now + IDLE,
    }
    told = msgspec.to_builtins(Worker(**{**usual, **changed}))
    return {key: value for key, value in told.items() if "digest" not in key}


def ended(name: str = "review", **changed: Any) -> dict[str, Any]:
    """One that has ended."""
    ending = Ending(at=1, outcome="exited", exit_code=3)
    return worker(name, **{"state": "stopped", "stop_reason": "manager-requested", "ended": ending, **changed})


class Refused(Exception):
    """What the service answers an action with instead."""

    def __init__(self, code: str, text: str = "it cannot be", field: str = "") -> None:
        super().__init__(code)
        self.error = {"code": code, "text": text, "field": field}


class HungUp(Exception):
    """What the service does instead of an answer: the connection ends."""


Answering = Callable[[dict[str, Any]], dict[str, Any]]


class Service:
    """`answers` has what each action is answered with: a result, a refusal, or a function of the parameters."""

    def __init__(self, runtime: Path) -> None:
        self.address = runtime / "agent-intercom" / contract.SOCKET_NAME
        self.answers: dict[str, dict[str, Any] | Refused | Answering] = {}
        self.asked: list[dict[str, Any]] = []
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def listen(self) -> None:
        self.address.parent.mkdir(mode=0o700, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(self.address))
        self._listener.listen()
        self._begin(self._accept, self._listener)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for thread in self._threads:
            thread.join()

    def params(self, action: str) -> dict[str, Any]:
        """What the one request of this action said."""
        (request,) = [each for each in self.asked if each["action"] == action]
        found: dict[str, Any] = request["params"]
        return found

    @property
    def caller(self) -> dict[str, Any]:
        """For whom the last request was."""
        found: dict[str, Any] = self.asked[-1]["caller"]
        return found

    def _begin(self, function: Callable[[socket.socket], None], of: socket.socket) -> None:
        thread = threading.Thread(target=function, args=(of,))
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._begin(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder = framing.FrameDecoder(contract.MAX_FRAME)
        with connection, contextlib.suppress(HungUp):
            while piece := connection.recv(65_536):
                decoder.feed(piece)
                while (payload := decoder.next()) is not None:
                    connection.sendall(framing.pack(codec.encode(self._answer(codec.decode(payload)))))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        head = {"version": request["version"], "id": request["id"]}
        answer = self.answers.get(request["action"], Refused("invalid_request", "nobody told the test what to say"))
        try:
            if isinstance(answer, Refused):
                raise answer
            return {**head, "ok": True, "result": answer(request["params"]) if callable(answer) else answer}
        except Refused as refused:
            return {**head, "ok": False, "error": refused.error}


@contextlib.contextmanager
def serving(runtime: Path, *, listening: bool = True) -> Iterator[Service]:
    """A service in a runtime directory, which listens unless that is left to somebody else."""
    service = Service(runtime)
    if listening:
        service.listen()
    try:
        yield service
    finally:
        service.close()
