# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start`, `restart` and `stop` under a real service manager: what is made, and that it is taken back."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.wire import until

PROJECT = "/home/alice/project"
ROOT = "/home/alice/.local/state/agent-intercom/runs"
RUNTIME = "/run/user/{uid}/agent-intercom/run"
SCOPE = "scope-canary-0123456789abcdef"
SECRET = "key-canary-0123456789abcdef"

# What stands for Pi: it tells what it was given, says hello, acknowledges what it is sent, and stays, deaf to SIGTERM.
_PI = """\
#!/usr/bin/python3 -I
import json, os, signal, socket, struct, sys, time
if "--list-models" in sys.argv:
    print("provider model")
    print("p m")
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
role, token, address, generation = (
    os.environ[f"PI_TMUX_ORCHESTRATOR_{name}"] for name in ("ROLE", "TOKEN", "SOCKET", "GENERATION")
)
with open(f"/home/alice/seen/.{role}", "w") as file:
    json.dump({"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}, file)
os.rename(f"/home/alice/seen/.{role}", f"/home/alice/seen/{role}-{generation}")
line = socket.socket(socket.AF_UNIX)
line.connect(address)
reader = line.makefile("rb")
def send(kind, **keys):
    frame = {"version": 1, "type": kind, "role": role, "token": token, "id": os.urandom(16).hex(), **keys}
    data = json.dumps(frame).encode()
    line.sendall(struct.pack(">I", len(data)) + data)
if os.path.exists("/home/alice/bin/mute"):
    time.sleep(3600)
send("hello", generation=int(generation))
send("lifecycle", state="idle", usage=None)
while head := reader.read(4):
    frame = json.loads(reader.read(struct.unpack(">I", head)[0]))
    if frame["type"] in ("context", "assignment"):
        send("ack", delivery_id=frame["id"], status="accepted")
while True:
    time.sleep(3600)
"""


class Line:
    """alice's command line."""

    def __init__(self, bed: Any) -> None:
        self.bed = bed
        self.uid = int(bed.as_user("alice", "id -u").stdout)
        self.environment = {"PATH": "/home/alice/bin:/usr/bin:/bin", "EXTRA_API_KEY": SECRET}

    def call(self, *words: str, check: bool = True) -> Any:
        given = [f"{name}={value}" for name, value in self.environment.items()]
        return self.bed.as_user("alice", ["env", "-C", PROJECT, *given, "/usr/bin/orchestrate", *words], check=check)

    def json(self, *words: str) -> dict[str, Any]:
        said = self.call("--json", *words)
        envelope: dict[str, Any] = json.loads(said.stdout)
        assert envelope["success"], envelope
        data: dict[str, Any] = envelope["data"]
        return data

    def error(self, *words: str) -> dict[str, str]:
        said = self.call("--json", *words, check=False)
        assert said.stderr == ""
        error: dict[str, str] = json.loads(said.stdout)["error"]
        return error

    def start(self, *words: str) -> dict[str, Any]:
        return self.json("start", "--task", "Do it.", *words)

    def states(self) -> str:
        """Every unit of every run, whatever its state; the slice of all runs is nobody's."""
        command = "systemctl --user list-units --all --plain --no-legend 'orchestrate-*' 'orchestrate@*' 'worker-*'"
        told = self.bed.as_user("alice", command).stdout.splitlines(keepends=True)
        # The worker service is that of every run.
        return "".join(each for each in told if not each.startswith("orchestrate-workers."))

    def worker(self, role: str) -> str:
        """The scope unit of a role's worker."""
        (unit,) = [each["unit"] for each in self.json("status")["workers"] if each["role"] == role]
        return str(unit)

    def files(self) -> set[str]:
        """What lies where runs are made and told to their brokers."""
        places = f"/home/alice/.local {RUNTIME.format(uid=self.uid)} /run/user/{self.uid}/agent-intercom"
        found = self.bed.run(f"find {places} 2>/dev/null", check=False).stdout.split()
        # What the worker service has of its own outlives every run, and so do the directories that hold it.
        theirs = ("/workers.sock", "/.local", "/.local/state", "/.local/state/agent-intercom")
        return {name for name in found if "/workers.sqlite3" not in name and not name.endswith(theirs)}

    def seen(self, role: str, generation: int) -> dict[str, Any]:
        """What the stand-in for Pi was given, as soon as it has told."""
        name = self.bed.root / f"home/alice/seen/{role}-{generation}"
        until(name.exists, f"{role} of generation {generation}")
        found: dict[str, Any] = json.loads(name.read_text())
        return found


