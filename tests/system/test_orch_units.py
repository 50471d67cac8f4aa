# SPDX-License-Identifier: Apache-2.0
"""The units of a run, line by line, with a stand-in for the broker that does what a test asks of it."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import HANG, UID, Door, Peer, until

TEMPLATES = ("orchestrate@.socket", "orchestrate@.service", "orchestrate-reaper@.service")

# Answers each line that a connection sends. A connection that is stored goes on with the next process.
_STAND_IN = r"""
import json, os, resource, selectors, signal, socket, sys, time

def notify(text, *fds):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(os.environ["NOTIFY_SOCKET"])
        socket.send_fds(line, [text.encode()], fds)

def barrier():
    ours, theirs = os.pipe()
    notify("BARRIER=1", theirs)
    os.close(theirs)
    os.read(ours, 1)

def told():
    status = dict(line.split(":\t") for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
    return {
        "argv": sys.argv[1:], "pid": os.getpid(), "names": names, "environ": sorted(os.environ),
        "cgroup": open("/proc/self/cgroup").read(), "umask": status["Umask"].strip(),
        "no_new_privs": status["NoNewPrivs"].strip(), "seccomp": status["Seccomp"].strip(),
        "bounding": status["CapBnd"].strip(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "user", "net", "pid", "ipc")},
        "limits": open("/proc/self/limits").read(),
    }

def obey(peer, line):
    match line.split():
        case ["tell"]:
            peer.sendall(json.dumps(told()).encode() + b"\n")
            return
        case ["store", count]:
            notify("FDSTORE=1\nFDNAME=c0", peer.fileno())
            barrier()
            for number in range(1, int(count)):
                notify(f"FDSTORE=1\nFDNAME=m{number}\nFDPOLL=0", memory := os.memfd_create("m"))
                barrier()
                os.close(memory)
        case ["fork"]:
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                listener.close()
                while True:
                    time.sleep(1000)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            time.sleep(1000)
        case ["exit", status]:
            os._exit(int(status))
    peer.sendall(b"done\n")

if "fail" in sys.argv:
    sys.exit(1)
if "refuse" in sys.argv:
    sys.exit(3)
names = os.environ["LISTEN_FDNAMES"].split(":")
waiting = selectors.DefaultSelector()
listener = socket.socket(fileno=3)
waiting.register(listener, selectors.EVENT_READ)
for number in range(1, len(names)):
    if names[number] == "c0":
        waiting.register(socket.socket(fileno=3 + number), selectors.EVENT_READ)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
notify("READY=1")
while True:
    ready = waiting.select(0.2)
    notify("WATCHDOG=1")
    for key, _ in ready:
        if key.fileobj is listener:
            waiting.register(listener.accept()[0], selectors.EVENT_READ)
        elif data := key.fileobj.recv(100):
            obey(key.fileobj, data.decode())
        else:
            waiting.unregister(key.fileobj)
            key.fileobj.close()
"""

_WRITE = """
import os
from agent_intercom.orchestration import runtime
from agent_intercom.orchestration.runtime import RunPlace
place = RunPlace(directory="/nonexistent/s/r", scope=None, environment={}, observer_report_usage=False)
where = runtime.runtime_dir(os.environ)
runtime.write(where, sys.argv[1], place)
print(runtime.socket_path(where, sys.argv[1]))
"""


_CREATE = """
import os
from agent_intercom.orchestration import rundir, runtime
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
from agent_intercom.orchestration.rundir import RoleSpec, RunSpec, Startup
from agent_intercom.orchestration.runtime import RunPlace
from agent_intercom.wire.clock import system_now
role = RoleSpec(provider="p", model="m", thinking="high")
spec = RunSpec(
    unit=sys.argv[1], project="/home/alice", approve_project=False, transport="tui",
    execution_profile=Profile("thorough", "packaged", "packaged-default"),
    orchestration_config=OrchestrationConfig("/home/alice/none.json", 3), project_config=UNMATCHED,
    roles={"implementer": role, "reviewer": role}, implementation_flow="single",
    startup=Startup(task="t", role_tasks={}),
)
run = rundir.create("/home/alice/.pi/runs", "s", "r", spec, system_now())
where = runtime.runtime_dir(os.environ)
for unit in sys.argv[1:]:
    place = dict(directory=run.path, scope=None, environment={}, observer_report_usage=False)
    runtime.write(where, unit, RunPlace(**place))
