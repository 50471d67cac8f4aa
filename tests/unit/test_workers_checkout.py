# SPDX-License-Identifier: Apache-2.0
"""Copies of projects to test in: what is in them, that git and tests work there, that projects stay as they are."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli.orchestrate.answer import INVALID_ARGUMENTS, LOCAL_RUNTIME_ERROR, CommandFailure
from agent_intercom.cli.orchestrate.worker import checkout as command
from agent_intercom.host import privatefiles
from agent_intercom.workers import checkout, confinement
from agent_intercom.workers.contract import SCRATCH_ENVIRONMENT, Code
from agent_intercom.workers.errors import WorkerError

SERVICE = Path(__file__).resolve().parents[2] / "service"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git reads no configuration but the project's."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.invalid", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *identity, "-C", directory, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def files(top: Path) -> dict[str, str]:
    """What is in a directory but its repository: content of files, and where links lead."""
    found = {}
    for place, directories, names in os.walk(top):
        directories[:] = [name for name in directories if name != ".git"]
        for name in [*names, *(name for name in directories if Path(place, name).is_symlink())]:
            each = Path(place, name)
            if name == ".git":
                continue
            found[str(each.relative_to(top))] = f"-> {each.readlink()}" if each.is_symlink() else each.read_text()
    return found


def write(top: Path, contents: dict[str, str]) -> None:
    for name, content in contents.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(content)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a commit, and changes of every kind that are in none."""
    top = tmp_path / "project"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    write(top, {"a.py": "one", "gone.py": "gone", "sub/b.py": "b", "run.sh": "x", ".gitignore": IGNORED})
    (top / "run.sh").chmod(0o755)
    (top / "link").symlink_to("sub/b.py")
    git(top, "add", ".")
    git(top, "commit", "-qm", "first")
    write(top, {"a.py": "two", "new.py": "untracked", "staged.py": "staged"})
    git(top, "add", "staged.py")
    (top / "gone.py").unlink()
    return top


IGNORED = "node_modules\n.venv\n__pycache__\n*.pyc\nbuild/\ndev.sqlite\n.env\ndeps\n"


