# SPDX-License-Identifier: Apache-2.0
"""Control groups, in directories that look as the kernel's do. What the kernel tells by itself is in tests/system."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_intercom.host import cgroups
from agent_intercom.host.cgroups import Counters, Counts
from agent_intercom.host.errors import HostError

GROUP = "/user.slice/worker-1.scope"

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes control groups; the hierarchy is the second place of those that are looked at."""
    monkeypatch.setattr(cgroups, "_ROOTS", (str(tmp_path / "none"), str(tmp_path / "unified")))

    def made(name: str = GROUP, procs: str = "", populated: int = 0, **files: str) -> Path:
        directory = tmp_path / "unified" / name.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").write_text(procs)
        for group in (directory, *directory.parents):
            if group.is_relative_to(tmp_path / "unified"):
                (group / "cgroup.controllers").touch()
        (directory / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
        for file, text in files.items():
            (directory / file.replace("_", ".")).write_text(text)
        return directory

    return made


def test_where_a_group_is(make: Make, tmp_path: Path) -> None:
    directory = make()
    assert cgroups.directory(GROUP) == str(directory)
    assert cgroups.directory("/") == str(tmp_path / "unified")
    # A plain directory with hierarchies of version 1, which have groups of the same name.
    (tmp_path / "none" / GROUP[1:]).mkdir(parents=True)
    (tmp_path / "none" / GROUP[1:] / "cgroup.procs").touch()
    assert cgroups.directory("/") == str(tmp_path / "unified")
    assert cgroups.directory(GROUP) == str(directory)
    (tmp_path / "none" / GROUP[1:] / "cgroup.controllers").touch()
    assert cgroups.directory(GROUP) == str(tmp_path / "none" / GROUP[1:])


@pytest.mark.parametrize("name", ["", "user.slice", "/gone.scope", "/../unified", "/user.slice/../user.slice"])
def test_a_group_that_is_not_there_has_nobody(make: Make, name: str) -> None:
    make()
    assert cgroups.directory(name) is None
    assert cgroups.members(name) == []
    assert not cgroups.populated(name)
    assert not cgroups.frozen(name)
    assert cgroups.wait_empty(name, 0)
    assert asyncio.run(cgroups.emptied(name, 10))
    assert not cgroups.kill(name)
    assert cgroups.cpu_usec(name) is None
    with Counters(name) as counters:
        assert counters.read() == Counts()


def test_whether_all_of_a_group_stands_still(make: Make) -> None:
    events = make() / cgroups.EVENTS_NAME
    assert not cgroups.frozen(GROUP)
    events.write_text("populated 1\nfrozen 1\n")
    assert cgroups.frozen(GROUP)
    # A kernel before 5.2 freezes none.
    events.write_text("populated 1\n")
    assert not cgroups.frozen(GROUP)


def test_members_are_also_those_below(make: Make) -> None:
    make(procs="4\n5\n")
    make(f"{GROUP}/inner/most", procs="6\n")
    make("/user.slice/other.scope", procs="7\n")
    assert sorted(cgroups.members(GROUP)) == [4, 5, 6]


def test_somebody_is_there(make: Make) -> None:
    make(populated=1)
    assert cgroups.populated(GROUP)
    assert not cgroups.wait_empty(GROUP, 0)
    make(populated=0)
    assert not cgroups.populated(GROUP)
    assert cgroups.wait_empty(GROUP, 0)


def test_a_group_that_cannot_be_read_is_not_called_empty(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make(populated=1)
    number = errno.EIO

    def pread(fd: int, count: int, position: int) -> bytes:
        raise OSError(number, "")

    monkeypatch.setattr(os, "pread", pread)
    for ask in (cgroups.populated, lambda group: cgroups.wait_empty(group, 0)):
        with pytest.raises(HostError) as raised:
            ask(GROUP)
        assert (raised.value.code, raised.value.field) == ("cgroup_unreadable", "cgroup.events")
    # What the kernel says of a file whose group has gone.
    number = errno.ENODEV
    assert not cgroups.populated(GROUP)
    number = errno.ENOENT
    assert cgroups.wait_empty(GROUP, 0)


def test_kill_writes_to_the_kernel(make: Make) -> None:
    directory = make()
    # Linux before 5.14 has no such file.
    assert not cgroups.kill(GROUP)
    assert not (directory / "cgroup.kill").exists()
    make(cgroup_kill="")
    assert cgroups.kill(GROUP)
    assert (directory / "cgroup.kill").read_text() == "1"


def test_processor_time(make: Make) -> None:
    make()
    assert cgroups.cpu_usec(GROUP) is None
    make(cpu_stat="usage_usec 1234\nuser_usec 1000\nsystem_usec 234\n")
    assert cgroups.cpu_usec(GROUP) == 1234


def test_counters_keep_what_they_read_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(memory_events="low 9\nhigh 8\nmax 7\noom 2\noom_kill 1\n")
    with Counters(GROUP) as counters:
        assert counters.read() == Counts(1)
        (directory / "memory.events").write_text("oom 2\noom_kill 2\n")
        assert counters.read() == Counts(2)

        def gone(fd: int, count: int, position: int) -> bytes:
            raise OSError(errno.ENODEV, "")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", gone)
            assert counters.read() == Counts(2)
        counters.close()
        assert counters.read() == Counts(2)


def test_counters_of_a_machine_without_controllers(make: Make) -> None:
    make(pids_events="max 3\n")
    with Counters(GROUP) as counters:
        assert counters.read() == Counts(0)


def test_a_watch_calls_once_and_not_while_it_is_made() -> None:
    async def watched() -> list[str]:
        called: list[str] = []
        over = asyncio.Event()

        def empty() -> None:
            called.append("empty")
            over.set()

        watch = cgroups.Watch("/gone.scope", asyncio.get_running_loop(), empty)
        assert not called
        await over.wait()
        watch.close()
        watch.close()
        return called

    assert asyncio.run(watched()) == ["empty"]


def test_a_watch_that_is_closed_does_not_call() -> None:
    async def watched() -> None:
        watch = cgroups.Watch("/gone.scope", asyncio.get_running_loop(), lambda: pytest.fail("called"))
        watch.close()
        await asyncio.sleep(0)

    asyncio.run(watched())


def test_limits_that_nobody_is_held_to(make: Make) -> None:
    group = make(memory_max="67108864\n", memory_high="max\n")
    assert cgroups.unheld(GROUP, ("memory.max", "memory.high", "pids.max")) == ("memory.high", "pids.max")
    (group / "pids.max").write_text("512\n")
    assert cgroups.unheld(GROUP, ("memory.max", "pids.max")) == ()


def test_of_a_group_that_is_gone_what_is_above_it_tells(make: Make) -> None:
    limits = ("memory.max", "pids.max")
    above = make("/user.slice/workers.slice")
    (above / "cgroup.controllers").write_text("pids\n")
    assert cgroups.unheld("/user.slice/workers.slice/worker-2.scope", limits) == ("memory.max",)
    (above / "cgroup.controllers").write_text("cpu memory pids\n")
    assert cgroups.unheld("/user.slice/workers.slice/worker-2.scope", limits) == ()
    # The topmost one may be a container's, in which the group never was.
    assert cgroups.unheld("/elsewhere.slice/worker-2.scope", limits) == ()
    assert cgroups.unheld("/../worker-2.scope", limits) == ()


def test_a_group_that_goes_while_it_is_looked_at_loses_no_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    above = make("/user.slice/workers.slice")
    (above / "cgroup.controllers").write_text("memory pids\n")
    group = make("/user.slice/workers.slice/worker-2.scope")
    seen: list[str] = []

    def looked(cgroup: str) -> str | None:
        seen.append(cgroup)
        found = str(group.parent.parent.parent) + cgroup
        # It goes between the look for it and that for its files.
        return None if cgroup.endswith(".scope") and len(seen) > 1 else found

    monkeypatch.setattr(cgroups, "directory", looked)
    assert cgroups.unheld("/user.slice/workers.slice/worker-2.scope", iter(("memory.max", "pids.max"))) == ()
    assert cgroups.unheld("/user.slice/workers.slice/worker-2.scope", ("io.max",)) == ("io.max",)


def test_which_controllers_there_are(make: Make) -> None:
    (make() / "cgroup.controllers").write_text("cpu pids\n")
    assert cgroups.controllers(GROUP) == frozenset({"cpu", "pids"})
    assert cgroups.controllers("/nowhere") is None and cgroups.controllers("/../x") is None
