# SPDX-License-Identifier: Apache-2.0
"""Section 5: whom a selector means."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.contract.brokers import Broker
from tests.contract.peer import Peer, fresh, fresh_scope, message, refused, send


def ambiguous(selector: str) -> str:
    return f'Multiple sessions named "{selector}" are connected. Use the session ID instead.'


def reaches(sender: Peer, selector: str, target: Peer) -> None:
    """A send to `selector` arrives at `target`."""
    body = message()
    sender.send(send(selector, body))
    frames = [frame for frame in sender.barrier() if frame["type"].startswith("deliver")]
    assert [frame["type"] for frame in frames] == ["delivery_accepted"], frames
    frame = target.recv() if target is not sender else {"message": body, "type": "message"}
    while frame["type"] != "message":
        frame = target.recv()
    assert frame["message"] == body


def fails(sender: Peer, selector: str, code: str, reason: str) -> None:
    body = message()
    sender.send(send(selector, body))
    frames = [frame for frame in sender.barrier() if frame["type"].startswith("deliver")]
    assert frames == [refused(body["id"], code, reason)]


def not_found(sender: Peer, selector: str) -> None:
    fails(sender, selector, "SESSION_NOT_FOUND", "Session not found")


# 1. Exact id.


@pytest.mark.parametrize("target_scope", ["same", "other", "unscoped"])
def test_exact_id_in_any_scope(broker: Broker, target_scope: str) -> None:
    scope = fresh_scope()
    place = {"same": scope, "other": fresh_scope(), "unscoped": None}[target_scope]
    target, sender = broker.join(fresh(), place), broker.join(fresh(), scope)
    reaches(sender, target.id, target)


def test_exact_id_from_unscoped_to_scoped(broker: Broker) -> None:
    target, sender = broker.join(fresh(), fresh_scope()), broker.join(fresh())
    reaches(sender, target.id, target)


def test_exact_id_wins_over_a_name(broker: Broker) -> None:
    scope = fresh_scope()
    target = broker.join(fresh(), fresh_scope())
    named, sender = broker.join(fresh(), scope, name=target.id), broker.join(fresh(), scope)
    named.expect_type("session_joined")
    reaches(sender, target.id, target)
    named.expect_silence()


def test_exact_id_wins_over_a_longer_id(broker: Broker) -> None:
    scope = fresh_scope()
    target = broker.join(fresh(), scope)
    longer, sender = broker.join(target.id + "-longer", scope), broker.join(fresh(), scope)
    longer.expect_type("session_joined")
    reaches(sender, target.id, target)
    longer.expect_silence()


def test_exact_id_is_case_sensitive(broker: Broker) -> None:
    target, sender = broker.join("ABC" + fresh(), fresh_scope()), broker.join(fresh(), fresh_scope())
    not_found(sender, target.id.lower())


@pytest.mark.parametrize("odd", [" padded ", "new\nline", "\u00e9\U0001f600", "\ud800", '"'])
def test_exact_id_with_any_character(broker: Broker, odd: str) -> None:
    target, sender = broker.join(odd + fresh() + odd, fresh_scope()), broker.join(fresh(), fresh_scope())
    reaches(sender, target.id, target)


def test_exact_id_of_512_units_is_the_longest_that_can_be_addressed(broker: Broker) -> None:
    scope = fresh_scope()
    target, sender = broker.join(fresh().ljust(512, "x"), scope), broker.join(fresh(), scope)
    reaches(sender, target.id, target)
    longer = broker.join(fresh().ljust(513, "x"), scope)
    body = message()
    sender.barrier()
    sender.send(send(longer.id, body))
    sender.expect(refused(body["id"], "INVALID_MESSAGE", "Invalid message format"))
    reaches(sender, longer.id[:512], longer)


# 2. Name.


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("alpha", "alpha"),
        ("alpha", "ALPHA"),
        ("AlPhA", "aLpHa"),
        (" alpha ", " ALPHA "),
        ("\u00c9T\u00c9", "\u00e9t\u00e9"),
        ("\u0130x", "i\u0307x"),
        ("\u0391\u03a3", "\u03b1\u03c2"),
        ("\u212a", "k"),
        ("\U00010400", "\U00010428"),
    ],
)
def test_name_ignores_case(broker: Broker, name: str, selector: str) -> None:
    scope = fresh_scope()
    target, sender = broker.join(fresh(), scope, name=name), broker.join(fresh(), scope)
    reaches(sender, selector, target)


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("alpha", " alpha"),
        ("alpha", "alpha "),
        ("alpha", "alph"),
        ("alpha", "alphaa"),
        ("stra\u00dfe", "STRASSE"),
        ("e\u0301", "\u00e9"),
        ("\u03c3", "\u03c2"),
        ("\ufb01", "fi"),
    ],
)
def test_name_is_compared_whole_and_not_folded(broker: Broker, name: str, selector: str) -> None:
    scope = fresh_scope()
    broker.join(fresh(), scope, name=name)
    not_found(broker.join(fresh(), scope), selector)


@pytest.mark.parametrize("direction", ["scoped to other", "scoped to unscoped", "unscoped to scoped"])
def test_name_in_another_scope_is_hidden(broker: Broker, direction: str) -> None:
    places = {
        "scoped to other": (fresh_scope(), fresh_scope()),
        "scoped to unscoped": (fresh_scope(), None),
        "unscoped to scoped": (None, fresh_scope()),
    }
    mine, theirs = places[direction]
    name = fresh("name")
    broker.join(fresh(), theirs, name=name)
    not_found(broker.join(fresh(), mine), name)


def test_two_sessions_of_one_name_are_ambiguous(broker: Broker) -> None:
    scope = fresh_scope()
    broker.join(fresh(), scope, name="worker")
    broker.join(fresh(), scope, name="WORKER")
    fails(broker.join(fresh(), scope), "Worker", "AMBIGUOUS_TARGET", ambiguous("Worker"))


def test_name_in_another_scope_does_not_make_it_ambiguous(broker: Broker) -> None:
    scope = fresh_scope()
    broker.join(fresh(), fresh_scope(), name="worker")
    target, sender = broker.join(fresh(), scope, name="worker"), broker.join(fresh(), scope)
    reaches(sender, "worker", target)


def test_name_match_hides_prefix_matches(broker: Broker) -> None:
    scope = fresh_scope()
    prefix = fresh()
    broker.join(prefix + "-one", scope)
    target, sender = broker.join(fresh(), scope, name=prefix.upper()), broker.join(fresh(), scope)
    reaches(sender, prefix, target)


def test_ambiguous_name_does_not_fall_back_to_a_prefix(broker: Broker) -> None:
    scope = fresh_scope()
    prefix = fresh()
    broker.join(prefix + "-one", scope)
    broker.join(fresh(), scope, name=prefix)
    broker.join(fresh(), scope, name=prefix)
    fails(broker.join(fresh(), scope), prefix, "AMBIGUOUS_TARGET", ambiguous(prefix))


def test_name_set_by_presence_is_found_and_the_old_one_is_not(broker: Broker) -> None:
    scope = fresh_scope()
    target, sender = broker.join(fresh(), scope, name="old"), broker.join(fresh(), scope)
    target.send({"type": "presence", "name": "new"})
    target.barrier()
    reaches(sender, "new", target)
    not_found(sender, "old")


# 3. Prefix.


@pytest.mark.parametrize("length", [1, 4, 20])
def test_unique_prefix_of_any_length(broker: Broker, length: int) -> None:
    scope = fresh_scope()
    target, sender = broker.join("q" + uuid.uuid4().hex, scope), broker.join(fresh(), scope)
    reaches(sender, target.id[:length], target)


def test_prefix_is_case_sensitive(broker: Broker) -> None:
    scope = fresh_scope()
    broker.join("Q" + fresh(), scope)
    not_found(broker.join(fresh(), scope), "q")


def test_prefix_of_two_ids_is_ambiguous(broker: Broker) -> None:
    scope = fresh_scope()
    prefix = fresh()
    broker.join(prefix + "1", scope)
    broker.join(prefix + "2", scope)
    fails(broker.join(fresh(), scope), prefix, "AMBIGUOUS_TARGET", ambiguous(prefix))


@pytest.mark.parametrize("selector", ["x", 'with "quotes"', "\u00e9\U0001f600", "\ud800", "new\nline"])
def test_ambiguity_names_the_selector_as_typed(broker: Broker, selector: str) -> None:
    scope = fresh_scope()
    for _ in range(2):
        broker.join(fresh(), scope, name=selector)
    fails(broker.join(fresh(), scope), selector, "AMBIGUOUS_TARGET", ambiguous(selector))


def test_prefix_in_another_scope_is_hidden(broker: Broker) -> None:
    target = broker.join(fresh(), fresh_scope())
    not_found(broker.join(fresh(), fresh_scope()), target.id[:-1])
    not_found(broker.join(fresh()), target.id[:-1])


def test_no_infix_and_no_suffix(broker: Broker) -> None:
    scope = fresh_scope()
    target, sender = broker.join(fresh(), scope), broker.join("other" + fresh(), scope)
    not_found(sender, target.id[1:])


# The sender takes part.


@pytest.mark.parametrize("by", ["id", "name", "prefix"])
def test_sender_may_address_itself(broker: Broker, by: str) -> None:
    peer = broker.join("q" + fresh(), fresh_scope(), name="me")
    reaches(peer, {"id": peer.id, "name": "me", "prefix": "q"}[by], peer)


def test_sender_counts_for_ambiguity(broker: Broker) -> None:
    scope = fresh_scope()
    broker.join(fresh(), scope, name="worker")
    fails(broker.join(fresh(), scope, name="worker"), "worker", "AMBIGUOUS_TARGET", ambiguous("worker"))


def test_empty_name_is_never_matched(broker: Broker) -> None:
    scope = fresh_scope()
    broker.join(fresh(), scope, name="")
    sender = broker.join(fresh(), scope)
    body = message()
    sender.send(send("", body))
    sender.expect(refused(body["id"], "INVALID_MESSAGE", "Invalid message format"))


@pytest.mark.parametrize("gone", ["closed", "unregistered"])
def test_session_that_left_is_not_found(broker: Broker, gone: str) -> None:
    scope = fresh_scope()
    sender, target = broker.join(fresh(), scope), broker.join(fresh(), scope, name="target")
    sender.expect_type("session_joined")
    if gone == "closed":
        target.close()
    else:
        target.send({"type": "unregister"})
    sender.expect_type("session_left")
    for selector in (target.id, "target", target.id[:-1]):
        not_found(sender, selector)


@pytest.mark.parametrize(
    "selector", [None, 1, True, [], {}, "", "x" * 513, "\U0001f600" * 257], ids=lambda v: repr(v)[:9]
)
def test_selector_is_a_string_of_1_to_512_units(broker: Broker, selector: Any) -> None:
    sender = broker.join(fresh(), fresh_scope())
    body = message()
    sender.send(send(selector, body))
    sender.expect(refused(body["id"], "INVALID_MESSAGE", "Invalid message format"))


def test_longest_selector(broker: Broker) -> None:
    not_found(broker.join(fresh(), fresh_scope()), "\U0001f600" * 256)
