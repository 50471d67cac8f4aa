# SPDX-License-Identifier: Apache-2.0
"""What `make install` and `make install-user` lay out works, and exactly that is taken back."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("intercom.socket", "intercom-gateway.socket", "intercom.service")
RUN_UNITS = ("orchestrate@r1.socket", "orchestrate@r1.service", "orchestrate-reaper@r1.service")
PRUNE = ("orchestrate-prune.timer", "orchestrate-prune.service")
WORKERS = ("orchestrate-workers.socket", "orchestrate-workers.service")
CLEANUP = ("orchestrate-cleanup.timer", "orchestrate-cleanup.service")
FIXED = (*UNITS, *WORKERS, *PRUNE, *CLEANUP)
SOURCE = "/home/alice/src/agent-intercom"
MAKE = f"make --no-print-directory -C {SOURCE} PYTHON=/usr/bin/python3"
# What a user manager, Python or the tests' own commands leave in a home on their own.
NOT_OURS = ("src", ".cache", ".bash_history")


def test_units_are_loaded_for_every_user(bed: Any) -> None:
    for user in ("alice", "bob"):
        for unit in UNITS:
            assert bed.show(user, unit, "LoadState") == "loaded"
        for unit in (*RUN_UNITS, *WORKERS, *PRUNE, *CLEANUP):
            assert bed.show(user, unit, "LoadState") == "loaded"
    assert bed.show("alice", "intercom.service", "DropInPaths").endswith("50-mounts.conf")
    assert bed.show("alice", "orchestrate-r1.slice", "DropInPaths").endswith("/orchestrate-.slice.d/50-run.conf")
    slice_drop_in = bed.show("alice", "orchestrate-workers.slice", "DropInPaths")
    assert slice_drop_in == "/usr/lib/systemd/user/orchestrate-workers.slice.d/50-run.conf"


def test_nothing_is_enabled_by_installing(bed: Any) -> None:
    states = bed.as_user("alice", ["systemctl", "--user", "is-enabled", *FIXED], check=False).stdout.split()
    assert states == ["disabled", "disabled", "static", "disabled", "static", *["disabled", "static"] * 2]


def test_preset_enables_the_sockets(bed: Any) -> None:
    bed.as_user("alice", ["systemctl", "--user", "preset", *FIXED], check=False)
    states = bed.as_user("alice", ["systemctl", "--user", "is-enabled", *FIXED], check=False).stdout.split()
    assert states == ["enabled", "enabled", "static", "enabled", "static", *["disabled", "static"] * 2]


def test_verify_is_silent(bed: Any) -> None:
    """It prints problems and still ends with 0, so any output counts."""
    paths = [f"/usr/lib/systemd/user/{unit}" for unit in FIXED]
    done = bed.as_user("alice", ["systemd-analyze", "--user", "verify", *paths])
    assert done.stdout + done.stderr == ""


def doctor(bed: Any, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the envelope of `orchestrate doctor`."""
    command = ["orchestrate", "doctor", "--json", "--skip-model-check", *words]
    done = bed.as_user("alice", command, check=False)
    assert done.stderr == ""
    envelope: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, envelope


def test_doctor_sees_a_machine_that_can_host_runs(bed: Any) -> None:
    code, envelope = doctor(bed)
    data = envelope["data"]
    assert data["systemd"]["reachable"] and data["systemd"]["units_installed"] and data["systemd"]["units_current"]
    assert int(data["systemd"]["version"].split(".")[0].split(" ")[0]) >= 252
    checks = {check["check"]: check for check in data["checks"]}
    for name in ("systemd", "units", "runtime-directory", "modules", "settings", "runs", "retained"):
        assert checks[name]["state"] == "ok", checks[name]
    # There is no Pi on this machine.
    assert (code, envelope["error"]["code"], data["tmux"]) == (1, "missing_prerequisite", None)
    assert {check["check"] for check in data["checks"] if check["state"] == "fail"} == {"pi", "worker-bridge"}
    assert data["runs"] == {"live": 0, "failed": 0, "leftovers": 0, "retained": 0, "bytes": 0}
    units = bed.as_user("alice", "systemctl --user list-units --all --plain --no-legend 'orchestrate@*'").stdout
    assert " active " not in units


