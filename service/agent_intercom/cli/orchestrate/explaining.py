# SPDX-License-Identifier: Apache-2.0
"""Why a broker did not take a command, out of what its database tells, and the way out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from agent_intercom.orchestration.contract import RoleState, Workflow
from agent_intercom.orchestration.errors import Refusal

Told: TypeAlias = tuple[str, str]
"""The fault, and the way out."""


def refused(snapshot: Mapping[str, Any] | None, action: str, role: str, refusal: Refusal) -> Told:
    """What to tell of a command that was not accepted. `snapshot` is the broker's (section 11.4), or None."""
    plain = refusal.text, "`orchestrate status` tells where the run stands."
    if snapshot is None or "command delivery" not in refusal.text:
        return plain
    row = next((row for row in snapshot["roles"] if row["role"] == role), None)
    if row is None:
        return plain
    if not row["connected"]:
        return f"nothing was handed to {role}: its worker is not connected", (
            "Start it again (`orchestrate restart`), or wait until it is back."
        )
    state = snapshot["workflow"]["state"]
    if action == "send" and state == Workflow.NEEDS_ATTENTION:
        waiting = [row["role"] for row in snapshot["roles"] if row["state"] == RoleState.WAITING]
        others = " or ".join(waiting) or "nobody"
        return f"nothing was handed to {role}: the run waits for an answer to {others}", (
            f"Say --role {waiting[0]}." if waiting else "`orchestrate status` tells what is left to do."
        )
    if action == "continue":
        return (
            "nothing was admitted: no round of repair waits for it",
            "`orchestrate status` tells where the run stands.",
        )
    if action == "redeliver":
        return f"nothing was handed to {role}: nothing about it is in doubt", (
            "`orchestrate status` tells which role is uncertain."
        )
    if action == "restart":
        return f"{role} was not let go: the broker has nothing to brief its successor with", (
            "After a loss of memory a worker cannot be replaced; it can go on, or the run be started anew."
        )
    if refusal.code == "broker_rejected":
        return "the command was not taken: another one has the same id, or the message is too long for a worker", (
            "Leave --command-id out to have one made, or put the details into a file of the project."
        )
    return plain
