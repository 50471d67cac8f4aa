# SPDX-License-Identifier: Apache-2.0
"""Installing for one person and taking it back, where no service manager answers; and what is typed by mistake."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a private runtime directory, so that no manager of a real person is asked for anything."""
    with tempfile.TemporaryDirectory(prefix="in", dir="/tmp") as directory:
        Path(directory, "run").mkdir(mode=0o700)
        yield Path(directory)


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`packaging/install` as that person."""
    return subprocess.run(
        [sys.executable, str(ROOT / "packaging/install"), *arguments],
        env={"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def socket_file(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def test_an_interpreter_that_is_not_there_is_one_line(home: Path) -> None:
    done = run(home, "install", "--user", "--python=/nonexist")
    assert (done.returncode, done.stderr) == (1, "install: /nonexist does not run: No such file or directory\n")


def test_the_pages_as_installed_lead_to_each_other(home: Path) -> None:
    assert run(home, "install", "--user", "--no-bundle", f"--python={sys.executable}").returncode == 0
    pages = home / ".local/share/doc/agent-intercom"
    linked = {link for page in pages.glob("*.md") for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())}
    assert "commands.md" in linked
    assert [link for link in linked if not (pages / link).exists()] == []
    assert run(home, "remove", "--user").returncode == 0
    assert not (home / ".local/share").exists()


def test_taking_back_says_what_stays_and_removes_dead_sockets(home: Path) -> None:
    state, compat = home / ".local/state/agent-intercom", home / ".pi/agent/intercom"
    state.mkdir(parents=True)
    drop_in = home / ".config/systemd/user/intercom.socket.d/agent-dir.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("")
    socket_file(compat / "broker.sock").close()
    socket_file(home / "run/agent-intercom/intercom.sock").close()
    (compat / "config.json").write_text("{}")
    with socket_file(compat / "remote-gateway.sock") as live:
        live.listen()
        said = run(home, "remove", "--user").stderr
    assert sorted(path.name for path in compat.iterdir()) == ["config.json", "remote-gateway.sock"]
    assert not (home / "run/agent-intercom").exists()
    assert state.is_dir()
    assert f"{state} (to remove it: rm -r {state})" in said
    assert f"{drop_in} (to remove it: rm {drop_in})" in said
    assert f"removed a socket at which nobody listens any more: {compat}/broker.sock" in said


@pytest.mark.parametrize("words", [["user", "none", "carol", "id"], ["user", "none"], ["root", "none"]])
def test_a_testbed_says_what_is_missing(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/testbed"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("testbed: say ")
    assert done.stderr.count("\n") == 1
