# SPDX-License-Identifier: Apache-2.0
"""Everything that the rules remember. Plain records, so that they can be written to the memory file and read back."""

from __future__ import annotations

from typing import Any

import msgspec

from agent_intercom.orchestration import rows
from agent_intercom.orchestration.budget import Policy
from agent_intercom.orchestration.contract import Workflow

NEVER = 2**62
"""A monotonic time that does not come."""


class Link(msgspec.Struct):
    """A connection. `kind` is empty until its first frame; `since` is when it came (monotonic ms).

    `shown` are the ids of the reports that an observer was sent. `held` is its first frame, as long as that waits for a
    check of the workspace capsule.
    """

    number: int
    since: int
    kind: str = ""
    role: str = ""
    generation: int = 0
    shown: list[str] = msgspec.field(default_factory=list)
    held: bytes = b""


class Remembered(msgspec.Struct):
    """An accepted report with its body. `body` and `usage` are as observers are shown them; memory only."""

    id: str
    assignment_id: str
    role: str
    round: int
    body: dict[str, Any]
    usage: dict[str, Any] | None


class Owed(msgspec.Struct):
    """Work that a role could not be given because it was away. Durable (meta `owed`)."""

    round: int
    kind: str


class Return(msgspec.Struct):
    """What a worker that came back has said: that it `knows` its assignment, that it is `idle`.

    Both together mean that its agent stopped without a report while nobody listened.
    """

    knows: bool = False
    idle: bool = False


class Startup(msgspec.Struct):
    """What a run begins with (section 9.5). Bodies: memory and the startup file only."""

    task: str
    role_tasks: dict[str, str]
    context_capsule: str = ""
    workspace_capsule: str = ""


class Settings(msgspec.Struct):
    """What does not change during a run. `report_usage` is the observer setting of section 0.2.

    `worker_context` has the modes of roles for which one was chosen (section 18).
    """

    session: str
    project: str
    flow: str
    forced: list[str]
    policy: Policy
    control_token: str
    report_usage: bool
    worker_context: dict[str, str] = msgspec.field(default_factory=dict)


class State(msgspec.Struct):
    """A run. What is in `rows` is in the database too, and so are `owed`, `sequence` and what is said of repair rounds.

    `max_repair_rounds` is how many rounds after the first may be implemented (None: any number), `pending_repair_round`
    the one that was not begun for that reason. The rest is memory only.

    `roles` are in the order of creation. `latest` is the newest accepted report per role, by acceptance; `delivered`
    the run state that a role has, `deferred` the round of the one that it is to get with its next assignment. `unread`
    has the delivery ids of baselines that are not known to have arrived; the roles in it are durable (meta `unread`),
    and where an id is lost it is empty.
    `workspace` is the workspace capsule that the baselines have, `workspace_fault` what the last check of it found.
    `digests` tell a retried command from another with the same id.
    """

    settings: Settings
    seed: str
    roles: dict[str, rows.Role]
    startup: Startup | None = None
    workflow: str = Workflow.STARTING
    round: int = 1
    max_repair_rounds: int | None = None
    pending_repair_round: int | None = None
    sequence: int = 0
    fresh_ids: int = 0
    assignments: dict[str, rows.Assignment] = msgspec.field(default_factory=dict)
    reports: dict[str, rows.Report] = msgspec.field(default_factory=dict)
    activations: list[rows.Activation] = msgspec.field(default_factory=list)
    guardrails: list[rows.Guardrail] = msgspec.field(default_factory=list)
    commands: dict[str, rows.Command] = msgspec.field(default_factory=dict)
    digests: dict[str, bytes] = msgspec.field(default_factory=dict)
    owed: dict[str, Owed] = msgspec.field(default_factory=dict)
    unread: dict[str, str] = msgspec.field(default_factory=dict)
    workspace: str = ""
    workspace_fault: str = ""
    baselines: dict[str, str] = msgspec.field(default_factory=dict)
    latest: dict[str, Remembered] = msgspec.field(default_factory=dict)
    remembered: list[Remembered] = msgspec.field(default_factory=list)
    delivered: dict[str, str] = msgspec.field(default_factory=dict)
    deferred: dict[str, int] = msgspec.field(default_factory=dict)
    links: dict[int, Link] = msgspec.field(default_factory=dict)
    workers: dict[str, int] = msgspec.field(default_factory=dict)
    returns: dict[str, Return] = msgspec.field(default_factory=dict)
    waiting_since: int = NEVER