def make_run(bed: Any, name: str, days: float, *, place: bool = False) -> str:
    """The directory of a run of alice's that was at work last so many days ago; its unit id is its name."""
    script = """
        import os, sys, time
        from agent_intercom.orchestration import rundir, runtime
        from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
        from agent_intercom.orchestration.startup import Startup
        from agent_intercom.wire.clock import Now
        name, days, place = sys.argv[1:]
        roles = dict.fromkeys(("implementer", "reviewer"), rundir.RoleSpec(provider="p", model="m", thinking="high"))
        spec = rundir.RunSpec(
            unit=name, project="/home/alice", approve_project=False, transport="rpc",
            execution_profile=Profile("thorough", "packaged", "packaged-default"),
            orchestration_config=OrchestrationConfig("/c.json", 3), project_config=UNMATCHED, roles=roles,
            implementation_flow="single", startup=Startup(task="canary task", role_tasks={}),
        )
        root = "/home/alice/.local/state/agent-intercom/runs"
        run = rundir.create(root, "canary-session", name, spec, Now(0, 1_785_585_600_123))
        then = time.time() - float(days) * 86400
        for where, _, names in os.walk(run.path):
            for entry in names:
                os.utime(os.path.join(where, entry), (then, then))
        if place == "True":
            given = runtime.RunPlace(directory=run.path, scope=None, environment={}, observer_report_usage=False)
            runtime.write(os.environ["XDG_RUNTIME_DIR"], name, given)
        print(run.path)
    """
    made: str = bed.python("alice", textwrap.dedent(script), name, str(days), str(place))
    return made.strip()


def test_doctor_sees_a_run_that_its_broker_cannot_serve(bed: Any) -> None:
    directory = make_run(bed, "r1", 0, place=True)
    bed.as_user("alice", f"echo no database >{directory}/broker.sqlite3")
    bed.as_user("alice", "systemctl --user start orchestrate@r1.socket orchestrate@r1.service")
    _, envelope = doctor(bed)
    assert (envelope["data"]["runs"]["live"], envelope["data"]["runs"]["failed"]) == (1, 1)
    (told,) = [check for check in envelope["data"]["checks"] if check["check"] == "run"]
    assert told["text"].startswith("canary-session: degraded: ")
    assert "orchestrate@r1.service" in told["wayOut"]
    assert json.loads(bed.as_user("alice", "orchestrate prune --keep 0 --yes --json").stdout)["data"]["runs"] == []
    bed.as_user("alice", "systemctl --user stop orchestrate-r1.slice")
    # Its place went with it, so that nothing holds it any more; but what it was to begin with is still fresh.
    assert doctor(bed)[1]["data"]["runs"]["live"] == 0


def left_running(bed: Any) -> list[tuple[str, str, str]]:
    """What doctor tells of processes that nobody listens for."""
    found = [check for check in doctor(bed)[1]["data"]["checks"] if check["check"] == "left-running"]
    return [(check["state"], check["text"], check["wayOut"]) for check in found]


def test_doctor_and_prune_see_what_is_left_of_a_run_that_nobody_listens_for(bed: Any) -> None:
    directory = make_run(bed, "r2", 40, place=True)
    bed.as_user("alice", "systemctl --user start orchestrate@r2.socket")
    service = "--quiet --unit=orchestrate-r2-probe-g1 --slice=orchestrate-r2.slice"
    bed.as_user("alice", f"systemd-run --user {service} sleep infinity")
    assert left_running(bed) == []
    bed.as_user("alice", "systemctl --user stop orchestrate@r2.socket")
    stop = "orchestrate stop canary-session --yes"
    way_out = f"`{stop}`; or `systemctl --user stop orchestrate-r2.slice`"
    text = "canary-session: 1 process is left of it, and nobody listens for it"
    assert left_running(bed) == [("fail", text, way_out)]
    pruned = json.loads(bed.as_user("alice", "orchestrate prune --keep 0 --yes --json").stdout)["data"]
    assert (pruned["runs"], pruned["kept"]["held"]) == ([], {"left": 1})
    bed.as_user("alice", stop)
    assert left_running(bed) == []
    assert bed.show("alice", "orchestrate-r2-probe-g1.service", "ActiveState") == "inactive"
    pruned = json.loads(bed.as_user("alice", "orchestrate prune --keep 0 --yes --json").stdout)["data"]
    assert [run["coordination"] for run in pruned["runs"] if run["removed"]] == [directory]


def test_old_runs_are_removed_by_the_timer(bed: Any) -> None:
    old, new = make_run(bed, "old", 40), make_run(bed, "new", 1)
    bed.as_user("alice", ["systemctl", "--user", "enable", "--now", PRUNE[0]])
    assert bed.show("alice", PRUNE[0], "ActiveState") == "active"
    bed.as_user("alice", ["systemctl", "--user", "start", PRUNE[1]])
    assert bed.show("alice", PRUNE[1], "Result") == "success"
    assert bed.run(["ls", str(Path(old).parent)]).stdout.split() == ["new"]
    assert "startup.json" not in bed.run(["ls", new]).stdout
    said = json.dumps(bed.journal("alice"))
    assert PRUNE[1] in said and "canary" not in said
    bed.as_user("alice", ["systemctl", "--user", "disable", "--now", PRUNE[0]])


