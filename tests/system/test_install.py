# SPDX-License-Identifier: Apache-2.0
"""What `make install` lays out works, and is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_units_are_loaded_for_every_user(bed: Any) -> None:
    for user in ("alice", "bob"):
        for unit in ("intercom.socket", "intercom-gateway.socket", "intercom.service"):
            assert bed.show(user, unit, "LoadState") == "loaded"
    assert bed.show("alice", "intercom.service", "DropInPaths").endswith("50-mounts.conf")


def test_verify_is_silent(bed: Any) -> None:
    """It prints problems and still ends with 0, so any output counts."""
    units = "/usr/lib/systemd/user"
    done = bed.as_user(
        "alice",
        ["systemd-analyze", "--user", "verify", f"{units}/intercom.socket", f"{units}/intercom-gateway.socket"]
        + [f"{units}/intercom.service"],
    )
    assert done.stdout + done.stderr == ""


def test_nothing_names_the_checkout(staged: Path) -> None:
    checkout = str(Path(__file__).resolve().parents[2]).encode()
    for path in staged.rglob("*"):
        if path.is_file():
            assert checkout not in path.read_bytes(), path
