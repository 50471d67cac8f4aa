# SPDX-License-Identifier: Apache-2.0
"""`make demo` where the user has a manager, and where nothing but Python is there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
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
    units = "systemctl --user list-units --all --plain --no-legend '*demo*' 'orchestrate[@-]*'"
    listed = f"ls -R /run/user/4000/agent-intercom /run/user/4000/*demo* /run/user/4000/systemd/user {SOURCE}/build"
    files = bed.as_user("alice", f"{listed} 2>/dev/null", check=False).stdout
    return bed.as_user("alice", units).stdout, files


def check(said: str) -> None:
    """The conversation, and the run from plan to ready."""
    assert "reviewer reads from demo-writer: 'demo-question" in said
    assert "writer reads the answer: 'demo-answer" in said
    work = [
        "--implementation-flow phased",
        "--harness implementer=(command|external)",
        r"round 1 +the run is active",
        r"round 1 +implementer +plan +demo-plan: .* its test has failed",
        r"round 1 +implementer +implementation +demo-change: ",
        r"passed: python3 -m unittest",
        r"round 1 +reviewer +review +changes_requested: ",
        r"failed: two words with a tab between them",
        r"medium, words.py: demo-finding: .* counted as 1",
        r"round 2 +the run is active",
        r"round 2 +implementer +implementation +demo-change: ",
        r"changed: words.py, test_words.py",
        r"round 2 +reviewer +review +approved: ",
        r"passed: two words with a tab between them",
        r"round 2 +the run is ready",
        r"\$ orchestrate status demo-team-[0-9a-f]{8}",
        r"state: ready, round 2, phased flow",
        r"implementer +up, g1(, external)? +idle ",
        r"\$ orchestrate usage demo-team-[0-9a-f]{8}",
        r"all +5 +[1-9]",
        r"\+    return len\(text.split\(\)\)",
    ]
    assert re.search("(?s)" + ".*?".join(f"(?-s:{line})" for line in work), said)
    for role, event in (("implementer", "report_accepted"), ("reviewer", "report_accepted")):
        assert re.search(rf"run_event={event} role={role} round=2", said)
    assert said.count("in any field of any of those lines (searched)") == 2


@pytest.fixture
def no_units_of_runs(demo: Any) -> Iterator[None]:
    """As for whoever has installed nothing: the manager knows no unit of runs."""
    units = "orchestrate@* orchestrate-reaper@* orchestrate-workers.*"
    away = f"mkdir -p /root/away && cd /usr/lib/systemd/user && mv {units} /root/away"
    reload = "systemctl --user daemon-reload"
    demo.run(away)
    demo.as_user("alice", reload)
    yield
    demo.run("mv /root/away/* /usr/lib/systemd/user && rmdir /root/away")
    demo.as_user("alice", reload)


def with_a_manager(demo: Any) -> str:
    said = str(demo.as_user("alice", f"~/src/python/bin/python {SOURCE}/packaging/demo", timeout=180).stdout)
    check(said)
    assert "the broker is inactive." in said
    assert "made systemd start the broker: active, process" in said
    assert "$ orchestrate start --project" in said
    assert re.search(r"\$ orchestrate stop demo-team-[0-9a-f]{8} --yes", said)
    assert "stopped, and nobody is left in its slice" in said
    assert "--harness implementer=command" in said and "Worker started" in said
    units, files = leftovers(demo)
    assert not [line for line in units.splitlines() if not line.startswith("orchestrate-workers.")]
    assert "demo" not in files
    assert "run.json" not in files
    assert "orchestrate" not in files
    state = demo.as_user("alice", "find ~/.local ~/.pi ~/.config -type f", check=False).stdout.splitlines()
    # The worker service of an installation keeps its records.
    assert not [name for name in state if "/agent-intercom/workers.sqlite3" not in name]
    return said


def test_with_a_manager(demo: Any) -> None:
    said = with_a_manager(demo)
    assert "(/usr/bin/orchestrate)" in said


@pytest.mark.usefixtures("no_units_of_runs")
def test_with_a_manager_that_knows_no_runs(demo: Any) -> None:
    said = with_a_manager(demo)
    assert leftovers(demo)[0] == "" and demo.as_user("alice", "ls -A ~/.local", check=False).stdout == ""
    assert f"({SOURCE}/build/agent-intercom-demo-" in said


def test_with_nothing(demo: Any) -> None:
    command = f"env -u XDG_RUNTIME_DIR -u DBUS_SESSION_BUS_ADDRESS ~/src/python/bin/python {SOURCE}/packaging/demo"
    said = demo.as_user("alice", command, timeout=180).stdout
    check(said)
    assert "the brokers bind for themselves" in said
    assert "`orchestrate start` needs a service manager." in said
    assert "There is no journal" not in said
    assert "ai-demo-" not in demo.run("ls /tmp").stdout
