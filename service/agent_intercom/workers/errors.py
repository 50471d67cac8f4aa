# SPDX-License-Identifier: Apache-2.0
"""The one exception of this layer, and the one of it that says more."""

from __future__ import annotations

from typing import Final

from agent_intercom.workers.contract import Code

READ_ONLY: Final = "STATE_READ_ONLY"
FULL: Final = "STATE_FULL"
IO: Final = "STATE_IO"
BUSY: Final = "STATE_BUSY"
LOCKED: Final = "STATE_LOCKED"
FOREIGN: Final = "STATE_FOREIGN"
NEWER: Final = "STATE_NEWER"
DAMAGED: Final = "STATE_DAMAGED"
CHANGED: Final = "STATE_CHANGED"
"""Why the registry's database cannot be used. The first five are those of `host.sqlite`, without importing SQLite."""


class WorkerError(Exception):
    """A request that cannot be carried out, or a worker that could not be started, stopped or proved.

    `code` is one of `contract.Code`; `text` is one line without a name, path or value of anybody's; `field` names the
    parameter or file that is wrong.
    """

    def __init__(self, code: str, text: str, field: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.field = field


class Unusable(WorkerError):
    """The registry could not be read or written, and is as it was. `reason` is one of the codes above."""

    def __init__(self, reason: str, text: str, field: str) -> None:
        super().__init__(Code.STORE, text, field)
        self.reason = reason
