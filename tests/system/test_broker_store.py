# SPDX-License-Identifier: Apache-2.0
"""Other ways in which a broker is replaced, and what systemd keeps for it in the meantime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import LOCAL, Door, events, listening, main_pid, until, without_mounts

STRANGER = """
import os, sys
from systemd.daemon import notify
if not os.path.exists(sys.argv[1]):
    notify("FDSTORE=1\\nFDNAME=stranger", fds=[os.open("/dev/null", os.O_RDONLY)])
    open(sys.argv[1], "w").close()
"""
"""Stores a descriptor that no broker knows, once."""


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened


def kept(bed: Any) -> int:
    """Descriptors in the store of the service."""
    return int(bed.show("alice", "intercom.service", "NFileDescriptorStore"))


def opened(bed: Any) -> int:
    """Descriptors that the broker itself has open."""
    return len(bed.run(["ls", f"/proc/{main_pid(bed)}/fd"]).stdout.split())


def test_upgrade(bed: Any, door: Door) -> None:
    """What a package does after it replaced the files: daemon-reload, then try-restart."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    before = main_pid(bed)
    bed.as_user("alice", "systemctl --user daemon-reload && systemctl --user try-restart intercom.service")
    assert main_pid(bed) not in {0, before}
    one.deliver(two, "m-1")
    two.deliver(one, "m-2")
    # Where no broker runs, none is started.
    bed.as_user("alice", "systemctl --user stop intercom.service")
    bed.as_user("alice", "systemctl --user try-restart intercom.service")
    assert main_pid(bed) == 0
    assert listening(bed)


def test_reexecution_of_the_manager(bed: Any, door: Door) -> None:
    """An upgrade of systemd itself: the store goes through the manager's own state."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    before = kept(bed)
    bed.as_user("alice", "systemctl --user daemon-reexec")
    assert kept(bed) == before
    bed.as_user("alice", "systemctl --user restart intercom.service")
    one.deliver(two, "m-1")


def test_restart_of_the_socket_units(bed: Any, door: Door) -> None:
    """The service is restarted along with the sockets that it requires; its store, and so its sessions, stay."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two", LOCAL[1])
    bed.as_user("alice", "systemctl --user restart intercom.socket intercom-gateway.socket")
    assert listening(bed)
    one.deliver(two, "m-1")
    three = door.join("three", LOCAL[1])
    three.deliver(one, "m-2")


def test_watchdog(bed: Any, door: Door) -> None:
    bed.drop_in("alice", "intercom.service", "[Service]\nWatchdogSec=1s\n")
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    before = main_pid(bed)
    bed.as_user("alice", ["kill", "-STOP", str(before)])
    one.deliver(two, "m-1")
    two.deliver(one, "m-2")
    assert main_pid(bed) not in {0, before}
    assert bed.show("alice", "intercom.service", "NRestarts") == "1"
    assert any("Watchdog timeout" in entry["MESSAGE"] for entry in bed.journal("alice"))


def test_nothing_is_left_in_the_store(bed: Any, door: Door) -> None:
    bed.enable("alice")
    one = door.join("one")
    baseline, descriptors = kept(bed), opened(bed)
    assert baseline == 2
    for number in range(200):
        peer = door.connect()
        if number % 4:
            peer.register(f"s-{number}")
        door.hang_up(peer)
    until(lambda: kept(bed) == baseline, "the store as before")
    until(lambda: opened(bed) == descriptors, "the broker's descriptors as before")
    assert [session["id"] for session in one.list()] == ["one"]


def test_unknown_descriptors_are_removed(bed: Any, door: Door) -> None:
    without_mounts(bed)
    (bed.root / "usr/local/lib/stranger.py").write_text(STRANGER)
    command = "/usr/bin/python3 -I /usr/local/lib/stranger.py %t/agent-intercom/once"
    bed.drop_in("alice", "intercom.service", f"[Service]\nNotifyAccess=exec\nExecStartPost={command}\n")
    bed.enable("alice")
    one = door.join("one")
    until(lambda: kept(bed) == 3, "the stranger in the store")
    bed.as_user("alice", "systemctl --user restart intercom.service")
    one.health()
    until(lambda: kept(bed) == 2, "the stranger gone")
    assert [entry["INTERCOM_COUNT"] for entry in events(bed, "DESCRIPTOR_UNKNOWN")] == ["1"]
