# SPDX-License-Identifier: Apache-2.0
"""How long what has ended is kept, and how it is forgotten (managed-workers spec, section 2.11).

Deletion has three steps: a worker is claimed here, its files are deleted elsewhere, then its row goes (`forgotten`). A
crash in between leaves the row, and the next cleanup begins again. No worker goes before all that is below it.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_intercom.workers import lifecycle
from agent_intercom.workers.contract import Code, Lifetimes
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.facts import Facts
from agent_intercom.workers.ownership import Ownership
from agent_intercom.workers.records import Worker
from agent_intercom.workers.table import deepest_first
from agent_intercom.workers.terms import Caller, Candidates, Due, Kept, Pruning, Work


def ended_at(worker: Worker) -> int:
    """When a worker that has ended did so."""
    return worker.updated_at if worker.ended is None else worker.ended.at


def kept_until(worker: Worker, lifetimes: Lifetimes) -> int | None:
    """Until when an ended worker is kept; None: for ever. Nobody knowing of changes is no proof that there are none."""
    kept = lifetimes.retention_ms if worker.dirty is False else lifetimes.dirty_retention_ms
    return ended_at(worker) + kept if kept else None


class Retention(Ownership, Facts):
    """The part of the registry that forgets."""

    def forget(self, caller: Caller, reference: str, acknowledge: bool | None, now: int) -> list[Worker]:
        """Claim a worker that has ended, and its subtree, for deletion, deepest first; delete files, then `forgotten`.

        Codes as of `find`, and worker_live, not_owner, acknowledge_required: where it is False, and of a caller outside
        every worker where nothing is said (None).
        """
        family = self.forgettable(caller, reference)
        if not acknowledge and (caller.worker is None or acknowledge is not None):
            raise WorkerError(Code.ACKNOWLEDGE, f"{hesitation(family)}; acknowledge that", "acknowledge")
        return self._claim(family)

    def forgettable(self, caller: Caller, reference: str) -> list[Worker]:
        """What `forget` would claim: a worker that has ended, and its subtree, deepest first. Changes nothing.

        Codes as of `find`, and worker_live, not_owner, conflict (it is being forgotten).
        """
        family = self._family(self._owned(caller, reference))
        match self._held(family):
            case Code.LIVE:
                raise WorkerError(Code.LIVE, "the worker, or one below it, has not ended; stop it first", "worker")
            case Code.CONFLICT:
                raise WorkerError(Code.CONFLICT, "the worker is being forgotten", "worker")
        return family

    def prune(self, caller: Caller, reference: str | None, everyone: bool, acknowledge: bool, now: int) -> Pruning:
        """Claim what `prunable` finds. Codes as of that, and acknowledge_required."""
        found = self.prunable(caller, reference, everyone)
        if not acknowledge:
            raise WorkerError(Code.ACKNOWLEDGE, "records and files are deleted; acknowledge that", "acknowledge")
        return found._replace(workers=tuple(self._claim(found.workers)))

    def prunable(self, caller: Caller, reference: str | None, everyone: bool) -> Pruning:
        """Everything that has ended and is the caller's own, with all below it; `reference` narrows it to one.

        `everyone` takes what is other people's as well, and needs an override. Workers that have something live below
        them are kept, with all below them. Changes nothing. Codes: forbidden, and as of `forgettable`.
        """
        self._outside(caller)
        if everyone and not caller.override:
            raise WorkerError(Code.FORBIDDEN, "what others own is forgotten only with an override", "all")
        if reference is not None:
            return Pruning(tuple(self.forgettable(caller, reference)))
        chosen: dict[str, Worker] = {}
        kept = []
        for row in self.ended_workers():
            if not everyone and not self._mine(caller, None, row):
                continue
            family = self._family(row)
            if why := self._held(family):
                kept.append(Kept(row, why))
            else:
                chosen.update((each.id, each) for each in family)
        return Pruning(tuple(deepest_first(chosen.values())), tuple(kept))

    def _family(self, worker: Worker) -> list[Worker]:
        """A worker and all below it, deepest first."""
        return [*self._descendants(worker), worker]

    def _held(self, family: Iterable[Worker]) -> str:
        """The code of why a worker with all below it cannot be forgotten now, or empty."""
        if any(map(lifecycle.alive, family)):
            return Code.LIVE
        return Code.CONFLICT if any(row.id in self._claims for row in family) else ""

    def cleanup(self, caller: Caller, now: int) -> Candidates:
        """What a cleanup would do now with what the caller may see: stops first, then deletions. Changes nothing.

        What was kept long enough is deleted for a person whatever its scope id is, and where that is not known any
        more: time is what decides that, and who has that scope id may never ask.
        """
        self._outside(caller)
        seen = {row.id for row in self._rows.values() if self._sees(caller, None, row)}
        stops = [due for due in self._expired(now) if due.worker in seen]
        expired = []
        for row in self.ended_workers():
            until = kept_until(row, self._lifetimes)
            if (
                (row.id in seen or caller.session is None)
                and row.id not in self._claims
                and until is not None
                and until <= now
            ):
                expired.append(row)
        prunes = [
            Due(Work.PRUNE, row.id, row.incarnation, kept_until(row, self._lifetimes) or 0)
            for row in self._whole(expired)
        ]
        found = [*stops, *prunes]
        first = found[: self._limits.candidates]
        others = frozenset(due.worker for due in first if due.worker not in seen)
        return Candidates(tuple(first), len(found) - len(first), others)

    def claim(self, due: Due, now: int) -> Worker | None:
        """Claim for deletion what a cleanup found; None where that holds no longer."""
        worker = self.of(due.incarnation)
        if worker is None or lifecycle.alive(worker) or worker.id in self._claims or due.deadline > now:
            return None
        below = self._descendants(worker)
        if kept_until(worker, self._lifetimes) != due.deadline or not self._claims.issuperset(row.id for row in below):
            return None
        self._claims.add(worker.id)
        return worker

    def forgotten(self, worker: str, now: int) -> None:
        """What was claimed is deleted: the row goes, its generation stays.

        Raises WorkerError, `conflict`, where it was not claimed, or something below it is still kept.
        """
        row = self._rows.get(worker)
        if row is None:
            self._claims.discard(worker)
            return
        if worker not in self._claims or self._descendants(row):
            raise WorkerError(Code.CONFLICT, "the worker is not to be forgotten, or not yet", "worker")
        self._claims.discard(worker)
        self._remove(worker)

    def unclaim(self, worker: str) -> None:
        """What was claimed could not be deleted, and stays."""
        self._claims.discard(worker)

    def _whole(self, workers: Iterable[Worker]) -> list[Worker]:
        """Those of the workers below which there is none but those, deepest first."""
        chosen = {worker.id: worker for worker in workers}
        for row in self._rows.values():
            if row.id not in chosen:
                for above in self._ancestors(row):
                    chosen.pop(above.id, None)
        return deepest_first(chosen.values())

    def _claim(self, workers: Iterable[Worker]) -> list[Worker]:
        claimed = list(workers)
        self._claims.update(worker.id for worker in claimed)
        return claimed


def hesitation(workers: Iterable[Worker]) -> str:
    """What forgetting these workers does, and why one should think before."""
    reasons = []
    if any(worker.dirty is not False for worker in workers):
        reasons.append("its directory had changes that are not committed, or nobody knows")
    if any(worker.stop_reason.startswith("idle-") for worker in workers):
        reasons.append("it was ended for being idle")
    if any(not worker.stop_reason for worker in workers):
        reasons.append("nobody asked it to end")
    why = "; ".join(reasons)
    return "its record and private files are deleted" + (f" ({why})" if why else "")
