# SPDX-License-Identifier: Apache-2.0
"""What the registry of managed workers is asked, and what it answers with (managed-workers spec, section 2)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from agent_intercom.workers.contract import State
from agent_intercom.workers.records import Event, Generation, Grant, Incarnation, Key, Owner, Worker

KEY_LENGTH: Final = 64
KEY_MS: Final = 24 * 3_600_000
"""A start that is repeated under one key within this time is one start (section 2.17)."""

PREFIX_LENGTH: Final = 4
"""Digits of an id that may stand for it, where no other begins with them."""


class Caller(NamedTuple):
    """Who asks.

    `worker` is the incarnation whose scope unit the caller is in, found out by who asks the kernel, and never by what
    the caller says; its scope id is then the one of that worker. `session` is a manager's session id; None: a person.
    `override` is a person's will to act on what is not theirs; with a session it is refused.
    """

    scope: str | None = None
    session: str | None = None
    worker: str | None = None
    override: bool = False

    def __repr__(self) -> str:
        return "Caller()"


class Wanted(NamedTuple):
    """What `start` shall make.

    `name` None: one is made from harness, role and id. `run` and `generation` go together: the unit id of a run, whose
    role it is to be, and the generation that the run's broker gave that role. `directory_digest` is of the directory,
    `within` of it and of each directory above it, which is how it is known without a path whether it is inside another
    one. Durations are None where the registry's own hold; 0 is "never". `key` makes a repeat the same start, if it is
    the same in everything: `order_digest` is of what the registry does not know, such as the command.
    """

    harness: str
    name: str | None = None
    role: str = ""
    run: str | None = None
    generation: int | None = None
    directory_digest: str = ""
    within: tuple[str, ...] = ()
    task_digest: str = ""
    task_length: int = 0
    idle_ms: int | None = None
    warning_ms: int | None = None
    grace_ms: int | None = None
    runtime_ms: int | None = None
    grant: Grant | None = None
    key: str | None = None
    order_digest: str = ""


class Started(NamedTuple):
    """What `start` answers. `repeated`: nothing was made, this is what the same key made before."""

    worker: Worker
    repeated: bool = False


class Stopping(NamedTuple):
    """What `stop` and `restart` answer: the worker, and what has a stop fence now and is to be ended, in this order.

    Nothing is to be ended where everything has ended already.
    """

    worker: Worker
    fenced: tuple[Worker, ...]


class Work(StrEnum):
    """What a timer has to do."""

    CHECKPOINT = "checkpoint"
    STOP = "stop"
    PRUNE = "prune"


class Due(NamedTuple):
    """Something for a timer, or a candidate of a cleanup.

    `deadline` is the time that makes it due; who acts on it (`expire`, `checkpoint`, `claim`) hands it back, and
    nothing happens where it is another one by then. `reason` is a `contract.StopReason` for `Work.STOP`.
    """

    work: Work
    worker: str
    incarnation: str
    deadline: int
    reason: str = ""


class Listed(NamedTuple):
    """What `list` answers: the workers, oldest first, and how many ended ones are left out for their age.

    `more` is how many of those that were asked for are left out because there are so many: the first that were made.
    """

    workers: tuple[Worker, ...]
    hidden: int
    more: int = 0


class Kept(NamedTuple):
    """A worker that `prune` leaves, and the code of why: something below it lives, or it is being forgotten."""

    worker: Worker
    code: str


class Pruning(NamedTuple):
    """What `prune` forgets, deepest first, and what of the caller's own has ended and is kept all the same."""

    workers: tuple[Worker, ...]
    kept: tuple[Kept, ...] = ()


class Candidates(NamedTuple):
    """What a cleanup would do, in order, and how many more there are than one pass may do.

    `others` are the workers of it that the caller does not see: it is told how many there are and nothing of them.
    """

    due: tuple[Due, ...]
    deferred: int
    others: frozenset[str] = frozenset()


class Changes(NamedTuple):
    """What the store has to do, in one transaction.

    `undo` takes it back, last first, for `Registry.revert`; `kept` is the part of it that was kept from earlier, and
    is not taken back.
    """

    workers: tuple[Worker, ...] = ()
    removed: tuple[str, ...] = ()
    generations: tuple[Generation, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    buried: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    expired_keys: tuple[Key, ...] = ()
    events: tuple[Event, ...] = ()
    undo: tuple[Callable[[], object], ...] = ()
    kept: Changes | None = None

    def __bool__(self) -> bool:
        return any(self[:-2])


class Loaded(NamedTuple):
    """Everything that is stored."""

    workers: tuple[Worker, ...] = ()
    generations: tuple[Generation, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    keys: tuple[Key, ...] = ()
    events: tuple[Event, ...] = ()


NOTIFIABLE: Final = frozenset({State.READY, State.WORKING, State.WAITING})
"""What a worker may say of itself."""

PERSON: Final = Owner(kind="person")
NOBODY: Final = Owner(kind="none")
