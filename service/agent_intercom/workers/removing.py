# SPDX-License-Identifier: Apache-2.0
"""The actions of the worker service that forget: forget, prune and cleanup, and what its timer does (section 2.11).

A worker is claimed, its files are deleted, then its row goes. A crash in between leaves the row, and the next cleanup
begins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agent_intercom.workers import contract, places, retention, strays
from agent_intercom.workers.answers import Known, told
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.strays import Stray
from agent_intercom.workers.terms import Caller, Due, Pruning, Work

if TYPE_CHECKING:
    from agent_intercom.workers.records import Worker
    from agent_intercom.workers.service import Service


class Forget(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    acknowledge: bool | None = None
    preview: bool = False


class Prune(msgspec.Struct, forbid_unknown_fields=True):
    worker: str | None = None
    all: bool = False
    acknowledge: bool = False
    preview: bool = False


class Cleanup(msgspec.Struct, forbid_unknown_fields=True):
    execute: bool = False


class Removing:
    """What is to go. `known` is as that of `Actions`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = service.registry
        self._cleaning = asyncio.Lock()
        self.known: Known = {
            # A preview changes nothing.
            "forget": (Forget, self._forget, False),
            "prune": (Prune, self._prune, False),
            "cleanup": (Cleanup, self._cleanup, False),
        }

    async def _forget(self, caller: Caller, asked: Forget) -> dict[str, Any]:
        if asked.preview:
            family = self._registry.forgettable(caller, asked.worker)
            why = retention.hesitation(family)
            return {"forgotten": [], "candidates": [told(worker) for worker in family], "why": why}
        self._service.ready()
        claimed = self._registry.forget(caller, asked.worker, asked.acknowledge, now_ms())
        gone, errors = await self._delete(claimed)
        if errors:
            raise WorkerError(Code.STOP_FAILED, "files of the worker cannot be removed; it is kept", "worker")
        return {"forgotten": gone, "candidates": []}

    async def _prune(self, caller: Caller, asked: Prune) -> dict[str, Any]:
        if asked.preview:
            found = self._registry.prunable(caller, asked.worker, asked.all)
            now, more = _first(found)
            candidates = [told(worker) for worker in now]
            return {"pruned": [], "errors": [], "candidates": candidates, "more": len(more), "kept": _kept(found)}
        self._service.ready()
        claimed = self._registry.prune(caller, asked.worker, asked.all, asked.acknowledge, now_ms())
        now, later = _first(claimed)
        for worker in later:
            self._registry.unclaim(worker.id)
        gone, errors = await self._delete(now)
        return {"pruned": gone, "errors": errors, "candidates": [], "more": len(later), "kept": _kept(claimed)}

    async def _cleanup(self, caller: Caller, asked: Cleanup) -> dict[str, Any]:
        found = self._registry.cleanup(caller, now_ms())
        candidates = [self._candidate(due) for due in found.due if due.worker not in found.others]
        answer: dict[str, Any] = {"candidates": candidates, "handled": 0, "errors": 0, "deferred": found.deferred}
        answer["others"] = len(found.others)
        unknown = await self._strays()
        answer["strays"] = None if unknown is None else [stray.as_json() for stray in unknown]
        left = await left_behind(self._service, unknown)
        answer["left"] = len(left)
        if not asked.execute:
            return answer
        if self._cleaning.locked():
            raise WorkerError(Code.CONFLICT, "a cleanup is under way", "execute")
        self._service.ready()
        # Whose they are nobody knows, so a person has to say it.
        to_end = list(unknown or ()) if caller.override else []
        return await asyncio.shield(self._service.spawn(self._clean(found.due, to_end, left, answer)))

    async def _strays(self) -> list[Stray] | None:
        """The workers that live and are in no row; None where nobody can tell."""
        try:
            return await strays.find(self._service)
        except WorkerError:
            return None

    async def _clean(
        self, found: Iterable[Due], unknown: list[Stray], left: list[str], answer: dict[str, Any]
    ) -> dict[str, Any]:
        async with self._cleaning:
            ended, failed = await strays.end(self._service, unknown)
            answer["strays_ended"] = ended
            answer["errors"] += failed
            for due in found:
                try:
                    done = await self._handle(due)
                except WorkerError:
                    answer["errors"] += 1
                    continue
                answer["handled"] += done
            removed = [await self._service.remove(directory) for directory in left]
            answer["left"] = removed.count(False)
            answer["errors"] += removed.count(False)
        return answer

    async def _handle(self, due: Due) -> bool:
        """Do one thing that is due; False where it is not any more. Raises WorkerError where it cannot be done."""
        if due.work == Work.STOP:
            fenced = self._registry.expire(due, now_ms())
            self._service.commit()
            await self._service.end_all(fenced)
            return bool(fenced)
        claimed = self._registry.claim(due, now_ms())
        if claimed is None:
            return False
        _, errors = await self._delete([claimed])
        if errors:
            raise WorkerError(Code.STOP_FAILED, "files of the worker cannot be removed", "worker")
        return True

    def _candidate(self, due: Due) -> dict[str, Any]:
        worker = self._registry.get(due.worker)
        name = worker.name if worker is not None else ""
        told = {"worker": due.worker, "name": name, "work": str(due.work), "reason": str(due.reason)}
        return {**told, "deadline": due.deadline}

    async def _delete(self, claimed: Iterable[Worker]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Delete the files and then the rows of what was claimed: what is gone, and what cannot be removed."""
        return await asyncio.shield(self._service.spawn(self._deleted(claimed)))

    async def _deleted(self, claimed: Iterable[Worker]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        gone: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for worker in claimed:
            scratch = places.scratch_of(self._service.state_dir, worker.incarnation)
            try:
                for directory in (self._service.place_of(worker), scratch):
                    if not await asyncio.to_thread(places.remove, directory):
                        raise WorkerError(Code.STOP_FAILED, "its files cannot be removed", "worker")
                self._registry.forgotten(worker.id, now_ms())
                self._service.commit()
                self._service.forget(worker.id)
            except WorkerError as error:
                self._registry.unclaim(worker.id)
                errors.append({"worker": worker.id, "code": str(error.code)})
            else:
                gone.append(told(worker))
        return gone, errors


def _first(pruning: Pruning) -> tuple[Sequence[Worker], Sequence[Worker]]:
    """What one prune does, and what it leaves for the next: it is told in one answer, which has an end."""
    most = contract.Limits().listed
    return pruning.workers[:most], pruning.workers[most:]


def _kept(pruning: Pruning) -> list[dict[str, Any]]:
    kept = pruning.kept[: contract.Limits().listed]
    return [{"worker": each.worker.id, "name": each.worker.name, "code": str(each.code)} for each in kept]


async def left_behind(service: Service, unknown: Collection[Stray] | None) -> list[str]:
    """The scratch directories outside runs that could not be removed when their workers ended.

    `unknown` are the workers that live without a record, which may have one; where nobody can tell (None), it is none.
    """
    # Listed first: what is made meanwhile is of a worker that is live.
    there = await asyncio.to_thread(places.leftovers, service.state_dir, ())
    if not there or unknown is None:
        return []
    used = service.registry.in_use() | set(service.running)
    used |= {stray.incarnation for stray in unknown}
    kept = {places.scratch_of(service.state_dir, incarnation) for incarnation in used}
    return [directory for directory in there if directory not in kept]
