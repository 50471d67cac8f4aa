# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: what is made, what is refused, and that a failure leaves nothing."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import budget, contract, harness, manifest, reader, rundir, store
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
from agent_intercom.orchestration.rundir import RoleSpec, Run, RunSpec, Startup
from agent_intercom.wire.clock import Now

NOW = Now(0, 1_785_585_600_123)
CANARY = "canary-7f3a"
RUN_ID = "20260801T120000Z-4242"
ROLE = RoleSpec(provider="openai", model="m", thinking="high")
STARTUP = Startup(
    task=f"{CANARY} täsk \U0001f600", role_tasks={"probe": f"{CANARY} look"}, context_capsule=f"{CANARY} c"
)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Modes must not come from a strict umask."""
    previous = os.umask(0o022)
    yield
    os.umask(previous)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A state root that is not there yet, beside a project."""
    (tmp_path / "project").mkdir()
    return tmp_path.resolve() / "agent/orchestrations"


def spec(root: Path, **changes: Any) -> RunSpec:
    given: dict[str, Any] = {
        "unit": "a1",
        "project": str(root.parents[1] / "project"),
        "approve_project": True,
        "transport": "tui",
        "execution_profile": Profile("thorough", "packaged", "packaged-default"),
        "orchestration_config": OrchestrationConfig("/home/alice/tmux-orchestrator.json", 3),
        "project_config": UNMATCHED,
        # Not in the order in which roles are made.
        "roles": {name: ROLE for name in ("probe", "reviewer", "implementer")},
        "implementation_flow": "phased",
        "forced_specialists": ["probe"],
        "startup": STARTUP,
    }
    return RunSpec(**given | changes)


def create(root: Path, **changes: Any) -> Run:
    return rundir.create(str(root), "s", RUN_ID, spec(root, **changes), NOW)


def code(call: Any, *args: Any, **options: Any) -> str:
    """The code of a refusal, which shows nothing private."""
    with pytest.raises(Refusal) as caught:
        call(*args, **options)
    shown = f"{caught.value} {caught.value.field}"
    assert CANARY not in shown and "/" not in shown and RUN_ID not in shown
    return caught.value.code


def tree(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}


def test_what_is_made(root: Path) -> None:
    run = create(root)
    assert run.path == str(root / "s" / RUN_ID)
    assert (run.session, run.run_id, run.root) == ("s", RUN_ID, str(root))
    files = {"manifest.json", "broker.sqlite3", "startup.json", "startup-state", "control.token"}
    files |= {f"{role}.token" for role in ("implementer", "reviewer", "probe")}
    directories = {"sessions", "sessions/implementer", "sessions/reviewer", "sessions/probe"}
    assert tree(Path(run.path)) == dict.fromkeys(files, 0o600) | dict.fromkeys(directories, 0o700)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root.parent, root, root / "s", Path(run.path))} == {0o700}
    assert Path(run.path, "startup-state").read_text() == "STARTING\n"
    assert Path(run.database).name == contract.DATABASE == "broker.sqlite3"


def test_tokens(root: Path) -> None:
    run = create(root)
    every = [*run.tokens.values(), run.control_token]
    assert list(run.tokens) == ["implementer", "reviewer", "probe"]
    assert len(set(every)) == 4 and all(contract.HEX32.fullmatch(token) for token in every)
    for role, token in run.tokens.items():
        assert Path(run.path, f"{role}.token").read_text() == f"{token}\n"
    assert Path(run.path, "control.token").read_text() == f"{run.control_token}\n"


def test_manifest(root: Path) -> None:
    run = create(root)
    text = Path(run.path, "manifest.json").read_text()
    record = json.loads(text)
    assert text == json.dumps(record, indent=2, sort_keys=True) + "\n"
    assert (record["version"], record["host"], record["unit"]) == (8, "systemd", "a1")
    assert record["created_at"] == "2026-08-01T12:00:00.123000+00:00"
    assert (record["session"], record["coord"]) == ("s", run.path)
    assert record["roles"]["probe"]["session_id"] == f"{RUN_ID}-probe"
    assert "%" not in text and CANARY not in text