"""


class Runs:
    """Alice's runs. `door` connects as alice."""

    def __init__(self, bed: Any, door: Door) -> None:
        self.bed = bed
        self.door = door

    def stand_in(self, arguments: str = "%i", service: str = "") -> None:
        """What brokers that start from now on do instead of theirs."""
        directory = self.bed.root / "home/alice/.local"
        directory.mkdir(exist_ok=True)
        (directory / "stand-in").write_text(_STAND_IN)
        command = f"ExecStart=\nExecStart=/usr/bin/python3 -I /home/alice/.local/stand-in {arguments}\n{service}"
        self.bed.drop_in("alice", "orchestrate@.service", f"[Service]\n{command}")

    def no_stand_in(self) -> None:
        """Brokers that start from now on are those that are installed."""
        self.bed.drop_in("alice", "orchestrate@.service", "")

    def write(self, unit_id: str) -> str:
        """Do what precedes a start; the address of the run."""
        return str(self.bed.python("alice", _WRITE, unit_id).strip())

    def start(self, unit_id: str) -> str:
        address = self.write(unit_id)
        self.systemctl("start", f"orchestrate@{unit_id}.socket")
        return address

    def systemctl(self, *arguments: str, check: bool = True) -> int:
        return int(self.bed.as_user("alice", ["systemctl", "--user", *arguments], check=check).returncode)

    def state(self, unit: str) -> str:
        return str(self.bed.show("alice", unit, "ActiveState"))

    def states(self, unit_id: str) -> tuple[str, str, str]:
        """Of the run's socket, service and slice."""
        units = (f"orchestrate@{unit_id}.socket", f"orchestrate@{unit_id}.service", f"orchestrate-{unit_id}.slice")
        socket_, service, slice_ = map(self.state, units)
        return socket_, service, slice_

    def shown(self, unit_id: str, name: str) -> str:
        return str(self.bed.show("alice", f"orchestrate@{unit_id}.service", name))

    def worker(self, unit_id: str) -> str:
        """A worker of the run in a scope, one that does not go when it is asked to; the name of its unit."""
        name = f"orchestrate-{unit_id}-worker.scope"
        command = ["systemd-run", "--user", "--scope", f"--unit={name}", f"--slice=orchestrate-{unit_id}.slice"]
        command += ["--property=TimeoutStopSec=1s"]
        self.bed.popen("alice", [*command, "sh", "-c", "trap '' TERM; while :; do sleep 1000; done"])
        until(lambda: self.state(name) == "active", "the worker's scope")
        return name

    def ask(self, peer: Peer, line: str) -> str:
        peer.send_bytes(line.encode())
        return read_line(peer.sock)

    def told(self, peer: Peer) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(peer, "tell"))
        return answer

    def refused(self, address: str) -> bool:
        """Whether there is no such address."""
        try:
            self.door.connect(address)
        except OSError as error:
            assert error.errno == errno.ENOENT
            return True
        return False

    def place_exists(self, unit_id: str) -> bool:
        return bool((self.bed.root / f"run/user/{UID}/agent-intercom/run/{unit_id}").exists())


def read_line(sock: socket.socket) -> str:
    sock.settimeout(HANG)
    got = b""
    while not got.endswith(b"\n"):
        data = sock.recv(65536)
        assert data, "hung up"
        got += data
    return got.decode().strip()


