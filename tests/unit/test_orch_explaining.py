# SPDX-License-Identifier: Apache-2.0
"""Why a command was not accepted: what the snapshot leaves as the only cause, and the command that leads on."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.cli.orchestrate import explaining
from agent_intercom.orchestration.errors import Refusal
from tests.unit.tuistage import role, snapshot, works

CONFLICT = Refusal("broker_rejected", "Broker reported conflict command delivery")
UNCERTAIN = Refusal("broker_uncertain", "Broker reported uncertain command delivery")
REJECTED = Refusal("broker_rejected", "Broker reported rejected command delivery")
CONTINUE = f"`orchestrate continue s --yes --command-id {'a' * 32}`"
AWAY = {"state": "disconnected", "connected": False}
OPEN = {"round": 1, "kind": "review", "state": "accepted"}
LOST = {"round": 1, "kind": "review", "state": "uncertain"}


def told(
    action: str, name: str, refusal: Refusal, *roles: dict[str, Any], pending: int | None = None, **keys: Any
) -> str:
    shown = snapshot(*roles, **keys)
    shown["workflow"]["continuation"] = {"version": 1, "max_repair_rounds": 1, "pending_repair_round": pending}
    asked = explaining.Asked(action, name, "s", "a" * 32)
    return ". ".join(explaining.refused(shown, asked, refusal))


PAUSED: dict[str, Any] = {"state": "needs_attention", "pending": 2}


def test_a_message_while_a_round_of_repair_waits() -> None:
    found = told("send", "reviewer", CONFLICT, role("implementer"), role("reviewer"), **PAUSED)
    assert "a decision on another round of repair" in found and found.endswith(f"{CONTINUE} admits it.")
    found = told("send", "reviewer", CONFLICT, works("implementer", "implementation"), role("reviewer"), **PAUSED)
    assert "implementer must come to rest before it" in found and found.endswith(f"Then {CONTINUE} admits it.")


def test_a_message_while_another_waits_for_an_answer() -> None:
    roles = [role("implementer", state="waiting", assignment=OPEN), role("reviewer")]
    for pending in (None, 2):
        found = told("send", "reviewer", CONFLICT, *roles, state="needs_attention", pending=pending)
        assert "an answer to implementer" in found and "Say --role implementer." in found


def test_a_message_while_nobody_known_waits() -> None:
    found = told("send", "reviewer", CONFLICT, role("implementer"), role("reviewer"), state="needs_attention")
    assert "nobody" not in found and "`orchestrate status s`" in found


def test_a_message_that_nothing_stands_against() -> None:
    for state in ("active", "ready"):
        assert "another one has the same id" in told("send", "reviewer", CONFLICT, role("reviewer"), state=state)
    waiting = role("reviewer", state="waiting", assignment=OPEN)
    assert "another one has the same id" in told("send", "reviewer", CONFLICT, waiting, state="needs_attention")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (works("implementer", "implementation"), "implementer must come to rest"),
        (role("implementer", state="restarting"), "implementer must come to rest"),
        (role("implementer", **AWAY, assignment=OPEN), "implementer must come to rest"),
        (role("implementer", assignment=LOST), "what implementer did is uncertain"),
    ],
)
def test_continue_while_somebody_is_not_at_rest(row: dict[str, Any], named: str) -> None:
    found = told("continue", "implementer", CONFLICT, row, role("reviewer"), **PAUSED)
    assert named in found and "no round of repair" not in found


def test_continue_where_nothing_stands_against_it_now() -> None:
    """An id that was refused once is refused for ever."""
    found = told("continue", "implementer", CONFLICT, role("implementer", **AWAY), role("reviewer"), **PAUSED)
    assert "under this id" in found and found.endswith(f"{CONTINUE} admits it.")


def test_continue_without_a_round_that_waits() -> None:
    assert "no round of repair waits" in told("continue", "implementer", CONFLICT, role("implementer"))


def test_continue_of_a_run_in_doubt() -> None:
    found = told("continue", "implementer", CONFLICT, role("implementer"), state="uncertain", pending=2)
    assert "what a role did is uncertain" in found and CONTINUE not in found


def test_redeliver() -> None:
    assert "nothing about it is in doubt" in told("redeliver", "probe", CONFLICT, role("probe"))
    found = told("redeliver", "probe", CONFLICT, works("probe", "probe"), role("reviewer", state="uncertain"))
    assert "in doubt is reviewer" in found and "redeliver s --role reviewer --yes" in found
    found = told("redeliver", "probe", CONFLICT, role("probe", state="uncertain"), state="uncertain")
    assert "though the run is in doubt" in found


@pytest.mark.parametrize("action", ["send", "abort", "redeliver", "restart"])
def test_nobody_is_there(action: str) -> None:
    found = told(action, "probe", UNCERTAIN, role("probe", **AWAY))
    assert "its worker is not connected" in found and "`orchestrate restart s --role probe --yes`" in found


def test_nobody_could_brief_a_successor() -> None:
    assert "probe was not let go" in told("restart", "probe", UNCERTAIN, role("probe"))


def test_a_broker_that_keeps_no_more_commands() -> None:
    assert "keeps no more commands" in told("send", "probe", REJECTED, role("probe"))


def test_nothing_is_guessed_where_nothing_is_known() -> None:
    late = Refusal("broker_uncertain", "Broker did not acknowledge the command in time")
    assert told("send", "probe", late, role("probe", **AWAY)).startswith(late.text)
    assert told("abort", "probe", UNCERTAIN, role("probe")).startswith(UNCERTAIN.text)
    asked = explaining.Asked("send", "probe", "s", "a" * 32, "pi-tmux-agents")
    assert explaining.refused(None, asked, CONFLICT) == (
        CONFLICT.text,
        "`pi-tmux-agents status s` tells where the run stands.",
    )


def test_a_worker_of_somebody_else_is_not_restarted_from_here() -> None:
    shown = snapshot(role("reviewer", **AWAY))
    asked = explaining.Asked("send", "reviewer", "s", "a" * 32, external=True)
    text, hint = explaining.refused(shown, asked, UNCERTAIN)
    assert text == "nothing was handed to reviewer: its worker is not connected"
    assert "restart" not in hint and "`orchestrate status s`" in hint