EXTERNAL = tuple(word for role in ("implementer", "reviewer") for word in ("--harness", f"{role}=external"))


@pytest.fixture
def line(bed: Any) -> Iterator[Line]:
    home = bed.root / "home/alice"
    (home / "project").mkdir(exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)
    bed.run("rm -rf /home/alice/seen /home/alice/bin/mute && mkdir -m 777 /home/alice/seen")
    (home / "bin/pi").write_text(_PI)
    (home / "bin/pi").chmod(0o755)
    bridge = home / "orchestrator-worker.js"
    bridge.write_text("")
    config = home / ".config/agent-intercom/orchestrate.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        '[defaults]\nprovider = "p"\nmodel = "m"\n[harness.pi]\nbridge = "/home/alice/orchestrator-worker.js"\n'
        '[workers]\nwritable = ["/home/alice/seen"]\n'
    )
    bed.run("chown -R alice: /home/alice")
    made = Line(bed)
    yield made
    bed.as_user("alice", "systemctl --user stop orchestrate.slice; systemctl --user reset-failed", check=False)


def test_start_makes_a_run_that_listens_and_stop_leaves_nothing_of_it(line: Line) -> None:
    data = line.start(*EXTERNAL)
    unit, directory = data["unit"], data["paths"]["coordination"]
    assert Path(directory).parent == Path(ROOT, "pi-project-agents")
    assert data["paths"]["observer_socket"] == f"{RUNTIME.format(uid=line.uid)}/{unit}.sock"
    assert f"orchestrate@{unit}.socket" in line.states() and f"orchestrate@{unit}.service" in line.states()
    files = line.files()
    assert {f"{directory}/{name}" for name in ("manifest.json", "control.token", "startup.json")} <= files
    assert Path(line.bed.root, directory[1:], "startup-state").read_text() == "RUNNING\n"
    assert f"{RUNTIME.format(uid=line.uid)}/{unit}/run.json" in files
    listed = line.json("list")["sessions"]
    assert [(one["session"], one["project"]) for one in listed] == [("pi-project-agents", PROJECT)]

    told = line.json("stop", "--yes")
    assert told == {
        "session": "pi-project-agents",
        "run_id": data["run_id"],
        "stopped": True,
        "state_retained": True,
        "paths": {"coordination": directory},
        "registry_finalization": {"failed_roles": []},
    }
    assert line.states() == ""
    left = line.files()
    assert f"{directory}/manifest.json" in left and f"{directory}/startup.json" not in left
    assert not any(f"/{unit}" in name for name in left)
    assert line.json("list")["sessions"] == []
    # Nothing comes back by being connected to or asked.
    with socket.socket(socket.AF_UNIX) as caller, pytest.raises(FileNotFoundError):
        caller.connect(f"{line.bed.root}{data['paths']['observer_socket']}")
    assert line.error("send", "pi-project-agents", "--role", "reviewer", "--message", "x")["code"] == "broker_not_live"
    assert line.states() == ""


def test_a_session_that_is_going_on_is_refused_and_left_alone(line: Line) -> None:
    first = line.start(*EXTERNAL)
    before = line.files()
    assert line.error("start", "--task", "Do it.", *EXTERNAL)["code"] == "session_collision"
    assert line.files() == before
    assert line.json("status")["run_id"] == first["run_id"]
    line.start(*EXTERNAL, "--session", "another")
    assert {one["session"] for one in line.json("list")["sessions"]} == {"pi-project-agents", "another"}