@pytest.fixture
def runs(bed: Any) -> Iterator[Runs]:
    """Alice's runs, with the stand-in; they are ended at the end."""
    with Door(bed) as door:
        found = Runs(bed, door)
        found.stand_in()
        yield found
        # Those of scopes go with what was started in them.
        bed.as_user("alice", "systemctl --user stop orchestrate.slice; systemctl --user reset-failed")


def test_verify_is_silent(bed: Any) -> None:
    """It prints problems and still ends with 0, so any output counts."""
    paths = [f"/usr/lib/systemd/user/{name}" for name in TEMPLATES]
    done = bed.as_user("alice", ["systemd-analyze", "--user", "verify", *paths])
    assert done.stdout + done.stderr == ""


def test_nothing_of_a_run_can_be_enabled(bed: Any) -> None:
    units = [name.replace("@", "@r1") for name in TEMPLATES]
    states = bed.as_user("alice", ["systemctl", "--user", "is-enabled", *units], check=False).stdout.split()
    assert states == ["static"] * 3


def test_the_first_connection_starts_the_broker_of_that_run_and_no_other(runs: Runs) -> None:
    first, second = runs.start("r1"), runs.start("r2")
    assert runs.states("r1") == runs.states("r2") == ("active", "inactive", "active")
    peer = runs.door.connect(first)
    told = runs.told(peer)
    assert told["argv"] == ["r1"]
    assert told["names"] == ["run"]
    assert "/orchestrate.slice/orchestrate-r1.slice/orchestrate@r1.service" in told["cgroup"]
    assert runs.states("r1") == ("active", "active", "active")
    assert runs.states("r2") == ("active", "inactive", "active")
    # One broker, not one for each connection.
    assert runs.told(runs.door.connect(first))["pid"] == told["pid"] == int(runs.shown("r1", "MainPID"))
    assert runs.told(runs.door.connect(second))["argv"] == ["r2"]
    modes = runs.bed.run(["stat", "-c", "%a %U", first, first.rpartition("/")[0]]).stdout.split("\n")[:2]
    assert modes == ["600 alice", "700 alice"]


def test_stopping_the_slice_ends_everything_and_nothing_comes_back(runs: Runs) -> None:
    address = runs.start("r1")
    worker = runs.worker("r1")
    peer = runs.door.connect(address)
    pid = runs.told(peer)["pid"]
    assert runs.ask(peer, "fork") == "done"
    cgroup = runs.bed.root / "sys/fs/cgroup" / runs.shown("r1", "ControlGroup").lstrip("/")
    until(lambda: len((cgroup / "cgroup.procs").read_text().split()) == 2, "the forked process")
    runs.systemctl("stop", "orchestrate-r1.slice")
    assert runs.states("r1") == ("inactive", "inactive", "inactive")
    # It had to be killed.
    assert runs.state(worker) == "failed"
    assert not (runs.bed.root / f"proc/{pid}").exists()
    assert not cgroup.exists()
    assert runs.refused(address)
    assert not runs.place_exists("r1")
    # Neither by connecting nor by starting a unit of it.
    assert runs.systemctl("start", "orchestrate@r1.socket", check=False) != 0
    assert runs.systemctl("start", "orchestrate@r1.service", check=False) != 0
    assert runs.refused(address)
    assert runs.states("r1")[:2] == ("inactive", "inactive")


def test_a_run_that_was_not_written_cannot_be_started(runs: Runs) -> None:
    address = runs.start("r1").replace("r1.sock", "r2.sock")
    assert runs.refused(address)
    assert runs.systemctl("start", "orchestrate@r2.socket", check=False) != 0
    assert runs.refused(address)
    assert runs.states("r2") == ("inactive", "inactive", "inactive")


def test_a_second_start_fails_and_leaves_the_first_alone(runs: Runs) -> None:
    address = runs.start("r1")
    pid = runs.told(runs.door.connect(address))["pid"]
    with pytest.raises(AssertionError, match="run is there already"):
        runs.start("r1")
    assert runs.told(runs.door.connect(address))["pid"] == pid


