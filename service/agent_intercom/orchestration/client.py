# SPDX-License-Identifier: Apache-2.0
"""The asyncio client of a run's broker: one-shot control commands, a worker's link, an observer's link.

    answer = await control(socket_path, token, "send", "implementer", message="Use the new schema.")

    async with WorkerLink(socket_path, "reviewer", token) as link:
        async for delivery in link:
            await link.acknowledge(delivery.id)

    async with ObserverLink(socket_path, token) as observer:
        async for frame in observer:
            ...

Whose socket it is is checked before a byte is written. Nothing here reconnects: a link is one connection, and when to
try again is the caller's choice (100 ms doubling to 5 s is what workers do). What happens to a request that was written
and not answered is never guessed: it is `broker_uncertain`.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from agent_intercom.orchestration import client_frames as frames
from agent_intercom.orchestration.client_line import Inbox, Line
from agent_intercom.orchestration.contract import MAX_MESSAGE_UNITS, Code, CommandStatus
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire import codec

BROKER_REJECTED: Final = "broker_rejected"
"""The broker answered that it does not take the command. A code of the client's, never on the wire."""

RECONNECT_FIRST: Final = 0.1
RECONNECT_LAST: Final = 5.0
TIMEOUT: Final = 10.0

_Incoming = TypeVar("_Incoming")


class ControlAnswer(NamedTuple):
    """The broker took the command. `duplicate`: it had done so before, and nothing happened again."""

    id: str
    status: str
    duplicate: bool


async def control(
    socket_path: str | os.PathLike[str],
    token: str,
    action: str,
    role: str,
    *,
    delivery: str | None = None,
    message: str | None = None,
    command_id: str | None = None,
    timeout: float = TIMEOUT,
) -> ControlAnswer:
    """Send one control command and wait for what the broker decided (section 3.2).

    `command_id` (32 hexadecimal digits) makes a retry the same command; None takes a random one. `timeout` in seconds
    bounds connecting and answering each. Raises Refusal: `broker_not_ready` where the command cannot have been taken,
    `broker_uncertain` where it may have been, `broker_rejected` where it was not, `orchestration_error` for an answer
    that is none, `unauthorized` for a listener of another user, `worker_context_too_large` and `invalid_protocol`
    before anything is sent.
    """
    if message is not None and codec.utf16_length(message.strip()) > MAX_MESSAGE_UNITS:
        text = f"the message is longer than the {MAX_MESSAGE_UNITS} UTF-16 units that a worker takes"
        raise Refusal(Code.CONTEXT_TOO_LARGE, text, "message")
    request_id = frames.random_id() if command_id is None else command_id
    payload = frames.encode(
        "control", token=token, id=request_id, action=action, role=role, delivery=delivery, message=message
    )
    inbox: Inbox[bytes] = Inbox()
    line = Line(socket_path, inbox.put, inbox.end)
    try:
        await line.connect(timeout)
        line.send(payload)
        async with asyncio.timeout(timeout):
            answer = await inbox.next()
    except TimeoutError as error:
        raise Refusal(Code.BROKER_UNCERTAIN, "Broker did not acknowledge the command in time") from error
    finally:
        await line.close()
    if answer is None:
        raise Refusal(Code.BROKER_UNCERTAIN, "Broker closed before acknowledging the command")
    response = frames.control_response(answer, request_id)
    if not response.success:
        code = Code.BROKER_UNCERTAIN if response.status == CommandStatus.UNCERTAIN else BROKER_REJECTED
        raise Refusal(code, f"Broker reported {response.status} command delivery", request=request_id)
    return ControlAnswer(response.id, response.status, response.duplicate)


class _Link(ABC, Generic[_Incoming]):
    """One connection, which iterates over what the broker sends. `timeout` is in seconds."""

    def __init__(self, socket_path: str | os.PathLike[str], timeout: float) -> None:
        self._timeout = timeout
        self._line = Line(socket_path, self._on_payload, self._on_end)
        self._incoming: Inbox[_Incoming] = Inbox()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Incoming:
        incoming = await self._incoming.next()
        if incoming is None:
            raise StopAsyncIteration
        return incoming

    @abstractmethod
    async def connect(self) -> None:
        """Connect and be admitted."""

    async def close(self) -> None:
        """Close the connection: iterating ends, and what became of requests that wait is uncertain."""
        await self._line.close()

    @abstractmethod
    def _on_payload(self, payload: bytes) -> None: ...

    @abstractmethod
    def _on_end(self, error: Refusal | None) -> None: ...


