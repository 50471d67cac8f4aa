# SPDX-License-Identifier: Apache-2.0
"""The worker service without systemd: real sockets, launchers and control groups, and a stand-in for the manager.

    with WorkerHost(tmp) as host:
        with host.client() as client:
            worker = client.request("start", host.wanted("/bin/sleep", "100"))["worker"]
        host.kill()                # SIGKILL of the service; `host.start()` starts the next one

The stand-in makes control groups as systemd would, below one of its own. What it was told is in `host.made`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from agent_intercom.host.scopes import ScopeState, Started
    from agent_intercom.workers.managers import Connection

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "service"
HANG = 20.0
_LAUNCHER = """\
#!{python} -IS
import sys
sys.path[:0] = {path!r}
sys.dont_write_bytecode = True
from agent_intercom.workers.launcher import main
sys.exit(main(sys.argv[1:]))
"""


def unified() -> str | None:
    """Where control groups of version 2 can be made; None where they cannot."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(f"{root}/cgroup.procs") and os.access(root, os.W_OK):
            return root
    return None


def remove(directory: Path) -> None:
    """Remove a control group in which nobody is: the kernel takes a moment to believe it, and nothing tells when."""
    deadline = time.monotonic() + HANG
    while True:
        try:
            directory.rmdir()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