@pytest.mark.parametrize("fault", ["no-broker", "no-worker", "no-units", "no-room"])
def test_a_start_that_fails_takes_back_exactly_what_it_made(line: Line, fault: str) -> None:
    bed = line.bed
    before = line.files()
    undo = ":"
    words: tuple[str, ...] = ()
    if fault == "no-broker":
        bed.run("mv /usr/lib/agent-intercom/orchestrate-broker /root/")
        undo = "mv /root/orchestrate-broker /usr/lib/agent-intercom/"
        words = EXTERNAL
    elif fault == "no-worker":
        bed.run("mv /usr/lib/agent-intercom/orchestrate-launcher /root/")
        undo = "mv /root/orchestrate-launcher /usr/lib/agent-intercom/"
    elif fault == "no-units":
        bed.run("mv /usr/lib/systemd/user/orchestrate@.socket /root/")
        bed.as_user("alice", "systemctl --user daemon-reload")
        undo = "mv /root/orchestrate@.socket /usr/lib/systemd/user/"
        words = EXTERNAL
    else:
        bed.run(f"mkdir -p {ROOT}/pi-project-agents && chown -R alice: /home/alice/.local")
        bed.run(f"mount -t tmpfs -o size=16k,mode=700,uid={line.uid} none {ROOT}")
        undo = f"umount {ROOT}"
        before = line.files()
        words = EXTERNAL
    try:
        error = line.error("start", "--task", "Do it.", *words)
        assert error["code"] == ("orchestration_error" if fault == "no-room" else "startup_failed"), error
        assert line.states() == ""
        left = {path for path in line.files() - before if "/.lock" not in path}
        assert left <= {RUNTIME.format(uid=line.uid), f"/run/user/{line.uid}/agent-intercom"}
    finally:
        bed.run(undo)
        bed.as_user("alice", "systemctl --user daemon-reload")


def test_workers_are_given_what_was_chosen_and_nothing_is_told_to_others(line: Line) -> None:
    line.environment["AGENT_INTERCOM_SCOPE_ID"] = SCOPE
    data = line.start("--reviewer-thinking", "low")
    unit, directory = data["unit"], data["paths"]["coordination"]
    assert data["scoped"] is True and "EXTRA_API_KEY" in data["environment"]
    token = Path(line.bed.root, directory[1:], "reviewer.token").read_text().strip()
    seen = line.seen("reviewer", 1)
    assert seen["cwd"] == PROJECT
    assert seen["environ"]["AGENT_INTERCOM_SCOPE_ID"] == SCOPE and seen["environ"]["EXTRA_API_KEY"] == SECRET
    assert seen["environ"]["PI_TMUX_ORCHESTRATOR_TOKEN"] == token
    assert seen["environ"]["PI_TMUX_ORCHESTRATOR_SOCKET"] == data["paths"]["observer_socket"]
    assert "INVOCATION_ID" not in seen["environ"] and "NOTIFY_SOCKET" not in seen["environ"]
    assert seen["argv"][seen["argv"].index("--thinking") + 1] == "low"
    line.seen("implementer", 1)
    units = f"'orchestrate-{unit}*' 'orchestrate@{unit}*' 'worker-*' 'orchestrate-workers*'"
    public = line.bed.run(f"systemctl --user --machine=alice@ show {units} --all", check=False).stdout
    public += line.bed.as_user("alice", f"systemctl --user show {units} --all").stdout
    public += line.bed.run("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null").stdout
    public += json.dumps(line.bed.journal("alice"))
    public += line.call("status").stdout + line.call("--json", "status").stdout + line.call("list").stdout
    assert line.worker("reviewer") in public and "Agent Intercom, worker" in public
    for canary in (SCOPE, SECRET, token):
        assert canary not in public


