# SPDX-License-Identifier: Apache-2.0
"""The rows of the registry (managed-workers spec, section 2.18): metadata only.

No task, command, directory, scope id or value of a variable is in any of them. Times are milliseconds since the epoch;
None is "not known" or "not yet".
"""

from __future__ import annotations

import msgspec

from agent_intercom.workers.contract import State


class Owner(msgspec.Struct, frozen=True):
    """Whose a worker is.

    `kind` is `person`, `session` (`name` is the manager's session id), `worker` (`name` is the parent's incarnation),
    `run` (`name` is the run's unit id) or `none` (released). `epoch` rises by one whenever the owner changes.
    """

    kind: str
    name: str = ""
    epoch: int = 1


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may start itself (section 2.12). A child's grant is never wider than its parent's.

    `children` and `descendants` count live ones, `depth` how far below the holder they may be; `expires_at` ends it.
    `subdelegate` is whether a child may get a grant. Children work in the holder's directory or below it.
    """

    children: int
    descendants: int
    depth: int = 1
    expires_at: int | None = None
    subdelegate: bool = False


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where systemd put an incarnation: what proves later that a process is still that one."""

    control_group: str
    invocation_id: str
    pid: int
    start_ticks: int
    boot_id: str


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an incarnation ended. `outcome` is one of `contract.Outcome`."""

    at: int
    outcome: str
    exit_code: int | None = None
    exit_signal: int | None = None


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it is now.

    `name` is what people call it. `role` and `harness` say what it is for and what drives it. `run` is the run's unit
    id, `role` then one of its roles. `readiness` is `verified` (it spoke to us from inside its unit), `unverified` or
    empty. `scoped` is whether it has a scope id, so that who has none does not see it where that id is not known any
    more. It is in its state, for that reason, since `entered_at`.
    `enforced` has the words of `confinement.plan`. `interrupted` is what `blocked`, `paused` and `unreachable`
    return to. `parent` is the incarnation that started it, `root` the topmost one above it, or its own.
    `idle_ms`, `warning_ms`, `grace_ms` and `runtime_ms` are its lifetimes, 0 being "never". Since `paused_at` its times
    stand still. `ended` is known before the worker has ended where its leader left processes behind, which may stay
    until `children_deadline_at`.
    """

    id: str
    name: str
    harness: str
    role: str = ""
    run: str | None = None
    scoped: bool = False
    state: str = State.PROVISIONING
    state_reason: str = ""
    interrupted: str = ""
    readiness: str = ""
    generation: int
    incarnation: str
    owner: Owner
    parent: str | None = None
    root: str = ""
    depth: int = 0
    grant: Grant | None = None
    unit: str
    placed: Placed | None = None
    directory_digest: str = ""
    task_digest: str = ""
    task_length: int = 0
    enforced: tuple[str, ...] = ()
    created_at: int
    updated_at: int
    entered_at: int
    active_at: int
    idle_ms: int = 0
    warning_ms: int = 0
    grace_ms: int = 0
    runtime_ms: int = 0
    lease_expires_at: int | None = None
    idle_deadline_at: int | None = None
    checkpoint_requested_at: int | None = None
    checkpoint_attempted_at: int | None = None
    checkpoint_attempts: int = 0
    checkpoint_deadline_at: int | None = None
    runtime_left_ms: int | None = None
    runtime_deadline_at: int | None = None
    paused_at: int | None = None
    children_deadline_at: int | None = None
    stop_requested_at: int | None = None
    stop_reason: str = ""
    ended: Ending | None = None
    dirty: bool | None = None
    error_code: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a worker: a kind and a code, never what was said."""

    at: int
    worker: str
    incarnation: str
    kind: str
    code: str = ""


class Generation(msgspec.Struct, frozen=True):
    """The highest generation that a worker id has had. It outlives the worker's row."""

    worker: str
    generation: int


class Incarnation(msgspec.Struct, frozen=True):
    """Which worker an incarnation was of. It is kept as long as a row names it as a parent, whatever became of it."""

    incarnation: str
    worker: str


class Key(msgspec.Struct, frozen=True):
    """What was started under an idempotency key (section 2.17), by whom, and a digest of what was asked for."""

    key: str
    principal: str
    worker: str
    digest: str
    expires_at: int
