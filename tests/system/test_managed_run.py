# SPDX-License-Identifier: Apache-2.0
"""Runs whose workers are any programs: each in a scope unit of the run's slice, confined by its role, gone at the end.

What works here is told by scripts of the shell, which get their assignments as files and answer with
`orchestrate report`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.wire import until

PROJECT = "/home/alice/project"
SCOPE = "scope-canary-0123456789abcdef"
SECRET = "key-canary-0123456789abcdef"
SESSION = "pi-project-agents"

IMPLEMENTS = """
echo "round $AGENT_INTERCOM_ROUND" >>version.txt
orchestrate report --summary "Written."
"""

# Tries each way to write, and approves where the kernel has refused every one.
REVIEWS = f"""
[ -r {PROJECT}/version.txt ] || exit 9
{{
    echo x >>{PROJECT}/version.txt
    echo x >{PROJECT}/new.txt
    rm {PROJECT}/version.txt
    mv {PROJECT}/version.txt {PROJECT}/other.txt
    mkdir {PROJECT}/new
    touch "$HOME/.profile-of-mine"
}} 2>"$AGENT_INTERCOM_SCRATCH/refusals"
cp "$AGENT_INTERCOM_SCRATCH/refusals" "$TMPDIR/again" || exit 9
cp "$AGENT_INTERCOM_SCRATCH/refusals" "/home/alice/seen/by-the-reviewer" 2>/dev/null && exit 9
refused=$(grep -c -E 'Permission denied|Read-only' "$AGENT_INTERCOM_SCRATCH/refusals")
[ "$refused" = 6 ] && verdict=approved || verdict=changes_requested
orchestrate report --verdict $verdict --summary "$refused refused"
"""

TESTS_IN_A_COPY = """
cd "$AGENT_INTERCOM_CHECKOUT" || exit 9
[ -e bin/reviewer ] && [ -e .local/state/kept ] && [ ! -e .local/state/agent-intercom ] || exit 9
echo x >>version.txt || exit 9
orchestrate report --verdict approved --summary "In a copy."
"""

# Leaves its session twice over, hears nothing that is sent to it, and has a few hundred children.
STUBBORN = """
trap '' TERM HUP INT
cat >"$AGENT_INTERCOM_SCRATCH/many" <<'END'
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        made = 0
        try:
            while made < 300:
                if os.fork() == 0:
                    signal.pause()
                made += 1
        except OSError:
            pass
        open("/home/alice/seen/many", "w").write(str(made))
        signal.pause()
    os._exit(0)
os.wait()
END
python3 "$AGENT_INTERCOM_SCRATCH/many"
while :; do sleep 1000; done
"""

WAITS = "echo $$ >/home/alice/seen/waits; exec sleep 1000"


class Line:
    """alice's command line, and what the machine shows of her runs."""

    def __init__(self, bed: Any) -> None:
        self.bed = bed
        self.uid = int(bed.as_user("alice", "id -u").stdout)
        self.environment = {"AGENT_INTERCOM_SCOPE_ID": SCOPE, "EXTRA_API_KEY": SECRET, "PATH": "/usr/bin:/bin"}

    def call(self, *words: str, check: bool = True) -> Any:
        given = [f"{name}={value}" for name, value in self.environment.items()]
        return self.bed.as_user("alice", ["env", "-C", PROJECT, *given, "/usr/bin/orchestrate", *words], check=check)

    def json(self, *words: str) -> dict[str, Any]:
        envelope: dict[str, Any] = json.loads(self.call("--json", *words).stdout)
        assert envelope["success"], envelope
        data: dict[str, Any] = envelope["data"]
        return data

    def start(self, *more: str, **scripts: str) -> dict[str, Any]:
        """A run in which scripts work, by role."""
        words = ["--task", "Write version.txt.", "--skip-model-check", *more]
        for role, script in scripts.items():
            name = f"/home/alice/bin/{role}"
            (self.bed.root / name[1:]).write_text(f"#!/bin/sh\n{script}")
            self.bed.run(f"chmod 755 {name}")
            words += ["--harness", f"{role}=command", "--worker-command", f"{role}={name}"]
        return self.json("start", *words)

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["role"]: worker for worker in self.json("status", SESSION)["workers"]}

    def state(self) -> tuple[str, int]:
        workflow = self.json("status", SESSION)["broker"]["workflow"]
        return workflow["state"], workflow["round"]

    def cgroup(self, unit: str) -> Path:
        name: str = self.bed.show("alice", unit, "ControlGroup")
        assert name, unit
        return Path(self.bed.root, "sys/fs/cgroup", name[1:])

    def processes(self, cgroup: Path) -> set[int]:
        """Everybody in a control group and below it, by the testbed's own ids; nobody in one that is gone."""
        where = f"/{cgroup.relative_to(self.bed.root)}"
        # A group below it may go while it is looked at; whoever is there is found by the next look.
        script = f"if cd {where}; then find . -name cgroup.procs -exec cat {{}} + || :; echo looked; else echo gone; fi"
        *pids, last = self.bed.run(script).stdout.split()
        assert last == "looked" or (last == "gone" and not cgroup.exists()), last
        return set(map(int, pids))

    def seen(self, name: str) -> Path:
        path: Path = self.bed.root / "home/alice/seen" / name
        until(path.exists, name)
        return path

    def tree(self) -> str:
        """What is in the project, names, modes and contents, as one word."""
        digest = hashlib.sha256()
        for path in sorted((self.bed.root / PROJECT[1:]).rglob("*")):
            digest.update(f"{path}\0{path.lstat().st_mode}\0".encode())
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()


