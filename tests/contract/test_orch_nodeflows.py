# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the published worker bridges, each with the published parent, which has to be told the right end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

from tests.contract.nodepeers import Parent, Worker
from tests.contract.orchpeer import eventually
from tests.contract.orchruns import SESSION, Run

Rules: TypeAlias = Sequence[Mapping[str, object]]
Turns: TypeAlias = list[tuple[str, int]]

HELD = {"hold": True}
LISTENING = {"kind": "operator_message", **HELD}
SILENT = {"do": "settle", "times": 1}
"""An agent that forgets to report."""

BACK = {"round": 1, "report": {"verdict": "changes_requested", "summary": "The error is swallowed."}}
SPECIALISTS = ("probe", "playwright", "django")
TWICE: Turns = [("implementation", 1), ("implementation", 2)]


def peer(run: Run, role: str, *rules: Mapping[str, object], **options: Any) -> Worker:
    return Worker(role, run.tokens[role], run.socket, rules=rules, **options)


def parent_of(run: Run) -> Parent:
    return Parent(SESSION, run.directory, run.socket, run.roles)


@contextlib.asynccontextmanager
async def team(run: Run, **rules: Rules) -> AsyncIterator[tuple[dict[str, Worker], Parent]]:
    """The parent, which sees the run from its beginning, and a bridge for every role."""
    async with contextlib.AsyncExitStack() as peers:
        parent = await peers.enter_async_context(parent_of(run))
        await parent.ready()
        workers = {}
        for role in run.roles:
            workers[role] = await peers.enter_async_context(peer(run, role, *rules.get(role, ())))
        yield workers, parent
        for worker in workers.values():
            untroubled(worker)


def untroubled(worker: Worker) -> None:
    """The bridge was refused nothing, and its script did not stumble."""
    faults = [event for event in worker.events if event["event"] == "fault" or event.get("ok") is False]
    assert not faults, worker.story()


def turns(worker: Worker) -> Turns:
    return [(event["kind"], event["round"]) for event in worker.events if event["event"] == "turn"]


def evidence(worker: Worker) -> str:
    """What the worker had read of the others' work when its first assignment came."""
    read = ""
    for event in worker.events:
        if event["event"] == "message" and event["message"]["details"]["kind"] == "assignment":
            break
        if event["event"] == "message" and event["message"]["details"]["delivery_kind"] == "run_state":
            read = event["message"]["content"]
    return read


async def until(run: Run, role: str, **columns: object) -> None:
    """Wait until the role's row is so."""
    await asyncio.to_thread(eventually, lambda: columns.items() <= run.role(role).items())


async def ends(parent: Parent, state: str, *words: str) -> None:
    """The parent is told this end with these words in it, and nothing but what it was told before wakes it."""
    update = await parent.update(f"# Tmux orchestration {state}\n", triggers=True)
    assert all(word in update for word in words), update
    await parent.event("stopped")
    left = [event["message"]["content"] for event in parent.untaken("message") if event["options"].get("triggerTurn")]
    assert not left


def play(run: Run, scene: Coroutine[Any, Any, None], state: str, round_: int) -> None:
    """Have a scene played to the end, where the run is in this state and round."""
    with run:
        asyncio.run(scene)
        assert run.workflow() == (state, round_)


@pytest.mark.parametrize(("flow", "planned"), [("single", []), ("phased", [("plan", 1)])])
def test_two_roles_need_two_rounds(flow: str, planned: Turns) -> None:
    async def scene() -> None:
        async with team(run, reviewer=[BACK]) as (workers, parent):
            implementer, reviewer = workers.values()
            await parent.update("moved to active for round 1", triggers=False)
            await parent.update("moved to active for round 2", triggers=False)
            await ends(parent, "ready", "Round: 2", "implementation of round 2 is done.", "review of round 2 is done.")
            await reviewer.event("settled", lambda _: turns(reviewer)[-1] == ("review", 2))
            assert turns(implementer) == [*planned, *TWICE]
            assert turns(reviewer) == [("review", 1), ("review", 2)]
            assert "Make authentication sound." in (await reviewer.delivery("baseline"))["content"]
            assert "implementation of round 1 is done." in (await reviewer.delivery("run_state"))["content"]
            for _ in planned:
                assert "plan of round 1 is done." in (await implementer.delivery("run_state"))["content"]
            assert "The error is swallowed." in (await implementer.delivery("run_state"))["content"]

    run = Run(flow=flow)
    play(run, scene(), "ready", 2)


