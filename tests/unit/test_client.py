# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes: list, presence, the end and the health probe."""

from __future__ import annotations

import asyncio

import pytest

from agent_intercom.intercom import client_health
from agent_intercom.intercom.client import health, random_id
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import Connected
from agent_intercom.intercom.contract import POLICY_SEMANTICS_HASH
from tests.unit.clientstage import QUICK, connected, settled
from tests.unit.fakebroker import HANG, FakeBroker, Frame, info, run


def test_list_is_asked_again_after_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            listing = asyncio.ensure_future(made.list())
            await line.expect("list")
            line.close()
            again = await broker.accept()
            await again.register()
            request = await again.expect("list")
            again.write({"type": "sessions", "requestId": request["requestId"], "sessions": [info("me"), info("b")]})
            assert [session.id for session in await settled(listing)] == ["me", "b"]

    run(scenario)


def test_list_without_an_answer_times_out() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, timeouts=QUICK._replace(list=0.01)) as (made, _):
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "TIMEOUT"

    run(scenario)


def test_presence_is_kept_across_reconnects() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker, name="old") as (made, line):
            await made.presence(name="new", status="busy")
            assert await line.read() == {"type": "presence", "name": "new", "status": "busy"}
            line.close()
            again = await broker.accept()
            session = (await again.register())["session"]
            assert (session["name"], session["status"]) == ("new", "busy")
            with pytest.raises(ClientError):
                await made.presence(status="x" * 513)

    run(scenario)


@pytest.mark.parametrize("preserve", [True, False])
def test_unregister_is_written_before_the_end(preserve: bool) -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            await made.unregister(preserve_asks=preserve)
            assert await line.read() == {"type": "unregister", "preserveAsks": preserve}
            assert await line.at_end()
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "CLOSED"

    run(scenario)


def test_close_fails_what_waits_and_ends_the_events() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x"))
            asking = asyncio.ensure_future(made.ask("b", "?", timeout=None))
            await line.expect("send")
            await line.expect("send")
            await made.close()
            for waiting in (sending, asking):
                with pytest.raises(ClientError) as caught:
                    await settled(waiting)
                assert caught.value.code == "CLOSED"
            assert [type(event) async for event in made.events()] == [Connected]

    run(scenario)


def test_random_ids_are_uuids() -> None:
    import uuid

    found = uuid.UUID(random_id())
    assert (found.version, found.variant) == (4, uuid.RFC_4122)


# The health probe.

HEALTHY: Frame = {
    "type": "health_ok",
    "protocol": "pi-intercom",
    "version": 4,
    "endpoint": "local",
    "remoteAccess": {
        "feature": "remote-access-v1",
        "policySemanticsVersion": 2,
        "policySemanticsHash": POLICY_SEMANTICS_HASH,
    },
}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "compatible"),
        ({"version": 3}, "incompatible"),
        ({"version": True}, "incompatible"),
        ({"remoteAccess": None}, "incompatible"),
        ({"endpoint": "remote"}, "incompatible"),
        ({"type": "error"}, "unreachable"),
        ({"requestId": "other"}, "unreachable"),
    ],
)
def test_health_judges_the_first_frame(change: Frame, state: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        probing = asyncio.ensure_future(health(broker.path, HANG))
        line = await broker.accept()
        request = await line.expect("health")
        line.write({**HEALTHY, "requestId": request["requestId"], **change})
        found = await settled(probing)
        assert found.state == state
        assert await line.at_end()

    run(scenario)


def test_health_of_nobody_and_of_a_silent_listener() -> None:
    async def scenario(broker: FakeBroker) -> None:
        assert (await health(broker.path, 0.01)).state == "unreachable"
        assert (await health(broker.path.with_name("none"))).state == "unreachable"
        with pytest.raises(ClientError) as caught:
            client_health.require(await health(broker.path.with_name("none")))
        assert caught.value.code == "BROKER_UNREACHABLE"

    run(scenario)
