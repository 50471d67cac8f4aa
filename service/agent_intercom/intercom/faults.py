# SPDX-License-Identifier: Apache-2.0
"""Exceptions that nobody expected: told by type and place, never by their text, which may be a peer's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
from typing import Any, Final

_STDERR: Final = 2


def tell(error: BaseException | None) -> None:
    """Write one line about `error` to standard error, if that takes it at once."""
    if error is None:
        return
    line = f"intercom broker: internal error: {type(error).__name__} in {_place(error)}\n"
    ready = select.poll()
    ready.register(_STDERR, select.POLLOUT)
    with contextlib.suppress(OSError):
        if ready.poll(0):
            os.write(_STDERR, line.encode())


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Have every exception that reaches `loop` or the interpreter told like that, instead of with its traceback."""

    def failed(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tell(context.get("exception"))

    loop.set_exception_handler(failed)
    sys.excepthook = lambda _kind, error, _trace: tell(error)
    sys.unraisablehook = lambda unraisable: tell(unraisable.exc_value)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return "an unknown place"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
