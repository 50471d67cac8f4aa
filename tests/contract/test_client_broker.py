# SPDX-License-Identifier: Apache-2.0
"""The client against the project's own broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from agent_intercom.intercom.client import IntercomClient, health
from agent_intercom.intercom.client_errors import AskTimeout, ClientError, DeliveryFailed
from agent_intercom.intercom.client_types import (
    AskCancelled,
    AskDeferred,
    Connected,
    Disconnected,
    Joined,
    Left,
    Message,
    Presence,
)
from tests.contract.brokers import Broker
from tests.contract.conftest import StartBroker
from tests.contract.peer import HANG, fresh, fresh_scope

Scenario = Callable[[], Coroutine[Any, Any, None]]
JsonObject = dict[str, Any]

TEXT: Final = "naïve \U0001f600 \ud800 line\nbreak"


def session(broker: Broker, scope: str, name: str, **options: Any) -> IntercomClient:
    return IntercomClient(broker.home.socket, name=name, cwd="/src", model="m", scope=scope, **options)


class Reader:
    def __init__(self, client: IntercomClient) -> None:
        self._events = client.events()

    async def skip_to(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(HANG):
            while not isinstance(event := await anext(self._events), kind):
                pass
        return event


# The client.


def test_two_sessions_find_each_other_send_ask_and_reply(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta", status="idle") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            joined = await seen.skip_to(Joined)
            assert (joined.session.id, joined.session.name, joined.session.status) == (beta.session_id, "beta", "idle")
            assert [s.name for s in await beta.list()] == ["alpha", "beta"]

            await alpha.send("beta", TEXT)
            message = await heard.skip_to(Message)
            assert (message.text, message.sender.id, message.expects_reply) == (TEXT, alpha.session_id, False)

            asking = asyncio.create_task(alpha.ask("BETA", "?"))
            ask = await heard.skip_to(Message)
            assert ask.expects_reply
            await beta.reply(ask, "!")
            reply = await asking
            assert (reply.text, reply.message.sender.id) == ("!", beta.session_id)
            with pytest.raises(DeliveryFailed) as caught:
                await beta.reply(ask, "again")
            assert (caught.value.code, caught.value.accepted) == ("INVALID_REPLY_TARGET", False)

            await beta.presence(status="busy")
            assert (await seen.skip_to(Presence)).session.status == "busy"
            await beta.unregister()
            assert await seen.skip_to(Left) == Left(beta.session_id)

    asyncio.run(scenario())


def test_late_reply_cancel_and_defer(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            with pytest.raises(AskTimeout) as caught:
                await alpha.ask("beta", "?", timeout=0.1)
            ask = await heard.skip_to(Message)
            assert caught.value.deferred
            assert await heard.skip_to(AskDeferred) == AskDeferred(ask.id, alpha.session_id)
            await beta.reply(ask, "late")
            late = await seen.skip_to(Message)
            assert (late.text, late.reply_to) == ("late", ask.id)

            asking = asyncio.create_task(alpha.ask("beta", "?", timeout=None))
            ask = await heard.skip_to(Message)
            asking.cancel()
            gone = await heard.skip_to(AskCancelled)
            assert (gone.message_id, gone.reason) == (ask.id, "cancelled")
            assert not await alpha.cancel(ask.id)

    asyncio.run(scenario())


def test_refusals_of_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha", session_id=fresh()) as alpha, session(broker, scope, "beta"):
            with pytest.raises(DeliveryFailed) as caught:
                await alpha.send("nobody", "x")
            assert caught.value.code == "SESSION_NOT_FOUND"
            with pytest.raises(ClientError) as refused:
                await session(broker, scope, "thief", session_id=alpha.session_id).__aenter__()
            assert refused.value.code == "SESSION_ID_IN_USE"
            async with session(broker, scope, "beta"):
                with pytest.raises(DeliveryFailed) as caught:
                    await alpha.send("beta", "x")
                assert caught.value.code == "AMBIGUOUS_TARGET"

    asyncio.run(scenario())


def test_a_burst_stays_below_every_limit_of_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        scope = fresh_scope()
        async with session(broker, scope, "alpha") as alpha, session(broker, scope, "beta") as beta:
            heard = Reader(beta)
            sends = [asyncio.create_task(alpha.send("beta", str(n))) for n in range(300)]
            texts = [(await heard.skip_to(Message)).text for _ in sends]
            await asyncio.gather(*sends)
            assert texts == [str(n) for n in range(300)]
            assert alpha.connected
            assert beta.connected

    asyncio.run(scenario())


def test_a_restarted_broker_is_found_again_and_the_ask_is_still_answered(start: StartBroker) -> None:
    first = start({})

    async def scenario() -> None:
        scope = fresh_scope()
        async with session(first, scope, "alpha") as alpha, session(first, scope, "beta") as beta:
            seen, heard = Reader(alpha), Reader(beta)
            asking = asyncio.create_task(alpha.ask("beta", "?", timeout=HANG))
            ask = await heard.skip_to(Message)
            await asyncio.to_thread(first.stop)
            await seen.skip_to(Disconnected)
            await asyncio.to_thread(start, {})
            again = await seen.skip_to(Connected)
            assert again == Connected(alpha.session_id, resumed=True)
            await heard.skip_to(Connected)
            await beta.reply(ask, "!")
            assert (await asking).text == "!"

    asyncio.run(scenario())


def test_the_probe_knows_the_broker(broker: Broker) -> None:
    async def scenario() -> None:
        found = await health(broker.home.socket, HANG)
        assert (found.state, found.listener_pid) == ("compatible", broker.pid)
        assert (await health(broker.home.gateway, HANG)).state == "incompatible"

    asyncio.run(scenario())
