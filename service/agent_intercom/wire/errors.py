# SPDX-License-Identifier: Apache-2.0
"""The exception of the wire layer."""

from __future__ import annotations


class WireError(Exception):
    """A peer or a socket broke a rule of the wire.

    `code` is machine-readable: `FRAME_TOO_LARGE`, `FRAME_EMPTY`, `JSON_INVALID`, `JSON_TOO_DEEP`, `PEER_UNREADABLE`,
    `PEER_FOREIGN`, `CLOSED`. `field` names what was wrong where one thing can be named.
    """

    def __init__(self, code: str, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.field = field
