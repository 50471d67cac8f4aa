# SPDX-License-Identifier: Apache-2.0
"""Restart and SIGKILL under load: nobody loses the connection, no accepted message is lost or brought twice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.traffic import Pair, Traffic
from tests.system.wire import (
    Door,
    changed_module,
    configure,
    events,
    fresh,
    listening,
    packed,
    received,
    send,
    without_mounts,
)

UNHURRIED = {
    "registration_timeout_ms": 60_000,
    "ack_timeout_ms": 600_000,
    "rate_capacity": 1_000_000,
    "rate_refill_per_second": 1_000_000,
}
PAIRS = 50
IDLE = 10
BULK = [character * 250_000 for character in "abcde"]
"""Messages that no socket buffer takes together."""

RESTART = ["systemctl", "--user", "restart", "intercom.service"]
KILL = ["systemctl", "--user", "kill", "--kill-who=main", "--signal=KILL", "intercom.service"]


class House:
    """A broker with a hundred busy sessions, and one of each kind that a restart could forget."""

    def __init__(self, bed: Any, door: Door, pairs: int = PAIRS) -> None:
        self.bed = bed
        self.idle = [door.join(fresh("idle")) for _ in range(IDLE)]
        self.asker, self.answerer = door.join(fresh("asker")), door.join(fresh("answerer"))
        self.writer, self.sleeper = door.join(fresh("writer")), door.join(fresh("sleeper"))
        self.stutterer = door.join(fresh("stutterer"))
        joined = [Pair(door.join(fresh("from")), door.join(fresh("to"))) for _ in range(pairs)]
        quiet = [*self.idle, self.asker, self.answerer, self.writer, self.sleeper, self.stutterer]
        self.traffic = Traffic(joined, quiet)
        self.begin()

    def begin(self) -> None:
        """Leave things half done: an ask answered by nobody, one not acknowledged, unread bytes, half a frame."""
        self.asker.send(send(self.answerer.id, "ask-1", "what?", expectsReply=True))
        delivery = self.asker.accepted("ask-1")
        assert self.answerer.message()[0] == delivery
        self.answerer.send(received(delivery))
        self.asker.expect({"type": "delivered", "messageId": "ask-1", "deliveryId": delivery})
        self.answerer.send(send(self.asker.id, "pending-1", "not acknowledged yet"))
        self.pending = self.answerer.accepted("pending-1")
        self.bulk = {}
        for number, text in enumerate(BULK):
            self.writer.send(send(self.sleeper.id, f"bulk-{number}", text))
            self.bulk[f"bulk-{number}"] = self.writer.accepted(f"bulk-{number}")
        self.split = packed({"type": "list", "requestId": "split"})
        self.stutterer.send_bytes(self.split[:3])

    def stutter(self, piece: int) -> None:
        """One more byte of the split frame."""
        self.stutterer.send_bytes(self.split[3 + piece : 4 + piece])

    def during(self, *command: str) -> None:
        """Run a command of alice's while everybody goes on, and see that everybody does so after it."""
        process: subprocess.Popen[str] = self.bed.popen("alice", command)
        self.traffic.run(lambda: process.poll() is not None, f"the end of {command}")
        assert process.returncode == 0, process.communicate()
        self.traffic.go_on()

    def finish(self, piece: int) -> None:
        """End what was left half done, and require that all of it ends well."""
        self.traffic.drain()
        if not self.stutterer.hung_up():
            self.stutterer.send_bytes(self.split[3 + piece :])
            answer = self.stutterer.recv()
            assert answer is not None and (answer["type"], answer["requestId"]) == ("sessions", "split")
        for message_id, text in zip(self.bulk, BULK, strict=True):
            delivery, message = self.sleeper.message()
            assert (delivery, message["id"]) == (self.bulk[message_id], message_id)
            assert message["content"] == {"text": text}
            self.sleeper.send(received(delivery))
            self.writer.expect({"type": "delivered", "messageId": message_id, "deliveryId": delivery})
        assert self.asker.message()[0] == self.pending
        self.asker.send(received(self.pending))
        self.answerer.expect({"type": "delivered", "messageId": "pending-1", "deliveryId": self.pending})
        self.answerer.deliver(self.asker, "answer-1", "that", replyTo="ask-1")
        for peer in self.idle:
            peer.health()
        here = {session["id"] for session in self.idle[0].list()}
        assert here == {peer.id for peer in self.traffic.peers if not peer.ended}


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    configure(bed, **UNHURRIED)
    with Door(bed) as opened:
        yield opened


