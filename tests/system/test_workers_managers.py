# SPDX-License-Identifier: Apache-2.0
"""Managed workers with a systemd that goes and comes back, and with hands that are laid on their units past us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import until
from tests.system.workerbed import SERVICE, Workers, working

_MANY = """
import json, os, sys, threading
from agent_intercom.workers.client import from_environment
from agent_intercom.workers.errors import WorkerError
told = []
def start(_):
    given = {"command": ["/bin/sleep", "7441"], "directory": "/home/alice", "environment": {}}
    try:
        with from_environment(os.environ) as client:
            told.append(client.request("start", given, timeout=60)["worker"]["state"])
    except WorkerError as error:
        told.append(f"{error.code}: {error.text}")
print("begun", flush=True)
threads = [threading.Thread(target=start, args=(number,)) for number in range(40)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(told))
"""


@pytest.fixture
def workers(bed: Any) -> Iterator[Workers]:
    with working(bed) as found:
        yield found


def test_a_manager_that_is_executed_again_refuses_no_start(workers: Workers) -> None:
    bed: Any = workers.bed
    workers.ask('told = wait(start("/bin/true")["worker"]["id"])')
    starting = bed.popen("alice", bed.python_command(_MANY))
    assert starting.stdout.readline() == "begun\n"
    until(lambda: len(workers.units()) > 2, "the first ones are started")
    bed.as_user("alice", "systemctl --user daemon-reexec")
    told = json.loads(starting.stdout.read())
    assert told == ["registering"] * 40
    live = workers.ask('told = [each["unit"] for each in ask("list", {"all": True}, scope=None)["workers"]]')
    assert {unit for unit in workers.units() if unit.endswith(".scope")} == set(live)
    stop = 'told = [ask("stop", {"worker": each["id"]}, scope=None) for each in ask("list", scope=None)["workers"]]'
    workers.ask(stop)
    assert workers.processes("7441") == []
    until(lambda: workers.units() == [], "no unit is left")


def test_a_worker_that_is_frozen_with_systemctl_is_paused_and_goes_on(workers: Workers) -> None:
    begun = workers.ask('told = start("/bin/sleep", "7442", name="held")["worker"]')
    workers.bed.as_user("alice", ["systemctl", "--user", "freeze", begun["unit"]])
    seen, resumed = workers.ask(
        'told = [ask("status", {"worker": "held"})["worker"], ask("resume", {"worker": "held"})]'
    )
    assert (seen["state"], resumed["worker"]["state"]) == ("paused", "registering")
    workers.ask('told = ask("stop", {"worker": "held"})')
    workers.nothing_left()


def test_a_shim_that_leaves_its_unit_is_stopped_as_far_as_can_be_proved(workers: Workers) -> None:
    """Another unit of alice's takes it, while the service is not there to see."""
    bed: Any = workers.bed
    begun = workers.ask('told = start("/bin/sleep", "7443", name="moved")["worker"]')
    shim = begun["placed"]["pid"]
    group = bed.show("alice", SERVICE, "ControlGroup")
    bed.run(f"mkdir -p /sys/fs/cgroup{group}/../moved; echo {shim} >/sys/fs/cgroup{group}/../moved/cgroup.procs")
    workers.kill_service()
    found = workers.ask('told = ask("status", {"worker": "moved"})["worker"]')
    assert found["state"] == "registering"
    ended = workers.ask('told = ask("stop", {"worker": "moved"})["worker"]')
    assert ended["state"] == "stopped"
    assert workers.processes("7443") == []


def test_a_bus_that_does_not_answer_keeps_the_service_from_nothing(workers: Workers) -> None:
    """As many workers as would have waited for it one after the other, longer than a service may take to start."""
    bed: Any = workers.bed
    workers.ask('told = [start("/bin/sleep", "7444") for _ in range(13)]')
    (bus,) = bed.run(["pgrep", "-u", "alice", "-x", "dbus-daemon"]).stdout.split()
    bed.run(["kill", "-STOP", bus])
    try:
        workers.kill_service()
        told = workers.ask("""
live = ask("list")["workers"]
stopped = ask("stop", {"worker": live[0]["id"]})["worker"]
told = [len(live), stopped["state"], stopped["ended"]["exit_signal"]]
""")
        assert told == [13, "stopped", 15]
        assert bed.show("alice", SERVICE, "NRestarts") in ("1", "2")
    finally:
        bed.run(["kill", "-CONT", bus])
    workers.ask('told = [ask("stop", {"worker": each["id"]})["worker"]["state"] for each in ask("list")["workers"]]')
    assert workers.processes("7444") == []


_READ = """
import os, sqlite3, sys
held = sqlite3.connect(os.path.expanduser("~/.local/state/agent-intercom/workers.sqlite3"), isolation_level=None)
held.execute("BEGIN")
print(held.execute("SELECT count(*) FROM worker").fetchone()[0], flush=True)
sys.stdin.read()
"""


def test_a_registry_that_somebody_reads_makes_nobody_lose_a_worker(workers: Workers) -> None:
    bed: Any = workers.bed
    begun = workers.ask('told = start("/bin/sleep", "7445", name="read")["worker"]')
    bed.as_user("alice", ["systemctl", "--user", "stop", SERVICE])
    reader = bed.popen("alice", bed.python_command(_READ))
    assert int(reader.stdout.readline()) >= 1
    refused, health = workers.ask('told = [ask("list"), ask("health")["unusable"]]')
    assert (refused["error"], health) == ("store_unusable", "another program holds the registry open")
    assert "(STATE_BUSY)" in bed.show("alice", SERVICE, "StatusText")
    doctor = bed.as_user("alice", "orchestrate doctor --skip-model-check", check=False).stdout
    assert f"the registry cannot be used ({health})" in " ".join(doctor.split())
    reader.communicate("")
    until(lambda: workers.ask('told = ask("health")["unusable"]') is None, "the registry is used again")
    assert workers.ask('told = ask("stop", {"worker": "read"})["worker"]["id"]') == begun["id"]
    workers.nothing_left()


def test_a_second_service_says_who_has_the_registry_and_serves_when_that_one_has_gone(workers: Workers) -> None:
    bed: Any = workers.bed
    bed.as_user("alice", ["systemctl", "--user", "stop", SERVICE])
    by_hand = "exec /usr/lib/agent-intercom/orchestrate-workers --bind $XDG_RUNTIME_DIR/agent-intercom/hand.sock"
    first = bed.popen("alice", by_hand)
    assert first.stdout.readline() == "ready\n"
    told = workers.ask('told = ask("list")')
    assert told["error"] == "store_unusable" and "another worker service uses this registry" in told["text"]
    another = bed.as_user("alice", by_hand, check=False)
    assert another.returncode == 3 and "another worker service has the registry" in another.stderr
    pid = workers.main_pid()
    bed.run(["kill", *map(str, workers.processes("hand.sock"))])
    first.communicate()
    until(lambda: "error" not in workers.ask('told = ask("list")'), "the registry is used")
    assert workers.main_pid() == pid and bed.show("alice", SERVICE, "NRestarts") == "0"
