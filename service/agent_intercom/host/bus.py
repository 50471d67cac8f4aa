# SPDX-License-Identifier: Apache-2.0
"""The user's bus in an event loop: calls that run beside each other, signals, and descriptors that go along.

jeepney has the messages; its own loop passes no descriptors and says nothing when the bus has gone, so the socket is
driven here. It is imported with the connection, not with this module. What goes wrong is told as
`host.manager.ManagerError`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Self

from agent_intercom.host.manager import CALL_TIMEOUT, ManagerUnreachable, answered, bus_address, method_call

BUS: Final = "org.freedesktop.DBus"
_BUS_PATH: Final = "/org/freedesktop/DBus"
_RECEIVE: Final = 65_536


class Signal(NamedTuple):
    """A signal. `sender` is a unique name, which the bus vouches for (`org.freedesktop.DBus` for its own)."""

    sender: str
    path: str
    interface: str
    member: str
    body: tuple[Any, ...]


class Bus:
    """A connection. Use as an async context manager; raises ManagerUnreachable from the start on.

    `heard` is given every signal that `match` asked for, and those that anybody sends to this connection: whoever
    reads one looks at its sender. `gone` is called once when the bus has closed the connection.
    """

    def __init__(
        self, heard: Callable[[Signal], None], gone: Callable[[], None], environ: Mapping[str, str] | None = None
    ) -> None:
        self._heard = heard
        self._gone = gone
        self._address = bus_address(os.environ if environ is None else environ)
        self._socket: socket.socket | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._serials = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Self:
        if self._address is None:
            raise ManagerUnreachable(
                "there is no user bus: neither DBUS_SESSION_BUS_ADDRESS nor XDG_RUNTIME_DIR names one"
            )
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                self._socket = await _connect(self._address)
        except ImportError as error:
            raise ManagerUnreachable("jeepney is not installed") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise ManagerUnreachable("the user's bus does not answer") from error
        self._receiver = asyncio.create_task(self._receive(self._socket))
        try:
            await self.bus("Hello")
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; `gone` is not called for it. A second time is of no effect."""
        self._gone = _nothing
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.cancel()
            await asyncio.wait({receiver})
            if not receiver.cancelled():
                receiver.result()

    async def bus(self, member: str, signature: str = "", *arguments: Any) -> tuple[Any, ...]:
        """Call a method of the bus itself."""
        return await self.call(BUS, _BUS_PATH, BUS, member, signature, *arguments)

    async def match(self, **fields: str) -> None:
        """Have signals delivered whose fields are these; `arg0` is their first argument."""
        from jeepney import MatchRule

        arg0 = fields.pop("arg0", None)
        rule = MatchRule(type="signal", **fields)
        if arg0 is not None:
            rule.add_arg_condition(0, arg0)
        await self.bus("AddMatch", "s", rule.serialise())

    async def call(
        self,
        name: str,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *arguments: Any,
        unit: str = "",
        timeout: float = CALL_TIMEOUT,
    ) -> tuple[Any, ...]:
        """Call a method of whoever is called `name`, and wait for the answer, at most `timeout` seconds.

        Values of the signature `h` are open descriptors. `unit` is what ManagerRefused is to say that it is about.
        """
        message = method_call(name, path, interface, member, signature, arguments)
        serial = next(self._serials)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[serial] = answer
        try:
            async with asyncio.timeout(timeout):
                await self._send(message, serial)
                return answered(await answer, unit)
        except TimeoutError as error:
            raise ManagerUnreachable("the user's service manager does not answer") from error
        finally:
            self._waiting.pop(serial, None)

    async def _send(self, message: Any, serial: int) -> None:
        fds = array.array("i")
        data: bytes = message.serialise(serial, fds=fds)
        async with self._sending:
            if self._socket is None:
                raise ManagerUnreachable("the user's bus has gone")
            try:
                if fds:
                    data = data[await _send_with(self._socket, data, fds) :]
                await asyncio.get_running_loop().sock_sendall(self._socket, data)
            except OSError as error:
                self._lose()
                raise ManagerUnreachable("the user's bus has gone") from error
            except asyncio.CancelledError:
                # Who knows how much of it the bus has got.
                self._lose()
                raise

    async def _receive(self, sock: socket.socket) -> None:
        from jeepney import Parser

        loop = asyncio.get_running_loop()
        parser = Parser()
        try:
            with sock, contextlib.suppress(OSError):
                while data := await loop.sock_recv(sock, _RECEIVE):
                    parser.add_data(data)
                    while (message := _next(parser)) is not None:
                        self._dispatch(message)
        finally:
            self._lose()

    def _dispatch(self, message: Any) -> None:
        from jeepney import HeaderFields, MessageType

        fields = message.header.fields
        if message.header.message_type is MessageType.signal:
            names = (HeaderFields.sender, HeaderFields.path, HeaderFields.interface, HeaderFields.member)
            sender, path, interface, member = (str(fields.get(name, "")) for name in names)
            self._heard(Signal(sender, path, interface, member, message.body))
            return
        answer = self._waiting.get(fields.get(HeaderFields.reply_serial, 0))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _lose(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ManagerUnreachable("the user's bus has gone"))
        gone, self._gone = self._gone, _nothing
        gone()


def _next(parser: Any) -> Any:
    """The next message that is complete, or None. Raises OSError for what is no D-Bus: the bus is as good as gone."""
    try:
        return parser.get_next_message()
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG)) from error


def _nothing() -> None:
    pass


async def _connect(address: str) -> socket.socket:
    """A connection on which the bus knows who we are, and takes descriptors."""
    from jeepney.auth import BEGIN, Authenticator
    from jeepney.bus import get_bus

    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, get_bus(address))
        authenticator = Authenticator(enable_fds=True)
        for line in authenticator:
            if line:
                await loop.sock_sendall(sock, line)
            data = await loop.sock_recv(sock, 1024)
            if not data:
                raise OSError("closed")
            authenticator.feed(data)
        await loop.sock_sendall(sock, BEGIN)
    except BaseException:
        sock.close()
        raise
    return sock


async def _send_with(sock: socket.socket, data: bytes, fds: array.array[int]) -> int:
    """Send descriptors with the first bytes of a message; how many bytes went."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except BlockingIOError:
            writable = loop.create_future()
            loop.add_writer(sock.fileno(), _wake, writable)
            try:
                await writable
            finally:
                loop.remove_writer(sock.fileno())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
