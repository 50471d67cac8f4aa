# SPDX-License-Identifier: Apache-2.0
"""The worker service with a service manager that does not answer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.workerhost import WorkerHost, unified

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
