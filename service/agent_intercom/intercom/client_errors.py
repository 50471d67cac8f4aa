# SPDX-License-Identifier: Apache-2.0
"""The errors of the client. Standard library only."""

from __future__ import annotations


class ClientError(Exception):
    """The client refused or failed something.

    `code` is an error code of the protocol (contract section 2.3) or one of: `SCOPE_INVALID`, `INVALID_SESSION`,
    `INVALID_MESSAGE`, `FRAME_TOO_LARGE`, `PATH_TOO_LONG`, `BROKER_UNREACHABLE`, `CONNECTION_LOST`, `PEER_FOREIGN`,
    `PEER_UNREADABLE`, `INCOMPATIBLE`, `PROTOCOL_VIOLATION`, `TIMEOUT`, `CLOSED`. `field` names the
    value at fault where there is one.
    """

    def __init__(self, code: str, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.field = field


class DeliveryFailed(ClientError):
    """The broker's final word on a message that was not delivered.

    `code` is a delivery code of the contract, `reason` the broker's text. `accepted` tells whether the broker had taken
    the message before: then the recipient may have seen it, and only the same id may be sent again.
    """

    def __init__(self, message_id: str, code: str, reason: str, accepted: bool) -> None:
        super().__init__(code, reason)
        self.message_id = message_id
        self.reason = reason
        self.accepted = accepted


class SendTimeout(ClientError):
    """No final word on a message in time; whether it arrived is unknown. `accepted`: the broker had taken it."""

    def __init__(self, message_id: str, accepted: bool) -> None:
        super().__init__("TIMEOUT", "the broker did not say in time whether the message was delivered")
        self.message_id = message_id
        self.accepted = accepted


class AskTimeout(ClientError):
    """No reply in time.

    `deferred`: the ask stays open, and a late reply arrives as an ordinary message. `cancelled`: it was taken back.
    Neither where the broker did not say.
    """

    def __init__(self, message_id: str, delivered: bool, *, deferred: bool = False, cancelled: bool = False) -> None:
        super().__init__("TIMEOUT", "no reply in time")
        self.message_id = message_id
        self.delivered = delivered
        self.deferred = deferred
        self.cancelled = cancelled


class AskCancelledError(ClientError):
    """The asked session ended the ask without a reply; `reason` as in the contract's `ask_cancelled`."""

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__("ASK_CANCELLED", f"the ask was ended by the other side: {reason}")
        self.message_id = message_id
        self.reason = reason
