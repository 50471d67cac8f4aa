# SPDX-License-Identifier: Apache-2.0
"""Confined workers with a real systemd: they try to leave their unit, to end others and to reach the network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agent_intercom.workers import confinement
from tests.system.test_managed_run import IMPLEMENTS, SESSION, Line
from tests.system.test_managed_run import line as line  # noqa: PLC0414
from tests.system.wire import until
from tests.system.workerbed import Workers, working

pytestmark = pytest.mark.skipif(not confinement.filters() or confinement.abi() < 6, reason="the kernel cannot do it")

SEEN = "/home/alice/seen"

# What it finds goes to a file, as a whole; then it waits.
_TRIES = """#!/usr/bin/python3 -I
import ctypes, errno, json, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
results = {}
def attempt(name, what):
    try:
        what()
        results[name] = "done"
    except OSError as error:
        results[name] = errno.errorcode[error.errno]
class Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in
                "flags pidfd child_tid parent_tid exit_signal stack stack_size tls ids idn cgroup".split()]
def born(directory):
    group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    arguments = Arguments(flags=0x200000000, exit_signal=17, cgroup=group)
    result = libc.syscall(435, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)))
    if result == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "7481"])
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def moved(directory):
    with open(directory + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
"""

_ENDS = """
with open("/home/alice/seen/found.new", "w") as file:
    json.dump(results, file)
os.rename("/home/alice/seen/found.new", "/home/alice/seen/found")
time.sleep(1000)
"""


class Tried(Workers):
    """Workers whose program is a script that tries something."""

    def start(self, body: str, *words: str, flags: str = "") -> dict[str, str]:
        """What became of each attempt of a confined worker that is called `tries`."""
        program = self.bed.root / "home/alice/bin/tries"
        program.write_text(_TRIES + body + _ENDS)
        self.bed.run("chmod 755 /home/alice/bin/tries; rm -f /home/alice/seen/found")
        asked = f"orchestrate worker start tries --read-only --writable {SEEN} {flags} -- /home/alice/bin/tries"
        self.bed.as_user("alice", f"cd; {asked} {' '.join(words)}")
        found = self.bed.root / SEEN[1:] / "found"
        until(found.exists, "what it found")
        told: dict[str, str] = json.loads(found.read_text())
        return told


@pytest.fixture
def tried(bed: Any) -> Iterator[Tried]:
    bed.as_user("alice", f"mkdir -p {SEEN} ~/bin")
    with working(bed):
        yield Tried(bed)
    bed.run(f"rm -rf {SEEN} /home/alice/bin", check=False)


def test_a_confined_worker_stays_in_its_unit_and_ends_with_it(tried: Tried) -> None:
    other = tried.ask('told = start("/bin/sleep", "7482", name="other")["worker"]')["placed"]["control_group"]
    uid = tried.bed.as_user("alice", "id -u").stdout.strip()
    manager = f"/user.slice/user-{uid}.slice/user@{uid}.service/init.scope"
    found = tried.start(
        'for name in sys.argv[1:]:\n    attempt("born " + name, lambda: born("/sys/fs/cgroup" + name))\n'
        '    attempt("moved " + name, lambda: moved("/sys/fs/cgroup" + name))\n',
        other,
        manager,
    )
    assert {result for name, result in found.items() if name.startswith("born")} == {"ENOSYS"}
    assert {result for name, result in found.items() if name.startswith("moved")} == {"EACCES"}
    assert tried.processes("sleep 7481") == []
    told = json.loads(tried.bed.as_user("alice", "orchestrate --json worker status tries").stdout)["data"]["worker"]
    assert {"calls-filtered", "signals-own", "files-read-only"} <= set(told["enforced"])
    tried.bed.as_user("alice", "orchestrate worker stop tries --yes")
    assert tried.processes("bin/tries") == []


def test_a_confined_worker_ends_nobody_by_a_limit(tried: Tried) -> None:
    tried.ask('told = start("/bin/sleep", "7483", name="other")')
    service = tried.main_pid()
    found = tried.start(
        """
pid = int(sys.argv[1])
for kind in ("CPU", "NOFILE", "FSIZE", "NPROC"):
    attempt(kind, lambda: resource.prlimit(pid, getattr(resource, "RLIMIT_" + kind), (0, 0)))
attempt("signal", lambda: os.kill(pid, signal.SIGKILL))
""",
        str(service),
    )
    assert set(found.values()) == {"EPERM"}
    assert tried.main_pid() == service
    assert {each["name"] for each in tried.ask('told = ask("list", override=True)')["workers"]} >= {"other"}


def test_a_worker_without_network_has_none(tried: Tried) -> None:
    found = tried.start(
        """
attempt("fast open", lambda: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", 9)))
attempt("listen", lambda: socket.socket().listen())
attempt("datagram", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)))
attempt("local", lambda: socket.socketpair())
""",
        flags="--no-network",
    )
    assert found.pop("local") == "done"
    assert set(found.values()) == {"EACCES"}
    told = json.loads(tried.bed.as_user("alice", "orchestrate --json worker status tries").stdout)["data"]["worker"]
    assert "network-off" in told["enforced"] and "tcp-off" not in told["enforced"]


def test_a_confined_reviewer_does_not_outlive_its_run(line: Line) -> None:
    program = _TRIES + """
slice_ = f"/sys/fs/cgroup/user.slice/user-{os.getuid()}.slice"
attempt("born", lambda: born(f"{slice_}/user@{os.getuid()}.service/init.scope"))
print(results["born"])
"""
    (line.bed.root / "home/alice/bin/tries").write_text(program)
    line.bed.run("chmod 755 /home/alice/bin/tries")
    script = "/home/alice/bin/tries && orchestrate report --verdict approved --summary Tried."
    unit = line.start(implementer=IMPLEMENTS, reviewer=script)["unit"]
    until(lambda: line.state()[0] == "ready", "approved")
    assert Workers(line.bed).processes("sleep 7481") == []
    assert "ENOSYS" in line.call("worker", "logs", f"{unit}/reviewer", "--output").stdout
    line.call("stop", SESSION, "--yes")


def test_a_service_whose_descriptors_were_taken_makes_room_for_the_next(tried: Tried) -> None:
    """Somebody who is not confined did; workers live on."""
    answer = tried.ask('told = start("/bin/sleep", "7484", name="other")')
    assert "worker" in answer, answer
    begun = answer["worker"]
    before = tried.main_pid()
    tried.bed.as_user("alice", f"prlimit --pid {before} --nofile=0:0")
    told = json.loads(tried.bed.as_user("alice", "orchestrate --json worker status other --override").stdout)
    assert told["data"]["worker"]["incarnation"] == begun["incarnation"]
    assert told["data"]["worker"]["state"] not in {"failed", "stopped"}
    until(lambda: tried.main_pid() not in (0, before), "the next worker service")
    assert len(tried.processes("sleep 7484")) >= 1
    events = [entry.get("MESSAGE_ID") for entry in tried.bed.journal("alice", "-u", "orchestrate-workers.service")]
    assert events.count("76e1579dbde4422ea637f8ed568c1aab") == 1
