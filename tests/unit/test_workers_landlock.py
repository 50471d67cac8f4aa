# SPDX-License-Identifier: Apache-2.0
"""What the kernel is asked, for every ABI that there is, and that this kernel takes it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers import landlock

needs_landlock = pytest.mark.skipif(landlock.abi() < 1, reason="the kernel has no Landlock")


class Kernel:
    """Stands for syscall(2): keeps what it is asked, and answers with a descriptor of nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Any, ...]]] = []

    def syscall(self, number: int, *arguments: Any) -> int:
        self.calls.append((number, arguments))
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) if number == 444 else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel()
    monkeypatch.setattr(landlock, "_libc", stand_in)
    return stand_in


def asked(kernel: Kernel) -> tuple[int, int, int]:
    """Rights on files, rights on the network and scopes of the ruleset that was asked for."""
    attributes = kernel.calls[0][1][0]._obj
    return attributes.files, attributes.network, attributes.scoped


@pytest.mark.parametrize(
    ("abi", "files"),
    [(1, 0x1FF2), (2, 0x3FF2), (3, 0x7FF2), (4, 0x7FF2), (5, 0xFFF2), (6, 0xFFF2), (7, 0xFFF2), (9, 0xFFF2)],
)
def test_a_kernel_is_asked_for_what_its_abi_has(kernel: Kernel, abi: int, files: int) -> None:
    rules = landlock.Ruleset(abi, tcp=True)
    rules.allow(0, landlock.DIRECTORY)
    rules.enforce()
    rules.close()
    assert asked(kernel) == (files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    assert [number for number, _ in kernel.calls] == [444, 445, 446]
    allowed = kernel.calls[1][1][2]._obj.allowed
    assert allowed == landlock.DIRECTORY & files
    assert not allowed & (landlock.MAKE_CHAR | landlock.MAKE_BLOCK | landlock.IOCTL_DEV)
    assert kernel.calls[2][1][1].value == (1 if abi >= 7 else 0)


def test_tcp_is_left_alone_where_nobody_asks(kernel: Kernel) -> None:
    landlock.Ruleset(7, tcp=False).close()
    assert asked(kernel)[1] == 0


def test_reading_and_executing_are_never_handled(kernel: Kernel) -> None:
    landlock.Ruleset(7, tcp=True).close()
    assert not asked(kernel)[0] & 0b1101


def test_structures_are_as_long_as_the_kernel_has_them() -> None:
    assert ctypes.sizeof(landlock._PathBeneath) == 12
    assert ctypes.sizeof(landlock._Ruleset) == ctypes.sizeof(landlock._How) == 24


@needs_landlock
def test_this_kernel_takes_what_it_is_asked_for() -> None:
    rules = landlock.Ruleset(landlock.abi(), tcp=True)
    rules.close()


@needs_landlock
def test_every_abi_below_is_taken_too() -> None:
    for abi in range(1, landlock.abi() + 1):
        landlock.Ruleset(abi, tcp=True).close()


@needs_landlock
def test_a_rule_that_the_kernel_refuses_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    rules = landlock.Ruleset(landlock.abi(), tcp=False)
    descriptor = os.open(file, os.O_PATH)
    try:
        with pytest.raises(OSError) as caught:
            rules.allow(descriptor, landlock.DIRECTORY)
    finally:
        os.close(descriptor)
        rules.close()
    assert caught.value.errno == errno.EINVAL


def test_a_directory_is_opened_without_being_read(tmp_path: Path) -> None:
    descriptor = landlock.open_directory(str(tmp_path))
    try:
        assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        assert not os.get_inheritable(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("name", "number"),
    [("link", errno.ELOOP), ("link/inner", errno.ELOOP), ("file", errno.ENOTDIR), ("missing", errno.ENOENT)],
)
def test_neither_links_nor_files_are_directories(tmp_path: Path, name: str, number: int) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError) as caught:
        landlock.open_directory(f"{tmp_path}/{name}")
    assert caught.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_no_landlock_is_abi_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def syscall(self, *_: Any) -> int:
            return -1

    monkeypatch.setattr(landlock, "_libc", Without())
    assert landlock.abi() == 0
