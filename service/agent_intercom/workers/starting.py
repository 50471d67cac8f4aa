# SPDX-License-Identifier: Apache-2.0
"""How a worker comes to be, and comes to be again (managed-workers spec, sections 2.4, 2.8, 2.12, 2.13 and 2.17)."""

from __future__ import annotations

import hashlib
import re

import msgspec
from msgspec.structs import replace

from agent_intercom.workers import grants, lifecycle
from agent_intercom.workers.contract import Code, Lifetimes, StopReason, scope_unit
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.ownership import Ownership, principal
from agent_intercom.workers.records import Grant, Key, Owner, Worker
from agent_intercom.workers.terms import KEY_LENGTH, KEY_MS, Caller, Started, Stopping, Wanted

_DURATIONS = ("idle_ms", "warning_ms", "grace_ms", "runtime_ms")
_REMAINING = (
    "id", "name", "harness", "role", "run", "scoped", "owner", "parent", "depth", "grant", "directory_digest",
    "task_digest", "task_length", "created_at", *_DURATIONS,
)  # fmt: skip
"""What the next incarnation of a worker has of the one before. All else is what happened to that one."""

_MADE_UP = 60
"""Characters of a name that nobody has chosen, before those of the id."""


class Starting(Ownership):
    """The part of the registry that starts workers and starts them again."""

    def start(self, caller: Caller, wanted: Wanted, now: int) -> Started:
        """Reserve a worker in `provisioning`: new, or for a role of a run the next generation of that role's worker.

        Codes: invalid_request, name_taken, conflict, forbidden, grant_exceeded, limit_reached.
        """
        me = self._me(caller)
        _check(wanted)
        if wanted.run is not None and me is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker cannot start a role of a run")
        first = self._first(caller, me, wanted, now)
        if first is not None:
            return Started(first, repeated=True)
        scope = caller.scope if me is None else self.scope(me.id)
        grant = self._admit(me, wanted, now)
        self._room(wanted.run)
        self._pace(now)
        worker = replace(self._new(caller, me, wanted, grant, now), scoped=scope is not None)
        self._free(worker.name, worker.id, scope)
        self._drop_expired(now)
        self._set(self._scopes, worker.id, scope)
        self._begin(worker)
        self._count(now)
        if wanted.key is not None:
            row = Key(wanted.key, _name(principal(caller)), worker.id, _digest(wanted), now + KEY_MS)
            key = (row.key, row.principal, row.worker)
            self._set(self._keys, key, row)
            self._keyed[key] = row
        return Started(worker)

    def restart(self, caller: Caller, reference: str, now: int) -> Stopping:
        """First half of a restart: fence as `stop` does, where there is something to end. Then end it, then `again`.

        Nothing is ended that could not be begun again, as far as it is known here: its name and its place among the
        live ones stay its own until `again`, or `given_up`. Codes as of `stop`, and conflict (it is being ended
        already), place_lost, grant_exceeded, limit_reached, name_taken.
        """
        worker = self._owned(caller, reference)
        if worker.run is not None:
            raise WorkerError(Code.FORBIDDEN, "a worker of a run is changed by its run alone", "worker")
        if lifecycle.fenced(worker) and worker.stop_reason != StopReason.RESTART:
            raise WorkerError(Code.CONFLICT, "the worker is being ended", "worker")
        scope = self._repeatable(worker, now)
        self._room(None, worker)
        self._pace(now)
        self._free(worker.name, worker.id, scope)
        self._count(now)
        self._set(self._restarting, worker.id, worker.incarnation)
        if not lifecycle.alive(worker):
            # So that nothing but this restart begins it, and whatever comes in between takes this away.
            worker = self._put(replace(worker, stop_reason=StopReason.RESTART, updated_at=now), "restart_requested")
        fenced = tuple(self._fence(worker, StopReason.RESTART, now, StopReason.PARENT))
        return Stopping(self._rows[worker.id], fenced)

    def again(self, caller: Caller, worker: str, incarnation: str, now: int) -> Worker:
        """Second half of a restart: the next generation of a worker, `provisioning`, with all that was its own.

        `incarnation` is the one that `restart` gave. Codes: conflict where somebody stopped, forgot or restarted it
        meanwhile, or it has not ended; name_taken, limit_reached, grant_exceeded, place_lost.
        """
        self._me(caller)
        self.given_up(worker, incarnation)
        old = self._rows.get(worker)
        if old is None or old.incarnation != incarnation or old.stop_reason != StopReason.RESTART:
            raise WorkerError(Code.CONFLICT, "the worker was stopped, forgotten or restarted meanwhile", "worker")
        if lifecycle.alive(old) or any(map(lifecycle.alive, self._descendants(old))):
            raise WorkerError(Code.LIVE, "the worker, or one below it, has not ended", "worker")
        scope = self._repeatable(old, now)
        self._room(None)
        self._free(old.name, old.id, scope)
        return self._begin(self._next(old, self._generations.get(old.id, old.generation) + 1, now))

    def given_up(self, worker: str, incarnation: str) -> None:
        """A restart is over, be it that it failed: what was kept for it is not any more."""
        if self._restarting.get(worker) == incarnation:
            del self._restarting[worker]

    # Admission

    def starter(self, caller: Caller) -> Worker | None:
        """The worker in which somebody is who may start others, None for who is in none, before more is looked at.

        Codes: forbidden, grant_exceeded. `start` tells the rest: what was started under a key needs no grant any more.
        """
        me = self._me(caller)
        if me is not None and lifecycle.fenced(me):
            raise WorkerError(Code.FORBIDDEN, "you are being ended")
        if me is not None and me.run is not None:
            raise WorkerError(Code.GRANT, "a worker of a run has no grant to start others", "grant")
        if me is not None and me.grant is None:
            grants.held(None, 0)
        return me

    def _first(self, caller: Caller, me: Worker | None, wanted: Wanted, now: int) -> Worker | None:
        """The worker that the same key started before. Raises WorkerError, `conflict`, where that was another one."""
        name = _name(principal(caller))
        for row in self._keys.values():
            worker = self._rows.get(row.worker)
            if (row.key, row.principal) != (wanted.key, name) or row.expires_at <= now or worker is None:
                continue
            if not self._sees(caller, me, worker):
                continue
            if row.digest != _digest(wanted):
                raise WorkerError(Code.CONFLICT, f"{worker.id} was started under this key, with something else", "key")
            return worker
        return None

    def _admit(self, me: Worker | None, wanted: Wanted, now: int) -> Grant | None:
        """The grant that the new worker gets. Raises WorkerError where it may not be started, or not with that."""
        if wanted.grant is not None:
            grants.check(wanted.grant, self._limits)
        if me is None:
            return wanted.grant
        held = self._permitted(me, now)
        if me.directory_digest not in (wanted.within or (wanted.directory_digest,)):
            raise WorkerError(Code.GRANT, "it is not in your own directory or below it", "directory")
        return None if wanted.grant is None else grants.narrowed(wanted.grant, held)

    def _permitted(self, me: Worker, now: int) -> Grant:
        """The grant of a worker that may have one child more. Raises WorkerError, `grant_exceeded`.

        How long and how far down the grants above it hold needs no look: none is wider than the one that it came from.
        """
        if lifecycle.fenced(me):
            raise WorkerError(Code.FORBIDDEN, "you are being ended")
        held = grants.held(me.grant, now)
        if me.depth + 1 > self._limits.depth:
            raise WorkerError(Code.GRANT, "workers are nested too deep", "grant.depth")
        for above in (me, *self._ancestors(me)):
            below = list(filter(self._stands, self._descendants(above)))
            if above is me and sum(_id(self._parent(row)) == me.id for row in below) >= held.children:
                raise WorkerError(Code.GRANT, "your grant has no child left", "grant.children")
            if above.grant is None:
                continue
            if len(below) >= above.grant.descendants:
                raise WorkerError(Code.GRANT, "no descendant is left to you", "grant.descendants")
        return held

    def _repeatable(self, worker: Worker, now: int) -> str | None:
        """The scope id of a worker that may be started again. Raises WorkerError where it may not."""
        if worker.id in self._claims:
            raise WorkerError(Code.CONFLICT, "the worker is being forgotten", "worker")
        if worker.parent is not None:
            above = self.of(worker.parent)
            if above is None or not lifecycle.alive(above):
                raise WorkerError(Code.CONFLICT, "the worker that started it has ended", "worker")
            if lifecycle.alive(worker):
                grants.held(above.grant, now)
            else:
                self._permitted(above, now)
        return self.scope(worker.id)

    def _room(self, run: str | None, but: Worker | None = None) -> None:
        """Make sure that there may be one live worker more than there are without one. Raises `limit_reached`."""
        limits = self._limits
        live = [row for row in self._rows.values() if row is not but and self._stands(row)]
        if len(live) >= limits.live:
            raise WorkerError(Code.LIMIT, f"{limits.live} workers are live, which is all there may be", "live")
        if run is not None and sum(worker.run == run for worker in live) >= limits.live_in_run:
            raise WorkerError(Code.LIMIT, f"the run has {limits.live_in_run} live workers, which is all", "live_in_run")

    def _pace(self, now: int) -> None:
        """Make sure that one worker more may begin now. Raises WorkerError, `limit_reached`."""
        limits = self._limits
        while self._begun and self._begun[0] <= now - limits.starts_ms:
            self._begun.popleft()
        if len(self._begun) >= limits.starts:
            raise WorkerError(Code.LIMIT, "too many workers were started just now; try again in a minute", "starts")

    def _count(self, now: int) -> None:
        """Count one that begins: a restart when it is asked for, so that nobody else's start is in its way then."""
        self._begun.append(now)

    def _drop_expired(self, now: int) -> None:
        for key in [key for key, row in self._keys.items() if row.expires_at <= now]:
            self._drop_key(key)

    # Rows

    def _new(self, caller: Caller, me: Worker | None, wanted: Wanted, grant: Grant | None, now: int) -> Worker:
        if wanted.run is not None:
            worker, name = _role_id(wanted.run, wanted.role), f"{wanted.run}/{wanted.role}"
            generation = self._role_generation(worker, wanted.generation)
            owner = Owner("run", wanted.run)
            before = self._rows.get(worker)
        else:
            worker, generation, owner, before = self._fresh(), 1, principal(caller), None
            name = self._full(wanted.name if wanted.name is not None else _made_up(wanted, worker), me)
        incarnation, durations = self._fresh(), self._durations(wanted)
        return Worker(
            id=worker,
            name=name,
            harness=wanted.harness,
            role=wanted.role,
            run=wanted.run,
            generation=generation,
            incarnation=incarnation,
            owner=owner,
            parent=None if me is None else me.incarnation,
            root=incarnation if me is None else me.root or me.incarnation,
            depth=0 if me is None else me.depth + 1,
            grant=grant,
            unit=scope_unit(incarnation),
            directory_digest=wanted.directory_digest,
            task_digest=wanted.task_digest,
            task_length=wanted.task_length,
            # Of a role that was started before, the row goes on.
            created_at=now if before is None else before.created_at,
            updated_at=now,
            entered_at=now,
            active_at=now,
            idle_ms=durations.idle_ms,
            warning_ms=durations.warning_ms,
            grace_ms=durations.grace_ms,
            runtime_ms=durations.runtime_ms,
        )

    def _role_generation(self, worker: str, generation: int | None) -> int:
        existing, last = self._rows.get(worker), self._generations.get(worker, 0)
        if existing is not None and lifecycle.alive(existing):
            raise WorkerError(Code.CONFLICT, "the role has a live worker", "role")
        if worker in self._claims:
            raise WorkerError(Code.CONFLICT, "the worker is being forgotten", "role")
        # The same again is one whose broker has not seen it: only a connection makes the next one due.
        if generation is None or generation < last:
            raise WorkerError(Code.CONFLICT, "the role has had a later generation", "generation")
        return generation

    def _durations(self, wanted: Wanted) -> Lifetimes:
        """The lifetimes of a new worker; a run sees itself to when its workers are idle."""
        known = self._lifetimes
        idle = wanted.idle_ms
        if idle is None:
            idle = 0 if wanted.run is not None else known.idle_ms
        warning = min(known.warning_ms, idle // 2) if wanted.warning_ms is None else wanted.warning_ms
        if warning > idle:
            raise WorkerError(Code.INVALID, "it is longer than the time that a worker may be idle", "warning_ms")
        grace = known.grace_ms if wanted.grace_ms is None else wanted.grace_ms
        runtime = wanted.runtime_ms
        if runtime is None:
            runtime = 0 if wanted.run is not None else known.runtime_ms
        return known._replace(idle_ms=idle, warning_ms=warning, grace_ms=grace, runtime_ms=runtime)

    def _next(self, old: Worker, generation: int, now: int) -> Worker:
        """The next incarnation of a worker."""
        incarnation = self._fresh()
        return Worker(
            **{name: getattr(old, name) for name in _REMAINING},
            generation=generation,
            incarnation=incarnation,
            root=incarnation if old.parent is None else old.root,
            unit=scope_unit(incarnation),
            updated_at=now,
            entered_at=now,
            active_at=now,
        )

    def _fresh(self) -> str:
        while True:
            name = self._identify()
            if name not in self._incarnations and name not in self._generations:
                return name


def _made_up(wanted: Wanted, worker: str) -> str:
    """The name of a worker that nobody has named: of its harness and role, which are free text, what fits a name."""
    said = "-".join(filter(None, (wanted.harness, wanted.role)))
    fit = re.sub(r"[^A-Za-z0-9_.]+", "-", said, flags=re.ASCII).strip("-_.")[:_MADE_UP]
    return "-".join(filter(None, (fit, worker[:6])))


def _check(wanted: Wanted) -> None:
    for field in _DURATIONS:
        value = getattr(wanted, field)
        if value is not None and value < 0:
            raise WorkerError(Code.INVALID, "a duration is 0 or more", field)
    if wanted.key is not None and not 1 <= len(wanted.key) <= KEY_LENGTH:
        raise WorkerError(Code.INVALID, f"a key has 1 to {KEY_LENGTH} characters", "key")
    if wanted.run is not None and not (wanted.role and wanted.generation):
        raise WorkerError(Code.INVALID, "a worker of a run has a role and a generation", "role")


def _role_id(run: str, role: str) -> str:
    """The id of the worker of a run's role: the same for each of its generations, even if it was forgotten."""
    return hashlib.sha256(f"{run}/{role}".encode()).hexdigest()[:12]


def _id(worker: Worker | None) -> str:
    return "" if worker is None else worker.id


def _name(owner: Owner) -> str:
    return f"{owner.kind}:{owner.name}"


def _digest(wanted: Wanted) -> str:
    return hashlib.sha256(msgspec.json.encode(wanted._replace(key=None))).hexdigest()