def test_database(root: Path) -> None:
    import apsw

    run = create(root)
    with apsw.Connection(run.database, flags=apsw.SQLITE_OPEN_READONLY) as db:
        meta = dict(db.execute("SELECT key, value FROM meta"))
        roles = list(db.execute("SELECT role, auth_token, state, generation FROM roles ORDER BY rowid"))
    db.close()
    assert meta["control_token"] == run.control_token
    assert (meta["workflow_state"], meta["round"], meta["implementation_flow"]) == ("starting", "1", "phased")
    assert (meta["soft_role_tokens"], meta["soft_total_tokens"]) == ("200000", "600000")
    assert meta["forced_specialists"] == '["probe"]'
    assert meta["created_at"] == meta["updated_at"] == run.manifest.created_at
    assert budget.from_json(meta["budget_policy"]) == budget.PACKAGED
    assert [tuple(row) for row in roles] == [(role, token, "disconnected", 1) for role, token in run.tokens.items()]


def test_opened_as_made(root: Path) -> None:
    made = create(root)
    assert rundir.open_run(made.path) == made
    assert repr(made) == "Run()" and CANARY not in repr(spec(root)) + repr(STARTUP)


def test_bodies_are_in_one_file_only(root: Path) -> None:
    run = create(root)
    files = [path for path in Path(run.path).rglob("*") if path.is_file()]
    assert [path.name for path in files if CANARY in path.read_text("latin-1")] == ["startup.json"]


def test_startup_is_read_and_deleted(root: Path) -> None:
    run = create(root)
    assert rundir.take_startup(run.path) == STARTUP == rundir.take_startup(run.path)
    assert rundir.delete_startup(run.path) is True
    assert rundir.take_startup(run.path) is None
    assert rundir.delete_startup(run.path) is False


@pytest.mark.parametrize(
    ("startup", "keys"),
    [
        (Startup(task="t", role_tasks={}), {"task", "role_tasks"}),
        (Startup(task="t", role_tasks={}, context_capsule="c"), {"task", "role_tasks", "context_capsule"}),
        (
            Startup(task="t", role_tasks={}, workspace_capsule="{}"),
            {"task", "role_tasks", "context_capsule", "workspace_capsule"},
        ),
    ],
)
def test_keys_of_the_startup_file(root: Path, startup: Startup, keys: set[str]) -> None:
    run = create(root, startup=startup)
    assert json.loads(Path(run.path, "startup.json").read_text()).keys() == keys
    assert rundir.take_startup(run.path) == startup


def test_text_outside_ascii_takes_its_own_length(root: Path) -> None:
    """Escaped it would be three times as long as the file may be."""
    startup = Startup(task="t", role_tasks={role: "ü" * 30_000 for role in ("probe", "playwright", "django")})
    five = {role: RoleSpec(provider="p", model="m", thinking="low") for role in contract.ROLES}
    assert rundir.take_startup(create(root, startup=startup, roles=five).path) == startup


@pytest.mark.parametrize(
    ("startup", "refusal"),
    [
        (Startup(task="t" * 262_144, role_tasks={}), "startup_too_large"),
        (Startup(task="t", role_tasks={}, context_capsule="ä" * 6_145), "context_capsule_too_large"),
        (Startup(task="t", role_tasks={}, workspace_capsule="x" * 8_193), "workspace_capsule_invalid"),
        (Startup(task="t \ud800", role_tasks={}), "startup_invalid"),
        (Startup(task="t", role_tasks={"probe": "\udce9"}), "startup_invalid"),
        (Startup(task="t" * 32_768, role_tasks={}), "worker_context_too_large"),
        (Startup(task="t", role_tasks={"django": "x"}), "startup_invalid"),
        (Startup(task="t", role_tasks={"other": "x"}), "startup_invalid"),
    ],
)
def test_bodies_are_checked_before_anything_is_made(root: Path, startup: Startup, refusal: str) -> None:
    assert code(create, root, startup=startup) == refusal
    assert not root.parent.exists()


