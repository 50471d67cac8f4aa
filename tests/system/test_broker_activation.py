# SPDX-License-Identifier: Apache-2.0
"""systemd starts the broker because somebody connects, and it goes when nobody is there."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import (
    LOCAL,
    REMOTE,
    Door,
    configure,
    events,
    health,
    main_pid,
    register,
    states,
    until,
    without_mounts,
)

IDLE = {"intercom.socket": "active", "intercom-gateway.socket": "active", "intercom.service": "inactive"}


@pytest.fixture(params=["plain", "mounts"])
def door(bed: Any, request: pytest.FixtureRequest) -> Iterator[Door]:
    """A door to alice's sockets, once without the mount hardening and once with it."""
    if request.param == "plain":
        without_mounts(bed)
    with Door(bed) as opened:
        yield opened


@pytest.mark.parametrize("path", LOCAL)
def test_connecting_starts_it(bed: Any, door: Door, path: str) -> None:
    bed.enable("alice")
    assert states(bed) == IDLE
    peer = door.connect(path)
    peer.health()
    assert main_pid(bed) > 0
    peer.register("alice-1")
    assert [session["id"] for session in peer.list()] == ["alice-1"]


@pytest.mark.parametrize("path", REMOTE)
def test_connecting_to_the_gateway_starts_it(bed: Any, door: Door, path: str) -> None:
    bed.enable("alice")
    assert states(bed) == IDLE
    peer = door.connect(path)
    peer.health("remote")
    assert main_pid(bed) > 0
    peer.send({"type": "register", "protocol": "pi-intercom", "version": 4,
               "session": {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1}})  # fmt: skip
    refusal = peer.recv()
    assert refusal is not None and (refusal["type"], refusal["code"]) == ("error", "ACCESS_DENIED")
    peer.expect_end()
    # Its local side is as before.
    door.join("alice-1", LOCAL[1])


def test_cold_start_is_in_time_for_a_probe(bed: Any, door: Door) -> None:
    """Clients give a probe 1000 ms (contract section 1.5), and start a broker of their own when it is not answered."""
    bed.enable("alice")
    spent = []
    for _ in range(3):
        bed.as_user("alice", "systemctl --user stop intercom.service")
        began = time.monotonic()
        door.probe(LOCAL[1])
        spent.append(time.monotonic() - began)
    # Other tests may have the processors for a moment; a broker that is too slow is so every time.
    assert min(spent) < 1.0, spent


def test_idle_exit(bed: Any, door: Door) -> None:
    configure(bed, idle_exit_ms=300)
    bed.enable("alice")
    peer = door.join("alice-1")
    first = main_pid(bed)
    door.probe(LOCAL[1])
    assert main_pid(bed) == first
    door.hang_up(peer)
    until(lambda: states(bed) == IDLE, "idle exit after the last session")
    door.probe()
    until(lambda: states(bed) == IDLE, "idle exit of a broker that was only probed")
    assert [entry["INTERCOM_REASON"] for entry in events(bed, "BROKER_STOPPING")] == ["idle", "idle"]


def test_nobody_is_lost_to_idle_exit(bed: Any) -> None:
    """Hundreds of connections around the moment at which the broker goes: each is answered by it or by the next."""
    configure(bed, idle_exit_ms=100)
    bed.enable("alice")
    chance = random.Random(1)
    with Door(bed) as door:
        for _ in range(30):
            peers = []
            for number in range(12):
                peer = door.connect(chance.choice((*LOCAL, *REMOTE) if number % 2 else LOCAL))
                peer.send(health("r") if number % 2 else register(f"s-{number}"))
                peers.append(peer)
            for number, peer in enumerate(peers):
                answer = peer.recv()
                assert answer is not None and answer["type"] == ("health_ok" if number % 2 else "registered"), answer
            for peer in peers:
                door.hang_up(peer)
            time.sleep(chance.uniform(0.095, 0.115))
        until(lambda: states(bed) == IDLE, "idle exit")
    stops = events(bed, "BROKER_STOPPING")
    assert {entry["INTERCOM_REASON"] for entry in stops} == {"idle"}
    assert 8 <= len(stops) == len(events(bed, "BROKER_STARTED"))
