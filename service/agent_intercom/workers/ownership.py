# SPDX-License-Identifier: Apache-2.0
"""Who may see a worker, and who may change it (managed-workers spec, sections 1.9, 2.1, 2.9 and 2.12).

Whoever is outside every worker sees what has its own scope id, none at all being one too, and changes what it owns; a
person may override both. A worker sees and changes what is below it, and learns of nothing else, not even that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from agent_intercom.workers import leases, lifecycle
from agent_intercom.workers.contract import ID, NAME, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Owner, Worker
from agent_intercom.workers.table import Table
from agent_intercom.workers.terms import NOBODY, PERSON, PREFIX_LENGTH, Caller

_WHOSE = {"none": "nobody's since it was released", "run": "its run's", "worker": "that of who started it, a worker"}
_NOT_FOUND = "there is no such worker, or it is not one of yours"


def principal(caller: Caller) -> Owner:
    """Who owns what the caller starts; its epoch says nothing."""
    if caller.worker is not None:
        return Owner("worker", caller.worker)
    return PERSON if caller.session is None else Owner("session", caller.session)


def own_name(worker: Worker) -> str:
    """A worker's name without what makes it unique: a run's unit id, or the id of the worker that started it."""
    return worker.name.rpartition("/")[2]


class Ownership(Table):
    """The part of the registry that knows whose a worker is."""

    def find(self, caller: Caller, reference: str) -> Worker:
        """The worker that a caller may see (`status`, `wait`).

        `reference` is an id, the beginning of exactly one, or a name, of which a live worker's comes first.
        Codes: worker_not_found, worker_ambiguous (never for a caller inside a worker, who learns nothing of others).
        """
        me = self._me(caller)
        found = _matches([worker for worker in self._rows.values() if self._sees(caller, me, worker)], reference)
        if len(found) == 1:
            return found[0]
        if not found or me is not None:
            raise WorkerError(Code.NOT_FOUND, _NOT_FOUND, "worker")
        raise WorkerError(Code.AMBIGUOUS, "several workers are meant by that; say which by its id", "worker")

    def readable(self, caller: Caller, reference: str) -> Worker:
        """The worker whose `logs` a caller may read. Codes as of `find`, and not_owner."""
        return self._owned(caller, reference, person=True)

    def adopt(self, caller: Caller, reference: str, now: int) -> Worker:
        """Make the caller the owner; counts as activity. By the owner itself nothing but that.

        Codes as of `find`, and forbidden, worker_not_live, conflict (it is being ended), place_lost.
        """
        self._outside(caller)
        found = self.find(caller, reference)
        if not lifecycle.alive(found):
            raise WorkerError(Code.NOT_LIVE, "the worker has ended, and only one that lives can be adopted", "worker")
        worker = self._running(found)
        if worker.run is not None or worker.parent is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker of a run, or of another worker, stays where it is", "worker")
        if self.scope(worker.id) != caller.scope:
            raise WorkerError(Code.FORBIDDEN, "only who has the worker's scope id may adopt it", "worker")
        return self._hand_over(worker, principal(caller), "adopted", now)

    def release(self, caller: Caller, reference: str, now: int) -> Worker:
        """Leave a worker without an owner, with a fresh idle window, for somebody to adopt. Codes as of `adopt`."""
        self._outside(caller)
        worker = self._running(self._owned(caller, reference))
        if worker.parent is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker of another worker stays where it is", "worker")
        return self._hand_over(worker, NOBODY, "released", now)

    def renew(self, caller: Caller, reference: str | None, now: int) -> list[Worker]:
        """Count as activity of a worker, or of all that the caller owns (of a worker: of its direct children).

        Workers that are being ended, have ended or are paused are left out; one that is named is then refused.
        Codes as of `find`, and not_owner, worker_not_live, conflict.
        """
        me = self._me(caller)
        if reference is None:
            wanted = [worker for worker in self._rows.values() if self._mine(caller, me, worker) and _renewable(worker)]
        else:
            worker = self._running(self._owned(caller, reference))
            if me is not None and not self._mine(caller, me, worker):
                raise WorkerError(Code.NOT_OWNER, "only a child of your own can be renewed", "worker")
            if worker.paused_at is not None:
                raise WorkerError(Code.CONFLICT, "the worker is paused: its times stand still", "worker")
            wanted = [worker]
        lease_ms = self._lifetimes.lease_ms
        return [self._put(leases.touch(worker, now, lease_ms), "renewed") for worker in wanted]

    def standing(self, caller: Caller) -> list[Worker]:
        """The caller's own that live and that `renew` leaves out: they are paused, or being ended."""
        me = self._me(caller)
        own = [row for row in self._rows.values() if lifecycle.alive(row) and self._mine(caller, me, row)]
        return [row for row in own if not _renewable(row)]

    def heartbeat(self, caller: Caller, now: int) -> list[Worker]:
        """Extend the leases of what the caller owns, never past the idle deadline: its owner is there.

        Returns those that were extended; one that was not long ago is left as it is. It is no activity.
        """
        me = self._me(caller)
        owned = [row for row in self._rows.values() if self._mine(caller, me, row) and _renewable(row)]
        found = [leases.extend(worker, now, self._lifetimes.lease_ms) for worker in owned]
        return [self._put(later) for worker, later in zip(owned, found, strict=True) if later is not worker]

    def rename(self, caller: Caller, reference: str, name: str, now: int) -> Worker:
        """Give a live worker another name; nothing else changes.

        Codes as of `find`, and not_owner, worker_not_live, conflict, name_taken, invalid_request.
        """
        worker = self._running(self._owned(caller, reference))
        full = self._full(name, self._parent(worker))
        self._free(full, worker.id, self._scopes.get(worker.id) if worker.id in self._scopes else caller.scope)
        return worker if full == worker.name else self._put(replace(worker, name=full, updated_at=now), "renamed")

    # Who is who

    def _me(self, caller: Caller) -> Worker | None:
        """The worker that the caller is in. Raises WorkerError, `forbidden`, where it is none of those that live.

        So does an override by anybody but a person: agents have sessions, and a person's workers are not theirs.
        """
        if caller.worker is None:
            if caller.override and caller.session is not None:
                raise WorkerError(Code.FORBIDDEN, "only a person can override, and a session asks", "override")
            return None
        me = self.of(caller.worker)
        if me is None or not lifecycle.alive(me):
            raise WorkerError(Code.FORBIDDEN, "the caller is in a worker that has ended")
        if caller.override:
            raise WorkerError(Code.FORBIDDEN, "a worker cannot override", "override")
        return me

    def _outside(self, caller: Caller) -> None:
        if self._me(caller) is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker cannot do this")

    def _sees(self, caller: Caller, me: Worker | None, worker: Worker) -> bool:
        if me is not None:
            return self._below(worker, me)
        if caller.override:
            return True
        if worker.id in self._scopes:
            return self._scopes[worker.id] == caller.scope
        # Which scope id it has is not known any more: nobody must learn of a worker that may have another.
        return caller.scope is None and not worker.scoped

    def _mine(self, caller: Caller, me: Worker | None, worker: Worker) -> bool:
        """Whether a worker is the caller's own; of a worker, its direct child."""
        if me is not None:
            parent = self._parent(worker)
            return parent is not None and parent.id == me.id
        owner = principal(caller)
        return self._sees(caller, me, worker) and (worker.owner.kind, worker.owner.name) == (owner.kind, owner.name)

    def _owned(self, caller: Caller, reference: str, *, person: bool = False) -> Worker:
        """The worker that a caller may change; with `person` it is something that a person may do to a run's worker.

        Raises WorkerError: not_owner, forbidden, or as `find`.
        """
        worker = self.find(caller, reference)
        if caller.worker is not None:
            return worker
        if worker.run is not None and lifecycle.alive(worker) and not (person and caller.session is None):
            raise WorkerError(Code.FORBIDDEN, "a worker of a run is changed by its run alone", "worker")
        if caller.override or (person and worker.run is not None and caller.session is None):
            return worker
        if not self._mine(caller, None, worker):
            raise WorkerError(Code.NOT_OWNER, self._whose(caller, worker), "worker")
        return worker

    def _whose(self, caller: Caller, worker: Worker) -> str:
        """Why a caller may not change a worker that it sees; `; adopt it` ends this where that can be done."""
        told = "the worker is " + _WHOSE.get(worker.owner.kind, "somebody else's")
        if not lifecycle.alive(worker):
            return f"{told}, and has ended"
        if lifecycle.fenced(worker):
            return f"{told}, and is being ended"
        known = worker.id in self._scopes and self._scopes[worker.id] == caller.scope
        return f"{told}; adopt it" if known and worker.run is None and worker.parent is None else told

    def _running(self, worker: Worker) -> Worker:
        """The worker itself. Raises WorkerError where it has ended or is being ended."""
        if not lifecycle.alive(worker):
            raise WorkerError(Code.NOT_LIVE, "the worker has ended", "worker")
        if lifecycle.fenced(worker):
            raise WorkerError(Code.CONFLICT, "the worker is being ended", "worker")
        return worker

    def _hand_over(self, worker: Worker, owner: Owner, kind: str, now: int) -> Worker:
        if (worker.owner.kind, worker.owner.name) != (owner.kind, owner.name):
            worker = replace(worker, owner=Owner(owner.kind, owner.name, worker.owner.epoch + 1))
        return self._put(leases.touch(worker, now, self._lifetimes.lease_ms), kind)

    # Names

    def _full(self, name: str, parent: Worker | None) -> str:
        """What a worker is called in full; below another worker, names need to be unique there only.

        Otherwise a worker could find out by names that are taken what there is outside its own subtree.
        """
        if NAME.fullmatch(name) is None:
            raise WorkerError(Code.INVALID, "2 to 80 letters, digits, '.', '_', '-'; a letter or digit first", "name")
        return name if parent is None else f"{parent.id}/{name}"

    def _free(self, name: str, worker: str, scope: str | None) -> None:
        """Make sure that no other live worker of the scope id has this name. Raises WorkerError, `name_taken`."""
        for other in self._rows.values():
            same_scope = other.id in self._scopes and self._scopes[other.id] == scope
            if other.id != worker and self._stands(other) and same_scope and _same(other.name, name):
                raise WorkerError(Code.NAME_TAKEN, "a live worker has this name already", "name")


def _renewable(worker: Worker) -> bool:
    return lifecycle.alive(worker) and not lifecycle.fenced(worker) and worker.paused_at is None


def _same(name: str, other: str) -> bool:
    return name.casefold() == other.casefold()


def _matches(workers: Sequence[Worker], reference: str) -> list[Worker]:
    """The workers that a reference may mean: by id, else by name, else by the beginning of an id."""
    if ID.fullmatch(reference) is not None and (exact := [row for row in workers if row.id == reference]):
        return exact
    for named in (
        [row for row in workers if _same(row.name, reference)],
        [row for row in workers if row.parent is not None and _same(own_name(row), reference)],
    ):
        if named:
            return list(filter(lifecycle.alive, named)) or named
    return _beginning(workers, reference)


def _beginning(workers: Iterable[Worker], reference: str) -> list[Worker]:
    return [row for row in workers if len(reference) >= PREFIX_LENGTH and row.id.startswith(reference)]
