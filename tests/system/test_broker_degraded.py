# SPDX-License-Identifier: Apache-2.0
"""A broker that cannot work as it should says so and goes on: exiting would take its own address away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.wire import Door, Peer, events, fresh, listening, send, until, without_mounts

STATE = "/home/alice/.local/state/agent-intercom"


NEWER = """
import sqlite3
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA user_version = 99")
database.close()
"""


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    with Door(bed) as opened:
        yield opened


@pytest.fixture
def disk(bed: Any) -> Iterator[Path]:
    """The state directory as a small file system of its own; where it is, seen from here."""
    bed.as_user("alice", ["mkdir", "-p", "-m", "700", STATE])
    bed.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700,uid=4000,gid=4000", "tmpfs", STATE])
    try:
        yield bed.root / STATE.lstrip("/")
    finally:
        bed.as_user("alice", "systemctl --user stop intercom.service", check=False)
        bed.run(["umount", "-l", STATE])


@pytest.fixture(params=["plain", "mounts"], autouse=True)
def hardening(bed: Any, request: pytest.FixtureRequest) -> None:
    if request.param == "plain":
        without_mounts(bed)


def status(bed: Any) -> str:
    text: str = bed.show("alice", "intercom.service", "StatusText")
    return text


def says(bed: Any, code: str) -> None:
    until(lambda: status(bed).endswith(f"; degraded: {code}"), f"{code} in the status, which is {status(bed)!r}")


def says_nothing(bed: Any) -> None:
    until(lambda: "degraded" not in status(bed), "a status without a word of trouble")


def ask(asker: Peer, answerer: Peer, message_id: str) -> None:
    """An ask that is delivered and stays open."""
    asker.deliver(answerer, message_id, "what?", expectsReply=True)


def refused(door: Door, answerer: Peer) -> None:
    """An ask that nobody could answer after a crash is not accepted, and the sender is told why."""
    asker = door.join()
    message_id = fresh("ask")
    asker.send(send(answerer.id, message_id, "what?", expectsReply=True))
    frame = asker.recv()
    assert frame is not None and frame["type"] == "delivery_failed", frame
    assert (frame["messageId"], frame["accepted"], frame["code"]) == (message_id, False, "TOO_MANY_PENDING_ASKS")


def reply(answerer: Peer, asker: Peer, asked: str) -> None:
    answerer.deliver(asker, fresh("reply"), "that", replyTo=asked)


def codes(bed: Any) -> list[str]:
    return [entry["INTERCOM_CODE"] for entry in events(bed, "STORE_DEGRADED")]


def again(bed: Any, door: Door, *peers: Peer) -> list[Peer]:
    """Stop the service for good, so that nothing but the database is left; the same sessions on new connections."""
    bed.as_user("alice", "systemctl --user stop intercom.service")
    for peer in peers:
        assert peer.recv() is None
    return [door.join(peer.id) for peer in peers]


def test_disk_full(bed: Any, door: Door, disk: Path) -> None:
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    ask(one, two, "ask-1")
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as writer:
        while writer.write(b"x" * 512):
            pass
    refused(door, two)
    says(bed, "STATE_FULL")
    one.deliver(two, "m-1")
    # Across restarts too, while the disk is still full.
    bed.as_user("alice", "systemctl --user restart intercom.service")
    one.deliver(two, "m-2")
    refused(door, two)
    reply(two, one, "ask-1")
    says(bed, "STATE_FULL")
    assert set(codes(bed)) == {"STATE_FULL"}
    filler.unlink()
    ask(one, two, "ask-2")
    says_nothing(bed)
    assert len(events(bed, "STORE_RECOVERED")) == 1
    assert listening(bed)
    # What was written afterwards is what counts: the answered ask is gone, the open one is not.
    one, two = again(bed, door, one, two)
    two.send(send("one", "reply-1", "late", replyTo="ask-1"))
    answer = two.recv()
    assert answer is not None and answer["code"] == "INVALID_REPLY_TARGET"
    reply(two, one, "ask-2")


def test_disk_full_from_the_start(bed: Any, door: Door, disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as writer:
        while writer.write(b"x" * 512):
            pass
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    one.deliver(two, "m-1")
    refused(door, two)
    says(bed, "STATE_FULL")
    (disk / "filler").unlink()
    ask(one, two, "ask-1")
    says_nothing(bed)
    assert listening(bed)


def test_read_only_state(bed: Any, door: Door, disk: Path) -> None:
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    ask(one, two, "ask-1")
    bed.as_user("alice", "systemctl --user stop intercom.service")
    bed.run(["mount", "-o", "remount,ro", STATE])
    one, two = again(bed, door, one, two)
    one.deliver(two, "m-1")
    says(bed, "STATE_READ_ONLY")
    refused(door, two)
    # What an earlier broker stored can be read all the same.
    reply(two, one, "ask-1")
    bed.run(["mount", "-o", "remount,rw", STATE])
    # With mounts of its own a service sees that when it starts.
    bed.as_user("alice", "systemctl --user restart intercom.service")
    ask(one, two, "ask-2")
    says_nothing(bed)
    assert set(codes(bed)) == {"STATE_READ_ONLY"}
    assert listening(bed)


def test_damaged_database(bed: Any, door: Door) -> None:
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    bed.as_user("alice", "systemctl --user stop intercom.service")
    database = bed.root / STATE.lstrip("/") / "intercom.db"
    damaged = b"not a database" * 1000
    database.write_bytes(damaged)
    one, two = again(bed, door, one, two)
    says(bed, "DATABASE_DAMAGED")
    one.deliver(two, "m-1")
    ask(one, two, "ask-1")
    (aside,) = database.parent.glob("intercom.db.damaged-*")
    assert aside.read_bytes() == damaged
    one, two = again(bed, door, one, two)
    reply(two, one, "ask-1")
    says_nothing(bed)
    assert listening(bed)


def test_newer_database(bed: Any, door: Door) -> None:
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    ask(one, two, "ask-1")
    bed.as_user("alice", "systemctl --user stop intercom.service")
    database = bed.root / STATE.lstrip("/") / "intercom.db"
    bed.python("alice", NEWER, f"{STATE}/intercom.db")
    content = database.read_bytes()
    one, two = again(bed, door, one, two)
    one.deliver(two, "m-1")
    says(bed, "DATABASE_NEWER")
    refused(door, two)
    reply(two, one, "ask-1")
    assert database.read_bytes() == content
    assert codes(bed) == ["DATABASE_NEWER"]
    assert listening(bed)


def test_too_few_descriptors(bed: Any, door: Door) -> None:
    bed.drop_in("alice", "intercom.service", "[Service]\nLimitNOFILE=40\n")
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    crowd = [door.connect() for _ in range(60)]
    for peer in crowd:
        peer.send({"type": "register", "protocol": "pi-intercom", "version": 4, "sessionId": fresh("s"),
                   "session": {"cwd": "/", "model": "m", "pid": 1, "startedAt": 1, "lastActivity": 1}})  # fmt: skip
    says(bed, "OUT_OF_DESCRIPTORS")
    one.deliver(two, "m-1")
    ask(one, two, "ask-1")
    bed.as_user("alice", "systemctl --user restart intercom.service")
    two.deliver(one, "m-2")
    reply(two, one, "ask-1")
    # As one goes the next one's turn comes; nobody is turned away.
    for peer in crowd:
        answer = peer.recv()
        assert answer is not None and answer["type"] == "registered"
        door.hang_up(peer)
    says_nothing(bed)
    assert len(events(bed, "OUT_OF_DESCRIPTORS")) >= 1
    assert listening(bed)