def role(line: Line, name: str) -> dict[str, Any]:
    """A role as the run's broker has it."""
    rows: list[dict[str, Any]] = line.json("status", SESSION)["broker"]["roles"]
    return next(row for row in rows if row["role"] == name)


@pytest.fixture
def line(bed: Any) -> Iterator[Line]:
    home = bed.root / "home/alice"
    for name in ("project", "bin", "seen"):
        (home / name).mkdir(exist_ok=True)
    bed.run("rm -rf /home/alice/seen/* /home/alice/project/*; chown -R alice: /home/alice")
    yield Line(bed)
    bed.as_user(
        "alice", "systemctl --user stop orchestrate.slice probe-other; systemctl --user reset-failed", check=False
    )


def test_a_run_of_programs_comes_to_its_end(line: Line) -> None:
    """And a reviewer that insists on writing is refused by the kernel, which changes nothing of the run."""
    data = line.start(implementer=IMPLEMENTS, reviewer=REVIEWS)
    assert data["workers"]["reviewer"]["enforced"][0].startswith("files-read-only")
    workers = line.workers()
    assert workers["implementer"]["enforced"] == [] and workers["reviewer"]["enforced"]
    for worker in workers.values():
        assert worker["active"] == "active" and worker["unit"].startswith("worker-")
        assert line.bed.show("alice", worker["unit"], "Slice") == f"orchestrate-{data['unit']}.slice"
    until(lambda: line.state()[0] == "ready", "a run that is ready")
    assert (line.bed.root / PROJECT[1:] / "version.txt").read_text() == "round 1\n"
    assert [path.name for path in (line.bed.root / PROJECT[1:]).iterdir()] == ["version.txt"]
    events = line.json("events", SESSION)["events"]
    assert not [event for event in events if "uncertain" in str(event)]
    line.json("stop", "--yes")
    assert "worker-" not in line.bed.as_user("alice", "systemctl --user list-units --all --plain --no-legend").stdout


def test_the_worktree_is_unchanged_by_its_hash(line: Line) -> None:
    line.start(implementer=IMPLEMENTS, reviewer="until [ -e /home/alice/go ]; do sleep 0.1; done\n" + REVIEWS)
    version = line.bed.root / PROJECT[1:] / "version.txt"
    until(lambda: version.exists() and role(line, "reviewer")["assignment"], "work for the reviewer")
    before = line.tree()
    line.bed.run("touch /home/alice/go")
    try:
        until(lambda: line.state()[0] == "ready", "a run that is ready")
    finally:
        line.bed.run("rm /home/alice/go")
    assert line.tree() == before
    assert not (line.bed.root / "home/alice/.profile-of-mine").exists()


def test_a_home_without_git_is_reviewed_in_a_copy(line: Line) -> None:
    """The scratch directory and all that the product keeps lie in it, and are not copied."""
    home = line.bed.root / "home/alice"
    line.bed.as_user("alice", "cd; mkdir -p .local/state; touch .local/state/kept")
    try:
        line.start(
            "--project", "/home/alice", "--session", SESSION, implementer=IMPLEMENTS, reviewer=TESTS_IN_A_COPY
        )
        until(lambda: line.state()[0] in {"ready", "needs_attention"}, "the end of the review")
        assert line.state() == ("ready", 1)
        assert (home / "version.txt").read_text() == "round 1\n"
    finally:
        line.call("stop", SESSION, "--yes", check=False)
        line.bed.run("rm -f /home/alice/version.txt /home/alice/.local/state/kept")


