# SPDX-License-Identifier: Apache-2.0
"""The worker service with a service manager that does not answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.workerhost import SERVICE, WorkerHost, unified

pytestmark = pytest.mark.skipif(unified() is None, reason="no control group can be made here")


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_a_service_is_ready_before_a_bus_answers_that_it_asks_for_its_workers(directory: Path) -> None:
    deaf = directory / "m/deaf"
    with WorkerHost(directory, idle=60) as host:
        with host.client() as client:
            for _ in range(3):
                client.request("start", host.wanted("/bin/sleep", "100"))
        host.kill()
        deaf.touch()
        host.start()
        with host.client() as client:
            assert len(client.request("list", {})["workers"]) == 3
        deaf.unlink()
        with host.client() as client:
            for worker in client.request("list", {})["workers"]:
                ended = client.request("stop", {"worker": worker["id"]})["worker"]
                assert (ended["state"], ended["ended"]["outcome"]) == ("stopped", "signaled")


def test_a_unit_that_is_another_one_by_now_is_left_alone_whoever_above_it_is_ended(directory: Path) -> None:
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(SERVICE)!r}, *{[path for path in sys.path if "site-packages" in path]!r}]
from agent_intercom.workers.client import Client
with Client(os.environ["SOCKET"]) as client:
    given = {{"command": ["/bin/sleep", "100"], "directory": {str(directory)!r}, "environment": {{}}}}
    client.request("start", given)
    client.request("notify", {{"state": "ready"}})
signal.pause()
"""
    grant = {"children": 1, "descendants": 1, "depth": 1}
    with WorkerHost(directory) as host:
        with host.client() as client:
            parent = client.request("start", host.wanted(sys.executable, "-c", script, grant=grant))["worker"]
            waited = {"worker": parent["id"], "until": "ready", "timeout_ms": 20_000}
            assert client.request("wait", waited)["reached"]
            (child,) = (each for each in client.request("list", {"all": True})["workers"] if each["parent"])
        host.kill()
        # While no service is there to see it, it ends, and somebody starts a unit of that name.
        unit = host.group.path / child["unit"]
        (unit / "cgroup.kill").write_text("1")
        while (unit / "cgroup.procs").read_text():
            time.sleep(0.01)
        (host.memory / child["unit"]).write_text("f" * 32)
        with subprocess.Popen(["/bin/sleep", "100"]) as other:
            (unit / "cgroup.procs").write_text(str(other.pid))
            host.start()
            with host.client() as client:
                found = client.request("status", {"worker": child["id"]})["worker"]
                assert (found["state"], found["state_reason"]) == ("unreachable", "unit_changed")
                stopped = client.request("stop", {"worker": parent["id"]})["stopped"]
            ended = {each["id"]: (each["state"], each["error_code"]) for each in stopped}
            assert ended == {parent["id"]: ("stopped", ""), child["id"]: ("lost", "unit_changed")}
            assert (unit / "cgroup.procs").read_text().split() == [str(other.pid)]
            other.kill()
