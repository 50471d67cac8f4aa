# SPDX-License-Identifier: Apache-2.0
"""The worker service without systemd: what it refuses before anything is written, and what it asks a manager for."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host import cgroups
from agent_intercom.host.journal import Journal
from agent_intercom.host.manager import SYSTEMD, ManagerRefused, Variant
from agent_intercom.host.scopes import ScopeState, Started
from agent_intercom.workers import (
    actions,
    confinement,
    contract,
    ending,
    orders,
    places,
    provisioning,
    reattach,
    strays,
)
from agent_intercom.workers.clock import now_ms
from agent_intercom.workers.contract import Code, Lifetimes, Limits, Outcome
from agent_intercom.workers.errors import BUSY, Unusable, WorkerError
from agent_intercom.workers.managers import Managers
from agent_intercom.workers.places import Place
from agent_intercom.workers.provisioning import Order
from agent_intercom.workers.records import Ending, Grant, Worker
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.service import Running, Service
from agent_intercom.workers.spec import Confinement, Launch
from agent_intercom.workers.terms import Caller, Changes, Wanted
from tests.unit.workerstage import PLACED, WIDE, refused

SCOPE = "scope-0123456789abcdef"
PERSON = Caller(SCOPE)
READ_ONLY = ("no-new-privileges",)


class Store:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.applied: list[Changes] = []

    def apply(self, changes: Changes) -> None:
        if changes:
            self.applied.append(changes)


class Scopes:
    """A manager: `answers` are what `start` raises, one after the other, `units` what there is."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.answers: list[Exception] = []
        self.started: list[dict[str, Variant]] = []
        self.units: dict[str, ScopeState] = {}
        self.on_return: list[Callable[[], None]] = []

    async def __aenter__(self) -> Scopes:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    def changes(self, callback: object) -> None: ...

    def returned(self, callback: Callable[[], None]) -> None:
        self.on_return.append(callback)

    async def jobs(self) -> int:
        return 0

    async def version(self) -> int:
        return 252

    async def states(self, pattern: str) -> dict[str, ScopeState]:
        assert pattern == "worker-*.scope"
        return dict(self.units)

    async def start(self, unit: str, pid: int, properties: Mapping[str, Variant], timeout: float) -> Started:
        self.started.append(dict(properties))
        if self.answers:
            raise self.answers.pop(0)
        return Started("/x.scope", "0" * 32)


class Stage:
    """A service with all of it but workers: a start ends where a launcher would be forked."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.project = directory / "home", directory / "home" / "project"
        self.runtime, self.state = directory / "run", directory / "state"
        for made in (self.project, self.runtime, self.state):
            made.mkdir(0o700, parents=True)
        self.store, self.scopes = Store(), Scopes()
        numbers = itertools.count(0xA00000000000)
        self.registry = Registry(Limits(), Lifetimes(), lambda: f"{next(numbers):012x}")
        self.journal = Journal(path="/nonexistent")
        managers = Managers(lambda: self.scopes, lambda *_: None, self.journal)  # type: ignore[arg-type,return-value]
        self.service = Service(
            self.registry,
            self.store,
            managers,
            self.journal,
            runtime_dir=str(self.runtime),
            state_dir=str(self.state),
            launcher="/nonexistent",
        )
        self.orders: list[Order] = []
        monkeypatch.setattr(provisioning, "begin", self._begin)
        self.actions = actions.Actions(self.service, "/nonexistent")

    async def _begin(
        self, _: object, program: str, unit: str, order: Order, write_down: Callable[..., None], watch: object
    ) -> None:
        self.orders.append(order)
        write_down(PLACED)

    async def ask(self, action: str, caller: Caller = PERSON, **params: Any) -> dict[str, Any]:
        kind, method, _ = self.actions.known[action]
        return await method(caller, kind(**params))

    async def start(self, caller: Caller = PERSON, **more: Any) -> dict[str, Any]:
        given = {"command": ["/bin/true"], "directory": str(self.project), "environment": {"PATH": "/bin"}, **more}
        worker: dict[str, Any] = (await self.ask("start", caller, **given))["worker"]
        return worker

    def untouched(self) -> bool:
        """Whether nothing was written down, and no file made."""
        return not self.store.applied and not os.listdir(self.runtime) and not os.listdir(self.state)


Run = Callable[[Callable[[Stage], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test with a stage."""
    return staged(tmp_path, monkeypatch)


