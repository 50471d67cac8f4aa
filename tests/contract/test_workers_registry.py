# SPDX-License-Identifier: Apache-2.0
"""The worker service whose registry cannot be used for a while, or cannot be written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_intercom.workers.errors import WorkerError
from tests.contract.workerhost import HANG, WorkerHost, unified

pytestmark = pytest.mark.skipif(unified() is None, reason="no control group can be made here")

HELD, LOCKED = "another program holds the registry open", "another worker service uses this registry"


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@contextlib.contextmanager
def reading(database: Path) -> Iterator[None]:
    """Somebody looks at the registry with a program of theirs."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM worker").fetchone() == (1,)
        yield


@contextlib.contextmanager
def locking(database: Path) -> Iterator[None]:
    """Another worker service has it."""
    lock = os.open(f"{database}.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def test_a_service_does_not_rest_before_it_has_written_down_what_happened(directory: Path) -> None:
    with WorkerHost(directory, idle=0.2) as host:
        process = host.process
        assert process is not None
        with host.client() as client:
            begun = client.request("start", host.wanted("/bin/sleep", "100"))["worker"]["id"]
            # Nothing is written any more: as on a disk that is full.
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            stopped = client.request("stop", {"worker": begun})
            assert not stopped["recorded"] and client.request("health", {})["store"] == "store_unusable"
        # That it would have rested by now is all that is waited for.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert process.wait(HANG) == 0
        host.end()
        host.start()
        with host.client() as client:
            (found,) = client.request("list", {"all": False, "history": True})["workers"]
            assert (found["id"], found["state"]) == (begun, "stopped")


@pytest.mark.parametrize(("holding", "why"), [(reading, HELD), (locking, LOCKED)])
def test_a_registry_that_is_held_is_told_and_used_as_soon_as_it_is_let_go(
    directory: Path, holding: Callable[[Path], contextlib.AbstractContextManager[None]], why: str
) -> None:
    with WorkerHost(directory, idle=0.2) as host:
        with host.client() as client:
            begun = client.request("start", host.wanted("/bin/sleep", "100"))["worker"]["id"]
        host.end()
        with holding(directory / "s/agent-intercom/workers.sqlite3"):
            host.start()
            with host.client() as client:
                with pytest.raises(WorkerError) as caught:
                    client.request("list", {})
                assert (caught.value.code, caught.value.text.rpartition(": ")[2]) == ("store_unusable", why)
                assert client.request("health", {})["unusable"] == why
        with host.client() as client:
            deadline = time.monotonic() + HANG
            while client.request("health", {})["unusable"] is not None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            (found,) = client.request("list", {})["workers"]
            assert (found["id"], found["state"]) == (begun, "registering")
            assert client.request("stop", {"worker": begun})["worker"]["state"] == "stopped"
        assert host.files() == []
