# SPDX-License-Identifier: Apache-2.0
"""What becomes of the memory file, and of time, when one broker follows another."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.wire import (
    Door,
    Peer,
    changed_module,
    configure,
    events,
    fresh,
    listening,
    main_pid,
    packed,
    received,
    register,
    send,
    until,
    without_mounts,
)

RESTART = "systemctl --user restart intercom.service"
KILL = "systemctl --user kill --kill-who=main --signal=KILL intercom.service"
REPLACED = pytest.mark.parametrize("replace", [RESTART, KILL], ids=["restart", "kill"])

SO_PEERPIDFD = 77


@pytest.fixture
def door(bed: Any) -> Iterator[Door]:
    without_mounts(bed)
    with Door(bed) as opened:
        yield opened


def kept(bed: Any) -> int:
    return int(bed.show("alice", "intercom.service", "NFileDescriptorStore"))


def spoil_memory(bed: Any) -> None:
    """Make the memory file one of a format that nobody knows (its second word)."""
    directory = f"/proc/{main_pid(bed)}/fd"
    for name in bed.run(["ls", directory]).stdout.split():
        if "memfd:agent-intercom" in bed.run(["readlink", f"{directory}/{name}"], check=False).stdout:
            with open(bed.root / f"{directory[1:]}/{name}", "r+b") as memory:
                memory.seek(8)
                memory.write(struct.pack("=Q", 999))
            return
    raise AssertionError("no memory file")


def test_unusable_memory_file(bed: Any, door: Door) -> None:
    """Everybody is hung up on and comes back; and what is kept from then on is kept as ever."""
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    spoil_memory(bed)
    bed.as_user("alice", KILL)
    one.expect_end()
    two.expect_end()
    assert [entry["INTERCOM_CODE"] for entry in events(bed, "MEMORY_FILE_REFUSED")] == ["MEMORY_VERSION"]
    one, two = door.join("one"), door.join("two")
    assert kept(bed) == 3
    for replace in (KILL, RESTART, KILL):
        bed.as_user("alice", replace)
        one.deliver(two, fresh("m"))
    assert len(events(bed, "MEMORY_FILE_REFUSED")) == 1
    assert listening(bed)


@REPLACED
def test_time_goes_on(bed: Any, door: Door, replace: str) -> None:
    """Deadlines are kept by whoever is there when they pass."""
    configure(bed, ack_timeout_ms=2000, ask_expiry_ms=2000)
    bed.enable("alice")
    one, two = door.join("one"), door.join("two")
    one.deliver(two, "ask-1", expectsReply=True)
    one.send(send("two", "m-1"))
    delivery = one.accepted("m-1")
    assert two.message()[0] == delivery
    bed.as_user("alice", replace)
    failed = one.recv()
    assert failed is not None
    assert (failed["type"], failed["messageId"], failed["code"]) == ("delivery_failed", "m-1", "DELIVERY_TIMEOUT")
    two.expect({"type": "ask_cancelled", "messageId": "ask-1", "fromSessionId": "one", "reason": "expired"})


@REPLACED
def test_idle_exit_after_a_replacement(bed: Any, door: Door, replace: str) -> None:
    configure(bed, idle_exit_ms=1000)
    bed.enable("alice")
    door.probe()
    bed.as_user("alice", replace)
    until(lambda: main_pid(bed) == 0 and kept(bed) == 0, "idle exit")
    assert listening(bed)


def test_a_connection_that_has_not_registered_survives_a_restart(bed: Any, door: Door) -> None:
    configure(bed, registration_timeout_ms=60_000)
    bed.enable("alice")
    newcomer, visitor = door.connect(), door.connect()
    visitor.health()
    frame = packed(register("newcomer"))
    newcomer.send_bytes(frame[:20])
    bed.as_user("alice", RESTART)
    visitor.health()
    newcomer.send_bytes(frame[20:])
    newcomer.expect({"type": "registered", "sessionId": "newcomer", "protocol": "pi-intercom", "version": 4})


def test_registering_while_brokers_are_killed(bed: Any, door: Door) -> None:
    """Whoever has heard `registered` stays, through every kill that follows, but for one that a kill itself meets."""
    bed.enable("alice")
    pauses = " ".join(f"0.{hundredths}" for hundredths in (30, 45, 38, 52, 33, 48, 41, 36))
    killer = bed.popen("alice", f"for s in {pauses}; do sleep $s; {KILL}; done; true")
    held: list[Peer] = []
    while killer.poll() is None or not held:
        peer = door.connect()
        session = fresh("s")
        peer.try_send(register(session))
        answer = peer.recv()
        if answer is None:
            door.hang_up(peer)
            continue
        assert answer["type"] == "registered", answer
        peer.id = session
        held.append(peer)
        if len(held) > 100:
            door.hang_up(held.pop(0))
    onlooker = door.join("onlooker")
    onlooker.list()
    lost = [peer for peer in held if peer.hung_up()]
    assert len(lost) <= int(bed.show("alice", "intercom.service", "NRestarts")) == 8
    here = [*(peer for peer in held if peer not in lost), onlooker]
    until(lambda: [s["id"] for s in onlooker.list()] == [peer.id for peer in here], "exactly those that are there")
    for peer in here:
        peer.health()


def peer_death_is_noticed(sock: socket.socket) -> bool:
    """Whether this kernel tells a server of its peer's process (Linux 6.5)."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return False
    os.close(fd)
    return True


