# SPDX-License-Identifier: Apache-2.0
"""The asyncio client: one session that finds its way back to the broker. It never starts a broker.

    async with IntercomClient(path, name="alpha", cwd="/src", model="human") as client:
        reply = await client.ask("beta", "Is the build green?")

What the client adds to the frames: the server's user is checked before a byte is sent, another protocol or version ends
it for good, the scope is captured once, sends are kept below the broker's limits and repeated under their id after a
reconnect, redelivered messages are acknowledged and not shown twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Self

from agent_intercom.intercom import client_frames as frames
from agent_intercom.intercom.client_attempts import Attempts
from agent_intercom.intercom.client_errors import AskTimeout, ClientError, DeliveryFailed, SendTimeout
from agent_intercom.intercom.client_health import Health, health
from agent_intercom.intercom.client_link import Link
from agent_intercom.intercom.client_outgoing import ask_control, compose, now
from agent_intercom.intercom.client_policy import (
    DEFAULT_TIMEOUTS,
    FIRST_ATTEMPTS,
    FROM_ENVIRONMENT,
    PASSING,
    RECONNECT_DELAYS,
    STEADY,
    FromEnvironment,
    Timeouts,
    capture_scope,
    random_id,
    registration_error,
)
from agent_intercom.intercom.client_receiver import Receiver
from agent_intercom.intercom.client_state import Outgoing, fail
from agent_intercom.intercom.client_types import (
    Attachment,
    Connected,
    Control,
    Delivery,
    Disconnected,
    Event,
    Message,
    Reply,
    SessionInfo,
)
from agent_intercom.intercom.contract import DEFAULT_LIMITS, DeliveryCode

__all__ = [
    "FROM_ENVIRONMENT",
    "RECONNECT_DELAYS",
    "Health",
    "IntercomClient",
    "Timeouts",
    "capture_scope",
    "health",
    "random_id",
]


class IntercomClient:
    """A session at the broker that listens on the Unix socket `path`, or on the first of several that answers.

    `session_id` None lets the broker choose; the id is kept for the client's life. `scope` defaults to the environment;
    None or "" is unscoped. `pid`, `started_at` (Unix milliseconds) and `runtime_instance_id` let the same runtime
    replace its own earlier session (contract section 4.4). `auto_ack` False leaves acknowledging to `Message.ack`.
    `patient` True keeps trying when there is no broker at the start. `rate` is the broker's token bucket as (capacity,
    tokens per second), or None for a broker without one.

    Entering raises ClientError: `SCOPE_INVALID` and `INVALID_SESSION` before a socket is opened, `BROKER_UNREACHABLE`,
    `PATH_TOO_LONG`, `PEER_FOREIGN`, `INCOMPATIBLE`, `TIMEOUT`, or the code of the broker's refusal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        cwd: str,
        model: str,
        session_id: str | None = None,
        name: str | None = None,
        status: str | None = None,
        scope: str | None | FromEnvironment = FROM_ENVIRONMENT,
        pid: int | None = None,
        started_at: int | None = None,
        runtime_instance_id: str | None = None,
        auto_ack: bool = True,
        patient: bool = False,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        reconnect_delays: Sequence[float] = RECONNECT_DELAYS,
        rate: tuple[float, float] | None = (DEFAULT_LIMITS.rate_capacity, DEFAULT_LIMITS.rate_per_second),
        event_capacity: int = 1_024,
    ) -> None:
        self._scope = capture_scope(scope)
        if session_id is not None:
            frames.check_text(session_id, "session_id", 1, DEFAULT_LIMITS.target, "INVALID_SESSION")
            if not session_id.strip():
                raise ClientError("INVALID_SESSION", "session_id must not be blank", "session_id")
        self._claims: dict[str, Any] = {
            "cwd": cwd,
            "model": model,
            "pid": os.getpid() if pid is None else pid,
            "startedAt": now() if started_at is None else started_at,
            "runtimeInstanceId": runtime_instance_id or random_id(),
        }
        self._claim(name=name, status=status)
        self._timeouts = timeouts
        self._patient = patient
        paths = [path] if isinstance(path, str | os.PathLike) else path
        self._state = Receiver(session_id, auto_ack, event_capacity, self._on_registered)
        self._link = Link(paths, self._state.on_frame, self._on_lost, rate)
        self._state.attach(self._link)
        self._registered_claims: dict[str, Any] = {}
        self._lost: asyncio.Future[str | None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._attempts = Attempts(reconnect_delays)
        self._error: ClientError | None = None

    async def __aenter__(self) -> Self:
        self._ready = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(), name="intercom-client")
        try:
            await self._ready
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """The full session id, once registered."""
        if self._state.session_id is None:
            raise ClientError("CLOSED", "not registered yet", "session_id")
        return self._state.session_id

    @property
    def connected(self) -> bool:
        """Whether the session is registered at the moment."""
        return self._state.connected

    @property
    def broker_pid(self) -> int:
        """The process that called listen() on the socket, by the kernel: the user manager for a socket unit."""
        return self._link.peer.pid

    async def connect_now(self) -> None:
        """Return once registered. While the client waits to try again, it tries now instead.

        Raises ClientError: what that attempt failed with, or what ended the client.
        """
        self._raise_if_ended()
        if not self._state.connected:
            await self._attempts.next()

    async def list(self) -> list[SessionInfo]:
        """Every session of this scope, this one included. Raises ClientError `TIMEOUT` or what ended the client."""
        request_id = random_id()
        payload = frames.encode({"type": "list", "requestId": request_id})
        try:
            async with asyncio.timeout(self._timeouts.list):
                return list(await self._request(request_id, payload))
        except TimeoutError as error:
            raise ClientError("TIMEOUT", "the broker did not list its sessions in time") from error

    async def send(
        self,
        to: str,
        text: str,
        *,
        message_id: str | None = None,
        attachments: Sequence[Attachment] = (),
        reply_to: str | None = None,
        control: Control | None = None,
    ) -> Delivery:
        """Send a message and wait until the recipient acknowledged it.

        `to` is a session id, a name, or the start of an id (contract section 5). Raises DeliveryFailed, SendTimeout,
        ClientError `INVALID_MESSAGE` or `FRAME_TOO_LARGE` before anything is queued.
        """
        self._raise_if_ended()
        record = compose(to, text, message_id, attachments, reply_to, control, expects_reply=False)
        return await self._deliver(record)

    async def ask(
        self,
        to: str,
        text: str,
        *,
        timeout: float | None = 30.0,
        keep_open: bool = True,
        message_id: str | None = None,
        attachments: Sequence[Attachment] = (),
    ) -> Reply:
        """Send an ask and wait `timeout` seconds for its reply; None waits for ever.

        Raises AskTimeout after deferring the ask; its late reply arrives as an ordinary message. Without `keep_open`
        the ask is taken back instead, unless its reply comes before that. Raises AskCancelledError when the asked
        session leaves for good, and what `send` raises. Cancelling the task cancels the ask.
        """
        self._raise_if_ended()
        record = compose(to, text, message_id, attachments, expects_reply=True)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._state.replies[record.message_id] = reply
        delivered = False
        try:
            async with asyncio.timeout(timeout):
                delivered = await self._deliver_ask(record)
                return await reply
        except TimeoutError:
            if reply.done() and not reply.cancelled():
                return reply.result()
            if not keep_open:
                return await self._take_back(record.message_id, delivered)
            deferred = await self._defer_late(record.message_id)
            raise AskTimeout(record.message_id, delivered, deferred=deferred) from None
        except asyncio.CancelledError:
            self._link.post(ask_control("cancel_ask", random_id(), record.message_id))
            raise
        finally:
            self._state.replies.pop(record.message_id, None)

    async def reply(self, message: Message, text: str, *, attachments: Sequence[Attachment] = ()) -> Delivery:
        """Answer `message` and wait until the asker acknowledged the answer. Raises what `send` raises."""
        return await self.send(message.sender.id, text, reply_to=message.id, attachments=attachments)

    async def defer(self, message_id: str) -> bool:
        """Stop waiting for an ask of this session, which stays open. False: not applied, or no answer in time."""
        return await self._control_ask("defer_ask", message_id)

    async def cancel(self, message_id: str) -> bool:
        """Take an ask of this session back. False: not applied, or no answer in time."""
        return await self._control_ask("cancel_ask", message_id)

    async def presence(self, *, name: str | None = None, status: str | None = None, model: str | None = None) -> None:
        """Change what others see of this session. Raises ClientError `INVALID_SESSION`."""
        changes = self._claim(name=name, status=status, model=model)
        self._raise_if_ended()
        if self._state.connected:
            self._link.post(frames.encode({"type": "presence", **changes}))

    def events(self) -> AsyncIterator[Event]:
        """Events for one reader, until the client is closed. Raises what ended the client, after the last event."""
        return self._state.events

    async def unregister(self, *, preserve_asks: bool = False) -> None:
        """Leave and close. With `preserve_asks` open asks stay answerable, else the other sides see them cancelled."""
        if self._state.connected:
            self._link.post(frames.encode({"type": "unregister", "preserveAsks": preserve_asks}))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.close):
                    await self._link.flushed()
        await self.close()

    async def close(self) -> None:
        """Close the connection; open asks become deferred at the broker. Everything outstanding fails with `CLOSED`."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner
        self._end(ClientError("CLOSED", "the client was closed"), None)
        await self._link.close(self._timeouts.close)

    # Connection

    async def _run(self) -> None:
        resumed = False
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                code = await self._session(resumed)
            except ClientError as error:
                self._attempts.failed(error)
                if not self._try_again(error.code, resumed):
                    self._end(error, error)
                    return
            else:
                resumed = True
                self._state.events.put(Disconnected(code))
                if code is not None and code not in PASSING:
                    ended = ClientError(code, "the broker ended the session")
                    self._end(ended, ended)
                    return
                if loop.time() - began >= STEADY:
                    self._attempts.count = 0
            await self._attempts.pause()

    def _try_again(self, code: str, resumed: bool) -> bool:
        if resumed or self._patient:
            return code in PASSING
        return code == "CONNECTION_LOST" and self._attempts.count + 1 < FIRST_ATTEMPTS

    async def _session(self, resumed: bool) -> str | None:
        """One connection from beginning to end. Returns the code that it ended with."""
        loop = asyncio.get_running_loop()
        self._state.registering = loop.create_future()
        self._lost = loop.create_future()
        try:
            async with asyncio.timeout(self._timeouts.connect):
                await self._register(self._state.registering)
        except TimeoutError as error:
            raise ClientError("TIMEOUT", "what listens does not answer in time") from error
        finally:
            if not self._state.connected:
                self._link.drop()
        self._state.events.put(Connected(self.session_id, resumed))
        self._attempts.succeeded()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        return await self._lost

    async def _register(self, registering: asyncio.Future[None]) -> None:
        await self._link.open()
        self._registered_claims = dict(self._claims)
        claims = {**self._claims, "lastActivity": now()}
        self._link.post(frames.register_frame(claims=claims, session_id=self._state.session_id, scope=self._scope))
        await registering

    def _on_registered(self) -> None:
        """Post again what has no answer yet; nothing can come between `registered` and this."""
        changed = {
            key: self._claims[key]
            for key in ("name", "status", "model")
            if self._claims.get(key) != self._registered_claims.get(key)
        }
        if changed:
            self._link.post(frames.encode({"type": "presence", **changed}))
        for record in self._state.outbox.records():
            self._write(record)
        for payload, _ in self._state.requests.values():
            self._link.post(payload)

    def _on_lost(self, code: str | None) -> None:
        self._state.connected = False
        registering = self._state.registering
        if registering is not None:
            fail(registering, registration_error(code))
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(code)

    def _end(self, error: ClientError, for_reader: ClientError | None) -> None:
        """Fail whatever waits. The first error stays."""
        if self._error is None:
            self._error = error
        self._link.drop()
        self._state.end(self._error, for_reader)
        self._attempts.failed(self._error)
        if self._ready is not None:
            fail(self._ready, self._error)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    # Requests

    async def _request(self, request_id: str, payload: bytes) -> Any:
        self._raise_if_ended()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._state.requests[request_id] = (payload, future)
        try:
            if self._state.connected:
                self._link.post(payload)
            return await future
        finally:
            del self._state.requests[request_id]

    async def _defer_late(self, message_id: str) -> bool:
        self._state.replies.pop(message_id, None)
        with suppress(ClientError):
            return await self.defer(message_id)
        return False

    async def _take_back(self, message_id: str, delivered: bool) -> Reply:
        """Cancel an ask that nobody waits for any more. A reply that was there first is the result after all."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._state.replies[message_id] = reply
        cancelled = False
        with suppress(ClientError):
            cancelled = await self.cancel(message_id)
        if reply.done():
            return reply.result()
        raise AskTimeout(message_id, delivered, cancelled=cancelled)

    async def _control_ask(self, kind: str, message_id: str) -> bool:
        frames.check_text(message_id, "message_id", 1, DEFAULT_LIMITS.message_id, "INVALID_MESSAGE")
        request_id = random_id()
        try:
            async with asyncio.timeout(self._timeouts.ask_control):
                return bool(await self._request(request_id, ask_control(kind, request_id, message_id)))
        except TimeoutError:
            return False

    async def _deliver(self, record: Outgoing) -> Delivery:
        await self._state.outbox.admit(record)
        try:
            async with asyncio.timeout(self._timeouts.send):
                if self._state.connected:
                    self._write(record)
                return await record.future
        except TimeoutError as error:
            if record.future.done() and not record.future.cancelled():
                return record.future.result()
            raise SendTimeout(record.message_id, record.accepted) from error
        finally:
            self._state.outbox.remove(record)

    async def _deliver_ask(self, record: Outgoing) -> bool:
        """Whether delivery is certain. A repeated ask that is pending already may have arrived: its reply tells."""
        try:
            await self._deliver(record)
        except DeliveryFailed as error:
            if error.code != DeliveryCode.ASK_ALREADY_PENDING or record.attempts == 1:
                raise
            return False
        return True

    def _write(self, record: Outgoing) -> None:
        if not record.future.done():
            record.attempts += 1
            record.delivery_id = None
            self._link.post(record.payload)

    def _claim(self, **changes: str | None) -> dict[str, str]:
        given = {field: value for field, value in changes.items() if value is not None}
        frames.check_claims({**self._claims, **given})
        self._claims.update(given)
        return given
