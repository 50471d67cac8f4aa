# SPDX-License-Identifier: Apache-2.0
"""The published Pi extension on a real machine: it starts a run through our script, watches it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import pytest

from tests.contract.nodepeers import Event, Extension
from tests.system.conftest import Bed
from tests.system.pihome import RUNS, PiHome
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
            await extension.send(op="call", params={"action": "start", "task": CANARY})
            await extension.answer(START, True)
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
    if bed.run("command -v tmux", check=False).returncode != 0:
        pytest.skip("attaching is for people in tmux")
    tmux = "tmux new-session -d -s desk -x 120 -y 30 cat && tmux display-message -p -t desk '#{socket_path},#{pid},0'"
    inside = bed.as_user("alice", tmux).stdout.strip()

    async def scene(home: PiHome) -> None:
        async with home.extension(TMUX=inside) as extension:
            await started(extension)
            await update(extension, "Parent supervision attached", triggers=False)
            attached = said(await extension.call("attach", session=SESSION))
            assert attached.startswith(f"Switched to {SESSION}")

    with PiHome(bed, EXTERNAL) as home:
        asyncio.run(scene(home))
        is_shown(bed)
    bed.as_user("alice", ["tmux", "kill-server"])


def is_shown(bed: Bed) -> None:
    """The dashboard is in a window of its own, which closes with it."""
    screen = ["tmux", "capture-pane", "-p", "-t", "desk:orchestrate"]
    until(lambda: SESSION in bed.as_user("alice", screen, check=False).stdout, "the dashboard in a window")
    bed.as_user("alice", ["tmux", "send-keys", "-t", "desk:orchestrate", "q"])
    names = ["tmux", "list-windows", "-t", "desk", "-F", "#{window_name}"]
    until(lambda: "orchestrate" not in bed.as_user("alice", names).stdout.split(), "no window any more")
