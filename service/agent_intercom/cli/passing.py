# SPDX-License-Identifier: Apache-2.0
"""Sessions that live as long as one command."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from agent_intercom.cli import signals
from agent_intercom.cli.exits import JsonObject
from agent_intercom.cli.operations import Outcome, perform
from agent_intercom.cli.place import MODEL, Place, ephemeral_id, ephemeral_name
from agent_intercom.cli.seat import Seat
from agent_intercom.cli.seat_client import SeatClient
from agent_intercom.intercom.client import IntercomClient
from agent_intercom.intercom.client_policy import DEFAULT_TIMEOUTS

START_SECONDS: Final = 3.0
"""What a broker gets to start, however short an ask is to take."""


def carry_out(place: Place, request: JsonObject) -> Outcome:
    """Register as an ephemeral session, carry `request` out and leave. Raises ClientError where registering fails."""
    return _run(_carry_out(place, request))


def carry_out_as_seat(place: Place, seat: Seat, request: JsonObject) -> Outcome:
    """The same as the seat, which this process must hold. What arrives meanwhile goes to the seat's inbox."""
    return _run(_carry_out_as_seat(place, seat, request))


def _run(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run `work`; a signal cancels it, as the event loop does for SIGINT alone. Raises Ended."""
    told: list[int] = []

    async def until_told() -> Outcome:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            told.append(number)
            task.cancel()

        for number in signals.heeded():
            loop.add_signal_handler(number, end, number)
        return await work

    try:
        return asyncio.run(until_told())
    except asyncio.CancelledError:
        if told:
            raise signals.Ended(told[0]) from None
        raise


def _patience(request: JsonObject) -> float:
    """Seconds to wait for being registered: no longer than an ask is to take, and long enough to start a broker."""
    wanted = request.get("timeout")
    if not isinstance(wanted, float):
        return DEFAULT_TIMEOUTS.connect
    return min(DEFAULT_TIMEOUTS.connect, max(wanted, START_SECONDS))


async def _carry_out(place: Place, request: JsonObject) -> Outcome:
    client = IntercomClient(
        place.addresses,
        session_id=ephemeral_id(),
        name=ephemeral_name(place),
        cwd=place.cwd,
        model=MODEL,
        scope=place.scope,
        timeouts=DEFAULT_TIMEOUTS._replace(connect=_patience(request)),
        # Nobody reads events here: what is sent to this session must not be taken for delivered.
        auto_ack=False,
        event_capacity=0,
    )
    async with client:
        outcome = await perform(client, request, lasting=False)
        await client.unregister()
    return outcome


async def _carry_out_as_seat(place: Place, seat: Seat, request: JsonObject) -> Outcome:
    async with SeatClient(place, seat) as session:
        return await perform(session.client, request, lasting=True)
