# SPDX-License-Identifier: Apache-2.0
"""The power goes at any step of the commits of a routed report: the run that is left goes on, or is uncertain."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from agent_intercom.orchestration import rows, store
from agent_intercom.orchestration.store import Store
from tests.unit.runstage import BEGAN, Database, Stage
from tests.unit.stepping import Step, SteppingVFS
from tests.unit.test_orch_crash import DATABASE, Disk, choices, place

__all__ = ["place"]


def routed(roles: tuple[str, ...]) -> tuple[Stage, int, int]:
    """A run up to the review, and between which of its commits the report is accepted and routed."""
    stage = Stage(roles)
    stage.all_come()
    stage.accept("implementer")
    first = len(stage.batches)
    stage.report("implementer", paths=["app/models.py"])
    last = len(stage.batches)
    return stage, first, last


def going_on(path: Path, roles: tuple[str, ...]) -> Stage:
    """A broker that has nothing but this database, with all its workers back."""
    opened = Store.open(str(path))
    retained = opened.load()
    opened.close()
    stage = Stage(roles)
    stage.database = Database.holding(retained)
    stage.startup = None
    # Ids come of a seed that no two brokers share.
    stage.next_id = 1_000
    stage.boot()
    stage.all_come()
    return stage


def finish(stage: Stage) -> None:
    """Work, and an operator who leads out of every doubt."""
    for _ in range(20):
        for role in stage.roles:
            if role in stage.workers and stage.current(role) is not None:
                stage.work(role)
        if stage.workflow == "ready":
            return
        for role in stage.roles:
            if stage.workflow == "uncertain" and stage.control("redeliver", role)["status"] == "accepted":
                break
    raise AssertionError(f"stalled in {stage.workflow}")


@pytest.mark.parametrize(
    "roles", [("implementer", "reviewer"), ("implementer", "reviewer", "playwright", "django")], ids=["two", "four"]
)
def test_power_that_goes_while_a_report_is_routed(place: Path, roles: tuple[str, ...]) -> None:
    stage, first, last = routed(roles)
    live = place / DATABASE
    start = Stage(roles).database
    begun = [row for key, row in start.rows.items() if key[0] is rows.Role]
    store.create(str(live), start.meta, begun, BEGAN)
    opened = Store.open(str(live))
    for batch in stage.batches[:first]:
        opened.apply(batch)
    opened.close()
    content = live.read_bytes()
    log: list[Step] = []
    vfs = SteppingVFS("routed", log.append)
    opened = Store.open(str(live), vfs="routed")
    for batch in stage.batches[first:last]:
        opened.apply(batch)
    opened.close()
    vfs.unregister()
    ends = Counter()
    for number in range(len(log) + 1):
        for choice in choices(number):
            after = place / "after"
            after.mkdir()
            for name, data in Disk(content, log[:number], choice).files.items():
                (after / name).write_bytes(data)
            left = going_on(after / DATABASE, roles)
            shutil.rmtree(after)
            reports = left.database.of(rows.Report)
            ends[len(reports), left.workflow] += 1
            opened_by = Counter(each.role for each in left.database.of(rows.Assignment) if each.state != "completed")
            assert opened_by, "somebody has work, or is in doubt"
            assert left.workflow in ("active", "uncertain")
            finish(left)
            given = Counter((each.role, each.kind, each.round) for each in left.database.of(rows.Assignment))
            assert set(given.values()) == {1}
    # Before the commit the implementer goes on; after it a delivery that nobody acknowledged cannot be proven.
    assert set(ends) == {(0, "active"), (1, "uncertain")}
