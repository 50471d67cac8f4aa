# SPDX-License-Identifier: Apache-2.0
"""The record of an unanswered ask, shared by the rules and the store."""

from __future__ import annotations

import msgspec


class AskEdge(msgspec.Struct, gc=False):
    """An ask from `sender` that `target` has not answered yet (contract section 2.7).

    Keyed by `(sender, message_id)`. Times are Unix milliseconds. `blocking` is true while the asker waits; a deferred
    edge stays replyable. Holds ids and times only: never a scope, a name or text.
    """

    sender: str
    message_id: str
    target: str
    created_at: int
    expires_at: int
    blocking: bool
