# SPDX-License-Identifier: Apache-2.0
"""`watch`: hold the seat, show what happens, and carry out what other commands ask of the seat."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import time
from contextlib import suppress

from agent_intercom.cli import output, signals
from agent_intercom.cli.control import MAX_LINE, same_user
from agent_intercom.cli.exits import BROKEN_PIPE, OK, TIMED_OUT, USAGE, CommandError, JsonObject, exit_for, failure
from agent_intercom.cli.operations import Outcome, message_json, perform, session_json
from agent_intercom.cli.place import MEMORY_FILE_SYSTEMS, MODEL, file_system, here, passing, told
from agent_intercom.cli.seat import Seat
from agent_intercom.cli.seat_client import SeatClient
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Connected,
    Disconnected,
    Event,
    EventsLost,
    Joined,
    Left,
    Message,
    Presence,
    SessionInfo,
)
from agent_intercom.intercom.foreign import ADDRESS_BYTES, fits

REQUEST_TIMEOUT = 10.0
CONNECT_TIMEOUT = 10.0


def watch(options: argparse.Namespace) -> int:
    """`intercom watch`: until interrupted (exit 0) or the seat is lost."""
    place = here()
    seat = Seat(place)
    if not fits(seat.control_path):
        text = f"XDG_RUNTIME_DIR is so long that the seat's socket has more than {ADDRESS_BYTES} bytes"
        raise CommandError("PATH_TOO_LONG", text, hint="Set XDG_RUNTIME_DIR to a shorter one.")
    if not seat.hold():
        raise CommandError("SEAT_BUSY", "another `intercom watch` holds this seat; end it first")
    try:
        printer = Printer(options.json, options.all, seat.directory)
        return asyncio.run(_watch(SeatClient(place, seat, printer.show), seat, place.addresses))
    finally:
        seat.release()


async def _watch(session: SeatClient, seat: Seat, addresses: list[str]) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, *signals.heeded()):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait(), name="watch-stop")
    starting = asyncio.create_task(_run(session, seat, addresses), name="watch-run")
    try:
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        return OK
    finally:
        for task in (stopping, starting):
            task.cancel()
        for task in (stopping, starting):
            with suppress(asyncio.CancelledError):
                await task


async def _run(session: SeatClient, seat: Seat, addresses: list[str]) -> int:
    async with session, Control(session, seat, addresses):
        try:
            await session.ended()
        except BrokenPipeError:
            return BROKEN_PIPE
    return OK


class Printer:
    """Shows events: a line each, or a JSON object each.

    Without `everyone`, that sessions come and go which live only as long as a command is not shown. Before the first
    event it says so where `directory`, in which messages are kept, is not in memory.
    """

    def __init__(self, as_json: bool, everyone: bool, directory: str) -> None:
        self._as_json = as_json
        self._everyone = everyone
        self._unchecked: str | None = directory
        self._names: dict[str, str] = {}

    def show(self, event: Event) -> None:
        """Print `event`. Raises BrokenPipeError when nobody reads."""
        if self._unchecked is not None:
            directory, self._unchecked = self._unchecked, None
            self._tell_of_disk(file_system(directory))
        if self._hidden(event):
            return
        if self._as_json:
            output.emit(output.json_line(event_json(event)))
        else:
            output.emit(f"{time.strftime('%H:%M:%S')} {self._line(event)}")

    def _tell_of_disk(self, kind: str | None) -> None:
        if kind in MEMORY_FILE_SYSTEMS:
            return
        if self._as_json:
            output.emit(output.json_line({"event": "not_in_memory", "fileSystem": kind}))
            return
        where = "where nobody can tell" if kind is None else f"on {kind}, not in memory"
        text = f"XDG_RUNTIME_DIR is {where}: the messages of this seat are written there"
        output.complain(text, "Set it to a private directory in memory.")

    def _hidden(self, event: Event) -> bool:
        match event:
            case Joined(session=session) | Presence(session=session):
                return not self._everyone and session.model == MODEL and passing(session.id)
            case Left(session_id=session_id):
                return not self._everyone and passing(session_id)
        return False

    def _line(self, event: Event) -> str:
        match event:
            case Connected(session_id=session_id, resumed=resumed):
                return f"{'connected again' if resumed else 'connected'} as {output.printable(session_id)}"
            case Disconnected(code=code):
                return f"disconnected{f' ({output.printable(code)})' if code else ''}, trying again"
            case Joined(session=session):
                return (
                    f"joined   {self._who(session)}  {output.printable(session.model)}  {output.printable(session.cwd)}"
                )
            case Presence(session=session):
                return f"presence {self._who(session)}  {output.printable(session.status or '')}".rstrip()
            case Left(session_id=session_id):
                known = self._names.pop(session_id, "")
                return f"left     {output.printable(known or session_id)}"
            case Message():
                return self._message(event)
            case AskDeferred(message_id=message_id, from_session_id=asker):
                what = "a reply arrives only if it comes back" if passing(asker) else "the ask stays open"
                return f"the asker of {output.printable(message_id)} waits no more; {what}"
            case AskCancelled(message_id=message_id, reason=reason):
                return f"the ask {output.printable(message_id)} is gone ({reason})"
            case EventsLost(number=number):
                return f"{number} events were left out; see intercom list"

    def _message(self, message: Message) -> str:
        kind = "ask     " if message.expects_reply else "reply   " if message.reply_to else "message "
        text = output.block(message.text, " " * 9)
        lines = [f"{kind} {self._who(message.sender)}", text]
        lines += [f"[{a.type} {output.printable(a.name)}, {len(a.content)} characters]" for a in message.attachments]
        if message.expects_reply:
            lines.append(f"answer: intercom reply {output.printable(message.id)} TEXT")
        return ("\n" + " " * 9).join(lines)

    def _who(self, session: SessionInfo) -> str:
        name = session.name or session.id
        self._names[session.id] = name
        shown = output.printable(name)
        return shown if name == session.id else f"{shown} ({output.printable(session.id[:8])})"


def event_json(event: Event) -> JsonObject:
    """An event as `watch --json` prints it, one object a line."""
    match event:
        case Connected(session_id=session_id, resumed=resumed):
            return {"event": "connected", "sessionId": session_id, "resumed": resumed}
        case Disconnected(code=code):
            return {"event": "disconnected", **({"code": code} if code else {})}
        case Joined(session=session):
            return {"event": "joined", "session": session_json(session)}
        case Presence(session=session):
            return {"event": "presence", "session": session_json(session)}
        case Left(session_id=session_id):
            return {"event": "left", "sessionId": session_id}
        case Message():
            return {"event": "message", "message": message_json(event)}
        case AskDeferred(message_id=message_id, from_session_id=sender):
            return {"event": "ask_deferred", "messageId": message_id, "fromSessionId": sender}
        case AskCancelled(message_id=message_id, from_session_id=sender, reason=reason):
            return {"event": "ask_cancelled", "messageId": message_id, "fromSessionId": sender, "reason": reason}
        case EventsLost(number=number):
            return {"event": "events_lost", "number": number}


class Control:
    """The seat's own socket, for other commands of the same user."""

    def __init__(self, session: SeatClient, seat: Seat, addresses: list[str]) -> None:
        self._addresses = addresses
        self._session = session
        self._seat = seat
        self._server: asyncio.Server | None = None
        self._busy: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._seat.control_path)
        previous = os.umask(0o077)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._seat.control_path, limit=MAX_LINE)
        finally:
            os.umask(previous)

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        with suppress(FileNotFoundError):
            os.unlink(self._seat.control_path)
        for task in list(self._busy):
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, ValueError, TimeoutError, asyncio.CancelledError):
            pass  # the asking side is gone, or wrote no request; or the watch ends
        finally:
            writer.close()
            self._busy.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        if not same_user(sock):
            return
        async with asyncio.timeout(REQUEST_TIMEOUT):
            line = await reader.readline()
        outcome = await self._unless_called_off(json.loads(line), reader)
        if outcome is not None:
            writer.write(json.dumps({"exit": outcome[0], "result": outcome[1]}).encode() + b"\n")
            await writer.drain()

    async def _unless_called_off(self, request: object, reader: asyncio.StreamReader) -> Outcome | None:
        """The outcome of `request`, or None where the asking command went away: then an ask is taken back."""
        if not isinstance(request, dict):
            return USAGE, failure("USAGE", "no request")
        performing = asyncio.create_task(self._perform(request), name="seat-request")
        leaving = asyncio.create_task(reader.read(1), name="seat-request-end")
        try:
            await asyncio.wait({performing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return performing.result() if performing.done() else None
        finally:
            for task in (performing, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task

    async def _connected(self, request: JsonObject) -> Outcome | None:
        """None once the seat is connected; else why it is not. Nothing is queued for a broker that is not there."""
        patience = request.get("timeout")
        try:
            async with asyncio.timeout(min(patience, CONNECT_TIMEOUT) if isinstance(patience, float) else None):
                await self._session.client.connect_now()
        except TimeoutError:
            text = "what listens does not answer in time; nothing was sent"
            return TIMED_OUT, failure("TIMEOUT", text, "`intercom doctor` tells whether the broker is well.")
        except ClientError as error:
            return exit_for(error.code), failure(error.code, f"{told(error, self._addresses)}; nothing was sent")
        return None

    async def _perform(self, request: JsonObject) -> Outcome:
        client = self._session.client
        if request.get("op") == "whoami":
            return OK, {"ok": True, "name": self._session.name, "connected": client.connected}
        outcome = await self._connected(request) or await perform(client, request, lasting=True)
        target, asked = request.get("to"), request.get("replyTo")
        if isinstance(target, str) and isinstance(asked, str):
            self._seat.inbox.settle(target, asked, *outcome)
        return outcome
