# SPDX-License-Identifier: Apache-2.0
"""Runs as they lie on disk and live: found without a trace, whatever lies among them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import manifest, places, reader, rootscan, runs, runtime, supervisor, tmux
from agent_intercom.orchestration.errors import Refusal
from tests.unit.orchruns import ID, WORKING, Alive, make, tree

OLDER, NEWER = "20260701T120000Z-1", "20260901T120000Z-1"
CONVENTIONAL = "pi-project-agents"


class Stage:
    """A state root of ours, one of the original's, a runtime directory, and a project."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.ours, self.original = top / "ours", top / "home/.pi/agent/orchestrations"
        self.project, self.runtime = top / "project", top / "run"
        for directory in (self.ours, self.original, self.project, self.runtime):
            directory.mkdir(mode=0o700, parents=True)
        self.environ = {
            "HOME": str(top / "home"),
            "PATH": str(top / "bin"),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "AGENT_INTERCOM_RUNS_DIR": str(self.ours),
            "TMUX_TMPDIR": str(top),
        }

    @property
    def roots(self) -> list[str]:
        return places.roots(self.environ)

    def make(self, session: str, run_id: str = ID, *, root: Path | None = None, **options: Any) -> Path:
        given: dict[str, Any] = {
            "project": self.project,
            "unit": "u" + run_id[5] + session.encode().hex()[:20],
        } | options
        return make(root or self.ours, session, run_id, **given)

    def alive(self, directory: Path, unit: str | None = None) -> Alive:
        return Alive(self.runtime, unit or self.unit(directory), directory)

    def unit(self, directory: Path) -> str:
        found = runs.at(str(directory)).manifest.unit
        assert found is not None
        return found

    def resolve(self, name: str | None, live_only: bool = False, run_id: str | None = None) -> runs.Entry:
        return runs.resolve(name, str(self.project), self.environ, live_only, run_id)

    def program(self, text: str) -> None:
        """Make `text` what is called tmux, and have an address of a server of it."""
        (self.top / "bin").mkdir(exist_ok=True)
        (self.top / "bin/tmux").write_text(f"#!/bin/sh\n{text}\n")
        (self.top / "bin/tmux").chmod(0o755)
        if not self.tmux.exists():
            self.tmux.parent.mkdir(exist_ok=True)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(self.tmux))

    @property
    def tmux(self) -> Path:
        """Where a server of tmux would listen."""
        return self.top / f"tmux-{os.geteuid()}" / "default"


@pytest.fixture
def stage() -> Iterator[Stage]:
    # Addresses of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp") as top:
        yield Stage(Path(top).resolve())