def test_what_a_program_prints_is_read_by_the_person_and_kept_in_memory_alone(line: Line) -> None:
    canary = "words-canary-0123456789abcdef"
    # Put together by the program, so that only what it prints has it.
    says = "echo words-canary-$((0))123456789abcdef; ls /words-of-ls"
    data = line.start(implementer=says, reviewer=WAITS)
    until(lambda: role(line, "implementer")["state"] == "waiting", "a role that waits")
    command = f"orchestrate worker logs {data['unit']}/implementer --output"
    assert command in [step["command"] for step in line.json("status", SESSION)["next"]]
    printed = line.call(*command.split()[1:]).stdout
    assert canary in printed and "/words-of-ls" in printed and "ended, with exit status 2" in printed
    place = line.bed.root / f"run/user/{line.uid}/agent-intercom/run/{data['unit']}/output-implementer/output"
    assert place.parent.stat().st_mode & 0o777 == 0o700 and place.stat().st_mode & 0o777 == 0o600
    search = f"grep -rlF {canary} /run/user /home/alice /var /tmp 2>/dev/null"
    assert line.bed.run(search, check=False).stdout.split() == [f"/{place.relative_to(line.bed.root)}"]
    assert canary not in json.dumps(line.bed.journal("alice"))
    assert (
        line.call("worker", "logs", f"{data['unit']}/implementer", "--as", "some-session", check=False).returncode == 6
    )
    line.json("restart", SESSION, "--role", "implementer", "--yes")
    until(lambda: "--- started again, " in line.call(*command.split()[1:]).stdout, "another start that prints")
    assert line.call(*command.split()[1:]).stdout.startswith(printed)
    line.json("stop", "--yes")
    assert line.bed.run(search, check=False).stdout == ""
    assert "until the run is over" in line.call(*command.split()[1:]).stderr


@pytest.mark.parametrize("whom", ["worker", "bridge", "shim", "broker", "service", "all"])
def test_whoever_is_killed_nobody_survives_the_run_and_nobody_else_is_touched(line: Line, whom: str) -> None:
    bed = line.bed
    bed.as_user("alice", ["systemd-run", "--user", "--quiet", "--unit=probe-other", "/bin/sleep", "1000"])
    data = line.start(implementer=WAITS, reviewer=WAITS.replace("waits", "unused"))
    waits = int(line.seen("waits").read_text())
    group = line.cgroup(f"orchestrate-{data['unit']}.slice")
    scope = line.workers()["implementer"]
    units = {"broker": f"orchestrate@{data['unit']}.service", "service": "orchestrate-workers.service"}
    bridge = int(bed.run(f"ps -o ppid= -p {waits}").stdout)
    victims = {"worker": [waits], "bridge": [bridge], "shim": [scope["pid"]]}
    assert {waits, bridge} <= line.processes(group)
    for name in [whom] if whom != "all" else ["worker", "broker", "service", "shim"]:
        if name in units:
            bed.as_user("alice", f"systemctl --user kill --kill-who=main --signal=KILL {units[name]}")
        else:
            for pid in victims[name]:
                bed.run(f"kill -KILL {pid}", check=False)
    if whom == "broker":
        until(lambda: bed.show("alice", units["broker"], "MainPID") not in {"", "0"}, "a broker that is back")
        until(lambda: line.json("status", SESSION)["broker"]["roles"][0]["connected"], "workers that are attached")
        assert line.workers()["implementer"]["pid"] == scope["pid"]
    elif whom == "service":
        assert line.workers()["implementer"]["active"] == "active"
    elif whom == "worker":
        # Its bridge is there for the next one, and has told that this one ended without a report.
        until(lambda: role(line, "implementer")["state"] == "waiting", "a role that waits")
        assert line.workers()["implementer"]["active"] == "active" and waits not in line.processes(group)
    else:
        until(lambda: line.workers()["implementer"]["active"] == "inactive", "the truth about it")
    assert line.workers()["reviewer"]["active"] == "active"
    assert line.processes(group)
    bed.as_user("alice", f"systemctl --user stop orchestrate-{data['unit']}.slice")
    assert line.processes(group) == set()
    until(lambda: line.json("list")["sessions"] == [], "a run that is gone")
    after = line.json("status", SESSION)
    assert after["live"] is False and not any(row["connected"] for row in after["broker"]["roles"])
    ended = {worker["role"]: worker for worker in line.json("worker", "list", "--all", "--history")["workers"]}
    assert {worker["state"] for worker in ended.values()} <= {"stopped", "failed", "lost"} and len(ended) == 2
    assert ended["reviewer"]["stop_reason"] == "run-ended"
    assert bed.show("alice", "probe-other.service", "ActiveState") == "active"
    bed.as_user("alice", "systemctl --user stop probe-other.service")


