# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate prune` must not remove, whatever lies in a run; and removals that do not come to their end."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent_intercom
from agent_intercom.cli.orchestrate import pruning
from agent_intercom.orchestration import removal, rundir
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchcli import Home
from tests.unit.test_orch_pruning import age, half_made, make, root_of

RUN_ID = "20260801T120000Z-42"
NOBODY = 54_321

BIND = """\
import os, subprocess, sys
from agent_intercom.orchestration import removal
base = sys.argv[1]
subprocess.run(["mount", "--bind", base + "/precious", base + "/run/sub/mnt"], check=True)
print(*removal.mounted_in([base + "/run", base + "/other"]))
if len(sys.argv) > 2:
    removal._mount_points = lambda: []
try:
    removal.remove(base + "/run")
except OSError as error:
    print(error.errno)
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Home]:
    """One with a path that is short enough for addresses of sockets."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as directory:
        yield Home(Path(directory), monkeypatch, capfd)


@pytest.mark.parametrize("words", [(), ("late",)], ids=["seen", "mounted-afterwards"])
def test_a_mount_point_is_not_crossed(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Also one of the same device, and one that was not there when it was looked for."""
    for name in ("precious", "run/sub/mnt", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "precious/photo").write_text("x")
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "--bind", tmp_path, tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount in a namespace")
    done = subprocess.run(
        [*alone, sys.executable, "-c", BIND, str(tmp_path), *words], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(agent_intercom.__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout.split("\n") == [str(tmp_path / "run"), "18", ""]
    assert (tmp_path / "precious/photo").read_text() == "x"
    assert (tmp_path / "run").exists() is not bool(words)


def test_a_run_in_which_something_is_mounted_stays(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = make(home, "a", "r", 40), make(home, "b", "r", 40)
    table = home.root / "mountinfo"
    inside = str(run / "sessions/a b").replace(" ", "\\040")
    table.write_text(f"36 35 98:0 / / rw - ext4 /dev/root rw\n37 36 98:0 /x {inside} rw - ext4 /dev/root rw\n")
    monkeypatch.setattr(removal, "_MOUNTINFO", str(table))
    for words in ((), ("--yes",)):
        data = home.json("prune", "--keep", "0", *words).data
        assert [each["session"] for each in data["runs"]] == ["b"] and data["kept"]["held"] == {"mounted": 1}
    assert (run.exists(), other.exists()) == (True, False)
    assert "1 because another file system is mounted in it" in home.call("prune", "--keep", "0").out
    with pytest.raises(Refusal, match="something is mounted") as caught:
        rundir.remove(str(run))
    assert caught.value.code == "run_mounted" and run.exists()


def test_another_device_inside_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    assert not removal.weigh(str(tmp_path), 10).crosses
    real = os.lstat(tmp_path)
    monkeypatch.setattr(os, "lstat", lambda name: os.stat_result((*real[:2], real.st_dev + 1, *real[3:])))
    assert removal.weigh(str(tmp_path), 10).crosses


def test_links_are_removed_and_not_followed(home: Home) -> None:
    run, elsewhere = make(home, "a", "r", 40), home.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "photo").write_text("x")
    (run / "sessions/link").symlink_to(elsewhere)
    os.link(elsewhere / "photo", run / "sessions/hard")
    rundir.remove(str(run))
    assert not run.parent.exists() and (elsewhere / "photo").read_text() == "x"


@pytest.mark.parametrize("names", [["thesis.txt"], ["implementer/2026.jsonl"], ["private/"], ["implementer/empty/"]])
def test_transcripts_without_a_manifest_are_kept_and_told(home: Home, names: list[str]) -> None:
    run = half_made(home, "a", RUN_ID, 3)
    for name in names:
        (run / "sessions" / name).parent.mkdir(exist_ok=True)
        if name.endswith("/"):
            (run / "sessions" / name).mkdir()
        else:
            (run / "sessions" / name).write_text("mine")
    age(run, 100)
    data = home.json("prune", "--older-than", "1", "--yes").data
    assert data["runs"] == data["leftovers"] == [] and data["kept"]["held"] == {"unreadable": 1}
    assert run.exists()


def test_a_database_without_a_manifest_is_kept_and_told(home: Home) -> None:
    run = make(home, "a", RUN_ID, 100)
    (run / "manifest.json").unlink()
    assert home.json("prune", "--keep", "0", "--yes").data["kept"]["held"] == {"unreadable": 1}
    assert (run / "broker.sqlite3").exists()


@pytest.mark.parametrize("kind", ["empty", "linked-file", "directory-as-file"])
def test_what_no_start_makes_is_no_evidence(home: Home, kind: str) -> None:
    run = root_of(home) / "a" / RUN_ID
    run.mkdir(parents=True)
    if kind == "linked-file":
        (run / "control.token").symlink_to("/etc/passwd")
    elif kind == "directory-as-file":
        (run / "control.token").mkdir()
    age(run.parent, 100)
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["leftovers"] == data["runs"] == [] and run.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["theirs", "theirs/file"])
def test_what_is_of_somebody_else_holds_the_run(home: Home, name: str) -> None:
    run = make(home, "a", "r", 40)
    (run / "sessions" / name).parent.mkdir(exist_ok=True)
    (run / "sessions" / name).write_text("theirs")
    os.chown(run / "sessions" / name, NOBODY, NOBODY)
    age(run, 40)
    data = home.json("prune", "--older-than", "1", "--yes").data
    assert data["runs"] == [] and data["kept"]["held"] == {"closed": 1} and (run / "manifest.json").exists()


def test_a_removal_that_fails_leaves_no_half_run_and_is_finished_later(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(home, "a", "r", 40)
    real = os.unlink

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == "control.token":
            raise PermissionError(1, "Operation not permitted")
        real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        said = home.json("prune", "--older-than", "1", "--yes")
    assert said.code == 1
    left = run.parent / ".r.removing"
    assert [path.name for path in run.parent.iterdir()] == [left.name] and (left / "manifest.json").exists()
    assert home.json("runs", "a").code != 0
    preview = home.json("prune", "--older-than", "1").data
    assert preview["runs"] == []
    assert [(each["kind"], each["path"]) for each in preview["leftovers"]] == [("half-removed-run", str(left))]
    assert "what is left of a run whose removal was cut short: " in home.call("prune").out
    assert home.json("prune", "--yes").data["leftovers"][0]["removed"]
    assert not run.parent.exists()


def test_what_only_is_called_like_a_removal_stays(home: Home) -> None:
    for name in (".r.removing", ".removing", f".{RUN_ID}.removing"):
        directory = root_of(home) / "a" / name
        directory.mkdir(parents=True)
        (directory / "letter").write_text("mine")
    age(root_of(home), 40)
    data = home.json("prune", "--keep", "0", "--yes").data
    assert data["leftovers"] == data["runs"] == [] and len(list(root_of(home).glob("a/*/letter"))) == 3


@pytest.mark.parametrize("when", [10**12, 2**40, -(10**9)])
def test_a_date_that_no_calendar_has(home: Home, when: int) -> None:
    run = make(home, "a", "r", 40)
    for path in run.rglob("*"):
        os.utime(path, (when, when))
    for words in ((), ("--yes",)):
        (told,) = home.json("prune", "--keep", "0", *words).data["runs"]
    assert told["removed"] and told["age_days"] >= 0


def test_an_answer_that_cannot_be_made_removes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(home, "a", "r", 40)

    def refuse(*arguments: object) -> None:
        raise Refusal("orchestration_error", "no answer")

    monkeypatch.setattr(pruning, "_data", refuse)
    assert home.json("prune", "--keep", "0", "--yes").error[0] == "orchestration_error"
    assert run.exists()


def test_only_runs_are_measured_and_not_without_end(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run, measured = make(home, "a", "r", 40), []
    (root_of(home) / "usr/share/doc").mkdir(parents=True)
    real = removal.weigh

    def weigh(directory: str, limit: int) -> removal.Weighed:
        measured.append(directory)
        return real(directory, 3)

    monkeypatch.setattr(removal, "weigh", weigh)
    data = home.json("prune", "--keep", "0").data
    assert measured == [str(run)]
    assert data["runs"] == [] and data["kept"]["held"] == {"endless": 1}


def test_what_lies_deep_is_removed_with_few_descriptors(home: Home) -> None:
    """Whoever may write in a run cannot have it kept by that."""
    run = make(home, "a", "r", 40)
    deep = run / "sessions" / "/".join("d" * (3 * removal.MAX_DEPTH))
    deep.mkdir(parents=True)
    (deep / "file").touch()
    age(run, 40)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * removal.MAX_DEPTH, limits[1]))
    try:
        assert home.json("prune", "--keep", "0", "--yes").data["runs"][0]["removed"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not run.parent.exists()


# Imported before, because the interpreter may be where only root gets.
UNPRIVILEGED = f"""\
import codecs, ctypes, os, shutil, sys
codecs.lookup("ascii")
from agent_intercom.orchestration import removal
from agent_intercom.workers import places
if os.geteuid() == 0:
    os.chown(sys.argv[1], {NOBODY}, {NOBODY})
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
    # /proc/self is the user's own again (PR_SET_DUMPABLE of prctl(2)).
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""

CLOSED = """\
base = sys.argv[1]
for number in range(2):
    os.makedirs(f"{base}/run/state/{number}/in")
    open(f"{base}/run/state/{number}/in/file", "w").close()
open(f"{base}/run/manifest.json", "w").close()
os.chmod(f"{base}/run/state/0/in", 0)
os.chmod(f"{base}/run/state/0", 0o500)
os.chmod(f"{base}/run/state/1", 0)
weighed = removal.weigh(f"{base}/run", 100)
print(weighed.closed, weighed.endless, weighed.crosses)
removal.remove(f"{base}/run")
print(os.listdir(base))
"""

SWAPPED = """\
base = sys.argv[1]
os.makedirs(f"{base}/victim/src")
open(f"{base}/victim/src/work", "w").close()
os.chmod(f"{base}/victim", 0o755)
scratch = f"{base}/scratch"
os.makedirs(f"{scratch}/a/src/in")
os.chmod(f"{scratch}/a/src", 0)
def swap(event, arguments):
    if event == "os.chmod" and not os.path.islink(f"{scratch}/a"):
        os.rename(f"{scratch}/a", f"{scratch}/moved")
        os.symlink(f"{base}/victim", f"{scratch}/a")
sys.addaudithook(swap)
places.remove(scratch)
print(os.listdir(f"{base}/victim/src"), oct(os.stat(f"{base}/victim").st_mode & 0o777))
while os.path.lexists(scratch) and not places.remove(scratch):
    pass
print(os.listdir(f"{base}/victim/src"), os.listdir(base))
"""


def _unprivileged(code: str, directory: str) -> list[str]:
    """What a program prints that modes of files count for."""
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED + code, directory], stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(agent_intercom.__file__).parents[1])},
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture
def own() -> Iterator[str]:
    """A directory that an unprivileged user reaches."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as directory:
        yield directory


def test_directories_that_their_owner_has_closed_hold_no_run(own: str) -> None:
    assert _unprivileged(CLOSED, own) == ["False False False", "[]"]


def test_a_directory_that_becomes_a_link_while_it_is_removed_leads_nowhere(own: str) -> None:
    """Neither what the link leads to is removed, nor its mode changed."""
    assert _unprivileged(SWAPPED, own) == ["['work'] 0o755", "['work'] ['victim']"]


def test_a_session_that_cannot_be_read_is_passed_over_and_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "a", "r", 40)
    shut = make(home, "b", "r", 40).parent
    real = os.listdir

    def refuse(name: str = ".") -> list[str]:
        if name == str(shut):
            raise PermissionError(13, "Permission denied")
        return real(name)

    monkeypatch.setattr(os, "listdir", refuse)
    data = home.json("prune", "--keep", "0").data
    assert [each["session"] for each in data["runs"]] == ["a"] and data["unreadable_sessions"] == [str(shut)]
    assert f"passed over, because it cannot be read: {shut}" in home.call("prune", "--keep", "0", "--yes").out
    assert shut.exists() and not (shut.parent / "a").exists()


def test_an_answer_is_no_longer_than_callers_take(home: Home) -> None:
    first = make(home, "a", "r0", 40)
    for number in range(1, pruning.MAX_ITEMS + 20):
        shutil.copytree(first, first.parent / f"r{number}")
        text = (first / "manifest.json").read_text().replace(str(first), str(first.parent / f"r{number}"))
        (first.parent / f"r{number}/manifest.json").write_text(text)
    said = home.json("prune", "--keep", "0", "--yes")
    assert len(said.data["runs"]) == pruning.MAX_ITEMS and said.data["total"]["runs"] == pruning.MAX_ITEMS + 20
    assert len(said.out) < 256 * 1024 and not first.parent.exists()


@pytest.mark.parametrize("root", ["relative", "/dev/null"])
def test_a_root_that_is_none_is_told_with_the_way_out(home: Home, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_RUNS_DIR", root)
    assert home.json("prune", "--keep", "0").error[1].endswith(". `orchestrate doctor` tells more.")


def test_numbers_and_days_are_told_as_people_say_them() -> None:
    assert [pruning.ago(days * 86_400 + 5) for days in (0, 1, 2)] == ["today", "1 day ago", "2 days ago"]
    assert [pruning.count(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
