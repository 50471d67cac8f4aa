# SPDX-License-Identifier: Apache-2.0
"""Which Pi package a run is worked and watched with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import pipackage
from agent_intercom.orchestration.pipackage import PiPackage


def package(place: Path, metadata: Any = None) -> Path:
    """A package with a worker bridge; `metadata` is the content of its package.json."""
    (place / "extensions").mkdir(parents=True)
    (place / "extensions/orchestrator-worker.js").write_text("")
    if metadata is not None:
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        (place / "package.json").write_text(text)
    return place


def environ(home: Path, caller: Path | None = None) -> dict[str, str]:
    found = {"HOME": str(home)}
    return found if caller is None else {**found, pipackage.PACKAGE_ENVIRONMENT: str(caller)}


def test_the_package_that_called_comes_first(tmp_path: Path) -> None:
    caller = package(tmp_path / "caller", {"version": "0.10.0"})
    other = package(tmp_path / "other", {"version": "0.8.1"})
    found = pipackage.find(environ(tmp_path, caller), str(other / pipackage.BRIDGE_PATH))
    assert found == PiPackage(str(caller), "0.10.0", str(caller / "extensions/orchestrator-worker.js"))
    assert found.observer_report_usage


def test_a_directory_without_a_bridge_is_no_package(tmp_path: Path) -> None:
    """Where the script is called as a command of its own, the directory above is none of a package."""
    other = package(tmp_path / "other", {"version": "0.8.1"})
    found = pipackage.find(environ(tmp_path, tmp_path), str(other / pipackage.BRIDGE_PATH))
    assert found is not None
    assert found.directory == str(other)


def test_a_configured_bridge_stands_for_its_package(tmp_path: Path) -> None:
    other = package(tmp_path / "other", {"version": "0.8.1"})
    installed = package(tmp_path / ".pi/agent/npm/node_modules/pi-tmux-orchestrator", {"version": "0.10.0"})
    assert pipackage.find(environ(tmp_path), str(other / pipackage.BRIDGE_PATH)) == PiPackage(
        str(other), "0.8.1", str(other / "extensions/orchestrator-worker.js")
    )
    found = pipackage.find(environ(tmp_path))
    assert found is not None
    assert found.directory == str(installed)


def test_where_there_is_none(tmp_path: Path) -> None:
    assert pipackage.find(environ(tmp_path)) is None
    assert pipackage.find({**environ(tmp_path), "PI_CODING_AGENT_DIR": "not/absolute"}) is None
    assert pipackage.find(environ(tmp_path), "extensions/orchestrator-worker.js") is None


@pytest.mark.parametrize(
    ("version", "usage"),
    [("0.8.1", False), ("0.9.0", True), ("0.9.5-rc.1", True), ("0.10.0", True), ("1.0.0", True), ("0", False)]
    + [("0.9", True), ("latest", False), ("", False), ("0.09x", False)],
)
def test_its_age_says_what_observers_can_read(version: str, usage: bool) -> None:
    assert PiPackage("/p", version, "/p/b").observer_report_usage is usage


@pytest.mark.parametrize(
    "metadata", [None, "", "{", "[]", {}, {"version": 9}, {"version": "1\n2"}, "[" * 300_000, {"version": "9" * 65}]
)
def test_an_age_that_cannot_be_told(tmp_path: Path, metadata: Any) -> None:
    found = pipackage.find(environ(tmp_path, package(tmp_path / "caller", metadata)))
    assert found is not None
    assert (found.version, found.observer_report_usage) == ("", False)
