# SPDX-License-Identifier: Apache-2.0
"""What agents say stays between them, and other users stay out."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest

from tests.system.wire import (
    LOCAL,
    REMOTE,
    Door,
    Frame,
    Peer,
    configure,
    events,
    main_pid,
    received,
    register,
    send,
    without_mounts,
)

KEPT_WITH_AN_ASK = {"session", "message"}
"""Kinds of which the record of an open ask consists, so that the database holds them."""


LOGGED = {"SESSION_REGISTERED", "DELIVERY_FAILED", "FRAME_REFUSED", "PROTOCOL_ERROR", "RATE_LIMITED", "BROKER_RESTORED"}
"""What must have been told, or its silence shows nothing."""


class Canaries:
    """Strings that occur nowhere else, one for each use."""

    def __init__(self) -> None:
        self.tail = os.urandom(8).hex()
        self.kinds: set[str] = set()

    def __call__(self, kind: str) -> str:
        self.kinds.add(kind)
        return f"canary-{kind}-{self.tail}"

    def found(self, text: str | bytes) -> set[str]:
        """The kinds that occur in `text`."""
        data = text.encode() if isinstance(text, str) else text
        return {kind for kind in self.kinds if self(kind).encode() in data}


def answer(peer: Peer) -> Frame:
    frame = peer.recv()
    assert frame is not None
    return frame


def talk(door: Door, canary: Canaries) -> Peer:
    """Everything that a client can put a word into; one of the two sessions that talked, which has an open ask."""
    claims = {kind: canary(kind) for kind in ("name", "cwd", "model", "status", "runtimeInstanceId")}
    one, two = (door.connect().register(f"{canary('session')}-{n}", canary("scope"), **claims) for n in (1, 2))
    probe = door.connect()
    for peer, kind in ((one, "list"), (probe, "health")):
        peer.send({"type": kind, "requestId": canary("request")})
        assert answer(peer)["requestId"] == canary("request")
    one.send({"type": "presence", "status": canary("presence"), "name": canary("rename"), "model": canary("remodel")})

    asked = canary("message")
    attachment = {"type": "file", "name": canary("file"), "content": canary("content"), "language": canary("language")}
    content: Frame = {"text": canary("body"), "attachments": [attachment]}
    one.send(send(two.id, asked, content=content, expectsReply=True))
    delivery = one.accepted(asked)
    got, message = two.message()
    assert got == delivery and message["content"] == content
    two.send(received(delivery))
    one.expect({"type": "delivered", "messageId": asked, "deliveryId": delivery})
    one.send({"type": "defer_ask", "requestId": canary("request"), "messageId": asked})
    assert answer(one)["applied"] is True
    assert answer(two)["type"] == "ask_deferred"

    content = {"text": canary("body"), "control": {"type": canary("control"), "version": 1, "data": canary("data")}}
    two.send(send(one.id, asked, content=content))
    rejected = two.accepted(asked)
    assert one.message()[1]["content"] == content
    refusal = {"code": "CONFLICTING_MESSAGE_ID", "reason": canary("reason")}
    one.send({"type": "message_rejected", "deliveryId": rejected, **refusal})
    assert answer(two)["reason"] == canary("reason")

    for to, text in ((canary("target"), "x"), (two.id, canary("body") * 10_000)):
        one.send(send(to, f"{asked}-refused", text))
        assert answer(one)["accepted"] is False
    one.send(send(two.id, f"{asked}-late", canary("body")))
    one.accepted(f"{asked}-late")
    assert answer(one)["code"] == "DELIVERY_TIMEOUT"
    return one


def break_rules(door: Door, canary: Canaries) -> None:
    """The ways to be refused or cut off, each with a word of the peer's in it."""
    taken = register(f"{canary('session')}-1", canary("scope"), runtimeInstanceId=canary("thief"))
    for frame in (
        taken,
        taken | {"scopeId": canary("scope") + "!"},
        taken | {canary("key"): 1},
        taken | {"protocol": canary("protocol")},
        {"type": canary("type")},
        {"type": "access_control", "requestId": canary("request"), "action": "x", "adminToken": canary("token")},
    ):
        peer = door.connect()
        peer.send(frame)
        assert answer(peer)["type"] == "error"
        peer.expect_end()
    peer = door.connect(REMOTE[1])
    peer.send(register(canary("session")) | {"access": {"enrollmentToken": canary("token")}})
    assert answer(peer)["code"] == "ACCESS_DENIED"
    peer.expect_end()
    text = canary("garbage").encode()
    for length in (len(text), 1 << 21):
        peer = door.connect()
        peer.send_bytes(struct.pack(">I", length) + text)
        peer.expect_end()
    peer = door.connect().register(f"{canary('session')}-flood", canary("scope"))
    peer.send(*({"type": "list", "requestId": canary("request")} for _ in range(300)))
    while peer.recv() is not None:
        pass