def test_a_worker_does_not_report_by_way_of_another_ones_bridge(line: Line) -> None:
    """Not where it knows the address, either, and is the same user's."""
    forging = """
    bridges=$(dirname "$(dirname "$AGENT_INTERCOM_BRIDGE_SOCKET")")
    export AGENT_INTERCOM_BRIDGE_SOCKET=$bridges/implementer/bridge-g1.sock AGENT_INTERCOM_ASSIGNMENT_ID=
    for command in "report --summary forged" "progress --phase tool"; do
        orchestrate $command; echo "ended with $?"
    done
    exec sleep 1000
    """
    data = line.start("--with-probe", implementer=WAITS, reviewer=WAITS, probe=forging)
    logs = ("worker", "logs", f"{data['unit']}/probe", "--output")
    until(lambda: line.call(*logs).stdout.count("ended with") == 2, "a probe that has tried")
    printed = line.call(*logs).stdout
    assert printed.count("bridge of another worker") == printed.count("ended with 3") == 2, printed
    assert role(line, "implementer")["state"] == "active"
    line.json("stop", "--yes")


def test_a_bridge_that_was_killed_leaves_alone_what_is_in_another_unit(line: Line) -> None:
    """Be it of the same user and with the same variables."""
    bed = line.bed
    bed.as_user("alice", "systemctl --user stop probe-other.scope", check=False)
    stray = "systemd-run --user --scope --quiet --unit=probe-other sleep 1000 &\nsetsid sleep 1001 &\n"
    data = line.start(implementer=stray + WAITS, reviewer=WAITS.replace("waits", "unused"))
    waits = int(line.seen("waits").read_text())
    group = line.cgroup(f"orchestrate-{data['unit']}.slice")
    until(lambda: bed.show("alice", "probe-other.scope", "ActiveState") == "active", "a scope")
    sleeping = set(map(int, bed.run("pgrep -x -f 'sleep 1001'").stdout.split()))
    assert sleeping <= line.processes(group)
    bed.run(f"kill -KILL {int(bed.run(f'ps -o ppid= -p {waits}').stdout)}")
    until(lambda: line.workers()["implementer"]["active"] == "inactive", "the truth about it")
    line.call("restart", SESSION, "--role", "implementer", "--yes")
    until(lambda: role(line, "implementer")["state"] == "waiting", "a role that waits")
    assert not line.processes(group) & {waits, *sleeping}
    assert bed.show("alice", "probe-other.scope", "ActiveState") == "active"
    line.json("stop", "--yes")
    bed.as_user("alice", "systemctl --user stop probe-other.scope")


def test_a_disk_that_is_full_costs_no_work(line: Line) -> None:
    bed, state = line.bed, "/home/alice/.local/state"
    bed.as_user("alice", f"mkdir -p {state}")
    bed.run(f"mount -t tmpfs -o size=6m,mode=700,uid={line.uid},gid={line.uid} none {state}")
    try:
        fills = """
        head -c 20M /dev/zero >"$AGENT_INTERCOM_SCRATCH/fill"
        orchestrate report --verdict approved --summary Good.
        """
        data = line.start(implementer=IMPLEMENTS, reviewer=fills)
        logs = ("worker", "logs", f"{data['unit']}/reviewer", "--output")
        until(lambda: "stands still" in line.call(*logs).stdout, "a bridge that stands still")
        assert line.state()[0] == "active" and line.workers()["reviewer"]["active"] == "active"
        bed.run(f"rm {data['paths']['coordination']}/scratch/reviewer-g1/fill")
        until(lambda: line.state()[0] == "ready", "a run that is ready")
        assert line.call(*logs).stdout.count("stands still") == 1
        line.json("stop", "--yes")
    finally:
        bed.as_user("alice", "systemctl --user stop orchestrate.slice", check=False)
        bed.run(f"umount -l {state}")


