# SPDX-License-Identifier: Apache-2.0
"""The registry of managed workers: who has which worker, in which state, until when (managed-workers spec, section 2).

Pure: no I/O, no clock, no randomness of its own. `now` is milliseconds since the epoch everywhere. What a method changes
is in memory at once and in `take()` for the store; a caller commits it before it acts on it. Every method raises
WorkerError, with the registry as it was.

Methods named like actions take the caller and a reference to a worker: its id, a part of its beginning that is unique, or
its label (`UNIT/ROLE` for a run's). Methods named like facts (`placed`, `ended`, ...) take an incarnation, and do nothing
for one that is not the latest of its worker or has ended: what arrives late is about the past.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_intercom.workers.contract import Lifetimes, Limits
from agent_intercom.workers.records import Ending, Event, Placed, Worker
from agent_intercom.workers.terms import (
    Caller,
    Candidates,
    Changes,
    Due,
    Listed,
    Loaded,
    Started,
    Stopping,
    Wanted,
    Work,
)

__all__ = [
    "Caller",
    "Candidates",
    "Changes",
    "Due",
    "Listed",
    "Loaded",
    "Registry",
    "Started",
    "Stopping",
    "Wanted",
    "Work",
]


class Registry:
    """All workers of one user. `identify` gives twelve fresh hexadecimal digits at each call."""

    def __init__(
        self, limits: Limits, lifetimes: Lifetimes, identify: Callable[[], str], loaded: Loaded = Loaded()
    ) -> None: ...

    # What is there. No caller: for who runs the workers, not for who asks.

    def get(self, worker: str) -> Worker | None:
        """The worker with this id."""

    def of(self, incarnation: str) -> Worker | None:
        """The worker whose latest incarnation this is."""

    def live(self) -> list[Worker]:
        """The workers that have not ended, parents before their children."""

    def fenced(self) -> list[Worker]:
        """The workers that are to be ended and have not, deepest first: to be stopped again after a restart of ours."""

    def ended_workers(self) -> list[Worker]:
        """The workers that have ended and are retained."""

    def remember_scope(self, worker: str, scope: str | None) -> None:
        """Say which scope id a worker has (None: none at all). Without it, it is not known, and nobody can restart or
        adopt the worker, and only a person without a scope id, or with an override, sees it."""

    def scope(self, worker: str) -> str | None:
        """The scope id of a worker. Raises WorkerError, `place_lost` where it is not known."""

    def take(self) -> Changes:
        """What has changed since the last time; to be stored in one transaction."""

    def revert(self, changes: Changes) -> None:
        """Undo what `take` has given just before, because it could not be stored: for a request that is refused then."""

    def keep(self, changes: Changes) -> None:
        """Give `changes` again with the next `take`, because they are facts that could not be stored."""

    # Actions

    def start(self, caller: Caller, wanted: Wanted, now: int) -> Started:
        """Reserve a worker in `provisioning`: new, or for a role of a run the next generation of that role's worker.

        Codes: invalid_request, name_taken, conflict, forbidden, grant_exceeded, limit_reached.
        """

    def list(self, caller: Caller, now: int, *, everyone: bool = False, history: bool = False) -> Listed:
        """The caller's own workers, with `everyone` all in its scope; inside a worker, its subtree."""

    def find(self, caller: Caller, reference: str) -> Worker:
        """The worker that a caller may see (`status`, `wait`). Codes: worker_not_found, worker_ambiguous."""

    def readable(self, caller: Caller, reference: str) -> Worker:
        """The worker whose `logs` a caller may read. Codes as of `find`, and not_owner."""

    def events(self, worker: str, lines: int) -> list[Event]:
        """The last events of a worker, oldest first."""

    def stop(self, caller: Caller, reference: str, now: int) -> Stopping:
        """Put the stop fence around a worker and its whole live subtree, in one change; may be repeated."""

    def stop_role(self, caller: Caller, run: str, role: str | None, now: int) -> list[Worker]:
        """Fence the worker of a run's role (None: of all its roles) and what is below; what is to be ended, in order."""

    def restart(self, caller: Caller, reference: str, now: int) -> Stopping:
        """First half of a restart: fence as `stop` does, where there is something to end. Then end it, then `again`."""

    def again(self, caller: Caller, worker: str, incarnation: str, now: int) -> Worker:
        """Second half: the next generation of a worker, `provisioning`, with everything that was its own.

        `incarnation` is the one that `restart` gave. Codes: conflict where somebody stopped, forgot or restarted it
        meanwhile; name_taken, limit_reached, grant_exceeded as of `start`.
        """

    def rename(self, caller: Caller, reference: str, name: str, now: int) -> Worker:
        """Give a worker another label; nothing else changes. Codes: name_taken, invalid_request."""

    def adopt(self, caller: Caller, reference: str, now: int) -> Worker:
        """Make the caller the owner; counts as activity. By the owner itself nothing but that."""

    def release(self, caller: Caller, reference: str, now: int) -> Worker:
        """Leave a worker without an owner, with a fresh idle window."""

    def renew(self, caller: Caller, reference: str | None, now: int) -> list[Worker]:
        """Count as activity of a worker, or of all that the caller owns (of a worker: of its direct children)."""

    def pause(self, caller: Caller, reference: str, now: int) -> Worker:
        """Check that a worker may be paused; it is when `paused` is told. Codes: worker_not_live, conflict."""

    def resume(self, caller: Caller, reference: str, now: int) -> Worker:
        """Check that a worker may be resumed; it is when `resumed` is told. Codes: worker_not_live, conflict."""

    def notify(self, caller: Caller, state: str, now: int) -> Worker:
        """A worker says from inside its unit that it is `ready`, `working` or `waiting`."""

    def heartbeat(self, caller: Caller, now: int) -> None:
        """Extend the leases of what the caller owns, never past the idle deadline: its owner is there."""

    def forget(self, caller: Caller, reference: str, acknowledge: bool, now: int) -> list[Worker]:
        """Claim a worker that has ended, and its subtree, for deletion, deepest first; delete files, then `forgotten`.

        Codes: worker_live, not_owner, acknowledge_required.
        """

    def prune(
        self, caller: Caller, reference: str | None, everyone: bool, acknowledge: bool, now: int
    ) -> list[Worker]:
        """Claim what the caller owns and has ended; `everyone` needs an override. Else as `forget`."""

    def cleanup(self, caller: Caller, now: int) -> Candidates:
        """What a cleanup would do now. Changes nothing."""

    # A timer

    def due(self, now: int) -> list[Due]:
        """What has to be done by now: checkpoints to ask for, and workers to stop, deepest first."""

    def next_due(self) -> int | None:
        """When `due` will have something, at the latest."""

    def checkpoint(self, due: Due, now: int) -> Worker | None:
        """Count an attempt to ask for a checkpoint; None where the worker was active or ended meanwhile."""

    def expire(self, due: Due, now: int) -> list[Worker]:
        """Fence what has expired; what is to be ended, in order; nothing where it was renewed meanwhile."""

    def claim(self, due: Due, now: int) -> Worker | None:
        """Claim for deletion what a cleanup found; None where that holds no longer."""

    # Facts

    def placed(self, incarnation: str, placed: Placed, now: int, enforced: tuple[str, ...] = ()) -> Worker:
        """A worker is in its scope unit, verified, and waits at its gate.

        Raises WorkerError, `conflict` where it is not to begin any more: abandon it then.
        """

    def released(self, incarnation: str, now: int) -> Worker | None:
        """The command has begun: `registering`, and the runtime counts."""

    def failed(self, incarnation: str, code: str, now: int) -> list[Worker]:
        """A start has failed and nothing of it is left; what below it is to be ended, in order."""

    def stop_failed(self, incarnation: str, code: str, now: int) -> None:
        """A stop could not be completed: the fence stays, so that it can be repeated."""

    def children_remain(self, incarnation: str, ending: Ending, now: int) -> None:
        """The leader has ended and left processes behind, which `due` gives to stop after a grace."""

    def ended(self, incarnation: str, ending: Ending, now: int, dirty: bool | None = None) -> list[Worker]:
        """Nothing of an incarnation is left; what below it is to be ended, in order."""

    def lost(self, incarnation: str, now: int) -> list[Worker]:
        """An incarnation is gone and nothing tells how; what below it is to be ended, in order."""

    def unreachable(self, incarnation: str, reason: str, now: int) -> None:
        """It cannot be proved that what is there is this incarnation, nor that it is gone. `reason` is a code."""

    def stalled(self, incarnation: str, reason: str, now: int) -> None:
        """A worker does not do what it should."""

    def reattached(self, incarnation: str, now: int) -> None:
        """An incarnation is proved to be there, after a restart of ours or after `unreachable` or `stalled`."""

    def paused(self, incarnation: str, now: int) -> None:
        """The unit is frozen: all times of the worker stand still."""

    def resumed(self, incarnation: str, now: int) -> None:
        """The unit is thawed: the times go on with what was left."""

    def noted(self, incarnation: str, now: int) -> None:
        """A worker was active: it spoke to us, or used the processor."""

    def forgotten(self, worker: str, now: int) -> None:
        """What was claimed is deleted: the row goes, its generation stays."""

    def unclaim(self, worker: str) -> None:
        """What was claimed could not be deleted, and stays."""


def reached(worker: Worker, until: str) -> bool:
    """Whether a worker is where `wait` waits for: `ready`, `idle`, `end`, `checkpoint` or the name of a state.

    Raises WorkerError, `invalid_request`.
    """
    raise NotImplementedError
