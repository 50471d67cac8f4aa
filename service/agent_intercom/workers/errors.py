# SPDX-License-Identifier: Apache-2.0
"""The one exception of this layer."""

from __future__ import annotations


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