def test_nobody_gets_away(line: Line) -> None:
    """By leaving the session, by being deaf to SIGTERM, or by being many."""
    data = line.start(implementer=STUBBORN, reviewer=WAITS)
    line.seen("many")
    group = line.cgroup(f"orchestrate-{data['unit']}.slice")
    assert len(line.processes(group)) > 200
    line.json("stop", "--yes")
    assert line.processes(group) == set()


def test_what_is_private_is_nowhere_but_where_it_belongs(line: Line) -> None:
    data = line.start(implementer=WAITS, reviewer=IMPLEMENTS.replace("echo", ": echo"))
    line.seen("waits")
    bed = line.bed
    directory = data["paths"]["coordination"]
    token = (bed.root / directory[1:] / "implementer.token").read_text().strip()
    units = " ".join(worker["unit"] for worker in line.workers().values())
    public = bed.as_user("alice", f"systemctl --user show --all {units} 'orchestrate*'").stdout
    public += bed.run("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null").stdout
    public += json.dumps(bed.journal("alice"))
    public += line.call("status").stdout + line.call("--json", "status").stdout + line.call("list").stdout
    public += line.call("worker", "list").stdout
    assert "worker-" in public
    found = bed.run(
        f"grep -rlF -e {SCOPE} -e {SECRET} /run/user/{line.uid} /home/alice /tmp /var/tmp 2>/dev/null", check=False
    ).stdout.split()
    assert found and all(name.startswith(f"/run/user/{line.uid}/agent-intercom/run/{data['unit']}/") for name in found)
    where = bed.run("grep -lF canary-0123456789abcdef /proc/[0-9]*/environ 2>/dev/null", check=False).stdout.split()
    mine = line.processes(line.cgroup(f"orchestrate-{data['unit']}.slice"))
    assert {int(name.split("/")[2]) for name in where} <= mine
    for canary in (SCOPE, SECRET, token):
        assert canary not in public
    bob = bed.as_user("bob", f"cat /proc/{line.seen('waits').read_text().strip()}/environ", check=False)
    assert bob.returncode != 0


def test_a_pause_and_a_silent_end_are_told_with_the_way_out(line: Line) -> None:
    fails = "[ -e /home/alice/seen/go ] || exit 7\norchestrate report --summary 'It is written.'"
    data = line.start(implementer=fails, reviewer="orchestrate report --verdict approved --summary Good.")
    until(lambda: role(line, "implementer")["state"] == "waiting", "a role that waits")
    told = line.call("status", SESSION).stdout
    assert "worker: implementer: its program ended with exit status 7, without a report" in told
    assert "program implementer\n" in told and "read: " not in told
    worker = f"{data['unit']}/implementer"
    line.json("worker", "pause", worker)
    watching = line.json("status", SESSION)
    assert {each["role"] for each in watching["workers"] if each["paused"]} == {"implementer"}
    assert f"orchestrate worker resume {worker}" in [step["command"] for step in watching["next"]]
    assert "waiting for a person: implementer paused" in line.call("list").stdout
    assert f"worker resume {worker}" in line.call("doctor", check=False).stdout
    line.seen(".").joinpath("go").touch()
    sent = line.call("send", SESSION, "--role", "implementer", "--message", "Go on.").stdout
    assert f"its worker is paused, and reads it once it is resumed: orchestrate worker resume {worker}" in sent
    out = "/home/alice/seen/dashboard"
    line.bed.popen("alice", f"cd {PROJECT} && exec orchestrate dashboard {SESSION} >{out}")
    until(lambda: "implementer paused" in line.seen("dashboard").read_text(), "a dashboard that shows it")
    line.json("worker", "resume", worker)
    until(lambda: line.state()[0] == "ready", "a run that is ready")
    until(lambda: "READY" in line.seen("dashboard").read_text(), "a dashboard that was told that it goes on")
    # Nothing happens in the run but that: its control group tells.
    line.json("worker", "pause", f"{data['unit']}/reviewer")
    until(lambda: "reviewer paused" in line.seen("dashboard").read_text(), "a dashboard that sees a pause")
    line.json("worker", "resume", f"{data['unit']}/reviewer")
    assert "paused" not in line.call("list").stdout
    reports = line.json("status", SESSION)["reports"]
    assert {name: file.rpartition("/")[2] for name, file in reports.items()} == {
        "implementer": "report-1-implementation.json",
        "reviewer": "report-1-review.json",
    }
    file = line.bed.root / reports["implementer"][1:]
    assert json.loads(file.read_bytes())["summary"] == "It is written." and file.stat().st_mode & 0o777 == 0o600
    line.json("stop", "--yes")
