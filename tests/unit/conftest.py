# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules of unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orchcli import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Home:
    """A home of its own, with `orchestrate` as a function."""
    return Home(tmp_path, monkeypatch, capfd)