def test_stop_ends_workers_that_do_not_want_to(line: Line) -> None:
    line.start()
    pids = {line.seen(role, 1)["pid"] for role in ("implementer", "reviewer")}
    assert len(pids) == 2
    line.json("stop", "--yes")
    assert line.states() == ""
    for pid in pids:
        assert not os.path.exists(f"{line.bed.root}/proc/{pid}")


RESTART = ("restart", "pi-project-agents", "--role", "reviewer", "--yes")


def connected(line: Line) -> dict[str, Any]:
    """The run's roles as its broker has them, once every worker is there."""

    def there() -> Any:
        rows = {row["role"]: row for row in line.json("status")["broker"]["roles"]}
        return rows if all(row["connected"] for row in rows.values()) else None

    rows: dict[str, Any] = until(there, "every worker")
    return rows


def test_restart_replaces_a_worker_once_the_broker_has_agreed(line: Line) -> None:
    data = line.start()
    connected(line)
    first = line.seen("reviewer", 1)
    told = line.json(*RESTART, "--provider", "p", "--model", "m", "--thinking", "max")
    assert told.keys() == {"session", "role", "restarted", "generation"}
    assert told["restarted"] is True and told["generation"] == 2
    assert told["role"] == {
        "name": "reviewer",
        "transport": "rpc",
        "provider": "p",
        "model": "m",
        "thinking": "max",
        "tool_policy": "workflow-read-only-with-bash",
    }
    second = line.seen("reviewer", 2)
    assert second["argv"][second["argv"].index("--thinking") + 1] == "max"
    assert not os.path.exists(f"{line.bed.root}/proc/{first['pid']}")
    assert connected(line)["reviewer"]["generation"] == 2
    assert line.states().count("worker-") == 2
    manifest = json.loads(Path(line.bed.root, data["paths"]["coordination"][1:], "manifest.json").read_text())
    assert manifest["roles"]["reviewer"]["thinking"] == "max"