@pytest.mark.parametrize(("flow", "planned"), [("single", []), ("phased", [("plan", 1)])])
def test_five_roles_need_two_rounds_and_the_specialists_are_in_the_first(flow: str, planned: Turns) -> None:
    async def scene() -> None:
        documented = {"kind": "implementation", "round": 2, "report": {"changed_paths": ["README.md"]}}
        async with team(run, reviewer=[BACK], implementer=[documented]) as (workers, parent):
            await ends(parent, "ready", "Round: 2", *(f"{role} of round 1 is done." for role in SPECIALISTS))
            assert turns(workers["implementer"]) == [*planned, *TWICE]
            assert turns(workers["reviewer"]) == [("review", 1), ("review", 2)]
            for role in SPECIALISTS:
                assert turns(workers[role]) == [(role, 1)]
            read = evidence(workers["reviewer"])
            assert all(f"{kind} of round 1 is done." in read for kind in ("implementation", *SPECIALISTS)), read

    run = Run(*SPECIALISTS, flow=flow)
    play(run, scene(), "ready", 2)


def test_a_message_after_ready_opens_a_round_that_is_reviewed_again() -> None:
    async def scene() -> None:
        async with team(run, implementer=[{**HELD, "round": 2}]) as (workers, first):
            implementer, reviewer = workers.values()
            await ends(first, "ready", "Round: 1", "review of round 1 is done.")
            await until(run, "implementer", state="idle")
            run.send("implementer", "Rename it, too.")
            await implementer.event("held")
            assert "Rename it, too." in (await implementer.delivery("operator_message"))["content"]
            async with parent_of(run) as second:
                assert (await second.ready())["ok"]
                await implementer.send(op="continue")
                await ends(second, "ready", "Round: 2", "review of round 2 is done.")
            assert turns(implementer) == TWICE
            assert turns(reviewer) == [("review", 1), ("review", 2)]

    run = Run()
    play(run, scene(), "ready", 2)


def test_a_message_wakes_the_owner_that_waits_and_nobody_else() -> None:
    async def scene() -> None:
        async with team(run, reviewer=[SILENT, LISTENING]) as (workers, parent):
            reviewer = workers["reviewer"]
            update = await parent.update("# Tmux orchestration needs_attention\n", triggers=True)
            assert "- reviewer: waiting" in update
            run.declined("conflict", "send", "implementer", message="Can you see why?")
            assert run.workflow() == ("needs_attention", 1)
            run.send("reviewer", "You have not said what you found.")
            await reviewer.event("held")
            await asyncio.to_thread(eventually, lambda: run.workflow() == ("active", 1))
            await reviewer.send(op="turn")
            await reviewer.send(op="continue")
            await ends(parent, "ready", "review of round 1 is done.")
            assert turns(reviewer) == [("review", 1), ("operator_message", 1), ("review", 1)]
            assert turns(workers["implementer"]) == [("implementation", 1)]
            assert len(run.assignments("reviewer")) == 1

    run = Run()
    play(run, scene(), "ready", 1)