def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    # What the kernel of the machine has is tried elsewhere.
    monkeypatch.setattr(confinement, "abi", lambda: 7)

    def with_stage(body: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            stage = Stage(tmp_path.resolve(), monkeypatch)
            monkeypatch.setattr(stage.service, "_watch", lambda *_: None)
            try:
                await body(stage)
            finally:
                await stage.service.close(0)
                stage.journal.close()

        asyncio.run(main())

    return with_stage


def test_a_home_that_is_a_link_is_granted_as_what_it_leads_to(run: Run, tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        (tmp_path / "linked").symlink_to(stage.home)
        await stage.start(directory=f"{tmp_path}/linked/project", writable=[f"{tmp_path}/linked/project"])
        (order,) = stage.orders
        assert order.launch.confinement is not None
        assert list(order.launch.confinement.writable) == [order.launch.directory] == [str(stage.project)]

    run(body)


@pytest.mark.parametrize("name", ["gone", "file", "relative"])
def test_what_cannot_be_granted_is_refused_before_anything_is_written(run: Run, name: str) -> None:
    async def body(stage: Stage) -> None:
        (stage.project / "file").write_text("")
        given = name if name == "relative" else str(stage.project / name)
        with refused(Code.INVALID, "writable"):
            await stage.start(writable=[str(stage.project), given])
        assert stage.untouched()

    run(body)


def test_a_role_whose_grant_became_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write beside a granted directory could put a link to another one into its place."""
    monkeypatch.setattr(confinement, "abi", lambda: 7)
    top = tmp_path.resolve()
    (top / "granted").mkdir()
    limits = Confinement([str(top), str(top / "granted"), "/"])
    orders.admit(limits)
    orders.admit(None)
    (top / "granted").rmdir()
    with refused(Code.INVALID, "writable"):
        orders.admit(limits)
    (top / "granted").symlink_to("/")
    with refused(Code.INVALID, "writable"):
        orders.admit(limits)
    monkeypatch.setattr(confinement, "abi", lambda: 0)
    with refused(Code.CONFINEMENT_UNAVAILABLE, "required"):
        orders.admit(Confinement([str(top)]))
    orders.admit(Confinement([str(top)], required=False))


PARENT: dict[str, Any] = {"grant": Grant(children=9, descendants=9), "memory_max": 1000, "network": False}


@pytest.mark.parametrize(
    ("child", "allowed"),
    [
        ({}, False),
        ({"writable": []}, False),
        ({"writable": ["/"], "network": False}, False),
        ({"writable": ["."], "network": False}, False),
        ({"writable": ["out"]}, False),
        ({"writable": [], "network": False}, True),
        ({"writable": ["out"], "network": False}, True),
        ({"writable": ["out/below"], "network": False}, True),
        ({"writable": ["scratch"], "network": False}, True),
        ({"writable": ["out", "link"], "network": False}, False),
    ],
)
def test_a_confined_worker_starts_nothing_that_may_do_more(run: Run, child: dict[str, Any], allowed: bool) -> None:
    async def body(stage: Stage) -> None:
        (stage.project / "out" / "below").mkdir(parents=True)
        parent = await stage.start(name="parent", writable=[str(stage.project / "out")], **PARENT)
        (stage.project / "link").symlink_to("/")
        scratch = places.scratch_of(str(stage.state), parent["incarnation"])
        written = len(stage.store.applied)
        known = {"/": "/", ".": str(stage.project), "scratch": scratch}
        given = dict(child)
        if "writable" in child:
            given["writable"] = [known.get(name, str(stage.project / name)) for name in child["writable"]]
        inside = stage.actions.inside(parent["incarnation"])
        if not allowed:
            with refused(Code.GRANT, "writable"):
                await stage.start(inside, name="child", **given)
            assert len(stage.store.applied) == written and len(os.listdir(stage.runtime / "agent-intercom/worker")) == 1
            return
        await stage.start(inside, name="child", memory_max=2000, **given)
        order = stage.orders[-1]
        assert order.limits["MemoryMax"] == ("t", 1000)
        assert order.launch.confinement is not None and not order.launch.confinement.network

    run(body)


# What is asked of a manager.


class Fixed(Managers):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__(lambda: scopes, lambda *_: None, Journal(path="/nonexistent"))  # type: ignore[arg-type,return-value]


def order(slice_unit: str = contract.SLICE_UNIT) -> Order:
    launch = Launch(arguments=["/bin/true"], environment={}, directory="/", exit_file="/x", scratch="/x")
    return Order(launch, "/x", slice_unit, [], {"OOMPolicy": ("s", "kill")}, ())


async def placed(managers: Managers, scopes: Scopes, wanted: Order) -> Started:
    return await provisioning._placed(managers, scopes, "worker-0123456789ab.scope", 1, wanted)  # type: ignore[arg-type]


def refusal(name: str) -> ManagerRefused:
    return ManagerRefused(name, "worker-0123456789ab.scope")


UNKNOWN = "org.freedesktop.DBus.Error.PropertyReadOnly"


def test_a_manager_that_knows_no_oom_policy_is_asked_without_it_from_then_on() -> None:
    async def main() -> None:
        scopes = Scopes()
        managers = Fixed(scopes)
        await managers.scopes()
        scopes.answers = [refusal(UNKNOWN)]
        await placed(managers, scopes, order())
        await placed(managers, scopes, order())
        assert [("OOMPolicy" in given) for given in scopes.started] == [True, False, False]
        assert all("TasksMax" in given for given in scopes.started) and managers.lacking == {"OOMPolicy"}
        # What comes back may be a newer one.
        for told in scopes.on_return:
            told()
        await placed(managers, scopes, order())
        assert "OOMPolicy" in scopes.started[-1]
        await managers.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("names", "asked"), [((UNKNOWN, UNKNOWN), 2), (("org.freedesktop.DBus.Error.InvalidArgs",), 1)]
)
def test_another_refusal_is_told_and_nothing_is_believed_of_the_manager(names: tuple[str, ...], asked: int) -> None:
    async def main() -> None:
        scopes = Scopes()
        managers = Fixed(scopes)
        scopes.answers = [refusal(name) for name in names]
        with pytest.raises(ManagerRefused) as caught:
            await placed(managers, scopes, order())
        assert caught.value.name == names[-1] and len(scopes.started) == asked and not managers.lacking

    asyncio.run(main())


def test_a_slice_that_is_being_stopped_is_waited_for_and_a_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "_SLICE_PAUSE", 0)

    async def main() -> None:
        scopes = Scopes()
        managers = Fixed(scopes)
        scopes.answers = [refusal(f"{SYSTEMD}.TransactionIsDestructive")] * 3
        await placed(managers, scopes, order())
        assert len(scopes.started) == 4
        scopes.answers = [refusal(f"{SYSTEMD}.TransactionIsDestructive")]
        with refused(Code.CONFLICT, "run"):
            await placed(managers, scopes, order("orchestrate-0123.slice"))
        scopes.answers = [refusal(f"{SYSTEMD}.TransactionIsDestructive")] * 1000
        with refused(Code.BUSY, "slice"):
            await placed(managers, scopes, order())

    asyncio.run(main())


# Workers that nobody knows of.

STRAY = "worker-0123456789ab.scope"


def unit(name: str, above: str = "orchestrate-workers.slice") -> ScopeState:
    return ScopeState("active", "running", "success", "running", f"/user/{above}/{name}", "0" * 32)


def unit_ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of units that are ended from now on, none of which is there."""
    found: list[str] = []

    async def end(_: object, name: str, *__: object) -> None:
        found.append(name)

    monkeypatch.setattr(ending, "end", end)
    return found


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that were ended; of all but `worker-ffffffffffff.scope` somebody was there."""
    found = unit_ends(monkeypatch)
    monkeypatch.setattr(cgroups, "populated", lambda cgroup: "ffffffffffff" not in cgroup)
    monkeypatch.setattr(cgroups, "members", lambda cgroup: [os.getpid()])
    return found


def test_units_without_a_row_are_listed_and_ended_for_a_person_who_says_so(run: Run, ended: list[str]) -> None:
    async def body(stage: Stage) -> None:
        known = await stage.start()
        of_run = "worker-123456789abc.scope"
        stage.scopes.units = {
            known["unit"]: unit(known["unit"]),
            STRAY: unit(STRAY),
            of_run: unit(of_run, "orchestrate.slice/orchestrate-00ff.slice"),
            "worker-ffffffffffff.scope": unit("worker-ffffffffffff.scope"),
            "worker-of-somebody.scope": unit("worker-of-somebody.scope"),
        }
        shown = await stage.ask("cleanup", execute=False)
        assert [(each["unit"], each["run"]) for each in shown["strays"]] == [(STRAY, None), (of_run, "00ff")]
        assert shown["strays"][0]["programs"] and "strays_ended" not in shown
        assert (await stage.ask("health"))["strays"] == 2
        stage.service.unusable = Unusable(BUSY, "it is held open", "store")
        health = await stage.ask("health")
        assert (health["strays"], health["store"], health["unusable"]) == (None, "store_unusable", "it is held open")
        stage.service.unusable = None
        # A timer cleans up for everybody, and ends none of them.
        assert (await stage.ask("cleanup", execute=True))["strays_ended"] == [] == ended
        done = await stage.ask("cleanup", PERSON._replace(override=True), execute=True)
        assert done["strays_ended"] == ended == [STRAY, of_run] and done["errors"] == 0

    run(body)


def test_a_worker_is_told_of_no_unit(run: Run, ended: list[str]) -> None:
    async def body(stage: Stage) -> None:
        known = await stage.start()
        stage.scopes.units = {STRAY: unit(STRAY)}
        inside = stage.actions.inside(known["incarnation"])
        assert (await stage.ask("health", inside))["strays"] is None
        with refused(Code.FORBIDDEN):
            await stage.ask("cleanup", inside, execute=True)

    run(body)


def test_what_an_unknown_worker_may_have_stays_until_it_has_ended(run: Run, ended: list[str]) -> None:
    async def body(stage: Stage) -> None:
        mine, other = (places.scratch_of(str(stage.state), number) for number in ("0123456789ab", "ba9876543210"))
        place = places.of_worker(str(stage.runtime), "cccccccccccc")
        for directory in (mine, other):
            places.make_scratch(directory)
        places.make(place)
        stage.scopes.units = {STRAY: unit(STRAY)}
        await reattach.sweep(stage.service)
        assert [os.path.exists(each) for each in (mine, other, place)] == [True, False, True]
        await strays.end(stage.service, await strays.find(stage.service))
        stage.scopes.units = {}
        await reattach.sweep(stage.service)
        assert not os.path.exists(mine) and not os.path.exists(place)

    run(body)


def test_what_could_not_be_removed_is_told_and_tried_again(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        live = places.scratch_of(str(stage.state), (await stage.start())["incarnation"])
        left, strays_own = (places.scratch_of(str(stage.state), number) for number in ("0" * 12, "0123456789ab"))
        for directory in (left, strays_own):
            places.make_scratch(directory)
        stage.scopes.units = {STRAY: unit(STRAY)}
        shown = await stage.ask("cleanup", execute=False)
        assert shown["left"] == (await stage.ask("health"))["left"] == 1 and os.path.exists(left)
        with monkeypatch.context() as patch:
            patch.setattr(places, "remove", lambda directory: False)
            done = await stage.ask("cleanup", execute=True)
        assert (done["left"], done["errors"]) == (1, 1)
        done = await stage.ask("cleanup", execute=True)
        assert (done["left"], done["errors"]) == (0, 0)
        assert [os.path.exists(each) for each in (live, left, strays_own)] == [True, False, True]

    run(body)


def test_what_is_above_a_worker_that_lives_keeps_its_scratch_directory(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        top = await stage.start(name="top", grant=WIDE)
        inside = stage.actions.inside(top["incarnation"])
        child = await stage.start(inside, name="child", grant=Grant(children=1, descendants=1))
        below = await stage.start(stage.actions.inside(child["incarnation"]), name="below")
        directories = [places.scratch_of(str(stage.state), each["incarnation"]) for each in (top, child, below)]
        for directory in (*directories, left := places.scratch_of(str(stage.state), "0" * 12)):
            places.make_scratch(directory)
        for above in (top, child):
            stage.registry.lost(above["incarnation"], now_ms())
        told: list[tuple[str, object]] = []
        with monkeypatch.context() as patch:
            patch.setattr(places, "remove", lambda directory: directory != left)
            patch.setattr(stage.journal, "emit", lambda event, **fields: told.append((event.name, fields["worker"])))
            await reattach.sweep(stage.service)
        assert told == [("WORKER_FILES_LEFT", "0" * 12)]
        await reattach.sweep(stage.service)
        assert not os.path.exists(left)
        await stage.ask("cleanup", execute=True)
        assert all(map(os.path.exists, directories))

    run(body)


def test_what_is_started_while_leftovers_are_removed_keeps_what_it_has(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(stage: Stage) -> None:
        made: list[str] = []

        def leftovers(state_dir: str, keep: object) -> list[str]:
            worker = stage.registry.start(PERSON, Wanted(harness="command"), 1).worker
            made.extend(
                (places.scratch_of(state_dir, worker.incarnation), places.of_worker(str(stage.runtime), worker.id))
            )
            places.make_scratch(made[0])
            places.make(made[1])
            return made[:1]

        monkeypatch.setattr(places, "leftovers", leftovers)
        await reattach.sweep(stage.service)
        assert all(map(os.path.exists, made))

    run(body)


class Seen:
    """A watch of a worker that has exited."""

    left = False

    def ending(self, reason: str, now: int) -> Ending:
        return Ending(at=now, outcome=Outcome.EXITED, exit_code=0)


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_scratch_directory_goes_when_all_below_its_worker_have_ended(
    run: Run, ended: list[str], monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """What is below may write in it."""

    async def body(stage: Stage) -> None:
        parent = await stage.start(name="parent", **PARENT | {"network": True})
        child = await stage.start(stage.actions.inside(parent["incarnation"]), name="child")
        scratch = places.scratch_of(str(stage.state), parent["incarnation"])
        order: list[str] = []

        async def end(_: object, name: str, *__: object) -> None:
            order.append(name)
            if stubborn:
                raise WorkerError(Code.STOP_FAILED, "it does not end")

        told: list[tuple[str, object]] = []

        async def remove(directory: str) -> bool:
            order.append(directory)
            return True

        monkeypatch.setattr(ending, "end", end)
        monkeypatch.setattr(stage.service, "remove", remove)
        monkeypatch.setattr(
            stage.journal, "emit", lambda event, **fields: told.append((event.name, fields.get("code")))
        )
        running = Running(Seen(), "", scratch, "", asyncio.Event(), [])  # type: ignore[arg-type]
        stage.service.running[parent["incarnation"]] = running
        await stage.service._gone(parent["incarnation"])
        assert order[0] == child["unit"] and running.done.is_set()
        assert (scratch not in order) is stubborn is (("WORKER_FILES_LEFT", "scratch") in told)

    run(body)


def test_nothing_unknown_is_removed_where_nobody_can_tell_what_lives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        scratch = places.scratch_of(str(stage.state), "0123456789ab")
        places.make_scratch(scratch)

        async def nobody() -> None:
            raise WorkerError(Code.MANAGER_UNREACHABLE, "no manager")

        monkeypatch.setattr(stage.service.managers, "scopes", nobody)
        await reattach.sweep(stage.service)
        assert os.path.exists(scratch)
        assert (await stage.ask("cleanup", execute=False))["strays"] is None

    run(body)


def test_a_stopped_worker_cannot_be_restarted_and_the_way_out_is_told(tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    places.make(place)
    places.write(place, Place(arguments=("/bin/true",), directory="/", environment={}))
    places.remove(place)
    with pytest.raises(WorkerError, match="start it anew") as caught:
        places.read(place)
    assert caught.value.code == Code.PLACE_LOST


def test_a_heartbeat_writes_once_in_a_while(run: Run) -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.start()
        written = len(stage.store.applied)
        assert await stage.ask("heartbeat") == {"workers": []} and len(stage.store.applied) == written
        row = stage.registry.get(worker["id"])
        assert isinstance(row, Worker) and row.lease_expires_at is not None
        assert await stage.ask("heartbeat", Caller(SCOPE, "another-session")) == {"workers": []}

    run(body)