def test_stopping_the_socket_ends_the_broker(runs: Runs) -> None:
    address = runs.start("r1")
    runs.told(runs.door.connect(address))
    runs.systemctl("stop", "orchestrate@r1.socket")
    assert runs.refused(address)
    # The slice goes with the last of its units.
    until(lambda: runs.states("r1") == ("inactive", "inactive", "inactive"), "the end of the slice")


def test_all_runs_are_ended_and_workers_outside_them_go_on(runs: Runs) -> None:
    """As operations.md has it: all units of runs at once; and what else is in the slice above."""
    for unit in ("r1", "r2"):
        runs.told(runs.door.connect(runs.start(unit)))
    words = "--unit=worker-x --slice=orchestrate-workers.slice --scope sleep 1000"
    runs.bed.as_user("alice", f"systemd-run --user --quiet {words} >/dev/null 2>&1 &")
    until(lambda: runs.state("worker-x.scope") == "active", "a worker outside runs")
    runs.systemctl("stop", "orchestrate@*")
    for unit in ("r1", "r2"):
        until(lambda unit=unit: set(runs.states(unit)) == {"inactive"}, "the end of the run")  # type: ignore[misc]
    assert runs.state("worker-x.scope") == "active"
    runs.systemctl("stop", "orchestrate.slice")
    assert runs.state("worker-x.scope") == "inactive"


def test_connections_outlive_the_broker(runs: Runs) -> None:
    peer = runs.door.connect(runs.start("r1"))
    pids = [runs.told(peer)["pid"]]
    assert runs.ask(peer, "store 130") == "done"
    assert runs.shown("r1", "NFileDescriptorStore") == runs.shown("r1", "FileDescriptorStoreMax") == "128"
    peer.send_bytes(b"die")
    until(lambda: runs.shown("r1", "MainPID") not in {"0", str(pids[0])}, "the next broker")
    pids.append(runs.told(peer)["pid"])
    runs.systemctl("restart", "orchestrate@r1.service")
    pids.append(runs.told(peer)["pid"])
    assert len(set(pids)) == 3
    assert runs.shown("r1", "NFileDescriptorStore") == "128"
    assert runs.states("r1") == ("active", "active", "active")
    assert runs.place_exists("r1")


def test_a_broker_that_hangs_is_killed_and_restarted(runs: Runs) -> None:
    runs.stand_in(service="WatchdogSec=1s\n")
    peer = runs.door.connect(runs.start("r1"))
    before = runs.told(peer)["pid"]
    assert runs.ask(peer, "store 1") == "done"
    peer.send_bytes(b"hang")
    until(lambda: runs.shown("r1", "NRestarts") == "1", "the restart")
    assert runs.told(peer)["pid"] != before
    text = " ".join(str(entry["MESSAGE"]) for entry in runs.bed.journal("alice", "USER_UNIT=orchestrate@r1.service"))
    assert "SIGKILL" in text and "SIGABRT" not in text


def test_a_run_is_reaped_once_its_broker_has_failed_for_good(runs: Runs) -> None:
    runs.stand_in("fail")
    address, other = runs.start("r1"), runs.start("r2")
    worker = runs.worker("r1")
    runs.door.connect(address)
    until(lambda: runs.states("r1")[2] == "inactive", "the end of the run")
    assert runs.states("r1")[1] == "failed"
    until(lambda: runs.state("orchestrate-reaper@r1.service") == "inactive", "the end of the reaper")
    # It had to be killed.
    assert runs.state(worker) == "failed"
    assert runs.refused(address)
    assert not runs.place_exists("r1")
    assert runs.shown("r1", "NRestarts") == runs.shown("r1", "StartLimitBurst") == "30"
    # Nobody else's.
    assert runs.states("r2") == ("active", "inactive", "active")
    assert not runs.refused(other)


