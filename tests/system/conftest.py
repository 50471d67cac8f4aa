# SPDX-License-Identifier: Apache-2.0
"""The testbed as fixtures.

`bed` is what a test asks for: a booted machine with agent-intercom installed from `make install PREFIX=/usr` (not
the checkout), in which alice and bob have nothing running, nothing enabled and no state. It is booted once per
session and put back between tests:

    def test_activation(bed):
        bed.enable("alice")                                   # systemctl --user start of both sockets
        bed.python("alice", "import agent_intercom; ...")     # the installed package; returns stdout
        bed.as_user("alice", "systemctl --user show -p MainPID --value intercom.service").stdout
        bed.run("ss -xl")                                     # as root
        bed.journal("alice", "-u", "intercom.service")        # entries of this test only, as dicts
        reader = bed.popen("alice", ["/usr/bin/intercom", "watch"])   # killed at the end of the test

Commands are a list, or a string for `sh -c`. A failing command raises `AssertionError` with what it printed, unless
`check=False`. With xdist everything here runs on one worker (see tests/conftest.py).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "tests/testbed"
SITE = "/usr/lib/agent-intercom/site"
SOCKETS = ("intercom.socket", "intercom-gateway.socket")
SERVICE = "intercom.service"
WORKERS = ("orchestrate-workers.socket", "orchestrate-workers.service", "orchestrate-workers.slice")


def _load_testbed() -> ModuleType:
    """The testbed script as a module: calling it saves an interpreter per command."""
    loader = importlib.machinery.SourceFileLoader("testbed", str(TESTBED))
    spec = importlib.util.spec_from_loader("testbed", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = write
    return module


testbed = _load_testbed()
USERS: dict[str, int] = testbed.USERS

Command = str | Sequence[str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)


class Bed:
    """A booted testbed. `root` is its root directory as this process reaches it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bed = testbed.Bed(name)
        self.root = Path(f"/proc/{self._bed.leader}/root")
        self._visitors: Path = self._bed.cgroup / "visitors"
        self._visitors.mkdir(exist_ok=True)
        self._running: list[subprocess.Popen[str]] = []
        self._since: dict[str, int] = {}

    def _argv(self, user: str | None, command: Command) -> list[str]:
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        # In the testbed's cgroup, so that it can be killed with all that comes of it.
        join = ["sh", "-c", 'echo 0 >"$0" && exec "$@"', str(self._visitors / "cgroup.procs")]
        return [*join, *(self._bed.enter_as(user, argv) if user else self._bed.enter(argv))]

    def _call(
        self, user: str | None, command: Command, check: bool, stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._argv(user, command),
            capture_output=True,
            text=True,
            input=stdin or "",
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command!r} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def run(
        self, command: Command, *, check: bool = True, stdin: str | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root and return what it printed."""
        return self._call(None, command, check, stdin, timeout)

    def as_user(
        self, user: str, command: Command, *, check: bool = True, stdin: str | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with the environment of a login of `user`."""
        return self._call(user, command, check, stdin, timeout)

    def popen(self, user: str | None, command: Command, **options: Any) -> subprocess.Popen[str]:
        """Start a command that goes on beside the test; stdin, stdout and stderr are pipes unless told otherwise.

        It, and whatever it started, is killed at the end of the test.
        """
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(self._argv(user, command), text=True, **options)
        self._running.append(process)
        return process

    def python(self, user: str, script: str, *args: str, check: bool = True, timeout: float = 120) -> str:
        """Run a script with the interpreter and the package that are installed; returns its standard output."""
        return self.as_user(user, self.python_command(script, *args), check=check, timeout=timeout).stdout

    def argv(self, user: str | None, command: Sequence[str]) -> list[str]:
        """What runs a command as `popen` does, for a process that is started by other means."""
        return self._argv(user, command)

    @staticmethod
    def python_command(script: str, *args: str) -> list[str]:
        """The same as a command, for `popen`."""
        return ["/usr/bin/python3", "-I", "-c", f"import sys; sys.path.insert(0, {SITE!r})\n{script}", *args]

    def enable(self, user: str, *units: str) -> None:
        """Start the sockets (or `units`) for a user, as `systemctl --user enable --now` would."""
        self.as_user(user, ["systemctl", "--user", "start", *(units or SOCKETS)])

    def show(self, user: str, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.as_user(user, ["systemctl", "--user", "show", "-P", name, unit]).stdout.strip()

    def drop_in(self, user: str, unit: str, text: str, name: str = "test.conf") -> None:
        """Give a user a drop-in for a unit, for this test."""
        directory = self.root / f"home/{user}/.config/systemd/user/{unit}.d"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        self.as_user(user, "systemctl --user daemon-reload")

    def journal(self, user: str, *match: str) -> list[dict[str, Any]]:
        """Journal entries that a user sees (`journalctl --user`) since the test began."""
        self.run(["journalctl", "--sync"])
        command = ["journalctl", "--user", "-o", "json", "--all", *match]
        lines = self.as_user(user, command).stdout.splitlines()
        # Not --after-cursor: with a match, systemd 252 leaves out the first entry that matches.
        since = self._since.get(user, 0)
        return [entry for entry in map(json.loads, lines) if int(entry["__REALTIME_TIMESTAMP"]) > since]

    def end_commands(self) -> None:
        """Kill what `popen` started and everything that came of it."""
        kill = self._visitors / "cgroup.kill"
        if kill.exists():
            kill.write_text("1")
        for process in self._running:
            process.kill()
            process.communicate()
        self._running.clear()

    def reset(self) -> None:
        """Back to a machine on which nobody has used the intercom."""
        self.end_commands()
        for user, uid in USERS.items():
            # Tests open modes on purpose; systemd relies on those of its nodes for what is to be inaccessible.
            runtime = f"/run/user/{uid}"
            self.run(f"chmod 0700 {runtime} /home/{user} && chmod 0000 {runtime}/systemd/inaccessible/*")
            self.as_user(user, ["systemctl", "--user", "stop", *SOCKETS, SERVICE, *WORKERS], check=False)
            home = self.root / f"home/{user}"
            for path in (".pi", ".local", ".config", ".cache"):
                shutil.rmtree(home / path, ignore_errors=True)
            shutil.rmtree(self.root / f"run/user/{uid}/agent-intercom", ignore_errors=True)
            newest = self.as_user(
                user,
                "systemctl --user daemon-reload; systemctl --user reset-failed; journalctl --user -q -n1 -o json",
            ).stdout
            self._since[user] = int(json.loads(newest)["__REALTIME_TIMESTAMP"]) if newest.strip() else 0


def install(destdir: Path) -> None:
    """`make install` into a staging directory."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    done = subprocess.run(
        ["make", "-C", ROOT, "install", f"DESTDIR={destdir}", "PREFIX=/usr", "MOUNTS=yes"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make install DESTDIR=... PREFIX=/usr` lays out."""
    destdir = tmp_path_factory.mktemp("staged") / "root"
    destdir.mkdir(mode=0o755)
    install(destdir)
    return destdir


@pytest.fixture(scope="session")
def able() -> None:
    """Skip where no testbed can be booted, before anything is built for it."""
    if os.geteuid() != 0:
        pytest.skip("the testbed needs root")
    probe = ["unshare", "-m", "-p", "-f", "-C", "true"]
    namespaces = subprocess.run(probe, capture_output=True, text=True, check=False)
    if namespaces.returncode != 0:
        pytest.skip(f"the testbed needs namespaces: {namespaces.stderr.strip()}")


@pytest.fixture(scope="session")
def booted(able: None, staged: Path) -> Iterator[Bed]:
    """A testbed with the installation in it. Tests use `bed`, which is this one put back."""
    name = f"pytest{os.getpid()}"
    up = subprocess.run([TESTBED, "up", name, "--owner", str(os.getpid())], capture_output=True, text=True, check=False)
    assert up.returncode == 0, up.stderr
    bed = Bed(name)
    try:
        subprocess.run(["cp", "-a", f"{staged}/.", f"{bed.root}/"], check=True)
        bed.run("journalctl --update-catalog", check=False)
        yield bed
    finally:
        subprocess.run([TESTBED, "down", name], check=True)


@pytest.fixture
def bed(booted: Bed) -> Iterator[Bed]:
    """The testbed, with nothing of an earlier test in it."""
    booted.reset()
    yield booted
    booted.end_commands()
