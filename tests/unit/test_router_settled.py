# SPDX-License-Identifier: Apache-2.0
"""What is remembered of settled messages, against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.router.settled import Settled
from agent_intercom.intercom.router.state import Delivery
from agent_intercom.wire.clock import Now

LIMITS = Limits(recent_entries=5, recent_ms=20)


def delivery(message_id: str, until: int) -> Delivery:
    return Delivery(f"d-{message_id}-{until}", "sender", 1, message_id, "target", 2, b"", until, False, None)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 9), st.booleans()), max_size=300))
def test_as_a_plain_list_would(steps: list[tuple[str, int, bool]]) -> None:
    settled = Settled()
    known: list[Delivery] = []
    clock = 0
    for message_id, passed, drops in steps:
        clock += passed
        settled.forget(Now(clock, 0), LIMITS)
        known = [entry for entry in known if entry.until > clock][-LIMITS.recent_entries :]
        found = settled.by_message.get(("sender", message_id))
        assert found is next((entry for entry in known if entry.message_id == message_id), None)
        if found is None:
            entry = delivery(message_id, clock + LIMITS.recent_ms)
            settled.add(entry)
            known.append(entry)
        elif drops:
            settled.drop(found)
            known.remove(found)
        assert settled.entries() == known
        assert len(settled) == len(known)
        assert settled.size == sum(len(entry.message_id) + 140 for entry in known)


def test_what_is_dropped_over_and_over_does_not_pile_up() -> None:
    settled = Settled()
    kept = delivery("kept", 1000)
    settled.add(kept)
    for _ in range(10_000):
        entry = delivery("again", 1000)
        settled.add(entry)
        settled.drop(entry)
    assert settled.entries() == [kept]
    assert len(settled._order) < 200
    stale = [entry for entry in settled._order if entry is not kept]
    assert all(not entry.sender + entry.message_id + entry.target + entry.delivery for entry in stale)
