# SPDX-License-Identifier: Apache-2.0
"""Runs `intercom` against a broker of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.contract.brokers import Broker
from tests.contract.peer import HANG, Peer, fresh_scope, message, send

JsonObject = dict[str, Any]


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
