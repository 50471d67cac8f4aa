# SPDX-License-Identifier: Apache-2.0
"""Starting launchers, from the worker service's side (managed-workers spec, 9.3).

`spawn` starts one that waits at its gate. Its process id can be nobody else's until `Gated.ended` has returned, however
soon it ends: it is reaped there and nowhere else. When this process dies, the gate ends, and so does a launcher that
has not been told anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import Final

from agent_intercom.wire import framing
from agent_intercom.workers.contract import START_TIMEOUT, Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.launcher import STARTED
from agent_intercom.workers.spec import Launch

_REPORT_LIMIT: Final = 4096
_LAUNCH_LIMIT: Final = 0xFFFF_FFFF
_NOT_BEGUN: Final = "the launcher ended before the command began"
_MAY_HAVE_BEGUN: Final = "the launcher ended and said nothing: the command may have begun"
_CODES: Final = frozenset(code.value for code in Code)


class Gated:
    """A launcher. What it has forked is not ended with it: that is for its scope unit.

    `pid` and `pidfd` are valid until `ended` has returned.
    """

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, gate: int, report: int) -> None:
        self.pid = process.pid
        self.pidfd = pidfd
        # Kept, because subprocess reaps what belongs to a forgotten one.
        self._process = process
        self._gate = gate
        self._report = report
        self._end: asyncio.Future[tuple[int | None, int | None]] | None = None

    async def release(self, launch: Launch, timeout: float = START_TIMEOUT) -> None:
        """Tell it what to start, and wait until that has begun, for `timeout` seconds.

        Raises WorkerError with the launcher's code and reason, `start_failed` where it ended without any or took too
        long, `invalid_request` for what no command can be given, of which it is told nothing. Where this is cancelled
        or takes too long the command may run, and where the launcher ended without a word it may have begun, and ended
        the launcher: stop the scope unit.
        """
        told = False
        try:
            content = framing.pack(launch.encode(), _LAUNCH_LIMIT)
            async with asyncio.timeout(timeout):
                # A launcher that is no more has said why, or nothing.
                with contextlib.suppress(BrokenPipeError):
                    await _write(self._gate, content)
                    told = True
                self._close_gate()
                report = await _read(self._report, _REPORT_LIMIT)
        except ValueError as error:
            raise WorkerError(Code.INVALID, str(error), "command") from error
        except TimeoutError as error:
            text = "the launcher did not say in time that the command began"
            raise WorkerError(Code.START_FAILED, text, "command") from error
        finally:
            self._close_gate()
            self._close_report()
        if report == STARTED:
            return
        code, _, text = report.decode(errors="replace").partition("\n")
        if code not in _CODES or not text:
            # A launcher begins nothing before it has all; what it has begun may kill it before it can say so.
            code, text = Code.START_FAILED, _MAY_HAVE_BEGUN if told else _NOT_BEGUN
        raise WorkerError(code, text, "command")

    def abandon(self) -> None:
        """Kill it. A launcher that was not released has started nothing; `ended` returns soon after this."""
        self._close_gate()
        self._close_report()
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def ended(self) -> tuple[int | None, int | None]:
        """Wait until it has ended, and reap it: its exit code, or None and the signal that ended it."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._reap())
        # Who stops waiting does not stop the others.
        return await asyncio.shield(self._end)

    async def _reap(self) -> tuple[int | None, int | None]:
        await ready(self.pidfd)
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        self._close_gate()
        self._close_report()
        os.close(self.pidfd)
        self.pidfd = -1
        # WEXITED without WNOHANG always finds one.
        assert found is not None
        exited = found.si_code == os.CLD_EXITED
        self._process.returncode = found.si_status if exited else -found.si_status
        return (found.si_status, None) if exited else (None, found.si_status)

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def _close_report(self) -> None:
        if self._report >= 0:
            os.close(self._report)
            self._report = -1


async def spawn(program: str) -> Gated:
    """Start the launcher `program`. Raises WorkerError `start_failed` where it is not there or nothing can be started.

    It gets no variable and no descriptor of ours. Await `Gated.ended` for each, whatever becomes of it.
    """
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
        try:
            waiting, gate = _pipe(passed, kept)
            reporting, report = _pipe(passed, kept, writing=True)
            # Without preexec_fn this is vfork(2), which is safe beside threads and does not copy page tables.
            process = subprocess.Popen(
                [program],
                stdin=waiting,
                stdout=reporting,
                stderr=subprocess.DEVNULL,
                close_fds=True,
                start_new_session=True,
                cwd="/",
                env={},
            )
            kept.callback(process.wait)
            kept.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            text = f"the launcher cannot be started: {os.strerror(error.errno or 0)}"
            raise WorkerError(Code.START_FAILED, text, "launcher") from error
        kept.pop_all()
        return Gated(process, pidfd, gate, report)


def _pipe(passed: contextlib.ExitStack, kept: contextlib.ExitStack, writing: bool = False) -> tuple[int, int]:
    """A pipe as the end that is passed on, for `writing` or else reading, and the end that is kept; closed by these."""
    ends = os.pipe()
    theirs, ours = reversed(ends) if writing else ends
    passed.callback(os.close, theirs)
    kept.callback(os.close, ours)
    return theirs, ours


async def _write(descriptor: int, content: bytes) -> None:
    os.set_blocking(descriptor, False)
    view = memoryview(content)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await ready(descriptor, writing=True)


async def _read(descriptor: int, limit: int) -> bytes:
    """What comes until its end, `limit` bytes at most."""
    os.set_blocking(descriptor, False)
    content = b""
    while len(content) < limit:
        try:
            piece = os.read(descriptor, limit - len(content))
        except BlockingIOError:
            await ready(descriptor)
            continue
        if not piece:
            break
        content += piece
    return content


async def ready(descriptor: int, writing: bool = False) -> None:
    """Wait until `descriptor` can be read, or written: for a pidfd, until the process has ended."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(descriptor, wake)
    try:
        await woken
    finally:
        remove(descriptor)
