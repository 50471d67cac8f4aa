# SPDX-License-Identifier: Apache-2.0
"""The client against a broker whose frames the test writes: registering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_intercom.intercom.client import IntercomClient, Timeouts, capture_scope
from agent_intercom.intercom.client_errors import ClientError
from agent_intercom.intercom.client_types import Connected, Disconnected
from tests.unit.clientstage import SCOPE, Reader, client, connected, settled
from tests.unit.fakebroker import FakeBroker, registered, run


def test_register_has_exactly_the_contracts_keys() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, name="n", status="s", scope=SCOPE, pid=7, started_at=8, runtime_instance_id="r")
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        frame = await line.register()
        await entering
        session = frame.pop("session")
        assert frame == {
            "type": "register",
            "protocol": "pi-intercom",
            "version": 4,
            "sessionId": "me",
            "scopeId": SCOPE,
        }
        assert session.pop("lastActivity") > 8
        assert session == {
            "name": "n",
            "status": "s",
            "cwd": "/src",
            "model": "m",
            "pid": 7,
            "startedAt": 8,
            "runtimeInstanceId": "r",
        }
        assert made.session_id == "me"
        assert made.connected
        await made.close()
        assert await line.at_end()

    run(scenario)


def test_the_brokers_choice_of_an_id_is_kept_for_life() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, session_id=None)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        assert "sessionId" not in await line.read()
        line.write(registered("chosen"))
        await entering
        line.close()
        again = await broker.accept()
        assert (await again.register())["sessionId"] == "chosen"
        await made.close()

    run(scenario)


def test_a_reconnect_keeps_id_scope_and_runtime_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: FakeBroker) -> None:
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", SCOPE)
        made = IntercomClient(broker.path, cwd="/", model="m", session_id="me", reconnect_delays=(0.0,))
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "Other_scope_0123456789")
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        first = await line.register()
        await entering
        events = Reader(made)
        assert await events.next() == Connected("me", resumed=False)
        line.close()
        second = await (await broker.accept()).register()
        assert first["scopeId"] == second["scopeId"] == SCOPE
        for key in ("pid", "startedAt", "runtimeInstanceId"):
            assert first["session"][key] == second["session"][key]
        assert await events.next() == Disconnected(None)
        assert await events.next() == Connected("me", resumed=True)
        await made.close()

    run(scenario)


@pytest.mark.parametrize("value", ["short", "x" * 129, "with space 0123456789", "Scope_0123456789\n"])
def test_an_invalid_scope_stops_before_a_socket_is_opened(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: FakeBroker) -> None:
        monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", value)
        with pytest.raises(ClientError) as caught:
            IntercomClient(broker.path, cwd="/", model="m")
        assert caught.value.code == "SCOPE_INVALID"
        assert value not in repr(caught.value)
        assert caught.value.__cause__ is None
        assert broker.idle()

    run(scenario)


def test_an_empty_scope_is_unscoped() -> None:
    assert capture_scope("") is None
    assert capture_scope(None) is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cwd": ""}, "cwd"),
        ({"cwd": "x" * 4097}, "cwd"),
        ({"model": ""}, "model"),
        ({"name": "\U0001f600" * 129}, "name"),
        ({"status": "x" * 513}, "status"),
        ({"runtime_instance_id": "x" * 257}, "runtimeInstanceId"),
        ({"session_id": " "}, "session_id"),
        ({"session_id": "x" * 513}, "session_id"),
    ],
)
def test_claims_over_the_limits_are_refused_at_once(options: dict[str, Any], field: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        with pytest.raises(ClientError) as caught:
            client(broker, **options)
        assert (caught.value.code, caught.value.field) == ("INVALID_SESSION", field)

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "registered", "sessionId": "me"},
        {"type": "registered", "sessionId": "me", "protocol": "pi-intercom", "version": 3},
        {"type": "registered", "sessionId": "me", "protocol": "other", "version": 4},
        {"type": "registered", "sessionId": "me", "protocol": "pi-intercom", "version": 4, "extra": 1},
        {"type": "registered", "sessionId": "another", "protocol": "pi-intercom", "version": 4},
        {"type": "session_left", "sessionId": "x"},
        {"type": "unheard_of"},
        [],
    ],
)
def test_another_protocol_ends_the_client_for_good(answer: Any) -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, patient=True)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write(answer)
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert caught.value.code == "INCOMPATIBLE"
        assert await line.at_end()
        assert broker.idle()

    run(scenario)


def test_version_four_may_be_written_as_a_fraction() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker)
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write({**registered("me"), "version": 4.0})
        await settled(entering)
        await made.close()

    run(scenario)


@pytest.mark.parametrize("code", ["SESSION_ID_IN_USE", "INVALID_REQUEST", "TOO_MANY_SESSIONS"])
def test_a_refused_registration_carries_its_code(code: str) -> None:
    async def scenario(broker: FakeBroker) -> None:
        entering = asyncio.ensure_future(client(broker).__aenter__())
        line = await broker.accept()
        await line.expect("register")
        line.write({"type": "error", "code": code, "error": "why"})
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert (caught.value.code, str(caught.value)) == (code, "why")
        assert await line.at_end()

    run(scenario)


def test_a_full_broker_is_tried_again_after_a_reconnect() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            line.close()
            again = await broker.accept()
            await again.expect("register")
            again.write({"type": "error", "code": "TOO_MANY_SESSIONS", "error": "full"})
            await (await broker.accept()).register()
            await Reader(made).skip_to(Disconnected)

    run(scenario)


def test_an_id_lost_to_another_ends_the_client_and_what_waits() -> None:
    async def scenario(broker: FakeBroker) -> None:
        async with connected(broker) as (made, line):
            sending = asyncio.ensure_future(made.send("b", "x"))
            await line.expect("send")
            line.close()
            again = await broker.accept()
            await again.expect("register")
            again.write({"type": "error", "code": "SESSION_ID_IN_USE", "error": "why"})
            with pytest.raises(ClientError) as caught:
                await settled(sending)
            assert caught.value.code == "SESSION_ID_IN_USE"
            with pytest.raises(ClientError):
                await Reader(made).skip_to(type(None))
            with pytest.raises(ClientError) as caught:
                await made.list()
            assert caught.value.code == "SESSION_ID_IN_USE"

    run(scenario)


def test_no_broker_is_told_at_once_and_nothing_is_started() -> None:
    async def scenario(broker: FakeBroker) -> None:
        await broker.stop()
        with pytest.raises(ClientError) as caught:
            await client(broker).__aenter__()
        assert caught.value.code == "BROKER_UNREACHABLE"
        assert str(broker.path) not in str(caught.value)

    run(scenario)


def test_a_patient_client_waits_for_a_broker() -> None:
    async def scenario(broker: FakeBroker) -> None:
        await broker.stop()
        made = client(broker, patient=True)
        entering = asyncio.ensure_future(made.__aenter__())
        await asyncio.sleep(0)
        await broker.start()
        await (await broker.accept()).register()
        await settled(entering)
        await made.close()

    run(scenario)


def test_the_first_address_that_answers_is_taken() -> None:
    async def scenario(broker: FakeBroker) -> None:
        paths = [broker.path.with_name("none"), broker.path]
        made = IntercomClient(paths, cwd="/", model="m", scope=None)
        entering = asyncio.ensure_future(made.__aenter__())
        await (await broker.accept()).register()
        await settled(entering)
        await made.close()

    run(scenario)


def test_a_connection_lost_before_registered_is_tried_three_times() -> None:
    async def scenario(broker: FakeBroker) -> None:
        entering = asyncio.ensure_future(client(broker).__aenter__())
        for _ in range(3):
            line = await broker.accept()
            await line.expect("register")
            line.close()
        with pytest.raises(ClientError) as caught:
            await settled(entering)
        assert caught.value.code == "CONNECTION_LOST"
        assert broker.idle()

    run(scenario)


def test_a_broker_that_does_not_register_is_given_up() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, timeouts=Timeouts(connect=0.01))
        with pytest.raises(ClientError) as caught:
            await made.__aenter__()
        assert caught.value.code == "TIMEOUT"

    run(scenario)


def test_connecting_now_does_not_wait_for_the_next_attempt() -> None:
    async def scenario(broker: FakeBroker) -> None:
        made = client(broker, reconnect_delays=(3_600.0,))
        entering = asyncio.ensure_future(made.__aenter__())
        line = await broker.accept()
        await line.register()
        await entering
        await broker.stop()
        line.close()
        await Reader(made).skip_to(Disconnected)
        with pytest.raises(ClientError) as caught:
            await settled(asyncio.ensure_future(made.connect_now()))
        assert caught.value.code == "BROKER_UNREACHABLE"
        await broker.start()
        connecting = asyncio.ensure_future(made.connect_now())
        await (await broker.accept()).register()
        await settled(connecting)
        assert made.connected
        await made.close()
        with pytest.raises(ClientError) as caught:
            await made.connect_now()
        assert caught.value.code == "CLOSED"

    run(scenario)


def test_an_address_that_no_socket_can_have_is_told() -> None:
    async def scenario(broker: FakeBroker) -> None:
        long = f"{broker.path}/{'x' * 107}"
        with pytest.raises(ClientError) as caught:
            await IntercomClient(long, cwd="/", model="m").__aenter__()
        assert caught.value.code == "PATH_TOO_LONG"
        made = IntercomClient((long, broker.path), cwd="/", model="m")
        entering = asyncio.ensure_future(made.__aenter__())
        await (await broker.accept()).register()
        await entering
        await made.close()

    run(scenario)
