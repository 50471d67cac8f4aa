# SPDX-License-Identifier: Apache-2.0
"""Beside brokers and clients of the Node line: neither side takes the other's place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.wire import LOCAL, Door, configure, events, health_ok, listening, until

DIRECTORY = "/home/alice/.pi/agent/intercom"
IDENTITY = f"import json; IDENTITY = json.loads({json.dumps(health_ok(''))!r})\n"

NODE_BROKER = (
    IDENTITY
    + """
import os, signal, socket, struct
directory = os.path.expanduser("~/.pi/agent/intercom")
os.makedirs(directory, 0o700, exist_ok=True)
owner = os.path.join(directory, "broker.owner")
for _ in range(2):
    try:
        with open(os.open(owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(str(os.getpid()))
        break
    except FileExistsError:
        pid = open(owner).read()
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            os.unlink(owner)
            continue
        except PermissionError:
            pass
        sys.exit(f"Intercom broker already owned by live process {pid}")
listeners = []
for name in ("broker.sock", "remote-gateway.sock"):
    path = os.path.join(directory, name)
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(511)
    listeners.append(listener)
with open(os.path.join(directory, "broker.pid"), "w") as file:
    file.write(str(os.getpid()))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("started", os.getpid(), flush=True)
try:
    while True:
        peer, _ = listeners[0].accept()
        size = struct.unpack(">I", peer.recv(4, socket.MSG_WAITALL))[0]
        asked = json.loads(peer.recv(size, socket.MSG_WAITALL))
        answer = IDENTITY | {"requestId": asked["requestId"]}
        payload = json.dumps(answer).encode()
        peer.sendall(struct.pack(">I", len(payload)) + payload)
        peer.close()
finally:
    for name in ("broker.sock", "remote-gateway.sock", "broker.pid", "broker.owner"):
        os.unlink(os.path.join(directory, name))
"""
)
"""Start-up, health and end as the contract has them (sections 1.3 and 1.4)."""

SPAWN = (
    IDENTITY
    + """
import os, socket, struct, subprocess, time, uuid
environment = dict(os.environ, PI_CODING_AGENT_DIR=os.path.expanduser("~/.pi/agent"), NODE_NO_WARNINGS="1")
for _ in range(int(sys.argv[1])):
    subprocess.Popen(["intercom", "broker", "/x/entry.mjs"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL, start_new_session=True, cwd="/usr/lib", env=environment)

def compatible():
    asked = {"type": "health", "requestId": str(uuid.uuid4())}
    payload = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(1.0)
        try:
            peer.connect(os.path.expanduser("~/.pi/agent/intercom/broker.sock"))
            peer.sendall(struct.pack(">I", len(payload)) + payload)
            size = struct.unpack(">I", peer.recv(4, socket.MSG_WAITALL))[0]
            return json.loads(peer.recv(size, socket.MSG_WAITALL)) == IDENTITY | {"requestId": asked["requestId"]}
        except OSError:
            return False

end = time.monotonic() + 5
while not compatible():
    if time.monotonic() > end:
        sys.exit("Broker failed to start within timeout")
    time.sleep(0.1)
"""
)
"""What a client does that finds no broker, with {"brokerCommand": "intercom", "brokerArgs": ["broker"]}."""

PEER_PID = """
import socket, struct
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(sys.argv[1])
    print(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
"""


def here(bed: Any, name: str) -> Path:
    found: Path = bed.root / DIRECTORY.lstrip("/") / name
    return found


@pytest.fixture
def node(bed: Any) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = bed.popen("alice", bed.python_command(NODE_BROKER))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("started")
    return process


def brokers(bed: Any) -> list[str]:
    """Processes of brokers that bound for themselves."""
    found: list[str] = bed.run(["pgrep", "-u", "alice", "-f", "/x/entry.mjs"], check=False).stdout.split()
    return found


def test_a_node_broker_keeps_its_address(bed: Any, node: subprocess.Popen[str]) -> None:
    pid = here(bed, "broker.owner").read_text()
    before = here(bed, "broker.sock").stat().st_ino
    done = bed.as_user("alice", "systemctl --user start intercom.socket intercom-gateway.socket", check=False)
    assert done.returncode != 0 and not listening(bed)
    assert [entry["INTERCOM_PID"] for entry in events(bed, "FOREIGN_BROKER")] == [pid]
    with Door(bed) as door:
        door.probe(LOCAL[1])
        assert here(bed, "broker.sock").stat().st_ino == before
        assert here(bed, "broker.owner").read_text() == here(bed, "broker.pid").read_text() == pid
        with pytest.raises(FileNotFoundError):
            door.connect(LOCAL[0])
        # It ends as brokers do that are asked to, and the way is free.
        bed.as_user("alice", ["kill", pid])
        node.wait(30)
        bed.enable("alice")
        for path in LOCAL:
            door.probe(path)


def test_a_node_broker_does_not_start_beside_the_unit(bed: Any) -> None:
    bed.enable("alice")
    manager = bed.python("alice", PEER_PID, LOCAL[1]).strip()
    assert bed.python("alice", PEER_PID, LOCAL[0]).strip() == manager
    assert here(bed, "broker.owner").read_text() == manager
    assert not here(bed, "broker.pid").exists()
    second = bed.as_user("alice", bed.python_command(NODE_BROKER), check=False)
    assert second.returncode == 1
    assert second.stderr.strip() == f"Intercom broker already owned by live process {manager}"
    with Door(bed) as door:
        door.probe(LOCAL[1])
    # Nor does one of ours, as a client would start it.
    ours = bed.as_user("alice", ["intercom", "broker", "/x/entry.mjs"], check=False)
    assert (ours.returncode, ours.stdout) == (1, "")
    assert ours.stderr.startswith(f"intercom broker: Intercom broker already owned by live process {manager}, ")
    assert ours.stderr.count("\n") == 1
    bed.as_user("alice", "systemctl --user stop intercom.socket intercom-gateway.socket intercom.service")
    assert not here(bed, "broker.owner").exists()
    third = bed.popen("alice", bed.python_command(NODE_BROKER))
    assert third.stdout.readline().startswith("started")


def test_a_client_starts_it_as_its_broker_command(bed: Any) -> None:
    configure(bed, idle_exit_ms=1000)
    bed.python("alice", SPAWN, "1")
    (pid,) = brokers(bed)
    assert here(bed, "broker.owner").read_text() == here(bed, "broker.pid").read_text() == pid
    with Door(bed) as door:
        one, two = door.join("one", LOCAL[1]), door.join("two", LOCAL[1])
        one.deliver(two, "m-1")
        # Another client finds it and starts none.
        door.probe(LOCAL[1])
    until(lambda: not brokers(bed), "the end of a broker that nobody uses")
    left = {file.name for file in here(bed, ".").iterdir()}
    assert not left & {"broker.sock", "remote-gateway.sock", "broker.owner", "broker.pid"}
    bed.enable("alice")
    with Door(bed) as door:
        door.probe(LOCAL[1])


def test_of_several_that_clients_start_one_stays(bed: Any) -> None:
    bed.python("alice", SPAWN, "4")
    until(lambda: len(brokers(bed)) == 1, "one broker")
    assert [here(bed, "broker.owner").read_text()] == brokers(bed)
    with Door(bed) as door:
        door.join("one", LOCAL[1]).deliver(door.join("two", LOCAL[1]), "m-1")
