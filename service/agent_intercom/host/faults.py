# SPDX-License-Identifier: Apache-2.0
"""Exceptions that nobody expected: told by type and place, never by their text, which may be a peer's."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from agent_intercom.host.journal import Event, Journal


def tell(error: BaseException | None, journal: Journal) -> None:
    """Log where `error` came from."""
    if error is not None:
        module, line = _place(error)
        journal.emit(Event.INTERNAL_ERROR, kind=type(error).__name__, module=module, line=line)


def watch(loop: asyncio.AbstractEventLoop, journal: Journal) -> None:
    """Have every exception that reaches `loop` or the interpreter told like that, instead of with its traceback."""

    def failed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            journal.emit(Event.INTERNAL_ERROR, kind="unknown", module="asyncio")
        else:
            tell(error, journal)

    loop.set_exception_handler(failed)
    sys.excepthook = lambda _kind, error, _trace: tell(error, journal)
    sys.unraisablehook = lambda unraisable: tell(unraisable.exc_value, journal)


def _place(error: BaseException) -> tuple[str, int | None]:
    trace = error.__traceback__
    if trace is None:
        return "unknown", None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return os.path.basename(trace.tb_frame.f_code.co_filename), trace.tb_lineno
