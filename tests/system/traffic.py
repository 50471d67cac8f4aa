# SPDX-License-Identifier: Apache-2.0
"""Many sessions talking at once, with every frame accounted for."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from tests.system.wire import HANG, Peer, received, send


class Pair:
    """A session that sends to another without a pause, and that one, which acknowledges; ids tell the messages apart.

    Every frame is checked as it comes, so that nothing is accepted, brought or reported twice.
    """

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self.sender = sender
        self.receiver = receiver
        self.sent: list[str] = []
        self.got: list[str] = []
        self.accepted: dict[str, str] = {}
        self.delivered: list[str] = []
        self.failed: list[str] = []

    @property
    def broken(self) -> bool:
        return self.sender.ended or self.receiver.ended

    @property
    def outstanding(self) -> int:
        return len(self.sent) - len(self.delivered) - len(self.failed)

    def step(self) -> None:
        message_id = f"{self.sender.id}-{len(self.sent)}"
        self.sent.append(message_id)
        # A connection that was closed meanwhile is noticed by reading.
        self.sender.try_send(send(self.receiver.id, message_id))

    def read_receiver(self) -> None:
        for frame in self.receiver.arrived():
            assert frame["type"] == "message", frame
            message_id = frame["message"]["id"]
            assert message_id not in self.got[-1000:], f"brought twice: {message_id}"
            self.got.append(message_id)
            self.receiver.try_send(received(frame["deliveryId"]))

    def read_sender(self) -> None:
        for frame in self.sender.arrived():
            kind, message_id = frame["type"], frame["messageId"]
            if kind == "delivery_accepted":
                assert message_id not in self.accepted, f"accepted twice: {frame}"
                self.accepted[message_id] = frame["deliveryId"]
            elif kind == "delivered":
                assert self.accepted.get(message_id) == frame["deliveryId"], frame
                self.delivered.append(message_id)
            else:
                assert kind == "delivery_failed", frame
                assert frame["accepted"] is (message_id in self.accepted), frame
                assert frame["code"] in {"RECIPIENT_DISCONNECTED", "SESSION_NOT_FOUND"}, frame
                self.failed.append(message_id)

    def check(self) -> None:
        """Nothing lost: to be called when nothing is outstanding."""
        assert len(set(self.got)) == len(self.got)
        if not self.broken:
            assert self.sent == self.got == self.delivered and not self.failed
        elif self.sender.ended:
            # Whatever it was told is accepted has been brought all the same.
            assert set(self.accepted) <= set(self.got)
        else:
            assert sorted(self.delivered + self.failed) == sorted(self.sent)
            assert set(self.delivered) <= set(self.got)


class Traffic:
    """Pairs at work, each with at most `window` messages under way; `watched` are idle peers that must stay connected.

    A pair of which one side was closed sends no more.
    """

    def __init__(self, pairs: list[Pair], watched: list[Peer], window: int = 2) -> None:
        self.pairs = pairs
        self.peers = [*watched, *(peer for pair in pairs for peer in (pair.sender, pair.receiver))]
        self._window = window
        self._selector = selectors.DefaultSelector()
        for pair in pairs:
            self._selector.register(pair.sender.sock, selectors.EVENT_READ, (pair.sender, pair.read_sender))
            self._selector.register(pair.receiver.sock, selectors.EVENT_READ, (pair.receiver, pair.read_receiver))

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def run(self, done: Callable[[], bool], what: str, sending: bool = True) -> None:
        """Go on until `done`."""
        end = time.monotonic() + HANG
        while not done():
            assert time.monotonic() < end, f"never came: {what}"
            for pair in self.pairs if sending else ():
                while not pair.broken and pair.outstanding < self._window:
                    pair.step()
            for key, _ in self._selector.select(0.02):
                peer, read = key.data
                read()
                if peer.ended:
                    self._selector.unregister(peer.sock)

    def go_on(self, messages: int = 5) -> None:
        """Go on until every pair has seen through more messages than can have been under way."""
        marks = [len(pair.delivered) + messages for pair in self.pairs]
        pairs = list(zip(self.pairs, marks, strict=True))
        self.run(lambda: all(pair.broken or len(pair.delivered) >= mark for pair, mark in pairs), "traffic goes on")

    def drain(self) -> None:
        """Send no more and wait for what is under way; then nothing may be missing."""
        pairs = self.pairs
        self.run(
            lambda: all(pair.sender.ended or not pair.outstanding for pair in pairs), "all delivered", sending=False
        )
        # A receiver whose sender is gone still gets what was accepted.
        self.run(
            lambda: all(set(pair.accepted) <= set(pair.got) for pair in pairs if not pair.receiver.ended),
            "all brought",
            sending=False,
        )
        for pair in pairs:
            pair.check()

    def ended(self) -> int:
        """How many connections the broker has closed, idle ones included."""
        return sum(peer.hung_up() for peer in self.peers)
