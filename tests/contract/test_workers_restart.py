# SPDX-License-Identifier: Apache-2.0
"""Restarts over the socket: a live worker is not ended for a start that cannot be, and what was ended is told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers.errors import WorkerError
from tests.contract.workerhost import HANG, WorkerHost, hosted, unified

pytestmark = pytest.mark.skipif(unified() is None, reason="no control group can be made here")


@pytest.fixture
def host() -> Iterator[WorkerHost]:
    with hosted() as found:
        yield found


def _gone(directory: Path) -> None:
    shutil.rmtree(directory)


def _a_link(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("what", "lose", "code", "field"),
    [
        ("directory", _gone, "invalid_request", "directory"),
        ("writable", _gone, "invalid_request", "writable"),
        ("writable", _a_link, "invalid_request", "writable"),
        ("command", _gone, "command_not_found", "command"),
    ],
)
def test_a_worker_that_could_not_begin_again_goes_on(
    host: WorkerHost, what: str, lose: Callable[[Path], None], code: str, field: str
) -> None:
    own = host.directory.resolve() / "own"
    own.mkdir()
    command = str(shutil.copy("/bin/sleep", own)) if what == "command" else "/bin/sleep"
    more: dict[str, Any] = {} if what == "command" else {what: str(own) if what == "directory" else [str(own)]}
    with host.client() as client:
        worker = client.request("start", host.wanted(command, "100", name="mine") | more, timeout=HANG)["worker"]
        lose(own)
        with pytest.raises(WorkerError) as caught:
            client.request("restart", {"worker": "mine"}, timeout=HANG)
        assert (caught.value.code, caught.value.field) == (code, field)
        now = client.request("status", {"worker": "mine"}, timeout=HANG)["worker"]
        assert (now["incarnation"], now["state"], now["stop_reason"]) == (worker["incarnation"], worker["state"], "")
        client.request("stop", {"worker": "mine"}, timeout=HANG)


def test_a_restart_that_ended_a_worker_and_could_not_begin_it_says_so(host: WorkerHost) -> None:
    command = str(shutil.copy("/bin/sleep", host.directory))
    with host.client() as client:
        client.request("start", host.wanted(command, "100", name="mine"), timeout=HANG)
        os.chmod(command, 0)
        with pytest.raises(WorkerError, match="the worker has ended, and not begun again") as caught:
            client.request("restart", {"worker": "mine"}, timeout=HANG)
        assert caught.value.code == "start_failed"
        with pytest.raises(WorkerError) as caught:
            client.request("restart", {"worker": "mine"}, timeout=HANG)
        # Nothing was ended for this one.
        assert "has ended" not in caught.value.text
        # Its name was kept as long as the restart went on.
        client.request("start", host.wanted("/bin/sleep", "100", name="mine"), timeout=HANG)
        client.request("stop", {"worker": "mine"}, timeout=HANG)
