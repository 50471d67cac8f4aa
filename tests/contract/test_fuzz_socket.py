# SPDX-License-Identifier: Apache-2.0
"""A few thousand generated frames over a socket: the broker lives, and a session beside them notices nothing."""

from __future__ import annotations

from random import Random

import pytest

from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import Peer, fresh_scope, info
from tests.fuzzing import Fuzzer, compact, packed

FRAMES = 1_200
IDS = ["a", "ab", "abc", "B", "\u00e9"]


@pytest.mark.parametrize("seed", range(3))
def test_bad_frames_never_disturb_another_session(start: StartBroker, seed: int) -> None:
    broker = start({})
    random = Random(1_000 + seed)
    fuzzer = Fuzzer(random, IDS, [fresh_scope(), fresh_scope()])
    bystander = broker.join("bystander", fresh_scope(), name="by")
    peers: list[Peer] = []
    for count in range(FRAMES):
        if len(peers) < 5:
            peer = broker.connect_remote() if random.randrange(20) == 0 else broker.connect()
            peer.flood(packed(compact(fuzzer.register(random.choice(IDS)))))
            peers.append(peer)
        peer = random.choice(peers)
        if count % 25 == 7:
            peer.flood(fuzzer.stream())
            end(peer, peers)
            continue
        data = packed(fuzzer.payload())
        cut = random.randrange(len(data))
        for piece in (data[:cut], data[cut:]):
            peer.flood(piece)
        if random.randrange(8) == 0:
            end(peer, peers)
        if count % 100 == 0:
            bystander.expect_silence()
    for peer in list(peers):
        end(peer, peers)
    bystander.expect_silence()
    assert bystander.roster() == [info("bystander", name="by")]
    assert broker.alive()


def end(peer: Peer, peers: list[Peer]) -> None:
    """Say that no more will come, read what did, which has to be whole frames of valid JSON, and close."""
    peers.remove(peer)
    peer.may_be_torn = True
    peer.shutdown_write()
    peer.drain()
    peer.close()


def test_peer_that_closes_without_reading(broker: Broker) -> None:
    """Answers to a connection that is gone are thrown away."""
    for _ in range(50):
        peer = broker.connect()
        peer.send(*[{"type": "health", "requestId": "r" * 1_000}] * 100)
        peer.close()
    broker.connect().expect_silence()