def test_capsule_of_exactly_the_limit(root: Path) -> None:
    startup = Startup(task="t", role_tasks={}, context_capsule="x" * 12_288)
    assert rundir.take_startup(create(root, startup=startup).path) == startup


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{}", "startup_invalid"),
        ("[]", "startup_invalid"),
        ('{"task":"a","role_tasks":{},"workspace_capsule":"x"}', "startup_invalid"),
        ('{"task":"a","role_tasks":{},"role_tasks":{}}', "startup_invalid"),
        ('{"task":1,"role_tasks":{}}', "startup_invalid"),
        ('{"task":"a","role_tasks":[]}', "startup_invalid"),
        ('{"task":"a","role_tasks":{"probe":1}}', "startup_invalid"),
        ('{"task":"a","role_tasks":{},"context_capsule":"' + "x" * 12_289 + '"}', "context_capsule_too_large"),
        (" " * 262_145, "startup_too_large"),
    ],
)
def test_startup_of_another_kind(root: Path, text: str, refusal: str) -> None:
    run = create(root)
    Path(run.path, "startup.json").write_text(text)
    assert code(rundir.take_startup, run.path) == refusal


def test_startup_behind_a_link(root: Path) -> None:
    run = create(root)
    file = Path(run.path, "startup.json")
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    assert code(rundir.take_startup, run.path) == "run_foreign"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a\n"])
def test_names(root: Path, name: str) -> None:
    assert code(rundir.create, str(root), name, RUN_ID, spec(root), NOW) == "session_invalid"
    assert code(rundir.create, str(root), "s", name, spec(root), NOW) == "run_id_invalid"
    assert code(rundir.create, "relative", "s", RUN_ID, spec(root), NOW) == "path_invalid"
    assert not root.parent.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "Not-opaque"},
        {"project": "/nonexistent/../x"},
        {"transport": "ssh"},
        {"roles": {"implementer": ROLE}},
        {"roles": {"implementer": ROLE, "reviewer": msgspec.structs.replace(ROLE, harness="other")}},
        {"roles": {"implementer": ROLE, "reviewer": ROLE, "other": ROLE}},
        {"implementation_flow": "both"},
        {"forced_specialists": ["django"]},
    ],
)
def test_a_run_that_could_not_be_read_is_not_made(root: Path, change: dict[str, Any]) -> None:
    refused = code(create, root, **change)
    assert code(rundir.check, str(root), "s", RUN_ID, spec(root, **change), NOW) == refused
    assert not root.parent.exists()


def test_checked_as_it_would_be_made(root: Path) -> None:
    found = rundir.check(str(root), "s", RUN_ID, spec(root), NOW)
    assert not root.parent.exists()
    assert found == create(root).manifest
    before = tree(root.parents[1])
    assert code(rundir.check, str(root), "s", RUN_ID, spec(root), NOW) == "run_exists"
    rundir.check(str(root), "s", "another", spec(root), NOW)
    assert tree(root.parents[1]) == before


@pytest.mark.parametrize("level", ["orchestrations", "orchestrations/s"])
def test_checking_looks_at_what_is_there(root: Path, level: str) -> None:
    create(root)
    at = root.parent / level
    at.rename(root.parent / "moved")
    at.symlink_to(root.parent / "moved")
    assert code(rundir.check, str(root), "s", "another", spec(root), NOW) == "run_foreign"
    at.unlink()
    at.touch()
    assert code(rundir.check, str(root), "s", "another", spec(root), NOW) == "run_foreign"


def test_an_open_directory_is_not_closed_by_checking(root: Path) -> None:
    create(root)
    root.chmod(0o755)
    rundir.check(str(root), "s", "another", spec(root), NOW)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_a_run_is_never_replaced(root: Path) -> None:
    made = create(root)
    assert code(create, root) == "run_exists"
    assert rundir.open_run(made.path) == made


def test_ancestors_keep_their_modes(root: Path) -> None:
    root.parent.mkdir(mode=0o755)
    create(root)
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o755


