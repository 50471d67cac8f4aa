# SPDX-License-Identifier: Apache-2.0
"""Managed workers outside runs, with a real systemd: started, watched, ended, found again, and never left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.test_orch_hosting import Hosting
from tests.system.wire import Door, until
from tests.system.workerbed import SCOPE, SERVICE, TOKEN, Workers, working

# The worker service, killed at one step of the first start or stop after which `killed` is there.
_KILLED = """
import functools, os, signal, sys
sys.path.insert(0, "/usr/lib/agent-intercom/site")
sys.argv[0] = "/usr/lib/agent-intercom/orchestrate-workers"
from agent_intercom.host import scopes
from agent_intercom.workers import ending, orders, provisioning, serve, service, spawning
STEP, MARK = open("/home/alice/.local/step").read().strip(), "/home/alice/.local/killed"
def die(step):
    if step == STEP and not os.path.exists(MARK):
        open(MARK, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
def around(owner, name, step, before=False):
    method = getattr(owner, name)
    if name in ("start", "stop", "release", "begin", "end", "spawn", "_write") and step != "released":
        @functools.wraps(method)
        async def wrapped(*given, **named):
            if before:
                die(step)
            found = await method(*given, **named)
            die(step)
            return found
    else:
        @functools.wraps(method)
        def wrapped(*given, **named):
            found = method(*given, **named)
            die(step)
            return found
    setattr(owner, name, wrapped)
around(service.Service, "begin", "reserved", before=True)
around(orders, "of_person", "prepared")
around(provisioning, "spawn", "spawned")
around(scopes.Scopes, "start", "placed")
around(service.Service, "_write_down", "nothing")
around(spawning, "_write", "told")
around(spawning.Gated, "release", "begun")
around(service.Service, "_watch", "watched")
around(service.Service, "end", "fenced", before=True)
around(scopes.Scopes, "stop", "stopped")
write_down = service.Service._write_down
def written(self, worker, order):
    placed = write_down(self, worker, order)
    def both(where):
        placed(where)
        die("written")
    return both
service.Service._write_down = written
sys.exit(serve.main([]))
"""


@pytest.fixture
def workers(bed: Any) -> Iterator[Workers]:
    with working(bed) as found:
        yield found
    bed.as_user("alice", "rm -rf ~/.config/systemd/user/orchestrate-workers.service.d", check=False)


def test_a_worker_comes_and_goes_without_a_trace(workers: Workers) -> None:
    told = workers.ask(
        """
begun = start("/bin/sleep", "7431", name="sleeper")["worker"]
told = [begun, ask("status", {"worker": "sleeper"}), ask("list"), open(f"/proc/{begun['placed']['pid']}/cgroup").read()]
"""
    )
    begun, status, listed, cgroup = told
    assert (begun["state"], begun["readiness"], begun["generation"]) == ("registering", "unverified", 1)
    assert f"0::{begun['placed']['control_group']}" in cgroup.splitlines()
    assert f"orchestrate.slice/orchestrate-workers.slice/{begun['unit']}" in cgroup
    assert {process["name"] for process in status["processes"]} >= {"sleep"}
    assert status["unit"]["active"] == "active"
    assert [worker["id"] for worker in listed["workers"]] == [begun["id"]]
    assert workers.bed.show("alice", begun["unit"], "Description") == "Agent Intercom, worker"
    (ended,) = workers.ask('told = ask("stop", {"worker": "sleeper"})["stopped"]')
    assert (ended["state"], ended["stop_reason"]) == ("stopped", "manager-requested")
    assert workers.processes("7431") == []
    workers.nothing_left()


def test_nothing_private_is_to_be_seen(workers: Workers) -> None:
    bed = workers.bed
    begun = workers.ask('told = start("/bin/sleep", "7432", task="task-canary", keep_output=True)["worker"]')
    environ = bed.run(f"cat /proc/{workers.processes('7432')[-1]}/environ").stdout
    assert SCOPE in environ and TOKEN in environ
    shim = begun["placed"]["pid"]
    seen = [
        bed.run(f"cat /proc/{shim}/cmdline /proc/{shim}/environ").stdout,
        bed.as_user("alice", ["systemctl", "--user", "show", begun["unit"], SERVICE]).stdout,
        json.dumps(bed.journal("alice")),
        bed.run("cat /run/user/1000/systemd/transient/* 2>/dev/null || true", check=False).stdout,
        bed.run("strings -a /home/alice/.local/state/agent-intercom/workers.sqlite3* || cat "
                "/home/alice/.local/state/agent-intercom/workers.sqlite3*", check=False).stdout,
        bed.as_user("bob", "ps axeww; ls -lR /run/user 2>&1", check=False).stdout,
    ]  # fmt: skip
    for text in seen:
        for canary in (SCOPE, TOKEN, "task-canary"):
            assert canary not in text
    workers.ask(f'told = ask("stop", {{"worker": "{begun["id"]}"}})')


@pytest.mark.parametrize(
    ("command", "outcome", "code", "killer"),
    [
        ("exit 0", "exited", 0, None),
        ("exit 7", "exited", 7, None),
        ("kill -9 $$", "signaled", None, 9),
    ],
)
def test_how_a_worker_ended_is_told(
    workers: Workers, command: str, outcome: str, code: int | None, killer: int | None
) -> None:
    told = workers.ask(f'told = wait(start("/bin/sh", "-c", {command!r})["worker"]["id"])')
    assert told["ended"]["outcome"] == outcome
    assert (told["ended"]["exit_code"], told["ended"]["exit_signal"]) == (code, killer)
    assert told["state"] == ("stopped" if code == 0 else "failed")
    until(lambda: workers.units() == [], "no unit is left")


def test_how_it_ended_is_told_by_a_service_that_came_later(workers: Workers) -> None:
    workers.bed.as_user("alice", "mkdir -p ~/.local; mkfifo ~/.local/go", check=False)
    begun = workers.ask('told = start("/bin/sh", "-c", "read x </home/alice/.local/go; exit 7")["worker"]')
    workers.bed.as_user("alice", ["systemctl", "--user", "stop", SERVICE])
    workers.bed.as_user("alice", "echo go >~/.local/go", timeout=10)
    until(lambda: begun["unit"] not in workers.units(), "the worker ended")
    found = workers.ask(f'told = ask("status", {{"worker": "{begun["id"]}"}})["worker"]')
    assert (found["state"], found["ended"]["outcome"], found["ended"]["exit_code"]) == ("failed", "exited", 7)


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM HUP; while :; do sleep 7433; done",
        "setsid sh -c 'trap \"\" TERM; (sleep 7433; :) & sleep 7433' & sleep 7433",
        "for i in $(seq 200); do sleep 7433 & done; wait",
    ],
)
def test_whatever_a_worker_starts_ends_with_it(workers: Workers, command: str) -> None:
    begun = workers.ask(f'told = start("/bin/sh", "-c", {command!r})["worker"]')
    until(lambda: workers.processes("7433"), "it runs")
    (ended,) = workers.ask(f'told = ask("stop", {{"worker": "{begun["id"]}"}})["stopped"]')
    assert ended["state"] == "stopped"
    assert workers.processes("7433") == []
    workers.nothing_left()


def test_processes_that_are_left_behind_are_seen(workers: Workers) -> None:
    script = """
begun = start("/bin/sh", "-c", "setsid sleep 7434 & exit 3")["worker"]
told = wait(begun["id"], "blocked")
"""
    told = workers.ask(script)
    assert (told["state"], told["state_reason"]) == ("blocked", "children_remain")
    assert told["ended"]["exit_code"] == 3
    workers.ask(f'told = ask("stop", {{"worker": "{told["id"]}"}})')
    assert workers.processes("7434") == []


def test_workers_are_found_again(workers: Workers) -> None:
    begun = workers.ask('told = start("/bin/sleep", "7435", name="stays")["worker"]')
    for way in ("kill", "restart"):
        if way == "kill":
            workers.kill_service()
        else:
            workers.bed.as_user("alice", ["systemctl", "--user", "restart", SERVICE])
        found = workers.ask('told = ask("status", {"worker": "stays"})["worker"]')
        assert (found["placed"], found["state"]) == (begun["placed"], "registering")
    (ended,) = workers.ask('told = ask("stop", {"worker": "stays"})["stopped"]')
    assert ended["state"] == "stopped"
    workers.nothing_left()


def test_pausing_holds_a_worker_and_stopping_a_paused_one_ends_it(workers: Workers) -> None:
    script = """
begun = start("/bin/sleep", "7436", name="held")["worker"]
paused = ask("pause", {"worker": "held"})
seen = ask("status", {"worker": "held"})["unit"]
resumed = ask("resume", {"worker": "held"})
ask("pause", {"worker": "held"})
told = [paused, seen, resumed, ask("stop", {"worker": "held"})]
"""
    paused, seen, resumed, ended = workers.ask(script)
    assert (paused["worker"]["state"], paused["worker"]["runtime_deadline_at"]) == ("paused", None)
    assert seen["freezer"] == "frozen"
    assert resumed["worker"]["state"] == "registering"
    assert ended["worker"]["state"] == "stopped"
    workers.nothing_left()


def test_a_restart_gives_exactly_the_same(workers: Workers) -> None:
    script = """
first = start("/bin/sleep", "7437", name="again")["worker"]
told = [first, ask("restart", {"worker": "again"})["worker"]]
"""
    first, second = workers.ask(script)
    assert (second["id"], second["generation"]) == (first["id"], 2)
    assert second["incarnation"] != first["incarnation"] and second["unit"] != first["unit"]
    (pid,) = [p for p in workers.processes("7437") if p != second["placed"]["pid"]]
    environ = workers.bed.run(f"cat /proc/{pid}/environ").stdout
    assert SCOPE in environ and TOKEN in environ and second["incarnation"] in environ
    workers.ask('told = ask("stop", {"worker": "again"})')
    workers.nothing_left()


def test_what_does_not_start_leaves_nothing(workers: Workers) -> None:
    script = """
told = [start("/nonexistent/program"), start("/etc/passwd"), start("sleep", "1", directory="/nonexistent")]
"""
    missing, refused, nowhere = workers.ask(script)
    assert missing["error"] == "command_not_found"
    assert refused["error"] == "start_failed"
    assert (nowhere["error"], nowhere["field"]) == ("invalid_request", "directory")
    workers.nothing_left()


def test_without_a_bus_nothing_starts_and_everything_else_works(workers: Workers) -> None:
    workers.bed.drop_in("alice", SERVICE, "[Service]\nEnvironment=DBUS_SESSION_BUS_ADDRESS=unix:path=/nonexistent\n")
    told = workers.ask('told = [start("/bin/true"), ask("list"), ask("health")]')
    assert told[0]["error"] == "manager_unreachable"
    assert told[1]["workers"] == []
    assert told[2]["systemd"] is None
    workers.nothing_left()


def test_a_read_only_worker_is_refused_by_the_kernel(workers: Workers) -> None:
    script = """
command = "touch /home/alice/written; echo $?; touch $AGENT_INTERCOM_SCRATCH/x; echo $?; echo $TMPDIR"
begun = start("/bin/sh", "-c", command, writable=[], keep_output=True)["worker"]
wait(begun["id"])
told = [begun, ask("logs", {"worker": begun["id"], "output": True})["output"]]
"""
    begun, output = workers.ask(script)
    assert begun["enforced"] and begun["enforced"] != ["nothing"]
    refused, code, allowed, scratch = output.splitlines()
    assert "ermission denied" in refused and (code, allowed) == ("1", "0")
    assert scratch.endswith(begun["incarnation"])
    assert not (workers.bed.root / "home/alice/written").exists()
    assert not (workers.bed.root / scratch.lstrip("/")).exists()


def test_a_timer_cleans_up_for_whoever_wants_it(workers: Workers) -> None:
    workers.ask('told = wait(start("/bin/true")["worker"]["id"])')
    workers.bed.as_user("alice", ["systemctl", "--user", "start", "orchestrate-cleanup.service"])
    assert workers.bed.show("alice", "orchestrate-cleanup.service", "Result") == "success"
    # It is kept for days.
    assert len(workers.ask('told = ask("list", {"history": True})')["workers"]) == 1


def test_workers_end_with_their_run(workers: Workers) -> None:
    bed = workers.bed
    with Door(bed) as door:
        hosting = Hosting(bed, door)
        run = hosting.run()
        for role in ("implementer", "reviewer"):
            assert hosting.start(run, role) is None
            hosting.started(role)
        found = workers.ask('told = ask("list", {"all": True})')["workers"]
        assert {worker["name"] for worker in found} == {f"{run.unit}/implementer", f"{run.unit}/reviewer"}
        for worker in found:
            assert f"orchestrate-{run.unit}.slice/{worker['unit']}" in worker["placed"]["control_group"]
            assert workers.ask(f'told = ask("stop", {{"worker": "{worker["id"]}"}})')["error"] in (
                "forbidden",
                "not_owner",
            )
        # A person may hold them, and a broker's end is nothing to them.
        held = workers.ask(f'told = [ask(what, {{"worker": "{found[0]["id"]}"}}) for what in ("pause", "resume")]')
        assert [answer["worker"]["state"] for answer in held] == ["paused", "registering"]
        bed.as_user("alice", ["systemctl", "--user", "stop", f"orchestrate-{run.unit}.slice"])
        until(lambda: not workers.ask('told = ask("list", {"all": True})["workers"][0]["state"] != "stopped"'), "ended")
        for worker in found:
            ended = workers.ask(f'told = wait("{worker["id"]}")')
            assert (ended["state"], ended["stop_reason"]) == ("stopped", "run-ended")
        assert hosting.loaded(run) == []


def test_a_run_that_is_being_ended_begins_nothing_more(workers: Workers) -> None:
    bed = workers.bed
    with Door(bed) as door:
        hosting = Hosting(bed, door)
        # What is removed with a run comes later than whoever asks now.
        bed.drop_in("alice", "orchestrate@.socket", "[Socket]\nExecStopPost=\n")
        run = hosting.run()
        slice_unit = f"orchestrate-{run.unit}.slice"
        stubborn = "trap '' TERM; echo up; while :; do read x; done"
        scope = ["systemd-run", "--user", "--scope", "--quiet", "--unit=stubborn", f"--slice={slice_unit}"]
        held = bed.popen("alice", [*scope, "sh", "-c", stubborn])
        assert held.stdout.readline() == "up\n"
        bed.as_user("alice", ["systemctl", "--user", "stop", "--no-block", slice_unit])
        try:
            _, code, text = hosting.start(run, "implementer")
        finally:
            bed.as_user("alice", "systemctl --user kill --signal=KILL stubborn.scope")
        assert (code, "the run is being ended" in text) == ("conflict", True), text
        (found,) = workers.ask('told = ask("list", {"all": True, "history": True})')["workers"]
        assert (found["state"], found["error_code"]) == ("failed", "conflict")
        until(lambda: hosting.loaded(run) == [], "the run is over")
        assert workers.processes("orchestrate-launcher") == []


# The worker service, whose systemd knows no OOMPolicy= for scope units.
_OLD = """
import sys
sys.path.insert(0, "/usr/lib/agent-intercom/site")
sys.argv[0] = "/usr/lib/agent-intercom/orchestrate-workers"
from agent_intercom.host import scopes
from agent_intercom.workers import serve
start = scopes.Scopes.start
async def old(self, unit, pid, properties, *more):
    unknown = {"NoSuchProperty" if name == "OOMPolicy" else name: value for name, value in properties.items()}
    return await start(self, unit, pid, unknown, *more)
scopes.Scopes.start = old
sys.exit(serve.main([]))
"""


def replace_service(bed: Any, script: str) -> None:
    """Have another program be the worker service of a test."""
    bed.as_user("alice", "mkdir -p ~/.local && cat >~/.local/service.py", stdin=script)
    drop_in = "[Service]\nExecStart=\nExecStart=/usr/bin/python3 -I /home/alice/.local/service.py\n"
    bed.drop_in("alice", SERVICE, drop_in)


def test_systemd_that_knows_no_oom_policy_of_scopes_is_enough(workers: Workers) -> None:
    replace_service(workers.bed, _OLD)
    told = workers.ask('told = [start("/bin/sleep", "7439", name=name) for name in ("one", "two")] + [ask("health")]')
    assert [each["worker"]["state"] for each in told[:2]] == ["registering"] * 2
    assert told[2]["lacking"] == ["OOMPolicy"]
    # The real one knows it, and doctor sees that it does.
    doctor = workers.bed.as_user("alice", "orchestrate doctor --skip-model-check --json", check=False).stdout
    assert "worker-service" in doctor and "oom-policy" not in doctor
    workers.ask('told = [ask("stop", {"worker": name}) for name in ("one", "two")]')
    workers.nothing_left()


def test_workers_of_a_registry_that_was_damaged_are_told_and_end_only_for_a_person(workers: Workers) -> None:
    bed = workers.bed
    begun = workers.ask('told = start("/bin/sleep", "7440", writable=[])["worker"]')
    files = workers.files()
    assert any(begun["incarnation"] in name for name in files)
    stop = f"systemctl --user stop {SERVICE}"
    bed.as_user("alice", f"{stop} && cd ~/.local/state/agent-intercom && rm -f workers.sqlite3-* && "
                "head -c 8192 /dev/zero >workers.sqlite3")  # fmt: skip
    health, preview, cleaned = workers.ask(
        'told = [ask("health"), ask("cleanup", {"execute": False}), ask("cleanup", {"execute": True})]'
    )
    assert health["strays"] == 1 and cleaned["strays_ended"] == []
    (stray,) = preview["strays"]
    assert (stray["unit"], stray["run"]) == (begun["unit"], None) and "sleep" in stray["programs"]
    # The next service opens a registry that is whole, and takes nothing from whom it does not know.
    bed.as_user("alice", stop)
    doctor = "orchestrate doctor --skip-model-check"
    said = bed.as_user("alice", doctor, check=False)
    assert "1 worker lives of which the worker service does not know" in said.stdout + said.stderr
    workers.ask('told = ask("list")')
    assert workers.files() == files
    said = bed.as_user("alice", doctor, check=False)
    assert "1 worker lives of which the worker service does not know" in said.stdout + said.stderr
    said = bed.as_user("alice", "orchestrate worker cleanup --yes")
    assert begun["unit"] in said.stdout and workers.units()
    said = bed.as_user("alice", "orchestrate worker cleanup --yes --override")
    assert "Ended 1 of them." in said.stdout and workers.processes("7440") == []
    bed.as_user("alice", stop)
    workers.ask('told = ask("list")')
    workers.nothing_left()


@pytest.mark.parametrize(
    "step", ["reserved", "prepared", "spawned", "placed", "written", "told", "begun", "watched", "fenced", "stopped"]
)
def test_a_service_that_is_killed_at_any_step_leaves_no_stray(workers: Workers, step: str) -> None:
    bed = workers.bed
    bed.as_user("alice", f"mkdir -p ~/.local && echo {step} >~/.local/step")
    replace_service(bed, _KILLED)
    first = workers.ask('told = start("/bin/sleep", "7438", name="once")')
    if step in ("fenced", "stopped"):
        first = workers.ask('told = ask("stop", {"worker": "once"})')
    assert first["error"] == "workers_unreachable", first
    # Nobody knows which scope id a worker has that has no place yet, or none any more.
    who = ", override=True" if step in ("reserved", "stopped") else ""
    (found,) = workers.ask(f'told = ask("list", {{"history": True, "all": True}}{who})')["workers"]
    if found["state"] == "registering":
        assert step in ("told", "begun", "watched")
        assert found["unit"] in workers.units()
        assert {found["placed"]["pid"]} < set(workers.processes("7438")) | {found["placed"]["pid"]}
        assert workers.ask('told = ask("stop", {"worker": "once"})')["worker"]["state"] == "stopped"
    elif step in ("fenced", "stopped"):
        end = '{"worker": "once", "until": "end", "timeout_ms": 20_000}'
        assert workers.ask(f'told = ask("wait", {end}{who})')["worker"]["state"] == "stopped"
    else:
        assert step in ("reserved", "prepared", "spawned", "placed", "written", "told")
        assert (found["state"], found["error_code"]) == ("failed", "start_failed")
    until(lambda: workers.processes("7438") == [], "no process is left")
    until(lambda: workers.files() == [], "no file is left")
    workers.nothing_left()
    assert workers.processes("orchestrate-launcher") == []
