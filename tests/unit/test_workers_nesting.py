# SPDX-License-Identifier: Apache-2.0
"""Workers that start workers, what ends with what, and how long what has ended is kept."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent_intercom.workers.contract import Code, Lifetimes, Limits, State, StopReason
from agent_intercom.workers.records import Grant, Worker
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.terms import Caller, Due, Loaded, Work
from tests.unit.workerstage import FOREIGN, OVERRIDE, PERSON, SESSION, WIDE, Stage, ending, inside, refused

DAY = 24 * 3_600_000


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def family(stage: Stage) -> tuple[Worker, Worker, Worker, Worker]:
    """A parent, its child, its grandchild, and one that is not related."""
    parent = stage.run(SESSION, name="parent", grant=WIDE)
    child = stage.run(inside(parent), name="child", grant=replace(WIDE, depth=2))
    grandchild = stage.run(inside(child), name="grandchild")
    return parent, child, grandchild, stage.run(SESSION, name="stranger")


Family = tuple[Worker, Worker, Worker, Worker]


# Seeing


def test_a_child_has_its_parents_scope_id_and_its_place_below_it(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    assert stage.it.scope(grandchild.id) == "scope-a"
    assert (grandchild.depth, grandchild.parent, grandchild.root) == (2, child.incarnation, parent.incarnation)
    assert (child.owner.kind, child.owner.name) == ("worker", parent.incarnation)


def test_a_worker_learns_of_nothing_outside_its_subtree(stage: Stage, family: Family) -> None:
    parent, child, grandchild, stranger = family
    for unseen in (parent.id, "parent", child.id, "child", stranger.id, stranger.id[:6], "stranger", "nothing"):
        for action in (stage.it.stop, stage.it.restart, stage.it.renew, stage.it.pause):
            with refused(Code.NOT_FOUND):
                action(inside(child), unseen, stage.now)
        with refused(Code.NOT_FOUND):
            stage.it.readable(inside(child), unseen)
    assert stage.it.list(inside(child), stage.now, everyone=True).workers == (grandchild,)
    assert stage.it.find(inside(parent), "GRANDCHILD") == grandchild
    # Taken outside, and yet free here: a name that is taken would tell of a worker.
    assert stage.start(inside(child), name="stranger").name == f"{child.id}/stranger"


def test_what_is_ambiguous_below_a_worker_is_refused_as_what_is_not_there(stage: Stage) -> None:
    parent = stage.run(grant=WIDE)
    children = [stage.run(inside(parent), name=name, grant=Grant(children=1, descendants=1)) for name in ("one", "two")]
    for child in children:
        stage.run(inside(child), name="same")
    with refused(Code.NOT_FOUND):
        stage.it.find(inside(parent), "same")
    with refused(Code.AMBIGUOUS):
        stage.it.find(PERSON, "same")
    with refused(Code.NAME_TAKEN):
        stage.start(inside(parent), name="ONE")


@pytest.mark.parametrize("action", ["adopt", "release"])
def test_a_worker_neither_adopts_nor_releases_nor_overrides(stage: Stage, family: Family, action: str) -> None:
    parent, child, _, _ = family
    with refused(Code.FORBIDDEN):
        getattr(stage.it, action)(inside(parent), child.id, stage.now)
    with refused(Code.FORBIDDEN):
        getattr(stage.it, action)(OVERRIDE, child.id, stage.now)
    with refused(Code.FORBIDDEN, "override"):
        stage.it.find(inside(parent)._replace(override=True), child.id)
    with refused(Code.FORBIDDEN):
        stage.it.prune(inside(parent), None, False, True, stage.now)
    with refused(Code.FORBIDDEN):
        stage.it.cleanup(inside(parent), stage.now)


def test_who_is_in_a_worker_that_has_ended_may_do_nothing(stage: Stage, family: Family) -> None:
    parent = stage.end(family[0])
    for caller in (inside(parent), Caller("scope-a", worker="f" * 12)):
        with refused(Code.FORBIDDEN):
            stage.it.list(caller, stage.now)
        with refused(Code.FORBIDDEN):
            stage.start(caller)


def test_a_worker_renews_its_children_only(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    stage.now += 5
    with refused(Code.NOT_OWNER):
        stage.it.renew(inside(parent), grandchild.id, stage.now)
    assert [row.id for row in stage.it.renew(inside(parent), None, stage.now)] == [child.id]


# Grants


def test_without_a_grant_nothing_is_started(stage: Stage, family: Family) -> None:
    with refused(Code.GRANT, "grant"):
        stage.start(inside(family[2]))


def test_a_grant_ends_at_its_time(stage: Stage) -> None:
    parent = stage.run(grant=replace(WIDE, expires_at=stage.now + 10))
    child = stage.run(inside(parent), grant=Grant(children=1, descendants=1))
    assert child.grant is not None
    assert child.grant.expires_at == stage.now + 10
    stage.now += 10
    with refused(Code.GRANT, "grant"):
        stage.start(inside(parent))
    with refused(Code.GRANT, "grant"):
        stage.it.restart(inside(parent), child.id, stage.now)


@pytest.mark.parametrize(
    ("wider", "field"),
    [
        ({"children": 4}, "grant.children"),
        ({"descendants": 7}, "grant.descendants"),
        ({"depth": 3}, "grant.depth"),
        ({"expires_at": 2_000_001}, "grant.expires_at"),
    ],
)
def test_a_child_gets_no_wider_grant_than_its_parent_has(stage: Stage, wider: dict[str, int], field: str) -> None:
    parent = stage.run(grant=replace(WIDE, expires_at=2_000_000))
    with refused(Code.GRANT, field):
        stage.start(inside(parent), grant=replace(WIDE, **{"depth": 2, **wider}))
    stage.start(inside(parent), grant=replace(WIDE, depth=2, expires_at=2_000_000))


def test_a_grant_that_cannot_be_passed_on_is_not(stage: Stage) -> None:
    parent = stage.run(grant=replace(WIDE, subdelegate=False))
    with refused(Code.GRANT, "grant"):
        stage.start(inside(parent), grant=Grant(children=1, descendants=1))
    stage.start(inside(parent))


def test_children_and_descendants_are_counted_while_they_live(stage: Stage) -> None:
    parent = stage.run(grant=Grant(children=2, descendants=3, depth=2, subdelegate=True))
    first = stage.run(inside(parent), grant=Grant(children=2, descendants=2))
    stage.run(inside(parent))
    with refused(Code.GRANT, "grant.children"):
        stage.start(inside(parent))
    below = stage.run(inside(first))
    with refused(Code.GRANT, "grant.descendants"):
        stage.start(inside(first))
    stage.end(below)
    stage.start(inside(first))


def test_a_grant_reaches_as_far_down_as_it_says(stage: Stage) -> None:
    parent = stage.run(grant=Grant(children=5, descendants=5, depth=2, subdelegate=True))
    child = stage.run(inside(parent), grant=Grant(children=1, descendants=1, depth=1, subdelegate=True))
    with refused(Code.GRANT, "grant.depth"):
        stage.start(inside(child), grant=Grant(children=1, descendants=1, depth=1))
    stage.start(inside(child))


def test_children_work_in_their_parents_directory_or_below(stage: Stage) -> None:
    parent = stage.run(grant=WIDE, directory_digest="d")
    stage.start(inside(parent), directory_digest="d")
    stage.start(inside(parent), directory_digest="e", within=("e", "d", "root"))
    with refused(Code.GRANT, "directory"):
        stage.start(inside(parent), directory_digest="e", within=("e", "root"))


# Cascades


def test_a_stop_fences_the_whole_subtree_at_once_and_no_child_slips_in(stage: Stage, family: Family) -> None:
    parent, child, grandchild, stranger = family
    stage.it.take()
    fenced = stage.it.stop(SESSION, parent.id, stage.now).fenced
    assert [row.id for row in fenced] == [grandchild.id, child.id, parent.id]
    assert {row.id for row in stage.it.take().workers} == {row.id for row in fenced}
    assert [row.stop_reason for row in fenced] == ["parent-ended", "parent-ended", "manager-requested"]
    for caller in (parent, child):
        with refused(Code.FORBIDDEN):
            stage.start(inside(caller))
    assert stage.get(stranger).stop_requested_at is None


def test_a_cascade_that_was_not_completed_can_be_repeated(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    stage.it.stop(SESSION, parent.id, stage.now)
    stage.end(grandchild)
    stage.it.stop_failed(child.incarnation, "stop_failed", stage.now)
    assert [row.id for row in stage.it.stop(SESSION, parent.id, stage.now).fenced] == [child.id, parent.id]
    assert [row.id for row in stage.it.fenced()] == [child.id, parent.id]


@pytest.mark.parametrize("how", ["ended", "lost", "failed", "expired"])
def test_the_end_of_a_parent_ends_what_is_below_it(stage: Stage, family: Family, how: str) -> None:
    parent, child, grandchild, _ = family
    if how == "ended":
        stage.it.ended(parent.incarnation, ending(), stage.now)
    elif how == "expired":
        stage.now += 75 * 60_000
        due = next(due for due in stage.it.due(stage.now) if due.worker == parent.id)
        stage.it.expire(due, stage.now)
    elif how == "lost":
        assert [row.id for row in stage.it.lost(parent.incarnation, stage.now)] == [grandchild.id, child.id]
    else:
        stage.it.failed(parent.incarnation, "start_failed", stage.now)
    for below in (child, grandchild):
        assert (stage.get(below).state, stage.get(below).stop_reason) == (State.BLOCKED, StopReason.PARENT)


def test_what_is_below_a_restarted_parent_ends_and_stays_its_history(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    stage.it.restart(SESSION, parent.id, stage.now)
    stage.end(parent)
    with refused(Code.LIVE):
        stage.it.again(SESSION, parent.id, parent.incarnation, stage.now)
    stage.end(child)
    stage.end(grandchild)
    again = stage.begin(stage.it.again(SESSION, parent.id, parent.incarnation, stage.now))
    assert {row.id for row in stage.it.list(inside(again), stage.now, history=True).workers} == {
        child.id,
        grandchild.id,
    }
    with refused(Code.CONFLICT):
        stage.it.restart(inside(again), child.id, stage.now)
    assert stage.it.forget(inside(again), child.id, None, stage.now) == [stage.get(grandchild), stage.get(child)]


# Forgetting


def test_a_worker_is_forgotten_with_all_below_it_deepest_first(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    with refused(Code.LIVE):
        stage.it.forget(SESSION, parent.id, True, stage.now)
    stage.it.stop(SESSION, parent.id, stage.now)
    for row in (grandchild, child, parent):
        stage.end(row)
    with refused(Code.ACKNOWLEDGE, "acknowledge"):
        stage.it.forget(SESSION, parent.id, False, stage.now)
    claimed = stage.it.forget(SESSION, parent.id, True, stage.now)
    assert [row.id for row in claimed] == [grandchild.id, child.id, parent.id]
    with refused(Code.CONFLICT):
        stage.it.forgotten(parent.id, stage.now)
    for row in claimed:
        stage.it.forgotten(row.id, stage.now)
    changes = stage.it.take()
    assert set(changes.removed) == {row.id for row in claimed}
    assert set(changes.buried) == {row.incarnation for row in claimed}
    assert stage.it.events(parent.id, 9) == []


def test_a_worker_needs_no_acknowledgement_to_forget_what_it_started(stage: Stage, family: Family) -> None:
    child, grandchild = family[1:3]
    stage.end(grandchild)
    # Saying that there is none is another thing.
    with refused(Code.ACKNOWLEDGE, "acknowledge"):
        stage.it.forget(inside(child), "grandchild", False, stage.now)
    assert stage.it.forget(inside(child), "grandchild", None, stage.now) == [stage.get(grandchild)]


def test_a_parent_that_began_again_keeps_its_name_in_what_it_started(stage: Stage, family: Family) -> None:
    parent, child, grandchild, _ = family
    stage.it.restart(SESSION, parent.id, stage.now)
    for row in (grandchild, child, parent):
        stage.end(row)
    stage.it.take()
    stage.it.again(SESSION, parent.id, parent.incarnation, stage.now)
    assert parent.incarnation not in stage.it.take().buried
    stage.it.forget(OVERRIDE, child.id, True, stage.now)
    stage.it.forgotten(grandchild.id, stage.now)
    stage.it.forgotten(child.id, stage.now)
    assert set(stage.it.take().buried) == {grandchild.incarnation, child.incarnation, parent.incarnation}


def test_a_registry_in_which_a_parent_is_missing_still_works(stage: Stage, family: Family) -> None:
    _, child, grandchild, _ = family
    later = Stage(loaded=Loaded(workers=(child, grandchild)))
    for row in (child, grandchild):
        later.it.remember_scope(row.id, "scope-a")
    assert [row.id for row in later.it.stop(OVERRIDE, child.id, later.now).fenced] == [grandchild.id, child.id]


def test_pruning_takes_ones_own_and_with_an_override_everyones(stage: Stage) -> None:
    mine, other, live = stage.run(SESSION), stage.run(PERSON), stage.run(SESSION)
    foreign = stage.run(FOREIGN)
    for row in (mine, other, foreign):
        stage.end(row)
    with refused(Code.ACKNOWLEDGE):
        stage.it.prune(SESSION, None, False, False, stage.now)
    with refused(Code.FORBIDDEN, "all"):
        stage.it.prune(SESSION, None, True, True, stage.now)
    with refused(Code.NOT_OWNER):
        stage.it.prune(SESSION, other.id, False, True, stage.now)
    assert [row.id for row in stage.it.prune(SESSION, None, False, True, stage.now).workers] == [mine.id]
    stage.it.unclaim(mine.id)
    pruned = stage.it.prune(OVERRIDE, None, True, True, stage.now).workers
    assert {row.id for row in pruned} == {mine.id, other.id, foreign.id}
    assert stage.get(live).state == State.REGISTERING


def test_pruning_takes_what_is_below_along_and_tells_what_is_kept(stage: Stage, family: Family) -> None:
    parent, child, grandchild, stranger = family
    stage.end(stranger)
    stage.end(parent)
    found = stage.it.prunable(SESSION, None, False)
    assert [row.id for row in found.workers] == [stranger.id]
    assert [(row.worker.id, row.code) for row in found.kept] == [(parent.id, Code.LIVE)]
    stage.end(grandchild)
    stage.end(child)
    assert stage.it.prunable(PERSON, None, False) == ((), ())
    # What is seen before and what is done is one choice, of all and of one.
    for reference in (None, parent.id):
        found = stage.it.prunable(SESSION, reference, False)
        taken = [row.id for row in found.workers if row.id != stranger.id]
        assert taken == [grandchild.id, child.id, parent.id]
        assert stage.it.prune(SESSION, reference, False, True, stage.now) == found
        for row in found.workers:
            stage.it.unclaim(row.id)
    stage.it.forget(SESSION, parent.id, True, stage.now)
    with refused(Code.CONFLICT):
        stage.it.prunable(SESSION, parent.id, False)
    found = stage.it.prune(SESSION, None, False, True, stage.now)
    assert [row.id for row in found.workers] == [stranger.id]
    assert [(row.worker.id, row.code) for row in found.kept] == [(parent.id, Code.CONFLICT)]


# Retention


@pytest.mark.parametrize(("dirty", "days"), [(False, 7), (True, 30), (None, 30)])
def test_what_may_have_changes_that_are_not_committed_is_kept_longer(
    stage: Stage, dirty: bool | None, days: int
) -> None:
    worker = stage.end(stage.run(), dirty=dirty)
    until = stage.now + days * DAY
    assert stage.it.cleanup(PERSON, until - 1) == ((), 0, frozenset())
    due = Due(Work.PRUNE, worker.id, worker.incarnation, until)
    assert stage.it.cleanup(PERSON, until) == ((due,), 0, frozenset())
    assert stage.it.claim(due, until - 1) is None
    assert stage.it.claim(due, until) == worker
    assert stage.it.claim(due, until) is None


def test_a_preview_changes_nothing_and_shows_only_what_may_be_seen(stage: Stage) -> None:
    idle, ended, foreign = stage.run(), stage.end(stage.run()), stage.end(stage.run(FOREIGN))
    stage.it.take()
    later = stage.now + 40 * DAY
    found = stage.it.cleanup(PERSON, later)
    # Of what a person does not see only time decides, and it is counted; an agent cleans up what it sees.
    assert found.due[0][:2] == (Work.STOP, idle.id) and found.others == {foreign.id}
    assert {(due.work, due.worker) for due in found.due[1:]} == {(Work.PRUNE, row.id) for row in (ended, foreign)}
    agents = stage.it.cleanup(SESSION, later)
    assert [due.worker for due in agents.due] == [idle.id, ended.id] and not agents.others
    everything = stage.it.cleanup(OVERRIDE, later).due
    assert {due.worker for due in everything} == {idle.id, ended.id, foreign.id}
    assert not stage.it.take()
    assert stage.get(idle) == idle


def test_an_agents_cleanup_leaves_alone_whose_scope_id_is_not_known_any_more() -> None:
    stage = Stage()
    worker = stage.end(stage.run(FOREIGN))
    stage.it.take()
    again = Registry(Limits(), Lifetimes(), lambda: worker.id, Loaded((worker,)))
    later = stage.now + 40 * DAY
    assert again.cleanup(SESSION, later) == ((), 0, frozenset())
    assert again.cleanup(PERSON, later).others == {worker.id}


def test_a_parent_is_not_deleted_before_what_is_kept_below_it(stage: Stage, family: Family) -> None:
    parent, child, grandchild, stranger = family
    stage.end(grandchild, dirty=True)
    for row in (child, parent, stranger):
        stage.end(row)
    due = stage.it.cleanup(SESSION, stage.now + 7 * DAY).due
    assert [row.worker for row in due] == [stranger.id]
    later = stage.now + 30 * DAY
    due = stage.it.cleanup(SESSION, later).due
    assert [row.worker for row in due[:2]] == [grandchild.id, child.id]
    assert {row.worker for row in due[2:]} == {parent.id, stranger.id}
    assert stage.it.claim(due[1], later) is None
    assert [stage.it.claim(row, later) for row in due[:2]] == [stage.get(grandchild), stage.get(child)]


def test_one_cleanup_does_so_much_and_says_what_is_left() -> None:
    stage = Stage(Limits(candidates=2), Lifetimes(retention_ms=1))
    for _ in range(5):
        stage.end(stage.run())
    found = stage.it.cleanup(PERSON, stage.now + 1)
    assert (len(found.due), found.deferred) == (2, 3)


def test_a_retention_of_nothing_is_for_ever() -> None:
    stage = Stage(lifetimes=Lifetimes(retention_ms=0))
    stage.end(stage.run())
    assert stage.it.cleanup(PERSON, stage.now + 1000 * DAY) == ((), 0, frozenset())
