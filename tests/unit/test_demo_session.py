# SPDX-License-Identifier: Apache-2.0
"""What `make demo` starts and ends among the runs of whoever calls it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "packaging/demo"


def load() -> ModuleType:
    """The program, as one more process would have it."""
    loader = importlib.machinery.SourceFileLoader("demo", str(DEMO))
    spec = importlib.util.spec_from_loader("demo", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def ended(demo: Any, refused: set[str]) -> list[str]:
    """Play a demo of which the commands in `refused` fail; the sessions that it has told to stop."""
    stopped = []

    def call(*words: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        if words[:2] == ("orchestrate", "stop"):
            stopped.append(words[2])
        if words[1] in refused and check:
            demo.fail(f"{words[1]} was refused")
        return subprocess.CompletedProcess(words, 0, "{}", "")

    place = demo.Place(call=call, prefix=[], python=["python"], orchestrate=["orchestrate"], project="/project")
    with pytest.raises((SystemExit, KeyError)):
        demo.run_of_systemd(place)
    return stopped


@pytest.mark.parametrize("refused", [{"start"}, {"status"}, set()])
def test_a_demo_ends_no_session_but_its_own(refused: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    first, second = load(), load()
    assert first.SESSION != second.SESSION
    assert set(ended(first, refused)) == {first.SESSION} and set(ended(second, refused)) == {second.SESSION}
    assert first.START[first.START.index("--session") + 1] == first.SESSION
