# SPDX-License-Identifier: Apache-2.0
"""What the worker service is asked for: requests as they come over the socket, and their answers.

Every action of the managed-workers spec, section 1.2, is one method here. Its parameters are a struct, which refuses
what it does not know; its result is JSON. Nothing is decided here: that is the registry's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT, SCOPE_PATTERN
from agent_intercom.wire import codec
from agent_intercom.wire.errors import WireError
from agent_intercom.workers import contract
from agent_intercom.workers.actions import Actions
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.listening import Origin, Peer
from agent_intercom.workers.refusals import Refusals
from agent_intercom.workers.terms import Caller

if TYPE_CHECKING:
    from agent_intercom.workers.service import Service

_FIELD: Final = re.compile(r" - at `\$?\.?([A-Za-z0-9_.\[\]]*)`$")
_EXPECTED: Final = re.compile(r"Expected (`[a-z |]+`(?: of length)?(?: [<>]=? [0-9]+)?)")
_NAMED: Final = re.compile(r"field `([A-Za-z0-9_]+)`")
_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)

_BYTES: Final = frozenset({"command", "directory", "environment", "writable"})
"""Parameters that are what the kernel is given, which need not be text: Python has such bytes as lone surrogates."""

_WORDS: Final = frozenset({"role", "harness", "key"})
"""Parameters that are stored and shown as they are."""

_WORD_LENGTH: Final = 80


class Claim(msgspec.Struct, forbid_unknown_fields=True):
    """Who somebody says to be. What the kernel says is counted instead wherever it says anything."""

    scope: str | None = None
    session: str | None = None
    override: bool = False


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request. `id` comes back in its answer."""

    version: int
    id: Annotated[str, msgspec.Meta(max_length=128)]
    action: str
    params: dict[str, Any]
    caller: Claim = msgspec.field(default_factory=Claim)


class Requests:
    """Answers requests. `service` does what they ask for, unless its registry is `unusable`.

    `refusals` tells of what was not done.
    """

    def __init__(self, service: Service, library: str, refusals: Refusals) -> None:
        self._service = service
        self._actions = Actions(service, library)
        self._refusals = refusals

    async def answer(self, payload: bytes, origin: Origin, peer: Peer) -> bytes:
        """The answer to one request. Raises nothing that a request could cause."""
        number, action = "", ""
        try:
            request = _decoded(payload)
            # Some are waited for, for long, and what came may be longer than what it says.
            del payload
            number, action = request.id, request.action
            if request.version != contract.PROTOCOL_VERSION:
                text = f"the worker service speaks version {contract.PROTOCOL_VERSION}: restart it after an upgrade"
                raise WorkerError(Code.INVALID, text, "version")
            result = await self._carry_out(request, origin, peer)
            answer = codec.encode({"version": contract.PROTOCOL_VERSION, "id": number, "ok": True, "result": result})
            if len(answer) > contract.MAX_FRAME:
                raise WorkerError(Code.LIMIT, "it is done, but the answer is longer than an answer may be", "answer")
            return answer
        except WorkerError as error:
            known = action if action in self._actions.known else "unknown"
            inside = origin.worker is not None
            self._refusals.tell(known, str(error.code), inside)
            fault = {"code": str(error.code), "text": error.text, "field": error.field}
            return codec.encode({"version": contract.PROTOCOL_VERSION, "id": number, "ok": False, "error": fault})

    async def _carry_out(self, request: Request, origin: Origin, peer: Peer) -> dict[str, Any]:
        found = self._actions.known.get(request.action)
        if found is None:
            raise WorkerError(Code.INVALID, "there is no such action", "action")
        kind, method, changes = found
        unusable = self._service.unusable
        # Of whoever is inside a worker nobody knows then what it may be told.
        if unusable is not None and (request.action != "health" or origin.worker is not None):
            raise WorkerError(Code.STORE, f"the registry of workers cannot be used: {unusable.text}", "store")
        caller = self._caller(request.caller, origin)
        params = _params(request.params, kind)
        _check(request.params)
        if changes:
            self._service.ready()
        if request.action == "wait":
            return await _while_there(method(caller, params), peer)
        result: dict[str, Any] = await method(caller, params)
        return result

    def _caller(self, claim: Claim, origin: Origin) -> Caller:
        if origin.worker is not None:
            return self._actions.inside(origin.worker)
        scope = claim.scope or None
        if scope is not None and SCOPE_PATTERN.fullmatch(scope) is None:
            raise WorkerError(Code.INVALID, "the scope id is not valid", SCOPE_ENVIRONMENT)
        session = claim.session or None
        if session is not None and _SESSION.fullmatch(session) is None:
            raise WorkerError(Code.INVALID, "the session id is not valid", "session")
        return Caller(scope=scope, session=session, override=claim.override)


async def _while_there(work: Awaitable[dict[str, Any]], peer: Peer) -> dict[str, Any]:
    """Wait for something, as long as whoever asked for it does."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(peer.gone.wait())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else {}
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


def _decoded(payload: bytes) -> Request:
    try:
        return codec.convert(codec.decode(payload), Request)
    except WireError as error:
        raise WorkerError(Code.INVALID, "a request is one JSON object", "") from error
    except msgspec.ValidationError as error:
        raise _wrong(error, "") from None
    except RecursionError:
        raise _nested() from None


def _check(given: dict[str, Any]) -> None:
    """Raise WorkerError where a text is one that can be neither stored nor given to the kernel."""
    for name, value in given.items():
        if not _encodes(value, "surrogateescape" if name in _BYTES else "strict"):
            raise WorkerError(Code.INVALID, "it is no text that can be written as UTF-8", _shown(name))
        if name in _WORDS and isinstance(value, str) and not (len(value) <= _WORD_LENGTH and value.isprintable()):
            raise WorkerError(Code.INVALID, f"it is at most {_WORD_LENGTH} printable characters", name)


def _encodes(value: object, errors: str) -> bool:
    """Whether all texts in a JSON value, names included, can be written as UTF-8."""
    if isinstance(value, dict):
        return all(_encodes(each, errors) for pair in value.items() for each in pair)
    if isinstance(value, list):
        return all(_encodes(each, errors) for each in value)
    try:
        return not isinstance(value, str) or value.encode("utf-8", errors) is not None
    except UnicodeEncodeError:
        return False


def _shown(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else "params"


def _params(given: dict[str, Any], kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return codec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong(error, "params") from None
    except RecursionError:
        raise _nested() from None


def _nested() -> WorkerError:
    return WorkerError(Code.INVALID, "it is nested deeper than a request is", "params")


def _wrong(error: msgspec.ValidationError, where: str) -> WorkerError:
    """What is wrong with a request. The library's text may quote what it has read, so only the place is told."""
    text = str(error)
    named, field = _NAMED.search(text), _FIELD.search(text)
    name = named[1] if named else field[1] if field else ""
    if named and "unknown field" in text:
        return WorkerError(Code.INVALID, "there is no such parameter", name)
    if named:
        return WorkerError(Code.INVALID, "this parameter is missing", name)
    expected = _EXPECTED.match(text)
    wanted = f": {expected[1]} is expected" if expected else ""
    return WorkerError(Code.INVALID, f"this has the wrong type or value{wanted}", name or where)
