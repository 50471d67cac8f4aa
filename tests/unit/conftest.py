# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules of unit tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.homeruns import Runs
from tests.unit.orchcli import Home


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Home]:
    """A home of its own, with `orchestrate` as a function. Its path is short enough for addresses of sockets."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as directory:
        yield Home(Path(directory), monkeypatch, capfd)


@pytest.fixture
def runs(home: Home) -> Runs:
    """Runs in that home."""
    return Runs(home)
