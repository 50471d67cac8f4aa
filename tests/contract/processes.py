# SPDX-License-Identifier: Apache-2.0
"""What the brokers of both products have in common as processes of a test's."""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.contract.peer import HANG


class Closable(Protocol):
    """A peer of the test's."""

    def close(self) -> None: ...


class Served:
    """A broker that the test starts and ends, with the peers that the test connected to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ready = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._peers: list[Closable] = []

    def _popen(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.root / "stderr").open("ab") as errors:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def _await_ready(self, line: str) -> None:
        """Wait until the broker says that it serves, in a line that begins so."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            readable, _, _ = select.select([process.stdout], [], [], HANG)
            assert readable, "no ready line"
            self.ready = process.stdout.readline().decode()
            assert self.ready.startswith(line), (self.ready, self.errors())
        except AssertionError:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def errors(self) -> str:
        """What the broker has written to its standard error so far."""
        return (self.root / "stderr").read_text(errors="replace")

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def hang_up(self) -> None:
        """Close every connection that the test opened."""
        for peer in self._peers:
            peer.close()
        self._peers.clear()

    def wait(self) -> int:
        """Wait until the process has ended by itself; its exit status."""
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