@REPLACED
def test_the_death_of_a_client_is_noticed_by_the_next_broker(bed: Any, door: Door, replace: str) -> None:
    """Its connection is held open by somebody else, here by this test, so that only the process's end can tell."""
    bed.enable("alice")
    one = door.join("one")
    with Door(bed) as other:
        two = other.join("two")
        bed.as_user("alice", replace)
        assert [session["id"] for session in one.list()] == ["one", "two"]
        other.fall_shut()
        if peer_death_is_noticed(one.sock):
            until(lambda: [session["id"] for session in one.list()] == ["one"], "the session of the dead client gone")
            two.expect_end()
        else:
            two.health()


def test_a_paused_sender_and_its_reader_outlive_their_brokers(bed: Any, door: Door) -> None:
    """More waits for the reader than a broker takes, so that the sender is not read from, and brokers come and go."""
    configure(bed, ack_timeout_ms=600_000, stall_timeout_ms=60_000, write_timeout_ms=600_000, rate_capacity=100_000)
    bed.enable("alice")
    reader, sender = door.join("reader"), door.join("sender")
    texts = {f"m-{number}": chr(97 + number) * 200_000 for number in range(20)}
    frames = [send("reader", message_id, text) for message_id, text in texts.items()]
    writing = threading.Thread(target=sender.send, args=frames)
    writing.start()
    try:
        until(lambda: events(bed, "SENDER_PAUSED"), "the sender is paused")
        for replace in (KILL, RESTART, KILL):
            bed.as_user("alice", replace)
            assert not sender.hung_up() and not reader.hung_up()
        deliveries = {}
        for message_id, text in texts.items():
            delivery, message = reader.message()
            assert (message["id"], message["content"]) == (message_id, {"text": text})
            deliveries[message_id] = delivery
            reader.send(received(delivery))
    finally:
        writing.join(30)
    answers: dict[str, list[tuple[str, str]]] = {"delivery_accepted": [], "delivered": []}
    for _ in range(2 * len(texts)):
        answer = sender.recv()
        assert answer is not None
        answers[answer["type"]].append((answer["messageId"], answer["deliveryId"]))
    assert answers == {"delivery_accepted": list(deliveries.items()), "delivered": list(deliveries.items())}


POISON = "    content = message.content\n    text = content.text\n"


def test_a_fault_of_ours_costs_one_connection(bed: Any, door: Door) -> None:
    """The rules raise what nobody expected: one peer goes, no word of its is told, and the next broker goes on too."""
    name = "agent_intercom/intercom/router/messages.py"
    bed.enable("alice")
    raises = "    if content.text.startswith('poison'):\n        raise KeyError(content.text)\n"
    with changed_module(bed, name, POISON, POISON + raises):
        one, two, three = door.join("one"), door.join("two"), door.join("three")
        two.send(send("three", "pending"))
        delivery = two.accepted("pending")
        one.send(send("two", "m-1", "poison-canary"))
        one.expect_end()
        assert [session["id"] for session in two.list()] == ["two", "three"]
        bed.as_user("alice", KILL)
        assert three.message()[0] == delivery
        three.send(received(delivery))
        two.expect({"type": "delivered", "messageId": "pending", "deliveryId": delivery})
        one = door.join("one")
        one.deliver(two, "m-2")
    messages = [entry["MESSAGE"] for entry in bed.journal("alice")]
    assert not any("canary" in message or "Traceback" in message for message in messages)
    assert len([message for message in messages if "Internal error (kind=KeyError module=messages.py" in message]) == 2
    assert bed.show("alice", "intercom.service", "NRestarts") == "1"
