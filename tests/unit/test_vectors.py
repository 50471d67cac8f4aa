# SPDX-License-Identifier: Apache-2.0
"""The vector files are the reviewed ones, and the hashes that the broker announces follow from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.intercom import contract
from tests.canonical import canonical_hash, insertion_hash

VECTORS = Path(__file__).resolve().parent.parent / "vectors"

# name: (SHA-256 of the file, schema version, semantics hash, domain)
PINNED: dict[str, tuple[str, int, str, str | None]] = {
    "protocol-v4.json": (
        "b238101372da8dda030b76f3a2ac5c12897afe448ae9eb82ba13490f2a592b4f",
        2,
        "ef23cae55b3cca7683fee60e5f2421350cde731dc5424c82286a33a8b9cdf6cb",
        "agent-intercom-core/protocol-v4/acceptance-vectors",
    ),
    "policy-v2.json": (
        "0787f78af806a3c7a66db78d80c2caa69a732854e31796634a37595d0617105e",
        2,
        "f3b00e503631bc91123aedfbcf1df72cc9913e1893c09728b2c598f3dcdfdfe0",
        None,
    ),
    "participant-state.json": (
        "f6df87674b44785fb701d58049fa1a79e57a01ab56be8a6cce3197d6116c6a81",
        1,
        "0da19269f0c2befd9b22b8d146d6bd30450f3f0d64598148fd9317f36a5fc920",
        "agent-intercom-core/boss-participant-state-v1",
    ),
    "participant-state-transition.json": (
        "a1599f2b3dfd17dbbd4a93bc29613368d8549c6562077af5e1c0e871b0749298",
        1,
        "143fb362364d0742df565e8a02f778a493007e799c429cec8468f38e6520c86a",
        "agent-intercom-core/boss-participant-state-transition-v1",
    ),
}


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((VECTORS / name).read_bytes())
    return document


def recomputed(document: dict[str, Any]) -> str:
    if document["domain"] is None:
        return insertion_hash(document["value"])
    return canonical_hash(document["domain"], document["value"])


def test_exactly_the_pinned_files_are_carried() -> None:
    assert {path.name for path in VECTORS.iterdir()} == set(PINNED)


@pytest.mark.parametrize("name", PINNED)
def test_file_is_pinned(name: str) -> None:
    digest, version, _, _ = PINNED[name]
    assert hashlib.sha256((VECTORS / name).read_bytes()).hexdigest() == digest
    assert load(name)["value"]["version"] == version


@pytest.mark.parametrize("name", PINNED)
def test_semantics_hash_is_recomputed(name: str) -> None:
    _, _, semantics, domain = PINNED[name]
    document = load(name)
    assert document["domain"] == domain
    assert recomputed(document) == semantics == document["hash"]


def test_broker_announces_the_recomputed_hashes() -> None:
    policy = load("policy-v2.json")
    assert recomputed(load("protocol-v4.json")) == contract.PROTOCOL_SEMANTICS_HASH
    assert recomputed(policy) == contract.POLICY_SEMANTICS_HASH
    assert policy["value"]["version"] == contract.POLICY_SEMANTICS_VERSION


@pytest.mark.parametrize("name", PINNED)
def test_hash_notices_any_change(name: str) -> None:
    document = load(name)
    document["value"]["version"] += 1
    assert recomputed(document) != document["hash"]


def test_corpus_has_all_acceptance_vectors() -> None:
    vectors = load("protocol-v4.json")["value"]["vectors"]
    assert len(vectors) == len({vector["name"] for vector in vectors}) == 48


SCOPES = [vector for vector in load("protocol-v4.json")["value"]["vectors"] if vector["operation"] == "validate_scope"]


@pytest.mark.parametrize("vector", SCOPES, ids=lambda vector: vector["name"])
def test_scope_vectors(vector: dict[str, Any]) -> None:
    try:
        scope = contract.parse_scope(vector.get("scopeInput"))
    except ValueError as error:
        outcome = "invalid_scope"
        assert str(vector["scopeInput"]) not in str(error)
    else:
        outcome = "valid_unscoped" if scope is None else "valid_scoped"
        assert scope in {None, vector.get("scopeInput")}
    assert outcome == vector["expected"]
