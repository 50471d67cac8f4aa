# SPDX-License-Identifier: Apache-2.0
"""A broker for a run that cannot be served: it accepts, says so, and is named in the status.

Exiting instead would make the socket unit fail and take the run's address away (design 4).
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from agent_intercom.host.journal import Event, Journal
from agent_intercom.host.notify import Notifier
from agent_intercom.orchestration import encode
from agent_intercom.orchestration.contract import HEX32, MAX_FRAME, Code, CommandStatus, Limits
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.framing import FrameDecoder, pack
from agent_intercom.wire.reactor import Connection, NullTape, Reactor

_TEXT: Final = "This run cannot be served; its unit's status says why"


class Refuser:
    """Answers `hello` and `control` with an error and ends every connection.

    `code` says why; see `RUN_REFUSED` in the journal's catalogue.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, code: str, limits: Limits, notifier: Notifier, journal: Journal
    ) -> None:
        self.stopped = asyncio.Event()
        self._loop = loop
        self._code = code
        self._limits = limits
        self._notifier = notifier
        self._journal = journal
        self.reason = ""
        self._decoders: dict[int, FrameDecoder] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._reactor = Reactor(loop, self, NullTape(), uid=os.getuid())
        self.listen = self._reactor.listen

    def ready(self) -> None:
        """Say that connections are refused."""
        self._notifier.ready(f"degraded: {self._code}; every request is refused")
        self._journal.emit(Event.RUN_REFUSED, code=self._code)

    def stop(self, reason: str) -> None:
        """End. `reason` is the name of a signal, or `retry`."""
        self.reason = self.reason or reason
        self._notifier.stopping()
        self._journal.emit(Event.BROKER_STOPPING, reason=reason)
        self.stopped.set()

    def close(self) -> None:
        """Let go of everything."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._reactor.close()
        self._notifier.close()
        self._journal.close()

    # What the reactor tells.

    def accepted(self, connection: Connection, now: Now) -> None:
        number = connection.number
        self._decoders[number] = FrameDecoder(MAX_FRAME)
        self._deadlines[number] = self._loop.call_later(self._limits.handshake_ms / 1000, self._give_up, connection)
        if len(self._decoders) > self._limits.unauthenticated:
            self._give_up(self._reactor.connections[next(iter(self._decoders))])

    def _give_up(self, connection: Connection) -> None:
        self._forget(connection.number)
        self._reactor.destroy(connection)

    def _forget(self, number: int) -> None:
        self._decoders.pop(number, None)
        deadline = self._deadlines.pop(number, None)
        if deadline is not None:
            deadline.cancel()

    def received(self, connection: Connection, data: memoryview, now: Now) -> None:
        decoder = self._decoders.get(connection.number)
        if decoder is None:
            return
        decoder.feed(data)
        try:
            payload = decoder.next()
            if payload is None:
                return
            answer = _answer(codec.decode(payload))
        except WireError:
            answer = None
        if answer is not None:
            connection.queue(pack(answer, MAX_FRAME))
        self._forget(connection.number)
        self._reactor.end(connection)

    def lost(self, connection: Connection, reason: str, now: Now) -> None:
        self._forget(connection.number)

    def congested(self, connection: Connection, now: Now) -> None:
        """One small answer never congests."""

    def drained(self, connection: Connection, now: Now) -> None:
        """One small answer never congests."""

    def refused(self, origin: str, uid: int | None) -> None:
        self._journal.emit(
            Event.PEER_REFUSED, uid=uid, listener=origin, code="UNREADABLE" if uid is None else "FOREIGN"
        )

    def out_of_descriptors(self, active: bool) -> None:
        """Connections are short-lived here."""

    def batch_done(self, now: Now) -> None:
        """Nothing is to be committed."""


def _answer(frame: object) -> bytes | None:
    match frame:
        case {"type": "control", "id": str(request)} if HEX32.fullmatch(request):
            return encode.control_response(request, CommandStatus.UNCERTAIN, False)
        case {"type": "hello", "id": str(request)} if HEX32.fullmatch(request):
            return encode.response(request, False, Code.BROKER_NOT_READY, _TEXT)
    return None
