# SPDX-License-Identifier: Apache-2.0
"""Taking over descriptors: tried in a child, since the numbers begin at 3 and belong to one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from agent_intercom.host.activation import inherited

PROGRAM = """
import json, os, sys
from agent_intercom.host.activation import inherited
from agent_intercom.host.errors import HostError

os.environ["LISTEN_PID"] = str(os.getpid() + int(os.environ.pop("OFFSET", "0")))
for name in os.environ.pop("BLOCK", "").split():
    sys.modules[name] = None
try:
    found = inherited()
except HostError as error:
    print(json.dumps({"code": error.code, "text": str(error)}))
    sys.exit()
everything = [s.fileno() for _, s in found.listeners] + list(found.stored.values()) + [fd for _, fd in found.unknown]
print(json.dumps({
    "listeners": [[name, os.path.basename(s.getsockname())] for name, s in found.listeners],
    "stored": found.stored,
    "unknown": found.unknown,
    "inheritable": any(os.get_inheritable(fd) for fd in everything),
    "blocking": any(os.get_blocking(fd) for fd in everything),
    "environment": [name for name in os.environ if name.startswith("LISTEN")],
    "c_environment": "LISTEN_FDS" in os.popen("env").read(),
    "systemd": "systemd" in sys.modules,
}))
"""


def run(passed: list[int], **variables: str) -> dict[str, Any]:
    """What a process sees that inherits `passed` as 3, 4, …"""
    moved = "".join(f"os.dup2({fd}, {3 + index}); " for index, fd in enumerate(passed))
    above = max(passed, default=3) + 50
    lifted = f"import os; fds=[os.dup2(fd, {above} + i) for i, fd in enumerate({passed})]; "
    moved = "".join(f"os.dup2(fds[{index}], {3 + index}); " for index in range(len(passed)))
    start = lifted + moved + f"os.closerange({above}, {above + len(passed)}); " if passed else ""
    done = subprocess.run(
        [sys.executable, "-c", start + f"exec({PROGRAM!r})"],
        pass_fds=passed,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        check=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def listener(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import tempfile

    with (
        tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX) as made,
    ):
        made.bind(f"{directory}/l")
        made.listen()
        yield made


def test_nothing_inherited() -> None:
    environ = {"LISTEN_PID": "1", "OTHER": "kept"}
    assert inherited(environ) == ([], {}, [])
    assert environ == {"OTHER": "kept"}
    assert run([])["systemd"] is False


def test_everything_is_classified(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("memory")
    passed = [listener.fileno(), listener.fileno(), ours.fileno(), theirs.fileno(), memory, ours.fileno(), memory]
    try:
        found = run(passed, LISTEN_FDS="7", LISTEN_FDNAMES="local:remote:c1:c2:memory:c1:stored")
    finally:
        ours.close()
        theirs.close()
        os.close(memory)
    assert found == {
        "listeners": [["local", "l"], ["remote", "l"]],
        "stored": {"c1": 5, "c2": 6, "memory": 7},
        "unknown": [["c1", 8], ["stored", 9]],
        "inheritable": False,
        "blocking": False,
        "environment": [],
        "c_environment": False,
        "systemd": True,
    }


def test_a_connection_under_a_listeners_name_is_no_listener(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = run([ours.fileno()], LISTEN_FDS="1", LISTEN_FDNAMES="local")
    assert (found["listeners"], found["stored"]) == ([], {"local": 3})


def test_a_datagram_socket_is_no_listener() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        found = run([datagram.fileno()], LISTEN_FDS="1")
    assert (found["listeners"], found["unknown"]) == ([], [["unknown", 3]])


def test_meant_for_another_process(listener: socket.socket) -> None:
    found = run([listener.fileno()], LISTEN_FDS="1", OFFSET="1")
    assert (found["listeners"], found["stored"], found["environment"]) == ([], {}, [])


@pytest.mark.parametrize("variables", [{"LISTEN_FDS": "many"}, {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b:c"}])
def test_malformed(listener: socket.socket, variables: dict[str, str]) -> None:
    assert run([listener.fileno()] * 2, **variables)["code"] == "ACTIVATION_INVALID"


def test_descriptor_that_is_not_open() -> None:
    assert run([], LISTEN_FDS="1")["code"] == "ACTIVATION_INVALID"


def test_missing_library(listener: socket.socket) -> None:
    found = run([listener.fileno()], LISTEN_FDS="1", BLOCK="systemd.daemon")
    assert found["code"] == "MODULE_MISSING"
    assert "python3-systemd" in found["text"]
