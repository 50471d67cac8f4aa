# SPDX-License-Identifier: Apache-2.0
"""Manifests of every version: what is read, what is refused, and that ours is read as it was written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import manifest
from agent_intercom.orchestration.errors import Refusal
from tests.unit import orchruns

COORD = "/state/pi-demo-agents/20260801T120000Z-4242"
PROJECT = "/home/alice/demo"


def sample(version: int) -> dict[str, Any]:
    """A manifest of that version in which whatever may be empty is filled."""
    record = orchruns.record(Path(COORD), version, Path(PROJECT), ("implementer", "reviewer"), "a1")
    if version >= 5:
        record["project_config"] |= {
            "matched": True,
            "directory": PROJECT,
            "implementation_flow": "phased",
            "specialists": ["probe"],
            "role_overrides": ["implementer", "reviewer"],
        }
    if version in {6, 7}:
        record["custom_role_registry"] = {"roles": []}
    if version == 8:
        for role in record["roles"].values():
            role["skills"] = [{"path": "/skills/a.md", "sha256": "0" * 64}]
    return record


def parse(record: object) -> manifest.Manifest:
    return manifest.parse(json.dumps(record).encode(), COORD)


def refused(record: object) -> str:
    with pytest.raises(Refusal) as caught:
        parse(record)
    assert caught.value.code == "manifest_invalid"
    assert "alice" not in str(caught.value) + caught.value.field
    return caught.value.field


@pytest.mark.parametrize("version", range(1, 9))
def test_every_version_is_read(version: int) -> None:
    found = parse(sample(version))
    assert found.version == version
    assert found.roles.keys() == {"implementer", "reviewer"}
    assert found.host == ("systemd" if version == 8 else "tmux")
    assert (found.coordination is None) == (version < 3)
    assert found.execution_profile.source == ("legacy" if version < 4 else "packaged-default")
    assert found.project_config.matched is (None if version < 5 else True)
    assert (found.orchestration_config.version is None) == (version < 5)


@pytest.mark.parametrize("version", range(1, 9))
def test_exactly_the_keys_of_its_version(version: int) -> None:
    for key in sample(version):
        without = sample(version)
        del without[key]
        refused(without)
    refused(sample(version) | {"extra": 1})
    for key in sample(version)["roles"]["reviewer"]:
        without = sample(version)
        del without["roles"]["reviewer"][key]
        assert refused(without) == "roles.reviewer"
    more = sample(version)
    more["roles"]["reviewer"]["extra"] = 1
    assert refused(more) == "roles.reviewer"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", True),
        ("version", 9),
        ("version", "5"),
        ("created_at", "2026-08-01T12:00:00"),
        ("created_at", 1),
        ("session", "other"),
        ("window", "other"),
        ("project", "relative"),
        ("project", "/home/alice/../bob"),
        ("coord", "/state/pi-demo-agents/other"),
        ("approve_project", 0),
        ("transport", "ssh"),
        ("coordination", "files"),
        ("protocol_version", True),
        ("protocol_version", 2),
        ("monitor_pane_id", "0"),
        ("roles", []),
        ("roles.reviewer.provider", ""),
        ("roles.reviewer.model", "m" * 257),
        ("roles.reviewer.thinking", "some"),
        ("roles.reviewer.thinking", []),
        ("roles.reviewer.tools", None),
        ("roles.implementer.tools", "read"),
        ("roles.reviewer.pane_id", "%1"),
        ("roles.reviewer.pane_id", "%x"),
        ("roles.reviewer.session_dir", f"{COORD}/sessions/implementer"),
        ("roles.reviewer.session_id", "a/b"),
        ("roles.reviewer.skills", [{"path": "/a/../b", "sha256": "0" * 64}]),
        ("roles.reviewer.skills", [{"path": "/b", "sha256": "0" * 63}]),
        ("roles.reviewer.skills", [{"path": "/b", "sha256": "0" * 64}] * 2),
        ("roles.reviewer.skills", [{"path": f"/{n}", "sha256": "0" * 64} for n in range(9)]),
        ("execution_profile.kind", "custom"),
        ("execution_profile.name", "Thorough"),
        ("execution_profile.source", "legacy"),
        ("orchestration_config.path", "relative"),
        ("orchestration_config.version", True),
        ("project_config.matched", 1),
        ("project_config.matched", False),
        ("project_config.directory", "/elsewhere"),
        ("project_config.implementation_flow", "both"),
        ("project_config.specialists", ["probe", "probe"]),
        ("project_config.specialists", [{}]),
        ("project_config.workspace_capsule", 1),
        ("project_config.model_defaults", None),
        ("project_config.role_overrides", ["reviewer", "implementer"]),
    ],
)
def test_values_are_checked(field: str, value: Any) -> None:
    record = sample(5)
    *where, last = field.split(".")
    inner = record
    for step in where:
        inner = inner[step]
    inner[last] = value
    assert refused(record).partition(".")[0] == (where[0] if where else field)


def test_roles_of_a_run() -> None:
    for name in ("implementer", "reviewer"):
        record = sample(5)
        del record["roles"][name]
        assert refused(record) == "roles"
    record = sample(5)
    record["roles"]["custom-x"] = record["roles"]["implementer"] | {"session_dir": f"{COORD}/sessions/custom-x"}
    assert refused(record) == "roles"


def test_custom_roles_of_later_hosts() -> None:
    record = sample(7)
    own = {"session_dir": f"{COORD}/sessions/custom-x", "tools": "read,grep,find,ls", "pane_id": "%3"}
    custom = record["roles"]["reviewer"] | own
    record["roles"]["custom-x"] = custom | {"custom_role": {"a": 1}, "custom_policy": {}}
    assert parse(record).roles["custom-x"].custom_role == {"a": 1}


def test_a_project_chose_no_profile_in_version_4() -> None:
    record = sample(4)
    record["execution_profile"]["source"] = "project"
    assert refused(record) == "execution_profile.source"
    record = sample(5)
    record["execution_profile"]["source"] = "project"
    parse(record)


def test_unmatched_project() -> None:
    record = sample(5)
    unmatched = dict.fromkeys(record["project_config"]) | {
        "matched": False,
        "model_defaults": False,
        "role_overrides": [],
    }
    record["project_config"] = unmatched
    assert parse(record).project_config == manifest.UNMATCHED
    record["project_config"] = unmatched | {"model_defaults": 0}
    assert refused(record) == "project_config.model_defaults"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"version":5,"version":5}', b"\xff", b"NaN", b"[" * 60_000, b" " * 65_536 + b"{}"],
)
def test_strict_json(content: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        manifest.parse(content, COORD)
    assert caught.value.code == "manifest_invalid"


def ours() -> manifest.Manifest:
    return parse(sample(8))


def test_ours_is_read_as_it_was_written() -> None:
    content = manifest.encode(ours())
    assert manifest.parse(content, COORD) == ours()
    assert content == (json.dumps(sample(8), indent=2, sort_keys=True) + "\n").encode()
    assert b"pane" not in content


def test_harness_of_a_role() -> None:
    record = sample(8)
    assert parse(record).roles["reviewer"].harness is None
    for harness in ("pi", "external"):
        record["roles"]["reviewer"]["harness"] = harness
        found = parse(record)
        assert found.roles["reviewer"].harness == harness
        assert manifest.parse(manifest.encode(found), COORD) == found
    for wrong in ("Pi", "", None, ["pi"]):
        record["roles"]["reviewer"]["harness"] = wrong
        assert refused(record) == "roles.reviewer.harness"
    older = sample(5)
    older["roles"]["reviewer"]["harness"] = "pi"
    assert refused(older) == "roles.reviewer"


def test_only_what_can_be_read_is_written() -> None:
    for name, value in (("unit", "A"), ("unit", None), ("unit", "a" * 33), ("host", "tmux"), ("version", 5)):
        broken = copy.deepcopy(ours())
        setattr(broken, name, value)
        with pytest.raises(Refusal) as caught:
            manifest.encode(broken)
        assert caught.value.code == "manifest_invalid"
        assert caught.value.field == name


@pytest.fixture
def coord(tmp_path: Path) -> Path:
    """A directory of a run, whose manifest fits it."""
    place = tmp_path.resolve() / "s/r"
    place.mkdir(parents=True)
    (tmp_path / "project").mkdir()
    return place


def put(coord: Path, version: int = 8) -> None:
    text = json.dumps(sample(version)).replace(COORD, str(coord)).replace('"pi-demo-agents"', '"s"')
    (coord / "manifest.json").write_text(text.replace(PROJECT, str(coord.parents[1] / "project")))


def test_from_a_file(coord: Path) -> None:
    with pytest.raises(Refusal) as caught:
        manifest.read(str(coord))
    assert caught.value.code == "run_gone"
    put(coord)
    assert manifest.read(str(coord)).coord == str(coord)


def test_a_link_is_no_manifest(coord: Path) -> None:
    put(coord)
    (coord / "manifest.json").rename(coord / "other")
    (coord / "manifest.json").symlink_to(coord / "other")
    with pytest.raises(Refusal) as caught:
        manifest.read(str(coord))
    assert caught.value.code == "manifest_invalid"


def test_a_run_outlives_its_project(coord: Path) -> None:
    put(coord)
    before = manifest.read(str(coord))
    (coord.parents[1] / "project").rename(coord.parents[1] / "moved")
    assert manifest.read(str(coord)) == before


def test_prompts_of_the_oldest_have_content(coord: Path) -> None:
    put(coord, 1)
    (coord / "implementer.prompt.md").write_text("x")
    (coord / "reviewer.prompt.md").write_text("")
    with pytest.raises(Refusal) as caught:
        manifest.read(str(coord))
    assert caught.value.field == "roles.reviewer.prompt_path"
    (coord / "reviewer.prompt.md").write_text("x")
    assert manifest.read(str(coord)).version == 1
