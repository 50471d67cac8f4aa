# SPDX-License-Identifier: Apache-2.0
"""What the workflow wants done. All `Save`s of a batch are committed first; then the rest is done, in order."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from agent_intercom.orchestration import rows


class Save(msgspec.Struct, frozen=True):
    """The row is to be as given."""

    row: rows.Change


class Write(msgspec.Struct, frozen=True, gc=False):
    """Queue `frame` (length prefix included) on connection `number`."""

    number: int
    frame: bytes


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Read no more from the connection, send what is queued, close."""

    number: int


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Close the connection at once; nothing that waits for it is sent."""

    number: int


class Bound(msgspec.Struct, frozen=True, gc=False):
    """The connection is a worker's or an observer's now: what follows leaves when it is sure to survive a restart.

    `watches`: an observer's, which is given up when it does not read for a second (section 1.6).
    """

    number: int
    watches: bool


class Check(msgspec.Struct, frozen=True, gc=False):
    """Find out whether the run's workspace capsule still holds; the answer is an input for this connection."""

    number: int


class ForgetStartup(msgspec.Struct, frozen=True, gc=False):
    """All bodies that the startup file holds were handed on: delete it (section 4.3, step 8)."""


class Tell(msgspec.Struct, frozen=True, gc=False):
    """The status line changed."""


class Note(msgspec.Struct, frozen=True):
    """Log `event` of the journal's catalogue."""

    event: str
    fields: dict[str, Any]


Effect: TypeAlias = Save | Write | Finish | Drop | Bound | Check | ForgetStartup | Tell | Note
