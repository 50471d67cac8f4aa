# SPDX-License-Identifier: Apache-2.0
"""Those who are connected to the report socket: what they say becomes events, and an answer finds who waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from agent_intercom.orchestration.contract import Code
from agent_intercom.wire.errors import WireError
from agent_intercom.workers.bridge import events, line

MAX_CLIENTS: Final = 32
"""Who may be connected to the report socket at once; one more is turned away."""

_MAX_FOREIGN: Final = 4
"""How many of them may be none of the bridge's own, who are told so."""

_FOREIGN: Final = {
    "ok": False,
    "code": Code.UNAUTHORIZED,
    "text": "that is the bridge of another worker: only what runs in its unit reports by way of it",
    "field": "",
    "by": "bridge",
}


class Reception:
    """The report socket. `watch` and `unwatch` are a selector's, `tell` takes what has happened.

    Raises OSError where nobody can listen at `address`.
    """

    def __init__(
        self,
        address: str,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        unwatch: Callable[[socket.socket], object],
        tell: Callable[[events.Event], None],
    ) -> None:
        self._address = address
        self._listener = line.listen(address)
        self._watch, self._unwatch, self._tell = watch, unwatch, tell
        self._clients: set[line.Client] = set()
        self._waiting = line.Waiting()
        watch(self._listener, self._come)

    def reply(self, effect: events.Reply) -> None:
        """Answer whoever waits, if anybody does."""
        one = self._waiting.redeem(effect.ticket)
        if one is not None:
            self._answer(one, effect.answer)

    def close(self) -> None:
        """Listen no more, and leave everybody."""
        for each in self._clients:
            each.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._address)

    def _come(self) -> None:
        found = line.accepted(self._listener)
        if found is None:
            return
        foreign = 0 if found.ours else sum(not each.ours for each in self._clients)
        if len(self._clients) >= MAX_CLIENTS or foreign >= _MAX_FOREIGN:
            found.close()
            return
        self._clients.add(found)
        self._watch(found.socket, lambda: self._listen_to(found))

    def _listen_to(self, one: line.Client) -> None:
        try:
            for request in one.requests():
                self._take(one, request)
        except (OSError, EOFError, ValueError, WireError):
            self._leave(one)

    def _take(self, one: line.Client, request: dict[str, Any]) -> None:
        if not one.ours:
            self._answer(one, _FOREIGN)
            return
        ticket, about = self._waiting.issue(one), request.get("assignment_id")
        about = about if isinstance(about, str) else None
        if request.get("request") == "report":
            self._tell(events.Reporting(ticket, about, request.get("report"), request.get("usage")))
        elif request.get("request") == "progress":
            self._tell(events.Progressing(ticket, about, request.get("phase"), request.get("usage")))
        else:
            raise ValueError("no request of a command")

    def _answer(self, one: line.Client, answer: dict[str, Any]) -> None:
        try:
            one.answer(answer)
        except OSError:
            self._leave(one)

    def _leave(self, one: line.Client) -> None:
        if one in self._clients:
            self._clients.remove(one)
            self._unwatch(one.socket)
            one.close()
            for ticket in self._waiting.leave(one):
                self._tell(events.Left(ticket))
