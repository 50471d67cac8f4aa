# SPDX-License-Identifier: Apache-2.0
"""One broker per module, and one of its own for a test that stops or configures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.contract.brokers import PATIENT, Broker, Home, Setting


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[Broker]:
    """A broker whose timers do not fire; tests on it keep apart by fresh ids and scopes."""
    home = Home()
    broker = Broker(home).start()
    try:
        yield broker
        assert broker.alive(), broker.errors()
        assert "Traceback" not in broker.errors()
    finally:
        broker.stop()
        home.remove()


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    """The module's broker, for one test; it has to survive the test."""
    yield shared_broker
    shared_broker.hang_up()
    assert shared_broker.alive(), shared_broker.errors()


@pytest.fixture
def home() -> Iterator[Home]:
    place = Home()
    yield place
    place.remove()


StartBroker = Callable[[Mapping[str, Setting]], Broker]


@pytest.fixture
def start(home: Home) -> Iterator[StartBroker]:
    """Start brokers with settings of the test's own over the patient ones, one after another in one home."""
    started: list[Broker] = []

    def begin(settings: Mapping[str, Setting]) -> Broker:
        broker = Broker(home, {**PATIENT, **settings}).start()
        started.append(broker)
        return broker

    yield begin
    for broker in started:
        broker.stop()
    assert "Traceback" not in (home.root / "stderr").read_text()