class WorkerLink(_Link[frames.Delivery]):
    """One authenticated connection of a role's worker (section 2).

    Requests are sent one after another and each waits for its answer; what the broker sends in between is kept for
    whoever iterates. Iterating ends with the connection, after everything that came before. A request raises Refusal:
    the broker's code and text where it refused, `broker_uncertain` where the connection ended or `timeout` seconds
    passed before the answer, `broker_not_ready` where there is no connection.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        role: str,
        token: str,
        *,
        generation: int = 1,
        timeout: float = TIMEOUT,
    ) -> None:
        super().__init__(socket_path, timeout)
        self._role = role
        self._token = token
        self._generation = generation
        self._turn = asyncio.Lock()
        self._waiting: tuple[str, asyncio.Future[frames.Response]] | None = None
        self._last_word: frames.Response | None = None

    @property
    def connected(self) -> bool:
        """Whether requests can be sent."""
        return self._line.open

    async def connect(self) -> None:
        """Connect and say hello. A broker that does not want this worker closes without a word: `unauthorized`."""
        await self._line.connect(self._timeout)
        try:
            await self._request("hello", generation=self._generation)
        except Refusal as error:
            lost = not self._line.open
            await self._line.close()
            if error.code == Code.BROKER_UNCERTAIN and lost:
                text = "Broker closed the connection instead of taking the worker"
                raise Refusal(Code.UNAUTHORIZED, text) from error
            raise
        except BaseException:
            await self._line.close()
            raise

    async def lifecycle(self, state: str, usage: Mapping[str, Any] | None = None) -> None:
        """Tell what the worker does: `idle`, `active`, `waiting` or `uncertain`."""
        await self._request("lifecycle", state=state, usage=usage)

    async def acknowledge(self, delivery_id: str, status: str = "accepted") -> None:
        """Acknowledge a delivery: `accepted`, `duplicate` for one that was there before, or `uncertain`."""
        await self._request("ack", delivery_id=delivery_id, status=status)

    async def report(
        self, assignment_id: str, report: Mapping[str, Any], usage: Mapping[str, Any] | None = None
    ) -> bool:
        """Report on an assignment. False: there was a report already, which stays as it is."""
        keys = {} if usage is None else {"usage": usage}
        answer = await self._request("report", assignment_id=assignment_id, report=report, **keys)
        return answer.status != "duplicate"

    async def progress(self, assignment_id: str, phase: str, usage: Mapping[str, Any] | None = None) -> None:
        """Tell that work goes on: `thinking`, `streaming`, `tool` or `reporting`."""
        await self._request("progress", assignment_id=assignment_id, phase=phase, usage=usage)

    async def guardrail(self, assignment_id: str, level: str, metric: str, observed: float, threshold: float) -> bool:
        """Tell that a threshold of the budget was crossed. False: that was known for this level."""
        answer = await self._request(
            "guardrail",
            assignment_id=assignment_id,
            level=level,
            metric=metric,
            observed=observed,
            threshold=threshold,
        )
        return answer.status != "duplicate"

    async def _request(self, kind: str, **keys: Any) -> frames.Response:
        async with self._turn:
            return await self._exchange(kind, keys)

    async def _exchange(self, kind: str, keys: Mapping[str, Any]) -> frames.Response:
        request_id = frames.random_id()
        payload = frames.encode(kind, role=self._role, token=self._token, id=request_id, **keys)
        answer: asyncio.Future[frames.Response] = asyncio.get_running_loop().create_future()
        self._waiting = (request_id, answer)
        try:
            self._line.send(payload)
            async with asyncio.timeout(self._timeout):
                response = await answer
        except TimeoutError as error:
            raise Refusal(Code.BROKER_UNCERTAIN, "Broker did not answer in time", request=request_id) from error
        finally:
            self._waiting = None
        if not response.success:
            raise Refusal(response.status, response.error or "Broker refused the request", request=request_id)
        return response

    def _on_payload(self, payload: bytes) -> None:
        frame = frames.worker_bound(payload)
        if isinstance(frame, frames.Response):
            self._settle(frame)
        elif frame is not None:
            self._incoming.put(frame)

    def _settle(self, response: frames.Response) -> None:
        if self._waiting is None or self._waiting[0] != response.id:
            # A refusal under an id of the broker's own is its last word on this connection.
            self._last_word = None if response.success else response
            return
        answer = self._waiting[1]
        if not answer.done():
            answer.set_result(response)

    def _on_end(self, error: Refusal | None) -> None:
        self._incoming.end(error)
        if self._waiting is None or self._waiting[1].done():
            return
        if self._last_word is not None:
            self._waiting[1].set_result(self._last_word)
        else:
            self._waiting[1].set_exception(error or Refusal(Code.BROKER_UNCERTAIN, "Broker closed before answering"))


class ObserverLink(_Link[frames.Observed]):
    """One connection of a read-only observer (section 3.3).

    Iterating gives, in the broker's order, the reports that it remembers, a snapshot, and whatever happens from then
    on; what happens meanwhile may come before the snapshot. It ends when the broker closes, and raises Refusal
    `orchestration_error` after the first frame that is not exactly what the contract has.
    """

    def __init__(self, socket_path: str | os.PathLike[str], token: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(socket_path, timeout)
        self._token = token
        self._hello: asyncio.Future[None] | None = None
        self._request_id = frames.random_id()

    async def connect(self) -> None:
        """Connect and be admitted. A broker that does not want this observer closes without a word: `unauthorized`."""
        self._hello = asyncio.get_running_loop().create_future()
        await self._line.connect(self._timeout)
        try:
            self._line.send(frames.encode("observe", token=self._token, id=self._request_id))
            async with asyncio.timeout(self._timeout):
                await self._hello
        except TimeoutError as error:
            await self._line.close()
            raise Refusal(Code.BROKER_NOT_READY, "Broker did not answer in time") from error
        except BaseException:
            await self._line.close()
            raise

    def _on_payload(self, payload: bytes) -> None:
        if self._hello is None or self._hello.done():
            self._incoming.put(frames.observed(payload))
            return
        frames.observing(payload, self._request_id)
        self._hello.set_result(None)

    def _on_end(self, error: Refusal | None) -> None:
        self._incoming.end(error)
        if self._hello is not None and not self._hello.done():
            text = "Broker closed the connection instead of taking the observer"
            self._hello.set_exception(error or Refusal(Code.UNAUTHORIZED, text))
            # It may never be waited for, when the broker closed before the first frame was written.
            self._hello.exception()