@pytest.mark.parametrize("mounts", [False, True])
def test_no_word_leaves_the_memory(bed: Any, mounts: bool) -> None:
    if not mounts:
        without_mounts(bed)
    configure(bed, ack_timeout_ms=300)
    bed.enable("alice")
    canary = Canaries()
    with Door(bed) as door:
        one = talk(door, canary)
        break_rules(door, canary)
        for replacement in ("kill --kill-who=main --signal=KILL", "restart"):
            bed.as_user("alice", f"systemctl --user {replacement} intercom.service")
            one.list()
        pid = main_pid(bed)
        shown = {
            "journal of the user": bed.as_user("alice", "journalctl --user -o json --all").stdout,
            "journal": bed.run("journalctl --sync; journalctl -o export --all").stdout,
            "properties": bed.as_user("alice", "systemctl --user show '*'; systemctl --user show").stdout,
            "status": bed.as_user("alice", "systemctl --user status --full --lines=999 '*'", check=False).stdout,
            "command lines": bed.run("cat /proc/[0-9]*/cmdline /proc/[0-9]*/comm", check=False).stdout,
            "environment": bed.run(["cat", f"/proc/{pid}/environ"]).stdout,
            "descriptors": bed.run(f"ls -l /proc/{pid}/fd").stdout,
        }
        # The reading works, and there was something to read.
        assert {entry["INTERCOM_EVENT"] for entry in bed.journal("alice") if "INTERCOM_EVENT" in entry} >= LOGGED
        assert {name: canary.found(text) for name, text in shown.items() if canary.found(text)} == {}
        state = bed.root / "home/alice/.local/state/agent-intercom"
        stored = {file.name: canary.found(file.read_bytes()) for file in state.iterdir()}
        assert set().union(*stored.values()) == KEPT_WITH_AN_ASK, stored
        everywhere = ["/home/alice", "/run/user/4000", "/tmp", "/var/tmp", "/var/log", "/var/lib/systemd", "/dev/shm"]
        holding = bed.run(["grep", "-rlaF", "-D", "skip", canary.tail, *everywhere], check=False).stdout.splitlines()
        assert {os.path.dirname(file) for file in holding} == {"/home/alice/.local/state/agent-intercom"}


OPENED = ["/run/user/4000", "/run/user/4000/agent-intercom", "/home/alice", "/home/alice/.pi", "/home/alice/.pi/agent",
          "/home/alice/.pi/agent/intercom", *LOCAL, *REMOTE]  # fmt: skip


@pytest.mark.parametrize("mounts", [False, True])
def test_other_users_are_refused_by_the_kernel_check(bed: Any, mounts: bool) -> None:
    """Everything on the way is opened on purpose, so that nothing is left but the broker's own look at the peer."""
    if not mounts:
        without_mounts(bed)
    bed.enable("alice")
    with Door(bed) as alice, Door(bed, "bob") as bob, Door(bed, None) as root:
        one, two = alice.join("one"), alice.join("two")
        for path in (*LOCAL, *REMOTE):
            with pytest.raises(PermissionError):
                bob.connect(path)
        bed.run(["chmod", "0777", *OPENED])
        try:
            for door in (bob, root):
                for path in (*LOCAL, *REMOTE):
                    peer = door.connect(path)
                    peer.try_send({"type": "health", "requestId": "x"})
                    peer.expect_end()
        finally:
            bed.run(["chmod", "0755", "/home/alice"])
            bed.run(["chmod", "0700", "/run/user/4000"])
        one.deliver(two, "m-1")
    refused = events(bed, "PEER_REFUSED")
    uids = ["65534"] * 8 if mounts else ["4001"] * 4 + ["0"] * 4
    assert [entry["INTERCOM_UID"] for entry in refused] == uids
    assert [entry["INTERCOM_LISTENER"] for entry in refused] == ["local", "local", "remote", "remote"] * 2
    assert {entry["INTERCOM_CODE"] for entry in refused} == {"FOREIGN"}
