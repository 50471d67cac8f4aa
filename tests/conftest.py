# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every test: nothing may leak, nothing may be skipped in CI, and CI is repeatable."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# Under nohup, and in the background of a script, these are ignored, and whatever a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

_SLOW_MACHINE = [HealthCheck.too_slow]
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("ci" if IN_CI else "dev")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With xdist: the system tests on one worker, because they share a testbed; all others where there is room.

    (`--dist loadgroup` is meant for this and has no effect with pytest 9.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "system" if nodeid.startswith("tests/system/") else nodeid

    return Scheduling(config, log)


NEED_SYSTEMD_MODULE = {"test_host_activation.py", "test_host_notify.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the module systemd could not be built, only what is about it is left out."""
    if importlib.util.find_spec("systemd") is None:
        missing = pytest.mark.skip(reason="the Python module systemd is missing")
        for item in items:
            if item.path.name in NEED_SYSTEMD_MODULE:
                item.add_marker(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI, turn a skip into a failure: what CI does not run, nobody runs."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for a module that skips itself while it is being imported."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def _children() -> set[int]:
    """PIDs of this process's children, over all of its threads (proc(5), /proc/pid/task/tid/children)."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:  # the thread ended meanwhile
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def _descriptors() -> dict[int, str]:
    """Open descriptors and what each refers to."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that listed the directory
            continue
    return found


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves behind an asyncio task, a child process or a descriptor.

    `asyncio.run` cancels what its main coroutine left running and says nothing; the function that does so is
    wrapped to tell. Fixtures of a wider scope than one test are set up earlier and so are not counted.
    """
    abandoned: list[str] = []
    cancel_all = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def telling_cancel_all(loop: asyncio.AbstractEventLoop) -> None:
        abandoned.extend(repr(task) for task in asyncio.all_tasks(loop))
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", telling_cancel_all)
    children, descriptors = _children(), _descriptors()
    yield
    leaked_fds = _leaked_descriptors(descriptors)
    if leaked_fds:  # something may only be waiting for the collector
        gc.collect()
        leaked_fds = _leaked_descriptors(descriptors)
    problems = [f"task: {task}" for task in abandoned]
    problems += [f"child: {pid} {_command(pid)}" for pid in sorted(_children() - children)]
    problems += [f"descriptor: {fd} -> {target}" for fd, target in leaked_fds.items()]
    if problems:
        pytest.fail("leaked " + "; ".join(problems), pytrace=False)


def _leaked_descriptors(before: dict[int, str]) -> dict[int, str]:
    now = _descriptors()
    return {
        fd: target
        for fd, target in sorted(now.items())
        if before.get(fd) != target and target not in {"/dev/urandom", "/dev/null"}
    }
