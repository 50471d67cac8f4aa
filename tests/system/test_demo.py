# SPDX-License-Identifier: Apache-2.0
"""`make demo` where the user has a manager, and where nothing but Python is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "/home/alice/src/agent-intercom"


@pytest.fixture
def demo(bed: Any) -> Any:
    """The testbed with the project in alice's home, and `~/src/python`, an environment with its dependencies."""
    source = Path(f"{bed.root}{SOURCE}")
    shutil.rmtree(source.parent, ignore_errors=True)
    source.mkdir(parents=True)
    for name in ("service", "units", "packaging", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "NEWS.md"):
        shutil.copy(ROOT / name, source / name)
    bed.run(["chown", "-R", "alice:alice", "/home/alice/src"])
    bed.as_user(
        "alice",
        "python3 -m venv --without-pip --system-site-packages ~/src/python"
        " && cd ~/src/python/lib/python3*/site-packages && echo /usr/lib/agent-intercom/site > bundled.pth",
    )
    yield bed
    bed.run(["rm", "-rf", "/home/alice/src"])


def leftovers(bed: Any) -> tuple[str, str]:
    units = bed.as_user("alice", "systemctl --user list-units --all --plain --no-legend '*demo*'").stdout
    listed = f"ls /run/user/4000 /run/user/4000/systemd/user {SOURCE}/build 2>/dev/null"
    files = bed.as_user("alice", listed, check=False).stdout
    return units, files


def check(said: str) -> None:
    assert "reviewer reads from demo-writer: 'demo-question" in said
    assert "writer reads the answer: 'demo-answer" in said


def test_with_a_manager(demo: Any) -> None:
    said = demo.as_user("alice", f"~/src/python/bin/python {SOURCE}/packaging/demo", timeout=120).stdout
    check(said)
    assert "the broker is inactive." in said
    assert "made systemd start the broker: active, process" in said
    assert "in any field of any of those lines (searched)" in said
    units, files = leftovers(demo)
    assert units == ""
    assert "demo" not in files
    state = demo.as_user("alice", "ls -A ~/.local ~/.pi", check=False)
    assert state.stdout == ""


def test_with_nothing(demo: Any) -> None:
    command = f"env -u XDG_RUNTIME_DIR -u DBUS_SESSION_BUS_ADDRESS ~/src/python/bin/python {SOURCE}/packaging/demo"
    said = demo.as_user("alice", command, timeout=120).stdout
    check(said)
    assert "the broker binds for itself" in said
    assert "in any field of any of those lines (searched)" in said
    assert "There is no journal" not in said
    assert "ai-demo-" not in demo.run("ls /tmp").stdout
