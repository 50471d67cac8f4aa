# SPDX-License-Identifier: Apache-2.0
"""The published Pi extension on a real machine: it starts a run through our script, watches it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from tests.contract.nodepeers import Event, Extension
from tests.mockmodel import Model, call, report
from tests.system.conftest import Bed
from tests.system.pihome import RUNS, PiHome, Terminal
from tests.system.wire import until

SESSION: Final = "pi-project-agents"
START: Final = "Start tmux orchestration?"
EXTERNAL: Final = '[defaults]\nharness = "external"\n'
CANARY: Final = "Make the cassowary sound."
REPAIR: Final = [{"round": 1, "report": {"verdict": "changes_requested", "summary": "Not yet."}}]


def said(event: Event) -> str:
    return str(event["text"] if event["ok"] else event["error"])


async def update(extension: Extension, text: str, *, triggers: bool) -> str:
    """The next message into the parent's session with this text, which triggers a turn or does not."""

    def fits(event: Event) -> bool:
        return text in event["message"]["content"] and event["options"]["triggerTurn"] is triggers

    content: str = (await extension.event("message", fits))["message"]["content"]
    return content


async def started(extension: Extension, agreed: bool = True, **params: object) -> Event:
    """What a start comes to that the person agrees to, or not."""
    await extension.send(op="call", params={"action": "start", "task": CANARY, **params})
    await extension.answer(START, agreed)
    return await extension.event("result")


def test_a_run_from_its_preview_to_its_end(bed: Bed) -> None:
    async def scene(home: PiHome) -> None:
        async with home.extension() as extension:
            assert said(await extension.call("doctor")) == "Prerequisite checks complete"
            assert said(await extension.call("list")) == "No running orchestrations."

            assert said(await started(extension, agreed=False)) == "start_confirmation_declined"
            assert not home.path(RUNS).exists() and home.units() == []

            result = await started(
                extension,
                withProbe=True,
                probeTask="Look for feathers.",
                implementationFlow="phased",
                contextCapsule={"currentState": "It is silent."},
            )
            run: dict[str, Any] = result["details"]["data"]
            assert said(result).startswith(f"Started detached {SESSION} with headless RPC workers and phased")
            await update(extension, "Parent supervision attached", triggers=False)
            # The preview says it, so nobody is asked.
            await extension.send(op="call", params={"action": "start", "task": CANARY})
            assert "Failed (session_collision)" in said(await extension.event("result"))

            async with contextlib.AsyncExitStack() as stack:
                held = [{"kind": "implementation", "hold": True, "times": 1}]
                rules = {"implementer": held, "reviewer": REPAIR}
                workers = {
                    role: await stack.enter_async_context(home.worker(role, run, rules.get(role, ())))
                    for role in ("implementer", "reviewer", "probe")
                }
                implementer = workers["implementer"]
                baseline = await implementer.delivery("baseline")
                assert CANARY in baseline["content"] and "It is silent." in baseline["content"]
                assert "Look for feathers." in (await workers["probe"].delivery("baseline"))["content"]
                await implementer.event("held")

                status = said(await extension.call("status", session=SESSION))
                assert "workflow=active round=1; implementer=active" in status and "3 roles" in status
                sent = await extension.call("send", session=SESSION, role="implementer", message="Mind the beak.")
                assert said(sent) == f"Acknowledged by {SESSION}/implementer"
                assert (await implementer.delivery("operator_message"))["content"] == "Mind the beak."
                await implementer.send(op="continue")

                ready = await update(extension, "# Tmux orchestration ready", triggers=True)
                assert "implementation of round 2 is done." in ready and "review of round 2 is done." in ready
                assert said(await extension.call("list")) == f"1 orchestration(s): {SESSION}"
                assert "workflow=ready round=2" in said(await extension.call("status", session=SESSION))

                await extension.send(op="command", name="or-stop")
                await extension.answer("Select a running orchestration", f"{SESSION} · {run['project']}")
                await extension.answer("Stop tmux orchestration?", True)
                await extension.event("told", lambda event: event["text"] == "stop complete")
            assert said(await extension.call("list")) == "No running orchestrations."
            assert "Failed (" in said(await extension.call("send", session=SESSION, role="probe", message="x"))
            faults = [event for event in extension.events if event["event"] in {"fault", "noise"}]
            assert not faults
        assert home.units() == [] and home.left_in_tmp() == []
        assert not [event for event in extension.events if event["event"] == "exited" and event["stderr"]]
        assert CANARY not in str(bed.journal("alice"))

    with PiHome(bed, EXTERNAL) as home:
        asyncio.run(scene(home))


def test_attaching_opens_a_window_with_the_dashboard(bed: Bed) -> None:
    async def scene(home: PiHome, terminal: Terminal) -> None:
        async with home.extension(TMUX=terminal.inside) as extension:
            await started(extension)
            await update(extension, "Parent supervision attached", triggers=False)
            attached = said(await extension.call("attach", session=SESSION))
            assert attached.startswith(f"Switched to {SESSION}")

    with PiHome(bed, EXTERNAL) as home, Terminal(bed, "cat") as terminal:
        asyncio.run(scene(home, terminal))
        terminal.shows(SESSION, window="orchestrate")
        terminal.type("q", window="orchestrate")
        until(lambda: terminal.windows() == ["first"], "no window for the dashboard")


TALK: Final = {
    ("", "", 0): [call("tmux_orchestrator", action="start", task=CANARY, useParentModel=True), {"say": "Begun."}],
    ("", "", 2): [{"say": "The team has done it."}],
    ("", "", None): [{"say": "Noted."}],
    ("reviewer", "review", 1): [report(verdict="changes_requested", summary="Not yet.")],
}


def test_the_real_pi_starts_a_team_of_real_pis(bed: Bed) -> None:
    """A person in Pi asks for a team, agrees to it, is told by their own Pi what it did, and ends it."""
    with Model(TALK) as model, PiHome(bed, "") as home:
        home.pi(model.url)
        with Terminal(bed, "pi", rows=60) as terminal:
            terminal.shows("Pi can explain", "pi-tmux-orchestrator")
            terminal.type("Put a team to work.", "Enter")
            terminal.shows(START, "implementer: stand-in/m (off)", "→ Yes")
            assert home.units() == []
            terminal.type("Enter")
            terminal.shows("Tmux orchestration ready", "review of round 2 is done.", "The team has done it.")
            lines = bed.as_user("alice", ["orchestrate", "status", SESSION]).stdout
            assert "state: ready, round 2, single flow" in lines and "2 of 2 workers connected" in lines
            work = [(request.role, request.round) for request in model.requests if request.role]
            assert work == [("implementer", 1), ("reviewer", 1), ("implementer", 2), ("reviewer", 2)]

            terminal.type(f"/or-stop {SESSION}", "Enter")
            terminal.shows("Stop tmux orchestration?", "→ Yes")
            terminal.type("Enter")
            terminal.shows("stop complete")
        assert home.units() == [] and home.left_in_tmp() == []
        assert bed.run(["pgrep", "-u", "alice", "-f", "orchestrator-worker"], check=False).stdout == ""
