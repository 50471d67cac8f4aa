# SPDX-License-Identifier: Apache-2.0
"""What looks at paths beside the worker service, on disks that do not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from agent_intercom.workers import lookers
from agent_intercom.workers.contract import Code
from agent_intercom.workers.lookers import Lookers
from tests.unit.workerstage import refused


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """What a disk waits for; none hangs when the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def hang(looking: Lookers, caller: str, answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, refused(Code.TIMEOUT, "directory"):
        patched.setattr(lookers, "_LOOKING", 0.0)
        await looking.look(caller, answers.wait, 20)


def test_whose_disks_hang_waits_and_is_told_so_and_nobody_else_does(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        looking = Lookers()
        for _ in range(lookers._OF_ONE):
            await hang(looking, "one", answers, monkeypatch)
        monkeypatch.setattr(lookers, "_WAITING", 0.0)
        with refused(Code.LIMIT, "directory"):
            await looking.look("one", str)
        assert await looking.look("other", str, 1) == "1"
        # Who comes while they hang goes on when one comes back.
        monkeypatch.setattr(lookers, "_WAITING", 20.0)
        waiting = asyncio.create_task(looking.look("one", str, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        answers.set()
        assert await waiting == "2"

    asyncio.run(main())


def test_all_of_them_together_are_bounded(answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookers, "_OF_ALL", 2)

    async def main() -> None:
        looking = Lookers()
        for caller in "ab":
            await hang(looking, caller, answers, monkeypatch)
        monkeypatch.setattr(lookers, "_WAITING", 0.0)
        with refused(Code.LIMIT, "directory"):
            await looking.look("c", str)

    asyncio.run(main())


def test_what_it_raises_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(Lookers().look("one", int, "x"))


_ENDS = """
import asyncio, threading
from agent_intercom.workers import lookers
lookers._LOOKING = 0.0
try:
    asyncio.run(lookers.Lookers().look("one", threading.Event().wait))
except lookers.WorkerError as error:
    print(error.code)
"""


def test_what_hangs_keeps_no_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "timed_out\n"