def test_catalog_explains(bed: Any) -> None:
    """Every entry of the catalog is known to journalctl after the installation."""
    text = (bed.root / "usr/lib/systemd/catalog/agent-intercom.catalog").read_text()
    ids = {line.split()[1] for line in text.splitlines() if line.startswith("-- ")}
    assert ids
    listed = bed.run(["journalctl", "--list-catalog", *sorted(ids)]).stdout
    assert len(listed.splitlines()) >= len(ids)


def test_nothing_names_the_checkout_or_the_staging_directory(staged: Path) -> None:
    for path in staged.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert f"{ROOT}/service".encode() not in content, path
            assert f"{ROOT}/build".encode() not in content, path
            assert str(staged).encode() not in content, path


def test_manifest_is_complete(staged: Path) -> None:
    manifest = json.loads((staged / "usr/lib/agent-intercom/manifest.json").read_text())
    present = {f"/{path.relative_to(staged)}": path for path in staged.rglob("*")}
    files = {name for name, path in present.items() if path.is_file()}
    assert files - {"/usr/lib/agent-intercom/manifest.json"} == manifest["files"].keys()
    assert {name for name, path in present.items() if path.is_dir()} == set(manifest["directories"])
    for name, digest in manifest["files"].items():
        assert hashlib.sha256(present[name].read_bytes()).hexdigest() == digest


@pytest.fixture
def alice(bed: Any) -> Any:
    """The testbed with a copy of the project in alice's home, and with the bundled dependencies already there."""
    source = Path(f"{bed.root}{SOURCE}")
    shutil.rmtree(source.parent, ignore_errors=True)
    skip = shutil.ignore_patterns(".*", "__pycache__", "dist")
    shutil.copytree(ROOT, source, ignore=skip, symlinks=True)
    bed.run(["chown", "-R", "alice:alice", "/home/alice/src"])
    yield bed
    bed.run(["rm", "-rf", "/home/alice/src"])


def home(bed: Any) -> dict[str, str]:
    """Every path below alice's home with what is in it."""
    base = bed.root / "home/alice"
    found = {}
    for path in sorted(base.rglob("*")):
        name = str(path.relative_to(base))
        if name.partition("/")[0] not in NOT_OURS:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
    return found


