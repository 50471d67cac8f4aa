# SPDX-License-Identifier: Apache-2.0
"""Binding without systemd: modes from the first moment, and what is refused."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator

import pytest

from agent_intercom.host import standalone
from agent_intercom.host.errors import HostError
from agent_intercom.host.standalone import bind, identity, private_directory, unbind


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ai-", dir="/tmp") as directory:
        yield directory


def mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def refused(path: str) -> tuple[str, str | None]:
    with pytest.raises(HostError) as caught:
        bind(path).close()
    assert path not in str(caught.value)
    return caught.value.code, caught.value.field


def test_bind_makes_everything_private(home: str) -> None:
    before = os.umask(0)
    try:
        path = f"{home}/a/b/s"
        with bind(path, 5) as listener:
            assert (mode(path), mode(f"{home}/a/b"), mode(f"{home}/a")) == (0o600, 0o700, 0o700)
            assert not listener.getblocking()
            assert not listener.get_inheritable()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                listener.accept()[0].close()
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_mode_is_right_at_bind(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only afterwards: the umask is seen while the socket is made."""
    seen = []

    class Watching(socket.socket):
        def listen(self, *backlog: int) -> None:
            seen.append(mode(self.getsockname()))
            super().listen(*backlog)

    monkeypatch.setattr(standalone.socket, "socket", Watching)  # type: ignore[attr-defined]
    bind(f"{home}/s").close()
    assert seen == [0o600]


def test_our_own_stale_socket_is_replaced(home: str) -> None:
    path = f"{home}/s"
    bind(path).close()
    old = identity(path)
    with bind(path):
        assert identity(path) != old


def test_anything_else_at_the_path_is_refused(home: str) -> None:
    path = f"{home}/s"
    os.symlink("/nowhere", path)
    assert refused(path) == ("PATH_FOREIGN", "path")
    os.unlink(path)
    with open(path, "w") as file:
        file.write("kept")
    assert refused(path) == ("PATH_FOREIGN", "path")
    assert os.path.getsize(path) == 4


def test_path_length(home: str) -> None:
    longest = f"{home}/{'x' * (107 - len(home) - 1)}"
    bind(longest).close()
    assert refused(longest + "x") == ("PATH_TOO_LONG", "path")
    # Bytes count, not characters.
    assert refused(f"{home}/{'ü' * 60}") == ("PATH_TOO_LONG", "path")


def test_lost_race(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{home}/s"
    with bind(path):
        monkeypatch.setattr(standalone, "_clear", lambda name, directory: None)
        assert refused(path) == ("PATH_IN_USE", "path")


def test_directory_replaced_while_binding(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(name: str, directory: int) -> None:
        os.rename(f"{home}/d", f"{home}/old")
        os.mkdir(f"{home}/d", 0o700)

    monkeypatch.setattr(standalone, "_clear", replace)
    assert refused(f"{home}/d/s") == ("DIRECTORY_FOREIGN", "directory")


def test_open_directory_is_repaired(home: str) -> None:
    os.chmod(home, 0o755)
    bind(f"{home}/s").close()
    assert mode(home) == 0o700


def test_open_directory_that_cannot_be_repaired(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, mode: int) -> None:
        raise PermissionError

    os.chmod(home, 0o750)
    monkeypatch.setattr(os, "fchmod", fail)
    assert refused(f"{home}/s") == ("DIRECTORY_OPEN", "directory")


def test_symlinked_directory(home: str) -> None:
    os.mkdir(f"{home}/real", 0o700)
    os.symlink("real", f"{home}/link")
    os.symlink("nowhere", f"{home}/dangling")
    assert refused(f"{home}/link/s") == ("DIRECTORY_SYMLINK", "directory")
    assert refused(f"{home}/dangling/s") == ("DIRECTORY_SYMLINK", "directory")
    assert os.listdir(f"{home}/real") == []


def test_foreign_directory(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(f"{home}/file", "w"):
        pass
    assert refused(f"{home}/file/s") == ("DIRECTORY_FOREIGN", "directory")
    os.chmod(home, 0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert refused(f"{home}/s") == ("DIRECTORY_FOREIGN", "directory")
    assert mode(home) == 0o755


def test_directory_that_cannot_be_made() -> None:
    assert refused("/proc/none/s") == ("DIRECTORY_UNUSABLE", "directory")


def test_unbind_removes_only_what_we_made(home: str) -> None:
    path = f"{home}/s"
    with bind(path):
        made = identity(path)
    assert made is not None
    os.rename(path, f"{home}/ours")
    with bind(path):
        assert not unbind(path, made)
        assert not unbind(path, None)
        # The same number, another file.
        now = identity(path)
        assert now is not None
        assert not unbind(path, now._replace(modified=made.modified - 1))
    assert os.path.exists(path)
    os.unlink(path)
    os.rename(f"{home}/ours", path)
    assert unbind(path, made)
    assert not unbind(path, made)
    assert identity(path) is None


def test_private_directory_can_be_used_alone(home: str) -> None:
    fd = private_directory(f"{home}/x/y")
    assert os.fstat(fd).st_ino == os.stat(f"{home}/x/y").st_ino
    os.close(fd)
