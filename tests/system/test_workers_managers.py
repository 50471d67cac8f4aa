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
