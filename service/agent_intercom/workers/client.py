# SPDX-License-Identifier: Apache-2.0
"""The client of the worker service: requests over its socket, answered in order (managed-workers spec, section 1.9).

Blocking, and without asyncio, because a command imports it. The service is started by the first connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from os import path
from typing import Any, Final, Self

from agent_intercom.wire import codec, framing
from agent_intercom.wire.errors import WireError
from agent_intercom.wire.peer import peer_credentials
from agent_intercom.workers import contract
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

TIMEOUT: Final = 90.0
"""Seconds for an answer, where the caller does not say: a cascade stops several workers, each within seconds."""

LOOK_TIMEOUT: Final = 10.0
"""The same for what only looks: nothing is to be ended for it."""

_LOOKING: Final = frozenset({"list", "status", "logs", "health"})
_CODES: Final = frozenset(Code)
_CONNECT_TIMEOUT: Final = 10.0
_BACKLOG_PAUSE: Final = 0.02
_PIECE: Final = 65_536


def socket_path(runtime_dir: str) -> str:
    """The address of the worker service; `runtime_dir` is what systemd calls `%t`."""
    return path.join(runtime_dir, "agent-intercom", contract.SOCKET_NAME)


def from_environment(environ: Mapping[str, str]) -> Client:
    """A client of the calling person's worker service.

    Raises WorkerError `workers_unreachable` where nobody says where the runtime directory is.
    """
    from agent_intercom.orchestration import runtime
    from agent_intercom.orchestration.errors import Refusal

    try:
        directory = runtime.runtime_dir(environ)
    except Refusal as refusal:
        raise WorkerError(Code.UNREACHABLE, refusal.text, refusal.field or "XDG_RUNTIME_DIR") from refusal
    return Client(socket_path(directory))


class Gone(WorkerError):
    """The worker service has ended, or hung up, before it answered; what was asked for may be done all the same."""

    def __init__(self) -> None:
        super().__init__(Code.UNREACHABLE, "the worker service closed the connection: ask again")


class Client:
    """One connection to the worker service. Use as a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._decoder: framing.FrameDecoder

    def __enter__(self) -> Self:
        self._socket = _connected(self._address)
        self._decoder = framing.FrameDecoder(contract.MAX_FRAME)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what was asked for goes on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def reconnect(self) -> None:
        """Begin anew with another connection. Raises WorkerError `workers_unreachable`."""
        self.close()
        self.__enter__()

    def request(
        self,
        action: str,
        params: Mapping[str, Any],
        *,
        scope: str | None = None,
        session: str | None = None,
        override: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Ask for `action` and wait for its result, at most `timeout` seconds (None: as long as such a thing takes).

        `scope` and `session` say for whom; whoever calls from inside a worker is that worker, whatever it says. Raises
        WorkerError: what the service answers with, `workers_unreachable` for a service that does not answer as one,
        `timed_out` where the answer did not come in time: what was asked for may be done all the same.
        """
        if self._socket is None:
            raise WorkerError(Code.UNREACHABLE, "there is no connection to the worker service")
        number = os.urandom(16).hex()
        caller = {"scope": scope, "session": session, "override": override}
        request = {"version": contract.PROTOCOL_VERSION, "id": number, "action": action}
        try:
            frame = framing.pack(codec.encode({**request, "caller": caller, "params": params}), contract.MAX_FRAME)
        except WireError as error:
            text = f"the request is longer than {contract.MAX_FRAME} bytes: pass a smaller environment or task"
            raise WorkerError(Code.INVALID, text, "params") from error
        if timeout is None:
            timeout = LOOK_TIMEOUT if action in _LOOKING else TIMEOUT
        answer = self._exchange(frame, time.monotonic() + timeout)
        result, error_ = answer.get("result"), answer.get("error")
        # Whoever is not let in is told why in an answer to no request.
        known = (number, "") if isinstance(error_, dict) else (number,)
        if answer.get("version") != contract.PROTOCOL_VERSION or answer.get("id") not in known:
            raise _not_understood()
        if answer.get("ok") is True and isinstance(result, dict):
            return result
        if isinstance(error_, dict):
            code, said = error_.get("code"), error_.get("text")
            if isinstance(code, str) and code in _CODES and isinstance(said, str):
                raise WorkerError(code, said, str(error_.get("field") or ""))
        raise _not_understood()

    def _exchange(self, frame: bytes, deadline: float) -> dict[str, Any]:
        assert self._socket is not None
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # Whoever hangs up may have said why.
                self._socket.sendall(frame)
            while (payload := self._decoder.next()) is None:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = self._socket.recv(_PIECE)
                if not piece:
                    raise Gone
                self._decoder.feed(piece)
            answer = codec.decode(payload)
        except TimeoutError as error:
            # An answer that comes later would be taken for that of the next request.
            self.close()
            text = "the worker service did not answer in time; it may do what was asked for all the same"
            raise WorkerError(Code.TIMEOUT, text) from error
        except OSError as error:
            raise Gone from error
        except WireError as error:
            raise _not_understood() from error
        if not isinstance(answer, dict):
            raise _not_understood()
        return answer


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    try:
        connection.settimeout(_CONNECT_TIMEOUT)
        while True:
            try:
                connection.connect(address)
                break
            except BlockingIOError:
                # unix(7): a full backlog is EAGAIN, and nothing can be waited for.
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_BACKLOG_PAUSE)
        # Who called listen(2): the user manager, for a socket unit.
        if peer_credentials(connection).uid != os.geteuid():
            raise WorkerError(Code.UNREACHABLE, "another user listens at the worker service's address", "socket")
    except (OSError, WireError) as error:
        connection.close()
        raise WorkerError(Code.UNREACHABLE, _unreachable(error), "socket") from error
    except WorkerError:
        connection.close()
        raise
    return connection


def _unreachable(error: Exception) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"nobody listens for the worker service: systemctl --user start {contract.SOCKET_UNIT}"
    return "the worker service cannot be reached"


def _not_understood() -> WorkerError:
    return WorkerError(Code.UNREACHABLE, "the worker service answers in another way than this version expects")
