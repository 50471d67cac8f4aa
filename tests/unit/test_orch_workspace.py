# SPDX-License-Identifier: Apache-2.0
"""The workspace capsule: what is in it, what cannot be one, and when it does not hold any more."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import workspace
from agent_intercom.orchestration.errors import Refusal

IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false")


def git(project: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=project, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    made = Path(os.path.realpath(tmp_path)) / "project"
    (made / "src").mkdir(parents=True)
    (made / "src" / "a.py").write_text("secret words\n")
    (made / "AGENTS.md").write_text("secret rules\n")
    (made / "pyproject.toml").write_text("[project]\n")
    git(made, "init", "-q")
    git(made, "add", ".")
    git(made, "commit", "-qm", "one")
    return made


def code(call: Any, *given: Any) -> str:
    with pytest.raises(Refusal) as refused:
        call(*given)
    assert "secret" not in str(refused.value) and "/" not in str(refused.value)
    return refused.value.code


def build(project: Path, *paths: str) -> str:
    return workspace.build(str(project), paths)


def test_what_is_in_it(project: Path) -> None:
    text = build(project, "src/a.py", "new/b.py", "src/a.py")
    assert json.loads(text) == {
        "schema_version": 1,
        "project_root_sha256": hashlib.sha256(os.fsencode(project)).hexdigest(),
        "git": {"head": git(project, "rev-parse", "HEAD"), "state": "clean"},
        "instructions": [{"path": "AGENTS.md", "sha256": hashlib.sha256(b"secret rules\n").hexdigest()}],
        "markers": ["pyproject.toml"],
        "relevant_paths": ["src/a.py", "new/b.py"],
    }
    assert "secret" not in text
    workspace.validate(text, str(project))
    assert workspace.describe(text) == {
        "enabled": True,
        "schema_version": 1,
        "validation": "valid",
        "instruction_count": 1,
        "marker_count": 1,
        "relevant_path_count": 2,
        "bytes": len(text),
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def test_the_lists_are_fixed() -> None:
    assert (len(set(workspace.INSTRUCTIONS)), len(set(workspace.MARKERS))) == (5, 16)


def test_everything_fits_at_once(project: Path) -> None:
    for name in (*workspace.INSTRUCTIONS, *workspace.MARKERS):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    text = build(project, *(f"{number:x}" + "ä" * 127 + "b" for number in range(16)))
    assert len(text.encode()) <= 8_192
    assert workspace.describe(text)["relevant_path_count"] == 16
    workspace.validate(text, str(project))


def test_dirt_does_not_matter(project: Path) -> None:
    clean = build(project)
    (project / "src" / "a.py").write_text("other")
    dirty = build(project)
    assert json.loads(dirty)["git"]["state"] == "dirty"
    workspace.validate(clean, str(project))
    git(project, "checkout", "-q", ".")
    workspace.validate(dirty, str(project))
    (project / "new.txt").write_text("untracked")
    assert json.loads(build(project))["git"]["state"] == "dirty"


def commit(project: Path) -> None:
    git(project, "commit", "-q", "--allow-empty", "-m", "two")


@pytest.mark.parametrize(
    "change",
    [
        commit,
        lambda project: (project / "AGENTS.md").write_text("other rules"),
        lambda project: (project / "AGENTS.md").unlink(),
        lambda project: (project / "CLAUDE.md").write_text("new rules"),
        lambda project: (project / "Makefile").write_text("all:"),
        lambda project: (project / "pyproject.toml").unlink(),
    ],
)
def test_what_makes_it_stale(project: Path, change: Any) -> None:
    text = build(project)
    change(project)
    assert code(workspace.validate, text, str(project)) == "workspace_capsule_stale"
    workspace.validate(build(project), str(project))


def test_no_repository(project: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    assert code(build, plain) == "workspace_capsule_invalid"
    git(plain, "init", "-q")
    assert code(build, plain) == "workspace_capsule_invalid"
    assert code(build, project / "src") == "workspace_capsule_invalid"
    assert code(build, project / "missing") == "workspace_capsule_invalid"
    link = tmp_path / "link"
    link.symlink_to(project)
    assert code(build, link) == "workspace_capsule_invalid"
    assert code(workspace.build, "project", []) == "workspace_capsule_invalid"
    assert code(workspace.validate, build(project), str(plain)) == "workspace_capsule_invalid"


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "..", "../x", "src/../../x", "a\nb", "a\0b", "a\x1b", "\ud800", "é" * 129, "out/x"],
)
def test_paths_that_are_none(project: Path, tmp_path: Path, path: str) -> None:
    (project / "out").symlink_to(tmp_path)
    assert code(build, project, path) == "workspace_capsule_invalid"


def test_too_many_paths(project: Path) -> None:
    assert code(build, project, *map(str, range(17))) == "workspace_capsule_invalid"
    build(project, *map(str, range(16)))


def test_a_link_is_followed_inside_only(project: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.md").write_text("secret outside")
    (project / "CLAUDE.md").symlink_to("AGENTS.md")
    (project / "GEMINI.md").symlink_to(tmp_path / "outside.md")
    os.mkfifo(project / "CONTRIBUTING.md")
    found = json.loads(build(project))["instructions"]
    assert [each["path"] for each in found] == ["AGENTS.md", "CLAUDE.md"]
    assert found[0]["sha256"] == found[1]["sha256"]


def test_instructions_without_end(project: Path) -> None:
    with open(project / "AGENTS.md", "wb") as file:
        file.truncate(workspace.MAX_INSTRUCTION_BYTES + 1)
    assert code(build, project) == "workspace_capsule_invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"schema_version": True},
        {"more": 1},
        {"git": {"head": "0" * 40}},
        {"git": {"head": "0" * 39, "state": "clean"}},
        {"git": {"head": "0" * 40, "state": "unknown"}},
        {"project_root_sha256": "0" * 64},
        {"project_root_sha256": "x"},
        {"markers": [1]},
        {"relevant_paths": ["a"] * 17},
        {"relevant_paths": ["../a"]},
        {"instructions": [{"path": "AGENTS.md"}]},
        {"relevant_paths": ["a" * 8_192]},
    ],
    ids=str,
)
def test_texts_that_are_none(project: Path, change: dict[str, Any]) -> None:
    text = json.dumps(json.loads(build(project)) | change)
    assert code(workspace.validate, text, str(project)) == "workspace_capsule_invalid"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema_version":1,"schema_version":1}', "\ud800"], ids=ascii
)
def test_texts_that_are_no_object(project: Path, text: str) -> None:
    assert code(workspace.validate, text, str(project)) == "workspace_capsule_invalid"
    assert code(workspace.describe, text) == "workspace_capsule_invalid"


def test_git_takes_no_hook_lock_or_word_of_the_environment(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "ran"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch '{trace}'\n")
    hook.chmod(0o700)
    git(project, "config", "core.fsmonitor", str(hook))
    hooks = project / ".git" / "hooks"
    (hooks / "post-index-change").write_text(hook.read_text())
    (hooks / "post-index-change").chmod(0o700)
    # Git would write the index anew, had it looked at a file whose time is another.
    os.utime(project / "src" / "a.py", (1, 1))
    index = project / ".git" / "index"
    before = (index.read_bytes(), index.stat().st_mtime_ns)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    assert json.loads(build(project))["git"]["state"] == "clean"
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before
    assert not trace.exists() and not (tmp_path / "trace").exists()


def fake_git(directory: Path, script: str) -> str:
    directory.mkdir()
    (directory / "git").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "git").chmod(0o700)
    return f"{directory}:{os.environ['PATH']}"


def test_git_that_does_not_answer(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "GIT_TIMEOUT", 0.5)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    # Its child must not outlive the question.
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", f"tail -f /dev/null >'{fifo}' & wait"))
    assert code(build, project) == "workspace_capsule_invalid"
    assert select.select([reading], [], [], 30)[0] and os.read(reading, 1) == b""
    os.close(reading)


def test_git_that_says_too_much(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", "exec cat /dev/zero"))
    assert code(build, project) == "workspace_capsule_invalid"


def test_no_git(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code(build, project) == "workspace_capsule_invalid"


def test_a_broker_without_a_capsule_does_not_import_it() -> None:
    name = "agent_intercom.orchestration.workspace"
    text = f"import sys, agent_intercom.orchestration.launch; print({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout == "False\n"