@pytest.mark.parametrize("existing", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", ["replace", "create", "store", "sync"])
def test_a_failure_takes_back_exactly_what_was_made(
    root: Path, monkeypatch: pytest.MonkeyPatch, existing: int, fault: str
) -> None:
    """Of the ancestor, the root and the session's directory, as many are there already, one with a run in it."""
    if existing == 3:
        rundir.create(str(root), "s", "other", spec(root), NOW)
    elif existing:
        (root.parent, root)[existing - 1].mkdir(parents=True)
    before = tree(root.parents[1])

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    def fail_store(*_: object) -> None:
        raise store.StoreError("STATE_FULL")

    real = privatefiles.create
    calls = iter(range(100))

    def fail_later(name: str, content: bytes) -> None:
        if next(calls) == 3:
            fail()
        real(name, content)

    patches = {
        "replace": (privatefiles, "create", fail),
        "create": (privatefiles, "create", fail_later),
        "store": (store, "create", fail_store),
        "sync": (privatefiles, "sync_directory", fail),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*patches[fault])
        assert code(create, root) == "run_unwritable"
    after = tree(root.parents[1])
    # The root is closed to others by whatever looks at it.
    name = str(root.relative_to(root.parents[1]))
    assert after == (before | {name: 0o700} if name in before else before)
    create(root)


@pytest.mark.parametrize("level", ["root", "session", "run"])
def test_no_link_from_the_root_down(root: Path, level: str) -> None:
    made = create(root)
    place = {"root": root, "session": root / "s", "run": Path(made.path)}[level]
    place.rename(root.parent / "moved")
    place.symlink_to(root.parent / "moved")
    for call in (rundir.open_run, rundir.take_startup, rundir.delete_startup, rundir.remove):
        assert code(call, made.path) == "run_foreign"
    if level != "run":
        assert code(rundir.create, str(root), "s", "other", spec(root), NOW) == "run_foreign"
    assert (root.parent / "moved").exists()


def test_ancestors_may_be_links(root: Path) -> None:
    link = root.parents[1] / "link"
    root.parent.mkdir()
    link.symlink_to(root.parent)
    made = rundir.create(str(link / "orchestrations"), "s", RUN_ID, spec(root), NOW)
    assert made.path == str(root / "s" / RUN_ID)
    assert rundir.open_run(str(link / "orchestrations" / "s" / RUN_ID)) == made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("level", ["root", "session", "run"])
def test_another_users_directory(root: Path, level: str) -> None:
    made = create(root)
    os.chown({"root": root, "session": root / "s", "run": made.path}[level], 4242, 4242)
    assert code(rundir.open_run, made.path) == "run_foreign"


def test_directories_are_closed_again(root: Path) -> None:
    run = create(root)
    root.chmod(0o755)
    Path(run.path).chmod(0o755)
    rundir.open_run(run.path)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(run.path).stat().st_mode) == 0o755
    rundir.open_run(run.path, writer=True)
    assert stat.S_IMODE(Path(run.path).stat().st_mode) == 0o700


def test_a_run_that_is_gone(root: Path) -> None:
    made = create(root)
    assert code(rundir.open_run, str(root / "s" / "other")) == "run_gone"
    Path(made.path, "manifest.json").unlink()
    assert code(rundir.open_run, made.path) == "run_gone"


@pytest.mark.parametrize("path", ["", "run", "/", "/run", "/a/..", "/a/b/"])
def test_what_is_no_path_of_a_run(path: str) -> None:
    assert re.fullmatch("(path|session|run_id)_invalid", code(rundir.open_run, path))


def test_a_token_has_to_be_private_and_whole(root: Path) -> None:
    run = create(root)
    file = Path(run.path, "reviewer.token")
    good = file.read_bytes()
    for content in (b"", good[:-2], good + b"x", good.upper(), b" " * 129, b"\xff" * 32):
        file.write_bytes(content)
        assert code(rundir.open_run, run.path) == "token_invalid"
    file.write_bytes(good.strip())
    assert rundir.open_run(run.path) == run
    file.chmod(0o640)
    assert code(rundir.open_run, run.path) == "token_invalid"
    file.chmod(0o600)
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    assert code(rundir.open_run, run.path) == "token_invalid"
    file.unlink()
    assert code(rundir.open_run, run.path) == "token_invalid"


