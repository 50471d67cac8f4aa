# SPDX-License-Identifier: Apache-2.0
"""`setup`: what it writes, and that it takes back exactly that."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_intercom.cli import setup
from agent_intercom.cli.main import main

UNITS = Path(__file__).parents[2] / "units"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's unit directory, with PI_CODING_AGENT_DIR set to something awkward."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("PI_CODING_AGENT_DIR", '/a 100% "b"\\c')
    monkeypatch.setattr(setup, "has_mount_hardening", lambda: False)
    return tmp_path / "c/systemd/user"


def files(directory: Path) -> dict[str, str]:
    return {str(f.relative_to(directory)): f.read_text() for f in directory.rglob("*") if f.is_file()}


def test_setup_moves_only_the_compatibility_paths(config: Path) -> None:
    assert main(["setup"]) == 0
    found = files(config)
    assert set(found) == {
        "intercom.socket.d/agent-dir.conf",
        "intercom-gateway.socket.d/agent-dir.conf",
        "intercom.service.d/agent-dir.conf",
    }
    lines = found["intercom.socket.d/agent-dir.conf"].splitlines()[1:]
    assert lines == [
        "[Socket]",
        "ListenStream=",
        "ListenStream=%t/agent-intercom/intercom.sock",
        'ListenStream=/a 100%% "b"\\c/intercom/broker.sock',
        'Environment="AGENT_INTERCOM_COMPAT_DIR=/a 100%% \\"b\\"\\\\c/intercom"',
    ]
    assert "remote-gateway.sock" in found["intercom-gateway.socket.d/agent-dir.conf"]
    assert "ReadWritePaths" not in found["intercom.service.d/agent-dir.conf"]


def test_the_canonical_paths_are_those_of_the_units() -> None:
    for unit in ("intercom.socket", "intercom-gateway.socket"):
        listens = [line for line in (UNITS / unit).read_text().splitlines() if line.startswith("ListenStream=%t")]
        assert len(listens) == 1
        assert listens[0] in setup.drop_ins("/x")[f"{unit}.d/agent-dir.conf"]


def test_a_read_only_home_gets_the_directory_opened() -> None:
    text = setup.drop_ins("/x", mounts=True)["intercom.service.d/agent-dir.conf"]
    assert 'ReadWritePaths="-/x"' in text


def test_setup_twice_changes_nothing_and_undo_takes_back(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = config / "intercom.socket.d/mine.conf"
    own.parent.mkdir(parents=True)
    own.write_text("[Socket]\n")
    assert main(["setup", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["changed"]) == 3
    assert "daemon-reload" in first["next"]
    assert main(["setup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "changed": [], "next": None}
    assert main(["setup", "--undo"]) == 0
    assert files(config) == {"intercom.socket.d/mine.conf": "[Socket]\n"}
    assert not (config / "intercom-gateway.socket.d").exists()


def test_undo_has_the_sockets_of_the_units_removed_and_nobody_else_s(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="su", dir="/tmp") as root, ExitStack() as opened:
        monkeypatch.setenv("PI_CODING_AGENT_DIR", f"{root}/100% mine")
        directory = Path(root, "100% mine/intercom")
        directory.mkdir(parents=True)
        assert main(["setup"]) == 0
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(directory / "remote-gateway.sock"))
        listening.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / "broker.sock"))
        capsys.readouterr()
        assert main(["setup", "--undo", "--json"]) == 0
        following = json.loads(capsys.readouterr().out)["next"]
        assert f"stop intercom.socket intercom-gateway.socket && rm -f '{directory}/broker.sock' && " in following
        assert "remote-gateway.sock" not in following
        assert following.endswith("daemon-reload && systemctl --user start intercom.socket intercom-gateway.socket")


def test_undo_leaves_a_file_of_somebody_else(config: Path) -> None:
    other = config / "intercom.socket.d/agent-dir.conf"
    other.parent.mkdir(parents=True)
    other.write_text("[Socket]\n")
    assert main(["setup", "--undo"]) == 2
    assert other.exists()


@pytest.mark.parametrize("value", ["", "  ", "/a\nb", "/" + "x" * 100])
def test_what_no_unit_can_hold_is_refused(value: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_CODING_AGENT_DIR", value)
    assert main(["setup"]) == 2
    assert not config.exists()


def test_a_directory_that_cannot_be_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="su", dir="/tmp") as root:
        for name in ("file", "else"):
            Path(root, name).write_text("")
        Path(root, "linked").mkdir()
        Path(root, "linked/intercom").symlink_to("/tmp")
        for value in (f"{root}/file", f"{root}/file/below", f"{root}/linked"):
            monkeypatch.setenv("PI_CODING_AGENT_DIR", value)
            assert main(["setup"]) == 2, value
        assert not config.exists()
        assert sorted(os.listdir(root)) == ["else", "file", "linked"]
        monkeypatch.setenv("PI_CODING_AGENT_DIR", f"{root}/new/place")
        assert main(["setup"]) == 0
        assert not Path(root, "new").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_drop_ins_without_a_word() -> None:
    # The units' own paths have to fit a socket address below this.
    with tempfile.TemporaryDirectory(prefix="su", dir="/tmp") as root:
        assert verified(Path(root)) == ""


def verified(tmp_path: Path) -> str:
    """What systemd-analyze says about the units with the drop-ins."""
    for name in ("intercom.socket", "intercom-gateway.socket", "intercom.service"):
        text = (UNITS / name).read_text()
        text = text.replace("/usr/lib/agent-intercom/", "/bin/true #") if name.endswith("service") else text
        (tmp_path / name).write_text(text.replace("/usr/lib/agent-intercom/socket-guard", "/bin/true"))
    for name, content in setup.drop_ins('/a 100% "b"\\c/intercom', mounts=True).items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(content)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(tmp_path / "intercom.socket")],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        check=False,
    )
    return done.stdout + done.stderr
