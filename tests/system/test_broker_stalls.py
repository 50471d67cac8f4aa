# SPDX-License-Identifier: Apache-2.0
"""Whom the broker talks to may stand still: neither the journal nor the manager holds up what agents say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import Door, events, fresh, until


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened


@contextlib.contextmanager
def stopped(bed: Any, pid: str) -> Iterator[None]:
    bed.run(["kill", "-STOP", pid])
    try:
        yield
    finally:
        bed.run(["kill", "-CONT", pid])


def test_a_journal_that_takes_nothing(bed: Any, door: Door) -> None:
    """Lines are lost and counted; no session waits for them."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    with stopped(bed, bed.run(["pidof", "systemd-journald"]).stdout.strip()):
        for _ in range(600):
            door.hang_up(door.join())
        one.deliver(two, "m-1")

    def told() -> list[dict[str, Any]]:
        # The count goes out with the next line that gets through.
        door.hang_up(door.join())
        return events(bed, "LOG_LINES_LOST")

    assert int(until(told, "the count of lost lines")[0]["INTERCOM_LOST"]) > 0
    assert one.list()


def test_a_manager_that_does_not_answer(bed: Any, door: Door) -> None:
    """Who is registered goes on; who comes is let in although nothing can be stored for it yet."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    manager = (bed.root / "home/alice/.pi/agent/intercom/broker.owner").read_text()
    with stopped(bed, manager):
        newcomer = door.connect()
        newcomer.health()
        one.deliver(two, "m-1")
        newcomer.register("three")
        one.deliver(newcomer, "m-2")
    # What could not be stored then is stored by now.
    until(lambda: bed.show("alice", "intercom.service", "NFileDescriptorStore") == "4", "all in the store")
    bed.as_user("alice", "systemctl --user kill --kill-who=main --signal=KILL intercom.service")
    for peer in (one, two):
        peer.deliver(newcomer, fresh("m"))