@pytest.mark.parametrize("limit", [None, 0, 3, 1_000_000])
def test_the_policies_are_in_the_database(root: Path, limit: int | None) -> None:
    run = create(root, max_repair_rounds=limit, worker_context={"reviewer": "retain", "implementer": "prune"})
    meta = reader.read(run.database).meta
    assert json.loads(meta["continuation_policy"]) == {"version": 1, "max_repair_rounds": limit}
    chosen = {"implementer": "prune", "reviewer": "retain"}
    assert json.loads(meta["worker_context_policy"]) == {"version": 1, "overrides": chosen}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_repair_rounds": -1}, "repair_rounds_invalid"),
        ({"max_repair_rounds": 1_000_001}, "repair_rounds_invalid"),
        ({"worker_context": {"django": "retain"}}, "worker_context_invalid"),
        ({"worker_context": {"reviewer": "keep"}}, "worker_context_invalid"),
    ],
)
def test_policies_that_are_none(root: Path, changes: dict[str, Any], expected: str) -> None:
    assert code(create, root, **changes) == expected
    assert not root.exists()


def test_runs_that_no_broker_leads(root: Path) -> None:
    run = create(root)
    file = Path(run.path, "manifest.json")
    record = json.loads(file.read_text())
    for name in ("coordination", "protocol_version", "execution_profile", "orchestration_config", "project_config"):
        del record[name]
    del record["host"], record["unit"]
    for number, (name, role) in enumerate(record["roles"].items()):
        del role["session_id"], role["skills"], role["harness"]
        role |= {"pane_id": f"%{number}", "prompt_path": f"{run.path}/{name}.prompt.md"}
        Path(role["prompt_path"]).write_text("x")
    file.write_text(json.dumps(record | {"version": 2, "monitor_pane_id": "%9"}))
    assert code(rundir.open_run, run.path) == "run_unsupported"


def test_the_manifest_is_replaced_whole_or_not_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(root)
    run.manifest.roles["reviewer"].model = "other"
    before = tree(Path(run.path))

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        assert code(rundir.save_manifest, run) == "run_unwritable"
    assert rundir.open_run(run.path).manifest.roles["reviewer"].model == "m"
    rundir.save_manifest(run)
    assert rundir.open_run(run.path) == run
    assert tree(Path(run.path)) == before


def test_a_manifest_behind_a_link_is_not_replaced(root: Path) -> None:
    run = create(root)
    file = Path(run.path, "manifest.json")
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    assert code(rundir.save_manifest, run) == "run_foreign"
    assert file.is_symlink()


def test_startup_state(root: Path) -> None:
    run = create(root)
    for state in ("RUNNING", "FAILED"):
        rundir.write_startup_state(run.path, state)
        assert Path(run.path, "startup-state").read_text() == f"{state}\n"
    assert code(rundir.write_startup_state, run.path, "DONE") == "startup_state_invalid"


def test_removed_with_its_session_when_it_was_the_last(root: Path) -> None:
    first, second = create(root), rundir.create(str(root), "s", "other", spec(root), NOW)
    rundir.remove(first.path)
    assert not Path(first.path).exists() and Path(second.path).exists()
    rundir.remove(second.path)
    assert list(root.iterdir()) == []
    assert code(rundir.remove, second.path) == "run_gone"


def test_five_roles_and_skills(root: Path) -> None:
    skills = [manifest.Skill("/skills/a.md", "0" * 64)]
    roles = {name: msgspec.structs.replace(ROLE, skills=skills) for name in contract.ROLES}
    run = create(root, roles=roles, forced_specialists=["django", "probe"])
    assert list(run.tokens) == list(contract.ROLES)
    assert rundir.open_run(run.path).manifest.roles["django"].skills == skills


def test_harnesses(root: Path) -> None:
    roles = {"implementer": ROLE, "reviewer": msgspec.structs.replace(ROLE, harness=harness.EXTERNAL), "probe": ROLE}
    found = rundir.open_run(create(root, roles=roles).path).manifest.roles
    assert (found["implementer"].harness, found["reviewer"].harness) == ("pi", "external")
