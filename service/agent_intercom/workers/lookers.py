# SPDX-License-Identifier: Apache-2.0
"""Threads that look at the paths of workers, which may be on a disk that does not answer.

Whatever hangs there keeps nobody from ending workers, nor the process from ending, which waits for none of them; nor
does it keep others from starting workers: each caller has threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

_T = TypeVar("_T")

_OF_ONE: Final = 4
_OF_ALL: Final = 32
"""How many of them one caller has at once, and all have."""

_WAITING: Final = 10.0
_LOOKING: Final = 10.0
"""Seconds until one of them is free, and for one look."""


class Lookers:
    """The threads of a service; one that does not come back counts for as long as it is there."""

    def __init__(self) -> None:
        self._out: Counter[Hashable] = Counter()
        self._back = asyncio.Event()

    async def look(self, caller: Hashable, look: Callable[..., _T], *given: object) -> _T:
        """The answer of a function that looks at paths for a caller.

        Raises what it raises, and WorkerError: `timed_out` where it does not come back, `limit_reached` where it never
        began, because what others look at for this caller does not.
        """
        await self._free(caller)
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._begin(caller, answer, look, *given)
        try:
            async with asyncio.timeout(_LOOKING):
                return await answer
        except TimeoutError as error:
            text = "the directories cannot be looked at: the disk that they are on does not answer"
            raise WorkerError(Code.TIMEOUT, text, "directory") from error

    async def _free(self, caller: Hashable) -> None:
        """Wait until the caller may have one thread more."""
        try:
            async with asyncio.timeout(_WAITING):
                while self._out[caller] >= _OF_ONE or self._out.total() >= _OF_ALL:
                    await self._back.wait()
        except TimeoutError as error:
            text = "nothing was looked at: directories of earlier starts are, and do not answer; try again later"
            raise WorkerError(Code.LIMIT, text, "directory") from error

    def _begin(self, caller: Hashable, answer: asyncio.Future[_T], look: Callable[..., _T], *given: object) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            tell: Callable[[], None]
            try:
                tell = functools.partial(answer.set_result, look(*given))
            except Exception as error:
                # Whatever it is, it is raised where the answer is awaited.
                tell = functools.partial(answer.set_exception, error)
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._came_back, caller, answer, tell)

        try:
            threading.Thread(target=run, name="paths", daemon=True).start()
        except RuntimeError as error:
            raise WorkerError(Code.LIMIT, "no thread is left to look at the directories", "directory") from error
        self._out[caller] += 1

    def _came_back(self, caller: Hashable, answer: asyncio.Future[_T], tell: Callable[[], None]) -> None:
        self._out[caller] -= 1
        if not self._out[caller]:
            del self._out[caller]
        self._back.set()
        self._back = asyncio.Event()
        if not answer.done():
            tell()