def restored(bed: Any) -> list[tuple[int, int]]:
    """What each broker that went on says: connections kept and closed."""
    return [(int(e["INTERCOM_KEPT"]), int(e["INTERCOM_CLOSED"])) for e in events(bed, "BROKER_RESTORED")]


def test_restarts(bed: Any, door: Door) -> None:
    without_mounts(bed)
    bed.enable("alice")
    house = House(bed, door)
    with house.traffic as traffic:
        traffic.go_on()
        for turn in range(20):
            house.stutter(turn)
            house.during(*RESTART)
        assert traffic.ended() == 0
        house.finish(20)
        assert traffic.ended() == 0
    assert restored(bed) == [(len(traffic.peers), 0)] * 20
    assert listening(bed)


def test_kills(bed: Any, door: Door) -> None:
    without_mounts(bed)
    bed.enable("alice")
    house = House(bed, door)
    with house.traffic as traffic:
        traffic.go_on()
        for turn in range(10):
            before = traffic.ended()
            house.stutter(turn)
            house.during(*KILL)
            # The one that was being read or written at that moment, and only that.
            assert traffic.ended() - before <= 1
        assert not any(peer.hung_up() for peer in house.idle)
        house.finish(10)
        closed = traffic.ended()
    assert sum(gone for _, gone in restored(bed)) == closed
    assert bed.show("alice", "intercom.service", "NRestarts") == "10"
    assert listening(bed)


def test_kills_of_brokers_that_are_coming_up(bed: Any, door: Door) -> None:
    """However far the one before had come: it continued somebody else's state, and so does the next."""
    without_mounts(bed)
    bed.enable("alice")
    house = House(bed, door, 20)
    pauses = " ".join(f"0.{tenths:02}" for tenths in (2, 30, 15, 25, 40, 35, 20, 28, 45, 33, 22, 38, 26, 42, 18, 31))
    with house.traffic as traffic:
        traffic.go_on()
        house.during("sh", "-c", f"for s in {pauses}; do {' '.join(KILL)}; sleep $s; done; true")
        assert traffic.ended() <= int(bed.show("alice", "intercom.service", "NRestarts"))
        assert not any(peer.hung_up() for peer in house.idle)
        house.finish(0)
    assert listening(bed)


def test_upgrade_under_load(bed: Any, door: Door) -> None:
    """Another version finds no input of the old one's: those would have to be met by the rules of that."""
    without_mounts(bed)
    bed.enable("alice")
    house = House(bed, door)
    with house.traffic as traffic:
        traffic.go_on()
        for turn in range(3):
            with changed_module(bed, "agent_intercom/__init__.py", '__version__ = "', f'__version__ = "{turn}.'):
                house.during("systemctl", "--user", "try-restart", "intercom.service")
            assert traffic.ended() == 0
        house.finish(0)
    assert [gone for _, gone in restored(bed)] == [0] * 3
    assert not events(bed, "MEMORY_FILE_REFUSED")


def test_both_under_the_mount_hardening(bed: Any, door: Door) -> None:
    bed.enable("alice")
    house = House(bed, door)
    with house.traffic as traffic:
        house.during(*RESTART)
        assert traffic.ended() == 0
        house.during(*KILL)
        assert traffic.ended() <= 1
        house.finish(0)
    assert len(restored(bed)) == 2
    assert bed.show("alice", "intercom.service", "PrivateUsers") == "yes"