def test_restart_starts_a_worker_that_is_away_again(line: Line) -> None:
    (line.bed.root / "home/alice/bin/mute").touch()
    line.start()
    first = line.seen("reviewer", 1)
    line.bed.run("rm /home/alice/seen/reviewer-1")
    assert line.json(*RESTART, "--thinking", "max")["generation"] == 1
    second = line.seen("reviewer", 1)
    assert second["pid"] != first["pid"] and second["argv"][second["argv"].index("--thinking") + 1] == "max"
    assert not os.path.exists(f"{line.bed.root}/proc/{first['pid']}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--provider", "p", "--model", "z"), "reviewer model unavailable"),
        (("--provider", "", "--model", "", "--skip-model-check"), "--provider"),
        (("--provider=--extension", "--model=/tmp/x.js", "--skip-model-check"), "--provider"),
        (("--provider", "p", "--model", "m\nx", "--skip-model-check"), "--model"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_anybody_is_let_go(
    line: Line, words: tuple[str, ...], text: str
) -> None:
    line.start()
    connected(line)
    pid = line.seen("reviewer", 1)["pid"]
    assert text in line.error(*RESTART, *words)["message"]
    assert connected(line)["reviewer"]["generation"] == 1 and os.path.exists(f"{line.bed.root}/proc/{pid}")


def test_a_restart_that_fails_is_told_to_the_broker_and_to_the_person(line: Line) -> None:
    line.start()
    connected(line)
    line.bed.run("mv /usr/lib/agent-intercom/orchestrate-launcher /root/")
    try:
        error = line.error(*RESTART)
    finally:
        line.bed.run("mv /root/orchestrate-launcher /usr/lib/agent-intercom/")
    assert error["code"] == "startup_failed" and "redeliver" in error["message"], error
    broker = line.json("status")["broker"]
    assert broker["workflow"]["state"] == "uncertain"
    assert {row["role"]: row["state"] for row in broker["roles"]}["reviewer"] == "uncertain"
    line.json(*RESTART)
    connected(line)
    line.json("redeliver", "pi-project-agents", "--role", "reviewer", "--yes")
    assert line.json("status")["broker"]["workflow"]["state"] == "active"


def test_two_restarts_at_once_are_one_after_the_other(line: Line) -> None:
    line.start()
    connected(line)
    given = ["env", "-C", PROJECT, *(f"{name}={value}" for name, value in line.environment.items())]
    both = [line.bed.popen("alice", [*given, "/usr/bin/orchestrate", "--json", *RESTART]) for _ in range(2)]
    told = [json.loads(each.communicate(timeout=60)[0]) for each in both]
    assert all(each["success"] for each in told), told
    rows = connected(line)
    assert rows["reviewer"]["state"] != "uncertain"
    assert line.states().count("worker-") == 2


@pytest.mark.parametrize("when", ["broker", "launcher"])
def test_a_start_that_is_interrupted_leaves_nothing(line: Line, when: str) -> None:
    bed, name = line.bed, f"/usr/lib/agent-intercom/orchestrate-{when}"
    before = line.files()
    stuck = "#!/bin/sh\\n: >/home/alice/seen/begun\\nexec sleep 600\\n"
    bed.run(f"mv {name} /root/; printf '{stuck}' >{name}; chmod 755 {name}")
    try:
        given = ["env", "-C", PROJECT, *(f"{key}={value}" for key, value in line.environment.items())]
        start = [*given, "sh", "-c", 'echo $$ >/home/alice/seen/pid; exec "$@"', "-", "/usr/bin/orchestrate", "start"]
        process = bed.popen("alice", [*start, "--task", "Do it."])
        until((bed.root / "home/alice/seen/begun").exists, "a start in the middle")
        bed.run("kill -TERM $(cat /home/alice/seen/pid)")
        process.communicate(timeout=60)
    finally:
        bed.run(f"mv -f /root/orchestrate-{when} {name}")
    assert process.returncode == 143
    assert line.states() == ""
    assert {
        path for path in line.files() - before if not path.endswith(("/run", "agent-intercom")) and ".lock" not in path
    } == set()


def test_stop_ends_what_no_longer_listens(line: Line) -> None:
    data = line.start()
    pid = line.seen("reviewer", 1)["pid"]
    # The workers go with the socket, and take their time.
    line.bed.as_user("alice", f"systemctl --user stop orchestrate@{data['unit']}.socket")
    assert line.json("list")["sessions"] == []
    assert line.json("stop", "pi-project-agents", "--yes")["stopped"] is True
    assert not os.path.exists(f"{line.bed.root}/proc/{pid}") and line.states() == ""
    assert line.error("stop", "pi-project-agents", "--yes")["code"] == "broker_not_live"


@pytest.mark.parametrize("fault", ["manifest", "place"])
def test_stop_ends_a_run_that_cannot_be_read(line: Line, fault: str) -> None:
    data = line.start(*EXTERNAL)
    if fault == "manifest":
        (line.bed.root / data["paths"]["coordination"][1:] / "manifest.json").write_text("{}")
    else:
        line.bed.run(f"rm {RUNTIME.format(uid=line.uid)}/{data['unit']}/run.json")
    assert line.error("start", "--task", "Do it.", *EXTERNAL)["code"] == "session_collision"
    assert line.json("stop", "pi-project-agents", "--yes")["stopped"] is True
    assert line.states() == ""


def test_a_person_is_told_what_to_do_next(line: Line) -> None:
    said = line.call("start", "--task", "Do it.", *EXTERNAL).stdout
    for word in (
        "orchestrate status pi-project-agents",
        "orchestrate stop pi-project-agents --yes",
        "implementer.token",
    ):
        assert word.replace("implementer", "ROLE") in said or word in said
    refused = line.call("stop", check=False)
    assert refused.returncode == 2 and "--yes" in refused.stderr and "orchestrate@" in line.states()
