# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start`, `restart` and `stop` under a real service manager: what is made, and that it is taken back."""

from __future__ import annotations

import json
import os
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

# What stands for Pi: it tells what it was given, and stays, deaf to everything that can be refused.
_PI = """\
#!/usr/bin/python3 -I
import json, os, signal, sys, time
if "--list-models" in sys.argv:
    print("provider model")
    print("p m")
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
role = os.environ["PI_TMUX_ORCHESTRATOR_ROLE"]
generation = os.environ["PI_TMUX_ORCHESTRATOR_GENERATION"]
os.makedirs("/home/alice/seen", exist_ok=True)
with open(f"/home/alice/seen/.{role}", "w") as file:
    json.dump({"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}, file)
os.rename(f"/home/alice/seen/.{role}", f"/home/alice/seen/{role}-{generation}")
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
        command = "systemctl --user list-units --all --plain --no-legend 'orchestrate-*' 'orchestrate@*'"
        return str(self.bed.as_user("alice", command).stdout)

    def files(self) -> set[str]:
        """What lies where runs are made and told to their brokers."""
        places = f"/home/alice/.local {RUNTIME.format(uid=self.uid)} /run/user/{self.uid}/agent-intercom"
        return set(self.bed.run(f"find {places} 2>/dev/null", check=False).stdout.split())

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
    bed.run("rm -rf /home/alice/seen && mkdir -m 777 /home/alice/seen")
    (home / "bin/pi").write_text(_PI)
    (home / "bin/pi").chmod(0o755)
    bridge = home / "orchestrator-worker.js"
    bridge.write_text("")
    config = home / ".config/agent-intercom/orchestrate.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        '[defaults]\nprovider = "p"\nmodel = "m"\n[harness.pi]\nbridge = "/home/alice/orchestrator-worker.js"\n'
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
    assert told["stopped"] is True and told["state_retained"] is True
    assert line.states() == ""
    left = line.files()
    assert f"{directory}/manifest.json" in left and f"{directory}/startup.json" not in left
    assert not any(f"/{unit}" in name for name in left)
    assert line.json("list")["sessions"] == []
    # Nothing comes back by being connected to or asked.
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
        bed.run("mv /usr/lib/agent-intercom/orchestrate-worker /root/")
        undo = "mv /root/orchestrate-worker /usr/lib/agent-intercom/"
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
        assert error["code"] in {"startup_failed", "orchestration_error"}, error
        assert line.states() == ""
        assert line.files() - before <= {RUNTIME.format(uid=line.uid), f"{RUNTIME.format(uid=line.uid)}/.lock",
                                         f"/run/user/{line.uid}/agent-intercom"}  # fmt: skip
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
    units = f"'orchestrate-{unit}*' 'orchestrate@{unit}*'"
    public = line.bed.run(f"systemctl --user --machine=alice@ show {units} --all", check=False).stdout
    public += line.bed.as_user("alice", f"systemctl --user show {units} --all").stdout
    public += line.bed.run("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null").stdout
    public += json.dumps(line.bed.journal("alice"))
    public += line.call("status").stdout + line.call("--json", "status").stdout + line.call("list").stdout
    assert f"orchestrate-{unit}-reviewer-g1.service" in public
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


def test_restart_replaces_a_worker_that_is_away(line: Line) -> None:
    data = line.start()
    first = line.seen("reviewer", 1)
    line.bed.run("rm /home/alice/seen/reviewer-1")
    restart = ("restart", "pi-project-agents", "--role", "reviewer", "--yes")
    told = line.json(*restart, "--provider", "p", "--model", "m", "--thinking", "max")
    assert told["restarted"] is True and told["role"]["thinking"] == "max"
    second = line.seen("reviewer", 1)
    assert second["pid"] != first["pid"] and second["argv"][second["argv"].index("--thinking") + 1] == "max"
    assert not os.path.exists(f"{line.bed.root}/proc/{first['pid']}")
    manifest = json.loads(Path(line.bed.root, data["paths"]["coordination"][1:], "manifest.json").read_text())
    assert manifest["roles"]["reviewer"]["thinking"] == "max"
    error = line.error(*restart, "--provider", "p", "--model", "z")
    assert error["code"] == "orchestration_error" and "reviewer model unavailable" in error["message"]
    assert line.seen("reviewer", 1)["pid"] == second["pid"]


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
