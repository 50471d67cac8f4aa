# SPDX-License-Identifier: Apache-2.0
"""The shell of the bridge: what happens goes into the rules (`core`), and what they want is done, in order.

One thread and one selector, without asyncio: there is one of these for each worker, and all of them stay in memory.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from os import path
from typing import Final

from agent_intercom.host import privatefiles
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire.errors import WireError
from agent_intercom.workers import client
from agent_intercom.workers import contract as service
from agent_intercom.workers.bridge import (
    belonging,
    child,
    core,
    events,
    keeping,
    line,
    looking,
    memory,
    reception,
    traces,
)
from agent_intercom.workers.bridge import settings as variables
from agent_intercom.workers.bridge.settings import Settings
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

_AGAIN_MS: Final = 1_000
_AGAIN_MOST_MS: Final = 60_000
"""After how long a worker service that has gone is told again what is done here: twice as long each time."""

_RETRY_MS: Final = 1_000
"""After how long it is tried again to write what could not be written."""

_ASSIGNMENT: Final = "assignment.txt"
_MESSAGES: Final = "messages"


class Shell:
    """A bridge as a process. Use `run` once; `close` after it, whatever happens."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._queue: deque[events.Event] = deque()
        self._status: int | None = None
        self._broker: line.BrokerLine | None = None
        self._service: line.ServiceLine | None = None
        self._said = ""
        self._say_at: int | None = None
        self._patience = _AGAIN_MS
        self._child: child.Running | None = None
        self._deaf = False
        self._look: tuple[int, int] | None = None
        self._file = path.join(settings.state, f"bridge-g{settings.generation}.json")
        self._address = line.address_of(settings.state, settings.scratch, settings.generation)
        self._lock: int | None = None
        self._held: list[events.Effect] = []
        self._again_at: int | None = None
        self._stands = self._ending = False
        self._reception: reception.Reception | None = None

    def run(self) -> int:
        """Work until the run has ended, another worker has taken over or somebody says so; the exit status.

        Raises WorkerError for a state directory that cannot be used.
        """
        bridge = core.Bridge(self._prepare(), self._settings.thresholds)
        wakeup = self._signals()
        self._watch(wakeup, lambda: self._told_to_end(wakeup))
        self._carry_out(bridge.start(_now()))
        while self._status is None:
            if self._held:
                self._wait(None)
            elif self._queue:
                self._carry_out(bridge.step(self._queue.popleft(), _now()))
            else:
                self._wait(bridge.wake_at)
        return self._status

    def close(self) -> None:
        """End what still runs, and give back everything."""
        if self._child is not None:
            self._child.leave(gently=bool(self._held))
        for each in (self._broker, self._service, self._reception):
            if each is not None:
                each.close()
        if self._look is not None:
            looking.end(*self._look)
        if self._lock is not None:
            os.close(self._lock)
        signal.set_wakeup_fd(-1)
        self._selector.close()

    # Beginning.

    def _prepare(self) -> memory.Memory:
        """Be the only bridge of this generation, end what one before it has left, and read what it knew."""
        settings = self._settings
        try:
            for directory in (settings.state, settings.scratch):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
            privatefiles.close_directory(settings.state)
            self._lock = privatefiles.lock(f"{self._file}.lock")
            self._reception = reception.Reception(
                self._address, self._watch, self._selector.unregister, self._queue.append
            )
            known = keeping.read(self._file, settings.role, settings.generation)
        except BlockingIOError as error:
            raise WorkerError(Code.CONFLICT, "another bridge works for this role", "bridge") from error
        except OSError as error:
            text = f"the state directory cannot be used: {os.strerror(error.errno or 0)}"
            raise WorkerError(Code.STORE, text, service.STATE_ENVIRONMENT) from error
        try:
            traces.works(settings.state, settings.command[0])
        except OSError as error:
            _say(f"what persons read could not be written: {os.strerror(error.errno or 0)}")
        if known.work is not None and known.work.begun:
            child.end_leftovers(self._address, belonging.all_of_the_run(belonging.own(), settings.socket))
        return known

    def _signals(self) -> int:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        return reading

    # Waiting.

    def _watch(self, what: int | socket.socket, then: Callable[[], None], writing: bool = False) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            self._selector.modify(what, wanted, then)
        except KeyError:
            self._selector.register(what, wanted, then)

    def _wait(self, until: int | None) -> None:
        until = min((at for at in (until, self._say_at, self._again_at) if at is not None), default=None)
        timeout = None if until is None else max(until - _now(), 0) / 1000
        for key, _ in self._selector.select(timeout):
            # What was done about another one may have closed this.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        if self._say_at is not None and self._say_at <= _now():
            self._say_state()
        if self._again_at is not None and self._again_at <= _now() and self._status is None:
            self._try_again()
        if not self._queue:
            self._queue.append(events.Tick())

    def _told_to_end(self, wakeup: int) -> None:
        os.read(wakeup, 64)
        self._ending = True
        self._end_standing()
        self._queue.append(events.Terminated())

    # The broker.

    def _connect(self) -> None:
        address = self._settings.socket
        try:
            self._broker = line.BrokerLine(address, self._settings.role, self._settings.token)
        except (OSError, WireError):
            self._queue.append(events.Lost(looking.gone(address)))
            return
        self._watch(self._broker.socket, self._hear)
        self._queue.append(events.Connected())

    def _hear(self) -> None:
        broker = self._broker
        if broker is None:
            return
        try:
            broker.flush()
            self._queue.extend(broker.frames())
            self._watch(broker.socket, self._hear, broker.unsent)
        except (OSError, EOFError, Refusal, WireError):
            self._hang_up()
            self._queue.append(events.Lost())

    def _hang_up(self) -> None:
        if self._broker is not None:
            self._selector.unregister(self._broker.socket)
            self._broker.close()
            self._broker = None

    def _send(self, effect: events.Send) -> None:
        broker = self._broker
        if broker is None:
            return
        try:
            broker.ask(effect.id, effect.kind, effect.keys)
            self._watch(broker.socket, self._hear, broker.unsent)
        except (OSError, Refusal, WireError):
            self._hang_up()
            self._queue.append(events.Lost())

    # The command.

    def _begin(self, effect: events.Begin) -> None:
        settings = self._settings
        file, messages = path.join(settings.state, _ASSIGNMENT), path.join(settings.state, _MESSAGES)
        told = {
            variables.ROLE_ENVIRONMENT: settings.role,
            variables.ID_ENVIRONMENT: effect.assignment_id,
            variables.KIND_ENVIRONMENT: effect.kind,
            variables.ROUND_ENVIRONMENT: str(effect.round),
            variables.FILE_ENVIRONMENT: file,
            variables.MESSAGES_ENVIRONMENT: messages,
            variables.SOCKET_ENVIRONMENT: self._address,
            service.SCRATCH_ENVIRONMENT: settings.scratch,
        }
        try:
            privatefiles.replace(file, effect.text.encode())
            _empty(messages)
            # Said first: it may print at once, to the same place.
            _say(f"the command starts: {effect.kind}, round {effect.round}")
            copied = settings.scratch if settings.read_only else None
            self._child = child.run(settings.command, {**settings.environment, **told}, settings.project, copied)
        except OSError as error:
            keeping.check(error, "what the command reads")
            _say(f"the command could not be run: {os.strerror(error.errno or 0)}")
            self._queue.append(events.Ended())
            return
        self._deaf = False
        traces.forget(settings.state)
        self._watch(self._child.pidfd, self._bury)

    def _bury(self) -> None:
        if self._child is not None:
            self._selector.unregister(self._child.pidfd)
            ended = self._child.reap()
            _say(f"the command ended, {_how(ended)}")
            self._child = None
            self._queue.append(events.Ended(ended))

    def _signal(self, number: int) -> None:
        if self._child is not None and not self._child.signal(number) and not self._deaf:
            self._deaf = True
            _say("the command cannot be ended: it may not be signalled, as it may have become another user's")

    def _leave_trace(self, effect: events.Silent | events.Publish) -> None:
        """Leave what persons read; no work waits for that."""
        state = self._settings.state
        try:
            if isinstance(effect, events.Publish):
                traces.publish(state, effect.round, effect.kind, effect.report)
                return
            code = effect.code
            exited, number = (None, -code) if code is not None and code < 0 else (code, None)
            at = time.time_ns() // 1_000_000
            traces.fell_silent(state, traces.Silent(effect.kind, effect.round, exited, number, at))
        except OSError as error:
            _say(f"what persons read could not be written: {os.strerror(error.errno or 0)}")

    def _hand(self, effect: events.Hand) -> None:
        """Put a message where the command looks: whole, or not at all."""
        message = effect.message
        name = path.join(self._settings.state, _MESSAGES, f"{message.number:04}-{message.deliver_as}.txt")
        try:
            privatefiles.replace(name, message.content.encode())
        except OSError as error:
            # It is in the memory, and in what the command reads when it runs again.
            _say(f"a message could not be handed on: {os.strerror(error.errno or 0)}")

    def _find_out(self) -> None:
        try:
            self._look = looking.begin(self._settings.socket, self._settings.role)
        except OSError:
            self._queue.append(events.Looked(None))
            return
        self._watch(self._look[1], self._found)

    def _found(self) -> None:
        if self._look is not None:
            self._selector.unregister(self._look[1])
            found, self._look = looking.end(*self._look), None
            self._queue.append(events.Looked(found))

    def _answer(self, effect: events.Reply) -> None:
        if self._reception is not None:
            self._reception.reply(effect)

    # The worker service.

    def _notify(self, state: str) -> None:
        """Tell what is done here, if somebody listens; nothing waits for that."""
        if self._settings.managed:
            self._said = state
            self._say_state()

    def _say_state(self) -> None:
        self._say_at = None
        runtime_dir = path.dirname(path.dirname(path.dirname(self._settings.socket)))
        try:
            if self._service is None:
                self._service = line.ServiceLine(client.socket_path(runtime_dir))
                self._watch(self._service.socket, self._noticed)
            self._service.notify(self._said)
        except (OSError, WireError):
            self._forget_service()

    def _noticed(self) -> None:
        """Throw the answers away. A service that answers may be told again soon where it goes."""
        try:
            if self._service is not None and self._service.answered():
                self._patience = _AGAIN_MS
        except (OSError, EOFError, WireError):
            self._forget_service()

    def _forget_service(self) -> None:
        """Nobody listens any more, and may not have heard the last; the next one is told again what is done here."""
        self._say_at = _now() + self._patience
        self._patience = min(2 * self._patience, _AGAIN_MOST_MS)
        if self._service is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._service.socket)
            self._service.close()
            self._service = None

    # Effects.

    def _carry_out(self, effects: list[events.Effect]) -> None:
        for number, effect in enumerate(effects):
            try:
                self._do(effect)
            except keeping.Standstill as fault:
                # All that follows waits for this one, and whatever happens meanwhile for all that follows.
                self._held, self._again_at = effects[number:], _now() + _RETRY_MS
                if not self._stands:
                    self._stands = True
                    _say(f"{fault}; it stands still, and tries again every second")
                self._end_standing()
                return
        if self._stands:
            self._stands = False
            _say("it can be written again, and the bridge goes on")

    def _end_standing(self) -> None:
        """Who is to end does not wait for the disk: that may be for ever."""
        over = [effect.status for effect in self._held if isinstance(effect, events.Exit)]
        if over or (self._ending and self._held):
            self._status = over[0] if over else 128 + signal.SIGTERM

    def _try_again(self) -> None:
        held, self._held, self._again_at = self._held, [], None
        self._carry_out(held)

    def _do(self, effect: events.Effect) -> None:
        match effect:
            case events.Remember():
                keeping.write(self._file, effect.memory)
            case events.Connect():
                self._connect()
            case events.Disconnect():
                self._hang_up()
            case events.Send():
                self._send(effect)
            case events.Begin():
                self._begin(effect)
            case events.Silent() | events.Publish():
                self._leave_trace(effect)
            case events.Hand():
                self._hand(effect)
            case events.Signal():
                self._signal(effect.number)
            case events.Reply():
                self._answer(effect)
            case events.Notify():
                self._notify(effect.state)
            case events.Look():
                self._find_out()
            case events.Exit():
                self._status = effect.status


def _empty(directory: str) -> None:
    """Make sure of a directory with nothing in it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    privatefiles.close_directory(directory)
    for name in os.listdir(directory):
        with contextlib.suppress(IsADirectoryError):
            os.unlink(path.join(directory, name))


def _now() -> int:
    return time.monotonic_ns() // 1_000_000


def _how(ended: int) -> str:
    return f"with exit status {ended}" if ended >= 0 else f"by signal {-ended}"


def _say(text: str) -> None:
    """Tell whoever reads what the command prints."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"orchestrate-bridge: {text}\n")
