# SPDX-License-Identifier: Apache-2.0
"""Sessions: registering, replacing, leaving, presence, lists, targets (contract sections 2.4, 2.5, 4 and 5)."""

from __future__ import annotations

from typing import Any

from agent_intercom.intercom import contract
from agent_intercom.intercom.contract import DeliveryCode, ErrorCode, Text
from agent_intercom.intercom.router import encode
from agent_intercom.intercom.router.asks import Asks, Refusal
from agent_intercom.intercom.router.book import Book
from agent_intercom.intercom.router.deliveries import Deliveries
from agent_intercom.intercom.router.effects import Bound, Unbound
from agent_intercom.intercom.router.registration import (
    MAX_SHOWN_BYTES,
    Refused,
    public_info,
    read_envelope,
    read_session_id,
)
from agent_intercom.intercom.router.state import NEVER, Link, Session
from agent_intercom.wire.clock import Now


class Sessions:
    """Who is registered, and who sees whom."""

    __slots__ = ("_asks", "_book", "_deliveries")

    def __init__(self, book: Book, asks: Asks, deliveries: Deliveries) -> None:
        self._book = book
        self._asks = asks
        self._deliveries = deliveries

    def register(self, link: Link, frame: dict[str, Any], fresh_id: str, now: Now) -> None:
        """Bind the connection to a session id. Raises `Refused`; then nothing has changed.

        `fresh_id` is the id that the session gets if it does not bring one.
        """
        book = self._book
        scope, claims = read_envelope(frame, book.limits)
        if link.session is not None:
            raise Refused(ErrorCode.INVALID_REQUEST, Text.DUPLICATE_REGISTER)
        session_id = read_session_id(frame) or fresh_id
        incumbent = book.sessions.get(session_id)
        if incumbent is None and len(book.sessions) >= book.limits.sessions:
            raise Refused(ErrorCode.TOO_MANY_SESSIONS, Text.TOO_MANY_SESSIONS)
        if link.origin != contract.ORIGIN_LOCAL:
            given = type(frame.get("access")) is dict
            refusal = Text.REMOTE_REGISTRATION_REJECTED if given else Text.REMOTE_REGISTRATION_MISSING
            raise Refused(ErrorCode.ACCESS_DENIED, refusal)
        if incumbent is not None and not _same_runtime(incumbent, claims):
            raise Refused(ErrorCode.SESSION_ID_IN_USE, contract.session_in_use(session_id))
        session = self._session(link, session_id, scope, claims, now)
        if len(session.shown) > MAX_SHOWN_BYTES:
            raise Refused(ErrorCode.INVALID_REQUEST, Text.INVALID_REGISTER)
        if incumbent is not None:
            self._step_aside(incumbent, now)
        self._bind(link, session)
        if incumbent is not None:
            book.note("SESSION_REPLACED", session=session_id, origin=link.origin)
            book.finish(incumbent.number)

    def _session(self, link: Link, session_id: str, scope: str | None, claims: dict[str, Any], now: Now) -> Session:
        info = public_info(session_id, claims, link.origin)
        name = claims.get("name")
        return Session(
            id=session_id,
            number=link.number,
            scope=scope,
            runtime=claims.get("runtimeInstanceId"),
            info=info,
            shown=encode.quote(info),
            folded_name=None if name is None else name.lower(),
            broadcast_at=now.mono,
        )

    def _step_aside(self, incumbent: Session, now: Now) -> None:
        """The first three steps of a replacement (contract section 4.4)."""
        self._book.tell_audience(incumbent, encode.session_left(incumbent.id))
        self._deliveries.fail_for(incumbent.number, now, hears=True)
        self._asks.leave(incumbent.id)

    def _bind(self, link: Link, session: Session) -> None:
        book = self._book
        link.session = session.id
        book.unregistered.pop(link.number, None)
        book.sessions[session.id] = session
        book.idle_at = NEVER
        book.effects.append(Bound(link.number))
        book.write(link.number, encode.registered(session.id))
        book.tell_audience(session, encode.session_joined(session.shown))
        book.note("SESSION_REGISTERED", session=session.id, origin=link.origin)

    def unregister(self, link: Link, session: Session, preserve_asks: bool, now: Now) -> None:
        """The session leaves and its connection stays (contract section 2.4)."""
        self._remove(session, now)
        if preserve_asks:
            self._asks.leave(session.id)
        else:
            self._asks.withdraw(session.id)
        link.session = None
        link.register_by = now.mono + self._book.limits.registration_ms
        self._book.unregistered[link.number] = link
        self._book.wake(link.register_by)
        self._book.effects.append(Unbound(link.number))
        self._book.note("SESSION_LEFT", session=session.id, reason="unregistered")
        self._book.arm_idle(now)

    def leave(self, session: Session, reason: str, now: Now) -> None:
        """The session's connection is gone (contract section 2.5, last line)."""
        self._remove(session, now)
        self._asks.leave(session.id)
        self._book.note("SESSION_LEFT", session=session.id, reason=reason)
        self._book.arm_idle(now)

    def _remove(self, session: Session, now: Now) -> None:
        self._book.tell_audience(session, encode.session_left(session.id))
        del self._book.sessions[session.id]
        self._deliveries.fail_for(session.number, now, hears=False)

    def list(self, session: Session, request_id: str) -> bool:
        """Answer `list`: all of the scope, itself included. False when not even the request id fits a frame.

        Where long claims would push the answer over the frame size, the optional status texts are left out, then the
        latest registrations: a shorter list is better than one that ends the reader's connection.
        """
        book = self._book
        visible = [other for other in book.sessions.values() if other.scope == session.scope]
        shown = [other.shown for other in visible]
        quoted = encode.quote(request_id)
        payload = encode.sessions(quoted, shown)
        if len(payload) > contract.MAX_FRAME:
            shown = [encode.quote({k: v for k, v in other.info.items() if k != "status"}) for other in visible]
            room = contract.MAX_FRAME - len(encode.sessions(quoted, []))
            if room < 0:
                return False
            payload = encode.sessions(quoted, _that_fit(shown, room))
            book.note("LIST_SHORTENED", session=session.id)
        book.write(session.number, payload)
        return True

    def presence(self, session: Session, changes: dict[str, str], now: Now) -> Session | None:
        """Apply `name`, `status` and `model`; tell the scope unless nothing changed within the last second.

        Returns one of those who were told and do not keep up with reading. Raises `Refused`; then nothing has changed.
        """
        info = session.info
        changed = any(info.get(key) != value for key, value in changes.items())
        after = {**info, **changes, "lastActivity": now.wall}
        shown = encode.quote(after)
        if len(shown) > MAX_SHOWN_BYTES:
            raise Refused(ErrorCode.INVALID_REQUEST, f"Invalid presence {next(iter(changes))}")
        session.info = after
        session.shown = shown
        if "name" in changes:
            session.folded_name = changes["name"].lower()
        if changed or now.mono - session.broadcast_at >= self._book.limits.presence_ms:
            session.broadcast_at = now.mono
            self._book.tell_audience(session, encode.presence_update(session.shown))
            return self._slowest(session)
        return None

    def _slowest(self, subject: Session) -> Session | None:
        """Who of the subject's audience has too many bytes waiting, if anybody."""
        return next((other for other in self._book.audience(subject) if other.slow_since >= 0), None)

    def resolve(self, sender: Session, target: str) -> Session | Refusal:
        """Exact id anywhere, then name, then id prefix within the sender's scope (contract section 5)."""
        sessions = self._book.sessions
        exact = sessions.get(target)
        if exact is not None:
            return exact
        visible = [session for session in sessions.values() if session.scope == sender.scope]
        folded = target.lower()
        found = [session for session in visible if session.folded_name == folded]
        if not found:
            found = [session for session in visible if session.id.startswith(target)]
        if len(found) == 1:
            return found[0]
        if found:
            return DeliveryCode.AMBIGUOUS_TARGET, contract.ambiguous(target)
        return DeliveryCode.SESSION_NOT_FOUND, Text.NOT_FOUND


def _same_runtime(incumbent: Session, claims: dict[str, Any]) -> bool:
    """Whether the newcomer is the incumbent's own process coming back (contract section 4.4)."""
    if incumbent.info["origin"] != contract.ORIGIN_LOCAL:
        return False
    runtime = claims.get("runtimeInstanceId")
    if incumbent.runtime is not None or runtime is not None:
        return incumbent.runtime == runtime
    return bool(incumbent.info["pid"] == claims["pid"] and incumbent.info["startedAt"] == claims["startedAt"])


def _that_fit(shown: list[bytes], room: int) -> list[bytes]:
    fitting: list[bytes] = []
    for entry in shown:
        room -= len(entry) + 1
        if room < 0:
            break
        fitting.append(entry)
    return fitting
