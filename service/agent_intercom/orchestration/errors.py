# SPDX-License-Identifier: Apache-2.0
"""The one exception of this layer."""

from __future__ import annotations


class Refusal(Exception):
    """A request, file or value that the contract does not allow.

    `code` is one of `contract.Code` or, for what never reaches the wire, a code that the raiser documents; `field`
    names what is wrong. `request` is the id of the frame that is refused, as far as one could be read.
    """

    def __init__(self, code: str, text: str, field: str = "", request: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.field = field
        self.request = request
