# SPDX-License-Identifier: Apache-2.0
"""The exception of the host layer."""

from __future__ import annotations


class HostError(Exception):
    """Something that the machine or its manager gave us cannot be used.

    `code` is machine-readable; each module of this layer names its own codes. `field` names what was wrong (a
    variable, a descriptor's name, a kind of path) where one thing can be named; it never holds a path or peer text.
    """

    def __init__(self, code: str, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.field = field
