# SPDX-License-Identifier: Apache-2.0
"""What the worker service may say of a worker whose processes go their own ways: no more than is proved."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers import landlock
from agent_intercom.workers.contract import LEFT_UNIT
from tests.contract.test_workers_service import until
from tests.contract.workerhost import HANG, Group, WorkerHost, hosted, unified

pytestmark = pytest.mark.skipif(unified() is None, reason="no control group can be made here")


@pytest.fixture
def host() -> Iterator[WorkerHost]:
    with hosted() as found:
        yield found


@pytest.fixture
def elsewhere() -> Iterator[Group]:
    """A control group that is of no worker."""
    group = Group()
    yield group
    group.remove()


@pytest.fixture
def ask(host: WorkerHost) -> Callable[..., dict[str, Any]]:
    def request(action: str, **params: Any) -> dict[str, Any]:
        with host.client() as client:
            found: dict[str, Any] = client.request(action, params, timeout=HANG)
            return found

    return request


Ask = Callable[..., dict[str, Any]]


def move(group: Group, *pids: int) -> None:
    for pid in pids:
        (group.path / "cgroup.procs").write_text(str(pid))


def commands(unit: Path) -> dict[int, bytes]:
    """Who is in a unit, and with which command line."""
    pids = map(int, (unit / "cgroup.procs").read_text().split())
    return {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}


def shells(unit: Path) -> int:
    return sum(b"/bin/sh" in command for command in commands(unit).values())


def frozen(host: WorkerHost, worker: dict[str, Any], how: str | None = None) -> str:
    """Whether the unit of a worker is frozen; with `how` it is made so first, as with systemctl."""
    directory = host.group.path / worker["unit"]
    if how is not None:
        (directory / "cgroup.freeze").write_text(how)
        wanted = f"frozen {how}"
        until(lambda: wanted in (directory / "cgroup.events").read_text().splitlines(), "it is frozen, or thawed")
    found: str = (directory / "cgroup.freeze").read_text().strip()
    return found


def test_whoever_has_left_its_unit_is_told_and_not_waited_for(host: WorkerHost, ask: Ask, elsewhere: Group) -> None:
    gone = ask("start", **host.wanted("/bin/sleep", "100", name="gone"))["worker"]
    asked = ask("start", **host.wanted("/bin/sleep", "100", name="asked"))["worker"]
    stays = ask("start", **host.wanted("/bin/sh", "-c", "sleep 99 & exec sleep 100", name="stays"))["worker"]
    units = {worker["name"]: host.group.path / worker["unit"] for worker in (gone, asked, stays)}
    # One of it stays, so that nobody notices before the stop.
    until(lambda: len(commands(units["stays"])) == 3 and shells(units["stays"]) == 0, "it runs")
    move(elsewhere, *(pid for pid, command in commands(units["stays"]).items() if b"99" not in command))
    ended = ask("stop", worker="stays")["worker"]
    assert (ended["state"], ended["error_code"], ended["ended"]["outcome"]) == ("stopped", LEFT_UNIT, "unknown")
    move(elsewhere, *map(int, (units["gone"] / "cgroup.procs").read_text().split()))
    lost = ask("wait", worker="gone", until="end", timeout_ms=20_000)["worker"]
    assert (lost["state"], lost["error_code"]) == ("lost", LEFT_UNIT)
    assert LEFT_UNIT in [event["kind"] for event in ask("logs", worker=lost["id"])["events"]]
    # Where nobody left, nothing is said of it.
    assert ask("stop", worker="asked")["worker"]["error_code"] == ""
    assert len(elsewhere.members()) == 4


def test_a_shim_that_left_its_unit_makes_no_worker_lost(host: WorkerHost, ask: Ask, elsewhere: Group) -> None:
    begun = ask("start", **host.wanted("/bin/sleep", "100", name="held"))["worker"]
    host.kill()
    move(elsewhere, begun["placed"]["pid"])
    host.start()
    assert ask("status", worker="held")["worker"]["state"] == "registering"
    ask("stop", worker="held")
    assert host.group.members() == []


def test_what_was_frozen_past_the_service_is_paused(host: WorkerHost, ask: Ask) -> None:
    begun = ask("start", **host.wanted("/bin/sleep", "100", name="held"))["worker"]
    frozen(host, begun, "1")
    assert ask("status", worker="held")["worker"]["state"] == "paused"
    frozen(host, begun, "0")
    assert ask("status", worker="held")["worker"]["state"] == "registering"
    frozen(host, begun, "1")
    assert ask("resume", worker="held")["worker"]["state"] == "registering"
    assert frozen(host, begun) == "0"
    host.kill()
    frozen(host, begun, "1")
    host.start()
    found = ask("list")["workers"][0]
    assert (found["state"], found["runtime_deadline_at"]) == ("paused", None)
    assert ask("resume", worker="held")["worker"]["state"] == "registering"


def test_of_what_is_frozen_past_the_service_the_times_stand_still(host: WorkerHost, ask: Ask) -> None:
    """Without anybody who asks for it, and with what was left when it was frozen."""
    lifetimes = {"runtime_ms": 60_000}
    begun = ask("start", **host.wanted("/bin/sleep", "100", lifetimes=lifetimes))["worker"]

    def listed() -> dict[str, Any]:
        (found,) = ask("list")["workers"]
        return dict(found)

    frozen(host, begun, "1")
    until(lambda: listed()["state"] == "paused", "it is taken as paused")
    paused = listed()
    assert paused["runtime_deadline_at"] is None and 0 < paused["runtime_left_ms"] <= 60_000
    frozen(host, begun, "0")
    until(lambda: listed()["state"] == "registering", "it goes on")
    assert listed()["runtime_deadline_at"] >= begun["runtime_deadline_at"]
    # Whose slice is frozen is not paused.
    above = host.group.path / "cgroup.freeze"
    above.write_text("1")
    events = host.group.path / begun["unit"] / "cgroup.events"
    until(lambda: "frozen 1" in events.read_text(), "it stands still")
    assert ask("status", worker=begun["id"])["worker"]["state"] == "registering"
    above.write_text("0")


def test_what_is_frozen_takes_its_signal_when_it_is_stopped(host: WorkerHost, ask: Ask) -> None:
    """The stand-in, as an older systemd, asks what cannot listen."""
    begun = ask("start", **host.wanted("/bin/sleep", "100", name="held"))["worker"]
    frozen(host, begun, "1")
    assert ask("stop", worker="held")["worker"]["ended"]["exit_signal"] == signal.SIGTERM


@pytest.mark.parametrize("known", [True, False])
def test_a_frozen_worker_whose_leader_ends_is_thawed(host: WorkerHost, ask: Ask, known: bool) -> None:
    begun = ask("start", **host.wanted("/bin/sleep", "100", name="held"))["worker"]
    if known:
        ask("pause", worker="held")
    else:
        frozen(host, begun, "1")
    os.kill(begun["placed"]["pid"], signal.SIGKILL)
    # The service is not asked: it would look at the unit then.
    remain = "ended and left processes behind"
    until(lambda: remain in (host.directory / "errors").read_text(), "its children remain")
    until(lambda: frozen(host, begun) == "0", "it is thawed")
    blocked = ask("wait", worker="held", until="blocked", timeout_ms=20_000)["worker"]
    assert blocked["state_reason"] == "children_remain" and blocked["paused_at"] is None
    ask("stop", worker="held")
    assert host.group.members() == []


def test_git_is_not_asked_for_a_confined_worker(host: WorkerHost, ask: Ask) -> None:
    """Its repository may have git run anything, and git is run by the service, which nothing confines."""
    if not landlock.abi():
        pytest.skip("the kernel has no Landlock")
    tree, ran = host.directory / "tree", host.directory / "ran"
    tree.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tree)]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    (tree / "file").write_text("one")
    (tree / ".gitattributes").write_text("* filter=x")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, env=environment)
    subprocess.run([*git, "config", "filter.x.clean", f"touch {ran}; cat"], check=True, env=environment)
    for name, writable in (("free", None), ("confined", [str(tree)])):
        # Of the same size, so that git has to look into it.
        (tree / "file").write_text("two" if writable is None else "ten")
        ask("start", **{**host.wanted("/bin/sleep", "100", name=name, writable=writable), "directory": str(tree)})
        ended = ask("stop", worker=name)["worker"]
        assert (ran.exists(), ended["dirty"]) == ((True, True) if writable is None else (False, None))
        ran.unlink(missing_ok=True)
