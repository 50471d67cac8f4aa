# SPDX-License-Identifier: Apache-2.0
"""The client of the worker service against one that answers what it likes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.wire import codec, framing
from agent_intercom.workers import client as module
from agent_intercom.workers.client import Client
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError


@contextmanager
def service(directory: Path, *answers: Any) -> Iterator[Client]:
    """A service that gives these answers, and then none. A dict gets what makes it one to the request."""
    address = str(directory / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            decoder = framing.FrameDecoder()
            given = list(answers)
            with connection:
                while data := connection.recv(65_536):
                    decoder.feed(data)
                    while (payload := decoder.next()) is not None:
                        if given:
                            answer = {"version": 1, "id": codec.decode(payload)["id"], **given.pop(0)}
                            connection.sendall(framing.pack(codec.encode(answer)))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with Client(address) as opened:
                yield opened
        finally:
            thread.join(20)
            assert not thread.is_alive()


def fault(code: object) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "text": "so it is", "field": ""}}


@pytest.mark.parametrize("code", ["made_up", "", None, 7, ["conflict"], "\x1b[2J"])
def test_a_code_that_nobody_knows_is_not_passed_on(tmp_path: Path, code: object) -> None:
    with service(tmp_path, fault(code)) as opened, pytest.raises(WorkerError) as caught:
        opened.request("list", {})
    assert caught.value.code == Code.UNREACHABLE


@pytest.mark.parametrize("code", list(Code))
def test_every_code_of_the_contract_is(tmp_path: Path, code: Code) -> None:
    with service(tmp_path, fault(str(code))) as opened, pytest.raises(WorkerError, match="so it is") as caught:
        opened.request("stop", {"worker": "abcd"})
    assert caught.value.code == code


@pytest.mark.parametrize("action", ["list", "status", "logs", "health"])
def test_a_mute_service_is_waited_for_only_as_long_as_looking_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    assert module.LOOK_TIMEOUT <= 10
    monkeypatch.setattr(module, "LOOK_TIMEOUT", 0.05)
    with service(tmp_path) as opened, pytest.raises(WorkerError) as caught:
        opened.request(action, {})
    assert caught.value.code == Code.TIMEOUT
