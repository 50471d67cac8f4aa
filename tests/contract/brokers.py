# SPDX-License-Identifier: Apache-2.0
"""A broker process of the tests' own, bound by itself below a private directory."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from tests.contract.peer import HANG, Peer

Setting: TypeAlias = int | str

PATIENT: Mapping[str, Setting] = {
    "registration_timeout_ms": 60_000,
    "idle_exit_ms": 3_600_000,
    "ack_timeout_ms": 600_000,
}
"""No timer fires during a test, however slow the machine."""


class Home:
    """The directories that a broker may touch. Short, because a socket's path has to fit 107 bytes."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ai", dir="/tmp"))
        self.agent = self.root / "pi"
        self.intercom = self.agent / "intercom"
        self.socket = self.intercom / "broker.sock"
        self.gateway = self.intercom / "remote-gateway.sock"
        self.config = self.root / "config"
        self.state = self.root / "state"
        self.runtime = self.root / "run"
        self.runtime.mkdir(mode=0o700)

    def configure(self, settings: Mapping[str, Setting]) -> None:
        """Write the broker's settings."""
        directory = self.config / "agent-intercom"
        directory.mkdir(parents=True, exist_ok=True)
        lines = (f"{key} = {value!r}".replace("'", '"') for key, value in settings.items())
        (directory / "intercom.toml").write_text("\n".join(lines) + "\n")

    def environment(self) -> dict[str, str]:
        """What the broker is started with: nothing of this process but where Python finds its modules."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "LC_ALL") if name in os.environ}
        return {
            **kept,
            "HOME": str(self.root),
            "PI_CODING_AGENT_DIR": str(self.agent),
            "XDG_CONFIG_HOME": str(self.config),
            "XDG_STATE_HOME": str(self.state),
            "XDG_DATA_HOME": str(self.root / "data"),
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(self.root),
        }

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class Broker:
    """A running broker."""

    def __init__(self, home: Home, settings: Mapping[str, Setting] = PATIENT) -> None:
        self.home = home
        self.settings = dict(settings)
        self.ready = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._peers: list[Peer] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        self.home.configure(self.settings)
        with (self.home.root / "stderr").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent_intercom.intercom", *arguments],
                env=self.home.environment(),
                cwd=self.home.root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        return self._process

    def start(self, *arguments: str) -> Broker:
        """Start the process and wait for its ready line."""
        process = self.spawn(*arguments)
        assert process.stdout is not None
        try:
            readable, _, _ = select.select([process.stdout], [], [], HANG)
            assert readable, "no ready line"
            self.ready = process.stdout.readline().decode()
            assert self.ready.startswith("Intercom broker started"), (self.ready, self.errors())
        except AssertionError:
            self.stop()
            raise
        return self

    def errors(self) -> str:
        """What the broker has written to its standard error so far."""
        return (self.home.root / "stderr").read_text(errors="replace")

    def connect(self) -> Peer:
        """A connection to the local socket; closed with the test."""
        peer = Peer(self.home.socket)
        self._peers.append(peer)
        return peer

    def connect_remote(self) -> Peer:
        """A connection to the remote gateway; closed with the test."""
        peer = Peer(self.home.gateway)
        self._peers.append(peer)
        return peer

    def join(self, session_id: str | None = None, scope: str | None = None, **claims: object) -> Peer:
        """A registered connection."""
        peer = self.connect()
        peer.register(session_id, scope, **claims)
        return peer

    def hang_up(self) -> None:
        """Close every connection that the test opened."""
        for peer in self._peers:
            peer.close()
        self._peers.clear()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait for the process to end by itself; its exit status."""
        assert self._process is not None
        return self._process.wait(HANG)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the process if it still runs; its exit status."""
        process = self._process
        assert process is not None
        # A broker that is killed must not have seen its peers leave before.
        if number != signal.SIGKILL:
            self.hang_up()
        if process.poll() is None:
            process.send_signal(number)
        self.hang_up()
        try:
            return process.wait(HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
