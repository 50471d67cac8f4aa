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
from agent_intercom.workers.terms import Caller, Candidates, Due, Work


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
        worker = self._owned(caller, reference)
        claimed = [*self._descendants(worker), worker]
        if any(map(lifecycle.alive, claimed)):
            raise WorkerError(Code.LIVE, "the worker, or one below it, has not ended; stop it first", "worker")
        if not acknowledge and (caller.worker is None or acknowledge is not None):
            raise WorkerError(Code.ACKNOWLEDGE, _hesitation(claimed), "acknowledge")
        return self._claim(claimed)

    def prune(self, caller: Caller, reference: str | None, everyone: bool, acknowledge: bool, now: int) -> list[Worker]:
        """Claim everything that has ended and is the caller's own, deepest first; `reference` narrows it to one.

        `everyone` takes what is other people's as well, and needs an override. Workers that have something live below
        them stay. Codes: forbidden, acknowledge_required, and as of `forget`.
        """
        self._outside(caller)
        if everyone and not caller.override:
            raise WorkerError(Code.FORBIDDEN, "what others own is forgotten only with an override", "all")
        if not acknowledge:
            raise WorkerError(Code.ACKNOWLEDGE, "records and files are deleted; acknowledge that", "acknowledge")
        if reference is not None:
            return self.forget(caller, reference, acknowledge, now)
        own = [row for row in self.ended_workers() if everyone or self._mine(caller, None, row)]
        return self._claim(self._whole(own))

    def cleanup(self, caller: Caller, now: int) -> Candidates:
        """What a cleanup would do now with what the caller may see: stops first, then deletions. Changes nothing.

        Deletions of workers whose scope id is not known any more are everybody's: nobody else would ever do them.
        """
        self._outside(caller)
        seen = {row.id for row in self._rows.values() if self._sees(caller, None, row)}
        stops = [due for due in self._expired(now) if due.worker in seen]
        expired = []
        for row in self.ended_workers():
            until = kept_until(row, self._lifetimes)
            whose = row.id in seen or row.id not in self._scopes
            if whose and row.id not in self._claims and until is not None and until <= now:
                expired.append(row)
        prunes = [
            Due(Work.PRUNE, row.id, row.incarnation, kept_until(row, self._lifetimes) or 0)
            for row in self._whole(expired)
        ]
        found = [*stops, *prunes]
        first = found[: self._limits.candidates]
        return Candidates(tuple(first), len(found) - len(first))

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
        return sorted(chosen.values(), key=lambda row: (-row.depth, row.created_at, row.id))

    def _claim(self, workers: list[Worker]) -> list[Worker]:
        if any(worker.id in self._claims for worker in workers):
            raise WorkerError(Code.CONFLICT, "the worker is being forgotten", "worker")
        self._claims.update(worker.id for worker in workers)
        return workers


def _hesitation(workers: Iterable[Worker]) -> str:
    """Why one should think before forgetting these workers, and what to do then."""
    reasons = []
    if any(worker.dirty is not False for worker in workers):
        reasons.append("its directory had changes that are not committed, or nobody knows")
    if any(worker.stop_reason.startswith("idle-") for worker in workers):
        reasons.append("it was ended for being idle")
    if any(not worker.stop_reason for worker in workers):
        reasons.append("nobody asked it to end")
    why = "; ".join(reasons)
    return "its record and private files are deleted" + (f" ({why})" if why else "") + "; acknowledge that"
