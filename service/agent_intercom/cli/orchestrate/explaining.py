# SPDX-License-Identifier: Apache-2.0
"""Why a broker did not take a command, as far as its database tells, and the way out. Pure.

Of a command that it decided against, the broker tells no cause. What is known is where the run stands afterwards:
causes are told where that leaves only one, and otherwise what the database says.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from agent_intercom.cli.orchestrate import steps
from agent_intercom.orchestration import standing
from agent_intercom.orchestration.contract import Code, CommandStatus, RoleState, Workflow
from agent_intercom.orchestration.errors import Refusal

Told: TypeAlias = tuple[str, str]
"""The fault, and the way out."""

Snapshot: TypeAlias = Mapping[str, Any]

_SOMEBODY: Final = "a role"


class Asked(NamedTuple):
    """A command that was not accepted. `new_id` is an id that no command has had, `program` how this one is called.

    `external`: somebody else starts the worker of the role.
    """

    action: str
    role: str
    session: str
    new_id: str
    program: str = "orchestrate"
    external: bool = False

    def line(self, action: str, rest: str = "") -> str:
        """A command line for the same run, as it stands in a text."""
        return f"`{self.program} {action} {shlex.quote(self.session)}{rest}`"


def refused(snapshot: Snapshot | None, asked: Asked, refusal: Refusal) -> Told:
    """What to tell of a command that was not accepted. `snapshot` is the broker's (section 11.4), or None."""
    plain = refusal.text, f"{asked.line('status')} tells where the run stands."
    if snapshot is None or "command delivery" not in refusal.text:
        return plain
    row = next((row for row in snapshot["roles"] if row["role"] == asked.role), None)
    if row is None:
        return plain
    if CommandStatus.UNCERTAIN in refusal.text:
        return _not_handed(asked, row) or plain
    if Code.REJECTED in refusal.text:
        return "the command was not taken: the broker keeps no more commands of this run", (
            "Those that lead out of a doubt or a pause are taken all the same; for others start a new run."
        )
    if asked.action == "continue":
        return _continue(snapshot, asked)
    if asked.action == "redeliver":
        return _redeliver(snapshot, asked, row)
    if asked.action == "send" and (found := _send(snapshot, asked, row)):
        return found
    # Nothing of the run stands against it.
    return "the command was not taken: another one has the same id, or the message is too long for a worker", (
        "Leave --command-id out to have one made, or put the details into a file of the project."
    )


def _not_handed(asked: Asked, row: Snapshot) -> Told | None:
    if not row["connected"]:
        if asked.external:
            return f"nothing was handed to {asked.role}: its worker is not connected", (
                f"Whoever runs it has to start it; {asked.line('status')} tells where it connects to."
            )
        again = asked.line("restart", f" --role {asked.role} --yes")
        return f"nothing was handed to {asked.role}: its worker is not connected", (
            f"Start it again ({again}), or wait until it is back."
        )
    if asked.action == "restart":
        return f"{asked.role} was not let go: the broker has nothing to brief its successor with", (
            "After a loss of memory a worker cannot be replaced; it can go on, or the run be started anew."
        )
    return None


def _send(snapshot: Snapshot, asked: Asked, row: Snapshot) -> Told | None:
    """A run that needs attention takes messages only for a role that stopped without a report (section 3.2)."""
    if snapshot["workflow"]["state"] != Workflow.NEEDS_ATTENTION or _waits(row):
        return None
    fault = f"nothing was handed to {asked.role}: the run waits for "
    others = [each["role"] for each in snapshot["roles"] if _waits(each)]
    if others:
        return f"{fault}an answer to {' or '.join(others)}", f"Say --role {others[0]}."
    pending = standing.pending_round(snapshot)
    if pending is not None:
        return _paused(f"{fault}a decision on another round of repair", snapshot, asked)
    return f"{fault}a person, and no role for an answer", f"{asked.line('status')} tells what is left to do."


def _continue(snapshot: Snapshot, asked: Asked) -> Told:
    fault = "nothing was admitted: "
    state = snapshot["workflow"]["state"]
    if standing.pending_round(snapshot) is None:
        return f"{fault}no round of repair waits for it", f"{asked.line('status')} tells where the run stands."
    if doubted := _doubted(snapshot, state):
        return f"{fault}what {' and '.join(doubted)} did is uncertain", _redelivery(asked, doubted)
    return _paused("nothing was admitted under this id, though a round of repair waits", snapshot, asked)


def _paused(fault: str, snapshot: Snapshot, asked: Asked) -> Told:
    """A round of repair waits: whoever is not at rest comes first, then the command that admits it."""
    command = f"`{steps.continuing(asked.session, asked.program, asked.new_id)}`"
    busy = standing.unsettled(snapshot)
    if busy:
        return f"{fault}, and {' and '.join(busy)} must come to rest before it", f"Then {command} admits it."
    return fault, f"{command} admits it."


def _redeliver(snapshot: Snapshot, asked: Asked, row: Snapshot) -> Told:
    fault = f"nothing was handed to {asked.role}"
    doubted = _doubted(snapshot, snapshot["workflow"]["state"])
    if not doubted:
        return f"{fault}: nothing about it is in doubt", f"{asked.line('status')} tells where the run stands."
    if doubted != [_SOMEBODY] and not standing.doubted(row):
        return f"{fault}: in doubt is {' and '.join(doubted)}", _redelivery(asked, doubted)
    return f"{fault}, though the run is in doubt", f"{asked.line('status')} tells where it stands."


def _doubted(snapshot: Snapshot, state: str) -> list[str]:
    """Who is in doubt; `_SOMEBODY` where the run is and no role is named."""
    found = [row["role"] for row in snapshot["roles"] if standing.doubted(row)]
    return found or ([_SOMEBODY] if state == Workflow.UNCERTAIN else [])


def _redelivery(asked: Asked, doubted: list[str]) -> str:
    if doubted == [_SOMEBODY]:
        return f"{asked.line('status')} tells more."
    return f"Look at that first; {asked.line('redeliver', f' --role {doubted[0]} --yes')} then hands it its work again."


def _waits(row: Snapshot) -> bool:
    """Whether a role stopped without a report, and takes a message."""
    return row["state"] == RoleState.WAITING and row["connected"] and row["assignment"] is not None
