# SPDX-License-Identifier: Apache-2.0
"""A workspace capsule is checked before every baseline that hands it on; who waits for that is held meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_intercom.orchestration.contract import MAX_FRAME
from tests.unit.runstage import Stage

CAPSULE = '{"schema_version":1}'
STALE = "workspace_capsule_stale"


def gathered(**settings: Any) -> Stage:
    """Everybody has come, and the last one is held."""
    stage = Stage(workspace=CAPSULE, **settings)
    for role in stage.roles:
        stage.hello(role)
    return stage


def begun() -> Stage:
    stage = gathered()
    stage.check()
    for role in stage.roles:
        baseline = next(frame for frame in stage.frames[stage.workers[role]] if frame.get("kind") == "baseline")
        stage.ack(role, baseline["id"])
    return stage


def test_the_start_waits_for_the_check() -> None:
    stage = gathered()
    last = stage.workers["reviewer"]
    assert (stage.workflow, stage.checks, stage.frames[last]) == ("connecting", [last], [])
    assert stage.check()[0]["status"] == "connected"
    assert stage.workflow == "active"
    for role in stage.roles:
        baseline = next(frame for frame in stage.frames[stage.workers[role]] if frame.get("kind") == "baseline")
        assert CAPSULE in baseline["content"]


def test_nobody_starts_with_a_capsule_that_does_not_hold() -> None:
    stage = gathered()
    answers = stage.check(STALE)
    assert [frame["status"] for frame in answers] == ["connected"]
    assert stage.workflow == "uncertain"
    assert STALE in stage.engine.workflow.status()
    assert not any(frame.get("kind") == "baseline" for frames in stage.frames.values() for frame in frames)
    assert stage.control("redeliver", "reviewer") == {}
    assert [frame["status"] for frame in stage.check(STALE)] == ["conflict"]
    assert stage.control("redeliver", "reviewer") == {}
    assert [frame["status"] for frame in stage.check()] == ["accepted"]
    assert stage.workflow == "active"
    assert STALE not in stage.engine.workflow.status()


def test_a_replacement_waits_for_the_check() -> None:
    stage = begun()
    stage.restart("reviewer")
    assert stage.hello("reviewer") == []
    stage.work("implementer")
    assert list(stage.engine.workflow.state.owed) == ["reviewer"]
    kinds = [frame.get("kind") or frame["type"] for frame in stage.check()]
    assert kinds == ["response", "baseline", "run_state", "review"]
    assert stage.workflow == "active"


def test_a_replacement_with_a_capsule_that_does_not_hold() -> None:
    stage = begun()
    stage.accept("implementer")
    stage.restart("implementer")
    stage.hello("implementer")
    assert [frame["status"] for frame in stage.check(STALE)] == ["connected"]
    assert (stage.workflow, stage.role_state("implementer")) == ("uncertain", "uncertain")
    assert stage.events()[-1] == "worker_handover_uncertain"
    # A person has looked.
    assert stage.control("redeliver", "implementer")["status"] == "accepted"
    assert "baseline" in stage.kinds_sent("implementer")
    assert stage.workflow == "active"


@pytest.mark.parametrize("fault", ["", STALE])
def test_who_is_gone_by_then_changes_nothing(fault: str) -> None:
    stage = gathered()
    stage.leave("reviewer")
    stage.check(fault)
    assert stage.workflow == "connecting"
    stage.hello("reviewer")
    stage.check()
    assert stage.workflow == "active"


def test_another_one_leaves_meanwhile() -> None:
    stage = gathered()
    stage.leave("implementer")
    assert [frame["status"] for frame in stage.check(STALE)] == ["connected"]
    assert stage.workflow == "connecting"
    stage.hello("implementer")
    stage.check()
    assert stage.workflow == "active"


def test_two_of_one_role() -> None:
    stage = gathered()
    first = stage.workers["reviewer"]
    stage.hello("reviewer")
    assert len(stage.checks) == 2
    assert stage.check()[0]["status"] == "connected"
    assert stage.check() == []
    assert stage.engine.workflow.state.workers["reviewer"] == first
    assert stage.workflow == "active"


def test_a_successor_asks_again() -> None:
    stage = gathered()
    last = stage.workers["reviewer"]
    stage.crash(remembers=True)
    assert stage.checks == [last]
    stage.check()
    assert stage.workflow == "active"


def test_a_successor_without_memory_begins_anew() -> None:
    stage = gathered()
    stage.crash(remembers=False)
    assert stage.checks == []
    for role in stage.roles:
        stage.hello(role)
    stage.check()
    assert stage.workflow == "active"


def test_what_was_sent_meanwhile_is_served_after_it() -> None:
    stage = gathered()
    number = stage.workers["reviewer"]
    frame = stage.envelope("lifecycle", "reviewer", state="idle", usage=None)
    assert stage.say(number, frame) == []
    stage.crash(remembers=True)
    kinds = [frame.get("kind") or frame.get("status") for frame in stage.check()]
    assert kinds == ["connected", "baseline", "recorded"]


def test_nobody_sends_without_end_meanwhile() -> None:
    stage = gathered()
    number = stage.workers["reviewer"]
    stage.feed(1, number, b"\0" * MAX_FRAME)
    assert number not in stage.ended
    stage.feed(1, number, b"\0")
    assert number in stage.ended


def test_a_stranger_has_nothing_checked() -> None:
    stage = Stage(workspace=CAPSULE)
    stage.hello("implementer")
    number = stage.connect()
    stage.say(number, stage.envelope("hello", "reviewer", generation=1) | {"token": "0" * 32})
    assert number in stage.ended
    number = stage.connect()
    stage.say(number, stage.envelope("hello", "reviewer", generation=2))
    assert number in stage.ended
    stage.control("redeliver", "implementer", token="0" * 32)
    assert stage.checks == []


def test_nothing_is_checked_that_is_not_handed_on() -> None:
    stage = begun()
    stage.leave("implementer")
    stage.hello("implementer")
    stage.control("redeliver", "reviewer")
    stage.observe()
    plain = Stage()
    plain.all_come()
    plain.restart("reviewer")
    plain.hello("reviewer")
    assert stage.checks == plain.checks == []


def test_an_answer_to_nobody() -> None:
    stage = begun()
    before = stage.engine.snapshot()
    for number in (stage.workers["implementer"], 99):
        stage.feed(6, number, STALE.encode())
    assert stage.engine.snapshot() == before
    assert STALE not in json.dumps(stage.frames)