@pytest.mark.parametrize("role", ["implementer", "reviewer"])
def test_a_restarted_worker_goes_on_while_the_one_before_is_kept_out(role: str) -> None:
    other = "reviewer" if role == "implementer" else "implementer"

    async def scene() -> None:
        async with parent_of(run) as parent, peer(run, other) as colleague, peer(run, role, HELD) as old:
            await parent.ready()
            await old.event("held")
            seen = len(old.events)
            run.accepted("restart", role)
            async with peer(run, role, entries=old.entries, generation=2) as new:
                await ends(parent, "ready", "review of round 1 is done.")
                assert "Make authentication sound." in (await new.delivery("baseline"))["content"]
                await old.send(op="continue")
                await old.event("tool_result", lambda event: not event["ok"])
                assert not [event for event in old.events[seen:] if event["event"] == "message"]
                assert turns(new) == turns(old)
                untroubled(new)
            untroubled(colleague)
        assert run.role(role)["generation"] == 2
        assert len(run.assignments(role)) == len(run.rows("SELECT id FROM reports WHERE role = ?", role)) == 1

    run = Run()
    play(run, scene(), "ready", 1)


@pytest.mark.parametrize("role", ["implementer", "reviewer"])
def test_a_worker_that_was_killed_at_work_waits_with_its_session_for_a_word(role: str) -> None:
    other = "reviewer" if role == "implementer" else "implementer"

    async def scene() -> None:
        async with parent_of(run) as parent, peer(run, other) as colleague:
            await parent.ready()
            async with peer(run, role, HELD) as first:
                await first.event("held")
                await first.kill()
            await until(run, role, connected=0)
            async with peer(run, role, LISTENING, entries=first.entries) as second:
                attention = await parent.update("# Tmux orchestration needs_attention\n", triggers=True)
                assert f"- {role}: waiting" in attention
                run.send(role, "Your process was killed; go on.")
                await second.event("held")
                await second.send(op="turn")
                await second.send(op="continue")
                await ends(parent, "ready", "review of round 1 is done.")
                assert turns(second)[-1] == turns(first)[-1]
                untroubled(second)
            untroubled(colleague)
        assert len(run.assignments(role)) == 1

    run = Run()
    play(run, scene(), "ready", 1)


def test_a_worker_that_was_killed_between_its_work_gets_what_it_is_owed() -> None:
    async def scene() -> None:
        async with parent_of(run) as parent, peer(run, "implementer", {**HELD, "round": 1}) as implementer:
            await parent.ready()
            async with peer(run, "reviewer", BACK) as first:
                await implementer.event("held")
                await first.delivery("baseline")
                await until(run, "reviewer", connected=1, state="idle")
                await first.kill()
            await until(run, "reviewer", connected=0)
            await implementer.send(op="continue")
            await implementer.event("settled")
            assert run.workflow() == ("active", 1)
            async with peer(run, "reviewer", BACK, entries=first.entries) as second:
                await ends(parent, "ready", "review of round 2 is done.")
                assert "implementation of round 1 is done." in (await second.delivery("run_state"))["content"]
                assert turns(second) == [("review", 1), ("review", 2)]
                untroubled(second)
            untroubled(implementer)

    run = Run()
    play(run, scene(), "ready", 2)


def test_a_worker_that_was_killed_before_it_took_its_work_leaves_the_run_uncertain() -> None:
    async def scene() -> None:
        async with parent_of(run) as parent, peer(run, "implementer", HELD) as implementer:
            await parent.ready()
            async with peer(run, "reviewer") as first:
                await implementer.event("held")
                await first.delivery("baseline")
                await until(run, "reviewer", connected=1, state="idle")
                first.pause()
                await implementer.send(op="continue")
                await implementer.event("settled")
                await first.kill()
            await until(run, "reviewer", connected=0)
            assert run.workflow() == ("active", 1)
            async with peer(run, "reviewer", entries=first.entries) as second:
                await ends(parent, "uncertain", "implementation of round 1 is done.")
                assert not turns(second)
                run.accepted("redeliver", "reviewer")
                await second.event("settled")
                assert turns(second) == [("review", 1)]
            untroubled(implementer)

    run = Run()
    play(run, scene(), "ready", 1)
