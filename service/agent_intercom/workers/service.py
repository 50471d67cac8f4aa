# SPDX-License-Identifier: Apache-2.0
"""The shell around the registry: what it decides is written down, carried out and watched (managed-workers spec, 9).

The registry decides, the store remembers, systemd and the kernel prove. In that order: nothing is done before the row
that says so is on the disk, and nothing is said to be done before it is proved. Starts go on side by side; of one
worker there is one operation at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple

from agent_intercom.host import faults
from agent_intercom.host.journal import Event, Journal
from agent_intercom.workers import contract, ending, pausing, places, provisioning, recording
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import LEFT_UNIT, TERMINAL, UNIT_CHANGED, Code, Outcome, StopReason
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.managers import Managers, explained
from agent_intercom.workers.provisioning import Order
from agent_intercom.workers.recording import Keeper, Recording
from agent_intercom.workers.records import Placed, Worker
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.spawning import Gated
from agent_intercom.workers.terms import Caller
from agent_intercom.workers.watching import Watch

FORGETTING: Final = frozenset({StopReason.REQUESTED, StopReason.PARENT, StopReason.RUN, StopReason.START_FAILED})
"""Why a worker was ended that nobody is going to restart: what it was started with is removed with it."""

_TOLD: Final = frozenset({"", StopReason.RUNTIME, StopReason.CHILDREN})
"""Why a worker of a run ended where nobody asked for it."""


class Running(NamedTuple):
    """An incarnation that is watched: what sees it, and the directories that are its own.

    `tree` is where git is asked for changes when it is stopped, empty where it is not: a confined worker could have git
    do what it may not do itself. `dirty` gets the answer. `done` is set when it has ended and its files are gone.
    """

    watch: Watch
    place: str
    scratch: str
    tree: str
    done: asyncio.Event
    dirty: list[bool]


class Service(Recording):
    """All managed workers of one user. `launcher` is the program that becomes a worker."""

    def __init__(
        self,
        registry: Registry,
        store: Keeper,
        managers: Managers,
        journal: Journal,
        *,
        runtime_dir: str,
        state_dir: str,
        launcher: str,
    ) -> None:
        super().__init__(registry, store, journal)
        self.managers = managers
        self.runtime_dir = runtime_dir
        self.state_dir = state_dir
        self.launcher = launcher
        self.running: dict[str, Running] = {}
        self.changed: set[str] = set()
        """The incarnations whose unit was seen to be another one."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[Any]] = set()

    # Tasks.

    @property
    def busy(self) -> bool:
        """Whether something is being carried out."""
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Carry something out that nobody's connection is to end. Raises WorkerError where the service ends."""
        if self.over:
            work.close()
            raise recording.ending()
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # A fault that nobody waits for is told; a refusal has been told where it came from.
        if not task.cancelled() and not isinstance(task.exception(), WorkerError | None):
            faults.tell(task.exception(), self.journal)
        self.on_change()

    async def carry_out(self, work: Coroutine[Any, Any, Worker]) -> Worker:
        """The same, and wait for it."""
        result: Worker = await asyncio.shield(self.spawn(work))
        return result

    async def settle(self, patience: float) -> None:
        """Let what is under way come to its end, for a while, and stop watching. Workers go on, and nothing is begun.

        Whoever asks for something can still be answered, as nobody has closed what that needs.
        """
        deadline = asyncio.get_running_loop().time() + patience
        while self._tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left)
        # What is cancelled may have something else to do.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(set(self._tasks))
        self.managers.on_connect = lambda: None
        for running in self.running.values():
            running.watch.close()
        self.over = True

    async def close(self, patience: float = 0) -> None:
        """The same, and write down what is not yet. Nobody may be asking for anything by now."""
        await self.settle(patience)
        for running in self.running.values():
            await running.watch.closed()
        self.running.clear()
        self.stop_recording()
        await self.managers.close()

    # Starting.

    async def begin(self, worker: Worker, prepare: Callable[[Worker], Order]) -> Worker:
        """Carry out a start that was reserved and written down. Raises WorkerError; nothing is left of it then.

        But for `stop_failed`: what may be left of it then is `unreachable`, and can be stopped like any other.
        """
        began = time.monotonic_ns()
        order: Order | None = None
        async with self.lock(worker.id):
            try:
                order = prepare(worker)
                written, watched = self._write_down(worker, order), self._watch_over(worker, order)
                await provisioning.begin(self.managers, self.launcher, worker.unit, order, written, watched)
            except provisioning.NotTakenBack as error:
                self.registry.unreachable(worker.incarnation, error.code, now_ms())
                self.record()
                self.journal.emit(Event.WORKER_STOP_FAILED, worker=worker.id, code=error.code)
                raise
            except BaseException as error:
                code = error.code if isinstance(error, WorkerError) else Code.START_FAILED
                await asyncio.shield(self._failed(worker, order, code))
                raise
            # It may have ended by now: what is seen of that comes after this.
            self.registry.released(worker.incarnation, now_ms())
            self.record()
        self.journal.emit(
            Event.WORKER_STARTED,
            worker=worker.id,
            harness=worker.harness,
            generation=worker.generation,
            took_ms=(time.monotonic_ns() - began) // 1_000_000,
            enforced=",".join(order.enforced) if order.launch.confinement else "none",
        )
        return self.registry.get(worker.id) or worker

    def _write_down(self, worker: Worker, order: Order) -> Callable[[Placed], None]:
        def placed(where: Placed) -> None:
            if worker.run is not None:
                role = places.RoleWorker(
                    role=worker.role,
                    generation=worker.generation,
                    unit=worker.unit,
                    pid=where.pid,
                    enforced=order.enforced,
                )
                places.write_role(order.place, role)
            # Raises where somebody has put a stop fence around it meanwhile.
            self.registry.placed(worker.incarnation, where, now_ms(), order.enforced)
            self.commit()

        return placed

    def _watch_over(self, worker: Worker, order: Order) -> Callable[[Gated, Placed], None]:
        def watched(launched: Gated, where: Placed) -> None:
            tree = "" if order.launch.confinement is not None else order.launch.directory
            self._watch(worker, where, launched, order.place, order.launch.scratch, tree)

        return watched

    async def _failed(self, worker: Worker, order: Order | None, code: str) -> None:
        if order is not None:
            await provisioning.forget(order)
        else:
            if worker.run is not None or worker.generation == 1:
                await self.remove(self.place_of(worker))
            await self.remove(places.scratch_of(self.state_dir, worker.incarnation))
        fallen = self.registry.failed(worker.incarnation, code, now_ms())
        self.record()
        self.journal.emit(Event.WORKER_START_FAILED, worker=worker.id, code=code)
        self.end_soon(fallen)

    def place_of(self, worker: Worker) -> str:
        """Where the private things of a worker's latest incarnation are."""
        if worker.run is not None:
            return places.of_run_worker(self.runtime_dir, worker.run, worker.incarnation)
        return places.of_worker(self.runtime_dir, worker.id)

    def _watch(
        self, worker: Worker, placed: Placed, leader: Gated | int | None, place: str, scratch: str, tree: str
    ) -> None:
        incarnation = worker.incarnation
        watch = Watch(
            placed,
            places.exit_file(place),
            leader,
            remain=lambda: self._children_remain(incarnation),
            gone=lambda: self.spawn(self._gone(incarnation)),
            stilled=lambda still: pausing.stilled(self, incarnation, still),
        )
        self.running[incarnation] = Running(watch, place, scratch, tree, asyncio.Event(), [])

    def attach(self, worker: Worker, placed: Placed, leader: int | None, scratch: str, tree: str) -> None:
        """Watch a worker that an earlier service has started. `leader` is a pidfd of its shim; None: it has ended.

        Raises as `Watch`, and `leader` is the caller's then.
        """
        self._watch(worker, placed, leader, self.place_of(worker), scratch, tree)

    # Ending.

    def _children_remain(self, incarnation: str) -> None:
        running, worker = self.running[incarnation], self.registry.of(incarnation)
        if worker is None or worker.stop_requested_at is not None:
            return
        # Nobody is going to resume it, and what is frozen cannot end by itself.
        self.registry.resumed(incarnation, now_ms())
        self.registry.children_remain(incarnation, running.watch.ending("", now_ms()), now_ms())
        self.record()
        self.journal.emit(Event.WORKER_CHILDREN_REMAIN, worker=worker.id)
        # Its unit may have been frozen past the service, too.
        self.spawn(pausing.thaw(self, worker))

    async def _gone(self, incarnation: str) -> None:
        """Nobody is left in the unit of an incarnation: say so, and take away what was its own."""
        running = self.running[incarnation]
        worker = self.registry.of(incarnation)
        try:
            if worker is not None:
                try:
                    await self._follow_run(worker)
                except Exception as error:
                    # Whoever waits for its end waits for more than that.
                    faults.tell(error, self.journal)
                # Much may have been asked of it meanwhile.
                await self._say_ended(self.registry.of(incarnation) or worker, running)
        finally:
            self.running.pop(incarnation, None)
            running.done.set()

    async def _follow_run(self, worker: Worker) -> None:
        """End the workers of a run that is over, all of them."""
        if worker.run is not None and not worker.stop_reason and await self._run_ended(worker.run):
            fenced = self.registry.stop_role(Caller(), worker.run, None, now_ms())
            self.record()
            self.end_soon(other for other in fenced if other.incarnation != worker.incarnation)

    async def _say_ended(self, worker: Worker, running: Running) -> None:
        now = now_ms()
        found, left = running.watch.ending(worker.stop_reason, now), running.watch.left
        if found.outcome == Outcome.UNKNOWN and not worker.stop_reason:
            fallen = self.registry.lost(worker.incarnation, now, left=left)
            self.journal.emit(Event.WORKER_LOST, worker=worker.id, code=LEFT_UNIT if left else "gone")
        else:
            dirty = running.dirty[0] if running.dirty else None
            fallen = self.registry.ended(worker.incarnation, found, now, dirty, left=left)
            self.journal.emit(
                Event.WORKER_ENDED,
                worker=worker.id,
                outcome=found.outcome,
                reason=worker.stop_reason or None,
                exit_code=found.exit_code,
                exit_signal=found.exit_signal,
                code=LEFT_UNIT if left else None,
            )
        self.record()
        await self._remove_own(worker, fallen, running.scratch, running.place)

    async def _remove_own(self, worker: Worker, below: Iterable[Worker], scratch: str, place: str) -> None:
        """End what is below a worker that has ended, and then remove its files, in which that may write.

        What is left of them is told, and the next cleanup tries again.
        """
        gone = True
        try:
            await self.end_all(below)
        except WorkerError:
            gone = False
        if not gone or not await self.remove(scratch):
            self.journal.emit(Event.WORKER_FILES_LEFT, worker=worker.id, code="scratch")
        if forgets_place(worker) and not await self.remove(place):
            self.journal.emit(Event.WORKER_FILES_LEFT, worker=worker.id, code="place")

    async def _run_ended(self, run: str) -> bool:
        """Whether a run is over, so that its workers ended with it: its socket listens as long as it goes on."""
        from agent_intercom.orchestration import hosting

        with contextlib.suppress(WorkerError):
            async with explained(Code.MANAGER_UNREACHABLE, "the run cannot be looked at"):
                return await (await self.managers.scopes()).ending(hosting.socket_unit(run))
        return False

    async def remove(self, directory: str) -> bool:
        """Remove a directory of a worker's; an empty name stands for one that is not known."""
        return not directory or await asyncio.to_thread(places.remove, directory)

    async def end(self, worker: Worker) -> Worker:
        """End what has a stop fence. Raises WorkerError `stop_failed`; the fence stays then."""
        async with self.lock(worker.id):
            now = self.registry.of(worker.incarnation)
            if now is None or now.state in TERMINAL:
                return now or worker
            running = self.running.get(worker.incarnation)
            cgroup, invocation = (now.placed.control_group, now.placed.invocation_id) if now.placed else ("", "")
            unit_changed = False
            if running is not None and now.run is None and running.tree:
                changed = await ending.dirty(running.tree)
                running.dirty[:] = [] if changed is None else [changed]
            try:
                # One that is watched was proved to be there, and is seen to go.
                which = ("", False) if running is not None else (invocation, now.incarnation in self.changed)
                await ending.end(self.managers, now.unit, cgroup, *which)
            except ending.AnotherUnit:
                unit_changed = True
            except WorkerError as error:
                self.registry.stop_failed(worker.incarnation, error.code, now_ms())
                self.record()
                self.journal.emit(Event.WORKER_STOP_FAILED, worker=worker.id, code=error.code)
                raise
            running = running or self.running.get(worker.incarnation)
            if running is not None:
                await running.done.wait()
            else:
                # Nobody watched it: it never came so far, or could not be proved to be there.
                fallen = self.registry.lost(worker.incarnation, now_ms(), unit_changed=unit_changed)
                self.record()
                if unit_changed:
                    self.journal.emit(Event.WORKER_LOST, worker=worker.id, code=UNIT_CHANGED)
                self.changed.discard(worker.incarnation)
                scratch = places.scratch_of(self.state_dir, now.incarnation) if now.run is None else ""
                await self._remove_own(now, fallen, scratch, self.place_of(now))
        return self.registry.get(worker.id) or worker

    def lock(self, worker: str) -> asyncio.Lock:
        """What is held while something is done with a worker."""
        return self._locks[worker]

    def forget(self, worker: str) -> None:
        """Nothing is going to be done with a worker any more."""
        if worker in self._locks and not self._locks[worker].locked():
            del self._locks[worker]

    async def end_all(self, workers: Iterable[Worker]) -> list[Worker]:
        """End workers, which come deepest first: those of one depth together, and then the next.

        Raises what failed first, after all were tried.
        """
        ended: list[Worker] = []
        failure: BaseException | None = None
        for _, level in itertools.groupby(workers, lambda worker: worker.depth):
            for found in await asyncio.gather(*map(self.end, level), return_exceptions=True):
                if isinstance(found, BaseException):
                    failure = failure or found
                else:
                    ended.append(found)
        if failure is not None:
            raise failure
        return ended

    def end_soon(self, workers: Iterable[Worker]) -> None:
        """The same, without waiting for it."""
        if todo := list(workers):
            self.spawn(self.end_all(todo))

    # What systemd tells.

    def unit_changed(self, unit: str, active: str, sub: str, result: str) -> None:
        """Note why systemd ended a unit, which it tells once."""
        match = contract.UNIT.fullmatch(unit)
        running = self.running.get(match["incarnation"]) if match else None
        if running is not None and result not in ("", "success"):
            running.watch.result = result


def forgets_place(worker: Worker) -> bool:
    """Whether the place of a worker that has ended goes with it: nobody starts it again, or reads there how it ended.

    How a worker of a run ended that nobody wanted to end, `status` tells as long as the run goes on.
    """
    return worker.stop_reason in FORGETTING or (worker.run is not None and worker.stop_reason not in _TOLD)
