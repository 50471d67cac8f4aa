# SPDX-License-Identifier: Apache-2.0
"""What happens to a bridge, and what it has done about it: the two sides of its rules (`core`)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from agent_intercom.orchestration.client_frames import Abort, Assignment, Context, Response
from agent_intercom.workers.bridge.memory import Memory, Message


class Connected(NamedTuple):
    """The broker's socket took the connection."""


class Lost(NamedTuple):
    """There is no connection: none could be made, or it has ended. `gone`: nothing is left of the run's address."""

    gone: bool = False


class Received(NamedTuple):
    """A frame of the broker's. `deliver_as` is that of a message."""

    frame: Response | Context | Assignment | Abort
    deliver_as: str | None = None


class Ended(NamedTuple):
    """The command has ended, and nothing of its process group is left.

    `code` is what it exited with, minus the signal that ended it; None: it could not be run.
    """

    code: int | None = None


class Looked(NamedTuple):
    """Answer to `Look`: the generation that the run expects; None where it cannot be read just now."""

    generation: int | None


class Reporting(NamedTuple):
    """A command reports. `ticket` is for the answer; without an assignment it means the open one."""

    ticket: int
    assignment_id: str | None
    report: object
    usage: object


class Progressing(NamedTuple):
    """A command says how it goes."""

    ticket: int
    assignment_id: str | None
    phase: object
    usage: object


class Left(NamedTuple):
    """Nobody waits for the answer to `ticket` any more."""

    ticket: int


class Terminated(NamedTuple):
    """This process was told to end."""


class Tick(NamedTuple):
    """Time has passed."""


Event: TypeAlias = Connected | Lost | Received | Ended | Looked | Reporting | Progressing | Left | Terminated | Tick


class Remember(NamedTuple):
    """Bring the memory to the disk. What follows may be done only when that has succeeded."""

    memory: Memory


class Connect(NamedTuple):
    """Connect to the broker."""


class Disconnect(NamedTuple):
    """Close the connection. No `Lost` follows."""


class Send(NamedTuple):
    """Send a request, whose members besides the envelope are `keys`."""

    id: str
    kind: str
    keys: dict[str, Any]


class Begin(NamedTuple):
    """Run the command for the open assignment; `text` is what it reads. It ends with `Ended`."""

    assignment_id: str
    kind: str
    round: int
    text: str

    def __repr__(self) -> str:
        return "Begin()"


class Silent(NamedTuple):
    """Tell persons how a command ended that has not reported; `code` as `Ended` has it."""

    kind: str
    round: int
    code: int | None


class Publish(NamedTuple):
    """Leave a report that counts where persons read it; done again, it is the same."""

    round: int
    kind: str
    report: dict[str, Any]

    def __repr__(self) -> str:
        return "Publish()"


class Hand(NamedTuple):
    """Put a message where the command that runs finds it."""

    message: Message


class Signal(NamedTuple):
    """Send a signal to the command's process group."""

    number: int


class Reply(NamedTuple):
    """Answer whoever holds `ticket`."""

    ticket: int
    answer: dict[str, Any]


class Notify(NamedTuple):
    """Tell the worker service what is done here: `ready`, `working` or `waiting`."""

    state: str


class Look(NamedTuple):
    """Find out which generation the run expects."""


class Exit(NamedTuple):
    """Be over, with this status. Nothing follows."""

    status: int


Effect: TypeAlias = (
    Remember | Connect | Disconnect | Send | Begin | Silent | Publish | Hand | Signal | Reply | Notify | Look | Exit
)
