# SPDX-License-Identifier: Apache-2.0
"""Building the C programs, and starting what is measured: the relay, the router, the brokers, the bare process.

Nothing is niced, and the bench pins all servers alike: both sides run under the same conditions.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

SYSTEM_PYTHON = "/usr/bin/python3"
HERE = Path(__file__).resolve().parent.parent
SERVICE = HERE.parent.parent / "service"
READY_TIMEOUT = 20.0

LIFTED = """\
rate_capacity = 1000000
rate_refill_per_second = 1000000
max_pending_deliveries = 65536
max_pending_per_sender = 65536
idle_exit_ms = 86400000
"""
"""`intercom.toml` of the measured broker. The relay has no limits, so the broker's must not be reached."""


def complaints(home: Path) -> Path:
    """Where what is measured writes its standard error."""
    return home / "stderr"


class BenchError(Exception):
    """Something that is measured did not start, or ended early. The text names it."""


class Programs(NamedTuple):
    """The compiled C programs."""

    relay: Path
    loadgen: Path
    runload: Path
    activate: Path


def build(directory: Path) -> Programs:
    """Compile the programs into `directory` with `cc -O2`; BenchError without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchError("no C compiler: install gcc, or set CC")
    for name in Programs._fields:
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(directory / name), str(HERE / f"{name}.c")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BenchError(f"{name}.c does not compile: {result.stderr}")
    return Programs(*(directory / name for name in Programs._fields))


def broker_present() -> bool:
    """Whether this checkout has a broker to measure."""
    package = SERVICE / "agent_intercom" / "intercom"
    return (package / "__main__.py").exists() and (package / "broker.py").exists()


def _interpreter() -> str:
    """What an installed broker runs with, as `make install` chooses: the distribution's interpreter.

    The one of a version manager may be built without optimization and as a shared library, which costs a third. It
    takes over only where the distribution's cannot load the extension modules of this environment.
    """
    question = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    try:
        answer = subprocess.run([SYSTEM_PYTHON, "-c", question], capture_output=True, text=True, check=False)
    except OSError:
        return sys.executable
    fits = answer.stdout.strip() == sysconfig.get_config_var("EXT_SUFFIX")
    return SYSTEM_PYTHON if fits else sys.executable


PYTHON = _interpreter()
"""The interpreter of everything that is measured and is in Python."""


def broker_command() -> list[str]:
    """The broker, run from the checkout."""
    return [PYTHON, "-m", "agent_intercom.intercom"]


def environment(home: Path) -> dict[str, str]:
    """A private and small environment below `home`; the same for all, so that start-up costs compare."""
    config = home / "config" / "agent-intercom"
    config.mkdir(parents=True, exist_ok=True)
    (config / "intercom.toml").write_text(LIFTED)
    for name in ("agent", "run", "state"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(SERVICE), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]),
        "PI_CODING_AGENT_DIR": str(home / "agent"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_RUNTIME_DIR": str(home / "run"),
    }


class Notify:
    """The manager's end of `NOTIFY_SOCKET`: notes when READY came and closes descriptors at once.

    Closing matters: a broker that stores a connection and then waits for BARRIER waits for the close.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ready: float | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._stop, selectors.EVENT_READ)
            while all(key.fileobj is not self._stop for key, _ in selector.select()):
                text, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 32)
                for descriptor in descriptors:
                    os.close(descriptor)
                if self.ready is None and b"READY=1" in text.split(b"\n"):
                    self.ready = time.perf_counter()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Server:
    """One running server. `path` is where to connect; `pid` is the process itself."""

    def __init__(
        self, process: subprocess.Popen[bytes], path: Path, errors: Path, listener: Listener | None = None
    ) -> None:
        self.process = process
        self.path = path
        self._errors = errors
        self._listener = listener

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether it still runs; a broker that idles away between two measurements is a fault of the bench."""
        return self.process.poll() is None

    def complaint(self, what: str) -> str:
        """`what` went wrong, the exit status if there is one, and the end of what the process wrote."""
        said = self._errors.read_text(errors="replace").strip()[-400:]
        return f"{self.path.stem}: {what} (status {self.process.poll()}): {said}"

    def stop(self) -> None:
        """End it by SIGTERM, by SIGKILL if that does not help, and take its socket away."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        if self._listener:
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)


class Listener:
    """Listening sockets as socket units hand them over, and a NOTIFY_SOCKET that answers.

    `names` are the descriptors' names; clients connect to `path`, the address of the first.
    """

    def __init__(self, home: Path, names: tuple[str, ...] = ("local", "remote")) -> None:
        self._names = names
        self._paths = [home / f"{name}.sock" for name in names]
        self._sockets = [self._bind(path) for path in self._paths]
        self.path = self._paths[0]
        self.notify = Notify(home / "n.sock")

    @staticmethod
    def _bind(path: Path) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(512)
        return listening

    def spawn(self, programs: Programs, command: list[str], environ: dict[str, str]) -> Server:
        """Start `command` with the listeners as descriptors from 3 on and LISTEN_PID its own."""
        descriptors = [listening.fileno() for listening in self._sockets]
        errors = complaints(Path(environ["HOME"]))
        with errors.open("ab") as stderr:
            process = subprocess.Popen(
                [str(programs.activate), ":".join(self._names), *map(str, descriptors), "--", *command],
                env=environ | {"NOTIFY_SOCKET": str(self.notify.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=descriptors,
            )
        return Server(process, self.path, errors, self)

    def close(self) -> None:
        """Close and remove the sockets."""
        for listening, path in zip(self._sockets, self._paths, strict=True):
            listening.close()
            path.unlink(missing_ok=True)
        self.notify.close()


def spawn_bound(command: list[str], environ: dict[str, str], path: Path) -> Server:
    """Start a server that binds for itself and wait for the first line of its output.

    BenchError when it ends before it prints one.
    """
    errors = complaints(Path(environ["HOME"]))
    with errors.open("ab") as stderr:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
    server = Server(process, path, errors)
    assert process.stdout
    if not process.stdout.readline():
        process.wait()
        text = server.complaint("not ready")
        server.stop()
        raise BenchError(text)
    return server


def start_relay(programs: Programs, home: Path) -> Server:
    """Start the relay."""
    path = home / "relay.s"
    return spawn_bound([str(programs.relay), str(path)], environment(home), path)


def start_router(home: Path) -> Server:
    """Start the asyncio router without rules."""
    path = home / "router.s"
    return spawn_bound([PYTHON, str(HERE / "router.py"), str(path)], environment(home), path)


def start_broker(programs: Programs, home: Path) -> Server:
    """Start the broker as a service manager would: inherited listeners and NOTIFY_SOCKET. Returns at READY."""
    listener = Listener(home)
    return await_ready(listener, listener.spawn(programs, broker_command(), environment(home)))


def await_ready(listener: Listener, server: Server) -> Server:
    """Wait until `server` said READY=1 to its `listener`. BenchError when it does not; it is stopped then."""
    deadline = time.perf_counter() + READY_TIMEOUT
    while listener.notify.ready is None:
        if not server.alive() or time.perf_counter() > deadline:
            text = server.complaint("not ready")
            server.stop()
            raise BenchError(text)
        time.sleep(0.005)
    return server