def make(bed: Any, target: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = bed.as_user("alice", f"{MAKE} {target}", check=check, timeout=300)
    return done


def test_user_installation_is_taken_back_exactly(alice: Any) -> None:
    before = home(alice)
    said = make(alice, "install-user").stderr
    assert "systemctl --user enable --now intercom.socket intercom-gateway.socket" in said
    for unit in UNITS:
        path = alice.show("alice", unit, "FragmentPath")
        assert path == f"/home/alice/.local/share/systemd/user/{unit}"
    states = alice.as_user("alice", ["systemctl", "--user", "is-enabled", *UNITS], check=False).stdout.split()
    assert states == ["disabled", "disabled", "static"]
    guard = alice.as_user("alice", ["systemctl", "--user", "cat", "intercom.socket"]).stdout
    assert "/home/alice/.local/lib/agent-intercom/socket-guard" in guard
    assert "/usr/lib/agent-intercom" not in guard
    paths = [f"/home/alice/.local/share/systemd/user/{unit}" for unit in UNITS]
    assert alice.as_user("alice", ["systemd-analyze", "--user", "verify", *paths]).stderr == ""
    broker = alice.as_user("alice", ["systemctl", "--user", "cat", *RUN_UNITS, "orchestrate-r1.slice"]).stdout
    assert "/home/alice/.local/lib/agent-intercom/orchestrate-broker" in broker
    assert "/usr/lib/agent-intercom" not in broker and "/usr/share/doc" not in broker
    assert alice.as_user("alice", "~/.local/bin/intercom --help").stdout.startswith("usage: intercom")
    make(alice, "uninstall-user")
    assert home(alice) == before
    assert alice.show("alice", "intercom.socket", "FragmentPath") == "/usr/lib/systemd/user/intercom.socket"


def test_installing_twice_is_installing_once(alice: Any) -> None:
    before = home(alice)
    make(alice, "install-user")
    once = home(alice)
    make(alice, "install-user")
    assert home(alice) == once
    make(alice, "uninstall-user")
    assert home(alice) == before


def test_enabled_and_running_is_taken_back_too(alice: Any) -> None:
    before = home(alice)
    assert "enabled and started" in make(alice, "install-user ENABLE=1").stderr
    assert alice.as_user("alice", ["systemctl", "--user", "is-enabled", *UNITS[:2]]).stdout.split() == ["enabled"] * 2
    listed = json.loads(alice.as_user("alice", "~/.local/bin/intercom list --json").stdout)
    assert "sessions" in listed
    main = alice.show("alice", "intercom.service", "MainPID")
    command = alice.run(["cat", f"/proc/{main}/cmdline"]).stdout
    assert "/home/alice/.local/lib/agent-intercom/intercom-broker" in command
    said = make(alice, "uninstall-user").stderr
    assert "disabling intercom.socket intercom-gateway.socket" in said
    for unit in UNITS:
        assert alice.show("alice", unit, "ActiveState") == "inactive"
    left = {name for name in home(alice).keys() - before.keys() if not name.startswith((".pi", ".local/state"))}
    # The directories of the links that `enable` made are systemd's.
    assert left <= {".config", ".config/systemd", ".config/systemd/user", ".local"}


def test_the_timer_is_taken_back_too(alice: Any) -> None:
    make(alice, "install-user")
    alice.as_user("alice", ["systemctl", "--user", "enable", "--now", PRUNE[0]])
    assert "disabling orchestrate-prune.timer" in make(alice, "uninstall-user").stderr
    assert alice.show("alice", PRUNE[0], "ActiveState") == "inactive"
    assert not (alice.root / "home/alice/.config/systemd/user/timers.target.wants/orchestrate-prune.timer").exists()


def test_uninstalling_ends_runs(alice: Any) -> None:
    make(alice, "install-user")
    alice.as_user("alice", "mkdir -p -m 700 $XDG_RUNTIME_DIR/agent-intercom/run/r1")
    alice.as_user("alice", "touch $XDG_RUNTIME_DIR/agent-intercom/run/r1/run.json")
    alice.as_user("alice", "systemctl --user start orchestrate@r1.socket")
    refused = make(alice, "uninstall-user", check=False)
    assert refused.returncode != 0 and "nothing was removed: 1 run goes on: orchestrate@r1 (" in refused.stderr
    assert alice.show("alice", "orchestrate@r1.socket", "ActiveState") == "active"
    assert (alice.root / "home/alice/.local/bin/orchestrate").exists()
    assert "ending the runs that go on" in make(alice, "uninstall-user FORCE=1").stderr
    assert alice.show("alice", "orchestrate@r1.socket", "ActiveState") == "inactive"
    assert not (alice.root / "run/user/4000/agent-intercom/run/r1").exists()


def test_what_was_changed_or_added_stays_and_is_named(alice: Any) -> None:
    make(alice, "install-user")
    alice.as_user("alice", "echo '# mine' >> ~/.local/share/systemd/user/intercom.service")
    alice.as_user("alice", "echo mine > ~/.local/lib/agent-intercom/notes")
    said = make(alice, "uninstall-user").stderr
    assert "kept, because it was changed: /home/alice/.local/share/systemd/user/intercom.service" in said
    assert "kept, because something else is in it: /home/alice/.local/lib/agent-intercom" in said
    left = {name for name, kind in home(alice).items() if kind != "directory" and name.startswith(".local")}
    assert left == {".local/share/systemd/user/intercom.service", ".local/lib/agent-intercom/notes"}


def test_a_file_in_the_way_is_not_overwritten(alice: Any) -> None:
    alice.as_user("alice", "mkdir -p ~/.local/bin && echo mine > ~/.local/bin/intercom")
    before = home(alice)
    done = make(alice, "install-user", check=False)
    assert done.returncode != 0
    assert "/home/alice/.local/bin/intercom" in done.stderr
    assert home(alice) == before


def test_taking_back_what_is_not_there(alice: Any) -> None:
    assert "nothing is installed" in make(alice, "uninstall-user").stderr


def test_an_empty_home_is_no_place(alice: Any) -> None:
    done = alice.as_user("alice", f"HOME= {MAKE} install-user", check=False)
    assert done.returncode != 0
    assert "HOME is empty" in done.stderr


def test_enabling_without_a_manager_is_no_success(alice: Any) -> None:
    before = home(alice)
    command = f"env -u XDG_RUNTIME_DIR -u DBUS_SESSION_BUS_ADDRESS {MAKE} install-user ENABLE=1"
    done = alice.as_user("alice", command, check=False, timeout=300)
    assert done.returncode != 0
    assert "nothing is enabled" in done.stderr
    make(alice, "uninstall-user")
    assert home(alice) == before


def test_removed_from_the_staging_directory(staged: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(staged, copy, symlinks=True)
    remove = ["make", "-C", str(ROOT), "uninstall", f"DESTDIR={copy}", "PREFIX=/usr"]
    subprocess.run(remove, check=True, capture_output=True)
    assert list(copy.iterdir()) == []
