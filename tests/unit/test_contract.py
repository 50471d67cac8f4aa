# SPDX-License-Identifier: Apache-2.0
"""The contract's closed sets stand twice, as constants and as the client's types; they must stay equal."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from agent_intercom.intercom import client_frames
from agent_intercom.intercom.contract import CancelReason, DeliveryCode


@pytest.mark.parametrize(
    ("constants", "frame", "field", "size"),
    [
        (DeliveryCode, client_frames.DeliveryRefused, "code", 15),
        (CancelReason, client_frames.AskCancelledNotice, "reason", 5),
    ],
)
def test_closed_sets_are_one(constants: type, frame: type[Any], field: str, size: int) -> None:
    values = {value for name, value in vars(constants).items() if name.isupper()}
    assert len(values) == size
    assert set(get_args(get_type_hints(frame)[field])) == values
