# SPDX-License-Identifier: Apache-2.0
"""Never two brokers: a foreign broker in the way of the socket unit, and the socket unit in the way of one."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

COMPAT = ".pi/agent/intercom"
FOREIGN_BROKER = "e38d4c64accc43daae042fb405d4573d"


def compat(bed: Any, name: str) -> Any:
    return bed.root / "home/alice" / COMPAT / name


@pytest.fixture
def foreign(bed: Any) -> subprocess.Popen[str]:
    """A broker that bound for itself, as an agent's client would have started it."""
    process: subprocess.Popen[str] = bed.popen("alice", ["/usr/bin/intercom", "broker", "/some/entry.mjs"])
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Intercom broker started (pid: ")
    return process


def test_the_manager_owns_the_addresses_while_the_unit_is_active(bed: Any) -> None:
    bed.enable("alice")
    manager = bed.as_user("alice", ["pgrep", "-u", "alice", "-x", "systemd"]).stdout.strip()
    owner = compat(bed, "broker.owner")
    assert owner.read_text() == manager
    assert owner.stat().st_mode & 0o777 == 0o600
    bed.as_user("alice", "/usr/bin/intercom list --json")
    assert not compat(bed, "broker.pid").exists()
    bed.as_user("alice", "systemctl --user stop intercom.socket intercom-gateway.socket intercom.service")
    assert not owner.exists()


def test_another_broker_refuses_to_start_while_the_unit_is_active(bed: Any) -> None:
    bed.enable("alice")
    owner = compat(bed, "broker.owner").read_text()
    refused = bed.as_user("alice", "/usr/bin/intercom broker", check=False)
    assert refused.returncode == 1
    assert f"Intercom broker already owned by live process {owner}" in refused.stderr
    assert compat(bed, "broker.owner").read_text() == owner
    bed.as_user("alice", "/usr/bin/intercom list --json")


def test_a_foreign_broker_is_not_pushed_aside(bed: Any, foreign: subprocess.Popen[str]) -> None:
    pid = compat(bed, "broker.owner").read_text()
    assert compat(bed, "broker.pid").read_text() == pid
    started = bed.as_user("alice", "systemctl --user start intercom.socket", check=False)
    assert started.returncode != 0
    assert bed.show("alice", "intercom.socket", "ActiveState") == "failed"
    assert compat(bed, "broker.owner").read_text() == pid
    assert foreign.poll() is None
    entries = [entry for entry in bed.journal("alice") if entry.get("MESSAGE_ID") == FOREIGN_BROKER]
    assert [entry["INTERCOM_PID"] for entry in entries] == [pid]
    status = bed.as_user("alice", "systemctl --user status intercom.socket", check=False).stdout
    assert "intercom doctor --take-over" in status


def test_taking_over(bed: Any, foreign: subprocess.Popen[str]) -> None:
    bed.as_user("alice", "systemctl --user start intercom.socket", check=False)
    told = bed.as_user("alice", "/usr/bin/intercom doctor --take-over", check=False)
    foreign.wait(timeout=30)
    assert "systemctl --user" in told.stdout + told.stderr
    bed.as_user("alice", "systemctl --user reset-failed intercom.socket; systemctl --user start intercom.socket")
    bed.as_user("alice", "/usr/bin/intercom list --json")
    assert bed.show("alice", "intercom.service", "ActiveState") == "active"


def test_a_killed_broker_is_not_in_the_way(bed: Any, foreign: subprocess.Popen[str]) -> None:
    bed.run(["kill", "-KILL", compat(bed, "broker.owner").read_text()])
    foreign.wait(timeout=30)
    assert compat(bed, "broker.pid").exists() and compat(bed, "broker.sock").exists()
    bed.enable("alice")
    assert not compat(bed, "broker.pid").exists()
    bed.as_user("alice", "/usr/bin/intercom list --json")


def test_restarting_the_socket_unit_under_a_broker(bed: Any) -> None:
    bed.enable("alice")
    bed.as_user("alice", "/usr/bin/intercom list --json")
    owner = compat(bed, "broker.owner").read_text()
    bed.as_user("alice", "systemctl --user restart intercom.socket")
    assert bed.show("alice", "intercom.socket", "ActiveState") == "active"
    assert compat(bed, "broker.owner").read_text() == owner
    bed.as_user("alice", "/usr/bin/intercom list --json")