def test_a_broker_that_is_refused_is_not_tried_again(runs: Runs) -> None:
    runs.stand_in("refuse")
    address = runs.start("r1")
    runs.door.connect(address)
    until(lambda: runs.states("r1")[2] == "inactive", "the end of the run")
    assert runs.shown("r1", "NRestarts") == "0"
    assert runs.refused(address)


def test_a_broker_that_often_ends_keeps_its_address(runs: Runs) -> None:
    """systemd's own limits, 5 starts in 10 s and 20 activations in 2 s, would take it away."""
    address = runs.start("r1")
    pids = set()
    for _ in range(22):
        peer = runs.door.connect(address)
        pids.add(runs.told(peer)["pid"])
        peer.send_bytes(b"exit 0")
        runs.door.hang_up(peer)
    assert len(pids) == 22


def test_forked_workers_inherit_no_confinement(runs: Runs) -> None:
    """Compared with what the same manager starts without any setting, except that nothing may be dumped."""
    told = runs.told(runs.door.connect(runs.start("r1")))
    assert (told["no_new_privs"], told["seccomp"], told["umask"]) == ("0", "0", "0022")
    plain = ["systemd-run", "--user", "--quiet", "--pipe", "--wait", "--collect"]
    bounding = runs.bed.as_user("alice", [*plain, "grep", "CapBnd", "/proc/self/status"]).stdout.split()[1]
    limits = runs.bed.as_user("alice", [*plain, "cat", "/proc/self/limits"]).stdout
    command = "for n in mnt user net pid ipc; do readlink /proc/self/ns/$n; done"
    namespaces = runs.bed.as_user("alice", [*plain, "sh", "-c", command]).stdout.split()
    assert told["bounding"] == bounding
    assert list(told["namespaces"].values()) == namespaces
    assert re.sub("Max core.*", "", told["limits"]) == re.sub("Max core.*", "", limits)
    assert re.search(r"Max core file size +1 +1 ", told["limits"])
    assert runs.shown("r1", "MemorySwapMax") == "0"
    # Nothing of the shell that started the run: that is in run.json.
    assert "SHLVL" not in told["environ"]


def test_the_installed_broker_serves_a_run_and_a_second_one_for_it_fails(runs: Runs) -> None:
    runs.no_stand_in()
    runs.bed.python("alice", _CREATE, "r1", "r2")
    addresses = [f"/run/user/{UID}/agent-intercom/run/{unit}.sock" for unit in ("r1", "r2")]
    runs.systemctl("start", "orchestrate@r1.socket", "orchestrate@r2.socket")
    runs.door.connect(addresses[0])
    until(lambda: runs.states("r1")[1] == "active", "the broker")
    assert "degraded" not in runs.shown("r1", "StatusText")
    runs.door.connect(addresses[1])
    until(lambda: runs.states("r2")[2] == "inactive", "the end of the second")
    # The connection still waits when the first attempt ends, and may start another while the reaper stops the slice.
    assert runs.states("r2")[1] in ("failed", "inactive")
    assert runs.shown("r2", "NRestarts") == "0"
    entries = runs.bed.journal("alice")
    assert any("another broker serves this run" in str(entry["MESSAGE"]) for entry in entries)
    assert runs.states("r1") == ("active", "active", "active")
    runs.systemctl("stop", "orchestrate-r1.slice")
    assert runs.states("r1") == ("inactive", "inactive", "inactive")


def test_a_run_whose_directory_is_gone_is_refused_aloud(runs: Runs) -> None:
    runs.no_stand_in()
    peer = runs.door.connect(runs.start("r1"))
    until(lambda: runs.states("r1")[1] == "active", "the broker")
    assert runs.shown("r1", "StatusText").startswith("degraded: run_gone")
    peer.send({"type": "control", "id": "0" * 32})
    answer = peer.recv()
    assert answer is not None and answer["success"] is False, answer
    assert runs.states("r1") == ("active", "active", "active")
