# SPDX-License-Identifier: Apache-2.0
"""Peer credentials and death notice, on real sockets."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_intercom.wire.errors import WireError
from agent_intercom.wire.peer import PeerCredentials, peer_credentials, peer_pidfd

CONNECT_AND_WAIT = """
import socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory(prefix="aic-", dir="/tmp") as directory, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(Path(directory, "s")))
        sock.listen()
        yield sock


def test_credentials_of_this_process() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_credentials(left) == PeerCredentials(os.getpid(), os.getuid(), os.getgid())


def test_credentials_name_the_process_that_connected(listener: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", CONNECT_AND_WAIT, listener.getsockname()], stdin=subprocess.PIPE)
    with child, listener.accept()[0] as accepted:
        assert peer_credentials(accepted) == PeerCredentials(child.pid, os.getuid(), os.getgid())


def test_credentials_unreadable_without_a_unix_peer() -> None:
    with socket.socket(socket.AF_INET) as sock, pytest.raises(WireError) as caught:
        peer_credentials(sock)
    assert (caught.value.code, caught.value.field) == ("PEER_UNREADABLE", "SO_PEERCRED")


def test_credentials_unreadable_when_the_call_fails() -> None:
    left, right = socket.socketpair()
    right.close()
    left.close()
    with pytest.raises(WireError) as caught:
        peer_credentials(left)
    assert caught.value.code == "PEER_UNREADABLE"
    assert isinstance(caught.value.__cause__, OSError)


def test_credentials_of_unexpected_size_are_unreadable() -> None:
    class Short(socket.socket):
        def getsockopt(self, *_args: int) -> bytes:  # type: ignore[override]
            return b"\0" * 4

    with Short(socket.AF_UNIX) as sock, pytest.raises(WireError) as caught:
        peer_credentials(sock)
    assert caught.value.code == "PEER_UNREADABLE"


def test_pidfd_becomes_readable_when_the_peer_ends(listener: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", CONNECT_AND_WAIT, listener.getsockname()], stdin=subprocess.PIPE)
    with child, listener.accept()[0] as accepted:
        pidfd = peer_pidfd(accepted)
        if pidfd is None:
            pytest.skip("this kernel has no SO_PEERPIDFD (Linux 6.5)")
        try:
            assert not os.get_inheritable(pidfd)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(0) == []
            assert child.stdin is not None
            child.stdin.close()
            assert poller.poll(30_000)
        finally:
            os.close(pidfd)


@pytest.mark.parametrize("code", [errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.EMFILE, errno.ENODATA])
def test_pidfd_degrades(code: int) -> None:
    class Failing(socket.socket):
        def getsockopt(self, *_args: int) -> int:  # type: ignore[override]
            raise OSError(code, os.strerror(code))

    with Failing(socket.AF_UNIX) as sock:
        assert peer_pidfd(sock) is None


def test_pidfd_of_a_socket_without_peer_is_none() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        assert peer_pidfd(sock) is None