class Group:
    """A control group that the units of one test are in."""

    def __init__(self) -> None:
        root = unified()
        assert root is not None
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        self.name = f"{own.removeprefix('0::').rstrip('/')}/t{os.getpid()}-{os.urandom(4).hex()}"
        self.path = Path(f"{root}{self.name}")
        self.path.mkdir()

    def members(self) -> list[int]:
        """Who is in one of the units."""
        return [int(pid) for file in self.path.rglob("cgroup.procs") for pid in file.read_text().split()]

    def remove(self) -> None:
        """Kill who is left, and remove it."""
        (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + HANG
        while self.members():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for directory in sorted(self.path.rglob("*/"), key=lambda found: -len(found.parts)):
            remove(directory)
        remove(self.path)


class StandIn:
    """A `workers.managers.Connection`. Its memory is a directory, so it outlives the service.

    Files there make it differ: `no-bus`, `deaf` (a bus that never answers), `no-freezer` (it does nothing), `run-over`,
    `jobs` (how many).
    """

    def __init__(self, memory: str, group: str, root: str) -> None:
        self.lost = asyncio.Event()
        self._memory, self._group, self._root = Path(memory), group, Path(root)

    async def __aenter__(self) -> Self:
        from agent_intercom.host.manager import ManagerUnreachable

        while (self._memory / "deaf").exists():
            await asyncio.sleep(0.02)
        if (self._memory / "no-bus").exists():
            raise ManagerUnreachable("there is no bus")
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    def changes(self, callback: Callable[[str, str, str, str], None]) -> None: ...

    def returned(self, callback: Callable[[], None]) -> None: ...

    async def states(self, pattern: str) -> dict[str, ScopeState]:
        units = [directory.name for directory in self._root.iterdir() if directory.is_dir()]
        return {unit: state for unit in units if (state := await self.state(unit)) is not None}

    async def start(self, unit: str, pid: int, properties: Mapping[str, Any], timeout: float) -> Started:
        from agent_intercom.host.scopes import Started

        with (self._memory / "made").open("a") as file:
            file.write(json.dumps({"unit": unit, "properties": dict(properties)}) + "\n")
        directory = self._root / unit
        directory.mkdir()
        (directory / "cgroup.procs").write_text(str(pid))
        invocation = os.urandom(16).hex()
        (self._memory / unit).write_text(invocation)
        return Started(f"{self._group}/{unit}", invocation)

    async def stop(self, unit: str, timeout: float = 0) -> bool:
        from agent_intercom.host import cgroups

        group = f"{self._group}/{unit}"
        if not (self._root / unit).exists():
            return False
        for pid in cgroups.members(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not await cgroups.emptied(group, 0.5):
            cgroups.kill(group)
            await cgroups.emptied(group, HANG)
        await asyncio.to_thread(remove, self._root / unit)
        return True

    async def kill(self, unit: str, signal: int) -> bool:
        return True

    async def freeze(self, unit: str) -> bool:
        return await self._freeze(unit, "1")

    async def thaw(self, unit: str) -> bool:
        return await self._freeze(unit, "0")

    async def _freeze(self, unit: str, how: str) -> bool:
        if not (self._root / unit).exists():
            return False
        if not (self._memory / "no-freezer").exists():
            (self._root / unit / "cgroup.freeze").write_text(how)
        return True

    async def reset_failed(self, unit: str) -> bool:
        return False

    async def state(self, unit: str) -> ScopeState | None:
        from agent_intercom.host.scopes import ScopeState

        directory = self._root / unit
        if not directory.exists():
            return None
        frozen = (directory / "cgroup.freeze").read_text().strip() == "1"
        invocation = (self._memory / unit).read_text()
        freezer = "frozen" if frozen else "running"
        return ScopeState("active", "running", "success", freezer, f"{self._group}/{unit}", invocation)

    async def ending(self, unit: str) -> bool:
        return (self._memory / "run-over").exists()

    async def jobs(self) -> int:
        file = self._memory / "jobs"
        return int(file.read_text()) if file.exists() else 0

    async def version(self) -> int:
        return 257


class WorkerHost:
    """A worker service with everything of its own below `directory`, whose path is short."""

    def __init__(self, directory: Path, *, idle: float | None = None) -> None:
        self.directory = directory
        self.runtime, self.state, self.memory = (directory / name for name in ("r", "s", "m"))
        self.library = directory / "l"
        for made in (self.runtime, self.state, self.memory, self.library):
            made.mkdir(mode=0o700)
        self.group = Group()
        launcher = self.library / "orchestrate-launcher"
        path = [str(SERVICE)]
        launcher.write_text(_LAUNCHER.format(python=sys.executable, path=path))
        launcher.chmod(0o755)
        self._idle = idle
        self.process: subprocess.Popen[bytes] | None = None
        where = self.runtime / "agent-intercom"
        where.mkdir(mode=0o700)
        self.address = str(where / "workers.sock")
        self.listener: socket.socket | None = None
        if idle is not None:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.address)
            self.listener.listen()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        if self.listener is not None:
            self.listener.close()
        self.group.remove()

    def start(self) -> None:
        """Start the service; it is ready when this returns."""
        command = [sys.executable, "-m", "tests.contract.workerhost", str(self.directory), self.group.name]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{SERVICE}:{ROOT}", "HOME": str(self.directory)}
        descriptors = []
        if self.listener is not None:
            descriptors = [self.listener.fileno()]
            command += [str(self._idle), str(self.listener.fileno())]
        errors = (self.directory / "errors").open("ab")
        with errors:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, pass_fds=descriptors, cwd=ROOT
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == b"ready\n", (self.directory / "errors").read_text()

    def end(self) -> int:
        """Tell it to end; its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        process.wait(HANG)
        assert process.stdout is not None
        process.stdout.close()
        return process.returncode

    def client(self) -> Any:
        from agent_intercom.workers.client import Client

        return Client(self.address)

    def wanted(self, *command: str, **more: Any) -> dict[str, Any]:
        """The parameters of `start` for a command."""
        given = {"PATH": "/usr/bin:/bin", "SOCKET": self.address}
        return {"command": list(command), "directory": str(self.directory), "environment": given, **more}

    @property
    def made(self) -> list[dict[str, Any]]:
        """The scope units that the manager was asked for."""
        file = self.memory / "made"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def files(self) -> list[Path]:
        """What is in places and scratch directories."""
        where = (self.runtime / "agent-intercom/worker", self.state / "agent-intercom/workers")
        return [found for directory in where if directory.exists() for found in directory.iterdir()]

    def clear(self) -> None:
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def hosted() -> Iterator[WorkerHost]:
    """One in a directory of its own, which goes with it."""
    made = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    with WorkerHost(made) as found:
        yield found
    shutil.rmtree(made)


def main(directory: str, group: str, idle: str = "", descriptor: str = "") -> None:
    """The service, as a process."""
    from agent_intercom.host.activation import Inherited
    from agent_intercom.host.journal import Journal
    from agent_intercom.host.notify import Notifier
    from agent_intercom.workers import opening, serve

    root = f"{unified()}{group}"
    where = f"{directory}/r"

    async def run() -> None:
        from agent_intercom.host import faults, standalone

        # To standard error, whatever journal this machine has.
        journal = Journal(identifier="workers", stderr=True, path=f"{directory}/no-journal")
        faults.watch(asyncio.get_running_loop(), journal)
        state = f"{directory}/s/agent-intercom"
        store = await opening.opened(state, 0.2)
        serve.PROVING = 0.5
        if descriptor:
            listener = socket.socket(fileno=int(descriptor))
        else:
            listener = standalone.bind(f"{where}/agent-intercom/workers.sock")
        given = Inherited([("workers", listener)], {}, [])

        def connect() -> Connection:
            return StandIn(f"{directory}/m", group, root)

        service = serve.Main(
            given, Notifier({}), journal, where, state, f"{directory}/l", store, not descriptor, connect,
            float(idle or 0),
        )  # fmt: skip
        if descriptor:
            print("ready", flush=True)
        await service.run(time.monotonic_ns())
        service.store.close()

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