def test_the_copy_has_what_git_lists(project: Path, scratch: Path) -> None:
    made = checkout.make(str(project), str(scratch))
    copy = Path(made.root)
    assert copy == scratch / "worktree" == Path(made.directory)
    expected = {"a.py": "two", "sub/b.py": "b", "run.sh": "x", "link": "-> sub/b.py", "new.py": "untracked"}
    assert files(copy) == {**expected, "staged.py": "staged", ".gitignore": IGNORED}
    assert (made.files, made.links, made.left_out) == (7, 0, 0)
    assert (copy / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (copy / "a.py").stat().st_mtime_ns == (project / "a.py").stat().st_mtime_ns
    assert sorted(os.listdir(scratch)) == [".worktree.lock", "worktree"]


def test_dependencies_are_linked_and_what_has_to_be_written_is_not(project: Path, scratch: Path) -> None:
    write(
        project, {"node_modules/p/index.js": "p", "node_modules/.cache/c": "c", "packages/x/node_modules/q/i.js": "q"}
    )
    write(project, {"packages/x/x.js": "x", ".venv/bin/tool": "t", "deps/d/d": "d", "build/o": "o"})
    write(project, {"sub/__pycache__/b.pyc": "b", "dev.sqlite": "data", ".env": "secret"})
    made = checkout.make(str(project), str(scratch))
    copy = Path(made.root)
    for linked in ("node_modules/p", "packages/x/node_modules/q", ".venv", "deps", ".env"):
        assert (copy / linked).readlink() == project / linked
    assert made.links == 5
    for left in ("node_modules/.cache", "build", "sub/__pycache__"):
        assert not os.path.lexists(copy / left)
    (copy / "node_modules" / ".cache").mkdir()
    (copy / "dev.sqlite").write_text("changed")
    assert (project / "dev.sqlite").read_text() == "data"


def test_a_large_ignored_file_is_linked(project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "_MAX_IGNORED_FILE", 3)
    write(project, {"dev.sqlite": "four"})
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert (copy / "dev.sqlite").readlink() == project / "dev.sqlite"


def test_git_tells_the_same_of_both(project: Path, scratch: Path) -> None:
    copy = Path(checkout.make(str(project), str(scratch)).root)
    for arguments in (("status", "--porcelain"), ("diff",), ("diff", "--cached"), ("log", "--format=%H")):
        assert git(copy, *arguments) == git(project, *arguments) != ""


def test_the_copy_is_a_repository_of_its_own(project: Path, scratch: Path) -> None:
    head, state = git(project, "rev-parse", "HEAD"), git(project, "status", "--porcelain")
    objects = sorted((project / ".git").rglob("*"))
    copy = Path(checkout.make(str(project), str(scratch)).root)
    git(copy, "stash", "--include-untracked", "-q")
    assert (copy / "a.py").read_text() == "one"
    git(copy, "stash", "pop", "-q")
    git(copy, "add", ".")
    git(copy, "commit", "-qm", "mine")
    assert (git(project, "rev-parse", "HEAD"), git(project, "status", "--porcelain")) == (head, state)
    assert sorted((project / ".git").rglob("*")) == objects


def test_a_directory_in_a_repository_leads_to_its_copy(project: Path, scratch: Path) -> None:
    made = checkout.make(str(project / "sub"), str(scratch))
    assert made.directory == f"{made.root}/sub"
    assert (Path(made.root) / "a.py").exists()


def test_a_linked_worktree_can_be_copied(project: Path, scratch: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    git(project, "worktree", "add", "-q", "-b", "side", str(other))
    (other / "a.py").write_text("three")
    copy = Path(checkout.make(str(other), str(scratch)).root)
    assert git(copy, "status", "--porcelain") == git(other, "status", "--porcelain") == " M a.py\n"
    git(copy, "commit", "-qam", "mine")
    assert git(other, "status", "--porcelain") == " M a.py\n"


def test_a_repository_without_a_commit_can_be_copied(scratch: Path, tmp_path: Path) -> None:
    project = tmp_path / "young"
    project.mkdir()
    git(project, "init", "-q", "-b", "main")
    write(project, {"a": "a", "b": "b"})
    git(project, "add", "a")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert git(copy, "status", "--porcelain") == "A  a\n?? b\n"


def test_repositories_inside_are_copied_too(project: Path, scratch: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q", "-b", "main")
    write(library, {"l": "l"})
    git(library, "add", ".")
    git(library, "commit", "-qm", "l")
    git(project, "submodule", "add", "-q", str(library), "third")
    git(project, "clone", "-q", str(library), "loose")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert (copy / "third" / "l").read_text() == (copy / "loose" / "l").read_text() == "l"


def test_a_project_without_git_is_copied_as_a_whole(scratch: Path, tmp_path: Path) -> None:
    project = tmp_path / "plain"
    write(
        project, {"a": "a", "build/b": "b", "node_modules/p/i": "p", "venv/x": "x", "s/__pycache__/c": "c", "s/t": "t"}
    )
    os.mkfifo(project / "pipe")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    linked = {"node_modules/p": f"-> {project}/node_modules/p", "venv": f"-> {project}/venv"}
    assert files(copy) == {"a": "a", "build/b": "b", "s/t": "t", **linked}


def test_every_copy_is_a_new_one(project: Path, scratch: Path) -> None:
    copy = Path(checkout.make(str(project), str(scratch)).root)
    (copy / "a.py").write_text("broken")
    (copy / "left").mkdir(mode=0o500)
    (copy / "closed").mkdir(mode=0)
    (project / "new.py").unlink()
    assert Path(checkout.make(str(project), str(scratch)).root) == copy
    assert (copy / "a.py").read_text() == "two"
    assert not {"left", "closed", "new.py"} & set(os.listdir(copy))
    assert sorted(os.listdir(scratch)) == [".worktree.lock", "worktree"]


def test_rests_of_a_copy_that_was_cut_short_go_away(project: Path, scratch: Path) -> None:
    write(scratch, {".worktree.new/x": "x", ".worktree.old/x": "x"})
    checkout.make(str(project), str(scratch))
    assert sorted(os.listdir(scratch)) == [".worktree.lock", "worktree"]


def test_a_link_in_the_place_of_the_copy_is_not_followed(project: Path, scratch: Path, tmp_path: Path) -> None:
    """A worker may have put one there; who makes the next copy need not be confined."""
    victim = tmp_path / "victim"
    write(victim, {"kept": "kept"})
    victim.chmod(0o755)
    for name in ("worktree", ".worktree.new", ".worktree.old"):
        (scratch / name).symlink_to(victim)
    checkout.make(str(project), str(scratch))
    assert (scratch / "worktree").is_dir()
    assert not (scratch / "worktree").is_symlink()
    assert files(victim) == {"kept": "kept"}
    assert victim.stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_through_a_directory_that_became_a_link(project: Path, scratch: Path) -> None:
    """git still lists what was in the directory."""
    (project / "sub" / "b.py").unlink()
    (project / "sub").rmdir()
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "b.py").write_text("other")
    (project / "sub").symlink_to("elsewhere")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert (copy / "sub").readlink() == Path("elsewhere")
    assert (copy / "elsewhere" / "b.py").read_text() == "other"


def test_files_are_copied_where_blocks_cannot_be_shared(
    project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", cannot)
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert (copy / "new.py").read_text() == "untracked"


def test_variables_of_a_hook_do_not_count(project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert checkout.make(str(project), str(scratch)).files == 7


@pytest.mark.parametrize(
    ("source", "place", "field"),
    [
        ("missing", "scratch", "directory"),
        ("project/a.py", "scratch", "directory"),
        ("scratch/in", "scratch", "directory"),
        ("project", "missing", "scratch"),
        ("/", "scratch", "directory"),
    ],
)
@pytest.mark.usefixtures("scratch")
def test_what_cannot_be_copied_is_refused(project: Path, tmp_path: Path, source: str, place: str, field: str) -> None:
    (tmp_path / "scratch/in").mkdir()
    with pytest.raises(WorkerError) as caught:
        checkout.make(os.path.join(tmp_path, source), f"{tmp_path}/{place}")
    assert (caught.value.code, caught.value.field) == (Code.INVALID, field)
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "scratch" / "worktree").exists()


def test_scratch_in_a_repository_is_not_copied(project: Path) -> None:
    """Where a home is one, so is what is in it."""
    scratch = project / "state" / "scratch"
    write(project, {"state/scratch/temporary": "t", "state/other": "o"})
    for _ in range(2):
        copy = Path(checkout.make(str(project), str(scratch)).root)
        assert {name for name in files(copy) if name.startswith("state")} == {"state/other"}
    assert (scratch / "temporary").exists()


@pytest.mark.parametrize("by_git", [False, True])
def test_what_the_product_keeps_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_git: bool) -> None:
    """A project may be a whole home, and its state is in that."""
    home = tmp_path / "home"
    scratch = home / "runs/r1/scratch/reviewer-g1"
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", str(home / "runs"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    ours = {".local/state/agent-intercom/workers.sqlite3": "rows", "runs/r1/manifest.json": "{}"}
    theirs = {"a": "a", "sub/b": "b", ".local/state/other/c": "c"}
    write(home, {**ours, **theirs, "runs/r1/scratch/reviewer-g1/temporary": "t"})
    if by_git:
        git(home, "init", "-q", "-b", "main")
        git(home, "add", ".local")
    for _ in range(2):
        made = checkout.make(str(home), str(scratch))
        assert (files(Path(made.root)), made.left_out) == (theirs, 0)
    inside = home / ".local/state/agent-intercom"
    made = checkout.make(str(inside), str(scratch))
    # Whoever asks for that itself is given it.
    assert files(Path(made.directory)) == {"workers.sqlite3": "rows"}


def test_no_name_of_the_copy_is_taken_from_the_project(project: Path, scratch: Path) -> None:
    names = (".clone", ".worktree.new", ".worktree.clone/x", "worktree", ".worktree.lock")
    write(project, dict.fromkeys(names, "theirs"))
    git(project, "add", ".clone")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert all((copy / name).read_text() == "theirs" for name in names)
    assert git(copy, "status", "--porcelain") == git(project, "status", "--porcelain") != ""
    assert sorted(os.listdir(scratch)) == [".worktree.lock", "worktree"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_split_index_is_whole_in_the_copy(project: Path, scratch: Path, tmp_path: Path, linked: bool) -> None:
    if linked:
        git(project, "worktree", "add", "-q", "-b", "side", str(tmp_path / "other"))
        project = tmp_path / "other"
        write(project, {"staged.py": "s"})
    git(project, "update-index", "--split-index")
    write(project, {"later.py": "later"})
    git(project, "add", ".")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert git(copy, "status", "--porcelain") == git(project, "status", "--porcelain") != ""
    git(copy, "commit", "-qam", "mine")
    assert git(copy, "status", "--porcelain") == ""


SETTINGS = {
    "core.fileMode": "false",
    "core.autocrlf": "true",
    "core.excludesFile": "my ignored",
    'filter.up \\ ".d.clean': 'tr a-z A-Z #\t"quoted" \\ ; end ',
    'filter.up \\ ".d.smudge': "cat",
    "diff.own.textconv": "sed 's/^/> /'",
    "user.name": "Who Made It",
}


def test_git_reads_the_files_of_the_copy_as_those_of_the_project(project: Path, scratch: Path) -> None:
    for key, value in SETTINGS.items():
        git(project, "config", key, value)
    git(project, "config", "core.bare", "false")
    git(project, "config", "core.hooksPath", "hooks")
    git(project, "config", "core.worktree", str(project))
    with (project / ".git/config").open("a") as file:
        file.write("[status]\n\tshort\n")
    write(project, {".git/info/exclude": "excluded\n", ".git/info/attributes": "*.u diff=own\n"})
    write(project, {"my ignored": "mine\n", "excluded": "e", "mine": "m", "w.txt": "one\r\ntwo\r\n", "x.u": "x\n"})
    git(project, "add", "w.txt", "x.u")
    git(project, "commit", "-qm", "second")
    write(project, {"x.u": "y\n"})
    (project / "link").unlink()
    (project / "a.py").chmod(0o755)
    copy = Path(checkout.make(str(project), str(scratch)).root)
    for arguments in (("status",), ("status", "--porcelain", "--ignored"), ("diff",)):
        assert git(copy, *arguments) == git(project, *arguments) != ""
    assert "> y" in git(copy, "diff", "x.u")
    for key, value in SETTINGS.items():
        assert git(copy, "config", "--local", key) == f"{value}\n"
    assert git(copy, "config", "--type=bool", "status.short") == "true\n"
    assert Path(git(copy, "rev-parse", "--show-toplevel").strip()) == copy
    assert "hookspath" not in git(copy, "config", "--local", "--list")


def test_what_git_is_told_by_a_link_the_copy_is_told_too_and_what_git_cannot_read_it_does_without(
    project: Path, scratch: Path, tmp_path: Path
) -> None:
    excluded = project / ".git/info/exclude"
    excluded.unlink(missing_ok=True)
    excluded.symlink_to(tmp_path / "everywhere/exclude")
    write(tmp_path, {"everywhere/exclude": "excluded\n"})
    write(project, {"excluded": "e"})
    (project / ".git/info/attributes").mkdir()
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert (copy / ".git/info/exclude").read_text() == "excluded\n" and not (copy / ".git/info/attributes").exists()
    assert "excluded" not in git(copy, "status", "--porcelain")


def test_a_sparse_checkout_stays_sparse(project: Path, scratch: Path) -> None:
    write(project, {"one/1": "1", "two/2": "2"})
    git(project, "add", ".")
    git(project, "commit", "-qam", "more")
    git(project, "sparse-checkout", "set", "--cone", "--sparse-index", "one")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert git(copy, "sparse-checkout", "list") == git(project, "sparse-checkout", "list") == "one\n"
    assert git(copy, "status", "--porcelain") == git(project, "status", "--porcelain") == ""
    assert not (copy / "two").exists()
    git(copy, "sparse-checkout", "disable")
    assert (copy / "two/2").read_text() == "2"


def test_large_files_with_holes_take_no_room(project: Path, scratch: Path) -> None:
    with (project / "image").open("wb") as file:
        file.truncate(1 << 30)
    if (project / "image").stat().st_blocks:
        pytest.skip("this file system has no holes")
    copy = Path(checkout.make(str(project), str(scratch)).root)
    assert ((copy / "image").stat().st_size, (copy / "image").stat().st_blocks) == (1 << 30, 0)


def test_what_can_never_be_copied_is_known_before(project: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert checkout.hopeless(str(project)) is None
    assert checkout.hopeless(str(tmp_path / "plain"), str(tmp_path)) is None
    assert "git is not installed" in (checkout.hopeless(str(project / "sub"), str(tmp_path)) or "")
    assert "root of all files" in (checkout.hopeless("/") or "")


def test_a_damaged_repository_is_refused_and_leaves_nothing(project: Path, scratch: Path) -> None:
    checkout.make(str(project), str(scratch))
    (project / ".git" / "index").write_bytes(b"damaged")
    with pytest.raises(WorkerError, match="`git ls-files` cannot read") as caught:
        checkout.make(str(project), str(scratch))
    assert caught.value.field == "directory"
    assert sorted(os.listdir(scratch)) == [".worktree.lock", "worktree"]
    assert (scratch / "worktree" / "a.py").read_text() == "two"


def test_two_copies_at_once_are_refused(project: Path, scratch: Path) -> None:
    lock = privatefiles.lock(str(scratch / ".worktree.lock"))
    try:
        with pytest.raises(WorkerError) as caught:
            checkout.make(str(project), str(scratch))
    finally:
        os.close(lock)
    assert caught.value.code == Code.CONFLICT


def test_no_room_leaves_nothing(project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(WorkerError, match=r"the copy could not be made \(ENOSPC\)") as caught:
        checkout.make(str(project), str(scratch))
    assert caught.value.code == Code.START_FAILED
    assert os.listdir(scratch) == [".worktree.lock"]
    assert len(os.listdir("/proc/self/fd")) == before


CONFINED = """
import contextlib, ctypes, json, os, subprocess, sys
service, project, scratch, python = sys.argv[1:]
sys.path.insert(0, service)
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
from agent_intercom.workers import checkout, confinement
from agent_intercom.workers.spec import Confinement
confinement.apply(Confinement([]), scratch)
os.environ["TMPDIR"] = scratch
os.chdir(project)
made = checkout.make(project, scratch)
os.chdir(made.directory)
def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [done.returncode, done.stdout + done.stderr]
results = {
    "temporary": run(python, "-c", "import tempfile; print(tempfile.mkdtemp())"),
    "tests": run(python, "-m", "pytest", "-q"),
    "status": run("git", "-C", project, "status", "--porcelain"),
    "diff": run("git", "diff"),
    "stash": run("git", "-c", "user.name=A", "-c", "user.email=a@example.invalid", "stash", "-q"),
    "clean": run("git", "status", "--porcelain", "--untracked-files=no"),
    "here-document": run("/bin/sh", "-c", "cat <<X\\nhere\\nX\\n"),
}
print(json.dumps(results))
"""


@pytest.mark.skipif(confinement.abi() < 2, reason="the kernel cannot confine")
def test_a_confined_worker_tests_in_its_copy(project: Path, scratch: Path) -> None:
    write(project, {"test_it.py": "def test_it(tmp_path):\n    (tmp_path / 'x').write_text('x')\n"})
    command = [sys.executable, "-I", "-c", CONFINED, str(SERVICE), str(project), str(scratch), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [results["temporary"][0], results["temporary"][1].startswith(f"{scratch}/")] == [0, True]
    assert results["tests"][0] == 0, results["tests"][1]
    assert (scratch / "worktree" / ".pytest_cache").is_dir()
    assert results["status"] == [0, git(project, "status", "--porcelain")]
    assert "+two" in results["diff"][1]
    assert results["stash"] == [0, ""]
    assert results["clean"] == [0, ""]
    assert results["here-document"] == [0, "here\n"]
    assert not (project / ".pytest_cache").exists()


def ask(directory: str | None) -> Any:
    return command.checkout(argparse.Namespace(directory=directory, program="orchestrate", json=False))


def test_the_command_prints_the_path_alone(
    project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SCRATCH_ENVIRONMENT, str(scratch))
    for directory in (None, str(project)):
        with contextlib.chdir(project):
            answer = ask(directory)
        assert answer.data["directory"] == f"{scratch}/worktree"
        assert list(answer.lines) == [f"{scratch}/worktree"]
        told = "orchestrate: 7 files copied, 0 links to what the project ignores\n"
        assert capsys.readouterr() == ("", told)
        assert answer.error is None
    options = argparse.Namespace(directory=str(project), program="orchestrate", json=True)
    assert command.checkout(options).data["files"] == 7 and capsys.readouterr() == ("", "")


def test_the_command_is_for_inside_workers(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCRATCH_ENVIRONMENT, raising=False)
    with pytest.raises(CommandFailure, match="names no scratch directory") as caught:
        ask(str(project))
    assert caught.value.code == INVALID_ARGUMENTS


def test_the_command_tells_the_way_out(project: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH_ENVIRONMENT, str(scratch))
    with pytest.raises(CommandFailure, match="is not there") as caught:
        ask(f"{project}/missing")
    assert (caught.value.code, caught.value.hint.split()[0]) == (INVALID_ARGUMENTS, "Name")
    monkeypatch.setattr(checkout, "_make", lambda *_: (_ for _ in ()).throw(OSError(28, "")))
    with pytest.raises(CommandFailure, match="ENOSPC") as caught:
        ask(str(project))
    assert caught.value.code == LOCAL_RUNTIME_ERROR
