# SPDX-License-Identifier: Apache-2.0
"""A registry of managed workers with a clock and ids of its own, and short ways to get workers somewhere."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from agent_intercom.workers.contract import Lifetimes, Limits
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.records import Ending, Grant, Placed, Worker
from agent_intercom.workers.registry import Registry
from agent_intercom.workers.terms import Caller, Loaded, Wanted

PERSON = Caller("scope-a")
SESSION = Caller("scope-a", "manager-1")
OTHER = Caller("scope-a", "manager-2")
FOREIGN = Caller("scope-b", "manager-1")
OVERRIDE = Caller("scope-a", override=True)

PLACED = Placed(control_group="/workers.slice/x.scope", invocation_id="0" * 32, pid=7, start_ticks=8, boot_id="boot")
WIDE = Grant(children=3, descendants=6, depth=3, subdelegate=True)


def ending(at: int = 0, code: int | None = 0, signal: int | None = None) -> Ending:
    """How a leader ends; by itself and well unless something else is said."""
    return Ending(at=at, outcome="exited" if signal is None else "signaled", exit_code=code, exit_signal=signal)


class Stage:
    """`now` is the time that every call of `start`, `run` and the like gives; the registry is `it`."""

    def __init__(
        self, limits: Limits | None = None, lifetimes: Lifetimes | None = None, loaded: Loaded | None = None
    ) -> None:
        self.now = 1_000_000
        self._ids = itertools.count(0xA0000)
        self.it = Registry(limits or Limits(), lifetimes or Lifetimes(), self._id, loaded or Loaded())

    def _id(self) -> str:
        # Ids that begin alike only by chance, as random ones do.
        return f"{next(self._ids) * 0x9E3779B97F4A7C15 % 2**48:012x}"

    def start(self, caller: Caller = PERSON, **wanted: Any) -> Worker:
        """A worker in `provisioning`."""
        return self.it.start(caller, Wanted(**{"harness": "command", **wanted}), self.now).worker

    def run(self, caller: Caller = PERSON, **wanted: Any) -> Worker:
        """A worker whose command has begun."""
        worker = self.start(caller, **wanted)
        return self.begin(worker)

    def begin(self, worker: Worker) -> Worker:
        self.it.placed(worker.incarnation, PLACED, self.now)
        self.it.released(worker.incarnation, self.now)
        return self.get(worker)

    def get(self, worker: Worker) -> Worker:
        found = self.it.get(worker.id)
        assert found is not None
        return found

    def end(self, worker: Worker, code: int = 0, dirty: bool | None = False) -> Worker:
        self.it.ended(self.get(worker).incarnation, ending(self.now, code), self.now, dirty)
        return self.get(worker)


def inside(worker: Worker) -> Caller:
    """A caller in a worker's unit, that claims to be somebody else."""
    return Caller("scope-b", "manager-9", worker.incarnation)


@contextlib.contextmanager
def refused(code: str, field: str | None = None) -> Iterator[None]:
    """WorkerError with this code, and this field if one is given."""
    with pytest.raises(WorkerError) as caught:
        yield
    assert caught.value.code == code
    assert field is None or caught.value.field == field
    assert "\n" not in caught.value.text
