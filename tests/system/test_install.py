# SPDX-License-Identifier: Apache-2.0
"""What `make install` and `make install-user` lay out works, and exactly that is taken back."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("intercom.socket", "intercom-gateway.socket", "intercom.service")
RUN_UNITS = ("orchestrate@r1.socket", "orchestrate@r1.service", "orchestrate-reaper@r1.service")
SOURCE = "/home/alice/src/agent-intercom"
MAKE = f"make --no-print-directory -C {SOURCE} PYTHON=/usr/bin/python3"
# What a user manager, Python or the tests' own commands leave in a home on their own.
NOT_OURS = ("src", ".cache", ".bash_history")


def test_units_are_loaded_for_every_user(bed: Any) -> None:
    for user in ("alice", "bob"):
        for unit in UNITS:
            assert bed.show(user, unit, "LoadState") == "loaded"
        for unit in RUN_UNITS:
            assert bed.show(user, unit, "LoadState") == "loaded"
    assert bed.show("alice", "intercom.service", "DropInPaths").endswith("50-mounts.conf")
    assert bed.show("alice", "orchestrate-r1.slice", "DropInPaths").endswith("/orchestrate-.slice.d/50-run.conf")


def test_nothing_is_enabled_by_installing(bed: Any) -> None:
    states = bed.as_user("alice", ["systemctl", "--user", "is-enabled", *UNITS], check=False).stdout.split()
    assert states == ["disabled", "disabled", "static"]


def test_preset_enables_the_sockets(bed: Any) -> None:
    bed.as_user("alice", ["systemctl", "--user", "preset", *UNITS], check=False)
    states = bed.as_user("alice", ["systemctl", "--user", "is-enabled", *UNITS], check=False).stdout.split()
    assert states == ["enabled", "enabled", "static"]


def test_verify_is_silent(bed: Any) -> None:
    """It prints problems and still ends with 0, so any output counts."""
    paths = [f"/usr/lib/systemd/user/{unit}" for unit in UNITS]
    done = bed.as_user("alice", ["systemd-analyze", "--user", "verify", *paths])
    assert done.stdout + done.stderr == ""


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


def test_uninstalling_ends_runs(alice: Any) -> None:
    make(alice, "install-user")
    alice.as_user("alice", "mkdir -p -m 700 $XDG_RUNTIME_DIR/agent-intercom/run/r1")
    alice.as_user("alice", "touch $XDG_RUNTIME_DIR/agent-intercom/run/r1/run.json")
    alice.as_user("alice", "systemctl --user start orchestrate@r1.socket")
    make(alice, "uninstall-user")
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
