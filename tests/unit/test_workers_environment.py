# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker: what it is given, what is taken out, and what nobody can slip in."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_intercom.orchestration.environment import NEVER
from agent_intercom.workers.environment import Identity, build, commands_of, finds_command
from agent_intercom.workers.errors import WorkerError

SCOPE = "scope-of-the-asker"
WHO = Identity("ba9876543210", "0123456789ab", 3)
OWN = {
    "AGENT_INTERCOM_WORKER_ID": "ba9876543210",
    "AGENT_INTERCOM_WORKER_INCARNATION_ID": "0123456789ab",
    "AGENT_INTERCOM_WORKER_GENERATION": "3",
    "AGENT_INTERCOM_SCRATCH": "/s",
}


def built(given: dict[str, str], scope: str | None = SCOPE, confined: bool = False) -> dict[str, str]:
    return build(given, scope=scope, identity=WHO, scratch="/s", confined=confined)


def test_what_it_is_given_and_what_it_is() -> None:
    given = {"PATH": "/bin", "EMPTY": "", "BYTES": "\udcff", "TMPDIR": "/t"}
    assert built(given) == {**given, **OWN, "AGENT_INTERCOM_SCOPE_ID": SCOPE}


@pytest.mark.parametrize("pattern", [pattern for group in NEVER for pattern in group.patterns])
def test_what_belongs_to_one_session_or_service_is_nobody_else_s(pattern: str) -> None:
    """Whatever the asker, the run's place or the manager's own environment has of it."""
    name = pattern.replace("*", "X")
    found = built({name: "poison"}, scope=None)
    assert "poison" not in found.values()


def test_the_scope_is_that_of_the_record_and_no_other() -> None:
    poisoned = {"AGENT_INTERCOM_SCOPE_ID": "scope-of-somebody-else"}
    assert built(poisoned)["AGENT_INTERCOM_SCOPE_ID"] == SCOPE
    assert "AGENT_INTERCOM_SCOPE_ID" not in built(poisoned, scope=None)


@pytest.mark.parametrize("scope", ["", "short", "x" * 129, "sixteen letters.", "s\u00e4" * 10])
def test_a_scope_that_is_none(scope: str) -> None:
    with pytest.raises(WorkerError) as caught:
        built({}, scope=scope)
    assert caught.value.code == "invalid_request" and (not scope or scope not in str(caught.value))


def test_who_is_confined_finds_its_own_places_and_no_way_around() -> None:
    given = {"TMPDIR": "/t", "XDG_CACHE_HOME": "/c", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/b", "DOCKER_HOST": "x"}
    assert built(given, confined=True) == {
        **OWN,
        **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), "/s"),
        "XDG_CACHE_HOME": "/s/cache",
        "GIT_OPTIONAL_LOCKS": "0",
        "AGENT_INTERCOM_READ_ONLY": "1",
        "AGENT_INTERCOM_SCOPE_ID": SCOPE,
    }


def test_a_worker_s_worker_does_not_get_its_scratch_directory() -> None:
    parent = {"AGENT_INTERCOM_SCRATCH": "/p", "TMPDIR": "/p", "XDG_CACHE_HOME": "/p/cache", "TMP": "/p2", "X": "/p/x"}
    assert built(parent, scope=None) == {"TMP": "/p2", "X": "/p/x", **OWN}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An installation, and a directory `other` with another `orchestrate`."""
    for directory in ("lib/agent-intercom", "bin", "other", "empty/orchestrate"):
        (tmp_path / directory).mkdir(parents=True)
    for directory in ("bin", "other"):
        (tmp_path / directory / "orchestrate").write_text("#!/bin/sh\n")
        (tmp_path / directory / "orchestrate").chmod(0o755)
    return tmp_path


def test_where_the_commands_of_an_installation_are(prefix: Path) -> None:
    for directory in ("lib/agent-intercom", "bin"):
        assert commands_of(str(prefix / directory)) == str(prefix / "bin")
    assert commands_of(str(prefix / "empty")) is None
    (prefix / "bin/orchestrate").chmod(0o644)
    assert commands_of(str(prefix / "lib/agent-intercom")) is None


def test_who_would_not_find_orchestrate_finds_that_of_the_installation(prefix: Path) -> None:
    own, other, empty = (str(prefix / name) for name in ("bin", "other", "empty"))

    def search(given: str) -> str:
        made = build({"PATH": given}, scope=None, identity=WHO, scratch="/s", confined=False, commands=own)
        assert finds_command(made)
        return made["PATH"]

    assert search("/nowhere") == f"/nowhere:{own}"
    assert search(empty) == f"{empty}:{own}", "a directory of that name is no command"
    assert search(f"/nowhere:{other}") == f"/nowhere:{other}", "somebody has chosen"
    assert search("other") == f"other:{own}", "where it works need not be here"
    assert search(own) == own
    assert search("") == f":{own}"
    assert "PATH" not in build({}, scope=None, identity=WHO, scratch="/s", confined=False, commands=own)
    assert built({"PATH": "/nowhere"})["PATH"] == "/nowhere"
