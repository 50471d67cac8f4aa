# SPDX-License-Identifier: Apache-2.0
"""A broker process of the tests' own, bound by itself below a private directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from tests.contract.peer import Peer
from tests.contract.processes import Served

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


class Broker(Served):
    """A running broker."""

    def __init__(self, home: Home, settings: Mapping[str, Setting] = PATIENT) -> None:
        super().__init__(home.root)
        self.home = home
        self.settings = dict(settings)

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        self.home.configure(self.settings)
        self._process = self._popen(
            [sys.executable, "-m", "agent_intercom.intercom", *arguments], self.home.environment()
        )
        return self._process

    def start(self, *arguments: str) -> Broker:
        """Start the process and wait for its ready line."""
        self.spawn(*arguments)
        self._await_ready("Intercom broker started")
        return self

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
