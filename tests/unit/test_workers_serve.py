# SPDX-License-Identifier: Apache-2.0
"""One life of the worker service in this process: its registry, its end, and what it leaves."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.host.activation import Inherited
from agent_intercom.host.notify import Notifier
from agent_intercom.workers import opening, reattach, serve
from agent_intercom.workers.opening import NoStore
from agent_intercom.workers.store import Store
from tests.unit.test_workers_peers import HANG, Told

NAME = "workers.sqlite3"


def test_a_fault_behind_a_registry_that_can_be_used_again_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can do nothing with it would keep it from the next one, and refuse everybody for good."""

    async def faulty(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(opening, "FIRST", 0.0)
    monkeypatch.setattr(reattach, "reattach", faulty)
    state = tmp_path / "state"

    async def main() -> None:
        held = Store.open(str(state / NAME))
        blind = opening.attempt(str(state))
        held.close()
        assert isinstance(blind, NoStore)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        given = Inherited([("workers", listener)], {}, [])
        it = serve.Main(given, Notifier({}), Told(), str(tmp_path), str(state), "/nonexistent", blind, False)
        async with asyncio.timeout(HANG):
            await it.run(time.monotonic_ns())
        it.store.close()
        assert it.failed
        Store.open(str(state / NAME)).close()

    asyncio.run(main())


def test_a_directory_that_others_may_use_is_refused_before_the_registry_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o755)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir(0o700)
    monkeypatch.setattr(opening, "attempt", lambda _: pytest.fail("the registry is opened"))
    assert serve.main(["--bind", str(place / "s")]) == 1
    assert "must be yours alone" in capsys.readouterr().err
    assert not list((tmp_path / "XDG_STATE_HOME").iterdir())