def refused(work: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value.code, caught.value.text


@pytest.mark.parametrize("version", range(1, 9))
def test_runs_of_every_version_are_found(stage: Stage, version: int) -> None:
    directory = stage.make("s", version=version, root=stage.original)
    entry = runs.find("s", None, stage.roots)
    assert (entry.session, entry.run_id, entry.directory) == ("s", ID, str(directory))
    assert entry.root == str(stage.original) and entry.unit is None
    assert entry.host == ("systemd" if version == 8 else "tmux")
    assert entry.database == str(directory / "broker.sqlite3")
    assert runs.find("s", ID, stage.roots) == entry == runs.at(str(directory)) == stage.resolve("s")


def test_sessions_by_name_with_their_newest_run(stage: Stage) -> None:
    stage.make("b", OLDER)
    stage.make("b", NEWER)
    stage.make("a", OLDER)
    stage.make("a", NEWER, root=stage.original, version=5)
    found = runs.sessions(stage.roots)
    assert [(each.newest.session, each.newest.run_id, each.newest.host) for each in found.sessions] == [
        ("a", NEWER, "tmux"),
        ("b", NEWER, "systemd"),
    ]
    assert not found.truncated and not found.issues
    assert [entry.run_id for entry in runs.runs_of("a", stage.roots).entries] == [NEWER, OLDER]
    assert [(entry.session, entry.run_id) for entry in runs.newest(stage.roots).entries] == [
        ("b", NEWER),
        ("a", NEWER),
        ("b", OLDER),
        ("a", OLDER),
    ]


def test_what_cannot_be_read_is_an_issue_and_hides_nothing(stage: Stage) -> None:
    stage.make("s", OLDER)
    broken = stage.make("s", NEWER)
    (broken / "manifest.json").write_text('{"version": 8, "secret": 1}')
    (stage.ours / "s" / "file").write_text("")
    (stage.ours / "s" / "no name").mkdir()
    (stage.ours / "lost").mkdir()
    (stage.ours / "file").write_text("")
    (stage.ours / "no name").mkdir()
    [session] = runs.sessions(stage.roots).sessions
    assert (session.newest.run_id, session.issues) == (OLDER, 3)
    assert {issue.name: issue.text for issue in runs.sessions(stage.roots).issues} == {
        "lost": "no run is retained",
        "file": "not a directory of ours",
        "no name": "not the name of a session",
    }
    found = runs.runs_of("s", stage.roots)
    assert [entry.run_id for entry in found.entries] == [OLDER]
    assert {issue.name: issue.text for issue in found.issues} == {
        "no name": "not the name of a run",
        "file": "the run is not a directory of ours",
        NEWER: "the manifest does not fit this run",
    }
    assert stage.resolve("s").run_id == OLDER
    assert refused(lambda: runs.find("s", NEWER, stage.roots)) == (
        "orchestration_error",
        "the manifest does not fit this run",
    )


def test_of_a_session_only_the_newest_readable_run_is_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        stage.make("s", f"2026080{number}T120000Z-1", schema_version=None)
    for number in (1, 5):
        (stage.ours / "s" / f"2026080{number}T120000Z-1" / "manifest.json").write_text("{")
    (stage.ours / "s" / "0file").write_text("")
    read: list[str] = []
    reads = manifest.read

    def counted(directory: str) -> manifest.Manifest:
        read.append(Path(directory).name)
        return reads(directory)

    monkeypatch.setattr(manifest, "read", counted)
    [session] = runs.sessions(stage.roots).sessions
    assert (session.newest.run_id, session.truncated, session.issues) == ("20260804T120000Z-1", False, 2)
    assert read == ["20260805T120000Z-1", "20260804T120000Z-1"]


def test_an_issue_names_the_field_and_none_of_the_content(stage: Stage) -> None:
    directory = stage.make("s")
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"high"', '"secret-level"'))
    [issue] = runs.runs_of("s", stage.roots).issues
    assert issue.text == "the manifest does not fit this run (roles.implementer.thinking)"


def test_nothing_is_there(stage: Stage) -> None:
    shutil.rmtree(stage.ours)
    assert runs.sessions(stage.roots) == runs.Sessions([], [], False)
    assert runs.newest(stage.roots) == runs.Runs([], [], False, 0)
    assert not stage.ours.exists()
    for name in ("s", "..", "a/b", ""):
        assert refused(lambda name=name: runs.runs_of(name, stage.roots))[0] == "orchestration_state_not_found"  # type: ignore[misc]
        assert refused(lambda name=name: runs.find(name, None, stage.roots))[0] == "orchestration_error"  # type: ignore[misc]
    stage.make("s")
    for run_id in ("20250101T000000Z-1", "..", "", "../s"):
        unavailable = ("orchestration_error", "Requested coordination run is unavailable")
        assert refused(lambda run_id=run_id: runs.find("s", run_id, stage.roots)) == unavailable  # type: ignore[misc]


def test_no_link_is_followed(stage: Stage) -> None:
    elsewhere = stage.make("s", root=stage.top / "elsewhere")
    (stage.ours / "linked").symlink_to(elsewhere.parent)
    (stage.ours / "t").mkdir()
    (stage.ours / "t" / ID).symlink_to(elsewhere)
    directory = stage.make("u")
    (directory / "manifest.json").rename(stage.top / "manifest.json")
    (directory / "manifest.json").symlink_to(stage.top / "manifest.json")
    found = runs.sessions(stage.roots)
    assert not found.sessions
    assert {issue.name for issue in found.issues} == {"linked", "t", "u"}
    assert refused(lambda: runs.find("linked", None, stage.roots))[0] == "orchestration_error"
    assert refused(lambda: runs.find("t", ID, stage.roots))[0] == "orchestration_error"
    database = stage.make("v") / "broker.sqlite3"
    database.rename(stage.top / "db")
    database.symlink_to(stage.top / "db")
    entry = runs.find("v", None, stage.roots)
    assert refused(lambda: reader.overview(entry.database)) == (
        "orchestration_error",
        "Broker database path is unsafe",
    )


@pytest.mark.parametrize("dangling", [False, True])
def test_a_root_that_is_a_link_is_refused(stage: Stage, dangling: bool) -> None:
    real = stage.top / "real"
    if not dangling:
        stage.make("s", root=real)
    stage.ours.rmdir()
    stage.ours.symlink_to(real)
    for work in (runs.sessions, runs.newest, lambda r: runs.runs_of("s", r), lambda r: runs.find("s", None, r)):
        assert refused(lambda work=work: work(stage.roots))[0] == "orchestration_error"  # type: ignore[misc]
    # What lies above the root is taken as it is.
    (stage.top / "way").symlink_to(stage.top)
    real.mkdir(exist_ok=True)
    assert runs.sessions([str(stage.top / "way" / "real")]).issues == []


@pytest.fixture
def crowded() -> Iterator[Path]:
    """A root in memory, where making thousands of files costs nothing."""
    with tempfile.TemporaryDirectory(prefix="or", dir="/dev/shm") as top:
        yield Path(top).resolve()


def test_scans_are_bounded(stage: Stage, crowded: Path) -> None:
    root, roots = crowded / "root", [str(crowded / "root")]
    stage.make("s", NEWER, root=root)
    for number in range(3_000):
        (root / "s" / f"0{number}").touch()
    [session] = runs.sessions(roots).sessions
    assert session.truncated and session.newest.run_id == NEWER and session.issues == 99
    page = runs.runs_of("s", roots, 7)
    assert page.truncated and (len(page.entries), len(page.issues)) == (1, 6)
    for number in range(3_000, 5_000):
        (root / "s" / f"0{number}").touch()
    # Which of them are looked at is the file system's choice.
    page = runs.runs_of("s", roots)
    assert page.truncated and len(page.entries) + len(page.issues) == rootscan.MAX_SCAN
    for number in range(5_000):
        (root / f"t{number}").touch()
    found = runs.sessions(roots)
    assert found.truncated and len(found.sessions) + len(found.issues) == 100
    assert runs.newest(roots).truncated


def test_a_page_of_sessions_ends_at_a_hundred(stage: Stage) -> None:
    for number in range(101):
        stage.make(f"s{number:03}", schema_version=None)
    found = runs.sessions(stage.roots)
    assert [each.newest.session for each in found.sessions] == [f"s{number:03}" for number in range(100)]
    assert found.truncated
    newest = runs.newest(stage.roots)
    assert len(newest.entries) == 100 and newest.truncated and newest.total == 101
    shutil.rmtree(stage.ours / "s050")
    assert not runs.sessions(stage.roots).truncated and not runs.newest(stage.roots).truncated


def everything(stage: Stage) -> None:
    """Read whatever there is to read, as everybody does."""
    runs.sessions(stage.roots)
    runs.newest(stage.roots)
    supervisor.sessions(stage.roots)
    for each in runs.sessions(stage.roots).sessions:
        session = each.newest.session
        stage.resolve(session)
        supervisor.runs_of(session, stage.roots)
        entry = runs.find(session, None, stage.roots)
        supervisor.snapshot_of(entry)
        supervisor.usage(entry)
        supervisor.events(entry)
        with pytest.raises(Refusal):
            supervisor.command(entry, "reviewer", "0" * 32)
    with pytest.raises(Refusal):
        stage.resolve("nobody", True)


def retained(stage: Stage) -> None:
    for version in range(1, 9):
        stage.make(f"v{version}", version=version, root=stage.original)
    for number in range(1, 11):
        stage.make(f"d{number}", schema_version=number, roles=("implementer", "reviewer", "probe"))
    stage.make("working", changes=WORKING)


def test_reading_leaves_no_trace(stage: Stage) -> None:
    retained(stage)
    for directory in (stage.ours, stage.ours / "working", stage.ours / "working" / ID):
        directory.chmod(0o755)
    before = tree(stage.top)
    everything(stage)
    assert tree(stage.top) == before


def test_what_cannot_be_written_can_be_read(stage: Stage) -> None:
    retained(stage)
    everything(stage)
    for path in [*stage.top.rglob("*"), stage.top]:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        path.chmod(0o500 if path.is_dir() else 0o400)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            assert not os.access(stage.ours, os.W_OK)
            everything(stage)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for path in [stage.top, *stage.top.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)


def test_a_run_lives_while_somebody_listens_for_its_broker(stage: Stage) -> None:
    directory = stage.make("s")
    with stage.alive(directory) as alive:
        [entry] = runs.live_runs(stage.environ).entries
        assert entry == runs.find("s", None, stage.roots)._replace(unit=stage.unit(directory))
        assert runs.seen_live(runs.find("s", None, stage.roots), stage.environ) == entry == stage.resolve("s", True)
        before = tree(stage.top)
        everything(stage)
        assert tree(stage.top) == before
        assert alive.path == runtime.socket_path(str(stage.runtime), stage.unit(directory))
    # The socket's file and run.json are still there.
    assert runs.live_runs(stage.environ) == runs.Runs([], [], False, 0)
    assert runs.seen_live(entry, stage.environ).unit is None
    assert stage.resolve("s").unit is None


def test_where_nobody_can_tell_which_runs_live_none_is_said_to_be_dead(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stage.make("s")
    without = {**stage.environ, "XDG_RUNTIME_DIR": ""}
    monkeypatch.setattr(runtime, "LOGIND", str(stage.top / "nowhere"))
    for look in (lambda: runs.live_runs(without), lambda: runs.resolve("s", "/", without, False)):
        code, text = refused(look)
        assert code == "orchestration_error" and "which runs live" in text and "XDG_RUNTIME_DIR" in text
    # cron(8) and su(1) have no variable, and logind's directory all the same.
    logind = stage.top / "logind"
    logind.mkdir()
    (logind / str(os.geteuid())).symlink_to(stage.runtime)
    monkeypatch.setattr(runtime, "LOGIND", str(logind))
    assert refused(lambda: runs.live_runs(without))[0] == "orchestration_error"
    (logind / str(os.geteuid())).unlink()
    (logind / str(os.geteuid())).mkdir(mode=0o700)
    with stage.alive(directory):
        assert runs.live_runs(without).entries == []
    assert runtime.runtime_dir({}) == str(logind / str(os.geteuid()))


def test_a_run_whose_place_cannot_be_read_lives_all_the_same(stage: Stage) -> None:
    directory = stage.make("s")
    unit = stage.unit(directory)
    place = stage.runtime / "agent-intercom/run" / unit / "run.json"
    with stage.alive(directory):
        place.unlink()
        [entry] = runs.live_runs(stage.environ).entries
        assert entry.directory == str(directory) and entry.unit == unit
        assert stage.resolve("s", True) == entry
        (directory / "manifest.json").write_text("{}")
        [issue] = runs.live_runs(stage.environ).issues
        assert "run.json" in issue.text and unit in issue.name


def test_a_live_run_is_found_wherever_it_lies(stage: Stage) -> None:
    directory = stage.make("s", root=stage.top / "elsewhere")
    with stage.alive(directory):
        assert stage.resolve("s", True).root == str(stage.top / "elsewhere")
    assert refused(lambda: stage.resolve("s"))[0] == "orchestration_state_not_found"


def test_what_lives_and_cannot_be_read_is_not_passed_over(stage: Stage) -> None:
    stage.make("s", OLDER)
    directory = stage.make("s", NEWER)
    with stage.alive(directory, "other"):
        [issue] = runs.live_runs(stage.environ).issues
        assert issue.directory == str(directory) and "unit" in issue.text
        code, text = refused(lambda: stage.resolve("s"))
        assert code == "orchestration_error" and "lives cannot be read" in text
        assert stage.resolve("s", run_id=OLDER).run_id == OLDER


def test_a_named_session(stage: Stage) -> None:
    older, newer = stage.make("s", OLDER), stage.make("s", NEWER)
    assert stage.resolve("s").directory == str(newer)
    assert stage.resolve("s", run_id=OLDER).directory == str(older)
    assert refused(lambda: stage.resolve("s", True))[0] == "broker_not_live"
    with stage.alive(older):
        # What lives comes first.
        assert stage.resolve("s").directory == str(older)
        assert stage.resolve("s", True).directory == str(older)
        assert stage.resolve("s", run_id=NEWER).directory == str(newer)
        assert refused(lambda: stage.resolve("s", True, NEWER))[0] == "broker_not_live"
        code, text = refused(lambda: stage.resolve("nobody"))
        assert code == "orchestration_state_not_found" and "(live: s)" in text
        assert refused(lambda: stage.resolve("no name"))[0] == "orchestration_error"
        with stage.alive(newer):
            assert "--run" in refused(lambda: stage.resolve("s"))[1]
            assert stage.resolve("s", True, NEWER).directory == str(newer)


def test_no_session_is_named(stage: Stage) -> None:
    code, text = refused(lambda: stage.resolve(None))
    assert code == "orchestration_state_not_found" and "no run lives" in text
    other = stage.make("other", project=stage.top)
    here = stage.make("mine")
    retained = stage.make(CONVENTIONAL, OLDER)
    assert stage.resolve(None).directory == str(retained)
    assert refused(lambda: stage.resolve(None, True))[0] == "broker_not_live"
    with stage.alive(other):
        # Somebody else's project is no answer where this one has a run of its own.
        assert stage.resolve(None).directory == str(retained)
        assert stage.resolve(None, True).directory == str(other)
        with stage.alive(here):
            assert stage.resolve(None).directory == stage.resolve(None, True).directory == str(here)
            conventional = stage.make(CONVENTIONAL, NEWER)
            with stage.alive(conventional):
                assert stage.resolve(None).directory == str(conventional)
                assert stage.resolve(None, run_id=here.name).directory in {str(here), str(other)}
            shutil.rmtree(conventional.parent)
            second = stage.make("second")
            with stage.alive(second):
                code, text = refused(lambda: stage.resolve(None))
                assert code == "orchestration_state_not_found" and "(live: mine, other, second)" in text
    assert refused(lambda: stage.resolve(None, True))[0] == "orchestration_state_not_found"


@pytest.mark.parametrize(
    ("project", "name"),
    [
        ("/srv/Demo", "pi-demo-agents"),
        ("/srv/a b__c/", "pi-a-b-c-agents"),
        ("/srv/ÄÖ", "pi-project-agents"),
        ("/", "pi-project-agents"),
        ("/srv/" + "x" * 60, "pi-" + "x" * 48 + "-agents"),
        ("/srv/" + "x" * 47 + "-y", "pi-" + "x" * 47 + "-agents"),
    ],
)
def test_the_conventional_name(project: str, name: str) -> None:
    assert runs.default_session(project) == name
    assert rootscan.NAME.fullmatch(name)


def test_a_run_that_lives_in_tmux_is_not_ours_to_touch(stage: Stage) -> None:
    directory = stage.make("s", version=5, root=stage.original)
    log = stage.top / "asked"
    stage.program(f'printf "%s\\n" "$*" >> {log}\n[ "$2" = show-options ] && echo {directory} && exit\nexit 1')
    entry = runs.find("s", None, stage.roots)
    assert runs.in_tmux(entry, stage.environ)
    assert refused(lambda: stage.resolve("s", True))[0] == "foreign_host"
    assert set(log.read_text().splitlines()) == {"-u show-options -w -q -v -t =s:=agents @pi_agents_coord"}
    log.unlink()
    # Reading asks nobody.
    assert stage.resolve("s") == entry
    everything(stage)
    ours = runs.at(str(stage.make("t")))
    assert not runs.in_tmux(ours, stage.environ)
    assert not log.exists()
    stage.program(f"echo {directory}x")
    assert not runs.in_tmux(entry, stage.environ)
    assert refused(lambda: stage.resolve("s", True))[0] == "broker_not_live"


def test_tmux_that_does_not_answer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tmux.hosted(stage.environ) == {}
    stage.program("exec /bin/sleep 60")
    monkeypatch.setattr(tmux, "TIMEOUT_S", 0.05)
    assert tmux.hosted(stage.environ) == {}
    stage.program("echo broken; exit 1")
    assert tmux.hosted(stage.environ) == {}


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_started_where_no_server_of_tmux_is(stage: Stage, inside: bool) -> None:
    log = stage.top / "asked"
    stage.program(f": > {log}")
    environ = stage.environ | ({"TMUX": f"{stage.tmux},1,0"} if inside else {})
    assert tmux.hosted(environ) == {} and log.exists()
    log.unlink()
    stage.tmux.unlink()
    # Neither a directory that is left over nor a server that `tmux` would not ask is one.
    stage.tmux.write_text("")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(stage.tmux.with_name("another")))
    assert tmux.hosted(environ) == {} and not tmux.hosts("s", "/d", environ) and not log.exists()


def test_a_directory_of_tmux_that_is_not_there_is_passed_over(stage: Stage) -> None:
    """By tmux too, which then asks the server below /tmp."""
    assert tmux.address({"TMUX_TMPDIR": "/nowhere"}) == f"/tmp/tmux-{os.geteuid()}/default"
    assert tmux.address({"TMUX_TMPDIR": str(stage.top)}) == str(stage.tmux)
    assert tmux.address({"TMUX": "/a/b,12,0", "TMUX_TMPDIR": "/c"}) == "/a/b"


@pytest.fixture
def real_tmux(stage: Stage) -> Iterator[Mapping[str, str]]:
    """A server of tmux of our own, in which the session `s` hosts a run."""
    program = shutil.which("tmux")
    if program is None:
        pytest.skip("no tmux here")
    directory = stage.make("s", version=5, root=stage.top / "ä b:c")
    environ = {**stage.environ, "PATH": os.environ["PATH"], "TERM": "dumb"}
    commands = (
        ["new-session", "-d", "-s", "s", "-n", "agents", "exec sleep 600"],
        ["set-option", "-w", "-t", "=s:=agents", "@pi_agents_coord", str(directory)],
        ["new-session", "-d", "-s", "ss", "-n", "other", "exec sleep 600"],
    )
    try:
        for command in commands:
            done = subprocess.run([program, "-f", "/dev/null", *command], env=environ, capture_output=True, check=False)
            if done.returncode:
                pytest.skip("tmux cannot be started here")
        yield environ
    finally:
        subprocess.run([program, "kill-server"], env=environ, capture_output=True, check=False)


def test_the_real_tmux_tells_what_it_hosts(stage: Stage, real_tmux: Mapping[str, str]) -> None:
    entry = runs.find("s", None, [str(stage.top / "ä b:c")])
    assert runs.in_tmux(entry, real_tmux)
    assert tmux.hosted(real_tmux) == {entry.directory: "s"}
    assert not tmux.hosts("s", entry.directory + "x", real_tmux)
    assert not tmux.hosts("ss", entry.directory, real_tmux)
    assert not tmux.hosts("nobody", entry.directory, real_tmux)
