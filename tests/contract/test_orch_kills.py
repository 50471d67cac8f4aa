# SPDX-License-Identifier: Apache-2.0
"""The broker of a run is killed at every point of a complete round, with what it left kept and with that lost.

Whatever the point: what a worker was told is so, no work is handed out twice, and the run goes on or says that it is
uncertain. A run that does neither makes these tests wait until they fail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.contract.faultybroker import SAME, UNRECORDED
from tests.contract.orchruns import Run
from tests.contract.orchteam import World
from tests.contract.servicemanager import Nursery

GROUPS = 12
"""Tests among which the points are dealt out."""

ALL = {
    ("implementer", "plan", 1),
    ("implementer", "implementation", 1),
    ("probe", "probe", 1),
    ("playwright", "playwright", 1),
    ("django", "django", 1),
    ("reviewer", "review", 1),
    ("implementer", "implementation", 2),
    ("reviewer", "review", 2),
}
SPECIALISTS = ("probe", "playwright", "django")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    place = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        # Nothing here is for a loss of power.
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield place
    place.close()


class Killed:
    """A run whose brokers are killed at `faults`, one after the other; `struck` are the kinds of the points."""

    def __init__(self, nursery: Nursery, *faults: int | str, keeps: bool = True, again: Sequence[str] = ()) -> None:
        self.faults = faults = (*faults, *again)
        self.world = world = World(Run(*SPECIALISTS, flow="phased"), nursery)
        try:
            self.trace = world.run.root / "trace"
            world.manager.keeps = keeps
            world.manager.orders = [{"trace": str(self.trace), "fault": fault} for fault in (*faults, None)]
            world.manager.start()
            world.come()
            self.state = world.settle()
            world.told()
            self.struck = self.trace.read_text().splitlines() if self.trace.exists() else []
            world.loop.until(lambda: len(world.manager.ends) >= len(self.struck), "did the killed broker end")
            world.kept_its_word()
            self._check()
            if self.state == "uncertain":
                world.redeliver()
                assert world.work() == ALL
                world.told()
                world.kept_its_word()
        except BaseException:
            print(self.describe())
            raise
        finally:
            world.close()

    def describe(self) -> str:
        """What there is to be known of a run that failed."""
        struck = self.trace.read_text() if self.trace.exists() else "nothing"
        lines = {getattr(line, "role", "observer"): (line.losses, line.closes) for line in self.world.lines}
        errors = (self.world.run.root / "stderr").read_text()
        return f"{self.faults} struck {struck}; {self.world.manager.status}; {lines}\n{errors}"

    def _check(self) -> None:
        world = self.world
        assert len(world.manager.ends) == len(self.struck)
        assert all(os.WTERMSIG(status) == signal.SIGKILL for status in world.manager.ends)
        if self.state == "ready":
            assert world.work() == ALL
            assert all(member.baselines == 1 for member in world.members.values())
        else:
            assert world.work() <= ALL
        if world.manager.keeps:
            assert world.closes() <= sum(kind in UNRECORDED for kind in self.struck)
            assert self.state == "ready" or world.losses()


def every(nursery: Nursery, first: int, step: int, **more: Any) -> Iterator[Killed]:
    """Runs that are killed at the points from `first` on, until a run has no more points."""
    point = first
    while (killed := Killed(nursery, point, **more)).struck:
        yield killed
        point += step


@pytest.mark.parametrize("group", range(GROUPS))
def test_what_was_kept_lets_the_run_go_on(nursery: Nursery, group: int) -> None:
    for killed in every(nursery, 1 + group, GROUPS):
        # Nothing is uncertain but what one system call without a record may have done.
        assert killed.state == "ready" or killed.struck[0] in UNRECORDED


@pytest.mark.parametrize("group", range(GROUPS // 3))
def test_what_the_database_has_lets_the_run_go_on_or_be_uncertain(nursery: Nursery, group: int) -> None:
    assert {killed.state for killed in every(nursery, 1 + 4 * group, 4 * GROUPS // 3, keeps=False)}


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("first", [101, 140, 305, 401])
def test_a_broker_is_killed_while_it_comes_up(nursery: Nursery, first: int, keeps: bool) -> None:
    struck = {Killed(nursery, first, point, keeps=keeps).struck[-1] for point in range(1, 41 if keeps else 19)}
    assert {"decided", "loaded" if keeps else "stored"} <= struck


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "lost"])
@pytest.mark.parametrize("group", range(4))
def test_a_broker_is_killed_at_the_same_point_again(nursery: Nursery, group: int, keeps: bool) -> None:
    for killed in every(nursery, 5 + 14 * group, 56, keeps=keeps, again=(SAME, SAME)):
        assert len({*killed.struck}) == 1
