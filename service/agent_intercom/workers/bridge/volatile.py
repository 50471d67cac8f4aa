# SPDX-License-Identifier: Apache-2.0
"""What a bridge knows and need not keep: it goes with the process, or with the connection."""

from __future__ import annotations

import msgspec


class Child(msgspec.Struct):
    """The command that runs, for which assignment. `again`: a message has come that is to be acted on after it.

    SIGTERM is sent at `stop_at` and SIGKILL at `kill_at`, where these are set.
    """

    assignment_id: str
    again: bool = False
    stop_at: int | None = None
    kill_at: int | None = None


class Request(msgspec.Struct):
    """The request that waits for its answer. `about` is the assignment or state that it is about.

    `ticket` is whom a command's saying is answered to; `crossing` the threshold that is told.
    """

    id: str
    kind: str
    about: str
    overdue_at: int
    ticket: int | None = None
    crossing: tuple[str, str] | None = None
